"""The proxy as a process of its own in front of two real engines, and a third engine that answers by itself. This
module owns their life and blocking calls to them; it judges nothing."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from splitproxy.engines.slotfile import read_head
from tests import live, models
from tests.live_pair import READER_FLAGS, WRITER_FLAGS

READY_S = 30.0
FLOOR = 512  # min_prompt_tokens


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer, byte for byte."""

    status: int
    headers: "Message[str, str]"
    body: bytes


def post(url: str, body: bytes | Mapping[str, Any]) -> Raw:
    """The whole answer to a POST, whatever its status."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - this machine
    try:
        with urllib.request.urlopen(request, timeout=READY_S) as answer:  # noqa: S310
            return Raw(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Raw(error.code, error.headers, error.read())


@dataclass(frozen=True, slots=True)
class Served:
    """Addresses of the proxy, the engines behind it, and the engine beside it."""

    url: str
    reader: str
    writer: str
    alone: str
    folder: Path

    def forget(self) -> None:
        """Empty all slots: what is read in other portions differs in the last digits."""
        for engine in (self.reader, self.writer, self.alone):
            post(f"{engine}/slots/0?action=erase", b"{}")

    def tokens(self, path: str, body: Mapping[str, Any]) -> list[int]:
        """The ids that an engine really evaluates for a body, out of the slot that it has filled."""
        post(f"{self.alone}/slots/0?action=erase", b"{}")
        # Nothing is written, or its tokens would be in the slot as well.
        one = {"max_tokens": 1, "max_output_tokens": 1, "n_predict": 1, "stream": False}
        answer = post(self.alone + path, {**body, **one})
        assert answer.status == 200, answer.body
        post(f"{self.alone}/slots/0?action=save", {"filename": "truth"})
        file = self.folder / "truth"
        try:
            return read_head(file).tokens.to_list()
        finally:
            file.unlink()

    def own_answer(self, path: str, body: Mapping[str, Any]) -> Raw:
        """The engine's own answer after it has read all of the prompt but the last token, as after a handover."""
        ids = self.tokens(path, body)
        post(f"{self.alone}/slots/0?action=erase", b"{}")
        post(f"{self.alone}/completion", {"prompt": ids[:-1], "n_predict": 0, "id_slot": 0})
        return post(self.alone + path, body)


@contextlib.contextmanager
def served(folder: Path, *writer_flags: str, kind: str = "dense") -> Iterator[Served]:
    """Three engines and the proxy, its pair proven."""
    model, sessions, file = models.tiny_model(kind), folder / "sessions", folder / "proxy.toml"
    sessions.mkdir(mode=0o700)
    common = ("-c", "8192", "--slot-save-path", str(sessions))
    writer_flags = writer_flags or WRITER_FLAGS
    with contextlib.ExitStack() as stack:
        reader, writer, alone = (
            stack.enter_context(live.engine(model, *common, *flags)).url
            for flags in (READER_FLAGS, writer_flags, WRITER_FLAGS)
        )
        port = live.free_port()
        engines = [("reader", "prefill", reader), ("writer", "decode", writer)]
        tables = "".join(f'[[engines]]\nname = "{n}"\nrole = "{r}"\nurl = "{u}"\n' for n, r, u in engines)
        split = f'[split]\npolicy = "threshold"\nmin_prompt_tokens = {FLOOR}\ndir = "{sessions}"\n'
        file.write_text(f'listen = "127.0.0.1:{port}"\n{split}{tables}')
        command = [sys.executable, "-m", "splitproxy", "serve", "-c", str(file)]
        log = stack.enter_context((folder / "proxy.log").open("wb"))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_proven(f"http://127.0.0.1:{port}", process, folder / "proxy.log")
            yield Served(f"http://127.0.0.1:{port}", reader, writer, alone, sessions)
        finally:
            process.terminate()
            process.wait()


def _wait_until_proven(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not _is_proven(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the proxy did not start:\n{log.read_text()}")
        time.sleep(0.05)


def _is_proven(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/splitproxy/status", timeout=1) as answer:  # noqa: S310
            pairs = json.load(answer)["pairs"]
            return bool(pairs) and all(pair["state"] == "proven" for pair in pairs)
    except OSError:
        return False
