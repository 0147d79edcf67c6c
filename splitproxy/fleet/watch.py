"""Looks at an engine's slots, shared by all who want one and kept apart.

A llama-server notices that a client has left by a poll that comes due after a second without other results, and a look
at its slots is such a result: looks that come more often keep it working for nobody. That does not hold for a request
that streams its progress, such as all that prefill engines get: the next piece that cannot be sent tells.
"""

import asyncio
from collections import deque
from collections.abc import Mapping

from splitproxy.engines.adapter import PrefillEngine, SlotState
from splitproxy.errors import EngineError

LOOK_INTERVAL_S = 1.5
BURST = 2  # looks that may follow each other at once; the next ones wait the longer


class SlotWatch:
    """The looks at one engine; `apart` where its requests do not stream their progress."""

    def __init__(self, engine: PrefillEngine, *, apart: bool = True) -> None:
        self._engine = engine
        self._apart = apart
        self._turn = asyncio.Lock()
        self._begun = 0  # looks
        self._latest = 0  # the number of the look that has ended last, if it was not given up
        self._times = deque([float("-inf")] * BURST, maxlen=BURST)
        self._seen: Mapping[int, SlotState] | EngineError = {}

    async def look(self) -> Mapping[int, SlotState]:
        """What each slot does, as seen after this was called. Raises EngineError."""
        begun = self._begun
        async with self._turn:
            if self._latest <= begun:
                await self._look()
        if isinstance(self._seen, EngineError):
            raise self._seen
        return self._seen

    def count(self) -> None:
        """Somebody looks at the slots past this watch, because it cannot wait."""
        self._times.append(asyncio.get_running_loop().time())

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if self._apart:
            await asyncio.sleep(self._times[0] + BURST * LOOK_INTERVAL_S - loop.time())
        self._begun += 1
        self._times.append(loop.time())
        try:
            self._seen = await self._engine.slots()
        except EngineError as error:
            self._seen = error
        self._latest = self._begun
