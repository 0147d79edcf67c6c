"""Clients under load: an open loop waits for no answer, a closed one does, and what they saw is in their samples."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splitproxy.measure.load import PATH, Caller, client_session, closed_loop, open_loop
from splitproxy.measure.measures import Sample
from splitproxy.measure.mixes import Prompt

Pieces = tuple[bytes, ...]

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
PING, DONE = b": ping\n\n", b"data: [DONE]\n\n"


def text(word: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":' + orjson.dumps(word) + b"}}]}\n\n"


@dataclass
class Server:
    """Answers every request with the same pieces, one after the other, as soon as `ready` says so."""

    pieces: Pieces = (ROLE, PING, text("one"), text("two"), text("three"), DONE)
    ready: Callable[["Server"], bool] = lambda _server: True
    breaks: bool = False
    bodies: list[dict[str, object]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(orjson.loads(await request.read()))
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        async with self.changed:
            self.changed.notify_all()
            await self.changed.wait_for(lambda: self.ready(self))
        response = web.StreamResponse(headers={"X-Splitproxy-Route": "handover", "X-Splitproxy-Reason": "worth_moving"})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.002)  # or the pieces come as one
        self.at_once -= 1
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        return response


Start = Callable[..., Awaitable[tuple[Server, Caller]]]


@pytest.fixture
async def served() -> AsyncIterator[Start]:
    """Starts servers of this kind, each with a client."""
    async with started() as start:
        yield start


@asynccontextmanager
async def started() -> AsyncIterator[Start]:
    running: list[TestServer] = []
    async with client_session() as http:

        async def start(key: str = "", **options: object) -> tuple[Server, Caller]:
            server, app = Server(**options), web.Application()  # type: ignore[arg-type]
            app.router.add_post(PATH, server.answer)
            running.append(TestServer(app))
            await running[-1].start_server()
            return server, Caller(str(running[-1].make_url("")).rstrip("/"), http, 1.0, key)

        yield start
        for one in running:
            await one.close()


def prompts(count: int, *, every_s: float = 0.0) -> list[Prompt]:
    return [Prompt("chat", number * every_s, 20, 7, seed=number) for number in range(count)]


def ignore(_sample: Sample) -> None:
    """Nobody watches."""


async def test_a_sample_tells_what_the_client_saw(served: Start) -> None:
    """The first token is the first text, not the headers, a role or a comment; each further text has a gap."""
    server, caller = await served(key="secret")
    sample = await caller.ask(prompts(1)[0], 0.0)
    assert (sample.status, sample.failed, sample.kind) == (200, False, "chat")
    assert (sample.route, sample.reason) == ("handover", "worth_moving")
    assert len(sample.gaps_s) == 2
    assert sample.first_token_s is not None
    assert 0 < sample.first_token_s < sample.first_token_s + sum(sample.gaps_s) <= sample.total_s
    assert server.keys == ["Bearer secret"]
    (body,) = server.bodies
    assert (body["stream"], body["max_tokens"]) == (True, 7)


async def test_reasoning_is_text(served: Start) -> None:
    """A model that thinks first has brought its first token with the first thought."""
    _, caller = await served(pieces=(ROLE, text("so").replace(b"content", b"reasoning_content"), text("yes"), DONE))
    assert len((await caller.ask(prompts(1)[0], 0.0)).gaps_s) == 1


@pytest.mark.parametrize(
    ("pieces", "breaks", "first"),
    [
        ((ROLE, DONE), False, False),
        ((ROLE, text("one")), True, True),
        ((ROLE, text("one"), b'data: {"error":{"message":"gone"}}\n\n'), False, True),
    ],
)
async def test_an_answer_without_text_or_end_has_failed(
    served: Start, pieces: Pieces, breaks: bool, first: bool
) -> None:
    """An empty answer, and one that breaks off, are samples of failures, whatever had come before."""
    _, caller = await served(pieces=pieces, breaks=breaks)
    sample = await caller.ask(prompts(1)[0], 0.0)
    assert sample.failed
    assert (sample.first_token_s is not None) is first


async def test_an_open_loop_waits_for_no_answer(served: Start) -> None:
    """All prompts are sent when they are due, though none is answered before the last has come."""
    server, caller = await served(ready=lambda server: len(server.bodies) == 5)
    told: list[Sample] = []
    samples = await open_loop([caller], prompts(5, every_s=0.01), told.append)
    assert server.most == 5
    assert [sample.failed for sample in samples] == [False] * 5
    assert all(
        sample.started_s >= prompt.at_s for sample, prompt in zip(samples, prompts(5, every_s=0.01), strict=True)
    )
    assert len(told) == 5


async def test_servers_take_turns(served: Start) -> None:
    """Several servers get the prompts one after the other."""
    (one, first), (other, second) = await served(), await served()
    await open_loop([first, second], prompts(5), ignore)
    assert (len(one.bodies), len(other.bodies)) == (3, 2)


async def test_a_closed_loop_waits_for_each_answer(served: Start) -> None:
    """So many clients are so many requests at once, and every prompt is sent once."""
    server, caller = await served(ready=lambda server: server.at_once == 3 or len(server.bodies) == 9)
    told: list[Sample] = []
    samples = await closed_loop(caller, prompts(9), 3, told.append)
    assert (server.most, len(samples), len(told)) == (3, 9, 9)
    assert len({orjson.dumps(body) for body in server.bodies}) == 9
