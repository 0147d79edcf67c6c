"""Event streams: events come out whole wherever the bytes are cut, and pings and errors are events themselves."""

import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.api.sse import EventReader, error_event, keep_alive, progress_event
from splitproxy.model import Api
from tests.splits import cut, cuts

STREAM = (
    b": a comment\n\n"
    b'data: {"a":1}\n\n'
    b"event: ping\r\ndata:  two words \r\n\r\n"
    b"data: first\ndata: second\nid: 7\n\n"
    b":\n\n"
    b"event: nothing\n\n"
    b'data: "\xc3\xa9"\n\n'
    b"data:[DONE]\n\n"
)
EVENTS = [b'{"a":1}', b"two words", b"first\nsecond", b'"\xc3\xa9"', b"[DONE]"]


def read(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_events_come_out_in_order() -> None:
    """Comments and other fields are skipped, lines of one event are joined."""
    assert read(STREAM) == EVENTS


@given(
    st.lists(st.sampled_from([b"data:", b"data: x", b"\n", b"\r", b"\r\n", b"\n\n", b":", b"event: e", b"\xff"])).map(
        b"".join
    ),
    cuts(),
)
def test_any_bytes_survive_any_cuts(stream: bytes, places: list[int]) -> None:
    """Whatever comes, no error escapes, and the events are the same however it was cut."""
    assert read(*cut(stream, places)) == read(stream)


def test_events_survive_every_cut() -> None:
    """A cut anywhere, inside a line end included, changes nothing."""
    for place in range(len(STREAM) + 1):
        assert read(STREAM[:place], STREAM[place:]) == EVENTS


def test_events_survive_every_pair_of_cuts() -> None:
    """Nor do two cuts, however near."""
    for a, b in itertools.combinations(range(len(STREAM) + 1), 2):
        assert read(STREAM[:a], STREAM[a:b], STREAM[b:]) == EVENTS


def test_events_survive_byte_for_byte() -> None:
    """Nor does a stream that comes in single bytes."""
    assert read(*(STREAM[n : n + 1] for n in range(len(STREAM)))) == EVENTS


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_an_event_is_given_as_soon_as_it_ends(end: bytes) -> None:
    """An event does not wait for the next one, and half an event is none."""
    reader = EventReader()
    assert list(reader.feed(b"data: x" + end[:-1])) == []
    assert list(reader.feed(end[-1:])) == [b"x"]


@given(texts=st.lists(st.text("ab\u00e9 :{}", min_size=1).map(str.strip).filter(bool)), data=st.data())
def test_any_events_survive_any_cuts(texts: list[str], data: st.DataObject) -> None:
    """Whatever the events and the cuts, the same events come out."""
    stream = b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    assert read(*pieces) == [text.encode() for text in texts]


@pytest.mark.parametrize("api", Api)
def test_a_ping_says_nothing(api: Api) -> None:
    """A keep-alive is a whole event: a comment, or for Messages the ping that its clients know."""
    ping = keep_alive(api)
    assert ping.endswith(b"\n\n")
    assert read(ping) == ([b'{"type": "ping"}'] if api is Api.MESSAGES else [])
    assert ping.startswith(b"event: ping\n" if api is Api.MESSAGES else b":")


@pytest.mark.parametrize("api", Api)
def test_an_error_is_one_event(api: Api) -> None:
    """An error in a stream is one event with the error as its data, named where the API names its events."""
    body = orjson.dumps({"error": {"message": "two\nlines"}})
    event = error_event(api, body)
    assert read(event) == [body]
    assert event.startswith(b"event: error\n") == (api in (Api.MESSAGES, Api.RESPONSES))


@pytest.mark.parametrize("api", Api)
def test_progress_is_an_event_of_its_api(api: Api) -> None:
    """Each API that has words for progress says it in one whole event; the others say nothing."""
    told = {"total": 9, "cache": 1, "processed": 4, "time_ms": 2}
    event = progress_event(api, "r1", 5, told)
    if api in (Api.MESSAGES, Api.OTHER):
        assert event == b""
        return
    (data,) = EventReader().feed(event)
    assert orjson.loads(data)["prompt_progress"] == told
    assert event.startswith(b"event: response.in_progress\n") is (api is Api.RESPONSES)
