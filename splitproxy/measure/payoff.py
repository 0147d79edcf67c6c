"""Does a handover pay? One pair reads prompts of growing length both ways, until the answer is clear.

It drives two engines that nobody else uses, leaves their slots empty however it ends, and prints nothing.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from splitproxy.engines.adapter import Deadlines, Engine, PrefillEngine, to_the_end
from splitproxy.errors import EngineError, Step
from splitproxy.fleet.probe import random_text
from splitproxy.model import Prompt, Ticket

SHORTEST_TOKENS = 128
STEP_FACTOR = 2
SLOWEST_S = 60.0  # a prompt that is expected to take longer either way is not read any more
ROUND_TO_TOKENS = 64
QUIET_LOOK_S, QUIET_LOOKS = 1.5, 40
# Shorter differences are noise: two equal engines must not look as if one paid.
PAYS_FACTOR = 1.05


@dataclass(frozen=True, slots=True)
class Rung:
    """Prompts of one length. Seconds to the first token, medians of all rounds; `parts` are those of the handover."""

    tokens: int
    local_s: float
    handover_s: float
    read_s: float
    save_s: float
    restore_s: float
    session_bytes: int
    reused: bool = True  # by the decode engine's own figures, in every round

    @property
    def gain(self) -> float:
        """How many times sooner a handover brings the first token."""
        return self.local_s / self.handover_s if self.handover_s else 0.0

    @property
    def pays(self) -> bool:
        return self.gain >= PAYS_FACTOR


@dataclass(frozen=True, slots=True)
class Payoff:
    """What the ladder says."""

    rungs: tuple[Rung, ...]

    @property
    def break_even_tokens(self) -> int | None:
        """The length from which on a handover is quicker; None where it is not, up to the longest that was tried."""
        if not self.rungs or not self.rungs[-1].pays:
            return None
        paying = self.rungs[-1]
        for rung in reversed(self.rungs[:-1]):
            if not rung.pays:
                return _crossing(rung, paying)
            paying = rung
        return paying.tokens

    @property
    def read_again_tokens(self) -> int | None:
        """The shortest length of which restored prompts were read again; None where all were reused."""
        return next((rung.tokens for rung in self.rungs if not rung.reused), None)

    @property
    def recommended_min_prompt_tokens(self) -> int | None:
        """A floor somewhat above the break-even length, so that every handover has something to win."""
        found = self.break_even_tokens
        return None if found is None else -(-found * 5 // (4 * ROUND_TO_TOKENS)) * ROUND_TO_TOKENS


def _crossing(below: Rung, above: Rung) -> int:
    """Where two straight lines that join the measured lengths lie apart by the margin."""
    lost, won = (abs(rung.local_s - PAYS_FACTOR * rung.handover_s) for rung in (below, above))
    return round(below.tokens + (above.tokens - below.tokens) * lost / (lost + won))


def lengths(context: int, up_to: int) -> list[int]:
    """The lengths of a ladder that ends where the engines do, or at `up_to`."""
    longest = min(up_to, context - ROUND_TO_TOKENS)
    found, length = [], SHORTEST_TOKENS
    while length < longest:
        found.append(length)
        length *= STEP_FACTOR
    return [*found, longest] if longest >= SHORTEST_TOKENS else []


Climbed = Callable[[str, int, int], None]
"""Told before each measurement: what comes, how many are done, how many there are in all."""


@dataclass(slots=True)
class Ladder:
    """A measurement that is about to run on one slot of each engine."""

    source: PrefillEngine
    target: Engine
    source_slot: int
    target_slot: int
    deadlines: Deadlines
    tell: Climbed = lambda _what, _done, _all: None
    rungs: list[Rung] = field(default_factory=list)  # complete ones: all that is left after a stop
    _tickets: list[Ticket] = field(default_factory=list)

    async def climb(self, ladder: Sequence[int], rounds: int) -> Payoff:
        """Read prompts of these lengths both ways, in turns. Raises EngineError.

        Cancelled in the middle, it leaves both slots empty and no session file.
        """
        try:
            for place, tokens in enumerate(ladder):
                if self._takes_too_long(tokens):
                    break
                self.rungs.append(await self._rung(tokens, rounds, place * 2 * rounds, len(ladder) * 2 * rounds))
        finally:
            await to_the_end(self._clean())
        return Payoff(tuple(self.rungs))

    def _takes_too_long(self, tokens: int) -> bool:
        if not self.rungs:
            return False
        last = self.rungs[-1]
        return max(last.local_s, last.handover_s) * tokens / last.tokens > SLOWEST_S

    async def _rung(self, tokens: int, rounds: int, done: int, total: int) -> Rung:
        local_s, moves = [], []
        for number in range(rounds):
            self.tell(f"{tokens} tokens, read by the decode engine", done + 2 * number, total)
            local_s.append(await self._local(await self._prompt(tokens)))
            self.tell(f"{tokens} tokens, handed over", done + 2 * number + 1, total)
            moves.append(await self._moved(await self._prompt(tokens)))

        def middle(part: str) -> float:
            seconds: float = statistics.median(getattr(move, part) for move in moves)
            return seconds

        return Rung(
            tokens,
            statistics.median(local_s),
            middle("handover_s"),
            middle("read_s"),
            middle("save_s"),
            middle("restore_s"),
            moves[0].session_bytes,
            all(move.reused for move in moves),
        )

    async def _prompt(self, tokens: int) -> Prompt:
        """A prompt that neither engine has seen, with both slots empty."""
        for engine, slot in self._slots():
            await engine.erase(slot, self.deadlines)
        return await self.target.trial(random_text(tokens), tokens)

    async def _local(self, prompt: Prompt) -> float:
        start = time.perf_counter()
        await self.target.sample(prompt, self.target_slot, 1, self.deadlines)
        return time.perf_counter() - start

    async def _moved(self, prompt: Prompt) -> Rung:
        start = time.perf_counter()
        ticket = await self.source.prefill(prompt, self.source_slot, self.deadlines, _ignore)
        self._tickets.append(ticket)
        redeemed = await self.target.redeem(ticket, self.target_slot, self.deadlines)
        sample = await self.target.sample(prompt, self.target_slot, 1, self.deadlines)
        handover_s = time.perf_counter() - start
        await self._discard()
        return Rung(
            len(prompt),
            0.0,
            handover_s,
            ticket.prefill_ms / 1000,
            ticket.save_ms / 1000,
            redeemed.restore_ms / 1000,
            ticket.session_bytes,
            sample.figures is None or sample.figures.cached_tokens >= ticket.proof_tokens,
        )

    def _slots(self) -> tuple[tuple[PrefillEngine, int], ...]:
        return (self.source, self.source_slot), (self.target, self.target_slot)

    async def _discard(self) -> None:
        while self._tickets:
            await self.source.discard(self._tickets.pop())

    async def _clean(self) -> None:
        await self._discard()
        for engine, slot in self._slots():
            with suppress(EngineError):
                # An engine whose request was cut off goes on to the end of its batch, and must not be sent anything.
                for _ in range(QUIET_LOOKS):
                    if not any(state.busy for state in (await engine.slots()).values()):
                        break
                    await asyncio.sleep(QUIET_LOOK_S)
                await engine.erase(slot, self.deadlines)


def _ignore(_step: Step, _done: int, _total: int) -> None:
    """Progress that nobody follows."""
