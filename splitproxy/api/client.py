"""The client's end of an exchange: when headers go out, what is sent while it waits, and errors in its API's words."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self

import orjson

from splitproxy.api.sse import MEDIA_TYPE, data_event, error_event, keep_alive
from splitproxy.api.wire import error_body
from splitproxy.errors import RequestError, SplitproxyError
from splitproxy.model import Api

Headers = Sequence[tuple[str, str]]

_JSON = ("Content-Type", "application/json; charset=utf-8")
_UNBUFFERED = ("X-Accel-Buffering", "no")  # for other proxies on the way
_STREAM = (("Content-Type", MEDIA_TYPE), ("Cache-Control", "no-cache"), _UNBUFFERED)


class ClientLeft(SplitproxyError):  # noqa: N818 - the field says it that way
    """The client's connection broke while something was written to it."""


class Sink(Protocol):
    """Where an answer is written to. Every method that waits raises ClientLeft when the client is gone."""

    async def start(self, status: int, headers: Headers, length: int | None) -> None: ...

    def send(self, data: bytes) -> bool:
        """Write at once, if the client keeps up; False: nothing was written, `write` has to wait for the client."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self) -> None: ...

    def abort(self) -> None:
        """Cut the connection, so that half an answer is not taken for a whole one."""
        ...


class Client:
    """A waiting client. As a context manager it keeps a stream alive from the first silence on.

    Keep-alives start the response, so an engine's error that comes later becomes an event of the stream.
    """

    def __init__(
        self, sink: Sink, api: Api, *, stream: bool, keep_alive_s: float, request_id: str, own: Headers = ()
    ) -> None:
        """`own` are headers of every answer that begins here and not at an engine."""
        self._sink = sink
        self._own = own
        self._api = api
        self._stream = stream
        self._keep_alive_s = keep_alive_s
        self._request_id = request_id
        self._beat: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._started = False
        self._committed = False
        self._events = False  # whether what has begun is a stream of events
        self._tail = b""
        self._last = time.monotonic()
        self._collected: list[bytes] | None = None  # a body that is sent in one piece, at its end
        self._pending: tuple[int, Headers] | None = None
        self._news = b""  # an event of our own that is to be written
        self._wake = asyncio.Event()
        self._ending = False  # whether the answer's last byte is on its way
        self._late_status = 0  # of an engine's answer that is no stream, and must become an event of one

    async def __aenter__(self) -> Self:
        if self._stream:
            self._beat = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._quiet()

    async def _quiet(self) -> None:
        if (beat := self._beat) is None:
            return
        self._beat = None
        async with self._starting:
            beat.cancel()
        await asyncio.wait({beat})  # awaiting the task itself would swallow a cancellation of our own
        if not beat.cancelled():
            beat.result()

    async def _keep_alive(self) -> None:
        ping = keep_alive(self._api)
        with suppress(ClientLeft):  # the server cancels the request itself
            while True:
                due_s = self._last + self._keep_alive_s - time.monotonic()
                if due_s > 0 and not self._news:
                    await self._doze(due_s)
                    continue
                async with self._starting:
                    if not self._started and self._pending is None:
                        self._started = self._events = True
                        await self._sink.start(200, [*_STREAM, *self._own], None)
                self._last = time.monotonic()
                news, self._news = self._news, b""
                if self._events and self._between_events:
                    await self._sink.write(news or ping)

    async def _doze(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    def tell(self, event: bytes) -> None:
        """Have an event of our own written to a stream that waits for its answer; only the latest is kept."""
        self._news = event
        self._wake.set()

    async def begin(self, status: int, headers: Headers, *, length: int | None, one_piece: bool) -> None:
        """The engine's answer has begun. `one_piece`: it is changed on the way, so its length is known at the end."""
        self._committed = True
        self._news = b""
        streams = any(n.lower() == "content-type" and v.lower().startswith(MEDIA_TYPE) for n, v in headers)
        async with self._starting:
            if self._started:
                if not streams:
                    self._late_status = status
                    self._collected = []
            elif one_piece:
                self._pending = (status, headers)
                self._collected = []
            else:
                self._started = True
                self._events = streams
                if streams:
                    # Nobody knows its length: keep-alives and other figures may be added.
                    headers, length = _with_unbuffered(headers), None
                await self._sink.start(status, headers, length)

    @property
    def committed(self) -> bool:
        """Whether the client has been promised the answer of one engine: another can no longer take over."""
        return self._committed

    def send(self, data: bytes) -> bool:
        """Pass a piece of the answer on, if that needs no waiting; False: nothing was sent, `relay` must be awaited."""
        if self._collected is not None:
            self._collected.append(data)
            return True
        if not self._sink.send(data):
            return False
        self._note(data)
        return True

    async def relay(self, data: bytes) -> None:
        """Pass a piece of the answer on."""
        if data and not self.send(data):
            self._note(data)
            await self._sink.write(data)

    def _note(self, data: bytes) -> None:
        self._last = time.monotonic()
        self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]

    @property
    def _between_events(self) -> bool:
        return not self._tail or self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    async def finish(self) -> None:
        """The engine's answer is complete."""
        await self._quiet()
        body = b"".join(self._collected or ())
        if self._late_status:
            await self._sink.write(self._late_event(self._late_status, body))
        elif self._pending is not None:
            self._started = True
            await self._sink.start(*self._pending, len(body))
            await self._sink.write(body)
        self._ending = True
        await self._sink.end()

    def _late_event(self, status: int, body: bytes) -> bytes:
        """An engine's whole answer as an event of a stream that had to begin before it."""
        line = b" ".join(body.splitlines()).strip()
        if not _is_object(line):
            words = line.decode(errors="replace") or "the engine gave no reason"
            status = status if status >= 400 else 502  # a client that streams can do nothing with it
            line = error_body(self._api, status, words, self._request_id)
        return error_event(self._api, line) if status >= 400 else data_event(line)

    async def fail(self, error: RequestError) -> None:
        """End with an error of our own: a response of its own, or an event of a stream that has begun."""
        await self._quiet()
        body = error_body(self._api, error.status, str(error), self._request_id)
        if not self._started:
            retry = [] if error.retry_after_s is None else [("Retry-After", str(error.retry_after_s))]
            self._started = True
            await self._sink.start(error.status, [_JSON, *retry, *self._own], len(body))
            await self._sink.write(body)
        elif self._events and not self._ending:
            await self._sink.write((b"" if self._between_events else b"\n\n") + error_event(self._api, body))
        else:
            self._sink.abort()
            return
        await self._sink.end()


def _with_unbuffered(headers: Headers) -> Headers:
    return [*((name, value) for name, value in headers if name.lower() != _UNBUFFERED[0].lower()), _UNBUFFERED]


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False
