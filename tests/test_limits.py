"""Bad input, odd clients and full queues: an answer in the client's own words, never an error of ours, never a hang."""

import asyncio
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from splitproxy.serve import app
from tests.fake_engine import FakeEngine
from tests.harness import CHAT, COMPLETIONS, FLOOR, NATIVE, Reply, Running, body, proxy, right_text, until, words

Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

LONG = words(3 * FLOOR)
SHORT = body(CHAT, "Hello.")
PATHS = [CHAT, COMPLETIONS, NATIVE, "/v1/messages", "/v1/responses"]
MIB = 2**20


def error_of(reply: Reply, path: str) -> Json:
    """The error of an answer, after a look at its shape."""
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.json.get("type") == ("error" if path == "/v1/messages" else None)
    found: Json = reply.json["error"]
    assert path == "/v1/messages" or found["code"] == reply.status
    return found


async def talk(p: Running, *parts: bytes, whole: bool = True) -> bytes:
    """What a client gets that writes these parts, one at a time, and reads to the end, or the head alone."""
    incoming, outgoing = await asyncio.open_connection(*p.host)
    try:
        for part in parts:
            outgoing.write(part)
            await outgoing.drain()
            await p.get("/health")  # by then the proxy has seen the part
        async with asyncio.timeout(5):
            return await (incoming.read() if whole else incoming.readuntil(b"\r\n\r\n"))
    finally:
        outgoing.close()


def raw(method: str, target: str, data: bytes = b"", *lines: str, version: str = "1.1", last: bool = True) -> bytes:
    """A request as its bytes; with the `last` one its connection ends."""
    head = [f"{method} {target} HTTP/{version}", "Host: x", *(["Connection: close"] if last else []), *lines]
    if data and not any(line.lower().startswith(("transfer-encoding", "content-length")) for line in lines):
        head.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*head, "", ""]).encode("latin-1") + data


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def json_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


# ---- bodies ----

NO_REQUESTS = {
    "nothing": b"",
    "blank": b"  \n",
    "cut": b'{"prompt": "x"',
    "array": b"[1]",
    "text": b'"x"',
    "null": b"null",
    "number": b"1e999999",
    "nan": b'{"prompt": NaN}',
    "trailing": b'{"prompt": "x"} {}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "deep": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deeper": b"[" * 1_000_000,
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_no_request_is_refused(fake: Start, path: str) -> None:
    """A body that no engine could read is refused in the API's shape, and reaches none."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        for what, data in NO_REQUESTS.items():
            reply = await p.ask(path, data)
            assert reply.status == 400, what
            assert error_of(reply, path)["type"] == "invalid_request_error"
        assert writer.steps() == reader.steps() == []
        assert (await p.long()).way == ("handover", "worth_moving")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("manner", ["length", "chunked", "gzip"])
async def test_a_body_over_the_limit_is_refused(fake: Start, path: str, manner: str) -> None:
    """The limit holds for what a body unpacks to, however it is sent."""
    reader, writer = await fake(), await fake()
    data = json.dumps(body(CHAT, "x" * 2 * MIB)).encode()
    async with proxy(reader, writer, max_body_mib=1) as p:
        if manner == "length":
            reply = await posted(p, path, io.BytesIO(data))
        elif manner == "gzip":
            reply = await p.ask(path, gzip.compress(data), Content_Encoding="gzip")
        else:
            reply = await posted(p, path, pieces(data, 2**16))
        assert reply.status == 413
        assert error_of(reply, path)["type"] == ("request_too_large" if "messages" in path else "invalid_request_error")
        assert (await p.long()).status == 200


async def posted(p: Running, path: str, data: Any, **headers: str) -> Reply:
    async with p.http.post(p.url + path, data=data, headers=headers) as answer:
        return Reply(answer.status, answer.headers, [await answer.read()])


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for place in range(0, len(data), size):
        yield data[place : place + size]


@pytest.mark.parametrize("prompt", [LONG, "short"], ids=["long", "short"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_packed_body_is_unpacked(fake: Start, prompt: str, coding: str) -> None:
    """Engines read no packed bodies, so they get plain ones."""
    reader, writer = await fake(), await fake()
    asked = body(CHAT, prompt)
    data = json.dumps(asked).encode()
    packed = gzip.compress(data) if coding == "gzip" else zlib.compress(data)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, packed, Content_Encoding=coding)
        assert (reply.status, reply.text) == (200, right_text(asked))
    call = writer.sent("decode")[0]
    assert (call.raw[: len(data) - 1], "content-encoding" in call.headers) == (data[:-1], False)


@pytest.mark.parametrize("prompt", [LONG, "short"], ids=["long", "short"])
async def test_a_body_packed_with_brotli_is_unpacked(fake: Start, prompt: str) -> None:
    """Where the package is there, br is one more way to pack a body."""
    brotli = pytest.importorskip("brotli", reason="the package for br is not installed")
    reader, writer = await fake(), await fake()
    asked = body(CHAT, prompt)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, brotli.compress(json.dumps(asked).encode()), Content_Encoding="br")
        assert (reply.status, reply.text) == (200, right_text(asked))


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
@pytest.mark.parametrize("coding", ["br", "x-own", "gzip, gzip", "caf\xe9"])
async def test_a_body_in_an_unknown_coding_is_refused(
    fake: Start, path: str, coding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody here can unpack, nobody can pin to a slot: the client is told what it may send."""
    monkeypatch.setattr(app, "CODINGS", frozenset({"gzip", "deflate"}))
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        answer = await talk(p, raw("POST", path, b"{}", f"Content-Encoding: {coding}"))
        assert status(answer) == 400
        assert json_of(answer)["error"]["message"].endswith("cannot be read here; deflate and gzip can")


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
async def test_a_broken_packed_body_is_refused(fake: Start, path: str) -> None:
    """What cannot be unpacked is the client's mistake."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        half = gzip.compress(b'{"prompt": "x"}')[:-8]
        for data in (b"no gzip at all", half[:15], half, b"\x1f\x8b\x08\x00" + b"\xff" * 50):
            reply = await p.ask(path, data, Content_Encoding="gzip")
            assert (reply.status, error_of(reply, path)["type"]) == (400, "invalid_request_error")
        assert (await p.long()).status == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/tokenize"])
async def test_a_transfer_in_an_unknown_coding_is_refused(fake: Start, path: str) -> None:
    """Packed bytes are not taken for the body."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        answer = await talk(p, raw("POST", path, b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: gzip, chunked"))
        assert status(answer) == 501
        assert (
            json_of(answer)["error"]["message"] == "Transfer-Encoding: 'gzip, chunked' cannot be read here; chunked can"
        )
        assert writer.steps() == []


async def test_who_uploads_at_the_shutdown_is_told(fake: Start) -> None:
    """A client in the middle of its body gets words, too, when the proxy stops."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, drain_s=0.05) as p:
        incoming, outgoing = await asyncio.open_connection(*p.host)
        outgoing.write(raw("POST", CHAT, b"{", "Content-Length: 100"))
        await until(lambda: p.proxy.running)
        await p.stop()
        async with asyncio.timeout(5):
            answer = await incoming.read()
        outgoing.close()
    assert (status(answer), json_of(answer)["error"]["message"]) == (503, "the proxy is shutting down")


@pytest.mark.parametrize("size", [1, 1000])
async def test_a_chunked_body_is_read_whole(fake: Start, size: int) -> None:
    """A body may come in pieces of any size."""
    reader, writer = await fake(), await fake()
    asked = body(CHAT, LONG)
    async with proxy(reader, writer) as p:
        reply = await posted(p, CHAT, pieces(json.dumps(asked).encode(), size))
        assert (reply.status, reply.text) == (200, right_text(asked))


@pytest.mark.parametrize(
    "parts",
    [
        [raw("POST", CHAT, b"zz\r\nno chunk\r\n", "Transfer-Encoding: chunked")],
        [raw("POST", CHAT, b"{", "Content-Length: 100")],
    ],
    ids=["broken at once", "cut"],
)
async def test_a_body_that_never_comes_whole_is_refused(
    fake: Start, parts: list[bytes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that breaks off is the client's mistake: it is not waited for without end, and no error of ours."""
    monkeypatch.setattr(app, "BODY_S", 0.2)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        assert status(await talk(p, *parts, whole=False)) == 400
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [b"", raw("GET", "/health", last=False)], ids=["alone", "after another"])
async def test_a_body_that_breaks_later_is_refused_at_once(
    fake: Start, path: str, more: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A chunk that is none, long after the request's head, ends the request in its API's words, and the connection."""
    reader, writer = await fake(), await fake()
    begun = raw("POST", path, b"2\r\n{}\r\n", "Transfer-Encoding: chunked", last=False)
    async with proxy(reader, writer) as p:
        answer = await talk(p, more + begun, b"zz\r\nno chunk\r\n")
        answer = answer[answer.rindex(b"HTTP/1.1 ") :]
        assert (status(answer), b"Connection: close" in answer) == (400, True)
        assert "the body is damaged" in json_of(answer)["error"]["message"]
        assert (json_of(answer).get("type") == "error") is (path == "/v1/messages")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_what_breaks_http_is_not_logged(fake: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A request that cannot be read may hold a key: its bytes go nowhere."""
    caplog.set_level(logging.DEBUG)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        for line in ("Authorization: Bearer secret\x01", "Bad Name: secret", "Content-Length: secret"):
            assert status(await talk(p, raw("POST", CHAT, b"", line))) == 400
    assert "secret" not in caplog.text


@pytest.mark.parametrize("asked", [{}, {"messages": 7}, {"messages": []}, {"messages": [], "stream": True}], ids=str)
async def test_what_the_engine_refuses_is_its_own_answer(fake: Start, asked: Json) -> None:
    """A request that only an engine can judge is answered with the engine's bytes."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, asked)
        async with p.http.post(writer.url + CHAT, json={**asked, "id_slot": 0}) as own:
            assert reply.status == own.status
            if own.status != 200:
                assert reply.content == await own.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_refused_by_the_engine(fake: Start, stream: bool) -> None:
    """The engine's own words tell how long is too long, untouched."""
    reader, writer = await fake(context=1000), await fake(context=1000)
    asked = body(NATIVE, LONG, stream=stream)
    async with proxy(reader, writer) as p:
        reply = await p.ask(NATIVE, asked)
        async with p.http.post(writer.url + NATIVE, json={**asked, "id_slot": 0}) as own:
            assert reply.content == await own.read()
        assert (reply.status, reply.json["error"]["type"]) == (400, "exceed_context_size_error")
        assert reader.sent("prefill") == []


async def test_a_prompt_beyond_the_prefill_engine_stays(fake: Start) -> None:
    """What only the decode engine can hold is read there."""
    reader, writer = await fake(context=1000), await fake()
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, LONG))
        assert (reply.way, reply.text) == (("local", "too_long"), right_text(body(CHAT, LONG)))


async def test_a_request_needs_no_model(fake: Start) -> None:
    """An engine has one model; whether it is named, and how, is the engine's matter."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        for fields in ({}, {"model": "another"}, {"model": None}, {"model": 5}):
            assert (await p.ask(CHAT, {**SHORT, **fields})).status == 200


# ---- clients ----


async def test_a_client_may_ask_before_it_sends(fake: Start) -> None:
    """Expect: 100-continue is granted."""
    reader, writer = await fake(), await fake()
    data = json.dumps(SHORT).encode()
    head = raw("POST", CHAT, data, "Expect: 100-continue").removesuffix(data)
    async with proxy(reader, writer) as p:
        granted, _, answer = (await talk(p, head, data)).partition(b"\r\n\r\n")
    assert granted.startswith(b"HTTP/1.1 100 Continue")
    assert (status(answer), "expect" in writer.sent("decode")[0].headers) == (200, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [LONG, "short"], ids=["long", "short"])
async def test_an_old_client_is_served(fake: Start, stream: bool, prompt: str) -> None:
    """HTTP/1.0 knows no chunks: the end of the connection is the end of the answer."""
    reader, writer = await fake(), await fake()
    asked = body(CHAT, prompt, stream=stream)
    async with proxy(reader, writer) as p:
        answer = await talk(p, raw("POST", CHAT, json.dumps(asked).encode(), version="1.0"))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert status(answer) == 200
    assert b"chunked" not in head.lower()
    kind = "text/event-stream" if stream else "application/json"
    assert Reply(200, {"Content-Type": kind}, [content]).text == right_text(asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_old_client_may_keep_its_connection(fake: Start, stream: bool) -> None:
    """HTTP/1.0 with keep-alive: an answer with a length leaves the connection open, any other one ends with it."""
    reader, writer = await fake(), await fake()
    data = json.dumps(body(CHAT, "short", stream=stream)).encode()
    first = raw("POST", CHAT, data, "Connection: keep-alive", version="1.0", last=False)
    more = [] if stream else [raw("GET", "/health", version="1.0")]
    async with proxy(reader, writer) as p:
        answer = await talk(p, first, *more)
    assert answer.count(b"HTTP/1.0 200") == 1 + len(more)
    assert (b"Connection: keep-alive" in answer) is (not stream)


@pytest.mark.parametrize(
    ("request_line", "expected"),
    [
        (("HEAD", "/v1/models"), {200, 404}),
        (("HEAD", "/health"), {200}),
        (("OPTIONS", CHAT), {200, 404}),
        (("OPTIONS", "*"), {404}),
        (("GET", "http://elsewhere.example/v1/models"), {200}),
        (("POST", "http://elsewhere.example/slots/0?action=erase"), {403}),
        (("CONNECT", "elsewhere.example:80"), {400, 404, 405}),
        (("GET", "elsewhere.example"), {400}),
        (("GET", "@elsewhere.example/"), {400}),
        (("GET", "/v1/mod%65ls"), {200}),
        (("GET", "/%"), {400, 404}),
        (("GET", "/%00%ff"), {400, 404}),
        (("GET", "/caf\xe9"), {400, 404}),
        (("GET", "/?q=caf\xe9"), {400, 404}),
        (("GET", "/v1/models#fragment"), {200}),
        (("GET", "/" + "x" * 9000), {400, 414}),
        (("BREW", "/v1/models"), {400, 404, 405}),
        (("GET", CHAT), {404, 405}),
        (("POST", "/v1/models/"), {403}),
        (("DELETE", CHAT), {404, 405}),
    ],
    ids=str,
)
async def test_odd_requests_are_answered(
    fake: Start, request_line: tuple[str, str], expected: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever method and target are sent, there is an answer, and none of ours is a 500."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        answer = await talk(p, raw(*request_line))
        assert status(answer) in expected
        assert (await p.long()).way == ("handover", "worth_moving")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "line", ["X-Odd: caf\xe9", "Authorization: Bearer \xff", "X-Api-Key: \xe9", "X-Empty:", "Cookie: a=\x80"]
)
@pytest.mark.parametrize("keys", [[], ["a key"]], ids=["open", "keys"])
async def test_odd_headers_are_no_error(fake: Start, line: str, keys: list[str]) -> None:
    """A header of any bytes is taken as it is."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, api_keys=keys) as p:
        answer = await talk(p, raw("POST", CHAT, json.dumps(SHORT).encode(), line))
        assert status(answer) == (401 if keys else 200)


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
async def test_what_is_no_http_is_refused(fake: Start, sent: bytes) -> None:
    """A client that speaks something else is told so in JSON, without its own words, and the next is served."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        answer = await talk(p, sent)
        assert status(answer) == 400
        assert b"Server: splitproxy" in answer
        error = json_of(answer)["error"]
        assert (error["type"], error["message"]) == ("invalid_request_error", "the request is not valid HTTP")
        assert (await p.ask(CHAT, SHORT)).status == 200


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (raw("POST", "/v1/messages", b"{}", "Expect: 200-ok"), 417),
        (raw("OPTIONS", "*"), 404),
        (raw("GET", "http://elsewhere.example"), 404),
    ],
)
async def test_the_servers_own_errors_are_the_apis(fake: Start, sent: bytes, code: int) -> None:
    """What the HTTP server refuses by itself is worded as all other errors are."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        answer = await talk(p, sent)
    assert status(answer) == code
    assert b"Server: splitproxy\r\n" in answer
    assert b"X-Request-Id: " in answer
    found = json_of(answer)
    assert (found.get("type"), bool(found["error"]["message"])) == ("error" if code == 417 else None, True)


async def test_a_head_that_is_too_long_is_refused(fake: Start) -> None:
    """A header beyond what the server takes is told in JSON, and not quoted."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        answer = await talk(p, raw("POST", CHAT, b"{}", "Authorization: Bearer " + "k3y" * 10_000))
        assert status(answer) == 400
        assert json_of(answer)["error"]["message"] == "a line of the request's head is too long"
        assert b"k3y" not in answer


async def test_requests_in_one_write_are_answered_in_turn(fake: Start) -> None:
    """Pipelined requests share a connection, streams among them, and a HEAD has no body to be taken for more."""
    reader, writer = await fake(), await fake()
    asked = [body(CHAT, "one", stream=True), body(CHAT, LONG), body(CHAT, "three", stream=True)]
    sent = [raw("POST", CHAT, json.dumps(one).encode(), last=False) for one in asked]
    sent.insert(1, raw("HEAD", "/health", last=False))
    async with proxy(reader, writer) as p:
        answers = await talk(p, b"".join([*sent, raw("GET", "/health")]))
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 5
    kinds = re.findall(rb"Content-Type: ([a-z/-]+)|(data: \[DONE\])|(\"object\": ?\"chat.completion\")", answers)
    stream, plain = b"text/event-stream", b"application/json"
    found = [next(filter(None, kind)) for kind in kinds]
    assert [word if word.startswith((b"text", b"app", b"data")) else b"whole" for word in found] == [
        stream, b"data: [DONE]", plain, plain, b"whole", stream, b"data: [DONE]", plain,
    ]  # fmt: skip


async def test_a_connection_outlives_a_stream(fake: Start) -> None:
    """Streams and whole answers alternate on one connection of the client's, though engines close theirs."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
        for number in range(6):
            asked = body(CHAT, f"turn {number}", stream=number % 2 == 0)
            async with http.post(p.url + CHAT, json=asked) as answer:
                reply = Reply(answer.status, answer.headers, [await answer.read()])
            assert (reply.status, reply.text) == (200, right_text(asked))
        assert http.connector is not None
        assert len([key for key in http.connector._conns if key.port == p.host[1]]) == 1


async def test_a_refusal_does_not_spoil_the_connection(fake: Start) -> None:
    """After a refusal, whether its body was read or not, the next request on the same connection is served."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as http:
        for path, data, expected in (
            ("/slots/0?action=erase", "{}", 403),
            (CHAT, "{", 400),
            (CHAT, json.dumps({**SHORT, "kv_transfer_params": {}}), 400),
            (CHAT, json.dumps(SHORT), 200),
        ):
            async with http.post(p.url + path, data=data) as answer:
                assert answer.status == expected
                await answer.read()
        assert http.connector is not None
        assert len([key for key in http.connector._conns if key.port == p.host[1]]) == 1


# ---- queues ----


@asynccontextmanager
async def occupied(p: Running) -> AsyncIterator[None]:
    """The decode engine writes an answer that does not end while the block lasts."""
    p.decode.knobs.update({"decode": {"stall_after": 3, "times": 1}})
    blocker = asyncio.create_task(p.ask(CHAT, body(CHAT, "Go on.", stream=True)))
    await until(lambda: p.decode.sent("decode") and p.decode.sent("decode")[0].answered == 3)
    try:
        yield
    finally:
        blocker.cancel()
        await asyncio.wait([blocker])


@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_turns_requests_away(fake: Start, path: str, stream: bool) -> None:
    """Who finds the queue full is told at once when to come again, in the API's shape."""
    reader, writer = await fake(), await fake()
    asked = {**body(path, "short"), **body(CHAT, "short"), "input": "short", "stream": stream}
    async with proxy(reader, writer, queue={"max": 0}) as p:
        async with occupied(p):
            reply = await p.ask(path, asked)
        assert (reply.status, int(reply.headers["Retry-After"]) > 0) == (429, True)
        assert error_of(reply, path)["type"] == "rate_limit_error"
        assert await p.metric("splitproxy_queue_rejected_total") == 1


async def test_who_was_let_in_is_not_turned_away(fake: Start) -> None:
    """A prompt that was read waits for its decode slot, however full the queue is."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, queue={"max": 0}) as p:
        async with occupied(p):
            asking = asyncio.create_task(p.long())
            await until(p.files)
            assert (await p.ask(CHAT, SHORT)).status == 429
        assert (await asking).way == ("handover", "worth_moving")


@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_waits_longer_than_the_queue_allows(fake: Start, path: str, stream: bool) -> None:
    """Who has waited long enough is told when to come again, in the API's shape."""
    reader, writer = await fake(), await fake()
    asked = {**body(path, LONG), **body(CHAT, LONG), "input": LONG, "stream": stream}
    async with proxy(reader, writer, queue={"timeout_s": 0.2}) as p:
        async with occupied(p):
            reply = await p.ask(path, asked)
        assert (reply.status, int(reply.headers["Retry-After"]) > 0) == (503, True)
        assert error_of(reply, path)["type"] == ("overloaded_error" if path == "/v1/messages" else "unavailable_error")
        assert p.files() == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_stream_that_waited_in_vain_ends_with_an_event(fake: Start, path: str) -> None:
    """Where a keep-alive was sent, the queue's refusal is an event of the stream."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, queue={"timeout_s": 0.2}, keep_alive_s=0.05) as p:
        async with occupied(p):
            reply = await p.ask(path, body(CHAT, "Hello.", stream=True))
        assert reply.status == 200
        assert reply.error is not None
        assert "in time" in reply.error["message"]
        assert (b"event: error\n" in reply.content) is (path == "/v1/messages")


async def test_time_on_an_engine_is_no_time_in_the_queue(fake: Start) -> None:
    """A prompt that takes long to read may still wait for its decode slot."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, queue={"timeout_s": 0.5}) as p:
        reader.knobs.read_tps = 2000
        async with occupied(p):
            asking = asyncio.create_task(p.long())
            await until(p.files)
        reply = await asking
        assert (reply.status, reply.way) == (200, ("handover", "worth_moving"))
