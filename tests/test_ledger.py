"""The books: claims, the choice of a slot, the pool of cells, restarts, and session bytes in flight."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from splitproxy.books.ledger import EMPTY, NOTHING, Holding, Lease, Ledger, Order, SlotCount
from splitproxy.model import Role, Tokens

CONTEXT = 1000


def ids(*runs: tuple[int, int]) -> Tokens:
    """Tokens of runs: (7, 3) is 7 7 7."""
    return Tokens([token for token, count in runs for _ in range(count)])


A, B, C = ids((1, 100)), ids((2, 100)), ids((3, 100))


def opened(slots: int = 3, context: int = CONTEXT) -> Ledger:
    ledger = Ledger(10_000)
    ledger.open("w", Role.DECODE, slots, context)
    return ledger


def claim(ledger: Ledger, tokens: Tokens, growth: int = 0) -> Lease:
    lease = ledger.claim("w", tokens, len(tokens), growth)
    assert lease is not None
    return lease


def left_with(ledger: Ledger, *prompts: Tokens) -> None:
    """Let each prompt have a slot of its own, and leave it there."""
    leases = [claim(ledger, tokens) for tokens in prompts]
    for lease, tokens in zip(leases, prompts, strict=True):
        ledger.release(lease, Holding(tokens, occupied=len(tokens)))


# --- holdings


@pytest.mark.parametrize(
    ("holding", "prompt", "prefix"),
    [
        (Holding(A), A, 100),
        (Holding(A), ids((1, 60), (9, 9)), 60),
        (Holding(A), B, 0),
        (Holding(A, believed=20), ids((1, 100), (5, 50)), 120),
        (Holding(A, believed=20), ids((1, 100), (5, 5)), 105),
        (Holding(A, believed=20), ids((1, 99), (5, 50)), 99),
        (Holding(NOTHING, believed=20), A, 0),
        (EMPTY, A, 0),
    ],
)
def test_what_a_slot_holds_of_a_prompt(holding: Holding, prompt: Tokens, prefix: int) -> None:
    """An answer whose ids were not seen counts only where the prompt continues all that was before it."""
    assert holding.prefix(prompt) == prefix


# --- claims


def test_each_claim_gets_a_slot_of_its_own_until_none_is_left() -> None:
    """A slot has one lease at a time, and a claim that cannot be met fails at once."""
    ledger = opened(slots=2)
    first, second = claim(ledger, A), claim(ledger, B)
    assert {first.number, second.number} == {0, 1}
    assert ledger.claim("w", C, 100, 0) is None
    assert ledger.busy() == 2
    ledger.release(first)
    assert claim(ledger, C).number == first.number


def test_an_engine_that_is_not_there_gives_no_slot() -> None:
    """Unknown and closed engines have no slots, hold nothing and count nothing."""
    ledger = opened()
    ledger.close("w")
    ledger.close("w")
    for name in ("w", "unheard of"):
        assert ledger.claim(name, A, 100, 0) is None
        assert ledger.claim_engine(name) is None
        assert (ledger.held(name, A), ledger.context(name), ledger.is_ready(name)) == (0, 0, False)
        assert ledger.count(name) == SlotCount(0, 0, 0)


def test_a_lease_is_released_once() -> None:
    """Releasing twice is a mistake that shows, and does not free the slot under another's lease."""
    ledger = opened(slots=1)
    first = claim(ledger, A)
    ledger.release(first)
    with pytest.raises(ValueError, match="not held by this lease"):
        ledger.release(first)
    second = claim(ledger, B)
    with pytest.raises(ValueError, match="not held by this lease"):
        ledger.release(first)
    assert ledger.busy() == 1
    ledger.release(second)


def test_a_lease_that_ends_badly_leaves_nothing() -> None:
    """Without a holding the slot is believed to hold no token, and to fill what was reserved."""
    ledger = opened(slots=1)
    left_with(ledger, A)
    assert ledger.held("w", A) == 100
    lease = claim(ledger, A, growth=50)
    assert lease.held == 100
    assert ledger.held("w", A) == 0
    ledger.release(lease)
    assert ledger.held("w", A) == 0
    assert ledger.count("w") == SlotCount(free=1, busy=0, holding=1)
    other = ledger.claim("w", NOTHING, CONTEXT - 1, 0)
    assert other is not None


def test_engines_are_listed_by_role_in_order() -> None:
    """`ready` names the engines of a role as they came; a restart puts an engine where it was."""
    ledger = opened()
    ledger.open("r", Role.PREFILL, 1, 500)
    ledger.open("v", Role.DECODE, 1, 400)
    ledger.open("w", Role.DECODE, 1, 300)
    assert ledger.ready(Role.DECODE) == ["w", "v"]
    assert ledger.ready(Role.PREFILL) == ["r"]
    assert (ledger.context("w"), ledger.context("r")) == (300, 500)


def test_a_lease_of_a_whole_engine_names_no_slot() -> None:
    """Asking such a lease for its slot's number is an error, not slot 0."""
    lease = opened().claim_engine("w")
    assert lease is not None
    with pytest.raises(ValueError, match="whole engine"):
        _ = lease.number


# --- the choice of a slot


@pytest.mark.parametrize(
    ("held", "prompt", "slot"),
    [
        ([A, B], ids((1, 150)), 0),
        ([A, B], ids((2, 150)), 1),
        ([A, B], C, 2),
        ([A, B, C], ids((9, 10)), 0),
        ([A, B], ids((1, 50), (9, 50)), 0),
        ([A, B], ids((1, 49), (9, 50)), 2),
        ([A, B, C], ids((2, 20), (9, 50)), 0),
        ([ids((1, 900)), ids((2, 900)), ids((3, 900))], ids((2, 300), (9, 50)), 1),
        ([ids((1, 100)), ids((1, 150))], ids((1, 200)), 1),
        ([ids((1, 100)), ids((1, 150), (2, 160))], ids((1, 200)), 0),
    ],
    ids=[
        "the one it continues",
        "the one it continues, again",
        "an empty one",
        "the oldest",
        "half of what is held is a continuation",
        "less than half goes to an empty one",
        "less than half, none empty, and little to save: the oldest",
        "less than half, none empty: what saves much",
        "the longest of two",
        "never one that it would cut to less than half",
    ],
)
def test_the_slot_whose_use_costs_least(held: list[Tokens], prompt: Tokens, slot: int) -> None:
    """A prompt goes where it continues, else where nothing is, else where the loss is oldest."""
    ledger = opened(slots=3, context=4000)
    left_with(ledger, *held)
    expected = ledger.held("w", prompt)
    lease = claim(ledger, prompt)
    assert lease.number == slot
    assert lease.held == expected


@pytest.mark.parametrize(
    ("order", "prompt", "slot"),
    [
        (Order(0.1, {1: 3.0}), ids((9, 10)), 0),
        (Order(5.0, {1: 3.0}), ids((9, 10)), 3),
        (Order(2.0, {1: 3.0}), ids((9, 10)), 0),
        (Order(1.0, {2: 3.0, 1: 0.4}), ids((9, 10)), 0),
        (Order(0.1, {1: 3.0}), ids((4, 150)), 3),
        (Order(0.1, {1: 0.04}), ids((9, 10)), 3),
        (Order(5.0), ids((9, 10)), 3),
        (Order(0.4), ids((9, 10)), 3),
    ],
    ids=[
        "a short one overtakes a long one",
        "a longer one waits",
        "one that is shorter than what is left",
        "the least waiting of all together",
        "the one it continues, wherever it is",
        "what nobody would notice does not count",
        "a long one where nobody reads: among the upper half",
        "a short one where nobody reads: the oldest",
    ],
)
def test_the_slot_where_readings_wait_least(order: Order, prompt: Tokens, slot: int) -> None:
    """Slots are read from the first on: who has less to read gets a lower one."""
    ledger = opened(slots=4, context=4000)
    leases = [claim(ledger, ids((number + 1, 100))) for number in range(4)]
    for lease in reversed(leases):  # the last slot is the oldest
        if lease.number not in order.others_s:
            ledger.release(lease, Holding(ids((lease.number + 1, 100)), occupied=100))
    assert ledger.place("w", prompt, order) == slot
    found = ledger.claim("w", prompt, len(prompt), 0, order)
    assert found is not None
    assert found.number == slot


@pytest.mark.parametrize(("own_s", "slots"), [(5.0, [2, 3, 0, 1]), (0.1, [0, 1, 2, 3])])
def test_long_readings_leave_lower_slots_to_others(own_s: float, slots: list[int]) -> None:
    """While all slots are empty, long prompts begin in the middle, short ones at the first."""
    ledger = opened(slots=4)
    leases = [ledger.claim("w", A, 100, 0, Order(own_s)) for _ in slots]
    assert [lease.number for lease in leases if lease] == slots


def test_busy_slots_are_not_chosen() -> None:
    """A conversation's second request takes another slot while the first runs."""
    ledger = opened(slots=2)
    left_with(ledger, A)
    first, second = claim(ledger, A), claim(ledger, A)
    assert (first.held, second.held) == (100, 0)
    assert first.number != second.number


def test_held_while_all_are_busy_looks_at_all() -> None:
    """With no free slot the look is at the slots as they stand, of which a busy one holds nothing certain."""
    ledger = opened(slots=1)
    left_with(ledger, A)
    claim(ledger, A)
    assert ledger.held("w", A) == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_ids_are_needed_only_where_they_choose(slots: int) -> None:
    """Ids change nothing while no slot holds anything, or when there is but one."""
    ledger = opened(slots=slots)
    assert ledger.indifferent()
    lease = claim(ledger, A)
    assert ledger.indifferent() == (slots == 1)
    ledger.release(lease, Holding(A, occupied=100))
    assert ledger.indifferent() == (slots == 1)
    ledger.open("r", Role.PREFILL, 4, CONTEXT)
    assert ledger.indifferent() == (slots == 1)


# --- the pool of cells


def test_idle_slots_are_erased_oldest_first_and_no_more_than_needed() -> None:
    """A claim that does not fit beside idle conversations names those to erase, and takes them off the books."""
    ledger = opened(slots=4)
    for token in (1, 2, 3):
        left_with(ledger, ids((token, 200)))
    lease = ledger.claim("w", ids((9, 500)), 500, 100)
    assert lease is not None
    assert (lease.number, lease.erase, lease.cells) == (3, (0,), 600)
    assert ledger.held("w", ids((1, 200))) == 0
    assert ledger.held("w", ids((2, 200))) == 200


def test_a_slot_cannot_be_had_until_it_is_erased() -> None:
    """Nothing is sent to a slot that is about to be emptied for another request."""
    ledger = opened(slots=2)
    left_with(ledger, ids((1, 600)))
    lease = claim(ledger, B, growth=500)
    assert (lease.number, lease.erase) == (1, (0,))
    assert ledger.claim("w", C, 100, 0) is None
    assert ledger.claim_engine("w") is None
    assert ledger.count("w") == SlotCount(free=0, busy=2, holding=0)
    ledger.erased(lease, lease.erase)
    assert claim(ledger, C).erase == ()


def test_room_is_there_when_it_is_erased() -> None:
    """What is still to be erased for one request gives no room to another."""
    ledger = opened(slots=3)
    left_with(ledger, ids((1, 800)))
    lease = claim(ledger, B, growth=300)
    assert (lease.cells, lease.erase) == (400, (0,))
    assert ledger.claim("w", C, 100, 200) is None
    assert ledger.claim("w", C, 100, 100) is not None
    ledger.erased(lease, lease.erase)
    assert ledger.claim("w", C, 100, 300) is not None


@pytest.mark.parametrize("ends", [False, True], ids=["the erasing failed", "the request went before it"])
def test_a_slot_that_was_not_erased_stays_filled(ends: bool) -> None:
    """It can be had again, it is believed to hold nothing, and the next request that needs its room erases it."""
    ledger = opened(slots=2)
    left_with(ledger, ids((1, 600)))
    lease = claim(ledger, B, growth=500)
    if ends:
        ledger.release(lease, EMPTY)
    else:
        ledger.erased(lease)
        ledger.release(lease, EMPTY)
    assert ledger.held("w", ids((1, 600))) == 0
    again = claim(ledger, C, growth=500)
    assert (again.number, again.erase) == (1, (0,))


def test_what_runs_is_never_erased() -> None:
    """Cells reserved by running requests are theirs; a claim that needs them waits."""
    ledger = opened(slots=3)
    running = claim(ledger, A, growth=500)
    assert ledger.claim("w", B, 100, 301) is None
    assert ledger.held("w", B) == 0
    fits = claim(ledger, B, growth=300)
    assert fits.erase == ()
    ledger.release(running)


def test_a_claim_that_fails_changes_nothing() -> None:
    """Nothing is erased from the books for a request that has to wait all the same."""
    ledger = opened(slots=3)
    left_with(ledger, ids((1, 200)))
    running = claim(ledger, B, growth=500)
    assert ledger.claim("w", C, 100, 400) is None
    assert ledger.held("w", ids((1, 200))) == 200
    ledger.release(running)


def test_growth_beyond_the_context_is_no_reason_to_wait() -> None:
    """A request for more than the context can have the whole of it."""
    lease = opened().claim("w", A, 100, 10**9)
    assert lease is not None
    assert lease.cells == CONTEXT


@pytest.mark.parametrize("tokens", [CONTEXT, 10 * CONTEXT])
def test_a_prompt_that_never_fits_is_let_through(tokens: int) -> None:
    """The engine refuses it in its own words; it does not wait for room that will never be."""
    ledger = opened(slots=2)
    claim(ledger, A, growth=900)
    lease = ledger.claim("w", ids((2, tokens)), tokens, 100)
    assert lease is not None
    assert (lease.cells, lease.erase) == (0, ())


def test_an_estimate_is_no_reason_to_let_a_prompt_through() -> None:
    """A prompt that was not counted may fit all the same: it gets the whole pool, when that can be had."""
    ledger = opened(slots=2)
    running = claim(ledger, A)
    assert ledger.claim("w", NOTHING, 10 * CONTEXT, 100) is None
    ledger.release(running, Holding(A, occupied=100))
    lease = ledger.claim("w", NOTHING, 10 * CONTEXT, 100)
    assert lease is not None
    assert (lease.number, lease.cells, lease.erase) == (1, CONTEXT, (0,))


def test_an_answer_grows_while_there_is_room() -> None:
    """Idle conversations give way to it, running ones do not, and what cannot be had changes nothing."""
    ledger = opened(slots=3)
    left_with(ledger, ids((1, 300)))
    grows, other = claim(ledger, A, growth=100), claim(ledger, B, growth=200)
    assert ledger.grow(grows, 150) == ()
    assert ledger.grow(grows, 500) == (0,)
    ledger.erased(grows, (0,))
    assert ledger.grow(grows, 701) is None
    assert ledger.grow(grows, 700) == ()
    assert ledger.claim("w", C, 100, 0) is None
    ledger.release(other, EMPTY)
    assert ledger.grow(grows, 10**9) == ()
    ledger.release(grows)
    assert ledger.grow(grows, 5) == ()


def test_a_doubted_engine_is_believed_to_hold_nothing() -> None:
    """Its idle slots stay filled, what runs stays booked, and other engines are not doubted."""
    ledger = opened(slots=3)
    ledger.open("v", Role.DECODE, 1, CONTEXT)
    left_with(ledger, A)
    other = ledger.claim("v", C, 100, 0)
    assert other is not None
    ledger.release(other, Holding(C, occupied=100))
    running = claim(ledger, B)
    ledger.distrust("w")
    assert (ledger.held("w", A), ledger.held("v", C)) == (0, 100)
    assert ledger.count("w") == SlotCount(free=2, busy=1, holding=1)
    ledger.release(running, Holding(B, occupied=100))
    assert ledger.held("w", B) == 100


@pytest.mark.parametrize(
    ("prompt", "continues"), [(ids((1, 100), (5, 9)), True), (ids((1, 60), (5, 9)), False), (ids((1, 100)), True)]
)
def test_a_lease_tells_whether_the_prompt_continues_the_slot(prompt: Tokens, continues: bool) -> None:
    """Only then is every kind of memory sure to reuse what the slot holds."""
    ledger = opened(slots=1)
    left_with(ledger, A)
    assert claim(ledger, prompt).continues is continues


# --- slots that the engine chooses


def test_a_request_alone_gets_the_engine_until_it_is_known_where_it_is() -> None:
    """Such a request keeps all slots that are free until its own is known; then the others can be had."""
    ledger = opened(slots=3)
    left_with(ledger, A)
    running = claim(ledger, B)
    assert ledger.claim("w", C, 100, 0, alone=True) is None
    ledger.release(running, EMPTY)
    lease = ledger.claim("w", C, 100, 50, alone=True)
    assert lease is not None
    assert ledger.is_unsettled(lease)
    assert ledger.claim("w", A, 100, 0) is None
    chosen = next(number for number in range(3) if number != lease.number)
    settled = ledger.settle(lease, chosen)
    assert (settled.number, settled.cells, settled.held) == (chosen, lease.cells, 0)
    assert not ledger.is_unsettled(settled)
    assert ledger.settle(settled, lease.number) is settled
    assert ledger.busy() == 1
    assert ledger.count("w").free == 2
    ledger.release(settled, EMPTY)
    assert ledger.busy() == 0


def test_an_engine_may_choose_when_all_others_have_begun() -> None:
    """Until then it could choose a slot that is claimed, or about to be erased."""
    ledger = opened(slots=3)
    running = claim(ledger, B)
    assert ledger.not_begun("w") == [running]
    assert ledger.claim("w", C, 100, 0, alone=True) is None
    ledger.begun(running)
    assert (ledger.not_begun("w"), ledger.at_work("w")) == ([], {running.number})
    lease = ledger.claim("w", C, 100, 0, alone=True)
    assert lease is not None
    assert ledger.claim("w", A, 100, 0) is None
    settled = ledger.settle(lease, lease.number)
    assert ledger.at_work("w") == {running.number, settled.number}
    assert ledger.claim("w", A, 100, 0, alone=True) is not None


def test_a_slot_that_is_doomed_is_none_to_choose() -> None:
    """What is about to be erased must not be at work by then."""
    ledger = opened(slots=3, context=1000)
    left_with(ledger, Tokens(range(900)))
    eraser = claim(ledger, B, 500)
    assert eraser.erase
    ledger.begun(eraser)
    assert ledger.claim("w", C, 10, 0, alone=True) is None
    ledger.erased(eraser, eraser.erase)
    assert ledger.claim("w", C, 10, 0, alone=True) is not None


def test_a_slot_whose_answer_has_just_ended_may_be_chosen() -> None:
    """The engine knows of an end before we do: the slot is the newcomer's, and the release that follows is void."""
    ledger = opened(slots=2)
    ended = claim(ledger, B)
    ledger.begun(ended)
    lease = ledger.claim("w", C, 100, 0, alone=True)
    assert lease is not None
    settled = ledger.settle(lease, ended.number)
    assert settled.number == ended.number
    ledger.release(ended, Holding(B, occupied=len(B)))
    assert (ledger.busy(), ledger.count("w").free, ledger.held("w", B)) == (1, 1, 0)
    ledger.release(settled, Holding(C, occupied=len(C)))
    assert (ledger.busy(), ledger.count("w").free, ledger.held("w", C)) == (0, 2, len(C))


def test_a_beginning_counts_for_one_lease() -> None:
    """The next lease of the slot has not begun, and an old one does not begin it."""
    ledger = opened(slots=2)
    first = claim(ledger, B)
    ledger.begun(first)
    ledger.release(first, Holding(B, occupied=len(B)))
    second = claim(ledger, B)
    assert second.number == first.number
    ledger.begun(first)
    assert ledger.not_begun("w") == [second]


def test_an_engine_that_chooses_as_we_did_changes_nothing() -> None:
    """A request that lands where it was put keeps its lease."""
    ledger = opened(slots=2)
    lease = ledger.claim("w", A, 100, 0, alone=True)
    assert lease is not None
    assert ledger.settle(lease, lease.number) is lease
    assert not ledger.is_unsettled(lease)
    assert ledger.count("w").free == 1


def test_a_request_alone_can_end_before_its_slot_is_known() -> None:
    """Whoever leaves early gives the whole engine back."""
    ledger = opened(slots=2)
    lease = ledger.claim("w", A, 100, 0, alone=True)
    assert lease is not None
    ledger.release(lease)
    assert (ledger.busy(), ledger.count("w").free) == (0, 2)
    assert ledger.settle(lease, 1) is lease


# --- the whole engine


def test_a_whole_engine_is_claimed_only_when_it_is_quiet() -> None:
    """All slots or none; while it lasts no slot can be had, and nothing of before is believed after it."""
    ledger = opened(slots=2)
    left_with(ledger, A)
    slot = claim(ledger, B)
    assert ledger.claim_engine("w") is None
    ledger.release(slot)
    whole = ledger.claim_engine("w")
    assert whole is not None
    assert whole.slot is None
    assert ledger.claim("w", A, 100, 0) is None
    assert ledger.claim_engine("w") is None
    assert (ledger.busy(), ledger.count("w")) == (1, SlotCount(free=0, busy=2, holding=0))
    ledger.release(whole)
    assert ledger.busy() == 0
    assert ledger.held("w", A) == 0
    assert ledger.count("w") == SlotCount(free=2, busy=0, holding=2)


# --- restarts


def test_a_lease_from_before_a_restart_does_nothing() -> None:
    """Its release frees no slot of the new engine and leaves nothing on its books."""
    ledger = opened(slots=1)
    old = claim(ledger, A)
    ledger.open("w", Role.DECODE, 1, CONTEXT)
    assert not ledger.is_current(old)
    new = claim(ledger, B)
    ledger.release(old, Holding(A, occupied=100))
    assert ledger.is_current(new)
    assert ledger.busy() == 1
    ledger.release(new)
    assert ledger.held("w", A) == 0


def test_an_old_lease_of_a_whole_engine_does_nothing() -> None:
    """Nor does one of all slots."""
    ledger = opened(slots=2)
    old = ledger.claim_engine("w")
    assert old is not None
    ledger.close("w")
    ledger.release(old)
    ledger.open("w", Role.DECODE, 2, CONTEXT)
    ledger.release(old)
    assert ledger.count("w") == SlotCount(free=2, busy=0, holding=0)


def test_a_restart_forgets_what_was_held() -> None:
    """An engine that comes up holds nothing, and has the slots that it now says it has."""
    ledger = opened(slots=1)
    left_with(ledger, A)
    ledger.open("w", Role.DECODE, 2, 50)
    assert ledger.held("w", A) == 0
    assert ledger.count("w") == SlotCount(free=2, busy=0, holding=0)


def test_what_fits_can_be_claimed() -> None:
    """It is asked before two engines' slots are claimed together: neither is taken when the other is not to be had."""
    ledger = Ledger(0)
    assert not ledger.fits("w", 1)
    ledger.open("w", Role.DECODE, 2, 1000)
    assert ledger.fits("w", 5000)
    first = ledger.claim("w", NOTHING, 600, 0)
    assert first is not None
    assert (ledger.fits("w", 400), ledger.fits("w", 401)) == (True, False)
    second = ledger.claim("w", NOTHING, 400, 0)
    assert second is not None
    assert not ledger.fits("w", 0)
    ledger.release(second, Holding(occupied=400))
    assert ledger.fits("w", 400), "what an idle slot holds gives way"


# --- session files


def test_session_bytes_are_counted_while_reserved() -> None:
    """Files in flight share one limit, and room comes back once, at the latest with the context's end."""
    ledger = Ledger(100)
    assert ledger.has_room(100)
    assert not ledger.has_room(101)
    with ledger.reserve(60) as first:
        assert ledger.session_bytes == 60
        assert ledger.has_room(40)
        assert not ledger.has_room(41)
        first.release()
        assert ledger.session_bytes == 0
    assert ledger.session_bytes == 0
    with pytest.raises(KeyError), ledger.reserve(70):
        raise KeyError


def test_a_folder_that_others_fill_takes_no_more() -> None:
    """There is room for a session file when the folder can hold it beside those in flight, whatever the limit."""
    ledger = Ledger(100, lambda session_bytes: session_bytes <= 50)
    with ledger.reserve(30):
        assert ledger.has_room(20)
        assert not ledger.has_room(21)
    assert ledger.session_bytes == 0


# --- anything in any order

PROMPTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 400)), min_size=1, max_size=2).map(lambda r: ids(*r))
ENGINES = st.sampled_from(["w", "v"])


class Books(RuleBasedStateMachine):
    """Requests come, go and fail, and engines restart, in any order."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(1000)
        self.out: list[Lease] = []
        for name in ("w", "v"):
            self.ledger.open(name, Role.DECODE, 3, CONTEXT)

    @rule(target=leases, engine=ENGINES, tokens=PROMPTS, growth=st.integers(0, 1200))
    def claim(self, engine: str, tokens: Tokens, growth: int) -> Lease | None:
        promised = self.ledger.held(engine, tokens)
        any_free = self.ledger.count(engine).free > 0
        filled = self.filled(engine)
        lease = self.ledger.claim(engine, tokens, len(tokens), growth)
        if lease is None:
            assert not any_free or filled + min(len(tokens) + growth, CONTEXT) > CONTEXT, "it waits for no reason"
            return None
        assert all(other.number != lease.number for other in self.current(engine)), "leased twice"
        assert lease.number not in lease.erase
        assert not {other.number for other in self.current(engine)} & set(lease.erase), "a running slot is erased"
        assert lease.held == promised
        self.out.append(lease)
        return lease

    @rule(lease=leases, all_of_them=st.booleans())
    def erase(self, lease: Lease | None, all_of_them: bool) -> None:
        if lease is not None and lease in self.out:
            self.ledger.erased(lease, lease.erase if all_of_them else lease.erase[:1])

    @rule(lease=leases, cells=st.integers(0, 1200))
    def grow(self, lease: Lease | None, cells: int) -> None:
        if lease is not None and lease in self.out:
            erase = self.ledger.grow(lease, cells) or ()
            assert not {other.slot for other in self.current(lease.engine)} & set(erase), "a running slot is erased"

    @rule(target=leases, engine=ENGINES)
    def claim_engine(self, engine: str) -> Lease | None:
        quiet = not self.current(engine)
        for other in self.current(engine):
            assert self.ledger.claim_engine(engine) is None, other
        lease = self.ledger.claim_engine(engine)
        assert (lease is not None) == (quiet and self.ledger.is_ready(engine))
        if lease is not None:
            self.out.append(lease)
        return lease

    @rule(engine=ENGINES)
    def distrust(self, engine: str) -> None:
        self.ledger.distrust(engine)

    @rule(lease=consumes(leases), tokens=PROMPTS, fill=st.floats(0, 1), well=st.booleans())
    def release(self, lease: Lease | None, tokens: Tokens, fill: float, well: bool) -> None:
        if lease is None:
            return
        occupied = int(lease.cells * fill)
        self.ledger.release(lease, Holding(tokens.head(occupied), occupied=occupied) if well else None)
        self.out.remove(lease)

    @rule(engine=ENGINES)
    def restart(self, engine: str) -> None:
        self.ledger.open(engine, Role.DECODE, 3, CONTEXT)
        assert self.ledger.count(engine) == SlotCount(free=3, busy=0, holding=0)

    @rule(engine=ENGINES)
    def close(self, engine: str) -> None:
        self.ledger.close(engine)

    def current(self, engine: str) -> list[Lease]:
        return [lease for lease in self.out if lease.engine == engine and self.ledger.is_current(lease)]

    @invariant()
    def every_current_lease_is_counted_and_no_other(self) -> None:
        assert self.ledger.busy() == len(self.current("w")) + len(self.current("v"))

    def reserved(self, engine: str) -> int:
        """Cells of the requests that run; what lies in idle slots beside them can be erased."""
        books = self.ledger._engines.get(engine)
        return sum(slot.reserved for slot in books.slots if slot.lease is not None) if books is not None else 0

    def filled(self, engine: str) -> int:
        """The same with what has yet to be erased for them."""
        books = self.ledger._engines.get(engine)
        return sum(slot.cells for slot in books.slots if slot.lease is not None) if books is not None else 0

    @invariant()
    def the_pool_is_never_overdrawn(self) -> None:
        for engine in ("w", "v"):
            assert self.reserved(engine) <= CONTEXT

    def teardown(self) -> None:
        for lease in self.out:
            self.ledger.release(lease)
        assert self.ledger.busy() == 0
        for name in ("w", "v"):
            count = self.ledger.count(name)
            assert count.busy == 0
            assert count.free == (3 if self.ledger.is_ready(name) else 0)


Books.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase


# --- slots that the engine chooses


def test_a_request_without_a_slot_of_its_own_has_the_engine_until_it_is_known() -> None:
    """Nobody can have a slot while the engine chooses; then the chosen one is leased, and the others are free."""
    ledger = opened()
    lease = ledger.claim("w", A, len(A), 0, alone=True)
    assert lease is not None
    assert ledger.is_unsettled(lease)
    assert (ledger.count("w").free, ledger.claim("w", B, 1, 0), ledger.busy()) == (0, None, 1)
    settled = ledger.settle(lease, 2)
    assert (settled.number, ledger.count("w").free, ledger.busy()) == (2, 2, 1)
    assert not ledger.is_unsettled(settled)
    ledger.release(settled, Holding(A, occupied=len(A)))
    assert (claim(ledger, A).number, claim(ledger, A).number != 2) == (2, True)


def test_a_choice_as_expected_changes_nothing() -> None:
    """The slot that was claimed is the one that the engine chose: the lease stays as it is."""
    ledger = opened()
    lease = ledger.claim("w", A, len(A), 0, alone=True)
    assert lease is not None
    assert ledger.settle(lease, lease.number) is lease
    assert ledger.count("w").free == 2


def test_a_choice_that_never_came_ends_with_the_request() -> None:
    """Released without having been settled, the lease gives the whole engine back."""
    ledger = opened()
    lease = ledger.claim("w", A, len(A), 0, alone=True)
    assert lease is not None
    ledger.release(lease)
    assert (ledger.count("w").free, ledger.busy()) == (3, 0)
    assert ledger.settle(lease, 1) is lease


def test_an_engine_may_choose_only_while_all_its_slots_are_free() -> None:
    """A slot whose request has not reached the engine yet could be chosen from under it."""
    ledger = opened()
    lease = claim(ledger, A)
    assert ledger.claim("w", B, len(B), 0, alone=True) is None
    ledger.release(lease)
    assert ledger.claim("w", B, len(B), 0, alone=True) is not None


def test_one_slot_leaves_no_choice() -> None:
    """On an engine of one slot there is nothing to settle."""
    ledger = opened(1)
    lease = ledger.claim("w", A, len(A), 0, alone=True)
    assert lease is not None
    assert not ledger.is_unsettled(lease)
