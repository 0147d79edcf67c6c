"""Each fault has its status, and errors carry what their handlers need."""

import pytest

from splitproxy.errors import Cause, ConfigError, EngineError, Fault, RequestError, SplitproxyError, Step, http_status

STATUS = {
    Fault.INVALID_REQUEST: 400,
    Fault.UNAUTHORIZED: 401,
    Fault.FORBIDDEN: 403,
    Fault.BODY_TOO_LARGE: 413,
    Fault.QUEUE_FULL: 429,
    Fault.QUEUE_TIMEOUT: 503,
    Fault.PREFILL_FAILED: 503,
    Fault.NO_DECODE_ENGINE: 503,
    Fault.UNKNOWN_CODING: 501,
    Fault.DECODE_FAILED: 502,
    Fault.DECODE_TIMEOUT: 504,
    Fault.OUT_OF_ROOM: 503,
    Fault.SHUTTING_DOWN: 503,
}


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_has_its_status(fault: Fault) -> None:
    """Whose fault it is decides the status: 4xx the client's, 502 and 504 the engine's, 503 come back later."""
    assert http_status(fault) == STATUS[fault]
    assert RequestError(fault, "why").status == STATUS[fault]


def test_errors_are_of_one_tree() -> None:
    """Whatever is raised on purpose can be caught as one class, and says where and how."""
    error = EngineError(Step.SAVE, Cause.REFUSED, "no", status=500)
    assert isinstance(error, SplitproxyError)
    assert (error.step, error.cause, error.status, str(error)) == (Step.SAVE, Cause.REFUSED, 500, "no")
    faults = ConfigError(["one", "two"])
    assert isinstance(faults, SplitproxyError)
    assert (faults.faults, str(faults)) == (["one", "two"], "one\ntwo")
