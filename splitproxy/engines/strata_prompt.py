"""How a Strata server makes a prompt's text of a chat request, and what stands for ids where it tells none.

The server has no endpoint for either. It renders the template that /props shows as Hugging Face does, after it has
brought the messages into the template's form; both are done here again. A text that comes out differently costs time,
never text: the decode engine reads the client's own body.
"""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from splitproxy.model import Estimate

WIDTH_MAX = 4  # bytes in one stand-in


class Template(Protocol):
    """A chat template that is ready for use."""

    def render(self, request: Mapping[str, Any]) -> str:
        """The prompt text of a chat request. Raises ValueError for one that the template refuses."""
        ...


def template(source: str) -> Template:
    """A chat template from its Jinja text. Raises ValueError for one that is broken, ImportError without Jinja."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    room.filters["tojson"] = tojson
    room.globals["raise_exception"] = refuse
    try:
        compiled = room.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is broken: {error}") from None

    class Compiled:
        def render(self, request: Mapping[str, Any]) -> str:
            try:
                return compiled.render(add_generation_prompt=True, **arguments(request))
            except (jinja2.TemplateError, TypeError, OverflowError) as error:
                raise ValueError(f"the chat template refuses the request: {type(error).__name__}") from None

    return Compiled()


class PlainTemplate:
    """The ChatML frame alone: close enough to tell prompts apart and to guess their lengths."""

    def render(self, request: Mapping[str, Any]) -> str:
        told = arguments(request)
        lead = "".join(json.dumps(tool) + "\n" for tool in told["tools"] or ())
        turns = (f"<|im_start|>{m['role']}\n{_flat(m)}<|im_end|>\n" for m in told["messages"])
        return lead + "".join(turns) + "<|im_start|>assistant\n"


def _flat(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    return str(message["content"]) + (json.dumps(calls) if calls else "")


def arguments(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the server gives its template for a chat request. Raises ValueError for a request of another form."""
    messages = [_message(message) for message in _objects(request.get("messages"), "messages")]
    # Templates take a system message at the beginning only.
    messages = [{**m, "role": "user"} if m["role"] == "system" and place else m for place, m in enumerate(messages)]
    tools = [tool.get("function", tool) for tool in _objects(request.get("tools") or [], "tools")]
    return {"messages": messages, "tools": tools or None, **_effort(request)}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    found: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content")),
    }
    if reasoning := message.get("reasoning_content"):
        found["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in _objects(calls, "tool_calls")]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise ValueError("a tool call has no function")
    given = function.get("arguments")
    try:
        # Templates walk over the arguments: they take an object, not its text.
        found = json.loads(given) if isinstance(given, str) and given.strip() else given
    except json.JSONDecodeError:
        raise ValueError("a tool call's arguments are no JSON") from None
    return {"function": {"name": function.get("name"), "arguments": found or {}}}


def _text(content: object) -> str:
    if isinstance(content, list):
        parts = (part for part in content if isinstance(part, dict))
        return "".join(str(part.get("text", "")) for part in parts)
    return content if isinstance(content, str) else ""


def _objects(value: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{name} is no list of objects")
    return value


# A client's words for how much to think, and the template's: None is not at all.
LEVELS: Mapping[str, str | None] = {
    "none": None, "minimal": None, "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh",
}  # fmt: skip


def _effort(request: Mapping[str, Any]) -> dict[str, Any]:
    """How much the model is to think, in the template's words; nothing where the request leaves it open."""
    wishes = request.get("chat_template_kwargs")
    wishes = wishes if isinstance(wishes, dict) else {}
    if wishes.get("enable_thinking") is False:
        return {"enable_thinking": False}
    reasoning = request.get("reasoning")
    asked = request.get("reasoning_effort") or (reasoning.get("effort") if isinstance(reasoning, dict) else None)
    asked = wishes.get("reasoning_effort") or asked
    if asked is None or asked == "":
        return {}
    level = LEVELS.get(str(asked).lower(), "")
    return {"enable_thinking": False} if level is None else {"reasoning_effort": level} if level else {}


def estimate(text: str, bytes_per_token: float) -> Estimate:
    """Stand-ins for the ids of a text: its bytes in pieces of about a token's length. A piece that is not full yet is
    left out, so that a text that goes on begins with the pieces of what it was."""
    width = min(max(round(bytes_per_token), 1), WIDTH_MAX)
    raw = text.encode(errors="replace")
    count = len(raw) // width
    pieces = bytearray(4 * count)
    for place in range(width):
        pieces[place::4] = raw[place : width * count : width]
    return Estimate.from_bytes(bytes(pieces))


def request_of(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises ValueError."""
    found = orjson.loads(body.removeprefix(b"\xef\xbb\xbf"))
    if not isinstance(found, dict):
        raise ValueError("the body is no JSON object")
    return found
