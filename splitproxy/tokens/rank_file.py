"""Vocabularies of ranks: a .tiktoken file, and tiktoken's own encodings from its cache."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import tiktoken
import tiktoken.load

from splitproxy.tokens.names import special_words
from splitproxy.tokens.vocabulary import BrokenFile, UnsupportedVocabulary, Vocabulary, pattern_named

_LIMIT_BYTES = 256 * 2**20
# How engines cut text for models with these encodings.
_FAMILIES = {
    "gpt2": "gpt-2", "r50k_base": "gpt-2", "p50k_base": "gpt-2", "p50k_edit": "gpt-2", "cl100k_base": "dbrx",
    "o200k_base": "gpt-4o", "o200k_harmony": "gpt-4o",
}  # fmt: skip


def read(path: Path, family: str, special: Mapping[str, int]) -> Vocabulary:
    """The vocabulary of a rank file: lines of a word in base64, a blank, its id. `family` names the pattern.

    Raises BrokenFile, UnsupportedVocabulary, and OSError.
    """
    if not family:
        raise BrokenFile("does not say how text is cut: tokenizer.pattern must name it, for example qwen2")
    if path.stat().st_size > _LIMIT_BYTES:
        raise BrokenFile(f"is larger than {_LIMIT_BYTES // 2**20} MiB, which no rank file is")
    words = dict(_ranks(path.read_bytes()))
    if not words:
        raise BrokenFile("holds no ranks")
    return _vocabulary(words, dict(special), family)


def _ranks(content: bytes) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                word, rank = line.split()
                yield base64.b64decode(word, validate=True), int(rank)
            except (ValueError, binascii.Error):
                raise BrokenFile(f"is no rank file: line {number} is not a word in base64 and a number") from None


def named(name: str, family: str, special: Mapping[str, int]) -> Vocabulary:
    """One of tiktoken's own encodings, from its cache. Raises BrokenFile where the cache does not hold it."""
    if name not in tiktoken.list_encoding_names():
        raise BrokenFile(f"is no encoding of tiktoken; it has {', '.join(sorted(tiktoken.list_encoding_names()))}")
    with _without_download():
        encoding = tiktoken.get_encoding(name)
    wanted = family or _FAMILIES.get(name, "")
    if not wanted:
        raise UnsupportedVocabulary("its pattern is not known here; tokenizer.pattern can name it")
    return _vocabulary(dict(encoding._mergeable_ranks), dict(special or encoding._special_tokens), wanted)


@contextmanager
def _without_download() -> Iterator[None]:
    """tiktoken fetches what its cache lacks; a proxy that starts must not."""
    fetch = tiktoken.load.read_file
    tiktoken.load.read_file = _refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        tiktoken.load.read_file = fetch


def _refuse(_address: str) -> NoReturn:
    raise BrokenFile("is not in tiktoken's cache (TIKTOKEN_CACHE_DIR), and nothing is fetched at the start")


def _vocabulary(words: dict[bytes, int], special: dict[str, int], family: str) -> Vocabulary:
    ids = [*words.values(), *special.values()]
    if len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= 2**31:
        raise BrokenFile("gives an id twice, or one that is no id")
    return Vocabulary(words, None, special_words(words.items()) | special, pattern_named(family))
