"""A client leaves at every point of its request: what it started stops, and afterwards the books are at zero."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from splitproxy.model import Outcome
from tests.fake_engine import FakeEngine
from tests.harness import (
    CHAT,
    FLOOR,
    LAST_TURN,
    MESSAGES,
    NATIVE,
    RESPONSES,
    Reply,
    Running,
    body,
    needs,
    proxy,
    right_text,
    until,
    words,
)

KINDS = ("llama-server", "strata")
Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

LONG = words(3 * FLOOR)
NOTICE_S = 1.0  # until an engine knows that its client has left
GONE = (aiohttp.ClientError, asyncio.CancelledError)


@dataclass(frozen=True)
class Point:
    """Where a request is when its client leaves."""

    name: str
    step: str  # as the record names it
    role: str = ""  # of the engine that is at work then
    stage: str = ""  # what it works on
    knobs: dict[str, Any] | None = None
    stops: bool = True  # whether the engine can stop what it does; a save or restore runs to its end


POINTS = [
    Point("template", "tokenize", "decode", "template", {"hang": True}),
    Point("tokenize", "tokenize", "decode", "tokenize", {"hang": True}),
    Point("prefill begins", "prefill", "prefill", "prefill", {"hang": True}),
    Point("prefill", "prefill", "prefill", "prefill", {"stall_after": 600}),
    Point("save", "save", "prefill", "save", {"delay_s": 0.3}, stops=False),
    Point("restore", "restore", "decode", "restore", {"delay_s": 0.3}, stops=False),
    Point("first byte", "decode", "decode", "decode", {"hang": True}),
    Point("answer", "decode", "decode", "decode", {"stall_after": 3}),
]
# A whole answer; a stream that has not begun; one that was kept alive, so that its headers are out.
MANNERS = pytest.mark.parametrize(("stream", "keep_alive_s"), [(False, 5), (True, 5), (True, 0.02)])


def engine_of(p: Running, role: str) -> FakeEngine:
    return p.decode if role == "decode" or p.prefill is None else p.prefill


@asynccontextmanager
async def asking(p: Running, **fields: Any) -> AsyncIterator["asyncio.Task[Reply]"]:
    """A long request on its way; the client leaves at the end of the block."""
    task = asyncio.create_task(p.long(**fields))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def at_zero(p: Running) -> None:
    """The books are at zero, and the proxy serves as before."""
    await p.settled()
    await p.proven()
    for seed in ("after", "wards"):
        reply = await p.long(seed=seed)
        assert (reply.way, reply.text) == (
            ("handover", "worth_moving"),
            right_text(body(CHAT, words(3 * FLOOR, seed))),
        )


@MANNERS
@pytest.mark.parametrize("point", POINTS, ids=[point.name for point in POINTS])
async def test_what_a_client_started_stops_when_it_leaves(
    fake: Start, kind: str, point: Point, stream: bool, keep_alive_s: float
) -> None:
    """The step that runs is cancelled on its engine within a second, no file stays, and the slots come back (S14)."""
    if kind == "strata" and point.step == "tokenize":
        pytest.skip("a Strata server is not asked for ids")
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, keep_alive_s=keep_alive_s) as p:
        engine = engine_of(p, point.role)
        engine.knobs.update({point.stage: {**(point.knobs or {}), "times": 1}})
        async with asking(p, stream=stream):
            await p.at_work(engine, point.stage)
            if point.name == "prefill":
                await until(lambda: reader.sent("prefill")[0].read == 600)
            if point.name == "answer":
                await until(lambda: writer.sent("decode")[0].answered == 3)
        (call,) = engine.sent(point.stage)
        await until(lambda: call.finished is not None, NOTICE_S)
        assert call.cancelled is point.stops
        await until(lambda: p.proxy.recent, NOTICE_S)
        record = p.proxy.recent[-1]
        assert (record.outcome, record.step) == (Outcome.CANCELLED, point.step)
        assert await p.metric("splitproxy_cancelled_total", stage=point.step) == 1
        await until(lambda: not p.files(), NOTICE_S)
        await at_zero(p)


@MANNERS
async def test_who_waits_for_the_prefill_slot_may_leave(fake: Start, stream: bool, keep_alive_s: float) -> None:
    """A queued client that leaves is out of the queue at once, and nothing was sent for it."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, keep_alive_s=keep_alive_s) as p:
        reader.knobs.update({"prefill": {"hang": True, "times": 1}})
        async with asking(p, seed="first"):
            await p.at_work(reader, "prefill")
            async with asking(p, seed="second", stream=stream):
                await until(lambda: p.proxy.admission.waiting == 1)
            await until(lambda: p.proxy.admission.waiting == 0, NOTICE_S)
            await until(lambda: p.proxy.recent)
            assert (p.proxy.recent[-1].outcome, p.proxy.recent[-1].step) == (Outcome.CANCELLED, "queue")
        assert len(reader.sent("prefill")) == 1
        await at_zero(p)


@MANNERS
async def test_who_waits_for_the_decode_slot_may_leave(fake: Start, stream: bool, keep_alive_s: float) -> None:
    """A client that leaves while its session waits takes the session file with it."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, keep_alive_s=keep_alive_s) as p:
        writer.knobs.update({"decode": {"stall_after": 3, "times": 1}})
        async with asking(p, seed="first", stream=True):
            await until(lambda: writer.sent("decode") and writer.sent("decode")[0].answered == 3)
            async with asking(p, seed="second", stream=stream):
                await until(lambda: p.proxy.admission.waiting == 1 and p.files())
                assert p.proxy.ledger.session_bytes > 0
            await until(lambda: p.proxy.admission.waiting == 0 and not p.files(), NOTICE_S)
            await until(lambda: p.proxy.ledger.session_bytes == 0, NOTICE_S)
        assert [len(writer.sent(step)) for step in ("restore", "decode")] == [1, 1]
        await at_zero(p)


async def test_a_slot_is_not_used_before_its_engine_has_stopped(fake: Start) -> None:
    """An engine may take its time to notice that a client has left; until then the slot is nobody's."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        writer.knobs.notice_s = 0.6
        writer.knobs.update({"decode": {"stall_after": 3, "times": 1}})
        async with asking(p, stream=True):
            await until(lambda: writer.sent("decode") and writer.sent("decode")[0].answered == 3)
        writer.knobs.notice_s = 0
        assert (await p.ask(CHAT, body(CHAT, "Next."))).text == right_text(body(CHAT, "Next."))
        assert writer.violations == []
        await at_zero(p)


async def test_what_was_read_for_a_client_that_left_is_believed(fake: Start, kind: str) -> None:
    """The prompt of an answer that was cut off is held, and the same prompt is not read again."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        writer.knobs.update({"decode": {"stall_after": 3, "times": 1}})
        async with asking(p, stream=True):
            await until(lambda: writer.sent("decode") and writer.sent("decode")[0].answered == 3)
        await p.settled()
        assert (await p.long()).way == ("local", "warm")
        assert writer.sent("decode")[-1].read == LAST_TURN[kind]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings"])
async def test_other_calls_can_be_left_too(fake: Start, kind: str, path: str) -> None:
    """Whatever is passed through ends with its client, and gives the engine back."""
    needs(kind, path)
    reader, writer = await fake(slots=1), await fake(slots=2)
    async with proxy(reader, writer) as p:
        if path == "/v1/models":
            writer.knobs.update({"models": {"hang": True, "times": 1}})
            task: asyncio.Task[Reply] = asyncio.create_task(p.get(path))
            await p.at_work(writer, "models")
        else:
            writer.knobs.update({"decode": {"stall_after": 3, "times": 1}})
            blocker = asyncio.create_task(p.ask(CHAT, body(CHAT, "Go on.", stream=True)))
            await p.at_work(writer, "decode")
            task = asyncio.create_task(p.ask(path, {"input": "x"}))
            await until(lambda: p.proxy.admission.waiting == 1)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: p.proxy.admission.waiting == 0, NOTICE_S)
        if path != "/v1/models":
            blocker.cancel()
            await asyncio.wait([blocker])
        await at_zero(p)


@pytest.mark.parametrize("sent", [b"", b'{"messages": [{"role"'], ids=["no body", "half a body"])
async def test_a_client_that_leaves_while_it_sends_is_no_error(
    fake: Start, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that never comes whole is nobody's fault here, and nothing is logged as one."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        _, connection = await asyncio.open_connection(*p.host)
        connection.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n".encode() + sent)
        await connection.drain()
        await p.get("/health")  # by then the proxy has seen what was sent before
        connection.close()
        await at_zero(p)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_client_that_closes_its_sending_side_has_left(fake: Start) -> None:
    """A half-closed connection is taken for a closed one: nothing runs on for it."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        reader.knobs.update({"prefill": {"hang": True, "times": 1}})
        incoming, connection = await asyncio.open_connection(*p.host)
        asked = json.dumps(body(CHAT, LONG, stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n"
        connection.write(head.encode() + asked)
        await p.at_work(reader, "prefill")
        connection.write_eof()
        assert await asyncio.wait_for(incoming.read(), NOTICE_S) == b""
        connection.close()
        await until(lambda: reader.sent("prefill")[0].cancelled, NOTICE_S)
        await at_zero(p)


# ---- the proxy leaves ----


async def test_a_running_answer_may_end_when_the_proxy_stops(fake: Start) -> None:
    """While the proxy stops, what runs is finished, and who comes now is told to come elsewhere."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, drain_s=10) as p:
        writer.knobs.decode.pause_s = 0.05
        running = asyncio.create_task(p.long(stream=True))
        await until(lambda: writer.sent("decode") and writer.sent("decode")[0].answered == 2)
        stopping = asyncio.create_task(p.stop())
        await until(lambda: p.proxy.stopping)
        late = await p.ask(CHAT, body(CHAT, "Too late."))
        assert (late.status, late.json["error"]["type"]) == (503, "unavailable_error")
        assert int(late.headers["Retry-After"]) > 0
        assert (await p.get("/health")).status == 503
        reply = await running
        assert (reply.text, reply.error) == (right_text(body(CHAT, words(3 * FLOOR, "long"))), None)
        async with asyncio.timeout(NOTICE_S):
            await stopping


@pytest.mark.parametrize("path", [CHAT, NATIVE, RESPONSES, MESSAGES])
async def test_the_drain_is_bounded(fake: Start, kind: str, path: str) -> None:
    """What has not ended after drain_s is cut: the engine stops, and the stream ends in an error of its API."""
    needs(kind, path)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, drain_s=0.2) as p:
        writer.knobs.update({"decode": {"stall_after": 3, "times": 1}})
        running = asyncio.create_task(p.ask(path, body(path, "Go on.", stream=True)))
        await until(lambda: writer.sent("decode") and writer.sent("decode")[0].answered == 3)
        async with asyncio.timeout(NOTICE_S):
            await p.stop()
        reply = await running
        assert (reply.status, len(reply.events) > 1) == (200, True)
        assert reply.error is not None
        assert reply.error["message"] == "the proxy is shutting down"
        await until(lambda: writer.sent("decode")[0].cancelled, NOTICE_S)


async def test_a_whole_answer_that_is_cut(fake: Start) -> None:
    """Where nothing was sent yet, the drain's end is a status of its own."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, drain_s=0.2) as p:
        writer.knobs.update({"decode": {"hang": True, "times": 1}})
        running = asyncio.create_task(p.ask(CHAT, body(CHAT, "Go on.")))
        await until(lambda: writer.sent("decode"))
        async with asyncio.timeout(NOTICE_S):
            await p.stop()
        reply = await running
        assert (reply.status, reply.json["error"]["type"]) == (503, "unavailable_error")
        assert "Retry-After" in reply.headers


async def test_a_client_that_reads_nothing_does_not_hold_up_the_stop(fake: Start) -> None:
    """The last words are for who listens."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, drain_s=0.2) as p:
        writer.knobs.decode.stall_after = 3
        sent = json.dumps(body(CHAT, "Go on.", stream=True)).encode()
        _, connection = await asyncio.open_connection(*p.host, limit=1)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        )
        connection.write(head.encode() + sent)
        await until(lambda: writer.sent("decode") and writer.sent("decode")[0].answered == 3)
        async with asyncio.timeout(NOTICE_S):
            await p.stop()
        connection.close()


async def test_an_idle_proxy_stops_at_once(fake: Start) -> None:
    """A connection that is merely open holds nobody up."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, drain_s=10) as p:
        _, idle = await asyncio.open_connection(*p.host)
        await p.get("/health")  # by then the proxy has accepted it
        async with asyncio.timeout(NOTICE_S):
            await p.stop()
        idle.close()


# ---- many ----


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_clients_that_leave(fake: Start, kind: str, seed: int) -> None:
    """However many leave, at whatever moment, the next is served, and its answer is its own."""
    chance = random.Random(seed)
    reader, writer = await fake(), await fake(slots=4)
    async with proxy(reader, writer, keep_alive_s=0.05) as p:
        reader.knobs.read_tps, writer.knobs.write_tps = 20_000, 100
        reader.knobs.save.delay_s = writer.knobs.restore.delay_s = 0.02

        async def leave(number: int) -> None:
            await asyncio.sleep(chance.uniform(0, 0.5))
            prompt = words(chance.choice([40, 3 * FLOOR]), str(number))
            path = chance.choice([CHAT, NATIVE if kind == "llama-server" else RESPONSES])
            asked = body(path, prompt, stream=chance.random() < 0.7)
            task = asyncio.create_task(p.ask(path, asked))
            await asyncio.wait([task], timeout=chance.uniform(0, 0.6))
            if task.done():
                assert task.result().text == right_text(asked)
            task.cancel()
            await asyncio.wait([task])

        await asyncio.gather(*map(leave, range(20)))
        await at_zero(p)
