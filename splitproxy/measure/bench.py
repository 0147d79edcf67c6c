"""The user's own engines under a named load, split against not split, in turns.

Both arms go through the same proxy, whose policy is changed between them, so that all else is equal. The prompts of
both arrive at the same times and are equally long, and no text is sent twice.
"""

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from splitproxy.books.sessions import SessionStore
from splitproxy.config import Config
from splitproxy.engines.adapter import Engine
from splitproxy.errors import LaunchError
from splitproxy.measure.load import Caller, client_session, closed_loop, open_loop
from splitproxy.measure.measures import Limits, Sample, Summary, summarize
from splitproxy.measure.mixes import WORDS, plan
from splitproxy.model import PairState, Policy, Role
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled

UNSPLIT, SPLIT = "unsplit", "split"
LISTEN = "127.0.0.1:0"
KEEP_ALIVE_S = 3600.0  # the headers, which tell how a prompt was read, wait for the answer, however long that takes


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. With `clients` each of them waits for its answers; else prompts arrive at `rate_rps`."""

    mix: str
    requests: int
    rate_rps: float
    clients: int
    rounds: int
    scale: float
    seed: int
    limits: Limits

    @property
    def title(self) -> str:
        """The load in a few words."""
        pace = f"{self.clients} clients" if self.clients else f"{self.rate_rps:g} requests/s"
        limits = f"first token under {self.limits.first_token_s:g} s, p99 gap under {self.limits.gap_s * 1000:.0f} ms"
        return f"{self.mix}, {pace}, {self.rounds} x {self.requests} requests, {limits}"


Told = Callable[[str, int, int], None]
"""Told after each answer: the arm, how many answers there are, how many there will be."""


@dataclass(slots=True)
class Bench:
    """A proxy in front of the user's engines, and what was measured through it."""

    proxy: Proxy
    caller: Caller
    load: Load
    tell: Told
    samples: dict[str, list[list[Sample]]] = field(default_factory=lambda: {UNSPLIT: [], SPLIT: []})
    _done: int = 0
    # Engines may remember what an earlier bench has sent.
    _first_run: int = field(default_factory=lambda: 2 * random.randrange(10**5))  # noqa: S311 - no secret

    async def run(self, policy: Policy) -> None:
        """All rounds; each begins with the arm that came last in the one before."""
        for number in range(self.load.rounds):
            arms = ((UNSPLIT, Policy.NEVER), (SPLIT, policy))
            for place, (arm, chosen) in enumerate(arms if number % 2 == 0 else arms[::-1]):
                self._use(chosen)
                await self._round(arm, 2 * number + place)

    def _use(self, policy: Policy) -> None:
        exchange = self.proxy.exchange
        rules = replace(exchange.settings.rules, policy=policy)
        self.proxy.exchange = replace(exchange, settings=replace(exchange.settings, rules=rules))

    async def _round(self, arm: str, run: int) -> None:
        load = self.load
        number = self._first_run + run
        prompts = plan(load.mix, load.requests, load.rate_rps, load.seed + run // 2, scale=load.scale, run=number)

        def told(_sample: Sample) -> None:
            self._done += 1
            self.tell(arm, self._done, 2 * load.rounds * load.requests)

        self.samples[arm].append([])
        if load.clients:
            self.samples[arm][-1] += await closed_loop(self.caller, prompts, load.clients, told)
        else:
            self.samples[arm][-1] += await open_loop([self.caller], prompts, told)

    def summaries(self) -> dict[str, Summary]:
        """Each arm over all its rounds, as if they had followed each other."""
        return {arm: summarize(_joined(rounds), self._limits(rounds)) for arm, rounds in self.samples.items()}

    def _limits(self, rounds: Sequence[Sequence[Sample]]) -> Mapping[str, Limits]:
        return {sample.kind: self.load.limits for samples in rounds for sample in samples}


def _joined(rounds: Sequence[Sequence[Sample]]) -> list[Sample]:
    joined, start_s = list[Sample](), 0.0
    for samples in rounds:
        joined += [replace(sample, started_s=start_s + sample.started_s) for sample in samples]
        start_s = max((sample.started_s + sample.total_s for sample in joined), default=0.0)
    return joined


@asynccontextmanager
async def benching(config: Config, store: SessionStore, load: Load, tell: Told) -> AsyncIterator[Bench]:
    """The proxy after its self-test, with a client in front of it. Raises LaunchError where nothing can be compared."""
    config = config.model_copy(
        update={
            "listen": LISTEN,
            "keep_alive_s": KEEP_ALIVE_S,
            "queue": config.queue.model_copy(update={"max": max(config.queue.max, load.requests)}),
        }
    )
    async with assembled(config, store) as proxy, listening(proxy) as url, client_session() as http:
        await proxy.fleet.first_verdicts()
        faults = [f"{source} -> {target}: {pair.fault}" for (source, target), pair in proxy.fleet.pairs.items()]
        if not any(pair.state is PairState.PROVEN for pair in proxy.fleet.pairs.values()):
            raise LaunchError(f"no pair can hand over ({'; '.join(faults)}); splitproxy check shows why")
        engine = proxy.fleet.engine(proxy.ledger.ready(Role.DECODE)[0])
        key = config.api_keys[0] if config.api_keys else ""
        yield Bench(proxy, Caller(url, http, await words_per_token(engine), key), load, tell)


async def words_per_token(engine: Engine) -> float:
    """How many of the mixes' words an engine's token is."""
    sample = WORDS * 10
    return len(sample) / max(len(await engine.tokenize(" ".join(sample))), 1)
