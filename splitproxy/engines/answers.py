"""A client for engines' answers: HTTP/1.1 for one request, without a task switch for each piece of its answer.

Every connection is fresh, and closed after its answer: engines close idle and just-streamed ones unannounced, and an
idle one keeps a thread of theirs.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

from splitproxy.engines.adapter import Answer, Call, Take
from splitproxy.engines.http1 import AnswerReader, BrokenAnswer, Head, request_head
from splitproxy.errors import Cause, EngineError, Step

CONNECT_TIMEOUT_S = 5.0
_JOINED_BYTES = 64 * 1024  # a request of this size leaves in one write
_BODIED = frozenset({"POST", "PUT", "PATCH"})  # an empty body of theirs has a length


class AnswerClient:
    """Sends clients' requests to the server at `url`, each with `headers` in addition."""

    def __init__(self, url: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authority = parts.netloc
        self._path = parts.path
        self._headers = tuple(headers)

    @asynccontextmanager
    async def call(self, call: Call, silence_s: float | None) -> AsyncGenerator[Answer]:
        """Send a request; the answer once its head is there. Leaving early closes the connection.

        An engine that says nothing for `silence_s` while it is waited for has failed; None: it may take its time.
        Raises EngineError, from here and from the answer's `pour`.
        """
        length = len(call.body) if call.body is not None else 0 if call.method in _BODIED else None
        headers = [*call.headers, *self._headers]
        head = request_head(call.method, self._path + call.target, self._authority, headers, length)
        connection = await self._connect(call.method, silence_s)
        try:
            connection.send(head, call.body or b"")
            yield _Answer(await connection.head(), connection)
        finally:
            connection.close()

    async def _connect(self, method: str, silence_s: float | None) -> "_Connection":
        def make() -> _Connection:
            return _Connection(method, silence_s)

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(make, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise EngineError(Step.DECODE, Cause.TIMEOUT, "the engine did not take the connection in time") from None
        except OSError as error:
            raise _died(error) from None
        return connection


class _Connection(asyncio.Protocol):
    """One request and its answer. Whoever waits for the answer sleeps in `_wait`, and pieces pass it by."""

    def __init__(self, method: str, silence_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = AnswerReader(method)
        self._waiter: asyncio.Future[bool] | None = None
        self._take: Take | None = None
        self._early = b""  # of the body, and nobody has taken it yet
        self._error: Exception | None = None
        self._silence_s = silence_s
        self._heard = 0.0  # when the engine spoke last, or was first waited for, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def send(self, head: bytes, body: bytes) -> None:
        """Send the request."""
        if len(body) <= _JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def head(self) -> Head:
        """The answer's head, once it is there."""
        if self._silence_s is not None:
            self._timer = self._loop.call_later(self._silence_s, self._ring)
        await self._wait()
        assert self._reader.head is not None
        return self._reader.head

    async def pour(self, take: Take) -> bool:
        """See `Answer.pour`."""
        early, self._early = self._early, b""
        if early and not take(early):
            return True
        if self._reader.complete:
            return False
        self._take = take
        self._transport.resume_reading()
        try:
            return await self._wait()
        finally:
            self._take = None

    def close(self) -> None:
        """Close the connection, whatever is still to come."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _wait(self) -> bool:
        """Until the head is there, or the body, which gives False, or until its pieces are no longer taken."""
        if self._error is not None:
            raise self._error
        self._heard = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self, more: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(more)

    def _fail(self, error: Exception) -> None:
        """End the answer with an error: of the engine, or of whoever takes its pieces."""
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._transport.abort()

    def _ring(self) -> None:
        """The timer is moved when it rings, not with each piece of the answer."""
        assert self._silence_s is not None
        now = self._loop.time()
        # While nobody waits here, it is the client that is waited for.
        due = (now if self._waiter is None else self._heard) + self._silence_s
        if due > now:
            self._timer = self._loop.call_at(due, self._ring)
        else:
            self._fail(EngineError(Step.DECODE, Cause.TIMEOUT, "the engine did not answer in time"))

    # -- the event loop's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        reader, take = self._reader, self._take
        try:
            piece = reader.feed(data)
            if take is None:
                self._early += piece
                more = reader.head is None
            else:
                more = take(piece) if piece else True
        except BrokenAnswer as error:
            self._fail(EngineError(Step.DECODE, Cause.DIED, f"the engine's answer is broken: {error}"))
        except Exception as error:  # noqa: BLE001 - it is raised where the pieces are waited for
            self._fail(error)
        else:
            if reader.complete or not more:
                self._take = None
                self._transport.pause_reading()
                self._wake(not more)

    def eof_received(self) -> None:
        # Here and not with the connection's end: that waits for the engine to read the rest of the request.
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self._end()
        elif not self._reader.complete and self._error is None:
            self._fail(_died(error))

    def _end(self) -> None:
        """Nothing more is to come."""
        if self._reader.complete or self._error is not None:
            return
        try:
            self._reader.end()
        except BrokenAnswer as broken:
            self._fail(EngineError(Step.DECODE, Cause.DIED, f"the engine closed the connection: {broken}"))
        else:
            self._wake(False)


class _Answer:
    """An answer whose head is there."""

    def __init__(self, head: Head, connection: _Connection) -> None:
        self.status = head.status
        self.headers: Sequence[tuple[str, str]] = head.headers
        self.media_type = head.media_type
        self.pour = connection.pour


def _died(error: Exception) -> EngineError:
    reason = type(error).__name__
    if isinstance(error, OSError) and error.errno:
        # The system's words; asyncio's name the address. A name without an address has a number below zero.
        reason = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    return EngineError(Step.DECODE, Cause.DIED, f"the connection to the engine failed: {reason}")
