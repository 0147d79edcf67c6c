"""Starting, healing and stopping two Strata servers, and what is left of a run: nothing."""

import asyncio
import logging
import os
import shutil
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from splitproxy.books import sessions
from splitproxy.errors import ConfigError, LaunchError
from splitproxy.model import Kind, Role
from splitproxy.run import processes
from splitproxy.run.strata import launch as launch_module
from splitproxy.run.strata.launch import is_loaded
from tests.strata_bench import PACK_BYTES, StrataBench
from tests.test_launch import is_alive, until

GIB = 2**30


def say_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Have every folder say that so much is free in it."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free_bytes))


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StrataBench]:
    """A bench whose shared memory is a folder of its own."""
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setattr(processes, "_HEALTH_INTERVAL_S", 0.02)
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(sessions, "SHARED_MEMORY", memory)
    monkeypatch.setattr(launch_module, "SHARED_MEMORY", memory)
    say_free(monkeypatch, 100 * GIB)
    bench = StrataBench(tmp_path)
    bench.write()
    yield bench
    assert [event.facts["pid"] for event in bench.events() if is_alive(event.facts["pid"])] == []
    assert [*memory.iterdir()] == [], "a run left something behind"


async def test_s21_decode_first(bench: StrataBench) -> None:
    """S21: the decode server has its model loaded before the prefill server is started, and each step is told."""
    said: list[str] = []
    launcher = bench.launcher()
    try:
        await launcher.start(lambda role, text: said.append(f"{role} {text.split()[0]}"))
        assert bench.words() == ["decode started", "decode ready", "prefill started", "prefill ready"]
        assert said == ["decode starting,", "decode ready", "prefill starting,", "prefill ready"]
        assert [(engine.role, engine.kind) for engine in launcher.engines] == [
            (Role.DECODE, Kind.STRATA), (Role.PREFILL, Kind.STRATA),
        ]  # fmt: skip
        assert all(launcher.alive(role) for role in Role)
    finally:
        await launcher.stop()


async def test_s8_each_server_gets_its_own_config(bench: StrataBench) -> None:
    """S8: both run in the checkout with a config of their role's, which only the user reads."""
    async with bench.launcher():
        for role, card in ((Role.PREFILL, 3), (Role.DECODE, 1)):
            given = bench.started(role)
            assert given["engine"] == "strata"
            assert given["cwd"] == str(bench.checkout)
            assert (given["config"]["gpu"], given["card"]) == (card, str(card))
            assert given["config"]["log"] == f"engine.{role}.log"
            assert given["config"]["slot_save_path"] == str(bench.sessions)
            assert Path(given["path"]).name == f"strata.{role}.json"
            assert given["mode"] == 0o600
            assert stat.S_IMODE(Path(given["path"]).parent.stat().st_mode) == 0o700
            assert (bench.folder / "logs" / f"strata.{role}.log").read_text() == "loading the model\n"


async def test_s22_engines_leave_by_themselves(bench: StrataBench) -> None:
    """S22: the prefill server is stopped first, and each lets its engine save what it has learned."""
    async with bench.launcher():
        pass
    assert bench.words()[4:] == [
        "prefill asked to stop", "prefill engine left", "decode asked to stop", "decode engine left",
    ]  # fmt: skip
    assert all((bench.folder / f"{role}.learned").exists() for role in Role)


async def test_s5_the_arena_goes_with_the_run(bench: StrataBench, caplog: pytest.LogCaptureFixture) -> None:
    """S5: both engines name one private file in RAM, and it is removed at the end."""
    caplog.set_level(logging.INFO)
    async with bench.launcher():
        named = {bench.started(role)["config"]["args"][-1] for role in Role}
        (path,) = map(Path, named)
        assert path.is_relative_to(bench.folder / "shm")
        assert path.read_bytes() == b"experts" * 2
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()
    assert f"both engines share one copy of the experts in {path}" in caplog.text


@pytest.mark.parametrize("kind", ["file", "folder", "old file"])
async def test_s5_a_named_arena(bench: StrataBench, kind: str) -> None:
    """S5: a file or folder that the user names is taken; the file is removed if this run has made it."""
    place = bench.folder / "place"
    place.mkdir()
    name = place if kind == "folder" else place / "arena"
    if kind == "old file":
        name.write_text("old")
    bench.write({"shared_arena": str(name)})
    async with bench.launcher():
        arena = Path(bench.started(Role.DECODE)["config"]["args"][-1])
        assert arena == (place / "splitproxy-experts.arena" if kind == "folder" else name)
        assert [*place.iterdir()] == [arena]
    assert [*place.iterdir()] == ([arena] if kind == "old file" else [])


async def test_s22_what_cannot_be_removed(bench: StrataBench, caplog: pytest.LogCaptureFixture) -> None:
    """S22: an arena that cannot be removed is an ERROR with its path, and does not keep the rest from being removed."""
    arena = bench.folder / "arena"
    bench.write({"shared_arena": str(arena)})
    async with bench.launcher():
        arena.unlink()
        arena.mkdir()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{arena} cannot be removed: " in record.getMessage()


async def test_s5_too_little_memory(
    bench: StrataBench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: where the experts do not fit, each engine keeps its own, the log says why, and the pair starts."""
    caplog.set_level(logging.INFO)
    say_free(monkeypatch, GIB + PACK_BYTES - 1)
    async with bench.launcher():
        assert "--shared-expert-arena" not in bench.started(Role.DECODE)["config"]["args"]
    assert f"each engine keeps its own copy of the experts: {bench.folder / 'shm'} has 1.0 GiB free" in caplog.text


async def test_no_room_for_sessions(bench: StrataBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every save would be refused, nothing is started, and the fault names folder, figures and remedies."""
    bench.write(args=["--pack", str(bench.pack)])
    say_free(monkeypatch, 4 * GIB)
    with pytest.raises(
        ConfigError, match=f"no session of 500 tokens could be saved: .*{bench.sessions}.*min-free-mib 0"
    ):
        await bench.launcher().start()
    assert bench.events() == []
    async with bench.launcher({"split": {"policy": "never"}}):  # which saves nothing
        assert "decode ready" in bench.words()


async def test_arena_and_sessions_share_the_room(bench: StrataBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the arena takes is not free for session files in the same place."""
    bench.write(args=["--pack", str(bench.pack)])
    os.truncate(bench.pack / "experts.bin", 40 * GIB)
    say_free(monkeypatch, 44 * GIB)
    with pytest.raises(ConfigError, match=r"4,096 MiB are free"):
        await bench.launcher().start()


async def test_s21_prefill_that_does_not_start(bench: StrataBench, caplog: pytest.LogCaptureFixture) -> None:
    """S20, S21: a prefill server that does not start is one WARNING with its last words, and is tried again."""
    bench.turn(Role.PREFILL, "broken")
    async with bench.launcher() as launcher:
        assert launcher.alive(Role.DECODE)
        (bench.folder / "prefill.broken").unlink()
        await until(lambda: launcher.alive(Role.PREFILL))
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the engine did not start" in warning.getMessage()


async def test_s21_decode_that_does_not_start(bench: StrataBench) -> None:
    """S21: a decode server that does not start is an error with its last words, and nothing is left."""
    bench.turn(Role.DECODE, "broken")
    with pytest.raises(LaunchError, match=r"decode did not start(?s:.*)the engine did not start"):
        await bench.launcher().start()
    assert bench.words() == ["decode started"]


async def test_server_without_its_model(bench: StrataBench) -> None:
    """A server that answers but never has its model loaded is not ready."""
    bench.turn(Role.DECODE, "lazy")
    with pytest.raises(LaunchError, match=r"gave no answer within 0\.5 s"):
        await bench.launcher(start_timeout_s=0.5).start()


async def test_s20_dead_server_is_started_again(bench: StrataBench) -> None:
    """S20: a server that dies is started again with the same config and the same arena."""
    async with bench.launcher() as launcher:
        first = bench.started(Role.PREFILL)
        os.kill(first["pid"], signal.SIGKILL)
        await until(lambda: bench.words().count("prefill ready") == 2 and launcher.alive(Role.PREFILL))
        second = bench.started(Role.PREFILL)
        assert second["pid"] != first["pid"]
        assert second["config"] == first["config"]


async def test_cancelled_start_leaves_nothing(bench: StrataBench) -> None:
    """A start that is cancelled while a model loads stops both servers and removes what was made."""
    bench.turn(Role.PREFILL, "lazy")
    task = asyncio.create_task(bench.launcher().start())
    await until(lambda: "prefill started" in bench.words())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not any(is_alive(event.facts["pid"]) for event in bench.events()))


async def test_a_killed_run_is_cleared_away(bench: StrataBench, caplog: pytest.LogCaptureFixture) -> None:
    """S22: what a killed proxy left in RAM, tens of gigabytes perhaps, is removed by the next start."""
    left = bench.folder / "shm" / "splitproxy-run-killed"
    left.mkdir()
    (left / "experts.arena").write_text("experts")
    os.utime(left, (0, 0))
    async with bench.launcher():
        assert not left.exists()
    assert "a killed proxy had left behind" in caplog.text


async def test_engines_that_the_configuration_names(bench: StrataBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """[[engines]] on this machine keep their names and ports, and ask for the keys that are named there."""
    monkeypatch.setenv("KEY", "hush")
    ports = [engine.url.rpartition(":")[2] for engine in processes.local_engines(bench.config(), Kind.STRATA)]
    engines = [
        {"name": "w", "role": "decode", "kind": "strata", "url": f"http://localhost:{ports[0]}", "api_key_env": "KEY"},
        {"name": "r", "role": "prefill", "kind": "strata", "url": f"http://127.0.0.1:{ports[1]}"},
    ]
    async with bench.launcher({"engines": engines}) as launcher:
        assert [engine.name for engine in launcher.engines] == ["w", "r"]
        assert (bench.started(Role.DECODE)["key"], bench.started(Role.PREFILL)["key"]) == ("hush", None)


async def test_prefill_on_stdio_is_not_started_here(bench: StrataBench) -> None:
    """With strata.prefill = "stdio" only the decode server is started; the other is a process of its adapter's."""
    (bench.pack / "tokenizer.json").write_text("{}")
    bench.write(tokenizer=str(bench.pack))
    async with bench.launcher(prefill="stdio") as launcher:
        assert bench.words() == ["decode started", "decode ready"]
        decode, prefill = launcher.engines
        assert (decode.url != "", decode.process) == (True, None)
        assert prefill.process is not None
        assert prefill.process.exe == str(bench.checkout / "strata")
        assert prefill.process.gpu == 3
        assert prefill.process.log == str(bench.checkout / "engine.prefill.log")
        assert prefill.process.args == tuple(bench.started(Role.DECODE)["config"]["args"])


@pytest.mark.parametrize(
    ("status", "body", "loaded"),
    [
        (200, b'{"status": "ok", "loaded": true}', True),
        (200, b'{"status": "ok", "loaded": false}', False),
        (200, b'{"status": "ok"}', False),
        (200, b"ok", False),
        (200, b"[]", False),
        (503, b'{"loaded": true}', False),
    ],
)
def test_ready_means_loaded(status: int, body: bytes, loaded: bool) -> None:
    """GET /health of a Strata server is always 200: ready is one that says that its model is loaded."""
    assert is_loaded(status, body) is loaded
