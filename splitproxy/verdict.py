"""Why a handover was in vain, as far as it can be told from figures, and what to change. Pure."""

from dataclasses import dataclass

from splitproxy.model import Figures, InVain

# Fewer shared tokens than this are a system prompt or chance, not the beginning of the prompt that was moved.
SHARED_FACTOR = 0.05

ADVICE = {
    InVain.TEMPLATE_DRIFT: (
        "The decode engine reads another text than the one that was counted: does its chat template use the time or "
        "random ids, and do both engines have the same template? Keep such requests local with split.policy = "
        '"never", or change the template.'
    ),
    InVain.CLEARED_SLOTS: (
        "The decode engine clears slots that are idle while others work: start it with --kv-unified --cache-ram 0."
    ),
    InVain.NO_CHECKPOINTS: (
        "A model with a sliding window or a recurrent state needs a build that keeps checkpoints in session files and "
        "--ctx-checkpoints of 1 or more on both engines, or --swa-full on an older build."
    ),
    InVain.OTHER_TRAFFIC: (
        "Something else than this proxy uses the decode engine and overwrites what was restored, or the engine is "
        "started without --cache-ram 0."
    ),
}


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
