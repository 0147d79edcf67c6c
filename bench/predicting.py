"""How far the first token comes from its prediction, on real engines that the proxy has never seen before.

    python -m bench.predicting [--requests 60] [--engines real,SmolLM2] [--markdown FILE]

Prompts of many lengths, a third of which go on from an earlier one: at first one after the other, read by either engine
in turns, then as they come (open loop, policy `auto`), at about half of what one engine can read, with short chats
between them. The error is that of the proxy's own record: predicted minus actual, relative to the actual time from the
decision to the first byte.
"""

import argparse
import asyncio
import logging
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.stands import REAL, SMOLLM2, STANDS, Stand, machine, publish
from splitproxy.measure.load import open_loop
from splitproxy.measure.measures import percentile
from splitproxy.measure.mixes import Prompt
from splitproxy.model import Policy, RequestRecord

LENGTHS = {REAL: (100, 2500), SMOLLM2: (80, 900)}
FIRST = 20  # requests after which a proxy shall know its engines
CHAT_TOKENS, ANSWER_TOKENS = 30, 24
BUSY_PART = 0.5
MEDIAN_GOAL, P90_GOAL = 0.15, 0.40


def prompts(count: int, shortest: int, longest: int, read_s: float, at: Stand) -> list[Prompt]:
    """Lengths at random, each octave as often as any other; `read_s` is what reading one of them takes on average."""
    chance = random.Random(1)
    found: list[Prompt] = []
    now_s = 0.0
    for number in range(count):
        now_s += chance.expovariate(BUSY_PART / read_s)
        if number % 4 == 3:
            found.append(Prompt("chat", now_s, CHAT_TOKENS, ANSWER_TOKENS, seed=next(at.seeds)))
            continue
        tokens = round(shortest * (longest / shortest) ** chance.random())
        earlier = found[number - 3] if number % 3 == 2 and number >= 3 else None
        if earlier is None or earlier.kind == "chat":
            name = f"conversation {next(at.seeds)}"
            found.append(Prompt("prompt", now_s, tokens, ANSWER_TOKENS, name, tokens, next(at.seeds)))
        else:
            tokens = min(earlier.tokens + tokens // 4, longest)
            shared = earlier.tokens
            found.append(Prompt("prompt", now_s, tokens, ANSWER_TOKENS, earlier.beginning, shared, next(at.seeds)))
    return found


async def one_by_one(at: Stand, load: Sequence[Prompt]) -> list[RequestRecord]:
    """Each alone, read by the decode engine and handed over in turns."""
    before = len(at.records)
    for number, prompt in enumerate(load):
        at.use(Policy.ALWAYS if number % 2 else Policy.NEVER)
        await at.caller.ask(prompt, 0.0)
        await at.noted(before + number + 1)
    return at.records[before:]


async def as_they_come(at: Stand, load: Sequence[Prompt]) -> list[RequestRecord]:
    """When they are due, whatever became of those before, with policy `auto`."""
    at.use(Policy.AUTO)
    before = len(at.records)
    await open_loop([at.caller], load, lambda _sample: None)
    await at.noted(before + len(load))
    return at.records[before:]


def errors(records: Sequence[RequestRecord]) -> list[float]:
    """Sizes of the errors of those that had a prediction."""
    return [abs(record.prediction_error) for record in records if record.prediction_error is not None]


def row(engines: str, load: str, records: Sequence[RequestRecord]) -> str:
    found = errors(records)
    moved = sum(record.handover is not None for record in records)
    middle, high = (statistics.median(found), percentile(found, 90)) if found else (0.0, 0.0)
    told = [
        f"{100 * value:.0f} %" if value <= goal else f"**{100 * value:.0f} %**"
        for value, goal in ((middle, MEDIAN_GOAL), (high, P90_GOAL))
    ]
    unforeseen = len(records) - len(found)
    return f"| {engines} | {load} | {len(records)} | {moved} | {unforeseen} | {told[0]} | {told[1]} |"


async def measure(kinds: Sequence[str], count: int) -> list[str]:
    """The table, line by line."""
    lines = [
        "| engines | load | requests | handed over | nothing predicted | median error | p90 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for kind in kinds:
        shortest, longest = LENGTHS[kind]
        async with STANDS[kind]() as at:
            read_s = at.decode_s((shortest + longest) // 2) / 2
            alone = await one_by_one(at, prompts(count, shortest, longest, read_s, at))
            lines.append(row(kind, f"one by one, first {FIRST}", alone[:FIRST]))
            lines.append(row(kind, "one by one, after them", alone[FIRST:]))
            read_s = at.decode_s((shortest + longest) // 2) / 2
            busy = await as_they_come(at, prompts(count, shortest, longest, read_s, at))
            lines.append(row(kind, "as they come, handed over", [one for one in busy if one.handover is not None]))
            lines.append(row(kind, "as they come, read locally", [one for one in busy if one.handover is None]))
            lines.append(row(kind, "as they come, all", busy))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predicting", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--engines", default=f"{REAL},{SMOLLM2}", help="separated by commas")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    head = f"{machine()}; load of the machine before: {os.getloadavg()[1]:.1f}"
    lines = [head, "", *asyncio.run(measure(options.engines.split(","), options.requests))]
    publish(lines, Console(), options.markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
