"""What a tokenizer file says, whatever its format."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from splitproxy.tokens.patterns import PATTERNS, Pattern


class UnsupportedVocabulary(Exception):  # noqa: N818 - nobody's fault: the engine is asked instead
    """This vocabulary cannot be encoded here with certainty; the message says why."""


class BrokenFile(Exception):  # noqa: N818 - becomes a fault of the configuration
    """A tokenizer file is not what it should be; the message goes behind its path and a colon."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The ids that every prompt gets at its ends, None for none."""

    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-level vocabulary.

    `words` maps the bytes of ordinary tokens to ids. `merges` are pairs of byte strings, the first wins; None means
    that the words' ids are their ranks. `special` tokens are found in a text before it is cut into words. `ends` is
    None where the file does not tell.
    """

    words: dict[bytes, int] = field(repr=False)
    merges: Sequence[tuple[bytes, bytes]] | None = field(repr=False)
    special: dict[str, int] = field(repr=False)
    pattern: Pattern
    ends: Ends | None = None


def pattern_named(name: str) -> Pattern:
    """The pattern of a family. Raises UnsupportedVocabulary for one that is not known."""
    try:
        return PATTERNS[name]
    except KeyError:
        raise UnsupportedVocabulary(f"its pre-tokenizer {name!r} is not known here") from None


def byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary -> the byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


_SYMBOLS = byte_symbols()
_BYTES = str.maketrans({symbol: chr(byte) for symbol, byte in _SYMBOLS.items()})
_KNOWN = frozenset(_SYMBOLS)


def word_bytes(text: str) -> bytes | None:
    """The bytes that a token's text stands for; None where it holds a character that stands for none."""
    return text.translate(_BYTES).encode("latin-1") if _KNOWN.issuperset(text) else None


def merge_pair(text: str) -> tuple[bytes, bytes] | None:
    """The two sides of a merge as files write it, "left right"; None where it is no such line."""
    left, blank, right = text.partition(" ")
    sides = word_bytes(left), word_bytes(right)
    return (sides[0], sides[1]) if blank and sides[0] and sides[1] else None
