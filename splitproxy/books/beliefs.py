"""What a slot is believed to hold after a request, and whether it was what it was taken for. Pure."""

from splitproxy.books.ledger import Holding
from splitproxy.model import Figures, Tokens

# A slot that reuses less than an eighth of what it was believed to hold was not what it was taken for: the engine was
# restarted or used by others. Models with a sliding window or a recurrent state lose some, but never that much.
MISTAKE_TOKENS, MISTAKE_FACTOR = 256, 8
# A slot that falls short by this many tokens, and by this part, has cost reading that nobody reckoned with.
SHORT_TOKENS, SHORT_PART = 64, 0.25


def left_in_slot(tokens: Tokens | None, figures: Figures, answer: Tokens | None, *, reasoned: bool) -> Holding:
    """What an answer that is complete leaves behind: the prompt's `tokens` and the ids of the `answer`, each None where
    it is not known. `reasoned`: the answer has reasoning, which templates drop from history."""
    prompt_tokens = figures.cached_tokens + figures.read_tokens
    occupied = prompt_tokens + figures.answer_tokens
    if tokens is None or not tokens.may_be(prompt_tokens):
        return Holding(occupied=occupied)  # the engine read another prompt than was counted here
    if answer is not None:  # its last token is never evaluated
        exact = Tokens.from_bytes(tokens.to_bytes() + answer.head(len(answer) - 1).to_bytes())
        return Holding(exact, occupied=occupied)
    return Holding(tokens, 0 if reasoned else max(figures.answer_tokens - 1, 0), occupied)


def left_unfinished(tokens: Tokens | None, filled: int) -> Holding | None:
    """What an answer that was cut off leaves behind in at most `filled` cells: its prompt was read, of the rest nothing
    is certain."""
    return None if tokens is None else Holding(tokens, occupied=filled)


def falls_short(believed_tokens: float, cached_tokens: int) -> bool:
    """Whether a slot held clearly less than was believed, for whatever reason."""
    return believed_tokens - cached_tokens > max(SHORT_TOKENS, SHORT_PART * believed_tokens)


def is_another(believed_tokens: int, cached_tokens: int) -> bool:
    """Whether a slot that a prompt continues cannot have been what it was taken for."""
    return believed_tokens > MISTAKE_TOKENS and MISTAKE_FACTOR * cached_tokens < believed_tokens
