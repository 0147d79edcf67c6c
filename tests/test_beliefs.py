"""What a slot is believed to hold after a request, and when that was a mistake."""

import pytest

from splitproxy.books.beliefs import falls_short, is_another, left_in_slot, left_unfinished
from splitproxy.books.ledger import Holding
from splitproxy.model import Figures, Tokens

PROMPT, ANSWER = Tokens(range(100)), Tokens(range(500, 510))
FIGURES = Figures(cached_tokens=40, read_tokens=60, answer_tokens=10, prompt_ms=1.0, answer_ms=1.0)


@pytest.mark.parametrize(
    ("tokens", "answer", "reasoned", "left"),
    [
        (PROMPT, None, False, Holding(PROMPT, 9, 110)),
        (PROMPT, None, True, Holding(PROMPT, 0, 110)),
        (PROMPT, ANSWER, True, Holding(Tokens([*range(100), *range(500, 509)]), 0, 110)),
        (PROMPT.head(99), None, False, Holding(occupied=110)),
        (None, ANSWER, False, Holding(occupied=110)),
    ],
    ids=["ids not seen", "reasoning", "ids seen", "another prompt", "prompt not known"],
)
def test_a_slot_is_left_with_what_is_certain(
    tokens: Tokens | None, answer: Tokens | None, reasoned: bool, left: Holding
) -> None:
    """All but the answer's last token, which is never evaluated; and nothing of a prompt that was counted otherwise."""
    assert left_in_slot(tokens, FIGURES, answer, reasoned=reasoned) == left


def test_an_answer_that_was_cut_off_leaves_its_prompt() -> None:
    """Where the prompt is not known, nothing is."""
    assert left_unfinished(PROMPT, 130) == Holding(PROMPT, 0, 130)
    assert left_unfinished(None, 130) is None


@pytest.mark.parametrize(
    ("believed", "cached", "short"),
    [(0, 500, False), (64, 0, False), (65, 0, True), (200, 136, False), (1000, 760, False), (1000, 740, True)],
)
def test_what_counts_as_a_mismatch(believed: int, cached: int, short: bool) -> None:
    """A slot falls short when a quarter of what was believed is missing, and more than a few tokens; never by more."""
    assert falls_short(believed, cached) is short


@pytest.mark.parametrize(("believed", "cached", "another"), [(256, 0, False), (800, 100, False), (801, 100, True)])
def test_a_slot_that_reuses_next_to_nothing_is_another(believed: int, cached: int, another: bool) -> None:
    """Models lose some of what they held, never seven eighths of a conversation."""
    assert is_another(believed, cached) is another
