"""Prompts that an engine has read lately, and whether it can take them up again after others took its slots.

A llama-server keeps the conversations that it evicts in a cache of its own, unless it is told not to. Nobody can ask
what is in there; but an engine that reused more than its slot held has shown that it has one. Pure state.
"""

from collections import deque
from dataclasses import dataclass, field

from splitproxy.model import Tokens

PROMPTS = 8  # remembered of each engine
LOOK_TOKENS = 256  # conversations that have parted do not agree in so many again
TELLING_TOKENS = 256  # more than the slot holds must be remembered, or the reuse tells nothing
REVIVED_PART = 0.9
VERDICTS = 5


@dataclass(slots=True)
class _Engine:
    prompts: deque[Tokens] = field(default_factory=lambda: deque(maxlen=PROMPTS))
    revived: deque[bool] = field(default_factory=lambda: deque(maxlen=VERDICTS))

    def prefix(self, tokens: Tokens) -> int:
        """How many leading tokens of a prompt the one that is most like it shares."""
        longest = 0
        for prompt in reversed(self.prompts):
            # One that differs where the best ended cannot be better, and one that does not is like it up to there.
            if not longest or prompt.agrees(tokens, longest - LOOK_TOKENS, longest + 1):
                longest = max(longest, prompt.common_prefix(tokens, longest))
        return longest

    @property
    def revives(self) -> bool:
        return 2 * sum(self.revived) >= len(self.revived)


@dataclass(slots=True)
class Recall:
    """All engines. Until one has shown that it does not revive prompts, it is taken to.

    Where that is wrong, one handover takes longer than predicted and shows it; the other mistake would show nothing.
    """

    _engines: dict[str, _Engine] = field(default_factory=dict)

    def learn(self, engine: str, prompt: Tokens, held: int, cached: int) -> None:
        """The engine has read a prompt of which its slot was believed to hold `held` tokens, and reused `cached`."""
        known = self._engines.setdefault(engine, _Engine())
        remembered = known.prefix(prompt)
        if remembered - held >= TELLING_TOKENS:
            known.revived.append(cached >= REVIVED_PART * remembered)
        known.prompts.append(prompt)

    def held(self, engine: str, tokens: Tokens, held: int) -> int:
        """How many leading tokens of a prompt the engine need not read, if its slot holds `held` of them."""
        known = self._engines.get(engine)
        return held if known is None or not known.revives else max(held, known.prefix(tokens))

    def forget(self, engine: str) -> None:
        """The engine has been restarted: its memory is empty, its habits may be others."""
        self._engines.pop(engine, None)
