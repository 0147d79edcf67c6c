"""A llama-server without a model: its HTTP surface as far as a proxy uses it, real session files, and knobs for every
way in which an engine can fail.

It keeps the real one's rules and writes down each call that breaks one (`violations`): what a busy slot is sent, what
is not pinned to a slot, a session file that the real engine would not survive. Run it by hand with
`python -m tests.fake_engine`; it takes llama-server's flags, and knobs as `--set prefill.delay_s=2`.
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
from dataclasses import asdict, fields
from itertools import cycle
from pathlib import Path
from typing import Any, Never, Self

from aiohttp import web

from tests import fake_wire as wire
from tests.fake_knobs import Knobs, Restore, Run, Save, Stage
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
    tokenize,
)
from tests.fake_slots import Call, Slot, Slots
from tests.fake_wire import Generation, JsonDict, RefusalError

__all__ = ["Call", "FakeEngine", "Knobs", "Restore", "Run", "Save", "Slot", "Stage"]

Handler = Callable[[web.Request, Call], Awaitable[web.StreamResponse]]

HEADERS = {"Server": "llama.cpp", "Access-Control-Allow-Origin": ""}
ODD_SIZES = (1, 5, 2, 17, 3, 64, 7, 11)
POLLS = frozenset({"health", "props", "models", "slots", "metrics"})
POLL_S = 1.0
RESTORE_FAILED = "Unable to restore slot: No available space in KV cache or invalid slot save file"
NO_SLOT_ACTIONS = "This server does not support slots action. Start it with `--slot-save-path`"
UNSAFE_IN_NAMES = set('/\\:*?"<>|')
UNLIMITED_ANSWER = 16  # tokens, where neither the request nor a knob says when an answer ends


class FakeEngine:
    """One fake engine. `async with FakeEngine(slot_dir=...) as engine` serves on `engine.url`.

    `weights` names the model: another number answers differently. `memory` decides what a slot can reuse. `unified`
    is llama-server's --kv-unified. With `exits` a crash ends the process, as it does when run by hand.
    """

    kind = "llama-server"

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
        self._context, self._unified, self._exits, self._count = context, unified, exits, slots
        self._answers = 0
        self._polls: deque[float] = deque(maxlen=4)
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.slots = self._empty_slots()

    def _empty_slots(self) -> Slots:
        return Slots(self._count, self._context, self._unified, self.violations)

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
        """Serve. Port 0 takes a free one."""
        self.host, self.port = host, port
        # Without handler_cancellation nobody notices that a client has left.
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
        self._close()

    async def revive(self) -> None:
        """Come back on the same port, with empty slots."""
        self.slots = self._empty_slots()
        self.dead = False
        await self._listen()

    async def _listen(self) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._runner.server, self.host, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def _close(self) -> None:
        self.dead = True
        self.slots.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
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
        """The slots that are in use, by number."""
        return self.slots.busy()

    def forget_calls(self) -> None:
        """Start a new page: what was called before is no longer listed."""
        self.calls.clear()

    async def until(self, condition: Callable[[], object], timeout_s: float = 5) -> None:
        """Wait for a condition on this engine."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is waited for is any expression over the engine's state
                await asyncio.sleep(0.002)

    # ---- HTTP ----

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        for (method, path), handler in self._routes().items():
            app.router.add_route(method, path, self._noted(handler))
        app.router.add_get("/fake/violations", self._tell(lambda: self.violations))
        app.router.add_get("/fake/calls", self._tell(self._told_calls))
        app.router.add_get("/fake/knobs", self._tell(lambda: asdict(self.knobs)))
        app.router.add_post("/fake/knobs", self._set_knobs)
        app.router.add_route("*", "/{path:.*}", self._noted(_nothing_here))
        return app

    def _routes(self) -> dict[tuple[str, str], Handler]:
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/health"): self._health,
            ("GET", "/models"): self._models,
            ("GET", "/v1/models"): self._models,
            ("GET", "/props"): self._props,
            ("GET", "/slots"): self._list_slots,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/slots/{id}"): self._slot_action,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/apply-template"): self._apply_template,
        }
        for path, dialect in wire.DIALECTS.items():
            routes["POST", path] = self._generator(dialect)
        for path, dialect in wire.COUNTS.items():
            routes["POST", path] = self._counter(dialect)
        return routes

    def _noted(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler whose calls are written down, with what became of them."""

        async def noted(request: web.Request) -> web.StreamResponse:
            call = await self._note(request)
            try:
                if self.dead:  # the connection was accepted in the moment of the end
                    await self._cut(request, call)
                response = await self._answer(request, call, handler)
                call.status = response.status
            except (asyncio.CancelledError, ConnectionError):
                call.cancelled = not self.dead and call.status is None
                raise
            finally:
                call.finished = asyncio.get_running_loop().time()
            return response

        return noted

    async def _note(self, request: web.Request) -> Call:
        started = asyncio.get_running_loop().time()
        headers = {name.lower(): value for name, value in request.headers.items()}
        raw = await request.read()
        call = Call(request.method, request.path, dict(request.query), headers, raw, started)
        with contextlib.suppress(ValueError):
            call.body = json.loads(raw)
        self.calls.append(call)
        return call

    async def _answer(self, request: web.Request, call: Call, handler: Handler) -> web.StreamResponse:
        try:
            self._admit(request)
            return await handler(request, call)
        except RefusalError as error:
            return _json(error.body, error.status)

    def _admit(self, request: web.Request) -> None:
        if self.knobs.loading:
            raise RefusalError(503, "Loading model")
        if not self.knobs.api_key or request.path in ("/health", "/v1/health"):
            return
        key = request.headers.get("X-Api-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key != self.knobs.api_key:
            raise RefusalError(401, "Invalid API Key")

    # ---- trouble ----

    def _meet(self, name: str, call: Call) -> Any:
        """The trouble that this call meets at this stage; a stage without any where its `times` are used up."""
        call.stage = name
        stage: Stage = getattr(self.knobs, name)
        if stage.times == 0:
            return type(stage)()
        if stage.times > 0:
            stage.times -= 1
        return stage

    async def suffer(self, stage: Stage, request: web.Request, call: Call) -> None:
        """The trouble that comes before any answer."""
        if stage.delay_s:
            await asyncio.sleep(stage.delay_s)
        if stage.hang:
            await _forever()
        if stage.die:
            await self._end()
        if stage.drop:
            await self._cut(request, call)
        if stage.fail is not None:
            raise RefusalError(*stage.fail)

    async def disturb(self, stage: Run, count: int, request: web.Request, call: Call) -> None:
        """The trouble that comes after a number of tokens."""
        if stage.die_after is not None and count >= stage.die_after:
            await self._end()
        if stage.cut_after is not None and count >= stage.cut_after:
            await self._cut(request, call)
        if stage.stall_after is not None and count >= stage.stall_after:
            await _forever()
        if stage.error_after is not None and count >= stage.error_after:
            raise RefusalError(500, "the engine failed on purpose")

    async def _end(self) -> Never:
        self.die()
        await _forever()

    async def _cut(self, request: web.Request, call: Call) -> Never:
        call.status = 0
        if request.transport is not None:
            request.transport.abort()
        await _forever()

    # ---- calls that need no slot ----

    async def _health(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("health", call), request, call)
        return _json({"status": "ok"})

    async def _models(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("models", call), request, call)
        return _json(wire.models(self.model, self.context))

    async def _props(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("props", call), request, call)
        return _json(wire.props(self.model, self.build, self.context, self._count))

    async def _list_slots(self, request: web.Request, call: Call) -> web.Response:
        stage = self._meet("slots", call)
        self._count_poll()
        await self.suffer(stage, request, call)
        async with self.slots.thread:  # between two batches
            pass
        if request.query.get("fail_on_no_slot") and len(self.busy()) == self._count:
            raise RefusalError(503, "no slot available")
        return _json([self._slot_state(slot) for slot in self.slots.all])

    def _slot_state(self, slot: Slot) -> JsonDict:
        busy = slot.call is not None
        state = wire.slot_state(slot.id, self.context, busy)
        if slot.task is None:
            return state
        # Once a request has ended, the engine no longer says what it read and what it reused.
        read, cached, answered = (slot.call.read, slot.call.cached, slot.call.answered) if slot.call else (0, 0, 0)
        return {**state, **wire.used_slot_state(slot.task, len(slot.held.ids), read, cached, answered, busy)}

    async def _metrics(self, request: web.Request, call: Call) -> web.Response:
        stage = self._meet("metrics", call)
        self._count_poll()
        await self.suffer(stage, request, call)
        figures = {
            "prompt_tokens_total": sum(call.read for call in self.calls),
            "prompt_tokens_cached_total": sum(call.cached for call in self.calls),
            "tokens_predicted_total": sum(call.answered for call in self.calls),
            "requests_processing": len(self.busy()),
            "requests_deferred": len(self.slots.deferred),
        }
        text = "".join(f"llamacpp:{name} {value}\n" for name, value in figures.items())
        return web.Response(text=text, headers=HEADERS)

    def _count_poll(self) -> None:
        """Watch for polls that keep the real engine from noticing that a client has left: one that is told of progress
        is found out by the next piece that cannot be sent."""
        running = [slot.call for slot in self.slots.all if slot.call is not None]
        if all(call.stage == "prefill" for call in running):
            self._polls.clear()
            return
        self._polls.append(asyncio.get_running_loop().time())
        full = len(self._polls) == self._polls.maxlen
        if full and self._polls[-1] - self._polls[0] < POLL_S * (len(self._polls) - 1):
            self.violations.append("the engine's state was asked for more than once a second while a request ran")
            self._polls.clear()

    async def _tokenize(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("tokenize", call), request, call)
        body = _body(call)
        ids = _mixed(body.get("content", ""), bool(body.get("parse_special", True)))
        if body.get("with_pieces"):
            return _json({"tokens": [{"id": n, "piece": piece(n).decode(errors="replace")} for n in ids]})
        return _json({"tokens": ids})

    async def _detokenize(self, _: web.Request, call: Call) -> web.Response:
        return _json({"content": detokenize(_body(call).get("tokens", []))})

    async def _apply_template(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("template", call), request, call)
        return _json({"prompt": wire.chat_prompt(_body(call))})

    def _counter(self, dialect: wire.Dialect) -> Handler:
        async def handler(_: web.Request, call: Call) -> web.Response:
            return _json({"input_tokens": len(_mixed(dialect.prompt(_body(call))))})

        return handler

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
        told = [f.name for f in fields(Call) if f.name not in ("raw", "body", "headers")]
        return [{name: getattr(call, name) for name in told} for call in self.calls]

    # ---- slot actions ----

    async def _slot_action(self, request: web.Request, call: Call) -> web.Response:
        actions: dict[str, Callable[[Slot, Path, Any], JsonDict]] = {
            "save": self._save,
            "restore": self._restore,
            "erase": self._erase,
        }
        action, number = request.query.get("action", ""), _slot_number(request)
        if self.slot_dir is None:
            raise RefusalError(501, NO_SLOT_ACTIONS)
        if action not in actions:
            raise RefusalError(400, "Invalid action")
        stage = self._meet(action, call)
        named = {} if action == "erase" else {"filename": _file_name(_body(call))}
        slots = self.slots  # a revived engine has others
        slot, waited = await slots.take(number, call)
        try:
            async with slots.thread:
                started = time.perf_counter()
                await self.suffer(stage, request, call)
                answer = actions[action](slot, self.slot_dir / named.get("filename", ""), stage)
        except FileFatalError:
            await self._end()
        finally:
            (slots.free_quietly if waited else slots.free)(slot)
        spent = {"timings": {f"{action}_ms": _ms(started)}} if named else {}
        return _json({"id_slot": number, **named, **answer, **spent})

    def _save(self, slot: Slot, path: Path, knob: Save) -> JsonDict:
        held = slot.held
        listed = held
        if knob.wrong_tokens and held.ids:
            listed = Held([*held.ids[:-1], held.ids[-1] ^ 1], held.words, held.checkpoints)
        raw = self.layout.pack(listed, plain_list=knob.plain_list)
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
        except FileFatalError:
            self.violations.append(f"slot {slot.id} was to be restored from a truncated file")
            raise
        except (OSError, FileRefusedError) as error:
            what = "does not exist" if isinstance(error, OSError) else f"does not fit: {error}"
            self.violations.append(f"slot {slot.id} was to be restored from a file that {what}")
            raise RefusalError(400, RESTORE_FAILED) from None
        if len(held.ids) >= self.context or not self.slots.fits(len(held.ids)):
            raise RefusalError(400, RESTORE_FAILED)
        if not self.checkpoints:
            held.checkpoints = []
        slot.held, slot.forgot = held, knob.forgets and len(held.ids) >= knob.forgets_from
        return {"n_restored": len(held.ids) - knob.short_count, "n_read": len(raw)}

    def _erase(self, slot: Slot, _: Path, __: Stage) -> JsonDict:
        return {"n_erased": slot.clear()}

    # ---- generation ----

    def _generator(self, dialect: wire.Dialect) -> Handler:
        async def handler(request: web.Request, call: Call) -> web.StreamResponse:
            made = self._parse(call, dialect)
            stage = self._meet("prefill" if dialect.limit(made.body) == 0 else "decode", call)
            slots = self.slots  # a revived engine has others
            slot, _ = await slots.take(self._pin(call), call, made.prompt)
            slot.task = self._answers
            lag = 0.0
            try:
                return await _Job(self, request, call, dialect, made, slot, stage).run()
            except (asyncio.CancelledError, ConnectionError):
                lag = max(slot.lag_s, self.knobs.notice_s)
                raise
            finally:
                slots.free_after(slot, lag)

        return handler

    def _parse(self, call: Call, dialect: wire.Dialect) -> Generation:
        body = _body(call)
        content = dialect.prompt(body)
        ids = _mixed(content)
        if not ids:
            raise RefusalError(400, '"prompt" must not be empty')
        if not all(0 <= token < VOCABULARY for token in ids):
            raise RefusalError(400, "Prompt contains invalid tokens")
        if len(ids) >= self.context:
            raise wire.too_long(len(ids), self.context)
        self._answers += 1
        serial = hashlib.sha256(f"{self.model}{self._answers}".encode()).hexdigest()[:32]
        text = content if isinstance(content, str) else detokenize(ids)
        return Generation(body, ids, text, self.model, self.build, serial, int(time.time()))

    def _pin(self, call: Call) -> int | None:
        if "x-conversation-id" in call.headers:
            self.violations.append("X-Conversation-Id was passed on: the engine would go on when the client leaves")
        body = _body(call)
        if call.path.endswith("/messages"):
            return None  # the field is dropped when such a body is converted
        pin = body.get("id_slot", -1)
        if type(pin) is int and pin >= 0:
            return pin
        if not _wants_several(body):
            self.violations.append(f"{call.path} was not pinned to a slot")
        elif self.busy():
            self.violations.append(f"{call.path} takes several slots and was sent while others were at work")
        return None


class _Reply:
    """The way back to a client: events while it streams, and the edges at which their bytes are cut."""

    def __init__(self, request: web.Request, streams: bool, odd: bool) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, "X-Accel-Buffering": "no"}) if streams else None
        self._sizes = cycle(ODD_SIZES) if odd else None
        self._size = 0
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
        while len(self._waiting) > self._size:
            piece, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            if piece:
                await self._response.write(piece)
                await asyncio.sleep(0)  # so that the pieces leave one by one
            self._size = next(self._sizes)

    async def end(self, whole: Callable[[], JsonDict]) -> web.StreamResponse:
        if self._response is None:
            return _json(whole())
        if self._waiting:
            await self._response.write(self._waiting)
        await self._response.write_eof()
        return self._response


class _Job:
    """One generation in its slot."""

    def __init__(
        self,
        engine: FakeEngine,
        request: web.Request,
        call: Call,
        dialect: wire.Dialect,
        made: Generation,
        slot: Slot,
        stage: Run,
    ) -> None:
        self._engine, self._request, self._call, self._dialect = engine, request, call, dialect
        self._made, self._slot, self._stage = made, slot, stage
        self._is_prefill = call.stage == "prefill"
        self._limit = dialect.limit(made.body)
        self._reply = _Reply(request, bool(made.body.get("stream")), stage.odd_chunks)

    async def run(self) -> web.StreamResponse:
        made, reply = self._made, self._reply
        made.slot = self._slot.id
        await self._engine.suffer(self._stage, self._request, self._call)
        await reply.open()
        try:
            with self._engine.slots.reading(self._slot):
                await self._read()
            await self._write()
        except RefusalError as error:
            if not reply.streams:
                raise
            await reply.say(wire.event(error.body))
        else:
            await reply.say(self._dialect.end(made))
        return await reply.end(lambda: self._dialect.whole(made))

    async def _read(self) -> None:
        engine, made = self._engine, self._made
        self._reuse()
        started = time.perf_counter()
        await self._tell_progress()
        while rest := made.prompt[made.cached + made.read :]:
            batch = rest[: self._batch()]
            await self._spend(len(batch), engine.knobs.read_tps)
            self._hold(batch)
            made.read += len(batch)
            self._call.read = made.read
            made.prompt_ms = _ms(started)
            await self._tell_progress()
            if self._is_prefill:
                await engine.disturb(self._stage, made.read, self._request, self._call)
        self._slot.held.mark_prompt(made.cached, engine.checkpoints)

    def _reuse(self) -> None:
        made, slot = self._made, self._slot
        trusts = made.body.get("cache_prompt", True) and not slot.forgot
        made.cached = self._call.cached = slot.held.reusable(made.prompt, self._engine.memory) if trusts else 0
        slot.held.keep(made.cached)
        slot.forgot = False

    def _batch(self) -> int:
        """A batch ends where trouble is due, so that it comes after exactly that many tokens."""
        stage = self._stage
        due = [n for n in (stage.die_after, stage.cut_after, stage.stall_after, stage.error_after) if n is not None]
        left = [n - self._made.read for n in due if self._is_prefill and n > self._made.read]
        return min([self._engine.batch, *left])

    async def _tell_progress(self) -> None:
        if self._made.body.get("return_progress"):
            await self._reply.say(self._dialect.progress(self._made))

    async def _write(self) -> None:
        made = self._made
        started = time.perf_counter()
        await self._reply.say(self._dialect.start(made))
        for sample in self._engine.weights.answers(self._slot.held.words):
            if made.count == self._end_after():
                made.ended = True
                break
            made.samples.append(sample)
            self._call.answered = made.count
            made.answer_ms = _ms(started)
            await self._reply.say(self._dialect.token(made))
            if not self._is_prefill:
                await self._engine.disturb(self._stage, made.count, self._request, self._call)
            if self._is_full():
                break
            await asyncio.sleep(self._stage.pause_s)
            await self._spend(1, self._engine.knobs.write_tps)
            self._hold([sample.token])
        made.answer_ms = max(_ms(started), 0.001)

    async def _spend(self, tokens: int, speed: float) -> None:
        slots = self._engine.slots
        seconds = tokens / speed if speed else 0.0
        await (slots.write(seconds) if self._made.samples else slots.read(self._slot, seconds))
        if self._slot.fault is not None:
            raise self._slot.fault

    def _hold(self, ids: list[int]) -> None:
        self._engine.slots.make_room(len(ids))
        if self._slot.fault is not None:
            raise self._slot.fault
        self._slot.held.add(ids, self._engine.weights)

    def _is_full(self) -> bool:
        if self._limit is not None and self._made.count >= self._limit:
            return True
        self._made.truncated = len(self._slot.held.ids) + 1 >= self._engine.context
        return self._made.truncated

    def _end_after(self) -> int | None:
        return self._engine.knobs.answer_tokens or (UNLIMITED_ANSWER if self._limit is None else None)


def _json(value: object, status: int = 200) -> web.Response:
    headers = {**HEADERS, "Keep-Alive": "timeout=5, max=100"}
    return web.Response(text=wire.dump(value), status=status, content_type="application/json", headers=headers)


def _body(call: Call) -> JsonDict:
    if not isinstance(call.body, dict):
        raise RefusalError(400, "[json.exception.parse_error.101] parse error at line 1, column 1")
    return call.body


async def _nothing_here(_: web.Request, __: Call) -> web.StreamResponse:
    raise RefusalError(404, "File Not Found")


def _wants_several(body: JsonDict) -> bool:
    """Whether a request takes more slots than one, which the engine chooses."""
    prompt = body.get("prompt")
    return body.get("n", 1) > 1 or (isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int)


def _mixed(content: str | Sequence[Any], parse_special: bool = True) -> list[int]:
    """The tokens of a text, or of a list of ids and texts."""
    if isinstance(content, str):
        return tokenize(content, parse_special)
    ids: list[int] = []
    for part in content:
        ids += tokenize(part, parse_special) if isinstance(part, str) else [int(part)]
    return ids


def _slot_number(request: web.Request) -> int:
    try:
        return int(float(request.match_info["id"]))
    except ValueError:
        raise RefusalError(400, "Invalid slot ID") from None


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
    parser = argparse.ArgumentParser(
        prog="python -m tests.fake_engine", description="A llama-server without a model, with knobs for its failures."
    )
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
