"""JSON and headers in and out: what a client's body asks for, the pinned body, error bodies, header filters.

Pure: bytes and values in, bytes and values out. A client's body is never re-serialised; the slot pin is spliced in.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from splitproxy.api.translate import Untranslatable, chat_body
from splitproxy.errors import Fault, RequestError
from splitproxy.model import Api, Ask

# The endpoints that write an answer on a slot and take `id_slot`.
GENERATING: Mapping[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/completion": Api.NATIVE,
    "/completions": Api.NATIVE,
    "/v1/responses": Api.RESPONSES,
    "/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/messages": Api.MESSAGES,
    "/api/chat": Api.CHAT,
    "/infill": Api.OTHER,
}
# Requests with a body that need no slot. Any other may choose one by itself, and gets the engine to itself.
SLOTLESS = frozenset(
    prefix + path
    for prefix in ("", "/v1")
    for path in (
        "/tokenize", "/detokenize", "/apply-template", "/chat/completions/input_tokens", "/responses/input_tokens",
        "/messages/count_tokens", "/api/show",
    )
)  # fmt: skip
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Whatever the method: these show or change others' conversations.
_ADMINISTRATION = frozenset({"slots", "stream", "status", "requests", "api-monitor"})
_CHANGING = frozenset({
    "props", "lora-adapters", "models", "metrics", "health", "tools", "cors-proxy",
    "load", "unload", "vram", "settings", "config",
})  # fmt: skip
# Fields of other servers' hand-over protocols: a client that could set them could reach another conversation.
CONTROL_FIELDS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")

_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip
# Host and length are the next hop's own; a compressed answer could not be read; the key is between client and proxy;
# X-Conversation-Id would make the engine go on after the client has left.
_NOT_FORWARDED = _HOP_BY_HOP | {
    "host", "content-length", "content-encoding", "accept-encoding", "expect", "authorization", "x-api-key",
    "x-conversation-id",
}  # fmt: skip
_NOT_RETURNED = _HOP_BY_HOP | {"content-length", "date", "server"}


def is_administration(method: str, path: str) -> bool:
    """Whether a request would change an engine, or reach other clients' slots. `path` is decoded."""
    words = {word.lower() for word in path.split("/") if word}
    return bool(words & _ADMINISTRATION) or (method not in _SAFE_METHODS and bool(words & _CHANGING))


def needs_no_slot(method: str, path: str) -> bool:
    """Whether a request that is no generating one leaves all slots alone."""
    return method in _SAFE_METHODS or path in SLOTLESS


def api_of(path: str) -> Api:
    """The API whose error shape a path's clients expect."""
    known = GENERATING.get(path, Api.OTHER)
    return Api.MESSAGES if known is Api.OTHER and path.startswith(("/v1/messages", "/messages")) else known


def read_ask(path: str, body: bytes) -> Ask:
    """What a generating request asks for. Raises RequestError for a body that no engine could take."""
    api = GENERATING[path]
    fields = _json_object(body)
    for name in fields:
        if name in CONTROL_FIELDS:
            raise RequestError(Fault.INVALID_REQUEST, f"the field {name!r} must not be set by a client")
    prompt, chat, obstacle = None, None, None
    if api in (Api.COMPLETIONS, Api.NATIVE):
        prompt, obstacle = _prompt(fields)
    else:
        chat, obstacle = _chat(api, fields, body)
    return Ask(
        api=api,
        path=path,
        body=body,
        stream=fields.get("stream") is True,
        max_tokens=_max_tokens(api, fields),
        prompt=prompt,
        chat=chat,
        not_splittable=obstacle or _obstacle(fields),
        pinned=api is not Api.MESSAGES,  # llama-server drops `id_slot` when it converts such a body
        answers=_choices(fields) * _prompts(api, fields),
        keeps_cache=fields.get("cache_prompt") is not False,
        progress=fields.get("return_progress") is True,
    )


def read_any_ask(body: bytes) -> Ask:
    """What a chat or completion request asks for, told apart by its fields. Raises RequestError."""
    fields = _json_object(body)
    if "messages" in fields:
        return read_ask("/v1/chat/completions", body)
    if "prompt" in fields:
        return read_ask("/v1/completions", body)
    raise RequestError(Fault.INVALID_REQUEST, "the body must be that of a chat or completion request")


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise RequestError(Fault.INVALID_REQUEST, f"the body is not valid JSON: {error.msg} ({place})") from None
    if not isinstance(fields, dict):
        raise RequestError(Fault.INVALID_REQUEST, f"the body must be a JSON object, not {_json_type(fields)}")
    return fields


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# The fields that limit an answer, by API; the engine goes by one of those given, and ignores all others.
_LIMITS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("max_completion_tokens", "max_tokens", "n_predict"),
    Api.RESPONSES: ("max_output_tokens", "max_tokens", "n_predict"),
}
_PLAIN_LIMITS = ("max_tokens", "n_predict")


def _max_tokens(api: Api, fields: Mapping[str, Any]) -> int | None:
    """The longest answer that the engine may write, or None for one without a limit that is sure.

    Of several limits the largest is taken: what is reserved must never be too little.
    """
    given = [value for name in _LIMITS.get(api, _PLAIN_LIMITS) if (value := fields.get(name)) is not None]
    if not given or not all(type(value) is int and value >= 0 for value in given):
        return None
    return int(max(given))


def _choices(fields: Mapping[str, Any]) -> int:
    """How many answers each prompt gets. The engine takes 2.0 for 2."""
    return max([1, *(int(n) for name in ("n", "n_cmpl") if isinstance(n := fields.get(name), int | float))])


def _prompts(api: Api, fields: Mapping[str, Any]) -> int:
    """How many prompts a body holds. A list with numbers in it is one, of ids and texts."""
    prompt = fields.get("prompt") if api in (Api.COMPLETIONS, Api.NATIVE) else None
    if not isinstance(prompt, list) or any(isinstance(part, int | float) for part in prompt):
        return 1
    return max(1, len(prompt))


def _obstacle(fields: Mapping[str, Any]) -> str | None:
    """The first field that keeps a request from being handed over, whatever its API."""
    if _choices(fields) > 1:
        return "n"
    if fields.get("cache_prompt") is False:
        return "cache_prompt"
    if fields.get("lora"):
        return "lora"
    if fields.get("strata_checkpoint") is False:
        return "strata_checkpoint"  # such a request leaves no session behind
    return None


def _chat(api: Api, fields: Mapping[str, Any], body: bytes) -> tuple[bytes | None, str | None]:
    """The chat request that renders to the prompt, and what about it cannot be split."""
    match api:
        case Api.CHAT:
            return (body, None) if _all_text(fields.get("messages")) else (None, "messages")
        case Api.RESPONSES | Api.MESSAGES:
            try:
                return chat_body(api, fields), None
            except Untranslatable as reason:
                return None, str(reason)
        case _:
            return None, api.value


def _prompt(fields: Mapping[str, Any]) -> tuple[str | tuple[int, ...] | None, str | None]:
    """A prompt that is no chat, and what about it cannot be split."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(part) is int and 0 <= part < 2**31 for part in prompt):
        return tuple(prompt), None
    return None, "prompt"


def _all_text(messages: object) -> bool:
    """Whether messages hold text alone: pictures and sound have no token ids."""
    if not isinstance(messages, list):
        return False
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, dict) and part.get("type", "text") in ("text", "input_text") for part in parts)


def pin(ask: Ask, slot: int | None) -> bytes:
    """The client's body with the slot pin spliced in at its end, where it wins over a field of the same name. Without a
    slot the engine chooses: several prompts that are pinned would be read one after the other.

    `cache_prompt` is left as it was when the client switched it off: it asks for an answer without reuse.
    """
    end = ask.body.rindex(b"}")
    head = ask.body[:end]
    comma = b"" if head.rstrip().endswith(b"{") else b","
    cache = b',"cache_prompt":true' if ask.keeps_cache else b""
    return head + comma + b'"id_slot":%d' % (-1 if slot is None else slot) + cache + ask.body[end:]


def error_type(status: int) -> str:
    """The engines' own name for an error with this status."""
    names = {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "invalid_request_error",
        429: "rate_limit_error",
        501: "not_supported_error",
        503: "unavailable_error",
    }
    return names.get(status, "server_error")


def error_body(api: Api, status: int, message: str, request_id: str) -> bytes:
    """An error as the API that was called words it."""
    if api is Api.MESSAGES:
        names = {
            413: "request_too_large",
            500: "api_error",
            502: "api_error",
            503: "overloaded_error",
            504: "api_error",
        }
        inner = {"type": names.get(status, error_type(status)), "message": message}
        return orjson.dumps({"type": "error", "error": inner, "request_id": request_id})
    return orjson.dumps({"error": {"code": status, "message": message, "type": error_type(status)}})


def allow_origin(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """What lets a page read an answer that is not the engine's, or that begins before the engine has answered. Of the
    client's headers."""
    return [("Access-Control-Allow-Origin", value) for name, value in headers if name.lower() == "origin"][:1]


def to_engine(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The client's headers that an engine gets."""
    return _without(headers, _NOT_FORWARDED)


def to_client(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The engine's headers that a client gets."""
    return _without(headers, _NOT_RETURNED)


def _without(headers: Iterable[tuple[str, str]], dropped: frozenset[str] | set[str]) -> list[tuple[str, str]]:
    headers = list(headers)
    # A Connection header may name further headers that are meant for one hop alone.
    named = {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    }
    return [(name, value) for name, value in headers if name.lower() not in dropped and name.lower() not in named]
