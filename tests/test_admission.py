"""The queue: who is next, who is passed over, whose turn it is, and that no lease gets lost on its way to a waiter."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from splitproxy.books.admission import Admission, Turn
from splitproxy.books.ledger import NOTHING, Lease, Ledger
from splitproxy.errors import Fault, RequestError
from splitproxy.model import Role

CONTEXT = 1000


class Desk:
    """An admission over engines with one slot each, and the order in which waiters got theirs."""

    def __init__(self, *engines: tuple[str, Role], limit: int = 10) -> None:
        self.ledger = Ledger(0)
        for name, role in engines or (("w", Role.DECODE),):
            self.ledger.open(name, role, 1, CONTEXT)
        self.admission = Admission(self.ledger, limit)
        self.served: list[str] = []

    def claim(self, tokens: int = 10) -> Callable[[str], Lease | None]:
        return lambda engine: self.ledger.claim(engine, NOTHING, tokens, 0)

    async def acquire(
        self, engine: str | None = None, role: Role = Role.DECODE, within_s: float = 60, **options: Any
    ) -> Lease:
        deadline = asyncio.get_running_loop().time() + within_s
        return await self.admission.acquire(role, engine, self.claim(), deadline, **options)

    async def wait(
        self, label: str, engine: str | None = None, role: Role = Role.DECODE, **options: Any
    ) -> "asyncio.Task[Lease]":
        """A waiter that has joined the queue, or has its lease."""

        async def work() -> Lease:
            lease = await self.acquire(engine, role, **options)
            self.served.append(label)
            return lease

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        return task


async def test_a_free_slot_is_had_at_once() -> None:
    """Nobody waits for what is there, even where waiting is not allowed."""
    desk = Desk(limit=0)
    lease = await desk.acquire()
    assert (lease.engine, lease.slot) == ("w", 0)
    assert desk.admission.waiting == 0


async def test_the_queue_is_first_come_first_served() -> None:
    """Waiters get the slot in the order in which they came."""
    desk = Desk()
    lease = await desk.acquire()
    tasks = [await desk.wait(label) for label in "abc"]
    assert desk.admission.waiting == 3
    for task in tasks:
        desk.admission.release(lease)
        lease = await task
    assert desk.served == ["a", "b", "c"]
    assert desk.admission.waiting == 0


async def test_a_newcomer_does_not_overtake() -> None:
    """A request that would fit now waits behind one that came before and does not fit yet."""
    desk = Desk()
    desk.ledger.open("w", Role.DECODE, 3, CONTEXT)
    loop = asyncio.get_running_loop()
    running = await desk.admission.acquire(Role.DECODE, None, desk.claim(600), loop.time() + 60)
    large = asyncio.create_task(desk.admission.acquire(Role.DECODE, None, desk.claim(600), loop.time() + 60))
    await asyncio.sleep(0)
    small = await desk.wait("small")
    assert not small.done()
    desk.admission.release(running)
    assert (await large).cells == 600
    assert (await small).cells == 10


@pytest.mark.parametrize("role", Role)
async def test_a_blocked_engine_lets_others_pass(role: Role) -> None:
    """Who waits for a busy engine does not hold up those who want another."""
    desk = Desk(("a", role), ("b", role))
    busy = await desk.acquire("a", role)
    waiting = await desk.wait("for a", "a", role)
    passing = await desk.wait("for b", "b", role)
    assert (await passing).engine == "b"
    assert not waiting.done()
    assert (desk.admission.waiting_for("a"), desk.admission.waiting_for("b")) == (1, 0)
    desk.admission.release(busy)
    assert (await waiting).engine == "a"


async def test_any_engine_will_do_for_a_waiter_that_names_none() -> None:
    """A waiter for any engine takes the first that comes free."""
    desk = Desk(("a", Role.DECODE), ("b", Role.DECODE))
    leases = [await desk.acquire(), await desk.acquire()]
    assert [lease.engine for lease in leases] == ["a", "b"]
    waiter = await desk.wait("any")
    desk.admission.release(leases[1])
    assert (await waiter).engine == "b"


async def test_roles_do_not_block_each_other() -> None:
    """A queue for the prefill engine is none for the decode engine."""
    desk = Desk(("r", Role.PREFILL), ("w", Role.DECODE))
    await desk.acquire("r", Role.PREFILL)
    waiting = await desk.wait("reading", "r", Role.PREFILL)
    assert (await desk.acquire("w")).engine == "w"
    waiting.cancel()


async def test_a_full_queue_turns_away() -> None:
    """One more than may wait gets 429 and a time to come back; those before keep their places."""
    desk = Desk(limit=1)
    lease = await desk.acquire()
    first = await desk.wait("first")
    with pytest.raises(RequestError) as caught:
        await desk.acquire()
    assert (caught.value.fault, caught.value.retry_after_s) == (Fault.QUEUE_FULL, 5)
    assert (desk.admission.waiting, desk.admission.rejected) == (1, 1)
    desk.admission.release(lease)
    assert (await first).engine == "w"


async def test_a_deadline_ends_the_waiting() -> None:
    """Who waited too long is told so, and is no longer in the queue."""
    desk = Desk()
    lease = await desk.acquire()
    with pytest.raises(RequestError) as caught:
        await desk.acquire(within_s=0.001)
    assert (caught.value.fault, caught.value.retry_after_s) == (Fault.QUEUE_TIMEOUT, 5)
    assert (desk.admission.waiting, desk.admission.rejected) == (0, 1)
    desk.admission.release(lease)
    assert desk.ledger.busy() == 0


async def test_a_deadline_that_has_passed_takes_nothing_away() -> None:
    """A free slot is had even at the last moment, and a busy one is not waited for."""
    desk = Desk()
    lease = await desk.acquire(within_s=-1)
    with pytest.raises(RequestError):
        await desk.acquire(within_s=-1)
    desk.admission.release(lease)
    assert desk.ledger.busy() == 0


async def test_who_leaves_the_queue_is_forgotten() -> None:
    """A cancelled waiter gets no lease; the next one does."""
    desk = Desk()
    lease = await desk.acquire()
    gone, stays = await desk.wait("gone"), await desk.wait("stays")
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    desk.admission.release(lease)
    desk.admission.release(await stays)
    assert desk.served == ["stays"]
    assert (desk.ledger.busy(), desk.admission.waiting) == (0, 0)


@pytest.mark.parametrize("cancelled_first", [False, True], ids=["granted, then cancelled", "cancelled, then granted"])
async def test_a_lease_granted_to_a_leaver_goes_to_the_next(cancelled_first: bool) -> None:
    """Grant and cancellation in one moment, either way round, lose no slot."""
    desk = Desk()
    lease = await desk.acquire()
    gone, stays = await desk.wait("gone"), await desk.wait("stays")
    if cancelled_first:
        gone.cancel()
        desk.admission.release(lease)
    else:
        desk.admission.release(lease)
        gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    desk.admission.release(await stays)
    assert desk.served == ["stays"]
    assert (desk.ledger.busy(), desk.admission.waiting) == (0, 0)


async def test_a_lease_granted_at_the_deadline_is_not_lost() -> None:
    """Grant and deadline in one moment: the waiter has the lease, or it is free again."""
    desk = Desk()
    lease = await desk.acquire()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 0.01
    waiter = asyncio.create_task(desk.admission.acquire(Role.DECODE, None, desk.claim(), deadline))
    await asyncio.sleep(0)
    # The timers of one moment run in the order in which they were made: the waiter's comes first.
    loop.call_at(deadline, desk.admission.release, lease)
    done = await asyncio.gather(waiter, return_exceptions=True)
    assert isinstance(done[0], Lease | RequestError)
    assert desk.ledger.busy() == isinstance(done[0], Lease)
    assert desk.admission.waiting == 0


async def test_no_engine_left_ends_the_waiting() -> None:
    """When the last engine of the role goes, its waiters are told instead of waiting for ever."""
    desk = Desk()
    await desk.acquire()
    waiter = await desk.wait("waiter")
    desk.ledger.close("w")
    desk.admission.pump()
    with pytest.raises(RequestError) as caught:
        await waiter
    assert caught.value.fault is Fault.NO_DECODE_ENGINE
    with pytest.raises(RequestError, match="no decode engine is ready"):
        await desk.acquire()
    assert desk.admission.waiting == 0


async def test_another_decode_engine_stands_in() -> None:
    """Who waits for a decode engine that goes gets another one."""
    desk = Desk(("a", Role.DECODE), ("b", Role.DECODE))
    await desk.acquire("a")
    waiter = await desk.wait("waiter", "a")
    desk.ledger.close("a")
    desk.admission.pump()
    assert (await waiter).engine == "b"


async def test_no_other_prefill_engine_stands_in() -> None:
    """A handover is with one prefill engine; when that one goes, it is over."""
    desk = Desk(("a", Role.PREFILL), ("b", Role.PREFILL))
    await desk.acquire("a", Role.PREFILL)
    waiter = await desk.wait("waiter", "a", Role.PREFILL)
    desk.ledger.close("a")
    desk.admission.pump()
    with pytest.raises(RequestError):
        await waiter
    assert desk.ledger.busy() == 0


async def test_an_engine_that_comes_up_serves_those_who_wait() -> None:
    """A restart makes room: the lease of before does not count any more."""
    desk = Desk()
    old = await desk.acquire()
    waiter = await desk.wait("waiter")
    desk.ledger.open("w", Role.DECODE, 1, CONTEXT)
    desk.admission.pump()
    new = await waiter
    desk.admission.release(old)
    assert desk.ledger.busy() == 1
    desk.admission.release(new)
    assert desk.ledger.busy() == 0


async def test_every_waiter_leaving_at_once_leaves_nothing() -> None:
    """However many leave in the moment of a release, the books end at zero."""
    desk = Desk(("a", Role.DECODE), ("b", Role.DECODE))
    leases = [await desk.acquire(), await desk.acquire()]
    tasks = [await desk.wait(str(number)) for number in range(6)]
    for lease in leases:
        desk.admission.release(lease)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert (desk.ledger.busy(), desk.admission.waiting) == (0, 0)


# --- whose turn it is


async def in_order(desk: Desk, lease: Lease, tasks: "list[asyncio.Task[Lease]]") -> str:
    """Let one after the other in; the labels as they were served."""
    for _ in tasks:
        desk.admission.release(lease)
        served = len(desk.served)
        done, _pending = await asyncio.wait(
            [task for task in tasks if not task.done() or len(desk.served) == served],
            return_when=asyncio.FIRST_COMPLETED,
        )
        lease = next(task.result() for task in done)
        tasks = [task for task in tasks if task not in done]
    desk.admission.release(lease)
    return " ".join(desk.served)


async def queued(desk: Desk, *labels: str) -> "tuple[list[asyncio.Task[Lease]], dict[str, Turn]]":
    """A waiter for each label, whose first letter is its client."""
    turns = {label: desk.admission.turn(label[0]) for label in labels}
    return [await desk.wait(label, turn=turn) for label, turn in turns.items()], turns


@pytest.mark.parametrize(
    ("came", "served"),
    [
        ("a1 a2 a3 b1", "a1 b1 a2 a3"),
        ("a1 a2 a3 b1 b2 c1", "a1 b1 c1 a2 b2 a3"),
        ("a1 b1 a2 b2", "a1 b1 a2 b2"),
        ("a1 a2 a3", "a1 a2 a3"),
    ],
)
async def test_clients_take_turns(came: str, served: str) -> None:
    """A client with many requests waits as long as one with few; one client's own are served as they came."""
    desk = Desk()
    lease = await desk.acquire()
    tasks, _ = await queued(desk, *came.split())
    assert [waiting.position for waiting in desk.admission.line()] == list(range(1, len(tasks) + 1))
    assert await in_order(desk, lease, tasks) == served


async def test_a_place_that_was_not_used_goes_to_the_clients_next() -> None:
    """Leaving the queue costs a client's later requests nothing."""
    desk = Desk()
    lease = await desk.acquire()
    (gone, *tasks), turns = await queued(desk, "a1", "b1", "a2", "b2", "a3")
    gone.cancel()
    await asyncio.wait({gone})
    desk.admission.end(turns["a1"])
    desk.admission.end(turns["a1"])
    assert await in_order(desk, lease, tasks) == "b1 a2 b2 a3"


async def test_having_been_served_is_no_reason_to_wait_for_ever() -> None:
    """Turns are about those who wait now: a client that had the engine to itself is behind by one round, not by all."""
    desk = Desk()
    for _ in range(5):
        with desk.admission.turn("a") as turn:
            desk.admission.release(await desk.acquire(turn=turn))
    lease = await desk.acquire()
    tasks, _ = await queued(desk, "b1", "b2", "b3", "b4", "a1")
    assert await in_order(desk, lease, tasks) == "b1 b2 a1 b3 b4"


async def test_a_request_keeps_its_place_for_each_step() -> None:
    """Who came first and waits for its second lease is before those who came later and wait for their first."""
    desk = Desk(("r", Role.PREFILL), ("w", Role.DECODE))
    busy = await desk.acquire()
    early = desk.admission.turn("a")
    read = await desk.acquire("r", Role.PREFILL, turn=early)
    tasks, _ = await queued(desk, "b1")
    tasks.append(await desk.wait("a1", turn=early))
    desk.admission.release(read)
    assert await in_order(desk, busy, tasks) == "a1 b1"


async def test_who_has_begun_is_not_turned_away() -> None:
    """Only requests that have not begun fill the queue; one that waits for its next step is never refused."""
    desk = Desk(("r", Role.PREFILL), ("w", Role.DECODE), limit=1)
    busy = await desk.acquire()
    begun = desk.admission.turn("a")
    desk.admission.release(await desk.acquire("r", Role.PREFILL, turn=begun))
    tasks, _ = await queued(desk, "b1")
    tasks.append(await desk.wait("a1", turn=begun))
    with pytest.raises(RequestError) as caught:
        await desk.acquire(within_s=1)
    assert caught.value.fault is Fault.QUEUE_FULL
    assert (desk.admission.rejected, desk.admission.waiting) == (1, 2)
    assert await in_order(desk, busy, tasks) == "a1 b1"


# --- which engines will do


async def test_a_waiter_that_is_not_bound_goes_where_there_is_room() -> None:
    """The engine it names is tried first, another one rather than waiting."""
    desk = Desk(("a", Role.DECODE), ("b", Role.DECODE))
    assert (await desk.acquire("b", bound=False)).engine == "b"
    assert (await desk.acquire("b", bound=False)).engine == "a"
    waiter = await desk.wait("waiter", "b", bound=False)
    assert not waiter.done()
    waiter.cancel()


async def test_an_engine_to_avoid_is_never_had() -> None:
    """An engine that failed a request is not tried again for it, and when no other is left the waiting ends."""
    desk = Desk(("a", Role.DECODE), ("b", Role.DECODE))
    assert (await desk.acquire("a", avoid=lambda: {"a"})).engine == "b"
    with pytest.raises(RequestError) as caught:
        await desk.acquire(avoid=lambda: {"a", "b"})
    assert caught.value.fault is Fault.NO_DECODE_ENGINE


async def test_what_a_claim_raises_ends_the_waiting() -> None:
    """A request that learns while it waits that it has to go another way is told so; the next one is served."""
    desk = Desk()
    lease = await desk.acquire()
    stale = False

    def claim(engine: str) -> Lease | None:
        if stale:
            raise RequestError(Fault.OUT_OF_ROOM, "another way")
        return desk.ledger.claim(engine, NOTHING, 10, 0)

    deadline = asyncio.get_running_loop().time() + 60
    waiter = asyncio.create_task(desk.admission.acquire(Role.DECODE, None, claim, deadline))
    await asyncio.sleep(0)
    after = await desk.wait("after")
    stale = True
    desk.admission.release(lease)
    with pytest.raises(RequestError, match="another way"):
        await waiter
    assert (await after).engine == "w"
    assert desk.admission.waiting == 0
