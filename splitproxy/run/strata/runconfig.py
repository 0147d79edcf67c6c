"""Strata's run config (strata-MODEL.json), as far as a pair of engines is concerned: what it says, and what forbids it.

Pure. Keys that are not listed here are between Strata and its user; only the section `split_serve` is ours, and an
unknown key there is a fault.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, model_validator

from splitproxy.checked import Argument, Count, Table, Text, fault_sentence, sound_part
from splitproxy.errors import ConfigError
from splitproxy.model import Role

SECTION = "split_serve"
ARENA_FLAG = "--shared-expert-arena"
IN_PLACE_FLAGS = ("--mmap-experts", "--resident-experts", "--resident-budget-gib")  # the experts stay in the pack
PROFILE_FLAG = "--expert-profile-save"
MIN_FREE_FLAG = "--session-min-free-mib"

# Where the card of a process is chosen. Strata lets its config's env win over its config's gpu.
CARD_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def _card(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"[0-9]+", value.strip()):
        value = int(value)
    if type(value) is not int or value < 0:
        raise ValueError("must be the number of one card as nvidia-smi lists it: 0, 1, ...")
    return value


def _arena(value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value.strip()):
        return value
    raise ValueError("must be true, false, or the name of a file or folder")


def keys(text: str) -> tuple[str, ...]:
    """The API keys in a text, as Strata writes several: with commas between them."""
    return tuple(key for part in text.split(",") if (key := part.strip()))


Card = Annotated[int, BeforeValidator(_card)]


class SplitServe(Table):
    """The section of a run config that asks for a pair. Cards are numbered as nvidia-smi numbers them."""

    prefill_gpu: Card
    decode_gpu: Card
    min_prompt_tokens: Count = 2048
    dir: Text = ""
    shared_arena: Annotated[bool | str, PlainValidator(_arena)] = True
    prefill_args: tuple[Argument, ...] = ()
    decode_args: tuple[Argument, ...] = ()

    @model_validator(mode="after")
    def _cards_differ(self) -> "SplitServe":
        if self.prefill_gpu == self.decode_gpu:
            raise ValueError(
                f"prefill_gpu and decode_gpu are both {self.decode_gpu}; each engine needs a card of its own"
            )
        return self

    def card(self, role: Role) -> int:
        return self.prefill_gpu if role is Role.PREFILL else self.decode_gpu

    def args(self, role: Role) -> tuple[str, ...]:
        return self.prefill_args if role is Role.PREFILL else self.decode_args


class RunConfig(BaseModel):
    """The keys of a run config that a pair depends on. Paths are as written: relative to `cwd`."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    exe: Text = ""
    args: tuple[Argument, ...] = ()
    cwd: Text = ""
    log: Text = ""
    tokenizer: Text = ""
    lib_dirs: tuple[Text, ...] = ()
    env: dict[str, Argument] = {}
    backend: Text = ""
    api_key: Annotated[tuple[Text, ...], BeforeValidator(lambda v: keys(v) if isinstance(v, str) else v)] = ()
    split_serve: SplitServe | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run config that a pair can be made of: the keys we know, and the whole file as it was."""

    source: str
    config: RunConfig
    split: SplitServe
    tree: Mapping[str, Any]

    def args(self, role: Role) -> tuple[str, ...]:
        """All engine arguments of one role, as the user gave them."""
        return self.config.args + self.split.args(role)

    @property
    def all_args(self) -> tuple[str, ...]:
        return self.config.args + self.split.prefill_args + self.split.decode_args


def parse(tree: object, source: str) -> Run:
    """Check the content of a run config; `source` names it in faults. Raises ConfigError with every fault."""
    if not isinstance(tree, dict):
        raise ConfigError([f"{source}: must hold one JSON object, not a {type(tree).__name__}"])
    faults: list[str] = []
    known = {key: tree[key] for key in RunConfig.model_fields if tree.get(key) is not None}
    if not isinstance(section := known.pop(SECTION, False), dict) and section is not False:
        faults.append(f"{source}: {SECTION} = {section!r}: must be an object with prefill_gpu and decode_gpu")
    elif section is False:
        faults.append(
            f"{source}: {SECTION} is missing; a pair is asked for with "
            f'"{SECTION}": {{"prefill_gpu": 0, "decode_gpu": 1}} and the numbers of your cards'
        )
    else:
        known[SECTION] = {**section}
    config, doubtful = sound_part(
        RunConfig,
        known,
        faults,
        lambda error: fault_sentence(RunConfig, error, source, secret=("api_key", "env")),
    )
    if not config.exe and "exe" not in doubtful:
        faults.append(f"{source}: exe is missing; it names Strata's engine program")
    faults += [f"{source}: {fault}" for fault in _exclusions(tree, config)]
    if faults or config.split_serve is None:
        raise ConfigError(faults)
    return Run(source, config, config.split_serve, tree)


# -- what excludes a pair ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _KeyRule:
    """A key of the run config that must be absent or harmless, and why."""

    name: str
    harmless: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class _FlagRule:
    """Engine arguments that cannot be given, where, with which values, and why. A name ending in * is a beginning."""

    names: tuple[str, ...]
    reason: str
    one_role: bool = False  # only where they are given to one engine alone
    values: str = ".*"  # a pattern

    def applies(self, name: str, value: str | None, role: Role | None) -> bool:
        named = any(name.startswith(known[:-1]) if known.endswith("*") else name == known for known in self.names)
        return named and (role is not None or not self.one_role) and bool(re.fullmatch(self.values, value or ""))


_ONE_CARD = "a session file holds all layers of one card's engine; remove it, each engine has one card here"

_KEY_RULES = (
    _KeyRule(
        "layer_split",
        # "auto" is what Strata does where several cards are named; here none of the engines has several.
        lambda value: value is None or value is False or str(value).strip().lower() in ("", "auto"),
        _ONE_CARD,
    ),
    _KeyRule(
        "parallel",
        lambda value: value is None or (isinstance(value, int) and value <= 1),
        "an engine with batch slots saves and restores no session; remove it, or set it to 1",
    ),
    _KeyRule(
        "batch",
        lambda value: value is None or (isinstance(value, int) and value <= 1),
        "an engine with batch slots saves and restores no session; remove it",
    ),
    _KeyRule(
        "log",
        lambda value: not isinstance(value, str) or not value or bool(PurePath(value).name),
        "it must name a file, of which each engine gets one of its own",
    ),
    _KeyRule(
        "replicas",
        lambda value: value is None or (len(value) < 2 if isinstance(value, list) else value in (False, 0, 1)),
        "a server with replicas offers no session files; remove it, a pair has one engine for each role",
    ),
)

_FLAG_RULES = (
    _FlagRule(("--layer-split", "--split-skip-if-fits", "--peer-device"), _ONE_CARD),
    _FlagRule(("--gpu",), f"the cards come from {SECTION}.prefill_gpu and {SECTION}.decode_gpu"),
    _FlagRule(("--batch", "--slots"), "an engine with batch slots saves and restores no session"),
    _FlagRule(("--prompt-cache",), "the session file is made from the prompt cache", values=r"0+|-[0-9]+"),
    _FlagRule(("--serve",), "it is added where the engine is started"),
    _FlagRule(
        (ARENA_FLAG,),
        "the engines share their experts only where both are given the same file; put it in args",
        one_role=True,
    ),
    _FlagRule(
        (
            *("--pack", "--native*", "--kv", "--max-context", "--kv-resident", "--mtp", "--mtp-window", "--no-ple"),
            "--rope-*",
        ),
        "both engines must have the same, or one refuses the session file of the other; put it in args",
        one_role=True,
    ),
)


def _exclusions(tree: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    """Everything that Strata's session files exclude: a sentence each, with key, value and reason."""
    for rule in _KEY_RULES:
        if not rule.harmless(value := tree.get(rule.name)):
            yield f"{rule.name} = {value!r}: {rule.reason}"
    section = config.split_serve
    given_to: list[tuple[str, Role | None, tuple[str, ...]]] = [("args", None, config.args)]
    if section is not None:
        given_to += [(f"{SECTION}.{role}_args", role, section.args(role)) for role in Role]
    for key, role, args in given_to:
        for name, value in given(args):
            shown = name if value is None else f"{name} {value}"
            for flag in _FLAG_RULES:
                if flag.applies(name, value, role):
                    yield f"{key}: {shown} cannot be given: {flag.reason}"
            if name == PROFILE_FLAG and not PurePath(value or "").name:
                yield f"{key}: {shown}: must name a file, of which each engine gets one of its own"
            if name == MIN_FREE_FLAG and not re.fullmatch(r"[0-9]+", value or ""):
                yield f"{key}: {shown}: must be a number of MiB, 0 or more"
    for name in CARD_VARIABLES:
        if name in config.env and (name, config.env[name]) != ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"):
            yield (
                f"env.{name} = {config.env[name]!r}: it would move both engines to the same card; remove it, "
                f"{SECTION}.prefill_gpu and {SECTION}.decode_gpu choose the cards"
            )


# -- engine arguments --------------------------------------------------------------------------------------------------


def given(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag with the word behind it, None where that is a flag again. `--flag=value` counts as two words."""
    words: list[str] = []
    for word in args:
        name, equals, value = word.partition("=")
        words += [name, value] if equals and _is_flag(name) else [word]
    for place, word in enumerate(words):
        if _is_flag(word):
            behind = words[place + 1] if place + 1 < len(words) else None
            yield word, None if behind is None or _is_flag(behind) else behind


def value_of(args: Sequence[str], name: str) -> str | None:
    """The last value that is given for a flag; None when it is not given, or without a value."""
    return next((value for flag, value in reversed([*given(args)]) if flag == name), None)


def is_given(args: Sequence[str], name: str) -> bool:
    return any(flag == name for flag, _ in given(args))


def _is_flag(word: str) -> bool:
    return re.match(r"-{1,2}[A-Za-z]", word) is not None
