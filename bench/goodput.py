"""Goodput on equal hardware: split by cost, against one engine with two threads, against two replicas in turns.

    python -m bench.goodput [--rates 0.5,0.9] [--requests 40] [--rounds 2] [--model light] [--arms PATTERN]
                            [--markdown FILE]

All have the same two cores and the same random model; the same short chats and 2,000-token prompts arrive at the same
times (open loop), only the words differ. A request is good when its first token comes within 1 s (chat) or 10 s
(document), and 99 % of its gaps stay under 150 ms. The arms change places from round to round. The other two run as
llama-server does by itself, and a second time with the batches that `splitproxy up` chooses for engines on a CPU.

The light model reads a batch of 64 tokens in less than the limit for a gap; the mid-size one does not on a slow
machine, so that no way of running it keeps a chat's gaps once anything is read beside it.
"""

import argparse
import asyncio
import fnmatch
import itertools
import logging
import os
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.stands import machine, pin, publish
from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.config import Config
from splitproxy.engines.adapter import Engine
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.measure.bench import KEEP_ALIVE_S, words_per_token
from splitproxy.measure.load import Caller, client_session, open_loop
from splitproxy.measure.measures import Limits, Sample, percentile, summarize
from splitproxy.measure.mixes import Prompt, plan
from splitproxy.model import Role
from splitproxy.run.flags import CPU_BATCH
from splitproxy.run.launch import Launcher, physical_cores
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import assembled
from tests.live import engine
from tests.models import LIGHT, MID, SMALL, tiny_model

LIMITS = {"chat": Limits(1.0, 0.15), "document": Limits(10.0, 0.15)}
CONTEXT, SLOTS = 16384, 8
MODELS = {"small": SMALL, "light": LIGHT, "mid": MID}
INSIDE = 0.9  # of the requests, at the highest rate that counts


@dataclass(frozen=True, slots=True)
class Place:
    """Servers that are ready for requests; several take turns."""

    urls: tuple[str, ...]
    words_per_token: float


Arm = Callable[[Path], AbstractAsyncContextManager[Place]]


@asynccontextmanager
async def split(model: Path) -> AsyncIterator[Place]:
    """A prefill and a decode engine, one core each, behind the proxy with policy auto."""
    with tempfile.TemporaryDirectory() as logs, SessionStore(fresh_dir(), remove_at_close=True) as store:
        fields = {
            "listen": "127.0.0.1:0",
            "keep_alive_s": KEEP_ALIVE_S,
            "split": {"policy": "auto", "dir": str(store.folder)},
            "launch": {
                "engine": "embedded", "model": str(model), "log_dir": logs, "context": CONTEXT, "decode_slots": SLOTS,
            },
        }  # fmt: skip
        config = Config.model_validate(fields)
        launcher = Launcher(config, store.folder)
        try:
            await launcher.start()
            config = config.model_copy(update={"engines": launcher.engines})
            async with assembled(config, store) as proxy, listening(proxy) as url:
                await proxy.fleet.first_verdicts()
                writer = proxy.fleet.engine(proxy.ledger.ready(Role.DECODE)[0])
                yield Place((url,), await words_per_token(writer))
        finally:
            await launcher.stop()


@asynccontextmanager
async def engines(model: Path, flags: Sequence[tuple[str, ...]]) -> AsyncIterator[Place]:
    """Engines as one would start them without a proxy; with as many as there are cores, each on one of its own."""
    common = ("-c", str(CONTEXT), "-np", str(SLOTS), "--kv-unified", "--cache-ram", "0")
    cores = physical_cores()
    async with AsyncExitStack() as stack:
        urls = []
        for number, own in enumerate(flags):
            running = await asyncio.to_thread(stack.enter_context, engine(model, *common, *own))
            urls.append(running.url)
            if len(flags) == len(cores):
                pin(running.process.pid, cores[number])
        store = stack.enter_context(SessionStore(fresh_dir(), remove_at_close=True))
        adapter: Engine = LlamaServer("engine", urls[0], "", store)
        stack.push_async_callback(adapter.close)
        yield Place(tuple(urls), await words_per_token(adapter))


ONE, REPLICAS = [("-t", "2")], [("-t", "1"), ("-t", "1")]
IN_BATCHES = ("-b", str(CPU_BATCH))
ARMS: dict[str, Arm] = {
    "split, auto": split,
    "one engine, 2 threads": partial(engines, flags=ONE),
    "two replicas": partial(engines, flags=REPLICAS),
    f"one engine, batch {CPU_BATCH}": partial(engines, flags=[(*own, *IN_BATCHES) for own in ONE]),
    f"two replicas, batch {CPU_BATCH}": partial(engines, flags=[(*own, *IN_BATCHES) for own in REPLICAS]),
}
Results = dict[float, dict[str, list[list[Sample]]]]


async def measure(
    model: Path, arms: Sequence[str], rates: Sequence[float], requests: int, rounds: int, seed: int, console: Console
) -> Results:
    """All arms at all rates; each arm is started once a round."""
    results: Results = {rate: {arm: [] for arm in arms} for rate in rates}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs = itertools.count(random.randrange(10**6))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(arms) * rounds * len(rates) * requests)
        for number in range(rounds):
            first = number % len(arms)
            for name in (*arms[first:], *arms[:first]):
                async with ARMS[name](model) as place, client_session() as http:
                    await _practise(place, http, next(runs))
                    for rate in rates:
                        progress.update(task, description=f"{name}, {rate:g}/s")
                        prompts = plan("documents", requests, rate, seed + number, run=next(runs))
                        callers = [Caller(url, http, place.words_per_token) for url in place.urls]
                        found = await open_loop(callers, prompts, lambda _sample: progress.advance(task))
                        results[rate][name].append(found)
    return results


async def _practise(place: Place, http: aiohttp.ClientSession, run: int) -> None:
    """Every engine has read long and short prompts before anything counts, and the proxy has seen how fast."""
    for url in place.urls:
        caller = Caller(url, http, place.words_per_token)
        for number, tokens in enumerate((200, 1500, 100, 2000, 400)):
            await caller.ask(Prompt("document", 0, tokens, 16, seed=10**8 + 10 * run + number), 0.0)


def table(results: Results) -> list[str]:
    """One line for each rate and arm, over all rounds."""
    lines = [
        "| requests/s | arm | good | misses | chats in time | documents in time | chat first token, mean | "
        "document first token, mean (max) | gap p99 | gaps kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for rate, arms in results.items():
        for name, rounds in arms.items():
            samples = [sample for samples in rounds for sample in samples]
            whole = summarize(samples, LIMITS)
            chats, documents = ([s for s in samples if s.kind == kind] for kind in ("chat", "document"))
            firsts = {kind: [s.first_token_s or 99.0 for s in some] for kind, some in (("c", chats), ("d", documents))}
            lines.append(
                f"| {rate:g} | {name} | {whole.good} of {whole.requests} | {whole.requests - whole.good} "
                f"| {_in_time(chats)} | {_in_time(documents)} | {statistics.mean(firsts['c']):.2f} s "
                f"| {statistics.mean(firsts['d']):.1f} s ({max(firsts['d']):.1f}) "
                f"| {1000 * whole.gap_s[99]:.0f} ms | {_smooth(samples)} |"
            )
    return lines


def _in_time(samples: Sequence[Sample]) -> str:
    inside = [s for s in samples if not s.failed and (s.first_token_s or 99) <= LIMITS[s.kind].first_token_s]
    return f"{len(inside)} of {len(samples)}"


def _smooth(samples: Sequence[Sample]) -> str:
    inside = [s for s in samples if not s.failed and percentile(s.gaps_s, 99) <= LIMITS[s.kind].gap_s]
    return f"{len(inside)} of {len(samples)}"


def highest_rate(results: Results) -> dict[str, float | None]:
    """The highest rate at which nine in ten requests were good, for each arm."""
    found: dict[str, float | None] = {}
    for rate, arms in sorted(results.items()):
        for name, rounds in arms.items():
            whole = summarize([sample for samples in rounds for sample in samples], LIMITS)
            found.setdefault(name, None)
            if whole.good >= INSIDE * whole.requests:
                found[name] = rate
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.goodput", description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="0.5,0.9,1.5", help="requests a second, separated by commas")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=list(MODELS), default="light", help="6.5, 22 or 76 million random weights")
    parser.add_argument("--arms", default="*", help="only arms whose name matches this pattern")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console()
    rates = [float(text) for text in options.rates.split(",")]
    arms = [name for name in ARMS if fnmatch.fnmatch(name, options.arms)]
    model = tiny_model("dense", **MODELS[options.model])
    load = os.getloadavg()[1]
    results = asyncio.run(measure(model, arms, rates, options.requests, options.rounds, options.seed, console))
    best = ", ".join(f"{name}: {rate or 'none'}" for name, rate in highest_rate(results).items())
    head = (
        f"{machine()}; {options.model} model; {options.rounds} rounds of {options.requests}; "
        f"load of the machine before: {load:.1f}"
    )
    lines = [head, "", *table(results), "", f"Highest rate with {100 * INSIDE:.0f} % good: {best}."]
    publish(lines, console, options.markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
