"""Decisions by cost in the whole proxy: predictions come true, handovers in vain end, and both can be asked for."""

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from splitproxy.model import InVain, PairState, Policy
from tests.fake_engine import FakeEngine
from tests.harness import CHAT, COMPLETIONS, FLOOR, Reply, Running, body, proxy, right_text, until, words

Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

AUTO: Json = {"policy": "auto"}


async def pair(fake: Start, *, reads: float, writer_reads: float, slots: int = 1) -> tuple[FakeEngine, FakeEngine]:
    reader, writer = await fake(), await fake(slots=slots)
    reader.knobs.read_tps, writer.knobs.read_tps = reads, writer_reads
    return reader, writer


async def explained(p: Running, asked: Json) -> Json:
    reply = await p.ask("/splitproxy/explain", asked)
    assert reply.status == 200
    found: Json = reply.json
    return found


# -- predictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["always", "never"])
async def test_predictions_come_true(fake: Start, policy: str) -> None:
    """After twenty requests of many lengths, the median prediction is off by less than 15 %, nine in ten by 40 %."""
    reader, writer = await pair(fake, reads=8000, writer_reads=4000)
    writer.knobs.restore.delay_s = reader.knobs.save.delay_s = 0.03
    async with proxy(reader, writer, split={"policy": "always"}) as p:
        p.proxy.exchange = with_policy(p, policy)
        errors = []
        for place in range(32):
            length = 500 + 97 * (place * 7 % 16)
            reply = await p.ask(CHAT, body(CHAT, words(length, str(place)), limit=2, stream=True))
            record = await p.record(reply)
            assert record.prediction_error is not None
            errors.append(abs(record.prediction_error))
        late = sorted(errors[20:])
        assert statistics.median(late) < 0.15
        assert late[int(0.9 * len(late))] < 0.40
        path = "handover" if policy == "always" else "local"
        assert await p.metric("splitproxy_prediction_error_ratio_count", path=path) == 32


def with_policy(p: Running, policy: str) -> Any:
    """The exchange under another policy: `never` from the start would switch the self-test off."""
    settings = p.proxy.exchange.settings
    return replace(p.proxy.exchange, settings=replace(settings, rules=replace(settings.rules, policy=Policy(policy))))


# -- what is decided ---------------------------------------------------------------------------------------------------


async def test_a_slower_prefill_engine_is_not_used(fake: Start) -> None:
    """Where the decode engine reads faster by itself, a long prompt stays."""
    reader, writer = await pair(fake, reads=2000, writer_reads=8000)
    async with proxy(reader, writer, split=AUTO) as p:
        assert (await p.long()).way == ("local", "local_cheaper")


async def test_a_faster_prefill_engine_is_used(fake: Start) -> None:
    """Where the prefill engine brings the first token sooner, a long prompt is handed over."""
    reader, writer = await pair(fake, reads=20000, writer_reads=2000)
    async with proxy(reader, writer, split=AUTO) as p:
        assert (await p.long()).way == ("handover", "worth_moving")
        assert (await p.ask(CHAT, body(CHAT, "short"))).way == ("local", "too_short")


async def test_a_slow_save_counts(fake: Start) -> None:
    """A prefill engine that reads fast and saves slowly is found out."""
    reader, writer = await pair(fake, reads=8000, writer_reads=4000)
    reader.knobs.save.delay_s = 1.0
    async with proxy(reader, writer, split=AUTO) as p:
        assert (await p.long()).way == ("local", "local_cheaper")


async def test_a_busy_prefill_engine_is_passed_by(fake: Start) -> None:
    """What would wait too long for the prefill engine is read by an idle decode engine; forced prompts wait."""
    reader, writer = await pair(fake, reads=2500, writer_reads=2000, slots=4)
    async with proxy(reader, writer, split=AUTO) as p:
        first = [asyncio.create_task(p.long(seed=seed)) for seed in "a"]
        await p.at_work(reader, "prefill")
        assert (await explained(p, body(CHAT, words(3 * FLOOR, "b"))))["reason"] == "prefill_busy"
        reply = await p.long(seed="b")
        assert reply.way == ("local", "prefill_busy")
        assert {(await task).way for task in first} == {("handover", "worth_moving")}
    async with proxy(reader, writer, split={**AUTO, "force_handover_tokens": FLOOR}) as p:
        replies = await asyncio.gather(*(p.long(seed=seed) for seed in "cde"))
        assert {reply.way for reply in replies} == {("handover", "forced")}


@pytest.mark.parametrize(("weight", "way"), [(3.0, ("handover", "worth_moving")), (0.0, ("local", "local_cheaper"))])
async def test_running_answers_are_spared(fake: Start, weight: float, way: tuple[str, str]) -> None:
    """An answer that would stand still makes a somewhat slower handover worth it, as far as the weight says."""
    reader, writer = await pair(fake, reads=2500, writer_reads=3900, slots=4)
    async with proxy(reader, writer, split={**AUTO, "stall_weight": weight}) as p:
        writer.knobs.write_tps = 30
        running = asyncio.create_task(p.ask(CHAT, body(CHAT, "Go on.", limit=400, stream=True)))
        await until(lambda: (_view(p).streams, _view(p).reading_s) == (1, 0))
        assert (await p.long(limit=1)).way == way
        running.cancel()


async def test_work_beside_a_handover_in_vain_is_seen_when_it_begins(fake: Start) -> None:
    """Slots that are cleared while others work are suspected by who worked then, not by who works at the end."""
    reader, writer = await pair(fake, reads=50000, writer_reads=5000, slots=4)
    async with proxy(reader, writer, split=AUTO) as p:
        writer.knobs.restore.forgets, writer.knobs.write_tps = True, 100
        running = asyncio.create_task(p.ask(CHAT, body(CHAT, "Go on.", limit=60, stream=True)))
        await until(lambda: _view(p).streams == 1)
        await p.long(seed="a", limit=200)
        assert running.done()
        await p.long(seed="b", limit=1)
        await until(lambda: len(p.proxy.recent) == 3)
        causes = [record.in_vain for record in p.proxy.recent if record.effective is False]
        assert (causes[0], len(causes), causes.count(InVain.CLEARED_SLOTS)) == (InVain.CLEARED_SLOTS, 2, 1)


def _view(p: Running) -> Any:
    return p.proxy.fleet.views(None)[0][0]


# -- explain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_explain_tells_what_then_happens(fake: Start, path: str) -> None:
    """The decision and its figures can be had without running the request, and are those of the request itself."""
    reader, writer = await pair(fake, reads=20000, writer_reads=2000)
    asked = body(path, words(3 * FLOOR))
    async with proxy(reader, writer, split=AUTO) as p:
        told = await explained(p, asked)
        assert reader.sent("prefill") == writer.sent("decode") == []
        assert await p.metric("splitproxy_requests_total", endpoint="chat", outcome="ok") == 0
        reply = await p.ask(path, asked)
        assert (told["route"], told["reason"]) == reply.way == ("handover", "worth_moving")
        assert (told["prefill_engine"], told["decode_engine"], told["decode_slot"]) == ("reader", "writer", 0)
        assert told["tokenizer"] in ("engine", "local")
        assert told["held_tokens"] + told["uncached_tokens"] == told["prompt_tokens"] - 1
        assert 0 < told["predicted_handover_s"] < told["predicted_local_s"]
        warm = await explained(p, asked)
        assert (warm["route"], warm["reason"], warm["uncached_tokens"]) == ("local", "warm", 0)


@pytest.mark.parametrize("asked", [b"{}", b"[]", b"no", b'{"input": "x"}'])
async def test_explain_refuses_what_is_no_prompt(fake: Start, asked: bytes) -> None:
    """A body of no known kind is the client's mistake."""
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer) as p:
        assert (await p.ask("/splitproxy/explain", asked)).status == 400


async def test_the_same_fields_are_logged(fake: Start, caplog: pytest.LogCaptureFixture) -> None:
    """At debug level each decision is logged with its figures, and without the prompt."""
    caplog.set_level(logging.DEBUG, "splitproxy")
    reader, writer = await fake(), await fake()
    async with proxy(reader, writer, split=AUTO) as p:
        await p.long()
        (line,) = [r.getMessage() for r in caplog.records if "decided" in r.getMessage()]
    assert all(name in line for name in ("predicted_local_s", "predicted_handover_s", "uncached_tokens", "reason"))
    assert "river" not in line


async def test_the_status_shows_what_was_learned(fake: Start) -> None:
    """Speeds, session sizes and the proxy's own part can be looked at."""
    reader, writer = await pair(fake, reads=20000, writer_reads=2000)
    async with proxy(reader, writer, split=AUTO) as p:
        await p.record(await p.long(stream=True))
        status = (await p.get("/splitproxy/status")).json
        speeds = {engine["name"]: engine["speeds"] for engine in status["engines"]}
        assert speeds["writer"]["reads_tokens_per_s"]["512"] == pytest.approx(2000, rel=0.5)
        assert speeds["reader"]["reads_tokens_per_s"]["512"] > speeds["writer"]["reads_tokens_per_s"]["512"]
        assert status["pairs"][0]["session"]["bytes_per_token"] > 0
        assert status["last_requests"][0]["prediction_error"] is not None


# -- the verdict -------------------------------------------------------------------------------------------------------


async def test_handovers_in_vain_end_after_three(fake: Start, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that restores with success and reuses nothing is switched off after exactly three, with one warning
    that says what to change, and comes back by itself when a self-test passes."""
    reader, writer = await pair(fake, reads=50000, writer_reads=5000)
    async with proxy(reader, writer, split=AUTO) as p:
        writer.knobs.restore.forgets = True
        replies = [await p.long(seed=seed) for seed in "abcde"]
        assert [reply.way for reply in replies] == [("handover", "worth_moving")] * 3 + [
            ("local", "pair_switched_off")
        ] * 2
        assert [reply.text for reply in replies] == [right_text(body(CHAT, words(3 * FLOOR, seed))) for seed in "abcde"]
        causes = [record.in_vain for record in p.proxy.recent]
        assert (None not in causes[:3], causes[3:]) == (True, [None, None])
        counted = await p.metric("splitproxy_handoff_ineffective_causes_total", cause=str(causes[0]))
        assert counted == causes.count(causes[0])
        (warning,) = [r.getMessage() for r in caplog.records if "switched off" in r.getMessage()]
        assert str(causes[2]) in warning
        assert "--" in warning  # a flag to change
        writer.knobs.restore.forgets = False
        await until(lambda: p.pair()[0] is PairState.PROVEN)
        reply: Reply = await p.long(seed="f")
        assert reply.way == ("handover", "worth_moving")
        assert reply.text == right_text(body(CHAT, words(3 * FLOOR, "f")))
