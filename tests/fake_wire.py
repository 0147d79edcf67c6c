"""The shapes of llama-server's answers, one dialect for each of its APIs. Nothing here acts: a dialect turns what was
generated into JSON values, and one function writes them as server-sent events."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.fake_model import VOCABULARY, Sample, piece, render

JsonDict = dict[str, Any]

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

SAMPLING: JsonDict = {
    "seed": 4294967295, "temperature": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 40, "top_p": 0.95,
    "min_p": 0.05, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "typical_p": 1.0,
    "repeat_last_n": 64, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 64, "mirostat": 0,
    "mirostat_tau": 5.0, "mirostat_eta": 0.1, "adaptive_target": -1.0, "adaptive_decay": 0.9, "max_tokens": -1,
    "n_predict": -1, "n_keep": 0, "n_discard": 0, "ignore_eos": False, "stream": False, "n_probs": 0, "min_keep": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none", "reasoning_in_content": False, "generation_prompt": "",
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "speculative.types": "none", "timings_per_token": False, "post_sampling_probs": False, "backend_sampling": False,
    "lora": [],
}  # fmt: skip

SETTINGS_OF_A_REQUEST: JsonDict = {
    "dry_sequence_breakers": ["\n", ":", '"', "*"], "stop": [], "logit_bias": [], "grammar": "", "grammar_lazy": False,
    "grammar_triggers": [], "preserved_tokens": [],
}  # fmt: skip


class RefusalError(Exception):
    """An error that the engine answers with."""

    def __init__(self, status: int, message: str, kind: str = "", **more: int) -> None:
        super().__init__(message)
        self.status = status
        self.body: JsonDict = {
            "error": {
                "code": status,
                "message": message,
                "type": kind or ERROR_TYPES.get(status, "server_error"),
                **more,
            }
        }


def too_long(tokens: int, context: int) -> RefusalError:
    message = f"request ({tokens} tokens) exceeds the available context size ({context} tokens), try increasing it"
    return RefusalError(400, message, "exceed_context_size_error", n_prompt_tokens=tokens, n_ctx=context)


def event(value: JsonDict, name: str = "") -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + dump(value).encode() + b"\n\n"


def dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@dataclass(slots=True)
class Generation:
    """One request's answer as far as it got, and what the engine measured of it."""

    body: JsonDict
    prompt: list[int]
    prompt_text: str
    model: str
    build: str
    serial: str  # 32 characters, the tail of every id of this answer
    created: int
    slot: int = 0
    cached: int = 0
    read: int = 0
    prompt_ms: float = 0.0
    answer_ms: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    ended: bool = False  # by the end token
    truncated: bool = False  # by the context

    @property
    def text(self) -> str:
        return b"".join(piece(sample.token) for sample in self.samples).decode(errors="replace")

    @property
    def count(self) -> int:
        """Tokens sampled, the end token included."""
        return len(self.samples) + self.ended

    @property
    def finish_reason(self) -> str:
        return "stop" if self.ended else "length"

    @property
    def timings(self) -> JsonDict:
        # The first answer token comes with the prompt, so its time is not part of the answer's.
        gaps = self.count - 1
        return {
            "cache_n": self.cached,
            "prompt_n": self.read,
            "prompt_ms": self.prompt_ms,
            "prompt_per_token_ms": self.prompt_ms / self.read if self.read else 0.0,
            "prompt_per_second": 1000 * self.read / self.prompt_ms if self.prompt_ms else 0.0,
            "predicted_n": self.count,
            "predicted_ms": self.answer_ms,
            "predicted_per_token_ms": self.answer_ms / gaps if gaps > 0 else 0.0,
            "predicted_per_second": 1000 * gaps / self.answer_ms if gaps > 0 and self.answer_ms else 0.0,
        }

    @property
    def usage(self) -> JsonDict:
        return {
            "completion_tokens": self.count,
            "prompt_tokens": len(self.prompt),
            "total_tokens": len(self.prompt) + self.count,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    @property
    def progress(self) -> JsonDict:
        done = self.cached + self.read
        return {"total": len(self.prompt), "cache": self.cached, "processed": done, "time_ms": int(self.prompt_ms)}

    def wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))


def probability(sample: Sample, count: int) -> JsonDict:
    """A sampled token and the `count` most likely ones in its place."""
    likely = [_probable(token, logprob) for token, logprob in sample.probabilities(count)]
    return {**likely[0], "top_logprobs": likely[:count]}


def _probable(token: int, logprob: float) -> JsonDict:
    text = piece(token)
    return {"id": token, "token": text.decode(errors="replace"), "bytes": list(text), "logprob": logprob}


def probabilities(samples: Sequence[Sample], count: int) -> list[JsonDict]:
    return [probability(sample, count) for sample in samples]


class Dialect(Protocol):
    """How one API asks, and how it says what was generated: the bytes that a stream carries at each point."""

    def prompt(self, body: JsonDict) -> str | list[Any]:
        """Text, or a list of token ids and texts. Raises RefusalError where the body has none."""

    def limit(self, body: JsonDict) -> int | None:
        """The most answer tokens that the body allows; None without a limit."""

    def progress(self, made: Generation) -> bytes: ...

    def start(self, made: Generation) -> bytes: ...

    def token(self, made: Generation) -> bytes:
        """The latest sample of a generation."""

    def end(self, made: Generation) -> bytes: ...

    def whole(self, made: Generation) -> JsonDict:
        """The answer to a request that does not stream."""


def _limit(body: JsonDict, *names: str) -> int | None:
    given = next((body[name] for name in names if body.get(name) is not None), -1)
    return int(given) if int(given) >= 0 else None


class Chat:
    """/v1/chat/completions."""

    def prompt(self, body: JsonDict) -> str | list[Any]:
        return chat_prompt(body)

    def limit(self, body: JsonDict) -> int | None:
        return _limit(body, "max_tokens", "max_completion_tokens", "n_predict")

    def progress(self, made: Generation) -> bytes:
        return event({**self._chunk(made, {"role": "assistant", "content": None}), "prompt_progress": made.progress})

    def start(self, made: Generation) -> bytes:
        return event(self._chunk(made, {"role": "assistant", "content": None}))

    def token(self, made: Generation) -> bytes:
        sample = made.samples[-1]
        chunk = self._chunk(made, {"content": piece(sample.token).decode(errors="replace")})
        if count := self._top(made.body):
            chunk["choices"][0]["logprobs"] = {"content": probabilities([sample], count)}
        return event(_timed(chunk, made))

    def end(self, made: Generation) -> bytes:
        last = self._chunk(made, {}, made.finish_reason)
        if not made.wants_usage():
            return event({**last, "timings": made.timings}) + b"data: [DONE]\n\n"
        figures = {**self._chunk(made, {}), "choices": [], "usage": made.usage, "timings": made.timings}
        return event(last) + event(figures) + b"data: [DONE]\n\n"

    def whole(self, made: Generation) -> JsonDict:
        choice: JsonDict = {
            "finish_reason": made.finish_reason,
            "index": 0,
            "message": {"role": "assistant", "content": made.text},
        }
        if count := self._top(made.body):
            choice["logprobs"] = {"content": probabilities(made.samples, count)}
        return {
            "choices": [choice],
            **_origin(made, "chat.completion"),
            "usage": made.usage,
            "id": f"chatcmpl-{made.serial}",
            "timings": made.timings,
        }

    @staticmethod
    def _top(body: JsonDict) -> int:
        return int(body.get("top_logprobs") or 1) if body.get("logprobs") else int(body.get("n_probs") or 0)

    @staticmethod
    def _chunk(made: Generation, delta: JsonDict, finish_reason: str | None = None) -> JsonDict:
        origin = _origin(made, "chat.completion.chunk")
        return {
            "choices": [{"finish_reason": finish_reason, "index": 0, "delta": delta}],
            "created": origin.pop("created"),
            "id": f"chatcmpl-{made.serial}",
            **origin,
        }


class Completions:
    """/v1/completions."""

    def prompt(self, body: JsonDict) -> str | list[Any]:
        return _plain_prompt(body)

    def limit(self, body: JsonDict) -> int | None:
        return _limit(body, "max_tokens", "n_predict")

    def progress(self, made: Generation) -> bytes:
        return event({**self._chunk(made, ""), "prompt_progress": made.progress})

    def start(self, made: Generation) -> bytes:
        return b""

    def token(self, made: Generation) -> bytes:
        sample = made.samples[-1]
        chunk = self._chunk(made, piece(sample.token).decode(errors="replace"))
        if count := self._top(made.body):
            chunk["choices"][0]["logprobs"] = {"content": probabilities([sample], count)}
        return event(_timed(chunk, made))

    def end(self, made: Generation) -> bytes:
        return event(self._figures(made, self._chunk(made, "", made.finish_reason))) + b"data: [DONE]\n\n"

    def whole(self, made: Generation) -> JsonDict:
        answer = self._chunk(made, made.text, made.finish_reason)
        if count := self._top(made.body):
            answer["choices"][0]["logprobs"] = {"content": probabilities(made.samples, count)}
        return self._figures(made, answer)

    @staticmethod
    def _figures(made: Generation, answer: JsonDict) -> JsonDict:
        name = answer.pop("id")
        return {**answer, "usage": made.usage, "id": name, "timings": made.timings}

    @staticmethod
    def _top(body: JsonDict) -> int:
        return int(body.get("logprobs") or body.get("n_probs") or 0)

    @staticmethod
    def _chunk(made: Generation, text: str, finish_reason: str | None = None) -> JsonDict:
        return {
            "choices": [{"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}],
            **_origin(made, "text_completion"),
            "id": f"chatcmpl-{made.serial}",
        }


class Native:
    """/completion."""

    def prompt(self, body: JsonDict) -> str | list[Any]:
        return _plain_prompt(body)

    def limit(self, body: JsonDict) -> int | None:
        return _limit(body, "n_predict", "max_tokens")

    def progress(self, made: Generation) -> bytes:
        # A progress event claims the token 0, which was never sampled; the real engine does the same.
        return event({**self._chunk(made, "", [0]), "prompt_progress": made.progress})

    def start(self, made: Generation) -> bytes:
        return b""

    def token(self, made: Generation) -> bytes:
        sample = made.samples[-1]
        chunk = self._chunk(made, piece(sample.token).decode(errors="replace"), [sample.token])
        if count := int(made.body.get("n_probs") or 0):
            chunk["completion_probabilities"] = probabilities([sample], count)
        return event(_timed(chunk, made))

    def end(self, made: Generation) -> bytes:
        return event(self._final(made, "", []))

    def whole(self, made: Generation) -> JsonDict:
        tokens = [sample.token for sample in made.samples] if made.body.get("return_tokens") else []
        answer = self._final(made, made.text, tokens)
        if (count := int(made.body.get("n_probs") or 0)) and "content" in answer:
            answer["completion_probabilities"] = probabilities(made.samples, count)
        return answer

    @staticmethod
    def _chunk(made: Generation, text: str, tokens: list[int]) -> JsonDict:
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": made.count,
            "tokens_evaluated": len(made.prompt),
        }

    @staticmethod
    def _final(made: Generation, text: str, tokens: list[int]) -> JsonDict:
        answer = {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "id_slot": made.slot,
            "stop": True,
            "model": made.model,
            "tokens_predicted": made.count,
            "tokens_evaluated": len(made.prompt),
            "generation_settings": settings(made.body),
            "prompt": made.prompt_text,
            "has_new_line": "\n" in made.text,
            "truncated": made.truncated,
            "stop_type": "eos" if made.ended else "limit",
            "stopping_word": "",
            "tokens_cached": len(made.prompt) + max(made.count - 1, 0),
            "timings": made.timings,
        }
        fields = made.body.get("response_fields")
        return {path: _at(answer, path) for path in fields} if fields else answer


class Messages:
    """/v1/messages."""

    def prompt(self, body: JsonDict) -> str | list[Any]:
        return chat_prompt({**body, "messages": [*_lead(body.get("system")), *body.get("messages", [])]})

    def limit(self, body: JsonDict) -> int | None:
        return _limit(body, "max_tokens")

    def progress(self, made: Generation) -> bytes:
        return b""

    def start(self, made: Generation) -> bytes:
        message = {**self._message(made, []), "stop_reason": None, "usage": {**self._read(made), "output_tokens": 0}}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return self._event({"type": "message_start", "message": message}) + self._event(block)

    def token(self, made: Generation) -> bytes:
        delta = {"type": "text_delta", "text": piece(made.samples[-1].token).decode(errors="replace")}
        return self._event({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, made: Generation) -> bytes:
        delta = {"stop_reason": self._stop_reason(made), "stop_sequence": None}
        last = {"type": "message_delta", "delta": delta, "usage": {"output_tokens": made.count}}
        return (
            self._event({"type": "content_block_stop", "index": 0})
            + self._event(last)
            + self._event({"type": "message_stop"})
        )

    def whole(self, made: Generation) -> JsonDict:
        answer = self._message(made, [{"type": "text", "text": made.text}])
        answer["stop_reason"] = self._stop_reason(made)
        return {**answer, "usage": {**self._read(made), "output_tokens": made.count}}

    @staticmethod
    def _event(value: JsonDict) -> bytes:
        return event(value, value["type"])

    @staticmethod
    def _read(made: Generation) -> JsonDict:
        return {"cache_read_input_tokens": made.cached, "input_tokens": len(made.prompt) - made.cached}

    @staticmethod
    def _stop_reason(made: Generation) -> str:
        return "end_turn" if made.ended else "max_tokens"

    @staticmethod
    def _message(made: Generation, content: list[JsonDict]) -> JsonDict:
        return {
            "id": f"chatcmpl-{made.serial}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": made.model,
            "stop_reason": None,
            "stop_sequence": None,
        }


class Responses:
    """/v1/responses."""

    def prompt(self, body: JsonDict) -> str | list[Any]:
        given = body.get("input", "")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return chat_prompt({**body, "messages": [*_lead(body.get("instructions")), *messages]})

    def limit(self, body: JsonDict) -> int | None:
        return _limit(body, "max_output_tokens", "max_tokens")

    def progress(self, made: Generation) -> bytes:
        return self._event("response.in_progress", response=self._begun(made), prompt_progress=made.progress)

    def start(self, made: Generation) -> bytes:
        item = {"content": [], **self._item(made, "in_progress")}
        part = {"type": "output_text", "text": ""}
        return (
            self._event("response.created", response=self._begun(made))
            + self._event("response.in_progress", response=self._begun(made))
            + self._event("response.output_item.added", item=item)
            + self._event("response.content_part.added", item_id=self._name(made), part=part)
        )

    def token(self, made: Generation) -> bytes:
        text = piece(made.samples[-1].token).decode(errors="replace")
        return self._event("response.output_text.delta", item_id=self._name(made), delta=text)

    def end(self, made: Generation) -> bytes:
        done = {**self._begun(made), **self._result(made), "status": "completed"}
        done["created_at"] = made.created
        return (
            self._event("response.output_text.done", item_id=self._name(made), text=made.text)
            + self._event("response.content_part.done", item_id=self._name(made), part=self._part(made))
            + self._event("response.output_item.done", item=self._output(made))
            + self._event("response.completed", response=done, timings=made.timings)
        )

    def whole(self, made: Generation) -> JsonDict:
        times = {"completed_at": made.created, "created_at": made.created}
        return {**times, **self._begun(made), "status": "completed", **self._result(made)}

    @staticmethod
    def _event(kind: str, **values: Any) -> bytes:
        return event({"type": kind, **values}, kind)

    @staticmethod
    def _name(made: Generation) -> str:
        return f"msg_{made.serial}"

    @staticmethod
    def _begun(made: Generation) -> JsonDict:
        return {"id": f"resp_{made.serial}", "object": "response", "status": "in_progress"}

    @staticmethod
    def _part(made: Generation) -> JsonDict:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": made.text}

    def _item(self, made: Generation, status: str) -> JsonDict:
        return {"id": self._name(made), "role": "assistant", "status": status, "type": "message"}

    def _output(self, made: Generation) -> JsonDict:
        return {**self._item(made, "completed"), "content": [self._part(made)]}

    def _result(self, made: Generation) -> JsonDict:
        usage = {
            "input_tokens": len(made.prompt),
            "output_tokens": made.count,
            "total_tokens": len(made.prompt) + made.count,
            "input_tokens_details": {"cached_tokens": made.cached},
        }
        return {"model": made.model, "output": [self._output(made)], "usage": usage}


def _plain_prompt(body: JsonDict) -> str | list[Any]:
    if "prompt" not in body:
        raise RefusalError(400, "[json.exception.out_of_range.403] key 'prompt' not found")
    prompt: str | list[Any] = body["prompt"]
    return prompt


def chat_prompt(body: JsonDict) -> str:
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


def _lead(text: object) -> list[JsonDict]:
    return [{"role": "system", "content": text}] if text else []


def settings(body: JsonDict) -> JsonDict:
    """The sampling settings of a request, as the last native event repeats them."""
    known = {**SAMPLING, **SETTINGS_OF_A_REQUEST, "reasoning_format": "deepseek"}
    given = {name: value for name, value in body.items() if name in known}
    limit = body.get("n_predict", body.get("max_tokens", -1))
    return {**known, **given, "n_predict": limit, "max_tokens": limit}


def models(name: str, context: int) -> JsonDict:
    """GET /v1/models."""
    meta = {
        "vocab_type": 2, "n_vocab": VOCABULARY, "n_ctx": context, "n_ctx_train": 131072, "n_embd": 64,
        "n_params": 139584, "size": 279808, "ftype": "F16",
    }  # fmt: skip
    model = {
        "id": name, "aliases": [name], "tags": [], "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": 1700000000, "owned_by": "llamacpp", "meta": meta,
    }  # fmt: skip
    summary = {
        "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model", "description": "",
        "tags": [""], "capabilities": ["completion"], "parameters": "", "details": {"format": "gguf"},
    }  # fmt: skip
    return {"models": [summary], "object": "list", "data": [model]}


def props(name: str, build: str, context: int, slots: int) -> JsonDict:
    """GET /props."""
    told: JsonDict = {
        "default_generation_settings": {"params": SAMPLING, "n_ctx": context}, "total_slots": slots,
        "model_alias": name, "model_ftype": "F16", "model_path": f"/models/{name}.gguf",
        "modalities": {"vision": False, "video": False, "audio": False}, "media_marker": "<__media__>",
        "endpoint_slots": True, "endpoint_props": False, "endpoint_metrics": True, "ui": True, "ui_settings": {},
        "chat_template": "chatml", "chat_template_caps": {"supports_tools": True}, "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>", "build_info": build, "is_sleeping": False, "cors_proxy_enabled": False,
    }  # fmt: skip
    return told


def slot_state(number: int, context: int, busy: bool) -> JsonDict:
    """One of GET /slots, as long as the slot has never been used."""
    return {"id": number, "n_ctx": context, "speculative": False, "is_processing": busy}


def used_slot_state(task: int, tokens: int, read: int, cached: int, answered: int, busy: bool) -> JsonDict:
    """What GET /slots says besides once a slot has been used."""
    following = {"has_next_token": busy, "has_new_line": False, "n_remain": -1, "n_decoded": answered}
    return {
        "id_task": task,
        "n_prompt_tokens": tokens,
        "n_prompt_tokens_processed": read,
        "n_prompt_tokens_cache": cached,
        "params": SAMPLING,
        "next_token": [following],
    }


def _origin(made: Generation, kind: str) -> JsonDict:
    return {"created": made.created, "model": made.model, "system_fingerprint": made.build, "object": kind}


def _timed(chunk: JsonDict, made: Generation) -> JsonDict:
    return {**chunk, "timings": made.timings} if made.body.get("timings_per_token") else chunk


def _at(value: Any, path: str) -> Any:
    for name in path.split("/"):
        value = value[name]
    return value


DIALECTS: dict[str, Dialect] = {
    "/completion": Native(),
    "/completions": Native(),
    "/v1/completions": Completions(),
    "/v1/chat/completions": Chat(),
    "/chat/completions": Chat(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}
COUNTS: dict[str, Dialect] = {
    "/v1/chat/completions/input_tokens": Chat(),
    "/v1/responses/input_tokens": Responses(),
    "/v1/messages/count_tokens": Messages(),
}
