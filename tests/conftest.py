"""Fixtures that start engines, fake and real, and end them with the test."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import live
from tests.fake_engine import FakeEngine

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture
def session_dir(tmp_path: Path) -> Path:
    """The folder of session files that all engines of a test share."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    return folder


@pytest.fixture
async def fake(session_dir: Path) -> AsyncIterator[Callable[..., Awaitable[FakeEngine]]]:
    """Starts fake engines that share one folder of session files: `reader = await fake(slots=1)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> FakeEngine:
            return await stack.enter_async_context(FakeEngine(**{"slot_dir": session_dir, **options}))

        yield start


@pytest.fixture
def live_engine() -> Iterator[Callable[..., live.LiveEngine]]:
    """Starts real engines: `reader = live_engine(model, "-np", "1")`."""
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    with contextlib.ExitStack() as stack:
        yield lambda model, *flags, **options: stack.enter_context(live.engine(model, *flags, **options))
