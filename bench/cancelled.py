"""Ten long prompts are begun and given up; how long does the next short request wait?

    python -m bench.cancelled [--rounds 5] [--tokens 4000] [--json FILE]

In each round ten clients send a long prompt each and leave at a random moment of the reading. At once two short
requests come: one that the decode engine reads itself, and one that is just long enough for the prefill engine. What
the second waits for the prefill engine is shown in batches of that engine, measured in the same run: a llama-server
cannot stop in the middle of one. The same is done to one llama-server without a proxy, batch size 2048, its default.

Each engine computes with one thread on one core, as in `bench.interference`.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

from bench.interference import PLACES, READS, engine
from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.config import Config
from splitproxy.model import Outcome, PairState, RequestRecord
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled
from tests import models

CLIENTS = 10
LOCAL_TOKENS, MOVED_TOKENS, FLOOR = 64, 600, 256
BATCH_TOKENS = int(READS[READS.index("-b") + 1])
ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Round:
    """One round, in milliseconds."""

    batch_ms: float  # of the prefill engine
    waited_ms: float  # of the short request for the prefill engine
    moved_first_ms: float  # until its first token
    local_first_ms: float  # until the first token of the one that stayed local
    alone_first_ms: float  # the same on one llama-server without a proxy


class Bench:
    """The engines, the proxy, and what is asked of them."""

    def __init__(self, http: aiohttp.ClientSession, urls: dict[str, str], proxy: Proxy, tokens: int) -> None:
        self._http, self._urls, self._proxy, self._tokens = http, urls, proxy, tokens
        self._noted = ""  # the latest request that was looked at

    async def batch_ms(self) -> float:
        """What one batch takes, by a whole prompt that nothing disturbs."""
        await self._ask("proxy", await self._ids(self._tokens))
        handover = (await self._latest()).handover
        assert handover is not None
        return handover.prefill_ms * BATCH_TOKENS / handover.prefill_read_tokens

    async def run(self, batch_ms: float) -> Round:
        local, moved = await self._ids(LOCAL_TOKENS), await self._ids(MOVED_TOKENS)
        await self._given_up("proxy", batch_ms)
        asked = asyncio.gather(self._ask("proxy", local), self._ask("proxy", moved))
        local_first_ms, moved_first_ms = await asked
        record = await self._latest()
        await self._given_up("replica 1", batch_ms)
        alone_first_ms = await self._ask("replica 1", await self._ids(LOCAL_TOKENS))
        await self._quiet()
        return Round(batch_ms, record.queue_ms, moved_first_ms, local_first_ms, alone_first_ms)

    async def _latest(self) -> RequestRecord:
        """The latest request that was handed over, once it is noted."""
        await self._quiet()
        while True:
            moved = [
                record for record in self._proxy.recent if record.handover is not None and record.outcome is Outcome.OK
            ]
            if moved and moved[-1].request_id != self._noted:
                self._noted = moved[-1].request_id
                return moved[-1]
            await asyncio.sleep(0.01)

    async def _given_up(self, place: str, batch_ms: float) -> None:
        """Ten clients send a long prompt, and leave while the first is read."""
        prompts = [await self._ids(self._tokens) for _ in range(CLIENTS)]
        tasks = [asyncio.create_task(self._ask(place, prompt)) for prompt in prompts]
        while not await self._is_busy("reader" if place == "proxy" else place):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        await asyncio.sleep(random.uniform(0.2, 2.2) * batch_ms / 1000)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _ids(self, count: int) -> list[int]:
        """A prompt that no engine has seen."""
        words = " ".join(random.Random().choices(models.COMMON_WORDS, k=2 * count))
        async with self._http.post(f"{self._urls['reader']}/tokenize", json={"content": words}) as answer:
            ids: list[int] = (await answer.json())["tokens"][:count]
        return ids

    async def _ask(self, place: str, ids: Sequence[int]) -> float:
        """Milliseconds until the first token."""
        asked = {"prompt": ids, "n_predict": ANSWER_TOKENS, "stream": True}
        start, first = time.perf_counter(), 0.0
        async with self._http.post(f"{self._urls[place]}/completion", json=asked) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    first = first or time.perf_counter()
        return 1000 * (first - start)

    async def _is_busy(self, place: str) -> bool:
        if place == "reader":  # a look would wait for the batch
            return bool(self._proxy.ledger.count("reader").busy)
        async with self._http.get(f"{self._urls[place]}/slots") as answer:
            return any(slot["is_processing"] for slot in await answer.json())

    async def _quiet(self) -> None:
        """Wait until the engines have noticed that everybody has left."""
        while self._proxy.ledger.busy() or await self._is_busy("replica 1"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.5)


async def measure(rounds: int, tokens: int) -> list[Round]:
    model = models.tiny_model("dense", **models.MID)
    places = [place for place in PLACES if place.name in ("reader", "writer", "replica 1")]
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(SessionStore(fresh_dir(), remove_at_close=True))
        urls = {place.name: await stack.enter_async_context(engine(place, model, store.folder)) for place in places}
        engines = [
            {"name": "reader", "role": "prefill", "url": urls["reader"]},
            {"name": "writer", "role": "decode", "url": urls["writer"]},
        ]
        split = {"policy": "threshold", "min_prompt_tokens": FLOOR}
        config = Config.model_validate({"listen": "127.0.0.1:0", "engines": engines, "split": split})
        proxy = await stack.enter_async_context(assembled(config, store))
        urls["proxy"] = await stack.enter_async_context(listening(proxy))
        await proxy.fleet.first_verdicts()
        for pair in proxy.fleet.pairs.values():
            if pair.state is not PairState.PROVEN:
                raise RuntimeError(f"the pair is not proven: {pair.fault}")
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        bench = Bench(await stack.enter_async_context(aiohttp.ClientSession(connector=connector)), urls, proxy, tokens)
        return [await bench.run(await bench.batch_ms()) for _ in range(rounds)]


def show(console: Console, found: Sequence[Round], tokens: int) -> None:
    """Medians of all rounds with their spread."""
    title = f"After {CLIENTS} prompts of {tokens} tokens were given up: median (least to most) of {len(found)} rounds"
    table = Table(title=title, header_style="bold")
    table.add_column("what")
    table.add_column("ms", justify="right")
    table.add_column("in batches of the prefill engine", justify="right")
    rows = {
        f"a batch of {BATCH_TOKENS} tokens": [one.batch_ms for one in found],
        f"{MOVED_TOKENS} tokens wait for the prefill engine": [one.waited_ms for one in found],
        f"{MOVED_TOKENS} tokens, first token": [one.moved_first_ms for one in found],
        f"{LOCAL_TOKENS} tokens stay local, first token": [one.local_first_ms for one in found],
        f"{LOCAL_TOKENS} tokens on one llama-server, first token": [one.alone_first_ms for one in found],
    }
    for name, values in rows.items():
        parts = [value / one.batch_ms for value, one in zip(values, found, strict=True)]
        table.add_row(name, _spread(values, 0), _spread(parts, 2))
    console.print(table)


def _spread(values: Sequence[float], places: int) -> str:
    return f"{statistics.median(values):,.{places}f} ({min(values):,.{places}f} to {max(values):,.{places}f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.cancelled", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000, help="length of the prompts that are given up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console() if sys.stdout.isatty() else Console(width=130)
    found = asyncio.run(measure(options.rounds, options.tokens))
    show(console, found, options.tokens)
    if options.json is not None:
        options.json.write_bytes(orjson.dumps([asdict(one) for one in found], option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
