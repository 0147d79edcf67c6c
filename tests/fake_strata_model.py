"""What the fake Strata engines compute: which state of a conversation can be taken up again, and session files.

A conversation's states are the live one and its checkpoints. A state serves a prompt that begins with exactly its
tokens and has at least one more. Files follow the real layout as far as it is known; what the hashes are is the
engine's own matter, so these are others.
"""

import hashlib
import os
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fake_model import SPECIAL_IDS, Weights

TURN = SPECIAL_IDS["<|im_start|>"]
EVERY = 16384  # a checkpoint besides, each time so many tokens were read
MAGIC, END = b"STRSESS\x01", b"STRSEND\x01"
HEAD = struct.Struct("<8sIIQQQQQ")
KINDS = {"invalid": 400, "memory": 503, "storage": 507, "io": 500}  # and the HTTP status that each becomes


class SessionError(Exception):
    """A session file that is not written or not taken."""

    def __init__(self, kind: str, reason: str, *, published: bool = False) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.published = kind, reason, published


@dataclass
class Conversation:
    """The one conversation that an engine holds."""

    ids: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)  # how many tokens each holds
    complete: bool = False  # whether all of `ids` is a state of its own

    def reusable(self, prompt: Sequence[int]) -> int:
        """The length of the longest state that this prompt goes on from."""
        states = [*self.checkpoints, *([len(self.ids)] if self.complete else [])]
        return max((n for n in states if 1 <= n < len(prompt) and self.ids[:n] == list(prompt[:n])), default=0)

    def keep(self, count: int) -> None:
        """Go on from a state; what came after it is gone."""
        del self.ids[count:]
        del self.words[count:]
        self.checkpoints = [n for n in self.checkpoints if n <= count]
        self.complete = False

    def add(self, ids: Sequence[int], weights: Weights) -> None:
        self.ids += ids
        self.words += map(weights.word, ids)

    def mark_prompt(self, start: int, limit: int) -> None:
        """A prompt was read from `start` on: it is a state, and so is the beginning of its last turn."""
        turns = [place for place, token in enumerate(self.ids) if token == TURN]
        places = {*range(EVERY, len(self.ids), EVERY), *turns[-1:]}
        self.checkpoints = sorted({*self.checkpoints, *(n for n in places if n > start)})[-limit:] if limit else []
        self.complete = True


@dataclass(frozen=True)
class Fit:
    """What must match between the engine that saves and the one that restores."""

    model: int = 1
    configuration: int = 1

    def pack(self, held: Conversation) -> bytes:
        """The bytes of a session file: the live state, and the deepest checkpoint."""
        geometry = struct.pack("<18q", *([1] * 18)) + struct.pack("<qqQ", 0, 1, 0)
        live = _state(held.ids, held.words)
        kept = [_state(held.ids[:n], held.words[:n]) for n in held.checkpoints[-1:]]
        layer = struct.pack("<7q", *([0] * 7)) + _bytes(array("i", held.words).tobytes()) + _bytes(b"") * 4
        payload = b"".join([geometry, live, struct.pack("<Q", len(kept)), *kept, struct.pack("<Q", 1), layer])
        head = HEAD.pack(MAGIC, 1, 64, self.model, self.configuration, len(payload), 0, 0)
        return head + _hash(head) + payload + _hash(payload) + END

    def unpack(self, raw: bytes, context: int) -> Conversation:
        """A conversation. Raises SessionError as the real engine refuses: the order of its checks is kept."""
        if len(raw) < 80:
            raise SessionError("invalid", "the session file is too small")
        head, payload, trailer = raw[:56], raw[64:-16], raw[-16:]
        magic, version, size, model, configuration, length, _, _ = HEAD.unpack(head)
        if magic != MAGIC:
            raise SessionError("invalid", "not a session file")
        if raw[56:64] != _hash(head) or version != 1 or size != 64:
            raise SessionError("invalid", "the header is damaged")
        if model != self.model:
            raise SessionError("invalid", "the session belongs to another model")
        if configuration != self.configuration:
            raise SessionError("invalid", "the session belongs to another configuration")
        if length != len(payload):
            raise SessionError("invalid", "the size differs from the header's")
        if trailer != _hash(payload) + END:
            raise SessionError("invalid", "the payload is damaged")
        reader = _Reader(payload)
        reader.skip(18 * 8 + 3 * 8)
        ids, words = reader.state()
        kept = [len(reader.state()[0]) for _ in range(reader.number())]
        if len(ids) >= context:
            raise SessionError("invalid", "the session is larger than this engine can hold")
        return Conversation(ids, words, kept, complete=True)


def fit(model: int, context: int, kv: str, version: str) -> Fit:
    """What must match, of engines started this way."""
    return Fit(model, zlib.crc32(f"{context} {kv} {version}".encode()))


def write(path: Path, raw: bytes) -> None:
    """Write a file as the engine does: under a hidden name, for its owner alone, then in place."""
    hidden = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(raw)
        hidden.rename(path)
    except OSError as error:
        hidden.unlink(missing_ok=True)
        kind = "storage" if error.errno in (28, 122, 27) else "io"
        raise SessionError(kind, os.strerror(error.errno or 0)) from None


def read(path: Path) -> bytes:
    """Read a file as the engine does: no link of any kind."""
    try:
        status = path.lstat()
        if not path.is_file() or path.is_symlink() or status.st_nlink != 1:
            raise SessionError("invalid", "not a regular file of one name")
        return path.read_bytes()
    except OSError as error:
        raise SessionError("io", os.strerror(error.errno or 0)) from None


def _state(ids: Sequence[int], words: Sequence[int]) -> bytes:
    tokens = struct.pack("<Q", len(ids)) + array("i", ids).tobytes()
    state = _bytes(array("i", words).tobytes()) + _bytes(b"") * 4
    return tokens + struct.pack("<Q", 0) + state + struct.pack("<Q", len(ids))


def _bytes(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _hash(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=8).digest()


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw, self._place = raw, 0

    def skip(self, count: int) -> bytes:
        taken = self._raw[self._place : self._place + count]
        if len(taken) < count:
            raise SessionError("invalid", "the payload is cut")
        self._place += count
        return taken

    def number(self) -> int:
        return int.from_bytes(self.skip(8), "little")

    def state(self) -> tuple[list[int], list[int]]:
        ids = array("i", self.skip(4 * self.number())).tolist()
        self.skip(16 * self.number())
        words = array("i", self.skip(self.number())).tolist()
        for _ in range(4):
            self.skip(self.number())
        self.skip(8)
        return ids, words
