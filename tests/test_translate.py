"""Responses and Messages bodies become the chat request that the engine makes of them, or are left to the engine."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.api.translate import Untranslatable, chat_body
from splitproxy.model import Api

Json = dict[str, Any]


def responses(**fields: Any) -> Json:
    made: Json = orjson.loads(chat_body(Api.RESPONSES, fields))
    return made


def messages(**fields: Any) -> Json:
    made: Json = orjson.loads(chat_body(Api.MESSAGES, fields))
    return made


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def text(words: str) -> Json:
    return {"text": words, "type": "text"}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"}
CHAT_CALL = {"function": {"arguments": "{}", "name": "f"}, "id": "c", "type": "function"}
SAID = {
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "a"}],
}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("given_input", "made"),
    [
        ("hi", [user("hi")]),
        ([user("hi")], [user([text("hi")])]),
        ([{"type": "message", **user([{"type": "input_text", "text": "hi"}])}], [user([text("hi")])]),
        ([SAID], [{"role": "assistant", "content": [text("a")]}]),
        ([SAID, SAID], [{"role": "assistant", "content": [text("a"), text("a")]}]),
        ([CALL, CALL], [{"role": "assistant", "tool_calls": [CHAT_CALL, CHAT_CALL]}]),
        ([SAID, CALL], [{"role": "assistant", "content": [text("a")], "tool_calls": [CHAT_CALL]}]),
        ([THOUGHT, SAID], [{"role": "assistant", "content": [text("a")], "reasoning_content": "hm"}]),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "3"}],
            [{"content": "3", "role": "tool", "tool_call_id": "c"}],
        ),
    ],
)
def test_responses_items_become_messages(given_input: Any, made: list[Json]) -> None:
    """Each kind of item has its message; what the model did in one go is one message."""
    assert responses(input=given_input)["messages"] == made


def test_responses_fields_become_chat_fields() -> None:
    """Instructions lead, functions are nested, effort is named, and all other fields stay."""
    function = {"name": "f", "parameters": {}}
    tools = [{"type": "function", **function}, {"type": "web_search"}]
    chat = responses(
        input="x", instructions="s", tools=tools, reasoning={"effort": "low"}, chat_template_kwargs={"k": 1}
    )
    assert chat == {
        "messages": [{"role": "system", "content": "s"}, user("x")],
        "tools": [{"type": "function", "function": {**function, "strict": True}}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"k": 1},
    }


USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"b": "\u00e9", "a": [1, 2.5]}}
CHAT_USE = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b":"\u00e9","a":[1,2.5]}'}}
RESULT = {"type": "tool_result", "tool_use_id": "c"}


@pytest.mark.parametrize(
    ("message", "made"),
    [
        (user("hi"), [user("hi")]),
        (user([{"type": "text", "text": "hi", "cache_control": {}}]), [user([{**text("hi"), "cache_control": {}}])]),
        ({"role": "assistant", "content": [USE]}, [{"role": "assistant", "content": "", "tool_calls": [CHAT_USE]}]),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
            [{"role": "assistant", "content": [text("a")], "reasoning_content": "hm"}],
        ),
        ({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, []),
        (
            user([{**RESULT, "content": "3"}, {"type": "text", "text": "go"}]),
            [user([text("go")]), {"role": "tool", "tool_call_id": "c", "content": "3"}],
        ),
        (user([RESULT]), [{"role": "tool", "tool_call_id": "c", "content": ""}]),
        (
            user([{**RESULT, "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            [{"role": "tool", "tool_call_id": "c", "content": "ab"}],
        ),
    ],
)
def test_messages_blocks_become_messages(message: Json, made: list[Json]) -> None:
    """A message's text, thoughts and calls are one chat message; each result is one of its own, after it."""
    assert messages(messages=[message])["messages"] == made


def test_messages_fields_become_chat_fields() -> None:
    """The system text leads, tools are functions, a forced choice is `required`; nothing else counts."""
    chat = messages(
        messages=[user("x")],
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "tool", "name": "f"},
        max_tokens=5,
    )
    assert chat == {
        "messages": [{"role": "system", "content": "ab"}, user("x")],
        "tools": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
    }


@pytest.mark.parametrize(
    ("system", "made"),
    [
        ("x-anthropic-billing-header: v=1; cch=a5145;You are", "x-anthropic-billing-header: v=1; cch=fffff;You are"),
        ("x-anthropic-billing-header: v=1; cch=a51;You are", "x-anthropic-billing-header: v=1; cch=a51;You are"),
        ("x-anthropic-billing-header: none", "x-anthropic-billing-header: none"),
        ("You, cch=a5145;", "You, cch=a5145;"),
    ],
)
def test_a_stamp_that_changes_each_time_is_overwritten(system: str, made: str) -> None:
    """A client's stamp does not keep a conversation from being recognised, as in the engine."""
    assert messages(messages=[], system=system)["messages"][0]["content"] == made


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.RESPONSES, {}),
        (Api.RESPONSES, {"input": {"role": "user"}}),
        (Api.RESPONSES, {"input": ["x"]}),
        (Api.RESPONSES, {"input": "x", "previous_response_id": "r"}),
        (Api.RESPONSES, {"input": "x", "instructions": 5}),
        (Api.RESPONSES, {"input": "x", "tools": "f"}),
        (Api.RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}),
        (Api.RESPONSES, {"input": [{"role": "assistant", "content": "x"}]}),
        (Api.RESPONSES, {"input": [user([{"type": "input_image", "image_url": "x"}])]}),
        (Api.RESPONSES, {"input": [{**SAID, "content": [{"type": "refusal", "refusal": "x"}]}]}),
        (Api.RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
        (Api.RESPONSES, {"input": [{**CALL, "arguments": {}}]}),
        (Api.MESSAGES, {}),
        (Api.MESSAGES, {"messages": "x"}),
        (Api.MESSAGES, {"messages": [user(None)]}),
        (Api.MESSAGES, {"messages": [user([{"type": "image", "source": {}}])]}),
        (Api.MESSAGES, {"messages": [user([{"type": "document"}])]}),
        (Api.MESSAGES, {"messages": [user([{**RESULT, "content": [{"type": "image"}]}])]}),
        (Api.MESSAGES, {"messages": [{"content": [USE]}]}),
        (Api.MESSAGES, {"messages": [], "system": 5}),
        (Api.MESSAGES, {"messages": [user([{"type": ["text"]}])], "tool_choice": {"type": []}}),
    ],
)
def test_what_is_not_known_is_left_to_the_engine(api: Api, fields: Json) -> None:
    """Pictures, references, refusals and odd shapes have no ids here; the reason names the place, not the text."""
    with pytest.raises(Untranslatable) as caught:
        chat_body(api, fields)
    assert str(caught.value).isidentifier()


SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["user", "assistant", "text", "message", "function_call", "tool_use", "tool_result"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "input", "name", "call_id", "arguments", "output", "id"]),
        inner, max_size=5,
    ),
    max_leaves=25,
)  # fmt: skip
NAMES = st.sampled_from(["input", "messages", "system", "instructions", "tools", "tool_choice", "reasoning", "x"])


@given(st.sampled_from([Api.RESPONSES, Api.MESSAGES]), st.dictionaries(NAMES, SCRAPS, max_size=5))
def test_any_body_has_a_chat_request_or_a_reason(api: Api, fields: Json) -> None:
    """Whatever a client sends, the translation ends in a JSON object or says that there is none."""
    try:
        chat = orjson.loads(chat_body(api, fields))
    except Untranslatable:
        return
    assert isinstance(chat["messages"], list)


def test_a_body_that_is_nested_without_end_is_left_to_the_engine() -> None:
    """What cannot be written as JSON again has no ids."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    with pytest.raises(Untranslatable):
        chat_body(Api.RESPONSES, {"input": "x", "tools": [{"type": "function", "parameters": deep}]})
