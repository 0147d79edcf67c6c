"""The head of Strata's session files: enough to know that a file is one, whole, and fit for which engines.

Layout, little endian: 8 bytes of magic, u32 version, u32 size of this head (64), u64 fingerprint of the model, u64
fingerprint of the configuration, u64 length of the payload, 16 empty bytes, u64 hash of the first 56 bytes; then the
payload; then u64 hash of it and 8 bytes of end mark. The engine checks its hashes itself when it restores.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"STRSESS\x01"
END = b"STRSEND\x01"
VERSIONS = frozenset({1, 2})
_HEAD = struct.Struct("<8sIIQQQQQQ")
_TRAILER_BYTES = 16


@dataclass(frozen=True, slots=True)
class StrataFile:
    """What a session file's head says. Two files with the same fingerprints fit the same engines."""

    size_bytes: int
    version: int
    model: int
    configuration: int


def read_head(path: Path) -> StrataFile:
    """Read the head of a session file. Raises ValueError that says what is wrong with it, or OSError."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ValueError(f"it is cut off after {size_bytes} bytes")
        magic, version, head_bytes, model, configuration, payload_bytes, *_ = _HEAD.unpack(head)
        if magic != MAGIC or head_bytes != _HEAD.size:
            raise ValueError(f"it starts with {magic!r}, not with the mark of a session file")
        if version not in VERSIONS:
            raise ValueError(f"its format version {version} is unknown")
        if size_bytes != _HEAD.size + payload_bytes + _TRAILER_BYTES:
            raise ValueError(f"its payload of {payload_bytes} bytes does not fit into {size_bytes} bytes")
        file.seek(size_bytes - len(END))
        if file.read() != END:
            raise ValueError("its end mark is missing")
    return StrataFile(size_bytes, version, model, configuration)
