"""Prometheus collectors: fed by one record for each request, and by a look at the books when scraped.

Labels come from closed enums and configured names alone.
"""

import itertools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from splitproxy.books.admission import Admission
from splitproxy.books.ledger import Ledger
from splitproxy.fleet.fleet import Fleet
from splitproxy.model import GAP_BOUNDS_S, EngineState, Gaps, Outcome, PairState, RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_BYTE_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TRANSFER_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ERROR = (-0.75, -0.5, -0.4, -0.25, -0.15, -0.1, -0.05, 0, 0.05, 0.1, 0.15, 0.25, 0.4, 0.5, 1, 2, 4)
_BYTES = tuple(2**20 * 4**power for power in range(9))


class Metrics:
    """All collectors, on a registry of their own."""

    def __init__(self, fleet: Fleet, ledger: Ledger, admission: Admission, min_prompt_tokens: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter, which nobody reads
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"splitproxy_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"splitproxy_{name}", text, labels, buckets=buckets, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"splitproxy_{name}", text, registry=registry)

        self._requests = counter("requests", "Finished requests.", "endpoint", "outcome")
        self._decisions = counter("decisions", "Routes taken, and why.", "decision", "reason")
        self._handoffs = counter("handoffs", "Handovers by result.", "result")
        self._ineffective = counter("handoff_ineffective", "Handovers whose tokens the decode engine read again.")
        self._in_vain = counter("handoff_ineffective_causes", "The same by likely cause.", "cause")
        self._mistaken = counter("belief_mismatch", "Slots that held clearly less than was believed.")
        self._fallbacks = counter("fallbacks", "Handovers that ended in local reading.", "stage", "reason")
        self._taken_over = counter("taken_over", "Handovers that another prefill engine began anew.", "stage", "reason")
        self._cancelled = counter("cancelled", "Requests whose client left.", "stage")
        self._prompt_tokens = counter("prefill_tokens", "Prompt tokens by where they came from.", "source")
        self._answer_tokens = counter("generation_tokens", "Tokens of answers.")
        self._session_bytes_total = counter("session_bytes", "Bytes of session files handed over.")
        self._first_byte = histogram("time_to_first_token_seconds", "Until the first byte.", _FIRST_BYTE_S, "path")
        self._gaps = _Gaps()
        registry.register(self._gaps)
        self._total = histogram("request_seconds", "Whole requests.", _LONG_S, "path")
        self._queue = histogram("queue_seconds", "Waiting for slots.", _LONG_S)
        self._decode = histogram("decode_seconds", "On the decode engine.", _LONG_S)
        self._prefill = histogram("prefill_seconds", "Reading on the prefill engine.", _LONG_S)
        self._save = histogram("save_seconds", "Saving a session.", _TRANSFER_S)
        self._restore = histogram("restore_seconds", "Restoring a session.", _TRANSFER_S)
        self._session = histogram("session_size_bytes", "Session files.", _BYTES)
        self._added = histogram("added_first_byte_seconds", "The proxy's own share of the first byte.", _FIRST_BYTE_S)
        self._error = histogram("prediction_error_ratio", "Predicted to actual first token.", _ERROR, "path")
        self._last = {
            name: gauge(f"last_handoff_{name}", f"Last handover: {text}.")
            for name, text in (
                ("prefill_seconds", "reading"),
                ("save_seconds", "saving"),
                ("restore_seconds", "restoring"),
                ("session_size_bytes", "session file"),
            )
        }
        gauge("min_prompt_tokens", "Configured floor of uncached tokens.").set(min_prompt_tokens)
        registry.register(_Books(fleet, ledger, admission))

    def observe(self, record: RequestRecord) -> None:
        """Count one finished request."""
        self._requests.labels(record.api.value, record.outcome.value).inc()
        if record.route is not None:
            self._decisions.labels(record.route.kind.value, record.route.reason.value).inc()
        if record.outcome is Outcome.CANCELLED:
            self._cancelled.labels(record.step).inc()
        if (error := record.prediction_error) is not None:
            self._error.labels(record.path).observe(error)
        if record.mistaken:
            self._mistaken.inc()
        if record.route is not None or record.queue_ms > 0:  # what was refused or passed on at once says nothing
            self._observe_times(record)
        self._observe_handover(record)
        self._observe_tokens(record)

    def _observe_times(self, record: RequestRecord) -> None:
        self._total.labels(record.path).observe(record.total_ms / 1000)
        self._queue.observe(record.queue_ms / 1000)
        if record.decode_ms is not None:
            self._decode.observe(record.decode_ms / 1000)
        if record.outcome is not Outcome.OK or not record.stream:
            return
        if record.first_byte_ms is not None:
            self._first_byte.labels(record.path).observe(record.first_byte_ms / 1000)
        if record.added_first_byte_ms is not None:
            self._added.observe(record.added_first_byte_ms / 1000)
        self._gaps.add(record.gaps)

    def _observe_handover(self, record: RequestRecord) -> None:
        if record.failure is not None:
            self._handoffs.labels("failed").inc()
            self._fallbacks.labels(record.failure.step, record.failure.cause).inc()
        for failure in record.taken_over:
            self._handoffs.labels("failed").inc()
            self._taken_over.labels(failure.step, failure.cause).inc()
        cost = record.handover
        if cost is None:
            return
        if record.failure is None:
            self._handoffs.labels({True: "proven", False: "ineffective", None: "unproven"}[record.effective]).inc()
        if record.effective is False:
            self._ineffective.inc()
        if record.in_vain is not None:
            self._in_vain.labels(record.in_vain.value).inc()
        self._session_bytes_total.inc(cost.session_bytes)
        self._prefill.observe(cost.prefill_ms / 1000)
        self._save.observe(cost.save_ms / 1000)
        self._restore.observe(cost.restore_ms / 1000)
        self._session.observe(cost.session_bytes)
        self._last["prefill_seconds"].set(cost.prefill_ms / 1000)
        self._last["save_seconds"].set(cost.save_ms / 1000)
        self._last["restore_seconds"].set(cost.restore_ms / 1000)
        self._last["session_size_bytes"].set(cost.session_bytes)

    def _observe_tokens(self, record: RequestRecord) -> None:
        if record.figures is None:
            return
        moved = record.handover.prefill_read_tokens if record.handover is not None else 0
        cached = record.figures.cached_tokens - (
            record.handover.prefill_read_tokens if record.handover is not None and record.effective else 0
        )
        self._prompt_tokens.labels("local").inc(record.figures.read_tokens)
        self._prompt_tokens.labels("remote").inc(moved)
        self._prompt_tokens.labels("cached").inc(max(cached, 0))
        self._answer_tokens.inc(record.figures.answer_tokens)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Gaps(Collector):
    """A histogram that takes a stream's gaps as they were counted: one by one, a long answer's would stop the rest."""

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, gaps: Gaps) -> None:
        self._counts = [mine + more for mine, more in zip(self._counts, gaps.counts, strict=True)]
        self._total_s += gaps.total_s

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, GAP_BOUNDS_S), "+Inf"]
        buckets = list(zip(names, map(float, itertools.accumulate(self._counts)), strict=True))
        text = "Gaps between pieces of a stream."
        yield HistogramMetricFamily("splitproxy_inter_token_latency_seconds", text, buckets, self._total_s)


class _Books(Collector):
    """Gauges that are read when scraped."""

    def __init__(self, fleet: Fleet, ledger: Ledger, admission: Admission) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("splitproxy_engine_up", "1 while the engine is ready.", labels=["engine", "role"])
        slots = GaugeMetricFamily("splitproxy_slots", "Slots by state.", labels=["engine", "role", "state"])
        for name, member in self._fleet.members.items():
            up.add_metric([name, member.role.value], float(member.state is EngineState.READY))
            count = self._ledger.count(name)
            for state, number in (("free", count.free), ("busy", count.busy), ("holding", count.holding)):
                slots.add_metric([name, member.role.value, state], number)
        yield up
        yield slots
        proven = GaugeMetricFamily(
            "splitproxy_pair_proven", "1 while the pair's handovers are proven.", labels=["prefill", "decode"]
        )
        for (source, target), pair in self._fleet.pairs.items():
            proven.add_metric([source, target], float(pair.state is PairState.PROVEN))
        yield proven
        yield GaugeMetricFamily("splitproxy_queue_depth", "Requests that wait.", self._admission.waiting)
        oldest_s = max((waiting.waiting_s for waiting in self._admission.line()), default=0.0)
        yield GaugeMetricFamily("splitproxy_queue_oldest_seconds", "The longest wait of those who wait.", oldest_s)
        in_flight = self._ledger.session_bytes
        yield GaugeMetricFamily("splitproxy_session_bytes_in_flight", "Session files waiting, estimated.", in_flight)
        rejected = self._admission.rejected
        yield CounterMetricFamily("splitproxy_queue_rejected", "Requests turned away by the queue.", rejected)
