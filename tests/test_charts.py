"""What people get to see of measurements: tables, bars, sentences and pictures."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from splitproxy.errors import LaunchError
from splitproxy.measure import charts
from splitproxy.measure.measures import Limits, Sample, Summary, summarize
from splitproxy.measure.payoff import Payoff, Rung

TITLE = "documents, 0.5 requests/s"


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def shown(at: Console) -> str:
    assert isinstance(at.file, io.StringIO)
    return at.file.getvalue()


LADDER = Payoff((Rung(128, 0.1, 0.2, 0.15, 0.01, 0.01, 2**20), Rung(512, 0.4, 0.2, 0.15, 0.01, 0.01, 2**22)))


def summary() -> Summary:
    return summarize([Sample("chat", 0.0, 0.5, (0.05,), 0.6, "handover")], {"chat": Limits(1, 1)})


def test_the_ladder_is_shown() -> None:
    """The table, a bar for each measurement, and the floor that comes of it."""
    at = console()
    charts.show_payoff(at, LADDER)
    text = shown(at)
    assert f"split.min_prompt_tokens = {LADDER.recommended_min_prompt_tokens}." in text
    assert text.count("█") > 20
    assert "400 ms" in text


@pytest.mark.parametrize("ladder", [Payoff(()), Payoff(LADDER.rungs[:1])])
def test_a_ladder_without_profit_says_so(ladder: Payoff) -> None:
    """Where nothing pays, no floor is recommended."""
    at = console()
    charts.show_payoff(at, ladder)
    assert "min_prompt_tokens" not in shown(at)


def test_the_comparison_is_shown() -> None:
    """Both arms stand side by side with their percentiles, and the same figures are JSON."""
    at = console()
    charts.show_comparison(at, TITLE, {"unsplit": summary(), "split": summary()})
    text = shown(at)
    assert all(
        word in text for word in ("unsplit", "split", "goodput", "first token, p95", "gap, p99", "whole answer, p50")
    )
    assert json.loads(json.dumps(summary().as_json()))["gap_s"]["p99"] == 0.05


def test_pictures_are_pictures(tmp_path: Path) -> None:
    """Both pictures are PNG files; a folder that does not exist is an error in words."""
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the pictures, is not installed")
    charts.require_plots()
    charts.save_payoff(tmp_path / "a.png", LADDER)
    charts.save_comparison(tmp_path / "b.png", TITLE, {"unsplit": summary(), "split": summary()})
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))
    with pytest.raises(LaunchError, match="cannot be written"):
        charts.save_payoff(tmp_path / "none" / "a.png", LADDER)


def test_no_pictures_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the command says what to install, before anything is measured."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(LaunchError, match=r"splitproxy\[plots\]"):
        charts.require_plots()


@pytest.mark.parametrize(
    ("rungs", "words"),
    [
        ((), "Nothing was measured"),
        ((LADDER.rungs[1],), "at most 512 tokens"),
        (LADDER.rungs, "about 269 tokens"),
        ((LADDER.rungs[0],), "no first token sooner up to 128 tokens"),
        ((LADDER.rungs[0], replace(LADDER.rungs[1], reused=False)), "Of 512 tokens the decode engine reused too few"),
    ],
)
def test_a_ladder_is_summed_up_in_words(rungs: tuple[Rung, ...], words: str) -> None:
    """From which length on it pays, or that it does not, and nothing where nothing was measured."""
    assert words in " ".join(charts.verdict(Payoff(rungs)))
