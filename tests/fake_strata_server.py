"""The HTTP server in front of a fake Strata engine: HTTP/1.0, one conversation, no ids, no way to empty it.

It is driven as the fake llama-server is, by the same knobs, and writes down the rules that are broken (`violations`),
its own among them: a body that is not the client's, a foreign Host or Origin, a call that it has to forbid.
"""

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion10

from tests import fake_wire as wire
from tests.fake_engine import FakeEngine, Handler, _Job, _json, _ms, _Reply
from tests.fake_knobs import Knobs, Restore, Run, Save
from tests.fake_model import Held
from tests.fake_slots import Call, Slot, Slots
from tests.fake_strata_model import KINDS, Conversation, SessionError, fit, read, write
from tests.fake_wire import Dialect, Generation, JsonDict, RefusalError

# As a chat template writes them, and as `fake_model.render` does.
TEMPLATE = """\
{%- set lead = namespace(text='') -%}
{%- set rest = messages -%}
{%- if tools -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set lead.text = messages[0].content -%}
{%- set rest = messages[1:] -%}
{%- endif -%}
{{- '<|im_start|>system\\n' + lead.text + '\\n\\nYou can call these functions:\\n' -}}
{%- for tool in tools -%}{{- {'type': 'function', 'function': tool} | tojson + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

UNSAFE_IN_NAMES = set('/\\:*?"<>|')


@dataclass
class TurnHeld(Held):
    """What the slot holds, as an engine that can be taken up at few places only."""

    conversation: Conversation = field(default_factory=Conversation)

    def __post_init__(self) -> None:
        self.ids, self.words = self.conversation.ids, self.conversation.words

    def reusable(self, prompt: Any, memory: Any) -> int:
        return self.conversation.reusable(prompt)

    def keep(self, count: int) -> None:
        self.conversation.keep(count)

    def mark_prompt(self, start: int, limit: int) -> None:
        self.conversation.mark_prompt(start, limit)


@dataclass
class TurnSlot(Slot):
    held: Held = field(default_factory=TurnHeld)

    @property
    def conversation(self) -> Conversation:
        assert isinstance(self.held, TurnHeld)
        return self.held.conversation

    def hold(self, conversation: Conversation) -> None:
        self.held, self.forgot = TurnHeld(conversation=conversation), False

    def clear(self) -> int:
        count = len(self.held.ids)
        self.hold(Conversation())
        return count


class FakeStrata(FakeEngine):
    """One fake server. `async with FakeStrata(slot_dir=...) as engine` serves on `engine.url`.

    `loaded` says whether the model is; a request loads it in `load_s`. `comments_s` is how often a stream that has
    nothing to say says so (the real one: 10 s). `template` is what /props shows; empty for none. Whatever a
    llama-server is asked for besides, such as more slots, this server does not have.
    """

    kind = "strata"

    def __init__(
        self,
        *,
        context: int = 32768,
        batch: int = 512,
        slot_dir: Path | str | None = None,
        weights: int = 1,
        kv: str = "int8",
        prompt_cache: int = 6,
        model: str = "fake-model",
        build: str = "0.1.30-fake",
        knobs: Knobs | None = None,
        exits: bool = False,
        template: str = TEMPLATE,
        comments_s: float = 10.0,
        load_s: float = 0.0,
        memory: str = "",
        slots: int = 1,
    ) -> None:
        self.loaded = True
        self.published = False  # a save that fails has put its file in place all the same
        self.error_kind = ""  # of the error with which a slot action fails
        self.template, self.comments_s, self.load_s = template, comments_s, load_s
        self.fit = fit(weights, context, kv, build)
        super().__init__(
            context=context, batch=batch, slot_dir=slot_dir, weights=weights, model=model, build=build, knobs=knobs,
            exits=exits,
        )  # fmt: skip
        self.checkpoints = 0 if memory == "none" else prompt_cache

    def _empty_slots(self) -> Slots:
        slots = Slots(1, self._context, True, self.violations)
        slots.all = [TurnSlot(0)]
        return slots

    @property
    def conversation(self) -> Conversation:
        slot = self.slots.all[0]
        assert isinstance(slot, TurnSlot)
        return slot.conversation

    # ---- HTTP ----

    def _app(self) -> web.Application:
        app = super()._app()

        async def close(_: web.Request, response: web.StreamResponse) -> None:
            response.force_close()
            response.headers["Connection"] = "close"
            response.headers.pop("Access-Control-Allow-Origin", None)
            response.headers["Server"] = "Strata"

        app.on_response_prepare.append(close)
        return app

    def _routes(self) -> dict[tuple[str, str], Handler]:
        routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/models"): self._models,
            ("GET", "/v1/models"): self._models,
            ("GET", "/props"): self._props,
            ("GET", "/slots"): self._list_slots,
            ("POST", "/slots/{id}"): self._slot_action,
            ("POST", "/unload"): self._unload,
        }
        for path, dialect in DIALECTS.items():
            routes["POST", path] = self._generator(dialect)
        routes["POST", "/v1/messages/count_tokens"] = self._counting(wire.COUNTS["/v1/messages/count_tokens"])
        return routes

    def _noted(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        noted = super()._noted(handler)

        async def old(request: web.Request) -> web.StreamResponse:
            request._version = HttpVersion10
            return await noted(request)

        return old

    def _admit(self, request: web.Request) -> None:
        """A key, or no sign of a foreign web page."""
        if self.knobs.loading:
            raise RefusalError(503, "the engine is starting", "server_error")
        if key := self.knobs.api_key:
            given = request.headers.get("X-Api-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
            if request.path != "/health" and not hmac.compare_digest(given, key):
                raise RefusalError(401, "invalid API key", "authentication_error")
            return
        host = request.headers.get("Host", "").rpartition(":")[0].strip("[]")
        if not _is_local(host) or "Origin" in request.headers:
            self.violations.append(f"{request.path} came from a foreign host or web page")
            raise RefusalError(403, "forbidden")
        if request.method == "POST" and request.content_type != "application/json":
            raise RefusalError(415, "the body must be application/json")

    async def _health(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("health", call), request, call)
        return _json({
            "status": "ok", "max_context": self.context, "model": self.model, "images": False,
            "api_key": bool(self.knobs.api_key), "loaded": self.loaded, "service": "strata",
        })  # fmt: skip

    async def _models(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("models", call), request, call)
        entry = {
            "id": self.model, "object": "model", "owned_by": "strata", "meta": {"n_ctx": self.context},
            "status": {"value": "loaded" if self.loaded else "unloaded"},
            "architecture": {"input_modalities": ["text"]},
        }  # fmt: skip
        return _json({"object": "list", "data": [entry]})

    async def _props(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("props", call), request, call)
        return _json({
            "default_generation_settings": {"n_ctx": self.context, "params": {"n_predict": -1}}, "total_slots": 1,
            "model_alias": self.model, "chat_template": self.template, "chat_template_caps": {},
            "modalities": {"vision": False}, "models_autoload": True, "is_sleeping": False, "model_path": "",
            "build_info": f"Strata {self.build}",
        })  # fmt: skip

    async def _list_slots(self, request: web.Request, call: Call) -> web.Response:
        await self.suffer(self._meet("slots", call), request, call)
        if not self.loaded:
            return _json([])
        (slot,) = self.slots.all
        entry = {"id": 0, "n_ctx": self.context, "is_processing": slot.call is not None}
        return _json([{**entry, "n_prompt_tokens": len(slot.held.ids)}])

    def _counting(self, dialect: Dialect) -> Handler:
        count = self._counter(dialect)

        async def handler(request: web.Request, call: Call) -> web.StreamResponse:
            await self.suffer(self._meet("tokenize", call), request, call)
            return await count(request, call)

        return handler

    async def _unload(self, _: web.Request, __: Call) -> web.Response:
        if self.busy():
            raise RefusalError(409, "the model is busy", "model_busy")
        self.unload()
        return _json({"status": "ok"})

    def unload(self) -> None:
        """What an idle time limit does."""
        self.loaded = False
        self.slots.all[0].clear()

    # ---- session files ----

    async def _slot_action(self, request: web.Request, call: Call) -> web.Response:
        actions: dict[str, Callable[[TurnSlot, Path, Any], JsonDict]] = {"save": self._write, "restore": self._take}
        action = request.query.get("action", "")
        if self.slot_dir is None:
            raise RefusalError(501, "session files need --slot-save-path", "server_error")
        if action not in actions or request.match_info["id"] != "0":
            raise RefusalError(400, "no such slot or action")
        stage = self._meet(action, call)
        name = _file_name(call.body)
        if action == "restore" and not (self.slot_dir / name).exists():
            raise RefusalError(404, "there is no such file")
        if not self.loaded:
            raise RefusalError(503, "the model is not loaded", "server_error")
        slots = self.slots
        slot, _ = await slots.take(0, call)
        assert isinstance(slot, TurnSlot)
        try:
            async with slots.thread:
                started = time.perf_counter()
                await self.suffer(stage, request, call)
                answer = actions[action](slot, self.slot_dir / name, stage)
        except SessionError as error:
            told = {"kind": error.kind, "published": error.published}
            kind = "invalid_request_error" if KINDS[error.kind] < 500 else "server_error"
            refusal = RefusalError(KINDS[error.kind], error.reason, kind)
            refusal.body["error"] |= told
            raise refusal from None
        finally:
            slots.free(slot)
        return _json({"id_slot": 0, "filename": name, **answer, "timings": {f"{action}_ms": _ms(started)}})

    def _write(self, slot: TurnSlot, path: Path, knob: Save) -> JsonDict:
        if not slot.conversation.complete or not self.checkpoints:
            raise SessionError("invalid", "there is no complete session")
        if knob.no_space:
            raise SessionError("storage", "4096 MiB must stay free")
        if self.error_kind and not self.published:
            raise SessionError(self.error_kind, "on purpose")
        raw = self.fit.pack(slot.conversation)
        if knob.wrong_magic:
            raw = b"oops" + raw[4:]
        write(path, raw[: len(raw) - knob.truncate_bytes])
        if self.error_kind:
            raise SessionError(self.error_kind, "the folder was not flushed", published=True)
        return {"n_saved": len(slot.held.ids) - knob.wrong_count, "n_written": len(raw)}

    def _take(self, slot: TurnSlot, path: Path, knob: Restore) -> JsonDict:
        if not self.checkpoints:
            raise SessionError("invalid", "session files need a prompt cache")
        if self.error_kind:
            raise SessionError(self.error_kind, "on purpose")
        raw = read(path)
        found = self.fit.unpack(raw, self.context)
        if knob.forgets and len(found.ids) >= knob.forgets_from:
            found.complete, found.checkpoints = False, []
        slot.hold(found)
        return {"n_restored": len(found.ids) - knob.short_count, "n_read": len(raw)}

    # ---- generation ----

    def _generator(self, dialect: Dialect) -> Handler:
        async def handler(request: web.Request, call: Call) -> web.StreamResponse:
            made = self._parse(call, dialect)
            body = made.body
            # Nothing else tells the one from the other: a prefill is a request for one token that does not stream.
            is_prefill = dialect.limit(body) == 1 and not body.get("stream")
            stage = self._meet("prefill" if is_prefill else "decode", call)
            if not is_prefill and {"id_slot", "cache_prompt"} & body.keys():
                self.violations.append(f"{call.path} got a body that is not the client's own")
            if not self.loaded:
                await asyncio.sleep(self.load_s)
                self.loaded = True
            slots = self.slots
            slot, _ = await slots.take(0, call)
            lag = 0.0
            try:
                return await _Turn(self, request, call, dialect, made, slot, stage).run()
            except (asyncio.CancelledError, ConnectionError):
                lag = max(slot.lag_s, self.knobs.notice_s)
                raise
            finally:
                slots.free_after(slot, lag)

        return handler


class _Turn(_Job):
    """One request, as this server answers it: the stream is open before the prompt is read, and says that it lives."""

    def __init__(
        self, engine: FakeStrata, request: web.Request, call: Call, dialect: Dialect, made: Generation, slot: Slot,
        stage: Run,
    ) -> None:  # fmt: skip
        super().__init__(engine, request, call, _Opened(dialect), made, slot, stage)
        self._strata, self._opened = engine, dialect
        self._reply = _Reply10(request, bool(made.body.get("stream")), stage.odd_chunks)

    async def run(self) -> web.StreamResponse:
        made, reply = self._made, self._reply
        await self._engine.suffer(self._stage, self._request, self._call)
        if self._call.body.get("response_format") and self._limit == 1:
            await self._read()
            raise RefusalError(502, "the answer is not what was asked for", "structured_output_failed")
        await reply.open()
        await reply.say(self._opened.start(made))
        try:
            async with self._saying_that_it_lives():
                await self._read()
            await self._write()
        except RefusalError as error:
            if not reply.streams:
                raise
            error.body["error"]["type"] = "server_error"
            await reply.say(wire.event(error.body) + b"data: [DONE]\n\n")
        else:
            await reply.say(self._dialect.end(made))
        return await reply.end(lambda: self._dialect.whole(made))

    @contextlib.asynccontextmanager
    async def _saying_that_it_lives(self) -> Any:
        async def say() -> None:
            while True:
                await asyncio.sleep(self._strata.comments_s)
                await self._reply.say(b": keep-alive\n\n")

        task = asyncio.create_task(say())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _tell_progress(self) -> None:
        if self._made.body.get("return_progress"):
            await self._reply.say(self._dialect.progress(self._made))
        elif self._made.read:
            await self._reply.say(b": keep-alive\n\n")


class _Messages(wire.Messages):
    """Its figures come at the end: the stream is opened before anything is known."""

    def start(self, made: Generation) -> bytes:
        return super().start(replace(made, prompt=[]))

    def end(self, made: Generation) -> bytes:
        return super().end(made).replace(b'"usage":{', b'"usage":{' + wire.dump(self._read(made))[1:-1].encode() + b",")


class _Chat(wire.Chat):
    """Its figures come whether they were asked for or not."""

    def end(self, made: Generation) -> bytes:
        return super().end(replace(made, body={**made.body, "stream_options": {"include_usage": True}}))


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": _Chat(),
    "/v1/messages": _Messages(),
    "/v1/responses": wire.Responses(),
}


class _Opened:
    """A dialect whose stream has been opened already."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.prompt, self.limit, self.token, self.whole = dialect.prompt, dialect.limit, dialect.token, dialect.whole

    def start(self, made: Generation) -> bytes:
        return b""

    def progress(self, made: Generation) -> bytes:
        return self._dialect.progress(made)

    def end(self, made: Generation) -> bytes:
        return self._dialect.end(made)


class _Reply10(_Reply):
    """A way back whose stream ends with the connection."""

    async def open(self) -> None:
        if self._response is not None:
            self._response.content_type = "text/event-stream"
            await self._response.prepare(self._request)


def _is_local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _file_name(body: Any) -> str:
    name = str(body.get("filename", "")) if isinstance(body, dict) else ""
    plain = name.isprintable() and 0 < len(name.encode()) <= 200
    if not plain or UNSAFE_IN_NAMES & set(name) or name.startswith(".") or name.endswith((".", " ")):
        raise RefusalError(400, "the file name must be a plain one")
    return name


def serve(given: argparse.Namespace) -> None:
    """Serve until a signal comes."""

    async def run() -> None:
        engine = FakeStrata(
            context=given.max_context, batch=given.chunk, slot_dir=given.slot_save_path, weights=given.weights,
            kv=given.kv, prompt_cache=given.prompt_cache, build=given.version_name,
            knobs=Knobs(api_key=given.api_key), exits=True,
        )  # fmt: skip
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await engine.start(given.http)
        print(f"listening on {engine.url}", flush=True)
        await ended.wait()
        await engine.stop()

    asyncio.run(run())
