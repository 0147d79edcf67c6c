"""The whole proxy between two fake engines and a client. This module owns their life inside a test, what a client reads
out of an answer, and the books, which must be at zero when a test ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from splitproxy.books.sessions import SessionStore
from splitproxy.config import Config
from splitproxy.engines import strata_server
from splitproxy.fleet import fleet, health, pairs, slots
from splitproxy.model import EngineState, PairState, RequestRecord, Role
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled
from tests.fake_engine import FakeEngine
from tests.fake_model import Weights, piece, render, tokenize

Json = dict[str, Any]

WAIT_S = 10.0
TEST_S = 60.0  # a test that hangs fails, and says where
FLOOR = 400  # min_prompt_tokens of these tests; a fake engine's token is a byte
SPLIT: Json = {"policy": "threshold", "min_prompt_tokens": FLOOR, "probe_tokens": 64}
QUICK = {
    (health, "HEALTH_INTERVAL_S"): 0.05,
    (fleet, "SWEEP_INTERVAL_S"): 0.05,
    (slots, "QUIET_LOOKS_S"): {**slots.QUIET_LOOKS_S, Role.DECODE: (0.05, 1.25, 1.5)},
    (strata_server, "SLOWEST_TOKENS_PER_S"): 1e6,  # so that a reading's deadline is the configured silence alone
}
ANSWER_TOKENS = 12

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SPLITTABLE = (CHAT, COMPLETIONS, NATIVE)
EVERY_API = (*SPLITTABLE, RESPONSES, MESSAGES)


def words(count: int, seed: str = "") -> str:
    """A text of this many bytes; another seed shares no beginning."""
    return (f"{seed}. " + "The river runs past the garden and under the old bridge. " * (count // 50 + 1))[:count]


def body(path: str, prompt: str, *, limit: int | None = ANSWER_TOKENS, **fields: Any) -> Json:
    """A request of this API with `prompt` as its only text."""
    asked: Json = {"prompt": prompt} if path not in CHATS else {"messages": [{"role": "user", "content": prompt}]}
    if path == RESPONSES:
        asked = {"input": prompt}
    if limit is not None:
        asked[LIMITS.get(path, "max_tokens")] = limit
    return {**asked, **fields}


BOTH_KINDS = pytest.mark.parametrize("kind", ["llama-server", "strata"])
# What a Strata server reads again of a prompt that it holds: `<|im_start|>assistant` and a line end.
LAST_TURN = {"llama-server": 1, "strata": 11}
STRATA_HAS_NO = frozenset({"/v1/completions", "/completion", "/completions", "/v1/embeddings", "/chat/completions"})


def needs(kind: str, path: str) -> None:
    """Skip what this kind of engine has no endpoint for."""
    if kind == "strata" and path in STRATA_HAS_NO:
        pytest.skip("a Strata server has no such endpoint")


CHATS = frozenset({CHAT, "/chat/completions", MESSAGES})
LIMITS = {NATIVE: "n_predict", "/completions": "n_predict", RESPONSES: "max_output_tokens"}


def prompt_ids(asked: Json) -> list[int]:
    """The tokens that an engine reads for a request."""
    prompt = asked.get("prompt")
    if "input" in asked:
        return prompt_ids({"messages": [{"role": "user", "content": asked["input"]}]})
    if isinstance(prompt, list):
        return prompt
    return tokenize(prompt if prompt is not None else render(asked))


def right_text(asked: Json, count: int = ANSWER_TOKENS, weights: int = 1) -> str:
    """What an engine that read the whole prompt by itself says."""
    model = Weights(weights)
    answers = model.answers([model.word(token) for token in prompt_ids(asked)])
    return b"".join(piece(next(answers).token) for _ in range(count)).decode()


@dataclass(slots=True)
class Reply:
    """What a client got: the pieces as they arrived, and when."""

    status: int
    headers: Mapping[str, str]
    pieces: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def streamed(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Json]:
        """The events of a stream, or the body as the only one."""
        if not self.streamed:
            return [self.json]
        parts = [line.removeprefix(b"data: ") for line in self.content.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(part) for part in parts if part != b"[DONE]"]

    @property
    def text(self) -> str:
        return "".join(_text(event) for event in self.events)

    @property
    def error(self) -> Json | None:
        found: Json | None = self.events[-1].get("error") if self.content else None
        return found

    @property
    def timings(self) -> Json:
        return self.last("timings")

    def last(self, key: str) -> Json:
        """The latest event's object of this name."""
        found: Json = next(event[key] for event in reversed(self.events) if key in event)
        return found

    @property
    def way(self) -> tuple[str, str]:
        """Route and reason, as the headers tell them."""
        return self.headers["X-Splitproxy-Route"], self.headers["X-Splitproxy-Reason"]


def _text(event: Mapping[str, Any]) -> str:
    if event.get("type") in ("content_block_delta", "response.output_text.delta"):
        return str(event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"])
    if (parts := event.get("output", [event])[0].get("content")) and isinstance(parts, list):
        return "".join(part["text"] for part in parts)
    if "content" in event:
        return str(event["content"])
    choice = (event.get("choices") or [{}])[0]
    message = choice.get("delta") or choice.get("message") or {}
    return str(message.get("content") or choice.get("text") or "")


@dataclass(slots=True)
class Running:
    """A proxy that serves, the engines behind it, and a client in front of it."""

    url: str
    proxy: Proxy
    http: aiohttp.ClientSession
    listener: AsyncExitStack
    prefill: FakeEngine | None
    decode: FakeEngine
    more: Mapping[str, FakeEngine] = field(default_factory=dict)  # further engines, by name

    @property
    def engines(self) -> list[FakeEngine]:
        first = [self.decode] if self.prefill is None else [self.prefill, self.decode]
        return [*first, *self.more.values()]

    @property
    def folder(self) -> Path:
        return self.proxy.store.folder

    async def stop(self) -> None:
        """Stop as on a signal: running requests may end."""
        await self.listener.aclose()

    @property
    def host(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def ask(self, path: str, asked: Json | bytes, **headers: str) -> Reply:
        """The whole answer to a POST."""
        data = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        sent = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        async with asyncio.timeout(WAIT_S), self.http.post(self.url + path, data=data, headers=sent) as answer:
            reply = Reply(answer.status, answer.headers)
            async for piece in answer.content.iter_any():
                reply.pieces.append(piece)
                reply.times.append(asyncio.get_running_loop().time())
            return reply

    async def long(self, path: str = CHAT, seed: str = "long", **fields: Any) -> Reply:
        """The answer to a prompt that is worth moving."""
        return await self.ask(path, body(path, words(3 * FLOOR, seed), **fields))

    async def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        async with asyncio.timeout(WAIT_S), self.http.request(method, self.url + path, headers=sent) as answer:
            return Reply(answer.status, answer.headers, [await answer.read()])

    async def record(self, reply: Reply) -> RequestRecord:
        """What the proxy noted of a request; that is complete a moment after the client has its answer."""
        wanted = reply.headers["X-Request-Id"]
        await until(lambda: any(record.request_id == wanted for record in self.proxy.recent))
        return next(record for record in self.proxy.recent if record.request_id == wanted)

    async def metric(self, name: str, **labels: str) -> float:
        """The value of a metric; 0 where it was never counted."""
        value: float | None = self.proxy.metrics.registry.get_sample_value(name, labels)
        return value or 0.0

    def pair(self) -> tuple[PairState, str]:
        found = self.proxy.fleet.pairs["reader", "writer"]
        return found.state, found.fault

    async def proven(self) -> None:
        await until(lambda: self.pair()[0] is PairState.PROVEN)

    def state(self, name: str) -> EngineState:
        return self.proxy.fleet.members[name].state

    def files(self) -> list[str]:
        """The session files that lie in the folder."""
        return [path.name for path in self.folder.iterdir() if path.suffix == ".session"]

    def open_books(self) -> Json:
        """All that is not at zero."""
        proxy = self.proxy
        provers = len(proxy.fleet.pairs) if proxy.config.split.policy != "never" else 0
        watchers = 1 + 2 * len(proxy.fleet.members) + provers  # the sweep; health and pulse; self-tests
        books = {
            "leases": proxy.ledger.busy(),
            "waiting": proxy.admission.waiting,
            "session bytes": proxy.ledger.session_bytes,
            "session files": self.files(),
            "fleet tasks": len(proxy.fleet.tasks) - watchers,
            "busy slots": [engine.busy() for engine in self.engines if engine.busy() and not engine.dead],
            "violations": [engine.violations for engine in self.engines if engine.violations],
        }
        return {name: value for name, value in books.items() if value}

    async def settled(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the books are at zero."""
        try:
            await until(lambda: not self.open_books(), timeout_s)
        except TimeoutError:
            pytest.fail(f"the books are not at zero: {self.open_books()}")

    async def at_work(self, engine: FakeEngine, step: str) -> None:
        """Wait until this engine works on a call of this stage."""
        await until(lambda: any(call.finished is None for call in engine.sent(step)))


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait for a condition of this process."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is any expression over the proxy's state
            await asyncio.sleep(0.002)


def configured(
    prefill: str | None,
    decode: str,
    folder: Path,
    changes: Mapping[str, Any],
    more: Mapping[str, str] | None = None,
    kind: str = "llama-server",
) -> Config:
    """The configuration of a proxy in front of these addresses; `more` are further ones by name."""
    engines = [{"name": "writer", "role": "decode", "url": decode}]
    if prefill is not None:
        engines.insert(0, {"name": "reader", "role": "prefill", "url": prefill})
    for name, url in (more or {}).items():
        engines.append({"name": name, "role": "prefill" if name.startswith("reader") else "decode", "url": url})
    for engine in engines:
        engine["kind"] = kind
    split = {**SPLIT, "dir": str(folder), **changes.get("split", {})}
    base = {"listen": "127.0.0.1:0", "drain_s": 1, "engines": engines}
    return Config.model_validate({**base, **changes, "split": split})


@asynccontextmanager
async def proxy(
    prefill: FakeEngine | None,
    decode: FakeEngine,
    *,
    judged: bool = True,
    retry_s: float = 0.2,
    more: Mapping[str, FakeEngine] | None = None,
    **changes: Any,
) -> AsyncIterator[Running]:
    """The proxy in front of two engines, and of `more` by name: a reader is a prefill engine, any other writes.

    `changes` are keys of the configuration; tables are merged. With `judged` the first self-test is waited for; one
    that failed comes again after `retry_s`. At the end the books must be at zero.
    """
    assert decode.slot_dir is not None
    more = more or {}
    urls = {name: engine.url for name, engine in more.items()}
    config = configured(prefill.url if prefill else None, decode.url, decode.slot_dir, changes, urls, decode.kind)
    with pytest.MonkeyPatch.context() as patch, SessionStore(decode.slot_dir) as store:
        for (module, name), value in {**QUICK, (pairs, "PROBE_RETRY_S"): retry_s}.items():
            patch.setattr(module, name, value)
        # Every request comes on a connection of its own: one that is cut must not cost the next.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with (
            asyncio.timeout(TEST_S),
            assembled(config, store) as assembly,
            AsyncExitStack() as listener,
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as http,
        ):
            url = await listener.enter_async_context(listening(assembly))
            running = Running(url, assembly, http, listener, prefill, decode, more)
            if judged:
                async with asyncio.timeout(WAIT_S):
                    await assembly.fleet.first_verdicts()
                await until(lambda: not running.open_books())
                for engine in running.engines:
                    engine.forget_calls()
            yield running
            await running.settled()
