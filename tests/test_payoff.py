"""Whether it pays: the break-even length from a table, the ladder on fake engines, and a clean end at any time."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from splitproxy.books.sessions import SessionStore
from splitproxy.engines.adapter import Deadlines
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.errors import EngineError
from splitproxy.measure.payoff import PAYS_FACTOR, Ladder, Payoff, Rung, lengths
from tests.fake_engine import FakeEngine

Start = Callable[..., Awaitable[FakeEngine]]
DEADLINES = Deadlines(5, 5, 5)


def payoff(*rungs: tuple[int, float, float]) -> Payoff:
    return Payoff(tuple(Rung(tokens, local, moved, moved, 0, 0, 1) for tokens, local, moved in rungs))


@pytest.mark.parametrize(
    ("rungs", "break_even", "floor"),
    [
        ([], None, None),
        ([(128, 1.0, 2.0)], None, None),
        ([(128, 1.0, 2.0), (256, 2.0, 1.99)], None, None),  # noise
        ([(128, 2.0, 1.0)], 128, 192),
        ([(128, 2.0, 1.0), (256, 4.0, 2.0)], 128, 192),
        ([(100, 1.0, 1.5), (200, 2.0, 1.5)], 158, 256),
        ([(100, 3.0, 1.0), (200, 1.0, 2.0), (400, 8.0, 4.0)], 245, 320),  # the last crossing counts
        ([(100, 3.0, 1.0), (200, 4.0, 5.0)], None, None),
    ],
)
def test_the_break_even_length(
    rungs: list[tuple[int, float, float]], break_even: int | None, floor: int | None
) -> None:
    """It pays from the length on from which no longer prompt was better off alone; the floor leaves a margin."""
    found = payoff(*rungs)
    assert (found.break_even_tokens, found.recommended_min_prompt_tokens) == (break_even, floor)


def test_equal_engines_do_not_pay() -> None:
    """A difference within the noise is none."""
    assert not payoff((100, PAYS_FACTOR - 0.01, 1.0)).rungs[0].pays
    assert payoff((100, PAYS_FACTOR + 0.01, 1.0)).rungs[0].pays


@pytest.mark.parametrize(
    ("context", "up_to", "ladder"),
    [
        (8192, 1000, [128, 256, 512, 1000]),
        (1024, 8192, [128, 256, 512, 960]),
        (8192, 128, [128]),
        (8192, 100, []),
        (100, 8192, []),
    ],
)
def test_the_ladder_ends_where_the_engines_do(context: int, up_to: int, ladder: list[int]) -> None:
    """Lengths double up to the longest that was asked for and that fits."""
    assert lengths(context, up_to) == ladder


@asynccontextmanager
async def climbing(fake: Start, folder: Path) -> AsyncIterator[tuple[Ladder, FakeEngine, FakeEngine]]:
    reader, writer = await fake(), await fake(slots=2)
    with SessionStore(folder) as store:
        source, target = (LlamaServer(name, engine.url, "", store) for name, engine in (("r", reader), ("w", writer)))
        try:
            yield Ladder(source, target, 0, 0, DEADLINES), reader, writer
        finally:
            await source.close()
            await target.close()


def left_behind(folder: Path, *engines: FakeEngine) -> list[object]:
    files = [path.name for path in folder.iterdir() if path.suffix == ".session"]
    return [*files, *(slot.id for engine in engines for slot in engine.slots.all if slot.held.ids)]


async def test_a_faster_prefill_engine_pays(fake: Start, session_dir: Path) -> None:
    """The table shows both ways and what a handover is made of; a slow save moves the break-even length up."""
    async with climbing(fake, session_dir) as (ladder, reader, writer):
        reader.knobs.read_tps, writer.knobs.read_tps = 20000, 4000
        reader.knobs.save.delay_s = 0.08
        told: list[tuple[int, int]] = []
        ladder.tell = lambda _what, done, total: told.append((done, total))
        found = await ladder.climb([128, 512, 1500], 2)
        assert [rung.tokens for rung in found.rungs] == [128, 512, 1500]
        assert [rung.pays for rung in found.rungs] == [False, found.rungs[1].pays, True]
        assert found.break_even_tokens is not None
        assert 128 < found.break_even_tokens <= 1500
        assert told == [(number, 12) for number in range(12)]
        assert left_behind(session_dir, reader, writer) == []
        assert reader.violations == writer.violations == []


async def test_what_is_read_again_does_not_pay(fake: Start, session_dir: Path) -> None:
    """An engine that forgets longer sessions is found out by what it reused, however quick it is."""
    async with climbing(fake, session_dir) as (ladder, reader, writer):
        reader.knobs.read_tps, writer.knobs.read_tps = 0, 20000
        writer.knobs.restore.forgets, writer.knobs.restore.forgets_from = True, 400
        found = await ladder.climb([128, 512, 600], 2)
        assert [rung.reused for rung in found.rungs] == [True, False, False]
        assert found.read_again_tokens == 512


async def test_prompts_that_would_take_too_long_are_left_out(
    fake: Start, session_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ladder stops where the next length is expected to take unreasonably long."""
    monkeypatch.setattr("splitproxy.measure.payoff.SLOWEST_S", 1.0)
    async with climbing(fake, session_dir) as (ladder, reader, writer):
        reader.knobs.read_tps = writer.knobs.read_tps = 4000
        found = await ladder.climb([128, 256, 12000], 1)
        assert [rung.tokens for rung in found.rungs] == [128, 256]
        assert len(reader.sent("prefill")) == 2


@pytest.mark.parametrize("stage", ["prefill", "save", "restore", "decode"])
async def test_a_stop_leaves_the_engines_clean(
    fake: Start, session_dir: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in any step, both slots are empty afterwards, no session file is left, and what was measured is kept."""
    monkeypatch.setattr("splitproxy.measure.payoff.QUIET_LOOK_S", 0.02)
    async with climbing(fake, session_dir) as (ladder, reader, writer):
        busy = reader if stage in ("prefill", "save") else writer
        task = asyncio.create_task(ladder.climb([128, 256, 512], 1))
        await busy.until(lambda: len(ladder.rungs) == 1)
        busy.knobs.update({stage: {"delay_s": 0.2}})
        seen = len(busy.sent(stage))
        await busy.until(lambda: len(busy.sent(stage)) > seen)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert left_behind(session_dir, reader, writer) == []
        assert len(ladder.rungs) >= 1
        assert reader.violations == writer.violations == []


async def test_an_engine_that_fails_is_an_error(fake: Start, session_dir: Path) -> None:
    """A failing engine ends the measurement with its own error, and leaves nothing behind."""
    async with climbing(fake, session_dir) as (ladder, reader, writer):
        reader.knobs.save.fail = (500, "no")
        with pytest.raises(EngineError):
            await ladder.climb([128], 1)
        assert left_behind(session_dir, reader, writer) == []


async def test_every_pair_has_its_picture(fake: Start, session_dir: Path, tmp_path: Path) -> None:
    """`check --png` with several pairs writes a picture of each, and none over another."""
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the pictures, is not installed")
    reader, writers = await fake(), [await fake(slots=2) for _ in range(2)]
    named = [("r", "prefill", reader.url), *((f"w{n}", "decode", writer.url) for n, writer in enumerate(writers))]
    engines = "".join(f'[[engines]]\nname = "{name}"\nrole = "{role}"\nurl = "{url}"\n' for name, role, url in named)
    config = tmp_path / "pairs.toml"
    config.write_text(f'[split]\ndir = "{session_dir}"\n{engines}')
    options = ("--up-to", "256", "--rounds", "1", "--png", str(tmp_path / "pays.png"))
    command = (sys.executable, "-m", "splitproxy", "check", "-c", str(config), *options)
    checking = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT)
    output, _ = await checking.communicate()
    assert checking.returncode == 0, output.decode()
    assert {name for name in os.listdir(tmp_path) if name.endswith(".png")} == {"pays-r-w0.png", "pays-r-w1.png"}
