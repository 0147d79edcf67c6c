"""What must run to its end does so, however often its caller is cancelled."""

import asyncio

import pytest

from splitproxy.engines.adapter import to_the_end


class Work:
    """A step that waits until it is told to go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        self.done = False
        self._error = error

    async def run(self) -> str:
        self.reached.set()
        await self.go_on.wait()
        self.done = True
        if self._error is not None:
            raise self._error
        return "result"


async def test_a_result_and_an_error_come_through() -> None:
    """Without a cancellation it is as if the work had been awaited."""
    work, failing = Work(), Work(KeyError("x"))
    work.go_on.set()
    failing.go_on.set()
    assert await to_the_end(work.run()) == "result"
    with pytest.raises(KeyError):
        await to_the_end(failing.run())


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("error", [None, KeyError("unheard")])
async def test_a_cancellation_waits_for_the_work(times: int, error: Exception | None) -> None:
    """The work ends first, then the cancellation follows; an error of the work goes unheard and unlogged."""
    work = Work(error)
    task = asyncio.create_task(to_the_end(work.run()))
    await work.reached.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    work.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.done


async def test_work_that_is_cancelled_itself_is_a_cancellation() -> None:
    """Work that was stopped by others does not leave its caller waiting."""

    async def stopped() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await to_the_end(stopped())


async def test_a_cancellation_at_the_very_end_is_not_lost() -> None:
    """Work that ends in the moment of the cancellation does not swallow it."""
    work = Work()
    task = asyncio.create_task(to_the_end(work.run()))
    await work.reached.wait()
    work.go_on.set()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.done
