"""What a waiting client gets: headers once, pings between events alone, and errors in its API's words at any time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
import pytest

from splitproxy.api.client import Client, ClientLeft, Headers
from splitproxy.errors import Fault, RequestError
from splitproxy.model import Api

TINY_S = 0.001
NEVER_S = 3600.0
STREAM = [("Content-Type", "text/event-stream; charset=utf-8")]
UNBUFFERED = ("X-Accel-Buffering", "no")
PLAIN = [("Content-Type", "application/json")]
PING = b":\n\n"


class FakeSink:
    """Records what a client would see. `left` makes every later call fail, `stalled` makes the next start wait, and a
    client that is `slow` takes nothing at once."""

    def __init__(self) -> None:
        self.started: list[tuple[int, Headers, int | None]] = []
        self.pieces: list[bytes] = []
        self.ended = self.aborted = False
        self.left = False
        self.stalled: asyncio.Event | None = None
        self.slow = False
        self.waited = 0

    async def start(self, status: int, headers: Headers, length: int | None) -> None:
        assert not self.started, "started twice"
        if self.stalled is not None:
            await self.stalled.wait()
        self._check()
        self.started.append((status, headers, length))

    def send(self, data: bytes) -> bool:
        assert self.started, "written before the start"
        assert not self.ended
        if self.slow or self.left:
            return False
        self.pieces.append(data)
        return True

    async def write(self, data: bytes) -> None:
        assert self.started, "written before the start"
        self._check()
        self.waited += 1
        self.pieces.append(data)

    async def end(self) -> None:
        assert self.started
        self._check()
        self.ended = True

    def abort(self) -> None:
        self.aborted = True

    def _check(self) -> None:
        assert not self.ended
        if self.left:
            raise ClientLeft("gone")

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def pings(self) -> int:
        return self.pieces.count(PING)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - whatever a test waits for
            await asyncio.sleep(TINY_S)


@asynccontextmanager
async def waiting(
    sink: FakeSink, *, api: Api = Api.CHAT, stream: bool = True, keep_alive_s: float = TINY_S
) -> AsyncIterator[Client]:
    async with Client(sink, api, stream=stream, keep_alive_s=keep_alive_s, request_id="r1") as client:
        yield client


def error(fault: Fault = Fault.QUEUE_FULL, retry_after_s: int | None = 5) -> RequestError:
    return RequestError(fault, "too many", retry_after_s=retry_after_s)


# --- an answer


async def test_an_answer_goes_through_as_it_came() -> None:
    """Status, headers and length are the engine's, and each piece is written by itself."""
    sink = FakeSink()
    async with waiting(sink, keep_alive_s=NEVER_S) as client:
        assert not client.committed
        await client.begin(200, STREAM, length=None, one_piece=False)
        assert client.committed
        for piece in (b"data: 1\n\n", b"", b"data: 2", b"\n\n"):
            await client.relay(piece)
        await client.finish()
    assert sink.started == [(200, [*STREAM, UNBUFFERED], None)]
    assert sink.pieces == [b"data: 1\n\n", b"data: 2", b"\n\n"]
    assert sink.ended


async def test_a_piece_leaves_at_once_or_not_at_all() -> None:
    """A client that keeps up gets a piece without waiting; one that does not gets nothing until it is waited for."""
    sink = FakeSink()
    async with waiting(sink, keep_alive_s=NEVER_S) as client:
        await client.begin(200, STREAM, length=None, one_piece=False)
        assert client.send(b"data: 1\n\n")
        sink.slow = True
        assert not client.send(b"data: 2\n\n")
        assert (sink.pieces, sink.waited) == ([b"data: 1\n\n"], 0)
        await client.relay(b"data: 2\n\n")
    assert (sink.pieces, sink.waited) == ([b"data: 1\n\n", b"data: 2\n\n"], 1)


async def test_a_plain_answer_has_its_length() -> None:
    """An answer that is no stream keeps the engine's status and length, an error included."""
    sink = FakeSink()
    async with waiting(sink, stream=False) as client:
        await client.begin(404, PLAIN, length=2, one_piece=False)
        await client.relay(b"{}")
        await client.finish()
    assert (sink.started, sink.body, sink.ended) == ([(404, PLAIN, 2)], b"{}", True)


@pytest.mark.parametrize("kind", ["text/event-stream", "Text/Event-Stream; charset=utf-8"])
async def test_a_stream_has_no_length(kind: str) -> None:
    """Bytes may be added to a stream, so the engine's length would cut it; and nobody on the way may hold it back."""
    sink = FakeSink()
    async with waiting(sink, stream=False) as client:
        await client.begin(200, [("Content-Type", kind), ("x-accel-buffering", "yes")], length=9, one_piece=False)
        await client.relay(b"data: 1\n\n")
        await client.finish()
    assert sink.started == [(200, [("Content-Type", kind), UNBUFFERED], None)]


async def test_an_answer_in_one_piece_starts_at_its_end() -> None:
    """What is changed on the way is sent when its length is known."""
    sink = FakeSink()
    async with waiting(sink, stream=False) as client:
        await client.begin(200, PLAIN, length=7, one_piece=True)
        await client.relay(b'{"a":')
        await client.relay(b"12345}")
        assert not sink.started
        await client.finish()
    assert (sink.started, sink.pieces) == ([(200, PLAIN, 11)], [b'{"a":12345}'])


async def test_an_answer_in_one_piece_is_not_overtaken_by_pings() -> None:
    """Once an answer of its own has begun, no ping starts a stream in its place."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await client.begin(400, PLAIN, length=None, one_piece=True)
        await client.relay(b"{}")
        silence = asyncio.get_running_loop().time() + 20 * TINY_S
        await until(lambda: asyncio.get_running_loop().time() > silence)
        await client.finish()
    assert (sink.started, sink.pieces) == ([(400, PLAIN, 2)], [b"{}"])


# --- keep-alives


@pytest.mark.parametrize(
    ("api", "ping"),
    [(Api.CHAT, PING), (Api.RESPONSES, PING), (Api.MESSAGES, b'event: ping\ndata: {"type": "ping"}\n\n')],
)
async def test_a_waiting_stream_hears_something(api: Api, ping: bytes) -> None:
    """From acceptance on a streaming client gets headers, and pings in its API's own way."""
    sink = FakeSink()
    async with waiting(sink, api=api):
        await until(lambda: len(sink.pieces) >= 3)
    assert set(sink.pieces) == {ping}
    ((status, headers, length),) = sink.started
    assert (status, length) == (200, None)
    assert dict(headers) == {
        "Content-Type": "text/event-stream",
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",
    }


async def test_a_client_that_does_not_stream_simply_waits() -> None:
    """Nothing is sent ahead of an answer that has one status."""
    sink = FakeSink()
    async with waiting(sink, stream=False), waiting(other := FakeSink()):
        await until(lambda: other.pings >= 3)
    assert not sink.started


async def test_pings_end_with_the_answer() -> None:
    """After the end nothing is written any more."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await until(lambda: sink.pings >= 1)
        await client.begin(200, STREAM, length=None, one_piece=False)
        await client.relay(b"data: x\n\n")
        await client.finish()
        async with waiting(other := FakeSink()):
            await until(lambda: other.pings >= 3)
    assert sink.body.replace(PING, b"") == b"data: x\n\n"


@pytest.mark.parametrize("lower", [False, True], ids=["Content-Type", "content-type"])
async def test_silence_between_events_is_filled(lower: bool) -> None:
    """Pings go on after the first event, each silence anew."""
    sink = FakeSink()
    headers = [(name.lower() if lower else name, value) for name, value in STREAM]
    async with waiting(sink) as client:
        await client.begin(200, headers, length=None, one_piece=False)
        for _ in range(2):
            before = sink.pings
            await client.relay(b"data: x\n\n")
            await until(lambda before=before: sink.pings >= before + 2)  # type: ignore[misc]
    assert len(sink.started) == 1


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ([b"data: "], [b"x\n\n"]),
        ([b"data: x"], [b"\n\n"]),
        ([b"data: x\n"], [b"\n"]),
        ([b"data: x\r\n"], [b"\r\n"]),
        ([b"data: x\r\n\r"], [b"\n"]),
        ([b"data: x\n\nda"], [b"ta: y", b"\n\n"]),
        ([b"event: e\n", b"data: x\n"], [b"\n"]),
    ],
)
async def test_never_a_ping_inside_an_event(begun: list[bytes], rest: list[bytes]) -> None:
    """While an event is not complete there is silence; as soon as it is, wherever it was cut, pings go on."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await client.begin(200, STREAM, length=None, one_piece=False)
        for piece in begun:
            await client.relay(piece)
        before = sink.pings
        async with waiting(other := FakeSink()):
            await until(lambda: other.pings >= 3)
        assert sink.pings == before
        for piece in rest:
            await client.relay(piece)
        await until(lambda: sink.pings >= before + 1)
    assert b"".join(begun) + b"".join(rest) in sink.body


async def test_no_ping_in_an_answer_that_is_no_stream() -> None:
    """An engine's plain answer to a streaming client is not mixed with pings."""
    sink = FakeSink()
    async with waiting(sink) as client, waiting(other := FakeSink()):
        await client.begin(400, PLAIN, length=None, one_piece=False)
        await until(lambda: other.pings >= 3)
        await client.relay(b"{}")
        await client.finish()
    assert (sink.started, sink.pieces) == ([(400, PLAIN, None)], [b"{}"])


# --- errors


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_start_is_a_response(stream: bool) -> None:
    """An error of our own has its status, its length, and when to come back."""
    sink = FakeSink()
    async with waiting(sink, stream=stream, keep_alive_s=NEVER_S) as client:
        await client.fail(error())
    ((status, headers, length),) = sink.started
    assert (status, length, sink.ended) == (429, len(sink.body), True)
    assert dict(headers) == {"Content-Type": "application/json; charset=utf-8", "Retry-After": "5"}
    assert orjson.loads(sink.body)["error"]["message"] == "too many"


async def test_an_error_without_a_time_to_come_back_names_none() -> None:
    """There is a Retry-After only where one is known."""
    sink = FakeSink()
    async with waiting(sink, stream=False) as client:
        await client.fail(error(Fault.DECODE_FAILED, None))
    ((status, headers, _),) = sink.started
    assert (status, [name for name, _ in headers]) == (502, ["Content-Type"])


@pytest.mark.parametrize("api", Api)
async def test_an_error_after_pings_is_an_event(api: Api) -> None:
    """Once a stream has begun, an error of our own is its last event."""
    sink = FakeSink()
    async with waiting(sink, api=api) as client:
        await until(lambda: len(sink.pieces) >= 1)
        await client.fail(error())
    last = sink.pieces[-1]
    assert orjson.loads(last[last.index(b"data: ") + 6 :])["error"]["message"] == "too many"
    assert last.startswith(b"event: error\n") == (api in (Api.MESSAGES, Api.RESPONSES))
    assert (sink.ended, sink.aborted) == (True, False)


@pytest.mark.parametrize(("begun", "gap"), [(b"data: x\n\n", b""), (b"data: x", b"\n\n"), (b"data: x\n", b"\n\n")])
async def test_an_error_does_not_grow_into_half_an_event(begun: bytes, gap: bytes) -> None:
    """An event that broke off is ended before the error's own begins."""
    sink = FakeSink()
    async with waiting(sink, keep_alive_s=NEVER_S) as client:
        await client.begin(200, STREAM, length=None, one_piece=False)
        await client.relay(begun)
        await client.fail(error(Fault.DECODE_FAILED))
    assert sink.pieces[1].startswith(gap + b"data: {")
    assert sink.ended


async def test_an_error_inside_a_plain_answer_cuts_the_connection() -> None:
    """Half an answer must not be taken for a whole one."""
    sink = FakeSink()
    async with waiting(sink, stream=False) as client:
        await client.begin(200, PLAIN, length=100, one_piece=False)
        await client.relay(b'{"half')
        await client.fail(error(Fault.DECODE_FAILED))
    assert (sink.aborted, sink.ended, sink.body) == (True, False, b'{"half')


async def test_an_error_before_an_answer_in_one_piece_takes_its_place() -> None:
    """What was collected and never sent does not spoil the error's own response."""
    sink = FakeSink()
    async with waiting(sink, stream=False) as client:
        await client.begin(200, PLAIN, length=None, one_piece=True)
        await client.relay(b'{"half')
        await client.fail(error(Fault.DECODE_FAILED))
    assert [status for status, _, _ in sink.started] == [502]
    assert b"half" not in sink.body


@pytest.mark.parametrize("one_piece", [False, True])
async def test_an_engines_error_after_pings_becomes_an_event(one_piece: bool) -> None:
    """A status cannot be taken back: the engine's error is passed on as one event, its lines joined."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await until(lambda: sink.pings >= 1)
        await client.begin(400, PLAIN, length=None, one_piece=one_piece)
        await client.relay(b'{"error":\n')
        await client.relay(b'{"code":400}}\n')
        await client.finish()
    assert sink.body.replace(PING, b"") == b'data: {"error": {"code":400}}\n\n'
    assert len(sink.started) == 1


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.CHAT, b'data: {"error":{"code":500,"message":"Bad <b>luck</b>","type":"server_error"}}\n\n'),
        (
            Api.MESSAGES,
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"Bad <b>luck</b>"},'
            b'"request_id":"r1"}\n\n',
        ),
    ],
)
async def test_an_engines_error_that_is_no_json_is_worded_after_pings(api: Api, event: bytes) -> None:
    """A page of words from an engine becomes an error of the API that was called."""
    sink = FakeSink()
    async with waiting(sink, api=api) as client:
        await until(lambda: len(sink.pieces) >= 1)
        await client.begin(500, [("Content-Type", "text/html")], length=16, one_piece=False)
        await client.relay(b"Bad\r\n<b>luck</b>\n")
        await client.finish()
    assert sink.body.endswith(b"\n\n" + event)


@pytest.mark.parametrize("status", [200, 400])
async def test_a_plain_answer_after_pings_is_one_event(status: int) -> None:
    """An answer that is no stream cannot be written into one as it is: it becomes an event, on one line."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await until(lambda: sink.pings >= 1)
        await client.begin(status, PLAIN, length=10, one_piece=False)
        await client.relay(b'{"a":\r\n1}')
        await client.finish()
    assert sink.body.replace(PING, b"") == b'data: {"a": 1}\n\n'


async def test_what_is_neither_stream_nor_json_after_pings_is_an_error() -> None:
    """Words with status 200 are no answer that a streaming client could read."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await until(lambda: sink.pings >= 1)
        await client.begin(200, [], length=None, one_piece=False)
        await client.finish()
    error = orjson.loads(sink.body.replace(PING, b"").removeprefix(b"data: "))["error"]
    assert (error["code"], error["message"]) == (502, "the engine gave no reason")


async def test_events_after_pings_stay_events() -> None:
    """An engine that tells its error inside a stream of its own is passed on."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await until(lambda: sink.pings >= 1)
        await client.begin(500, STREAM, length=None, one_piece=False)
        await client.relay(b"data: {}\n\n")
        await client.finish()
    assert sink.body.replace(PING, b"") == b"data: {}\n\n"


# --- clients that leave


async def test_a_client_that_left_during_a_ping_is_noticed_later() -> None:
    """A ping that fails is no error by itself; the next write of the answer is."""
    sink = FakeSink()
    async with waiting(sink) as client:
        await until(lambda: sink.pings >= 1)
        sink.left = True
        async with waiting(other := FakeSink()):
            await until(lambda: other.pings >= 3)
        with pytest.raises(ClientLeft):
            await client.relay(b"data: x\n\n")


async def test_a_cancellation_is_never_swallowed() -> None:
    """A request that is cancelled while it waits for its last ping to end is cancelled."""
    sink = FakeSink()
    sink.stalled = asyncio.Event()
    cancelled = False

    async def request() -> None:
        nonlocal cancelled
        async with waiting(sink) as client:
            await until(lambda: client._started)
            try:
                await client.fail(error())
            except asyncio.CancelledError:
                cancelled = True
                raise

    task = asyncio.create_task(request())
    async with waiting(other := FakeSink()):
        await until(lambda: other.pings >= 3)
    task.cancel()
    await asyncio.sleep(0)
    sink.stalled.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled


async def test_an_error_waits_for_a_start_that_is_under_way() -> None:
    """An error that comes while the first ping starts the stream becomes an event of that stream."""
    sink = FakeSink()
    sink.stalled = asyncio.Event()
    async with waiting(sink) as client:
        await until(lambda: client._started)
        failing = asyncio.create_task(client.fail(error()))
        await asyncio.sleep(0)
        sink.stalled.set()
        await failing
    assert [status for status, _, _ in sink.started] == [200]
    assert sink.pieces[-1].startswith(b"data: {")


async def test_news_are_written_while_the_answer_is_waited_for() -> None:
    """An event of our own starts the stream and goes out without waiting for the next ping."""
    async with waiting(sink := FakeSink(), keep_alive_s=60) as client:
        client.tell(b"data: 1\n\n")
        await until(lambda: sink.pieces == [b"data: 1\n\n"])
        client.tell(b"data: 2\n\n")
        await until(lambda: sink.pieces[1:] == [b"data: 2\n\n"])
    assert [status for status, _, _ in sink.started] == [200]


async def test_news_end_with_the_answer() -> None:
    """Once the engine answers, nothing of our own is written between its events."""
    async with waiting(sink := FakeSink(), keep_alive_s=60) as client:
        client.tell(b"data: old\n\n")
        await client.begin(200, [("Content-Type", "text/event-stream")], length=None, one_piece=False)
        await client.relay(b"data: a\n\n")
        await client.finish()
    assert sink.pieces == [b"data: a\n\n"]
