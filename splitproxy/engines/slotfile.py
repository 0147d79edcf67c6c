"""The head of llama-server's session files: enough to know that a file holds the tokens it should.

The payload behind it is the engine's own matter. Layout, little endian: u32 magic, u32 version, u32 word count, the
words (i32). A list that starts with -1 is: -1, 1, token count, tokens, media; any other is the token ids themselves.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from splitproxy.model import Tokens

MAGIC = 0x67677371
VERSIONS = frozenset({2, 3, 4})
_LONGEST_WORDS = 64 * 1024**2  # more than any context: a length beyond it is a damaged file


@dataclass(frozen=True, slots=True)
class SlotFile:
    """What a session file's head says."""

    size_bytes: int
    version: int
    tokens: Tokens
    has_media: bool


def read_head(path: Path) -> SlotFile:
    """Read the head of a session file. Raises ValueError that says what is wrong with it, or OSError."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(12)
        if len(head) < 12:
            raise ValueError(f"it is cut off after {size_bytes} bytes")
        magic, version, words = struct.unpack("<III", head)
        if magic != MAGIC:
            raise ValueError(f"it starts with {magic:#010x}, not with the mark of a session file")
        if version not in VERSIONS:
            raise ValueError(f"its format version {version} is unknown")
        if words > _LONGEST_WORDS or 12 + 4 * words > size_bytes:
            raise ValueError(f"its token list of {words} words does not fit into {size_bytes} bytes")
        listed = file.read(4 * words)
    if len(listed) < 4 * words:
        raise ValueError("its token list is cut off")
    return SlotFile(size_bytes, version, *_token_list(listed))


def _token_list(listed: bytes) -> tuple[Tokens, bool]:
    if listed[:4] != b"\xff\xff\xff\xff":
        return Tokens.from_bytes(listed), False
    if len(listed) < 16:
        raise ValueError("its token list is cut off")
    form, count = struct.unpack("<II", listed[4:12])
    if form != 1 or 12 + 4 * count + 4 > len(listed):
        raise ValueError("its token list has an unknown form")
    (media,) = struct.unpack("<I", listed[12 + 4 * count : 16 + 4 * count])
    return Tokens.from_bytes(listed[12 : 12 + 4 * count]), media > 0
