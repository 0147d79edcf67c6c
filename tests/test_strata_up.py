"""`splitproxy up --strata` as a user runs it, in a process of its own."""

import asyncio
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from tests.strata_bench import StrataBench

WAIT_S = 60.0


async def run(*args: str) -> tuple[int | None, str]:
    """A `splitproxy` from beginning to end: exit code and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "splitproxy", *args, stdout=PIPE, stderr=STDOUT
    )
    try:
        async with asyncio.timeout(WAIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode()


@pytest.fixture
def bench(tmp_path: Path) -> StrataBench:
    return StrataBench(tmp_path)


async def test_faults_of_the_run_config(bench: StrataBench) -> None:
    """S1, S7: a run config that no pair can be made of ends with exit code 2 and a sentence for each fault."""
    path = bench.write({"prefill_gpu": True}, parallel=4)
    code, output = await run("up", "--strata", str(path), "--set", "strata.command=['./serve']")
    assert code == 2
    assert [line.partition(" = ")[0] for line in output.splitlines()] == [
        "strata-x.json: split_serve.prefill_gpu", "strata-x.json: parallel",
    ]  # fmt: skip


async def test_one_thing_is_started(bench: StrataBench) -> None:
    """A configuration that says twice what to start is refused."""
    config = bench.folder / "up.toml"
    config.write_text(f'[launch]\nmodel = "model.gguf"\n[strata]\nconfig = "{bench.write()}"\n')
    code, output = await run("up", "-c", str(config))
    assert (code, output) == (2, "up: [launch] and [strata] both say what to start; leave one out\n")
    code, output = await run("up", "--demo", "--strata", "x.json")
    assert code == 2
    assert "not allowed with argument --demo" in output
