"""The adapter for llama.cpp's own HTTP server, unmodified. The only module that knows its paths and fields.

The rules that keep a llama-server healthy are kept here: every generating request is pinned, prefills stream with
progress (so that closing the connection stops them), and saved files are checked before anybody restores them (a
truncated one ends the process).
"""

import hashlib
import logging
from typing import Any

import orjson

from splitproxy.api.sse import EventReader, is_comment
from splitproxy.api.wire import pin
from splitproxy.books.sessions import SessionStore
from splitproxy.engines.adapter import Deadlines, Encode, Progress, Sample, SlotState, to_the_end
from splitproxy.engines.http import (
    HEALTH_TIMEOUT_S,
    HttpEngine,
    figures,
    redeemed,
    require_ok,
    timing,
    translated,
    well_formed,
)
from splitproxy.engines.slotfile import read_head
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Api, Ask, EngineState, Figures, Identity, InVain, Prompt, Redeemed, Ticket, Tokens
from splitproxy.tokens.trials import difference

log = logging.getLogger(__name__)

TOKENIZE_TIMEOUT_S = 60.0
# Tokens that may be read again after a restore while the session still counts as used. Sliding-window models go back to
# a checkpoint a few tokens before the end; more means that it was not used.
REREAD_LIMIT = 16
# Text whose ids differ between vocabularies: scripts, digits, white space, an emoji with joiners.
_VOCABULARY_PROBE = (
    "The 1234567 quick\tfoxes'll  jump\n\n\u00e9\u00df \u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442 "
    "\U0001f469\u200d\U0001f4bb {x: [1, 2]}"
)


class LlamaServer(HttpEngine):
    """One llama-server at `url`. Must be closed."""

    spare_bytes = 0

    def __init__(self, name: str, url: str, api_key: str, store: SessionStore) -> None:
        super().__init__(name, url, api_key, store)

    # -- what it is ----------------------------------------------------------------------------------------------------

    async def health(self) -> EngineState:
        try:
            with translated(Step.CONTROL):
                async with self.request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S) as response:
                    return {200: EngineState.READY, 503: EngineState.LOADING}.get(response.status, EngineState.DOWN)
        except EngineError:
            return EngineState.DOWN

    async def identify(self) -> Identity:
        props = await self.json(Step.CONTROL, "GET", "/props")
        models = await self.json(Step.CONTROL, "GET", "/v1/models")
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
        answer = await self.json(
            Step.TOKENIZE, "POST", "/apply-template", body, timeout_s=TOKENIZE_TIMEOUT_S, private=True
        )
        if not isinstance(prompt := answer.get("prompt"), str):
            raise EngineError(Step.TOKENIZE, Cause.REFUSED, "/apply-template gave no prompt")
        return prompt

    async def tokenize(self, text: str) -> Tokens:
        body = {"content": text, "add_special": True, "parse_special": True}
        answer = await self.json(
            Step.TOKENIZE, "POST", "/tokenize", orjson.dumps(body), timeout_s=TOKENIZE_TIMEOUT_S, private=True
        )
        try:
            return Tokens(answer["tokens"])
        except (KeyError, TypeError, OverflowError):
            raise EngineError(Step.TOKENIZE, Cause.REFUSED, "/tokenize gave no list of ids") from None

    async def disagreement(self, text: str, encode: Encode) -> str:
        theirs, ours = await self.tokenize(text), await encode(text)
        return "" if ours == theirs else difference(text, ours, theirs)

    async def trial(self, text: str, length_tokens: int) -> Prompt:
        tokens = (await self.tokenize(text)).head(length_tokens)
        return Prompt(tokens, Ask(Api.NATIVE, "/completion", b"{}", prompt=tuple(tokens.to_list())))

    async def reads_alike(self, text: str, prompt: Prompt) -> bool:
        return (await self.tokenize(text)).head(len(prompt)) == prompt.tokens

    # -- a session on its way ------------------------------------------------------------------------------------------

    async def prefill(self, prompt: Prompt, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        # All but the last token: a recurrent model's state exists at its last position alone, and the decode engine has
        # to evaluate one token in any case.
        head = _moved(prompt)
        read = await self._read(head, slot, deadlines, progress)
        progress(Step.SAVE, len(head), len(head))
        name = self._store.new_name()
        try:
            saved = await to_the_end(self.slot_action(Step.SAVE, slot, "save", name, deadlines))
            session_bytes = await self._check(name, saved, head)
        except BaseException:
            await to_the_end(self._store.remove(name))
            raise
        return Ticket(
            name,
            len(head),
            session_bytes,
            read.cached_tokens,
            read.prompt_ms,
            timing(saved, "save_ms"),
            proof_tokens=len(head) - REREAD_LIMIT,
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
        reading = self.request("POST", "/completion", orjson.dumps(body), silence_s=deadlines.prefill_silence_s)
        with translated(Step.PREFILL):
            async with self.abortable(), reading as response:
                await require_ok(Step.PREFILL, response)
                async for chunk in response.content.iter_any():
                    for data in events.feed(chunk):
                        with well_formed(Step.PREFILL, "/completion"):
                            read = _prefill_event(data, prompt, progress)
                        if read is not None:
                            return read
        raise EngineError(Step.PREFILL, Cause.DIED, "the engine ended the stream before the prompt was read")

    async def _check(self, name: str, saved: dict[str, Any], prompt: Tokens) -> int:
        """Compare a saved file with what was to be saved; its size in bytes."""
        if saved.get("n_saved") != len(prompt):
            message = f"{saved.get('n_saved')} tokens were saved instead of {len(prompt)}"
            raise EngineError(Step.SAVE, Cause.CORRUPT, message)
        head = await self.saved_file(name, saved, read_head)
        if head.has_media or head.tokens != prompt:
            raise EngineError(Step.CHECK, Cause.CORRUPT, "the session file holds another prompt than the one read")
        return head.size_bytes

    async def redeem(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> Redeemed:
        answer = await to_the_end(self.slot_action(Step.RESTORE, slot, "restore", ticket.handle, deadlines))
        return redeemed(answer)

    async def erase(self, slot: int, deadlines: Deadlines) -> None:
        await to_the_end(self.slot_action(Step.CONTROL, slot, "erase", None, deadlines))

    async def slots(self) -> dict[int, SlotState]:
        entries = await self._slots()
        with well_formed(Step.CONTROL, "/slots"):
            # A slot that has not run a request yet does not tell how many tokens it holds.
            return {
                entry.get("id", place): SlotState(
                    bool(entry.get("is_processing")), int(entry.get("n_prompt_tokens", 0))
                )
                for place, entry in enumerate(entries)
            }

    async def newest_task(self) -> int | None:
        entries = await self._slots()
        with well_formed(Step.CONTROL, "/slots"):
            numbered = [(entry["id_task"], entry["id"]) for entry in entries if type(entry.get("id_task")) is int]
            return max(numbered)[1] if numbered else None

    async def _slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = await self.json(Step.CONTROL, "GET", "/slots", shape=list)
        return slots

    # -- answers -------------------------------------------------------------------------------------------------------

    @property
    def samples_compare(self) -> bool:
        return True

    async def sample(self, prompt: Prompt, slot: int, count: int, deadlines: Deadlines) -> Sample:
        body = {
            "prompt": (prompt.tokens if count else _moved(prompt)).to_list(),
            "n_predict": count,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0,
            "n_probs": 10 if count else 0,
        }
        answer = await self.json(
            Step.DECODE, "POST", "/completion", orjson.dumps(body), timeout_s=deadlines.decode_silence_s, private=True
        )
        with well_formed(Step.DECODE, "/completion"):
            tops = (answer.get("completion_probabilities") or [{}])[0].get("top_logprobs") or []
            logprobs = {top["id"]: float(top["logprob"]) for top in tops if top.get("logprob") is not None}
            return Sample(str(answer.get("content", "")), logprobs, figures(answer.get("timings") or {}))

    def pinned(self, ask: Ask, slot: int | None) -> bytes:
        return pin(ask, slot)

    def is_preamble(self, chunk: bytes) -> bool:
        return is_comment(chunk)

    # -- what to change ------------------------------------------------------------------------------------------------

    def advice(self, error: EngineError) -> list[str]:
        if (general := super().advice(error)) is not None:
            return general
        if error.status == 501:
            return ["Start the engine with --slot-save-path set to the folder of split.dir, and without --no-slots."]
        return ADVICE.get(error.step, ["See the engine's log."])

    def remedy(self, cause: InVain | None) -> str:
        return REMEDIES[cause]


ADVICE = {
    Step.SAVE: ["Is the folder of --slot-save-path writable for the engine, and is there space left?"],
    Step.CHECK: ["split.dir and both engines' --slot-save-path must be the same folder, readable for this process."],
    Step.RESTORE: [
        "Both engines need the same build, the same -ctk, -ctv and -fa, and the same model.",
        "A decode engine with more than one slot needs --kv-unified; its context must hold the prompt.",
        "Both engines' --slot-save-path must be the folder of split.dir.",
        "The decode engine's log names the reason.",
    ],
}

REMEDIES: dict[InVain | None, str] = {
    None: (
        "The restore reported success, yet the prompt was read again. For a model with a sliding window the decode "
        "engine needs a build that keeps checkpoints in session files and --ctx-checkpoints of 1 or more on both "
        "engines, or --swa-full on an older build. A decode engine with several slots must not clear idle ones: start "
        "it with --kv-unified --cache-ram 0. Other traffic on the decode engine, past the proxy, overwrites what was "
        "restored."
    ),
    InVain.TEMPLATE_DRIFT: (
        "The decode engine reads another text than the one that was counted: does its chat template use the time or "
        "random ids, and do both engines have the same template? Keep such requests local with split.policy = "
        '"never", or change the template.'
    ),
    InVain.CLEARED_SLOTS: (
        "The decode engine clears slots that are idle while others work: start it with --kv-unified --cache-ram 0."
    ),
    InVain.NO_CHECKPOINTS: (
        "A model with a sliding window or a recurrent state needs a build that keeps checkpoints in session files and "
        "--ctx-checkpoints of 1 or more on both engines, or --swa-full on an older build."
    ),
    InVain.OTHER_TRAFFIC: (
        "Something else than this proxy uses the decode engine and overwrites what was restored, or the engine is "
        "started without --cache-ram 0."
    ),
}


def _moved(prompt: Prompt) -> Tokens:
    """What a handover moves of a prompt."""
    return prompt.tokens.head(len(prompt) - 1)


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
    if read := event.get("prompt_progress"):
        progress(Step.PREFILL, int(read.get("processed", 0)), int(read.get("total", len(prompt))))
    if not event.get("stop"):
        return None
    told = figures(event.get("timings") or {})
    if told.cached_tokens + told.read_tokens != len(prompt) or event.get("truncated"):
        message = f"{told.cached_tokens + told.read_tokens} tokens were read instead of {len(prompt)}"
        raise EngineError(Step.PREFILL, Cause.CORRUPT, message)
    return told


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16] if data else ""
