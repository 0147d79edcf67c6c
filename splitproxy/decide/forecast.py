"""What each engine has before it, in seconds: prompts that it reads or is to read, and answers that it writes.

Speeds say how long a piece of work takes; jobs say which pieces there are and how far they have come. From both come
the seconds in the router's views. Plain functions of the clock that is given; no engine is called.
"""

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum

from splitproxy.decide.recall import Recall
from splitproxy.decide.speeds import LEAST_READ_TOKENS, Reading, Speeds
from splitproxy.model import Ask, DecodeView, PrefillView, Route, RouteKind, Tokens

# Work that takes longer than predicted is believed to take this part of its time so far more.
LEAST_LEFT = 0.1
LEAST_TOLD = 0.1  # of a reading must be done before its own pace counts
ARRIVALS, LEAST_ARRIVALS = 32, 4  # from which a rate is taken: at most the latest so many, at least so many
LEAST_SPAN_S = 10.0  # over which they are spread at least: a few that come together are no rate


class Phase(Enum):
    """How far a request has come on an engine. A prefill engine's jobs end with their reading."""

    WAITING = 0  # for a slot
    READING = 1
    WRITING = 2


@dataclass(slots=True, eq=False)
class Job:
    """One request's work on one engine."""

    forecast: "Forecast" = field(repr=False)
    engine: str
    read_s: float  # predicted, with the save that follows it
    write_s: float = 0.0
    save_s: float = 0.0  # predicted
    streamed: bool = True  # otherwise nothing tells when reading ends and writing begins
    phase: Phase = Phase.WAITING
    since: float = 0.0  # when the phase began
    crowded: bool = False  # whether the engine read for somebody else at the same time
    hindered: bool = False  # whether another engine read at the same time
    target: str = ""  # the decode engine that a prefill engine reads for
    reads: Reading | None = None  # what it reads, where that is known
    slot: int | None = None  # where it reads, as far as that is known
    _known: int | None = None  # tokens that the engine need not read, by its first report

    def begin(
        self, phase: Phase, engine: str | None = None, reads: Reading | None = None, slot: int | None = None
    ) -> None:
        """The job has come to this phase; a slot may have been found on another engine than the one first asked."""
        if self.phase is Phase.READING:
            self.forecast.stop_reading(self, finished=phase is Phase.WRITING)
        self.engine, self.reads = engine or self.engine, reads or self.reads
        self.slot = self.slot if slot is None else slot
        self.phase, self.since = phase, self.forecast.clock()
        if phase is Phase.READING:
            self.forecast.start_reading(self)

    @property
    def is_slight(self) -> bool:
        """Whether it reads next to nothing, such as the last token of a restored prompt: that hinders nobody."""
        return self.reads is not None and self.reads.count < LEAST_READ_TOKENS

    def report(self, done: int, total: int) -> None:
        """The engine tells how far its reading has come: its own pace is better than a prediction."""
        if self._known is None:
            self._known = done
        part = (done - self._known) / max(total - self._known, 1)
        if part >= LEAST_TOLD:
            self.read_s = (self.forecast.clock() - self.since) / part + self.save_s

    def saving(self) -> None:
        """All is read; what is left is the save."""
        self.read_s, self.since = self.save_s, self.forecast.clock()

    def at(self, now: float) -> Phase:
        """The phase that it is in, as far as can be told."""
        silent = self.phase is Phase.READING and not self.streamed
        return Phase.WRITING if silent and now - self.since >= self.read_s else self.phase

    def reading_left_s(self, now: float) -> float:
        match self.at(now):
            case Phase.WAITING:
                return self.read_s
            case Phase.READING:
                return _left_s(self.read_s, now - self.since)
            case Phase.WRITING:
                return 0.0

    def left_s(self, now: float) -> float:
        """Seconds until the job is done, once it has a slot."""
        if self.at(now) is not Phase.WRITING:
            return self.reading_left_s(now) + self.write_s
        begun = self.since if self.phase is Phase.WRITING else self.since + self.read_s
        return _left_s(self.write_s, now - begun)


def _comes_first(job: Job, slot: int | None) -> bool:
    """Whether an engine reads on for a job before it reads the prompt in a slot: batches are filled slot by slot, so a
    prompt in a lower slot overtakes one that came before it."""
    return job.slot is None or slot is None or job.slot <= slot


def _reading_before_s(jobs: Iterable[Job], slot: int | None, now: float) -> float:
    """Seconds that an engine will read for these jobs before it reads in a slot."""
    return sum(job.reading_left_s(now) for job in jobs if job.at(now) is Phase.READING and _comes_first(job, slot))


def _left_s(predicted_s: float, passed_s: float) -> float:
    return max(predicted_s - passed_s, LEAST_LEFT * max(predicted_s, passed_s))


class _Arrivals:
    """When the latest requests came."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=ARRIVALS)

    def note(self, now: float) -> None:
        self._at.append(now)

    def per_s(self, now: float) -> float:
        """How many come in a second; where none has come for long, few."""
        if len(self._at) < LEAST_ARRIVALS:
            return 0.0
        return len(self._at) / max(now - self._at[0], LEAST_SPAN_S)


@dataclass(slots=True)
class _Together:
    """Readings of one engine that overlapped: nobody knows how long each took, but all of them took the time."""

    began: float
    at_work: int = 0
    reads: list[Reading] = field(default_factory=list)
    sound: bool = True  # every one of them came to its end, and what it read is known

    @property
    def tells(self) -> bool:
        return self.sound and len(self.reads) > 1


@dataclass(slots=True)
class Forecast:
    """The jobs of all engines, and the speeds at which they are done."""

    speeds: Speeds = field(default_factory=Speeds)
    recall: Recall = field(default_factory=Recall)
    clock: Callable[[], float] = time.monotonic
    _jobs: list[Job] = field(default_factory=list)
    _together: dict[str, _Together] = field(default_factory=dict)
    _arrivals: dict[str, _Arrivals] = field(default_factory=lambda: defaultdict(_Arrivals))

    # -- jobs ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def job(
        self,
        engine: str,
        read_s: float | None,
        write_s: float = 0.0,
        *,
        save_s: float = 0.0,
        streamed: bool = True,
        target: str = "",
    ) -> Iterator[Job]:
        """Count a request's work on an engine, from the time at which it begins to wait for it."""
        job = Job(self, engine, (read_s or 0.0) + save_s, write_s, save_s, streamed, since=self.clock(), target=target)
        self._jobs.append(job)
        try:
            yield job
        finally:
            self._jobs.remove(job)
            if job.phase is Phase.READING:
                self.stop_reading(job, finished=False)

    def reading_ahead(self, route: Route) -> AbstractContextManager[Job]:
        """The prefill engine's part of a handover."""
        assert route.prefill_engine is not None
        size = self.speeds.session_bytes(route.prefill_engine, route.decode_engine, route.prompt_tokens or 0)
        save_s = self.speeds.save_s(route.prefill_engine, size)
        return self.job(route.prefill_engine, route.prefill_read_s, save_s=save_s, target=route.decode_engine)

    def answering(self, route: Route, ask: Ask, tokens: int, *, moved: bool) -> AbstractContextManager[Job]:
        """The decode engine's part of a request for `tokens`; `moved`: with a session ready to restore."""
        engine, read_s = route.decode_engine, 0.0
        # Whatever comes waits for what the engine reads then, a restored session's last token no less than a prompt.
        self._arrivals[engine].note(self.clock())
        if moved and route.prefill_engine is not None:
            size = self.speeds.session_bytes(route.prefill_engine, engine, tokens)
            read_s = self.speeds.restore_s(engine, size)
        else:
            held = min(route.held_tokens or 0, tokens)
            read_s = self.speeds.read_s(engine, Reading(held, tokens - held)) or 0.0
        write_s = self.speeds.write_s(engine, self.speeds.answer_tokens(ask.max_tokens))
        return self.job(engine, read_s, write_s, streamed=ask.stream)

    def start_reading(self, job: Job) -> None:
        """Two readings at once on one engine: the figures of each tell of both, those of their sum are right."""
        now = self.clock()
        for other in self._jobs:
            if other is job or other.at(now) is not Phase.READING:
                continue
            if other.engine == job.engine:
                other.crowded = job.crowded = True
            elif not (job.is_slight or other.is_slight):
                other.hindered = job.hindered = True
        if job.reads is not None and (read_s := self._predicted_s(job.engine, job.reads)) is not None:
            job.read_s = read_s  # what it reads is certain by now
        together = self._together.setdefault(job.engine, _Together(now))
        together.at_work += 1
        if job.reads is None or not job.streamed:
            together.sound = False
        else:
            together.reads.append(job.reads)

    def stop_reading(self, job: Job, *, finished: bool) -> None:
        """A reading has come to its end, or to an end. With the last of them the engine's speed is known again."""
        together = self._together[job.engine]
        together.at_work -= 1
        together.sound = together.sound and finished
        if together.at_work:
            return
        del self._together[job.engine]
        if together.tells:
            self.speeds.learn_readings(job.engine, together.reads, 1000 * (self.clock() - together.began))

    def _of(self, engine: str) -> Iterator[Job]:
        return (job for job in self._jobs if job.engine == engine)

    # -- views ---------------------------------------------------------------------------------------------------------

    def backlog_s(self, engine: str) -> float:
        """Seconds of reading that the engine has before it."""
        now = self.clock()
        return sum(job.reading_left_s(now) for job in self._of(engine))

    def reading_s(self, engine: str) -> dict[int, float]:
        """Seconds that are left of what the engine reads now, by slot."""
        now = self.clock()
        return {
            job.slot: job.reading_left_s(now)
            for job in self._of(engine)
            if job.slot is not None and job.at(now) is Phase.READING
        }

    def wait_s(self, engine: str, free_slots: int) -> float:
        """Seconds until a request that comes now has a slot: those that wait before it take slots first."""
        now = self.clock()
        jobs = list(self._of(engine))
        waiting = [job for job in jobs if job.phase is Phase.WAITING]
        if free_slots > len(waiting):
            return 0.0
        free_at = [0.0] * free_slots + [job.left_s(now) for job in jobs if job.phase is not Phase.WAITING]
        heapq.heapify(free_at)
        for job in waiting if free_at else ():
            heapq.heapreplace(free_at, free_at[0] + job.left_s(now))
        return free_at[0] if free_at else 0.0

    def decode_view(self, view: DecodeView, tokens: int | None) -> DecodeView:
        """The view with its seconds, for a prompt of `tokens`."""
        jobs = list(self._of(view.engine))
        now = self.clock()
        return replace(
            view,
            streams=sum(job.at(now) is not Phase.WAITING for job in jobs),
            arrivals_per_s=self._arrivals[view.engine].per_s(now),
            wait_s=self.wait_s(view.engine, view.free_slots),
            reading_s=_reading_before_s(jobs, view.slot, now),
            before_restored_s=_reading_before_s(jobs, view.restore_slot, now),
            coming_s=self._coming_s(view.engine, now),
            slows=max(
                (self.speeds.slowed_part(job.engine) for job in self._jobs if job.target == view.engine), default=0.0
            ),
            read_s=self._reading_s(view.engine, view.held_tokens, tokens, view.beside),
            added_s=self.speeds.added_s(RouteKind.LOCAL, tokens or 1),
        )

    def prefill_view(self, view: PrefillView, prompt: Tokens | None) -> PrefillView:
        """The view with its seconds, and with what the engine need not read although no slot holds it."""
        tokens = None if prompt is None else len(prompt)
        size = self.speeds.session_bytes(view.engine, view.decode_engine, tokens or 0)
        held = view.held_tokens if prompt is None else self.recall.held(view.engine, prompt, view.held_tokens)
        return replace(
            view,
            held_tokens=held,
            queue_s=self.backlog_s(view.engine),
            read_s=self._reading_s(view.engine, held, tokens),
            save_s=self.speeds.save_s(view.engine, size),
            restore_s=self.speeds.restore_s(view.decode_engine, size),
            added_s=self.speeds.added_s(RouteKind.HANDOVER, tokens or 1),
        )

    def _coming_s(self, engine: str, now: float) -> tuple[float, ...]:
        """In how many seconds each session will be ready that prefill engines read for a decode engine now."""
        ready, at_s = [], dict[str, float]()
        for job in self._jobs:
            if job.target == engine:  # one after the other, in the order in which they came
                at_s[job.engine] = at_s.get(job.engine, 0.0) + job.reading_left_s(now)
                ready.append(at_s[job.engine])
        return tuple(ready)

    def _reading_s(self, engine: str, held: int, tokens: int | None, beside: int = 0) -> float | None:
        if tokens is None:
            return None
        held = min(held, max(tokens - 1, 0))
        return self._predicted_s(engine, Reading(held, max(tokens - 1 - held, 1), beside))

    def _predicted_s(self, engine: str, reading: Reading) -> float | None:
        """Seconds that a reading takes if it begins now."""
        now = self.clock()
        hindered = any(
            job.engine != engine and job.at(now) is Phase.READING and not job.is_slight for job in self._jobs
        )
        return self.speeds.read_s(engine, reading, hindered=hindered)
