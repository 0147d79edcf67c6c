"""One prompt's way from the prefill engine to the decode engine: take a ticket, redeem it, prove it, discard it.

It knows the order of the steps, what each failure leads to, and what counts as proof. It never knows a path, a field of
an engine, or a client.
"""

import logging
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Self

from splitproxy.engines.adapter import Deadlines, Engine, PrefillEngine, Progress, to_the_end
from splitproxy.errors import Cause, EngineError, SplitproxyError, Step
from splitproxy.model import Failure, HandoverFigures, Prompt, Redeemed, Ticket

log = logging.getLogger(__name__)


class Stage(StrEnum):
    """Where a handover stands."""

    READY = "ready"
    READING = "reading"  # the prefill engine reads and saves
    TICKETED = "ticketed"  # a checked session waits to be redeemed
    RESTORING = "restoring"
    RESTORED = "restored"  # the decode engine may answer
    ANSWERING = "answering"  # the first byte has gone to the client
    PROVEN = "proven"
    INEFFECTIVE = "ineffective"  # all went well, and the tokens were read again all the same
    ABANDONED = "abandoned"  # failed before the first byte: the client never knows
    BROKEN = "broken"  # failed after it: the stream ends with an error event
    CANCELLED = "cancelled"  # the client left


class Event(StrEnum):
    """What happens to a handover."""

    READ = "read"
    RESTORE = "restore"
    DONE = "done"
    FAIL = "fail"
    REUSED = "reused"
    REREAD = "reread"
    LEAVE = "leave"


ENDS = frozenset({Stage.PROVEN, Stage.INEFFECTIVE, Stage.ABANDONED, Stage.BROKEN, Stage.CANCELLED})

MOVES: dict[tuple[Stage, Event], Stage] = {
    (Stage.READY, Event.READ): Stage.READING,
    (Stage.READY, Event.FAIL): Stage.ABANDONED,
    (Stage.READY, Event.LEAVE): Stage.CANCELLED,
    (Stage.READING, Event.DONE): Stage.TICKETED,
    (Stage.READING, Event.FAIL): Stage.ABANDONED,
    (Stage.READING, Event.LEAVE): Stage.CANCELLED,
    (Stage.TICKETED, Event.RESTORE): Stage.RESTORING,
    (Stage.TICKETED, Event.FAIL): Stage.ABANDONED,
    (Stage.TICKETED, Event.LEAVE): Stage.CANCELLED,
    (Stage.RESTORING, Event.DONE): Stage.RESTORED,
    (Stage.RESTORING, Event.FAIL): Stage.ABANDONED,
    (Stage.RESTORING, Event.LEAVE): Stage.CANCELLED,
    (Stage.RESTORED, Event.DONE): Stage.ANSWERING,
    (Stage.RESTORED, Event.FAIL): Stage.ABANDONED,
    (Stage.RESTORED, Event.LEAVE): Stage.CANCELLED,
    (Stage.ANSWERING, Event.REUSED): Stage.PROVEN,
    (Stage.ANSWERING, Event.REREAD): Stage.INEFFECTIVE,
    (Stage.ANSWERING, Event.FAIL): Stage.BROKEN,
    (Stage.ANSWERING, Event.LEAVE): Stage.CANCELLED,
}


class IllegalMove(SplitproxyError):  # noqa: N818
    """A handover was asked to do what its stage does not allow. Nothing has changed."""


def move(stage: Stage, event: Event) -> Stage:
    """The stage after an event. Raises IllegalMove."""
    try:
        return MOVES[stage, event]
    except KeyError:
        raise IllegalMove(f"a handover that is {stage} cannot take {event}") from None


@dataclass(slots=True)
class Handover:
    """The handover of one prompt. As a context manager it discards its ticket however the request ends.

    `take` and `redeem` answer whether the handover goes on; where it does not, `failure` says why, and the decode
    engine has to read the prompt itself.
    """

    prompt: Prompt
    source: PrefillEngine
    deadlines: Deadlines
    stage: Stage = Stage.READY
    ticket: Ticket | None = None
    redeemed: Redeemed | None = None
    failure: Failure | None = None

    @property
    def was_answered(self) -> bool:
        """Whether the engine of a failed step has surely stopped working on its slot: it answered."""
        return self.failure is not None and self.failure.cause in (Cause.REFUSED, Cause.CORRUPT)

    async def take(self, slot: int, progress: Progress) -> bool:
        """Have the prefill engine read the prompt, and save its session."""
        self._move(Event.READ)
        try:
            ticket = await self.source.prefill(self.prompt, slot, self.deadlines, progress)
        except EngineError as error:
            return self.fail(error)
        self.ticket = ticket
        self._move(Event.DONE)
        return True

    async def redeem(self, target: Engine, slot: int) -> bool:
        """Have the decode engine restore the session, and discard the ticket, used or not."""
        self._move(Event.RESTORE)
        assert self.ticket is not None
        try:
            redeemed = await target.redeem(self.ticket, slot, self.deadlines)
            if redeemed.tokens != self.ticket.tokens:
                message = f"{redeemed.tokens} of {self.ticket.tokens} tokens were restored"
                raise EngineError(Step.RESTORE, Cause.CORRUPT, message)
            self.redeemed = redeemed
        except EngineError as error:
            return self.fail(error)
        finally:
            await to_the_end(self.source.discard(self.ticket))
        self._move(Event.DONE)
        return True

    def fail(self, error: EngineError) -> bool:
        """A step has failed: note where and how. Returns False, as the step does."""
        self._move(Event.FAIL)
        self.failure = Failure(error.step.value, error.cause.value)
        log.info("handover from %s failed at %s (%s): %s", self.source.name, error.step, error.cause, error)
        return False

    def answering(self) -> None:
        """The first byte of the answer is on its way to the client."""
        if self.stage is Stage.RESTORED:
            self._move(Event.DONE)

    def prove(self, cached_tokens: int) -> bool:
        """Judge the handover by the decode engine's own count of reused tokens."""
        proven = self.ticket is not None and cached_tokens >= self.ticket.proof_tokens
        self._move(Event.REUSED if proven else Event.REREAD)
        return proven

    def figures(self) -> HandoverFigures | None:
        """What the handover cost, once the session was restored."""
        if self.ticket is None or self.redeemed is None:
            return None
        return HandoverFigures(
            prefill_ms=self.ticket.prefill_ms,
            save_ms=self.ticket.save_ms,
            restore_ms=self.redeemed.restore_ms,
            session_bytes=self.ticket.session_bytes,
            prefill_read_tokens=self.ticket.tokens - self.ticket.cached_tokens,
            prefill_cached_tokens=self.ticket.cached_tokens,
        )

    def _move(self, event: Event) -> None:
        self.stage = move(self.stage, event)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stage not in ENDS:
            broke = error is None or isinstance(error, Exception)
            self._move(Event.FAIL if broke else Event.LEAVE)
        if self.ticket is not None:
            await to_the_end(self.source.discard(self.ticket))
