"""Starting, watching, healing and stopping engines, with a small program in the engine's place."""

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitproxy.config import Config
from splitproxy.errors import ConfigError, LaunchError
from splitproxy.model import Kind, Role
from splitproxy.run import launch as launch_module
from splitproxy.run import processes
from splitproxy.run.launch import Launcher, engine_program
from splitproxy.run.processes import heal_delay_s, local_engines
from tests import models

WAIT_S = 30.0

# Stands in for llama-server. What it does is written in $FAKE/events; a file named ROLE.KNOB there turns a knob:
# `broken` ends it at once, `silent` never answers, `deaf` ignores SIGTERM, `nested` starts a process of its own.
ENGINE = f"""#!{sys.executable}
import http.server, os, pathlib, signal, subprocess, sys, time

fake = pathlib.Path(os.environ["FAKE"])
role = "decode" if "--kv-unified" in sys.argv else "prefill"
port = int(sys.argv[sys.argv.index("--port") + 1])

def event(word):
    with open(fake / "events", "a") as file:
        file.write(f"{{role}} {{word}} {{os.getpid()}} {{time.monotonic()}}\\n")

def knob(name):
    return (fake / f"{{role}}.{{name}}").exists()

def stop(*_):
    event("stopped")
    os._exit(0)

event("started")
print("loading the model", flush=True)
if knob("broken"):
    sys.exit("no room for the model")
signal.signal(signal.SIGTERM, signal.SIG_IGN if knob("deaf") else stop)
if knob("nested"):
    nested = subprocess.Popen(["sleep", "1000"])
    (fake / "nested.pid").write_text(str(nested.pid))
(fake / f"{{role}}.session").write_text("")
asked = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        status = 503 if asked < 3 or knob("silent") else 200
        if status == 200 and asked == 3:
            event("ready")
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Event:
    role: str
    word: str
    pid: int
    at_s: float


class Bench:
    """A folder with the fake engine, its knobs and what it wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "fake-engine"
        self.program.write_text(ENGINE)
        self.program.chmod(0o755)
        self.model = folder / "model.gguf"
        self.model.write_bytes(b"GGUF")
        self.logs = folder / "logs"

    def config(self, **keys: Any) -> Config:
        launch = {"engine": str(self.program), "model": str(self.model), "log_dir": str(self.logs)}
        return Config.model_validate({"launch": launch | keys})

    def launcher(self, heal_interval_s: float = 60.0, stop_grace_s: float = 10.0, **keys: Any) -> Launcher:
        return Launcher(self.config(**keys), self.folder, heal_interval_s=heal_interval_s, stop_grace_s=stop_grace_s)

    def turn(self, role: Role, knob: str, on: bool = True) -> None:
        path = self.folder / f"{role}.{knob}"
        path.touch() if on else path.unlink()

    def events(self) -> list[Event]:
        try:
            lines = (self.folder / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Event(role, word, int(pid), float(at_s)) for role, word, pid, at_s in map(str.split, lines)]

    def words(self) -> list[str]:
        return [f"{event.role} {event.word}" for event in self.events()]

    def pid(self, role: Role) -> int:
        """The process that was started last in this role."""
        return [event.pid for event in self.events() if event.role == role and event.word == "started"][-1]

    def alive(self) -> list[int]:
        return [event.pid for event in self.events() if event.word == "started" and is_alive(event.pid)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # nobody may be there to collect an orphan


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event here
            await asyncio.sleep(0.02)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setattr(processes, "_HEALTH_INTERVAL_S", 0.02)
    bench = Bench(tmp_path)
    yield bench
    assert bench.alive() == [], "an engine was left behind"


async def test_decode_engine_starts_first(bench: Bench) -> None:
    """The decode engine is ready before the prefill engine is started, and each step is reported."""
    said: list[str] = []
    launcher = bench.launcher()
    try:
        await launcher.start(lambda role, text: said.append(f"{role} {text.split()[0]}"))
        assert bench.words() == ["decode started", "decode ready", "prefill started", "prefill ready"]
        assert said == ["decode starting,", "decode ready", "prefill starting,", "prefill ready"]
        assert launcher.alive(Role.DECODE)
        assert launcher.alive(Role.PREFILL)
    finally:
        await launcher.stop()


async def test_prefill_engine_stops_first(bench: Bench) -> None:
    """Stopping ends the prefill engine, then the decode engine, and may be asked for twice."""
    launcher = bench.launcher()
    async with launcher:
        pass
    await launcher.stop()
    assert bench.words()[-2:] == ["prefill stopped", "decode stopped"]
    assert not launcher.alive(Role.DECODE)


async def test_engine_runs_apart_and_private(bench: Bench) -> None:
    """Ctrl-C in our terminal does not reach an engine, and only the user reads its logs and session files."""
    async with bench.launcher():
        for role in Role:
            assert os.getpgid(bench.pid(role)) == bench.pid(role)
            assert mode(bench.logs / f"engine.{role}.log") == 0o600
            assert mode(bench.folder / f"{role}.session") == 0o600
    assert mode(bench.logs) == 0o700


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system pins no processes")
async def test_engines_on_the_cpu_share_no_core(bench: Bench) -> None:
    """Without cards, each engine stays on its own half of the cores, if there are two."""
    if len(launch_module.physical_cores()) < 2:
        pytest.skip("one core only")
    async with bench.launcher(prefill_gpu=0):
        assert os.sched_getaffinity(bench.pid(Role.PREFILL)) == os.sched_getaffinity(0)
    async with bench.launcher():
        reader, writer = (os.sched_getaffinity(bench.pid(role)) for role in (Role.PREFILL, Role.DECODE))
    assert not reader & writer
    assert reader | writer == os.sched_getaffinity(0)


async def test_log_of_the_run_before_is_kept(bench: Bench) -> None:
    """A new run begins a new log and keeps that of the run before."""
    log = bench.logs / "engine.decode.log"
    bench.logs.mkdir()
    log.write_text("an old crash\n")
    async with bench.launcher():
        assert log.read_text() == "loading the model\n"
        assert log.with_suffix(".log.1").read_text() == "an old crash\n"


async def test_default_log_folder(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without launch.log_dir the logs go to a private folder in the user's state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(bench.folder / "state"))
    async with bench.launcher(log_dir=""):
        assert (bench.folder / "state" / "splitproxy" / "engine.prefill.log").exists()
    assert mode(bench.folder / "state" / "splitproxy") == 0o700


async def test_dead_prefill_engine_is_tolerated(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A prefill engine that does not start is one WARNING with the reason, and is tried again in the background."""
    bench.turn(Role.PREFILL, "broken")
    launcher = bench.launcher(heal_interval_s=0.3)
    async with launcher:
        assert launcher.alive(Role.DECODE)
        assert not launcher.alive(Role.PREFILL)
        await until(lambda: bench.words().count("prefill started") >= 3)
        bench.turn(Role.PREFILL, "broken", on=False)
        await until(lambda: launcher.alive(Role.PREFILL))
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "ended with exit code 1" in warning.getMessage()
    assert "no room for the model" in warning.getMessage()


async def test_dead_decode_engine_is_an_error(bench: Bench) -> None:
    """A decode engine that does not start raises with the end of its log, and no prefill engine is started."""
    bench.turn(Role.DECODE, "broken")
    launcher = bench.launcher()
    with pytest.raises(
        LaunchError, match=r"decode did not start: it ended with exit code 1(?s:.*)no room for the model"
    ):
        await launcher.start()
    assert bench.words() == ["decode started"]


async def test_engine_that_never_answers(bench: Bench) -> None:
    """An engine that gives no answer within the time is ended and is an error."""
    bench.turn(Role.DECODE, "silent")
    with pytest.raises(LaunchError, match=r"gave no answer within 0\.5 s"):
        await bench.launcher(start_timeout_s=0.5).start()
    assert bench.alive() == []


async def test_long_start_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an engine loads, whoever waits hears so from time to time, with the seconds."""
    monkeypatch.setattr(processes, "_TELL_INTERVAL_S", 0.05)
    bench.turn(Role.DECODE, "silent")
    told: list[str] = []
    task = asyncio.create_task(bench.launcher().start(lambda role, text: told.append(f"{role} {text}")))
    await until(lambda: len(told) >= 3)
    task.cancel()
    await asyncio.wait({task})
    assert all(re.fullmatch(r"decode still loading after \d+ s", text) for text in told[1:])


async def test_stranger_on_the_port(bench: Bench) -> None:
    """A program that already answers on an engine's port is not taken for the engine."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        engines = [
            {"name": "w", "role": "decode", "url": f"http://127.0.0.1:{port}"},
            {"name": "r", "role": "prefill", "url": "http://127.0.0.1:9"},
        ]
        config = Config.model_validate(bench.config().model_dump() | {"engines": engines})
        with pytest.raises(LaunchError, match=f"127.0.0.1:{port} is not free"):
            await Launcher(config, bench.folder).start()
    assert bench.events() == []


@pytest.mark.parametrize(
    ("role", "level"), [(Role.PREFILL, logging.WARNING), (Role.DECODE, logging.ERROR)], ids=lambda value: str(value)
)
async def test_dead_engine_is_started_again(
    bench: Bench, caplog: pytest.LogCaptureFixture, role: Role, level: int
) -> None:
    """An engine that dies is started again at once, logged and told, while the other runs on."""
    launcher, told = bench.launcher(), list[str]()
    launcher.tell(told.append)
    async with launcher:
        other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}[role]
        first, untouched = bench.pid(role), bench.pid(other)
        os.kill(first, signal.SIGKILL)
        await until(lambda: bench.words().count(f"{role} ready") == 2 and launcher.alive(role))
        assert bench.pid(role) != first
        assert bench.pid(other) == untouched
        assert told == [role.value]
    assert told == [role.value]
    records = [record for record in caplog.records if record.name == "splitproxy.run.processes"]
    assert [record.levelno for record in records if record.levelno >= logging.WARNING] == [level]
    assert "SIGKILL" in records[0].getMessage()


async def test_healing_keeps_its_distance(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt to start an engine again is immediate, and each later one waits for the interval."""
    waits: list[float] = []

    def no_wait(tried_at: float | None, now: float, interval_s: float) -> float:
        waits.append(heal_delay_s(tried_at, now, interval_s))
        return 0.0

    monkeypatch.setattr(processes, "heal_delay_s", no_wait)
    launcher = bench.launcher(heal_interval_s=1000.0)
    async with launcher:
        bench.turn(Role.PREFILL, "broken")
        os.kill(bench.pid(Role.PREFILL), signal.SIGKILL)
        await until(lambda: len(waits) >= 3)
        assert launcher.alive(Role.DECODE)
    assert waits[0] == 0.0
    assert all(900.0 < wait_s <= 1000.0 for wait_s in waits[1:])


@pytest.mark.parametrize(
    ("tried_at", "now", "expected"), [(None, 5.0, 0.0), (5.0, 5.0, 60.0), (5.0, 35.0, 30.0), (5.0, 100.0, 0.0)]
)
def test_heal_delay(tried_at: float | None, now: float, expected: float) -> None:
    """The first attempt is immediate; every later one waits for the rest of the interval."""
    assert heal_delay_s(tried_at, now, 60.0) == expected


async def test_deaf_engine_is_killed(bench: Bench) -> None:
    """An engine that ignores SIGTERM is killed after the grace, and the other is stopped all the same."""
    bench.turn(Role.PREFILL, "deaf")
    async with bench.launcher(stop_grace_s=0.2):
        pass
    assert bench.words()[-1] == "decode stopped"


async def test_failing_stop_spares_the_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one engine's stop fails the other is stopped all the same, and the first error is reported."""
    launcher = bench.launcher()
    await launcher.start()
    reader, killpg = bench.pid(Role.PREFILL), os.killpg

    def refuse_once(group: int, number: int) -> None:
        if (group, number) == (reader, signal.SIGTERM):
            raise PermissionError("not this one")
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", refuse_once)
    with pytest.raises(PermissionError, match="not this one"):
        await launcher.stop()
    assert bench.words()[-1] == "decode stopped"
    assert bench.alive() == []


async def test_what_an_engine_started_ends_with_it(bench: Bench) -> None:
    """Processes that an engine started itself are gone after it, whether it stopped or died."""
    bench.turn(Role.DECODE, "nested")
    async with bench.launcher():
        first = int((bench.folder / "nested.pid").read_text())
        os.kill(bench.pid(Role.DECODE), signal.SIGKILL)
        await until(lambda: bench.words().count("decode ready") == 2)
        await until(lambda: not is_alive(first))
        second = int((bench.folder / "nested.pid").read_text())
    await until(lambda: not is_alive(second))


async def test_cancelled_start_leaves_nothing(bench: Bench) -> None:
    """A start that is cancelled while the prefill engine loads stops both engines."""
    bench.turn(Role.PREFILL, "silent")
    task = asyncio.create_task(bench.launcher().start())
    await until(lambda: "prefill started" in bench.words())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.alive() == []


async def test_stop_while_healing_leaves_nothing(bench: Bench) -> None:
    """A stop that meets an engine just being started again ends that one, too."""
    launcher = bench.launcher()
    async with launcher:
        bench.turn(Role.PREFILL, "silent")
        os.kill(bench.pid(Role.PREFILL), signal.SIGKILL)
        await until(lambda: bench.words().count("prefill started") == 2)
    assert bench.alive() == []


PARENT = """
import asyncio, pathlib, sys
from splitproxy.config import load
from splitproxy.run.launch import Launcher

async def main():
    config = load(None, {}, sys.argv[2:])
    await Launcher(config, pathlib.Path(sys.argv[1])).start()
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent died")
async def test_killed_proxy_leaves_no_engine(bench: Bench) -> None:
    """The engines end with the proxy even when it is killed and can clean up nothing."""
    launch = bench.config().launch
    assert launch is not None
    settings = [f"launch.{key}={getattr(launch, key)}" for key in ("engine", "model", "log_dir")]
    command = [sys.executable, "-c", PARENT, str(bench.folder), *settings]
    parent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(WAIT_S):
        assert await parent.stdout.readline() == b"up\n"
    assert len(bench.alive()) == 2
    parent.kill()
    await parent.wait()
    await until(lambda: not bench.alive())


def engines(*rows: tuple[str, str, str]) -> Config:
    tables = [{"name": name, "role": role, "url": url} for name, role, url in rows]
    return Config.model_validate({"engines": tables, "launch": {"model": "m"}})


def test_configured_pair_keeps_names_and_ports() -> None:
    """One engine of each role on this machine is started under the configuration's name and address."""
    config = engines(("r", "prefill", "http://localhost:81"), ("w", "decode", "http://127.0.0.1:82"))
    assert [(engine.name, engine.url) for engine in local_engines(config, Kind.LLAMA_SERVER)] == [
        ("w", "http://127.0.0.1:82"),
        ("r", "http://localhost:81"),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        (),
        (("w", "decode", "http://127.0.0.1:82"),),
        (("r", "prefill", "http://10.0.0.1:81"), ("w", "decode", "http://127.0.0.1:82")),
        (("r", "prefill", "https://127.0.0.1:81"), ("w", "decode", "http://127.0.0.1:82")),
        (("r", "prefill", "http://127.0.0.1:81/api"), ("w", "decode", "http://127.0.0.1:82")),
    ],
)
def test_other_engines_are_made_up(rows: tuple[tuple[str, str, str], ...], caplog: pytest.LogCaptureFixture) -> None:
    """Without such a pair the engines are named by role, on free and different ports; ignored tables are mentioned."""
    decode, prefill = local_engines(engines(*rows), Kind.LLAMA_SERVER)
    assert (decode.name, decode.role, prefill.name, prefill.role) == ("decode", Role.DECODE, "prefill", Role.PREFILL)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", decode.url)
    assert decode.url != prefill.url
    assert len(caplog.records) == bool(rows)


def test_unusable_configuration(bench: Bench) -> None:
    """Contradicting arguments and a missing model are reported together, before anything starts."""
    with pytest.raises(ConfigError) as caught:
        bench.launcher(model="/nowhere.gguf", args=["-np", 2])
    assert [fault.split()[0] for fault in caught.value.faults] == ["launch.args:", "launch.model"]
    with pytest.raises(ConfigError, match="no \\[launch\\] table"):
        Launcher(Config(), bench.folder)


EMBEDDED = [sys.executable, "-m", "splitproxy.engines.embedded"]


@pytest.mark.parametrize(
    ("engine", "on_path", "installed", "expected"),
    [
        ("auto", "/bin/llama-server", True, ["/bin/llama-server"]),
        ("auto", None, True, EMBEDDED),
        ("auto", None, False, r"no llama-server on PATH and .*splitproxy\[local\]"),
        ("embedded", "/bin/llama-server", True, EMBEDDED),
        ("embedded", None, False, r"splitproxy\[local\]"),
        ("my-server", "/opt/my-server", False, ["/opt/my-server"]),
        ("my-server", None, True, "'my-server': there is no such program"),
    ],
)
def test_choice_of_program(
    monkeypatch: pytest.MonkeyPatch, engine: str, on_path: str | None, installed: bool, expected: list[str] | str
) -> None:
    """`auto` is llama-server where there is one, else the embedded engine; what is missing is named with its remedy."""
    monkeypatch.setattr(shutil, "which", lambda _: on_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if installed else None)
    if isinstance(expected, list):
        assert engine_program(engine) == expected
    else:
        with pytest.raises(LaunchError, match=expected):
            engine_program(engine)


async def test_program_that_cannot_run(bench: Bench) -> None:
    """A program that the system refuses to run is an error that says so."""
    bench.program.write_text("#!/no/such/interpreter\n")
    with pytest.raises(LaunchError, match="cannot be run: No such file or directory"):
        await bench.launcher().start()


@pytest.mark.live
async def test_real_engines(bench: Bench) -> None:
    """Both real engines start from one model, heal and stop."""
    launcher = bench.launcher(engine="embedded", model=str(models.tiny_model("dense")), decode_slots=2, context=2048)
    async with launcher:
        pids = [engine_pid(engine.url) for engine in launcher.engines]
    assert not any(is_alive(pid) for pid in pids)


def engine_pid(url: str) -> int:
    """The process whose command line names the url's port."""
    port = url.rpartition(":")[2]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"splitproxy.engines.embedded" in words and port.encode() in words:
                return int(entry.name)
    raise AssertionError(f"no engine for {url}")
