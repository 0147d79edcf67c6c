"""The one queue in front of the engines: who gets the next lease, and how long anybody waits for it.

It wakes waiters in the order in which they came, passing over one only where the engine that it waits for cannot take
it yet. No lock is held and no engine is called here.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from splitproxy.errors import Fault, RequestError
from splitproxy.ledger import Holding, Lease, Ledger
from splitproxy.model import Role

RETRY_AFTER_S = 5


@dataclass(slots=True, eq=False)
class _Waiter:
    role: Role
    engine: str | None  # None: any engine of the role
    claim: Callable[[str], Lease | None]
    turn: asyncio.Future[Lease] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Admission:
    """Hands out leases, first come first served.

    `limit` bounds the requests that wait. A claim is a plain function: engine name in, lease or None out.
    """

    def __init__(self, ledger: Ledger, limit: int) -> None:
        self._ledger = ledger
        self._limit = limit
        self._waiters: list[_Waiter] = []
        self.rejected = 0  # requests turned away, ever

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def waiting_for(self, engine: str) -> int:
        """Requests that wait for this very engine."""
        return sum(waiter.engine == engine for waiter in self._waiters)

    async def acquire(
        self, role: Role, engine: str | None, claim: Callable[[str], Lease | None], deadline: float
    ) -> Lease:
        """Wait for a lease until the loop's clock reads `deadline`.

        With an engine named, that one is preferred; should it be gone, any other of its role will do for a decode
        engine. Raises RequestError when the queue is full, the deadline passes, or no engine is left.
        """
        waiter = _Waiter(role, engine, claim)
        self._waiters.append(waiter)
        self.pump()
        if not waiter.turn.done() and len(self._waiters) > self._limit:
            self._withdraw(waiter)
            raise self._turned_away(Fault.QUEUE_FULL, "too many requests are waiting")
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter.turn
        except TimeoutError:
            self._withdraw(waiter)
            raise self._turned_away(Fault.QUEUE_TIMEOUT, "no engine slot became free in time") from None
        except BaseException:
            self._withdraw(waiter)
            raise

    def _turned_away(self, fault: Fault, message: str) -> RequestError:
        self.rejected += 1
        return RequestError(fault, message, retry_after_s=RETRY_AFTER_S)

    def _withdraw(self, waiter: _Waiter) -> None:
        """The waiter is gone. A lease that came in the same moment goes to the next."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif not waiter.turn.cancelled() and waiter.turn.done() and waiter.turn.exception() is None:
            self.release(waiter.turn.result())
        self.pump()

    def release(self, lease: Lease, holding: Holding | None = None) -> None:
        """End a lease and let the next one in."""
        self._ledger.release(lease, holding)
        self.pump()

    def pump(self) -> None:
        """Give every waiter its turn that can have it now. To be called whenever the books have changed."""
        blocked: set[str] = set()
        for waiter in list(self._waiters):
            if waiter.turn.done():
                continue  # cancelled a moment ago; it withdraws by itself
            engines = self._engines(waiter)
            if not engines:
                self._waiters.remove(waiter)
                message = f"no {waiter.role} engine is ready"
                waiter.turn.set_exception(RequestError(Fault.NO_DECODE_ENGINE, message, retry_after_s=RETRY_AFTER_S))
                continue
            open_ones = (engine for engine in engines if engine not in blocked)
            lease = next((lease for engine in open_ones if (lease := waiter.claim(engine)) is not None), None)
            if lease is None:
                blocked.update(engines)
            else:
                self._waiters.remove(waiter)
                waiter.turn.set_result(lease)

    def _engines(self, waiter: _Waiter) -> list[str]:
        ready = self._ledger.ready(waiter.role)
        if waiter.engine in ready:
            return [waiter.engine]
        return [] if waiter.role is Role.PREFILL else ready
