"""A request's good ways: which engine reads it, what each engine gets, and what the client gets."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from splitproxy.model import PairState
from tests import fake_engine
from tests.fake_engine import FakeEngine
from tests.harness import (
    ANSWER_TOKENS,
    CHAT,
    COMPLETIONS,
    EVERY_API,
    FLOOR,
    MESSAGES,
    NATIVE,
    RESPONSES,
    SPLITTABLE,
    body,
    prompt_ids,
    proxy,
    right_text,
    until,
    words,
)

Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

LONG = words(3 * FLOOR)
KEY = "sk-of-a-client-0123456789"
EVERY_WAY = [(path, stream) for path in (*EVERY_API, "/chat/completions", "/completions") for stream in (False, True)]


async def pair(fake: Start, **options: Any) -> tuple[FakeEngine, FakeEngine]:
    """A prefill and a decode engine."""
    return await fake(), await fake(**options)


# ---- handed over ----


@pytest.mark.parametrize(("path", "stream"), EVERY_WAY)
async def test_a_long_prompt_is_read_by_one_engine_and_answered_by_the_other(
    fake: Start, path: str, stream: bool
) -> None:
    """Each API's long prompt is read, saved, restored and answered with the text of an engine that did it all."""
    reader, writer = await pair(fake)
    asked = body(path, LONG, stream=stream)
    count = len(prompt_ids(asked))
    async with proxy(reader, writer) as p:
        reply = await p.ask(path, asked)
        record = await p.record(reply)
    assert (reply.status, reply.way, reply.text) == (200, ("handover", "worth_moving"), right_text(asked))
    assert reply.streamed is stream
    assert [step for step in reader.steps() if step != "erase"] == ["prefill", "save"]
    assert writer.steps()[-2:] == ["restore", "decode"]
    assert (reader.sent("prefill")[0].read, writer.sent("decode")[0].read) == (count - 1, 1)
    assert reader.sent("prefill")[0].body["prompt"] == prompt_ids(asked)[:-1]
    assert (record.path, record.effective, record.failure) == ("handover", True, None)


async def test_a_prompt_of_token_ids_is_handed_over_without_being_tokenized(fake: Start) -> None:
    """A prompt that comes as ids is read as these ids, on both engines."""
    reader, writer = await pair(fake)
    asked = {"prompt": prompt_ids(body(NATIVE, LONG)), "n_predict": ANSWER_TOKENS}
    async with proxy(reader, writer) as p:
        reply = await p.ask(NATIVE, asked)
    assert (reply.way, reply.text) == (("handover", "worth_moving"), right_text(asked))
    assert "tokenize" not in writer.steps()


async def test_a_chat_of_content_parts_is_handed_over(fake: Start) -> None:
    """Text in parts is text."""
    reader, writer = await pair(fake)
    parts = [{"type": "text", "text": text} for text in (LONG[:500], LONG[500:])]
    asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": ANSWER_TOKENS}
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, asked)
    assert (reply.way, reply.text) == (("handover", "worth_moving"), right_text(body(CHAT, LONG)))


@pytest.mark.parametrize("memory", ["sliding", "hybrid"])
async def test_other_kinds_of_memory_are_handed_over(fake: Start, memory: str) -> None:
    """Sliding-window and hybrid models answer from a moved session, reading a few tokens again at most."""
    reader, writer = await fake(memory=memory), await fake(memory=memory)
    asked = body(CHAT, LONG)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, asked)
        record = await p.record(reply)
    assert (reply.text, record.effective) == (right_text(asked), True)
    assert writer.sent("decode")[0].read <= 6


async def test_the_headers_tell_the_way(fake: Start) -> None:
    """Every answer names its route, reason, engine and request; a handover tells its costs as well."""
    reader, writer = await pair(fake)
    costs = {f"X-Splitproxy-{name}" for name in ("Prefill-Ms", "Save-Ms", "Restore-Ms", "Session-Bytes")}
    async with proxy(reader, writer) as p:
        moved, short = await p.long(), await p.ask(CHAT, body(CHAT, "short"))
        record = await p.record(short)
    assert costs <= moved.headers.keys()
    assert int(moved.headers["X-Splitproxy-Session-Bytes"]) > 1000
    assert not costs & short.headers.keys()
    assert (short.way, short.headers["X-Splitproxy-Engine"]) == (("local", "too_short"), "writer")
    assert short.headers["X-Request-Id"] == record.request_id != moved.headers["X-Request-Id"]
    assert "X-Splitproxy-Fallback" not in moved.headers


@pytest.mark.parametrize("prompt", [LONG, "short"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_body_reaches_the_decode_engine_as_it_was_written(fake: Start, prompt: str, stream: bool) -> None:
    """Nothing of a client's body changes but the pin at its end: not spaces, not order, not unknown fields."""
    reader, writer = await pair(fake)
    head = b'{ "zz_unknown" : [1.0, {"deep": null}],\n\t"max_tokens":3, "seed": 1e3, "stream": %s,' % (
        b"true" if stream else b"false"
    )
    sent = head + b' "messages": [{"role":"user", "content": "\\u00e4 %s"}]  ' % prompt.encode()
    async with proxy(reader, writer) as p:
        assert (await p.ask(CHAT, sent + b"}\n")).status == 200
    assert writer.sent("decode")[0].raw == sent + b',"id_slot":0,"cache_prompt":true}\n'


async def test_a_slot_of_the_clients_choice_is_overruled(fake: Start) -> None:
    """The proxy alone chooses slots."""
    reader, writer = await pair(fake, slots=2)
    async with proxy(reader, writer) as p:
        await p.long()
        used = writer.sent("decode")[0].slot
        assert (await p.long(seed="another", id_slot=used)).way == ("handover", "worth_moving")
    assert [call.slot == used for call in writer.sent("decode")] == [True, False]


@pytest.mark.parametrize("path", SPLITTABLE)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_figures_are_those_of_the_whole_request(fake: Start, path: str, stream: bool) -> None:
    """Timings and usage count both engines, and a split object beside them says what the handover cost."""
    reader, writer = await pair(fake)
    asked = body(path, LONG, stream=stream, stream_options={"include_usage": True})
    count = len(prompt_ids(asked))
    async with proxy(reader, writer) as p:
        reader.knobs.read_tps = 20_000
        reply = await p.ask(path, asked)
        record = await p.record(reply)
    split, timings = reply.last("split"), reply.timings
    assert record.handover is not None
    assert split == {
        "prefill_ms": record.handover.prefill_ms,
        "save_ms": record.handover.save_ms,
        "restore_ms": record.handover.restore_ms,
        "bytes": record.handover.session_bytes,
    }
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, count, ANSWER_TOKENS)
    assert timings["prompt_ms"] > split["prefill_ms"] > 1000 * (count - 1) / 20_000
    if path != NATIVE:
        usage = reply.last("usage")
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (count, 0)
        assert usage["completion_tokens"] == ANSWER_TOKENS


async def test_tokens_that_the_prefill_engine_held_count_as_cached(fake: Start) -> None:
    """What neither engine read is what the client is told was cached."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer, split={"policy": "always"}) as p:
        await p.ask(NATIVE, body(NATIVE, LONG))
        longer = body(NATIVE, LONG + words(500, "more"))
        reply = await p.ask(NATIVE, longer)
    assert reply.timings["cache_n"] == len(LONG) - 1
    assert reply.timings["cache_n"] + reply.timings["prompt_n"] == len(prompt_ids(longer))


# ---- kept on the decode engine ----


@pytest.mark.parametrize("stream", [False, True])
async def test_the_second_turn_is_warm(fake: Start, stream: bool) -> None:
    """The next turn of a chat is read where the chat is, and only what is new of it."""
    reader, writer = await pair(fake)
    first = body(CHAT, LONG, stream=stream)
    async with proxy(reader, writer) as p:
        answer = await p.ask(CHAT, first)
        turn = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        second = {**first, "messages": [*first["messages"], *turn]}
        reply = await p.ask(CHAT, second)
    assert (reply.way, reply.text) == (("local", "warm"), right_text(second))
    held = len(prompt_ids(first)) + ANSWER_TOKENS - 1
    assert writer.sent("decode")[1].cached == held
    assert reply.timings["prompt_n"] == len(prompt_ids(second)) - held
    assert len(reader.sent("prefill")) == 1


async def test_a_conversation_keeps_its_slot(fake: Start) -> None:
    """Conversations that take turns are each continued where they are."""
    reader, writer = await pair(fake, slots=2)
    chats = [body(CHAT, words(3 * FLOOR, seed)) for seed in "ab"]
    async with proxy(reader, writer) as p:
        for chat in chats:
            await p.ask(CHAT, chat)
        for chat in chats:
            reply = await p.ask(CHAT, {**chat, "messages": [*chat["messages"], {"role": "user", "content": "More."}]})
            assert reply.way == ("local", "warm")
    used = [call.slot for call in writer.sent("decode")]
    assert (set(used[:2]), used[2:]) == ({0, 1}, used[:2])


async def test_a_short_prompt_is_answered_before_it_is_tokenized(fake: Start) -> None:
    """A body that cannot reach the floor costs no tokenizing before its answer."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, "Hello."))
        await p.settled()
    assert (reply.way, reply.text) == (("local", "too_short"), right_text(body(CHAT, "Hello.")))
    assert (writer.steps()[0], reader.steps()) == ("decode", [])


async def test_a_long_body_with_a_short_prompt_stays(fake: Start) -> None:
    """It is the tokens that count, not the bytes of the body."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, "Hello.", metadata=LONG))
    assert (reply.way, reader.steps()) == (("local", "too_short"), [])


PICTURE = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    ("path", "asked", "status"),
    [
        (CHAT, {"messages": [{"role": "user", "content": PICTURE}]}, 500),
        (CHAT, body(CHAT, LONG, n=2), 200),
        (NATIVE, body(NATIVE, LONG, cache_prompt=False), 200),
        (NATIVE, body(NATIVE, LONG, lora=[{"id": 0, "scale": 0.5}]), 200),
        (COMPLETIONS, {"prompt": [LONG, 5]}, 200),
        (MESSAGES, {"messages": [{"role": "user", "content": [*PICTURE[:1], {"type": "search_result"}]}]}, 500),
        (RESPONSES, {"input": [{"role": "assistant", "content": LONG}]}, 200),
        ("/infill", {"input_prefix": LONG, "input_suffix": ""}, 404),
    ],
    ids=["picture", "n", "cache_prompt", "lora", "mixed prompt", "messages", "responses", "infill"],
)
async def test_what_cannot_be_split_goes_to_the_decode_engine_alone(
    fake: Start, path: str, asked: Json, status: int
) -> None:
    """Pictures, several answers, adapters and foreign prompts are answered by one engine, as it answers."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(path, asked)
    assert (reply.status, reply.way, reader.steps()) == (status, ("local", "not_splittable"), [])


async def test_a_client_may_ask_for_no_reuse(fake: Start) -> None:
    """cache_prompt = false is a wish about the answer, and stays as it is."""
    reader, writer = await pair(fake)
    asked = body(NATIVE, "Again.", cache_prompt=False)
    async with proxy(reader, writer) as p:
        await p.ask(NATIVE, asked)
        await p.ask(NATIVE, asked)
    assert [call.cached for call in writer.sent("decode")] == [0, 0]


@pytest.mark.parametrize(
    ("policy", "prompt", "way"),
    [
        ("never", LONG, ("local", "disabled")),
        ("always", "A few words.", ("handover", "forced")),
        ("always", "x", ("handover", "forced")),
    ],
)
async def test_the_policy_decides_over_the_threshold(
    fake: Start, policy: str, prompt: str, way: tuple[str, str]
) -> None:
    """never moves nothing, and always moves all that there is to move."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer, split={"policy": policy}) as p:
        reply = await p.ask(CHAT, body(CHAT, prompt))
    assert (reply.way, reply.text) == (way, right_text(body(CHAT, prompt)))


async def test_a_prompt_of_one_token_has_nothing_to_move(fake: Start) -> None:
    """The last token is the decode engine's in any case."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer, split={"policy": "always"}) as p:
        reply = await p.ask(NATIVE, body(NATIVE, "x"))
    assert reply.way == ("local", "too_short")


async def test_no_prefill_engine_is_a_plain_proxy(fake: Start) -> None:
    """Without a prefill engine everything is answered where it comes."""
    writer = await fake()
    async with proxy(None, writer) as p:
        reply = await p.long()
    assert (reply.status, reply.way) == (200, ("local", "disabled"))


# ---- everything else ----


async def test_other_calls_are_passed_through(fake: Start) -> None:
    """What is no completion is the decode engine's own answer, unchanged, and needs no slot."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        for path in ("/v1/models", "/props"):
            async with p.http.get(writer.url + path) as own:
                assert (await p.get(path)).content == await own.read()
        text = json.dumps({"content": "Hello."}).encode()
        reply = await p.ask("/tokenize?x=%2F", text, X_Extra="1")
        assert reply.json == {"tokens": list(b"Hello.")}
        assert (await p.get("/no/such%20thing")).json["error"]["type"] == "not_found_error"
    call = writer.sent("tokenize")[-1]
    assert (call.raw, call.query, call.headers["x-extra"]) == (text, {"x": "/"}, "1")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/slots"),
        ("POST", "/slots/0?action=erase"),
        ("POST", "/slots/0?action=save"),
        ("POST", "/%73lots/0?action=erase"),
        ("POST", "/slots%2F0?action=erase"),
        ("POST", "//slots//0?action=restore"),
        ("POST", "/v1/../slots/0?action=erase"),
        ("POST", "/SLOTS/0?action=erase"),
        ("POST", "/props"),
        ("POST", "/lora-adapters"),
        ("POST", "/models/load"),
        ("DELETE", "/v1/stream?conv_id=1"),
        ("GET", "/v1/stream?conv_id=1"),
    ],
)
async def test_administration_is_refused(fake: Start, method: str, path: str) -> None:
    """No client reaches an engine's administration, however it spells the path."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        host, port = p.host
        connection = await asyncio.open_connection(host, port)
        connection[1].write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        head = await connection[0].readuntil(b"\r\n\r\n")
        connection[1].close()
    assert head.startswith(b"HTTP/1.1 403")
    assert not [call for call in writer.calls if call.path.lower().strip("/").startswith("slots") and call.query]


async def test_an_unknown_call_gets_the_engine_to_itself(fake: Start) -> None:
    """A call that may take a slot by itself waits until nobody else is there."""
    reader, writer = await pair(fake, slots=2)
    async with proxy(reader, writer) as p:
        writer.knobs.decode.stall_after = 3
        stream = asyncio.create_task(p.ask(CHAT, body(CHAT, "Go on.", stream=True)))
        await p.at_work(writer, "decode")
        unknown = asyncio.create_task(p.ask("/v1/embeddings", {"input": "x"}))
        await until(lambda: p.proxy.admission.waiting == 1)
        assert not [call for call in writer.calls if call.path == "/v1/embeddings"]
        writer.knobs.decode.stall_after = None
        stream.cancel()
        assert (await unknown).status == 404
        assert (await p.long()).status == 200


@pytest.mark.parametrize("prompt", [LONG, "short"])
async def test_what_belongs_to_one_hop_stays_there(fake: Start, prompt: str) -> None:
    """Keys, hop headers and the header that would keep a lost stream running do not reach an engine."""
    reader, writer = await pair(fake)
    sent = {"X_Conversation_Id": "1", "Authorization": "Bearer abc", "X_Api_Key": "abc", "Accept_Encoding": "br"}
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, prompt), **sent, traceparent="00-1-2-01")
    assert (reply.status, reply.headers.getall("Server")) == (200, ["splitproxy"])  # type: ignore[attr-defined]
    headers = writer.sent("decode")[0].headers
    assert not {"x-conversation-id", "authorization", "x-api-key", "accept-encoding"} & headers.keys()
    assert headers["traceparent"] == "00-1-2-01"


@pytest.mark.parametrize("name", ["kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"])
async def test_control_fields_are_refused(fake: Start, name: str) -> None:
    """A field by which a client could reach another conversation is no client's to set."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, "Hello.", **{name: 1}))
    assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
    assert name in reply.json["error"]["message"]
    assert writer.steps() == []


async def test_keys_are_asked_for(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys configured nothing but health and metrics is to be had without one, in either header."""
    reader, writer = await pair(fake)
    reader.knobs.api_key = writer.knobs.api_key = "engine-key"
    monkeypatch.setenv("ENGINE_KEY", "engine-key")
    engines = [
        {"name": name, "role": role, "url": engine.url, "api_key_env": "ENGINE_KEY"}
        for name, role, engine in (("reader", "prefill", reader), ("writer", "decode", writer))
    ]
    async with proxy(reader, writer, api_keys=[KEY, "other"], engines=engines) as p:
        for headers in ({}, {"Authorization": "Bearer nope"}, {"X_Api_Key": KEY[:-1]}, {"Authorization": KEY}):
            refused = await p.ask(CHAT, body(CHAT, "Hi."), **headers)
            assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
        assert (await p.get("/splitproxy/status")).status == (await p.get("/v1/models")).status == 401
        assert (await p.get("/health")).status == (await p.get("/metrics")).status == 200
        for headers in ({"Authorization": f"Bearer {KEY}"}, {"X_Api_Key": KEY}, {"Authorization": "bearer other"}):
            assert (await p.ask(CHAT, body(CHAT, LONG), **headers)).status == 200
        assert writer.sent("decode")[0].headers["authorization"] == "Bearer engine-key"


async def test_nothing_private_is_told(fake: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts, answers and keys are in no log, no metric and no status, whether a request ends well or not."""
    caplog.set_level(logging.DEBUG)
    reader, writer = await pair(fake)
    prompt = words(3 * FLOOR, "xyzzy")
    asked = body(CHAT, prompt)
    key = {"Authorization": f"Bearer {KEY}"}
    async with proxy(reader, writer, api_keys=[KEY]) as p:
        await p.ask(CHAT, asked, **key)
        await p.ask(CHAT, body(CHAT, "xyzzy"), **key)
        await p.ask(CHAT, b'{"xyzzy": ' + prompt.encode(), **key)
        writer.knobs.tokenize.fail = writer.knobs.template.fail = (500, f"cannot read {prompt}")
        await p.ask(CHAT, body(CHAT, words(3 * FLOOR, "xyzzy 2")), **key)
        writer.knobs.decode.fail = (400, f"cannot read {prompt}")
        await p.ask(CHAT, asked, **key)
        told = (await p.get("/metrics", **key)).content + (await p.get("/splitproxy/status", **key)).content
    lines = [record.getMessage() for record in caplog.records if not record.name.startswith("asyncio")]
    everything = told.decode() + "\n".join(lines)
    assert "handover" in everything
    for secret in ("xyzzy", right_text(asked), KEY):
        assert secret not in everything


async def test_one_line_tells_a_request(fake: Start, caplog: pytest.LogCaptureFixture) -> None:
    """Each request has one log line, with its route, its tokens and what the handover cost."""
    caplog.set_level(logging.INFO, "splitproxy.access")
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.long()
        await p.record(reply)
    (line,) = [r.getMessage() for r in caplog.records if reply.headers["X-Request-Id"] in r.getMessage()]
    assert "200 ok, handover (worth_moving) on writer, " in line
    assert all(word in line for word in ("MiB saved in", "restored in", "reused", "read 1, wrote 12", "total"))


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("/v1/chat/completions", b"{", "chat, 400 error"),
        ("/slots/0?action=erase", {}, "other, 403 error"),
        ("/tokenize", {"content": "hello"}, "other, 200 ok, passed on to writer"),
        ("/v1/models", None, "other, 200 ok, passed on to writer"),
    ],
)
async def test_what_is_refused_or_passed_on_has_its_line_too(
    fake: Start, caplog: pytest.LogCaptureFixture, path: str, asked: Json | bytes | None, words: str
) -> None:
    """No request goes without its one line, wherever it ended."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        caplog.set_level(logging.INFO, "splitproxy.access")
        reply = await (p.get(path) if asked is None else p.ask(path, asked))
        await until(lambda: any(reply.headers["X-Request-Id"] in r.getMessage() for r in caplog.records))
    (line,) = [r.getMessage() for r in caplog.records if reply.headers["X-Request-Id"] in r.getMessage()]
    assert words in line


async def test_status_and_health_tell_the_pair(fake: Start) -> None:
    """Engines, pairs, books and the last requests are there to look at."""
    reader, writer = await pair(fake, slots=2, context=8192)
    async with proxy(reader, writer) as p:
        await p.record(await p.long())
        await p.settled()
        status, health = (await p.get("/splitproxy/status")).json, await p.get("/health")
        assert p.pair() == (PairState.PROVEN, "")
    assert health.json == {"status": "ok", "engines": {"reader": "ready", "writer": "ready"}}
    assert [engine["state"] for engine in status["engines"]] == ["ready", "ready"]
    assert status["engines"][1]["slots"] == {"free": 2, "busy": 0, "holding": 1}
    assert status["usable_context"] == 8192
    assert (status["pairs"][0]["state"], status["pairs"][0]["fault"]) == ("proven", None)
    assert (status["leases"], status["queue"]["waiting"], status["session_bytes"]["in_flight"]) == (0, 0, 0)
    assert (status["last_requests"][0]["route"], status["last_requests"][0]["effective"]) == ("handover", True)


# ---- as it comes ----


@pytest.mark.parametrize("path", SPLITTABLE)
@pytest.mark.parametrize("prompt", [LONG, "short"])
@pytest.mark.parametrize("odd", [False, True])
async def test_what_was_written_is_passed_on_at_once(fake: Start, path: str, prompt: str, odd: bool) -> None:
    """Each piece of a stream leaves when it comes, whole event or not: nothing waits for what follows."""
    reader, writer = await pair(fake)
    asked = body(path, prompt, stream=True)
    async with proxy(reader, writer) as p:
        writer.knobs.decode.pause_s = 0.02
        writer.knobs.decode.odd_chunks = odd
        reply = await p.ask(path, asked)
    assert reply.text == right_text(asked)
    assert len(reply.pieces) >= ANSWER_TOKENS
    assert reply.times[-1] - reply.times[0] > 0.02 * (ANSWER_TOKENS - 2)


async def test_the_first_tokens_do_not_wait_for_the_rest(fake: Start) -> None:
    """What an engine has said before it falls silent is with the client."""
    reader, writer = await pair(fake)
    asked = body(NATIVE, LONG, stream=True)
    async with proxy(reader, writer) as p:
        writer.knobs.decode.stall_after = 4
        async with p.http.post(p.url + NATIVE, json=asked) as answer:
            seen = b""
            while seen.count(b"\n\n") < 4:
                seen += await answer.content.readany()
        text = "".join(json.loads(part.removeprefix(b"data: "))["content"] for part in seen.split(b"\n\n")[:4])
    assert text == right_text(asked, 4)


@pytest.mark.parametrize("path", SPLITTABLE)
async def test_a_waiting_stream_is_kept_alive(fake: Start, path: str) -> None:
    """While the prefill engine reads, a streaming client has its headers and a comment now and then."""
    reader, writer = await pair(fake)
    asked = body(path, LONG, stream=True)
    async with proxy(reader, writer, keep_alive_s=0.05) as p:
        reader.knobs.read_tps = 4000
        reply = await p.ask(path, asked)
        record = await p.record(reply)
    assert (reply.status, reply.streamed, reply.text) == (200, True, right_text(asked))
    pings = reply.content.index(b"data: ") // len(b":\n\n")
    assert 3 <= pings <= 8
    assert reply.content.startswith(b":\n\n" * pings)
    assert (record.path, record.status) == ("handover", 200)


async def test_a_waiting_messages_stream_is_pinged_in_its_own_words(fake: Start) -> None:
    """Clients of the messages API know an event for this."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer, keep_alive_s=0.05) as p:
        writer.knobs.decode.delay_s = 0.2
        reply = await p.ask("/v1/messages", body(CHAT, "Hello.", stream=True))
    assert reply.content.startswith(b'event: ping\ndata: {"type": "ping"}\n\n')


@pytest.mark.parametrize("prompt", [LONG, "short"])
async def test_no_keep_alive_is_sent_inside_an_event(fake: Start, prompt: str) -> None:
    """An event that is written in parts is never broken by a comment."""
    reader, writer = await pair(fake)
    asked = body(CHAT, prompt, stream=True)
    async with proxy(reader, writer, keep_alive_s=0.01) as p:
        writer.knobs.decode.pause_s = 0.06
        whole = await p.ask(CHAT, asked)
        writer.knobs.decode.odd_chunks = True
        cut = await p.ask(CHAT, asked)
    assert whole.content.count(b":\n\n") >= ANSWER_TOKENS
    for reply in (whole, cut):
        parts = [part for part in reply.content.split(b"\n\n") if part not in (b":", b"", b"data: [DONE]")]
        assert all(json.loads(part.removeprefix(b"data: ")) for part in parts)
        assert reply.text == right_text(asked)


async def test_a_whole_answer_is_not_kept_alive(fake: Start) -> None:
    """A client that does not stream waits for one body and gets nothing before it."""
    reader, writer = await pair(fake)
    asked = body(CHAT, LONG)
    async with proxy(reader, writer, keep_alive_s=0.02) as p:
        reader.knobs.read_tps = 4000
        reply = await p.ask(CHAT, asked)
    assert (reply.content[:1], reply.text) == (b"{", right_text(asked))
    assert int(reply.headers["Content-Length"]) == len(reply.content)


async def test_a_refusal_after_a_keep_alive_is_an_event(fake: Start) -> None:
    """An error that comes when the stream has begun ends it as an error event, in the engine's words."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer, keep_alive_s=0.05) as p:
        writer.knobs.decode.delay_s, writer.knobs.decode.fail = 0.2, (400, "no such thing")
        reply = await p.ask(CHAT, body(CHAT, "Hello.", stream=True))
        record = await p.record(reply)
    assert (reply.status, reply.content[:3]) == (200, b":\n\n")
    assert reply.error == {"code": 400, "message": "no such thing", "type": "invalid_request_error"}
    assert (record.status, record.outcome) == (400, "error")


# ---- progress ----


@pytest.mark.parametrize("path", [*SPLITTABLE, RESPONSES])
async def test_progress_is_one_count_of_both_engines(fake: Start, path: str) -> None:
    """A client that asks for it hears how far its prompt is read: by one engine, then by the other, never less."""
    reader, writer = await pair(fake)
    asked = body(path, LONG, stream=True, return_progress=True)
    count = len(prompt_ids(asked))
    async with proxy(reader, writer) as p:
        reader.knobs.read_tps = 4000
        reply = await p.ask(path, asked)
        record = await p.record(reply)
    told = [event["prompt_progress"] for event in reply.events if "prompt_progress" in event]
    assert (record.path, record.effective, reply.text) == ("handover", True, right_text(asked))
    assert {progress["total"] for progress in told} == {count}
    done = [progress["processed"] for progress in told]
    assert done == sorted(done)
    assert done[0] < count - 1 < done[-1] == count
    assert {progress["cache"] for progress in told} == {0}


async def test_who_does_not_ask_hears_of_no_progress(fake: Start) -> None:
    """Progress is for those who ask for it."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, LONG, stream=True))
    assert b"prompt_progress" not in reply.content


async def test_sixty_events_arrive_as_sixty_reads(fake: Start) -> None:
    """A paced stream is not gathered into bursts."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        writer.knobs.decode.pause_s = 0.02
        reply = await p.ask(CHAT, body(CHAT, "short", stream=True, limit=61))
    assert len(reply.pieces) >= 61
    assert max(piece.count(b'"content":"') for piece in reply.pieces) == 1


@pytest.mark.parametrize("asked", [body(CHAT, LONG, stream=True), {"prompt": 5, "bootstrap_host": "x"}])
async def test_a_browser_may_read_what_begins_before_the_engine_answers(fake: Start, asked: Json) -> None:
    """Kept-alive streams and errors of our own name the page's origin, as the engine's answers do."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer, keep_alive_s=0.05) as p:
        reader.knobs.read_tps = 4000
        reply = await p.ask(CHAT, asked, Origin="http://page.example")
    assert "X-Splitproxy-Route" not in reply.headers
    assert reply.headers["Access-Control-Allow-Origin"] == "http://page.example"


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("OPTIONS", CHAT), ("GET", "/v1/models")])
async def test_who_may_read_an_engines_answer_is_the_engines_matter(
    fake: Start, method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's origin that the engine does not name is not named by the proxy either."""
    monkeypatch.delitem(fake_engine.HEADERS, "Access-Control-Allow-Origin")
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        headers = {"Origin": "http://page.example", "Content-Type": "application/json"}
        data = json.dumps(body(CHAT, "short")) if method == "POST" else None
        async with p.http.request(method, p.url + path, data=data, headers=headers) as answer:
            await answer.read()
            assert "Access-Control-Allow-Origin" not in answer.headers
