"""Text to ids with one vocabulary. Special tokens cut a text into pieces that are encoded independently, and pieces are
remembered: the next turn of a conversation encodes only what is new.

Calls come from several threads; the memory of pieces is guarded.
"""

import itertools
import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import tiktoken

from splitproxy.model import Tokens
from splitproxy.tokens.ranking import parts, ranked
from splitproxy.tokens.special import Cutter
from splitproxy.tokens.vocabulary import Ends, UnsupportedVocabulary, Vocabulary

MEMORY_BYTES = 64 * 2**20
# The expression engine gives up on a run of white space of a million characters, with a noise on the error output.
_LONGEST_RUN = 500_000
_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN}}}")
_ENTRY_BYTES = 200  # of a remembered piece, beside its text and ids


class Unencodable(Exception):  # noqa: N818 - the engine is asked instead
    """This one text cannot be encoded here."""


class Codec:
    """An encoder of one vocabulary. Raises UnsupportedVocabulary where its ids could not be the engine's."""

    def __init__(self, vocabulary: Vocabulary, memory_bytes: int = MEMORY_BYTES) -> None:
        self.special = vocabulary.special
        self.words = vocabulary.words
        self.ends = vocabulary.ends or Ends()
        self.knows_ends = vocabulary.ends is not None
        self._cutter = Cutter(vocabulary.special)
        self._words = _Words(vocabulary)
        self._memory = _Memory(memory_bytes)

    @property
    def remembered_bytes(self) -> int:
        return self._memory.size_bytes

    def encode(self, text: str, *, remember: bool = True) -> Tokens:
        """The ids of a whole prompt, with those at its ends. Raises Unencodable."""
        first, last = self.ends.first, self.ends.last
        head = [] if first is None else [_packed([first])]
        tail = [] if last is None else [_packed([last])]
        return Tokens.from_bytes(b"".join([*head, *self._pieces(text, remember=remember), *tail]))

    def plain(self, text: str) -> Tokens:
        """The ids of a text alone. Raises Unencodable."""
        return Tokens.from_bytes(b"".join(self._pieces(text, remember=False)))

    def _pieces(self, text: str, *, remember: bool) -> list[bytes]:
        found = []
        for piece in self._cutter.cut(text):
            if isinstance(piece, int):
                found.append(_packed([piece]))
                continue
            ids = self._memory.get(piece)
            if ids is None:
                ids = _packed(self._words.encode(piece))
                if remember:
                    self._memory.put(piece, ids)
            found.append(ids)
        return found


class _Words:
    """Encodes text without special tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ranks, self._ids = _ranks_and_ids(vocabulary)
        self._known = max(vocabulary.words.values(), default=-1) + 1  # from here on: bytes without a token
        self._complete = all(bytes([byte]) in vocabulary.words for byte in range(256))
        expression = vocabulary.pattern.expression
        self._encoding = tiktoken.Encoding("model", pat_str=expression, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> Sequence[int]:
        if len(text) > _LONGEST_RUN and _LONG_RUN.search(text):
            raise Unencodable("a run of white space is too long")
        try:
            ids: Sequence[int] = self._encoding.encode_ordinary(text)
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # of the Rust side, and no Exception
                raise Unencodable("the expression engine gave up") from None
            raise
        if self._ids is not None:
            ids = list(map(self._ids.__getitem__, ids))
        # Engines drop a byte that their vocabulary lacks.
        return ids if self._complete else [token for token in ids if token < self._known]


def _ranks_and_ids(vocabulary: Vocabulary) -> tuple[dict[bytes, int], list[int] | None]:
    """What tiktoken is given, and the id of each rank; None where ranks are ids."""
    words = vocabulary.words
    if vocabulary.merges is None:
        return _with_all_bytes(dict(words)), None
    ranks = ranked(vocabulary.merges)
    if any(len(word) > 1 and word not in words for word in ranks):
        raise UnsupportedVocabulary("its merges make words that it does not hold")
    # tiktoken takes a piece that has a rank as it stands. So a word that no merge reaches has a rank only in a family
    # that does the same; and there merging must not come upon it.
    if vocabulary.pattern.whole_words:
        special = {text.encode() for text in vocabulary.special}
        unreached = [word for word in words if word not in ranks and word not in special]
        if any(len(parts(word, ranks)) == 2 for word in unreached):
            raise UnsupportedVocabulary("it holds words that are whole in a text of their own alone")
        last = max(ranks.values())
        ranks.update((word, last + count) for count, word in enumerate(unreached, 1))
    order = sorted(ranks, key=ranks.__getitem__)
    spare = iter(range(max(words.values()) + 1, max(words.values()) + 257))
    ids = [words[word] if word in words else next(spare) for word in order]
    merged = [token for token, word in zip(ids, order, strict=True) if len(word) > 1]
    if all(a < b for a, b in itertools.pairwise(merged)):
        return dict(zip(order, ids, strict=True)), None
    return {word: place for place, word in enumerate(order)}, ids


def _with_all_bytes(ranks: dict[bytes, int]) -> dict[bytes, int]:
    """tiktoken needs every byte; those that a vocabulary lacks get ids that do not exist."""
    missing = [bytes([byte]) for byte in range(256) if bytes([byte]) not in ranks]
    ranks.update((word, count) for count, word in enumerate(missing, max(ranks.values(), default=-1) + 1))
    return ranks


def _packed(ids: Sequence[int]) -> bytes:
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class _Memory:
    """Pieces and their ids, the latest used ones, up to a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, piece: str) -> bytes | None:
        with self._lock:
            if (ids := self._entries.get(piece)) is not None:
                self._entries.move_to_end(piece)
            return ids

    def put(self, piece: str, ids: bytes) -> None:
        if (size := _size(piece, ids)) > self._limit_bytes:
            return
        with self._lock:
            if piece in self._entries:
                return  # another thread was quicker
            self._entries[piece] = ids
            self.size_bytes += size
            while self.size_bytes > self._limit_bytes:
                self.size_bytes -= _size(*self._entries.popitem(last=False))


def _size(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + _ENTRY_BYTES
