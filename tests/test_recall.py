"""An engine that revives conversations is believed to after it has shown it, and until it shows otherwise."""

from splitproxy.model import Tokens
from splitproxy.recall import PROMPTS, VERDICTS, Recall

A, B = list(range(1000)), list(range(5000, 6000))


def longer(ids: list[int]) -> Tokens:
    return Tokens([*ids, 1, 2, 3])


def test_nothing_is_believed_before_it_was_seen() -> None:
    """What an engine read before counts for nothing until it has reused more than its slot held."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", Tokens(B), 0, 0)
    assert recall.held("e", longer(A), 5) == 5


def test_an_engine_that_revives_is_believed() -> None:
    """Once it reused a prompt that had left its slot, all prompts of late are taken to be at hand."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", Tokens(B), 0, 0)
    recall.learn("e", longer(A), 0, 1000)
    assert recall.held("e", longer(B), 0) == 1000
    assert recall.held("e", longer(B), 1002) == 1002
    assert recall.held("other", longer(B), 7) == 7


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
    """Reuse that the slot alone explains is no sign of a memory."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", longer(A), 900, 1000)
    assert recall.held("e", longer(A), 3) == 3


def test_old_prompts_are_forgotten() -> None:
    """Only so many prompts are remembered."""
    recall = Recall()
    recall.learn("e", Tokens(A), 0, 0)
    recall.learn("e", longer(A), 0, 1000)
    for number in range(PROMPTS):
        recall.learn("e", Tokens([9000 + number]), 0, 0)
    assert recall.held("e", longer(A), 3) == 3
