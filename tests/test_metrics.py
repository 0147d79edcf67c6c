"""Each field of a record lands in its series, labels are closed lists, and the names are those that are documented."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitproxy.books.admission import Admission
from splitproxy.books.ledger import NOTHING, Holding, Ledger
from splitproxy.engines.adapter import Deadlines, Engine
from splitproxy.errors import Cause, RequestError, Step
from splitproxy.fleet.fleet import Fleet
from splitproxy.model import (
    GAP_BOUNDS_S,
    Api,
    EngineState,
    Failure,
    Figures,
    Gaps,
    HandoverFigures,
    Outcome,
    PairState,
    Reason,
    RequestRecord,
    Role,
    Route,
    RouteKind,
    Tokens,
)
from splitproxy.serve.metrics import CONTENT_TYPE, Metrics

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"
# What dashboards and alerts rely on.
NAMES = {
    "requests_total", "decisions_total", "handoffs_total", "handoff_ineffective_total", "fallbacks_total",
    "cancelled_total", "engine_up", "slots", "pair_proven", "queue_depth", "queue_rejected_total",
    "prefill_tokens_total", "added_first_byte_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_seconds", "queue_seconds", "prefill_seconds", "save_seconds", "restore_seconds", "decode_seconds",
    "session_bytes_total", "session_bytes_in_flight", "last_handoff_prefill_seconds", "min_prompt_tokens",
}  # fmt: skip


def gaps(*seconds: float) -> Gaps:
    places = [bisect_left(GAP_BOUNDS_S, gap) for gap in seconds]
    return Gaps(tuple(places.count(place) for place in range(len(GAP_BOUNDS_S) + 1)), sum(seconds))


HANDED_OVER = RequestRecord(
    request_id="r",
    api=Api.CHAT,
    stream=True,
    outcome=Outcome.OK,
    status=200,
    step="decode",
    route=Route(RouteKind.HANDOVER, Reason.WORTH_MOVING, "writer", "reader", 100, 0, 99),
    engine="writer",
    queue_ms=2000.0,
    tokenize_ms=1.0,
    first_byte_ms=4000.0,
    total_ms=9000.0,
    decode_ms=5000.0,
    figures=Figures(99, 1, 10.0, 40, 4000.0),
    handover=HandoverFigures(1500.0, 300.0, 100.0, 3 * 2**20, prefill_read_tokens=80, prefill_cached_tokens=19),
    effective=True,
    gaps=gaps(0.02, 0.03, 3.0),
)
LOCAL = replace(
    HANDED_OVER,
    route=Route(RouteKind.LOCAL, Reason.WARM, "writer"),
    figures=Figures(60, 40, 10.0, 7, 100.0),
    handover=None,
    effective=None,
)


class Exposed:
    """Metrics over a fleet that stands still, and what a scrape of them shows."""

    def __init__(self) -> None:
        self.ledger = Ledger(10**9)
        self.admission = Admission(self.ledger, 1)
        engines = {"reader": (named("reader"), Role.PREFILL), "writer": (named("writer"), Role.DECODE)}
        self.fleet = Fleet(engines, self.ledger, self.admission, Deadlines(1, 1, 1), 0, int)
        self.metrics = Metrics(self.fleet, self.ledger, self.admission, 2048)

    def series(self) -> dict[str, float]:
        """Every series but buckets, without the prefix: `name{label="value"}` -> value."""
        return {
            sample.name.removeprefix("splitproxy_") + labels(sample.labels): sample.value
            for family in text_string_to_metric_families(self.metrics.render().decode())
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        }

    def counted(self, *records: RequestRecord) -> dict[str, float]:
        """The series that records have changed, and by how much."""
        before = self.series()
        for record in records:
            self.metrics.observe(record)
        return {
            name: value - before.get(name, 0.0)
            for name, value in self.series().items()
            if value != before.get(name, 0.0)
        }


def labels(found: dict[str, str]) -> str:
    inner = ",".join(f"{name}={value}" for name, value in sorted(found.items()))
    return f"{{{inner}}}" if inner else ""


def named(name: str) -> Engine:
    return cast("Engine", type("Named", (), {"name": name})())


@pytest.fixture
async def exposed() -> Exposed:
    return Exposed()


# --- records


def test_a_handover_lands_in_its_series(exposed: Exposed) -> None:
    """Every figure of a handed-over request is counted once, in seconds and bytes, under its labels."""
    assert exposed.counted(HANDED_OVER) == {
        "requests_total{endpoint=chat,outcome=ok}": 1,
        "decisions_total{decision=handover,reason=worth_moving}": 1,
        "handoffs_total{result=proven}": 1,
        "prefill_tokens_total{source=local}": 1,
        "prefill_tokens_total{source=remote}": 80,
        "prefill_tokens_total{source=cached}": 19,
        "generation_tokens_total": 40,
        "session_bytes_total": 3 * 2**20,
        "time_to_first_token_seconds_count{path=handover}": 1,
        "time_to_first_token_seconds_sum{path=handover}": 4.0,
        "inter_token_latency_seconds_count": 3,
        "inter_token_latency_seconds_sum": pytest.approx(3.05),
        "request_seconds_count{path=handover}": 1,
        "request_seconds_sum{path=handover}": 9.0,
        "queue_seconds_count": 1,
        "queue_seconds_sum": 2.0,
        "decode_seconds_count": 1,
        "decode_seconds_sum": 5.0,
        "prefill_seconds_count": 1,
        "prefill_seconds_sum": 1.5,
        "save_seconds_count": 1,
        "save_seconds_sum": pytest.approx(0.3),
        "restore_seconds_count": 1,
        "restore_seconds_sum": pytest.approx(0.1),
        "session_size_bytes_count": 1,
        "session_size_bytes_sum": 3 * 2**20,
        "added_first_byte_seconds_count": 1,
        "added_first_byte_seconds_sum": pytest.approx(0.09),
        "last_handoff_prefill_seconds": 1.5,
        "last_handoff_save_seconds": pytest.approx(0.3),
        "last_handoff_restore_seconds": pytest.approx(0.1),
        "last_handoff_session_size_bytes": 3 * 2**20,
    }


def test_a_local_request_counts_no_handover(exposed: Exposed) -> None:
    """A prompt that the decode engine read itself is local or cached, and moves nothing."""
    counted = exposed.counted(LOCAL)
    assert counted["decisions_total{decision=local,reason=warm}"] == 1
    assert counted["prefill_tokens_total{source=local}"] == 40
    assert counted["prefill_tokens_total{source=cached}"] == 60
    assert "request_seconds_sum{path=local}" in counted
    assert not [name for name in counted if "handoff" in name or "session" in name or "remote" in name]


@pytest.mark.parametrize(
    ("changes", "series"),
    [
        ({"effective": True}, {"handoffs_total{result=proven}"}),
        ({"effective": False}, {"handoffs_total{result=ineffective}", "handoff_ineffective_total"}),
        ({"effective": None}, {"handoffs_total{result=unproven}"}),
        (
            {"effective": None, "handover": None, "failure": Failure("save", "timeout")},
            {"handoffs_total{result=failed}", "fallbacks_total{reason=timeout,stage=save}"},
        ),
        (
            {"effective": None, "failure": Failure("restore", "corrupt")},
            {"handoffs_total{result=failed}", "fallbacks_total{reason=corrupt,stage=restore}"},
        ),
        ({"mistaken": True}, {"handoffs_total{result=proven}", "belief_mismatch_total"}),
        ({"outcome": Outcome.CANCELLED}, {"handoffs_total{result=proven}", "cancelled_total{stage=decode}"}),
    ],
)
def test_how_a_handover_ended(exposed: Exposed, changes: dict[str, Any], series: set[str]) -> None:
    """Each end has one result, and what went wrong is counted beside it."""
    counted = exposed.counted(replace(HANDED_OVER, **changes))
    words = ("handoffs", "ineffective", "fallbacks", "mismatch", "cancelled_total")
    assert {name for name in counted if any(word in name for word in words)} == series
    assert all(counted[name] == 1 for name in series)


def test_tokens_that_were_read_again_are_not_cached(exposed: Exposed) -> None:
    """After a handover in vain both engines' reading counts, and nothing was reused."""
    counted = exposed.counted(replace(HANDED_OVER, effective=False, figures=Figures(0, 100, 10.0, 40, 4000.0)))
    assert counted["prefill_tokens_total{source=local}"] == 100
    assert counted["prefill_tokens_total{source=remote}"] == 80
    assert "prefill_tokens_total{source=cached}" not in counted


def test_a_few_tokens_read_twice_are_no_fewer_than_none_cached(exposed: Exposed) -> None:
    """Where the decode engine reads the last ones of a moved prompt again, nothing was cached, and nothing is owed."""
    cost = HandoverFigures(1.0, 1.0, 1.0, 1, prefill_read_tokens=99, prefill_cached_tokens=0)
    counted = exposed.counted(replace(HANDED_OVER, handover=cost, figures=Figures(94, 6, 10.0, 40, 4000.0)))
    assert counted["prefill_tokens_total{source=local}"] == 6
    assert counted["prefill_tokens_total{source=remote}"] == 99
    assert "prefill_tokens_total{source=cached}" not in counted


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": Outcome.ERROR},
        {"outcome": Outcome.CANCELLED},
        {"stream": False},
        {"first_byte_ms": None, "gaps": Gaps()},
    ],
)
def test_times_to_the_first_token_are_of_streams_that_ended_well(exposed: Exposed, changes: dict[str, Any]) -> None:
    """A failed or plain answer has no first token to time; its whole time still counts."""
    counted = exposed.counted(replace(HANDED_OVER, **changes))
    assert "request_seconds_count{path=handover}" in counted
    assert not [name for name in counted if name.startswith(("time_to_first", "inter_token", "added_first"))]


def test_a_request_that_never_began(exposed: Exposed) -> None:
    """A request without route, figures and engine is counted with its outcome and its waiting alone."""
    record = replace(
        LOCAL, route=None, figures=None, decode_ms=None, first_byte_ms=None, gaps=Gaps(), outcome=Outcome.CANCELLED,
        step="queue",
    )  # fmt: skip
    assert set(exposed.counted(record)) == {
        "requests_total{endpoint=chat,outcome=cancelled}",
        "cancelled_total{stage=queue}",
        "request_seconds_count{path=local}",
        "request_seconds_sum{path=local}",
        "queue_seconds_count",
        "queue_seconds_sum",
    }


# --- the books


def test_engines_slots_and_pairs(exposed: Exposed) -> None:
    """A scrape shows the books as they are at that moment."""
    exposed.ledger.open("writer", Role.DECODE, 3, 1000)
    exposed.fleet.members["writer"].state = EngineState.READY
    exposed.fleet.pairs["reader", "writer"].state = PairState.PROVEN
    lease = exposed.ledger.claim("writer", NOTHING, 10, 0)
    held = exposed.ledger.claim("writer", NOTHING, 10, 0)
    assert lease is not None
    assert held is not None
    exposed.ledger.release(held, Holding(Tokens([1]), occupied=1))
    series = exposed.series()
    assert series["engine_up{engine=reader,role=prefill}"] == 0
    assert series["engine_up{engine=writer,role=decode}"] == 1
    assert [series[f"slots{{engine=writer,role=decode,state={state}}}"] for state in ("free", "busy", "holding")] == [
        2,
        1,
        1,
    ]
    assert series["slots{engine=reader,role=prefill,state=free}"] == 0
    assert series["pair_proven{decode=writer,prefill=reader}"] == 1
    exposed.fleet.pairs["reader", "writer"].state = PairState.SWITCHED_OFF
    assert exposed.series()["pair_proven{decode=writer,prefill=reader}"] == 0


async def test_the_queue_and_session_bytes(exposed: Exposed) -> None:
    """Who waits, who was turned away, and what is on its way can be seen."""
    exposed.ledger.open("writer", Role.DECODE, 1, 1000)
    deadline = asyncio.get_running_loop().time() + 60

    def claim(engine: str) -> Any:
        return exposed.ledger.claim(engine, NOTHING, 10, 0)

    await exposed.admission.acquire(Role.DECODE, None, claim, deadline)
    waiter = asyncio.create_task(exposed.admission.acquire(Role.DECODE, None, claim, deadline))
    await asyncio.sleep(0)
    with pytest.raises(RequestError):
        await exposed.admission.acquire(Role.DECODE, None, claim, deadline)
    with exposed.ledger.reserve(4096):
        series = exposed.series()
    assert (series["queue_depth"], series["queue_rejected_total"], series["session_bytes_in_flight"]) == (1, 1, 4096)
    assert series["queue_oldest_seconds"] > 0
    waiter.cancel()
    await asyncio.wait({waiter})
    series = exposed.series()
    assert (series["queue_depth"], series["queue_oldest_seconds"], series["session_bytes_in_flight"]) == (0, 0, 0)


def test_the_configured_floor_is_shown(exposed: Exposed) -> None:
    """Dashboards can draw the threshold beside the prompts."""
    assert exposed.series()["min_prompt_tokens"] == 2048


# --- names and labels


def families(exposed: Exposed) -> set[str]:
    found = text_string_to_metric_families(exposed.metrics.render().decode())
    return {family.name + ("_total" if family.type == "counter" else "") for family in found}


def test_the_names(exposed: Exposed) -> None:
    """Dashboards find the names that they rely on; every name has our prefix, and none a second series for its age."""
    assert families(exposed) >= {f"splitproxy_{name}" for name in NAMES}
    assert all(name.startswith("splitproxy_") for name in families(exposed))
    assert b"_created" not in exposed.metrics.render()


def test_every_name_is_documented(exposed: Exposed) -> None:
    """A metric that is not in docs/metrics.md does not exist, and none is there that does not."""
    document = DOCUMENT.read_text(encoding="utf-8")
    rows = [line for line in document.splitlines() if line.startswith("| `splitproxy_")]
    documented = {word.strip("`, ") for row in rows for word in row.split("|")[1].split("`, `")}
    assert documented == families(exposed)


ENUMS: list[tuple[str, set[str], Callable[[str], RequestRecord]]] = [
    ("endpoint", {api.value for api in Api}, lambda value: replace(LOCAL, api=Api(value))),
    ("outcome", {outcome.value for outcome in Outcome}, lambda value: replace(LOCAL, outcome=Outcome(value))),
    (
        "reason",
        {reason.value for reason in Reason},
        lambda value: replace(LOCAL, route=Route(RouteKind.LOCAL, Reason(value), "w")),
    ),
]


@pytest.mark.parametrize(("label", "values", "record"), ENUMS, ids=[label for label, _, _ in ENUMS])
def test_labels_are_closed_lists(
    exposed: Exposed, label: str, values: set[str], record: Callable[[str], RequestRecord]
) -> None:
    """Every value of an enum can be counted, and the label has no other."""
    for value in values:
        exposed.metrics.observe(record(value))
    samples = [
        sample
        for family in text_string_to_metric_families(exposed.metrics.render().decode())
        for sample in family.samples
        if label in sample.labels and family.name != "splitproxy_fallbacks"
    ]
    assert {sample.labels[label] for sample in samples} == values


def test_a_fallback_is_labelled_with_step_and_cause(exposed: Exposed) -> None:
    """Each step and cause of a failure has a series of its own."""
    failures = [Failure(step.value, cause.value) for step in Step for cause in Cause]
    counted = exposed.counted(*(replace(LOCAL, failure=failure) for failure in failures))
    assert sum(name.startswith("fallbacks_total") for name in counted) == len(failures)


def test_what_is_scraped_is_prometheus_text(exposed: Exposed) -> None:
    """The content type is that of the text format, whose histograms end with +Inf."""
    exposed.metrics.observe(HANDED_OVER)
    text = exposed.metrics.render().decode()
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    assert 'splitproxy_time_to_first_token_seconds_bucket{le="+Inf",path="handover"} 1.0' in text
