"""What is noted while a request runs, and the record that it is frozen into."""

from typing import cast

import pytest

from splitproxy.engines.adapter import Deadlines, Engine
from splitproxy.model import GAP_BOUNDS_S, Api, Ask, Failure, Figures, Gaps, Outcome, Prompt, Redeemed, Ticket, Tokens
from splitproxy.serve import trace as trace_module
from splitproxy.serve.handover import Handover, Stage
from splitproxy.serve.trace import Trace


class Clock:
    """A clock that goes on by a second at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.setattr(trace_module, "time", clock := Clock())
    return Trace("r1", Api.CHAT, stream=True, start=clock.perf_counter())


def test_a_request_that_only_came() -> None:
    """A request that never got anywhere has a record, with nothing where nothing happened."""
    record = Trace("r1", Api.MESSAGES, stream=False).record()
    assert (record.request_id, record.api, record.stream, record.outcome) == ("r1", Api.MESSAGES, False, Outcome.OK)
    assert (record.step, record.status, record.route, record.engine) == ("accept", 0, None, "")
    assert (record.first_byte_ms, record.decode_ms, record.figures, record.handover) == (None, None, None, None)
    assert (record.queue_ms, record.tokenize_ms, record.gaps) == (0.0, 0.0, Gaps())
    assert record.total_ms >= 0


def test_times_are_added_up(trace: Trace) -> None:
    """Waiting twice is waiting for the sum of both, an error in between included; times are milliseconds."""
    with trace.waiting():
        assert trace.step == "queue"
    with pytest.raises(KeyError), trace.waiting():
        raise KeyError
    with trace.tokenizing():
        pass
    record = trace.record()
    assert (record.queue_ms, record.tokenize_ms) == (2000.0, 1000.0)


def test_the_first_piece_and_the_gaps_after_it(trace: Trace) -> None:
    """The first piece is timed from acceptance, each further one from the piece before it."""
    trace.start_decode()
    for _ in range(3):
        trace.chunk()
    record = trace.record()
    assert record.step == "decode"
    assert (record.first_byte_ms, record.gaps.total_s) == (2000.0, 2.0)
    assert record.gaps.counts[GAP_BOUNDS_S.index(1.0)] == sum(record.gaps.counts) == 2
    assert (record.decode_ms, record.total_ms) == (4000.0, 5000.0)


@pytest.mark.parametrize(
    ("stage", "effective"), [(stage, {"proven": True, "ineffective": False}.get(stage.value)) for stage in Stage]
)
def test_what_became_of_the_handover(trace: Trace, stage: Stage, effective: bool | None) -> None:
    """Only a handover that was judged was effective or not."""
    prompt = Prompt(Tokens([1, 2, 3]), Ask(Api.CHAT, "/", b""))
    handover = Handover(prompt, cast("Engine", None), Deadlines(1, 1, 1), stage)
    trace.handover = handover
    assert trace.record().effective is effective
    assert trace.record().handover is None
    handover.ticket, handover.redeemed = Ticket("t", 2, 100, 1, 5.0, 6.0, 2), Redeemed(2, 7.0)
    handover.failure = Failure("restore", "died")
    record = trace.record()
    assert record.handover is not None
    assert (record.handover.restore_ms, record.handover.prefill_read_tokens) == (7.0, 1)
    assert record.failure == Failure("restore", "died")


def test_a_record_does_not_change_any_more(trace: Trace) -> None:
    """What happens after the record was made is not in it."""
    trace.figures = Figures(1, 2, 3.0, 4, 5.0)
    record = trace.record()
    trace.chunk()
    trace.chunk()
    trace.outcome = Outcome.ERROR
    assert (record.gaps, record.outcome, record.figures) == (Gaps(), Outcome.OK, Figures(1, 2, 3.0, 4, 5.0))
