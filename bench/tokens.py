"""What token ids cost, made here and asked for, in one run on this machine.

    python -m bench.tokens [--runs 7] [--json FILE]

A real vocabulary (Qwen's, in a model of zeros), a real engine beside it on the same machine, and texts of 128k tokens:
the project's own sources, repeated with changes. `cold` is a text that was never seen, `follow-up` the next turn of a
conversation of that length. Engine times are whole HTTP calls through the adapter, as a request would make them.
"""

import argparse
import asyncio
import itertools
import json
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from splitproxy.books.ledger import Holding
from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.model import Tokens
from splitproxy.tokens import gguf_file
from splitproxy.tokens.codec import Codec
from splitproxy.tokens.tokenize import INLINE_CHARACTERS, LocalTokenizer
from tests import live
from tests.vocabularies import model_of, qwen

ROOT = Path(__file__).parent.parent
TOKENS = 128_000
CONVERSATIONS, CONVERSATION_TOKENS = 1000, 32_000
TURN = "<|im_end|>\n<|im_start|>user\n"


def sources() -> str:
    """The project's code and prose."""
    files = sorted(itertools.chain(ROOT.glob("*/*.py"), ROOT.glob("docs/*.md"), ROOT.glob("configs/*")))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def text_of(codec: Codec, tokens: int, seed: int) -> str:
    """A text of about this many tokens, another one for another seed."""
    lines = sources().splitlines()
    said = itertools.cycle([f"{seed} {line}" if number % 9 == 0 else line for number, line in enumerate(lines)])
    per_line = len(codec.plain("\n".join(lines))) / len(lines)
    return "\n".join(itertools.islice(said, int(tokens / per_line)))


def conversation(codec: Codec, tokens: int, seed: int) -> str:
    """The same as a rendered chat, with messages of about 2,000 tokens."""
    text = text_of(codec, tokens, seed)
    size = len(text) * 2000 // tokens
    return "<|im_start|>user\n" + TURN.join(text[start : start + size] for start in range(0, len(text), size))


async def wall_ms(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - start)


async def cpu_ms(call: Callable[[], Awaitable[object]]) -> float:
    """Processor time of the whole process, threads included."""
    start = time.process_time()
    await call()
    return 1000 * (time.process_time() - start)


async def measure(runs: int) -> dict[str, float]:
    """Every figure, by name; milliseconds where nothing else is said. Those of many runs are medians."""
    model = model_of(qwen())
    start = time.perf_counter()
    codec = Codec(gguf_file.read(model))
    figures = {"start: file read, encoder made": 1000 * (time.perf_counter() - start)}
    folder = fresh_dir()
    with live.engine(model, "-np", "1", "-c", "512") as engine, SessionStore(folder, remove_at_close=True) as store:
        server = LlamaServer("writer", engine.url, "", store)
        local = LocalTokenizer(codec)
        try:
            figures["start: compared with the engine"] = await wall_ms(lambda: local.meet(server))
            assert local.verdict("writer").local, local.verdict("writer").why
            figures |= await _cold(local, server, codec, runs)
            figures |= await _follow_up(local, server, codec, runs)
            figures |= await _short(local, codec)
        finally:
            local.close()
            await server.close()
    return figures | _books()


async def _cold(local: LocalTokenizer, server: LlamaServer, codec: Codec, runs: int) -> dict[str, float]:
    here, there = [], []
    for run in range(runs):
        text = text_of(codec, TOKENS, run)
        here.append(await wall_ms(lambda text=text: local.encode(text)))  # type: ignore[misc]
        there.append(await wall_ms(lambda text=text: server.tokenize(text)))  # type: ignore[misc]
        assert await local.encode(text) == await server.tokenize(text)
    ours, theirs = statistics.median(here), statistics.median(there)
    count = float(len(codec.plain(text)))
    return {"cold: tokens": count, "cold: here": ours, "cold: engine": theirs, "cold: times faster": theirs / ours}


async def _follow_up(local: LocalTokenizer, server: LlamaServer, codec: Codec, runs: int) -> dict[str, float]:
    text = conversation(codec, TOKENS, 99)
    await local.encode(text)
    here, there = [], []
    for run in range(runs):
        text += f"{TURN}And then? {run} " + "What about the river and the garden? " * 20
        here.append(await cpu_ms(lambda text=text: local.encode(text)))  # type: ignore[misc]
        there.append(await wall_ms(lambda text=text: server.tokenize(text)))  # type: ignore[misc]
    return {"follow-up: here, CPU": statistics.median(here), "follow-up: engine": statistics.median(there)}


async def _short(local: LocalTokenizer, codec: Codec) -> dict[str, float]:
    """Where a thread begins to be worth its way there and back."""
    figures = {}
    for size in (INLINE_CHARACTERS // 4, INLINE_CHARACTERS, 4 * INLINE_CHARACTERS):
        texts = [text_of(codec, 4000, seed)[:size] for seed in range(50)]
        inline = [await wall_ms(lambda text=text: _inline(codec, text)) for text in texts]  # type: ignore[misc]
        hop = [await wall_ms(lambda text=text: local._jobs.run(codec, text, remember=False)) for text in texts]  # type: ignore[misc]
        figures[f"{size} characters: at once"] = statistics.median(inline)
        figures[f"{size} characters: in a thread"] = statistics.median(hop)
    return figures


async def _inline(codec: Codec, text: str) -> Tokens:
    return codec.encode(text, remember=False)


def _books() -> dict[str, float]:
    """The ledger's side: prefixes compared, conversations held."""
    one, other = Tokens(range(TOKENS)), Tokens([*range(TOKENS), 1, 2, 3])
    cut = Tokens([*range(TOKENS // 3), -1, *range(TOKENS)])
    figures = {}
    for name, pair in (("equal", (one, other)), ("apart after a third", (one, cut))):
        start = time.perf_counter()
        for _ in range(100):
            pair[0].common_prefix(pair[1])
        figures[f"common prefix of 128k, {name}"] = 10 * (time.perf_counter() - start)
    tracemalloc.start()
    held = [Holding(Tokens(range(n, n + CONVERSATION_TOKENS))) for n in range(CONVERSATIONS)]
    figures["1,000 conversations of 32k, MB"] = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    del held
    figures["process at its largest, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tokens", description="What token ids cost.")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.runs))
    table = Table("token ids", "ms, unless it says otherwise")
    table.columns[1].justify = "right"
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if value < 10 else f"{value:,.1f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
