"""What `splitproxy up` starts as two Strata engines, made from one run config; and what it removes at the end.

It looks at free space and writes both roles' configs; what is in them is decided in `roles` and `memory`, and the
processes are those of `processes`.
"""

import asyncio
import json
import logging
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from splitproxy.books.sessions import SHARED_MEMORY, fresh_dir, hold
from splitproxy.config import Config, Engine
from splitproxy.errors import ConfigError
from splitproxy.model import Kind, Policy, Role
from splitproxy.run.processes import Child, Launching, Progress, address_of, local_engines, log_folder, new_log
from splitproxy.run.strata import memory, roles
from splitproxy.run.strata.plan import Plan

log = logging.getLogger(__name__)

# Strata's server gives its engine 20 s to save what it has learned and to leave.
STOP_GRACE_S = 30.0
_ARENA_NAME = "experts.arena"


class StrataLauncher(Launching):
    """The two engines of `splitproxy up` where they are Strata's, from the first start to the last stop.

    `engines` names them as the rest of the proxy addresses them; there are none before the start. `config` is the
    proxy's with `Plan.applied`. `heal_interval_s` is the least time between two attempts to start an engine again.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        session_dir: Path,
        *,
        heal_interval_s: float = 60.0,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._config = config
        self._plan = plan
        self._session_dir = session_dir
        super().__init__(plan.table.start_timeout_s, heal_interval_s, stop_grace_s)
        self._folder: Path | None = None  # of this run: both configs, and the arena where it has no other place
        self._lock: int | None = None
        self._arena: Path | None = None  # one that is removed at the end, elsewhere
        self.engines: tuple[Engine, ...] = ()

    async def start(self, progress: Progress | None = None) -> None:
        """Make both roles' configs, and start the servers, as `Processes.start` does.

        Raises LaunchError, or ConfigError where the session folder has no room; nothing is left then.
        """
        try:
            await self._processes.start(self._prepare(), progress)
        except BaseException:
            await self._remove()
            raise

    async def stop(self) -> None:
        """Stop the servers, then remove both configs and the shared arena. Raises the first error."""
        try:
            await self._processes.stop()
        finally:
            await self._remove()

    def _prepare(self) -> list[Child]:
        log_dir = log_folder(self._plan.table.log_dir)
        if left_out := roles.not_passed_on(self._plan.run):
            log.info("%s: not passed on: %s", self._plan.run.source, ", ".join(left_out))
        self._folder = fresh_dir(needed_bytes=0)
        self._lock = hold(self._folder)
        arena = self._place_arena(self._folder)
        self._check_room(arena)
        configs = {role: roles.role_config(self._plan.run, role, self._session_dir, arena.path) for role in Role}
        self.engines = self._make_engines(configs[Role.PREFILL])
        return [
            self._child(engine, self._write(self._folder, engine.role, configs[engine.role]), log_dir)
            for engine in self.engines
            if engine.process is None
        ]

    def _place_arena(self, folder: Path) -> memory.Arena:
        run, pack = self._plan.run, self._plan.pack
        shared = run.split.shared_arena
        path, known_as = folder / _ARENA_NAME, SHARED_MEMORY
        if isinstance(shared, str):
            named = self._plan.home / shared
            path = named / f"splitproxy-{_ARENA_NAME}" if named.is_dir() else named
            known_as = path.parent
        site = memory.ArenaSite(
            is_linux=sys.platform == "linux",
            pack=str(pack) if pack else None,
            experts_bytes=_size(pack / "experts.bin") if pack else None,
            path=path,
            folder=known_as,
            exists=path.exists(),
            free_bytes=shutil.disk_usage(path.parent).free if path.is_relative_to(known_as) else 0,
        )
        arena = memory.arena(shared, run.all_args, site)
        log.info("%s", arena.why)
        if arena.path is not None and not site.exists and not arena.path.is_relative_to(folder):
            self._arena = arena.path
        return arena

    def _check_room(self, arena: memory.Arena) -> None:
        """Raises ConfigError when every save would be refused."""
        if self._config.split.policy is Policy.NEVER:
            return
        free_bytes = shutil.disk_usage(self._session_dir).free
        if arena.path is not None and arena.path.parent.stat().st_dev == self._session_dir.stat().st_dev:
            free_bytes -= arena.added_bytes
        least = self._config.split.floor_tokens
        room = memory.room(self._plan.run.args(Role.PREFILL), self._session_dir, free_bytes, least)
        if room.fault:
            raise ConfigError([room.fault])
        if room.warning:
            log.warning("%s", room.warning)

    def _make_engines(self, prefill_config: dict[str, Any]) -> tuple[Engine, ...]:
        decode, prefill = local_engines(self._config, Kind.STRATA)
        if self._plan.table.prefill == "stdio":
            process = roles.prefill_process(prefill_config, self._plan.run, self._plan.home)
            prefill = Engine(name=prefill.name, role=Role.PREFILL, kind=Kind.STRATA, process=process)
        return decode, prefill

    def _write(self, folder: Path, role: Role, config: dict[str, Any]) -> Path:
        path = folder / f"strata.{role}.json"
        with open(path, "w", encoding="utf-8", opener=lambda name, how: os.open(name, how, 0o600)) as file:
            json.dump(config, file, indent=1)
        return path

    def _child(self, engine: Engine, config: Path, log_dir: Path) -> Child:
        host, port = address_of(engine)
        arguments = ("--engine", "strata", "--config", str(config), "--host", host, "--port", str(port))
        key = os.environ.get(engine.api_key_env) if engine.api_key_env else None
        return Child(
            engine=engine,
            command=[*self._plan.program, *arguments],
            env=roles.server_environment(os.environ, self._plan.run, engine.role, key),
            log_path=new_log(log_dir, f"strata.{engine.role}.log"),
            cwd=self._plan.base,
            is_ready=is_loaded,
            stops_its_own=True,
        )

    async def _remove(self) -> None:
        """Remove what this run has made. May be called twice."""
        removals = ((partial(Path.unlink, missing_ok=True), self._arena), (shutil.rmtree, self._folder))
        self._arena = self._folder = None
        for remove, path in removals:
            if path is not None:
                try:
                    await asyncio.to_thread(remove, path)  # tens of GB take seconds
                except OSError as error:
                    log.error("%s cannot be removed: %s", path, error.strerror)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_loaded(status: int, body: bytes) -> bool:
    """Whether a Strata server's answer to GET /health says that its model is loaded."""
    try:
        health = orjson.loads(body)
    except ValueError:
        return False
    return status == 200 and isinstance(health, dict) and health.get("loaded") is True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
