"""Background work that ends with its owner."""

import asyncio

import pytest

from splitproxy.fleet.tasks import Tasks


async def test_tasks_end_with_their_owner() -> None:
    """What still runs at the end is cancelled and waited for."""
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Tasks() as tasks:
        tasks.start(work())
        await asyncio.sleep(0)
        assert len(tasks) == 1
    assert ended.is_set()
    assert len(tasks) == 0


async def test_a_failure_is_heard_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A task that fails is logged with its error, and the others go on."""

    async def fail() -> None:
        raise ValueError("so it goes")

    async with Tasks() as tasks:
        tasks.start(fail())
        tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
        while len(tasks) > 1:  # noqa: ASYNC110 - nothing tells when a failed task is gone
            await asyncio.sleep(0)
        assert "so it goes" in caplog.text
