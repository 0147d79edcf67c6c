"""The decision: does the decode engine read a prompt itself, or is the prompt handed over?

Pure: no clock, no log, no engine. `decide` takes views and returns a Route that carries its reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from splitproxy.model import DecodeView, PairState, Policy, PrefillView, Reason, Route, RouteKind


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

    @property
    def floor(self) -> int:
        """The fewest uncached tokens that are worth moving; nothing to read is never worth it."""
        return 1 if self.policy is Policy.ALWAYS else max(1, self.min_prompt_tokens)


def decide(demand: Demand, decode: Sequence[DecodeView], prefill: Sequence[PrefillView], rules: Rules) -> Route:
    """Choose the route of one prompt.

    `decode` lists at least one ready decode engine; `prefill` lists every prefill engine once for each of them.
    """
    writer = max(decode, key=lambda view: _worth(view, demand.tokens))
    readers = [view for view in prefill if view.decode_engine == writer.engine]
    count = demand.tokens
    # The last token is the decode engine's own work in any case.
    held = None if count is None else min(writer.held_tokens, max(count - 1, 0))
    uncached = None if count is None or held is None else max(count - 1 - held, 0)

    def route(kind: RouteKind, reason: Reason, reader: str | None = None) -> Route:
        return Route(kind, reason, writer.engine, reader, count, held, uncached)

    if (reason := _stays_local(demand, uncached, bool(readers), rules)) is not None:
        return route(RouteKind.LOCAL, reason)
    assert count is not None
    if (found := _reader(count, writer, readers)) is None:
        return route(RouteKind.LOCAL, _no_reader(count, writer, readers))
    reason = Reason.FORCED if rules.policy is Policy.ALWAYS else Reason.WORTH_MOVING
    return route(RouteKind.HANDOVER, reason, found.engine)


def _worth(view: DecodeView, count: int | None) -> tuple[bool, int, int, int]:
    """How good a place a decode engine is: one that is free, then one that holds the conversation, then the idlest.

    Sharing less than half of a prompt, such as a system prompt alone, ties no conversation to an engine.
    """
    holds = view.held_tokens if count is not None and 2 * view.held_tokens >= count else 0
    return view.free_slots > 0, holds, view.free_slots - view.waiting, view.held_tokens


def _stays_local(demand: Demand, uncached: int | None, any_reader: bool, rules: Rules) -> Reason | None:
    """Why this prompt needs no prefill engine, or None."""
    if rules.policy is Policy.NEVER or not any_reader:
        return Reason.DISABLED
    if not demand.splittable:
        return Reason.NOT_SPLITTABLE
    if demand.tokens is None or uncached is None:
        return Reason.TOO_SHORT if demand.surely_short else Reason.TOKENIZER_DOWN
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
