"""The HTTP server in front of clients.

Routes, keys, body limits and the aiohttp end of an exchange live here; decisions do not.
"""

import asyncio
import errno
import hmac
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import _ErrInfo
from multidict import CIMultiDict

from splitproxy import config
from splitproxy.api.client import ClientLeft, Headers
from splitproxy.api.packing import CODINGS, Damaged, TooLarge, unpacked
from splitproxy.api.wire import (
    GENERATING,
    allow_origin,
    api_of,
    error_body,
    is_administration,
    needs_no_slot,
    read_any_ask,
    read_ask,
)
from splitproxy.errors import Fault, LaunchError, RequestError
from splitproxy.model import Api, Outcome, Role
from splitproxy.serve import metrics
from splitproxy.serve.assembly import Proxy
from splitproxy.serve.service import Incoming
from splitproxy.serve.status import status
from splitproxy.serve.trace import Trace

MIB = 2**20
BODY_S = 300.0  # for a client to send its body; one that breaks off in its middle is not noticed otherwise
LAST_WORDS_S = 0.5  # for clients to be told that their answer is cut short
CUT_S = 0.1  # for connections to close once their requests have ended; aiohttp takes 0 for no limit
JSON_TYPE = "application/json; charset=utf-8"
REQUEST_ID = web.RequestKey("request_id", str)
CLIENT = web.RequestKey("client", str)
OPEN_PATHS = frozenset({"/health", "/v1/health", "/metrics"})  # without a key: for probes and Prometheus

_http_log = logging.getLogger("splitproxy.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """A client that breaks HTTP is no error of ours, and what it sent, a key perhaps, is quoted in aiohttp's words."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_http_log.addFilter(_is_ours)


@asynccontextmanager
async def listening(proxy: Proxy) -> AsyncGenerator[str]:
    """Accept clients while the context lasts; yields the address. At its end running requests may finish for drain_s,
    while new ones are refused in words.

    Raises LaunchError when the address cannot be had.
    """
    application = web.AppRunner(make_app(proxy))
    await application.setup()
    assert application.server is not None
    runner = web.ServerRunner(_Server(application.server), shutdown_timeout=CUT_S)
    await runner.setup()
    try:
        await _listen(runner, proxy.config)
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        proxy.stopping = True
        try:
            await _drain(proxy)
        finally:
            await runner.cleanup()
            await application.cleanup()


class _Server(web.Server):
    """Accepts connections for an application, and has an answer of its own for what is no request at all."""

    def __init__(self, served: web.Server) -> None:
        # aiohttp tells a handler that its client has left only when asked to.
        super().__init__(served.request_handler, request_factory=served.request_factory, handler_cancellation=True)

    def __call__(self) -> web.RequestHandler:
        # Half a gzip body would pass with aiohttp.
        options: dict[str, Any] = {"access_log": None, "logger": _http_log, "auto_decompress": False}
        return _Connection(self, loop=asyncio.get_running_loop(), **options)


class _Connection(web.RequestHandler):
    """One client's connection."""

    def data_received(self, data: bytes) -> None:
        """Take what a client sent. Where a body breaks the rules in its middle, whoever reads that body is told."""
        super().data_received(data)
        if not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        # aiohttp takes it for one more request, which would be answered when this one's body is complete: never.
        now = self._current_request
        bodies = [body for _, body in self._messages][:-1] or ([] if now is None else [now.content])
        if bodies and not bodies[-1].is_eof():
            bodies[-1].set_exception(web.RequestPayloadError("the body breaks off"))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; aiohttp's own are worded as an API would."""
        if isinstance(resp, web.HTTPException):
            resp = _plain_error(request, resp.status, resp.reason)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Word an error for which there is no handler as an API would; aiohttp's words may quote the request."""
        super().handle_error(request, status, exc, message)  # logs it, and raises where an answer has begun
        words = "the request is not valid HTTP" if isinstance(exc, HttpProcessingError) else HTTPStatus(status).phrase
        if isinstance(exc, LineTooLong):
            words = "a line of the request's head is too long"
        response = _plain_error(request, status, words)
        response.force_close()
        return response


def _plain_error(request: web.BaseRequest, status: int, words: str) -> web.Response:
    """An error of the HTTP server itself."""
    request_id = request.get(REQUEST_ID) or secrets.token_hex(8)
    headers = {"X-Request-Id": request_id, "Server": "splitproxy", "Content-Type": JSON_TYPE}
    return web.Response(status=status, body=error_body(_api(request), status, words, request_id), headers=headers)


async def _drain(proxy: Proxy) -> None:
    if proxy.running:
        await asyncio.wait(proxy.running, timeout=proxy.config.drain_s)
    if proxy.running:
        proxy.exchange.drain.cut()
        await asyncio.wait(proxy.running, timeout=LAST_WORDS_S)
    for task in proxy.running:
        task.cancel()


async def _listen(runner: web.ServerRunner, settings: config.Config) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if isinstance(error, socket.gaierror):  # its numbers are its own
            reason = f"the host is not known here: {error.strerror}"
        elif error.errno == errno.EADDRNOTAVAIL:
            reason = "this machine does not have that address"
        raise LaunchError(f"listen = {settings.listen!r}: {reason}") from None


def make_app(proxy: Proxy) -> web.Application:
    """The aiohttp application of a proxy."""
    front = _Front(proxy)
    app = web.Application(client_max_size=proxy.config.max_body_mib * MIB, middlewares=[front.guard])
    for path in ("/health", "/v1/health"):
        app.router.add_get(path, front.health)
    app.router.add_get("/metrics", front.metrics)
    app.router.add_get("/splitproxy/status", front.status)
    app.router.add_post("/splitproxy/explain", front.explain)
    app.router.add_route("*", "/{path:.*}", front.serve)
    return app


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Front:
    """The handlers."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    @property
    def guard(self) -> Any:
        """Middleware: a request id, keys, and our own errors in the shape of the API that was called."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            request[REQUEST_ID] = secrets.token_hex(8)
            try:
                request[CLIENT] = self._client(request)
                return await handler(request)
            except RequestError as error:
                return self._refuse(request, error)
            except (web.HTTPRequestEntityTooLarge, TooLarge):
                message = f"the body is larger than {self._proxy.config.max_body_mib} MiB"
                return self._refuse(request, RequestError(Fault.BODY_TOO_LARGE, message))
            except (web.RequestPayloadError, Damaged):
                message = "the body is damaged: it is not what its headers say"
                response = self._refuse(request, RequestError(Fault.INVALID_REQUEST, message))
                response.force_close()  # where the next request begins nobody knows
                return response
            except ClientLeft:
                raise asyncio.CancelledError from None

        return guard

    def _refuse(self, request: web.Request, error: RequestError) -> web.Response:
        """Answer a request that never came as far as the exchange."""
        trace = Trace(request[REQUEST_ID], _api(request), stream=False)
        trace.outcome, trace.status = Outcome.ERROR, error.status
        self._proxy.observe(trace.record())
        return _error_response(request, error)

    def _client(self, request: web.Request) -> str:
        """Who sends a request: the number of its key, else its address. Raises RequestError without a valid key."""
        keys = self._proxy.config.api_keys
        if not keys or request.path in OPEN_PATHS or request.method == "OPTIONS":
            return request.remote or ""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("X-Api-Key", "")
        # Every key is compared in full: the time tells nothing about them.
        # A header may hold any bytes.
        found = [hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()) for key in keys]
        if not any(found):
            raise RequestError(Fault.UNAUTHORIZED, "a valid API key is needed")
        return f"key {found.index(True)}"

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Any request that an engine answers."""
        # As the engine will read it: a slash or letter may hide behind a percent sign.
        path = unquote(request.rel_url.raw_path)
        if is_administration(request.method, path):
            raise RequestError(Fault.FORBIDDEN, f"{request.method} {path} is not for clients of this proxy")
        if self._proxy.stopping:
            raise RequestError(Fault.SHUTTING_DOWN, "the proxy is shutting down", retry_after_s=5)
        if (task := asyncio.current_task()) is not None:
            self._proxy.running.add(task)
            task.add_done_callback(self._proxy.running.discard)
        incoming = Incoming(
            request_id=request[REQUEST_ID],
            method=request.method,
            target=request.rel_url.raw_path_qs,
            headers=tuple(request.headers.items()),
            client=request[CLIENT],
            body=await self._whole(request),
        )
        sink = _Sink(request)
        if request.method == "POST" and path in GENERATING:
            await self._proxy.exchange.run(incoming, read_ask(path, incoming.body), sink)
        else:
            takes_slots = not needs_no_slot(request.method, path)
            await self._proxy.exchange.forward(incoming, sink, api=api_of(path), takes_slots=takes_slots)
        return sink.response

    async def _whole(self, request: web.Request) -> bytes:
        async with self._proxy.exchange.drain.bounded():
            return await _body(request)

    async def health(self, _request: web.Request) -> web.Response:
        ready = bool(self._proxy.ledger.ready(Role.DECODE)) and not self._proxy.stopping
        engines = {name: member.state for name, member in self._proxy.fleet.members.items()}
        return _json({"status": "ok" if ready else "unavailable", "engines": engines}, 200 if ready else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._proxy.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def status(self, _request: web.Request) -> web.Response:
        return _json(status(self._proxy), 200)

    async def explain(self, request: web.Request) -> web.Response:
        """What would be decided about a request, and why, without running it."""
        ask = read_any_ask(await _body(request))
        return _json(await self._proxy.exchange.explain(ask), 200)


class _Sink:
    """The aiohttp end of an exchange."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse()
        self._flowing = False  # whether chunks can go straight to the connection, while the client keeps up

    async def start(self, status: int, headers: Headers, length: int | None) -> None:
        merged = CIMultiDict(headers)
        merged["X-Request-Id"] = self._request[REQUEST_ID]
        merged["Server"] = "splitproxy"
        self.response = web.StreamResponse(status=status, headers=merged)
        if length is not None:
            self.response.content_length = length
        elif self._request.version >= (1, 1):
            self.response.enable_chunked_encoding()
        else:
            self.response.force_close()  # what else would end the answer
        with _client_errors():
            await self.response.prepare(self._request)
            if self.response.chunked and self._request.method != "HEAD":
                await self.response.write(b"")  # the head does not wait for the first piece
                self._flowing = True

    def send(self, data: bytes) -> bool:
        transport = self._request.transport
        if not self._flowing or transport is None or transport.get_write_buffer_size():
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    async def write(self, data: bytes) -> None:
        with _client_errors():
            await self.response.write(data)

    async def end(self) -> None:
        with _client_errors():
            await self.response.write_eof()

    def abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


class _client_errors:  # noqa: N801 - reads as a statement
    """Turns a lost client connection into ClientLeft."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConnectionError):
            raise ClientLeft("the client's connection is closed") from None


async def _body(request: web.Request) -> bytes:
    """A request's body, unpacked."""
    coding = request.headers.get("Content-Encoding", "").lower() or "identity"
    if coding not in CODINGS | {"identity"} and request.body_exists:
        message = f"Content-Encoding: {coding!r} cannot be read here; {' and '.join(sorted(CODINGS))} can"
        raise RequestError(Fault.INVALID_REQUEST, message)
    if (transfer := request.headers.get("Transfer-Encoding", "chunked")).lower() != "chunked":
        message = f"Transfer-Encoding: {transfer!r} cannot be read here; chunked can"
        raise RequestError(Fault.UNKNOWN_CODING, message)
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.read()
    except TimeoutError:
        raise RequestError(Fault.INVALID_REQUEST, f"the body did not come whole within {BODY_S:g} s") from None
    if coding == "identity" or not data:
        return data
    return await asyncio.to_thread(unpacked, coding, data, request.client_max_size)


def _api(request: web.BaseRequest) -> Api:
    return api_of(unquote(request.rel_url.raw_path))


def _error_response(request: web.Request, error: RequestError) -> web.Response:
    api = _api(request)
    headers = {"X-Request-Id": request[REQUEST_ID], "Server": "splitproxy"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    body = error_body(api, error.status, str(error), request[REQUEST_ID])
    headers["Content-Type"] = JSON_TYPE
    headers.update(allow_origin(request.headers.items()))
    return web.Response(status=error.status, body=body, headers=headers)


def _json(value: object, status: int) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return web.Response(body=body, status=status, content_type="application/json")
