"""The error tree: what can go wrong, whose fault it is, and which HTTP status a client sees for it.

Engine adapters translate their HTTP client's exceptions into `EngineError`; nothing above them knows that client.
"""

from enum import StrEnum
from typing import assert_never


class SplitproxyError(Exception):
    """Everything that splitproxy raises on purpose."""


class ConfigError(SplitproxyError):
    """The configuration cannot be used. `faults` holds one sentence for each fault, never a secret value."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class LaunchError(SplitproxyError):
    """An engine that splitproxy starts itself did not start."""


class Cause(StrEnum):
    """How an engine failed. A metric label, so the list is closed."""

    REFUSED = "refused"  # it answered, with an error
    DIED = "died"  # the connection was refused, reset or cut
    TIMEOUT = "timeout"  # nothing came within the step's deadline
    CORRUPT = "corrupt"  # it reported success, but what it left is not what was asked for
    UNPROVEN = "unproven"  # it was not asked: it came up a moment ago and has yet to show that it does as it should


class Step(StrEnum):
    """What an engine was doing for a request. A metric label, so the list is closed."""

    TOKENIZE = "tokenize"
    PREFILL = "prefill"
    SAVE = "save"
    CHECK = "check"  # of the session file, before anything is restored
    RESTORE = "restore"
    DECODE = "decode"
    CONTROL = "control"  # identity, health, erase


class EngineError(SplitproxyError):
    """An engine did not do what it was asked. The message never holds prompt or answer text."""

    def __init__(self, step: Step, cause: Cause, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.cause = cause
        self.status = status  # the engine's HTTP status where it answered with one


class Fault(StrEnum):
    """Why splitproxy itself answers a client with an error."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    BODY_TOO_LARGE = "body_too_large"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    PREFILL_FAILED = "prefill_failed"  # only with on_prefill_failure = "reject"
    NO_DECODE_ENGINE = "no_decode_engine"
    DECODE_FAILED = "decode_failed"
    DECODE_TIMEOUT = "decode_timeout"
    OUT_OF_ROOM = "out_of_room"  # an answer without a limit outgrew the decode engine's pool
    SHUTTING_DOWN = "shutting_down"
    UNKNOWN_CODING = "unknown_coding"


def http_status(fault: Fault) -> int:
    """The HTTP status of a fault."""
    match fault:
        case Fault.INVALID_REQUEST:
            return 400
        case Fault.UNAUTHORIZED:
            return 401
        case Fault.FORBIDDEN:
            return 403
        case Fault.BODY_TOO_LARGE:
            return 413
        case Fault.QUEUE_FULL:
            return 429
        case Fault.UNKNOWN_CODING:
            return 501
        case Fault.DECODE_FAILED:
            return 502
        case (
            Fault.OUT_OF_ROOM
            | Fault.QUEUE_TIMEOUT
            | Fault.PREFILL_FAILED
            | Fault.NO_DECODE_ENGINE
            | Fault.SHUTTING_DOWN
        ):
            return 503
        case Fault.DECODE_TIMEOUT:
            return 504
        case _:
            assert_never(fault)


class RequestError(SplitproxyError):
    """A request that splitproxy answers with an error of its own; the message is meant for the client."""

    def __init__(self, fault: Fault, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return http_status(self.fault)
