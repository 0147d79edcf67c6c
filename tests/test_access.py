"""One request in words: every figure in the log line and on the status page, and never any text."""

from dataclasses import fields

import orjson

from splitproxy.model import (
    Api,
    Failure,
    Figures,
    HandoverFigures,
    Outcome,
    Reason,
    RequestRecord,
    Route,
    RouteKind,
)
from splitproxy.serve import access

HANDED_OVER = RequestRecord(
    request_id="abc123",
    api=Api.CHAT,
    stream=True,
    outcome=Outcome.OK,
    status=200,
    step="decode",
    route=Route(RouteKind.HANDOVER, Reason.WORTH_MOVING, "writer", "reader", 5000, 100, 4899),
    engine="writer",
    queue_ms=250.0,
    tokenize_ms=3.0,
    first_byte_ms=2345.6,
    total_ms=9876.5,
    decode_ms=7000.0,
    figures=Figures(4999, 1, 20.0, 64, 6800.0),
    handover=HandoverFigures(1500.0, 60.0, 40.0, 3 * 2**20, 4899, 100),
    effective=True,
)
SHORT = RequestRecord(
    request_id="def456",
    api=Api.MESSAGES,
    stream=False,
    outcome=Outcome.CANCELLED,
    status=0,
    step="queue",
    route=None,
    engine="",
    queue_ms=10.0,
    tokenize_ms=0.0,
    first_byte_ms=None,
    total_ms=10.0,
)


def test_the_line_of_a_handover() -> None:
    """Tokens, seconds and sizes of both engines are in one line."""
    assert access.line(HANDED_OVER) == (
        "abc123, chat+stream, 200 ok, handover (worth_moving) on writer, 5000 tokens, 4899 uncached, prefill 1.500 s, "
        "3.0 MiB saved in 0.060 s, restored in 0.040 s, reused 4999, read 1, wrote 64, queue 0.250 s, "
        "first byte 2.346 s, total 9.877 s"
    )


def test_the_line_of_a_request_that_was_cancelled() -> None:
    """A request that left early says in which step, and is silent about what never happened."""
    assert access.line(SHORT) == "def456, messages, 0 cancelled, queue 0.010 s, total 0.010 s, cancelled at queue"


def test_what_went_wrong_is_said() -> None:
    """A handover in vain and a fallback can be found in the log."""
    values = {f.name: getattr(HANDED_OVER, f.name) for f in fields(RequestRecord)}
    assert "handover INEFFECTIVE" in access.line(RequestRecord(**{**values, "effective": False}))
    failed = RequestRecord(**{**values, "failure": Failure("save", "timeout"), "handover": None, "effective": None})
    assert "fell back at save (timeout)" in access.line(failed)


def test_the_entry_holds_each_figure_as_json() -> None:
    """The status page shows the same figures, and null where there are none."""
    entry = orjson.loads(orjson.dumps(access.entry(HANDED_OVER)))
    assert (entry["route"], entry["reason"], entry["uncached_tokens"]) == ("handover", "worth_moving", 4899)
    assert (entry["prefill_engine"], entry["decode_engine"]) == ("reader", "writer")
    assert entry["handover"]["session_bytes"] == 3 * 2**20
    assert entry["figures"]["cached_tokens"] == 4999
    assert (entry["first_byte_ms"], entry["effective"], entry["failure"]) == (2345.6, True, None)
    short = orjson.loads(orjson.dumps(access.entry(SHORT)))
    assert short.keys() == entry.keys()
    assert (short["route"], short["decode_engine"], short["first_byte_ms"]) == (None, None, None)
