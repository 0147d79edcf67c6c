"""Engines' processes on this machine: run, wait until ready, watch, start again, stop in order.

It owns the processes and their log files, whatever kind of engine they are. It never asks an engine for more than
GET /health and never touches a session file. An engine runs in a process group of its own, so that Ctrl-C in the
terminal reaches the proxy alone, and the kernel ends it when the proxy ends, however that happens.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import urlsplit

import aiohttp

from splitproxy.config import Config, Engine
from splitproxy.errors import LaunchError
from splitproxy.model import Kind, Role

log = logging.getLogger(__name__)

Progress = Callable[[Role, str], None]
Told = Callable[[str], None]
"""Told the name of an engine whose process has ended."""

START_ORDER = (Role.DECODE, Role.PREFILL)
STOP_ORDER = (Role.PREFILL, Role.DECODE)

_HEALTH_INTERVAL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0
_TELL_INTERVAL_S = 15.0
_KILL_TIMEOUT_S = 10.0
_TAIL_LINES = 15

# Runs in the child before the engine's program replaces it. Python between fork and exec (preexec_fn) could meet a lock
# that another thread of the proxy held at the fork; this starts clean, and the process number stays the same. Session
# files hold conversations, and are for their owner alone.
_TRAMPOLINE = """
import ctypes, os, signal, sys
parent, cpus, program, *rest = sys.argv[1:]
os.umask(0o077)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(1)
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
try:
    os.execv(program, [program, *rest])
except OSError as error:
    sys.exit(f"error: {program}: cannot be run: {error.strerror}")
"""


class Processes:
    """The engines of one `splitproxy up`, one for a role, from the first start to the last stop.

    `heal_interval_s` is the least time between two attempts to start an engine again; `stop_grace_s` is what one that
    was asked to stop may take.
    """

    def __init__(self, start_timeout_s: float, *, heal_interval_s: float = 60.0, stop_grace_s: float = 5.0) -> None:
        self._start_timeout_s = start_timeout_s
        self._heal_interval_s = heal_interval_s
        self._stop_grace_s = stop_grace_s
        self._children: dict[Role, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self.told: Told = lambda _name: None

    def alive(self, role: Role) -> bool:
        """Whether the engine's process runs and has answered that it is ready."""
        child = self._children.get(role)
        return child is not None and child.ready and child.running

    async def start(self, children: "Iterable[Child]", progress: Progress | None = None) -> None:
        """Start the decode engine, then the prefill engine, and wait until each answers.

        Raises LaunchError when the decode engine does not start; nothing is left running then. A prefill engine that
        does not start is tried again in the background.
        """
        self._children = {child.role: child for child in children}
        try:
            for role in START_ORDER:
                if role in self._children:
                    await self._first_start(self._children[role], progress or _say_nothing)
        except BaseException:
            with contextlib.suppress(LaunchError):
                await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the prefill engine, then the decode engine; both are gone afterwards. Raises the first error."""
        errors: list[Exception] = []
        try:
            for task in self._watchers:
                task.cancel()
            ends = await asyncio.gather(*self._watchers, return_exceptions=True)
            errors += [end for end in ends if isinstance(end, Exception)]
            for role in STOP_ORDER:
                if child := self._children.get(role):
                    try:
                        await child.stop(self._stop_grace_s)
                    except Exception as error:  # noqa: BLE001 - the other engine must be stopped, too
                        errors.append(error)
        finally:
            self._watchers = []
            for child in self._children.values():
                child.kill()
        if errors:
            raise errors[0]

    async def _first_start(self, child: "Child", progress: Progress) -> None:
        tried_at: float | None = None
        progress(child.role, f"starting, log in {child.log_path}")
        try:
            await child.start(self._start_timeout_s, progress)
            progress(child.role, f"ready at {child.engine.url}")
        except LaunchError as error:
            if child.role is Role.DECODE:
                raise
            tried_at = time.monotonic()
            log.warning("%s\nThe decode engine serves alone; next try in %g s.", error, self._heal_interval_s)
            progress(child.role, "did not start; the decode engine serves alone")
        self._watchers.append(asyncio.create_task(self._heal(child, tried_at), name=f"heal {child.role}"))

    async def _heal(self, child: "Child", tried_at: float | None) -> None:
        """Start one engine again whenever it ends, for as long as the others live."""
        level = logging.ERROR if child.role is Role.DECODE else logging.WARNING
        failing = tried_at is not None
        while True:
            end = await child.ended() if child.process is not None else None
            delay_s = heal_delay_s(tried_at, time.monotonic(), self._heal_interval_s)
            if end is not None:
                self.told(child.engine.name)
                log.log(level, "%s is gone: %s. Next start in %.0f s; see %s.", child, end, delay_s, child.log_path)
                failing = False
            await asyncio.sleep(delay_s)
            tried_at = time.monotonic()
            try:
                await child.start(self._start_timeout_s, _say_nothing)
                log.info("%s serves again.", child)
            except LaunchError as error:
                # Once per change of state: the same words each minute would hide what else the log says.
                log.log(logging.INFO if failing else level, "%s", error)
                failing = True


class Launching(ABC):
    """What starts a pair of engines and stops it: an async context manager over their processes."""

    def __init__(self, start_timeout_s: float, heal_interval_s: float, stop_grace_s: float) -> None:
        self._processes = Processes(start_timeout_s, heal_interval_s=heal_interval_s, stop_grace_s=stop_grace_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    @abstractmethod
    async def start(self, progress: Progress | None = None) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    def alive(self, role: Role) -> bool:
        """Whether the engine's process runs and is ready. An engine on stdio is its adapter's to watch."""
        return self._processes.alive(role)

    def tell(self, told: Told) -> None:
        """Have somebody told of each engine whose process ends by itself, before it is started again."""
        self._processes.told = told


def _say_nothing(_role: Role, _text: str) -> None:
    pass


def heal_delay_s(tried_at: float | None, now: float, interval_s: float) -> float:
    """How long to wait before an engine is started again. `tried_at`: the last attempt that was no plain start."""
    return 0.0 if tried_at is None else max(0.0, tried_at + interval_s - now)


def answers(status: int, _body: bytes) -> bool:
    """Whether an answer to GET /health, by its status alone, means that the engine is ready."""
    return status == 200


@dataclass(slots=True)
class Child:
    """One engine's process. At most one runs at a time.

    `command` is the program's absolute path and its arguments, `cpus` the logical processors it is kept on (none: all
    that this process may use). `is_ready` judges the status and body of GET /health. `stops_its_own`: the program ends
    what it started when it is asked to stop, so that it alone is asked.
    """

    engine: Engine
    command: Sequence[str]
    env: dict[str, str]
    log_path: Path
    cwd: Path | None = None
    cpus: frozenset[int] = frozenset()
    is_ready: Callable[[int, bytes], bool] = answers
    stops_its_own: bool = False
    ready: bool = False
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"The {self.role} engine {self.engine.name}"

    @property
    def role(self) -> Role:
        return self.engine.role

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, timeout_s: float, progress: Progress) -> None:
        """Run the engine and wait until it answers. Raises LaunchError with the end of its log; nothing runs then."""
        late = ""
        try:
            _check_port_is_free(self.engine.url)
            log_size = self.log_path.stat().st_size if self.log_path.exists() else 0
            await self._spawn()
            async with asyncio.timeout(timeout_s):
                self.ready = await self._answers(progress)
        except TimeoutError:
            late = f"it gave no answer within {timeout_s:g} s"
        except OSError as error:
            raise LaunchError(f"{self} did not start: {error}.") from None
        finally:
            if not self.ready:
                self.kill()
        if not self.ready:
            end = await self.ended()
            raise LaunchError(f"{self} did not start: {late or end}. {_tail(self.log_path, log_size)}")

    async def _spawn(self) -> None:
        cpus = ",".join(str(cpu) for cpu in sorted(self.cpus))
        with _open_log(self.log_path) as output:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-S", "-P", "-c", _TRAMPOLINE, str(os.getpid()), cpus, *self.command),
                env=self.env,
                cwd=self.cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def _answers(self, progress: Progress) -> bool:
        """Wait until the engine is ready; False when its process ends first."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        began = told = time.monotonic()
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            while self.running:
                if await self._is_healthy(http) and self.running:
                    return True
                now = time.monotonic()
                if now - told >= _TELL_INTERVAL_S:
                    told = now
                    progress(self.role, f"still loading after {now - began:.0f} s")
                await asyncio.sleep(_HEALTH_INTERVAL_S)
        return False

    async def _is_healthy(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get(f"{self.engine.url}/health") as answer:
                return self.is_ready(answer.status, await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def ended(self) -> str:
        """Wait for the end of the process and say how it ended. Nothing that it started itself is left then."""
        if self.process is None:
            return "it was not running"
        code = await self.process.wait()
        self.kill()
        self.ready, self.process = False, None  # its number may belong to a stranger from now on
        return f"it ended with exit code {code}" if code >= 0 else f"it was ended by {_signal_name(-code)}"

    async def stop(self, grace_s: float) -> None:
        """End the process: by a request first, by force when it is not heard. Raises LaunchError when neither helps."""
        if self.process is None:
            return
        self.ready = False
        try:
            if self.stops_its_own:
                self.process.terminate()
            else:
                _signal_group(self.process.pid, signal.SIGTERM)
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            log.warning("%s did not stop within %g s when asked to; it is killed.", self, grace_s)
        finally:
            await self._end_by_force()

    async def _end_by_force(self) -> None:
        self.kill()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self.ended()
        except TimeoutError:
            raise LaunchError(f"{self} cannot be killed; it still runs.") from None

    def kill(self) -> None:
        """End the process and everything it started, now."""
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGKILL)


def local_engines(config: Config, kind: Kind) -> tuple[Engine, ...]:
    """The two engines to start: those that the configuration names, else new ones on free ports of this machine."""
    pair = [config.of_role(role) for role in START_ORDER]
    if all(len(engines) == 1 and engines[0].kind is kind and _is_local(engines[0].url) for engines in pair):
        return tuple(engines[0] for engines in pair)
    if config.engines:
        log.warning(
            "The [[engines]] are not started: `up` starts one prefill and one decode engine of kind %r with "
            "http://127.0.0.1:PORT as url. It uses free ports instead.",
            kind.value,
        )
    ports = _free_ports(len(START_ORDER))
    return tuple(
        Engine(name=role.value, role=role, kind=kind, url=f"http://127.0.0.1:{port}")
        for role, port in zip(START_ORDER, ports, strict=True)
    )


def _is_local(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and not parts.path and parts.hostname in ("localhost", "127.0.0.1", "::1")


def address_of(engine: Engine) -> tuple[str, int]:
    """Host and port that an engine of this machine is to listen on."""
    parts = urlsplit(engine.url)
    return "127.0.0.1" if parts.hostname in (None, "localhost") else parts.hostname, parts.port or 80


def _free_ports(count: int) -> list[int]:
    """Ports of this machine's loopback address that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        # All are held until all are known, so that they differ.
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(s.getsockname()[1]) for s in sockets]


def _check_port_is_free(url: str) -> None:
    # A stranger on the port would answer /health in the engine's place.
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise OSError(f"{host}:{port} is not free ({os.strerror(error.errno or 0)})") from None


def log_folder(log_dir: str) -> Path:
    """The folder of the engines' logs, made where it is missing; "": one in the user's state folder.

    Raises LaunchError.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = Path(log_dir).expanduser() if log_dir else state / "splitproxy"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not log_dir:
            folder.chmod(0o700)  # a folder that the user named keeps the mode the user gave it
    except OSError as error:
        raise LaunchError(f"{folder}: the engines' log files cannot be written there: {error.strerror}") from None
    return folder


def new_log(log_dir: Path, name: str) -> Path:
    """Where a run writes a log. That of the run before is kept beside it, so that a crash can still be looked into."""
    path = log_dir / name
    with contextlib.suppress(FileNotFoundError):
        path.rename(path.with_suffix(".log.1"))
    return path


def _open_log(path: Path) -> BinaryIO:
    """An engine's log, open for appending, readable by its owner only."""
    output = open(path, "ab", opener=lambda name, how: os.open(name, how, 0o600))  # noqa: SIM115 - the caller closes it
    os.fchmod(output.fileno(), 0o600)
    return output


def _tail(path: Path, offset: int) -> str:
    """The last lines that were written to a log since `offset`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(offset, size - 8192))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        lines = []
    return f"The end of {path}:\n" + "\n".join(f"  {line}" for line in lines) if lines else f"{path} says nothing."


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
