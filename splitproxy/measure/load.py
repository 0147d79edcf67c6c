"""Clients that put a server under load and note what they see. They know the OpenAI API alone, not what answers."""

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson

from splitproxy.measure.measures import Sample
from splitproxy.measure.mixes import Prompt

T = TypeVar("T")

PATH = "/v1/chat/completions"
_DONE, END_BYTES = b"data: [DONE]", 64
_TEXT = re.compile(rb'"(?:content|reasoning_content)":"[^"]')

Told = Callable[[Sample], None]


@dataclass(frozen=True, slots=True)
class Caller:
    """A client of one server."""

    url: str
    http: aiohttp.ClientSession
    words_per_token: float
    key: str = ""

    async def ask(self, prompt: Prompt, run_start: float) -> Sample:
        """Send one request and follow its stream to the end. What goes wrong is part of the sample."""
        body = {
            "messages": [{"role": "user", "content": prompt.text(self.words_per_token)}],
            "max_tokens": prompt.answer_tokens,
            "temperature": 0,
            "stream": True,
        }
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        start, times, end = time.perf_counter(), list[float](), b""
        status, route, reason = 0, "", ""
        try:
            async with self.http.post(self.url + PATH, data=orjson.dumps(body), headers=headers) as answer:
                status = answer.status
                route = answer.headers.get("X-Splitproxy-Route", "")
                reason = answer.headers.get("X-Splitproxy-Reason", "")
                async for chunk in answer.content.iter_any():
                    if _TEXT.search(chunk):
                        times.append(time.perf_counter())
                    end = end[-END_BYTES:] + chunk
            if status == 200 and _DONE not in end:
                status = 0  # it broke off
        except (aiohttp.ClientError, OSError):
            status = 0
        return Sample(
            prompt.kind,
            start - run_start,
            times[0] - start if times else None,
            tuple(after - before for before, after in itertools.pairwise(times)),
            time.perf_counter() - start,
            route,
            reason,
            status,
        )


@asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections of a client that has no limit of its own."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        yield session


async def open_loop(callers: Sequence[Caller], prompts: Sequence[Prompt], told: Told) -> list[Sample]:
    """Send each prompt when it is due, whatever became of those before; several servers take turns."""
    start = time.perf_counter()

    async def one(number: int, prompt: Prompt) -> Sample:
        await asyncio.sleep(max(prompt.at_s - (time.perf_counter() - start), 0))
        sample = await callers[number % len(callers)].ask(prompt, start)
        told(sample)
        return sample

    return await _all([one(number, prompt) for number, prompt in enumerate(prompts)])


async def closed_loop(caller: Caller, prompts: Sequence[Prompt], clients: int, told: Told) -> list[Sample]:
    """So many clients, each of which sends its next prompt when it has its answer."""
    start, left = time.perf_counter(), iter(prompts)

    async def client(mine: Iterator[Prompt]) -> list[Sample]:
        samples = []
        for prompt in mine:
            samples.append(await caller.ask(prompt, start))
            told(samples[-1])
        return samples

    found = await _all([client(left) for _ in range(clients)])
    return [sample for samples in found for sample in samples]


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
    return [task.result() for task in tasks]
