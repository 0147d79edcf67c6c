"""How requests end that still run when the proxy stops: they may finish for a while, and the rest is told so."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from splitproxy.errors import Fault, RequestError


class Drain:
    """All requests that run."""

    def __init__(self) -> None:
        self._running: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def bounded(self) -> AsyncGenerator[None]:
        """One request's work. Raises RequestError where `cut` ends it."""
        try:
            async with asyncio.timeout(None) as scope:
                self._running.add(scope)
                try:
                    yield
                finally:
                    self._running.discard(scope)
        except TimeoutError:
            if scope.expired():
                raise RequestError(Fault.SHUTTING_DOWN, "the proxy is shutting down", retry_after_s=5) from None
            raise

    def cut(self) -> None:
        """End all work that is under way."""
        now = asyncio.get_running_loop().time()
        for scope in self._running:
            scope.reschedule(now)
