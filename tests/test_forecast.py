"""Seconds of work before each engine: jobs, their phases, queues for slots, and the views that come of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from splitproxy.decide.forecast import Forecast, Phase
from splitproxy.decide.speeds import Reading
from splitproxy.model import Api, Ask, DecodeView, PairState, PrefillView, Reason, Route, RouteKind, Tokens

ASK = Ask(Api.CHAT, "/v1/chat/completions", b"{}", stream=True, max_tokens=10)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def forecast(clock: Clock) -> Forecast:
    return Forecast(clock=clock)


def test_a_reading_job_shrinks_as_time_goes_by(forecast: Forecast, clock: Clock) -> None:
    """What waits counts in full, what has begun counts less, and what takes longer than predicted still counts."""
    with forecast.job("r", 10.0) as job:
        clock.now += 50
        assert forecast.backlog_s("r") == 10
        job.begin(Phase.READING)
        clock.now += 4
        assert forecast.backlog_s("r") == 6
        clock.now += 96
        assert forecast.backlog_s("r") == pytest.approx(10)  # a tenth of what it has taken so far
        assert forecast.backlog_s("other") == 0
    assert forecast.backlog_s("r") == 0


def test_an_engine_that_reports_its_pace_is_believed(forecast: Forecast, clock: Clock) -> None:
    """The time left follows the engine's own progress, from the part that it had not read before."""
    with forecast.job("r", 10.0) as job:
        job.begin(Phase.READING)
        job.report(400, 1000)
        assert forecast.backlog_s("r") == 10
        clock.now += 5
        job.report(500, 1000)
        assert forecast.backlog_s("r") == pytest.approx(25)
        clock.now += 5
        assert forecast.backlog_s("r") == pytest.approx(20)


@pytest.mark.parametrize(
    ("reason", "moved"), [(Reason.TOO_SHORT, False), (Reason.LOCAL_CHEAPER, False), (Reason.WORTH_MOVING, True)]
)
def test_a_decode_engine_expects_what_will_come(forecast: Forecast, clock: Clock, reason: Reason, moved: bool) -> None:
    """Four requests make a rate, for their engine alone and whoever reads them; it falls while no more come."""
    route = Route(RouteKind.HANDOVER if moved else RouteKind.LOCAL, reason, "w")

    def rate(engine: str = "w") -> float:
        return forecast.decode_view(DecodeView(engine, 0, 4096, 4), 100).arrivals_per_s

    for _ in range(3):
        with forecast.answering(route, ASK, 10, moved=moved):
            clock.now += 4
    assert rate() == 0
    with forecast.answering(route, ASK, 10, moved=moved):
        clock.now += 4
    assert rate() == 0.25
    assert rate("v") == 0
    clock.now += 24
    assert rate() == 0.1


def test_requests_that_come_together_are_no_rate(forecast: Forecast) -> None:
    """A burst says nothing about what comes afterwards: it is spread over ten seconds."""
    for _ in range(4):
        with forecast.answering(Route(RouteKind.LOCAL, Reason.TOO_SHORT, "w"), ASK, 10, moved=False):
            pass
    assert forecast.decode_view(DecodeView("w", 0, 4096, 4), 100).arrivals_per_s == 0.4


def test_a_save_comes_after_all_is_read(forecast: Forecast, clock: Clock) -> None:
    """The engine's pace says how long it reads; the save is still to come, and then alone is left."""
    with forecast.job("r", 2.0, save_s=10.0) as job:
        assert forecast.backlog_s("r") == 12
        job.begin(Phase.READING)
        job.report(0, 1000)
        clock.now += 3
        job.report(500, 1000)
        assert forecast.backlog_s("r") == pytest.approx(13)
        clock.now += 3
        job.saving()
        clock.now += 4
        assert forecast.backlog_s("r") == pytest.approx(6)


def test_a_silent_answer_is_taken_to_be_written_once_its_prompt_must_be_read(forecast: Forecast, clock: Clock) -> None:
    """Where nothing streams, the prediction stands for the sign that was not given."""
    with forecast.job("w", 4.0, 6.0, streamed=False) as silent, forecast.job("v", 4.0, 6.0) as heard:
        for job in (silent, heard):
            job.begin(Phase.READING)
        clock.now += 5
        assert (silent.at(clock.now), heard.at(clock.now)) == (Phase.WRITING, Phase.READING)
        assert silent.left_s(clock.now) == 5


@contextmanager
def jobs(forecast: Forecast, *phases: tuple[Phase, float, float]) -> Iterator[None]:
    with ExitStack() as stack:
        for phase, read_s, write_s in phases:
            job = stack.enter_context(forecast.job("w", read_s, write_s))
            if phase is not Phase.WAITING:
                job.begin(phase)
        yield


@pytest.mark.parametrize(
    ("free", "phases", "wait_s"),
    [
        (1, [], 0),
        (2, [(Phase.WRITING, 0, 9)], 0),
        (0, [(Phase.WRITING, 0, 9)], 9),
        (0, [(Phase.READING, 3, 4), (Phase.WRITING, 0, 9)], 7),
        (0, [(Phase.WRITING, 0, 9), (Phase.WAITING, 1, 2)], 12),
        (0, [(Phase.WRITING, 0, 9), (Phase.WRITING, 0, 5), (Phase.WAITING, 1, 2)], 8),
        (1, [(Phase.WAITING, 1, 2)], 3),
        (0, [], 0),
    ],
)  # fmt: skip
def test_the_wait_for_a_slot(
    forecast: Forecast, free: int, phases: list[tuple[Phase, float, float]], wait_s: float
) -> None:
    """A request gets the first slot that is left over by those that run and those that came before it."""
    with jobs(forecast, *phases):
        assert forecast.wait_s("w", free) == wait_s


def test_the_views_get_their_seconds(forecast: Forecast, clock: Clock) -> None:
    """Speeds and jobs become the seconds that the router weighs."""
    speeds = forecast.speeds
    speeds.learn_reading("w", Reading(0, 1000), 4000)
    speeds.learn_reading("r", Reading(0, 1000), 1000)
    speeds.learn_move("r", "w", 1000, 1_000_000, 100, 50)
    with jobs(forecast, (Phase.WRITING, 0, 9), (Phase.READING, 3, 4)), forecast.job("r", 2.0):
        view = forecast.decode_view(DecodeView("w", 100, 8192, 0), 1101)
        assert (view.streams, view.wait_s, view.reading_s) == (2, 7, 3)
        assert view.read_s == pytest.approx(4.0, rel=0.1)
        move = forecast.prefill_view(PrefillView("r", "w", True, PairState.PROVEN, 8192, 0, True), Tokens(range(1001)))
        assert (move.queue_s, move.read_s, move.save_s, move.restore_s) == pytest.approx((2, 1, 0.1, 0.05), rel=0.01)
        assert forecast.decode_view(DecodeView("w", 0, 8192, 0), None).read_s is None


def test_the_work_of_a_request(forecast: Forecast) -> None:
    """A local answer reads what is not held; a moved one only restores; both write a usual answer at most."""
    speeds = forecast.speeds
    speeds.learn_reading("w", Reading(0, 1000), 4000)
    speeds.learn_move("r", "w", 1000, 1_000_000, 100, 50)
    speeds.engine("w").writing.learn(100)
    local = Route(RouteKind.LOCAL, Reason.WARM, "w", held_tokens=500, prompt_tokens=1000)
    moved = Route(RouteKind.HANDOVER, Reason.FORCED, "w", "r", 1000, 0, 999, prefill_read_s=3.0)
    with forecast.answering(local, ASK, 1000, moved=False) as job:
        assert (job.read_s, job.write_s) == pytest.approx((2.0, 1.0), rel=0.01)
    with forecast.answering(moved, ASK, 1000, moved=True) as job:
        assert job.read_s == pytest.approx(0.05, rel=0.01)
    with forecast.answering(moved, ASK, 1000, moved=False) as job:
        assert job.read_s == pytest.approx(4.0)
    with forecast.reading_ahead(moved) as job:
        assert job.engine == "r"
        assert job.read_s == pytest.approx(3.1, rel=0.01)


def test_readings_at_the_same_time_are_marked(forecast: Forecast, clock: Clock) -> None:
    """Figures of two prompts that one engine read at once are not taken for its speed; those before and after are."""
    with forecast.job("w", 4.0) as before:
        before.begin(Phase.READING)
        before.begin(Phase.WRITING)
        with forecast.job("w", 4.0) as one, forecast.job("w", 4.0) as two, forecast.job("v", 4.0) as elsewhere:
            for job in (one, two, elsewhere):
                job.begin(Phase.READING)
            assert [job.crowded for job in (before, one, two, elsewhere)] == [False, True, True, False]
            two.begin(Phase.READING, "v")
            assert elsewhere.crowded


@pytest.mark.parametrize(("slot", "reading_s"), [(0, 4), (1, 4), (2, 7), (None, 7)])
def test_a_lower_slot_is_read_first(forecast: Forecast, slot: int | None, reading_s: float) -> None:
    """Engines fill each batch slot by slot: a prompt waits for those in lower slots, and where no slot is known, for
    all."""
    with forecast.job("w", 3.0) as lower, forecast.job("w", 3.0) as higher, forecast.job("w", 1.0) as anywhere:
        higher.begin(Phase.READING, slot=2)
        lower.begin(Phase.READING, slot=0)
        anywhere.begin(Phase.READING)
        assert forecast.decode_view(DecodeView("w", 0, 8192, 5, slot=slot), 10).reading_s == reading_s
        assert forecast.decode_view(DecodeView("w", 0, 8192, 5, restore_slot=slot), 10).before_restored_s == reading_s


def test_what_is_left_to_read_is_told_by_slot(forecast: Forecast, clock: Clock) -> None:
    """Only readings count whose slot is known; an answer that is being written is none."""
    with forecast.job("w", 3.0) as one, forecast.job("w", 5.0) as two, forecast.job("w", 1.0) as unknown:
        one.begin(Phase.READING, slot=2)
        two.begin(Phase.READING, slot=0)
        unknown.begin(Phase.READING)
        clock.now += 1
        assert forecast.reading_s("w") == {2: 2.0, 0: 4.0}
        two.begin(Phase.WRITING)
        assert forecast.reading_s("w") == {2: 2.0}


# -- readings that overlap ---------------------------------------------------------------------------------------------


def together(forecast: Forecast, clock: Clock, *, finished: bool, known: bool) -> float | None:
    """Two readings of 1000 tokens overlap and are done after 6 s; how long one alone is then believed to take."""
    reads = Reading(0, 1000)
    with forecast.job("w", 1.0) as one, forecast.job("w", 1.0) as two:
        one.begin(Phase.READING, reads=reads)
        clock.now += 2
        two.begin(Phase.READING, reads=reads if known else None)
        clock.now += 3
        one.begin(Phase.WRITING)
        clock.now += 1
        if finished:
            two.begin(Phase.WRITING)
    return forecast.speeds.read_s("w", Reading(0, 1000))


def test_readings_that_overlap_teach_as_one(forecast: Forecast, clock: Clock) -> None:
    """What two readings took together is learned as the time of both."""
    assert together(forecast, clock, finished=True, known=True) == pytest.approx(3.0)


@pytest.mark.parametrize(("finished", "known"), [(False, True), (True, False)])
def test_readings_of_which_one_is_lost_teach_nothing(
    forecast: Forecast, clock: Clock, finished: bool, known: bool
) -> None:
    """Where one was cut off, or nobody knows what it read, the time tells nothing."""
    assert together(forecast, clock, finished=finished, known=known) is None


def test_one_reading_alone_is_left_to_the_engines_own_figures(forecast: Forecast, clock: Clock) -> None:
    """A single reading is not learned twice."""
    with forecast.job("w", 1.0) as job:
        job.begin(Phase.READING, reads=Reading(0, 1000))
        clock.now += 3
        job.begin(Phase.WRITING)
    assert forecast.speeds.read_s("w", Reading(0, 1000)) is None


def test_readings_of_different_engines_are_marked(forecast: Forecast) -> None:
    """Engines that read at the same time may hinder each other; one that only waits or writes hinders nobody."""
    with forecast.job("r", 4.0) as first, forecast.job("w", 1.0) as second, forecast.job("v", 1.0) as third:
        first.begin(Phase.READING)
        assert not first.hindered
        second.begin(Phase.READING)
        second.begin(Phase.WRITING)
        assert (first.hindered, second.hindered) == (True, True)
        first.begin(Phase.WRITING)
        third.begin(Phase.READING)
        assert not third.hindered


def test_the_last_token_of_a_restored_prompt_hinders_nobody(forecast: Forecast) -> None:
    """Next to nothing to read is no reading that another engine would feel."""
    with forecast.job("r", 4.0) as first, forecast.job("w", 0.0) as restored:
        first.begin(Phase.READING, reads=Reading(0, 1000))
        restored.begin(Phase.READING, reads=Reading(1000, 1))
        assert (first.hindered, restored.hindered) == (False, False)


def test_sessions_on_their_way_are_known(forecast: Forecast, clock: Clock) -> None:
    """A decode engine's view tells when the sessions will be ready that are being read for it, and for no other."""
    with (
        forecast.job("r", 4.0, target="w") as first,
        forecast.job("r", 3.0, target="w"),
        forecast.job("q", 1.0, target="w"),
        forecast.job("q", 9.0, target="v"),
    ):
        first.begin(Phase.READING)
        clock.now += 1
        assert forecast.decode_view(DecodeView("w", 0, 8192, 1), 10).coming_s == (3, 6, 1)


def test_a_reading_that_begins_is_known_better(forecast: Forecast, clock: Clock) -> None:
    """What a slot really holds, and what lies beside it, is certain when its reading begins: the forecast follows."""
    for held, beside, ms in ((0, 0, 1000), (0, 8000, 2000), (4000, 0, 3000)):
        for count in (50, 500, 1000):
            forecast.speeds.learn_reading("w", Reading(held, count, beside), ms * count / 1000)
    with forecast.job("w", 0.1) as job:
        assert forecast.backlog_s("w") == pytest.approx(0.1)
        job.begin(Phase.READING, reads=Reading(0, 1000, 8000))
        assert forecast.backlog_s("w") == pytest.approx(2.0, rel=0.2)
        clock.now += 1
        assert forecast.backlog_s("w") == pytest.approx(1.0, rel=0.4)
    with forecast.job("v", 0.1) as job:
        job.begin(Phase.READING, reads=Reading(0, 1000))
        assert forecast.backlog_s("v") == pytest.approx(0.1), "an engine of which nothing is known keeps its guess"
