"""Real llama.cpp servers on tiny models, each in a process of its own on a free loopback port. This module owns their
start, the wait until they are ready, and their end."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

READY_S = 60


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """A running server. Its log is for people who look at a failed test."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def engine(model: Path, *flags: str, port: int = 0) -> Iterator[LiveEngine]:
    """A server for this model under llama-server's flags, ready for requests; killed at the end. One thread, unless a
    flag says otherwise."""
    port = port or free_port()
    command = [sys.executable, "-m", "splitproxy.engines.embedded", "-m", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "-t", "1", *flags]
    with tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        running = LiveEngine(f"http://127.0.0.1:{port}", process, Path(log.name))
        try:
            _wait_until_ready(running)
            yield running
        finally:
            running.kill()


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_until_ready(running: LiveEngine) -> None:
    deadline = time.monotonic() + READY_S
    while not _is_ready(running.url):
        if running.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the engine did not start:\n{running.log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:  # noqa: S310 - always this machine
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
