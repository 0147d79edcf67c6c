"""The adapter for Strata's own HTTP server, unmodified. The only module that knows its paths and fields.

The server takes no token ids and makes none, so a prefill is the client's own body with one token of answer. A session
that was read so ends behind the prompt, where nothing can take it up again; what a decode engine takes up is the state
that was kept at the beginning of the last turn. The server writes HTTP/1.0: a stream that has no end mark was cut off.
"""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson

from splitproxy.api.sse import MEDIA_TYPE, EventReader, is_comment
from splitproxy.books.sessions import SessionStore
from splitproxy.engines.adapter import Answer, Call, Deadlines, Encode, Progress, Sample, SlotState, Take, to_the_end
from splitproxy.engines.http import HEALTH_TIMEOUT_S, HttpEngine, figures, redeemed, timing, translated, well_formed
from splitproxy.engines.strata_file import read_head
from splitproxy.engines.strata_lines import BESIDE_PROMPT_TOKENS, LONGEST_COUNTED, SLOWEST_TOKENS_PER_S
from splitproxy.engines.strata_prompt import PlainTemplate, Template, estimate, request_of, template
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Api, Ask, EngineState, Figures, Identity, InVain, Prompt, Redeemed, Ticket, Tokens

log = logging.getLogger(__name__)

COUNT_TIMEOUT_S = 60.0
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
# What a template puts behind the last turn's beginning, at most: the answer's header, and perhaps an empty thought.
LAST_TURN_TOKENS = 64
BYTES_PER_TOKEN = 4.0  # until the server has counted
SAMPLE_WORDS = "The quick brown fox jumps over the lazy dog, and 27 others read about it in the evening paper. " * 20
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
STREAM_FIELDS = ("stream", "stream_options", "return_progress")
NOT_FORWARDED = frozenset({"origin", "referer", "cookie"})  # without a key the server refuses foreign web pages
# The line that begins the last event of a stream that ended by itself. Line ends inside an answer are escaped.
_END = re.compile(
    rb"(?:^|\n)(?:data: ?\[DONE\]|event: ?(?:message_stop|error|response\.(?:completed|failed|incomplete))"
    rb'|data: ?\{"type": ?"(?:message_stop|error|response\.(?:completed|failed|incomplete))")'
)
_LONGEST_END_BYTES = 64


class StrataServer(HttpEngine):
    """One Strata server at `url`. Must be closed.

    `encode` makes token ids where a tokenizer file is configured: a prefill engine that is told ids needs them.
    """

    spare_bytes = 0  # the server was told how much must stay free, and says so when it refuses

    def __init__(self, name: str, url: str, api_key: str, store: SessionStore, encode: Encode | None = None) -> None:
        super().__init__(name, url, api_key, store)
        self._encode = encode
        self._template: Template = PlainTemplate()
        self._bytes_per_token = BYTES_PER_TOKEN

    # -- what it is ----------------------------------------------------------------------------------------------------

    async def health(self) -> EngineState:
        try:
            told = await self.json(Step.CONTROL, "GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except EngineError as error:
            return EngineState.LOADING if error.status == 503 else EngineState.DOWN
        return EngineState.READY if told.get("loaded", True) else EngineState.UNLOADED

    async def identify(self) -> Identity:
        health = await self.json(Step.CONTROL, "GET", "/health")
        props = await self.json(Step.CONTROL, "GET", "/props")
        with well_formed(Step.CONTROL, "/health or /props"):
            context = int(health["max_context"])
            slots = int(props.get("total_slots", 1))
            source = str(props.get("chat_template") or "")
        await self._slots()
        self._template = _template(source, self.name)
        self._bytes_per_token = await self._measure()
        return Identity(
            build=str(props.get("build_info", "")).removeprefix("Strata ").strip(),
            model=None,  # a name that was chosen for clients; session files hold a fingerprint of the model itself
            vocabulary=None,
            template=hashlib.sha256(source.encode()).hexdigest()[:16] if source else "",
            special_tokens=None,
            context=context - BESIDE_PROMPT_TOKENS,
            slots=max(slots, 1),
            session=f"context {context}",
        )

    async def _measure(self) -> float:
        """How many bytes of text the model's tokens have."""
        short, long = await self._count(""), await self._count(SAMPLE_WORDS)
        return len(SAMPLE_WORDS) / (long - short) if long > short else BYTES_PER_TOKEN

    async def _count(self, text: str) -> int:
        """The tokens of a prompt whose only message is `text`."""
        body = orjson.dumps({"messages": [{"role": "user", "content": text}]})
        answer = await self.json(Step.TOKENIZE, "POST", COUNT, body, timeout_s=COUNT_TIMEOUT_S, private=True)
        with well_formed(Step.TOKENIZE, COUNT):
            return int(answer["input_tokens"])

    async def slots(self) -> dict[int, SlotState]:
        entries = await self._slots()
        with well_formed(Step.CONTROL, "/slots"):
            seen = {
                int(entry["id"]): SlotState(bool(entry.get("is_processing")), int(entry.get("n_prompt_tokens") or 0))
                for entry in entries
            }
        return seen or {0: SlotState(False, 0)}  # a model that is not loaded has none

    async def _slots(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = await self.json(Step.CONTROL, "GET", "/slots", shape=list)
        return entries

    async def newest_task(self) -> int | None:
        return 0  # there is one slot

    # -- text to tokens ------------------------------------------------------------------------------------------------

    async def render(self, body: bytes) -> str:
        try:
            return self._template.render(request_of(body))
        except ValueError as error:
            raise EngineError(Step.TOKENIZE, Cause.REFUSED, f"the prompt cannot be rendered: {_kind(error)}") from None

    async def tokenize(self, text: str) -> Tokens:
        return estimate(text, self._bytes_per_token)

    async def disagreement(self, text: str, encode: Encode) -> str:
        """Nobody tells ids; but template and ids together must come to the number of tokens that the server counts."""
        # Templates may cut white space off a message's ends.
        framed = f"<{text}>"
        ours = await encode(await self.render(_chat(framed)))
        theirs = await self._count(framed)
        return "" if len(ours) == theirs else f"in {text[:60]!a} the engine counts {theirs} and this file {len(ours)}"

    async def trial(self, text: str, length_tokens: int) -> Prompt:
        """A chat whose only message is the beginning of `text`."""
        frame = len(await self.render(_chat("")))
        room = round(length_tokens * self._bytes_per_token) - frame
        body = _chat(text.encode()[: max(room, 1)].decode(errors="ignore"))
        return Prompt(await self._tokens(body), Ask(Api.CHAT, CHAT, body, chat=body))

    async def _tokens(self, body: bytes) -> Tokens:
        rendered = await self.render(body)
        return await self._encode(rendered) if self._encode is not None else await self.tokenize(rendered)

    async def reads_alike(self, text: str, prompt: Prompt) -> bool:
        """Ids are nobody's here: what differs is the template, or how many bytes this server's tokens have."""
        return await self._tokens(prompt.ask.body) == prompt.tokens

    # -- a session on its way ------------------------------------------------------------------------------------------

    async def prefill(self, prompt: Prompt, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        started = asyncio.get_running_loop().time()
        progress(Step.PREFILL, 0, len(prompt))
        read = await self._read(prompt, deadlines)
        read_ms = 1000 * (asyncio.get_running_loop().time() - started)
        progress(Step.SAVE, len(prompt), len(prompt))
        name = self._store.new_name()
        try:
            saved = await to_the_end(self._save(slot, name, deadlines))
            tokens, session_bytes = await self._check(name, saved, read)
        except BaseException:
            await to_the_end(self._store.remove(name))
            raise
        return Ticket(
            name,
            tokens,
            session_bytes,
            min(read.cached_tokens, tokens) if read is not None else 0,
            read.prompt_ms if read is not None and read.prompt_ms else read_ms,
            timing(saved, "save_ms"),
            proof_tokens=max(tokens - LAST_TURN_TOKENS, tokens // 2 + 1),
        )

    async def _read(self, prompt: Prompt, deadlines: Deadlines) -> Figures | None:
        """Have the client's own body read, with one token of answer; None where no figures came with it."""
        body = one_token(prompt.ask.body, prompt.ask.api)
        # Nothing is told while it reads; this is as long as the server itself would wait for its engine.
        timeout_s = deadlines.prefill_silence_s + min(len(prompt), LONGEST_COUNTED) / SLOWEST_TOKENS_PER_S
        with translated(Step.PREFILL):
            async with self.abortable(), self.request("POST", prompt.ask.path, body, timeout_s=timeout_s) as response:
                text = await response.read()
                if response.status == 200:
                    return _answer_figures(text)
                if response.status == 502 and b"structured_output_failed" in text:
                    return None  # one token is no JSON; the prompt was read all the same
        raise EngineError(Step.PREFILL, Cause.REFUSED, f"the engine answered {response.status}", status=response.status)

    async def _save(self, slot: int, name: str, deadlines: Deadlines) -> dict[str, Any]:
        return await self.slot_action(Step.SAVE, slot, "save", name, deadlines)

    async def _check(self, name: str, saved: Mapping[str, Any], read: Figures | None) -> tuple[int, int]:
        """Compare a saved file with what was to be saved; its tokens and its size in bytes."""
        tokens = saved.get("n_saved")
        wanted = tokens if read is None else read.cached_tokens + read.read_tokens
        if type(tokens) is not int or tokens < 1 or tokens != wanted:
            raise EngineError(Step.SAVE, Cause.CORRUPT, f"{tokens} tokens were saved instead of {wanted}")
        head = await self.saved_file(name, saved, read_head)
        return tokens, head.size_bytes

    async def redeem(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> Redeemed:
        answer = await to_the_end(self._restore(ticket, slot, deadlines))
        return redeemed(answer)

    async def _restore(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> dict[str, Any]:
        try:
            return await self.slot_action(Step.RESTORE, slot, "restore", ticket.handle, deadlines)
        except EngineError as error:
            if error.status != 503 or await self.health() is not EngineState.UNLOADED:
                raise
        await self.erase(slot, deadlines)  # a request loads the model; a slot action does not
        return await self.slot_action(Step.RESTORE, slot, "restore", ticket.handle, deadlines)

    async def erase(self, slot: int, deadlines: Deadlines) -> None:
        """Have the slot hold a few words: the server cannot empty it, but it keeps one conversation alone."""
        await self._say(_chat("Hello."), 1, deadlines)

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def samples_compare(self) -> bool:
        return False  # no log-probabilities; but a session file of another model is refused

    async def sample(self, prompt: Prompt, slot: int, count: int, deadlines: Deadlines) -> Sample:
        return await self._say(prompt.ask.body, max(count, 1), deadlines)

    async def _say(self, body: bytes, count: int, deadlines: Deadlines) -> Sample:
        asked = orjson.dumps({**request_of(body), "max_tokens": count, "temperature": 0, "stream": False})
        answer = await self.json(Step.DECODE, "POST", CHAT, asked, timeout_s=deadlines.decode_silence_s, private=True)
        with well_formed(Step.DECODE, CHAT):
            message = answer["choices"][0]["message"]
            text = str(message.get("reasoning_content") or "") + str(message.get("content") or "")
            return Sample(text, {}, figures(answer.get("timings") or {}))

    def pinned(self, ask: Ask, slot: int | None) -> bytes:
        return ask.body

    def is_preamble(self, chunk: bytes) -> bool:
        return is_comment(chunk) or _says_nothing(chunk)

    @asynccontextmanager
    async def call(self, call: Call, deadlines: Deadlines) -> AsyncGenerator[Answer]:
        headers = [(name, value) for name, value in call.headers if name.lower() not in NOT_FORWARDED]
        asked = Call(call.method, call.target, headers, call.body, call.streams)
        async with super().call(asked, deadlines) as answer:
            yield _Ended(answer) if answer.media_type == MEDIA_TYPE else answer

    # -- what to change ------------------------------------------------------------------------------------------------

    def advice(self, error: EngineError) -> list[str]:
        if (general := super().advice(error)) is not None:
            return general
        if error.status == 501:
            return [
                "Start the server with --slot-save-path set to the folder of split.dir, with one card and no parallel."
            ]
        return ADVICE.get(error.step, ["See the server's log."])

    def remedy(self, cause: InVain | None) -> str:
        return REMEDIES.get(cause, REMEDIES[None])


ADVICE = {
    Step.SAVE: [
        "Beside a session file 4096 MiB must stay free in split.dir, or as many as --session-min-free-mib says.",
        "A session file needs a prompt cache (--prompt-cache of 1 or more), one card, and no --batch.",
    ],
    Step.CHECK: ["split.dir and both servers' --slot-save-path must be the same folder, readable for this process."],
    Step.RESTORE: [
        "Both engines need the same model files, engine version, KV type, context size and rope settings.",
        "Both servers' --slot-save-path must be the folder of split.dir.",
        "The decode engine's log names the reason.",
    ],
}

REMEDIES: dict[InVain | None, str] = {
    None: (
        "The restore reported success, yet the prompt was read again. Strata takes a session up at the beginning of "
        "its last turn: --prompt-cache must be 1 or more, and --turn-token must be the one that begins a turn. Other "
        "traffic on the decode engine, past the proxy, overwrites what was restored."
    ),
    InVain.TEMPLATE_DRIFT: (
        "The decode engine reads another text than the prefill engine did: does its chat template use the time, and "
        "have both servers the same template and the same effort_position?"
    ),
    InVain.OTHER_TRAFFIC: (
        "Something else than this proxy uses the decode engine and overwrites what was restored: it holds one "
        "conversation at a time."
    ),
}


class _Ended:
    """An event stream of HTTP/1.0: it ends where the connection does; its own end mark alone tells that it is whole."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.status: int = answer.status
        self.headers: Sequence[tuple[str, str]] = answer.headers
        self.media_type: str = answer.media_type
        self._tail = b"\n"
        self._ended = False

    async def pour(self, take: Take) -> bool:
        def seen(chunk: bytes) -> bool:
            data = self._tail + chunk
            self._ended = self._ended or _END.search(data) is not None
            self._tail = data[-_LONGEST_END_BYTES:]
            return take(chunk)

        if await self._answer.pour(seen):
            return True
        if not self._ended:
            raise EngineError(Step.DECODE, Cause.DIED, "the engine ended the stream before the answer was complete")
        return False


def one_token(body: bytes, api: Api) -> bytes:
    """A client's body, asked to be read and answered with one token at once."""
    fields = {name: value for name, value in request_of(body).items() if name not in (*LIMITS, *STREAM_FIELDS)}
    limit = "max_output_tokens" if api is Api.RESPONSES else "max_tokens"
    return orjson.dumps({**fields, limit: 1, "stream": False})


def _chat(text: str) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": text}]})


def _template(source: str, name: str) -> Template:
    """The server's own template where it can be used here."""
    if not source:
        return PlainTemplate()
    try:
        return template(source)
    except ImportError:
        log.warning("prompts of %s are only guessed at: pip install 'splitproxy[strata]' brings Jinja", name)
    except ValueError as error:
        log.warning("prompts of %s are only guessed at: %s", name, error)
    return PlainTemplate()


def _kind(error: ValueError) -> str:
    # A decoder's words quote the body.
    return "it is no JSON object" if isinstance(error, orjson.JSONDecodeError) else str(error)


def _answer_figures(text: bytes) -> Figures | None:
    """The figures of an answer to any API; None where it has none."""
    try:
        answer = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise EngineError(Step.PREFILL, Cause.CORRUPT, "the answer is no JSON") from None
    with well_formed(Step.PREFILL, "a prefill"):
        if timings := answer.get("timings"):
            return figures(timings)
        usage = answer.get("usage") or {}
        if "cache_read_input_tokens" in usage:
            return Figures(int(usage["cache_read_input_tokens"]), int(usage["input_tokens"]), 0.0, 1, 0.0)
        for total, details in (("prompt_tokens", "prompt_tokens_details"), ("input_tokens", "input_tokens_details")):
            if total in usage:
                cached = int((usage.get(details) or {}).get("cached_tokens", 0))
                return Figures(cached, int(usage[total]) - cached, 0.0, 1, 0.0)
    return None


_SILENT_TYPES = frozenset({
    "ping", "message_start", "content_block_start", "response.created", "response.in_progress",
    "response.output_item.added", "response.content_part.added",
})  # fmt: skip


def _says_nothing(chunk: bytes) -> bool:
    """Whether all events of a piece are of those that the server sends before its engine has begun to write."""
    for data in EventReader().feed(chunk + b"\n\n"):
        try:
            event = orjson.loads(data)
            if event.get("type") in _SILENT_TYPES:
                continue
            (choice,) = event["choices"]
            delta = choice["delta"]
            if choice.get("finish_reason") or any(value for key, value in delta.items() if key != "role"):
                return False
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
            return False
    return True
