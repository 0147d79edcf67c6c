"""What `splitproxy up` starts as two llama-servers: which program, where, with which flags, environment and cores.

The processes themselves are those of `processes`.
"""

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from splitproxy.config import Config, Engine, Launch
from splitproxy.engines import embedded
from splitproxy.errors import ConfigError, LaunchError
from splitproxy.model import Kind
from splitproxy.run import flags
from splitproxy.run.processes import Child, Launching, Progress, address_of, local_engines, log_folder, new_log

log = logging.getLogger(__name__)


class Launcher(Launching):
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
        super().__init__(launch.start_timeout_s, heal_interval_s, stop_grace_s)
        self.engines: tuple[Engine, ...] = local_engines(config, Kind.LLAMA_SERVER)

    async def start(self, progress: Progress | None = None) -> None:
        """Start both engines, as `Processes.start` does. Raises LaunchError."""
        await self._processes.start(self._children(), progress)

    async def stop(self) -> None:
        """Stop both engines; they are gone afterwards. Raises the first error."""
        await self._processes.stop()

    def _children(self) -> list[Child]:
        program = engine_program(self._launch.engine)
        log_dir = log_folder(self._launch.log_dir)
        if ignored := sorted(name for name in os.environ if name.startswith("LLAMA_ARG_")):
            log.warning("%s: not passed on to the engines; launch.args may set the same.", ", ".join(ignored))
        cores = flags.share_cores(physical_cores())
        return [
            _child(engine, self._launch, program, cores[engine.role], self._session_dir, log_dir)
            for engine in self.engines
        ]


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
) -> Child:
    role = engine.role
    card = flags.gpu(launch, role)
    pinned = card is None and sys.platform == "linux" and not flags.places_itself(launch, role)
    host, port = address_of(engine)
    argv = flags.engine_flags(
        launch,
        role,
        host=host,
        port=port,
        session_dir=session_dir,
        threads=cores.threads if card is None else None,
    )
    key = os.environ.get(engine.api_key_env) if engine.api_key_env else None
    return Child(
        engine=engine,
        command=[*program, *argv],
        env=flags.environment(os.environ, card, key),
        log_path=new_log(log_dir, f"engine.{role}.log"),
        cpus=cores.cpus if pinned else frozenset(),
    )


def _refuse(launch: Launch) -> None:
    faults = flags.launch_faults(launch)
    if not Path(launch.model).is_file():
        faults.append(f"launch.model = {launch.model!r}: there is no such file")
    if faults:
        raise ConfigError(faults)
