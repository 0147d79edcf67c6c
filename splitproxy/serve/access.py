"""One finished request in words: the log line and the entry of the status page. Figures alone, never text."""

from typing import Any

from splitproxy.model import RequestRecord, Route


def line(record: RequestRecord) -> str:
    """The one log line of a request."""
    words = [
        record.request_id,
        record.api.value + ("+stream" if record.stream else ""),
        f"{record.status} {record.outcome.value}",
        *_route_words(record),
        f"queue {record.queue_ms / 1000:.3f} s",
        *([] if record.first_byte_ms is None else [f"first byte {record.first_byte_ms / 1000:.3f} s"]),
        f"total {record.total_ms / 1000:.3f} s",
    ]
    if record.outcome.value == "cancelled":
        words.append(f"cancelled at {record.step}")
    return ", ".join(words)


def _route_words(record: RequestRecord) -> list[str]:
    words = []
    if (route := record.route) is not None:
        words.append(f"{route.kind.value} ({route.reason.value}) on {record.engine or route.decode_engine}")
        if route.prompt_tokens is not None:
            words.append(f"{route.prompt_tokens} tokens, {route.uncached_tokens} uncached")
    if (cost := record.handover) is not None:
        words.append(
            f"prefill {cost.prefill_ms / 1000:.3f} s, {cost.session_bytes / 2**20:.1f} MiB saved in "
            f"{cost.save_ms / 1000:.3f} s, restored in {cost.restore_ms / 1000:.3f} s"
        )
    if (figures := record.figures) is not None:
        words.append(f"reused {figures.cached_tokens}, read {figures.read_tokens}, wrote {figures.answer_tokens}")
    if record.effective is False:
        words.append(f"handover INEFFECTIVE ({record.in_vain})")
    words += [f"taken over after {failure.step} ({failure.cause})" for failure in record.taken_over]
    if record.failure is not None:
        words.append(f"fell back at {record.failure.step} ({record.failure.cause})")
    if record.route is None and record.engine:
        words.append(f"passed on to {record.engine}")
    return words


def decision(route: Route) -> dict[str, Any]:
    """A decision and the figures behind it."""
    return {
        "route": route.kind.value,
        "reason": route.reason.value,
        "prompt_tokens": route.prompt_tokens,
        "held_tokens": route.held_tokens,
        "uncached_tokens": route.uncached_tokens,
        "predicted_local_s": _rounded(route.predicted_local_s),
        "predicted_handover_s": _rounded(route.predicted_handover_s),
        "stall_s": _rounded(route.stall_s),
        "prefill_engine": route.prefill_engine,
        "decode_engine": route.decode_engine,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def entry(record: RequestRecord) -> dict[str, Any]:
    """The same for the status page."""
    route, cost, figures = record.route, record.handover, record.figures
    return {
        "request_id": record.request_id,
        "api": record.api,
        "stream": record.stream,
        "status": record.status,
        "outcome": record.outcome,
        "route": None if route is None else route.kind,
        "reason": None if route is None else route.reason,
        "prefill_engine": None if route is None else route.prefill_engine,
        "decode_engine": record.engine or None,
        "prompt_tokens": None if route is None else route.prompt_tokens,
        "held_tokens": None if route is None else route.held_tokens,
        "uncached_tokens": None if route is None else route.uncached_tokens,
        "queue_ms": round(record.queue_ms, 1),
        "first_byte_ms": None if record.first_byte_ms is None else round(record.first_byte_ms, 1),
        "total_ms": round(record.total_ms, 1),
        "handover": cost,
        "figures": figures,
        "predicted_local_s": None if route is None else _rounded(route.predicted_local_s),
        "predicted_handover_s": None if route is None else _rounded(route.predicted_handover_s),
        "prediction_error": _rounded(record.prediction_error),
        "effective": record.effective,
        "in_vain": record.in_vain,
        "failure": record.failure,
    }
