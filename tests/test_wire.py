"""What a body asks for, the pin at its end, errors in each API's words, and which headers and paths pass."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitproxy.api import wire
from splitproxy.errors import Fault, RequestError
from splitproxy.model import Api, Ask

CHAT = "/v1/chat/completions"
NATIVE = "/completion"


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})


def native(**fields: Any) -> bytes:
    return orjson.dumps({"prompt": "hi", **fields})


# --- the pin

ODD_BODIES = [
    b'{"prompt":"hi"}',
    b'  {"prompt":"hi"}\n',
    b'{"prompt":"hi"}\r\n \t',
    b"{}",
    b" { } ",
    b"{\n}\n",
    b'{"id_slot":9,"prompt":"hi","id_slot":-1}',
    b'{"id_slot":"3","cache_prompt":null}',
    b'{"cache_prompt":true,"seed":12345678901234567890123}',
    b'{"temperature":0.1000000000000000055,"x":1e-400}',
    b'{"a":{"b":{"c":[{}]}}}',
    b'{"prompt":"}} {{ \\" }"}',
    b'{"prompt":"hi" , "n_predict" : 5 }',
    b'\xef\xbb\xbf{"prompt":"hi"}',
    b'{"prompt":"\\u00e9 \xc3\xa9 \\ud83d\\ude00"}',
    b'{"":0}',
]


def pinned(body: bytes, slot: int = 2) -> bytes:
    return wire.pin(wire.read_ask(NATIVE, body), slot)


@pytest.mark.parametrize("body", ODD_BODIES)
def test_the_pin_is_all_that_is_added(body: bytes) -> None:
    """The client's bytes stay as they are around the pin, and the pin is the last thing in the object."""
    out = pinned(body)
    end = body.rindex(b"}")
    assert out.startswith(body[:end])
    assert out.endswith(body[end:])
    added = out[end : len(out) - len(body[end:])]
    assert added.removeprefix(b",") == b'"id_slot":2,"cache_prompt":true'


@pytest.mark.parametrize("body", ODD_BODIES)
def test_the_pin_wins(body: bytes) -> None:
    """A parser that takes the last of two fields reads our slot, and all of the client's other fields unchanged."""
    before = json.loads(body.removeprefix(b"\xef\xbb\xbf"))
    after = json.loads(pinned(body).removeprefix(b"\xef\xbb\xbf"))
    assert after == {**before, "id_slot": 2, "cache_prompt": True}


@pytest.mark.parametrize(
    ("body", "cache"),
    [(b'{"cache_prompt":false}', False), (b'{"cache_prompt":true}', True), (b'{"cache_prompt":0}', True)],
)
def test_an_answer_without_reuse_stays_one(body: bytes, cache: bool) -> None:
    """A client that switched reuse off keeps it off, and still gets a slot that is free."""
    assert json.loads(pinned(body)) == {"cache_prompt": cache, "id_slot": 2}


TEXT = st.text('a}{"\\,:\u00e9\U0001f600\n', max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(
    fields=st.dictionaries(TEXT | st.sampled_from(["id_slot", "cache_prompt"]), JSON, max_size=4),
    before=st.text(" \t\r\n", max_size=3),
    after=st.text(" \t\r\n", max_size=3),
    indent=st.sampled_from([None, 0, 2]),
)
def test_any_object_can_be_pinned(fields: dict[str, Any], before: str, after: str, indent: int | None) -> None:
    """Whatever the object and its layout, the pinned body is valid JSON with the pin in it."""
    body = (before + json.dumps(fields, indent=indent, ensure_ascii=indent is None) + after).encode()
    cache = {} if fields.get("cache_prompt") is False else {"cache_prompt": True}
    assert json.loads(pinned(body, slot=7)) == {**fields, "id_slot": 7, **cache}


WORDS = st.sampled_from([
    b'{"prompt":"x"}', b'{"messages":[{"role":"user","content":"x"}]', b'"n"', b":", b",", b"{", b"}", b"[", b"]", b'"',
    b"1e999", b"9" * 400, b"-0.0", b"null", b"true", b'"stream"', b'"max_tokens"', b'"prompt"', b'"messages"',
    b'"\\ud800"', b"\xef\xbb\xbf", b"\xff", b"\0", b" ", b"[" * 2000, b'{"a":' * 2000, b'"\\u0000"',
])  # fmt: skip


@given(st.sampled_from(sorted(wire.GENERATING)), st.lists(WORDS | st.binary(max_size=4), max_size=12).map(b"".join))
def test_any_bytes_are_a_request_or_refused(path: str, body: bytes) -> None:
    """Whatever is sent, it can be pinned or it is refused in words that are an error body of the API."""
    try:
        ask = wire.read_ask(path, body)
    except RequestError as error:
        orjson.loads(wire.error_body(wire.GENERATING[path], error.status, str(error), "r1"))
        return
    assert orjson.loads(wire.pin(ask, 3).removeprefix(b"\xef\xbb\xbf"))["id_slot"] == 3


@given(
    st.sampled_from(sorted(wire.GENERATING)),
    st.dictionaries(
        st.sampled_from([
            "messages", "prompt", "input", "n", "n_cmpl", "stream", "max_tokens", "n_predict", "max_output_tokens",
            "cache_prompt", "lora", "return_progress", "system", "instructions", "tools", "max_completion_tokens",
        ]),
        JSON | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70),
        max_size=6,
    ),
)  # fmt: skip
def test_any_fields_are_read(path: str, fields: dict[str, Any]) -> None:
    """Fields of any type are a request; the engine, not the proxy, says what is wrong with them."""
    ask = wire.read_ask(path, json.dumps(fields).encode())
    assert ask.answers >= 0
    assert ask.max_tokens is None or ask.max_tokens >= 0


# --- bodies


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a":1}{"b":2}', "not valid JSON"),
        (b'{"a":1} x', "not valid JSON"),
        (b'{"a":NaN}', "not valid JSON"),
        (b'{"a":1e400}', "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b'\xef\xbb\xbf\xef\xbb\xbf{"a":1}', "not valid JSON"),
        (b"[1]", "an array"),
        (b'"x"', "a string"),
        (b"3", "a number"),
        (b"3.5", "a number"),
        (b"true", "a boolean"),
        (b"null", "null"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, message: str) -> None:
    """What no engine could take is the client's fault, and the message says what it is."""
    with pytest.raises(RequestError, match=message) as caught:
        wire.read_ask(CHAT, body)
    assert caught.value.fault is Fault.INVALID_REQUEST


def test_the_place_of_a_mistake_is_told_and_its_text_is_not() -> None:
    """An error names line and column, and quotes nothing of the body."""
    with pytest.raises(RequestError, match=r"line 2, column \d+") as caught:
        wire.read_ask(CHAT, b'{"messages":\n secret}')
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", wire.CONTROL_FIELDS)
@pytest.mark.parametrize("value", [None, "x", {"a": 1}])
def test_control_fields_are_refused(name: str, value: object) -> None:
    """A client cannot reach into another's handover, not even with an empty field."""
    with pytest.raises(RequestError, match=name) as caught:
        wire.read_ask(CHAT, chat(**{name: value}))
    assert caught.value.fault is Fault.INVALID_REQUEST


def test_control_fields_are_found_however_they_are_written() -> None:
    """An escaped or repeated name is the same name."""
    with pytest.raises(RequestError):
        wire.read_ask(CHAT, b'{"kv\\u005ftransfer_params":{},"messages":[]}')
    with pytest.raises(RequestError):
        wire.read_ask(CHAT, b'{"bootstrap_room":1,"bootstrap_room":2}')


def test_the_body_is_kept_byte_for_byte() -> None:
    """What the client sent is what the ask holds."""
    body = b' {"messages" : [] , "stream":true}\n'
    ask = wire.read_ask(CHAT, body)
    assert (ask.body, ask.path, ask.api, ask.stream) == (body, CHAT, Api.CHAT, True)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_output_tokens": 7}, None),
        ({"n_predict": 8}, 8),
        ({"n_predict": 0}, 0),
        ({"n_predict": -1}, None),
        ({"max_tokens": -1, "n_predict": 9}, None),
        ({"max_tokens": 1, "n_predict": 900}, 900),
        ({"max_tokens": None}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": 5.5}, None),
        ({"max_tokens": True}, None),
    ],
)
def test_the_longest_answer(fields: dict[str, Any], limit: int | None) -> None:
    """The limit of an answer is found under each API's name, and no limit is none."""
    assert wire.read_ask(CHAT, chat(**fields)).max_tokens == limit


@pytest.mark.parametrize(
    ("path", "known"),
    [
        (CHAT, {"max_completion_tokens"}),
        ("/api/chat", {"max_completion_tokens"}),
        ("/v1/responses", {"max_output_tokens"}),
        ("/v1/completions", set()),
        ("/completion", set()),
        ("/v1/messages", set()),
        ("/infill", set()),
    ],
)
def test_of_limits_that_contradict_each_other_the_largest_counts(path: str, known: set[str]) -> None:
    """Whichever of them the engine goes by, what is reserved is enough; one that an API does not know is none."""
    plain = {"max_tokens": 30, "n_predict": 40, "messages": [], "prompt": "x", "input": "x"}
    for name in ("max_completion_tokens", "max_output_tokens"):
        ask = wire.read_ask(path, orjson.dumps({**plain, name: 50}))
        assert ask.max_tokens == (50 if name in known else 40)


@pytest.mark.parametrize(
    ("fields", "stream", "progress", "keeps_cache"),
    [
        ({}, False, False, True),
        ({"stream": True, "return_progress": True}, True, True, True),
        ({"stream": 1, "return_progress": "yes", "cache_prompt": None}, False, False, True),
        ({"stream": False, "cache_prompt": False}, False, False, False),
    ],
)
def test_switches_are_on_only_when_they_are_true(
    fields: dict[str, Any], stream: bool, progress: bool, keeps_cache: bool
) -> None:
    """As for the engine, only true and false count."""
    ask = wire.read_ask(CHAT, chat(**fields))
    assert (ask.stream, ask.progress, ask.keeps_cache) == (stream, progress, keeps_cache)


# --- prompts and obstacles


@pytest.mark.parametrize("path", ["/completion", "/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("prompt", "read", "obstacle"),
    [
        ("hi", "hi", None),
        ("", "", None),
        (["hi"], "hi", None),
        ([1, 2, 3], (1, 2, 3), None),
        ([[1, 2, 3]], (1, 2, 3), None),
        ([0, 2**31 - 1], (0, 2**31 - 1), None),
        ([], None, "prompt"),
        ([[]], None, "prompt"),
        (["a", "b"], None, "prompt"),
        ([[1], [2]], None, "prompt"),
        ([1, "a"], None, "prompt"),
        ([2**31], None, "prompt"),
        ([-1], None, "prompt"),
        ([True], None, "prompt"),
        ([1.0], None, "prompt"),
        (7, None, "prompt"),
        (None, None, "prompt"),
        ({"prompt_string": "x", "multimodal_data": ["..."]}, None, "prompt"),
        ([{"prompt_string": "x"}], None, "prompt"),
    ],
)
def test_prompt_forms(path: str, prompt: object, read: object, obstacle: str | None) -> None:
    """Text and token ids are read in each form that an engine takes; anything else is for the engine alone."""
    ask = wire.read_ask(path, native(prompt=prompt))
    assert (ask.prompt, ask.not_splittable) == (read, obstacle)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2.0}, 2),
        ({"n": 2, "n_cmpl": 3}, 3),
        ({"n": 0}, 1),
        ({"n": "2"}, 1),
        ({"n": None}, 1),
        ({"prompt": ["a"]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2], [3]]}, 3),
        ({"prompt": ["a", [1]], "n": 2}, 4),
        ({"prompt": [{"prompt_string": "a"}, "b"]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [1, "a", "b"]}, 1),
        ({"prompt": []}, 1),
        ({"prompt": None}, 1),
    ],
)
def test_answers_are_counted(fields: dict[str, Any], answers: int) -> None:
    """Each answer takes a slot: several to one prompt, and one or more to each of several prompts."""
    assert wire.read_ask(NATIVE, native(**fields)).answers == answers


def test_a_chat_is_one_prompt() -> None:
    """A field that its API does not know makes no further answers."""
    assert wire.read_ask(CHAT, chat(prompt=["a", "b"], n=2)).answers == 2


def test_no_prompt_is_an_obstacle() -> None:
    """A request without a prompt has nothing to hand over."""
    assert wire.read_ask(NATIVE, b"{}").not_splittable == "prompt"
    assert wire.read_ask(CHAT, b"{}").not_splittable == "messages"


@pytest.mark.parametrize(
    ("messages", "splittable"),
    [
        ([{"role": "user", "content": "hi"}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}, {"text": "ho"}]}], True),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], True),
        ([{"role": "assistant", "content": None, "tool_calls": []}], True),
        ([{"role": "assistant"}], True),
        ([], True),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], False),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}], False),
        ([{"role": "user", "content": ["loose"]}], False),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "video_url"}]}], False),
        ("hi", False),
        (None, False),
        ({"role": "user"}, False),
    ],
)
def test_only_text_is_handed_over(messages: object, splittable: bool) -> None:
    """Pictures and sound have no token ids: such a conversation is the decode engine's alone."""
    ask = wire.read_ask(CHAT, orjson.dumps({"messages": messages}))
    assert (ask.prompt, ask.not_splittable) == (None, None if splittable else "messages")


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({"n": 2}, "n"),
        ({"n": 1}, None),
        ({"n": True}, None),
        ({"n": "2"}, None),
        ({"n_cmpl": 3}, "n"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"cache_prompt": True}, None),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
        ({"lora": []}, None),
        ({"tools": [{"type": "function"}], "response_format": {"type": "json_object"}, "logprobs": True}, None),
    ],
)
def test_features_that_keep_a_request_local(fields: dict[str, Any], obstacle: str | None) -> None:
    """What another engine's session could not serve stays with the decode engine."""
    assert wire.read_ask(CHAT, chat(**fields)).not_splittable == obstacle


@pytest.mark.parametrize("path", wire.GENERATING)
def test_each_generating_path_is_read_as_its_api(path: str) -> None:
    """Every path and alias leads to its API; those without a prompt that is known here are not split."""
    ask = wire.read_ask(path, chat(prompt="hi", input="hi"))
    assert ask.api is wire.GENERATING[path] is wire.api_of(path)
    assert (ask.not_splittable is None) == (ask.api is not Api.OTHER)


# --- paths


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("GET", "/slots", True),
        ("GET", "/slots/0", True),
        ("POST", "/slots/0", True),
        ("POST", "/v1/slots/0", True),
        ("POST", "//slots//0", True),
        ("POST", "/SLOTS/0", True),
        ("POST", "/x/../slots/0", True),
        ("GET", "/v1/stream", True),
        ("DELETE", "/v1/stream", True),
        ("GET", "/props", False),
        ("POST", "/props", True),
        ("PUT", "/Props", True),
        ("GET", "/lora-adapters", False),
        ("POST", "/lora-adapters", True),
        ("GET", "/v1/models", False),
        ("GET", "/models", False),
        ("POST", "/models/load", True),
        ("DELETE", "/models", True),
        ("POST", "/metrics", True),
        ("POST", "/health", True),
        ("POST", "/tools", True),
        ("POST", "/cors-proxy", True),
        ("POST", "/tokenize", False),
        ("POST", "/v1/embeddings", False),
        ("POST", CHAT, False),
        ("OPTIONS", CHAT, False),
        ("GET", "/", False),
        ("GET", "/slotsmachine", False),
    ],
)
def test_administration_is_not_for_clients(method: str, path: str, refused: bool) -> None:
    """Slots are out of reach by any method and spelling; the rest can be looked at, not changed."""
    assert wire.is_administration(method, path) is refused


@pytest.mark.parametrize(
    ("method", "path", "needs_none"),
    [
        ("GET", "/props", True),
        ("HEAD", "/anything", True),
        ("POST", "/tokenize", True),
        ("POST", "/v1/tokenize", True),
        ("POST", "/v1/messages/count_tokens", True),
        ("POST", "/v1/chat/completions/input_tokens", True),
        ("POST", "/v1/embeddings", False),
        ("POST", "/reranking", False),
        ("POST", "/tokenize/", False),
    ],
)
def test_which_requests_leave_slots_alone(method: str, path: str, needs_none: bool) -> None:
    """Only what is known to need no slot gets none; anything unknown has the engine to itself."""
    assert wire.needs_no_slot(method, path) is needs_none


@pytest.mark.parametrize(
    ("path", "api"),
    [("/v1/messages/count_tokens", Api.MESSAGES), ("/props", Api.OTHER), ("/v1/embeddings", Api.OTHER)],
)
def test_errors_of_other_paths_have_a_shape_too(path: str, api: Api) -> None:
    """A path beside a generating one words its errors like it."""
    assert wire.api_of(path) is api


# --- errors


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "unavailable_error"),
        (504, "server_error"),
    ],
)
@pytest.mark.parametrize("api", [api for api in Api if api is not Api.MESSAGES])
def test_errors_as_the_engines_word_them(api: Api, status: int, name: str) -> None:
    """Every API but Messages has the engines' own shape: code, message, type."""
    body = orjson.loads(wire.error_body(api, status, 'why "so"', "r1"))
    assert body == {"error": {"code": status, "message": 'why "so"', "type": name}}


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "api_error"),
    ],
)
def test_errors_as_messages_words_them(status: int, name: str) -> None:
    """Messages has a shape and names of its own, with the request's id."""
    body = orjson.loads(wire.error_body(Api.MESSAGES, status, "why", "r1"))
    assert body == {"type": "error", "error": {"type": name, "message": "why"}, "request_id": "r1"}


# --- headers


def test_what_an_engine_gets() -> None:
    """The client's headers go on, but for those of this hop, its key, and what would change the engine's ways."""
    kept = [("Content-Type", "application/json"), ("traceparent", "00-ab"), ("User-Agent", "x"), ("Accept", "*/*")]
    dropped = [
        ("Host", "proxy"), ("Content-Length", "5"), ("content-encoding", "gzip"), ("Accept-Encoding", "br"),
        ("Transfer-Encoding", "chunked"), ("Connection", "keep-alive"), ("Keep-Alive", "5"), ("TE", "trailers"),
        ("Trailer", "x"), ("Upgrade", "h2c"), ("Proxy-Authorization", "x"), ("Proxy-Connection", "x"),
        ("Expect", "100-continue"), ("Authorization", "Bearer key"), ("X-API-KEY", "key"), ("x-conversation-id", "c"),
    ]  # fmt: skip
    assert wire.to_engine([*dropped, *kept]) == kept


def test_what_a_client_gets() -> None:
    """The engine's headers come back, but for those of its hop and those that this server sets itself."""
    kept = [("Content-Type", "text/event-stream"), ("Set-Cookie", "a"), ("Set-Cookie", "b"), ("Content-Encoding", "br")]
    dropped = [("Content-Length", "5"), ("Date", "x"), ("Server", "llama.cpp"), ("Connection", "close")]
    assert wire.to_client([*kept[:2], *dropped, *kept[2:]]) == kept


@pytest.mark.parametrize("headers", [wire.to_engine, wire.to_client])
def test_headers_that_connection_names_stay_here(headers: Any) -> None:
    """A header that is declared to be of one hop alone is not passed on, however it is written."""
    given = [
        ("X-A", "1"),
        ("CONNECTION", "close, X-a ,x-B"),
        ("x-b", "2"),
        ("connection", "X-C"),
        ("X-c", "3"),
        ("D", "4"),
    ]
    assert headers(iter(given)) == [("D", "4")]


def test_several_prompts_are_spread_by_the_engine() -> None:
    """Without a slot the engine chooses, whatever the client has asked for."""
    body = b'{"prompt":["a","b"],"id_slot":3}'
    out = json.loads(wire.pin(wire.read_ask(NATIVE, body), None))
    assert out == {"prompt": ["a", "b"], "id_slot": -1, "cache_prompt": True}


def test_the_ask_of_a_pin_may_be_any() -> None:
    """The pin depends on the body and the cache switch alone."""
    assert wire.pin(Ask(Api.CHAT, CHAT, b'{"a":"}"} '), 0) == b'{"a":"}","id_slot":0,"cache_prompt":true} '
