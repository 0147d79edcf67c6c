"""`splitproxy up --strata` as a user runs it, in a process of its own, with fake engines in the place of Strata's."""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.fake_model import SPECIAL_IDS, VOCABULARY
from tests.harness import CHAT, Json, body, words
from tests.live_pair import children, until
from tests.strata_bench import StrataBench
from tests.test_launch import is_alive
from tests.vocabularies import spelled, symbols_by_byte

WAIT_S = 60.0


@asynccontextmanager
async def splitproxy(*args: str) -> AsyncIterator[Process]:
    """A `splitproxy` that is not left behind."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "splitproxy", *args, stdout=PIPE, stderr=STDOUT, env=os.environ | {"COLUMNS": "200"}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def end(process: Process) -> tuple[int | None, str]:
    """Wait for its end: exit code and the rest of its output."""
    async with asyncio.timeout(WAIT_S):
        output, _ = await process.communicate()
    return process.returncode, output.decode()


async def line(process: Process, pattern: str) -> "re.Match[str]":
    """Read its output up to a line that matches."""
    assert process.stdout is not None
    read = []
    async with asyncio.timeout(WAIT_S):
        while text := (await process.stdout.readline()).decode():
            if found := re.search(pattern, text):
                return found
            read.append(text)
    raise AssertionError(f"it ended without {pattern!r}:\n{''.join(read)}")


@pytest.fixture
def bench(tmp_path: Path) -> StrataBench:
    return StrataBench(tmp_path)


def byte_tokenizer() -> Json:
    """The tokenizer.json of the fake model, whose tokens are bytes."""
    vocabulary = {symbol: byte for byte, symbol in symbols_by_byte().items()}
    merge = (spelled(b"\xff"), spelled(b"\xfe"))  # which no text holds
    return {
        "model": {"type": "BPE", "vocab": {**vocabulary, "".join(merge): VOCABULARY}, "merges": [" ".join(merge)]},
        "pre_tokenizer": {"type": "ByteLevel", "use_regex": True},
        "added_tokens": [{"content": text, "id": token} for text, token in SPECIAL_IDS.items()],
    }


@pytest.mark.parametrize("prefill", ["server", "stdio"])
async def test_pair_from_a_run_config(bench: StrataBench, prefill: str) -> None:
    """S1, S8, S22: a run config brings up a proven pair, a prompt is handed over, and nothing is left."""
    bench.with_fakes()
    (bench.pack / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    path = bench.write({"dir": str(bench.sessions)}, tokenizer=str(bench.pack))
    settings = {
        "listen": "127.0.0.1:0", "strata.command": "['./serve']", "strata.prefill": prefill,
        "split.policy": "threshold",
        "strata.log_dir": str(bench.folder / "logs"),
    }  # fmt: skip
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    async with splitproxy("up", "--strata", str(path), *given) as process:
        pair = (await line(process, "prefill -> decode")).string
        url = (await line(process, r"OpenAI base URL: (\S+)/v1 ")).group(1)
        await line(process, "Ctrl-C stops everything")
        assert re.search(r"\bproven\b", pair)
        engines = children(process.pid)
        assert len(engines) == 2
        async with aiohttp.ClientSession() as http, http.post(url + CHAT, json=body(CHAT, words(3000))) as answer:
            assert answer.status == 200
            told = [answer.headers[f"X-Splitproxy-{name}"] for name in ("Route", "Reason")]
            assert told == ["handover", "worth_moving"]
        process.send_signal(signal.SIGINT)
        code, output = await end(process)
        assert code == 0, output
        assert "Traceback" not in output
    await until(lambda: not any(is_alive(pid) for pid in engines))
    assert [*bench.sessions.iterdir()] == []
    assert (bench.folder / "logs" / "strata.decode.log").exists()


async def test_faults_of_the_run_config(bench: StrataBench) -> None:
    """S1, S7: a run config that no pair can be made of ends with exit code 2 and a sentence for each fault."""
    path = bench.write({"prefill_gpu": True}, parallel=4)
    async with splitproxy("up", "--strata", str(path), "--set", "strata.command=['./serve']") as process:
        code, output = await end(process)
    assert code == 2
    assert [line.partition(" = ")[0] for line in output.splitlines()] == [
        "strata-x.json: split_serve.prefill_gpu", "strata-x.json: parallel",
    ]  # fmt: skip


async def test_one_thing_is_started(bench: StrataBench) -> None:
    """A configuration that says twice what to start is refused."""
    config = bench.folder / "up.toml"
    config.write_text(f'[launch]\nmodel = "model.gguf"\n[strata]\nconfig = "{bench.write()}"\n')
    async with splitproxy("up", "-c", str(config)) as process:
        assert await end(process) == (2, "up: [launch] and [strata] both say what to start; leave one out\n")
    async with splitproxy("up", "--demo", "--strata", "x.json") as process:
        code, output = await end(process)
    assert code == 2
    assert "not allowed with argument --demo" in output
