"""Responses and Messages requests as the chat requests that llama-server makes of them, to learn their prompt's ids.

For rendering only: what a decode engine gets is the client's own body, so a wrong translation costs time, never text.
What is not surely translated as the engine does it raises Untranslatable, and the decode engine reads it by itself.
Pure: values in, values out.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from splitproxy.errors import SplitproxyError
from splitproxy.model import Api

Json = dict[str, Any]


class Untranslatable(SplitproxyError):  # noqa: N818 - the field says it that way
    """A body has something that no chat request is known for. The message names it: a field or a type, never text."""


def chat_body(api: Api, fields: Mapping[str, Any]) -> bytes:
    """The chat request that stands for a Responses or Messages request. Raises Untranslatable."""
    translated = _responses(fields) if api is Api.RESPONSES else _messages(fields)
    try:
        return orjson.dumps(translated)
    except orjson.JSONEncodeError:  # nested deeper than it writes
        raise Untranslatable("depth") from None


# -- Responses ---------------------------------------------------------------------------------------------------------


def _responses(fields: Mapping[str, Any]) -> Json:
    if fields.get("previous_response_id"):
        raise Untranslatable("previous_response_id")
    chat = {name: value for name, value in fields.items() if name not in _RESPONSES_OWN}
    messages: list[Json] = []
    if "instructions" in fields:
        instructions = fields["instructions"]
        messages.append({"role": "system", "content": "" if instructions is None else _string(fields, "instructions")})
    _add_input(fields.get("input"), messages)
    chat["messages"] = messages
    if tools := _response_tools(fields.get("tools", [])):
        chat["tools"] = tools
    reasoning = fields.get("reasoning")
    if isinstance(reasoning, dict) and "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat


_RESPONSES_OWN = frozenset({"input", "instructions", "tools", "max_output_tokens", "reasoning"})


def _add_input(value: object, messages: list[Json]) -> None:
    if isinstance(value, str):
        messages.append({"role": "user", "content": value})
        return
    for item in _objects(value, "input"):
        kind = item.get("type")
        if item.get("role") in ("user", "system", "developer"):
            messages.append(_message(item, _text_parts(item.get("content"), ("input_text",))))
        elif kind == "message" and item.get("role") == "assistant":
            _add_output_message(item, messages)
        elif kind == "function_call":
            _last_assistant(messages).setdefault("tool_calls", []).append(_function_call(item))
        elif kind == "function_call_output":
            messages.append(_function_output(item))
        elif kind == "reasoning":
            _add_reasoning(item, messages)
        else:
            raise Untranslatable("input")


def _message(item: Json, content: object) -> Json:
    return {**{name: value for name, value in item.items() if name not in ("type", "status")}, "content": content}


def _text_parts(content: object, kinds: tuple[str, ...]) -> list[Json]:
    """Content as text parts; a plain string is one."""
    if isinstance(content, str):
        return [{"text": content, "type": "text"}]
    parts = _objects(content, "content")
    for part in parts:
        if part.get("type") not in kinds:
            raise Untranslatable("content")
    return [{"text": _string(part, "text"), "type": "text"} for part in parts]


def _add_output_message(item: Json, messages: list[Json]) -> None:
    parts = _text_parts(item.get("content"), ("output_text", "input_text"))
    if messages and messages[-1].get("role") == "assistant":
        held = messages[-1].get("content")
        messages[-1]["content"] = [*held, *parts] if isinstance(held, list) else parts
    else:
        messages.append(_message(item, parts))


def _last_assistant(messages: list[Json]) -> Json:
    """The message that what the model did belongs to: the last one if it is the model's, else a new one."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _function_call(item: Json) -> Json:
    function = {"arguments": _string(item, "arguments"), "name": _string(item, "name")}
    return {"function": function, "id": _string(item, "call_id"), "type": "function"}


def _function_output(item: Json) -> Json:
    output = item.get("output")
    content = output if isinstance(output, str) else _text_parts(output, ("input_text",))
    return {"content": content, "role": "tool", "tool_call_id": _string(item, "call_id")}


def _add_reasoning(item: Json, messages: list[Json]) -> None:
    content = _objects(item.get("content"), "reasoning")
    if not content or not isinstance(item.get("summary"), list):
        raise Untranslatable("reasoning")
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant", "content": []})
    messages[-1]["reasoning_content"] = _string(content[0], "text")


def _response_tools(tools: object) -> list[Json]:
    """Functions alone: the engine skips tools of other kinds."""
    made = []
    for tool in _objects(tools, "tools"):
        if tool.get("type") == "function":
            function = {name: value for name, value in tool.items() if name != "type"}
            made.append({"type": "function", "function": {**function, "strict": function.get("strict", True)}})
    return made


# -- Messages ----------------------------------------------------------------------------------------------------------


def _messages(fields: Mapping[str, Any]) -> Json:
    chat: Json = {name: fields[name] for name in ("chat_template_kwargs",) if name in fields}
    messages: list[Json] = []
    if (system := fields.get("system")) is not None:
        messages.append({"role": "system", "content": _system(system)})
    for message in _objects(fields.get("messages"), "messages"):
        messages += _chat_messages(message)
    chat["messages"] = messages
    if isinstance(tools := fields.get("tools"), list):
        chat["tools"] = [_function(tool) for tool in _objects(tools, "tools")]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and isinstance(kind := choice.get("type"), str) and kind in _TOOL_CHOICES:
        chat["tool_choice"] = _TOOL_CHOICES[kind]
    return chat


_TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "required"}


def _system(system: object) -> str:
    if isinstance(system, str):
        return _without_stamp(system)
    blocks = [block for block in _objects(system, "system") if block.get("type") == "text"]
    return "".join(_without_stamp(_string(block, "text")) for block in blocks)


def _without_stamp(text: str) -> str:
    """Text of a billing header with its stamp, which changes with every request, overwritten as the engine does it."""
    if text.startswith(_BILLING):
        place = text.find("cch=", len(_BILLING)) + 4
        if place > 3 and text[place + 5 : place + 6] == ";":
            return text[:place] + "fffff" + text[place + 5 :]
    return text


_BILLING = "x-anthropic-billing-header:"


def _chat_messages(message: Json) -> Iterable[Json]:
    """The chat messages that one message becomes: its text and calls, then a message for each tool result."""
    content = message.get("content")
    if isinstance(content, str):
        return [message]
    made: Json = {"role": _string(message, "role")}
    text: list[Json] = []
    calls: list[Json] = []
    results: list[Json] = []
    thoughts = ""
    for block in _objects(content, "content"):
        match block.get("type"):
            case "text":
                text.append(block)
            case "thinking":
                thoughts += _string(block, "thinking")
            case "tool_use":
                calls.append(_tool_use(block))
            case "tool_result":
                results.append(_tool_result(block))
            case "redacted_thinking":
                pass  # the engine leaves it out
            case _:
                raise Untranslatable("content")
    if not (text or calls or thoughts):
        return results
    made["content"] = text or ""
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made["reasoning_content"] = thoughts
    return [made, *results]


def _tool_use(block: Json) -> Json:
    arguments = orjson.dumps(block.get("input", {})).decode()
    function = {"name": _string(block, "name"), "arguments": arguments}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _tool_result(block: Json) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        content = "".join(part["text"] for part in _text_parts(content, ("text",)))
    elif not isinstance(content, str):
        content = ""
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id"), "content": content}


def _function(tool: Json) -> Json:
    function = {
        "name": tool.get("name", ""),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


# -- both --------------------------------------------------------------------------------------------------------------


def _objects(value: object, name: str) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Untranslatable(name)
    return value


def _string(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise Untranslatable(name)
    return value
