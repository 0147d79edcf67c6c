"""The commands as a user runs them, in processes of their own, with real engines on the tiny model."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import live, models
from tests.live_pair import (
    READER_FLAGS,
    WAIT_S,
    WRITER_FLAGS,
    Caller,
    argument,
    children,
    prompt,
    sessions,
    until,
    words,
)

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are watched through /proc"),
]

CHAT = "/v1/chat/completions"
Start = Callable[..., live.LiveEngine]


@dataclass(frozen=True)
class Command:
    """A running `splitproxy`."""

    process: Process

    async def line(self, pattern: str) -> "re.Match[str]":
        """Read its output up to a line that matches."""
        assert self.process.stdout is not None
        read = []
        async with asyncio.timeout(WAIT_S):
            while text := (await self.process.stdout.readline()).decode():
                if found := re.search(pattern, text):
                    return found
                read.append(text)
        raise AssertionError(f"it ended without {pattern!r}:\n{''.join(read)}")

    async def end(self) -> tuple[int, str]:
        """Wait for its end: exit code and the rest of its output."""
        async with asyncio.timeout(WAIT_S):
            output, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode()


@asynccontextmanager
async def splitproxy(*args: str) -> AsyncIterator[Command]:
    env = os.environ | {"COLUMNS": "200"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "splitproxy", *args, stdout=PIPE, stderr=STDOUT, env=env
    )
    command = Command(process)
    try:
        yield command
    finally:
        if process.returncode is None:
            process.kill()
        await command.end()


async def run(*args: str) -> tuple[int, str]:
    async with splitproxy(*args) as command:
        return await command.end()


# -- up ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Up:
    """A running `splitproxy up`, with what must be gone after it."""

    command: Command
    url: str
    table: str  # the line of the pair
    engines: dict[int, list[str]]

    @property
    def folder(self) -> Path:
        return Path(argument(next(iter(self.engines.values())), "--slot-save-path"))

    def is_engine_left(self) -> bool:
        return any(Path(f"/proc/{pid}").exists() for pid in self.engines)

    def taken_ports(self) -> list[int]:
        ports = [int(self.url.rpartition(":")[2])]
        ports += [int(argument(command, "--port")) for command in self.engines.values()]
        return [port for port in ports if not _is_free(port)]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@asynccontextmanager
async def up(folder: Path) -> AsyncIterator[Up]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    config = folder / "up.toml"
    config.write_text(
        f"""
        listen = "127.0.0.1:0"
        [launch]
        engine = "embedded"
        model = "{models.tiny_model("dense")}"
        log_dir = "{folder / "logs"}"
        [split]
        policy = "threshold"
        min_prompt_tokens = 2048
        """
    )
    async with splitproxy("up", "-c", str(config)) as command:
        table = (await command.line("prefill -> decode")).string
        url = (await command.line(r"OpenAI base URL: (\S+)/v1 ")).group(1)
        await command.line("Ctrl-C stops everything")
        running = Up(command, url, table, children(command.process.pid))
        assert len(running.engines) == 2
        yield running


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_up(tmp_path: Path, number: signal.Signals) -> None:
    """`up` shows a proven pair, hands a long prompt over, and leaves nothing behind when it is told to stop."""
    async with up(tmp_path) as running, Caller(running.url) as client:
        assert re.search(r"\bproven\b", running.table)
        reply = await client.ask(CHAT, prompt("chat", words(3000, number), 8, stream=True))
        assert (reply.route, reply.reason) == ("handover", "worth_moving")
        assert running.folder.is_dir()
        assert len(running.taken_ports()) == 3
        running.command.process.send_signal(number)
        code, output = await running.command.end()
        assert code == 0, output
        assert "Traceback" not in output
        assert not running.is_engine_left()
        assert not running.folder.exists()
        assert running.taken_ports() == []


async def test_up_killed(tmp_path: Path) -> None:
    """Engines do not outlive a proxy that was killed."""
    async with up(tmp_path) as running:
        running.command.process.kill()
        await until(lambda: not running.is_engine_left())
        assert running.taken_ports() == []
        shutil.rmtree(running.folder)


# -- check and serve ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """Two engines that run already, and a configuration that names them."""

    reader: str
    writer: str
    folder: Path
    config: str


def engines_for(live_engine: Start, session_dir: Path, **writer_model: int | str) -> Served:
    """Engines on the tiny model; the decode engine's may be another one."""
    common = ("-c", "8192", "--slot-save-path", str(session_dir))
    reader = live_engine(models.tiny_model("dense"), *common, *READER_FLAGS).url
    writer = live_engine(models.tiny_model("dense", **writer_model), *common, *WRITER_FLAGS).url
    config = session_dir.parent / "proxy.toml"
    config.write_text(
        f"""
        listen = "127.0.0.1:0"
        split.dir = "{session_dir}"
        [[engines]]
        role = "prefill"
        url = "{reader}"
        [[engines]]
        role = "decode"
        url = "{writer}"
        """
    )
    return Served(reader, writer, session_dir, str(config))


@pytest.mark.parametrize(
    ("seed", "code", "verdict"),
    [(1, 0, "prefill -> decode: proven"), (2, 1, "use one model file")],
    ids=["good pair", "bad pair"],
)
async def test_check(live_engine: Start, session_dir: Path, seed: int, code: int, verdict: str) -> None:
    """`check` passes a good pair, tells what to change about a bad one, and leaves no trace in either."""
    served = engines_for(live_engine, session_dir, seed=seed)
    ended, output = await run("check", "-c", served.config)
    assert ended == code, output
    assert verdict in output
    assert sessions(session_dir) == []
    async with Caller(served.reader) as reader, Caller(served.writer) as writer:
        assert await reader.erase() == 0
        assert await writer.erase() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_check_stopped(live_engine: Start, session_dir: Path, number: signal.Signals) -> None:
    """A check that is stopped while it reads prompts says what it has measured, and leaves both engines empty."""
    served = engines_for(live_engine, session_dir)
    async with splitproxy("check", "-c", served.config, "--rounds", "99") as checking:
        await checking.line("proven")
        checking.process.send_signal(number)
        code, output = await checking.end()
        assert code == 130, output
        assert "Traceback" not in output
    assert sessions(session_dir) == []
    async with Caller(served.reader) as reader, Caller(served.writer) as writer:
        assert await reader.erase() == 0
        assert await writer.erase() == 0


async def test_bench(live_engine: Start, session_dir: Path) -> None:
    """`bench` compares both arms under a load, and writes the same figures as JSON."""
    served = engines_for(live_engine, session_dir)
    figures = session_dir.parent / "bench.json"
    options = ("--requests", "6", "--rounds", "1", "--rate", "20", "--policy", "threshold", "--json", str(figures))
    code, output = await run("bench", "-c", served.config, "--set", "split.min_prompt_tokens=512", *options)
    assert code == 0, output
    arms = json.loads(figures.read_text())["arms"]
    assert {name: (arm["requests"], arm["failed"]) for name, arm in arms.items()} == {
        "unsplit": (6, 0), "split": (6, 0),
    }  # fmt: skip
    assert sessions(session_dir) == []


async def test_check_while_serving(live_engine: Start, session_dir: Path) -> None:
    """`check` keeps away from engines that a running proxy serves from, and says so in one sentence."""
    served = engines_for(live_engine, session_dir)
    async with splitproxy("serve", "-c", served.config) as serving:
        await serving.line("serving at")
        code, output = await run("check", "-c", served.config)
        assert code == 2
        assert output == f"split.dir = {str(session_dir)!r}: another splitproxy is using this folder\n"


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


async def test_serve(live_engine: Start, session_dir: Path) -> None:
    """`serve` proves its pair, takes less than 80 MB while it is idle, and ends with exit code 0."""
    served = engines_for(live_engine, session_dir)
    async with splitproxy("serve", "-c", served.config) as serving:
        url = (await serving.line(r"serving at (\S+),")).group(1)
        await serving.line("pair prefill -> decode is proven")
        async with Caller(url) as client:
            assert (await client.get("/health"))["status"] == "ok"
        assert resident_bytes(serving.process.pid) < 80e6
        serving.process.send_signal(signal.SIGTERM)
        code, output = await serving.end()
        assert code == 0, output


async def test_serve_with_faults(tmp_path: Path) -> None:
    """A faulty configuration ends with exit code 2 and one sentence for each fault."""
    config = tmp_path / "faulty.toml"
    config.write_text(
        'listen = "nowhere"\nmax_bodi_mib = 3\nsplit.policy = "sometimes"\nsplit.min_prompt_tokens = -1\n'
    )
    code, output = await run("serve", "-c", str(config))
    assert code == 2
    keys = ("listen", "unknown key max_bodi_mib", "split.policy", "split.min_prompt_tokens", "engines")
    assert len(output.splitlines()) == len(keys)
    for key in keys:
        assert any(line.startswith(f"{config}: {key}") for line in output.splitlines()), output
