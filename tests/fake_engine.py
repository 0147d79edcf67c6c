"""A llama-server without a model: its HTTP surface as far as a proxy uses it, real session files, and knobs for every
way in which an engine can fail.

It keeps the real one's rules and writes down each call that breaks one (`violations`): what a busy slot is sent, what
is not pinned to a slot, a session file that the real engine would not survive. Run it by hand with
`python -m tests.fake_engine`; it takes llama-server's flags and knobs as `--set prefill.delay_s=2`.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Never, Self

from aiohttp import web

from tests import fake_wire as wire
from tests.fake_model import (
    VOCABULARY,
    FileFatalError,
    FileRefusedError,
    Held,
    Layout,
    Memory,
    Weights,
    detokenize,
    piece,
    render,
    tokenize,
)
from tests.fake_wire import Generation, JsonDict, RefusalError

ODD_SIZES = (1, 5, 2, 17, 3, 64, 7, 11)
POLLS = frozenset({"health", "props", "models", "slots", "metrics"})
RESTORE_FAILED = "Unable to restore slot: No available space in KV cache or invalid slot save file"
UNSAFE_IN_NAMES = set('/\\:*?"<>|')


@dataclass
class Stage:
    """Trouble at one stage. `times` limits it to that many calls; afterwards the stage works."""

    fail: tuple[int, str] | None = None  # answer with this status and message
    hang: bool = False  # never answer
    die: bool = False  # the engine ends without an answer, and refuses connections until it is revived
    drop: bool = False  # close the connection without an answer; the engine lives
    delay_s: float = 0.0
    times: int = -1


@dataclass
class Run(Stage):
    """Trouble while a request runs, counted in tokens read (prefill) or in tokens answered (decode)."""

    die_after: int | None = None
    cut_after: int | None = None  # only the connection ends
    stall_after: int | None = None  # nothing more comes
    error_after: int | None = None  # an error event, then the end of the stream
    pause_s: float = 0.0  # before each event after the first
    odd_chunks: bool = False  # the stream is written in pieces that have nothing to do with its events


@dataclass
class Save(Stage):
    wrong_count: int = 0  # n_saved is this many too few
    truncate_bytes: int = 0  # the file is this much shorter than n_written says
    wrong_tokens: bool = False  # the file's token list names another last token
    wrong_magic: bool = False
    no_space: bool = False  # 500, and half a file stays behind
    plain_list: bool = False  # the older form of the token list


@dataclass
class Restore(Stage):
    short_count: int = 0  # n_restored is this many too few
    forgets: bool = False  # success, but nothing is reused afterwards


@dataclass
class Knobs:
    """How the engine behaves. May be changed at any time."""

    loading: bool = False  # 503 everywhere
    api_key: str = ""
    read_tps: float = 0.0  # tokens/s; 0: at once
    write_tps: float = 0.0
    answer_tokens: int = 0  # the end token comes after so many; 0: never if the request has a limit, else after 16
    notice_s: float = 0.0  # how long the work for a client that left goes on (the real engine: up to a second)
    tokenize: Stage = field(default_factory=Stage)
    template: Stage = field(default_factory=Stage)
    prefill: Run = field(default_factory=Run)
    save: Save = field(default_factory=Save)
    restore: Restore = field(default_factory=Restore)
    erase: Stage = field(default_factory=Stage)
    decode: Run = field(default_factory=Run)
    health: Stage = field(default_factory=Stage)
    props: Stage = field(default_factory=Stage)
    models: Stage = field(default_factory=Stage)
    slots: Stage = field(default_factory=Stage)
    metrics: Stage = field(default_factory=Stage)

    def update(self, changes: JsonDict) -> None:
        """Take over the named knobs: {"prefill": {"hang": true}}. Raises AttributeError for one that does not exist."""
        _update(self, changes)


def _update(knobs: object, changes: JsonDict) -> None:
    for name, value in changes.items():
        held = getattr(knobs, name)
        if is_dataclass(held):
            _update(held, value)
        else:
            setattr(knobs, name, tuple(value) if isinstance(value, list) else value)


@dataclass
class Call:
    """One call as it came, and what became of it. Times are the event loop's clock."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    raw: bytes
    started: float
    body: Any = None
    stage: str = ""
    slot: int | None = None
    status: int | None = None
    finished: float | None = None
    cancelled: bool = False  # the client left
    read: int = 0  # prompt tokens that were really read for it
    cached: int = 0
    answered: int = 0  # answer tokens


@dataclass
class Slot:
    id: int
    held: Held = field(default_factory=Held)
    call: Call | None = None  # what occupies it
    fault: RefusalError | None = None  # what ends the request in it
    forgot: bool = False
    task: int | None = None
    used: int = 0  # the larger, the later

    def clear(self) -> int:
        """Forget everything; the number of tokens that were held."""
        count = len(self.held.ids)
        self.held, self.forgot = Held(), False
        return count


@dataclass
class _Waiter:
    pin: int | None
    call: Call
    is_action: bool
    turn: "asyncio.Future[Slot]"


class _Reply:
    """The way back to the client: events while it streams, and the edges at which their bytes are cut."""

    def __init__(self, request: web.Request, streams: bool, odd: bool) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, "X-Accel-Buffering": "no"}) if streams else None
        self._sizes = cycle(ODD_SIZES) if odd else None
        self._waiting = b""

    @property
    def streams(self) -> bool:
        return self._response is not None

    async def open(self) -> None:
        if self._response is None:
            return
        self._response.content_type = "text/event-stream"
        self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        # Like the real engine, which closes after a stream without having said so in a header.
        self._response.force_close()

    async def say(self, data: bytes) -> None:
        if self._response is None or not data:
            return
        if self._sizes is None:
            await self._response.write(data)
            return
        self._waiting += data
        while len(self._waiting) >= (size := next(self._sizes)):
            await self._response.write(self._waiting[:size])
            self._waiting = self._waiting[size:]
            await asyncio.sleep(0)

    async def end(self, whole: JsonDict) -> web.StreamResponse:
        if self._response is None:
            return _json(whole)
        if self._waiting:
            await self._response.write(self._waiting)
        await self._response.write_eof()
        return self._response


HEADERS = {"Server": "llama.cpp", "Access-Control-Allow-Origin": ""}


def _json(value: object, status: int = 200) -> web.Response:
    headers = {**HEADERS, "Keep-Alive": "timeout=5, max=100"}
    return web.Response(text=wire.dump(value), status=status, content_type="application/json", headers=headers)


class FakeEngine:
    """One fake engine. `async with FakeEngine(slot_dir=...) as engine` serves on `engine.url`."""

    def __init__(
        self,
        *,
        slots: int = 1,
        context: int = 32768,
        batch: int = 512,
        memory: Memory = "dense",
        slot_dir: Path | str | None = None,
        unified: bool = True,
        weights: int = 1,
        k_type: int = 1,
        checkpoints: int = 4,
        model: str = "fake-model",
        build: str = "b0-unknown",
        knobs: Knobs | None = None,
        exits: bool = False,
    ) -> None:
        self.knobs = knobs or Knobs()
        self.memory: Memory = memory
        self.batch = batch
        self.weights = Weights(weights)
        self.layout = Layout(memory, 1 if unified else slots, k_type)
        self.checkpoints = checkpoints if memory != "dense" else 0
        self.slot_dir = Path(slot_dir) if slot_dir is not None else None
        self.model, self.build = model, build
        self.host, self.port = "127.0.0.1", 0
        self.calls: list[Call] = []
        self.violations: list[str] = []
        self.dead = False
        self._context, self._unified, self._exits = context, unified, exits
        self._count = slots
        self._serial = 0
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._reset()

    def _reset(self) -> None:
        self.slots = [Slot(n) for n in range(self._count)]
        self._deferred: deque[_Waiter] = deque()
        self._thread = asyncio.Lock()  # the one inference thread
        self._leaving: dict[int, asyncio.TimerHandle] = {}
        self._polls: deque[float] = deque(maxlen=4)

    # ---- life ----

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def context(self) -> int:
        """Tokens that one slot can hold."""
        return self._context if self._unified else self._context // self._count

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, port
        self._runner = web.AppRunner(
            self._app(), handler_cancellation=True, access_log=None, keepalive_timeout=5, shutdown_timeout=1
        )
        await self._runner.setup()
        await self._listen()

    async def stop(self) -> None:
        self._close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def die(self) -> None:
        """End like a process that crashed: connections are reset, new ones refused, memory lost."""
        if self._exits:
            os._exit(134)
        self.dead = True
        self._close()

    async def revive(self) -> None:
        """Come back on the same port, with empty slots."""
        self._reset()
        self.dead = False
        await self._listen()

    async def _listen(self) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._runner.server, self.host, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for timer in self._leaving.values():
            timer.cancel()
        self._leaving.clear()
        server = self._runner.server if self._runner is not None else None
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()

    # ---- what tests ask ----

    def steps(self) -> list[str]:
        """The stages that were called, in order, without the polls of an engine's state."""
        return [call.stage or call.path for call in self.calls if call.stage not in POLLS]

    def sent(self, stage: str) -> list[Call]:
        """The calls of one stage, in order."""
        return [call for call in self.calls if call.stage == stage]

    def busy(self) -> list[int]:
        return [slot.id for slot in self.slots if slot.call is not None]

    async def until(self, condition: Callable[[], object], timeout_s: float = 5) -> None:
        """Wait for a condition on this engine."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is waited for is any expression over the engine's state
                await asyncio.sleep(0.002)

    # ---- HTTP ----

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._middleware], client_max_size=1 << 28)
        add = app.router.add_route
        for path in ("/health", "/v1/health"):
            add("GET", path, self._health)
        for path in ("/v1/models", "/models"):
            add("GET", path, self._models)
        add("GET", "/props", self._props)
        add("GET", "/slots", self._list_slots)
        add("GET", "/metrics", self._metrics)
        add("POST", "/slots/{id}", self._slot_action)
        add("POST", "/tokenize", self._tokenize)
        add("POST", "/detokenize", self._detokenize)
        add("POST", "/apply-template", self._apply_template)
        for path, dialect in DIALECTS.items():
            add("POST", path, self._generator(dialect))
        for path in COUNTS:
            add("POST", path, self._count_tokens)
        add("GET", "/fake/violations", self._tell(lambda: self.violations))
        add("GET", "/fake/calls", self._tell(self._told_calls))
        add("GET", "/fake/knobs", self._tell(lambda: asdict(self.knobs)))
        add("POST", "/fake/knobs", self._set_knobs)
        return app

    @web.middleware
    async def _middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path.startswith("/fake/"):
            return await handler(request)
        call = Call(
            request.method,
            request.path,
            dict(request.query),
            {name.lower(): value for name, value in request.headers.items()},
            await request.read(),
            asyncio.get_running_loop().time(),
        )
        self.calls.append(call)
        with contextlib.suppress(ValueError):
            call.body = json.loads(call.raw)
        request["call"] = call
        try:
            response = await self._answer(request, handler)
            call.status = response.status
        except asyncio.CancelledError:
            call.cancelled = not self.dead and call.status is None
            raise
        finally:
            call.finished = asyncio.get_running_loop().time()
        return response

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            self._admit(request)
            return await handler(request)
        except RefusalError as error:
            return _json(error.body, error.status)
        except web.HTTPException:
            return _json(RefusalError(404, "File Not Found").body, 404)

    def _admit(self, request: web.Request) -> None:
        if self.knobs.loading:
            raise RefusalError(503, "Loading model")
        if not self.knobs.api_key or request.path in ("/health", "/v1/health"):
            return
        key = request.headers.get("X-Api-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key != self.knobs.api_key:
            raise RefusalError(401, "Invalid API Key")

    def _body(self, request: web.Request) -> JsonDict:
        call: Call = request["call"]
        if not isinstance(call.body, dict):
            raise RefusalError(400, "[json.exception.parse_error.101] parse error at line 1, column 1")
        return call.body

    def _meet(self, name: str, request: web.Request) -> Any:
        """The trouble that this call meets at this stage; a stage without any where its `times` are used up."""
        request["call"].stage = name
        stage: Stage = getattr(self.knobs, name)
        if stage.times == 0:
            return type(stage)()
        if stage.times > 0:
            stage.times -= 1
        return stage

    async def _suffer(self, stage: Stage, request: web.Request) -> None:
        if stage.delay_s:
            await asyncio.sleep(stage.delay_s)
        if stage.hang:
            await _forever()
        if stage.die:
            await self._die_here()
        if stage.drop:
            await self._cut(request)
        if stage.fail is not None:
            raise RefusalError(*stage.fail)

    async def _die_here(self) -> Never:
        self.die()
        await _forever()

    async def _cut(self, request: web.Request) -> Never:
        request["call"].status = 0
        if request.transport is not None:
            request.transport.abort()
        await _forever()

    def _violate(self, what: str) -> None:
        self.violations.append(what)

    # ---- calls that need no slot ----

    async def _health(self, request: web.Request) -> web.Response:
        await self._suffer(self._meet("health", request), request)
        return _json({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        await self._suffer(self._meet("models", request), request)
        meta = {
            "vocab_type": 2, "n_vocab": VOCABULARY, "n_ctx": self.context, "n_ctx_train": 131072, "n_embd": 64,
            "n_params": 139584, "size": 279808, "ftype": "F16",
        }  # fmt: skip
        model = {
            "id": self.model, "aliases": [self.model], "tags": [], "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "created": int(time.time()), "owned_by": "llamacpp", "meta": meta,
        }  # fmt: skip
        summary = {"name": self.model, "model": self.model, "type": "model", "capabilities": ["completion"]}
        return _json({"models": [summary], "object": "list", "data": [model]})

    async def _props(self, request: web.Request) -> web.Response:
        await self._suffer(self._meet("props", request), request)
        return _json({
            "default_generation_settings": {"params": wire.SAMPLING, "n_ctx": self.context},
            "total_slots": len(self.slots), "model_alias": self.model, "model_ftype": "F16",
            "model_path": f"/models/{self.model}.gguf",
            "modalities": {"vision": False, "video": False, "audio": False}, "media_marker": "<__media__>",
            "endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": True, "ui": True, "ui_settings": {},
            "chat_template": "chatml", "chat_template_caps": {"supports_tools": True},
            "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "build_info": self.build, "is_sleeping": False,
            "cors_proxy_enabled": False,
        })  # fmt: skip

    async def _list_slots(self, request: web.Request) -> web.Response:
        self._count_poll()
        await self._suffer(self._meet("slots", request), request)
        if request.query.get("fail_on_no_slot") and all(slot.call for slot in self.slots):
            raise RefusalError(503, "no slot available")
        return _json([self._slot_state(slot) for slot in self.slots])

    def _slot_state(self, slot: Slot) -> JsonDict:
        state: JsonDict = {
            "id": slot.id, "n_ctx": self.context, "speculative": False, "is_processing": slot.call is not None,
        }  # fmt: skip
        if slot.task is None:
            return state
        # After a request has ended, the engine no longer says what it read and what it reused.
        runs = slot.call
        return {
            **state, "id_task": slot.task, "n_prompt_tokens": len(slot.held.ids),
            "n_prompt_tokens_processed": runs.read if runs else 0, "n_prompt_tokens_cache": runs.cached if runs else 0,
            "params": wire.SAMPLING,
            "next_token": [{
                "has_next_token": runs is not None, "has_new_line": False, "n_remain": -1,
                "n_decoded": runs.answered if runs else 0,
            }],
        }  # fmt: skip

    async def _metrics(self, request: web.Request) -> web.Response:
        self._count_poll()
        await self._suffer(self._meet("metrics", request), request)
        figures = {
            "prompt_tokens_total": sum(call.read for call in self.calls),
            "prompt_tokens_cached_total": sum(call.cached for call in self.calls),
            "tokens_predicted_total": sum(call.answered for call in self.calls),
            "requests_processing": len(self.busy()),
            "requests_deferred": len(self._deferred),
        }
        text = "".join(f"llamacpp:{name} {value}\n" for name, value in figures.items())
        return web.Response(text=text, headers=HEADERS)

    def _count_poll(self) -> None:
        """The real engine does not notice that a client left while its state is asked for more than once a second."""
        if not self.busy():
            self._polls.clear()
            return
        self._polls.append(asyncio.get_running_loop().time())
        full = len(self._polls) == self._polls.maxlen
        if full and self._polls[-1] - self._polls[0] < len(self._polls) - 1:
            self._violate("the engine's state was asked for more than once a second while a request ran")
            self._polls.clear()

    async def _tokenize(self, request: web.Request) -> web.Response:
        await self._suffer(self._meet("tokenize", request), request)
        body = self._body(request)
        ids = _mixed(body.get("content", ""), bool(body.get("parse_special", True)))
        if body.get("with_pieces"):
            return _json({"tokens": [{"id": n, "piece": piece(n).decode(errors="replace")} for n in ids]})
        return _json({"tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return _json({"content": detokenize(self._body(request).get("tokens", []))})

    async def _apply_template(self, request: web.Request) -> web.Response:
        await self._suffer(self._meet("template", request), request)
        return _json({"prompt": _chat_prompt(self._body(request))})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        text = PROMPTS[COUNTS[request.path]](self._body(request))
        return _json({"input_tokens": len(_mixed(text, True))})

    async def _set_knobs(self, request: web.Request) -> web.Response:
        try:
            self.knobs.update(await request.json())
        except (AttributeError, ValueError) as error:
            return _json({"error": str(error)}, 400)
        return _json(asdict(self.knobs))

    def _tell(self, value: Callable[[], object]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            return _json(value())

        return handler

    def _told_calls(self) -> list[JsonDict]:
        untold = {"raw", "body"}
        return [{f.name: getattr(call, f.name) for f in fields(call) if f.name not in untold} for call in self.calls]

    # ---- who may use a slot ----

    async def _take(self, pin: int | None, call: Call, *, is_action: bool = False) -> tuple[Slot, bool]:
        """A slot, now or when it is this call's turn, and whether the call had to wait for it."""
        wanted = self.slots if pin is None else [self.slots[pin % len(self.slots)]]
        if pin is not None and wanted[0].call is not None:
            self._violate(f"{call.method} {call.path} was sent to slot {pin} while it was busy")
        idle = [slot for slot in wanted if slot.call is None]
        if idle:
            slot = min(idle, key=lambda slot: slot.used)
            slot.call = call
            return slot, False
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(None if pin is None else wanted[0].id, call, is_action, turn)
        self._deferred.append(waiter)
        try:
            return await turn, True
        except asyncio.CancelledError:
            if waiter in self._deferred:
                self._deferred.remove(waiter)
            elif turn.done() and not turn.cancelled():
                self._free(turn.result())
            raise

    def _free(self, slot: Slot) -> None:
        """Give a slot to the call that waits for it: one pinned to it first, else the first that takes any."""
        self._leaving.pop(slot.id, None)
        self._serial += 1
        slot.call, slot.fault, slot.used = None, None, self._serial
        pinned = (waiter for waiter in self._deferred if waiter.pin == slot.id)
        loose = (waiter for waiter in self._deferred if waiter.pin is None)
        waiter = next(pinned, None) or next(loose, None)
        if waiter is not None:
            self._deferred.remove(waiter)
            slot.call = waiter.call
            waiter.turn.set_result(slot)

    def _free_later(self, slot: Slot, seconds: float) -> None:
        if seconds <= 0 or self.dead:
            self._free(slot)
        else:
            self._leaving[slot.id] = asyncio.get_running_loop().call_later(seconds, self._free, slot)

    # ---- slot actions ----

    async def _slot_action(self, request: web.Request) -> web.Response:
        actions: dict[str, Callable[[Slot, Path, Any], JsonDict]] = {
            "save": self._save,
            "restore": self._restore,
            "erase": self._erase,
        }
        action = request.query.get("action", "")
        try:
            number = int(float(request.match_info["id"]))
        except ValueError:
            raise RefusalError(400, "Invalid slot ID") from None
        if self.slot_dir is None:
            message = "This server does not support slots action. Start it with `--slot-save-path`"
            raise RefusalError(501, message)
        if action not in actions:
            raise RefusalError(400, "Invalid action")
        stage = self._meet(action, request)
        name = _file_name(self._body(request)) if action != "erase" else ""
        call: Call = request["call"]
        call.slot = number % len(self.slots)
        slot, waited = await self._take(number, call, is_action=True)
        try:
            async with self._thread:
                started = time.perf_counter()
                await self._suffer(stage, request)
                answer = actions[action](slot, self.slot_dir / name, stage)
                spent = {"timings": {f"{action}_ms": _ms(started)}} if name else {}
        except FileFatalError:
            await self._die_here()
        finally:
            self._after_action(slot, waited)
        return _json({"id_slot": number, **({"filename": name} if name else {}), **answer, **spent})

    def _after_action(self, slot: Slot, waited: bool) -> None:
        if waited:
            # The real engine wakes one waiting task when a request ends, and none when a slot action does: a request
            # that waits behind a deferred action stays where it is.
            slot.call = None
        else:
            self._free(slot)

    def _save(self, slot: Slot, path: Path, knob: Save) -> JsonDict:
        held = slot.held
        raw = self.layout.pack(held, plain_list=knob.plain_list)
        if knob.wrong_tokens and held.ids:
            other = Held([*held.ids[:-1], held.ids[-1] ^ 1], held.words, held.checkpoints)
            raw = self.layout.pack(other, plain_list=knob.plain_list)
        if knob.wrong_magic:
            raw = b"oops" + raw[4:]
        if knob.no_space:
            path.write_bytes(raw[: len(raw) // 2])
            raise RefusalError(500, "Unable to save slot")
        path.write_bytes(raw[: len(raw) - knob.truncate_bytes])
        return {"n_saved": len(held.ids) - knob.wrong_count, "n_written": len(raw)}

    def _restore(self, slot: Slot, path: Path, knob: Restore) -> JsonDict:
        slot.clear()
        try:
            raw = path.read_bytes()
            held = self.layout.unpack(raw)
        except OSError:
            self._violate(f"slot {slot.id} was to be restored from a file that does not exist")
            raise RefusalError(400, RESTORE_FAILED) from None
        except FileRefusedError as error:
            self._violate(f"slot {slot.id} was to be restored from a file that does not fit: {error}")
            raise RefusalError(400, RESTORE_FAILED) from None
        except FileFatalError:
            self._violate(f"slot {slot.id} was to be restored from a truncated file")
            raise
        if len(held.ids) >= self.context or (self._unified and self._used() + len(held.ids) > self._context):
            raise RefusalError(400, RESTORE_FAILED)
        slot.held, slot.forgot = held, knob.forgets
        if not self.checkpoints:
            held.checkpoints = []
        return {"n_restored": len(held.ids) - knob.short_count, "n_read": len(raw)}

    def _erase(self, slot: Slot, _: Path, __: Stage) -> JsonDict:
        return {"n_erased": slot.clear()}

    # ---- generation ----

    def _generator(self, dialect: wire.Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            made = self._parse(request, dialect)
            call: Call = request["call"]
            stage: Run = self._meet("prefill" if dialect.limit(made.body) == 0 else "decode", request)
            slot, _ = await self._take(self._pin(made.body, call), call)
            lag = 0.0
            try:
                return await _Job(self, request, dialect, made, slot, stage).run()
            except asyncio.CancelledError:
                lag = self.knobs.notice_s
                raise
            finally:
                self._free_later(slot, lag)

        return handler

    def _parse(self, request: web.Request, dialect: wire.Dialect) -> Generation:
        body = self._body(request)
        if "x-conversation-id" in request["call"].headers:
            self._violate("X-Conversation-Id was passed on: the engine would not stop when the client leaves")
        content = PROMPTS[type(dialect)](body)
        ids = _mixed(content, True)
        if not ids:
            raise RefusalError(400, '"prompt" must not be empty')
        if not all(0 <= token < VOCABULARY for token in ids):
            raise RefusalError(400, "Prompt contains invalid tokens")
        if len(ids) >= self.context:
            raise wire.too_long(len(ids), self.context)
        self._serial += 1
        serial = hashlib.sha256(f"{self.model}{self._serial}".encode()).hexdigest()[:32]
        text = content if isinstance(content, str) else detokenize(ids)
        return Generation(body, ids, text, self.model, self.build, serial, int(time.time()))

    def _pin(self, body: JsonDict, call: Call) -> int | None:
        pin = body.get("id_slot", -1)
        if type(pin) is int and pin >= 0:
            return pin
        self._violate(f"{call.path} was not pinned to a slot")
        return None

    def _used(self) -> int:
        return sum(len(slot.held.ids) for slot in self.slots)

    def make_room(self, count: int) -> None:
        """Room in the pool that all slots share, as the real engine makes it: idle slots are purged, the least recently
        used first; if that is not enough, every running request fails."""
        idle = sorted((slot for slot in self.slots if slot.call is None), key=lambda slot: slot.used)
        while self._unified and self._used() + count > self._context:
            if idle:
                idle.pop(0).clear()
                continue
            self._violate("the running requests together overflowed the shared pool")
            for slot in self.slots:
                slot.clear()
                slot.fault = RefusalError(500, "Context size has been exceeded.")
            return

    async def compute(self, slot: Slot, tokens: int, speed: float, *, alone: bool) -> None:
        """Spend the time of one step. A step that reads keeps all others waiting; answers are written side by side."""
        seconds = tokens / speed if speed else 0.0
        async with self._thread:
            if alone:
                await asyncio.sleep(seconds)
        if not alone:
            await asyncio.sleep(seconds)
        if slot.fault is not None:
            raise slot.fault

    async def disturb(self, stage: Run, count: int, request: web.Request) -> None:
        """The trouble that comes after a number of tokens."""
        if stage.die_after is not None and count >= stage.die_after:
            await self._die_here()
        if stage.cut_after is not None and count >= stage.cut_after:
            await self._cut(request)
        if stage.stall_after is not None and count >= stage.stall_after:
            await _forever()
        if stage.error_after is not None and count >= stage.error_after:
            raise RefusalError(500, "the engine failed on purpose")

    async def suffer(self, stage: Stage, request: web.Request) -> None:
        await self._suffer(stage, request)


class _Job:
    """One generation in its slot."""

    def __init__(
        self,
        engine: FakeEngine,
        request: web.Request,
        dialect: wire.Dialect,
        made: Generation,
        slot: Slot,
        stage: Run,
    ) -> None:
        self._engine, self._request, self._dialect = engine, request, dialect
        self._made, self._slot, self._stage = made, slot, stage
        self._reads = request["call"].stage == "prefill"
        self._reply = _Reply(request, bool(made.body.get("stream")), stage.odd_chunks)
        self._call: Call = request["call"]

    async def run(self) -> web.StreamResponse:
        made = self._made
        self._call.slot = made.slot = self._slot.id
        self._slot.task = self._engine._serial
        await self._engine.suffer(self._stage, self._request)
        await self._reply.open()
        try:
            await self._read()
            await self._write()
        except RefusalError as error:
            if not self._reply.streams:
                raise
            await self._reply.say(wire.event(error.body))
            return await self._reply.end({})
        await self._reply.say(self._dialect.end(made))
        return await self._reply.end(self._dialect.whole(made))

    async def _read(self) -> None:
        engine, made, held = self._engine, self._made, self._slot.held
        trusts = made.body.get("cache_prompt", True) and not self._slot.forgot
        made.cached = self._call.cached = held.reusable(made.prompt, engine.memory) if trusts else 0
        held.keep(made.cached)
        self._slot.forgot = False
        started = time.perf_counter()
        await self._tell_progress()
        while rest := made.prompt[made.cached + made.read :]:
            batch = rest[: self._batch()]
            await engine.compute(self._slot, len(batch), engine.knobs.read_tps, alone=True)
            engine.make_room(len(batch))
            held = self._slot.held
            held.add(batch, engine.weights)
            made.read += len(batch)
            self._call.read = made.read
            made.prompt_ms = _ms(started)
            await self._tell_progress()
            if self._reads:
                await engine.disturb(self._stage, made.read, self._request)
        held.mark_prompt(engine.checkpoints)

    def _batch(self) -> int:
        """A batch ends where trouble is due, so that it comes after exactly that many tokens."""
        stage = self._stage
        due = [n for n in (stage.die_after, stage.cut_after, stage.stall_after, stage.error_after) if n is not None]
        left = [n - self._made.read for n in due if self._reads and n > self._made.read]
        return min([self._engine.batch, *left])

    async def _tell_progress(self) -> None:
        if self._made.body.get("return_progress"):
            await self._reply.say(self._dialect.progress(self._made))

    async def _write(self) -> None:
        made, held = self._made, self._slot.held
        started = time.perf_counter()
        await self._reply.say(self._dialect.start(made))
        for sample in self._engine.weights.answers(held.words):
            if made.count == self._end_after():
                made.ended = True
                break
            made.samples.append(sample)
            self._call.answered = made.count
            made.answer_ms = _ms(started)
            await self._reply.say(self._dialect.token(made))
            if not self._reads:
                await self._engine.disturb(self._stage, made.count, self._request)
            if self._is_full():
                break
            await self._step(sample.token)
        made.answer_ms = max(_ms(started), 0.001)

    async def _step(self, token: int) -> None:
        if self._stage.pause_s:
            await asyncio.sleep(self._stage.pause_s)
        await self._engine.compute(self._slot, 1, self._engine.knobs.write_tps, alone=False)
        self._engine.make_room(1)
        self._slot.held.add([token], self._engine.weights)

    def _is_full(self) -> bool:
        limit = self._dialect.limit(self._made.body)
        if limit is not None and self._made.count >= limit:
            return True
        self._made.truncated = len(self._slot.held.ids) + 1 >= self._engine.context
        return self._made.truncated

    def _end_after(self) -> int | None:
        limited = self._dialect.limit(self._made.body) is not None
        return self._engine.knobs.answer_tokens or (None if limited else 16)


# ---- bodies ----


def _mixed(content: str | Sequence[Any], parse_special: bool) -> list[int]:
    """Text, or a list of ids and texts."""
    if isinstance(content, str):
        return tokenize(content, parse_special)
    ids: list[int] = []
    for part in content:
        ids += tokenize(part, parse_special) if isinstance(part, str) else [int(part)]
    return ids


def _plain_prompt(body: JsonDict) -> str | list[Any]:
    if "prompt" not in body:
        raise RefusalError(400, "[json.exception.out_of_range.403] key 'prompt' not found")
    prompt: str | list[Any] = body["prompt"]
    return prompt


def _chat_prompt(body: JsonDict) -> str:
    if "messages" not in body:
        raise RefusalError(400, "'messages' is required")
    if not isinstance(body["messages"], list):
        raise RefusalError(400, "Expected 'messages' to be an array")
    for message in body["messages"]:
        parts = message.get("content")
        if isinstance(parts, list) and any(
            part.get("type") not in ("text", "input_text", "output_text") for part in parts
        ):
            hint = "hint: if this is unexpected, you may need to provide the mmproj"
            raise RefusalError(500, f"image input is not supported - {hint}")
    return render(body)


def _responses_prompt(body: JsonDict) -> str:
    given = body.get("input", "")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return _chat_prompt({**body, "messages": [*_lead(body.get("instructions")), *messages]})


def _messages_prompt(body: JsonDict) -> str:
    return _chat_prompt({**body, "messages": [*_lead(body.get("system")), *body.get("messages", [])]})


def _lead(text: object) -> list[JsonDict]:
    return [{"role": "system", "content": text}] if text else []


def _file_name(body: JsonDict) -> str:
    if "filename" not in body:
        raise RefusalError(400, "[json.exception.out_of_range.403] key 'filename' not found")
    name = str(body["filename"])
    plain = name.strip() == name and name.isprintable() and 0 < len(name.encode()) <= 255
    if not plain or UNSAFE_IN_NAMES & set(name) or name.endswith(".") or ".." in name:
        raise RefusalError(400, "Invalid filename")
    return name


def _ms(started: float) -> float:
    return round(1000 * (time.perf_counter() - started), 3)


async def _forever() -> Never:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


DIALECTS: dict[str, wire.Dialect] = {
    "/completion": wire.Native(),
    "/completions": wire.Native(),
    "/v1/completions": wire.Completions(),
    "/v1/chat/completions": wire.Chat(),
    "/chat/completions": wire.Chat(),
    "/v1/responses": wire.Responses(),
    "/v1/messages": wire.Messages(),
}
PROMPTS: dict[type, Callable[[JsonDict], str | list[Any]]] = {
    wire.Native: _plain_prompt,
    wire.Completions: _plain_prompt,
    wire.Chat: _chat_prompt,
    wire.Responses: _responses_prompt,
    wire.Messages: _messages_prompt,
}
COUNTS: dict[str, type] = {
    "/v1/chat/completions/input_tokens": wire.Chat,
    "/v1/responses/input_tokens": wire.Responses,
    "/v1/messages/count_tokens": wire.Messages,
}


# ---- by hand ----


def _settings(given: Sequence[str]) -> Iterator[JsonDict]:
    """`prefill.hang=true` as {"prefill": {"hang": True}}."""
    for setting in given:
        name, _, text = setting.partition("=")
        value: Any = json.loads(text)
        for part in reversed(name.split(".")):
            value = {part: value}
        yield value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-c", "--ctx-size", type=int, default=32768)
    parser.add_argument("-b", "--batch-size", type=int, default=512)
    parser.add_argument("-kvu", "--kv-unified", action="store_true")
    parser.add_argument("-a", "--alias", default="fake-model")
    parser.add_argument("--slot-save-path", type=Path)
    parser.add_argument("--ctx-checkpoints", type=int, default=4)
    parser.add_argument("--memory", choices=("dense", "sliding", "hybrid", "none"), default="dense")
    parser.add_argument("--weights", type=int, default=1, help="another number is another model")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=JSON", help="for example save.delay_s=2")
    # A launcher may hand over any of llama-server's flags.
    return parser.parse_known_args()[0]


async def _serve(given: argparse.Namespace) -> None:
    engine = FakeEngine(
        slots=given.parallel,
        context=given.ctx_size,
        batch=given.batch_size,
        memory=given.memory,
        slot_dir=given.slot_save_path,
        unified=given.kv_unified or given.parallel == 1,
        weights=given.weights,
        checkpoints=given.ctx_checkpoints,
        model=given.alias,
        exits=True,
    )
    for setting in _settings(given.set):
        engine.knobs.update(setting)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await engine.start(given.port, given.host)
    print(f"listening on {engine.url}", flush=True)
    await ended.wait()
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(_serve(_arguments()))
