"""The command line, the environment and the cores of an engine that splitproxy starts: pure functions of the config.

It knows which llama-server flags a handover needs and which contradict it. It never starts or reads anything.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from splitproxy.config import Launch
from splitproxy.model import Role

# A batch is the shortest piece of reading that can be cancelled; 512 costs a few per cent of reading speed.
READING_BATCH = 512
# And it is how long all running answers stand still at once while a decode engine reads a prompt. On the CPU 64 read as
# fast as 512, and fewer half as fast: attention is computed for 64 tokens at a time. Both engines have the same there,
# so that both round alike.
CPU_BATCH = 64
# A session file carries every checkpoint that its slot holds, and each may be many megabytes.
PREFILL_CHECKPOINTS = 3
DECODE_CHECKPOINTS = 4

_THREADS = ("-t", "--threads")
_THREADS_BATCH = ("-tb", "--threads-batch")
_GPU_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_BATCH = ("-b", "--batch-size")
_CHECKPOINTS = ("--ctx-checkpoints", "-ctxcp", "--swa-checkpoints")
_CACHE_RAM = ("--cache-ram", "-cram")
_PLACEMENT = ("-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--numa")
# What decides the layout or the numbers of a session file.
_ARITHMETIC = (
    *("-ctk", "--cache-type-k", "-ctv", "--cache-type-v", "-fa", "--flash-attn"),
    *("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--override-kv"),
    *("--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor", "--yarn-beta-slow", "--yarn-beta-fast"),
)
_WEIGHTS = (
    *("--lora", "--lora-scaled", "--lora-init-without-apply"),
    *("--control-vector", "--control-vector-scaled", "--control-vector-layer-range"),
)

_EVERYWHERE: frozenset[Role | None] = frozenset({None, *Role})
_ONE_ROLE: frozenset[Role | None] = frozenset(Role)
_NOT_PREFILL: frozenset[Role | None] = frozenset({None, Role.DECODE})


@dataclass(frozen=True, slots=True)
class Rule:
    """Flags that must not be given, where, with which harmless values, and why."""

    names: tuple[str, ...]
    reason: str
    where: frozenset[Role | None] = _EVERYWHERE  # None: launch.args, which both engines get
    allowed: frozenset[str] = frozenset()


_SAME = "both engines must have the same, or a session file of one is refused or misread by the other; use launch.args"
_ONE_CARD = "each engine runs on one card; name it with launch.prefill_gpu and launch.decode_gpu"

RULES: tuple[Rule, ...] = (
    Rule(("-m", "--model"), "it comes from launch.model"),
    Rule(
        ("-mu", "--model-url", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-dr", "--docker-repo"),
        "launch.model names the model file",
    ),
    Rule(("--models-dir", "--models-preset"), "an engine that switches models loses its slots; launch.model names one"),
    Rule(("--host", "--port"), "it comes from the engine's url in [[engines]], or is a free port of this machine"),
    Rule(("--slot-save-path",), "it comes from split.dir, which both engines and splitproxy must agree on"),
    Rule(("-c", "--ctx-size"), "it comes from launch.context"),
    Rule(
        ("--api-prefix", "--ssl-key-file", "--ssl-cert-file"), "splitproxy speaks plain HTTP to the engines it starts"
    ),
    Rule(
        ("--api-key", "--api-key-file"),
        "every user of the machine can read a command line; name the key's variable in api_key_env of [[engines]]",
    ),
    Rule(
        ("-np", "--parallel"),
        "one slot reads one prompt at a time; more make session files that the decode engine refuses",
        frozenset({Role.PREFILL}),
    ),
    Rule(("-np", "--parallel"), "it comes from launch.decode_slots", _NOT_PREFILL),
    Rule(
        ("-no-kvu", "--no-kv-unified"),
        "a decode engine restores a one-slot session file only into a unified pool",
        _NOT_PREFILL,
    ),
    Rule(
        _CACHE_RAM,
        "on the decode engine the prompt cache in RAM empties restored slots and can mix up conversations; "
        "it must be 0 there, prefill_args may have it",
        _NOT_PREFILL,
        frozenset({"0"}),
    ),
    Rule(("--no-cache-prompt",), "without the prompt cache nothing of a restored session is reused"),
    Rule(("--no-slots",), "splitproxy watches the slots"),
    Rule(
        ("--sleep-idle-seconds",),
        "an engine that sleeps forgets what its slots hold",
        allowed=frozenset({"-1"}),
    ),
    Rule(
        ("--swa-full",),
        "a session file holds the attention window only, so this engine would answer from tokens it does not have",
    ),
    Rule(_ARITHMETIC, _SAME, _ONE_ROLE),
    Rule(
        _WEIGHTS,
        "both engines must compute the same, or answers are wrong without an error; use launch.args",
        _ONE_ROLE,
    ),
    Rule(("-sm", "--split-mode"), _ONE_CARD, allowed=frozenset({"none"})),
    Rule(("-ts", "--tensor-split", "-mg", "--main-gpu", "-dev", "--device", "--rpc"), _ONE_CARD),
    Rule(
        ("--embedding", "--embeddings", "--rerank", "--reranking"),
        "an engine that is restricted to embeddings writes no answers",
    ),
)


def refuse(args: Sequence[str], role: Role | None) -> list[str]:
    """Why these extra arguments contradict a handover: a sentence each. `role` None: they are for both engines."""
    key = f"launch.{role}_args" if role else "launch.args"
    return list(dict.fromkeys(f"{key}: {sentence}" for sentence in _contradictions(args, role)))


def _contradictions(args: Sequence[str], role: Role | None) -> Iterator[str]:
    for name, value in _given(args):
        for rule in RULES:
            if name in rule.names and role in rule.where and value not in rule.allowed:
                shown = f" {value}" if value is not None and rule.allowed else ""
                yield f"{name}{shown} cannot be given: {rule.reason}"
        if name in _CHECKPOINTS and value is not None and re.fullmatch(r"0+|-\d+", value):
            yield f"{name} {value} cannot be given: without a checkpoint sliding-window models reuse nothing"


def launch_faults(launch: Launch) -> list[str]:
    """Every fault in the engines' arguments."""
    faults = refuse(launch.args, None)
    for role in Role:
        args = role_args(launch, role)
        faults += refuse(args, role)
        layers = _last(args, _GPU_LAYERS)
        if gpu(launch, role) is None and layers not in (None, "0"):
            faults.append(f"launch.{role}_args: {_GPU_LAYERS[0]} {layers} needs a card; name it with launch.{role}_gpu")
    return faults


def role_args(launch: Launch, role: Role) -> tuple[str, ...]:
    return launch.prefill_args if role is Role.PREFILL else launch.decode_args


def gpu(launch: Launch, role: Role) -> int | None:
    return launch.prefill_gpu if role is Role.PREFILL else launch.decode_gpu


def engine_flags(
    launch: Launch, role: Role, *, host: str, port: int, session_dir: Path, threads: int | None = None
) -> list[str]:
    """The flags of one engine, without the program. `threads` is for an engine on the CPU.

    What the user gives comes last and replaces what is a mere default.
    """
    extra = list(_split(launch.args + role_args(launch, role)))
    flags = ["-m", launch.model, "--host", host, "--port", str(port), "-c", str(launch.context)]
    flags += ["--slot-save-path", f"{session_dir}/", "--slots", "--metrics"]
    if role is Role.DECODE:
        flags += ["-np", str(launch.decode_slots), "--kv-unified"]
        defaults = [(_CACHE_RAM, 0), (_CHECKPOINTS, DECODE_CHECKPOINTS)]
    else:
        flags += ["-np", "1"]
        defaults = [(_CHECKPOINTS, PREFILL_CHECKPOINTS)]
    if gpu(launch, role) is None:
        defaults += [(_BATCH, CPU_BATCH), (_GPU_LAYERS, 0)]
    elif role is Role.PREFILL:
        defaults.append((_BATCH, READING_BATCH))
    if threads is not None:
        defaults += [(_THREADS, threads), (_THREADS_BATCH, threads)]
    for names, value in defaults:
        if _last(extra, names) is None:
            flags += [names[0], str(value)]
    return flags + extra


def environment(base: Mapping[str, str], card: int | None, api_key: str | None) -> dict[str, str]:
    """The engine's environment: `base` without what would set flags behind our back, one card visible or none."""
    env = {name: value for name, value in base.items() if not _is_hidden(name)}
    number = "" if card is None else str(card)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbers that nvidia-smi shows
    env["CUDA_VISIBLE_DEVICES"] = number
    env["HIP_VISIBLE_DEVICES"] = number or "-1"
    env["GGML_VK_VISIBLE_DEVICES"] = number
    if api_key:
        env["LLAMA_API_KEY"] = api_key
    return env


def _is_hidden(name: str) -> bool:
    # SLOTS_DEBUG would show prompts to whoever asks for the slots.
    return name.startswith(("LLAMA_ARG_", "SPLITPROXY_")) or name in ("LLAMA_API_KEY", "LLAMA_SERVER_SLOTS_DEBUG")


@dataclass(frozen=True, slots=True)
class Cores:
    """Where an engine on the CPU computes: how many threads, and on which logical processors (none: anywhere)."""

    threads: int
    cpus: frozenset[int] = frozenset()


def share_cores(physical: Sequence[frozenset[int]]) -> dict[Role, Cores]:
    """Give each engine its own half of the cores, so that reading a prompt does not slow an answer down.

    `physical` holds the logical processors of each core; two halves of one core would share its arithmetic. An odd
    core goes to the prefill engine, which computes more for each byte of memory it reads.
    """
    cores = sorted(physical, key=min)
    if len(cores) < 2:
        return {role: Cores(1) for role in Role}
    middle = len(cores) // 2
    parts = {Role.DECODE: cores[:middle], Role.PREFILL: cores[middle:]}
    return {role: Cores(len(part), frozenset[int]().union(*part)) for role, part in parts.items()}


def places_itself(launch: Launch, role: Role) -> bool:
    """Whether the user's arguments say where or on how many threads this engine computes."""
    args = launch.args + role_args(launch, role)
    return _last(args, _THREADS + _THREADS_BATCH + _PLACEMENT) is not None


def _split(args: Sequence[str]) -> Iterator[str]:
    """`--flag=value` as two words, which every llama-server understands; `--flag_name` as it spells it itself."""
    for word in args:
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            yield word
            continue
        yield match[1].replace("_", "-")
        if match[2] is not None:
            yield match[2]


def _given(args: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each flag with the word behind it, None where that is a flag again."""
    words = [*_split(args)]
    for place, word in enumerate(words):
        if _is_flag(word):
            behind = words[place + 1] if place + 1 < len(words) else None
            yield word, None if behind is None or _is_flag(behind) else behind


def _is_flag(word: str) -> bool:
    return re.match(r"-{1,2}[A-Za-z]", word) is not None


def _last(args: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value given for a flag, "" for one without a value, None when it is not given."""
    values = [value or "" for name, value in _given(args) if name in names]
    return values[-1] if values else None
