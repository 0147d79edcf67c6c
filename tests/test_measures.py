"""Samples become percentiles, goodput and bars."""

import math

import pytest

from splitproxy.measure.measures import Limits, Sample, bars, percentile, summarize

LIMITS = {"chat": Limits(1.0, 0.1), "document": Limits(5.0, 0.1)}


def sample(
    kind: str = "chat", start: float = 0.0, first: float | None = 0.5, gaps: tuple[float, ...] = (0.05,), **more: object
) -> Sample:
    return Sample(kind, start, first, gaps, (first or 0) + sum(gaps), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, 0), ([3.0], 99, 3), ([4.0, 1.0, 3.0, 2.0], 50, 2), ([4.0, 1.0, 3.0, 2.0], 75, 3), ([1.0, 2.0], 99, 2)],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    """A percentile is a value that was seen, whatever their order."""
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(
    ("seen", "good"),
    [
        (sample(), True),
        (sample(first=1.1), False),
        (sample("document", first=1.1), True),
        (sample(gaps=(0.05, 0.2)), False),
        (sample(first=None), False),
        (sample(status=503), False),
        (sample(gaps=()), True),
    ],
)
def test_a_good_request_keeps_both_limits(seen: Sample, good: bool) -> None:
    """In time and smooth, by the limits of its kind; what failed is never good."""
    assert seen.keeps(LIMITS[seen.kind]) is good


def test_a_summary_counts_from_the_first_arrival_to_the_last_end() -> None:
    """Goodput is good requests over the whole span; failures are counted, and have no times."""
    found = summarize(
        [sample(start=1.0), sample(start=2.0, first=3.0, route="handover"), sample(start=2.5, first=None)], LIMITS
    )
    assert (found.requests, found.failed, found.good, found.handed_over) == (3, 1, 1, 1)
    assert found.span_s == pytest.approx(4.05)
    assert found.goodput_rps == pytest.approx(1 / 4.05)
    assert found.mean_first_token_s == pytest.approx(1.75)
    assert found.as_json()["first_token_s"] == {"p50": 0.5, "p95": 3.0, "p99": 3.0}


def test_nothing_measured_is_no_crash() -> None:
    """An empty run has no goodput, and no first token."""
    found = summarize([], {})
    assert (found.goodput_rps, found.mean_first_token_s) == (0.0, math.inf)


def test_bars_are_in_proportion() -> None:
    """The longest fills the width, half of it is half as long, and nothing is no bar."""
    lines = bars([("a", 2.0), ("bb", 1.0), ("c", 0.0)], 8, lambda value: f"{value:g}")
    assert [line.count("█") for line in lines] == [8, 4, 0]
    assert [line.split(" ")[-1] for line in lines] == ["2", "1", "0"]
    assert lines[0].startswith(" a ")
