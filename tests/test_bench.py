"""A load on fake engines, split and unsplit in turns."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from splitproxy.books.sessions import SessionStore
from splitproxy.errors import LaunchError
from splitproxy.measure.bench import SPLIT, UNSPLIT, Bench, Load, benching
from splitproxy.measure.load import Caller, client_session, closed_loop
from splitproxy.measure.measures import Limits
from splitproxy.measure.mixes import Prompt, plan
from splitproxy.model import Policy
from tests.fake_engine import FakeEngine
from tests.harness import configured

Start = Callable[..., Awaitable[FakeEngine]]

LOAD = Load("documents", 8, 100.0, 0, 2, 0.3, 1, Limits(5.0, 1.0))


async def measured(fake: Start, folder: Path, load: Load, policy: Policy = Policy.THRESHOLD) -> Bench:
    reader, writer = await fake(), await fake(slots=4, context=1 << 17)
    config = configured(reader.url, writer.url, folder, {})
    with SessionStore(folder) as store:
        async with benching(config, store, load, lambda _arm, _done, _total: None) as bench:
            await bench.run(policy)
    assert reader.violations == writer.violations == []
    return bench


@pytest.mark.parametrize("load", [LOAD, replace(LOAD, clients=3)], ids=["arrivals", "clients"])
async def test_both_arms_get_the_same_load(fake: Start, session_dir: Path, load: Load) -> None:
    """Every prompt is answered in both arms; only the split one hands over."""
    bench = await measured(fake, session_dir, load)
    arms = bench.summaries()
    assert list(arms) == [UNSPLIT, SPLIT]
    assert {(one.requests, one.failed, one.good) for one in arms.values()} == {(16, 0, 16)}
    long = sum(prompt.kind == "document" for run in (0, 1) for prompt in plan("documents", 8, 1.0, 1 + run))
    assert (arms[UNSPLIT].handed_over, arms[SPLIT].handed_over) == (0, long)
    assert all(one.first_token_s[50] > 0 for one in arms.values())


async def test_progress_is_told(fake: Start, session_dir: Path) -> None:
    """After each answer it is told how many there are of how many."""
    reader, writer = await fake(), await fake(slots=4, context=1 << 17)
    told: list[tuple[str, int, int]] = []
    with SessionStore(session_dir) as store:
        config = configured(reader.url, writer.url, session_dir, {})
        async with benching(config, store, LOAD, lambda *figures: told.append(figures)) as bench:
            await bench.run(Policy.AUTO)
    assert [done for _, done, _ in told] == list(range(1, 33))
    assert [arm for arm, _, _ in told] == [UNSPLIT] * 8 + [SPLIT] * 16 + [UNSPLIT] * 8


async def test_a_pair_that_cannot_hand_over_is_not_compared(fake: Start, session_dir: Path) -> None:
    """Where nothing could be split the bench says so instead of comparing one thing with itself."""
    reader, writer = await fake(), await fake()
    writer.knobs.restore.forgets = True
    with SessionStore(session_dir) as store:
        config = configured(reader.url, writer.url, session_dir, {})
        with pytest.raises(LaunchError, match="splitproxy check"):
            async with benching(config, store, LOAD, lambda *_: None):
                pass


async def test_what_fails_is_a_sample_too(fake: Start) -> None:
    """A server that refuses or goes away makes failed samples, never an exception."""
    engine = await fake()
    engine.knobs.decode.fail = (500, "no")
    async with client_session() as http:
        prompts = [Prompt("chat", 0.0, 20, 4, seed=number) for number in range(2)]
        refused = await closed_loop(Caller(engine.url, http, 0.5), prompts, 1, lambda _sample: None)
        engine.die()
        gone = await closed_loop(Caller(engine.url, http, 0.5), prompts, 1, lambda _sample: None)
    assert [(sample.failed, sample.status) for sample in (*refused, *gone)] == [(True, 500)] * 2 + [(True, 0)] * 2
