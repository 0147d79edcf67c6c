"""What the fake engine computes: tokens, prompts, answers, what a slot can reuse, and session files. Nothing here waits
or speaks HTTP.

A slot's memory is a list of words, one for each token that was read; an answer depends on these words alone. So an
answer from another conversation, from another model's memory or from a hole in the memory reads differently.
"""

import hashlib
import json
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Memory = Literal["dense", "sliding", "hybrid", "none"]

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL_IDS = {text: 256 + place for place, text in enumerate(SPECIALS)}
VOCABULARY = 256 + len(SPECIALS)
SEED_SHIFT = 12  # in a slot's memory: the token's bits, and above them the model's seed
END = SPECIAL_IDS["<|im_end|>"]

ALPHABET = b"etaoinshrdlu \n"
WINDOW = 64
CHECKPOINT_GAP = 512  # between the two checkpoints that are taken at the end of a prompt
CHECKPOINT_TAIL = 4  # tokens from the last checkpoint to the end of the prompt

MAGIC = 0x67677371
VERSION = 4
LAYERS = 2
ROW_BYTES = 64  # of one token in one layer, for keys and for values


def tokenize(text: str, parse_special: bool = True) -> list[int]:
    """One token a byte, and one for each special word where these are parsed."""
    if not parse_special:
        return list(text.encode())
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, SPECIALS))})", text):
        ids += [SPECIAL_IDS[part]] if part in SPECIAL_IDS else part.encode()
    return ids


def piece(token: int) -> bytes:
    """The bytes that a token stands for."""
    return bytes([token]) if token < 256 else SPECIALS[token - 256].encode()


def detokenize(ids: Sequence[int]) -> str:
    return b"".join(map(piece, ids)).decode(errors="replace")


def render(body: dict[str, Any]) -> str:
    """The prompt of a chat request, in the ChatML form."""
    messages = list(body["messages"])
    parts: list[str] = []
    if body.get("tools"):
        lead = _text(messages.pop(0)) if messages and messages[0]["role"] == "system" else ""
        tools = "".join(json.dumps(tool) + "\n" for tool in body["tools"])
        parts.append(_turn("system", f"{lead}\n\nYou can call these functions:\n{tools}"))
    parts += [_turn(message["role"], _text(message)) for message in messages]
    if body.get("add_generation_prompt", True):
        parts.append("<|im_start|>assistant\n")
        if body.get("chat_template_kwargs", {}).get("enable_thinking") is False:
            parts.append("<think>\n\n</think>\n\n")
    return "".join(parts)


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return text + "".join(
        f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls", [])
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """A model: its seed decides what it remembers of a token and what it says."""

    seed: int = 1

    def word(self, token: int) -> int:
        """What reading this token leaves in the memory."""
        return token ^ (self.seed << SEED_SHIFT)

    def answers(self, memory: Sequence[int]) -> Iterator["Sample"]:
        """The tokens that follow this memory, without end; each is remembered before the next."""
        state = hashlib.blake2b(array("i", memory).tobytes(), key=self.seed.to_bytes(4, "little"), digest_size=8)
        foreign = any(word >> SEED_SHIFT != self.seed for word in memory)
        while True:
            sample = Sample(state.copy().digest(), self.seed + foreign)
            yield sample
            state.update(self.word(sample.token).to_bytes(4, "little"))


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled token, with the figures that a caller may ask for."""

    digest: bytes
    # Two models never give the same figures, nor does one of them with what the other has read, though now and then
    # they give the same token.
    shift: int = 1

    @property
    def token(self) -> int:
        return ALPHABET[self.digest[0] % len(ALPHABET)]

    def probabilities(self, count: int) -> list[tuple[int, float]]:
        """The most likely tokens and their log probabilities, the sampled one first."""
        first = self.digest[0] % len(ALPHABET)
        likely = [ALPHABET[(first + n) % len(ALPHABET)] for n in range(min(max(count, 1), len(ALPHABET)))]
        return [(token, -0.5 * self.shift - n - self.digest[1] / 1024) for n, token in enumerate(likely)]


@dataclass(slots=True)
class Held:
    """What a slot holds: token ids, what was remembered of each, and where its memory can be rolled back to."""

    ids: list[int] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    restored: bool = False

    def reusable(self, prompt: Sequence[int], memory: Memory) -> int:
        """How many leading tokens of this prompt need not be read again. The last one always is."""
        shared = common_prefix(self.ids, prompt)
        most = min(shared, len(prompt) - 1)
        if memory == "dense":
            return most
        rollback = max((place for place in self.checkpoints if place <= most), default=0)
        if memory == "hybrid":
            return most if most == len(self.ids) else rollback
        if memory == "sliding":
            # A session file lacks the one cell outside the window that an exact continuation asks for.
            exact = not self.restored and len(self.ids) - most < WINDOW
            return most if exact else max(rollback - 1, 0)
        return 0

    def keep(self, count: int) -> None:
        """Forget everything after the first `count` tokens."""
        del self.ids[count:]
        del self.words[count:]
        self.checkpoints = [place for place in self.checkpoints if place <= count]
        self.restored = self.restored and count > 0

    def add(self, ids: Sequence[int], weights: Weights) -> None:
        self.ids += ids
        self.words += map(weights.word, ids)

    def mark_prompt(self, start: int, limit: int) -> None:
        """Take the checkpoints of a prompt that was read from `start` on; only the latest `limit` are kept."""
        end = len(self.ids)
        passed = [end - CHECKPOINT_TAIL - CHECKPOINT_GAP, end - CHECKPOINT_TAIL]
        places = {*self.checkpoints, *(place for place in passed if place > start)}
        self.checkpoints = sorted(places)[-limit:] if limit else []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class FileRefusedError(Exception):
    """An engine says no to this session file, and clears the slot."""


class FileFatalError(Exception):
    """A session file that a real engine does not survive: its memory is shorter than its header says."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What must match between the engine that saves and the engine that restores."""

    memory: Memory = "dense"
    streams: int = 1
    k_type: int = 1  # f16

    def pack(self, held: Held, *, plain_list: bool = False) -> bytes:
        """The bytes of a session file."""
        listed = array("i", held.ids).tobytes()
        if not plain_list:
            listed = struct.pack("<iII", -1, 1, len(held.ids)) + listed + struct.pack("<I", 0)
        head = struct.pack("<III", MAGIC, VERSION, len(listed) // 4)
        return head + listed + self._blocks(held) + self._appendix(held)

    def unpack(self, raw: bytes) -> Held:
        """A slot's content. Raises FileRefusedError or FileFatalError as the real engine refuses or dies."""
        reader = _Reader(raw)
        ids = self._tokens(reader)
        words = self._memory_block(reader, len(ids))
        if self.memory == "sliding":
            self._memory_block(reader, min(len(ids), WINDOW))
        elif self.memory == "hybrid":
            reader.take("<IiIIIQ")
        return Held(ids, words, self._checkpoints(reader), restored=True)

    def _blocks(self, held: Held) -> bytes:
        whole = self._block(held.words, 0)
        if self.memory == "sliding":
            window = held.words[-WINDOW:]
            return whole + self._block(window, len(held.words) - len(window))
        if self.memory == "hybrid":
            return whole + struct.pack("<IiIIIQ", 1, len(held.ids) - 1, 0, 0, LAYERS, 0)
        return whole

    def _block(self, words: list[int], first: int) -> bytes:
        empty = [struct.pack("<I", 0)] * (self.streams - 1)
        if not words:
            return b"".join([struct.pack("<I", self.streams), struct.pack("<I", 0), *empty])
        cells = b"".join(struct.pack("<iIi", first + place, 1, 0) for place in range(len(words)))
        layer = struct.pack("<iQ", self.k_type, ROW_BYTES) + _rows(words)
        shape = struct.pack("<IIII", 0, LAYERS, 0, 0)
        parts = [struct.pack("<II", self.streams, len(words)), cells, shape, layer * (2 * LAYERS), *empty]
        return b"".join(parts)

    def _appendix(self, held: Held) -> bytes:
        if not held.checkpoints:
            return b""
        blob = bytes(16)
        entries = [
            struct.pack("<QiiQ", n, max(n - WINDOW, 0), n - 1, len(blob)) + blob + bytes(16) for n in held.checkpoints
        ]
        return b"SCKP" + struct.pack("<II", 1, len(entries)) + b"".join(entries)

    def _tokens(self, reader: "_Reader") -> list[int]:
        try:
            magic, version, count = reader.take("<III")
            words = list(reader.array(count))
        except FileFatalError:
            raise FileRefusedError("the header or the token list is cut") from None
        if (magic, version) != (MAGIC, VERSION):
            raise FileRefusedError("magic or version")
        if words[:1] != [-1]:
            return words
        if len(words) < 4 or words[1] != 1 or len(words) < 3 + words[2]:
            raise FileRefusedError("the token list")
        return words[3 : 3 + words[2]]

    def _memory_block(self, reader: "_Reader", count: int) -> list[int]:
        streams, cells = reader.take("<II")
        if streams != self.streams:
            raise FileRefusedError("the number of streams")
        words: list[int] = []
        if cells:
            reader.skip(12 * cells)
            _, layers, _, _ = reader.take("<IIII")
            for _ in range(2 * layers):
                k_type, row = reader.take("<iQ")
                if k_type != self.k_type:
                    raise FileRefusedError("the type of the keys")
                words = _words(reader.skip(row * cells), row)
        reader.skip(4 * (streams - 1))
        if cells != count:
            raise FileRefusedError("the number of cells")
        return words

    @staticmethod
    def _checkpoints(reader: "_Reader") -> list[int]:
        """Where the memory can be rolled back to; nothing where the appendix is damaged, as in the real engine."""
        try:
            if reader.skip(4) != b"SCKP":
                return []
            _, count = reader.take("<II")
            places = []
            for _ in range(count):
                place, _, _, length = reader.take("<QiiQ")
                reader.skip(length + 16)
                places.append(int(place))
        except FileFatalError:
            return []
        return places


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._place = 0

    def skip(self, count: int) -> bytes:
        taken = self._raw[self._place : self._place + count]
        if len(taken) < count:
            raise FileFatalError
        self._place += count
        return taken

    def take(self, shape: str) -> tuple[int, ...]:
        return struct.unpack(shape, self.skip(struct.calcsize(shape)))

    def array(self, count: int) -> "array[int]":
        words = array("i")
        words.frombytes(self.skip(4 * count))
        return words


def _rows(words: list[int]) -> bytes:
    """One row a token: its word first, the rest empty."""
    raw = array("i", words).tobytes()
    rows = bytearray(len(words) * ROW_BYTES)
    for byte in range(4):
        rows[byte::ROW_BYTES] = raw[byte::4]
    return bytes(rows)


def _words(rows: bytes, row: int) -> list[int]:
    raw = bytearray(len(rows) // row * 4)
    for byte in range(4):
        raw[byte::4] = rows[byte::row]
    words = array("i")
    words.frombytes(raw)
    return words.tolist()
