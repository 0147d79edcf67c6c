"""A pair of real engines with the proxy in front of them, and clients of both. This module owns the flags of such a
pair, the proxy's life inside a test, and what a client reads out of an answer; it judges nothing."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from splitproxy.books.sessions import SessionStore
from splitproxy.config import Config
from splitproxy.model import PairState, RequestRecord
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled
from tests.models import COMMON_WORDS

WAIT_S = 60.0

READER_FLAGS = ("-np", "1", "-b", "512", "--ctx-checkpoints", "3")
WRITER_FLAGS = ("-np", "1", "--kv-unified", "--cache-ram", "0", "--ctx-checkpoints", "4")

CHARACTERS_PER_TOKEN = 3.05  # of `words`, with the vocabulary of the tiny models
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "completion": "/completion"}


def words(tokens: int, seed: object) -> str:
    """English words, about this many tokens of the tiny models; another seed shares no beginning."""
    chance = random.Random(str(seed))
    text = " ".join(chance.choices(COMMON_WORDS, k=2 * tokens))
    return text[: int(tokens * CHARACTERS_PER_TOKEN)]


def prompt(api: str, text: str, answer_tokens: int, **fields: Any) -> dict[str, Any]:
    """A body for this API that makes `text` the prompt, greedy."""
    body: dict[str, Any] = {"temperature": 0, "stream": False, **fields}
    if api == "chat":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    body["n_predict" if api == "completion" else "max_tokens"] = answer_tokens
    if body["stream"] and api != "completion":
        body["stream_options"] = {"include_usage": True}
    return body


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer: the events of a stream, or one that is the whole body."""

    status: int
    headers: Mapping[str, str]
    events: list[dict[str, Any]]

    @property
    def route(self) -> str:
        return self.headers["X-Splitproxy-Route"]

    @property
    def reason(self) -> str:
        return self.headers["X-Splitproxy-Reason"]

    @property
    def text(self) -> str:
        return "".join(_text(event) for event in self.events)

    @property
    def last(self) -> dict[str, Any]:
        """The event with the figures."""
        return next(event for event in reversed(self.events) if "timings" in event)

    @property
    def timings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.last["timings"]
        return found

    @property
    def usage(self) -> dict[str, Any]:
        return next((event["usage"] for event in reversed(self.events) if event.get("usage")), {})


def _text(event: Mapping[str, Any]) -> str:
    if "content" in event:
        return str(event["content"])
    choice = (event.get("choices") or [{}])[0]
    message = choice.get("delta") or choice.get("message") or {}
    return str(message.get("content") or choice.get("text") or "")


class Caller:
    """A client of one server, proxy or engine. As a context manager it closes its connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Engines close a connection after a streamed answer without a word.
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def __aenter__(self) -> "Caller":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    async def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """The whole answer to a request that generates."""
        async with asyncio.timeout(WAIT_S), self._http.post(self.url + path, json=body) as answer:
            text = await answer.read()
        if answer.content_type == "text/event-stream":
            data = [part.removeprefix(b"data: ") for part in text.split(b"\n\n") if part.startswith(b"data: ")]
            events = [orjson.loads(part) for part in data if part != b"[DONE]"]
        else:
            events = [orjson.loads(text)]
        return Reply(answer.status, answer.headers, events)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """A control call's answer."""
        async with asyncio.timeout(WAIT_S), self._http.post(self.url + path, json=body) as answer:
            return await answer.json()

    async def get(self, path: str) -> Any:
        async with asyncio.timeout(WAIT_S), self._http.get(self.url + path) as answer:
            return await answer.json()

    async def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """The ids that an engine makes of a prompt."""
        text = body.get("prompt")
        if text is None:
            text = (await self.post("/apply-template", body))["prompt"]
        made = await self.post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        found: list[int] = made["tokens"]
        return found

    async def erase(self) -> int:
        """Empty an engine's slot 0; how many tokens it held."""
        return int((await self.post("/slots/0?action=erase", {}))["n_erased"])

    async def own_continuation(self, path: str, body: Mapping[str, Any]) -> Reply:
        """An engine's own answer after it has read all of the prompt but the last token by itself."""
        await self.erase()
        ids = await self.tokens(body)
        await self.post("/completion", {"prompt": ids[:-1], "n_predict": 0, "id_slot": 0})
        reply = await self.ask(path, body)
        assert reply.timings["cache_n"] == len(ids) - 1
        return reply


class Front(Caller):
    """A client of a proxy that runs in this process."""

    def __init__(self, url: str, proxy: Proxy) -> None:
        super().__init__(url)
        self.proxy = proxy

    async def record(self, reply: Reply) -> RequestRecord:
        """What the proxy noted about a request that was answered; its figures are the decode engine's own."""
        wanted = reply.headers["X-Request-Id"]
        await until(lambda: any(record.request_id == wanted for record in self.proxy.recent))
        return next(record for record in self.proxy.recent if record.request_id == wanted)

    def proven(self) -> bool:
        return all(pair.state is PairState.PROVEN for pair in self.proxy.fleet.pairs.values())


def configured(reader: str, writer: str, **split: Any) -> Config:
    """The configuration of a proxy in front of two engines, with a rule that does not depend on their speeds."""
    split = {"policy": "threshold", **split}
    engines = [
        {"name": "reader", "role": "prefill", "url": reader},
        {"name": "writer", "role": "decode", "url": writer},
    ]
    return Config.model_validate({"listen": "127.0.0.1:0", "drain_s": 1, "engines": engines, "split": split})


@asynccontextmanager
async def proxied(config: Config, folder: Path) -> AsyncIterator[Front]:
    """The proxy, after its first self-test."""
    with SessionStore(folder) as store:
        async with assembled(config, store) as proxy, listening(proxy) as url, Front(url, proxy) as front:
            async with asyncio.timeout(WAIT_S):
                await proxy.fleet.first_verdicts()
            assert isinstance(front, Front)
            yield front


def sessions(folder: Path) -> list[str]:
    """The session files in a folder."""
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what other processes do sets no event here
            await asyncio.sleep(0.02)


def processor_seconds(pid: int) -> float:
    """What a process has computed so far. Looking at it does not disturb an engine, as asking it would."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> dict[int, list[str]]:
    """The processes that a process has started and that still run, with their command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (path / "cmdline").read_bytes().decode().split("\0")[:-1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found[int(path.name)] = command
    return found


def argument(command: list[str], flag: str) -> str:
    """The value of a flag on a command line."""
    return command[command.index(flag) + 1]
