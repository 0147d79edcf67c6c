"""Whether deciding by cost is ever worse than not deciding: `auto` against `always` and `never`, over a grid of loads.

    python -m bench.never_worse [--rounds 3] [--cells PATTERN] [--markdown FILE]

Two real engines of this machine, one core each, with a random model of middling speed or with SmolLM2; for slow saves
two fake engines, because real ones save too fast into RAM. One proxy stands in front of them, and its policy is changed
between runs, in another order each round. A cell is a kind of load: short or long prompts, cold or with most of it held
by the decode engine, or all of these mixed; one after the other or in bursts (which make whoever reads them busy), and
with an idle decode engine or with answers running on it. Compared are medians over the rounds of the mean time to the
first token and of the goodput, which is requests a second that keep both limits; the answers that run are requests like
any other.
"""

import argparse
import asyncio
import fnmatch
import itertools
import logging
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.stands import EQUAL, REAL, SLOW_SAVE, SMOLLM2, STANDS, Stand, machine
from splitproxy.measure.load import open_loop
from splitproxy.measure.measures import Limits, Sample
from splitproxy.measure.mixes import Prompt
from splitproxy.model import Policy

ARMS = (Policy.AUTO, Policy.ALWAYS, Policy.NEVER)
HELD_PART = 0.75  # of a warm prompt
BURST = 4
PACE = {1: 1.6, BURST: 5.0}  # a prompt, or a burst, comes after so many times what reading one alone takes
CHAT_TOKENS, CHAT_LEAD_S, GAP_LIMIT_S = 24, 0.3, 0.15
LOST_S = 99.0  # stands for a first token that never came
LATE_FACTOR = {1: 2.5, BURST: 4.5}  # a first token is in time within so many times what reading its prompt alone takes
BOUND = 0.95


@dataclass(frozen=True, slots=True)
class Sizes:
    """What engines of a kind are asked, so that they are busy and not overrun."""

    short: int
    long: int
    chat_answer: int
    chat_every_s: float
    chat_limit_s: float


FAST = Sizes(400, 2000, 96, 0.35, 0.5)
SIZES = {REAL: FAST, SMOLLM2: Sizes(200, 800, 24, 1.5, 1.0), EQUAL: FAST, SLOW_SAVE: FAST}


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of prompt."""

    tokens: int
    warm: bool

    @property
    def own_tokens(self) -> int:
        """What of a prompt is not held."""
        return round((1 - HELD_PART) * self.tokens) if self.warm else self.tokens

    @property
    def name(self) -> str:
        return f"{'long' if self.tokens > 500 else 'short'}, {'warm' if self.warm else 'cold'}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A kind of load. Its shapes take turns."""

    engines: str  # which stand
    shapes: tuple[Shape, ...]
    burst: int
    answers: bool  # whether answers run on the decode engine
    prompts: int
    times: int = 1  # that the load is sent in one run

    @property
    def name(self) -> str:
        words = (
            self.engines,
            self.shapes[0].name if len(self.shapes) == 1 else "mixed",
            "bursts" if self.burst > 1 else "single",
            "answers running" if self.answers else "idle",
        )
        return ", ".join(words)


def grid() -> list[Cell]:
    """Every combination for real engines and for fake ones; a part of them for SmolLM2, and for slow saves."""
    return [cell for kind in STANDS for cell in _cells(kind)]


def _cells(kind: str) -> Iterator[Cell]:
    short, long = SIZES[kind].short, SIZES[kind].long
    shapes = [Shape(tokens, warm) for tokens in (short, long) for warm in (False, True)]
    mixed = (Shape(long, False), Shape(short, True), Shape(short, False), Shape(long, True))
    chosen = {SMOLLM2: shapes[1:3], SLOW_SAVE: shapes[2:3]}.get(kind, shapes)
    for shape, burst, answers in itertools.product(chosen, (1, BURST), (False, True)):
        few = shape.warm  # more of them would not fit into the decode engine together
        yield Cell(kind, (shape,), burst, answers, 4 if few or kind == SMOLLM2 else 8, 2 if few else 1)
    for burst, answers in itertools.product((1, BURST), (False, True)):
        yield Cell(kind, mixed, burst, answers, 8)


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a cell came to."""

    first_token_s: float  # mean
    goodput_rps: float
    handed_over: int


class Arms:
    """The arms of a cell at one stand."""

    def __init__(self, at: Stand) -> None:
        self._at = at
        self._read_tps = 2000 / at.decode_s(2000)

    async def run(self, cell: Cell, policy: Policy) -> Run:
        """One run: what comes when is the same for every arm, the words are new, and every slot is empty at first."""
        self._at.use(policy)
        await self._at.clear()
        sizes = SIZES[cell.engines]
        own_s = {shape: shape.own_tokens / self._read_tps for shape in cell.shapes}
        shapes = [cell.shapes[number % len(cell.shapes)] for number in range(cell.prompts)]
        step_s = PACE[cell.burst] * statistics.mean(own_s[shape] for shape in shapes)
        span_s = (-(-cell.prompts // cell.burst)) * step_s
        samples: list[Sample] = []
        for _ in range(cell.times):
            prompts = [self._prompt(shape, number // cell.burst * step_s) for number, shape in enumerate(shapes)]
            samples += await self._send(prompts, span_s, sizes if cell.answers else None)
        limits = {"chat": Limits(sizes.chat_limit_s, GAP_LIMIT_S)}
        for shape, alone_s in own_s.items():
            limits[shape.name] = Limits(LATE_FACTOR[cell.burst] * alone_s + 0.1, GAP_LIMIT_S)
        return Run(
            statistics.mean(sample.first_token_s or LOST_S for sample in samples),
            sum(sample.keeps(limits[sample.kind]) for sample in samples) / (cell.times * span_s),
            sum(sample.route == "handover" for sample in samples if sample.kind != "chat"),
        )

    async def _send(self, prompts: Sequence[Prompt], span_s: float, chats: Sizes | None) -> list[Sample]:
        """The prompts when they are due, with chats beside them; before that the turns that made warm ones warm."""
        for prompt in prompts:
            if prompt.shared_tokens:
                turn = replace(prompt, tokens=prompt.shared_tokens + 8, answer_tokens=1)
                await self._at.caller.ask(turn, 0.0)
        load = list(prompts)
        if chats is not None:
            load = [replace(prompt, at_s=prompt.at_s + CHAT_LEAD_S) for prompt in prompts]
            load += [
                Prompt("chat", number * chats.chat_every_s, CHAT_TOKENS, chats.chat_answer, seed=next(self._at.seeds))
                for number in range(round(span_s / chats.chat_every_s))
            ]
        samples = await open_loop([self._at.caller], sorted(load, key=lambda one: one.at_s), lambda _sample: None)
        await self._at.quiet()
        return samples

    def _prompt(self, shape: Shape, at_s: float) -> Prompt:
        seed = next(self._at.seeds)
        held = shape.tokens - shape.own_tokens
        beginning = f"conversation {seed}" if held else ""
        return Prompt(shape.name, at_s, shape.tokens, 8, beginning, held, seed)


async def practise(at: Stand) -> None:
    """Let the proxy learn its engines' speeds, as it would in its first minute."""
    for number, tokens in enumerate((40, 400, 1000, 2000, 40, 2000, 400, 1000)):
        at.use(Policy.ALWAYS if number % 2 else Policy.NEVER)
        await at.caller.ask(Prompt("prompt", 0, tokens, 8, seed=next(at.seeds)), 0.0)


Results = dict[Cell, dict[Policy, list[Run]]]


async def measure(cells: Sequence[Cell], rounds: int, console: Console, keep: Callable[[Results], None]) -> Results:
    """All cells, arms and rounds; the arms change places from round to round. `keep` gets what there is so far."""
    results: Results = {cell: {arm: [] for arm in ARMS} for cell in cells}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=len(cells) * rounds * len(ARMS))
        for kind, start in STANDS.items():
            chosen = [cell for cell in cells if cell.engines == kind]
            if not chosen:
                continue
            async with start() as at:
                await practise(at)
                arms = Arms(at)
                for number, cell in itertools.product(range(rounds), chosen):
                    for place in range(len(ARMS)):
                        arm = ARMS[(place + number) % len(ARMS)]
                        progress.update(task, description=f"{cell.name}: {arm}")
                        results[cell][arm].append(await arms.run(cell, arm))
                        progress.advance(task)
                    keep(results)
    return results


def table(results: Results) -> list[str]:
    """The grid in Markdown. The ratios are those of `auto` to the better of the other two; above 1 is better."""
    lines = [
        "| load | first token, s: auto | always | never | ratio | goodput/s: auto | always | never | ratio | moved |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell, arms in results.items():
        if not all(arms.values()):
            continue  # not measured yet
        firsts = {arm: [run.first_token_s for run in runs] for arm, runs in arms.items()}
        goods = {arm: [run.goodput_rps for run in runs] for arm, runs in arms.items()}
        sooner, better = ratios(arms)
        moved = statistics.median(run.handed_over for run in arms[Policy.AUTO])
        row = [
            cell.name,
            *(_spread(firsts[arm], 3) for arm in ARMS),
            _marked(sooner),
            *(_spread(goods[arm], 2) for arm in ARMS),
            _marked(better),
            f"{moved:g} of {cell.times * cell.prompts}",
        ]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def ratios(arms: dict[Policy, list[Run]]) -> tuple[float, float]:
    """How `auto` compares with the better of the other two: in the first token, and in goodput."""
    first = {arm: statistics.median(run.first_token_s for run in runs) for arm, runs in arms.items()}
    good = {arm: statistics.median(run.goodput_rps for run in runs) for arm, runs in arms.items()}
    best = max(good[Policy.ALWAYS], good[Policy.NEVER])
    return (
        min(first[Policy.ALWAYS], first[Policy.NEVER]) / first[Policy.AUTO],
        good[Policy.AUTO] / best if best else 1.0,
    )


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _marked(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio >= BOUND else f"**{ratio:.2f}**"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.never_worse", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", default="*", help="only cells whose name matches this pattern")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console()
    cells = [cell for cell in grid() if fnmatch.fnmatch(cell.name, options.cells)]
    head = f"{machine()}; {options.rounds} rounds; load of the machine before: {os.getloadavg()[1]:.1f}"

    def told(results: Results) -> list[str]:
        found = [ratios(arms) for arms in results.values() if all(arms.values())]
        held = sum(min(pair) >= BOUND for pair in found)
        return [head, "", *table(results), "", f"{held} of {len(found)} cells at {BOUND} or better in both."]

    def keep(results: Results) -> None:
        if options.markdown:
            options.markdown.write_text("\n".join(told(results)) + "\n", encoding="utf-8")

    results = asyncio.run(measure(cells, options.rounds, console, keep))
    keep(results)
    console.print("\n".join(told(results)), markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
