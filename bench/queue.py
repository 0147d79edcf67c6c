"""What a long queue costs: the proxy's time and memory, and what running answers feel, with 50 to 500 requests waiting.

    python -m bench.queue [--waiting 50 100 200 500] [--seconds 8] [--json FILE]

One decode engine with 4 slots that writes 400 tokens a second into each (`tests.fake_engine`, a process of its own),
the proxy as a process of its own, and clients with ten API keys that ask again as soon as they have an answer, so that
as many requests wait all the time. The levels take turns, up and down again, so that what grows with time is told from
what grows with the queue. CPU and memory are what the kernel counted for the proxy.
"""

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import orjson
from rich.console import Console
from rich.table import Table

SLOTS, TOKENS, TOKENS_PER_S = 4, 40, 400
KEYS = 10
READY_S = 20.0
CONFIG = """
listen = "127.0.0.1:0"
api_keys = [{keys}]
queue = {{ max = 1024, timeout_s = 3600 }}
[split]
dir = "{folder}/sessions"
policy = "never"
[[engines]]
role = "decode"
url = "{engine}"
"""


@dataclass(slots=True)
class Level:
    """What was seen while so many requests waited. Times are milliseconds."""

    waiting: int
    answers_per_s: float = 0.0
    cpu_ms: float = 0.0  # of the proxy, for each answer
    memory_mib: float = 0.0  # of the proxy, at the end
    begin_ms: list[float] = field(default_factory=list)  # from the end of the wait to the first token
    gaps_ms: list[float] = field(default_factory=list)  # between the tokens of an answer


@contextmanager
def process(log: Path, *command: str) -> Iterator[tuple[str, int]]:
    """A program that says in its output where it listens: its address and process number."""
    with log.open("wb") as output:
        running = subprocess.Popen([sys.executable, "-m", *command], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield _address(log, running), running.pid
    finally:
        running.terminate()
        running.wait()


def _address(log: Path, running: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and running.poll() is None:
        if found := re.search(r"(?:listening on|serving at) (http://[\d.:]+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"it did not start:\n{log.read_text()[-2000:]}")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


class Load:
    """Clients that keep asking."""

    def __init__(self, http: aiohttp.ClientSession, url: str, level: Level) -> None:
        self._http, self._url, self._level = http, url, level
        self.answers = 0
        self.noting = False

    async def ask(self, number: int) -> None:
        """Ask again and again. A client sends its next request when it has its answer."""
        prompt = [number % 256, *b" what comes next?"]  # as ids: the engine's speed in making them is none of ours
        asked = {"prompt": prompt, "n_predict": TOKENS, "stream": True}
        key = {"Authorization": f"Bearer key{number % KEYS}"}
        while True:
            times: list[float] = []
            async with self._http.post(f"{self._url}/completion", json=asked, headers=key) as answer:
                answer.raise_for_status()
                async for chunk in answer.content.iter_any():
                    times += [time.perf_counter()] * chunk.count(b'"content"')
            if self.noting:
                self.answers += 1
                self._level.gaps_ms += [1000 * (b - a) for a, b in pairwise(times)]


async def run(http: aiohttp.ClientSession, url: str, pid: int, level: Level, seconds: float) -> None:
    """Keep a level for a while, and note what is seen once the queue is as long as it is to be."""
    load = Load(http, url, level)
    tasks = [asyncio.create_task(load.ask(number)) for number in range(level.waiting + SLOTS)]
    try:
        while await gauge(http, url, "splitproxy_queue_depth") < level.waiting - SLOTS:
            await asyncio.sleep(0.2)
            _raise_first(tasks)
        before, added, start = cpu_s(pid), await added_s(http, url), time.perf_counter()
        load.noting = True
        await asyncio.sleep(seconds)
        load.noting = False
        _raise_first(tasks)
        after = await added_s(http, url)
        level.answers_per_s = load.answers / (time.perf_counter() - start)
        level.cpu_ms = 1000 * (cpu_s(pid) - before) / load.answers
        level.begin_ms.append(1000 * (after[0] - added[0]) / (after[1] - added[1]))
        level.memory_mib = memory_mib(pid)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        while await gauge(http, url, "splitproxy_queue_depth"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.2)


def _raise_first(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def gauge(http: aiohttp.ClientSession, url: str, name: str) -> float:
    async with http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


async def added_s(http: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """The proxy's own share of all first bytes so far: seconds, and how many there were."""
    name = "splitproxy_added_first_byte_seconds"
    return await gauge(http, url, f"{name}_sum"), await gauge(http, url, f"{name}_count")


async def measure(levels: Sequence[int], seconds: float) -> list[Level]:
    """Every level twice: in rising and then in falling order."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        knobs = ("--set", f"write_tps={TOKENS_PER_S}")
        flags = ("--port", "0", "-np", str(SLOTS), "--kv-unified", *knobs)
        with process(place / "engine.log", "tests.fake_engine", *flags) as (engine, _):
            keys = ", ".join(f'"key{number}"' for number in range(KEYS))
            (place / "proxy.toml").write_text(CONFIG.format(keys=keys, folder=folder, engine=engine))
            command = ("splitproxy", "serve", "-c", str(place / "proxy.toml"))
            with process(place / "proxy.log", *command) as (url, pid):
                connector = aiohttp.TCPConnector(force_close=True, limit=0)
                async with aiohttp.ClientSession(connector=connector) as http:
                    found = [Level(waiting) for waiting in (SLOTS, *levels, *reversed(levels))]
                    for level in found:
                        await run(http, url, pid, level, seconds)
                    return found[1:]


def show(console: Console, found: Sequence[Level]) -> None:
    """One row for each level: both of its turns."""
    table = Table(title="While so many requests wait (both turns)", header_style="bold")
    names = ("waiting", "answers/s", "proxy CPU, ms an answer", "added before the first token, ms", "gap p50, ms")
    for name in (*names, "gap p99, ms", "proxy memory, MiB"):
        table.add_column(name, justify="right")
    for waiting in sorted({level.waiting for level in found}):
        turns = [level for level in found if level.waiting == waiting]
        gaps = [sorted(level.gaps_ms) for level in turns]
        table.add_row(
            str(waiting),
            _both(f"{level.answers_per_s:.1f}" for level in turns),
            _both(f"{level.cpu_ms:.1f}" for level in turns),
            _both(f"{statistics.mean(level.begin_ms):.1f}" for level in turns),
            _both(f"{some[len(some) // 2]:.1f}" for some in gaps),
            _both(f"{some[99 * len(some) // 100]:.1f}" for some in gaps),
            _both(f"{level.memory_mib:.0f}" for level in turns),
        )
    console.print(table)


def _both(values: Iterable[str]) -> str:
    return " / ".join(values)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.queue", description=__doc__.partition("\n")[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[50, 100, 200, 500])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each turn of each level")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    found = asyncio.run(measure(options.waiting, options.seconds))
    show(console, found)
    if options.json is not None:
        options.json.write_bytes(orjson.dumps([asdict(level) for level in found], option=orjson.OPT_INDENT_2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
