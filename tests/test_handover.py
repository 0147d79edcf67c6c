"""A prompt's way between two engines: every move of the table, every failure, every place to be cancelled."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from splitproxy.engines.adapter import Deadlines, Engine, Progress
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Api, Ask, Failure, Prompt, Redeemed, Ticket, Tokens
from splitproxy.serve.handover import ENDS, MOVES, Event, Handover, IllegalMove, Stage, move

DEADLINES = Deadlines(1, 1, 1)
PROMPT = Prompt(Tokens(range(100)), Ask(Api.CHAT, "/v1/chat/completions", b"{}"))
TICKET = Ticket(
    "ticket-1", tokens=99, session_bytes=4096, cached_tokens=9, prefill_ms=70.0, save_ms=5.0, proof_tokens=83
)


class Scripted:
    """An engine that records its calls, and does at each what the script says: fail, wait, or go on."""

    name = "scripted"

    def __init__(self, **script: Callable[[], Awaitable[None]]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.restored = 99
        self._script = script

    async def _call(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        await asyncio.sleep(0)
        if name in self._script:
            await self._script[name]()

    async def prefill(self, prompt: Prompt, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        await self._call("prefill", prompt, slot)
        return TICKET

    async def redeem(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> Redeemed:
        await self._call("redeem", ticket.handle, slot)
        return Redeemed(self.restored, 3.0)

    async def discard(self, ticket: Ticket) -> None:
        await self._call("discard", ticket.handle)

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


def failing(step: Step, cause: Cause = Cause.REFUSED) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise EngineError(step, cause, "scripted")

    return fail


def handover_of(source: Scripted, prompt: Prompt = PROMPT) -> Handover:
    return Handover(prompt, cast("Engine", source), DEADLINES)


def no_progress(step: Step, done: int, total: int) -> None:
    """Nobody looks."""


async def take(handover: Handover) -> bool:
    return await handover.take(4, no_progress)


async def redeem(handover: Handover, target: Scripted) -> bool:
    return await handover.redeem(cast("Engine", target), 2)


# --- the table

ALLOWED = {
    Stage.READY: {Event.READ: Stage.READING, Event.FAIL: Stage.ABANDONED, Event.LEAVE: Stage.CANCELLED},
    Stage.READING: {Event.DONE: Stage.TICKETED, Event.FAIL: Stage.ABANDONED, Event.LEAVE: Stage.CANCELLED},
    Stage.TICKETED: {Event.RESTORE: Stage.RESTORING, Event.FAIL: Stage.ABANDONED, Event.LEAVE: Stage.CANCELLED},
    Stage.RESTORING: {Event.DONE: Stage.RESTORED, Event.FAIL: Stage.ABANDONED, Event.LEAVE: Stage.CANCELLED},
    Stage.RESTORED: {Event.DONE: Stage.ANSWERING, Event.FAIL: Stage.ABANDONED, Event.LEAVE: Stage.CANCELLED},
    Stage.ANSWERING: {
        Event.REUSED: Stage.PROVEN,
        Event.REREAD: Stage.INEFFECTIVE,
        Event.FAIL: Stage.BROKEN,
        Event.LEAVE: Stage.CANCELLED,
    },
}


@pytest.mark.parametrize(("stage", "event"), list(itertools.product(Stage, Event)))
def test_every_pair_of_stage_and_event(stage: Stage, event: Event) -> None:
    """Each event leads where it should or is refused; an end takes no event at all."""
    expected = ALLOWED.get(stage, {}).get(event)
    if expected is None:
        with pytest.raises(IllegalMove, match=f"{stage} cannot take {event}"):
            move(stage, event)
    else:
        assert move(stage, event) is expected


def test_the_ends_are_the_stages_without_a_way_out() -> None:
    """What counts as an end is what the table ends in."""
    assert {stage for stage, _ in MOVES} | ENDS == set(Stage)
    assert not {stage for stage, _ in MOVES} & ENDS


def test_every_stage_can_be_reached_and_left_to_an_end() -> None:
    """No stage is a dead end or out of reach."""
    reached, before = {Stage.READY}, set[Stage]()
    while reached != before:
        before = set(reached)
        reached |= {after for (stage, _), after in MOVES.items() if stage in reached}
    assert reached == set(Stage)
    assert all((stage, Event.LEAVE) in MOVES for stage in set(Stage) - ENDS)


@pytest.mark.parametrize("stage", Stage)
async def test_an_illegal_move_changes_nothing(stage: Stage) -> None:
    """A call that a stage does not allow raises before any engine is asked, and leaves all as it was."""
    source = Scripted()

    def at() -> Handover:
        handover = handover_of(source)
        handover.stage = stage
        return handover

    async def refused(act: Callable[[Handover], Awaitable[object]]) -> None:
        handover = at()
        with pytest.raises(IllegalMove):
            await act(handover)
        assert (handover.stage, handover.failure, handover.ticket) == (stage, None, None)

    async def fail(handover: Handover) -> None:
        handover.fail(EngineError(Step.SAVE, Cause.DIED, "late"))

    async def prove(handover: Handover) -> None:
        handover.prove(99)

    if stage is not Stage.READY:
        await refused(take)
    if stage is not Stage.TICKETED:
        await refused(lambda handover: redeem(handover, source))
    if stage is not Stage.ANSWERING:
        await refused(prove)
    if stage in ENDS:
        await refused(fail)
    handover = at()
    handover.answering()
    assert handover.stage is (Stage.ANSWERING if stage is Stage.RESTORED else stage)
    assert source.calls == []


# --- the way


@pytest.mark.parametrize(("cached", "proof"), [(99, True), (83, True), (82, False), (0, False)])
async def test_the_ticket_says_what_is_proof(cached: int, proof: bool) -> None:
    """A decode engine that reuses as many tokens as the ticket asks for has used the session."""
    async with handover_of(Scripted()) as handover:
        assert await take(handover)
        assert await redeem(handover, Scripted())
        handover.answering()
        assert handover.prove(cached) is proof


async def test_the_whole_way() -> None:
    """All but the last token are read, the ticket is redeemed and discarded, and the proof ends it."""
    source, target = Scripted(), Scripted()
    async with handover_of(source) as handover:
        assert await take(handover)
        assert (handover.stage, handover.figures()) == (Stage.TICKETED, None)
        assert await redeem(handover, target)
        assert source.calls[-1] == ("discard", "ticket-1"), "the session is removed before the answer begins"
        handover.answering()
        handover.answering()
        assert handover.prove(99)
    assert handover.stage is Stage.PROVEN
    assert source.calls[:2] == [("prefill", PROMPT, 4), ("discard", "ticket-1")]
    assert target.calls == [("redeem", "ticket-1", 2)]
    cost = handover.figures()
    assert cost is not None
    assert (cost.prefill_ms, cost.save_ms, cost.restore_ms, cost.session_bytes) == (70.0, 5.0, 3.0, 4096)
    assert (cost.prefill_read_tokens, cost.prefill_cached_tokens) == (90, 9)


async def test_tokens_that_are_read_again_make_it_ineffective() -> None:
    """A restore that the engine did not use is told from one that it did."""
    async with handover_of(Scripted()) as handover:
        await take(handover)
        await redeem(handover, Scripted())
        handover.answering()
        assert not handover.prove(0)
    assert handover.stage is Stage.INEFFECTIVE


@pytest.mark.parametrize("step", [Step.PREFILL, Step.SAVE, Step.CHECK])
@pytest.mark.parametrize("cause", Cause)
async def test_a_failed_reading_is_abandoned(step: Step, cause: Cause) -> None:
    """Where reading, saving or checking fails, the handover says which and how, and has nothing to discard."""
    source = Scripted(prefill=failing(step, cause))
    async with handover_of(source) as handover:
        assert not await take(handover)
        assert (handover.stage, handover.failure) == (Stage.ABANDONED, Failure(step.value, cause.value))
    assert (handover.stage, handover.figures()) == (Stage.ABANDONED, None)
    assert source.count("discard") == 0


@pytest.mark.parametrize("cause", Cause)
async def test_a_failed_restore_is_abandoned(cause: Cause) -> None:
    """Where restoring fails, the ticket is discarded at once, and the decode engine has to read."""
    source, target = Scripted(), Scripted(redeem=failing(Step.RESTORE, cause))
    async with handover_of(source) as handover:
        await take(handover)
        assert not await redeem(handover, target)
        assert (handover.stage, handover.failure) == (Stage.ABANDONED, Failure("restore", cause.value))
        assert source.count("discard") == 1
    assert handover.figures() is None


@pytest.mark.parametrize("restored", [0, 98, 100])
async def test_another_number_of_tokens_is_no_restore(restored: int) -> None:
    """A restore that reports success with other tokens than the ticket's has failed."""
    source, target = Scripted(), Scripted()
    target.restored = restored
    async with handover_of(source) as handover:
        await take(handover)
        assert not await redeem(handover, target)
    assert (handover.stage, handover.failure) == (Stage.ABANDONED, Failure("restore", "corrupt"))
    assert handover.figures() is None
    assert source.count("discard") >= 1


async def test_an_error_in_the_answer_breaks_it() -> None:
    """After the first byte a failure is another end than before it."""
    source = Scripted()
    handover = handover_of(source)

    async def answer() -> None:
        async with handover:
            await take(handover)
            await redeem(handover, Scripted())
            handover.answering()
            raise EngineError(Step.DECODE, Cause.DIED, "gone")

    with pytest.raises(EngineError):
        await answer()
    assert handover.stage is Stage.BROKEN
    assert source.count("discard") >= 1


async def test_an_answer_that_was_never_proven_ends_all_the_same() -> None:
    """Without figures there is no proof; the handover still ends, and its ticket is discarded."""
    source = Scripted()
    async with handover_of(source) as handover:
        await take(handover)
    assert handover.stage is Stage.ABANDONED
    assert source.count("discard") == 1


# --- cancelled


async def run(source: Scripted, target: Scripted, seen: list[Handover]) -> None:
    async with handover_of(source) as handover:
        seen.append(handover)
        await take(handover)
        await redeem(handover, target)
        handover.answering()
        await asyncio.sleep(0)
        handover.prove(99)


async def test_cancelled_at_each_await_the_ticket_is_discarded() -> None:
    """Wherever the client leaves, the handover ends and no ticket is left."""
    ends = set()
    for turns in range(1, 30):
        source, target, seen = Scripted(), Scripted(), list[Handover]()
        task = asyncio.create_task(run(source, target, seen))
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        handover = seen[0]
        assert handover.stage in ENDS
        assert (handover.ticket is None) == (source.count("discard") == 0)
        ends.add(handover.stage)
    else:
        pytest.fail("the handover never ended")
    assert Stage.CANCELLED in ends


@pytest.mark.parametrize("where", ["prefill", "redeem"])
async def test_cancelled_in_a_long_step(where: str) -> None:
    """A client that leaves in the middle of a step ends it: cancelled, with no failure noted and no ticket left."""
    reached = asyncio.Event()

    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    source = Scripted(**({"prefill": hang} if where == "prefill" else {}))
    target = Scripted(**({"redeem": hang} if where == "redeem" else {}))
    seen: list[Handover] = []
    task = asyncio.create_task(run(source, target, seen))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (seen[0].stage, seen[0].failure) == (Stage.CANCELLED, None)
    assert (source.count("discard") > 0) == (where == "redeem")


async def test_a_second_cancellation_does_not_keep_the_ticket() -> None:
    """Discarding runs to its end however often the request is cancelled."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    removed: list[str] = []

    async def slowly() -> None:
        reached.set()
        await go_on.wait()
        removed.append("ticket-1")

    source = Scripted(discard=slowly)
    task = asyncio.create_task(run(source, Scripted(), []))
    await reached.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert removed
