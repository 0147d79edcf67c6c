"""The vocabulary of a GGUF file. Only the file's head is read, through a window that never leaves the file: a length
that lies ends the reading, whatever it claims."""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from splitproxy.tokens.names import PURPOSES, special_names
from splitproxy.tokens.vocabulary import (
    BrokenFile,
    Ends,
    UnsupportedVocabulary,
    Vocabulary,
    merge_pair,
    pattern_named,
    word_bytes,
)

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LIMIT = 1 << 24  # entries of a list; the largest vocabularies have 2% of that
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PREFIX = "tokenizer.ggml."
_WANTED = ("general.name", "general.architecture")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def read(path: Path) -> Vocabulary:
    """The vocabulary of a model file. Raises BrokenFile, UnsupportedVocabulary, and OSError."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise BrokenFile("is no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as window:
            return _vocabulary(_Head(window).values())


class _Head:
    """Walks through the key-value part of a file."""

    def __init__(self, window: mmap.mmap) -> None:
        self._window = window
        self._size = len(window)
        self._place = len(MAGIC)

    def values(self) -> dict[str, Any]:
        """The values that matter for a vocabulary, by their keys."""
        version = self._scalar("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise BrokenFile(
                f"is a GGUF file of version {version}; versions {known} in little-endian order can be read"
            )
        self._scalar("Q")  # the number of tensors
        found = {}
        for _ in range(self._count(self._scalar("Q"), 13)):
            key = self._text()
            keep = key.startswith(_PREFIX) or key in _WANTED
            value = self._value(self._scalar("I"), keep=keep)
            if keep:
                found[key] = value
        return found

    def _take(self, length: int) -> int:
        """Go on by a number of bytes; where they begin."""
        start = self._place
        if length > self._size - start:
            raise BrokenFile("is cut off, or a length in it is wrong: it leads behind the end of the file")
        self._place += length
        return start

    def _scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self._window, self._take(struct.calcsize("<" + code)))[0]

    def _count(self, claimed: int, least_bytes: int) -> int:
        """A number of entries, if that many can be in the rest of the file."""
        if claimed > min(_LIMIT, (self._size - self._place) // least_bytes):
            raise BrokenFile(f"claims to hold a list of {claimed} entries, more than there can be")
        return claimed

    def _text(self) -> str:
        length = self._scalar("Q")
        start = self._take(length)
        return self._window[start : start + length].decode("utf-8", "surrogateescape")

    def _value(self, kind: int, *, keep: bool) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"), keep=keep)
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        raise BrokenFile(f"holds a value of the unknown kind {kind}")

    def _array(self, kind: int, claimed: int, *, keep: bool) -> list[Any]:
        if kind in _SCALARS:
            code = f"<{self._count(claimed, struct.calcsize('<' + _SCALARS[kind]))}{_SCALARS[kind]}"
            start = self._take(struct.calcsize(code))
            return list(struct.unpack_from(code, self._window, start)) if keep else []
        if kind != _STRING:
            raise BrokenFile(f"holds a list of the unknown kind {kind}")
        texts = (self._text() for _ in range(self._count(claimed, 8)))
        return list(texts) if keep else [text for text in texts if text is None]


def _vocabulary(values: dict[str, Any]) -> Vocabulary:
    get = _Typed(values)
    model = get.one("model", str, None)
    if model is None:
        raise BrokenFile("holds no tokenizer (tokenizer.ggml.model)")
    if model != "gpt2":
        raise UnsupportedVocabulary(f"its tokenizer is of the kind {model!r}, not byte-level BPE")
    _refuse_strips(values)
    pattern = pattern_named(get.one("pre", str, "default"))
    tokens, merges = get.many("tokens", str), get.many("merges", str)
    types = get.many("token_type", int) if _PREFIX + "token_type" in values else [_NORMAL] * len(tokens)
    if len(types) < len(tokens):
        raise BrokenFile(f"has {len(tokens)} tokens, but {len(types)} token types")
    special = _special(tokens, types, get)
    words = {word: token for token, text in enumerate(tokens) if (word := word_bytes(text))}
    return Vocabulary(words, list(_pairs(merges)), special, pattern, _ends(get, len(tokens), begins=pattern.begins))


class _Typed:
    """Values of the tokenizer, each of the kind that it must be."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def one(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(_PREFIX + name, default)
        if value is not default and not isinstance(value, kind):
            raise BrokenFile(f"holds {_PREFIX}{name} as something else than {kind.__name__}")
        return value

    def many(self, name: str, kind: type) -> list[Any]:
        value = self._values.get(_PREFIX + name)
        if not isinstance(value, list) or not value or not all(isinstance(entry, kind) for entry in value):
            raise BrokenFile(f"holds no list {_PREFIX}{name}")
        return value


def _special(tokens: list[str], types: list[int], get: _Typed) -> dict[str, int]:
    """The tokens that are found before a text is cut into words."""
    named = special_names({purpose for purpose in PURPOSES if get.one(f"{purpose}_token_id", int, None) is not None})
    kinds = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    typed = enumerate(zip(tokens, types, strict=False))
    return {text: token for token, (text, kind) in typed if kind in kinds or text in named}


def _pairs(merges: list[str]) -> Iterator[tuple[bytes, bytes]]:
    for line in merges:
        if (pair := merge_pair(line)) is None:
            raise BrokenFile("holds a merge that is no pair of words")
        yield pair


def _ends(get: _Typed, size: int, *, begins: bool) -> Ends:
    def end(name: str, *, wanted: bool) -> int | None:
        if not get.one(f"add_{name}_token", bool, wanted):
            return None
        token = get.one(f"{name}_token_id", int, None)
        if token is None or not 0 <= token < size:
            raise UnsupportedVocabulary(f"prompts get a {name} token, but the file does not say which")
        return int(token)

    return Ends(end("bos", wanted=begins), end("eos", wanted=False))


def _refuse_strips(values: dict[str, Any]) -> None:
    """Models whose special tokens take the white space around them: engines know them by name."""
    name = str(values.get("general.name", "")).lower()
    if any(word in name for word in ("phi-3", "phi3", "modern-bert")):
        raise UnsupportedVocabulary("its special tokens take white space with them")
