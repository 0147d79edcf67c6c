"""The share of one running answer in the decode engine's pool of cells, where nobody knows how long it will be.

A llama-server whose pool overflows fails every answer that runs. So an answer that outgrows its reservation gets more
in time, and where there is no more, it ends alone.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from splitproxy.books.ledger import Lease, Ledger
from splitproxy.errors import EngineError, Fault, RequestError
from splitproxy.fleet.tasks import beside
from splitproxy.fleet.watch import SlotWatch

STEP_TOKENS = 512  # reserved at once, and how near to its end a reservation is extended
LOOK_EVERY_S = 2.0

Erase = Callable[[Lease, Iterable[int]], Awaitable[None]]


class Share:
    """What one answer may fill, `cells` at the moment. `prompt_tokens` is the prompt's length or an estimate."""

    def __init__(self, lease: Lease, prompt_tokens: int, ledger: Ledger, watch: SlotWatch, erase: Erase) -> None:
        self.cells = lease.cells
        self.lease = lease
        self._ledger = ledger
        self._watch = watch
        self._erase = erase
        self._filled = prompt_tokens
        self._one_at_a_time = asyncio.Lock()

    def written(self, tokens: int) -> bool:
        """So many tokens were added; False where `make_room` must be awaited before there are more."""
        self._filled += tokens
        return self._filled <= self.cells

    async def make_room(self) -> None:
        """Get cells for what was written, if they are needed. Raises RequestError when there are none."""
        if self._filled > self.cells:
            await self._extend(self._filled + STEP_TOKENS, self._filled)

    async def _extend(self, wanted: int, least: int) -> None:
        """Get `wanted` cells, or as few as `least` where the pool has no more."""
        async with self._one_at_a_time:
            for cells in (wanted, least):
                if (erase := self._ledger.grow(self.lease, cells)) is not None:
                    self.cells = max(self.cells, cells)
                    await self._erase(self.lease, erase)
                    return
            raise RequestError(Fault.OUT_OF_ROOM, "the answer outgrew the decode engine's memory; set max_tokens")

    @asynccontextmanager
    async def followed(self, limited: bool) -> AsyncIterator[None]:
        """Ask the engine itself, now and then, how much the answer fills: events tell it roughly, and a whole answer
        tells nothing before it is complete. A `limited` one needs no more than was reserved, unless the prompt's length
        was estimated wrongly."""
        async with beside(self._follow(limited)):
            yield

    async def _follow(self, limited: bool) -> None:
        before, most = self._filled, STEP_TOKENS
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(EngineError, KeyError):
                filled = (await self._watch.look())[self.lease.number].filled
                # Before the next look it writes as much again. Of what the first one finds, some may be a prompt that
                # was estimated too short.
                since = min(max(filled - before, 0), most)
                step = max(STEP_TOKENS, 2 * since)
                before, most = filled, filled
                if filled + (0 if limited else step) > self.cells:
                    await self._extend(filled + 2 * step, filled + (0 if limited else 2 * since))
