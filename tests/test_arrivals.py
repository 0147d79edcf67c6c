"""Who will come while an engine is busy, by those who came before."""

import random
from itertools import accumulate

import pytest

from splitproxy.decide.arrivals import LEAST, REMEMBERED, Arrivals


def noted(*times: float) -> Arrivals:
    found = Arrivals()
    for at in times:
        found.note(at)
    return found


def test_few_requests_tell_nothing() -> None:
    """Nobody is expected before enough requests have come."""
    times = range(LEAST)
    assert noted(*times[1:]).waiting_s(10, now=20) == 0
    assert noted(*times).waiting_s(10, now=20) > 0


def test_one_after_the_other_never_waits() -> None:
    """Somebody who asks again each time that an answer is there finds the engine idle, however quickly they ask."""
    alone = noted(*range(0, 40, 2))
    assert alone.waiting_s(1.9, now=40) == 0
    assert alone.waiting_s(3.0, now=41) == pytest.approx(1, rel=0.1)


def test_those_that_come_together_wait_for_one_another() -> None:
    """Of two that come at once, the second waits all the time that the first takes."""
    pairs = noted(*(10 * number + late for number in range(16) for late in (0.0, 0.5)))
    assert pairs.waiting_s(2.5, now=160) == pytest.approx(2.0 / 2)


def test_at_random_half_of_the_time_is_waited() -> None:
    """Where requests come independently, as many as usual come, and wait for half of it on average."""
    chance = random.Random(1)
    found, rate, busy_s = [], 3.0, 2.0
    for _ in range(200):
        *times, now = accumulate(chance.expovariate(rate) for _ in range(2 * REMEMBERED))
        found.append(noted(*times).waiting_s(busy_s, now))
    assert sum(found) / len(found) == pytest.approx(rate * busy_s**2 / 2, rel=0.1)


def test_what_is_not_seen_yet_counts_at_the_usual_rate() -> None:
    """A longer reading than all that is remembered is not taken for one to which nobody comes."""
    assert noted(*range(20)).waiting_s(100, now=20) == pytest.approx(100**2 / 2, rel=0.2)


def test_only_the_latest_count() -> None:
    """A crowd is forgotten once as many have come alone as are remembered."""
    crowd = [0.0] * REMEMBERED
    later = [10.0 + 10 * number for number in range(REMEMBERED)]
    assert noted(*crowd).waiting_s(1, now=9) > 10
    assert noted(*crowd, *later).waiting_s(1, now=10.0 * REMEMBERED + 5) == 0


def test_a_long_silence_is_believed() -> None:
    """The longer nobody came, the fewer are expected."""
    found = noted(*range(8))
    assert found.waiting_s(50, now=1000) < found.waiting_s(50, now=10)
