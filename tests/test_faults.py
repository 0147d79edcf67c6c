"""Every stage fails in every way: the answer is right all the same, or the error is clear and in the client's words."""

import asyncio
import itertools
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from splitproxy.engines import llama_server, strata_server
from splitproxy.fleet import health, pairs, slots
from splitproxy.model import EngineState, PairState
from tests.fake_engine import FakeEngine
from tests.harness import CHAT, FLOOR, SPLITTABLE, Reply, Running, body, needs, proxy, right_text, until, words

KINDS = ("llama-server", "strata")
Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

LONG = words(3 * FLOOR)
# For trouble that only a deadline ends; elsewhere a busy machine must not bring them about.
DEADLINES = {"prefill_silence_s": 0.6, "transfer_timeout_s": 0.6, "decode_silence_s": 0.6}
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The access log so far."""
    caplog.set_level(logging.INFO, "splitproxy")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "splitproxy.access"]


async def recovered(p: Running) -> None:
    """Once the trouble is over, the next long prompt is handed over."""
    for engine in p.engines:
        if engine.dead:
            await engine.revive()
    await p.proven()
    await p.settled()
    after = await p.long(seed="afterwards")
    assert (after.status, after.way) == (200, ("handover", "worth_moving"))
    assert after.text == right_text(body(CHAT, words(3 * FLOOR, "afterwards")))


# ---- on the way: no error for the client ----

PREFILL_FAULTS: list[tuple[Json, str, str]] = [
    ({"prefill": {"fail": (400, "no")}}, "prefill", "refused"),
    ({"prefill": {"fail": (500, "no")}}, "prefill", "refused"),
    ({"prefill": {"fail": (503, "Loading model")}}, "prefill", "refused"),
    ({"prefill": {"die": True}}, "prefill", "died"),
    ({"prefill": {"drop": True}}, "prefill", "died"),
    ({"prefill": {"die_after": 600}}, "prefill", "died"),
    ({"prefill": {"cut_after": 600}}, "prefill", "died"),
    ({"prefill": {"hang": True}}, "prefill", "timeout"),
    ({"prefill": {"stall_after": 600}}, "prefill", "timeout"),
    ({"prefill": {"error_after": 600}}, "prefill", "refused"),
    ({"save": {"fail": (500, "Unable to save slot")}}, "save", "refused"),
    ({"save": {"fail": (501, "no slots")}}, "save", "refused"),
    ({"save": {"hang": True}}, "save", "timeout"),
    ({"save": {"die": True}}, "save", "died"),
    ({"save": {"drop": True}}, "save", "died"),
    ({"save": {"no_space": True}}, "save", "refused"),
    ({"save": {"wrong_count": 1}}, "save", "corrupt"),
    ({"save": {"truncate_bytes": 1}}, "check", "corrupt"),
    ({"save": {"truncate_bytes": 10**9}}, "check", "corrupt"),
    ({"save": {"wrong_tokens": True}}, "check", "corrupt"),
    ({"save": {"wrong_magic": True}}, "check", "corrupt"),
]
RESTORE_FAULTS: list[tuple[Json, str, str]] = [
    ({"restore": {"fail": (400, "Unable to restore slot")}}, "restore", "refused"),
    ({"restore": {"fail": (500, "no")}}, "restore", "refused"),
    ({"restore": {"short_count": 1}}, "restore", "corrupt"),
    ({"restore": {"drop": True}}, "restore", "died"),
    ({"restore": {"hang": True}}, "restore", "timeout"),
]
FAULTS = [("prefill", *row) for row in PREFILL_FAULTS] + [("decode", *row) for row in RESTORE_FAULTS]


def once(knobs: Json) -> Json:
    """The same trouble for one call only."""
    return {stage: {**changes, "times": 1} for stage, changes in knobs.items()}


def name(row: Any) -> str:
    return "-".join(f"{key}={value}" for changes in row.values() for key, value in changes.items())


@BOTH
@pytest.mark.parametrize(
    ("role", "knobs", "stage", "reason"), FAULTS, ids=[f"{stage}-{name(knobs)}" for _, knobs, stage, _ in FAULTS]
)
async def test_a_failure_on_the_way_is_no_error(
    fake: Start,
    kind: str,
    lines: Callable[[], list[str]],
    role: str,
    knobs: Json,
    stage: str,
    reason: str,
    stream: bool,
) -> None:
    """Whatever goes wrong before the decode engine answers, it reads the prompt itself, and one line says so (S12)."""
    if kind == "strata" and "wrong_tokens" in knobs.get("save", {}):
        pytest.skip("a Strata file lists no tokens where others could find them")
    reader, writer = await fake(), await fake()
    asked = body(CHAT, LONG, stream=stream)
    async with proxy(reader, writer, split=DEADLINES if reason == "timeout" else {}) as p:
        await p.proven()
        (reader if role == "prefill" else writer).knobs.update(once(knobs))
        reply = await p.ask(CHAT, asked)
        record = await p.record(reply)
        assert (reply.status, reply.text) == (200, right_text(asked))
        assert (reply.way[0], reply.headers["X-Splitproxy-Fallback"]) == ("handover", f"{stage}:{reason}")
        assert (record.path, record.outcome) == ("fallback", "ok")
        (line,) = lines()
        assert f"fell back at {stage} ({reason})" in line
        assert await p.metric("splitproxy_fallbacks_total", stage=stage, reason=reason) == 1
        assert await p.metric("splitproxy_handoffs_total", result="failed") == 1
        assert p.files() == []
        await recovered(p)


@BOTH
async def test_a_decode_engine_that_dies_at_the_restore_is_an_error(
    fake: Start, lines: Callable[[], list[str]], stream: bool
) -> None:
    """Without a decode engine nobody answers; the session file is gone, and the error says when to come again."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        writer.knobs.update(once({"restore": {"die": True}}))
        reply = await p.long(stream=stream)
        assert (reply.status, reply.json["error"]["type"]) == (503, "unavailable_error")
        assert int(reply.headers["Retry-After"]) > 0
        await p.record(reply)
        assert len(lines()) == 1
        assert p.files() == []
        await recovered(p)


async def test_a_folder_that_others_have_filled_is_noticed_before_reading(
    fake: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads a prompt whose session has no place to go; when there is space again, it is used."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        with monkeypatch.context() as patch:
            patch.setattr(p.proxy.store, "free_bytes", lambda: 100)
            for seed in ("first", "second"):
                assert (await p.long(seed=seed)).way == ("local", "no_room")
        assert reader.steps() == []
        assert [record.levelname for record in caplog.records if str(p.folder) in record.getMessage()] == ["WARNING"]
        assert (await p.long(seed="afterwards")).way == ("handover", "worth_moving")


async def test_a_file_that_is_written_after_its_deadline_is_swept(fake: Start) -> None:
    """A session that an engine saves when nobody waits any more does not stay in the folder."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, split=DEADLINES) as p:
        await p.proven()
        late = p.folder / "splitproxy-0123456789abcdef0123456789abcdef.session"
        reader.knobs.update(once({"save": {"hang": True}}))
        reply = await p.long()
        saved = p.folder / reader.sent("save")[-1].body["filename"]
        saved.write_bytes(b"late")
        late.write_bytes(b"later")
        await until(lambda: not p.files())
    assert reply.headers["X-Splitproxy-Fallback"] == "save:timeout"


@pytest.mark.parametrize("knobs", [{"prefill": {"fail": (500, "no")}}, {"save": {"truncate_bytes": 1}}], ids=name)
@BOTH
async def test_a_failure_may_be_wanted_as_an_error(fake: Start, knobs: Json, stream: bool) -> None:
    """With on_prefill_failure = "reject" a prompt that cannot be moved is refused for now, and nothing is read."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, split={"on_prefill_failure": "reject"}) as p:
        reader.knobs.update(once(knobs))
        reply = await p.long(stream=stream)
        assert (reply.status, reply.json["error"]["code"]) == (503, 503)
        assert int(reply.headers["Retry-After"]) > 0
        assert writer.sent("decode") == []
        await recovered(p)


# ---- tokens ----


@pytest.mark.llama_server_only("a Strata server is not asked for ids")
@pytest.mark.parametrize("stage", ["tokenize", "template"])
@pytest.mark.parametrize(
    "trouble", [{"fail": (500, "no")}, {"drop": True}, {"hang": True}], ids=["refused", "died", "hangs"]
)
@BOTH
async def test_a_prompt_that_cannot_be_counted_stays(
    fake: Start, stage: str, trouble: Json, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ids there is nothing to move: the decode engine reads the client's own body."""
    monkeypatch.setattr(llama_server, "TOKENIZE_TIMEOUT_S", 0.2)
    reader, writer = await fake(), await fake()
    asked = body(CHAT, LONG, stream=stream)
    async with proxy(reader, writer) as p:
        writer.knobs.update({stage: trouble})
        reply = await p.ask(CHAT, asked)
        assert (reply.way, reply.text) == (("local", "tokenizer_down"), right_text(asked))
        writer.knobs.update({stage: {"fail": None, "drop": False, "hang": False}})
        await recovered(p)


# ---- the decode engine itself ----


@pytest.mark.parametrize("path", [*SPLITTABLE, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("knobs", [{"fail": (500, "broken")}, {"drop": True}, {"die": True}], ids=str)
@BOTH
async def test_a_decode_engine_that_fails_before_its_first_byte(
    fake: Start, kind: str, lines: Callable[[], list[str]], path: str, knobs: Json, stream: bool
) -> None:
    """The client gets the engine's own error, or one of ours where it says nothing, in its API's shape."""
    needs(kind, path)
    reader, writer = await fake(), await fake()
    asked = (
        {"input": LONG} if path == "/v1/responses" else body(path, LONG, messages=[{"role": "user", "content": LONG}])
    )
    async with proxy(reader, writer) as p:
        writer.knobs.update(once({"decode": knobs}))
        reply = await p.ask(path, {**asked, "stream": stream})
        record = await p.record(reply)
        if "fail" in knobs:
            assert (reply.status, reply.json["error"]["message"]) == (500, "broken")
        else:
            assert reply.status == 502
            assert reply.json.get("type") == ("error" if path == "/v1/messages" else None)
            assert reply.json["error"]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
        assert (record.outcome, record.status) == ("error", reply.status)
        assert len(lines()) == 1
        await recovered(p)


@pytest.mark.parametrize("prompt", [LONG, "short"], ids=["long", "short"])
@pytest.mark.parametrize("knobs", [{"cut_after": 3}, {"die_after": 3}, {"stall_after": 3}], ids=str)
async def test_a_stream_that_breaks_ends_with_an_error_event(
    fake: Start, lines: Callable[[], list[str]], prompt: str, knobs: Json
) -> None:
    """After the first byte, all that is left is to say that there is no more to come."""
    reader, writer = await fake(), await fake()
    asked = body(CHAT, prompt, stream=True)
    async with proxy(reader, writer, split=DEADLINES if "stall_after" in knobs else {}) as p:
        await p.proven()
        writer.knobs.update(once({"decode": knobs}))
        reply = await p.ask(CHAT, asked)
        record = await p.record(reply)
        assert (reply.status, reply.text) == (200, right_text(asked, 3))
        assert reply.error is not None
        assert reply.error["code"] == (504 if "stall_after" in knobs else 502)
        assert not reply.content.endswith(b"data: [DONE]\n\n")
        assert (record.outcome, len(lines())) == ("error", 1)
        await recovered(p)


async def test_an_error_event_of_the_engine_is_passed_on(fake: Start, lines: Callable[[], list[str]]) -> None:
    """What the engine itself says about its failure is what the client reads; nothing is believed held afterwards."""
    reader, writer = await fake(), await fake()
    asked = body(CHAT, LONG, stream=True)
    async with proxy(reader, writer) as p:
        writer.knobs.update(once({"decode": {"error_after": 3}}))
        reply = await p.ask(CHAT, asked)
        record = await p.record(reply)
        assert reply.error == {"code": 500, "message": "the engine failed on purpose", "type": "server_error"}
        assert (record.outcome, len(lines())) == ("error", 1)
        assert (await p.ask(CHAT, asked)).way == ("handover", "worth_moving")
        await recovered(p)


@pytest.mark.parametrize("prompt", [LONG, "short"], ids=["long", "short"])
@pytest.mark.parametrize("knobs", [{"cut_after": 3}, {"die_after": 3}], ids=str)
async def test_a_whole_answer_that_breaks_is_an_error(fake: Start, prompt: str, knobs: Json) -> None:
    """Half an answer is none."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        writer.knobs.update(once({"decode": knobs}))
        reply = await p.ask(CHAT, body(CHAT, prompt))
        assert (reply.status, reply.json["error"]["type"]) == (502, "server_error")
        await recovered(p)


async def test_a_stream_that_never_begins_ends(fake: Start) -> None:
    """An engine's silence is not waited for without end while a client hopes."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, split=DEADLINES, keep_alive_s=0.05) as p:
        await p.proven()
        writer.knobs.update(once({"decode": {"hang": True}}))
        reply = await p.ask(CHAT, body(CHAT, "Hello.", stream=True))
        assert (reply.status, reply.content[:3]) == (200, b":\n\n")
        assert reply.error is not None
        assert reply.error["code"] == 504
        await recovered(p)


@BOTH
async def test_a_hanging_engine_that_goes_down_is_given_up(fake: Start, stream: bool) -> None:
    """Who waits for an engine that turns out to be gone is told so at once."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        writer.knobs.decode.hang = True
        asking = asyncio.create_task(p.ask(CHAT, body(CHAT, "Hello.", stream=stream)))
        await p.at_work(writer, "decode")
        writer.knobs.health.fail = (500, "gone")
        assert (await asking).status in (502, 504)
        writer.knobs.update({"health": {"fail": None}, "decode": {"hang": False}})
        await recovered(p)


# ---- engines that are not there ----


@pytest.mark.parametrize("path", [*SPLITTABLE, "/v1/messages", "/v1/embeddings", "/v1/models"])
@pytest.mark.parametrize("trouble", ["down", "loading", "both down"])
async def test_no_decode_engine_is_an_error_for_now(fake: Start, path: str, trouble: str) -> None:
    """Without a decode engine every call is told when to come again, in its API's shape."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        if trouble == "loading":
            writer.knobs.loading = True
        else:
            writer.die()
        if trouble == "both down":
            reader.die()
        await until(lambda: p.state("writer") is not EngineState.READY)
        reply = await p.get(path) if path == "/v1/models" else await p.ask(path, body(path, LONG, messages=[]))
        assert (reply.status, int(reply.headers["Retry-After"]) > 0) == (503, True)
        assert reply.json["error"]["type"] == ("overloaded_error" if path == "/v1/messages" else "unavailable_error")
        assert (await p.get("/health")).status == 503
        writer.knobs.loading = False
        await recovered(p)
        assert (await p.get("/health")).status == 200


@pytest.mark.parametrize("trouble", ["down", "loading"])
async def test_a_prefill_engine_that_is_not_there_costs_nothing(fake: Start, trouble: str) -> None:
    """While the prefill engine is away the decode engine serves alone; when it is back, prompts move again."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        if trouble == "down":
            reader.die()
        reader.knobs.loading = trouble == "loading"
        await until(lambda: p.state("reader") is not EngineState.READY)
        reply = await p.long()
        assert (reply.way, reply.text) == (("local", "prefill_down"), right_text(body(CHAT, LONG_SEEDED)))
        assert (await p.get("/health")).json["status"] == "ok"
        reader.knobs.loading = False
        await recovered(p)


LONG_SEEDED = words(3 * FLOOR, "long")


async def test_engines_may_come_later_than_the_proxy(fake: Start) -> None:
    """A proxy that starts before its engines refuses for now, then serves alone, then hands over."""
    reader, writer = await fake(), await fake()
    reader.die()
    writer.knobs.loading = True
    async with proxy(reader, writer, judged=False) as p:
        await until(lambda: p.state("writer") is EngineState.LOADING)
        assert (await p.long()).status == 503
        writer.knobs.loading = False
        async with asyncio.timeout(5):
            await p.proxy.fleet.first_verdicts()
        assert (await p.long()).way == ("local", "prefill_down")
        await recovered(p)


async def test_the_first_verdict_waits_for_an_engine_that_loads(fake: Start) -> None:
    """A pair is not judged while its prefill engine loads the model, and is proven as soon as that has come up."""
    reader, writer = await fake(), await fake()
    reader.knobs.loading = True
    async with proxy(reader, writer, judged=False) as p:
        await until(lambda: p.state("writer") is EngineState.READY and p.state("reader") is EngineState.LOADING)
        judged = asyncio.create_task(p.proxy.fleet.first_verdicts())
        assert (await p.long()).way == ("local", "prefill_down")
        assert not judged.done()
        reader.knobs.loading = False
        async with asyncio.timeout(5):
            await judged
        assert (await p.long()).way == ("handover", "worth_moving")


async def test_a_prefill_engine_that_is_killed_in_the_middle_is_used_again(fake: Start) -> None:
    """The answer comes all the same, and the health watcher notices the end and the return by itself."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        reader.knobs.read_tps = 2000
        asking = asyncio.create_task(p.long(stream=True))
        await p.at_work(reader, "prefill")
        reader.die()
        reply = await asking
        assert (reply.status, reply.text) == (200, right_text(body(CHAT, LONG_SEEDED)))
        assert reply.headers["X-Splitproxy-Fallback"] == "prefill:died"
        await until(lambda: p.state("reader") is EngineState.DOWN)
        reader.knobs.read_tps = 0
        await recovered(p)


async def test_a_prompt_that_waits_for_a_prefill_engine_that_dies_is_answered(fake: Start) -> None:
    """Whoever waits in line for a prefill engine that goes is answered by the decode engine."""
    reader, writer = await fake(), await fake(slots=2)
    async with proxy(reader, writer) as p:
        reader.knobs.prefill.hang = True
        asking = [asyncio.create_task(p.long(seed=seed)) for seed in "ab"]
        await until(lambda: p.proxy.admission.waiting == 1)
        reader.die()
        replies = await asyncio.gather(*asking)
        assert [reply.status for reply in replies] == [200, 200]
        assert [reply.text for reply in replies] == [right_text(body(CHAT, words(3 * FLOOR, seed))) for seed in "ab"]
        assert {reply.headers["X-Splitproxy-Fallback"] for reply in replies} == {"prefill:died"}
        reader.knobs.prefill.hang = False
        await recovered(p)


async def test_a_prompt_that_waits_for_a_prefill_engine_in_vain_is_answered(fake: Start) -> None:
    """Whoever has waited long enough for a prefill engine that never comes free is answered by the decode engine."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, split=DEADLINES, queue={"timeout_s": 0.8}) as p:
        await p.proven()
        reader.knobs.notice_s = 3
        reader.knobs.update({"prefill": {"hang": True, "times": 1}})
        for seed in "ab":
            reply = await p.long(seed=seed)
            assert (reply.status, reply.text) == (200, right_text(body(CHAT, words(3 * FLOOR, seed))))
            assert reply.headers["X-Splitproxy-Fallback"] == "prefill:timeout"
        reader.knobs.notice_s = 0
        await recovered(p)


async def test_a_prefill_engine_that_does_not_stop_is_not_waited_for(
    fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is at work long after its request was cut off makes the engine one that is away."""
    monkeypatch.setattr(slots, "STUCK_S", 0.1)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, split=DEADLINES) as p:
        await p.proven()
        reader.knobs.notice_s = 2
        reader.knobs.update({"prefill": {"hang": True, "times": 1}})
        assert (await p.long()).headers["X-Splitproxy-Fallback"] == "prefill:timeout"
        await until(lambda: p.proxy.fleet.members["reader"].stuck)
        assert (await p.long(seed="next")).way == ("local", "prefill_down")
        reader.knobs.notice_s = 0
        await recovered(p)


async def test_an_engine_that_stands_still_is_noticed(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes connections and does nothing is given up after two looks at its health."""
    for module in (llama_server, strata_server):
        monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 0.1)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        reader.knobs.health.hang = True
        await until(lambda: p.state("reader") is EngineState.DOWN)
        assert (await p.long()).way == ("local", "prefill_down")
        reader.knobs.health.hang = False
        await recovered(p)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_whose_process_ended_is_a_new_one(
    fake: Start, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """Whoever starts an engine again tells, and nothing is believed of it though no look has found it away."""
    monkeypatch.setattr(health, "HEALTH_INTERVAL_S", 3600.0)
    reader, writer = await fake(), await fake()
    name = "reader" if role == "prefill" else "writer"
    engine = reader if role == "prefill" else writer
    async with proxy(reader, writer) as p:
        held = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
        assert (await p.ask(CHAT, held)).status == 200
        engine.die()
        await engine.revive()
        p.proxy.fleet.health.lost(name)
        assert not p.proxy.ledger.is_ready(name)
        await p.proven()
        assert p.proxy.ledger.count(name).holding == 0
        assert (await p.ask(CHAT, held)).way[0] == "handover" if role == "decode" else "local"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_was_restarted_unseen_costs_time_alone(fake: Start, role: str) -> None:
    """Slots that were lost behind our back make prompts be read again, never a wrong answer."""
    reader, writer = await fake(), await fake()
    engine = reader if role == "prefill" else writer
    first = body(CHAT, LONG)
    async with proxy(reader, writer) as p:
        answer = await p.ask(CHAT, first)
        for slot in engine.slots.all:
            slot.clear()
        turn = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": LONG}]
        second = {**first, "messages": [*first["messages"], *turn]}
        reply = await p.ask(CHAT, second)
        assert (reply.status, reply.text) == (200, right_text(second))
        await recovered(p)


# ---- pairs that do not work ----


async def test_three_handovers_in_vain_switch_the_pair_off(fake: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A pair whose restored sessions are read again is left alone after three, and taken up when it works again."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        writer.knobs.restore.forgets = True
        ways = []
        for seed in "abcd":
            reply = await p.long(seed=seed)
            assert reply.text == right_text(body(CHAT, words(3 * FLOOR, seed)))
            ways.append(reply.way)
        assert ways == [("handover", "worth_moving")] * 3 + [("local", "pair_switched_off")]
        assert await p.metric("splitproxy_handoff_ineffective_total") == 3
        state, fault = p.pair()
        assert (state, bool(fault)) == (PairState.SWITCHED_OFF, True)
        assert len([r for r in caplog.records if "switched off" in r.getMessage()]) == 1
        writer.knobs.restore.forgets = False
        await recovered(p)


async def test_what_no_self_test_shows_is_tried_less_and_less_often(
    fake: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A pair that passes its self-test and is switched off again rests twice as long; people are warned once."""
    caplog.set_level(logging.INFO)
    reader, writer = await fake(), await fake()

    def told(level: int) -> int:
        return sum("is switched off" in record.getMessage() for record in caplog.records if record.levelno == level)

    async with proxy(reader, writer, retry_s=0.2) as p:
        pair = p.proxy.fleet.pairs["reader", "writer"]
        assert pair.report is not None
        writer.knobs.restore.forgets, writer.knobs.restore.forgets_from = True, pair.report.tokens + 1
        rests = []
        for time in range(3):
            await p.proven()
            for number in range(3):
                assert (await p.long(seed=f"{time} {number}")).way == ("handover", "worth_moving")
            assert pair.state is PairState.SWITCHED_OFF
            rests.append(pair.rests)
        assert rests == [False, True, True]
        assert (told(logging.WARNING), told(logging.INFO)) == (1, 2)
        writer.knobs.restore.forgets = False
        await recovered(p)
        assert pair.relapses == 0


async def test_a_handover_that_works_forgives_those_in_vain(fake: Start) -> None:
    """Only handovers in vain in a row count."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        for place, forgets in enumerate([True, True, False, True, True]):
            writer.knobs.restore.forgets = forgets
            assert (await p.long(seed=str(place))).way == ("handover", "worth_moving")
        assert p.pair()[0] is PairState.PROVEN


UNFIT: list[tuple[str, Json, Json, str]] = [
    ("another model", {"weights": 2}, {}, "text|restored"),  # the file itself says so
    ("another build", {"build": "b2"}, {}, "build"),
    ("no checkpoints", {"memory": "none"}, {}, "reused|restored"),
    ("refuses", {}, {"prefill": {"fail": (500, "no")}}, "read"),
    ("does not save", {}, {"save": {"fail": (501, "no")}}, "saved"),
    ("saves short", {}, {"save": {"truncate_bytes": 1}}, "file"),
    ("does not restore", {}, {"restore": {"fail": (400, "no")}}, "restored"),
    ("forgets", {}, {"restore": {"forgets": True}}, "reused"),
]


@pytest.mark.parametrize(("options", "knobs", "told"), [row[1:] for row in UNFIT], ids=[row[0] for row in UNFIT])
async def test_a_pair_that_does_not_pass_is_not_used(fake: Start, options: Json, knobs: Json, told: str) -> None:
    """Prompts stay where they are until a self-test has passed, and the status says which step did not."""
    reader, writer = await fake(), await fake(**options)
    for stage, changes in knobs.items():
        (writer if stage == "restore" else reader).knobs.update({stage: changes})
    async with proxy(reader, writer, retry_s=60) as p:
        reply = await p.long()
        status = (await p.get("/splitproxy/status")).json["pairs"][0]
        assert reply.way == ("local", "pair_unproven")
        assert reply.text == right_text(body(CHAT, LONG_SEEDED), weights=options.get("weights", 1))
        assert (status["state"], bool(re.match(told, status["fault"]))) == ("unproven", True), status["fault"]


async def test_a_folder_that_is_not_shared_is_noticed(fake: Start, tmp_path: Path) -> None:
    """Engines that save somewhere else make no pair, and the status says what to set."""
    other = tmp_path / "other"
    other.mkdir()
    reader, writer = await fake(slot_dir=other), await fake()
    async with proxy(reader, writer, retry_s=60) as p:
        reply = await p.ask(CHAT, body(CHAT, LONG))
        assert (reply.status, reply.way) == (200, ("local", "pair_unproven"))
        assert "--slot-save-path" in p.pair()[1]


async def test_a_pair_that_fails_again_and_again_is_tested_less_often(
    fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each self-test keeps clients waiting, and may leave a file in a folder that is not ours: the waits double."""
    times: list[float] = []

    async def fails(_: pairs.Pairs, pair: pairs.Pair) -> None:
        pair.tests += 1
        times.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(pairs.Pairs, "_test", fails)
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, judged=False, retry_s=0.05) as p:
        await until(lambda: len(times) >= 5)
        assert p.pair()[0] is PairState.UNPROVEN
    waits_s = [after - before for before, after in itertools.pairwise(times[-4:])]
    assert all(wait_s > least_s for wait_s, least_s in zip(waits_s, (0.04, 0.08, 0.16), strict=True))


async def test_a_self_test_of_an_engine_that_was_is_no_proof(fake: Start) -> None:
    """An engine that was given up and welcomed while its pair was tested has to be tested again."""
    reader, writer = await fake(), await fake()
    writer.knobs.restore.delay_s = 0.3
    async with proxy(reader, writer, judged=False, retry_s=3600) as p:
        await p.at_work(writer, "restore")
        p.proxy.fleet.members["writer"].epoch += 1
        await until(lambda: not p.open_books())
        assert p.pair()[0] is PairState.UNPROVEN


def test_replies_are_judged_by_their_text() -> None:
    """A broken stream's error event is no text."""
    reply = Reply(200, {"Content-Type": "text/event-stream"}, [b'data: {"error":{"code":1}}\n\n'])
    assert (reply.text, reply.error) == ("", {"code": 1})
