"""An engine is taken to revive conversations until it shows that it does not."""

import pytest

from splitproxy.decide.recall import PROMPTS, VERDICTS, Recall
from splitproxy.model import Tokens

A, B = list(range(1000)), list(range(5000, 6000))


def longer(ids: list[int]) -> Tokens:
    return Tokens([*ids, 1, 2, 3])


def test_an_engine_gets_the_chance_to_revive() -> None:
    """What it read lately is taken to be at hand, before anything is known of its habits; nothing else is."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", Tokens(B), 0, 0)
    assert recall.held("e", longer(A), 5) == 1000
    assert recall.held("e", longer(B), 1002) == 1002
    assert recall.held("e", Tokens(range(9000, 9900)), 5) == 5
    assert recall.held("other", longer(B), 7) == 7


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_prompt_that_is_most_alike_counts(order: tuple[int, ...]) -> None:
    """Whichever was read last: of turns of one conversation the longest, and a stranger never."""
    turns = [A, A[:600], B]
    recall = Recall()
    for number in order:
        recall.learn("e", Tokens([*turns[number], 7, 7]), 0, 2000)
    assert recall.held("e", longer(A), 0) == 1000
    assert recall.held("e", longer(A[:700]), 0) == 700


def test_an_engine_that_does_not_revive_is_believed() -> None:
    """One that read again what it had read lately is not expected to do better the next time."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", Tokens(B), 0, 0)
    recall.learn("e", longer(A), 0, 0)
    assert recall.held("e", longer(B), 0) == 0
    recall.learn("e", longer(B), 0, 1000)
    assert recall.held("e", longer(A), 0) == 1003


def test_an_engine_that_stops_is_not() -> None:
    """Most of the latest verdicts count, and a restart takes all of them back."""
    recall = Recall()
    for cached in (1000, 1000, 0, 0, 0):
        recall.learn("e", longer(A), 1003, 1003)
        recall.learn("e", longer(A), 0, cached)
    assert recall.held("e", longer(A), 3) == 3
    for _ in range(VERDICTS):
        recall.learn("e", longer(A), 0, 1003)
    assert recall.held("e", longer(A), 3) == 1003
    recall.forget("e")
    assert recall.held("e", longer(A), 3) == 3


def test_what_the_slot_held_tells_nothing() -> None:
    """Reuse that the slot alone explains is no sign of a memory, and none of a lack of it."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", longer(A), 0, 0)
    recall.learn("e", longer(A), 900, 1000)
    assert recall.held("e", longer(A), 3) == 3


def test_old_prompts_are_forgotten() -> None:
    """Only so many prompts are remembered."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    assert recall.held("e", longer(A), 3) == 1000
    for number in range(PROMPTS):
        recall.learn("e", Tokens([9000 + number]), 0, 0)
    assert recall.held("e", longer(A), 3) == 3
