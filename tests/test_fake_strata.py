"""The fake Strata engines keep the rules of the real ones: which state is resumed, what is refused, and how."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from tests.fake_model import SPECIAL_IDS, Weights
from tests.fake_strata_model import Conversation, SessionError, fit, read, write
from tests.fake_strata_server import FakeStrata

KINDS = ("strata",)
Start = Callable[..., Awaitable[FakeStrata]]
ROOT = Path(__file__).parent.parent
PROGRAM = (sys.executable, "-m", "tests.fake_strata")
TURN = SPECIAL_IDS["<|im_start|>"]
PROMPT = [TURN, *range(65, 95), TURN, 66, 67]


def said(*commands: str, flags: tuple[str, ...] = ()) -> list[str]:
    """What the engine prints after READY for these commands."""
    text = "".join(f"{command}\n" for command in commands)
    done = subprocess.run(
        [*PROGRAM, "--serve", *flags], input=text, capture_output=True, text=True, cwd=ROOT, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("INFO ")
    return lines[2:]


def gen(max_new: int, ids: list[int], keys: str = "") -> str:
    return f"GEN {max_new} {keys}{','.join(map(str, ids))}"


def heads(lines: list[str]) -> list[str]:
    return [line.partition(" ")[0] for line in lines]


def test_a_session_ends_where_the_request_did(tmp_path: Path) -> None:
    """One token of answer leaves exactly the prompt; its turn serves the same prompt again, the whole does not."""
    path = tmp_path / "x"
    lines = said(
        gen(1, PROMPT), f"SAVE {path}", gen(1, PROMPT), gen(1, [*PROMPT, 70]), flags=("--session-min-free-mib", "0")
    )
    assert next(line for line in lines if line.startswith("SAVED")).split()[1] == str(len(PROMPT))
    assert [line for line in lines if line.startswith("RESUME")] == ["RESUME 0", "RESUME 31", f"RESUME {len(PROMPT)}"]
    assert fit(1, 32768, "int8", "0.1.30-fake").unpack(read(path), 32768).ids == PROMPT


def test_a_prefill_leaves_the_last_token() -> None:
    """Nothing is written, and a continuing request resumes one token before the end; other engines refuse."""
    lines = said(gen(0, PROMPT, "prefill=1 "), gen(1, PROMPT), flags=("--set", "knows_prefill=true"))
    assert "T" not in heads(lines[: heads(lines).index("DONE")])
    assert f"RESUME {len(PROMPT) - 1}" in lines
    assert said(gen(0, PROMPT, "prefill=1 ")) == ["ERR bad request: max_new"]


@pytest.mark.parametrize("command", ["GEN 0 65", "GEN 1 x", "GEN 1 99999", "GEN 40000 65", "GEN 1", "HELLO"], ids=str)
def test_what_is_refused_leaves_the_engine_idle(command: str) -> None:
    """A refusal is one line, and the next command is answered."""
    lines = said(command, gen(1, PROMPT))
    assert heads(lines[:1]) == ["ERR"]
    assert lines[-1].startswith("DONE 1 ")


def test_a_save_wants_a_session_and_space(tmp_path: Path) -> None:
    """Without a complete session, a prompt cache or enough space there is no file."""
    path = tmp_path / "x"
    assert said(f"SAVE {path}")[-1].startswith("SERR invalid 0 ")
    assert said(gen(1, PROMPT), f"SAVE {path}", flags=("--prompt-cache", "0"))[-1].startswith("SERR invalid 0 ")
    assert said(gen(1, PROMPT), f"SAVE {path}", flags=("--set", "spare_mib=5"))[-1].startswith("SERR storage 0 ")
    assert not path.exists()


def test_a_restore_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """Links, other engines' files and damaged ones are refused by kind; a live session survives that."""
    held = Conversation()
    held.add(PROMPT, Weights())
    held.mark_prompt(0, 6)
    files = {name: tmp_path / name for name in ("good", "model", "damaged", "link", "twice")}
    good = fit(1, 32768, "int8", "0.1.30-fake").pack(held)
    write(files["good"], good)
    write(files["model"], fit(2, 32768, "int8", "0.1.30-fake").pack(held))
    write(files["damaged"], good[:100] + b"xx" + good[102:])
    files["link"].symlink_to(files["good"])
    for name in ("model", "damaged", "link"):
        assert said(f"RESTORE {files[name]}")[-1].startswith("SERR invalid 0 "), name
    assert said(f"RESTORE {tmp_path / 'none'}")[-1].startswith("SERR io 0 ")
    lines = said(f"RESTORE {files['good']}", f"RESTORE {files['model']}", gen(1, [*PROMPT, 70]))
    assert f"RESUME {len(PROMPT)}" in lines
    files["twice"].hardlink_to(files["good"])
    with pytest.raises(SessionError, match="one name"):
        read(files["good"])


async def test_the_server_can_be_run_by_hand(tmp_path: Path) -> None:
    """It listens where it says, speaks HTTP/1.0, and closes."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, "--http", "0", "--slot-save-path", str(tmp_path), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().split()[-1]
    async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
        assert (answer.version, answer.headers["Connection"]) == (aiohttp.HttpVersion10, "close")
        assert (await answer.json())["service"] == "strata"
    process.terminate()
    assert await process.wait() == 0


async def test_the_server_is_careful_whom_it_answers(fake: Start) -> None:
    """Foreign hosts, web pages and bodies of another type are refused, and slot calls need a plain name."""
    engine = await fake()
    async with aiohttp.ClientSession() as http:
        for headers, status in (({"Host": "evil.example:80"}, 403), ({"Origin": "http://evil.example"}, 403)):
            async with http.get(f"{engine.url}/slots", headers=headers) as answer:
                assert answer.status == status
        slot = f"{engine.url}/slots/0?action=save"
        async with http.post(slot, data=b"{}", headers={"Content-Type": "text/plain"}) as answer:
            assert answer.status == 415
        for name, status in (("../x", 400), (".x", 400), ("x.", 400), ("x", 400)):
            async with http.post(slot, json={"filename": name}) as answer:
                assert answer.status == status
        async with http.post(f"{engine.url}/slots/0?action=restore", json={"filename": "none"}) as answer:
            assert answer.status == 404
    engine.violations.clear()
