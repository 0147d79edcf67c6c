"""What has been learned of each engine's speed: reading by length, writing, saving, restoring; and of the proxy's own.

Pure state: figures of finished requests in, predictions out. Nothing here is configured, and nothing outlives the
process. A single odd figure changes little; an engine that has become slower or faster is believed after three.
"""

import math
import operator
import statistics
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from splitproxy.model import RequestRecord, RouteKind

SAMPLES_PER_BUCKET = 5
BUCKETS_PER_OCTAVE = 2
# Of more, those that got no sample for longest are forgotten: a fit takes about 10 us for each sample.
MOST_BUCKETS = 64
SAMPLE_HALF_LIFE, LEAST_WEIGHT = 48.0, 0.2  # samples after which one counts half; what the oldest still counts
LEAST_VALUE, MOST_VALUE = 1e-6, 1e13  # milliseconds or bytes beyond which nothing was measured
ROUNDS = 5  # of re-weighting; the sum of absolute deviations has settled by then
NOISE = 0.02  # relative; deviations below it are all alike
SURPRISE = 0.6  # of the logarithm: twice as long as, or half as long, as samples of this size took so far
SURPRISES = 3  # in a row, and as far off as each other: the engine has changed
SAMPLES_TO_KNOW = 3  # of a size, before another of it can surprise
# A slope alone is fitted until the sizes seen lie this far apart: noise would make a large constant of nothing, and
# predict nonsense for other sizes.
SPREAD_FOR_TWO, SPREAD_FOR_ALL = 2.0, 8.0
LEAST_READ_TOKENS = 8  # fewer tell about the engine's overhead alone
MEDIAN_OF = 21
TYPICAL_ANSWER_TOKENS = 128  # until answers have been seen


@dataclass(frozen=True, slots=True)
class _Sample:
    """`size` is what the bucket goes by; `parts` are multiplied by the weights that are sought."""

    parts: tuple[float, ...]
    value: float
    number: int

    @property
    def size(self) -> float:
        return self.parts[0]


_Bucket = tuple[int, ...]


class Fit:
    """value = w0 * size + w1 * part1 + ..., all weights at least 0, fitted to the latest samples of every size.

    What is kept small is the sum of the factors by which samples are missed, not their squares: outliers do not pull.
    """

    def __init__(self, parts: int) -> None:
        self._count = parts
        self._buckets: dict[_Bucket, deque[_Sample]] = {}  # the one that got a sample last is the last
        self._weights: tuple[float, ...] | None = None
        self._learned = 0
        self._surprises: list[float] = []

    @property
    def weights(self) -> tuple[float, ...] | None:
        """None until the first sample."""
        return self._weights

    @property
    def samples(self) -> int:
        """How many are kept."""
        return sum(map(len, self._buckets.values()))

    def predict(self, parts: Sequence[float]) -> float | None:
        if self._weights is None:
            return None
        return sum(weight * part for weight, part in zip(self._weights, parts, strict=True))

    def learn(self, parts: tuple[float, ...], value: float) -> None:
        """Take a sample. What no engine can have measured is ignored."""
        sound = LEAST_VALUE <= value <= MOST_VALUE and parts[0] > 0 and min(parts) >= 0 and max(parts) <= MOST_VALUE
        if not sound:
            return
        self._learned += 1
        key = _bucket(parts)
        bucket = self._buckets[key] = self._buckets.pop(key, deque(maxlen=SAMPLES_PER_BUCKET))
        while len(self._buckets) > MOST_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        self._wonder(bucket, parts[0], value)
        bucket.append(_Sample(parts, value, self._learned))
        self._fit()

    def _wonder(self, bucket: "deque[_Sample]", size: float, value: float) -> None:
        """Notice that the engine has become another one: samples of known sizes that agree in how far they are off."""
        if len(bucket) < SAMPLES_TO_KNOW:
            return
        usual = statistics.median(sample.value / sample.size for sample in bucket)
        off = math.log(value / size / usual)
        if abs(off) < SURPRISE or (self._surprises and abs(self._surprises[-1] - off) >= SURPRISE):
            self._surprises.clear()
        if abs(off) >= SURPRISE:
            self._surprises.append(off)
        if len(self._surprises) >= SURPRISES:
            self._scale(math.exp(statistics.median(self._surprises)))

    def _scale(self, factor: float) -> None:
        """All that was seen before the surprises is taken to have changed by the same factor: the shape stays."""
        since = self._learned - len(self._surprises)
        for number, bucket in self._buckets.items():
            self._buckets[number] = deque(
                (
                    sample if sample.number > since else _Sample(sample.parts, sample.value * factor, sample.number)
                    for sample in bucket
                ),
                maxlen=SAMPLES_PER_BUCKET,
            )
        self._surprises.clear()

    def _fit(self) -> None:
        samples = list(chain.from_iterable(map(_without_odd_ones, self._buckets.values())))
        sizes = [sample.size for sample in samples]
        spread = max(sizes) / min(sizes)
        wanted = 1 if spread < SPREAD_FOR_TWO else 2 if spread < SPREAD_FOR_ALL else self._count
        count = min(wanted, self._count)
        weights = [statistics.median(sample.value / sample.size for sample in samples)] + [0.0] * (count - 1)
        for _ in range(ROUNDS if count > 1 else 0):
            weights = self._refined(samples, weights)
        self._weights = (*weights, *([0.0] * (self._count - count)))

    def _refined(self, samples: Iterable[_Sample], weights: Sequence[float]) -> list[float]:
        """One round of least squares, in which each sample counts by how well the last round met it.

        It counts so that what adds up is the logarithm of the factor by which it was missed: neither a reading that
        seems to take no time nor one that takes ever so long has more to say than any other.
        """
        count = len(weights)
        matrix = [[0.0] * count for _ in range(count)]
        right = [0.0] * count
        for sample in samples:
            parts = [part / sample.value for part in sample.parts[:count]]
            ratio = max(sum(map(operator.mul, weights, parts)), 1e-9)
            says = max(abs(math.log(ratio)), NOISE) / max((ratio - 1) ** 2, NOISE**2)
            says *= max(0.5 ** ((self._learned - sample.number) / SAMPLE_HALF_LIFE), LEAST_WEIGHT)
            for i, part in enumerate(parts):
                right[i] += says * part
                for j in range(i, count):
                    matrix[i][j] += says * part * parts[j]
        return _solve(matrix, right)


def _bucket(parts: Sequence[float]) -> _Bucket:
    """Samples whose values must be alike: of about one size and, where more than that counts, of about one shape."""
    shape = tuple(math.frexp(part / parts[0])[1] for part in (parts[1], *parts[3:])) if len(parts) > 2 else ()
    return math.floor(BUCKETS_PER_OCTAVE * math.log2(parts[0])), *shape


def _without_odd_ones(bucket: Collection[_Sample]) -> list[_Sample]:
    """Samples of about one size, without those that most of them contradict."""
    if len(bucket) < SAMPLES_TO_KNOW:
        return list(bucket)
    # One of the values, not the middle of two that may have nothing in common.
    usual = statistics.median_low(sample.value / sample.size for sample in bucket)
    return [sample for sample in bucket if abs(math.log(sample.value / sample.size / usual)) < SURPRISE]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution with no weight below 0, of a symmetric matrix whose lower half is not filled."""
    count = len(right)
    for i in range(count):
        matrix[i][i] *= 1.0 if i == 0 else 1.001  # what little the samples tell apart goes to the slope
        for j in range(i):
            matrix[i][j] = matrix[j][i]
    kept = list(range(count))
    while True:
        found = _eliminate([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
        worst = min(range(len(kept)), key=found.__getitem__)
        if found[worst] >= 0 or len(kept) == 1:
            weights = [0.0] * count
            for place, value in zip(kept, found, strict=True):
                weights[place] = max(value, 0.0)
            return weights
        del kept[worst]


def _eliminate(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's way for a symmetric positive matrix of a few rows; what it cannot tell is 0."""
    size = len(right)
    for pivot in range(size):
        if matrix[pivot][pivot] <= 1e-300:
            continue
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            right[row] -= factor * right[pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
    found = [0.0] * size
    for row in reversed(range(size)):
        rest = right[row] - sum(matrix[row][column] * found[column] for column in range(row + 1, size))
        found[row] = rest / matrix[row][row] if matrix[row][row] > 1e-300 else 0.0
    return found


class Median:
    """The middle of the latest values; None until there is one."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=MEDIAN_OF)

    def learn(self, value: float) -> None:
        if math.isfinite(value) and value >= 0:
            self._values.append(value)

    @property
    def value(self) -> float | None:
        return statistics.median(self._values) if self._values else None


@dataclass(frozen=True, slots=True)
class Reading:
    """`count` tokens that an engine reads behind `held` ones, while its other slots hold `beside`.

    Attention looks back on what is held, and on some engines it passes over all the rest of the pool, though faster.
    """

    held: int
    count: int
    beside: int = 0

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """What its time depends on: tokens, what they look back on and what lies beside that (both in thousands), and
        that there is a reading at all."""
        looked_back = self.count * (self.held + self.count / 2)
        return float(self.count), looked_back / 1000, 1.0, self.count * self.beside / 1000


@dataclass(slots=True)
class EngineSpeeds:
    """One engine. Times are milliseconds, writing is milliseconds for a token."""

    reading: Fit = field(default_factory=lambda: Fit(4))
    hindrance: Median = field(default_factory=Median)  # how much longer it reads while another engine reads
    writing: Median = field(default_factory=Median)
    saving: Fit = field(default_factory=lambda: Fit(2))
    restoring: Fit = field(default_factory=lambda: Fit(2))


@dataclass(slots=True)
class Speeds:
    """All engines and pairs. What is not known yet is predicted as None."""

    _engines: dict[str, EngineSpeeds] = field(default_factory=lambda: defaultdict(EngineSpeeds))
    _sizes: dict[tuple[str, str], Fit] = field(default_factory=dict)
    _added: dict[RouteKind, Fit] = field(default_factory=lambda: {kind: Fit(2) for kind in RouteKind})
    _answer: Median = field(default_factory=Median)

    def engine(self, name: str) -> EngineSpeeds:
        return self._engines[name]

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn_reading(self, engine: str, reading: Reading, ms: float, *, hindered: bool = False) -> None:
        """The engine took `ms` for a reading.

        `hindered`: another engine read at the same time, which may be on the same processor, memory or bus.
        """
        known = self.engine(engine)
        if reading.count < LEAST_READ_TOKENS:
            return
        if hindered and (alone_ms := known.reading.predict(reading.parts)):
            known.hindrance.learn(ms / alone_ms)
        else:
            known.reading.learn(reading.parts, ms)

    def slowed_part(self, engine: str) -> float:
        """The part of another engine's reading time by which this one's takes longer meanwhile."""
        factor = max(self.engine(engine).hindrance.value or 1.0, 1.0)
        return 1 - 1 / factor

    def learn_readings(self, engine: str, readings: Sequence[Reading], ms: float) -> None:
        """Readings that overlapped took so long together. The model is a sum, so it can be taught one."""
        if sum(reading.count for reading in readings) >= LEAST_READ_TOKENS:
            parts = zip(*(reading.parts for reading in readings), strict=True)
            self.engine(engine).reading.learn(tuple(sum(part) for part in parts), ms)

    def learn_move(
        self, source: str, target: str, tokens: int, session_bytes: int, save_ms: float, restore_ms: float
    ) -> None:
        """A session of `tokens` went from one engine to the other."""
        self.engine(source).saving.learn((float(session_bytes), 1.0), save_ms)
        self.engine(target).restoring.learn((float(session_bytes), 1.0), restore_ms)
        self._sizes.setdefault((source, target), Fit(2)).learn((float(tokens), 1.0), float(session_bytes))

    def learn(self, record: RequestRecord) -> None:
        """A request has ended: take what its engines measured."""
        figures, route = record.figures, record.route
        if figures is None or route is None:
            return
        # One that broke after the restore was answered by another engine, from its own reading.
        moved = record.handover if record.failure is None else None
        if not record.crowded:
            reading = Reading(figures.cached_tokens, figures.read_tokens, record.beside)
            self.learn_reading(record.engine, reading, figures.prompt_ms, hindered=record.hindered)
        if figures.answer_tokens > 1 and figures.answer_ms > 0:
            self.engine(record.engine).writing.learn(figures.answer_ms / figures.answer_tokens)
        self._answer.learn(figures.answer_tokens)
        if moved is not None and route.prefill_engine is not None:
            tokens = moved.prefill_cached_tokens + moved.prefill_read_tokens
            reading = Reading(moved.prefill_cached_tokens, moved.prefill_read_tokens)
            self.learn_reading(route.prefill_engine, reading, moved.prefill_ms, hindered=record.prefill_hindered)
            self.learn_move(
                route.prefill_engine, record.engine, tokens, moved.session_bytes, moved.save_ms, moved.restore_ms
            )
        alone = record.stream and not record.crowded and record.effective is not False
        if alone and (added_ms := record.unexplained_ms) is not None:
            kind = RouteKind.LOCAL
            if moved is not None:  # the decode engine's first step is no reading, but comes before the first token
                kind, added_ms = RouteKind.HANDOVER, added_ms + figures.prompt_ms
            self._added[kind].learn((float(route.prompt_tokens or 1), 1.0), max(added_ms, 0.01))

    # -- predicting ----------------------------------------------------------------------------------------------------

    def read_s(self, engine: str, reading: Reading, *, hindered: bool = False) -> float | None:
        """Seconds that a reading takes; None while the engine's speed is not known."""
        known = self.engine(engine)
        if reading.count <= 0:
            return 0.0
        factor = max(known.hindrance.value or 1.0, 1.0) if hindered else 1.0
        alone_s = _seconds(known.reading.predict(reading.parts))
        return None if alone_s is None else factor * alone_s

    def session_bytes(self, source: str, target: str, tokens: int) -> int:
        """How large a session file will be; 0 where nothing is known."""
        sizes = self._sizes.get((source, target))
        return 0 if sizes is None else int(sizes.predict((float(tokens), 1.0)) or 0)

    def save_s(self, engine: str, session_bytes: int) -> float:
        return _seconds(self.engine(engine).saving.predict((float(session_bytes), 1.0))) or 0.0

    def restore_s(self, engine: str, session_bytes: int) -> float:
        return _seconds(self.engine(engine).restoring.predict((float(session_bytes), 1.0))) or 0.0

    def added_s(self, kind: RouteKind, tokens: int) -> float:
        """What comes on top of the engines' own work: the proxy, HTTP, and the engine's tokenizing."""
        return _seconds(self._added[kind].predict((float(max(tokens, 1)), 1.0))) or 0.0

    def answer_tokens(self, limit: int | None) -> int:
        """How long an answer will be, at most `limit`."""
        usual = self._answer.value
        length = TYPICAL_ANSWER_TOKENS if usual is None else round(usual)
        return length if limit is None else min(length, limit)

    def write_s(self, engine: str, tokens: int) -> float:
        return tokens * (self.engine(engine).writing.value or 0.0) / 1000

    # -- for people ----------------------------------------------------------------------------------------------------

    def status(self, engine: str) -> dict[str, Any]:
        """What is known of an engine: tokens and bytes a second."""
        known = self.engine(engine)
        writing = known.writing.value
        return {
            "reads_tokens_per_s": {
                str(length): round(length / seconds, 1)
                for length in (512, 2048, 8192)
                if (seconds := self.read_s(engine, Reading(0, length)))
            },
            "writes_tokens_per_s": round(1000 / writing, 1) if writing else None,
            "saves_bytes_per_s": _rate(known.saving),
            "restores_bytes_per_s": _rate(known.restoring),
        }

    def pair_status(self, source: str, target: str) -> dict[str, Any]:
        """What is known of a pair's session files."""
        weights = (found.weights if (found := self._sizes.get((source, target))) else None) or (0.0, 0.0)
        return {"bytes_per_token": round(weights[0], 1), "fixed_bytes": round(weights[1])}

    def added_status(self) -> dict[str, Any]:
        """The proxy's own part by route, for a prompt of 2048 tokens."""
        return {kind.value: round(self.added_s(kind, 2048), 4) for kind in RouteKind}


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def _rate(fit: Fit) -> int | None:
    return round(1000 / fit.weights[0]) if fit.weights and fit.weights[0] > 0 else None
