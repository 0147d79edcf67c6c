"""Speeds are learned from figures, survive odd ones, and follow an engine that has changed."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitproxy.decide.speeds import MOST_BUCKETS, SAMPLES_PER_BUCKET, Fit, Median, Reading, Speeds
from splitproxy.model import Api, Failure, Figures, HandoverFigures, Outcome, RequestRecord, Route, RouteKind
from splitproxy.model import Reason as Why

FIXED_MS, TOKEN_MS, LOOK_BACK_MS = 30.0, 2.0, 0.5  # of the engine that these tests measure


def reading_ms(start: int, count: int, factor: float = 1.0) -> float:
    return factor * (FIXED_MS + TOKEN_MS * count + LOOK_BACK_MS * count * (start + count / 2) / 1000)


def taught(lengths: list[int], factor: float = 1.0, speeds: Speeds | None = None) -> Speeds:
    found = speeds or Speeds()
    for length in lengths:
        found.learn_reading("e", Reading(0, length), reading_ms(0, length, factor))
    return found


def error(speeds: Speeds, start: int, count: int, factor: float = 1.0) -> float:
    """How far a predicted reading is from the truth, relative to it."""
    predicted = speeds.read_s("e", Reading(start, count))
    assert predicted is not None
    return abs(1000 * predicted / reading_ms(start, count, factor) - 1)


LENGTHS = [100, 300, 900, 2500, 7000]


def test_nothing_is_known_at_first() -> None:
    """What was never measured is not predicted, and reading nothing takes no time."""
    speeds = Speeds()
    assert speeds.read_s("e", Reading(0, 100)) is None
    assert speeds.read_s("e", Reading(50, 0)) == 0
    assert (speeds.save_s("e", 9), speeds.restore_s("e", 9), speeds.write_s("e", 9)) == (0, 0, 0)
    assert speeds.session_bytes("a", "b", 100) == 0
    assert speeds.answer_tokens(7) == 7


def test_one_reading_is_enough_for_a_guess() -> None:
    """After the self-test alone, other lengths are predicted in proportion."""
    speeds = taught([512])
    assert error(speeds, 0, 512) < 1e-6
    assert speeds.read_s("e", Reading(0, 1024)) == pytest.approx(2 * (speeds.read_s("e", Reading(0, 512)) or 0))


@given(start=st.integers(0, 20_000), count=st.integers(50, 20_000))
@settings(max_examples=60)
def test_reading_is_predicted_for_any_length_and_place(start: int, count: int) -> None:
    """Lengths that were never read, and readings that go on from what a slot holds, follow from those that were."""
    assert error(taught(LENGTHS * 3), start, count) < 0.05


@given(
    seed=st.integers(0, 10_000),
    outliers=st.lists(st.sampled_from([1e-3, 0.05, 0.2, 5.0, 40.0, 1e4]), max_size=12),
)
@settings(max_examples=80)
def test_outliers_do_not_pull(seed: int, outliers: list[float]) -> None:
    """A quarter of readings that are wildly wrong, scattered over all lengths, moves no prediction by a quarter."""
    chance = random.Random(seed)
    speeds = Speeds()
    samples = [(length, 1.0) for length in LENGTHS * 9]
    for place, factor in zip(range(0, 45, 4), outliers, strict=False):
        samples[place] = (samples[place][0], factor)
    for length, factor in samples:
        speeds.learn_reading("e", Reading(0, length), reading_ms(0, length, factor * chance.uniform(0.97, 1.03)))
    for length in LENGTHS:
        assert error(speeds, 0, length) < 0.25


def test_a_place_far_into_a_conversation_is_no_surprise() -> None:
    """The same number of tokens takes longer behind a long beginning, and that is not taken for a slower engine."""
    speeds = taught(LENGTHS * 3)
    for start in (30_000, 31_000, 32_000, 33_000):
        speeds.learn_reading("e", Reading(start, 300), reading_ms(start, 300))
    assert error(speeds, 0, 300) < 0.05
    assert error(speeds, 32_000, 300) < 0.05


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0, 4.0])
def test_an_engine_that_has_changed_is_believed_after_three(factor: float) -> None:
    """Three readings of known lengths that agree with each other and not with the past change all lengths alike."""
    speeds = taught(LENGTHS * 4)
    taught([900, 300], factor, speeds)
    assert error(speeds, 0, 7000) < 0.1
    taught([900], factor, speeds)
    assert error(speeds, 0, 7000, factor) < 0.1
    assert error(speeds, 0, 100, factor) < 0.1


def test_what_lies_beside_slows_less_than_what_is_looked_back_on() -> None:
    """Attention passes over the pool's other cells faster than over the prompt's own: the two are learned apart."""

    def took_ms(reading: Reading) -> float:
        return reading_ms(reading.held, reading.count) + 0.15 * LOOK_BACK_MS * reading.count * reading.beside / 1000

    speeds, chance = Speeds(), random.Random(7)
    for _ in range(60):
        reading = Reading(chance.choice((0, 0, 1500, 6000)), chance.choice(LENGTHS), chance.randrange(0, 40_000, 1000))
        speeds.learn_reading("e", reading, took_ms(reading))
    for reading in (Reading(0, 500), Reading(20_000, 500), Reading(0, 500, 40_000), Reading(6000, 300, 20_000)):
        assert speeds.read_s("e", reading) == pytest.approx(took_ms(reading) / 1000, rel=0.05)


def test_readings_of_ever_new_shapes_are_no_burden() -> None:
    """However many kinds of readings there were, the latest of them are kept, and only so many."""
    fit, chance = Fit(4), random.Random(7)
    for _ in range(2000):
        reading = Reading(round(2 ** chance.uniform(0, 17)), round(2 ** chance.uniform(3, 17)), chance.randrange(10**6))
        fit.learn(reading.parts, 1.0 + reading.count)
    assert fit.samples <= SAMPLES_PER_BUCKET * MOST_BUCKETS


def test_readings_in_two_minds_are_still_a_guess() -> None:
    """Half of them contradict the other half: one half is believed."""
    speeds = Speeds()
    for factor in (1.0, 40.0) * 4:
        speeds.learn_reading("e", Reading(0, 500), factor * 1000)
    predicted = speeds.read_s("e", Reading(0, 500))
    assert predicted is not None
    assert 0.9 < predicted < 42


@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_surprises_that_contradict_each_other_change_nothing(factor: float) -> None:
    """Readings that are too slow and too fast in turn tell nothing about the engine."""
    speeds = taught(LENGTHS * 4)
    for place in range(4):
        taught([300], factor if place % 2 else 1 / factor, speeds)
    assert error(speeds, 0, 7000) < 0.1


@given(
    st.lists(
        st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**7), st.floats(allow_nan=True, allow_infinity=True)),
        max_size=40,
    )
)
@settings(max_examples=150)
def test_no_figures_break_the_books(samples: list[tuple[int, int, float]]) -> None:
    """Whatever an engine reports, a prediction is a finite number of seconds that is not negative."""
    speeds = Speeds()
    for start, count, ms in samples:
        speeds.learn_reading("e", Reading(start, count), ms)
        speeds.learn_move("e", "f", count, start, ms, ms)
    for count in (1, 100, 10**6):
        predicted = speeds.read_s("e", Reading(0, count))
        assert predicted is None or (predicted >= 0 and math.isfinite(predicted))
    moved = (speeds.save_s("e", 10**9), speeds.restore_s("f", 10**9), float(speeds.session_bytes("e", "f", 10**6)))
    assert all(value >= 0 and math.isfinite(value) for value in moved)


def test_many_short_readings_do_not_push_long_ones_out() -> None:
    """What is known of long prompts outlives any number of short ones."""
    speeds = taught(LENGTHS * 3)
    taught([20] * 500, 1.0, speeds)
    assert error(speeds, 0, 7000) < 0.1


def test_a_session_has_a_fixed_part() -> None:
    """Session files and transfers are a constant and so much for each token and byte."""
    speeds = Speeds()
    for tokens in (200, 1000, 4000):
        size = 15_000_000 + 20_000 * tokens
        speeds.learn_move("a", "b", tokens, size, 5 + size / 1e6, 2 + size / 4e6)
    assert speeds.session_bytes("a", "b", 2000) == pytest.approx(55_000_000, rel=0.02)
    assert speeds.save_s("a", 55_000_000) == pytest.approx(0.060, rel=0.05)
    assert speeds.restore_s("b", 55_000_000) == pytest.approx(0.0158, rel=0.05)
    assert speeds.pair_status("a", "b")["bytes_per_token"] == pytest.approx(20_000, rel=0.02)


def record(*, moved: bool, crowded: bool = False, stream: bool = True) -> RequestRecord:
    kind = RouteKind.HANDOVER if moved else RouteKind.LOCAL
    route = Route(kind, Why.WORTH_MOVING, "w", "r" if moved else None, prompt_tokens=1001)
    handover = HandoverFigures(1000, 100, 50, 10_000, 900, 100) if moved else None
    figures = Figures(1000, 1, 10, 50, 500) if moved else Figures(200, 801, 4000, 50, 500)
    work_ms = 1160 if moved else 4000
    return RequestRecord(
        "", Api.CHAT, stream, Outcome.OK, 200, "decode", route, "w", 70, 5, work_ms + 70 + 20 + 8, 9999,
        figures=figures, handover=handover, decided_ms=8, crowded=crowded,
    )  # fmt: skip


def test_a_handed_over_request_teaches_both_engines() -> None:
    """A handover tells the prefill engine's reading, both transfers, the session's size and the proxy's own part."""
    speeds = Speeds()
    speeds.learn(record(moved=True))
    assert speeds.read_s("r", Reading(100, 900)) == pytest.approx(1.0)
    assert speeds.read_s("w", Reading(0, 100)) is None
    assert (speeds.save_s("r", 10_000), speeds.restore_s("w", 10_000)) == pytest.approx((0.1, 0.05))
    assert speeds.session_bytes("r", "w", 1000) == 10_000
    assert speeds.write_s("w", 100) == pytest.approx(1.0)
    assert speeds.added_s(RouteKind.HANDOVER, 1001) == pytest.approx(0.03)  # 10 ms are the first step's
    assert speeds.added_s(RouteKind.LOCAL, 1001) == 0
    assert (speeds.answer_tokens(None), speeds.answer_tokens(10)) == (50, 10)


def test_a_local_request_teaches_the_decode_engine() -> None:
    """A prompt that the decode engine read itself tells its reading and the proxy's part, if it was alone."""
    speeds = Speeds()
    speeds.learn(record(moved=False, crowded=True))
    assert speeds.read_s("w", Reading(0, 100)) is None
    speeds.learn(record(moved=False, stream=False))
    assert speeds.read_s("w", Reading(200, 801)) == pytest.approx(4.0)
    assert speeds.added_s(RouteKind.LOCAL, 1001) == 0
    speeds.learn(record(moved=False))
    assert speeds.added_s(RouteKind.LOCAL, 1001) == pytest.approx(0.02)


def test_a_handover_that_broke_teaches_no_transfer() -> None:
    """Where another engine took over after the restore, only its own reading is told, and the way it took is local."""
    speeds = Speeds()
    broken = replace(record(moved=True), figures=Figures(200, 801, 4000, 50, 500), failure=Failure("decode", "died"))
    speeds.learn(broken)
    assert speeds.read_s("w", Reading(200, 801)) == pytest.approx(4.0)
    assert speeds.read_s("r", Reading(0, 100)) is None
    assert (speeds.restore_s("w", 10_000), speeds.added_s(RouteKind.HANDOVER, 1001)) == (0, 0)


def test_a_handover_in_vain_teaches_nothing_of_what_comes_on_top() -> None:
    """The prompt that is read again after the restore is no first step."""
    speeds = Speeds()
    speeds.learn(replace(record(moved=True), effective=False))
    assert speeds.added_s(RouteKind.HANDOVER, 1001) == 0


def test_the_status_tells_rates() -> None:
    """People see tokens and bytes a second."""
    speeds = Speeds()
    assert speeds.status("w")["writes_tokens_per_s"] is None
    speeds.learn(record(moved=True))
    assert speeds.status("w")["writes_tokens_per_s"] == 100
    assert speeds.status("r")["saves_bytes_per_s"] == 100_000
    assert speeds.status("r")["reads_tokens_per_s"]["512"] == pytest.approx(900, rel=0.01)


def test_engines_that_hinder_each_other() -> None:
    """What is read beside another engine tells how much longer that takes, and nothing about reading alone."""
    speeds = taught(LENGTHS * 2)
    for length in LENGTHS:
        speeds.learn_reading("e", Reading(0, length), reading_ms(0, length, 1.6), hindered=True)
    assert error(speeds, 0, 900) < 0.05
    alone, hindered = speeds.read_s("e", Reading(0, 900)), speeds.read_s("e", Reading(0, 900), hindered=True)
    assert alone is not None
    assert hindered == pytest.approx(1.6 * alone, rel=0.05)
    assert speeds.slowed_part("e") == pytest.approx(0.6 / 1.6, rel=0.05)
    for length in LENGTHS * 5:  # engines on machines of their own: faster than alone is only noise
        speeds.learn_reading("e", Reading(0, length), reading_ms(0, length, 0.9), hindered=True)
    assert speeds.read_s("e", Reading(0, 900), hindered=True) == speeds.read_s("e", Reading(0, 900))


def test_a_fit_without_spread_is_a_slope() -> None:
    """Sizes that lie close together say nothing about a constant: none is made up."""
    fit = Fit(2)
    for size, value in ((100.0, 240.0), (110.0, 260.0), (120.0, 280.0)):
        fit.learn((size, 1.0), value)
    assert fit.weights is not None
    assert fit.weights[1] == 0


def test_a_median_ignores_what_is_no_number() -> None:
    """Figures that cannot be are not taken."""
    median = Median()
    assert median.value is None
    for value in (math.nan, math.inf, -1.0, 3.0, 5.0, 400.0):
        median.learn(value)
    assert median.value == 5
