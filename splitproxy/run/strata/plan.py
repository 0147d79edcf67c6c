"""Reads a Strata run config from its file, and what files tell about it, before anything is started."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitproxy.config import Config, Strata, Tokenizer
from splitproxy.errors import ConfigError
from splitproxy.run.strata.runconfig import Run, keys, parse, value_of


@dataclass(frozen=True, slots=True)
class Plan:
    """A pair of Strata engines that can be started, as far as files tell."""

    table: Strata
    run: Run
    program: tuple[str, ...]  # what runs a server, without its arguments
    base: Path  # where it runs

    @property
    def home(self) -> Path:
        """What the run config's paths are relative to."""
        return self.base / self.run.config.cwd

    @property
    def pack(self) -> Path | None:
        found = value_of(self.run.all_args, "--pack")
        return self.home / found if found else None

    def applied(self, config: Config) -> Config:
        """The proxy's own configuration, with what the run config says about it and nobody else did.

        Raises ConfigError where token ids have to be made here and there is no file to make them with.
        """
        said, split = self.run.split, config.split
        updates: dict[str, Any] = {}
        if "min_prompt_tokens" in said.model_fields_set - split.model_fields_set:
            updates["min_prompt_tokens"] = said.min_prompt_tokens
        if said.dir and not split.dir:
            updates["dir"] = str(self.home / said.dir)
        own_keys = self.run.config.api_key or keys(os.environ.get("STRATA_API_KEY", ""))
        return config.model_copy(
            update={
                "split": split.model_copy(update=updates),
                "api_keys": config.api_keys or own_keys,
                "tokenizer": self._tokenizer(config.tokenizer),
            }
        )

    def _tokenizer(self, table: Tokenizer) -> Tokenizer:
        """Where token ids come from: where the proxy's configuration leaves it open, from the model's own files."""
        needed = self.table.prefill == "stdio"
        if table.source == "auto":
            model = value_of(self.run.all_args, "--native")
            candidates = [self.home / self.run.config.tokenizer / "tokenizer.json"]
            candidates += [self.home / model] if model else []
            if found := next((path for path in candidates if path.is_file()), None):
                return table.model_copy(update={"source": str(found)})
            missing = f"there is no {' or '.join(str(path) for path in candidates)}"
        else:
            missing = f"tokenizer.source is {table.source!r}"
            needed = needed and table.source == "engine"
        if needed:
            raise ConfigError(
                [
                    f'strata.prefill = "stdio": that engine reads token ids, which are made here, and {missing}; '
                    "name the model's tokenizer.json or GGUF file in tokenizer.source"
                ]
            )
        return table


def plan(table: Strata) -> Plan:
    """Read the run config that [strata] names. Raises ConfigError with every fault."""
    path = Path(table.config).absolute()
    base = Path(table.dir).absolute() if table.dir else path.parent
    faults: list[str] = []
    if not base.is_dir():
        faults.append(f"strata.dir = {table.dir!r}: there is no such folder")
    program = _program(table.command[0], base)
    if program is None:
        faults.append(f"strata.command = {[*table.command]!r}: there is no program {table.command[0]!r}")
    try:
        run = parse(_read(path), path.name)
    except ConfigError as error:
        raise ConfigError(faults + error.faults) from None
    found = Plan(table, run, (program or "", *table.command[1:]), base)
    if not (exe := found.home / run.config.exe).is_file():
        faults.append(f"{path.name}: exe = {run.config.exe!r}: there is no file {exe}")
    arena = run.split.shared_arena
    if isinstance(arena, str) and not (found.home / arena).parent.is_dir():
        faults.append(f"{path.name}: split_serve.shared_arena = {arena!r}: there is no folder for it")
    if faults:
        raise ConfigError(faults)
    return found


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a mark in front
    except OSError as error:
        raise ConfigError([f"strata.config = {str(path)!r}: cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"strata.config = {str(path)!r}: is not valid JSON: {error}"]) from None


def _program(word: str, base: Path) -> str | None:
    """The absolute path of a program: a path is relative to `base`, a bare word is looked up in PATH."""
    return shutil.which(str(base / word) if os.sep in word else word)
