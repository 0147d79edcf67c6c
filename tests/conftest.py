"""Fixtures that start engines, fake and real, and end them with the test."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests import live
from tests.fake_engine import FakeEngine
from tests.fake_strata_server import FakeStrata

# How long an example takes says more about the machine than about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# These run on both event loops that the proxy may run on; all others on asyncio's own.
ON_BOTH_LOOPS = frozenset({"test_answers.py", "test_flow.py"})


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loops of a test, by name."""
    fast = {"uvloop": uvloop.new_event_loop} if item.path.name in ON_BOTH_LOOPS else {}
    return {"asyncio": asyncio.new_event_loop, **fast}


@pytest.fixture
def session_dir(tmp_path: Path) -> Path:
    """The folder of session files that all engines of a test share."""
    folder = tmp_path / "sessions"
    folder.mkdir()
    return folder


@pytest.fixture
def kind() -> str:
    """The kind of engine that `fake` starts."""
    return "llama-server"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module that names KINDS once for each; those that are marked keep to a llama-server."""
    kinds = getattr(metafunc.module, "KINDS", None)
    if kinds and "fake" in metafunc.fixturenames:
        alone = next(metafunc.definition.iter_markers("llama_server_only"), None)
        metafunc.parametrize("kind", kinds[:1] if alone else kinds)


@pytest.fixture
async def fake(session_dir: Path, kind: str) -> AsyncIterator[Callable[..., Awaitable[FakeEngine]]]:
    """Starts fake engines that share one folder of session files: `reader = await fake(slots=1)`."""
    engine = {"llama-server": FakeEngine, "strata": FakeStrata}[kind]
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> FakeEngine:
            return await stack.enter_async_context(engine(**{"slot_dir": session_dir, **options}))

        yield start


@pytest.fixture
def live_engine() -> Iterator[Callable[..., live.LiveEngine]]:
    """Starts real engines: `reader = live_engine(model, "-np", "1")`."""
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    with contextlib.ExitStack() as stack:
        yield lambda model, *flags, **options: stack.enter_context(live.engine(model, *flags, **options))
