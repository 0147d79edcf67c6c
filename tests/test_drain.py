"""What still runs when the proxy stops is ended in words, and nothing else is taken for that."""

import asyncio

import pytest

from splitproxy.errors import Fault, RequestError
from splitproxy.serve.drain import Drain


async def hang(drain: Drain) -> None:
    async with drain.bounded():
        await asyncio.Event().wait()


async def test_what_runs_is_cut_in_words() -> None:
    """Each request that runs ends in an error for its client; one that comes later does not."""
    drain = Drain()
    tasks = [asyncio.create_task(hang(drain)) for _ in range(3)]
    await asyncio.sleep(0)
    drain.cut()
    drain.cut()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error.fault for error in found if isinstance(error, RequestError)] == [Fault.SHUTTING_DOWN] * 3
    async with drain.bounded():
        await asyncio.sleep(0)


async def test_other_endings_are_not_the_drains() -> None:
    """A request that fails, runs out of time or is cancelled by itself ends as it would have."""
    drain = Drain()
    for error in (TimeoutError("mine"), RequestError(Fault.QUEUE_FULL, "full"), LookupError()):
        with pytest.raises(type(error)) as caught:
            async with drain.bounded():
                raise error
        assert caught.value is error
    task = asyncio.create_task(hang(drain))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    drain.cut()
