"""Through the proxy an answer is, byte for byte, what the engine itself answers: every API, whatever is asked for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from splitproxy.api.wire import read_ask
from tests.live_pair import words
from tests.live_served import FLOOR, Raw, Served, post, served

pytestmark = pytest.mark.live

Json = dict[str, Any]

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEXT = "TEXT"  # where a body has its prompt

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {**SCHEMA, "properties": {"a": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
OTHER_TOOL = {"type": "function", "function": {**FUNCTION, "name": "wait"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": "x"}'}}
FLAT_TOOL = {"type": "function", **FUNCTION}
FLAT_CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": "x"}'}
CLAUDE_TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CLAUDE_CALL = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": "x\n\u00e9", "n": 1.5}}


def user(content: Any = TEXT) -> Json:
    return {"role": "user", "content": content}


def assistant(content: Any = "Fine.") -> Json:
    return {"role": "assistant", "content": content}


def chat(*more: Json, **fields: Any) -> tuple[str, Json]:
    return CHAT, {"messages": [user(), *more], "max_tokens": 8, "temperature": 0, **fields}


def completions(**fields: Any) -> tuple[str, Json]:
    return COMPLETIONS, {"prompt": TEXT, "max_tokens": 8, "temperature": 0, **fields}


def native(**fields: Any) -> tuple[str, Json]:
    return NATIVE, {"prompt": TEXT, "n_predict": 8, "temperature": 0, **fields}


def responses(*more: Json, **fields: Any) -> tuple[str, Json]:
    asked = [user(), *more] if more else TEXT
    return RESPONSES, {"input": asked, "max_output_tokens": 8, "temperature": 0, **fields}


def messages(*more: Json, **fields: Any) -> tuple[str, Json]:
    return MESSAGES, {"messages": [user(), *more], "max_tokens": 8, "temperature": 0, **fields}


CASES: dict[str, tuple[str, Json]] = {
    "chat": chat(),
    "chat without v1": ("/chat/completions", chat()[1]),
    "system": chat(messages=[{"role": "system", "content": "Be brief."}, user()]),
    "developer": chat(messages=[{"role": "developer", "content": "Be brief."}, user()]),
    "turns": chat(assistant(), user("And now?")),
    "parts": chat(messages=[user([{"type": "text", "text": TEXT}, {"type": "text", "text": "And?"}])]),
    "usage": chat(stream_options={"include_usage": True}),
    "no usage": chat(stream_options={"include_usage": False}),
    "tools": chat(tools=[TOOL]),
    "tools forced": chat(tools=[TOOL], tool_choice="required", max_tokens=60),
    "tools off": chat(tools=[TOOL], tool_choice="none"),
    "parallel calls": chat(tools=[TOOL, OTHER_TOOL], parallel_tool_calls=True, tool_choice="required", max_tokens=60),
    "results": chat(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        tools=[TOOL],
    ),
    "json object": chat(response_format={"type": "json_object"}, max_tokens=24),
    "json schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, max_tokens=24
    ),
    "grammar": chat(grammar='root ::= "yes" | "no"'),
    "logprobs": chat(logprobs=True, top_logprobs=3),
    "stop": chat(stop=["e", "a"]),
    "stop string": chat(stop="e"),
    "seed": chat(seed=7, temperature=1.0),
    "sampling": chat(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=3, presence_penalty=0.5),
    "samplers": chat(samplers=["top_k", "temperature"], seed=1, temperature=1.0, repeat_penalty=1.1),
    "bias": chat(logit_bias={"40": 5}),
    "thinking off": chat(chat_template_kwargs={"enable_thinking": False}),
    "reasoning format": chat(reasoning_format="none"),
    "reasoning effort": chat(reasoning_effort="low"),
    "prefill": chat(assistant("Well,")),
    "no prompt": chat(add_generation_prompt=False),
    "one token": chat(max_tokens=1),
    "no tokens": chat(max_tokens=0),
    "completion tokens": chat(max_tokens=None, max_completion_tokens=5),
    "timings": chat(timings_per_token=True),
    "verbose": chat(verbose=True),
    "ids back": chat(return_tokens=True),
    "unknown fields": chat(x_own={"deep": [1, {"usage": None}]}, user="u", metadata={"a": "b"}, store=False),
    "own slot": chat(id_slot=0, cache_prompt=True),
    "unicode": chat(messages=[user(TEXT + ' \u00e9\u4f60\U0001f469\u200d\U0001f4bb <|im_end|> \\n "quoted" \u2028')]),
    "completions": completions(),
    "completions logprobs": completions(logprobs=2),
    "completions echo": completions(echo=True),
    "completions stop": completions(stop=["e"]),
    "completions usage": completions(stream_options={"include_usage": True}),
    "completions schema": completions(json_schema=SCHEMA, max_tokens=24),
    "completions list": completions(prompt=[TEXT]),
    "native": native(),
    "native alias": ("/completions", native()[1]),
    "native probs": native(n_probs=3),
    "native probs after": native(n_probs=2, post_sampling_probs=True),
    "native tokens": native(return_tokens=True),
    "native schema": native(json_schema=SCHEMA, n_predict=24),
    "native grammar": native(grammar='root ::= "yes"'),
    "native stop": native(stop=["e"]),
    "native fields": native(response_fields=["content", "timings"]),
    "native ignore": native(ignore_eos=True, t_max_predict_ms=60_000, n_keep=4),
    "responses": responses(),
    "responses alias": ("/responses", responses()[1]),
    "responses instructions": responses(instructions="Be brief."),
    "responses turns": responses(
        {"type": "message", **assistant([{"type": "output_text", "text": "Fine.", "annotations": []}])}, user("So?")
    ),
    "responses tools": responses(tools=[FLAT_TOOL]),
    "responses forced": responses(tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=60),
    "responses results": responses(
        FLAT_CALL, {"type": "function_call_output", "call_id": "c1", "output": "3"}, tools=[FLAT_TOOL]
    ),
    "responses effort": responses(reasoning={"effort": "low"}),
    "responses thoughts": responses(
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}, user("So?")
    ),
    "responses format": responses(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    "responses extras": responses(store=False, metadata={"a": "b"}, truncation="auto", parallel_tool_calls=True),
    "messages": messages(),
    "messages system": messages(system="Be brief."),
    "messages blocks": messages(system=[{"type": "text", "text": "Be.", "cache_control": {"type": "ephemeral"}}]),
    "messages parts": messages(messages=[user([{"type": "text", "text": TEXT}, {"type": "text", "text": "And?"}])]),
    "messages turns": messages(assistant(), user("And now?")),
    "messages tools": messages(tools=[CLAUDE_TOOL]),
    "messages forced": messages(tools=[CLAUDE_TOOL], tool_choice={"type": "any"}, max_tokens=60),
    "messages results": messages(
        assistant([{"type": "text", "text": "I look."}, CLAUDE_CALL]),
        user([{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}]),
        tools=[CLAUDE_TOOL],
    ),
    "messages thoughts": messages(
        assistant([{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "So."}]),
        user("?"),
    ),
    "messages thinking": messages(thinking={"type": "enabled", "budget_tokens": 1024}),
    "messages stop": messages(stop_sequences=["e"]),
    "messages sampling": messages(top_k=5, top_p=0.5, metadata={"user_id": "u"}),
}
# What is one engine's alone, or answered by the decode engine in any case.
LOCAL: dict[str, tuple[str, Json]] = {
    "progress": chat(return_progress=True),
    "native progress": native(return_progress=True),
    "two answers": chat(n=2, seed=3),
    "no reuse": chat(cache_prompt=False),
    "lora": native(lora=[]),
}
STREAMS = (False, True)
REFUSED: dict[str, tuple[str, Json]] = {
    "no messages": (CHAT, {"max_tokens": 3}),
    "odd messages": (CHAT, {"messages": "hi"}),
    "odd role": (CHAT, {"messages": [{"content": "x"}]}),
    "bad grammar": chat(grammar="root ::= ("),
    "both formats": chat(grammar='root ::= "a"', json_schema=SCHEMA),
    "picture": chat(messages=[user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}])]),
    "no prompt": (COMPLETIONS, {"max_tokens": 3}),
    "no input": (RESPONSES, {"max_output_tokens": 3}),
    "odd item": responses({"type": "item_reference", "id": "x"}),
    "previous": responses(previous_response_id="resp_1"),
    "no messages at all": (MESSAGES, {"max_tokens": 3}),
    "bad ids": native(prompt=[1, 2, 999_999]),
    "too long": native(prompt=[5] * 9000),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    with served(tmp_path_factory.mktemp("served")) as everything:
        yield everything


def written(body: Json, text: str) -> Json:
    """The body with its prompt in its place."""
    filled: Json = json.loads(json.dumps(body).replace(TEXT, text))
    return filled


# What differs between any two answers: random names, times, and how long things took.
CHANGING = (
    (rb'"(id|item_id|call_id|tool_call_id|tool_use_id)":"(\w+?[-_])?\w{24,32}"', rb'"\1":"\2"'),
    (rb'"(created|created_at|completed_at)":\d+', rb'"\1":0'),
    (rb'"(\w+_ms|\w+_per_second)":[-+.\de]+', rb'"\1":0'),
)
# What a handover changes on purpose: how much was reused, counted for both engines, and its costs.
COUNTED = (
    (rb'"(cache_n|prompt_n|cached_tokens|cache_read_input_tokens)":\d+', rb'"\1":0'),
    (rb'("cache_read_input_tokens":0,"input_tokens"):\d+', rb"\1:0"),
    (rb',"split":\{[^}]*\}', b""),
)


def steady(answer: Raw, *, handed_over: bool) -> tuple[int, str, bytes]:
    """An answer without what may differ."""
    body = answer.body
    for pattern, instead in (*CHANGING, *(COUNTED if handed_over else ())):
        body = re.sub(pattern, instead, body)
    return answer.status, answer.headers["Content-Type"], body


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
@pytest.mark.parametrize("case", [*CASES, *LOCAL])
def test_a_short_prompt_is_answered_as_by_the_engine(place: Served, case: str, stream: bool) -> None:
    """What the decode engine answers by itself reaches the client byte for byte."""
    path, body = {**CASES, **LOCAL}[case]
    body = written({**body, "stream": stream}, words(12, (case, stream)))
    place.forget()
    expected, answer = post(place.alone + path, body), post(place.url + path, body)
    assert answer.headers["X-Splitproxy-Route"] == "local"
    assert steady(answer, handed_over=False) == steady(expected, handed_over=False)


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_a_long_prompt_is_answered_as_by_the_engine(place: Served, case: str, stream: bool) -> None:
    """A handed-over answer is the decode engine's own after all tokens but the last, apart from what was reused."""
    path, body = CASES[case]
    body = written({**body, "stream": stream}, words(FLOOR + 100, (case, stream, "long")))
    place.forget()
    expected, answer = place.own_answer(path, body), post(place.url + path, body)
    assert answer.headers["X-Splitproxy-Route"] == "handover"
    assert "X-Splitproxy-Fallback" not in answer.headers
    assert steady(answer, handed_over=True) == steady(expected, handed_over=True)


COUNTERS = {RESPONSES: "/v1/responses/input_tokens", MESSAGES: "/v1/messages/count_tokens"}


@pytest.mark.parametrize("case", [case for case, (path, _) in CASES.items() if path in COUNTERS])
def test_translated_bodies_have_the_ids_that_the_engine_reads(place: Served, case: str) -> None:
    """The ids made of a Responses or Messages body are those in the slot after it, and as many as the engine counts."""
    path, body = CASES[case]
    body = written(body, words(60, case))
    chat = read_ask(path, json.dumps(body).encode()).chat
    assert chat is not None
    text = json.loads(post(f"{place.alone}/apply-template", chat).body)["prompt"]
    asked = {"content": text, "add_special": True, "parse_special": True}
    ids = json.loads(post(f"{place.alone}/tokenize", asked).body)["tokens"]
    assert ids == place.tokens(path, body)
    assert json.loads(post(place.url + COUNTERS[path], body).body)["input_tokens"] == len(ids)


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_the_engines_own(place: Served, case: str, stream: bool) -> None:
    """What the engine refuses is refused with its status and its words, long or short."""
    path, body = REFUSED[case]
    body = written({**body, "stream": stream}, words(FLOOR + 100, case))
    expected, answer = post(place.alone + path, body), post(place.url + path, body)
    assert answer.status >= 400
    assert steady(answer, handed_over=False) == steady(expected, handed_over=False)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"one","n_predict":4,"n_predict":2,"temperature":0}',
        b'\xef\xbb\xbf{"prompt":"one","n_predict":2,"temperature":0}',
        b' \n{ "temperature":0.0e0 , "n_predict":2, "prompt":"\\u0041\\ud83d\\ude00\\/ \\u0000." }\r\n\t ',
        b'{"prompt":"one","n_predict":2,"temperature":0,"x":123456789012345678901234567890}',
        b'{"prompt":"\xc3\xa9\xe2\x80\xa8\xf0\x9f\x98\x80","n_predict":2,"temperature":0,"z":-0.0}',
        b'{"zz":{"usage":{"prompt_tokens":3}},"prompt":"one","n_predict":2,"temperature":0}',
    ],
    ids=["twice", "mark", "spaces", "huge", "utf-8", "figures"],
)
def test_an_odd_body_means_the_same_to_the_engine(place: Served, body: bytes) -> None:
    """Keys that come twice, escapes, white space and numbers beyond 64 bits reach the engine as they were written."""
    place.forget()
    expected, answer = post(place.alone + NATIVE, body), post(place.url + NATIVE, body)
    assert steady(answer, handed_over=False) == steady(expected, handed_over=False)
