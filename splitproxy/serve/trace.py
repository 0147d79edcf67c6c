"""What is noted while a request runs, frozen into its record at the end."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from splitproxy.errors import Step
from splitproxy.model import GAP_BOUNDS_S, Api, Failure, Figures, Gaps, InVain, Outcome, RequestRecord, Route
from splitproxy.serve.handover import Handover, Stage

_EFFECTIVE = {Stage.PROVEN: True, Stage.INEFFECTIVE: False}


@dataclass(slots=True)
class Trace:
    """One request while it runs. Times are the performance counter's, in seconds."""

    request_id: str
    api: Api
    stream: bool
    start: float = field(default_factory=time.perf_counter)
    step: str = "accept"
    status: int = 0
    outcome: Outcome = Outcome.OK
    route: Route | None = None
    engine: str = ""
    queue_s: float = 0.0
    tokenize_s: float = 0.0
    first_byte: float | None = None
    decode_start: float | None = None
    last_chunk: float = 0.0
    figures: Figures | None = None
    reasoned: bool = False
    answered: bool = False  # the engine's answer has ended; whatever comes after cannot spoil it
    mistaken: bool = False
    decided: float | None = None
    beside: int = 0
    hindered: bool = False
    prefill_hindered: bool = False
    crowded: bool = False
    others_at_work: bool = False  # the decode engine had other requests, too, when it got this one
    in_vain: InVain | None = None
    handover: Handover | None = None
    taken_over: list[Failure] = field(default_factory=list)  # handovers that failed and that another engine began anew
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_S) + 1))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent in the queue."""
        self.step = "queue"
        start = time.perf_counter()
        try:
            yield
        finally:
            self.queue_s += time.perf_counter() - start

    @contextmanager
    def tokenizing(self) -> Iterator[None]:
        """Time spent on token ids."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.tokenize_s += time.perf_counter() - start

    def decide(self, route: Route) -> None:
        """The route is chosen."""
        self.route, self.decided = route, time.perf_counter()

    def start_decode(self, *, others_at_work: bool = False) -> None:
        """The decode engine gets the request."""
        self.others_at_work = others_at_work
        self.step = Step.DECODE.value
        self.decode_start = time.perf_counter()

    def chunk(self) -> None:
        """A piece of the answer is on its way."""
        now = time.perf_counter()
        if self.first_byte is None:
            self.first_byte = now
        else:
            gap_s = now - self.last_chunk
            self.gaps[bisect_left(GAP_BOUNDS_S, gap_s)] += 1
        self.last_chunk = now

    def record(self) -> RequestRecord:
        """The request as it stands now."""
        now = time.perf_counter()
        handover = self.handover
        return RequestRecord(
            request_id=self.request_id,
            api=self.api,
            stream=self.stream,
            outcome=self.outcome,
            status=self.status,
            step=self.step,
            route=self.route,
            engine=self.engine,
            queue_ms=1000 * self.queue_s,
            tokenize_ms=1000 * self.tokenize_s,
            first_byte_ms=None if self.first_byte is None else 1000 * (self.first_byte - self.start),
            total_ms=1000 * (now - self.start),
            decode_ms=None if self.decode_start is None else 1000 * (now - self.decode_start),
            figures=self.figures,
            handover=None if handover is None else handover.figures(),
            effective=None if handover is None else _EFFECTIVE.get(handover.stage),
            mistaken=self.mistaken,
            failure=None if handover is None else handover.failure,
            taken_over=tuple(self.taken_over),
            gaps=Gaps(tuple(self.gaps), self.last_chunk - self.first_byte if self.first_byte is not None else 0.0),
            decided_ms=None if self.decided is None else 1000 * (self.decided - self.start),
            beside=self.beside,
            hindered=self.hindered,
            prefill_hindered=self.prefill_hindered,
            crowded=self.crowded,
            in_vain=self.in_vain,
        )
