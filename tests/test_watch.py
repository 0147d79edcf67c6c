"""Looks at an engine's slots: shared, fresh, and never too many."""

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from splitproxy.engines.adapter import Engine, SlotState
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.fleet import watch
from splitproxy.fleet.watch import SlotWatch
from tests.harness import until


class Looked:
    """An engine that counts the looks at its slots, and answers when it is told to."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fault: EngineError | None = None

    async def slots(self) -> Mapping[int, SlotState]:
        self.times.append(asyncio.get_running_loop().time())
        count = len(self.times)
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return {0: SlotState(False, count)}


def watched(engine: Looked) -> SlotWatch:
    return SlotWatch(cast("Engine", engine))


async def test_those_who_wait_share_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody who asked before a look began gets what it saw; who asks later gets a later one."""
    monkeypatch.setattr(watch, "LOOK_INTERVAL_S", 0.01)
    engine = Looked()
    looks = watched(engine)
    engine.open.clear()
    first = asyncio.create_task(looks.look())
    await until(lambda: engine.times)
    later = [asyncio.create_task(looks.look()) for _ in range(5)]
    await asyncio.sleep(0)
    engine.open.set()
    assert (await first)[0].filled == 1
    assert [(await task)[0].filled for task in later] == [2] * 5


async def test_looks_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may follow each other at once; on average they are an interval apart."""
    monkeypatch.setattr(watch, "LOOK_INTERVAL_S", 0.05)
    engine = Looked()
    looks = watched(engine)
    for _ in range(6):
        await looks.look()
    spans = [later - earlier for earlier, later in zip(engine.times, engine.times[2:], strict=False)]
    assert min(spans) >= 0.099


async def test_looks_at_a_prefill_engine_need_not_be_kept_apart() -> None:
    """What streams its progress finds out by itself that nobody waits."""
    engine = Looked()
    looks = SlotWatch(cast("Engine", engine), apart=False)
    for _ in range(20):
        await looks.look()
    assert engine.times[-1] - engine.times[0] < watch.LOOK_INTERVAL_S


async def test_who_leaves_does_not_keep_others_from_looking() -> None:
    """A look that was given up is made by the next in line."""
    engine = Looked()
    looks = watched(engine)
    engine.open.clear()
    gone, stays = asyncio.create_task(looks.look()), asyncio.create_task(looks.look())
    await until(lambda: engine.times)
    gone.cancel()
    await until(lambda: len(engine.times) == 2)
    engine.open.set()
    assert (await stays)[0].filled == 2


async def test_a_failure_is_everybodys() -> None:
    """Who shared a look that failed is told, and the next look is a new one."""
    engine = Looked()
    looks = watched(engine)
    engine.fault = EngineError(Step.CONTROL, Cause.TIMEOUT, "nothing came")
    with pytest.raises(EngineError, match="nothing came"):
        await looks.look()
    engine.fault = None
    assert (await looks.look())[0].filled == 2
