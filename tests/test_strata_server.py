"""Strata servers behind the proxy: a whole request's way, and what such a server does otherwise than a llama-server."""

import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from splitproxy.books.sessions import SessionStore
from splitproxy.engines.adapter import Deadlines
from splitproxy.engines.strata_server import StrataServer, one_token
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Api, EngineState, InVain, PairState, Tokens
from tests.fake_model import tokenize
from tests.fake_strata_server import TEMPLATE, FakeStrata
from tests.harness import (
    ANSWER_TOKENS,
    CHAT,
    FLOOR,
    LAST_TURN,
    MESSAGES,
    RESPONSES,
    body,
    prompt_ids,
    proxy,
    right_text,
    until,
    words,
)

KINDS = ("strata",)
Start = Callable[..., Awaitable[FakeStrata]]
Json = dict[str, Any]
LONG = words(3 * FLOOR)
APIS = (CHAT, MESSAGES, RESPONSES)
REREAD = LAST_TURN["strata"]
DEADLINES = Deadlines(5, 5, 5)


async def pair(fake: Start, **options: Any) -> tuple[FakeStrata, FakeStrata]:
    return await fake(), await fake(**options)


# ---- handed over ----


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_read_by_one_server_and_answered_by_the_other(
    fake: Start, path: str, stream: bool
) -> None:
    """S10: read, saved, restored, answered; the last turn's beginning is read again, and no file is left."""
    reader, writer = await pair(fake)
    asked = body(path, LONG, stream=stream)
    count = len(prompt_ids(asked))
    async with proxy(reader, writer) as p:
        reply = await p.ask(path, asked)
        record = await p.record(reply)
        assert p.files() == []
    assert (reply.status, reply.way, reply.text) == (200, ("handover", "worth_moving"), right_text(asked))
    assert (reader.steps(), writer.steps()) == (["prefill", "save"], ["restore", "decode"])
    assert (reader.sent("prefill")[0].read, writer.sent("decode")[0].read) == (count, REREAD)
    assert (record.path, record.effective, record.failure) == ("handover", True, None)


@pytest.mark.parametrize("path", APIS)
async def test_the_prefill_is_the_clients_own_request_for_one_token(fake: Start, path: str) -> None:
    """S9: nothing that decides about the prompt is changed on its way to the prefill server."""
    reader, writer = await pair(fake)
    asked = body(path, LONG, stream=True, temperature=0.5, zz_unknown=[1, None])
    async with proxy(reader, writer) as p:
        await p.ask(path, asked)
    (call,) = reader.sent("prefill")
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert call.body == {**asked, limit: 1, "stream": False}


@pytest.mark.parametrize("prompt", [LONG, "short"])
async def test_the_body_reaches_the_decode_server_as_it_was_written(fake: Start, prompt: str) -> None:
    """Not one byte of a client's body changes: this server takes no slot."""
    reader, writer = await pair(fake)
    sent = (
        b'{ "zz" : [1.0],\n\t"max_tokens":3, "messages": [{"role":"user", "content": "\\u00e4 %s"}]  }\n'
        % prompt.encode()
    )
    async with proxy(reader, writer) as p:
        assert (await p.ask(CHAT, sent)).status == 200
    assert writer.sent("decode")[0].raw == sent


async def test_the_figures_are_those_of_the_whole_request(fake: Start) -> None:
    """S17: both servers' tokens and times, at most as many as the prompt has, and the handover's costs beside them."""
    reader, writer = await pair(fake)
    asked = body(CHAT, LONG, stream=True)
    count = len(prompt_ids(asked))
    async with proxy(reader, writer) as p:
        reader.knobs.read_tps = 20_000
        reply = await p.ask(CHAT, asked)
        record = await p.record(reply)
    split, timings, usage = reply.last("split"), reply.timings, reply.last("usage")
    assert record.handover is not None
    assert split["bytes"] == record.handover.session_bytes
    assert split["save_ms"] == record.handover.save_ms
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, count, ANSWER_TOKENS)
    assert timings["prompt_ms"] > split["prefill_ms"] > 1000 * (count - 1) / 20_000
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (count, 0)


async def test_the_next_turn_is_warm(fake: Start) -> None:
    """S11, S16: what the decode server holds is prompt and answer; only what is new is read, and it stays there."""
    reader, writer = await pair(fake)
    first = body(CHAT, LONG)
    async with proxy(reader, writer) as p:
        answer = await p.ask(CHAT, first)
        turn = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        second = {**first, "messages": [*first["messages"], *turn]}
        reply = await p.ask(CHAT, second)
        assert (reply.way, reply.text) == (("local", "warm"), right_text(second))
        held = p.proxy.ledger.held("writer", Tokens())
    assert held == 0
    assert writer.sent("decode")[1].cached == len(prompt_ids(first)) + ANSWER_TOKENS - 1
    assert len(reader.sent("prefill")) == 1


async def test_a_short_prompt_stays(fake: Start) -> None:
    """S3: what the decode server reads itself in no time is not moved."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, "Hello."))
        assert (reply.way, reply.text) == (("local", "too_short"), right_text(body(CHAT, "Hello.")))
        threshold = [(await p.ask(CHAT, body(CHAT, words(FLOOR + more, str(more))))).way[0] for more in (-100, 50)]
    assert threshold == ["local", "handover"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}, {"type": "image_url"}]}]}),
        (CHAT, body(CHAT, LONG, strata_checkpoint=False)),
        (CHAT, body(CHAT, LONG, n=2)),
    ],
    ids=["picture", "no checkpoint", "n"],
)
async def test_what_cannot_be_moved_stays(fake: Start, path: str, asked: Json) -> None:
    """S15: pictures, and requests that leave no session behind, are the decode server's alone."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(path, asked)
    assert (reply.way, reader.steps()) == (("local", "not_splittable"), [])


async def test_an_answer_that_must_be_json_is_handed_over(fake: Start) -> None:
    """The prefill server cannot make JSON of one token and says so; it has read the prompt all the same."""
    reader, writer = await pair(fake)
    asked = body(CHAT, LONG, response_format={"type": "json_object"})
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, asked)
        record = await p.record(reply)
    assert (reply.text, record.path, record.effective) == (right_text(asked), "handover", True)


# ---- what the server is like ----


async def test_a_model_that_is_not_loaded_is_loaded_first(fake: Start) -> None:
    """A restore loads no model, but a request does; what was held before is forgotten (S16)."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        await p.long()
        writer.unload()
        await until(lambda: not p.proxy.ledger.count("writer").free or p.proxy.fleet.members["writer"].looks)
        reply = await p.long(seed="next")
        assert (reply.way, reply.text) == (
            ("handover", "worth_moving"),
            right_text(body(CHAT, words(3 * FLOOR, "next"))),
        )
        assert (await p.record(reply)).path == "handover"
        assert writer.loaded
        reader.unload()
        assert (await p.long(seed="third")).way == ("handover", "worth_moving")


async def test_what_an_unloaded_server_held_is_forgotten(fake: Start) -> None:
    """S16: nothing is believed held after an unload, and the next turn is read as a whole, by the faster one."""
    reader, writer = await pair(fake)
    first = body(CHAT, LONG)
    async with proxy(reader, writer) as p:
        answer = await p.ask(CHAT, first)
        turn = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        second = {**first, "messages": [*first["messages"], *turn]}
        writer.unload()
        looks = p.proxy.fleet.members["writer"].looks
        await until(lambda: p.proxy.fleet.members["writer"].looks > looks + 1)
        reply = await p.ask(CHAT, second)
        assert (reply.way, reply.text) == (("handover", "worth_moving"), right_text(second))


async def test_a_stream_is_cut_off_where_it_has_no_end_mark(fake: Start) -> None:
    """HTTP/1.0 ends a stream by closing: one whose engine died is told from one that is complete."""
    reader, writer = await pair(fake)
    for path in APIS:
        asked = body(path, "short", stream=True)
        async with proxy(reader, writer) as p:
            writer.knobs.update({"decode": {"cut_after": 3, "times": 1}})
            reply = await p.ask(path, asked)
            record = await p.record(reply)
            assert (reply.status, reply.text, record.outcome) == (200, right_text(asked, 3), "error")
            assert reply.error is not None
            await p.proven()


async def test_an_error_event_of_the_server_is_passed_on(fake: Start) -> None:
    """What the server says about its failure is what the client reads, and nothing is believed held afterwards."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        writer.knobs.update({"decode": {"error_after": 3, "times": 1}})
        reply = await p.ask(CHAT, body(CHAT, LONG, stream=True))
        assert b"the engine failed on purpose" in reply.content
        assert reply.content.endswith(b"data: [DONE]\n\n")
        assert (await p.record(reply)).outcome == "error"
        assert (await p.ask(CHAT, body(CHAT, LONG))).way == ("handover", "worth_moving")


async def test_the_servers_comments_are_no_answer(fake: Start) -> None:
    """The server opens its stream at once and comments while it reads: the first token counts, not that."""
    reader, writer = await pair(fake, comments_s=0.05)
    async with proxy(reader, writer, split={"policy": "never"}) as p:
        writer.knobs.read_tps = 4000
        reply = await p.ask(CHAT, body(CHAT, LONG, stream=True))
        record = await p.record(reply)
    assert reply.content.count(b": keep-alive") >= 3
    assert record.first_byte_ms is not None
    assert record.first_byte_ms > 1000 * 1200 / 4000
    assert sum(record.gaps.counts) <= ANSWER_TOKENS  # between tokens, and to the last event


async def test_a_foreign_page_is_no_matter_of_the_server(fake: Start) -> None:
    """Host and Origin are between client and proxy; the server would refuse them."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reply = await p.ask(CHAT, body(CHAT, LONG), Origin="http://page.example", Referer="http://page.example/x")
        assert (reply.status, reply.way) == (200, ("handover", "worth_moving"))
    assert not {"origin", "referer"} & writer.sent("decode")[0].headers.keys()


async def test_keys_are_given(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server gets its own key, on every call, and nobody else's."""
    reader, writer = await pair(fake)
    reader.knobs.api_key = writer.knobs.api_key = "server-key"
    monkeypatch.setenv("SERVER_KEY", "server-key")
    engines = [
        {"name": name, "role": role, "kind": "strata", "url": engine.url, "api_key_env": "SERVER_KEY"}
        for name, role, engine in (("reader", "prefill", reader), ("writer", "decode", writer))
    ]
    async with proxy(reader, writer, engines=engines) as p:
        assert (await p.long()).way == ("handover", "worth_moving")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/load"),
        ("POST", "/unload"),
        ("POST", "/v1/unload"),
        ("POST", "/v1/vram"),
        ("POST", "/settings"),
        ("POST", "/config"),
        ("GET", "/api/requests"),
        ("GET", "/api-monitor"),
        ("GET", "/status"),
        ("POST", "/slots/0?action=save"),
    ],
)
async def test_administration_is_refused(fake: Start, method: str, path: str) -> None:
    """No client unloads a model, changes settings, or reads what others ask."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p, p.http.request(method, p.url + path, data=b"{}") as answer:
        assert answer.status == 403
    assert not [call for call in writer.calls if call.path == path.partition("?")[0] and call.method == method]


async def test_other_calls_are_passed_through(fake: Start) -> None:
    """Whatever else the server offers is its own answer."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        assert (await p.get("/v1/models")).json["data"][0]["id"] == "fake-model"
        counted = await p.ask("/v1/messages/count_tokens", body(MESSAGES, "Hello.", limit=None))
        assert counted.json == {"input_tokens": len(prompt_ids(body(CHAT, "Hello.")))}
        assert (await p.ask("/v1/completions", {"prompt": "x"})).status == 404


# ---- failures of its kind ----


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("refusal", "status"), [("invalid", 400), ("memory", 503), ("storage", 507), ("io", 500)])
async def test_a_session_that_is_refused_is_no_error(
    fake: Start, role: str, refusal: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """S12, S24: whatever kind of refusal it is, the decode server reads the prompt itself."""
    caplog.set_level(logging.DEBUG, "splitproxy")
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        (reader if role == "prefill" else writer).error_kind = refusal
        reply = await p.long()
        step = "save" if role == "prefill" else "restore"
        assert (reply.status, reply.text) == (200, right_text(body(CHAT, words(3 * FLOOR, "long"))))
        assert reply.headers["X-Splitproxy-Fallback"] == f"{step}:refused"
        assert p.files() == []
        assert f"answered {status}: {refusal}: " in caplog.text
        reader.error_kind = writer.error_kind = ""


async def test_a_published_file_goes_too(fake: Start) -> None:
    """A save that failed after its file was in place leaves nothing behind."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        reader.error_kind, reader.published = "io", True
        assert (await p.long()).headers["X-Splitproxy-Fallback"] == "save:refused"
        assert p.files() == []
        reader.error_kind, reader.published = "", False


async def test_a_server_without_session_files_is_noticed(fake: Start) -> None:
    """A server that was started without a folder for them makes no pair, and the log says which flag is missing."""
    reader, writer = await fake(slot_dir=None), await fake()
    async with proxy(reader, writer, retry_s=60) as p:
        assert (await p.long()).way == ("local", "pair_unproven")
        assert "501" in p.pair()[1]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"context": 16384}, "session differs: context 32768 and context 16384"),
        ({"build": "0.1.31"}, "build differs: 0.1.30-fake and 0.1.31"),
        ({"template": TEMPLATE + "{# other #}"}, "template differs"),
        ({"kv": "fp16"}, "restored: the engine answered 400: invalid"),
        ({"weights": 2}, "restored: the engine answered 400: invalid"),
    ],
    ids=["context", "version", "template", "KV type", "model"],
)
async def test_servers_that_do_not_match_are_no_pair(fake: Start, options: Json, fault: str) -> None:
    """S24: what servers tell is compared, what they do not their session files do; the answer comes all the same."""
    reader, writer = await pair(fake, **options)
    async with proxy(reader, writer, retry_s=60) as p:
        reply = await p.long()
        state, told = p.pair()
        assert (reply.status, reply.way, state) == (200, ("local", "pair_unproven"), PairState.UNPROVEN)
        assert told.startswith(fault)


async def test_a_file_that_cannot_be_told_from_the_right_one_is_noticed_by_its_use(fake: Start) -> None:
    """A restore is believed only when the decode server's own figures show that it was used."""
    reader, writer = await pair(fake)
    async with proxy(reader, writer) as p:
        writer.knobs.restore.forgets = True
        reply = await p.long()
        record = await p.record(reply)
        assert (reply.text, record.effective) == (right_text(body(CHAT, words(3 * FLOOR, "long"))), False)
        writer.knobs.restore.forgets = False


# ---- the adapter alone ----


async def adapter(engine: FakeStrata, store: SessionStore) -> StrataServer:
    return StrataServer("writer", engine.url, "", store)


async def test_how_long_tokens_are_is_measured(fake: Start, tmp_path: Path) -> None:
    """Prompts are estimated by the server's own count of a text; the fake's token is a byte."""
    engine = await fake()
    with SessionStore(tmp_path / "s") as store:
        made = await adapter(engine, store)
        identity = await made.identify()
        text = await made.render(json.dumps(body(CHAT, LONG)).encode())
        estimated = await made.tokenize(text)
        await made.close()
    assert (identity.build, identity.context, identity.slots, identity.model) == ("0.1.30-fake", 32768 - 9, 1, None)
    assert len(estimated) == len(text)
    assert estimated.may_be(len(prompt_ids(body(CHAT, LONG))))


async def test_ids_that_are_made_elsewhere_are_checked_by_their_number(fake: Start, tmp_path: Path) -> None:
    """Nobody tells ids, but template and ids together must come to what the server counts."""
    engine = await fake()

    async def encode(text: str) -> Tokens:
        return Tokens(tokenize(text))

    async def other(text: str) -> Tokens:
        return Tokens(tokenize(text)[::2])

    with SessionStore(tmp_path / "s") as store:
        made = await adapter(engine, store)
        await made.identify()
        assert await made.disagreement("Some text.", encode) == ""
        assert "the engine counts" in await made.disagreement("Some text.", other)
        await made.close()


@pytest.mark.parametrize("template", ["", "{% broken"])
async def test_without_a_template_prompts_are_guessed_at(fake: Start, template: str) -> None:
    """A server whose template is of no use here serves all the same, and prompts move."""
    reader, writer = await fake(template=template), await fake(template=template)
    async with proxy(reader, writer) as p:
        assert (await p.long()).way == ("handover", "worth_moving")


@pytest.mark.parametrize("stream", [True, False])
def test_a_prefill_asks_for_one_token_and_no_stream(stream: bool) -> None:
    """Every way of limiting and of streaming is taken out, and nothing else."""
    asked = {"messages": [1], "max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7, "stream": stream}
    more = {"stream_options": {}, "return_progress": True, "tools": [2]}
    made = json.loads(one_token(json.dumps({**asked, **more}).encode(), Api.CHAT))
    assert made == {"messages": [1], "tools": [2], "max_tokens": 1, "stream": False}


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("step", Step)
async def test_there_is_advice_for_every_failure(step: Step, cause: Cause, tmp_path: Path) -> None:
    """No failure leaves its reader without a next step, and no handover in vain without a remedy."""
    made = StrataServer("a", "http://127.0.0.1:9", "", SessionStore(tmp_path))
    for status in (None, 401, 501):
        found = made.advice(EngineError(step, cause, "x", status=status))
        assert found
        assert all(text.endswith((".", "?")) for text in found)
    assert all(made.remedy(found).endswith((".", "?")) for found in (None, *InVain))
    await made.close()


async def test_health_tells_loaded_from_unloaded(fake: Start, tmp_path: Path) -> None:
    """A server that answers is up, whether its model is loaded or comes with the next request."""
    engine = await fake()
    with SessionStore(tmp_path / "s") as store:
        made = await adapter(engine, store)
        seen = [await made.health()]
        engine.unload()
        seen.append(await made.health())
        assert (await made.slots())[0].busy is False
        engine.knobs.loading = True
        seen.append(await made.health())
        engine.die()
        seen.append(await made.health())
        await made.close()
    assert seen == [EngineState.READY, EngineState.UNLOADED, EngineState.LOADING, EngineState.DOWN]
