"""What the records promise: tokens compare as memory and show no ids; a request record knows its path."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.model import (
    Api,
    Ask,
    Failure,
    Figures,
    HandoverFigures,
    Outcome,
    Reason,
    RequestRecord,
    Route,
    RouteKind,
    Tokens,
)

# Ids that differ in one byte alone show a comparison that loses its place within an id.
IDS = st.lists(st.sampled_from([0, 1, 2, 256, 65536, 16777216, 16777217]), max_size=70)


def shared(a: list[int], b: list[int]) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


@given(common=IDS, a=IDS, b=IDS)
def test_the_common_prefix_is_what_a_plain_loop_finds(common: list[int], a: list[int], b: list[int]) -> None:
    """Comparing blocks of memory gives the count that comparing id by id gives, both ways round."""
    a, b = common + a, common + b
    assert Tokens(a).common_prefix(Tokens(b)) == shared(a, b)
    assert Tokens(b).common_prefix(Tokens(a)) == shared(a, b)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 64, 65, 400])
def test_the_common_prefix_ends_at_any_place(length: int) -> None:
    """A difference at each single place is found at that place."""
    ids = list(range(length))
    for place in range(length):
        other = [*ids[:place], -5, *ids[place + 1 :]]
        assert Tokens(ids).common_prefix(Tokens(other)) == place


@given(ids=IDS, count=st.integers(-3, 80))
def test_head_is_the_first_ids(ids: list[int], count: int) -> None:
    """`head` takes at most what is there, and nothing for a count below zero."""
    assert Tokens(ids).head(count) == Tokens(ids[: max(count, 0)])


@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_ids_survive_packing(ids: list[int]) -> None:
    """Ids come back as they were, through a list and through the bytes of a session file."""
    tokens = Tokens(ids)
    assert tokens.to_list() == ids
    assert len(tokens) == len(ids)
    assert Tokens.from_bytes(tokens.to_bytes()) == tokens
    assert hash(Tokens(ids)) == hash(tokens)


def test_bytes_are_little_endian() -> None:
    """Session files are little endian, whatever machine this is."""
    assert Tokens([1, 258]).to_bytes() == bytes([1, 0, 0, 0, 2, 1, 0, 0])


@pytest.mark.parametrize("raw", [b"\0", b"\0\0\0", b"\0\0\0\0\0"])
def test_part_of_an_id_is_refused(raw: bytes) -> None:
    """Bytes that are no whole ids are an error, not a shorter prompt."""
    with pytest.raises(ValueError, match="4 bytes"):
        Tokens.from_bytes(raw)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_id_beyond_32_bits_is_refused(value: int) -> None:
    """An id that cannot be one is an error, not another id."""
    with pytest.raises(OverflowError):
        Tokens([value])


def test_tokens_equal_only_tokens() -> None:
    """Tokens are not equal to what merely holds the same ids."""
    assert Tokens([1, 2]) != [1, 2]
    assert Tokens([1, 2]) != array("i", [1, 2]).tobytes()


def test_representations_hold_no_prompt() -> None:
    """What may end in a log or a traceback shows neither ids nor text."""
    assert repr(Tokens([31337, 4711])) == "<2 tokens>"
    assert str(Tokens([31337])) == "<1 tokens>"
    ask = Ask(Api.COMPLETIONS, "/v1/completions", b'{"prompt":"secret"}', prompt="secret")
    assert "secret" not in repr(ask)


def record(route: Route | None = None, **fields: object) -> RequestRecord:
    known: dict[str, object] = {
        "request_id": "r", "api": Api.CHAT, "stream": True, "outcome": Outcome.OK, "status": 200, "step": "decode",
        "route": route, "engine": "writer", "queue_ms": 0.0, "tokenize_ms": 0.0, "first_byte_ms": 0.0, "total_ms": 0.0,
    }  # fmt: skip
    return RequestRecord(**{**known, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("route", "failure", "path"),
    [
        (None, None, "local"),
        (Route(RouteKind.LOCAL, Reason.WARM, "writer"), None, "local"),
        (Route(RouteKind.HANDOVER, Reason.WORTH_MOVING, "writer", "reader"), None, "handover"),
        (Route(RouteKind.HANDOVER, Reason.WORTH_MOVING, "writer", "reader"), Failure("save", "died"), "fallback"),
    ],
)
def test_the_path_tells_how_a_prompt_was_read(route: Route | None, failure: Failure | None, path: str) -> None:
    """A failed handover is a fallback; a request that was never routed counts as local."""
    assert record(route, failure=failure).path == path


def test_the_added_time_is_what_no_engine_and_no_queue_took() -> None:
    """Our own share of the first byte leaves out the queue, both engines' reading, and the session's way."""
    figures = Figures(cached_tokens=9, read_tokens=1, prompt_ms=7.0, answer_tokens=3, answer_ms=50.0)
    cost = HandoverFigures(100.0, 10.0, 5.0, 1, 9, 0)
    assert record(first_byte_ms=200.0, queue_ms=30.0, figures=figures, handover=cost).added_first_byte_ms == 48.0
    assert record(first_byte_ms=20.0, queue_ms=3.0, figures=figures).added_first_byte_ms == 10.0
    assert record(first_byte_ms=5.0, queue_ms=3.0, figures=figures).added_first_byte_ms == 0.0
    assert record(first_byte_ms=None, figures=figures).added_first_byte_ms is None
    assert record(first_byte_ms=5.0).added_first_byte_ms is None
