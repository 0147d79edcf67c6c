"""What goes wrong with real engines: one is killed, a client leaves, a pair does not fit together."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from splitproxy.config import Config
from splitproxy.fleet import health
from splitproxy.model import Outcome, PairState, Role
from splitproxy.run.launch import Launcher
from tests import live, models
from tests.live_pair import (
    READER_FLAGS,
    WRITER_FLAGS,
    Caller,
    Front,
    argument,
    children,
    configured,
    processor_seconds,
    prompt,
    proxied,
    sessions,
    until,
    words,
)

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="engines are watched through /proc"),
]

CHAT = "/v1/chat/completions"
Start = Callable[..., live.LiveEngine]


async def until_it_has_computed(pid: int, seconds: float) -> None:
    start = processor_seconds(pid)
    await until(lambda: processor_seconds(pid) > start + seconds)


# -- an engine that dies -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def launched(model: Path, folder: Path, logs: Path) -> AsyncIterator[tuple[Launcher, Front]]:
    """Two engines under the launcher, which starts a dead one again at once, with the proxy in front of them."""
    launch = {"engine": "embedded", "model": str(model), "log_dir": str(logs)}
    config = Config.model_validate(
        {"listen": "127.0.0.1:0", "drain_s": 1, "split": {"policy": "threshold"}, "launch": launch}
    )
    launcher = Launcher(config, folder, heal_interval_s=0.5)
    async with launcher, proxied(config.model_copy(update={"engines": launcher.engines}), folder) as front:
        yield launcher, front


def engine_pid(front: Front, role: Role) -> int:
    port = next(engine.url.rpartition(":")[2] for engine in front.proxy.config.engines if engine.role is role)
    engines = children(os.getpid()).items()
    return next(pid for pid, command in engines if "--port" in command and argument(command, "--port") == port)


async def test_prefill_engine_killed_while_it_reads(session_dir: Path, tmp_path: Path) -> None:
    """A prefill engine killed in the middle of a prompt costs the client time only, comes back, and is used again."""
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    body = prompt("chat", words(3000, "killed"), 16, stream=True)
    async with launched(models.tiny_model("dense", **models.SMALL), session_dir, tmp_path / "logs") as (
        launcher,
        front,
    ):
        assert front.proven()
        reader = engine_pid(front, Role.PREFILL)
        asking = asyncio.create_task(front.ask(CHAT, body))
        await until_it_has_computed(reader, 0.5)
        os.kill(reader, signal.SIGKILL)
        reply = await asking
        assert (reply.status, reply.headers["X-Splitproxy-Fallback"]) == (200, "prefill:died")
        assert sessions(session_dir) == []

        await until(lambda: launcher.alive(Role.PREFILL) and engine_pid(front, Role.PREFILL) != reader)
        await until(front.proven)
        again = await front.ask(CHAT, prompt("chat", words(2500, "again"), 4))
        assert again.route == "handover"
        assert "split" in again.last

        async with Caller(launcher.engines[0].url) as direct:
            await direct.erase()
            assert reply.text == (await direct.ask(CHAT, body)).text


async def test_decode_engine_replaced_unseen(
    live_engine: Start, session_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode engine that lost everything behind the proxy's back still gives the right answer."""
    monkeypatch.setattr(health, "HEALTH_INTERVAL_S", 3600.0)
    model, common = models.tiny_model("dense"), ("-c", "8192", "--slot-save-path", str(session_dir))
    reader = live_engine(model, *common, *READER_FLAGS)
    writer = live_engine(model, *common, *WRITER_FLAGS)
    first = prompt("chat", words(3000, "first"), 16)
    async with proxied(configured(reader.url, writer.url), session_dir) as front:
        said = await front.ask(CHAT, first)
        assert said.route == "handover"
        writer.kill()
        live_engine(model, *common, *WRITER_FLAGS, port=int(writer.url.rpartition(":")[2]))
        messages = [*first["messages"], {"role": "assistant", "content": said.text}]
        second = first | {"messages": [*messages, {"role": "user", "content": "And then?"}]}
        reply = await front.ask(CHAT, second)
        record = await front.record(reply)
        async with Caller(writer.url) as direct:
            await direct.erase()
            expected = await direct.ask(CHAT, second)
    assert (reply.status, reply.reason) == (200, "warm")
    assert record.figures is not None
    assert record.figures.cached_tokens == 0
    assert reply.text == expected.text


# -- a client that leaves ----------------------------------------------------------------------------------------------

LONG_TOKENS = 20_000  # about 20 seconds of reading for the small model on one core
STOP_S = 2.0


@dataclass(frozen=True)
class Slow:
    """A pair that needs many seconds for a long prompt or a long answer."""

    reader: live.LiveEngine
    writer: live.LiveEngine
    folder: Path


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    model, folder = models.tiny_model("dense", **models.SMALL), tmp_path_factory.mktemp("sessions")
    common = ("-c", "32768", "--slot-save-path", str(folder))
    # Small batches: what takes time is to notice that nobody listens, not to finish a batch on a busy machine.
    reader_flags, writer_flags = ((*common, *flags, "-b", "128") for flags in (READER_FLAGS, WRITER_FLAGS))
    with live.engine(model, *reader_flags) as reader, live.engine(model, *writer_flags) as writer:
        yield Slow(reader, writer, folder)


async def seconds_until_idle(pid: int) -> float:
    """How long a process goes on computing."""
    start = since = time.monotonic()
    spent = processor_seconds(pid)
    while time.monotonic() < since + 0.5:
        await asyncio.sleep(0.05)
        if (now := processor_seconds(pid)) > spent + 0.01:  # answering a health check is not computing
            since, spent = time.monotonic(), now
    return since - start


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("policy", "length", "answer"),
    [("threshold", LONG_TOKENS, 8), ("never", LONG_TOKENS, 8), ("never", 50, LONG_TOKENS)],
    ids=["prefill engine reads", "decode engine reads", "decode engine writes"],
)
async def test_client_leaves(slow: Slow, policy: str, length: int, answer: int, stream: bool) -> None:
    """An engine that works for a client that has left stops within 2 seconds, and the books are at zero."""
    engine = slow.reader if policy == "threshold" else slow.writer
    body = prompt("chat", words(length, (policy, stream)), answer, stream=stream)
    async with (
        Caller(engine.url) as direct,
        proxied(configured(slow.reader.url, slow.writer.url, policy=policy), slow.folder) as front,
    ):
        asking = asyncio.create_task(front.ask(CHAT, body))
        await until_it_has_computed(engine.process.pid, 1.0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        took_s = await seconds_until_idle(engine.process.pid)
        [slot] = await direct.get("/slots")
        assert not slot["is_processing"]
        assert took_s < STOP_S
        assert 0 < await direct.erase() < LONG_TOKENS / 2
        await until(lambda: front.proxy.recent and not front.proxy.ledger.busy())
        assert front.proxy.recent[-1].outcome is Outcome.CANCELLED
        assert front.proxy.ledger.session_bytes == 0
        assert sessions(slow.folder) == []


# -- pairs that do not fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Misfit:
    """How a pair differs from a good one, and the words that must be in the proxy's warning."""

    words: tuple[str, ...]
    reader: tuple[str, ...] = ()
    writer: tuple[str, ...] = ()
    model: dict[str, int | str] = field(default_factory=dict)  # of the decode engine
    kind: str = "dense"


SAVE_PATH = "--slot-save-path"
MISFITS = {
    "other weights": Misfit(("text: another text", "use one model file"), model={"seed": 2}),
    # The window of this model holds so little that its answers are close, whatever was restored.
    "other weights, sliding": Misfit(("text: another text", "use one model file"), model={"seed": 2}, kind="sliding"),
    "other size": Misfit(("model differs: n_params=", "the same model file"), model={"dim": 128}),
    "slots apart": Misfit(("restored: ", "--kv-unified"), writer=("-np", "2", "--no-kv-unified")),
    "other KV type": Misfit(("restored: ", "-ctk"), writer=("-ctk", "f32")),
    "reader's folder": Misfit(("file: the saved file is not in", SAVE_PATH), reader=(SAVE_PATH, "ELSEWHERE")),
    "writer's folder": Misfit(("restored: ", SAVE_PATH), writer=(SAVE_PATH, "ELSEWHERE")),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS.keys())
async def test_misfit(
    live_engine: Start, session_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, misfit: Misfit
) -> None:
    """A pair that cannot hand over is found by its self-test, named with advice, and answers all the same."""
    (tmp_path / "elsewhere").mkdir()
    common = ("-c", "8192", "--slot-save-path", str(session_dir))

    def flags(*given: str) -> tuple[str, ...]:
        return (*common, *(str(tmp_path / "elsewhere") if flag == "ELSEWHERE" else flag for flag in given))

    reader = live_engine(models.tiny_model(misfit.kind), *flags(*READER_FLAGS, *misfit.reader))
    writer = live_engine(models.tiny_model(misfit.kind, **misfit.model), *flags(*WRITER_FLAGS, *misfit.writer))
    await answers_alone(reader, writer, session_dir)
    for text in misfit.words:
        assert text in caplog.text
    assert sessions(session_dir) == []


@pytest.mark.parametrize("role", Role)
async def test_no_save_path(
    live_engine: Start, session_dir: Path, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    """An engine without --slot-save-path is told which flag it lacks."""
    path = (SAVE_PATH, str(session_dir))
    model = models.tiny_model("dense")
    reader = live_engine(model, "-c", "8192", *READER_FLAGS, *(() if role is Role.PREFILL else path))
    writer = live_engine(model, "-c", "8192", *WRITER_FLAGS, *(() if role is Role.DECODE else path))
    await answers_alone(reader, writer, session_dir)
    assert f"Start the engine with {SAVE_PATH}" in caplog.text
    assert sessions(session_dir) == []


async def answers_alone(reader: live.LiveEngine, writer: live.LiveEngine, folder: Path) -> None:
    body = prompt("chat", words(2500, "alone"), 8)
    async with proxied(configured(reader.url, writer.url), folder) as front, Caller(writer.url) as direct:
        [pair] = front.proxy.fleet.pairs.values()
        assert pair.state is PairState.UNPROVEN
        reply = await front.ask(CHAT, body)
        assert (reply.status, reply.route, reply.reason) == (200, "local", "pair_unproven")
        assert reply.text == (await direct.ask(CHAT, body | {"cache_prompt": False})).text
