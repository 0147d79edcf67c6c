"""What a running answer feels of a long prompt that arrives: split, on one engine, and on two engines side by side.

    python -m bench.interference [--runs 3] [--tokens 2000] [--aside] [--json FILE] [--add FILE ...]

A stream runs. Two fresh prompts arrive, one after the other; from the first to the end of the second's answer the gaps
between the stream's tokens are noted. The ways to serve this take turns, run by run:

- undisturbed: no prompt comes; the decode engine of the split pair writes for as long as the split took for its prompts
- split: a prefill engine reads, a decode engine writes, the proxy in front of both
- held: the same, but the decode engine holds the prompts already; what it costs to answer beside the stream, no more
- one engine: a single llama-server, with the batch sizes 2048 (its default) and 512
- replicas: two whole llama-servers, requests in turns; the second prompt meets the stream

Each engine computes with one thread on one core: prefill engine and first replica on one, all the others on another.
With --aside the proxy and the clients keep to the prefill engine's core, too. The first step is what the decode engine
itself says that it took for the last token of a prompt, beside the stream: a gap in it. --add takes the runs of earlier
files in.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.config import Config
from splitproxy.model import PairState
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled
from tests import models

AIM_FACTOR = 1.5
ANSWER_TOKENS = 8
PROMPTS = 2
CONTEXT = 16384
START_S = 120
WARM_UP_TOKENS = 16
WRITES = ("-np", "4", "--kv-unified", "--cache-ram", "0")
READS = ("-np", "1", "-b", "512")
# With two cores there is none left for the client and the proxy: they go first, or their waiting would be measured.
_ON_ONE_CORE = (
    "import os, sys; os.nice(5); os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Place:
    """An engine to start: its flags and its core."""

    name: str
    core: int
    flags: tuple[str, ...]


PLACES = (
    Place("reader", 0, READS),
    Place("writer", 1, WRITES),
    Place("replica 0", 0, (*WRITES, "-b", "2048")),
    Place("replica 1", 1, (*WRITES, "-b", "2048")),
    Place("small batches", 1, (*WRITES, "-b", "512")),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One stream, in milliseconds. Save and restore are of the prompts that were handed over."""

    median_gap_ms: float
    p99_gap_ms: float
    largest_gap_ms: float
    first_token_ms: float  # of the prompts
    save_ms: float
    restore_ms: float
    first_step_ms: float = 0.0  # of the prompts' answers, where the decode engine had nothing else to read


@asynccontextmanager
async def engine(place: Place, model: Path, folder: Path) -> AsyncIterator[str]:
    """A server on one core; yields its address."""
    cores = sorted(os.sched_getaffinity(0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "splitproxy.engines.embedded", "-m", str(model), "--port", str(port), "-t", "1"]
    command += ["-tb", "1", "-c", str(CONTEXT), "--slot-save-path", str(folder), *place.flags]
    core = cores[place.core % len(cores)]
    none = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ON_ONE_CORE, str(core), *command, stdin=none, stdout=none, stderr=none
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while not await _is_ready(http, url):
                if process.returncode is not None:
                    raise RuntimeError(f"{place.name} did not start")
                await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


class Stream:
    """A running answer, and when each of its tokens came."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.times: list[float] = []
        self._task = asyncio.create_task(self._read(http, url))

    async def _read(self, http: aiohttp.ClientSession, url: str) -> None:
        asked = {"prompt": f"{random.random()} Tell me more.", "n_predict": CONTEXT // 4, "stream": True, "seed": 1}
        async with http.post(f"{url}/completion", json=asked) as answer:
            async for chunk in answer.content.iter_any():
                self.times += [time.perf_counter()] * chunk.count(b"data: ")

    async def running(self) -> None:
        while len(self.times) < WARM_UP_TOKENS:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def gaps_ms(self, start: float, end: float) -> list[float]:
        """The gaps that lie in this time, as a whole or in part."""
        return [1000 * (b - a) for a, b in pairwise(self.times) if b > start and a < end]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve a stream and prompts: where each goes, in order."""

    name: str
    stream: str
    prompts: tuple[str, ...]
    held: bool = False  # the prompts were asked before


class Bench:
    """All engines, the proxy, and the ways to use them."""

    def __init__(self, http: aiohttp.ClientSession, urls: dict[str, str], proxy: Proxy, tokens: int) -> None:
        self._http, self._urls, self._proxy, self._tokens = http, urls, proxy, tokens
        self._spent_s = 0.0  # of the latest prompts, for the undisturbed stream

    @property
    def ways(self) -> list[Way]:
        return [
            Way("split", "proxy", ("proxy",) * PROMPTS),
            Way("undisturbed", "proxy", ()),
            Way("held", "proxy", ("proxy",) * PROMPTS, held=True),
            Way("one engine, batch 2048", "replica 1", ("replica 1",) * PROMPTS),
            Way("one engine, batch 512", "small batches", ("small batches",) * PROMPTS),
            Way("replicas", "replica 1", ("replica 0", "replica 1")),
        ]

    async def run(self, way: Way) -> Run:
        prompts = [await self._fresh_ids() for _ in way.prompts]
        if way.held:
            for place, ids in zip(way.prompts, prompts, strict=True):
                await self._ask(self._urls[place], ids)
        stream = Stream(self._http, self._urls[way.stream])
        firsts: list[float] = []
        costs: list[dict[str, float]] = []
        try:
            await stream.running()
            start = time.perf_counter()
            for place, ids in zip(way.prompts, prompts, strict=True):
                first_ms, cost = await self._ask(self._urls[place], ids)
                firsts.append(first_ms)
                costs.append(cost)
            if way.name == "split" and not all(costs):
                raise RuntimeError(f"a prompt was not handed over: {self._proxy.recent[-1].route}")
            if way.name == "split":
                self._spent_s = time.perf_counter() - start
            elif not way.prompts:
                await asyncio.sleep(self._spent_s)
            gaps = stream.gaps_ms(start, time.perf_counter())
        finally:
            await stream.close()
            await self._quiet()
        return Run(
            median_gap_ms=statistics.median(gaps),
            p99_gap_ms=sorted(gaps)[max(0, -(-99 * len(gaps) // 100) - 1)],
            largest_gap_ms=max(gaps),
            first_token_ms=statistics.median(firsts) if firsts else 0.0,
            save_ms=max((cost.get("save_ms", 0.0) for cost in costs), default=0.0),
            restore_ms=max((cost.get("restore_ms", 0.0) for cost in costs), default=0.0),
            first_step_ms=self._first_step_ms(len(prompts)) if "proxy" in way.prompts else 0.0,
        )

    def _first_step_ms(self, count: int) -> float:
        """The longest first step of the latest answers, so many of them; the stream that was cut off has no figures."""
        latest = [record.figures for record in self._proxy.recent if record.figures is not None][-count:]
        return max(figures.prompt_ms for figures in latest)

    async def _fresh_ids(self) -> list[int]:
        """A prompt that no engine has seen."""
        words = " ".join(random.Random().choices(models.COMMON_WORDS, k=2 * self._tokens))
        async with self._http.post(f"{self._urls['reader']}/tokenize", json={"content": words}) as answer:
            ids: list[int] = (await answer.json())["tokens"][: self._tokens]
        return ids

    async def _ask(self, url: str, ids: list[int]) -> tuple[float, dict[str, float]]:
        """Send a prompt and read its answer: when its first token came, and what the handover cost."""
        asked = {"prompt": ids, "n_predict": ANSWER_TOKENS, "stream": True}
        cost: dict[str, float] = {}
        start, first = time.perf_counter(), 0.0
        async with self._http.post(f"{url}/completion", json=asked) as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    first = first or time.perf_counter()
                    cost = orjson.loads(line[6:]).get("split", cost)
        return 1000 * (first - start), cost

    async def _quiet(self) -> None:
        """Wait until every engine has noticed that the stream is over."""
        for name, url in self._urls.items():
            while name != "proxy" and await self._is_busy(url):  # noqa: ASYNC110 - a look a while, not an event
                await asyncio.sleep(1.5)
        while self._proxy.ledger.busy():  # noqa: ASYNC110 - the books set no event
            await asyncio.sleep(0.05)

    async def _is_busy(self, url: str) -> bool:
        async with self._http.get(f"{url}/slots") as answer:
            return any(slot["is_processing"] for slot in await answer.json())


async def measure(runs: int, tokens: int, aside: bool, console: Console) -> dict[str, list[Run]]:
    """Start everything and let the ways take turns."""
    model = models.tiny_model("dense", **models.MID)
    async with contextlib.AsyncExitStack() as stack:
        store = stack.enter_context(SessionStore(fresh_dir(), remove_at_close=True))
        with console.status("starting engines"):
            urls = {p.name: await stack.enter_async_context(engine(p, model, store.folder)) for p in PLACES}
        if aside:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        engines = [
            {"name": "reader", "role": "prefill", "url": urls["reader"]},
            {"name": "writer", "role": "decode", "url": urls["writer"]},
        ]
        split = {"policy": "threshold", "min_prompt_tokens": 256}
        config = Config.model_validate({"listen": "127.0.0.1:0", "engines": engines, "split": split})
        proxy = await stack.enter_async_context(assembled(config, store))
        urls["proxy"] = await stack.enter_async_context(listening(proxy))
        with console.status("self-test"):
            await proxy.fleet.first_verdicts()
        for pair in proxy.fleet.pairs.values():
            if pair.state is not PairState.PROVEN:
                raise RuntimeError(f"the pair is not proven: {pair.fault}")
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        return await _take_turns(Bench(http, urls, proxy, tokens), runs, console)


async def _take_turns(bench: Bench, runs: int, console: Console) -> dict[str, list[Run]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, list[Run]] = {way.name: [] for way in bench.ways}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=runs * len(found))
        # An engine's first step in a part of its memory that it has never used takes up to a second.
        for _ in range(2):
            await bench.run(next(way for way in bench.ways if way.held))
        for _ in range(runs):
            for way in bench.ways:
                progress.update(task, description=way.name)
                found[way.name].append(await bench.run(way))
                progress.advance(task)
    return found


def show(console: Console, found: dict[str, list[Run]], tokens: int) -> None:
    """Medians of all runs with their spread, and whether the split keeps to its aim."""
    title = f"Gaps in a running stream, ms, while {PROMPTS} prompts of {tokens} tokens arrive"
    table = Table(title=f"{title}: median (least to most) of {len(found['split'])} runs", header_style="bold")
    table.add_column("way", no_wrap=True)
    for name in ("median", "p99", "largest", "first token of a prompt", "save", "restore", "first step"):
        table.add_column(name, justify="right", no_wrap=True)
    fields = (
        "median_gap_ms",
        "p99_gap_ms",
        "largest_gap_ms",
        "first_token_ms",
        "save_ms",
        "restore_ms",
        "first_step_ms",
    )
    for name, runs in found.items():
        table.add_row(name, *(_spread([getattr(run, field) for run in runs]) for field in fields))
    console.print(table)
    kept = sum(
        split.largest_gap_ms <= AIM_FACTOR * alone.largest_gap_ms + split.restore_ms
        for split, alone in zip(found["split"], found["undisturbed"], strict=True)
    )
    middle = {name: _median(runs, "largest_gap_ms") for name, runs in found.items()}
    stall = _median(found["split"], "restore_ms")
    limit = AIM_FACTOR * middle["undisturbed"] + stall
    verdict = "within" if middle["split"] <= limit else "NOT within"
    console.print(
        f"split: largest gap {middle['split']:.1f} ms, {verdict} {limit:.1f} ms = "
        f"{AIM_FACTOR} x {middle['undisturbed']:.1f} ms undisturbed + {stall:.1f} ms for the restore; "
        f"with the prompts held already it is {middle['held']:.1f} ms. "
        f"Run by run: within in {kept} of {len(found['split'])}"
    )


def _median(runs: Sequence[Run], field: str) -> float:
    return float(statistics.median(getattr(run, field) for run in runs))


def _spread(values: Sequence[float]) -> str:
    if not any(values):
        return "-"
    places = 1 if max(values) < 100 else 0
    return f"{statistics.median(values):.{places}f} ({min(values):.{places}f} to {max(values):.{places}f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2000, help="length of each prompt")
    parser.add_argument(
        "--aside", action="store_true", help="keep the proxy and the clients on the prefill engine's core"
    )
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE", help="figures of earlier runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    found = asyncio.run(measure(options.runs, options.tokens, options.aside, console)) if options.runs else {}
    for file in options.add:
        for name, runs in orjson.loads(file.read_bytes()).items():
            found.setdefault(name, []).extend(Run(**run) for run in runs)
    show(console, found, options.tokens)
    if options.json is not None:
        figures: dict[str, Any] = {name: [asdict(run) for run in runs] for name, runs in found.items()}
        options.json.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
