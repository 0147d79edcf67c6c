"""Merges turned into ranks: whatever the list of merges, encoding gives what merging pair by pair gives."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitproxy.tokens.codec import Codec
from splitproxy.tokens.patterns import Pattern
from splitproxy.tokens.ranking import ranked
from splitproxy.tokens.vocabulary import UnsupportedVocabulary, Vocabulary

Merge = tuple[bytes, bytes]
WHOLE = r"[a-z]+|[^a-z]+"

letters = st.text("abc", min_size=1, max_size=3).map(str.encode)
merge_lists = st.lists(st.tuples(letters, letters), min_size=1, max_size=14, unique=True)
texts = st.text("abc", min_size=1, max_size=14)


def merged(word: bytes, merges: Sequence[Merge]) -> list[bytes]:
    """What an engine makes of a word: the neighbours whose merge comes first in the list, the leftmost of them."""
    order = {pair: place for place, pair in reversed(list(enumerate(merges)))}
    parts = [word[place : place + 1] for place in range(len(word))]
    while True:
        found = [
            (order[pair], place)
            for place in range(len(parts) - 1)
            if (pair := (parts[place], parts[place + 1])) in order
        ]
        if not found:
            return parts
        _, place = min(found)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def vocabulary(merges: Sequence[Merge], *, whole_words: bool = False, more: Sequence[bytes] = ()) -> Vocabulary:
    """A vocabulary of all bytes and all that merges spell, its ids in no order of use."""
    spelled = {*(left + right for left, right in merges), *more}
    words = {word: token for token, word in enumerate(sorted(spelled, reverse=True))}
    words |= {bytes([byte]): len(words) + byte for byte in range(256)}
    return Vocabulary(words, merges, {}, Pattern(WHOLE, whole_words=whole_words))


@settings(max_examples=600, deadline=None)
@given(merge_lists, st.lists(texts, min_size=1, max_size=6))
def test_any_list_of_merges_is_followed(merges: list[Merge], said: list[str]) -> None:
    """Dead merges, merges out of order and several merges of one word give the ids of merging pair by pair."""
    made = vocabulary(merges)
    codec = Codec(made)
    for text in said:
        assert codec.plain(text).to_list() == [made.words[word] for word in merged(text.encode(), merges)]


@settings(max_examples=400, deadline=None)
@given(merge_lists, st.lists(letters, max_size=4), st.lists(texts, min_size=1, max_size=6))
def test_whole_words_are_taken_as_they_stand(merges: list[Merge], more: list[bytes], said: list[str]) -> None:
    """Where a family takes whole words, a piece that is a word is its token, and any other is merged pair by pair."""
    made = vocabulary(merges, whole_words=True, more=more)
    try:
        codec = Codec(made)
    except UnsupportedVocabulary:
        return  # told apart in the next test
    for text in [*said, *(word.decode() for word in more)]:
        word = text.encode()
        parts = [word] if word in made.words else merged(word, merges)
        assert codec.plain(text).to_list() == [made.words[part] for part in parts]


def test_a_word_that_only_looks_mergeable_is_refused() -> None:
    """A whole word that two tokens spell without a merge cannot be expressed by ranks: the engine is asked."""
    made = vocabulary([(b"a", b"b")], whole_words=True, more=[b"abc"])
    with pytest.raises(UnsupportedVocabulary, match="whole"):
        Codec(made)


def test_a_word_that_no_merge_reaches_is_never_used() -> None:
    """Without the habit of whole words, a word of the vocabulary is no token of a text unless merges spell it."""
    made = vocabulary([(b"a", b"b")], more=[b"abc"])
    assert Codec(made).plain("abc").to_list() == [made.words[b"ab"], made.words[b"c"]]


def test_a_merge_can_wait_for_a_later_one() -> None:
    """A merge whose side comes about by a merge further down the list happens as soon as it can."""
    merges = [(b"a", b"bc"), (b"b", b"c"), (b"c", b"c")]
    assert ranked(merges)[b"abc"] < ranked(merges)[b"bc"]
    assert merged(b"abcc", merges) == [b"abc", b"c"]


def test_a_dead_merge_gets_no_rank() -> None:
    """A pair that an earlier merge always breaks up has no rank: tiktoken would find another pair for the word."""
    assert b"abc" not in ranked([(b"a", b"b"), (b"b", b"c"), (b"a", b"bc")])
