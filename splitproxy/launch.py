"""Starts the two engines on this machine, watches and heals them, and stops them in order.

It owns the engines' processes and log files. It never asks an engine for more than GET /health and never touches a
session file. An engine runs in a process group of its own, so that Ctrl-C in the terminal reaches the proxy alone, and
the kernel ends it when the proxy ends, however that happens.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import urlsplit

import aiohttp

from splitproxy import flags
from splitproxy.config import Config, Engine, Launch
from splitproxy.engines import embedded
from splitproxy.errors import ConfigError, LaunchError
from splitproxy.model import Role

log = logging.getLogger(__name__)

Progress = Callable[[Role, str], None]

START_ORDER = (Role.DECODE, Role.PREFILL)
STOP_ORDER = (Role.PREFILL, Role.DECODE)

_HEALTH_INTERVAL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0
_KILL_TIMEOUT_S = 10.0
_TAIL_LINES = 15

# Runs in the child before the engine's program replaces it. Python between fork and exec (preexec_fn) could meet a lock
# that another thread of the proxy held at the fork; this starts clean, and the process number stays the same.
_TRAMPOLINE = """
import ctypes, os, signal, sys
parent, cpus, program, *rest = sys.argv[1:]
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


class Launcher:
    """The two engines of `splitproxy up`, from the first start to the last stop.

    `engines` names them as the rest of the proxy addresses them. Raises ConfigError with every fault of [launch].
    `heal_interval_s` is the least time between two attempts to start an engine again.
    """

    def __init__(
        self, config: Config, session_dir: Path, *, heal_interval_s: float = 60.0, stop_grace_s: float = 5.0
    ) -> None:
        launch = config.launch
        if launch is None:
            raise ConfigError(["launch: there is no [launch] table; it names the model that `splitproxy up` serves"])
        _refuse(launch)
        self._launch = launch
        self._session_dir = session_dir
        self._heal_interval_s = heal_interval_s
        self._stop_grace_s = stop_grace_s
        self._children: dict[Role, _Child] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self.engines: tuple[Engine, ...] = local_engines(config)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def alive(self, role: Role) -> bool:
        """Whether the engine's process runs and has answered that it is ready."""
        child = self._children.get(role)
        return child is not None and child.ready and child.running

    async def start(self, progress: Progress | None = None) -> None:
        """Start the decode engine, then the prefill engine, and wait until both answer.

        Raises LaunchError when the decode engine does not start; nothing is left running then. A prefill engine that
        does not start is tried again in the background.
        """
        try:
            self._children = self._prepare()
            for role in START_ORDER:
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

    def _prepare(self) -> "dict[Role, _Child]":
        program = engine_program(self._launch.engine)
        log_dir = _private_folder(self._launch.log_dir)
        if ignored := sorted(name for name in os.environ if name.startswith("LLAMA_ARG_")):
            log.warning("%s: not passed on to the engines; launch.args may set the same.", ", ".join(ignored))
        cores = flags.share_cores(physical_cores())
        return {
            engine.role: _child(engine, self._launch, program, cores[engine.role], self._session_dir, log_dir)
            for engine in self.engines
        }

    async def _first_start(self, child: "_Child", progress: Progress) -> None:
        tried_at: float | None = None
        progress(child.role, f"starting, log in {child.log_path}")
        try:
            await child.start(self._launch.start_timeout_s)
            progress(child.role, f"ready at {child.engine.url}")
        except LaunchError as error:
            if child.role is Role.DECODE:
                raise
            tried_at = time.monotonic()
            log.warning("%s\nThe decode engine serves alone; next try in %g s.", error, self._heal_interval_s)
            progress(child.role, "did not start; the decode engine serves alone")
        self._watchers.append(asyncio.create_task(self._heal(child, tried_at), name=f"heal {child.role}"))

    async def _heal(self, child: "_Child", tried_at: float | None) -> None:
        """Start one engine again whenever it ends, for as long as the launcher lives."""
        level = logging.ERROR if child.role is Role.DECODE else logging.WARNING
        failing = tried_at is not None
        while True:
            end = await child.ended() if child.process is not None else None
            delay_s = heal_delay_s(tried_at, time.monotonic(), self._heal_interval_s)
            if end is not None:
                log.log(level, "%s is gone: %s. Next start in %.0f s; see %s.", child, end, delay_s, child.log_path)
                failing = False
            await asyncio.sleep(delay_s)
            tried_at = time.monotonic()
            try:
                await child.start(self._launch.start_timeout_s)
                log.info("%s serves again.", child)
            except LaunchError as error:
                # Once per change of state: the same words each minute would hide what else the log says.
                log.log(logging.INFO if failing else level, "%s", error)
                failing = True


def _say_nothing(_role: Role, _text: str) -> None:
    pass


def heal_delay_s(tried_at: float | None, now: float, interval_s: float) -> float:
    """How long to wait before an engine is started again. `tried_at`: the last attempt that was no plain start."""
    return 0.0 if tried_at is None else max(0.0, tried_at + interval_s - now)


@dataclass(slots=True)
class _Child:
    """One engine's process. At most one runs at a time."""

    engine: Engine
    command: Sequence[str]
    env: dict[str, str]
    log_path: Path
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

    async def start(self, timeout_s: float) -> None:
        """Run the engine and wait until it answers. Raises LaunchError with the end of its log; nothing runs then."""
        late = ""
        try:
            _check_port_is_free(self.engine.url)
            log_size = self.log_path.stat().st_size if self.log_path.exists() else 0
            await self._spawn()
            async with asyncio.timeout(timeout_s):
                self.ready = await self._answers()
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
        with _open_log(self.log_path) as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env=self.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=0o077,  # session files hold conversations
            )

    async def _answers(self) -> bool:
        """Wait until the engine is ready; False when its process ends first."""
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            while self.running:
                if await _is_healthy(http, self.engine.url) and self.running:
                    return True
                await asyncio.sleep(_HEALTH_INTERVAL_S)
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


def local_engines(config: Config) -> tuple[Engine, ...]:
    """The two engines to start: those that the configuration names, else new ones on free ports of this machine."""
    pair = [config.of_role(role) for role in START_ORDER]
    if all(len(engines) == 1 and _is_local(engines[0].url) for engines in pair):
        return tuple(engines[0] for engines in pair)
    if config.engines:
        log.warning(
            "The [[engines]] are not started: `up` starts one prefill and one decode engine with http://127.0.0.1:PORT "
            "as url. It uses free ports instead."
        )
    ports = _free_ports(len(START_ORDER))
    return tuple(
        Engine(name=role.value, role=role, url=f"http://127.0.0.1:{port}")
        for role, port in zip(START_ORDER, ports, strict=True)
    )


def engine_program(engine: str) -> list[str]:
    """The command that runs an engine, without flags. `engine` is launch.engine. Raises LaunchError."""
    if engine == "auto" and (found := shutil.which("llama-server")):
        return [found]
    if engine in ("auto", "embedded"):
        if importlib.util.find_spec("xllamacpp") is not None:
            return [sys.executable, "-m", embedded.__name__]
        missing = "there is no llama-server on PATH and " if engine == "auto" else ""
        raise LaunchError(f"launch.engine = {engine!r}: {missing}{embedded.INSTALL_HINT}")
    if found := shutil.which(engine):
        return [str(Path(found).absolute())]
    raise LaunchError(f"launch.engine = {engine!r}: there is no such program")


def physical_cores() -> list[frozenset[int]]:
    """The cores this process may use, each as the set of its logical processors."""
    if not hasattr(os, "sched_getaffinity"):
        return [frozenset({cpu}) for cpu in range(os.cpu_count() or 1)]
    usable = os.sched_getaffinity(0)
    return list({frozenset(_siblings(cpu) & usable | {cpu}) for cpu in usable})


def _siblings(cpu: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        ranges = [part.partition("-") for part in path.read_text(encoding="ascii").strip().split(",")]
        return {number for low, _, high in ranges for number in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return {cpu}


def _child(
    engine: Engine, launch: Launch, program: Sequence[str], cores: flags.Cores, session_dir: Path, log_dir: Path
) -> _Child:
    role = engine.role
    card = flags.gpu(launch, role)
    pinned = card is None and sys.platform == "linux" and not flags.places_itself(launch, role)
    parts = urlsplit(engine.url)
    argv = flags.engine_flags(
        launch,
        role,
        host="127.0.0.1" if parts.hostname == "localhost" else parts.hostname or "127.0.0.1",
        port=parts.port or 80,
        session_dir=session_dir,
        threads=cores.threads if card is None else None,
    )
    cpus = ",".join(str(cpu) for cpu in sorted(cores.cpus)) if pinned else ""
    key = os.environ.get(engine.api_key_env) if engine.api_key_env else None
    log_path = log_dir / f"engine.{role}.log"
    _keep_previous(log_path)
    return _Child(
        engine=engine,
        command=[sys.executable, "-S", "-P", "-c", _TRAMPOLINE, str(os.getpid()), cpus, *program, *argv],
        env=flags.environment(os.environ, card, key),
        log_path=log_path,
    )


def _refuse(launch: Launch) -> None:
    faults = flags.launch_faults(launch)
    if not Path(launch.model).is_file():
        faults.append(f"launch.model = {launch.model!r}: there is no such file")
    if faults:
        raise ConfigError(faults)


def _is_local(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "http" and not parts.path and parts.hostname in ("localhost", "127.0.0.1", "::1")


def _free_ports(count: int) -> list[int]:
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


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _private_folder(log_dir: str) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = Path(log_dir).expanduser() if log_dir else state / "splitproxy"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not log_dir:
            folder.chmod(0o700)  # a folder that the user named keeps the mode the user gave it
    except OSError as error:
        raise LaunchError(f"{folder}: the engines' log files cannot be written there: {error.strerror}") from None
    return folder


def _keep_previous(log_path: Path) -> None:
    """Each run begins a log; that of the run before is kept beside it, so that a crash can still be looked into."""
    with contextlib.suppress(FileNotFoundError):
        log_path.rename(log_path.with_suffix(".log.1"))


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
