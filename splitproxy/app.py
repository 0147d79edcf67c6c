"""The HTTP server in front of clients, and the assembly of everything behind it.

Routes, keys, body limits and the aiohttp end of an exchange live here; decisions do not.
"""

import asyncio
import hmac
import logging
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict

from splitproxy import access, config, metrics
from splitproxy.adapter import Deadlines, Engine
from splitproxy.admission import Admission
from splitproxy.client import ClientLeft, Headers
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.errors import ConfigError, Fault, LaunchError, RequestError
from splitproxy.exchange import Exchange
from splitproxy.fleet import Fleet
from splitproxy.ledger import Ledger
from splitproxy.model import Api, EngineState, Kind, Outcome, Policy, RequestRecord, Role
from splitproxy.router import Rules
from splitproxy.service import Incoming, Settings
from splitproxy.sessions import SessionStore
from splitproxy.tokenize import EngineTokenizer, LocalTokenizer, Tokenizer
from splitproxy.trace import Trace
from splitproxy.vocab import files
from splitproxy.vocab.codec import Codec
from splitproxy.vocab.vocabulary import UnsupportedVocabulary, Vocabulary
from splitproxy.wire import GENERATING, api_of, error_body, is_administration, needs_no_slot, read_any_ask, read_ask

log = logging.getLogger(__name__)

MIB = 2**20
RECENT_REQUESTS = 50
BODY_S = 300.0  # for a client to send its body; one that breaks off in its middle is not noticed otherwise
CUT_S = 0.1  # for connections to close once their requests have ended; aiohttp takes 0 for no limit
REQUEST_ID = web.RequestKey("request_id", str)
CLIENT = web.RequestKey("client", str)
OPEN_PATHS = frozenset({"/health", "/v1/health", "/metrics"})  # without a key: for probes and Prometheus

_http_log = logging.getLogger("splitproxy.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """A client that breaks HTTP is no error of ours, and what it sent, a key perhaps, is quoted in aiohttp's words."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_http_log.addFilter(_is_ours)


@dataclass(slots=True)
class Proxy:
    """Everything that serves requests, put together."""

    config: config.Config
    store: SessionStore
    ledger: Ledger
    admission: Admission
    fleet: Fleet
    exchange: Exchange
    tokenizer: Tokenizer
    metrics: metrics.Metrics
    recent: deque[RequestRecord]
    stopping: bool = False
    running: set["asyncio.Task[Any]"] = field(default_factory=set)  # requests that an engine answers

    def observe(self, record: RequestRecord) -> None:
        self.fleet.forecast.speeds.learn(record)
        self.metrics.observe(record)
        self.recent.append(record)
        log.info("%s", access.line(record))


def make_engine(table: config.Engine, store: SessionStore) -> Engine:
    """The adapter of one configured engine."""
    key = os.environ.get(table.api_key_env, "") if table.api_key_env else ""
    match table.kind:
        case Kind.LLAMA_SERVER:
            return LlamaServer(table.name, table.url, key, store)
        case Kind.STRATA:
            raise ConfigError([f"engines: {table.name} has kind = 'strata', which this version cannot serve"])


def make_tokenizer(settings: config.Config) -> Tokenizer:
    """The configured tokenizer; reads its file and takes a second or two. Raises ConfigError for one that is broken."""
    table = settings.tokenizer
    source = table.source
    if source == "engine":
        return EngineTokenizer('tokenizer.source is "engine"')
    if source == "auto":
        source = settings.launch.model if settings.launch is not None else ""
        if not source or not Path(source).is_file():
            return EngineTokenizer("there is no model file to read; tokenizer.source can name one")
    try:
        return LocalTokenizer(_codec(source, files.read(source, table.pattern, table.special_tokens)))
    except UnsupportedVocabulary as reason:
        why = f"{source} is of no use here: {reason}"
        log.warning("token ids are made by the engine: %s", why)
        return EngineTokenizer(why)


def _codec(source: str, vocabulary: Vocabulary) -> Codec:
    """The encoder of a vocabulary. Raises ConfigError for ids or words that no encoder can be made of."""
    try:
        return Codec(vocabulary)
    except UnsupportedVocabulary:
        raise
    except BaseException as error:
        # tiktoken's native part panics on two words with one id, in an exception that has no public name.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            kind = type(error).__name__
            raise ConfigError([f"tokenizer: {source}: its words or ids contradict each other ({kind})"]) from None
        raise


def deadlines(split: config.Split) -> Deadlines:
    return Deadlines(split.prefill_silence_s, split.transfer_timeout_s, split.decode_silence_s)


@asynccontextmanager
async def assembled(
    settings: config.Config, store: SessionStore, made: Tokenizer | None = None
) -> AsyncGenerator[Proxy]:
    """Build the proxy in front of the configured engines and watch them while the context lasts.

    `made` is the configured tokenizer, for callers that have made it already. Raises ConfigError.
    """
    split = settings.split
    limit_bytes = split.max_session_mib * MIB or store.free_bytes() // 2
    ledger = Ledger(limit_bytes, store.can_hold)
    admission = Admission(ledger, settings.queue.max)
    tokenizer = made if made is not None else await asyncio.to_thread(make_tokenizer, settings)
    async with AsyncExitStack() as stack:
        stack.callback(tokenizer.close)
        engines: dict[str, tuple[Engine, Role]] = {}
        for table in settings.engines:
            engine = make_engine(table, store)
            stack.push_async_callback(engine.close)
            engines[table.name] = (engine, table.role)
        probe_tokens = 0 if split.policy is Policy.NEVER else split.probe_tokens
        fleet = Fleet(engines, ledger, admission, deadlines(split), probe_tokens, store.sweep, tokenizer.meet)
        rules = Rules(split.policy, split.min_prompt_tokens, split.force_handover_tokens, split.stall_weight)
        exchange = Exchange(
            Settings(
                rules=rules,
                deadlines=deadlines(split),
                on_prefill_failure=split.on_prefill_failure,
                keep_alive_s=settings.keep_alive_s,
                queue_timeout_s=settings.queue.timeout_s,
                reserve_tokens=split.reserve_tokens,
            ),
            fleet,
            ledger,
            admission,
            tokenizer,
            lambda record: proxy.observe(record),
        )
        collectors = metrics.Metrics(fleet, ledger, admission, split.min_prompt_tokens)
        proxy = Proxy(
            settings, store, ledger, admission, fleet, exchange, tokenizer, collectors, deque(maxlen=RECENT_REQUESTS)
        )
        await stack.enter_async_context(fleet)
        yield proxy


@asynccontextmanager
async def listening(proxy: Proxy) -> AsyncGenerator[str]:
    """Accept clients while the context lasts; yields the address. At its end running requests may finish for drain_s,
    while new ones are refused in words.

    Raises LaunchError when the address cannot be had.
    """
    # aiohttp tells a handler that its client has left only when asked to.
    runner = web.AppRunner(
        make_app(proxy), handler_cancellation=True, access_log=None, shutdown_timeout=CUT_S, logger=_http_log
    )
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


async def _drain(proxy: Proxy) -> None:
    if proxy.running:
        await asyncio.wait(proxy.running, timeout=proxy.config.drain_s)
    for task in proxy.running:
        task.cancel()


async def _listen(runner: web.AppRunner, settings: config.Config) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
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
            except web.HTTPRequestEntityTooLarge:
                message = f"the body is larger than {self._proxy.config.max_body_mib} MiB"
                return self._refuse(request, RequestError(Fault.BODY_TOO_LARGE, message))
            except web.RequestPayloadError:
                message = "the body is damaged: it is not what its headers say"
                return self._refuse(request, RequestError(Fault.INVALID_REQUEST, message))
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
            body=await _body(request),
        )
        sink = _Sink(request)
        if request.method == "POST" and path in GENERATING:
            await self._proxy.exchange.run(incoming, read_ask(path, incoming.body), sink)
        else:
            takes_slots = not needs_no_slot(request.method, path)
            await self._proxy.exchange.forward(incoming, sink, api=api_of(path), takes_slots=takes_slots)
        return sink.response

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
        ask = read_any_ask(await request.read())
        return _json(await self._proxy.exchange.explain(ask), 200)


def status(proxy: Proxy) -> dict[str, Any]:
    """What goes on, for people and scripts: engines, pairs, queue, last requests."""
    tables = {table.name: table for table in proxy.config.engines}
    return {
        "policy": proxy.config.split.policy,
        "min_prompt_tokens": proxy.config.split.min_prompt_tokens,
        "engines": [
            {
                "name": name,
                "role": member.role,
                "kind": tables[name].kind,
                "url": tables[name].place,
                "state": member.state,
                "fault": member.fault or None,
                "identity": member.identity,
                "slots": proxy.ledger.count(name),
                "waiting": proxy.admission.waiting_for(name),
                "speeds": proxy.fleet.forecast.speeds.status(name),
                "backlog_s": round(proxy.fleet.forecast.backlog_s(name), 3),
            }
            for name, member in proxy.fleet.members.items()
        ],
        "pairs": [
            {
                "prefill": source,
                "decode": target,
                "state": pair.state,
                "fault": pair.fault or None,
                "checks": pair.report.checks if pair.report else [],
                "prefill_tokens_per_s": pair.report.prefill_tokens_per_s if pair.report else None,
                "decode_tokens_per_s": pair.report.decode_tokens_per_s if pair.report else None,
                "session_bytes_per_token": pair.bytes_per_token or None,
                "session": proxy.fleet.forecast.speeds.pair_status(source, target),
            }
            for (source, target), pair in proxy.fleet.pairs.items()
        ],
        "tokenizer": {
            "source": proxy.config.tokenizer.source,
            "engines": {engine.name: _used(proxy, engine.name) for engine in proxy.config.of_role(Role.DECODE)},
        },
        "added_s": proxy.fleet.forecast.speeds.added_status(),
        "usable_context": usable_context(proxy),
        "queue": {"max": proxy.config.queue.max, "waiting": proxy.admission.waiting, "line": proxy.admission.line()},
        "leases": proxy.ledger.busy(),
        "session_bytes": {"in_flight": proxy.ledger.session_bytes, "limit": proxy.ledger.session_limit_bytes},
        "last_requests": [access.entry(record) for record in reversed(proxy.recent)],
    }


def _used(proxy: Proxy, engine: str) -> dict[str, str]:
    verdict = proxy.tokenizer.verdict(engine)
    return {"used": "local" if verdict.local else "engine", "why": verdict.why}


def usable_context(proxy: Proxy) -> int | None:
    """The smallest context of all engines that are up."""
    ready = [name for name, member in proxy.fleet.members.items() if member.state is EngineState.READY]
    return min((proxy.ledger.context(name) for name in ready), default=None)


class _Sink:
    """The aiohttp end of an exchange."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse()
        self._flowing = False  # whether the next chunk needs none of the server library's care

    async def start(self, status: int, headers: Headers, length: int | None) -> None:
        merged = CIMultiDict(headers)
        merged["X-Request-Id"] = self._request[REQUEST_ID]
        merged["Server"] = "splitproxy"
        _allow_origin(self._request, merged)
        self.response = web.StreamResponse(status=status, headers=merged)
        if length is not None:
            self.response.content_length = length
        elif self._request.version >= (1, 1):
            self.response.enable_chunked_encoding()
        with _client_errors():
            await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        transport = self._request.transport
        if self._flowing and transport is not None and not transport.get_write_buffer_size():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return
        with _client_errors():
            await self.response.write(data)
        # Headers are out. While the client keeps up, chunks go straight to its connection.
        self._flowing = self.response.chunked and transport is not None and not transport.is_closing()

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
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestError(Fault.INVALID_REQUEST, f"the body did not come whole within {BODY_S:g} s") from None


def _api(request: web.Request) -> Api:
    return api_of(unquote(request.rel_url.raw_path))


def _error_response(request: web.Request, error: RequestError) -> web.Response:
    api = _api(request)
    headers = {"X-Request-Id": request[REQUEST_ID], "Server": "splitproxy"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    body = error_body(api, error.status, str(error), request[REQUEST_ID])
    headers["Content-Type"] = "application/json; charset=utf-8"
    _allow_origin(request, headers)
    return web.Response(status=error.status, body=body, headers=headers)


def _allow_origin(request: web.Request, headers: MutableMapping[str, str]) -> None:
    """What begins before the engine has answered lets a browser read it as the engine would."""
    if (origin := request.headers.get("Origin")) is not None:
        headers.setdefault("Access-Control-Allow-Origin", origin)


def _json(value: object, status: int) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return web.Response(body=body, status=status, content_type="application/json")
