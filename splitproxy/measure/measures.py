"""What a client sees of an engine under load: samples of single requests, and what many of them come to. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PERCENTILES = (50, 95, 99)
BARS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to be a good one: seconds to the first token, and the 99th percentile of its gaps."""

    first_token_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it. Times are seconds; `first_token_s` is None where none came."""

    kind: str
    started_s: float  # after the beginning of the run
    first_token_s: float | None
    gaps_s: tuple[float, ...]
    total_s: float
    route: str = ""
    reason: str = ""
    status: int = 200

    @property
    def failed(self) -> bool:
        return self.first_token_s is None or self.status != 200

    def keeps(self, limits: Limits) -> bool:
        """Whether it came in time and ran smoothly."""
        if self.failed or self.first_token_s is None:
            return False
        return self.first_token_s <= limits.first_token_s and percentile(self.gaps_s, 99) <= limits.gap_s


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many per cent do not exceed; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Many requests together. Each table maps a percentile to seconds."""

    requests: int
    failed: int
    good: int
    span_s: float  # from the first arrival to the last end
    mean_first_token_s: float
    first_token_s: dict[int, float]
    gap_s: dict[int, float]
    total_s: dict[int, float]
    handed_over: int

    @property
    def goodput_rps(self) -> float:
        """Good requests a second."""
        return self.good / self.span_s if self.span_s else 0.0

    def as_json(self) -> dict[str, Any]:
        names = ("requests", "failed", "good", "span_s", "mean_first_token_s", "handed_over")
        tables = {"first_token_s": self.first_token_s, "gap_s": self.gap_s, "total_s": self.total_s}
        percentiles = {
            name: {f"p{percent}": value for percent, value in table.items()} for name, table in tables.items()
        }
        return {name: getattr(self, name) for name in names} | {"goodput_rps": self.goodput_rps} | percentiles


def summarize(samples: Sequence[Sample], limits: Mapping[str, Limits]) -> Summary:
    """What samples come to. `limits` holds those of each kind."""
    answered = [sample for sample in samples if not sample.failed]
    firsts = [sample.first_token_s for sample in answered if sample.first_token_s is not None]
    gaps = [gap for sample in answered for gap in sample.gaps_s]
    ends = [sample.started_s + sample.total_s for sample in samples]

    def table(values: Sequence[float]) -> dict[int, float]:
        return {percent: percentile(values, percent) for percent in PERCENTILES}

    return Summary(
        requests=len(samples),
        failed=len(samples) - len(answered),
        good=sum(sample.keeps(limits[sample.kind]) for sample in samples),
        span_s=max(ends, default=0.0) - min((sample.started_s for sample in samples), default=0.0),
        mean_first_token_s=sum(firsts) / len(firsts) if firsts else math.inf,
        first_token_s=table(firsts),
        gap_s=table(gaps),
        total_s=table([sample.total_s for sample in answered]),
        handed_over=sum(sample.route == "handover" for sample in samples),
    )


def bars(rows: Sequence[tuple[str, float]], width: int, unit: Callable[[float], str]) -> list[str]:
    """A horizontal bar for each row, in proportion, with its value behind it."""
    longest = max((value for _, value in rows), default=0.0) or 1.0
    label_width = max((len(label) for label, _ in rows), default=0)
    lines = []
    for label, value in rows:
        eighths = round(8 * width * value / longest)
        bar = BARS[8] * (eighths // 8) + BARS[eighths % 8].strip()
        lines.append(f"{label:>{label_width}} {bar} {unit(value)}")
    return lines
