"""How fast an engine on the CPU reads in batches of several sizes: a batch is how long answers beside it stand still.

    python -m bench.batches [--sizes 512,128,64,48,32] [--rounds 3] [--markdown FILE]

One engine for each size and model, on one core, one thread. They read new random prompts of two lengths in turns; of
each the median counts, by the engine's own timings. A whole batch of the longer prompt is how long an answer beside it
waits for its next token.
"""

import argparse
import json
import os
import random
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.stands import machine, pin, publish
from splitproxy.run.demo import demo_model
from splitproxy.run.launch import physical_cores
from tests.live import LiveEngine, engine
from tests.models import MID, SMALL, tiny_model

MODELS: dict[str, Callable[[], Path]] = {
    "random, 6.5 million weights": lambda: tiny_model("dense", **SMALL),
    "random, 76 million": lambda: tiny_model("dense", **MID),
    "SmolLM2": demo_model,
}
LENGTHS = (200, 1500)
FLAGS = ("-c", "4096", "-np", "2", "--kv-unified", "--cache-ram", "0")
FIRST_ID, LAST_ID = 20, 250  # of a vocabulary that every model has


def read_tps(at: LiveEngine, tokens: int) -> float:
    """Tokens a second at which the engine reads a prompt that it has not seen."""
    ids = random.choices(range(FIRST_ID, LAST_ID), k=tokens)
    body = json.dumps({"prompt": ids, "n_predict": 1, "cache_prompt": False}).encode()
    request = urllib.request.Request(f"{at.url}/completion", body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310 - always this machine
        return float(json.load(answer)["timings"]["prompt_per_second"])


def measure(sizes: Sequence[int], rounds: int, console: Console) -> list[str]:
    """The table, line by line."""
    lines = [
        "| model | batch | " + " | ".join(f"{length} tokens, tokens/s" for length in LENGTHS) + " | a batch, ms |",
        "|---|---:|" + "---:|" * (len(LENGTHS) + 1),
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(MODELS) * rounds * len(sizes) * len(LENGTHS))
        for name, model in MODELS.items():
            found: dict[tuple[int, int], list[float]] = {(size, length): [] for size in sizes for length in LENGTHS}
            with ExitStack() as stack:
                engines = {size: stack.enter_context(engine(model(), *FLAGS, "-b", str(size))) for size in sizes}
                for at in engines.values():
                    pin(at.process.pid, physical_cores()[-1])
                for _ in range(rounds):
                    for size, length in found:
                        progress.update(task, description=f"{name}, batch {size}")
                        found[size, length].append(read_tps(engines[size], length))
                        progress.advance(task)
            for size in sizes:
                speeds = [statistics.median(found[size, length]) for length in LENGTHS]
                told = " | ".join(f"{speed:.0f}" for speed in speeds)
                lines.append(f"| {name} | {size} | {told} | {1000 * size / speeds[-1]:.0f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="512,128,64,48,32", help="tokens, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    console = Console()
    head = f"{machine()}; {options.rounds} rounds; load of the machine before: {os.getloadavg()[1]:.1f}"
    lines = [head, "", *measure([int(size) for size in options.sizes.split(",")], options.rounds, console)]
    publish(lines, console, options.markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
