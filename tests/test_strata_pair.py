"""A prefill engine of our own in front of a Strata server: a whole request's way, and what every fault of the pipe
comes to for the client."""

import base64
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from splitproxy.engines import strata_lines, strata_process
from splitproxy.model import EngineState, Role
from tests.fake_model import SPECIAL_IDS
from tests.fake_strata_server import FakeStrata
from tests.harness import CHAT, FLOOR, MESSAGES, RESPONSES, Running, body, prompt_ids, proxy, right_text, until, words

KINDS = ("strata",)
Start = Callable[..., Awaitable[FakeStrata]]
ROOT = Path(__file__).parent.parent
LONG = words(3 * FLOOR, "long")
CONTEXT = 32768


class Rig:
    """The program that stands for the engine, its switches, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exe, self.ranks = folder / "strata", folder / "bytes.tiktoken"
        self.exe.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fake_strata "$@"\n')
        self.exe.chmod(0o700)
        lines = (f"{base64.b64encode(bytes([n])).decode()} {n}" for n in range(256))
        self.ranks.write_text("\n".join(lines) + "\n")

    def knobs(self, **switches: Any) -> None:
        path = self.folder / "knobs.json"
        path.with_suffix(".new").write_text(json.dumps(switches))
        path.with_suffix(".new").rename(path)

    def journal(self) -> list[str]:
        return (self.folder / "journal").read_text().splitlines()

    @asynccontextmanager
    async def proxy(self, writer: FakeStrata, *args: object, **changes: Any) -> AsyncIterator[Running]:
        files = ("--knobs", str(self.folder / "knobs.json"), "--journal", str(self.folder / "journal"))
        given = ("--max-context", CONTEXT, "--session-min-free-mib", 0, "--prefill", 400, *files, *args)
        engines = [
            {"name": "reader", "role": "prefill", "kind": "strata", "process": {"exe": str(self.exe), "args": given}},
            {"name": "writer", "role": "decode", "kind": "strata", "url": writer.url},
        ]
        tokenizer = {"source": str(self.ranks), "pattern": "qwen2", "special_tokens": SPECIAL_IDS}
        async with proxy(None, writer, judged=False, engines=engines, tokenizer=tokenizer, **changes) as p:
            await until(lambda: p.proxy.tokenizer.verdict("writer").local, 20)
            yield p


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(strata_process, "ASK_S", 0.3)
    monkeypatch.setattr(strata_lines, "SLOWEST_TOKENS_PER_S", 1e6)
    monkeypatch.setattr(strata_process, "RESTART_S", 0.5)
    return Rig(tmp_path)


@pytest.mark.parametrize("knows", [True, False], ids=["prefill=1", "one token"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_prompt_is_read_over_the_pipe(rig: Rig, fake: Start, path: str, knows: bool) -> None:
    """S9, S10: ids made here are read by the process, and the server answers the client's own body from its session."""
    rig.knobs(knows_prefill=knows)
    writer = await fake()
    async with rig.proxy(writer) as p:
        await p.proven()
        asked = body(path, LONG, stream=True)
        reply = await p.ask(path, asked)
        record = await p.record(reply)
        assert (reply.status, reply.way, reply.text) == (200, ("handover", "worth_moving"), right_text(asked))
        assert (record.path, record.effective) == ("handover", True)
        assert writer.sent("decode")[-1].read == 1  # the process leaves one token, as a request would
        count = len(prompt_ids(asked))
        told = f"GEN 0 prefill=1 <{count} ids>" if knows else f"GEN 1 <{count - 1} ids>"
        assert rig.journal()[-2:] == [told, "SAVE"]
        assert p.files() == []


async def test_progress_is_that_of_the_engine_at_work(rig: Rig, fake: Start) -> None:
    """S18: a client that asks for it hears how far the process has read."""
    rig.knobs(knows_prefill=True, chunk_s=0.02)
    writer = await fake()
    async with rig.proxy(writer) as p:
        await p.proven()
        reply = await p.ask(CHAT, body(CHAT, LONG, stream=True, return_progress=True))
        told = [event["prompt_progress"]["processed"] for event in reply.events if "prompt_progress" in event]
    assert told == sorted(told)
    assert len(set(told)) >= 3


@pytest.mark.parametrize(
    ("switches", "fallback"),
    [
        ({"dies_after": 600}, "prefill:died"),
        ({"error_after": 600}, "prefill:died"),
        ({"strange_line": "SAVED 1 2 3.0"}, "prefill:corrupt"),
        ({"save_error": "storage"}, "save:refused"),
        ({"save_error": "io", "published": True}, "save:refused"),
        ({"nan_ms": True}, "save:corrupt"),
        ({"session_backwards": True}, "save:corrupt"),
        ({"dies_in_save": True}, "save:died"),
        ({"wrong_count": 1}, "save:corrupt"),
        ({"truncate_bytes": 1}, "check:corrupt"),
    ],
    ids=str,
)
async def test_whatever_the_process_does_the_answer_is_right(
    rig: Rig, fake: Start, switches: dict[str, Any], fallback: str
) -> None:
    """S12, S20: the server reads the prompt itself, no file is left, and a process that ended is started again."""
    writer = await fake()
    async with rig.proxy(writer) as p:
        await p.proven()
        rig.knobs(**switches)
        reply = await p.ask(CHAT, body(CHAT, LONG))
        assert (reply.status, reply.text) == (200, right_text(body(CHAT, LONG)))
        assert reply.headers["X-Splitproxy-Fallback"] == fallback
        assert p.files() == []
        rig.knobs()
        await until(lambda: p.pair()[0].value == "proven" and p.state("reader") is EngineState.READY)
        assert (await p.ask(CHAT, body(CHAT, words(3 * FLOOR, "after")))).way == ("handover", "worth_moving")


async def test_a_prefill_engine_that_does_not_start_is_tolerated(rig: Rig, fake: Start) -> None:
    """S19, S21: the server serves alone, the health page says so, and the status names the process."""
    rig.knobs(dies_at_start=True)
    writer = await fake()
    async with rig.proxy(writer) as p:
        reply = await p.ask(CHAT, body(CHAT, LONG))
        assert (reply.text, reply.way) == (right_text(body(CHAT, LONG)), ("local", "prefill_down"))
        health = (await p.get("/health")).json
        assert (health["status"], health["engines"]["writer"]) == ("ok", "ready")
        assert health["engines"]["reader"] != "ready"
        (reader, _) = (await p.get("/splitproxy/status")).json["engines"]
        assert (reader["kind"], reader["url"], reader["role"]) == ("strata", str(rig.exe), Role.PREFILL)


async def test_the_usable_context_is_the_smaller_one(rig: Rig, fake: Start) -> None:
    """S19: engines of different context make no Strata pair, and the status shows what can be used."""
    rig.knobs()
    writer = await fake(context=16384)
    async with rig.proxy(writer) as p:
        await until(lambda: "session differs" in p.pair()[1])
        assert (await p.get("/splitproxy/status")).json["usable_context"] == 16384 - 9


async def test_room_that_the_engine_wants_to_stay_free_is_left(rig: Rig, fake: Start) -> None:
    """S4: a prompt is not read where the engine would not save it, for want of what has to stay free beside it."""
    rig.knobs()
    writer = await fake()
    async with rig.proxy(writer, "--set", "spare_mib=1000000000", "--session-min-free-mib", 100_000_000) as p:
        await p.proven()
        reply = await p.ask(CHAT, body(CHAT, LONG))
        assert (reply.way, reply.text) == (("local", "no_room"), right_text(body(CHAT, LONG)))


async def test_the_process_ends_with_the_proxy(rig: Rig, fake: Start) -> None:
    """S22: nothing runs on, and no session folder holds a file, when the proxy has stopped."""
    rig.knobs()
    writer = await fake()
    async with rig.proxy(writer) as p:
        await p.proven()
        engine: Any = p.proxy.fleet.prefill_engine("reader")
        process = engine._pipe._process
    assert process.returncode is not None
    assert writer.slot_dir is not None
    assert list(writer.slot_dir.iterdir()) == []


async def test_the_figures_reach_the_metrics(rig: Rig, fake: Start) -> None:
    """S17, S23: requests, handovers, bytes and the engines' own times are counted as for any other kind."""
    rig.knobs(chunk_s=0.02)
    writer = await fake()
    async with rig.proxy(writer) as p:
        await p.proven()
        reply = await p.ask(CHAT, body(CHAT, LONG))
        record = await p.record(reply)
        assert record.handover is not None
        assert record.handover.prefill_ms >= 40
        assert record.handover.session_bytes > 1000
        told = (await p.get("/metrics")).content.decode()
    assert 'splitproxy_handoffs_total{result="proven"} 1.0' in told
