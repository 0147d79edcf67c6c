"""llama.cpp's own HTTP server from the wheel `xllamacpp`, run as a process of its own under llama-server's flag names.

    python -m splitproxy.engines.embedded -m model.gguf --port 8081 -np 1

It owns the flags and the process's manners (it dies with its parent, ends at once on SIGTERM, creates private files
only) and nothing else: what is served is llama.cpp's. It never serves inside the proxy's process: a damaged session
file or a full graphics card ends the process that the engine lives in.
"""

import argparse
import ctypes
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

GGUF_MAGIC = b"GGUF"
INSTALL_HINT = "the Python package xllamacpp is not installed; `pip install 'splitproxy[local]'` brings it"

_PR_SET_PDEATHSIG = 1
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


class UsageError(Exception):
    """The command line cannot be used: exit code 2."""


class StartError(Exception):
    """The engine did not start: exit code 1."""


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends, however it ends (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was told
        sys.exit(1)


@dataclass(frozen=True, slots=True)
class Flag:
    """One llama-server flag: its names, the field of xllamacpp's parameters it sets, and how its text becomes a value.

    A flag without `read` takes no value and sets `value`.
    """

    names: tuple[str, ...]
    field: str
    read: Callable[[str], Any] | None = None
    value: Any = True


@dataclass(frozen=True, slots=True)
class OneOf:
    """Reads a word that must be one of a few."""

    allowed: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text not in self.allowed:
            raise ValueError(f"one of {', '.join(self.allowed)}")
        return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _gpu_layers(text: str) -> int:
    special = {"auto": -1, "all": -2}
    return special[text] if text in special else _integer(text)


def _on_off(text: str) -> bool:
    return OneOf(("on", "off"))(text) == "on"


def _folder(text: str) -> str:
    if not Path(text).is_dir():
        raise ValueError("an existing folder")
    return text.rstrip("/") + "/"  # the engine appends file names without a separator


def _file_text(text: str) -> str:
    try:
        return Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ValueError("a readable text file") from None


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


FLAGS: tuple[Flag, ...] = (
    Flag(("-m", "--model"), "model.path", str),
    Flag(("-mm", "--mmproj"), "mmproj.path", str),
    Flag(("-a", "--alias"), "model_alias", lambda text: set(_words(text))),
    Flag(("--host",), "hostnames", lambda text: [text]),
    Flag(("--port",), "port", _integer),
    Flag(("--api-key",), "api_keys", _words),
    Flag(("--api-key-file",), "api_keys", lambda text: _file_text(text).split()),
    Flag(("-c", "--ctx-size"), "n_ctx", _integer),
    Flag(("-n", "--predict", "--n-predict"), "n_predict", _integer),
    Flag(("-np", "--parallel"), "n_parallel", _integer),
    Flag(("-kvu", "--kv-unified"), "kv_unified"),
    Flag(("-no-kvu", "--no-kv-unified"), "kv_unified", value=False),
    Flag(("-b", "--batch-size"), "n_batch", _integer),
    Flag(("-ub", "--ubatch-size"), "n_ubatch", _integer),
    Flag(("-t", "--threads"), "cpuparams.n_threads", _integer),
    Flag(("-tb", "--threads-batch"), "cpuparams_batch.n_threads", _integer),
    Flag(("--threads-http",), "n_threads_http", _integer),
    Flag(("-ngl", "--gpu-layers", "--n-gpu-layers"), "n_gpu_layers", _gpu_layers),
    Flag(("-sm", "--split-mode"), "split_mode", OneOf(("none", "layer", "row", "tensor"))),
    Flag(("-mg", "--main-gpu"), "main_gpu", _integer),
    Flag(("-nkvo", "--no-kv-offload"), "no_kv_offload"),
    Flag(("-kvo", "--kv-offload"), "no_kv_offload", value=False),
    Flag(("--no-op-offload",), "no_op_offload"),
    Flag(("-fit", "--fit"), "fit_params", _on_off),
    Flag(("-fa", "--flash-attn"), "flash_attn_type", OneOf(("on", "off", "auto"))),
    Flag(("-ctk", "--cache-type-k"), "cache_type_k", OneOf(_CACHE_TYPES)),
    Flag(("-ctv", "--cache-type-v"), "cache_type_v", OneOf(_CACHE_TYPES)),
    Flag(("-cram", "--cache-ram"), "cache_ram_mib", _integer),
    Flag(("--cache-idle-slots",), "cache_idle_slots"),
    Flag(("--no-cache-idle-slots",), "cache_idle_slots", value=False),
    Flag(("--cache-prompt",), "cache_prompt"),
    Flag(("--no-cache-prompt",), "cache_prompt", value=False),
    Flag(("--cache-reuse",), "n_cache_reuse", _integer),
    Flag(("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"), "n_ctx_checkpoints", _integer),
    Flag(("-cms", "--checkpoint-min-step"), "checkpoint_min_step", _integer),
    Flag(("--swa-full",), "swa_full"),
    Flag(("--context-shift",), "ctx_shift"),
    Flag(("--no-context-shift",), "ctx_shift", value=False),
    Flag(("-sps", "--slot-prompt-similarity"), "slot_prompt_similarity", _number),
    Flag(("--slot-save-path",), "slot_save_path", _folder),
    Flag(("--slots",), "endpoint_slots"),
    Flag(("--no-slots",), "endpoint_slots", value=False),
    Flag(("--metrics",), "endpoint_metrics"),
    Flag(("--props",), "endpoint_props"),
    Flag(("--webui", "--ui"), "ui"),
    Flag(("--no-webui", "--no-ui"), "ui", value=False),
    Flag(("--embedding", "--embeddings"), "embedding"),
    Flag(("-cb", "--cont-batching"), "cont_batching"),
    Flag(("-nocb", "--no-cont-batching"), "cont_batching", value=False),
    Flag(("--warmup",), "warmup"),
    Flag(("--no-warmup",), "warmup", value=False),
    Flag(("--jinja",), "use_jinja"),
    Flag(("--no-jinja",), "use_jinja", value=False),
    Flag(("--chat-template",), "chat_template", str),
    Flag(("--chat-template-file",), "chat_template", _file_text),
    Flag(("--reasoning-format",), "reasoning_format", OneOf(("none", "auto", "deepseek", "deepseek-legacy"))),
    Flag(("--mmap",), "load_mode", value="mmap"),
    Flag(("--no-mmap",), "load_mode", value="none"),
    Flag(("--mlock",), "load_mode", value="mlock"),
    Flag(("--rope-scaling",), "rope_scaling_type", OneOf(("none", "linear", "yarn"))),
    Flag(("--rope-freq-base",), "rope_freq_base", _number),
    Flag(("--rope-freq-scale",), "rope_freq_scale", _number),
    Flag(("--yarn-orig-ctx",), "yarn_orig_ctx", _integer),
    Flag(("-s", "--seed"), "sampling.seed", _integer),
    Flag(("--temp", "--temperature"), "sampling.temp", _number),
    Flag(("--top-k",), "sampling.top_k", _integer),
    Flag(("--top-p",), "sampling.top_p", _number),
    Flag(("--min-p",), "sampling.min_p", _number),
    Flag(("--sse-ping-interval",), "sse_ping_interval", _integer),
    Flag(("--sleep-idle-seconds",), "sleep_idle_seconds", _integer),
    Flag(("-lv", "--verbosity", "--log-verbosity"), "verbosity", _integer),
)

# How a word of the command line is spelled among the constants of xllamacpp: the enum, and the constant's name.
ENUMS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "cache_type_k": ("ggml_type", lambda word: f"GGML_TYPE_{word.upper()}"),
    "cache_type_v": ("ggml_type", lambda word: f"GGML_TYPE_{word.upper()}"),
    "flash_attn_type": (
        "llama_flash_attn_type",
        lambda word: "LLAMA_FLASH_ATTN_TYPE_" + {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[word],
    ),
    "split_mode": ("llama_split_mode", lambda word: f"LLAMA_SPLIT_MODE_{word.upper()}"),
    "load_mode": ("llama_load_mode", lambda word: f"LLAMA_LOAD_MODE_{word.upper()}"),
    "rope_scaling_type": ("llama_rope_scaling_type", lambda word: f"LLAMA_ROPE_SCALING_TYPE_{word.upper()}"),
    "reasoning_format": (
        "common_reasoning_format",
        lambda word: "COMMON_REASONING_FORMAT_" + word.upper().replace("-", "_"),
    ),
}


class _Parser(argparse.ArgumentParser):
    """argparse, but one sentence for a fault instead of a screen of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Read llama-server flags into `{field of the parameters: value}`. Raises UsageError with one sentence."""
    fields: dict[str, Any] = {"port": 8080}
    parser = _Parser(
        prog="python -m splitproxy.engines.embedded",
        description="llama.cpp's HTTP server; the flags mean what they mean to llama-server.",
        allow_abbrev=False,
    )
    for place, flag in enumerate(FLAGS):
        if flag.read is None:
            parser.add_argument(*flag.names, dest=str(place), action="store_const", const=True, help=flag.field)
        else:
            parser.add_argument(*flag.names, dest=str(place), metavar="VALUE", help=flag.field)
    given, unknown = parser.parse_known_args([_hyphens(word) for word in argv])
    if unknown:
        raise UsageError(f"the embedded engine does not know {unknown[0]!r}; a llama-server binary may")
    for place, flag in enumerate(FLAGS):
        text = getattr(given, str(place))
        if text is not None:
            fields[flag.field] = _value(flag, text)
    if not fields.get("model.path"):
        raise UsageError("-m names no model file")
    return fields


def _hyphens(word: str) -> str:
    # llama-server takes --ctx_size for --ctx-size, too.
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _value(flag: Flag, text: str) -> Any:
    if flag.read is None:
        return flag.value
    try:
        return flag.read(text)
    except ValueError as error:
        secret = flag.field == "api_keys"
        raise UsageError(f"{flag.names[-1]} {'' if secret else repr(text) + ' '}is not {error}") from None


def check_model(path: Path) -> None:
    """Raise StartError when the file is not there or is no GGUF file, before the engine meets it."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise StartError(f"{path}: cannot be read: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise StartError(f"{path}: is not a GGUF file")


def parameters(fields: Mapping[str, Any]) -> Any:
    """xllamacpp's CommonParams with the given fields set."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    for field, value in fields.items():
        holder, _, name = field.rpartition(".")
        if field in ENUMS:
            enum, constant = ENUMS[field]
            value = getattr(getattr(xllamacpp, enum), constant(value))
        setattr(getattr(params, holder) if holder else params, name, value)
    return params


def serve(fields: Mapping[str, Any]) -> NoReturn:
    """Start the engine, print its address once it listens, and stay until a signal ends the process."""
    import xllamacpp

    try:
        server = xllamacpp.Server(parameters(fields))
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise StartError(f"the engine did not start with {fields['model.path']}: {error}") from None
    print(server.listening_address, flush=True)
    while True:
        signal.pause()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine. Exit code 2 for a command line that cannot be used, 1 for an engine that did not start."""
    # Not Python's handlers: those run only between bytecodes, and loading a model is minutes inside one call.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    os.umask(0o077)  # session files hold conversations, and the engine creates them with what the umask leaves
    try:
        fields = parse(sys.argv[1:] if argv is None else argv)
        if key := os.environ.get("LLAMA_API_KEY"):
            fields.setdefault("api_keys", [key])
        check_model(Path(fields["model.path"]))
        if importlib.util.find_spec("xllamacpp") is None:
            raise StartError(INSTALL_HINT)
        serve(fields)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
