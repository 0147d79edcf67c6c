"""The slots of the fake engine: who may use one, who waits for it, what it holds, and which rules were broken.

It knows nothing of HTTP. Everything runs in one event loop, and nothing here waits except for a slot or for time.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tests.fake_model import Held
from tests.fake_wire import RefusalError


@dataclass
class Call:
    """One call as it came, and what became of it. Times are the event loop's clock."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    raw: bytes
    started: float
    body: Any = None
    stage: str = ""
    slot: int | None = None
    status: int | None = None
    finished: float | None = None
    cancelled: bool = False  # the client left
    read: int = 0  # prompt tokens that were really read for it
    cached: int = 0
    answered: int = 0  # answer tokens


@dataclass
class Slot:
    id: int
    held: Held = field(default_factory=Held)
    call: Call | None = None  # what occupies it
    fault: RefusalError | None = None  # what ends the request in it
    forgot: bool = False  # it holds tokens without their memory
    task: int | None = None
    used: int = 0  # the larger, the later
    lag_s: float = 0.0  # how long the step that was cut off would still have run

    def clear(self) -> int:
        """Forget everything; the number of tokens that were held."""
        count = len(self.held.ids)
        self.held, self.forgot = Held(), False
        return count


@dataclass
class _Waiter:
    pin: int | None
    call: Call
    turn: "asyncio.Future[Slot]"


def _similar(slot: Slot, prompt: Sequence[int]) -> int:
    """How many leading tokens of a prompt a slot holds; 0 where they are no more than a tenth of it."""
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(slot.held.ids, prompt, strict=False)))
    return shared if 10 * shared > len(prompt) else 0


class Slots:
    """All slots of one engine, the line of those who wait, and the memory that the slots share."""

    def __init__(self, count: int, context: int, unified: bool, violations: list[str]) -> None:
        self.all = [Slot(n) for n in range(count)]
        self.deferred: deque[_Waiter] = deque()
        self.closed = False
        self.purged = 0  # idle slots that were emptied because the pool was full
        self._pool = context if unified else None
        self._violations = violations
        self._turns = 0
        self._thread = asyncio.Lock()  # the one thread that computes
        self._reading: dict[int, asyncio.Event] = {}  # slots whose prompt is not read yet, and what tells its end
        self._leaving: dict[int, asyncio.TimerHandle] = {}

    def __getitem__(self, number: int) -> Slot:
        """A slot by any number: like the real engine, which never says that there is no such slot."""
        return self.all[number % len(self.all)]

    def busy(self) -> list[int]:
        return [slot.id for slot in self.all if slot.call is not None]

    def close(self) -> None:
        """The engine has ended: nobody gets a slot any more."""
        self.closed = True
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()

    @property
    def thread(self) -> asyncio.Lock:
        """Held by whatever keeps the whole engine from computing."""
        return self._thread

    async def take(self, pin: int | None, call: Call, prompt: Sequence[int] = ()) -> tuple[Slot, bool]:
        """A slot, now or when it is this call's turn, and whether the call had to wait for it. Without a pin it is an
        idle one that holds more than a tenth of the prompt, else the one that was used longest ago."""
        wanted = self.all if pin is None else [self[pin]]
        if pin is not None and wanted[0].call is not None:
            self._violations.append(f"{call.method} {call.path} was sent to slot {wanted[0].id} while it was busy")
        idle = [slot for slot in wanted if slot.call is None]
        if idle:
            slot = max(idle, key=lambda slot: (_similar(slot, prompt), -slot.used))
            self._occupy(slot, call)
            return slot, False
        waiter = _Waiter(None if pin is None else wanted[0].id, call, asyncio.get_running_loop().create_future())
        self.deferred.append(waiter)
        try:
            return await waiter.turn, True
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _occupy(self, slot: Slot, call: Call) -> None:
        self._turns += 1
        slot.call, slot.used, slot.lag_s = call, self._turns, 0.0
        call.slot = slot.id

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self.deferred:
            self.deferred.remove(waiter)
        elif waiter.turn.done() and not waiter.turn.cancelled():
            self.free(waiter.turn.result())

    def free(self, slot: Slot) -> None:
        """Give a slot to the call that waits for it: one pinned to it first, else the first that takes any."""
        self._leaving.pop(slot.id, None)
        slot.call, slot.fault = None, None
        pinned = (waiter for waiter in self.deferred if waiter.pin == slot.id)
        loose = (waiter for waiter in self.deferred if waiter.pin is None)
        waiter = next(pinned, None) or next(loose, None)
        if waiter is not None and not self.closed:
            self.deferred.remove(waiter)
            self._occupy(slot, waiter.call)
            waiter.turn.set_result(slot)

    def free_quietly(self, slot: Slot) -> None:
        """Free a slot after an action that had to wait for it.

        The real engine wakes one waiting task when a request ends, and none when a slot action does: a request that
        waits behind a deferred action stays where it is.
        """
        slot.call = None

    def free_after(self, slot: Slot, seconds: float) -> None:
        """Free a slot whose client has left, when the engine would notice it."""
        if seconds <= 0 or self.closed:
            self.free(slot)
        else:
            self._leaving[slot.id] = asyncio.get_running_loop().call_later(seconds, self.free, slot)

    # ---- memory ----

    def fits(self, count: int) -> bool:
        """Whether the shared pool has room for so many tokens more, without anybody's loss."""
        return self._pool is None or self._used() + count <= self._pool

    def make_room(self, count: int) -> None:
        """Room in the shared pool, as the real engine makes it: idle slots are purged, the least recently used first;
        if that is not enough, every running request fails."""
        idle = sorted((slot for slot in self.all if slot.call is None), key=lambda slot: slot.used)
        while not self.fits(count) and idle:
            self.purged += bool(idle.pop(0).clear())
        if self.fits(count):
            return
        self._violations.append("the running requests together overflowed the shared pool")
        for slot in self.all:
            slot.clear()
            if slot.call is not None:
                slot.fault = RefusalError(500, "Context size has been exceeded.")

    def _used(self) -> int:
        return sum(len(slot.held.ids) for slot in self.all)

    # ---- time ----

    @contextmanager
    def reading(self, slot: Slot) -> Iterator[None]:
        """For as long as a slot's prompt is not read, which keeps the prompts of higher slots waiting."""
        ended = self._reading[slot.id] = asyncio.Event()
        try:
            yield
        finally:
            del self._reading[slot.id]
            ended.set()

    async def read(self, slot: Slot, seconds: float) -> None:
        """Spend the time of a batch. It keeps every other step waiting, and runs to its end even if nobody wants it.

        The real engine fills each batch slot by slot, from the first on, whoever came first.
        """
        while True:
            while (first := min(self._reading, default=slot.id)) < slot.id:
                await self._reading[first].wait()
            async with self._thread:
                if min(self._reading, default=slot.id) >= slot.id:
                    return await self._spend(slot, seconds)

    async def _spend(self, slot: Slot, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            slot.lag_s = ends - loop.time()
            raise

    async def write(self, seconds: float) -> None:
        """Spend the time of one answer token. Answers are written side by side, but not while a batch is read."""
        async with self._thread:
            pass
        await asyncio.sleep(seconds)
