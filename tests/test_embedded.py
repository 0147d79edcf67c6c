"""The embedded engine: its flags as a table, its manners by running it."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from splitproxy.engines import embedded
from splitproxy.engines.embedded import UsageError
from tests import models

COMMAND = [sys.executable, "-m", "splitproxy.engines.embedded"]
WAIT_S = 60


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--host 127.0.0.1 --port 81", {"hostnames": ["127.0.0.1"], "port": 81}),
        ("-c 4096 -np 2 -b 512 -ub 256", {"n_ctx": 4096, "n_parallel": 2, "n_batch": 512, "n_ubatch": 256}),
        ("--ctx-size=4096 --parallel=2", {"n_ctx": 4096, "n_parallel": 2}),
        ("--ctx_size 4096", {"n_ctx": 4096}),
        ("-t 3 -tb 4", {"cpuparams.n_threads": 3, "cpuparams_batch.n_threads": 4}),
        ("-kvu", {"kv_unified": True}),
        ("--no-kv-unified", {"kv_unified": False}),
        ("-ngl 0", {"n_gpu_layers": 0}),
        ("-ngl all", {"n_gpu_layers": -2}),
        ("-fa on -ctk q8_0 -ctv bf16", {"flash_attn_type": "on", "cache_type_k": "q8_0", "cache_type_v": "bf16"}),
        ("--cache-ram 0 --no-cache-idle-slots", {"cache_ram_mib": 0, "cache_idle_slots": False}),
        ("-cram -1", {"cache_ram_mib": -1}),
        ("--ctx-checkpoints 3 --swa-full", {"n_ctx_checkpoints": 3, "swa_full": True}),
        ("--slot-save-path /", {"slot_save_path": "/"}),
        ("--slot-save-path /proc", {"slot_save_path": "/proc/"}),
        ("--slots --metrics --no-webui", {"endpoint_slots": True, "endpoint_metrics": True, "ui": False}),
        ("--no-mmap --no-warmup --jinja", {"load_mode": "none", "warmup": False, "use_jinja": True}),
        ("-a one,two --api-key k1,k2", {"model_alias": {"one", "two"}, "api_keys": ["k1", "k2"]}),
        ("-np 1 -np 2", {"n_parallel": 2}),
    ],
)
def test_flags(line: str, expected: Mapping[str, Any]) -> None:
    """A llama-server flag in any of its spellings sets the field that it means."""
    assert embedded.parse(["-m", "m.gguf", *line.split()]) == {"model.path": "m.gguf", "port": 8080, **expected}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-m m --bogus 3", "the embedded engine does not know '--bogus'"),
        ("-m m --ctx 3", "does not know '--ctx'"),
        ("-m m -c many", "--ctx-size 'many' is not a whole number"),
        ("-m m -ctk q9", "--cache-type-k 'q9' is not one of f32,"),
        ("-m m --slot-save-path /nowhere", "--slot-save-path '/nowhere' is not an existing folder"),
        ("-m m --api-key-file /nowhere", "--api-key-file is not a readable text file"),
        ("-m m --port", "--port: expected one argument"),
        ("-c 3", "-m names no model file"),
    ],
)
def test_unusable_flags(line: str, message: str) -> None:
    """An unknown flag or a value that is none is one sentence that names it."""
    with pytest.raises(UsageError) as caught:
        embedded.parse(line.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_chat_template_file(tmp_path: Path) -> None:
    """A chat template is read from its file."""
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    fields = embedded.parse(["-m", "m", "--chat-template-file", str(tmp_path / "t.jinja")])
    assert fields["chat_template"] == "{{ messages }}"


def test_every_flag_sets_a_field_that_exists() -> None:
    """Each name is given once, and each flag's field is one of xllamacpp's parameters."""
    xllamacpp = pytest.importorskip("xllamacpp")
    names = [name for flag in embedded.FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    params = xllamacpp.CommonParams()
    for flag in embedded.FLAGS:
        holder, _, name = flag.field.rpartition(".")
        assert hasattr(getattr(params, holder) if holder else params, name), flag.field


@pytest.mark.parametrize(
    "flag", [flag for flag in embedded.FLAGS if flag.field in embedded.ENUMS], ids=lambda flag: flag.names[-1]
)
def test_every_choice_is_a_constant(flag: embedded.Flag) -> None:
    """Each word that a flag allows is one that xllamacpp knows."""
    pytest.importorskip("xllamacpp")
    for word in flag.read.allowed if isinstance(flag.read, embedded.OneOf) else (flag.value,):
        embedded.parameters({flag.field: word})


def run(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *args], env=os.environ | env, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--bogus"], 2, "error: the embedded engine does not know '--bogus'; a llama-server binary may\n"),
        (["-m", "/nowhere"], 1, "error: /nowhere: cannot be read: No such file or directory\n"),
        (["-m", "/etc/passwd"], 1, "error: /etc/passwd: is not a GGUF file\n"),
    ],
)
def test_exit_codes(args: list[str], code: int, message: str) -> None:
    """A command line that cannot be used ends with 2, a model that cannot be read with 1, each with one sentence."""
    done = run(*args)
    assert (done.returncode, done.stderr, done.stdout) == (code, message, "")


def test_missing_package(tmp_path: Path) -> None:
    """Without xllamacpp the one sentence names the extra that brings it."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'xllamacpp' else find(name, *rest)\n"
    )
    done = run("-m", str(tmp_path / "m.gguf"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"error: {embedded.INSTALL_HINT}\n"


@pytest.mark.live
def test_broken_model(tmp_path: Path) -> None:
    """A damaged model file ends the engine with 1 and without a traceback."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(models.tiny_model("dense").read_bytes()[:3000])
    done = run("-m", str(broken), "--port", str(free_port()))
    assert done.returncode == 1
    assert f"error: the engine did not start with {broken}" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def served(folder: Path, *args: str, **env: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A running engine: its process and its address."""
    command = [*COMMAND, "-m", str(models.tiny_model("dense")), "--port", str(free_port()), "-c", "1024", "-t", "1"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [*command, "--slot-save-path", str(folder), *args],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def ask(url: str, body: Mapping[str, Any] | None = None, key: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=WAIT_S) as answer:  # noqa: S310
        return json.load(answer)


@pytest.mark.live
def test_serves_and_saves_privately(tmp_path: Path) -> None:
    """The engine prints its address, answers there, and session files are readable by their owner only."""
    with served(tmp_path, "-np", "2", "--kv-unified", "--alias", "tiny") as (_, url):
        assert ask(f"{url}/health") == {"status": "ok"}
        assert ask(f"{url}/v1/models")["data"][0]["id"] == "tiny"
        assert len(ask(f"{url}/slots")) == 2
        ask(f"{url}/completion", {"prompt": "one two three", "n_predict": 1, "id_slot": 1})
        assert ask(f"{url}/slots/1?action=save", {"filename": "file"})["n_saved"] > 0
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


@pytest.mark.live
def test_key_from_the_environment(tmp_path: Path) -> None:
    """A key in LLAMA_API_KEY is asked for, so that it needs no place on the command line."""
    with served(tmp_path, LLAMA_API_KEY="k") as (_, url):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(f"{url}/slots")
        caught.value.close()
        assert caught.value.code == 401
        assert len(ask(f"{url}/slots", key="k")) == 1


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ends_on_request(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C end the engine without a word."""
    with served(tmp_path) as (process, _):
        before = (tmp_path / "log").read_text()
        process.send_signal(number)
        assert process.wait(WAIT_S) == -number
        assert (tmp_path / "log").read_text() == before


@pytest.mark.live
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent died")
def test_dies_with_its_parent(tmp_path: Path) -> None:
    """An engine whose parent is killed ends, too."""
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [*COMMAND, "-m", str(models.tiny_model("dense")), "--port", str(free_port())]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([sys.executable, "-c", parent, *command], stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"http://")
        process.kill()
        # The engine holds the pipe's other end: its end is the end of the file.
        assert process.stdout.read() == b""
