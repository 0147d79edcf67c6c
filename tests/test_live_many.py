"""Many requests at once on real engines, with clients that leave and engines that die: every answer that arrives is the
one that its conversation gets alone, and work that nobody waits for holds nobody up.

The engine is not bit-stable: how a prompt was cut into batches, and what else was computed in the same step, changes
the last digits of its logits, and one answer in fifty or so turns on two tokens that are as likely as each other. Such
an answer must be one that the engine might have given unsplit: each of its tokens is its own first choice there, or
misses that by no more than its rounding.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from splitproxy.config import Config
from splitproxy.fleet import health
from splitproxy.model import PairState
from tests import live, models
from tests.live_pair import READER_FLAGS, Caller, Front, configured, processor_seconds, proxied, sessions, until, words

pytestmark = pytest.mark.live

CHAT = "/v1/chat/completions"
CLIENTS, TURNS, ANSWER_TOKENS = 8, 6, 16
LEAVES = 0.05  # of all requests
ROUNDING = 0.02  # of a log-probability; between the best and the second best token lies 0.7 in the middle
MANY_FLAGS = ("-np", "4", "--kv-unified", "--cache-ram", "0", "--ctx-checkpoints", "4")
CONTEXT = 32768

Json = dict[str, Any]


@dataclass(slots=True)
class Talk:
    """One conversation: what is sent at each turn, and the answer that it gets alone."""

    name: str
    turns: list[tuple[list[Json], str]] = field(default_factory=list)


def body(messages: list[Json], *, stream: bool) -> Json:
    return {"messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": stream}


async def alone(url: str, number: int) -> Talk:
    """Have an engine hold the conversation by itself, nothing else running. It is 3,000 to 6,000 tokens long, and its
    secret is in every turn."""
    chance = random.Random(f"talk {number}")
    talk, secret = Talk(f"talk {number}"), words(6, f"secret {number}")
    text, rest = words(chance.randrange(2500, 4000), (number, "document")), chance.randrange(100, 350)
    messages: list[Json] = [{"role": "user", "content": f"The secret is {secret}. {text}"}]
    async with Caller(url) as engine:
        await engine.erase()
        for turn in range(TURNS):
            reply = await engine.ask(CHAT, {**body(messages, stream=False), "id_slot": 0})
            assert reply.status == 200
            talk.turns.append((messages, reply.text))
            then = f"Remember {secret}. {words(rest, (number, turn))}"
            messages = [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": then}]
        assert 3000 <= reply.timings["cache_n"] + reply.timings["prompt_n"] <= 6000
    return talk


@dataclass(slots=True)
class Tally:
    """What became of all requests."""

    finished: int = 0
    left: int = 0
    broken: int = 0
    other: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # answers that are not the expected ones


class Client:
    """Holds one conversation through the proxy. It leaves now and then, and asks again."""

    def __init__(self, front: Front, talk: Talk, tally: Tally, seed: str) -> None:
        self._front, self._talk, self._tally = front, talk, tally
        self._chance = random.Random(f"{talk.name} {seed}")

    async def hold(self) -> None:
        for turn in range(TURNS):
            while not await self._ask(turn):  # noqa: ASYNC110 - a client tries again after a while
                await asyncio.sleep(0.05)

    async def _ask(self, turn: int) -> bool:
        messages, expected = self._talk.turns[turn]
        leaves = self._chance.random() < LEAVES
        patience_s = self._chance.uniform(0.0, 0.3) if leaves else 60
        try:
            async with asyncio.timeout(patience_s):
                text = await self._text(body(messages, stream=self._chance.random() < 0.5))
        except TimeoutError:
            assert leaves, "an answer took a minute"
            self._tally.left += 1
            return False
        if text is None:
            self._tally.broken += 1
            return False
        self._tally.finished += 1
        if text != expected:
            self._tally.other.setdefault((self._talk.name, turn), set()).add(text)
        return True

    async def _text(self, asked: Json) -> str | None:
        """The whole answer; None where an engine has failed."""
        # A connection of its own: leaving must not cost another request.
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector) as http,
            http.post(self._front.url + CHAT, json=asked) as answer,
        ):
            data = await answer.read()
        if answer.status != 200:
            assert answer.status in (502, 503, 504), data
            return None
        if not asked["stream"]:
            return str(orjson.loads(data)["choices"][0]["message"]["content"])
        events = [orjson.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        if "error" in events[-1]:
            return None
        deltas = (event["choices"][0]["delta"] for event in events if event["choices"])
        return "".join(delta.get("content") or "" for delta in deltas)


async def might_say(url: str, messages: list[Json], text: str) -> bool:
    """Whether every token of a text is the engine's first choice, or as good as that, after those before it."""
    async with Caller(url) as engine:
        ways = [(await engine.tokens({"messages": messages}), text, 0)]
        while ways:
            ids, rest, count = ways.pop()
            if count == ANSWER_TOKENS and not rest:
                return True
            asked = {"prompt": ids, "n_predict": 1, "n_probs": 8, "temperature": 0, "id_slot": 0}
            event = (await engine.ask("/completion", asked)).events[0]
            choices = event["completion_probabilities"][0]["top_logprobs"]
            for choice in choices:
                likely = choice["logprob"] > choices[0]["logprob"] - ROUNDING
                if likely and rest and rest.startswith(choice["token"]):
                    ways.append(([*ids, choice["id"]], rest[len(choice["token"]) :], count + 1))
    return False


@dataclass(slots=True)
class Engines:
    """The engines of a test by name, which can be ended and started again."""

    model: Path
    folder: Path
    running: dict[str, tuple[live.LiveEngine, contextlib.ExitStack]] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    def start(self, name: str) -> str:
        flags = READER_FLAGS if name.startswith("reader") else MANY_FLAGS
        common = ("-c", str(CONTEXT), "--slot-save-path", str(self.folder))
        port, stack = self.ports.setdefault(name, live.free_port()), contextlib.ExitStack()
        engine = stack.enter_context(live.engine(self.model, *common, *flags, port=port))
        self.running[name] = engine, stack
        return engine.url

    def kill(self, name: str) -> None:
        self.running.pop(name)[1].close()

    def url(self, name: str) -> str:
        return self.running[name][0].url

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    folder = tmp_path / "sessions"
    folder.mkdir()
    found = Engines(models.tiny_model("dense"), folder)
    try:
        yield found
    finally:
        found.close()


@contextlib.asynccontextmanager
async def in_front(engines: Engines, *names: str) -> AsyncIterator[Front]:
    """The proxy in front of started engines, all pairs proven."""
    tables = [
        {"name": name, "role": "prefill" if name.startswith("reader") else "decode", "url": engines.start(name)}
        for name in names
    ]
    split = {"min_prompt_tokens": 1024, "policy": "threshold"}
    config = Config.model_validate({"listen": "127.0.0.1:0", "drain_s": 1, "engines": tables, "split": split})
    async with proxied(config, engines.folder) as front:
        await until(front.proven)
        yield front


async def talks(engines: Engines) -> list[Talk]:
    """All conversations, each held alone by one engine."""
    url = engines.start("writer-alone")
    found = [await alone(url, number) for number in range(CLIENTS)]
    engines.kill("writer-alone")
    answers = [text for talk in found for _, text in talk.turns]
    assert len(set(answers)) == len(answers), "answers of two conversations could be taken for each other"
    return found


async def all_at_once(front: Front, found: list[Talk], tally: Tally, seed: str) -> None:
    async with asyncio.TaskGroup() as group:
        for talk in found:
            group.create_task(Client(front, talk, tally, seed).hold())


async def every_answer_is_right(engines: Engines, found: list[Talk], tally: Tally) -> None:
    """What differs from the answer given alone is the engine's own all the same, and nobody else's."""
    assert sum(len(texts) for texts in tally.other.values()) <= 0.1 * tally.finished
    url = engines.start("writer-alone")
    for (name, turn), texts in tally.other.items():
        talk = next(talk for talk in found if talk.name == name)
        for text in texts:
            assert await might_say(url, talk.turns[turn][0], text), (name, turn, text, talk.turns[turn][1])
        assert not texts & {text for other in found if other is not talk for _, text in other.turns}


def has_finished(tally: Tally, count: int) -> bool:
    return tally.finished >= count


def is_noticed(front: Front, name: str) -> bool:
    """Whether the proxy knows that an engine is gone."""
    return not front.proxy.ledger.is_ready(name)


async def nothing_is_left(front: Front, engines: Engines, names: tuple[str, ...]) -> None:
    """Ledger, folder, tasks and the engines' own slots are at zero."""
    proxy = front.proxy
    watchers = 1 + 2 * len(proxy.fleet.members) + len(proxy.fleet.pairs)
    await until(lambda: proxy.ledger.busy() == 0 and len(proxy.fleet.tasks) == watchers)
    assert (proxy.admission.waiting, proxy.ledger.session_bytes, sessions(engines.folder)) == (0, 0, [])
    for name in names:
        async with Caller(engines.url(name)) as engine:
            assert not [slot for slot in await engine.get("/slots") if slot["is_processing"]]


async def test_eight_conversations_on_four_slots(engines: Engines) -> None:
    """One prefill and one decode engine, everybody at once, twice, one in twenty requests given up."""
    names = ("reader", "writer")
    found, tally = await talks(engines), Tally()
    async with in_front(engines, *names) as front:
        for seed in ("first", "second"):
            await all_at_once(front, found, tally, seed)
        await nothing_is_left(front, engines, names)
        value = front.proxy.metrics.registry.get_sample_value
        assert value("splitproxy_belief_mismatch_total") == 0
        assert (value("splitproxy_handoffs_total", {"result": "proven"}) or 0) >= CLIENTS
        assert not value("splitproxy_handoffs_total", {"result": "ineffective"})
    await every_answer_is_right(engines, found, tally)
    assert (tally.finished, tally.broken) == (2 * CLIENTS * TURNS, 0)
    assert tally.left > 0


async def test_engines_die_under_eight_conversations(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prefill and two decode engines, one of each role killed in the middle and started again: who was cut off
    knows it, all other answers are right, and both engines are used again."""
    monkeypatch.setattr(health, "HEALTH_INTERVAL_S", 0.2)
    names = ("reader", "reader-2", "writer", "writer-2")
    found, tally = await talks(engines), Tally()
    async with in_front(engines, *names) as front:
        running = asyncio.create_task(all_at_once(front, found, tally, "dying"))
        for name in ("writer", "reader"):
            await until(partial(has_finished, tally, tally.finished + CLIENTS))
            engines.kill(name)
            await until(partial(is_noticed, front, name))
            await asyncio.to_thread(engines.start, name)
        await running
        await until(lambda: all(pair.state is PairState.PROVEN for pair in front.proxy.fleet.pairs.values()))
        await all_at_once(front, found, tally, "again")
        await nothing_is_left(front, engines, names)
        used = {record.engine for record in front.proxy.recent}
        readers = {record.route.prefill_engine for record in front.proxy.recent if record.route is not None}
    await every_answer_is_right(engines, found, tally)
    assert tally.finished == 2 * CLIENTS * TURNS
    assert tally.left > 0
    assert {"writer", "writer-2"} <= used
    assert {"reader", "reader-2"} & readers


async def test_ten_prompts_that_were_given_up_hold_nobody_up(tmp_path: Path) -> None:
    """The next prompt waits for the batch that the prefill engine reads, and for the one that it has begun before it
    notices, and a prompt that the decode engine reads itself for nothing."""
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    folder, batch, model = tmp_path / "sessions", 64, models.tiny_model("dense", **models.MID)
    folder.mkdir()
    common = ("-c", "8192", "--slot-save-path", str(folder), "--ctx-checkpoints", "3", "-b", str(batch))
    with (
        live.engine(model, *common, "-np", "1") as reader,
        live.engine(model, *common, "-np", "4", "--kv-unified", "--cache-ram", "0") as writer,
    ):
        async with proxied(configured(reader.url, writer.url, min_prompt_tokens=256), folder) as front:
            await until(front.proven)
            tasks = [asyncio.create_task(front.ask("/completion", asked(4000, n))) for n in range(10)]
            await until(lambda: front.proxy.admission.waiting == 9)
            before = processor_seconds(reader.process.pid)
            await until(lambda: processor_seconds(reader.process.pid) > before + 0.5)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            long = asyncio.create_task(front.ask("/completion", asked(600, "long")))
            short = await front.ask("/completion", asked(30, "short"))
            assert (short.route, long.done()) == ("local", False)
            record = await front.record(await long)
            assert record.handover is not None
            batch_ms = record.handover.prefill_ms * batch / record.handover.prefill_read_tokens
            assert record.queue_ms < 4 * batch_ms
            assert (await front.record(short)).queue_ms < batch_ms


def asked(tokens: int, seed: object) -> Json:
    """A prompt of about so many tokens that no engine has seen."""
    return {"prompt": words(tokens, seed), "n_predict": 4}
