"""The ids of an answer, at every cut of its bytes."""

import json

import pytest

from splitproxy.api.answer_ids import IdReader
from splitproxy.model import Tokens


def stream(*lists: list[int]) -> bytes:
    events = [{"content": 'say "tokens":[9] and \\', "tokens": ids, "preserved_tokens": [7]} for ids in lists]
    return b"".join(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" for event in events)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (stream([1], [22], [3, 4], []), [1, 22, 3, 4]),
        (json.dumps({"content": "whole", "tokens": [511, 0, 70000]}).encode(), [511, 0, 70000]),
    ],
    ids=["stream", "whole"],
)
def test_ids_are_found_at_every_cut(text: bytes, ids: list[int]) -> None:
    """Wherever the bytes are cut in two, and byte by byte, the same ids are found, none of them in the text."""
    for cut in range(len(text) + 1):
        reader = IdReader()
        reader.feed(text[:cut])
        reader.feed(text[cut:])
        assert reader.ids(len(ids)) == Tokens(ids), cut
    reader = IdReader()
    for place in range(len(text)):
        reader.feed(text[place : place + 1])
    assert reader.ids(len(ids)) == Tokens(ids)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_incomplete_list_is_no_answer(count: int) -> None:
    """Ids that are not as many as the engine counted are not used."""
    reader = IdReader()
    reader.feed(stream([1], [2]))
    assert reader.ids(count) is None


def test_no_ids_are_none() -> None:
    """An API that gives none gives no empty answer either."""
    reader = IdReader()
    reader.feed(b'{"choices":[]}')
    assert reader.ids(0) is None
