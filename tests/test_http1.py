"""HTTP/1.1 as a client speaks it: any split of an answer's bytes gives the same, and what is no answer is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.engines.http1 import AnswerReader, BrokenAnswer, Head, request_head
from tests.splits import cut, cuts

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(pieces: list[bytes], method: str = "POST", *, closed: bool = False) -> tuple[Head | None, bytes, bool]:
    """Head, body and whether the answer is complete."""
    reader = AnswerReader(method)
    body = b"".join([reader.feed(piece) for piece in pieces])
    if closed:
        reader.end()
    return reader.head, body, reader.complete


def outcome(pieces: list[bytes], method: str) -> object:
    """What becomes of an answer at the end of its connection, whatever it is."""
    try:
        return read(pieces, method, closed=True)
    except BrokenAnswer:
        return BrokenAnswer


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


# --- a request


def test_a_request_is_sent_as_it_is() -> None:
    """Method, target and fields are the caller's, in their order; host, length and the connection's end are added."""
    head = request_head("POST", "/v1/x?a=%2F", "engine:8081", [("X-A", "1"), ("x-a", "2")], 7)
    assert head == (
        b"POST /v1/x?a=%2F HTTP/1.1\r\nHost: engine:8081\r\nX-A: 1\r\nx-a: 2\r\nConnection: close\r\n"
        b"Content-Length: 7\r\n\r\n"
    )
    assert b"Content-Length" not in request_head("GET", "/", "engine", [], None)


def test_bytes_that_are_no_text_go_through() -> None:
    """A field may hold any bytes; they leave as they came."""
    value = b"\xff\xfe\xc3\xa9".decode("utf-8", "surrogateescape")
    assert b"X-A: \xff\xfe\xc3\xa9\r\n" in request_head("GET", "/", "engine", [("X-A", value)], None)


@pytest.mark.parametrize(
    ("method", "target", "field"),
    [("GET\r\n", "/", "x"), ("GET", "/\n", "x"), ("GET", "/", "x\r\nHost: other"), ("GET", "/", "x\0")],
)
def test_a_field_is_no_way_into_the_head(method: str, target: str, field: str) -> None:
    """A line break or a zero in a request's head is refused."""
    with pytest.raises(ValueError, match="line break"):
        request_head(method, target, "engine", [("X-A", field)], None)


# --- an answer


@pytest.mark.parametrize(
    ("answer", "method", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "GET", b"hello"),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", "GET", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", b""),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", "GET", b""),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "GET", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
         b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "POST", b"{}"),
        (STREAM_HEAD + chunked(b"data: 1\n\n", b"data: 2\n\n"), "POST", b"data: 1\n\ndata: 2\n\n"),
        (STREAM_HEAD + b"3;a=b \r\nabc\r\n00A \r\n0123456789\r\n0\r\nX-Sum: 1\r\nX: 2\r\n\r\n", "POST",
         b"abc0123456789"),
        (STREAM_HEAD + chunked(b"\r\n0\r\n\r\n", b"\r"), "POST", b"\r\n0\r\n\r\n\r"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\ncontent-length: 3\r\n\r\n" + chunked(b"x"), "GET", b"x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", "GET", b"{}"),
    ],
)  # fmt: skip
def test_an_answer_ends_by_itself(answer: bytes, method: str, body: bytes) -> None:
    """Each way to tell a body's end is known, and what follows the end is dropped."""
    for pieces in ([answer], [bytes([byte]) for byte in answer], [answer + b"HTTP/1.1 500 More\r\n\r\n"]):
        head, found, complete = read(pieces, method)
        assert head is not None
        assert (found, complete) == (body, True)
        assert head.status in (200, 204, 304)


def test_an_answer_of_http_1_0_ends_with_its_connection() -> None:
    """Without a length the body is all that comes until the connection is closed."""
    answer = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n"
    assert read([answer])[1:] == (b"data: 1\n\n", False)
    assert read([answer], closed=True)[1:] == (b"data: 1\n\n", True)


def test_a_head_is_given_as_it_came() -> None:
    """Fields keep their order, case and bytes; the media type is told without parameters."""
    block = b"HTTP/1.1 418 I'm\xff\r\nX-A:  1 \r\nx-a:\r\nX-B: \xff\xc3\xa9\r\nContent-Type: Text/X ; a=b\r\n"
    head = read([block + b"Content-Length: 0\r\n\r\n"])[0]
    assert head is not None
    value = b"\xff\xc3\xa9".decode("utf-8", "surrogateescape")
    assert head.headers == (
        ("X-A", "1"), ("x-a", ""), ("X-B", value), ("Content-Type", "Text/X ; a=b"), ("Content-Length", "0"),
    )  # fmt: skip
    assert (head.status, head.media_type, head.values("x-a")) == (418, "text/x", ["1", ""])


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"HTT", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell",
        STREAM_HEAD, STREAM_HEAD + b"5\r\nhell", STREAM_HEAD + b"5\r\nhello\r\n", STREAM_HEAD + b"0\r\n",
        STREAM_HEAD + b"0\r\nX: 1\r\n",
    ],
)  # fmt: skip
def test_an_answer_that_breaks_off(answer: bytes) -> None:
    """Half an answer is never taken for a whole one."""
    assert outcome([answer], "POST") is BrokenAnswer


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 99 x\r\n\r\n", b"HTTP/1.1 2000 x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno field\r\n\r\n", b"HTTP/1.1 200 OK\r\nA b: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: \0\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: a\x01b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: a\x7fb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: 1\r\n folded\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: 1\rB: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        STREAM_HEAD + b"\r\n", STREAM_HEAD + b"+5\r\nhello\r\n", STREAM_HEAD + b"0x5\r\nhello\r\n",
        STREAM_HEAD + b"5_0\r\n", STREAM_HEAD + b"f" * 16 + b"\r\n", STREAM_HEAD + b"5\r\nhello!\r\n",
        STREAM_HEAD + b"5\r\nhello\n0\r\n\r\n", STREAM_HEAD + b"5;" + b"x" * 10000 + b"\r\n",
        STREAM_HEAD + b"5" * 10000, STREAM_HEAD + b"0\r\n" + b"A: 12345\r\n" * 10000,
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000,
    ],
)  # fmt: skip
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    """What breaks the rules is refused as soon as it is seen, wherever it is cut."""
    for pieces in ([answer], [bytes([byte]) for byte in answer]):
        with pytest.raises(BrokenAnswer):
            read(pieces)


BODIES = st.one_of(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6).map(lambda chunks: STREAM_HEAD + chunked(*chunks)),
    st.binary(max_size=60).map(lambda body: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)),
    st.binary(max_size=60).map(lambda body: b"HTTP/1.0 200 OK\r\n\r\n" + body),
)
WORDS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n", b"\r\n", b"\r", b"\n", b"0\r\n\r\n", b"3\r\nabc\r\n", b"3\r\nabcd\r\n", b"a",
        b"5;x=y\r\n", b"X: 1\r\n", b"\0", b"+3\r\n",
    ]
)  # fmt: skip


@given(BODIES, cuts())
def test_any_split_gives_the_same_answer(answer: bytes, places: list[int]) -> None:
    """However the network cuts an answer, its head and body are the same, and no byte of it is lost."""
    assert outcome(cut(answer, places), "POST") == outcome([answer], "POST") != BrokenAnswer


@given(st.lists(WORDS | st.binary(max_size=8), max_size=12).map(b"".join), cuts(), st.sampled_from(["GET", "HEAD"]))
def test_whatever_comes_is_an_answer_or_broken(data: bytes, places: list[int], method: str) -> None:
    """Nothing but BrokenAnswer escapes, and whether it does depends on the bytes alone."""
    assert outcome(cut(data, places), method) == outcome([data], method)
