"""The decision, as a table: which route, why, and between which engines."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.decide.router import EVEN_FACTOR, Demand, Rules, decide
from splitproxy.model import DecodeView, PairState, Policy, PrefillView, Reason, RouteKind

LOCAL, HANDOVER = RouteKind.LOCAL, RouteKind.HANDOVER
FLOOR = 100


def writer(name: str = "w", held: int = 0, context: int = 8192, free: int = 1, **more: Any) -> DecodeView:
    return DecodeView(name, held, context, free, **more)


def reader(
    name: str = "r",
    to: str = "w",
    *,
    up: bool = True,
    pair: PairState = PairState.PROVEN,
    context: int = 8192,
    waiting: int = 0,
    room: bool = True,
    **more: Any,
) -> PrefillView:
    return PrefillView(name, to, up, pair, context, waiting, room, **more)


@dataclass
class Case:
    """One row: what is asked of which engines, and what must come out."""

    id: str
    kind: RouteKind
    reason: Reason
    tokens: int | None = 1000
    splittable: bool = True
    surely_short: bool = False
    policy: Policy = Policy.THRESHOLD
    floor: int = FLOOR
    force: int = 0
    weight: float = 1.0
    decode: list[DecodeView] = field(default_factory=lambda: [writer()])
    prefill: list[PrefillView] = field(default_factory=lambda: [reader()])


CASES = [
    Case("long and cold", HANDOVER, Reason.WORTH_MOVING),
    Case("the floor itself is enough", HANDOVER, Reason.WORTH_MOVING, tokens=FLOOR + 1),
    Case("one below the floor", LOCAL, Reason.TOO_SHORT, tokens=FLOOR),
    Case("one token leaves nothing to read", LOCAL, Reason.TOO_SHORT, tokens=1, floor=0),
    Case("two tokens with no floor", HANDOVER, Reason.WORTH_MOVING, tokens=2, floor=0),
    Case("no tokens at all", LOCAL, Reason.TOO_SHORT, tokens=0),
    Case("known to be short without its ids", LOCAL, Reason.TOO_SHORT, tokens=None, surely_short=True),
    Case("no ids", LOCAL, Reason.TOKENIZER_DOWN, tokens=None),
    Case("warm", LOCAL, Reason.WARM, decode=[writer(held=900)]),
    Case("held and new tokens meet at the floor", HANDOVER, Reason.WORTH_MOVING, decode=[writer(held=899)]),
    Case("all of it held", LOCAL, Reason.WARM, decode=[writer(held=1000)], floor=0),
    Case("more held than asked for", LOCAL, Reason.WARM, decode=[writer(held=5000)]),
    Case("always", HANDOVER, Reason.FORCED, policy=Policy.ALWAYS),
    Case("always, below the floor", HANDOVER, Reason.FORCED, policy=Policy.ALWAYS, tokens=2),
    Case("always, but nothing to read", LOCAL, Reason.TOO_SHORT, policy=Policy.ALWAYS, tokens=1),
    Case("always, but all held", LOCAL, Reason.WARM, policy=Policy.ALWAYS, decode=[writer(held=999)]),
    Case("never", LOCAL, Reason.DISABLED, policy=Policy.NEVER),
    Case("never comes before all else", LOCAL, Reason.DISABLED, policy=Policy.NEVER, splittable=False, tokens=None),
    Case("no prefill engine", LOCAL, Reason.DISABLED, prefill=[]),
    Case("a prefill engine of another pair", LOCAL, Reason.DISABLED, prefill=[reader(to="other")]),
    Case("pictures", LOCAL, Reason.NOT_SPLITTABLE, splittable=False),
    Case("pictures, always", LOCAL, Reason.NOT_SPLITTABLE, splittable=False, policy=Policy.ALWAYS),
    Case("prefill engine down", LOCAL, Reason.PREFILL_DOWN, prefill=[reader(up=False)]),
    Case("down and unproven is down", LOCAL, Reason.PREFILL_DOWN, prefill=[reader(up=False, pair=PairState.UNPROVEN)]),
    Case("unproven", LOCAL, Reason.PAIR_UNPROVEN, prefill=[reader(pair=PairState.UNPROVEN)]),
    Case("unproven, always", LOCAL, Reason.PAIR_UNPROVEN, policy=Policy.ALWAYS,
         prefill=[reader(pair=PairState.UNPROVEN)]),
    Case("switched off", LOCAL, Reason.PAIR_SWITCHED_OFF, prefill=[reader(pair=PairState.SWITCHED_OFF)]),
    Case("too long for the reader", LOCAL, Reason.TOO_LONG, prefill=[reader(context=999)]),
    Case("all but the last token fit", HANDOVER, Reason.WORTH_MOVING, prefill=[reader(context=1000)]),
    Case("too long for the writer", LOCAL, Reason.TOO_LONG, decode=[writer(context=1000)]),
    Case("an answer fits the writer", HANDOVER, Reason.WORTH_MOVING, decode=[writer(context=1001)]),
    Case("no room", LOCAL, Reason.NO_ROOM, prefill=[reader(room=False)]),
    Case("short comes before down", LOCAL, Reason.TOO_SHORT, tokens=5, prefill=[reader(up=False)]),
    Case("warm comes before down", LOCAL, Reason.WARM, decode=[writer(held=950)], prefill=[reader(up=False)]),
    Case("the reason nearest to use: room over down", LOCAL, Reason.NO_ROOM,
         prefill=[reader("a", up=False), reader("b", room=False)]),
    Case("the reason nearest to use: length over proof", LOCAL, Reason.TOO_LONG,
         prefill=[reader("a", context=10), reader("b", pair=PairState.SWITCHED_OFF)]),
    Case("one usable reader is enough", HANDOVER, Reason.WORTH_MOVING,
         prefill=[reader("a", up=False), reader("b"), reader("c", room=False)]),
    Case("forced, whatever the floor", HANDOVER, Reason.FORCED, floor=5000, force=999),
    Case("one too few to be forced", LOCAL, Reason.TOO_SHORT, floor=5000, force=1000),
    Case("forced, but nobody can read", LOCAL, Reason.NO_ROOM, force=10, prefill=[reader(room=False)]),
    Case("never is stronger than forced", LOCAL, Reason.DISABLED, policy=Policy.NEVER, force=10),
    Case("auto, nothing learned yet: by count", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO),
    Case("auto, no ids", LOCAL, Reason.TOKENIZER_DOWN, policy=Policy.AUTO, tokens=None),
    Case("auto, below the floor", LOCAL, Reason.TOO_SHORT, policy=Policy.AUTO, tokens=FLOOR,
         decode=[writer(read_s=9)], prefill=[reader(read_s=1)]),
    Case("auto, warm", LOCAL, Reason.WARM, policy=Policy.AUTO,
         decode=[writer(held=950, read_s=9)], prefill=[reader(read_s=1)]),
    Case("auto, no reader", LOCAL, Reason.PREFILL_DOWN, policy=Policy.AUTO,
         decode=[writer(read_s=9)], prefill=[reader(read_s=1, up=False)]),
    Case("auto, sooner by handover", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=2)], prefill=[reader(read_s=1, save_s=0.5, restore_s=0.4)]),
    Case("auto, sooner alone", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO,
         decode=[writer(read_s=2)], prefill=[reader(read_s=1, save_s=0.7, restore_s=0.4)]),
    Case("auto, running answers weigh", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=2, streams=1)], prefill=[reader(read_s=3, save_s=0.2, restore_s=0.1)]),
    Case("auto, as much as is configured", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO, weight=0.5,
         decode=[writer(read_s=2, streams=1)], prefill=[reader(read_s=3, save_s=0.2, restore_s=0.1)]),
    Case("auto, restoring stalls them too", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO,
         decode=[writer(read_s=2, streams=4)], prefill=[reader(read_s=2, restore_s=1.9)]),
    Case("auto, so does what will come meanwhile", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=2, arrivals_per_s=1)], prefill=[reader(read_s=3.9)]),
    Case("auto, of which fewer come while it only restores", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO,
         decode=[writer(read_s=2, arrivals_per_s=1)], prefill=[reader(read_s=2, restore_s=1.9)]),
    Case("auto, unless others do not count", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO, weight=0,
         decode=[writer(read_s=2, streams=9, arrivals_per_s=9)], prefill=[reader(read_s=2.1)]),
    Case("auto, the prefill engine is busy", LOCAL, Reason.PREFILL_BUSY, policy=Policy.AUTO,
         decode=[writer(read_s=5)], prefill=[reader(read_s=1, queue_s=9)]),
    Case("auto, busy, but the decode engine is too", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=5, wait_s=9)], prefill=[reader(read_s=1, queue_s=9)]),
    Case("auto, the decode engine reads for another", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=5, reading_s=4)], prefill=[reader(read_s=8)]),
    Case("auto, a restored session need not wait for it", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=1, reading_s=4)], prefill=[reader(read_s=3)]),
    Case("auto, unless it is read first", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO,
         decode=[writer(read_s=1, reading_s=4, before_restored_s=4)], prefill=[reader(read_s=3, restore_s=2)]),
    Case("auto, forced behind any queue", HANDOVER, Reason.FORCED, policy=Policy.AUTO, force=900,
         decode=[writer(read_s=5)], prefill=[reader(read_s=1, queue_s=99)]),
    Case("auto, sessions on their way would have to wait", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=2, coming_s=(0.5, 1.0, 7.0))], prefill=[reader(read_s=4)]),
    Case("auto, or would be read more slowly", HANDOVER, Reason.WORTH_MOVING, policy=Policy.AUTO,
         decode=[writer(read_s=2, coming_s=(2.5, 3.0, 7.0), slows=0.5)], prefill=[reader(read_s=4)]),
    Case("auto, sessions that are ready later do not", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO,
         decode=[writer(read_s=2, coming_s=(2.5, 3.0, 7.0))], prefill=[reader(read_s=4)]),
    Case("auto, the proxy's own part counts", LOCAL, Reason.LOCAL_CHEAPER, policy=Policy.AUTO,
         decode=[writer(read_s=2)], prefill=[reader(read_s=1, added_s=1.5)]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_route_and_its_reason(case: Case) -> None:
    """Every circumstance leads to one route and one reason."""
    demand = Demand(case.tokens, case.splittable, case.surely_short)
    route = decide(demand, case.decode, case.prefill, Rules(case.policy, case.floor, case.force, case.weight))
    assert (route.kind, route.reason) == (case.kind, case.reason)
    assert (route.prefill_engine is not None) == (case.kind is HANDOVER)


def test_each_reason_has_a_row() -> None:
    """No reason is left untested, and none exists that is never given."""
    assert {case.reason for case in CASES} == set(Reason)


def test_the_writer_that_holds_most_answers() -> None:
    """A conversation stays where it is while a slot is free there; only then do free slots count."""
    rules = Rules(Policy.THRESHOLD, FLOOR)
    holder, full, idle = writer("a", held=500, free=1), writer("a", held=500, free=0), writer("b", held=10, free=4)
    assert decide(Demand(1000), [holder, idle], [], rules).decode_engine == "a"
    assert decide(Demand(1000), [full, idle], [], rules).decode_engine == "b"
    busy, idle = writer("a", free=1), writer("b", free=2)
    assert decide(Demand(1000), [busy, idle], [], Rules(Policy.THRESHOLD, FLOOR)).decode_engine == "b"
    assert decide(Demand(None), [busy, idle], [], Rules(Policy.THRESHOLD, FLOOR)).decode_engine == "b"


def test_the_reader_with_the_shortest_queue_reads() -> None:
    """Of the usable readers of the chosen writer, the one with the fewest waiting gets the prompt."""
    readers = [
        reader("a", waiting=2),
        reader("b", waiting=1),
        reader("c", waiting=0, up=False),
        reader("d", to="v", waiting=0),
    ]
    route = decide(Demand(1000), [writer("w", held=1), writer("v")], readers, Rules(Policy.THRESHOLD, FLOOR))
    assert (route.decode_engine, route.prefill_engine) == ("w", "b")


@pytest.mark.parametrize(
    ("tokens", "held", "figures"),
    [
        (1000, 400, (1000, 400, 599)),
        (1000, 2000, (1000, 999, 0)),
        (1, 1, (1, 0, 0)),
        (0, 0, (0, 0, 0)),
        (None, 400, (None, None, None)),
    ],
)
def test_the_figures_leave_the_last_token_to_the_writer(
    tokens: int | None, held: int, figures: tuple[int | None, ...]
) -> None:
    """Held and uncached tokens add up to all but the last one, which the decode engine reads in any case."""
    route = decide(Demand(tokens), [writer(held=held)], [], Rules(Policy.NEVER, 0))
    assert (route.prompt_tokens, route.held_tokens, route.uncached_tokens) == figures


@given(
    tokens=st.integers(0, 3000),
    held=st.integers(0, 3000),
    floor=st.integers(0, 3000),
    policy=st.sampled_from([Policy.THRESHOLD, Policy.ALWAYS]),
)
def test_the_rule_of_the_threshold(tokens: int, held: int, floor: int, policy: Policy) -> None:
    """With a proven pair, a prompt of two tokens or more moves exactly when it has enough new ones."""
    route = decide(Demand(tokens), [writer(held=held)], [reader()], Rules(policy, floor))
    need = tokens - 1 - min(held, tokens - 1)
    least = 1 if policy is Policy.ALWAYS else max(1, floor)
    assert (route.kind is HANDOVER) == (tokens >= 2 and need >= least)


# -- by cost -----------------------------------------------------------------------------------------------------------

AUTO = Rules(Policy.AUTO, FLOOR)


@pytest.mark.parametrize(
    ("policy", "floor", "force", "least"),
    [
        (Policy.AUTO, 512, 0, 512),
        (Policy.AUTO, 512, 100, 100),
        (Policy.AUTO, 512, 900, 512),
        (Policy.ALWAYS, 512, 0, 1),
    ],
)
def test_what_may_be_forced_is_not_too_short_to_count(policy: Policy, floor: int, force: int, least: int) -> None:
    """A prompt need not be tokenized only where nothing could have it handed over."""
    assert Rules(policy, floor, force).least == least


def test_both_predictions_come_with_the_route() -> None:
    """A route tells both ways' seconds, whichever was taken, and what a local reading would do to others."""
    slow = writer(read_s=4, wait_s=1, streams=1, arrivals_per_s=0.5, added_s=0.5)
    quick = reader(read_s=1, queue_s=2, save_s=0.25, restore_s=0.125, added_s=0.5)
    for rules in (AUTO, Rules(Policy.ALWAYS, 0), Rules(Policy.NEVER, 0)):
        route = decide(Demand(1000), [slow], [quick], rules)
        assert (route.predicted_local_s, route.predicted_handover_s, route.stall_s) == (5.5, 3.875, 8)
    assert decide(Demand(None), [slow], [quick], AUTO).predicted_local_s is None


def test_the_cheapest_pair_is_taken() -> None:
    """Of several engines the pair that brings the first token soonest reads and answers."""
    writers = [writer("w", read_s=9, wait_s=5, free=0), writer("v", read_s=9)]
    readers = [
        reader("a", "w", read_s=1),
        reader("a", "v", read_s=1, queue_s=6),
        reader("b", "v", read_s=3),
        reader("c", "v", read_s=1, up=False),
    ]
    route = decide(Demand(1000), writers, readers, AUTO)
    assert (route.decode_engine, route.prefill_engine, route.predicted_handover_s) == ("v", "b", 3)


def test_engines_that_cost_the_same_are_told_apart_by_what_they_hold() -> None:
    """Between equal costs a free decode engine that holds the conversation, or the idler one, answers."""
    writers = [writer("w", read_s=1.0, free=1), writer("v", read_s=1.05, free=3)]
    readers = [reader("a", "w", read_s=0.5), reader("a", "v", read_s=0.5)]
    assert decide(Demand(1000), writers, readers, AUTO).decode_engine == "v"
    assert decide(Demand(5), writers, readers, AUTO).decode_engine == "v"


@given(
    local=st.floats(0, 100),
    streams=st.integers(0, 8),
    arrivals=st.floats(0, 5),
    queue=st.floats(0, 100),
    read=st.floats(0, 100),
    restore=st.floats(0, 5),
    wait=st.floats(0, 100),
)
def test_auto_never_takes_the_dearer_way(
    local: float, streams: int, arrivals: float, queue: float, read: float, restore: float, wait: float
) -> None:
    """With speeds known, the way taken costs no more than the other, or a handover next to nothing more; a longer queue
    never speaks for a handover."""
    at = writer(read_s=local, streams=streams, arrivals_per_s=arrivals, wait_s=wait)

    def taken(queue_s: float) -> RouteKind:
        return decide(Demand(1000), [at], [reader(read_s=read, restore_s=restore, queue_s=queue_s)], AUTO).kind

    local_cost = wait + local + (streams * local + arrivals * local**2 / 2)
    move_cost = max(queue + read, wait) + restore + (streams * restore + arrivals * restore**2 / 2)
    assert (taken(queue) is HANDOVER) == (move_cost <= EVEN_FACTOR * local_cost)
    if taken(queue) is LOCAL:
        assert taken(2 * queue + 1) is LOCAL
