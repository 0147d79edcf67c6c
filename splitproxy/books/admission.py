"""The one queue in front of the engines: who gets the next lease, and how long anybody waits for it.

Clients take turns; within one client it is first come, first served. A waiter is passed over only where the engines
that it waits for cannot take it yet. No lock is held and no engine is called here.
"""

import asyncio
import bisect
import itertools
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from splitproxy.books.ledger import Holding, Lease, Ledger
from splitproxy.errors import Fault, RequestError, SplitproxyError
from splitproxy.model import Role

RETRY_AFTER_S = 5
LAST_ROUND = sys.maxsize

Claim = Callable[[str], Lease | None]
"""Engine name in, lease out, or None while there is none. What it raises ends the waiting."""

Avoid = Callable[[], Collection[str]]
"""The engines that will not do at the moment."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request's place in the order of all, to be ended with it: `round` is when its client is due, `arrival` breaks
    ties. It keeps its place for every lease that it needs, and a place that was not used goes to the client's next."""

    admission: "Admission"
    client: str
    arrival: int
    round: int
    used: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.round, self.arrival

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admission.end(self)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits, for the status page."""

    position: int
    role: Role
    engine: str | None
    waiting_s: float


@dataclass(slots=True, eq=False)
class _Waiter:
    turn: Turn
    role: Role
    engine: str | None  # None: any engine of the role
    bound: bool
    avoid: Avoid
    claim: Claim
    since: float = field(default_factory=time.monotonic)
    lease: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Hands out leases, fairly between clients. `limit` bounds the requests that wait for their first one."""

    def __init__(self, ledger: Ledger, limit: int) -> None:
        self._ledger = ledger
        self._limit = limit
        self._waiters: list[_Waiter] = []
        self._arrivals = itertools.count()
        self._round = 0  # of the request that was let in last
        self._due: dict[str, int] = {}  # the next round of clients that are ahead of it
        self._unused: dict[str, list[Turn]] = {}  # by client, in order
        self.rejected = 0  # requests turned away, ever

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def waiting_for(self, engine: str) -> int:
        """Requests that wait for this very engine."""
        return sum(waiter.engine == engine for waiter in self._waiters)

    def line(self) -> list[Waiting]:
        """Everybody who waits, first in line first."""
        now = time.monotonic()
        return [
            Waiting(place, waiter.role, waiter.engine, now - waiter.since)
            for place, waiter in enumerate(self._waiters, start=1)
        ]

    def turn(self, client: str) -> Turn:
        """The place in line of a request that comes now. A client with many requests gets every client's share."""
        due = max(self._round, self._due.get(client, 0))
        self._due[client] = due + 1
        turn = Turn(self, client, next(self._arrivals), due)
        self._unused.setdefault(client, []).append(turn)
        return turn

    def after_all(self) -> Turn:
        """A place behind everybody who waits or will come, for work that no client waits for."""
        return Turn(self, "", next(self._arrivals), LAST_ROUND, used=True)

    def end(self, turn: Turn) -> None:
        """A request has ended. If it never got a lease, its client's later requests move up."""
        if turn.used or turn not in (unused := self._unused.get(turn.client, [])):
            return
        later = unused[unused.index(turn) + 1 :]
        rounds = [turn.round, *(other.round for other in later)]
        for other, place in zip(later, rounds, strict=False):
            other.round = place
        self._due[turn.client] = rounds[-1]
        self._forget(turn)
        self._waiters.sort(key=lambda waiter: waiter.turn.order)

    def _forget(self, turn: Turn) -> None:
        """The turn is used, or over."""
        unused = self._unused[turn.client]
        unused.remove(turn)
        if not unused:
            del self._unused[turn.client]

    async def acquire(
        self,
        role: Role,
        engine: str | None,
        claim: Claim,
        deadline: float,
        *,
        turn: Turn | None = None,
        bound: bool = True,
        avoid: Avoid = tuple,
    ) -> Lease:
        """Wait for a lease until the loop's clock reads `deadline`.

        `engine` is tried first. With `bound` no other is tried while it is up; should it be gone, any other of its role
        will do for a decode engine. Those that `avoid` names at the time will not. Raises RequestError when the queue
        is full, the deadline passes, or no engine is left.
        """
        if turn is None:
            with self.turn("") as own:
                return await self.acquire(role, engine, claim, deadline, turn=own, bound=bound, avoid=avoid)
        waiter = _Waiter(turn, role, engine, bound, avoid, claim)
        bisect.insort(self._waiters, waiter, key=lambda w: w.turn.order)
        self.pump()
        self._bound_the_queue()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter.lease
        except TimeoutError:
            self._withdraw(waiter)
            raise self._turned_away(Fault.QUEUE_TIMEOUT, "no engine slot became free in time") from None
        except BaseException:
            self._withdraw(waiter)
            raise

    def _bound_the_queue(self) -> None:
        """Turn away whoever is last in line when too many wait. Who has begun, and waits for the next step, stays."""
        waiting = [waiter for waiter in self._waiters if not waiter.turn.used and not waiter.lease.done()]
        if len(waiting) > self._limit:
            last = waiting[-1]
            self._waiters.remove(last)
            last.lease.set_exception(self._turned_away(Fault.QUEUE_FULL, "too many requests are waiting"))

    def _turned_away(self, fault: Fault, message: str) -> RequestError:
        self.rejected += 1
        return RequestError(fault, message, retry_after_s=RETRY_AFTER_S)

    def _withdraw(self, waiter: _Waiter) -> None:
        """The waiter is gone. A lease that came in the same moment goes to the next."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif not waiter.lease.cancelled() and waiter.lease.done() and waiter.lease.exception() is None:
            self.release(waiter.lease.result())
        self.pump()

    def erased(self, lease: Lease, emptied: Collection[int]) -> None:
        """The idle slots in a lease's way can be had again; those in `emptied` hold nothing any more."""
        self._ledger.erased(lease, emptied)
        self.pump()

    def settle(self, lease: Lease, chosen: int) -> Lease:
        """The engine has chosen a slot for a request that had it alone: the other slots can be had again."""
        settled = self._ledger.settle(lease, chosen)
        self.pump()
        return settled

    def release(self, lease: Lease, holding: Holding | None = None) -> None:
        """End a lease and let the next one in."""
        self._ledger.release(lease, holding)
        self.pump()

    def pump(self) -> None:
        """Give every waiter its turn that can have it now. To be called whenever the books have changed."""
        blocked = {name for role in Role for name in self._ledger.ready(role) if not self._ledger.has_free(name)}
        for waiter in list(self._waiters):
            if waiter.lease.done():
                continue  # cancelled a moment ago; it withdraws by itself
            engines = self._engines(waiter)
            if not engines:
                self._waiters.remove(waiter)
                message = f"no {waiter.role} engine is ready"
                waiter.lease.set_exception(RequestError(Fault.NO_DECODE_ENGINE, message, retry_after_s=RETRY_AFTER_S))
                continue
            open_ones = (engine for engine in engines if engine not in blocked)
            try:
                lease = next((lease for engine in open_ones if (lease := waiter.claim(engine)) is not None), None)
            except SplitproxyError as error:
                self._waiters.remove(waiter)
                waiter.lease.set_exception(error)
                continue
            if lease is None:
                blocked.update(engines)
            else:
                self._let_in(waiter, lease)

    def _let_in(self, waiter: _Waiter, lease: Lease) -> None:
        self._waiters.remove(waiter)
        if not waiter.turn.used:
            waiter.turn.used = True
            self._round = max(self._round, waiter.turn.round)
            self._forget(waiter.turn)
        if not self._waiters:
            self._due = {client: due for client, due in self._due.items() if due > self._round}
        waiter.lease.set_result(lease)

    def _engines(self, waiter: _Waiter) -> list[str]:
        avoid = waiter.avoid()
        ready = [name for name in self._ledger.ready(waiter.role) if name not in avoid]
        if waiter.engine in ready:
            others = [] if waiter.bound else [name for name in ready if name != waiter.engine]
            return [waiter.engine, *others]
        return [] if waiter.role is Role.PREFILL else ready
