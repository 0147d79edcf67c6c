"""The decision: does the decode engine read a prompt itself, or is the prompt handed over?

Pure: no clock, no log, no engine. `decide` takes views and returns a Route that carries its reason and what it was
weighed by.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from splitproxy.model import DecodeView, PairState, Policy, PrefillView, Reason, Route, RouteKind

# Costs this close are no difference: what else is known of two engines decides.
TIE_FACTOR, TIE_S = 1.1, 0.02
# A handover that costs this little more is taken: it keeps the decode engine free for whoever comes meanwhile.
EVEN_FACTOR = 1.03


@dataclass(frozen=True, slots=True)
class Demand:
    """A prompt, as far as it is known. `tokens` is None for a prompt that was not, or could not be, tokenized."""

    tokens: int | None
    splittable: bool = True
    surely_short: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """The configured part of a decision."""

    policy: Policy
    min_prompt_tokens: int
    force_handover_tokens: int = 0  # 0: none are forced
    stall_weight: float = 1.0  # a second that others stand still or wait, in seconds of a first token

    @property
    def floor(self) -> int:
        """The fewest uncached tokens that are worth moving; nothing to read is never worth it."""
        return 1 if self.policy is Policy.ALWAYS else max(1, self.min_prompt_tokens)

    @property
    def least(self) -> int:
        """The fewest tokens with which a prompt may be handed over at all."""
        return min(self.floor, self.force_handover_tokens or self.floor)

    def forces(self, uncached: int) -> bool:
        """Whether so many tokens are handed over whatever it costs."""
        if self.policy is Policy.ALWAYS:
            return True
        return 0 < self.force_handover_tokens <= uncached and self.policy is not Policy.NEVER


@dataclass(frozen=True, slots=True)
class _Need:
    """What a prompt asks of one decode engine."""

    tokens: int | None
    held: int | None
    uncached: int | None


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to the first token: seconds until it comes, and what it costs everybody."""

    writer: DecodeView
    reader: PrefillView | None
    first_token_s: float
    cost_s: float


def decide(demand: Demand, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rules: Rules) -> Route:
    """Choose the route of one prompt.

    `decode` lists at least one ready decode engine; `prefill` lists every prefill engine once for each of them.
    """
    writer = max(decode, key=lambda view: _worth(view, demand.tokens))
    if rules.policy is Policy.AUTO and (found := _weigh(demand, decode, prefill, rules)) is not None:
        way, reason = found
        writer = way.writer
        if reason is not None:
            kind = RouteKind.LOCAL if way.reader is None else RouteKind.HANDOVER
            need = _need(writer, demand.tokens)
            return _route(kind, reason, need, writer, _readers_of(writer, prefill), way.reader)
    return _by_count(demand, writer, _readers_of(writer, prefill), rules)


def _need(writer: DecodeView, count: int | None) -> _Need:
    if count is None:
        return _Need(None, None, None)
    # The last token is the decode engine's own work in any case.
    held = min(writer.held_tokens, max(count - 1, 0))
    return _Need(count, held, max(count - 1 - held, 0))


def _worth(view: DecodeView, count: int | None) -> tuple[bool, int, int, int]:
    """How good a place a decode engine is: one that is free, then one that holds the conversation, then the idlest.

    Sharing less than half of a prompt, such as a system prompt alone, ties no conversation to an engine.
    """
    holds = view.held_tokens if count is not None and 2 * view.held_tokens >= count else 0
    return view.free_slots > 0, holds, view.free_slots - view.waiting, view.held_tokens


# -- by count: enough new tokens are handed over -----------------------------------------------------------------------


def _by_count(demand: Demand, writer: DecodeView, readers: Sequence[PrefillView], rules: Rules) -> Route:
    need = _need(writer, demand.tokens)
    if (reason := _stays_local(demand, need.uncached, bool(readers), rules)) is not None:
        return _route(RouteKind.LOCAL, reason, need, writer, readers)
    assert need.tokens is not None
    assert need.uncached is not None
    if (found := _reader(need.tokens, writer, readers)) is None:
        return _route(RouteKind.LOCAL, _no_reader(need.tokens, writer, readers), need, writer, readers)
    reason = Reason.FORCED if rules.forces(need.uncached) else Reason.WORTH_MOVING
    return _route(RouteKind.HANDOVER, reason, need, writer, readers, found)


def _route(
    kind: RouteKind,
    reason: Reason,
    need: _Need,
    writer: DecodeView,
    readers: Sequence[PrefillView],
    reader: PrefillView | None = None,
) -> Route:
    """A route with the predictions of both ways, as far as there are any."""
    count = need.tokens or 0
    usable = [view for view in readers if _usable(count, writer, view) is None] if reader is None else [reader]
    moves = [way.first_token_s for view in usable if (way := _handover(writer, view, 0.0)) is not None]
    local = None if need.tokens is None else _local(writer, 0.0)
    return Route(
        kind,
        reason,
        writer.engine,
        None if reader is None else reader.engine,
        need.tokens,
        need.held,
        need.uncached,
        None if local is None else local.first_token_s,
        min(moves, default=None),
        _stall_s(writer),
        None if reader is None else reader.read_s,
    )


def _stays_local(demand: Demand, uncached: int | None, any_reader: bool, rules: Rules) -> Reason | None:
    """Why this prompt needs no prefill engine, or None."""
    if rules.policy is Policy.NEVER or not any_reader:
        return Reason.DISABLED
    if not demand.splittable:
        return Reason.NOT_SPLITTABLE
    if demand.tokens is None or uncached is None:
        return Reason.TOO_SHORT if demand.surely_short else Reason.TOKENIZER_DOWN
    if uncached and rules.forces(uncached):
        return None
    if demand.tokens - 1 < rules.floor:
        return Reason.TOO_SHORT
    return Reason.WARM if uncached < rules.floor else None


def _usable(count: int, writer: DecodeView, view: PrefillView) -> Reason | None:
    """Why a prefill engine cannot read this prompt, or None."""
    if not view.up:
        return Reason.PREFILL_DOWN
    if view.pair is PairState.SWITCHED_OFF:
        return Reason.PAIR_SWITCHED_OFF
    if view.pair is not PairState.PROVEN:
        return Reason.PAIR_UNPROVEN
    if count >= writer.context or count - 1 >= view.context:
        return Reason.TOO_LONG
    return None if view.room else Reason.NO_ROOM


def _reader(count: int, writer: DecodeView, readers: Sequence[PrefillView]) -> PrefillView | None:
    usable = [view for view in readers if _usable(count, writer, view) is None]
    return min(usable, key=lambda view: (view.backlog_tokens - view.held_tokens, view.waiting), default=None)


def _no_reader(count: int, writer: DecodeView, readers: Sequence[PrefillView]) -> Reason:
    """The reason of the prefill engine that came closest to being usable."""
    order = (Reason.PREFILL_DOWN, Reason.PAIR_UNPROVEN, Reason.PAIR_SWITCHED_OFF, Reason.TOO_LONG, Reason.NO_ROOM)
    found = {_usable(count, writer, view) for view in readers}
    return max((reason for reason in order if reason in found), key=order.index)


# -- by cost: the way whose first token comes soonest, at least harm to running answers --------------------------------


def _weigh(
    demand: Demand, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rules: Rules
) -> tuple[_Way, Reason | None] | None:
    """The cheapest way over all engines and why it is, or no reason where there was no choice to make.

    None where speeds are not known yet, or something else than the cost decides.
    """
    if demand.tokens is None or not demand.splittable:
        return None
    ways: list[_Way] = []
    for writer in decode:
        found = _ways(demand, writer, _readers_of(writer, prefill), rules)
        if found is None:
            return None
        ways += found
    least = min(way.cost_s for way in ways)
    even = [way for way in ways if way.cost_s <= TIE_FACTOR * least + TIE_S]
    # Which decode engine: what else is known of it decides between equals. Which way on it: the cheaper one.
    writer = max((way.writer for way in even), key=lambda view: _worth(view, demand.tokens))
    own = [way for way in ways if way.writer is writer]
    way = _cheapest(own)
    return way, _reason(way, demand, own, rules)


def _cheapest(ways: Sequence[_Way]) -> _Way:
    """The way that costs least; of a handover and a local reading that cost the same, the handover."""
    least = min(ways, key=lambda way: way.cost_s)
    moves = [way for way in ways if way.reader is not None and way.cost_s <= EVEN_FACTOR * least.cost_s]
    return min(moves, key=lambda way: way.cost_s, default=least)


def _readers_of(writer: DecodeView, prefill: Sequence[PrefillView]) -> list[PrefillView]:
    return [view for view in prefill if view.decode_engine == writer.engine]


def _ways(demand: Demand, writer: DecodeView, readers: Sequence[PrefillView], rules: Rules) -> list[_Way] | None:
    """The ways that a prompt may take over one decode engine; None while speeds are not known."""
    need = _need(writer, demand.tokens)
    assert need.tokens is not None
    assert need.uncached is not None
    if (local := _local(writer, rules.stall_weight)) is None:
        return None
    if _stays_local(demand, need.uncached, bool(readers), rules) is not None:
        return [local]
    usable = [view for view in readers if _usable(need.tokens, writer, view) is None]
    moves = [_handover(writer, view, rules.stall_weight) for view in usable]
    found = [way for way in moves if way is not None]
    if len(found) < len(moves):
        return None
    return found if found and rules.forces(need.uncached) else [local, *found]


def _local(writer: DecodeView, stall_weight: float) -> _Way | None:
    """The decode engine reads the prompt itself, once it has a slot and has read what came before."""
    if writer.read_s is None:
        return None
    first_token_s = max(writer.wait_s, writer.reading_s) + writer.read_s + writer.added_s
    return _Way(writer, None, first_token_s, first_token_s + stall_weight * _stall_s(writer))


def _handover(writer: DecodeView, reader: PrefillView, stall_weight: float) -> _Way | None:
    """The prefill engine reads while the prompt waits for a decode slot; the longer of the two counts."""
    if reader.read_s is None:
        return None
    ready_s = reader.queue_s + reader.read_s + reader.save_s
    first_token_s = max(ready_s, writer.wait_s, writer.before_restored_s) + reader.restore_s + reader.added_s
    return _Way(writer, reader, first_token_s, first_token_s + stall_weight * _held_up_s(writer, reader.restore_s))


def _stall_s(writer: DecodeView) -> float:
    """How long others would be held up by a local reading, taken together: what the decode engine reads and writes now,
    what will come meanwhile, and the sessions on their way, which are read more slowly and have to wait when they are
    ready before it."""
    read_s = writer.read_s or 0.0
    done_s = writer.reading_s + read_s
    slower_s = sum(writer.slows * min(read_s, ready_s) for ready_s in writer.coming_s)
    waiting_s = sum(min(max(done_s - ready_s, 0.0), read_s) for ready_s in writer.coming_s)
    return _held_up_s(writer, read_s) + slower_s + waiting_s


def _held_up_s(writer: DecodeView, seconds: float) -> float:
    """What a decode engine that is busy for so long costs those that it works for, and those that come meanwhile: they
    wait for half of it on average."""
    return writer.streams * seconds + writer.arrivals_per_s * seconds**2 / 2


def _reason(way: _Way, demand: Demand, own: Sequence[_Way], rules: Rules) -> Reason | None:
    """Why this way was taken; None where the decode engine had no other."""
    need = _need(way.writer, demand.tokens)
    if way.reader is not None:
        return Reason.FORCED if rules.forces(need.uncached or 0) else Reason.WORTH_MOVING
    unhindered = [move.cost_s - _queueing_s(move.writer, move.reader) for move in own if move.reader is not None]
    if not unhindered:
        return None
    return Reason.PREFILL_BUSY if min(unhindered) < way.cost_s else Reason.LOCAL_CHEAPER


def _queueing_s(writer: DecodeView, reader: PrefillView) -> float:
    """What the queue at the prefill engine adds to a handover: nothing, where a decode slot takes as long."""
    alone_s = reader.read_s or 0.0
    waits_s = max(writer.wait_s, writer.before_restored_s)
    return max(reader.queue_s + alone_s + reader.save_s, waits_s) - max(alone_s + reader.save_s, waits_s)
