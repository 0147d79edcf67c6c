"""The adapter for llama.cpp's own HTTP server, unmodified. The only module that knows its paths and fields.

The rules that keep a llama-server healthy are kept here: every generating request is pinned, prefills stream with
progress (so that closing the connection stops them), saved files are checked before anybody restores them (a truncated
one ends the process), and every connection is fresh (the server closes idle and just-streamed ones unannounced).
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import orjson
from yarl import URL

from splitproxy.adapter import Answer, Call, Deadlines, Progress, Sample, SlotState, to_the_end
from splitproxy.engines.slotfile import read_head
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import EngineState, Figures, Identity, Redeemed, Ticket, Tokens
from splitproxy.sessions import SessionStore
from splitproxy.sse import EventReader

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
TOKENIZE_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
# Text whose ids differ between vocabularies: scripts, digits, white space, an emoji with joiners.
_VOCABULARY_PROBE = (
    "The 1234567 quick\tfoxes'll  jump\n\n\u00e9\u00df \u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442 "
    "\U0001f469\u200d\U0001f4bb {x: [1, 2]}"
)


class LlamaServer:
    """One llama-server at `url`. Must be closed."""

    def __init__(self, name: str, url: str, api_key: str, store: SessionStore) -> None:
        self.name = name
        self._url = url
        self._store = store
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._calls: set[asyncio.Timeout] = set()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.close()

    def abort(self) -> None:
        """End all work that is under way: the engine is given up."""
        now = asyncio.get_running_loop().time()
        for timeout in self._calls:
            if not timeout.expired():
                timeout.reschedule(now)

    # -- what it is ----------------------------------------------------------------------------------------------------

    async def health(self) -> EngineState:
        try:
            with _translated(Step.CONTROL):
                async with self._request("GET", "/health", timeout_s=CONTROL_TIMEOUT_S) as response:
                    return {200: EngineState.READY, 503: EngineState.LOADING}.get(response.status, EngineState.DOWN)
        except EngineError:
            return EngineState.DOWN

    async def identify(self) -> Identity:
        props = await self._json(Step.CONTROL, "GET", "/props")
        models = await self._json(Step.CONTROL, "GET", "/v1/models")
        await self._slots()
        probe = await self.tokenize(_VOCABULARY_PROBE)
        try:
            meta = models["data"][0].get("meta") or {}
            context = int(props["default_generation_settings"]["n_ctx"])
            slots = int(props["total_slots"])
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            message = f"/props or /v1/models lacks a field that a llama-server has: {error}"
            raise EngineError(Step.CONTROL, Cause.REFUSED, message) from None
        shape = ("n_params", "size", "n_embd", "n_ctx_train", "ftype")
        return Identity(
            build=str(props.get("build_info", "")),
            model=" ".join(f"{name}={meta.get(name)}" for name in shape),
            vocabulary=f"type={meta.get('vocab_type')} n={meta.get('n_vocab')} probe={_digest(probe.to_bytes())}",
            template=_digest(str(props.get("chat_template", "")).encode()),
            special_tokens=f"bos={props.get('bos_token')!r} eos={props.get('eos_token')!r}",
            context=context,
            slots=slots,
        )

    # -- text to tokens ------------------------------------------------------------------------------------------------

    async def render(self, body: bytes) -> str:
        answer = await self._json(
            Step.TOKENIZE, "POST", "/apply-template", body, timeout_s=TOKENIZE_TIMEOUT_S, private=True
        )
        if not isinstance(prompt := answer.get("prompt"), str):
            raise EngineError(Step.TOKENIZE, Cause.REFUSED, "/apply-template gave no prompt")
        return prompt

    async def tokenize(self, text: str) -> Tokens:
        body = {"content": text, "add_special": True, "parse_special": True}
        answer = await self._json(
            Step.TOKENIZE, "POST", "/tokenize", orjson.dumps(body), timeout_s=TOKENIZE_TIMEOUT_S, private=True
        )
        try:
            return Tokens(answer["tokens"])
        except (KeyError, TypeError, OverflowError):
            raise EngineError(Step.TOKENIZE, Cause.REFUSED, "/tokenize gave no list of ids") from None

    # -- a session on its way ------------------------------------------------------------------------------------------

    async def prefill(self, prompt: Tokens, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        figures = await self._read(prompt, slot, deadlines, progress)
        progress(Step.SAVE, len(prompt), len(prompt))
        name = self._store.new_name()
        try:
            saved = await to_the_end(self._slot_action(Step.SAVE, slot, "save", name, deadlines))
            session_bytes = await self._check(name, saved, prompt)
        except BaseException:
            await to_the_end(self._store.remove(name))
            raise
        return Ticket(
            name, len(prompt), session_bytes, figures.cached_tokens, figures.prompt_ms, _timing(saved, "save_ms")
        )

    async def _read(self, prompt: Tokens, slot: int, deadlines: Deadlines, progress: Progress) -> Figures:
        """Have the prompt read, generating nothing, and follow how it goes."""
        body = {
            "prompt": prompt.to_list(),
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": True,
            "stream": True,
            "return_progress": True,
        }
        events = EventReader()
        reading = self._request("POST", "/completion", orjson.dumps(body), silence_s=deadlines.prefill_silence_s)
        with _translated(Step.PREFILL):
            async with self._abortable(), reading as response:
                await _require_ok(Step.PREFILL, response)
                async for chunk in response.content.iter_any():
                    for data in events.feed(chunk):
                        with _well_formed(Step.PREFILL, "/completion"):
                            figures = _prefill_event(data, prompt, progress)
                        if figures is not None:
                            return figures
        raise EngineError(Step.PREFILL, Cause.DIED, "the engine ended the stream before the prompt was read")

    async def _check(self, name: str, saved: dict[str, Any], prompt: Tokens) -> int:
        """Compare a saved file with what was to be saved; its size in bytes."""
        if saved.get("n_saved") != len(prompt):
            message = f"{saved.get('n_saved')} tokens were saved instead of {len(prompt)}"
            raise EngineError(Step.SAVE, Cause.CORRUPT, message)
        try:
            head = await self._store.read(name, read_head)
        except FileNotFoundError:
            message = (
                f"the saved file is not in {self._store.folder}: split.dir and the engine's --slot-save-path must be "
                "the same folder"
            )
            raise EngineError(Step.CHECK, Cause.CORRUPT, message) from None
        except (OSError, ValueError) as error:
            raise EngineError(Step.CHECK, Cause.CORRUPT, f"the session file is unusable: {error}") from None
        if head.size_bytes != saved.get("n_written"):
            message = f"the session file has {head.size_bytes} bytes, but {saved.get('n_written')} were written"
            raise EngineError(Step.CHECK, Cause.CORRUPT, message)
        if head.has_media or head.tokens != prompt:
            raise EngineError(Step.CHECK, Cause.CORRUPT, "the session file holds another prompt than the one read")
        return head.size_bytes

    async def redeem(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> Redeemed:
        answer = await to_the_end(self._slot_action(Step.RESTORE, slot, "restore", ticket.handle, deadlines))
        restored = answer.get("n_restored")
        return Redeemed(restored if type(restored) is int else 0, _timing(answer, "restore_ms"))

    async def discard(self, ticket: Ticket) -> None:
        await self._store.remove(ticket.handle)

    async def erase(self, slot: int, deadlines: Deadlines) -> None:
        await to_the_end(self._slot_action(Step.CONTROL, slot, "erase", None, deadlines))

    async def slots(self) -> dict[int, SlotState]:
        entries = await self._slots()
        with _well_formed(Step.CONTROL, "/slots"):
            # A slot that has not run a request yet does not tell how many tokens it holds.
            return {
                entry.get("id", place): SlotState(
                    bool(entry.get("is_processing")), int(entry.get("n_prompt_tokens", 0))
                )
                for place, entry in enumerate(entries)
            }

    async def newest_task(self) -> int | None:
        entries = await self._slots()
        with _well_formed(Step.CONTROL, "/slots"):
            numbered = [(entry["id_task"], entry["id"]) for entry in entries if type(entry.get("id_task")) is int]
            return max(numbered)[1] if numbered else None

    async def _slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = await self._json(Step.CONTROL, "GET", "/slots", shape=list)
        return slots

    async def _slot_action(
        self, step: Step, slot: int, action: str, name: str | None, deadlines: Deadlines
    ) -> dict[str, Any]:
        body = orjson.dumps({"filename": name} if name is not None else {})
        target = f"/slots/{slot}?action={action}"
        with _translated(step):
            async with self._abortable():
                timeout_s = deadlines.transfer_timeout_s
                answer: dict[str, Any] = await self._json(step, "POST", target, body, timeout_s=timeout_s)
        return answer

    # -- answers -------------------------------------------------------------------------------------------------------

    async def sample(self, prompt: Tokens, slot: int, count: int, deadlines: Deadlines) -> Sample:
        body = {
            "prompt": prompt.to_list(),
            "n_predict": count,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0,
            "n_probs": 10 if count else 0,
        }
        answer = await self._json(
            Step.DECODE, "POST", "/completion", orjson.dumps(body), timeout_s=deadlines.decode_silence_s, private=True
        )
        with _well_formed(Step.DECODE, "/completion"):
            tops = (answer.get("completion_probabilities") or [{}])[0].get("top_logprobs") or []
            logprobs = {top["id"]: float(top["logprob"]) for top in tops if top.get("logprob") is not None}
            return Sample(str(answer.get("content", "")), logprobs, _figures(answer.get("timings") or {}))

    @asynccontextmanager
    async def call(self, call: Call, deadlines: Deadlines) -> AsyncGenerator[Answer]:
        silence_s = deadlines.decode_silence_s if call.streams else None
        with _translated(Step.DECODE):
            async with self._abortable() as timeout:
                silence = _Silence(timeout, silence_s)
                try:
                    async with self._request(call.method, call.target, call.body, headers=call.headers) as response:
                        yield _HttpAnswer(response, silence)
                finally:
                    silence.end()

    @asynccontextmanager
    async def _abortable(self) -> AsyncGenerator[asyncio.Timeout]:
        """A stretch of work that `abort` can end."""
        async with asyncio.timeout(None) as timeout:
            self._calls.add(timeout)
            try:
                yield timeout
            finally:
                self._calls.discard(timeout)

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        target: str,
        body: bytes | AsyncIterator[bytes] | None = None,
        *,
        headers: Sequence[tuple[str, str]] | None = None,
        timeout_s: float | None = None,
        silence_s: float | None = None,
    ) -> Any:
        json_type = [("Content-Type", "application/json")] if body is not None else []
        return self._http.request(
            method,
            URL(self._url + target, encoded=True),
            data=body,
            headers=[*(json_type if headers is None else headers), *self._key.items()],
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s),
        )

    async def _json(
        self,
        step: Step,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        timeout_s: float = CONTROL_TIMEOUT_S,
        private: bool = False,
        shape: type[dict[Any, Any] | list[Any]] = dict,
    ) -> Any:
        """One control call. `private` keeps the engine's error text out of ours: it may quote the request."""
        with _translated(step):
            async with self._request(method, target, body, timeout_s=timeout_s) as response:
                await _require_ok(step, response, private=private)
                text = await response.read()
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, shape):
            wanted = "object" if shape is dict else "list"
            raise EngineError(step, Cause.REFUSED, f"{target.partition('?')[0]} gave no JSON {wanted}")
        return found


class _Silence:
    """Ends a call whose engine falls silent. Its timer is moved when it rings, not with each piece of the answer."""

    def __init__(self, timeout: asyncio.Timeout, limit_s: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._limit_s = limit_s or 0.0
        self._since: float | None = self._loop.time()  # None: it is the client that is waited for
        self._timer = self._loop.call_later(self._limit_s, self._ring) if limit_s else None

    def begin(self) -> None:
        """The engine is waited for."""
        self._since = self._loop.time()

    def pause(self) -> None:
        """The engine has said something, and now the client is waited for."""
        self._since = None

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._limit_s
        if due > now:
            self._timer = self._loop.call_at(due, self._ring)
        elif not self._timeout.expired():
            self._timeout.reschedule(now)


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse, silence: _Silence) -> None:
        self._response = response
        self._silence = silence
        self.status = response.status
        self.headers: Sequence[tuple[str, str]] = tuple(response.headers.items())
        self.media_type = response.content_type

    async def chunks(self) -> AsyncIterator[bytes]:
        silence, read = self._silence, self._response.content.readany
        with _translated(Step.DECODE):
            silence.begin()
            while chunk := await read():
                silence.pause()
                yield chunk
                silence.begin()


@contextmanager
def _translated(step: Step) -> Iterator[None]:
    """Turn the HTTP client's errors into ours."""
    try:
        yield
    except TimeoutError:
        raise EngineError(step, Cause.TIMEOUT, "the engine did not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise EngineError(step, Cause.DIED, f"the connection to the engine failed: {reason}") from None


@contextmanager
def _well_formed(step: Step, source: str) -> Iterator[None]:
    """Turn what fails on JSON of another shape than expected into an engine's error."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise EngineError(step, Cause.CORRUPT, f"{source} answered in an unknown shape") from None


async def _require_ok(step: Step, response: aiohttp.ClientResponse, *, private: bool = False) -> None:
    if response.status == 200:
        return
    message = f"the engine answered {response.status}"
    if not private:
        message += f": {_error_message(await response.read())}"
    raise EngineError(step, Cause.REFUSED, message, status=response.status)


def _error_message(text: bytes) -> str:
    try:
        return str(orjson.loads(text)["error"]["message"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "without a reason"


def _prefill_event(data: bytes, prompt: Tokens, progress: Progress) -> Figures | None:
    """Take one event of a prefill; the engine's figures when it was the last."""
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise EngineError(Step.PREFILL, Cause.CORRUPT, "the engine's progress is no JSON object")
    if error := event.get("error"):
        raise EngineError(Step.PREFILL, Cause.REFUSED, f"the engine stopped: {error.get('type', 'error')}")
    if told := event.get("prompt_progress"):
        progress(Step.PREFILL, int(told.get("processed", 0)), int(told.get("total", len(prompt))))
    if not event.get("stop"):
        return None
    figures = _figures(event.get("timings") or {})
    if figures.cached_tokens + figures.read_tokens != len(prompt) or event.get("truncated"):
        message = f"{figures.cached_tokens + figures.read_tokens} tokens were read instead of {len(prompt)}"
        raise EngineError(Step.PREFILL, Cause.CORRUPT, message)
    return figures


def _figures(timings: dict[str, Any]) -> Figures:
    return Figures(
        cached_tokens=int(timings.get("cache_n", 0)),
        read_tokens=int(timings.get("prompt_n", 0)),
        prompt_ms=float(timings.get("prompt_ms", 0.0)),
        answer_tokens=int(timings.get("predicted_n", 0)),
        answer_ms=float(timings.get("predicted_ms", 0.0)),
    )


def _timing(answer: dict[str, Any], name: str) -> float:
    with _well_formed(Step.CONTROL, "a slot action"):
        return float((answer.get("timings") or {}).get(name, 0.0))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16] if data else ""
