"""Kinds of load by name: which prompts come when, and how much is answered. Pure: the same seed makes the same plan."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_TEXT = (
    "the river carries letters from one station to another while people wait for an answer and morning light falls on "
    "small windows above a garden where nobody reads what was written about weather work and winter travel"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to be sent. `shared_tokens` of its `tokens` begin like all prompts with the same `beginning`."""

    kind: str
    at_s: float  # after the beginning of the run; ignored by clients that wait for their answers
    tokens: int
    answer_tokens: int
    beginning: str = ""
    shared_tokens: int = 0
    seed: int = 0

    def text(self, words_per_token: float) -> str:
        """Its words; another seed or beginning shares none."""
        shared = round(self.shared_tokens * words_per_token)
        own = max(round((self.tokens - self.shared_tokens) * words_per_token), 1)
        head = random.Random(self.beginning).choices(WORDS, k=shared)  # noqa: S311 - words, not secrets
        return " ".join([*head, f"{self.seed}", *random.Random(self.seed).choices(WORDS, k=own)])  # noqa: S311


Draw = Callable[[random.Random, int], Prompt]


def _chat(chance: random.Random, seed: int) -> Prompt:
    return Prompt("chat", 0.0, chance.randint(30, 200), chance.randint(24, 64), seed=seed)


def _document(chance: random.Random, seed: int) -> Prompt:
    """One in four is long: a document that is asked about while others chat."""
    if chance.random() < 0.75:
        return _chat(chance, seed)
    return Prompt("document", 0.0, chance.randint(1500, 2500), chance.randint(16, 48), seed=seed)


def _agent(chance: random.Random, seed: int) -> Prompt:
    """The turns of three agents: each begins with all of its agent's last turn, tools and instructions included."""
    agent, turn = seed % 3, seed // 3
    return Prompt("agent", 0.0, 1200 + 150 * turn, chance.randint(16, 40), f"agent {agent}", 1100 + 150 * turn, seed)


MIXES: Mapping[str, Draw] = {"chat": _chat, "documents": _document, "agent": _agent}


def plan(mix: str, count: int, rate_rps: float, seed: int, *, scale: float = 1.0, run: int = 0) -> list[Prompt]:
    """`count` prompts of a mix that arrive at random, `rate_rps` a second on average.

    `scale` stretches the prompts. Runs with another number have the same arrivals and lengths, and other words.
    """
    chance = random.Random(f"{mix} {seed}")  # noqa: S311 - has to be the same each time
    times = _arrivals(chance, rate_rps)
    prompts = []
    for number in range(count):
        prompt = MIXES[mix](chance, number)
        prompts.append(
            Prompt(
                prompt.kind,
                next(times),
                max(round(scale * prompt.tokens), 8),
                prompt.answer_tokens,
                f"{prompt.beginning} of run {run}" if prompt.beginning else "",
                round(scale * prompt.shared_tokens),
                1_000_000 * run + 1000 * seed + number,
            )
        )
    return prompts


def _arrivals(chance: random.Random, rate_rps: float) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += chance.expovariate(rate_rps) if rate_rps else 0.0
