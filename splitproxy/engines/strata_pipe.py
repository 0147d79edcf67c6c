"""One process of `strata --serve`: started, spoken with line by line, and ended. It knows no command's meaning.

Whoever holds the pipe asks one thing at a time and reads its answer to the end; where that fails the process is killed,
because nobody can tell any more which line answers what.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from splitproxy.engines.strata_lines import QUIT, Event, Info, OutOfStep, Ready, parse
from splitproxy.errors import Cause, EngineError, Step

log = logging.getLogger(__name__)

LINE_BYTES_MAX = 1 << 20
GRACE_S = 20.0  # to leave by itself, and then to end when told to

# Runs in the child before the engine's program replaces it, so that the engine ends with the proxy, however that ends.
_TRAMPOLINE = """
import ctypes, os, signal, sys
parent, program, *rest = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)
try:
    os.execvp(program, [program, *rest])
except OSError as error:
    sys.exit(f"error: {program}: cannot be run: {error.strerror}")
"""


@dataclass(frozen=True, slots=True)
class Command:
    """What to start. `log` is a file for what the engine says on its standard error; empty for none."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str = ""
    log: str = ""


class Pipe:
    """A running engine that has said that it is ready."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.context = 0
        self.stops = False
        self.info: dict[str, str] = {}

    @classmethod
    async def open(cls, command: Command, ready_s: float) -> "Pipe":
        """Start the engine and wait until it is ready. Raises EngineError; nothing is left running then."""
        with contextlib.ExitStack() as files:
            try:
                errors: BinaryIO | int = asyncio.subprocess.DEVNULL
                if command.log:
                    errors = files.enter_context(_log_file(command.log))
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-c", _TRAMPOLINE, str(os.getpid()), *command.argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    cwd=command.cwd or None,
                    env=dict(command.env),
                    limit=LINE_BYTES_MAX,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineError(Step.CONTROL, Cause.DIED, f"cannot be started: {error}") from None
        pipe = cls(process)
        try:
            async with asyncio.timeout(ready_s):
                await pipe._wait_ready()
        except TimeoutError:
            await pipe.kill()
            raise EngineError(Step.CONTROL, Cause.TIMEOUT, f"was not ready after {ready_s:g} s") from None
        except BaseException:
            await pipe.kill()
            raise
        return pipe

    async def _wait_ready(self) -> None:
        while True:
            match await self._next(Step.CONTROL):
                case Info() as told:
                    self.info.update(told.values)
                case Ready() as ready:
                    self.context, self.stops = ready.context, ready.stops
                    return
                case _:
                    pass  # loading is told in lines of no fixed form

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def write(self, line: str, step: Step = Step.CONTROL) -> None:
        """Send a command. Raises EngineError where the engine is gone."""
        if not self.alive or self._process.stdin is None or self._process.stdin.is_closing():
            raise EngineError(step, Cause.DIED, "the engine has ended")
        self._process.stdin.write(line.encode())

    async def next(self, step: Step, timeout_s: float) -> Event:
        """The next line. Raises EngineError where none comes in time, where the engine has ended, and, after the engine
        was killed, for one that cannot be read."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next(step)
        except TimeoutError:
            raise EngineError(step, Cause.TIMEOUT, f"the engine said nothing for {timeout_s:g} s") from None

    async def _next(self, step: Step) -> Event:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            if line.endswith(b"\n"):
                return parse(line.decode(errors="replace").rstrip("\r\n"))
        except ValueError:  # of a line without end
            await self.kill()
            raise EngineError(step, Cause.CORRUPT, "the engine printed a line without end") from None
        except OutOfStep as reason:
            await self.kill()
            raise EngineError(step, Cause.CORRUPT, f"the engine is out of step: {reason}") from None
        code = await self._process.wait()
        raise EngineError(step, Cause.DIED, f"the engine has ended ({_told(code)})")

    def abort(self) -> None:
        """End the process and all that it has started, now."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def kill(self) -> None:
        self.abort()
        await self._process.wait()

    async def close(self) -> None:
        """Have the engine leave by itself; where it does not, end it."""
        with contextlib.suppress(EngineError, ConnectionError):
            self.write(QUIT)
            assert self._process.stdin is not None
            self._process.stdin.close()
        for last in (self._process.terminate, self.abort):
            if await self._ends():
                break
            last()
        await self._process.wait()

    async def _ends(self) -> bool:
        """Whether it ends within its grace. What it still prints is read: it must not wait for a reader."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                assert self._process.stdout is not None
                while await self._process.stdout.read(LINE_BYTES_MAX):
                    pass
                await self._process.wait()
        return not self.alive


def _log_file(path: str) -> BinaryIO:
    """A file that only its owner can read: engines may log prompts."""
    Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab")


def _told(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
