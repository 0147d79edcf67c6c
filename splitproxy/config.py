"""The typed configuration: every key, default, range and cross check, once.

`load` is the only function here that reads anything. Precedence: flag > environment > file > default.
"""

import ipaddress
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from splitproxy.checked import (
    Argument,
    Count,
    Flag,
    Name,
    Positive,
    Seconds,
    Table,
    Text,
    fault_sentence,
    lacks,
    refuse_bool,
    sound_part,
    table_at,
)
from splitproxy.errors import ConfigError
from splitproxy.model import Kind, Policy, Role

ENV_PREFIX = "SPLITPROXY_"
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def _listen_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError('must be "HOST:PORT", for example "127.0.0.1:8080"; an IPv6 host goes in brackets')
    return value


def _engine_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError("must be the address of an engine, for example http://127.0.0.1:8081")
    if parts.username or parts.password:
        raise ValueError("must not hold a user name or password; name the key's variable in api_key_env")
    return value.rstrip("/")


def _absolute_folder(value: str) -> str:
    if value and not value.startswith("/"):
        raise ValueError("must be an absolute path, as in --slot-save-path: engines run in folders of their own")
    return value


class Queue(Table):
    """How many requests may wait for a slot, and for how long."""

    max: Count = 256
    timeout_s: Seconds = 600


class Split(Table):
    """When prompts are handed over, and where session files go."""

    policy: Policy = Policy.AUTO
    min_prompt_tokens: Count | None = None
    force_handover_tokens: Count = 0
    stall_weight: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, allow_inf_nan=False)] = 1.0
    on_prefill_failure: Literal["local", "reject"] = "local"
    dir: Annotated[Text, AfterValidator(_absolute_folder)] = ""
    max_session_mib: Count = 0
    reserve_tokens: Positive = 1024
    probe_tokens: Annotated[int, BeforeValidator(refuse_bool), Field(ge=64)] = 512
    prefill_silence_s: Seconds = 60
    transfer_timeout_s: Seconds = 120
    decode_silence_s: Seconds = 900

    @property
    def floor_tokens(self) -> int:
        """`min_prompt_tokens`, or what is usual: the fewest that are worth weighing; where nothing is weighed, enough
        to pay on most machines."""
        if self.min_prompt_tokens is not None:
            return self.min_prompt_tokens
        return 512 if self.policy is Policy.THRESHOLD else 32


class Tokenizer(Table):
    """Where token ids come from."""

    source: Annotated[str, Field(strict=True, min_length=1)] = "auto"
    pattern: Text = ""
    special_tokens: dict[str, Count] = {}  # noqa: RUF012 - pydantic gives each table a copy


class Process(Table):
    """An engine that the proxy starts itself and speaks with over the engine's own standard input and output."""

    exe: Text = Field(min_length=1)
    args: tuple[Argument, ...] = ()
    gpu: Count | None = None
    log: Text = ""
    cwd: Text = ""
    lib_dirs: tuple[Text, ...] = ()
    env: dict[str, Argument] = {}  # noqa: RUF012 - as above
    backend: Literal["cuda", "hip"] = "cuda"


class Engine(Table):
    """One engine: a server at `url`, or a `process` of ours."""

    name: Name = ""
    role: Role
    kind: Kind = Kind.LLAMA_SERVER
    url: Annotated[str, Field(strict=True), AfterValidator(_engine_url)] = Field(default="", validate_default=False)
    api_key_env: Text = ""
    process: Process | None = None

    @property
    def place(self) -> str:
        """Where the engine is, for people: its address, or the program that is started."""
        return self.url if self.process is None else self.process.exe

    @model_validator(mode="after")
    def _reachable(self) -> "Engine":
        if self.process is None and not self.url:
            raise lacks("url")
        if self.process is not None and self.url:
            raise ValueError("url and process exclude each other: a process of ours has no address")
        if self.process is not None and (self.kind is not Kind.STRATA or self.role is not Role.PREFILL):
            raise ValueError(
                'process needs kind = "strata" and role = "prefill"; '
                f"this engine has kind = {self.kind.value!r} and role = {self.role.value!r}"
            )
        return self


class Launch(Table):
    """What `splitproxy up` starts."""

    engine: Text = "auto"
    model: Text = Field(min_length=1)
    args: tuple[Argument, ...] = ()
    prefill_args: tuple[Argument, ...] = ()
    decode_args: tuple[Argument, ...] = ()
    prefill_gpu: Count | None = None
    decode_gpu: Count | None = None
    context: Positive = 8192
    decode_slots: Positive = 1
    log_dir: Text = ""
    start_timeout_s: Seconds = 900

    @model_validator(mode="after")
    def _cards_differ(self) -> "Launch":
        if self.prefill_gpu is not None and self.prefill_gpu == self.decode_gpu:
            raise ValueError(
                f"prefill_gpu and decode_gpu are both {self.decode_gpu}; each engine needs a card of its own"
            )
        return self


class Strata(Table):
    """What `splitproxy up` starts where the engines are Strata's."""

    config: Text = Field(min_length=1)
    dir: Text = ""
    command: tuple[Argument, ...] = Field(default=("python3", "-m", "serve.server"), min_length=1)
    prefill: Literal["server", "stdio"] = "server"
    log_dir: Text = ""
    start_timeout_s: Seconds = 900


class Config(Table):
    """The whole configuration. Durations are seconds, sizes MiB where the name says so."""

    listen: Annotated[str, Field(strict=True), AfterValidator(_listen_address)] = "127.0.0.1:8080"
    insecure: Flag = False
    api_keys: tuple[Annotated[str, Field(strict=True, min_length=1)], ...] = ()
    keep_alive_s: Seconds = 5
    drain_s: Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, allow_inf_nan=False)] = 30
    max_body_mib: Positive = 64
    queue: Queue = Queue()
    split: Split = Split()
    tokenizer: Tokenizer = Tokenizer()
    engines: tuple[Engine, ...] = ()
    launch: Launch | None = None
    strata: Strata | None = None

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def of_role(self, role: Role) -> list[Engine]:
        """The engines of one role, in the order of the file."""
        return [engine for engine in self.engines if engine.role is role]


def load(path: Path | None, env: Mapping[str, str], flags: Sequence[str] = ()) -> Config:
    """Read and check a configuration.

    `path` is a TOML file or None for none, `env` the process environment, `flags` are KEY=VALUE settings from the
    command line with dots between levels. Raises ConfigError with every fault that was found.
    """
    faults: list[str] = []
    tree: dict[str, Any] = {}
    origin: dict[tuple[str, ...], str] = {}
    if path is not None:
        tree = _read_file(path)
    for source, keys, text in (*_from_env(env), *_from_flags(flags, faults)):
        value = [key.strip() for key in text.split(",")] if keys == ("api_keys",) else _literal(keys, text)
        if _put(tree, keys, value):
            origin[keys] = source
        else:
            faults.append(f"{source}: {'.'.join(keys)} cannot be set: {keys[0]!r} is not a table")
    default = str(path) if path is not None else "configuration"
    config, doubtful = sound_part(
        Config, tree, faults, lambda error: fault_sentence(Config, error, default, origin, ("api_keys",))
    )
    faults += [f"{default}: {fault}" for fault in _cross_faults(config, env, doubtful)]
    if faults:
        raise ConfigError(faults)
    return _named(config)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: is not valid TOML: {error}"]) from None


def _from_env(env: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    for name, text in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            yield name, tuple(name.removeprefix(ENV_PREFIX).lower().split("__")), text


def _from_flags(flags: Sequence[str], faults: list[str]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    for flag in flags:
        key, equals, text = flag.partition("=")
        if equals and key:
            yield "command line", tuple(key.strip().split(".")), text
        else:
            faults.append(f"command line: {flag!r} is not KEY=VALUE, for example split.policy=never")


def _literal(keys: tuple[str, ...], text: str) -> Any:
    """A value as TOML would read it; what is no TOML value is a plain string, and so is `7` where a text belongs."""
    known = table_at(Config, keys[:-1]).model_fields.get(keys[-1])
    if known is not None and known.annotation is str and text[:1] not in ("'", '"'):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], keys: tuple[str, ...], value: object) -> bool:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return False
    tree[keys[-1]] = value
    return True


def _cross_faults(config: Config, env: Mapping[str, str], doubtful: set[str]) -> Iterator[str]:
    """Faults between keys. What `doubtful` keys lack may only have been taken out."""
    open_to_all = not _is_loopback(config.host) and not config.api_keys and not config.insecure
    if open_to_all and not doubtful & {"api_keys", "insecure"}:
        yield (
            f"listen = {config.listen!r} can be reached from other machines; "
            "set api_keys, or insecure = true if that is meant"
        )
    if config.engines and not config.of_role(Role.DECODE) and "engines" not in doubtful:
        yield 'engines: none has role = "decode"; one must write the answers'
    if not doubtful & {"engines", "tokenizer", "launch"}:
        yield from _pair_faults(config)
    for key in ("name", "url"):
        values = [value for engine in config.engines if (value := getattr(engine, key))]
        for value in sorted({v for v in values if values.count(v) > 1}):
            yield f"engines: {key} = {value!r} is given to more than one engine"
    started = config.launch is not None or config.strata is not None
    if not config.engines and not started and not doubtful & {"engines", "launch", "strata"}:
        yield (
            "engines: none is named; add one [[engines]] table for each engine, "
            "or [launch] or [strata] for `splitproxy up`"
        )
    for engine in config.engines:
        if engine.api_key_env and engine.api_key_env not in env:
            # Some write the key itself here, and it must not be shown.
            name = repr(engine.api_key_env) if _VARIABLE.fullmatch(engine.api_key_env) else "..."
            yield f"engines: api_key_env = {name}: there is no such environment variable"


def _pair_faults(config: Config) -> Iterator[str]:
    """Engines that cannot be pairs, whatever runs there."""
    kinds = {engine.kind for engine in config.engines}
    if len(kinds) > 1 and config.of_role(Role.PREFILL):
        told = ", ".join(f"{engine.name or engine.role.value} = {engine.kind.value!r}" for engine in config.engines)
        yield f"engines: kind differs ({told}); a session of one kind of engine cannot be restored by another"
    source = config.tokenizer.source
    made_by_engine = source == "engine" or (source == "auto" and config.launch is None)
    if made_by_engine and any(engine.process is not None for engine in config.engines):
        yield (
            f"tokenizer.source = {source!r}: an engine with a process reads token ids, which are made here; "
            "name the model's tokenizer.json"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _named(config: Config) -> Config:
    """Give each nameless engine its role as name, numbered where there are several."""
    engines = list(config.engines)
    taken = {engine.name for engine in engines}
    for place, engine in enumerate(engines):
        if not engine.name:
            number = 1
            while (name := engine.role.value + (f"-{number}" if number > 1 else "")) in taken:
                number += 1
            taken.add(name)
            engines[place] = engine.model_copy(update={"name": name})
    return config.model_copy(update={"engines": tuple(engines)})
