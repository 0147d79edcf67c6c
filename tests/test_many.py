"""Many conversations at once: who waits for whom, what fits where, and engines that come, go, and are not alone."""

import asyncio
import gc
import random
import statistics
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import aiohttp
import pytest

from splitproxy.books import growth
from splitproxy.fleet import health, pairs, watch
from splitproxy.model import EngineState, PairState, Tokens
from tests import fake_engine, harness
from tests.fake_engine import FakeEngine
from tests.harness import (
    ANSWER_TOKENS,
    BOTH_KINDS,
    CHAT,
    COMPLETIONS,
    FLOOR,
    NATIVE,
    Reply,
    Running,
    body,
    needs,
    prompt_ids,
    proxy,
    right_text,
    until,
    words,
)

Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
KEYS = ["anna", "bert"]


PATH = NATIVE  # of short prompts


@pytest.fixture(autouse=True)
def path_of_short_prompts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Strata server takes chats alone."""
    monkeypatch.setitem(globals(), "PATH", NATIVE if kind == "llama-server" else CHAT)


def short(name: str, **fields: Any) -> Json:
    """A prompt that the decode engine reads itself, different from all others."""
    return body(PATH, f"{name}: what comes next?", **fields)


def read_ahead(seed: str) -> list[int]:
    """What a prefill engine gets of a long prompt."""
    return prompt_ids(body(CHAT, words(3 * FLOOR, seed)))[:-1]


def by(client: str) -> dict[str, str]:
    """The header that tells who asks."""
    return {"Authorization": f"Bearer {client}"}


def order(writer: FakeEngine) -> list[str]:
    """The names of the short prompts that reached an engine, in order."""
    asked = [call.body for call in writer.sent("decode")]
    prompts = (body["prompt"] if "prompt" in body else body["messages"][0]["content"] for body in asked)
    return [prompt.partition(":")[0] for prompt in prompts if isinstance(prompt, str)]


def turn_of(count: int, **fields: Any) -> Json:
    """A chat with a prompt of about this many tokens."""
    return body(CHAT, words(count), **fields)


def at_work(writer: FakeEngine, count: int) -> bool:
    """Whether so many slots are in use."""
    return len(writer.busy()) == count


async def waiting(p: Running, count: int) -> None:
    await until(lambda: p.proxy.admission.waiting == count)


async def queued(p: Running, names: Iterable[str]) -> "list[asyncio.Task[Reply]]":
    """Requests that wait, in this order; a name begins with its client's: "anna 1"."""
    tasks = []
    for name in names:
        count = p.proxy.admission.waiting
        tasks.append(asyncio.create_task(p.ask(PATH, short(name), **by(name.split()[0]))))
        await waiting(p, count + 1)
    return tasks


async def occupied(p: Running, writer: FakeEngine, name: str = "anna 0") -> "asyncio.Task[Reply]":
    """A request that keeps a slot until `writer.knobs.decode.stall_after` is None, or somebody hangs up."""
    count = len(writer.sent("decode"))
    task = asyncio.create_task(p.ask(PATH, short(name, stream=True), **by(name.split()[0])))
    await until(lambda: len(writer.sent("decode")) > count and writer.sent("decode")[-1].answered)
    return task


async def hang_up(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


# ---- the queue ----


@BOTH_KINDS
async def test_clients_take_turns(fake: Start) -> None:
    """However many requests one client has waiting, another's first is next, and within one it is first come first
    served."""
    writer = await fake()
    async with proxy(None, writer, api_keys=KEYS) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        tasks = await queued(p, ["anna 1", "anna 2", "anna 3", "bert 1", "bert 2"])
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        assert [(await task).status for task in tasks] == [200] * 5
        assert order(writer) == ["anna 0", "bert 1", "anna 1", "bert 2", "anna 2", "anna 3"]


@BOTH_KINDS
async def test_addresses_are_clients_where_no_keys_are(fake: Start) -> None:
    """Without keys a client is an address: the same one waits in one line."""
    writer = await fake()
    async with proxy(None, writer) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        tasks = await queued(p, ["anna 1", "bert 1", "anna 2"])
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        await asyncio.gather(*tasks)
        assert order(writer)[1:] == ["anna 1", "bert 1", "anna 2"]


async def test_a_self_test_lets_every_client_go_first(fake: Start) -> None:
    """While anybody waits for a slot, the pair that is to be tested waits, too, and it keeps no slot of the other
    engine for itself."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, api_keys=KEYS, retry_s=3600) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        p.proxy.fleet.health.lost("reader")
        await until(lambda: p.state("reader") is EngineState.READY and p.proxy.admission.waiting == 1)
        tasks = await queued(p, ["anna 1", "anna 2", "bert 1"])
        assert p.proxy.ledger.count("reader").free == 1
        writer.knobs.decode.stall_after = None
        writer.forget_calls()
        await hang_up(first)
        await asyncio.gather(*tasks)
        await p.proven()
        assert order(writer)[:3] == ["bert 1", "anna 1", "anna 2"]
        assert reader.sent("prefill")[0].started > max(call.finished or 0 for call in writer.sent("decode")[:3])


async def test_a_self_test_takes_its_turn_where_nobody_leaves_a_gap(
    fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that always wait cannot keep a pair from being tested for ever."""
    monkeypatch.setattr(pairs, "PROBE_PATIENCE_S", 0.1)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, api_keys=KEYS, retry_s=3600) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        p.proxy.fleet.health.lost("reader")
        await until(lambda: p.state("reader") is EngineState.READY and p.proxy.admission.waiting == 1)
        tasks = await queued(p, ["anna 1", "anna 2"])
        await until(lambda: p.proxy.admission._waiters[0].turn.client == "")
        writer.knobs.decode.stall_after = None
        writer.forget_calls()
        await hang_up(first)
        await asyncio.gather(*tasks)
        await p.proven()
        assert writer.steps().index("restore") < len(writer.steps()) - 3


async def test_who_waited_for_a_self_test_is_routed_again(fake: Start) -> None:
    """A prompt that was to be read locally because the pair was not proven yet is handed over when it is."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, retry_s=3600) as p:
        writer.knobs.restore.delay_s = 0.3
        p.proxy.fleet.health.lost("reader")
        await p.at_work(writer, "restore")
        explained = await p.ask("/splitproxy/explain", body(CHAT, words(3 * FLOOR)))
        assert explained.json["reason"] == "pair_unproven"
        reply = await p.long()
        assert reply.way == ("handover", "worth_moving")


@BOTH_KINDS
async def test_places_that_nobody_used_are_given_back(fake: Start) -> None:
    """A client that leaves with its requests does not wait longer for the one that stays."""
    writer = await fake()
    async with proxy(None, writer, api_keys=KEYS) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        gone = await queued(p, ["anna 1", "anna 2", "anna 3"])
        stays = await queued(p, ["anna 4", "bert 1", "bert 2", "bert 3"])
        await hang_up(*gone)
        await waiting(p, 4)
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        await asyncio.gather(*stays)
        assert order(writer)[1:] == ["bert 1", "anna 4", "bert 2", "bert 3"]


@BOTH_KINDS
async def test_a_full_queue_turns_the_greediest_away(fake: Start) -> None:
    """The one who is last in line goes, not the newcomer whose turn is sooner."""
    writer = await fake()
    async with proxy(None, writer, queue={"max": 2}, api_keys=KEYS) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        tasks = await queued(p, ["anna 1", "anna 2"])
        newcomer = asyncio.create_task(p.ask(PATH, short("bert 1"), **by("bert")))
        assert (await tasks[1]).status == 429
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        assert [(await task).status for task in (tasks[0], newcomer)] == [200, 200]
        assert p.proxy.admission.rejected == 1


ERRORS = {
    CHAT: lambda error: error["error"]["type"],
    NATIVE: lambda error: error["error"]["type"],
    RESPONSES: lambda error: error["error"]["type"],
    MESSAGES: lambda error: error["error"]["type"],
}
ASKED: dict[str, Json] = {
    CHAT: body(CHAT, "Who?"),
    NATIVE: body(NATIVE, "Who?"),
    RESPONSES: {"input": "Who?", "max_output_tokens": 3},
    MESSAGES: {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3},
}


@pytest.mark.parametrize("full", [True, False], ids=["full", "too late"])
@pytest.mark.parametrize("path", ASKED)
@BOTH_KINDS
async def test_who_cannot_wait_is_told_in_its_apis_words(fake: Start, kind: str, path: str, full: bool) -> None:
    """429 when the queue is full and 503 when the deadline passes, each with a time to come again."""
    needs(kind, path)
    writer = await fake()
    async with proxy(None, writer, queue={"max": 0 if full else 5, "timeout_s": 0.05}) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        reply = await p.ask(path, ASKED[path])
        assert (reply.status, reply.headers["Retry-After"]) == (429 if full else 503, "5")
        error = reply.json["error"]
        overloaded = "overloaded_error" if path == MESSAGES else "unavailable_error"
        assert error["type"] == ("rate_limit_error" if full else overloaded)
        assert reply.json.get("type") == ("error" if path == MESSAGES else None)
        assert await p.metric("splitproxy_queue_rejected_total") == 1
        await hang_up(first)


@pytest.mark.parametrize("path", ASKED)
@BOTH_KINDS
async def test_who_waits_in_a_stream_is_kept_alive(fake: Start, kind: str, path: str) -> None:
    """A stream that waits for a slot hears something in its API's own way, and gets its answer afterwards (S13)."""
    needs(kind, path)
    writer = await fake()
    async with proxy(None, writer, keep_alive_s=0.02) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        pieces: list[bytes] = []
        async with p.http.post(p.url + path, json={**ASKED[path], "stream": True}) as answer:
            stream = answer.content.iter_any()
            while b"".join(pieces).count(b"\n\n") < 2:
                pieces.append(await anext(stream))
            assert set(b"".join(pieces).split(b"\n\n")) == {
                b'event: ping\ndata: {"type": "ping"}' if path == MESSAGES else b":", b"",
            }  # fmt: skip
            assert order(writer) == ["anna 0"]
            writer.knobs.decode.stall_after = None
            await hang_up(first)
            pieces += [piece async for piece in stream]
        assert answer.status == 200
        assert b"".join(pieces).count(b"data: {") > 3


@BOTH_KINDS
async def test_the_queue_can_be_seen(fake: Start) -> None:
    """Status and metrics tell who waits, where in line, for what, and how long."""
    writer = await fake()
    async with proxy(None, writer) as p:
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        tasks = await queued(p, ["anna 1", "anna 2"])
        line = (await p.get("/splitproxy/status")).json["queue"]["line"]
        assert [(place["position"], place["role"], place["engine"]) for place in line] == [
            (1, "decode", "writer"), (2, "decode", "writer"),
        ]  # fmt: skip
        assert line[0]["waiting_s"] >= line[1]["waiting_s"] > 0
        told = (await p.get("/metrics")).content.decode()
        assert "splitproxy_queue_depth 2.0" in told
        oldest = float(told.partition("\nsplitproxy_queue_oldest_seconds ")[2].partition("\n")[0])
        assert oldest >= line[0]["waiting_s"]
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        await asyncio.gather(*tasks)


@BOTH_KINDS
async def test_reading_is_not_waiting(fake: Start) -> None:
    """The time in which a prompt is read does not count against the deadline of the queue."""
    reader, writer = await fake(batch=100), await fake()
    async with proxy(reader, writer, queue={"timeout_s": 0.8}) as p:
        reader.knobs.read_tps = 2.5 * FLOOR
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        long = asyncio.create_task(p.long())
        await waiting(p, 1)  # the prompt is read, and the decode engine is busy
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        reply = await long
        assert (reply.status, reply.way) == (200, ("handover", "worth_moving"))
        record = await p.record(reply)
        assert record.queue_ms < 800 < record.total_ms


@BOTH_KINDS
async def test_all_waiting_counts(fake: Start) -> None:
    """Who has waited for the prefill engine has that much less time to wait for the decode engine."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, queue={"timeout_s": 1.0}) as p:
        reader.knobs.save.delay_s = 0.7
        writer.knobs.decode.stall_after = 1
        first = await occupied(p, writer)
        before = asyncio.create_task(p.long(seed="before"))
        await p.at_work(reader, "save")
        reply = await p.long()
        record = await p.record(reply)
        assert reply.status == 503
        assert 900 < record.queue_ms < 1300 < record.total_ms
        await hang_up(first, before)


@BOTH_KINDS
async def test_who_has_begun_is_not_turned_away(fake: Start) -> None:
    """A prompt that was read is answered, however many wait by then."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, queue={"max": 1}, api_keys=KEYS) as p:
        writer.knobs.decode.stall_after = 1
        reader.knobs.save.delay_s = 0.2
        first = await occupied(p, writer)
        long = asyncio.create_task(p.ask(CHAT, body(CHAT, words(3 * FLOOR)), **by("bert")))
        await p.at_work(reader, "save")
        task = await queued(p, ["anna 1"])
        await waiting(p, 2)
        writer.knobs.decode.stall_after = None
        await hang_up(first)
        assert ((await long).status, (await task[0]).status) == (200, 200)


async def test_five_hundred_wait_for_four_slots(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is answered; of two clients with very different numbers of requests each has its turns, in order. The
    last request cost the proxy no more than the first, and nothing of them is kept."""
    many, few, rounds = 440, 60, 2
    clients = many + few
    monkeypatch.setattr(harness, "WAIT_S", 50.0)
    writer = await fake(slots=4)
    seen: list[int] = []
    async with proxy(None, writer, queue={"max": clients}, api_keys=KEYS) as p:
        p.proxy.recent = type(p.proxy.recent)(maxlen=clients)
        for _ in range(rounds):
            writer.forget_calls()
            writer.knobs.decode.stall_after = 1
            held = [await occupied(p, writer, f"anna held {number}") for number in range(4)]
            names = [*(f"anna {number}" for number in range(many)), *(f"bert {number}" for number in range(few))]
            tasks = await queued(p, names)
            writer.knobs.decode.stall_after = None
            await hang_up(*held)
            assert {(await task).status for task in tasks} == {200}
            served = order(writer)[4:]
            for client, count in (("anna", many), ("bert", few)):
                turns = [int(name.split()[1]) for name in served if name.startswith(client)]
                # Four are let in at a time, and they race to the engine.
                assert len(turns) == count
                assert all(abs(turn - place) < 8 for place, turn in enumerate(turns))
            assert served.index(f"bert {few - 1}") < 2 * few + 16
            records = list(p.proxy.recent)
            own = [record.total_ms - record.queue_ms - (record.decode_ms or 0) for record in records]
            quarter = clients // 4
            decode = [record.decode_ms or 0 for record in records]
            for spent in (own, decode):
                assert statistics.median(spent[-quarter:]) < 5 * statistics.median(spent[:quarter]) + 1
            del records, tasks, held
            writer.forget_calls()
            await p.settled()
            gc.collect()
            seen.append(len(gc.get_objects()))
        assert seen[1] < 1.05 * seen[0]


# ---- the pool ----


async def test_the_pool_never_overflows(fake: Start) -> None:
    """Whatever the mix of prompts and answers, the engine never has to make room itself, and idle slots are erased
    first."""
    chance = random.Random(7)
    reader, writer = await fake(), await fake(slots=4, context=4 * FLOOR)
    async with proxy(reader, writer) as p:
        writer.knobs.write_tps = 2000

        async def client(number: int) -> None:
            text = words(chance.randrange(20, 3 * FLOOR), str(number))
            for _ in range(3):
                limit = chance.randrange(1, FLOOR // 2)
                asked = body(NATIVE, text, limit=limit)
                reply = await p.ask(NATIVE, asked)
                assert reply.status == 200
                assert reply.text == right_text(asked, reply.timings["predicted_n"])
                assert reply.timings["predicted_n"] == limit

        await asyncio.gather(*(client(number) for number in range(12)))
        assert writer.slots.purged == 0
        assert writer.sent("erase")
        assert max(call.answered for call in writer.sent("decode")) > 0


async def test_what_never_fits_gets_the_engines_own_error(fake: Start) -> None:
    """A prompt longer than the context is refused by the engine at once, though the pool is full."""
    writer = await fake(slots=2, context=1000)
    async with proxy(None, writer) as p:
        writer.knobs.decode.stall_after = 1
        first = asyncio.create_task(p.ask(NATIVE, body(NATIVE, words(400), limit=500, stream=True)))
        await p.at_work(writer, "decode")
        reply = await p.ask(NATIVE, body(NATIVE, words(1000)))
        assert (reply.status, reply.json["error"]["type"]) == (400, "exceed_context_size_error")
        await hang_up(first)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_an_answer_without_limit_ends_alone(fake: Start, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Where the pool has no more room for it, it ends with an error, and the answer beside it is complete."""
    monkeypatch.setattr(growth, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(growth, "STEP_TOKENS", 100)
    monkeypatch.setattr(watch, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(fake_engine, "POLL_S", 0.0)
    writer = await fake(slots=2, context=2000)
    async with proxy(None, writer, split={"reserve_tokens": 200}) as p:
        writer.knobs.write_tps = 2000
        asked = body(NATIVE, "Beside.", limit=1000)
        beside = asyncio.create_task(p.ask(NATIVE, asked))
        await p.at_work(writer, "decode")
        writer.knobs.answer_tokens = 1900
        reply = await p.ask(NATIVE, body(NATIVE, "On and on.", limit=None, stream=stream))
        assert reply.status == (200 if stream else 503)
        assert "set max_tokens" in str(reply.error)
        writer.knobs.answer_tokens = 0
        assert (await beside).text == right_text(asked, 1000)


async def test_an_answer_without_limit_may_have_what_is_free(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows over idle conversations, which are erased in time, and is complete."""
    monkeypatch.setattr(growth, "STEP_TOKENS", 100)
    writer = await fake(slots=2, context=2000)
    async with proxy(None, writer, split={"reserve_tokens": 200}) as p:
        idle = await p.ask(NATIVE, body(NATIVE, words(900)))
        writer.knobs.answer_tokens = 1500
        asked = body(NATIVE, "On and on.", limit=None, stream=True)
        reply = await p.ask(NATIVE, asked)
        assert (idle.status, reply.status) == (200, 200)
        assert reply.text == right_text(asked, 1500)
        assert (writer.slots.purged, len(writer.sent("erase"))) == (0, 1)


@pytest.mark.parametrize(
    ("asked", "followed"),
    [
        (turn_of(3 * FLOOR, limit=ANSWER_TOKENS), False),
        (turn_of(20, limit=ANSWER_TOKENS), False),
        (turn_of(3 * FLOOR, limit=None), True),
        (turn_of(3 * FLOOR, limit=ANSWER_TOKENS, lora=[{"id": 0, "scale": 1.0}]), True),
        (turn_of(20, limit=ANSWER_TOKENS, lora=[{"id": 0, "scale": 1.0}]), True),
    ],
    ids=["counted", "short", "no limit", "not counted", "short, not counted"],
)
async def test_only_answers_that_may_outgrow_their_room_are_followed(
    fake: Start, monkeypatch: pytest.MonkeyPatch, asked: Json, followed: bool
) -> None:
    """Looks at the slots cost an engine, so they are made only where prompt or answer may be longer than reserved."""
    monkeypatch.setattr(growth, "LOOK_EVERY_S", 0.01)
    writer = await fake()
    async with proxy(None, writer) as p:
        writer.knobs.decode.pause_s = 0.01
        writer.forget_calls()
        assert (await p.ask(CHAT, asked)).status == 200
        assert bool(writer.sent("slots")) is followed


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CHAT, body(CHAT, "Two.", n=2)),
        (COMPLETIONS, {"prompt": ["One.", "Two."], "max_tokens": 4}),
        ("/v1/embeddings", {"input": "x"}),
        ("/rerank", {"query": "x"}),
    ],
    ids=["n", "prompts", "embeddings", "rerank"],
)
async def test_what_takes_several_slots_is_alone(fake: Start, path: str, asked: Json) -> None:
    """It waits until its engine is empty, and while it runs nobody else is let in; another engine goes on."""
    one, two = await fake(slots=2), await fake(slots=2)
    async with proxy(None, one, more={"writer-2": two}) as p:
        for writer in (one, two):
            writer.knobs.decode.stall_after = 1
        running = [await occupied(p, writer, f"anna {number}") for number, writer in enumerate((one, two))]
        alone = asyncio.create_task(p.ask(path, asked))
        await waiting(p, 1)
        (name,) = (name for name in ("writer", "writer-2") if p.proxy.admission.waiting_for(name))
        engine = one if name == "writer" else two
        two.knobs.decode.stall_after = one.knobs.decode.stall_after = None
        beside = await p.ask(PATH, short("beside"))
        assert (beside.status, beside.headers["X-Splitproxy-Engine"] == name) == (200, False)
        assert not [call for call in (*one.calls, *two.calls) if call.path == path]
        engine.knobs.decode.pause_s = 0.02
        await hang_up(running[0 if engine is one else 1])
        await until(lambda: [call for call in engine.calls if call.path == path])
        (call,) = (call for call in engine.calls if call.path == path and call.body.get("id_slot", -1) == -1)
        assert call.finished is not None or p.proxy.ledger.count(name).busy == 2
        assert (await alone).status == (200 if path in (CHAT, COMPLETIONS) else 404)
        assert not [call for call in engine.sent("decode") if call.finished is None]
        await hang_up(*running)


async def test_messages_run_side_by_side(fake: Start) -> None:
    """Requests that no slot can be named for share an engine with each other, streamed or not, and with any others."""
    writer = await fake(slots=4)
    async with proxy(None, writer) as p:
        writer.knobs.decode.pause_s = 1.0
        asked = [
            body(MESSAGES, "First.", stream=True),
            body(MESSAGES, "Second."),
            body(CHAT, "Third."),
            body(MESSAGES, "Fourth.", stream=True),
        ]
        tasks = []
        for number, one in enumerate(asked, start=1):
            tasks.append(asyncio.create_task(p.ask(MESSAGES if "Third" not in str(one) else CHAT, one)))
            await until(partial(at_work, writer, number))
        assert p.proxy.ledger.count("writer").busy == 4
        writer.knobs.decode.pause_s = 0.0
        for task, one in zip(tasks, asked, strict=True):
            assert (await task).text == right_text(one)


async def test_messages_do_not_wait_for_an_engine_to_be_empty(fake: Start) -> None:
    """An answer that is not streamed is seen to have begun by a look; until then nobody chooses a slot beside it."""
    writer = await fake(slots=2)
    async with proxy(None, writer) as p:
        writer.knobs.decode.delay_s = 0.3
        writer.knobs.decode.pause_s = 1.0
        whole = asyncio.create_task(p.ask(PATH, short("whole")))
        await until(lambda: writer.sent("decode"))
        message = asyncio.create_task(p.ask(MESSAGES, body(MESSAGES, "Beside.")))
        await until(lambda: len(writer.busy()) == 2)
        assert not whole.done()
        writer.knobs.decode.pause_s = 0.0
        assert [(await task).status for task in (whole, message)] == [200, 200]


async def test_a_conversation_of_messages_stays_in_its_slot(fake: Start) -> None:
    """The slot that the engine chose is known for the next turn, though others run beside it."""
    writer = await fake(slots=4)
    async with proxy(None, writer) as p:
        writer.knobs.decode.stall_after = 1
        held = await occupied(p, writer)
        writer.knobs.decode.stall_after = None
        messages = [{"role": "user", "content": words(3 * FLOOR)}]
        said = await p.ask(MESSAGES, turn(messages))
        first = writer.sent("decode")[-1]
        again = await p.ask(MESSAGES, turn(answered(messages, said.text, "And then?")))
        second = writer.sent("decode")[-1]
        assert (second.slot, again.status) == (first.slot, 200)
        assert second.cached >= first.read
        assert await p.metric("splitproxy_belief_mismatch_total") == 0
        await hang_up(held)


async def test_a_message_that_was_given_up_keeps_the_slot_that_the_engine_chose(fake: Start) -> None:
    """Where nobody knows yet which slot it got, nobody gets any until the engine has stopped."""
    writer = await fake(slots=2)
    text = words(1000)
    async with proxy(None, writer) as p:
        assert (await p.ask(CHAT, body(CHAT, text))).status == 200
        writer.knobs.decode.pause_s, writer.knobs.notice_s = 1.0, 0.5
        # More than a tenth of it is in the first slot, which we would not overwrite for it.
        gone = asyncio.create_task(p.ask(MESSAGES, body(MESSAGES, text[:300] + words(300, "another"))))
        await until(writer.busy)
        assert writer.busy() == [0]
        await hang_up(gone)
        writer.knobs.decode.pause_s = 0.0
        await asyncio.gather(*(p.ask(NATIVE, short(f"next {number}")) for number in range(2)))
        assert not writer.violations


async def test_an_endpoint_that_is_not_there_is_asked_alone_once(fake: Start) -> None:
    """To hear again that the engine does not have it, nobody waits, and nobody is kept waiting."""
    writer = await fake(slots=2)
    async with proxy(None, writer) as p:
        assert (await p.ask("/v1/embeddings", {"input": "x"})).status == 404
        writer.knobs.decode.stall_after = 1
        held = await occupied(p, writer)
        assert (await p.ask("/v1/embeddings", {"input": "x"})).status == 404
        another = asyncio.create_task(p.ask("/rerank", {"query": "x"}))
        await waiting(p, 1)
        await hang_up(held)
        assert (await another).status == 404
        p.proxy.fleet.health.lost("writer")
        await until(lambda: p.state("writer") is EngineState.READY)
        assert not p.proxy.fleet.members["writer"].lacks


# ---- conversations ----


def turn(messages: list[Json], **fields: Any) -> Json:
    return {"messages": messages, "max_tokens": ANSWER_TOKENS, **fields}


def answered(messages: list[Json], text: str, then: str) -> list[Json]:
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": then}]


async def test_as_many_conversations_stay_warm_as_there_are_slots(fake: Start) -> None:
    """Four at once, three turns each: only the first turn of each is handed over, none is mixed with another."""
    reader, writer = await fake(), await fake(slots=4)
    async with proxy(reader, writer) as p:

        async def conversation(number: int) -> list[str]:
            messages, routes = [{"role": "user", "content": words(3 * FLOOR, f"talk {number}")}], []
            for _ in range(3):
                asked = turn(messages)
                reply = await p.ask(CHAT, asked)
                assert reply.text == right_text(asked)
                routes.append(reply.way[0])
                messages = answered(messages, reply.text, "And then?")
            return routes

        routes = await asyncio.gather(*(conversation(number) for number in range(4)))
        assert routes == [["handover", "local", "local"]] * 4
        assert await p.metric("splitproxy_belief_mismatch_total") == 0


async def test_an_answer_that_was_cut_off_leaves_its_prompt(fake: Start) -> None:
    """A client that leaves in the middle of a limited answer may come back: its prompt is still there, and the room
    that was reserved counts as filled."""
    reader, writer = await fake(), await fake(slots=2)
    asked = turn([{"role": "user", "content": words(3 * FLOOR)}], stream=True)
    count = len(prompt_ids(asked))
    async with proxy(reader, writer) as p:
        writer.knobs.decode.stall_after = 2
        gone = asyncio.create_task(p.ask(CHAT, asked))
        await until(lambda: writer.sent("decode") and writer.sent("decode")[-1].answered == 2)
        await hang_up(gone)
        await p.settled()
        writer.knobs.decode.stall_after = None
        (slot,) = (slot for slot in p.proxy.ledger._engines["writer"].slots if slot.holding.occupied)
        assert (len(slot.holding.tokens), slot.holding.believed) == (count, 0)
        assert slot.holding.occupied == count + ANSWER_TOKENS
        again = await p.ask(CHAT, asked)
        assert (again.way, again.text) == (("local", "warm"), right_text(asked))
        assert again.timings["prompt_n"] <= 1


async def test_who_lost_its_slot_while_waiting_is_routed_again(fake: Start) -> None:
    """A conversation that was warm when it came, and is not when its turn comes, does not hold others up by being read
    there."""
    reader, writer = await fake(), await fake(slots=2, context=3 * FLOOR)
    async with proxy(reader, writer) as p:
        messages = [{"role": "user", "content": words(FLOOR + 100, "warm")}]
        said = await p.ask(CHAT, turn(messages))
        writer.knobs.decode.stall_after = 1
        running = asyncio.create_task(p.ask(NATIVE, body(NATIVE, "Run.", limit=FLOOR, stream=True)))
        await p.at_work(writer, "decode")
        writer.knobs.decode.stall_after = None
        large = asyncio.create_task(p.ask(NATIVE, body(NATIVE, "Large.", limit=5 * FLOOR // 2)))
        await waiting(p, 1)
        asked = turn(answered(messages, said.text, "And then?"))
        again = asyncio.create_task(p.ask(CHAT, asked))
        await waiting(p, 2)
        await hang_up(running)
        reply = await again
        assert (reply.status, reply.way) == (200, ("handover", "worth_moving"))
        assert reply.text == right_text(asked)
        assert (await large).status == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_the_ids_of_an_answer_are_exact_where_the_api_gives_them(fake: Start, stream: bool) -> None:
    """The native API tells the ids of its answer: what continues them is held, what differs is not believed."""
    writer = await fake(slots=2)
    async with proxy(None, writer) as p:
        ids = prompt_ids(body(NATIVE, words(FLOOR)))
        said = await p.ask(NATIVE, body(NATIVE, "", stream=stream, return_tokens=True) | {"prompt": ids})
        answer = [token for event in said.events for token in event.get("tokens", [])]
        assert len(answer) == ANSWER_TOKENS
        other = [*ids, *(token ^ 1 for token in answer)]
        held = [p.proxy.ledger.held("writer", Tokens(prompt)) for prompt in ([*ids, *answer, 65], other)]
        assert held == [len(ids) + ANSWER_TOKENS - 1, len(ids)]


@pytest.mark.parametrize("way", ["others", "sleep", "restart"])
async def test_an_engine_that_lost_what_it_held_is_believed_no_longer(fake: Start, way: str) -> None:
    """Used by others, asleep for a while, or restarted between two looks: the answers are right, the loss is counted,
    and nothing of before is believed."""
    reader, writer = await fake(), await fake(slots=4)
    async with proxy(reader, writer) as p:
        talks = [[{"role": "user", "content": words(3 * FLOOR, f"talk {number}")}] for number in range(3)]
        for number, messages in enumerate(talks):
            talks[number] = answered(messages, (await p.ask(CHAT, turn(messages))).text, "And then?")
        if way == "others":
            async with aiohttp.ClientSession() as http:
                for slot in range(4):
                    asked = {"prompt": words(2 * FLOOR, "else"), "n_predict": 4, "id_slot": slot}
                    async with http.post(writer.url + NATIVE, json=asked) as answer:
                        assert answer.status == 200
        elif way == "sleep":
            for held in writer.slots.all:
                held.clear()
        else:
            writer.die()
            await writer.revive()
        replies = []
        for messages in talks:
            asked = turn(messages)
            replies.append(await p.ask(CHAT, asked))
            assert replies[-1].text == right_text(asked)
        lost = await p.metric("splitproxy_belief_mismatch_total")
        if way == "restart":
            assert lost <= 1  # noticed by the connection, or by the figures
        else:
            assert [reply.way[0] for reply in replies] == ["local", "handover", "handover"]
            assert lost == 1


async def test_an_engine_that_came_back_as_another_is_recognised(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine that was restarted with another model between two looks is tested again, and gets no sessions."""
    monkeypatch.setattr(health, "IDENTIFY_INTERVAL_S", 0.0)
    reader, writer = await fake(), await fake(slots=2)
    async with proxy(reader, writer) as p:
        messages = [{"role": "user", "content": words(3 * FLOOR)}]
        said = await p.ask(CHAT, turn(messages))
        writer.weights, writer.build = type(writer.weights)(2), "b1-another"
        for slot in writer.slots.all:
            slot.clear()
        asked = turn(answered(messages, said.text, "And then?"))
        assert (await p.ask(CHAT, asked)).text == right_text(asked, weights=2)
        await until(lambda: p.pair()[0] is PairState.UNPROVEN and "build differs" in p.pair()[1])
        asked = body(CHAT, words(3 * FLOOR, "fresh"))
        reply = await p.ask(CHAT, asked)
        assert (reply.way, reply.text) == (("local", "pair_unproven"), right_text(asked, weights=2))


async def test_a_prompt_that_leaves_its_conversation_raises_no_doubt(
    fake: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that keeps only its end holds nothing for a prompt that differs earlier: that is counted, and the engine's
    other slots are believed in as before."""
    reader, writer = await fake(memory="hybrid"), await fake(memory="hybrid", slots=4)
    async with proxy(reader, writer) as p:
        talk = words(6 * FLOOR, "talk")
        await p.ask(CHAT, body(CHAT, words(3 * FLOOR, "bystander")))
        for text in (talk, talk[: 7 * FLOOR // 2] + "Something else."):
            asked = body(CHAT, text)
            assert (await p.ask(CHAT, asked)).text == right_text(asked)
        assert await p.metric("splitproxy_belief_mismatch_total") == 1
        assert not [record for record in caplog.records if "has lost what it held" in record.getMessage()]
        assert (await p.ask(CHAT, body(CHAT, words(3 * FLOOR, "bystander") + " More?"))).way == ("local", "warm")


# ---- pools ----


async def pools(fake: Start, **options: Any) -> tuple[list[FakeEngine], list[FakeEngine]]:
    """Two prefill and two decode engines."""
    return [await fake(), await fake()], [await fake(slots=2, **options), await fake(slots=2, **options)]


def among(readers: list[FakeEngine], writers: list[FakeEngine], **changes: Any) -> Any:
    more = {"reader-2": readers[1], "writer-2": writers[1]}
    return proxy(readers[0], writers[0], more=more, **changes)


async def all_proven(p: Running) -> None:
    await until(lambda: all(pair.state is PairState.PROVEN for pair in p.proxy.fleet.pairs.values()))
    await p.settled()


async def test_conversations_spread_and_stay(fake: Start) -> None:
    """New conversations go where most is free, and each next turn to the engine that holds it."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        for writer in writers:
            writer.knobs.write_tps = 50  # so that the first answers run while the last prompts are read
        engines: list[list[str]] = []
        talks = [[{"role": "user", "content": words(3 * FLOOR, f"talk {number}")}] for number in range(4)]
        for _ in range(3):
            replies = await asyncio.gather(*(p.ask(CHAT, turn(messages)) for messages in talks))
            engines.append([reply.headers["X-Splitproxy-Engine"] for reply in replies])
            talks = [answered(m, r.text, "And then?") for m, r in zip(talks, replies, strict=True)]
        assert sorted(engines[0]) == ["writer", "writer", "writer-2", "writer-2"]
        assert engines[0] == engines[1] == engines[2]
        assert all(reader.sent("save") for reader in readers)


async def test_a_prefill_engine_is_chosen_by_what_it_holds(fake: Start) -> None:
    """A document that one of them has read is read there again, and only what is new."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        for reader in readers:
            reader.forget_calls()
        document = words(4 * FLOOR, "document")
        for question in ("Who?", "Where?", "When?"):
            reply = await p.ask(CHAT, body(CHAT, f"{document} {question}"))
            for writer in writers:
                for slot in writer.slots.all:
                    slot.clear()
            p.proxy.ledger.distrust("writer")
            p.proxy.ledger.distrust("writer-2")
            assert reply.way == ("handover", "worth_moving")
        reads = [call for reader in readers for call in reader.sent("prefill")]
        assert sorted(call.cached > 4 * FLOOR for call in reads) == [False, True, True]
        assert sorted(len(reader.sent("prefill")) for reader in readers) == [0, 3]


@BOTH_KINDS
async def test_two_prompts_are_read_by_two_prefill_engines(fake: Start) -> None:
    """While one reads, the next prompt goes to the other."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        for reader in readers:
            reader.knobs.prefill.delay_s = 0.1
            reader.forget_calls()
        replies = await asyncio.gather(*(p.long(seed=f"prompt {number}") for number in range(2)))
        assert [reply.way[0] for reply in replies] == ["handover", "handover"]
        assert [len(reader.sent("prefill")) for reader in readers] == [1, 1]


async def test_a_decode_engine_that_dies_takes_nothing_else_with_it(fake: Start) -> None:
    """Streams that had begun there end with an error event, whoever waited is answered by the other, its own streams go
    on, and after its return it is tested and used again."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        for writer in writers:
            writer.knobs.write_tps = 100
        running = [asyncio.create_task(p.long(seed=f"talk {number}", stream=True, limit=60)) for number in range(4)]
        await until(lambda: sum(call.answered > 1 for writer in writers for call in writer.sent("decode")) == 4)
        later = [asyncio.create_task(p.long(seed=f"later {number}")) for number in range(3)]
        await waiting(p, 3)
        writers[0].die()
        replies = await asyncio.gather(*running)
        for number, reply in enumerate(replies):
            asked = body(CHAT, words(3 * FLOOR, f"talk {number}"), limit=60)
            if reply.headers["X-Splitproxy-Engine"] == "writer":
                assert reply.error is not None
                assert right_text(asked, 60).startswith(reply.text)
            else:
                assert reply.text == right_text(asked, 60)
        assert sum(reply.error is not None for reply in replies) == 2
        for number, task in enumerate(later):
            reply = await task
            assert (reply.status, reply.headers["X-Splitproxy-Engine"]) == (200, "writer-2")
            assert reply.text == right_text(body(CHAT, words(3 * FLOOR, f"later {number}")))
        await writers[0].revive()
        await all_proven(p)
        again = await asyncio.gather(*(p.long(seed=f"again {number}") for number in range(4)))
        assert {reply.headers["X-Splitproxy-Engine"] for reply in again} == {"writer", "writer-2"}
        assert {reply.way[0] for reply in again} == {"handover"}


async def test_a_prefill_engine_that_dies_takes_nothing_else_with_it(fake: Start) -> None:
    """Prompts that it was reading are read by the other prefill engine, whose own go on, and after its return it
    reads."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        for reader in readers:
            reader.knobs.prefill.stall_after = FLOOR
        tasks = [asyncio.create_task(p.long(seed=f"talk {number}")) for number in range(2)]
        for reader in readers:
            await p.at_work(reader, "prefill")
        readers[0].die()
        await waiting(p, 1)
        for reader in readers:
            reader.knobs.prefill.stall_after = None
        (first,) = (n for n in range(2) if readers[0].sent("prefill")[0].body["prompt"] == read_ahead(f"talk {n}"))
        await hang_up(tasks[1 - first])
        reply = await tasks[first]
        assert (reply.status, reply.way) == (200, ("handover", "worth_moving"))
        assert "X-Splitproxy-Fallback" not in reply.headers
        assert reply.text == right_text(body(CHAT, words(3 * FLOOR, f"talk {first}")))
        assert [failure.cause for failure in (await p.record(reply)).taken_over] == ["died"]
        assert await p.metric("splitproxy_taken_over_total", stage="prefill", reason="died") == 1
        assert (await p.long(seed="meanwhile")).way == ("handover", "worth_moving")
        await readers[0].revive()
        await all_proven(p)
        readers[0].forget_calls()
        for reader in readers:
            reader.knobs.prefill.delay_s = 0.1
        await asyncio.gather(*(p.long(seed=f"again {number}") for number in range(2)))
        assert len(readers[0].sent("prefill")) == 1


@pytest.mark.parametrize("knobs", [{"prefill": {"drop": True}}, {"save": {"drop": True}}, {"prefill": {"hang": True}}])
async def test_prefill_engines_are_tried_once_each(fake: Start, knobs: Json) -> None:
    """Where all of them fail, the decode engine reads the prompt itself."""
    readers, writers = await pools(fake)
    async with among(readers, writers, split={"prefill_silence_s": 0.6}) as p:
        await all_proven(p)
        for engine in (*readers, *writers):
            engine.forget_calls()
        for reader in readers:
            reader.knobs.update(knobs)
        reply = await p.long()
        assert (reply.status, reply.headers["X-Splitproxy-Route"]) == (200, "handover")
        assert reply.headers["X-Splitproxy-Fallback"].partition(":")[0] == next(iter(knobs))
        assert reply.text == right_text(body(CHAT, words(3 * FLOOR, "long")))
        assert [len(reader.sent("prefill")) for reader in readers] == [1, 1]
        assert not [call for writer in writers for call in writer.sent("restore")]
        for reader in readers:
            reader.knobs.update({stage: dict.fromkeys(changes, False) for stage, changes in knobs.items()})


async def test_what_the_folder_cannot_keep_is_read_once(fake: Start) -> None:
    """A session that could not be saved for want of space is no reason to read the prompt twice."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        for reader in readers:
            reader.forget_calls()
            reader.knobs.save.no_space = True
        reply = await p.long()
        assert (reply.status, reply.headers["X-Splitproxy-Fallback"]) == (200, "save:refused")
        assert sum(len(reader.sent("prefill")) for reader in readers) == 1


async def test_a_session_goes_to_a_decode_engine_that_can_take_it(fake: Start) -> None:
    """While a decode engine that came back has yet to prove itself, a waiting session is restored by another one."""
    readers, writers = await pools(fake)
    async with among(readers, writers) as p:
        await all_proven(p)
        readers[0].knobs.save.delay_s = readers[1].knobs.save.delay_s = 0.3
        asked = asyncio.create_task(p.long())
        await until(lambda: any(reader.sent("save") for reader in readers))
        chosen = p.proxy.fleet.forecast._jobs[0].target
        for pair in p.proxy.fleet.pairs.values():
            if pair.target.engine.name == chosen:
                pair.state = PairState.UNPROVEN
        reply = await asked
        assert reply.headers["X-Splitproxy-Engine"] not in ("", chosen)
        assert "X-Splitproxy-Fallback" not in reply.headers
        assert int(reply.headers["X-Splitproxy-Session-Bytes"]) > 0


async def test_a_session_that_no_decode_engine_can_take_is_read_again(fake: Start) -> None:
    """Where none has proven itself, the prompt is read locally, and the reason is that and no refusal."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, retry_s=3600) as p:
        await p.proven()
        reader.knobs.save.delay_s = 0.3
        asked = asyncio.create_task(p.long())
        await p.at_work(reader, "save")
        p.proxy.fleet.pairs["reader", "writer"].state = PairState.UNPROVEN
        reply = await asked
        assert (reply.status, reply.headers["X-Splitproxy-Fallback"]) == (200, "restore:unproven")


@BOTH_KINDS
async def test_who_waits_for_the_last_engine_hears_at_once_that_it_went(fake: Start) -> None:
    """A request that one engine failed and that waits for the other is told when that one goes, not at its deadline."""
    one, two = await fake(), await fake()
    async with proxy(None, one, more={"writer-2": two}) as p:
        for engine in (one, two):
            engine.knobs.decode.stall_after = 1
        held = asyncio.create_task(p.ask(PATH, short("held", stream=True)))
        await until(lambda: [call for call in (*one.sent("decode"), *two.sent("decode")) if call.answered])
        busy, free = (one, two) if one.busy() else (two, one)
        free.knobs.update({"decode": {"stall_after": None, "drop": True, "times": 1}})
        asked = asyncio.create_task(p.ask(PATH, short("asked")))
        await waiting(p, 1)
        busy.die()
        assert (await asked).status == 503
        assert (await held).error is not None
        assert (await p.ask(PATH, short("after"))).status == 200


@BOTH_KINDS
async def test_an_engine_that_loads_again_is_passed_over(fake: Start) -> None:
    """Where another decode engine is there, nobody gets to see that one is loading its model."""
    one, two = await fake(), await fake()
    async with proxy(None, one, more={"writer-2": two}) as p:
        one.knobs.update({"decode": {"fail": (503, "Loading model"), "times": 1}})
        reply = await p.ask(PATH, short("asked"))
        assert (reply.status, reply.headers["X-Splitproxy-Engine"]) == (200, "writer-2")
        assert len(one.sent("decode")) == 1


@pytest.mark.parametrize("takes_slots", [False, True])
async def test_other_calls_find_the_engine_that_lives(fake: Start, takes_slots: bool) -> None:
    """A call that is no generating one goes to another decode engine when the first one does not take it."""
    one, two = await fake(), await fake()
    path, asked = ("/v1/embeddings", {"input": "x"}) if takes_slots else ("/tokenize", {"content": "abc"})
    async with proxy(None, one, more={"writer-2": two}) as p:
        one.die()
        reply = await p.ask(path, asked)
        assert reply.status == (404 if takes_slots else 200)
        await until(lambda: p.state("writer") is EngineState.DOWN)


# ---- cancellation ----


@BOTH_KINDS
async def test_ten_cancelled_prefills_hold_nobody_up(fake: Start) -> None:
    """Ten long prompts are begun and given up; the next one waits for what is left of one batch, not for them, and one
    that the decode engine reads itself does not wait at all."""
    reader, writer = await fake(batch=500), await fake(slots=4)
    async with proxy(reader, writer) as p:
        reader.knobs.read_tps = 1000
        long = [
            asyncio.create_task(p.ask(CHAT, body(CHAT, words(50 * FLOOR, f"talk {number}")))) for number in range(10)
        ]
        await p.at_work(reader, "prefill")
        await waiting(p, 9)
        await hang_up(*long)
        started = asyncio.get_running_loop().time()
        moved = asyncio.create_task(p.ask(CHAT, body(CHAT, words(FLOOR + 50, "short"))))
        assert (await p.ask(PATH, short("local"))).way == ("local", "too_short")
        assert len(reader.sent("prefill")) == 1
        assert (await moved).way == ("handover", "worth_moving")
        given_up, last = reader.sent("prefill")
        assert given_up.read <= 2 * reader.batch
        assert last.started - started < 2 * reader.batch / reader.knobs.read_tps


async def test_cancellations_at_random_leave_nothing(fake: Start) -> None:
    """Whenever clients leave, those who stay get their own answers, and the books end at zero."""
    chance = random.Random(11)
    readers, writers = await pools(fake, context=8 * FLOOR)
    async with among(readers, writers) as p:
        await all_proven(p)
        for engine in (*readers, *writers):
            engine.knobs.read_tps, engine.knobs.write_tps = 20000, 1000
            engine.knobs.notice_s = 0.02

        async def client(number: int, patience_s: float | None, stream: bool) -> bool:
            asked = body(CHAT, words(chance.randrange(30, 4 * FLOOR), f"client {number}"), stream=stream)
            try:
                async with asyncio.timeout(patience_s):
                    reply = await p.ask(CHAT, asked)
            except TimeoutError:
                return False
            assert (reply.status, reply.text) == (200, right_text(asked))
            return True

        plan = [(chance.choice([None, chance.uniform(0.0, 0.5)]), chance.random() < 0.5) for _ in range(60)]
        stayed = await asyncio.gather(*(client(n, patience, stream) for n, (patience, stream) in enumerate(plan)))
        assert all(stay for stay, (patience, _) in zip(stayed, plan, strict=True) if patience is None)
        assert not all(stayed)


async def test_many_who_leave_do_not_make_an_engine_deaf(fake: Start) -> None:
    """Slots of requests that were cut off are looked at together: an engine whose slots are asked for too often does
    not notice that clients have left."""
    writer = await fake(slots=4)
    async with proxy(None, writer) as p:
        writer.knobs.notice_s = 2.0
        writer.knobs.decode.stall_after = 1
        running = [await occupied(p, writer, f"anna {number}") for number in range(4)]
        writer.forget_calls()
        await hang_up(*running)
        await p.settled()
        assert 2 <= len(writer.sent("slots")) <= 4
