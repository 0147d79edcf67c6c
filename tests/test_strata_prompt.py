"""A Strata server's prompts: what its template is given, what comes out, and what stands for ids."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.engines.strata_prompt import PlainTemplate, arguments, estimate, request_of, template
from tests.fake_model import render
from tests.fake_strata_server import TEMPLATE

USER = {"role": "user", "content": "Hello."}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages or [USER]), **fields}


@pytest.mark.parametrize(
    "request_",
    [
        chat(),
        chat({"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Hi."}, USER),
        chat(tools=[TOOL]),
        chat({"role": "system", "content": "Be kind."}, USER, tools=[TOOL]),
        chat(chat_template_kwargs={"enable_thinking": False}),
    ],
    ids=["plain", "turns", "tools", "system and tools", "no thinking"],
)
def test_the_servers_template_gives_the_servers_text(request_: dict[str, Any]) -> None:
    """What is rendered here is what the server itself reads."""
    assert template(TEMPLATE).render(request_) == render(request_)


def test_what_the_template_is_given() -> None:
    """Parts become text, a call's arguments an object, a developer the system, and a late system message a user's."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = arguments(
        chat(
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
            {"role": "system", "content": "late"},
            tools=[TOOL],
            reasoning_effort="high",
        )
    )
    assert found["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "user", "content": "late"},
    ]
    assert found["tools"] == [TOOL["function"]]
    assert found["reasoning_effort"] == "xhigh"


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"reasoning_effort": "medium"}}, {"reasoning_effort": "medium"}),
        ({"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}, {"enable_thinking": False}),
        ({"reasoning_effort": "odd"}, {}),
        ({"chat_template_kwargs": 5, "reasoning": 5}, {}),
    ],
)
def test_how_much_to_think(fields: dict[str, Any], given: dict[str, Any]) -> None:
    """Clients ask for an effort in several ways; templates know a few words."""
    found = arguments(chat(**fields))
    assert {key: found[key] for key in found if key not in ("messages", "tools")} == given


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"messages": "x"},
        {"messages": [1]},
        {"messages": [USER], "tools": "x"},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]},
    ],
)
def test_a_request_of_another_form_is_refused(request_: dict[str, Any]) -> None:
    """What no template could take is said to be so."""
    with pytest.raises(ValueError, match=r"messages|tools|tool call"):
        arguments(request_)


def test_a_template_may_refuse() -> None:
    """A template's own refusal, and one that is broken, are plain errors that quote no prompt."""
    refusing = template("{{ raise_exception('no ' + messages[0].content) }}")
    with pytest.raises(ValueError, match="refuses the request") as caught:
        refusing.render(chat())
    assert "Hello" not in str(caught.value)
    with pytest.raises(ValueError, match="broken"):
        template("{% if %}")


def test_a_template_cannot_reach_out() -> None:
    """A template comes from a server: it may not use what it was not given."""
    escaping = template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="refuses"):
        escaping.render(chat())


def test_a_guess_tells_prompts_apart() -> None:
    """Without a template the frame is guessed at; what differs between prompts is there."""
    one, other = PlainTemplate().render(chat()), PlainTemplate().render(chat(tools=[TOOL]))
    assert "<|im_start|>user\nHello.<|im_end|>" in one
    assert one != other
    assert '"name": "f"' in other


@given(start=st.text(), more=st.text(), width=st.floats(0.1, 9))
def test_an_estimate_goes_on_as_its_text_does(start: str, more: str, width: float) -> None:
    """The stand-ins of a text that goes on begin with those of what it was, and their number is in proportion."""
    short, long = estimate(start, width), estimate(start + more, width)
    assert long.common_prefix(short) == len(short)
    pieces = min(max(round(width), 1), 4)
    assert len(short) == len(start.encode(errors="replace")) // pieces


def test_an_estimate_may_be_what_an_engine_counts() -> None:
    """It is no count, so twice as many or half as many are no contradiction."""
    found = estimate("x" * 100, 1.0)
    assert [found.may_be(count) for count in (49, 50, 100, 200, 201)] == [False, True, True, True, False]
    assert found.head(3).may_be(5)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5"])
def test_a_body_must_be_an_object(body: bytes) -> None:
    """Nothing else can be a chat request; a mark of the byte order before it is none of it."""
    with pytest.raises(ValueError):  # noqa: PT011 - a decoder's words are its own
        request_of(body)
    assert request_of(b"\xef\xbb\xbf{}") == {}
