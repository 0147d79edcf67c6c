"""The decision, as a table: which route, why, and between which engines."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.model import DecodeView, PairState, Policy, PrefillView, Reason, RouteKind
from splitproxy.router import Demand, Rules, decide

LOCAL, HANDOVER = RouteKind.LOCAL, RouteKind.HANDOVER
FLOOR = 100


def writer(name: str = "w", held: int = 0, context: int = 8192, free: int = 1) -> DecodeView:
    return DecodeView(name, held, context, free)


def reader(
    name: str = "r",
    to: str = "w",
    *,
    up: bool = True,
    pair: PairState = PairState.PROVEN,
    context: int = 8192,
    waiting: int = 0,
    room: bool = True,
) -> PrefillView:
    return PrefillView(name, to, up, pair, context, waiting, room)


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
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_route_and_its_reason(case: Case) -> None:
    """Every circumstance leads to one route and one reason."""
    demand = Demand(case.tokens, case.splittable, case.surely_short)
    route = decide(demand, case.decode, case.prefill, Rules(case.policy, case.floor))
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
