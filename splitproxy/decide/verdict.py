"""Why a handover was in vain, as far as it can be told from figures. Pure."""

from dataclasses import dataclass

from splitproxy.model import Figures, InVain

# Fewer shared tokens than this are a system prompt or chance, not the beginning of the prompt that was moved.
SHARED_FACTOR = 0.05


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known about a handover that was restored and read again all the same."""

    prompt_tokens: int  # as they were counted here
    figures: Figures  # the decode engine's
    proven_tokens: int  # the longest prompt that this pair was ever seen to reuse
    others_at_work: bool  # whether the decode engine worked on other slots meanwhile


def likely_cause(seen: Circumstances) -> InVain:
    """The likeliest reason of a handover in vain."""
    read = seen.figures.cached_tokens + seen.figures.read_tokens
    if read != seen.prompt_tokens or seen.figures.cached_tokens > SHARED_FACTOR * seen.prompt_tokens:
        return InVain.TEMPLATE_DRIFT
    if seen.others_at_work:
        return InVain.CLEARED_SLOTS
    # A short prompt fits into a sliding window: its self-test passes where nothing longer is ever reused.
    return InVain.NO_CHECKPOINTS if seen.prompt_tokens > 2 * seen.proven_tokens else InVain.OTHER_TRAFFIC
