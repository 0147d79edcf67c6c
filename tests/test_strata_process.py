"""A Strata engine of our own: what it is told over its pipe, and that every fault there ends in a clear error, with no
file left and no pipe out of step."""

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from splitproxy.books.sessions import SessionStore
from splitproxy.config import Process
from splitproxy.engines import strata_lines, strata_pipe, strata_process
from splitproxy.engines.adapter import Deadlines
from splitproxy.engines.strata_process import StrataProcess, command
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Api, Ask, EngineState, Estimate, Prompt, Ticket, Tokens
from tests.fake_strata_model import fit
from tests.harness import until

ROOT = Path(__file__).parent.parent
DEADLINES = Deadlines(prefill_silence_s=10, transfer_timeout_s=10, decode_silence_s=10)
IDS = [72 + n % 40 for n in range(1000)]
CONTEXT = 4096


def prompt_of(ids: list[int]) -> Prompt:
    return Prompt(Tokens(ids), Ask(Api.CHAT, "/v1/chat/completions", b"{}"))


PROMPT = prompt_of(IDS)


class Rig:
    """Fake engines on a pipe, started by adapters, with their switches and what they were told."""

    def __init__(self, folder: Path, store: SessionStore) -> None:
        self.folder, self.store = folder, store
        self.exe = folder / "strata"
        self.exe.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fake_strata "$@"\n')
        self.exe.chmod(0o700)
        self.made: list[StrataProcess] = []
        self.told: list[tuple[Step, int, int]] = []

    def knobs(self, **switches: Any) -> None:
        """Switches, from the next command on."""
        path = self.folder / "knobs.json"
        path.with_suffix(".new").write_text(json.dumps(switches))
        path.with_suffix(".new").rename(path)

    def engine(self, *args: object, silence_s: float = 10.0, **switches: Any) -> StrataProcess:
        self.knobs(**switches)
        files = ("--knobs", str(self.folder / "knobs.json"), "--journal", str(self.folder / "journal"))
        given = ("--max-context", CONTEXT, "--session-min-free-mib", 0, "--prefill", 100, *files, *args)
        process = Process.model_validate(
            {"exe": str(self.exe), "args": given, "log": str(self.folder / "logs" / "x.log")}
        )
        made = StrataProcess("reader", process, self.store, silence_s=silence_s)
        self.made.append(made)
        return made

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def read(self, engine: StrataProcess, prompt: Prompt = PROMPT) -> Awaitable[Ticket]:
        return engine.prefill(prompt, 0, DEADLINES, lambda *told: self.told.append(told))

    def files(self) -> list[str]:
        return [path.name for path in self.store.folder.iterdir()]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    with SessionStore(tmp_path / "sessions") as opened:
        yield opened


@pytest.fixture
async def rig(tmp_path: Path, store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(strata_process, "ASK_S", 0.3)
    monkeypatch.setattr(strata_lines, "SLOWEST_TOKENS_PER_S", 1e6)
    made = Rig(tmp_path, store)
    yield made
    for engine in made.made:
        await engine.close()


async def failure(work: Awaitable[object]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await work
    return caught.value


async def alive(engine: StrataProcess) -> bool:
    return await engine.health() is EngineState.READY


# ---- what it is told ----


async def test_a_prompt_is_read_up_to_its_last_token(rig: Rig) -> None:
    """S9: an engine that can reads all but the last token and writes none; the session ends where an answer begins."""
    engine = rig.engine(knows_prefill=True)
    ticket = await rig.read(engine)
    assert rig.journal()[-2:] == ["GEN 0 prefill=1 <1000 ids>", "SAVE"]
    assert (ticket.tokens, ticket.proof_tokens, ticket.cached_tokens) == (999, 999, 0)
    path = rig.store.folder / ticket.handle
    assert fit(1, CONTEXT, "int8", "0.1.30-fake").unpack(path.read_bytes(), CONTEXT).ids == IDS[:-1]
    assert ticket.session_bytes == path.stat().st_size
    assert rig.told[0] == (Step.PREFILL, 0, 1000)
    assert rig.told[-2:] == [(Step.PREFILL, 999, 1000), (Step.SAVE, 999, 999)]
    await engine.discard(ticket)
    assert rig.files() == []


async def test_an_engine_that_cannot_is_told_another_way(rig: Rig) -> None:
    """One token on all but the last id leaves the same session."""
    engine = rig.engine()
    ticket = await rig.read(engine)
    assert rig.journal()[-2:] == ["GEN 1 <999 ids>", "SAVE"]
    raw = (rig.store.folder / ticket.handle).read_bytes()
    assert fit(1, CONTEXT, "int8", "0.1.30-fake").unpack(raw, CONTEXT).ids == IDS[:-1]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
async def test_what_an_engine_knows_is_asked_without_losing_step(rig: Rig, knows: bool, keeps: bool) -> None:
    """A refusal that is printed late is not taken for the next answer."""
    engine = rig.engine(knows_prefill=knows, keeps_errors=keeps)
    for _ in range(2):
        ticket = await rig.read(engine)
        assert ticket.tokens == 999
    first = "GEN 0 prefill=1 <2 ids>"
    assert (
        rig.journal()[: 2 if keeps and not knows else 1] == [first, "GEN 1 <2 ids>"][: 2 if keeps and not knows else 1]
    )


async def test_a_stray_line_is_no_answer_to_what_is_asked(rig: Rig) -> None:
    """A warning that comes first does not end the wait for a refusal that the engine keeps to itself."""
    engine = rig.engine(keeps_errors=True, ready_line="WARN the card is warm")
    async with asyncio.timeout(8):
        assert (await rig.read(engine)).tokens == 999


async def test_an_unknown_finish_is_an_end(rig: Rig) -> None:
    """An engine may call the end of a reading without an answer as it likes."""
    ticket = await rig.read(rig.engine(knows_prefill=True, finish="prefill"))
    assert rig.journal()[-2:] == ["GEN 0 prefill=1 <1000 ids>", "SAVE"]
    assert ticket.tokens == 999


async def test_a_verifier_that_fails_on_the_first_prompt_ends_the_engine(rig: Rig) -> None:
    """A DONE may follow such an error: it must not be taken for the next answer."""
    engine = rig.engine(knows_prefill=True, first_line="ERR verify: timed out at layer 3")
    assert "verify: timed out" in str(await failure(engine.identify()))
    assert await engine.health() is EngineState.DOWN


async def test_what_it_read_before_is_not_read_again(rig: Rig) -> None:
    """A prompt that goes on from the one before costs what is new, and the ticket says so."""
    engine = rig.engine(knows_prefill=True)
    await rig.read(engine)
    ticket = await rig.read(engine, prompt_of([*IDS, *IDS[:200]]))
    assert (ticket.tokens, ticket.cached_tokens) == (1199, 999)


@pytest.mark.parametrize("fields", [5, 8, 10, 13, 14, 15, 20])
async def test_older_engines_tell_less_at_the_end(rig: Rig, fields: int) -> None:
    """However many figures come, the prompt was read."""
    assert (await rig.read(rig.engine(done_fields=fields))).tokens == 999


async def test_an_engine_tells_what_it_is(rig: Rig) -> None:
    """Version and usable context come from its first lines; what it does not tell cannot differ."""
    engine = rig.engine(start_lines="loading\n42 of 99 layers", chatter=True)
    identity = await engine.identify()
    assert (identity.build, identity.context, identity.slots) == ("0.1.30-fake", CONTEXT - 9, 1)
    assert (identity.model, identity.template, identity.session) == (None, None, f"context {CONTEXT}")
    assert (await rig.read(engine)).tokens == 999
    assert (await engine.slots())[0].busy is False


async def test_a_session_file_is_its_owners_alone(rig: Rig) -> None:
    """Session files and logs hold what people wrote."""
    ticket = await rig.read(rig.engine())
    assert stat.S_IMODE((rig.store.folder / ticket.handle).stat().st_mode) == 0o600
    assert stat.S_IMODE((rig.folder / "logs" / "x.log").stat().st_mode) == 0o600


# ---- every fault ----

FAULTS: list[tuple[dict[str, Any], Step, Cause, str, bool]] = [
    # switches, step, cause, what is said, whether the engine goes on
    ({"dies_after": 300}, Step.PREFILL, Cause.DIED, "exit code 1", False),
    ({"error_after": 300}, Step.PREFILL, Cause.DIED, "verify: timed out", False),
    ({"silent": True}, Step.PREFILL, Cause.TIMEOUT, "said nothing", False),
    ({"silent_after": 300}, Step.PREFILL, Cause.TIMEOUT, "said nothing", False),
    ({"strange_line": "SAVED 1 2 3.0"}, Step.PREFILL, Cause.CORRUPT, "out of step", False),
    ({"strange_line": "PP x"}, Step.PREFILL, Cause.CORRUPT, "out of step", False),
    ({"strange_line": "x" * 2_000_000}, Step.PREFILL, Cause.CORRUPT, "without end", False),
    ({"wrong_prompt": 1}, Step.PREFILL, Cause.CORRUPT, "tokens were read instead of", False),
    ({"one_done_more": True}, Step.PREFILL, Cause.CORRUPT, "tokens were read instead of", False),
    ({"first_line": "ERR verify: an earlier window never finished"}, Step.PREFILL, Cause.DIED, "never finished", False),
    ({"first_line": "ERR verify batch: no end"}, Step.PREFILL, Cause.DIED, "verify batch", False),
    ({"save_error": "storage"}, Step.SAVE, Cause.REFUSED, "storage: on purpose", True),
    ({"save_error": "invalid"}, Step.SAVE, Cause.REFUSED, "invalid: on purpose", True),
    ({"save_error": "memory"}, Step.SAVE, Cause.REFUSED, "memory: on purpose", True),
    ({"save_error": "io"}, Step.SAVE, Cause.REFUSED, "io: on purpose", True),
    ({"save_error": "io", "published": True}, Step.SAVE, Cause.REFUSED, "though the file is in place", True),
    ({"save_line": "T 5"}, Step.SAVE, Cause.CORRUPT, "out of step", False),
    ({"save_line": "an unknown line"}, Step.SAVE, Cause.CORRUPT, "out of step", False),
    ({"save_line": "FATAL the card is gone"}, Step.SAVE, Cause.DIED, "the card is gone", False),
    ({"save_line": "ERR no"}, Step.SAVE, Cause.DIED, "no", False),
    ({"session_backwards": True}, Step.SAVE, Cause.CORRUPT, "out of step", False),
    ({"nan_ms": True}, Step.SAVE, Cause.CORRUPT, "out of step", False),
    ({"dies_in_save": True}, Step.SAVE, Cause.DIED, "exit code 1", False),
    ({"wrong_count": 1}, Step.SAVE, Cause.CORRUPT, "998 tokens were saved instead of 999", False),
    ({"truncate_bytes": 1}, Step.CHECK, Cause.CORRUPT, "does not fit into", True),
    ({"truncate_bytes": 10**6}, Step.CHECK, Cause.CORRUPT, "cut off after 0 bytes", True),
]


@pytest.mark.parametrize(
    ("switches", "step", "cause", "said", "goes_on"), FAULTS, ids=[str(row[0])[:60] for row in FAULTS]
)
async def test_every_fault_ends_in_a_clear_error(
    rig: Rig, switches: dict[str, Any], step: Step, cause: Cause, said: str, goes_on: bool
) -> None:
    """S12: whatever the engine does, the error says what, no file is left, and a pipe that is out of step is closed."""
    engine = rig.engine(silence_s=0.5)
    await engine.identify()
    rig.knobs(**switches)
    error = await failure(rig.read(engine))
    assert (error.step, error.cause) == (step, cause)
    assert said in str(error)
    assert rig.files() == []
    await until(lambda: not engine._turn.locked())
    assert await alive(engine) is goes_on
    if goes_on:
        rig.knobs()
        assert (await rig.read(engine)).tokens == 999


async def test_a_step_that_never_ends_is_ended(rig: Rig) -> None:
    """A save may be silent as long as the engine says, and never longer than its deadline."""
    engine = rig.engine(save_silent=True)
    deadlines = Deadlines(10, transfer_timeout_s=0.4, decode_silence_s=10)
    error = await failure(engine.prefill(PROMPT, 0, deadlines, lambda *_: None))
    assert (error.step, error.cause, await alive(engine)) == (Step.SAVE, Cause.TIMEOUT, False)
    assert rig.files() == []


async def test_a_refused_prompt_is_the_requests_own(rig: Rig) -> None:
    """A prompt that is too long, or of no known ids, is refused, and the engine goes on; its ids are not repeated."""
    engine = rig.engine()
    for ids in ([65] * 5000, [10**6] * 30):
        error = await failure(rig.read(engine, prompt_of(ids)))
        assert (error.step, error.cause) == (Step.PREFILL, Cause.REFUSED)
        assert "65,65" not in str(error)
    assert (await rig.read(engine)).tokens == 999


@pytest.mark.parametrize("knows", [True, False])
async def test_a_prompt_that_does_not_fit_is_not_sent(rig: Rig, knows: bool) -> None:
    """An engine keeps 8 tokens of its context, and may keep its refusal to itself, too."""
    engine = rig.engine(knows_prefill=knows, keeps_errors=True)
    longest = (await engine.identify()).context
    asked = len(rig.journal())
    error = await failure(rig.read(engine, prompt_of([65] * (longest + 1))))
    assert (error.step, error.cause, f"takes {longest}" in str(error)) == (Step.PREFILL, Cause.REFUSED, True)
    assert len(rig.journal()) == asked
    assert (await rig.read(engine, prompt_of([65] * longest))).tokens == longest - 1


async def test_guesses_are_no_ids(rig: Rig) -> None:
    """What only stands for ids is not sent to an engine that would read it."""
    engine = rig.engine()
    guessed = Prompt(Estimate(IDS), PROMPT.ask)
    error = await failure(rig.read(engine, guessed))
    assert (error.cause, "tokenizer.source" in str(error)) == (Cause.REFUSED, True)
    assert not any(line.startswith("GEN") and "1000" in line for line in rig.journal())


async def test_too_little_space_is_said_so(rig: Rig) -> None:
    """The engine wants space beside the file; its refusal names it, and the advice the flag."""
    engine = rig.engine("--session-min-free-mib", 4096, spare_mib=100)
    error = await failure(rig.read(engine))
    assert "storage: 4096 MiB must stay free" in str(error)
    assert any("--session-min-free-mib" in text for text in engine.advice(error))
    assert engine.spare_bytes == 4096 * 2**20


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("step", Step)
async def test_there_is_advice_for_every_failure(rig: Rig, step: Step, cause: Cause) -> None:
    """No failure leaves its reader without a next step."""
    assert all(text.endswith((".", "?")) for text in rig.engine().advice(EngineError(step, cause, "x")))


# ---- cancelled ----


async def leave(task: "asyncio.Task[Any]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_leaves_stops_the_reading(rig: Rig) -> None:
    """S14: the engine is told to stop, stays busy until it has, and takes the next prompt in step."""
    engine = rig.engine(chunk_s=0.05)
    await engine.identify()
    task = asyncio.ensure_future(rig.read(engine))
    await until(lambda: any(done > 200 for step, done, _ in rig.told if step is Step.PREFILL))
    await leave(task)
    assert (await engine.slots())[0].busy
    await until(lambda: not engine._turn.locked())
    assert rig.journal()[-1] == "STOP"
    rig.knobs()
    ticket = await rig.read(engine, prompt_of(IDS[::-1]))
    assert (ticket.tokens, rig.files()) == (999, [ticket.handle])


async def test_who_leaves_before_the_reading_begins_stops_it_too(rig: Rig) -> None:
    """The engine forgets a stop that comes before it has begun: it is told again."""
    engine = rig.engine(chunk_s=0.05)
    await engine.identify()
    rig.knobs(chunk_s=0.05, starts_late_s=0.3)
    task = asyncio.ensure_future(rig.read(engine))
    await until(engine._turn.locked)
    await asyncio.sleep(0)  # the reading begins
    await leave(task)
    await until(lambda: not engine._turn.locked())
    assert rig.journal().count("STOP") > 1
    assert max(done for _, done, _ in rig.told) < 900
    assert await alive(engine)


async def test_who_leaves_while_waiting_is_not_read(rig: Rig) -> None:
    """A prompt that nobody waits for any more when its turn comes is not sent."""
    engine = rig.engine(late_stop=True, chunk_s=0.03)
    await engine.identify()
    first = asyncio.ensure_future(rig.read(engine))
    await until(lambda: len(rig.told) > 3)
    await leave(first)
    second = asyncio.ensure_future(rig.read(engine, prompt_of(IDS[:700])))
    await until(engine._session.locked)
    assert engine._turn.locked()
    await leave(second)
    await until(lambda: not engine._turn.locked())
    assert (await rig.read(engine, prompt_of(IDS[::-1]))).tokens == 999
    assert not any("<699 ids>" in line for line in rig.journal())


async def test_a_stop_that_comes_too_late_is_no_harm(rig: Rig) -> None:
    """A stop that finds the engine idle stops nothing that comes after it."""
    engine = rig.engine(late_stop=True, chunk_s=0.02)
    await engine.identify()
    task = asyncio.ensure_future(rig.read(engine))
    await until(lambda: len(rig.told) > 3)
    await leave(task)
    await until(lambda: not engine._turn.locked())
    rig.knobs()
    assert (await rig.read(engine)).tokens == 999


async def test_an_engine_that_cannot_stop_is_ended(rig: Rig) -> None:
    """Older engines read on for nobody: they are started again instead."""
    engine = rig.engine(stops=False, chunk_s=0.05)
    await engine.identify()
    task = asyncio.ensure_future(rig.read(engine))
    await until(lambda: len(rig.told) > 3)
    await leave(task)
    await until(lambda: not engine._turn.locked())
    assert not await alive(engine)


async def test_an_engine_that_does_not_stop_is_ended(rig: Rig) -> None:
    """What was told to stop has as long as for any other line."""
    engine = rig.engine(silence_s=0.3)
    await engine.identify()
    rig.knobs(silent=True)
    task = asyncio.ensure_future(rig.read(engine))
    await until(engine._turn.locked)
    await leave(task)
    await until(lambda: not engine._turn.locked())
    assert not await alive(engine)


async def test_a_save_runs_to_its_end_and_its_file_goes(rig: Rig) -> None:
    """An engine cannot take a save back; nobody waits for its file."""
    engine = rig.engine(save_s=0.3)
    await engine.identify()
    task = asyncio.ensure_future(rig.read(engine))
    await until(lambda: rig.told and rig.told[-1][0] is Step.SAVE)
    await leave(task)
    assert rig.files() == []
    rig.knobs()
    assert (await rig.read(engine)).tokens == 999


async def test_prompts_take_turns(rig: Rig) -> None:
    """One pipe has one conversation at a time: who comes second is read second."""
    engine = rig.engine(chunk_s=0.01)
    await engine.identify()
    tickets = await asyncio.gather(*(rig.read(engine, prompt_of([65 + n] * 500)) for n in range(3)))
    assert [ticket.tokens for ticket in tickets] == [499] * 3
    for number, ticket in enumerate(tickets):
        raw = (rig.store.folder / ticket.handle).read_bytes()
        assert fit(1, CONTEXT, "int8", "0.1.30-fake").unpack(raw, CONTEXT).ids == [65 + number] * 499


# ---- life ----


async def test_an_engine_that_ends_is_started_again_at_its_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """S20: a dead engine is started again in the background, and not more often than once a minute."""
    engine = rig.engine()
    await engine.identify()
    engine.abort()
    await until(lambda: engine._pipe is not None and not engine._pipe.alive)
    assert await engine.health() is EngineState.DOWN
    assert (await failure(rig.read(engine))).cause is Cause.DIED
    monkeypatch.setattr(strata_process, "RESTART_S", 0.0)
    assert await engine.health() is EngineState.LOADING
    assert (await rig.read(engine)).tokens == 999
    assert await engine.health() is EngineState.READY


@pytest.mark.parametrize(
    ("switches", "said"), [({"dies_at_start": True}, "exit code 1"), ({"never_ready": True}, "was not ready after")]
)
async def test_an_engine_that_does_not_start_is_tolerated(
    rig: Rig, switches: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S21: the log says why, once, and nothing is left running."""
    monkeypatch.setattr(strata_process, "READY_S", 1.0)
    engine = rig.engine(**switches)
    assert await engine.health() is EngineState.LOADING
    error = await failure(engine.identify())
    assert (error.cause, said in str(error)) == (Cause.DIED, True)
    assert await engine.health() is EngineState.DOWN
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_a_program_that_is_not_there_is_named(rig: Rig) -> None:
    """What cannot be run is said so, and where to look."""
    rig.exe.unlink()
    assert "ended (exit code" in str(await failure(rig.engine().identify()))
    assert "cannot be run" in (rig.folder / "logs" / "x.log").read_text()


async def test_closing_ends_the_process(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """S22: an engine is asked to leave; one that does not is ended, and one that is starting is, too."""
    monkeypatch.setattr(strata_pipe, "GRACE_S", 0.3)
    idle, busy, starting = rig.engine(), rig.engine(), rig.engine()
    await asyncio.gather(idle.identify(), busy.identify())
    rig.knobs(silent=True)
    task = asyncio.ensure_future(rig.read(busy))
    await until(busy._turn.locked)
    await starting.health()
    async with asyncio.timeout(10):
        await asyncio.gather(idle.close(), busy.close(), starting.close())
    await asyncio.wait([task])
    assert not any(engine._pipe is not None and engine._pipe.alive for engine in (idle, busy, starting))


# ---- how it is started ----


def test_the_card_is_chosen_by_environment() -> None:
    """Cards are numbered as nvidia-smi does; what the configuration says of the environment wins."""
    env = {"PATH": "/bin", "LD_LIBRARY_PATH": "/old", "SPLITPROXY_API_KEYS": "secret"}
    made = command(Process(exe="strata", args=("--kv", "int8"), gpu=1, lib_dirs=("/a", "/b"), env={"X": "1"}), env)
    assert list(made.argv) == ["strata", "--serve", "--kv", "int8"]
    assert made.env == {
        "PATH": "/bin",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1",
        "LD_LIBRARY_PATH": os.pathsep.join(("/a", "/b", "/old")),
        "X": "1",
    }
    hip = command(Process(exe="strata", gpu=0, backend="hip", env={"HIP_VISIBLE_DEVICES": "2"}), {})
    assert hip.env == {"HIP_VISIBLE_DEVICES": "2"}
    assert command(Process(exe="strata"), {}).env == {}
