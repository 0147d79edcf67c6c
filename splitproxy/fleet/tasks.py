"""Work in the background that belongs to somebody: it ends with its owner, and its failures are heard."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)


class Tasks:
    """Background tasks. An async context manager: at its end they are cancelled and waited for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside all else. A failure of it is logged, and is nobody else's."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` beside the body of the context. Where it fails, the body is cancelled and its error raised."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    try:
        async with asyncio.timeout(None) as scope:

            def ended(_: object) -> None:
                if not task.cancelled() and task.exception() is not None:
                    scope.reschedule(loop.time())

            task.add_done_callback(ended)
            try:
                yield
            finally:
                task.remove_done_callback(ended)
                task.cancel()
                await asyncio.wait([task])
    except TimeoutError:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
    finally:
        if task.done() and not task.cancelled():
            task.exception()  # where the body has ended by itself, nobody else asks
