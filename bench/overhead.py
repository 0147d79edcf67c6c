"""What the proxy itself adds to the time to the first token of a handed-over prompt, with all its parts.

    python -m bench.overhead [--tiny] [--runs 5] [--tokens 2500] [--json FILE]

Two engines of this machine, one core each, and the proxy in this process. A client in a thread of its own sends a fresh
prompt and notes when the first piece of text arrives. From that the engines' work is taken off, by their own figures:
reading the prompt, saving and restoring the session, reading the last token. What is left is `added`: the proxy, and
what the engines do around that work without timing it. Two things of that kind are measured apart, with no proxy
between: what the decode engine takes for the same request with the same session restored (it renders and tokenizes the
prompt, too), and the copy of the last prompt that the prefill engine's cache in RAM keeps before it reads another.
"""

import argparse
import asyncio
import http.client
import logging
import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.config import Config
from splitproxy.engines.adapter import Answer, Call, Deadlines, Engine, Take
from splitproxy.engines.adapter import Progress as Told
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.errors import Step
from splitproxy.model import PairState, RequestRecord, Role, Ticket, Tokens
from splitproxy.run.demo import demo_model
from splitproxy.run.launch import Launcher
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled, deadlines

BUDGET_MS = 30.0
ANSWER_TOKENS = 4
PATH = "/v1/chat/completions"
_TEXT = re.compile(rb'"content":"[^"]')
_WORDS = (  # noqa: SIM905 - words to read, not a list to edit
    "the river carries letters from one station to another while people wait for an answer and the morning light falls "
    "on small windows above a garden where nobody reads what was written about weather work and winter travel"
).split()


@dataclass(frozen=True, slots=True)
class Part:
    """One stretch of the way to the first token."""

    name: str
    engine: bool  # the engines' own work, by their own figures
    ms: float


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt. `parts` follow each other and sum up to `first_token_ms`."""

    prompt_tokens: int
    first_token_ms: float
    parts: tuple[Part, ...]
    direct_ms: float  # the same request at the decode engine itself, less its own reading of the last token
    kept_ms: float  # the prefill engine's copy of the prompt before; 0 for the first

    @property
    def added_ms(self) -> float:
        return sum(part.ms for part in self.parts if not part.engine)

    @property
    def own_ms(self) -> float:
        """What is added by the proxy alone."""
        return self.added_ms - self.direct_ms - self.kept_ms


class Watch:
    """Notes when each call to an engine began and ended, by standing in front of the adapters' methods."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def attach(self, proxy: Proxy) -> None:
        for member in proxy.fleet.members.values():
            engine = cast("Engine", member.engine)
            for name in ("redeem", "discard"):
                setattr(engine, name, self._timed(name, getattr(engine, name)))
            setattr(engine, "prefill", self._prefill(engine.prefill))  # noqa: B010 - methods are not for assignment
            setattr(engine, "call", self._call(engine.call))  # noqa: B010
        setattr(proxy.store, "read", self._timed("check", proxy.store.read))  # noqa: B010

    def _note(self, name: str) -> None:
        self.at.setdefault(name, time.perf_counter())

    def _timed(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any) -> Any:
            self._note(name)
            try:
                return await method(*args)
            finally:
                self._note(f"{name} end")

        return timed

    def _prefill(self, method: Callable[..., Awaitable[Ticket]]) -> Callable[..., Awaitable[Ticket]]:
        async def prefill(prompt: Tokens, slot: int, limits: Deadlines, progress: Told) -> Ticket:
            def told(step: Step, done: int, total: int) -> None:
                if step is Step.SAVE:
                    self._note("save")
                progress(step, done, total)

            self._note("prefill")
            ticket = await method(prompt, slot, limits, told)
            self._note("prefill end")
            return ticket

        return prefill

    def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @asynccontextmanager
        async def call(request: Call, limits: Deadlines) -> AsyncIterator[Answer]:
            self._note("call")
            async with method(request, limits) as answer:
                yield _Watched(answer, self)

        return call


class _Watched:
    def __init__(self, answer: Answer, watch: Watch) -> None:
        self._answer = answer
        self._watch = watch
        self.status, self.headers, self.media_type = answer.status, answer.headers, answer.media_type

    async def pour(self, take: Take) -> bool:
        def noted(chunk: bytes) -> bool:
            if _TEXT.search(chunk):
                self._watch._note("text")
            return take(chunk)

        return await self._answer.pour(noted)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw."""

    start: float
    text: float
    request_id: str
    timings: dict[str, Any]


def ask(url: str, body: bytes) -> Seen:
    """Send a streaming request and note when its first piece of text arrives. Blocks."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    try:
        start = time.perf_counter()
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the answer is {answer.status}: {answer.read()[:300]!r}")
        text, timings = 0.0, {}
        for line in answer:
            if not text and _TEXT.search(line):
                text = time.perf_counter()
            if b'"timings":{' in line:
                timings = orjson.loads(line.removeprefix(b"data: "))["timings"]
        return Seen(start, text, answer.headers.get("X-Request-Id", ""), timings)
    finally:
        connection.close()


class Bench:
    """The pair, the proxy and what has been measured."""

    def __init__(self, proxy: Proxy, url: str, folder: Path) -> None:
        self._proxy = proxy
        self._url = url
        self._folder = folder
        self._limits = deadlines(proxy.config.split)
        self._reader = self._engine(Role.PREFILL)
        self._writer = self._engine(Role.DECODE)
        self._kept_ms = 0.0

    def _engine(self, role: Role) -> LlamaServer:
        engine = next(member.engine for member in self._proxy.fleet.members.values() if member.role is role)
        assert isinstance(engine, LlamaServer)
        return engine

    async def text(self, tokens: int) -> str:
        """Words that no engine has seen, about this many tokens."""
        chance = random.Random()
        words = chance.choices(_WORDS, k=tokens)
        sample = " ".join(words[:500])
        per_word = len(await self._writer.tokenize(sample)) / min(len(words), 500)
        return " ".join(words[: int(tokens / per_word)])

    async def run(self, tokens: int) -> Run:
        """One fresh prompt through the proxy, and once more straight to the decode engine."""
        text = await self.text(tokens)
        fields = {"messages": [{"role": "user", "content": text}], "max_tokens": ANSWER_TOKENS, "stream": True}
        body = orjson.dumps({**fields, "temperature": 0})
        watch = Watch()
        plain = self._methods()
        watch.attach(self._proxy)
        try:
            seen = await asyncio.to_thread(ask, self._url, body)
        finally:
            self._restore_methods(plain)
        record = await self._record(seen.request_id)
        assert record.route is not None
        if record.handover is None or record.effective is not True:
            raise RuntimeError(f"the prompt was not handed over: {record.route.reason}, {record.failure}")
        run = Run(
            prompt_tokens=record.route.prompt_tokens or 0,
            first_token_ms=1000 * (seen.text - seen.start),
            parts=_parts(watch.at, seen, record),
            direct_ms=await self._direct(body),
            kept_ms=self._kept_ms,
        )
        self._kept_ms = await self._keep(body)
        return run

    async def _keep(self, body: bytes) -> float:
        """What the prefill engine takes to put a prompt away when another comes. It is back in its slot afterwards."""

        async def around(prompt: Tokens) -> tuple[float, int]:
            asked = {"prompt": prompt.to_list(), "n_predict": 0, "id_slot": 0, "cache_prompt": True}
            start = time.perf_counter()
            answer = await self._reader.json(Step.PREFILL, "POST", "/completion", orjson.dumps(asked), timeout_s=600)
            timings = answer["timings"]
            return 1000 * (time.perf_counter() - start) - float(timings["prompt_ms"]), int(timings["cache_n"])

        other = await self._reader.tokenize("z")
        putting_away, _ = await around(other)
        nothing_to_put_away, _ = await around(other)
        prompt = await self._reader.tokenize(await self._reader.render(body))
        _, reused = await around(prompt)
        if reused < len(prompt) - 16:
            raise RuntimeError(f"the prefill engine's cache in RAM gave {reused} of {len(prompt)} tokens back")
        return max(0.0, putting_away - nothing_to_put_away)

    def _methods(self) -> list[object]:
        return [self._reader, self._writer, self._proxy.store]

    def _restore_methods(self, owners: Sequence[object]) -> None:
        for owner in owners:
            for name in ("redeem", "discard", "prefill", "call", "read"):
                vars(owner).pop(name, None)

    async def _record(self, request_id: str) -> RequestRecord:
        while True:
            for record in self._proxy.recent:
                if record.request_id == request_id:
                    return record
            await asyncio.sleep(0.01)

    async def _direct(self, body: bytes) -> float:
        """What the decode engine takes from the request to the first text, less its own reading of one token."""
        session = "overhead.session"
        target = "/slots/0?action={}"
        action = orjson.dumps({"filename": session})
        try:
            await self._reader.json(Step.SAVE, "POST", target.format("save"), action)
            await self._writer.json(Step.RESTORE, "POST", target.format("restore"), action)
        finally:
            (self._folder / session).unlink(missing_ok=True)
        pinned = body[:-1] + b',"id_slot":0,"cache_prompt":true}'
        seen = await asyncio.to_thread(ask, self._writer._url, pinned)
        return 1000 * (seen.text - seen.start) - float(seen.timings["prompt_ms"])


def _parts(at: dict[str, float], seen: Seen, record: RequestRecord) -> tuple[Part, ...]:
    """The way to the first token, cut at the calls to the engines."""
    cost, figures = record.handover, record.figures
    assert cost is not None
    assert figures is not None

    def span(start: float, end: float) -> float:
        return 1000 * (end - start)

    save_ms = span(at["save"], at["check"])
    return (
        Part("accept, decide, claim", False, span(seen.start, at["prefill"]) - record.tokenize_ms),
        Part("tokenize", False, record.tokenize_ms),
        Part("prefill engine reads", True, cost.prefill_ms),
        Part("around reading", False, span(at["prefill"], at["save"]) - cost.prefill_ms),
        Part("prefill engine saves", True, cost.save_ms),
        Part("around saving", False, save_ms - cost.save_ms),
        Part("check the file", False, span(at["check"], at["prefill end"])),
        Part("claim", False, span(at["prefill end"], at["redeem"])),
        Part("decode engine restores", True, cost.restore_ms),
        Part("around restoring", False, span(at["redeem"], at["redeem end"]) - cost.restore_ms),
        Part("discard the file", False, span(at["redeem end"], at["call"])),
        Part("decode engine reads", True, figures.prompt_ms),
        Part("around the answer", False, span(at["call"], at["text"]) - figures.prompt_ms),
        Part("relay", False, span(at["text"], seen.text)),
    )


async def measure(model: Path, runs: int, tokens: int, console: Console) -> list[Run]:
    """Start the pair and the proxy, and send the prompts."""
    with tempfile.TemporaryDirectory() as logs, SessionStore(fresh_dir(), remove_at_close=True) as store:
        fields = {
            "listen": "127.0.0.1:0",
            "split": {"policy": "always"},
            "launch": {"model": str(model), "log_dir": logs, "context": max(8192, 2 * tokens)},
        }
        config = Config.model_validate(fields)
        launcher = Launcher(config, store.folder)
        config = config.model_copy(update={"engines": launcher.engines})
        with console.status("starting two engines"):
            await launcher.start()
        try:
            async with assembled(config, store) as proxy, listening(proxy) as url:
                with console.status("self-test"):
                    await proxy.fleet.first_verdicts()
                for pair in proxy.fleet.pairs.values():
                    if pair.state is not PairState.PROVEN:
                        raise RuntimeError(f"the pair is not proven: {pair.fault}")
                return await _repeat(Bench(proxy, url, store.folder), runs, tokens, console)
        finally:
            await launcher.stop()


async def _repeat(bench: Bench, runs: int, tokens: int, console: Console) -> list[Run]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"prompts of {tokens} tokens", total=runs)
        for _ in range(runs):
            done.append(await bench.run(tokens))
            progress.advance(task)
    return done


def medians(runs: Sequence[Run]) -> dict[str, float]:
    """The median of each part and of each sum, in milliseconds."""
    found = {
        part.name: statistics.median(run.parts[place].ms for run in runs) for place, part in enumerate(runs[0].parts)
    }
    return found | {
        "first token": statistics.median(run.first_token_ms for run in runs),
        "added": statistics.median(run.added_ms for run in runs),
        "direct request": statistics.median(run.direct_ms for run in runs),
        "prompt put away": statistics.median(run.kept_ms for run in runs),
        "added by the proxy alone": statistics.median(run.own_ms for run in runs),
    }


def show(console: Console, runs: Sequence[Run]) -> None:
    """All parts of all runs, and whether the proxy keeps to its budget."""
    table = Table(title=f"Time to the first token, ms ({runs[0].prompt_tokens} prompt tokens)", header_style="bold")
    for name in ("part", "whose", *(str(number + 1) for number in range(len(runs))), "median"):
        table.add_column(name, justify="left" if name in ("part", "whose") else "right")
    middle = medians(runs)

    def row(name: str, whose: str, values: Sequence[float], style: str = "") -> None:
        table.add_row(name, whose, *(f"{value:.1f}" for value in values), f"{middle[name]:.1f}", style=style)

    for place, part in enumerate(runs[0].parts):
        style = "dim" if part.engine else ""
        row(part.name, "engine" if part.engine else "added", [run.parts[place].ms for run in runs], style)
    table.add_section()
    row("first token", "", [run.first_token_ms for run in runs])
    row("added", "", [run.added_ms for run in runs], "bold")
    row("direct request", "of it", [run.direct_ms for run in runs])
    row("prompt put away", "of it", [run.kept_ms for run in runs])
    row("added by the proxy alone", "", [run.own_ms for run in runs], "bold")
    console.print(table)
    for name in ("added", "added by the proxy alone"):
        verdict = "within" if middle[name] <= BUDGET_MS else "NOT within"
        console.print(f"{name}, median of {len(runs)}: {middle[name]:.1f} ms, {verdict} {BUDGET_MS:g} ms")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a random model of the tests instead of the demo model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2500, help="length of each prompt")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console()
    if options.tiny:
        from tests.models import tiny_model

        model = tiny_model("dense")
    else:
        model = demo_model(console=console)
    runs = asyncio.run(measure(model, options.runs, options.tokens, console))
    show(console, runs)
    if options.json:
        options.json.write_bytes(
            orjson.dumps(
                {"model": model.name, "medians_ms": medians(runs), "runs": [asdict(run) for run in runs]},
                option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
