"""What one decision costs once the prompt's token ids are there: views of all engines, both predictions, the route.

    python -m bench.deciding [--runs 200]

The books are those of one prefill engine that remembers 8 prompts and a decode engine with 8 slots, each of 128k
tokens, all but the last thousands of which the prompt shares with every one of them. As many requests have come before
as are remembered.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from splitproxy.books.admission import Admission
from splitproxy.books.ledger import Holding, Ledger
from splitproxy.books.sessions import SessionStore
from splitproxy.decide.forecast import ARRIVALS
from splitproxy.decide.recall import PROMPTS
from splitproxy.decide.router import Demand, Rules, decide
from splitproxy.decide.speeds import Reading
from splitproxy.engines.adapter import Deadlines
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.fleet.fleet import Fleet
from splitproxy.model import Api, Ask, EngineState, PairState, Policy, Reason, Role, Route, RouteKind, Tokens

SLOTS, HELD_TOKENS = 8, 128 * 1024
BUDGET_MS = 0.2
LEAST_APART, STEP_APART = 5000, 3000  # tokens from a prompt's end
RULES = Rules(Policy.AUTO, 2048)
EARLIER = Ask(Api.CHAT, "/v1/chat/completions", b"{}")


def books(ids: list[int]) -> Ledger:
    """A decode engine whose slots hold the prompt up to some place near its end, and a prefill engine."""
    ledger = Ledger(2**40)
    ledger.open("reader", Role.PREFILL, 1, 2 * HELD_TOKENS)
    ledger.open("writer", Role.DECODE, SLOTS, 2 * SLOTS * HELD_TOKENS)
    leases = [ledger.claim("writer", Tokens(), HELD_TOKENS, 0) for _ in range(SLOTS)]
    for number, lease in enumerate(leases):
        assert lease is not None
        ledger.release(lease, Holding(parted(ids, number), 0, HELD_TOKENS))
    return ledger


def parted(ids: list[int], number: int) -> Tokens:
    """A prompt that shares all but its end with the one of these ids."""
    end = HELD_TOKENS - LEAST_APART - STEP_APART * number
    return Tokens([*ids[:end], *(token + 1 for token in ids[end:HELD_TOKENS])])


async def measure(runs: int) -> dict[str, list[float]]:
    """Milliseconds of every run, by what was done."""
    chance = random.Random(1)
    ids = [chance.randrange(150_000) for _ in range(HELD_TOKENS)]
    prompt, stranger = Tokens([*ids, 1, 2, 3]), Tokens(chance.randrange(150_000) for _ in range(HELD_TOKENS))
    with tempfile.TemporaryDirectory() as folder, SessionStore(Path(folder)) as store:
        engines = {
            name: (LlamaServer(name, "http://127.0.0.1:9", "", store), role)
            for name, role in (("reader", Role.PREFILL), ("writer", Role.DECODE))
        }
        ledger = books(ids)
        fleet = Fleet(engines, ledger, Admission(ledger, 10), Deadlines(1, 1, 1), 0, store.sweep)
        for name, member in fleet.members.items():
            member.state = EngineState.READY
            for length in (500, 2000, 8000, 30_000):
                fleet.forecast.speeds.learn_reading(name, Reading(0, length), length)
        fleet.pairs["reader", "writer"].state = PairState.PROVEN
        for number in range(PROMPTS):
            fleet.forecast.recall.learn("reader", parted(ids, number), 0, HELD_TOKENS)
        for _ in range(ARRIVALS):
            with fleet.forecast.answering(Route(RouteKind.LOCAL, Reason.TOO_SHORT, "writer"), EARLIER, 10, moved=False):
                pass

        def one(tokens: Tokens) -> None:
            decode, prefill = fleet.views(tokens)
            decide(Demand(len(tokens)), decode, prefill, RULES)

        found = {
            "shared with every slot": _timed(lambda: one(prompt), runs),
            "shared with none": _timed(lambda: one(stranger), runs),
            "a claim, shared with every slot": _timed(lambda: _claim(ledger, prompt), runs),
        }
        for engine, _ in engines.values():
            await engine.close()
    return found


def _claim(ledger: Ledger, prompt: Tokens) -> None:
    ledger.outlook("writer", prompt)  # what a claim looks at, without changing the books


def _timed(work: Callable[[], None], runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.deciding", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    options = parser.parse_args()
    found = asyncio.run(measure(options.runs))
    table = Table(title=f"{SLOTS} slots of {HELD_TOKENS:,} tokens, ms", header_style="bold")
    for column in ("", "median", "p95", "least"):
        table.add_column(column, justify="right" if column else "left")
    for name, times in found.items():
        ordered = sorted(times)
        row = (statistics.median(times), ordered[int(0.95 * len(ordered))], ordered[0])
        table.add_row(name, *(f"{value:.3f}" for value in row))
    console = Console()
    console.print(table)
    middle = statistics.median(found["shared with every slot"])
    console.print(f"a decision: {middle:.3f} ms, {'within' if middle <= BUDGET_MS else 'NOT within'} {BUDGET_MS:g} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
