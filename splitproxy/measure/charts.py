"""Measurements for people: tables and bars in the terminal, pictures in a file. It measures nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitproxy.errors import LaunchError
from splitproxy.measure.measures import PERCENTILES, Summary, bars
from splitproxy.measure.payoff import Payoff

BAR_WIDTH = 40
NO_PLOTS = "--png needs matplotlib: pip install 'splitproxy[plots]'"


def show_payoff(console: Console, payoff: Payoff) -> None:
    """The ladder as a table and as bars, and what it says."""
    table = _table("tokens", "alone", "moved", "read", "save", "restore", "session", "sooner")
    for rung in payoff.rungs:
        style = "green" if rung.pays else "red"
        table.add_row(
            f"{rung.tokens:,}",
            *map(_seconds, (rung.local_s, rung.handover_s, rung.read_s, rung.save_s, rung.restore_s)),
            f"{rung.session_bytes / 2**20:.1f} MiB",
            Text(f"{rung.gain:.2f} x" if rung.reused else "read again", style if rung.reused else "bold red"),
        )
    console.print("Time to the first token, read by the decode engine alone, and moved to it:")
    console.print(table)
    rows = []
    for rung in payoff.rungs:
        rows += [(f"{rung.tokens:,} alone", rung.local_s), ("moved", rung.handover_s)]
    for line in bars(rows, BAR_WIDTH, _seconds):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in verdict(payoff):
        console.print(line, highlight=False, soft_wrap=True)


def verdict(payoff: Payoff) -> list[str]:
    """What a ladder says, in sentences."""
    if not payoff.rungs:
        return ["Nothing was measured to its end."]
    if (lost := payoff.read_again_tokens) is not None:
        return [f"Of {lost:,} tokens the decode engine reused too few after a restore: it read them again."]
    if (found := payoff.break_even_tokens) is None:
        return [
            f"A handover brings no first token sooner up to {payoff.rungs[-1].tokens:,} tokens. It can still pay where "
            'other answers run on the decode engine and would stand still: split.policy = "auto" weighs that.',
        ]
    shortest, floor = found <= payoff.rungs[0].tokens, payoff.recommended_min_prompt_tokens
    return [
        f"It pays from {'at most ' if shortest else 'about '}{found:,} tokens on.",
        f'Recommended for split.policy = "threshold": split.min_prompt_tokens = {floor}.',
        'Policy "auto" weighs each prompt anew, running answers included; a lower floor does no harm there.',
    ]


def show_comparison(console: Console, title: str, arms: Mapping[str, Summary]) -> None:
    """Several arms of one load, side by side."""
    console.print(title, highlight=False, soft_wrap=True)
    table = Table(header_style="bold")
    table.add_column("")
    for name in arms:
        table.add_column(name, justify="right")

    def row(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    summaries = list(arms.values())
    row("requests, failed", [f"{one.requests}, {one.failed}" for one in summaries])
    row("inside the limits", [f"{one.good} ({100 * one.good / max(one.requests, 1):.0f} %)" for one in summaries])
    row("goodput, requests/s", [f"{one.goodput_rps:.2f}" for one in summaries])
    row("handed over", [str(one.handed_over) for one in summaries])
    row("first token, mean", [_seconds(one.mean_first_token_s) for one in summaries])
    for name, field in (("first token", "first_token_s"), ("gap", "gap_s"), ("whole answer", "total_s")):
        for percent in PERCENTILES:
            row(f"{name}, p{percent}", [_seconds(getattr(one, field)[percent]) for one in summaries])
    console.print(table)


def save_payoff(path: Path, payoff: Payoff) -> None:
    """The ladder as a picture. Raises LaunchError without matplotlib."""
    figure, axes = _figure(1)
    (axis,) = axes
    tokens = [rung.tokens for rung in payoff.rungs]
    axis.plot(tokens, [rung.local_s for rung in payoff.rungs], "o-", label="decode engine alone")
    axis.plot(tokens, [rung.handover_s for rung in payoff.rungs], "o-", label="handed over")
    if (found := payoff.break_even_tokens) is not None:
        axis.axvline(found, linestyle=":", label=f"from {found:,} tokens on")
    axis.set(xlabel="prompt, tokens", ylabel="first token, seconds", xscale="log", yscale="log")
    _finish(figure, axes, path)


def save_comparison(path: Path, title: str, arms: Mapping[str, Summary]) -> None:
    """Several arms of one load as a picture. Raises LaunchError without matplotlib."""
    figure, axes = _figure(3)
    fields = (("first token", "first_token_s"), ("gap", "gap_s"), ("whole answer", "total_s"))
    for axis, (name, field) in zip(axes, fields, strict=True):
        for place, (arm, summary) in enumerate(arms.items()):
            values = [getattr(summary, field)[percent] for percent in PERCENTILES]
            axis.bar([number + 0.4 * place for number in range(len(values))], values, 0.4, label=arm)
        axis.set(title=name, ylabel="seconds")
        axis.set_xticks([number + 0.2 for number in range(len(PERCENTILES))], [f"p{p}" for p in PERCENTILES])
    figure.suptitle(title)
    _finish(figure, axes, path)


def _figure(count: int) -> tuple[Any, Sequence[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LaunchError(NO_PLOTS) from None
    figure = Figure(figsize=(5.5 * count, 4.5), layout="constrained")
    return figure, [figure.add_subplot(1, count, number + 1) for number in range(count)]


def _finish(figure: Any, axes: Sequence[Any], path: Path) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}") from None


def require_plots() -> None:
    """Raises LaunchError where pictures cannot be drawn: better before a long measurement than after it."""
    _figure(1)


def _seconds(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _table(*columns: str) -> Table:
    table = Table(header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table
