"""The flags, the environment and the cores of launched engines, as tables."""

from pathlib import Path
from typing import Any

import pytest

from splitproxy.config import Launch
from splitproxy.model import Role
from splitproxy.run import flags

BASE = {"model": "/m.gguf"}
BOTH = "-m /m.gguf --host 127.0.0.1 --port 9 -c 8192 --slot-save-path /ram/ --slots --metrics"


def argv(role: Role, threads: int | None = None, **keys: Any) -> str:
    launch = Launch.model_validate(BASE | keys)
    words = flags.engine_flags(launch, role, host="127.0.0.1", port=9, session_dir=Path("/ram"), threads=threads)
    return " ".join(words).removeprefix(BOTH).strip()


@pytest.mark.parametrize(
    ("role", "threads", "keys", "expected"),
    [
        (Role.DECODE, 2, {}, "-np 1 --kv-unified --cache-ram 0 --ctx-checkpoints 4 -b 64 -ngl 0 -t 2 -tb 2"),
        (Role.PREFILL, 2, {}, "-np 1 --ctx-checkpoints 3 -b 64 -ngl 0 -t 2 -tb 2"),
        (Role.DECODE, None, {"decode_gpu": 0}, "-np 1 --kv-unified --cache-ram 0 --ctx-checkpoints 4"),
        (Role.PREFILL, None, {"prefill_gpu": 0}, "-np 1 --ctx-checkpoints 3 -b 512"),
        (
            Role.DECODE,
            None,
            {"decode_slots": 4, "decode_gpu": 1},
            "-np 4 --kv-unified --cache-ram 0 --ctx-checkpoints 4",
        ),
        (
            Role.PREFILL,
            2,
            {"prefill_args": ["--batch-size=2048", "-t", 1, "--ctx_checkpoints", 2]},
            "-np 1 -ngl 0 -tb 2 --batch-size 2048 -t 1 --ctx-checkpoints 2",
        ),
        (
            Role.DECODE,
            None,
            {"decode_gpu": 0, "args": ["-fa", "on"], "decode_args": ["-ngl", 20], "prefill_args": ["-ngl", 99]},
            "-np 1 --kv-unified --cache-ram 0 --ctx-checkpoints 4 -fa on -ngl 20",
        ),
        (
            Role.PREFILL,
            None,
            {"prefill_gpu": 0, "args": ['--chat-template-kwargs={"a": "b=-c"}']},
            '-np 1 --ctx-checkpoints 3 -b 512 --chat-template-kwargs {"a": "b=-c"}',
        ),
    ],
)
def test_flags_of_a_handover(role: Role, threads: int | None, keys: dict[str, Any], expected: str) -> None:
    """Each role gets what a handover needs, and a user's value replaces a default instead of standing beside it."""
    assert argv(role, threads, **keys) == expected


def test_paths_and_context_reach_the_engine() -> None:
    """Model, address, context and session folder come from the configuration, the folder with its slash."""
    launch = Launch.model_validate(BASE | {"context": 32768})
    words = flags.engine_flags(launch, Role.PREFILL, host="::1", port=81, session_dir=Path("/ram"), threads=None)
    expected = "-m /m.gguf --host ::1 --port 81 -c 32768 --slot-save-path /ram/ --slots --metrics -np 1"
    assert " ".join(words).startswith(expected)


REFUSED = [
    (None, ["-m", "x"]),
    (None, ["--model=x"]),
    (None, ["-hf", "some/model"]),
    (None, ["--port", "81"]),
    (None, ["--host=0.0.0.0"]),
    (None, ["--slot-save-path", "/x"]),
    (None, ["--slot_save_path=/x"]),
    (None, ["-c", "4096"]),
    (None, ["-np", "1"]),
    (Role.PREFILL, ["--parallel", "2"]),
    (Role.DECODE, ["--parallel=2"]),
    (Role.DECODE, ["--no-kv-unified"]),
    (None, ["-no-kvu"]),
    (Role.DECODE, ["--cache-ram", "8192"]),
    (Role.DECODE, ["-cram", "-1"]),
    (None, ["--cache-ram=8192"]),
    (Role.PREFILL, ["--no-cache-prompt"]),
    (Role.PREFILL, ["--ctx-checkpoints", "0"]),
    (Role.DECODE, ["--swa-checkpoints=0"]),
    (Role.DECODE, ["--no-slots"]),
    (Role.DECODE, ["--sleep-idle-seconds", "60"]),
    (Role.PREFILL, ["--swa-full"]),
    (Role.DECODE, ["--swa-full"]),
    (Role.PREFILL, ["-ctk", "q8_0"]),
    (Role.DECODE, ["--cache-type-v=q8_0"]),
    (Role.DECODE, ["-fa", "off"]),
    (Role.PREFILL, ["--lora", "x.gguf"]),
    (Role.DECODE, ["--rope-freq-base", "1e6"]),
    (None, ["-sm", "row"]),
    (Role.PREFILL, ["--tensor-split", "1,1"]),
    (Role.DECODE, ["--main-gpu", "1"]),
    (None, ["--device=CUDA0,CUDA1"]),
    (None, ["--rpc", "host:1"]),
    (None, ["--api-key", "hidden"]),
    (None, ["--embedding"]),
]


@pytest.mark.parametrize(("role", "args"), REFUSED)
def test_contradictions_are_refused(role: Role | None, args: list[str]) -> None:
    """An argument that contradicts a handover gets one sentence with the key, the flag as given and the reason."""
    (sentence,) = flags.refuse(args, role)
    key = f"launch.{role}_args" if role else "launch.args"
    assert sentence.startswith(f"{key}: {args[0].partition('=')[0].replace('_', '-')}")
    assert "cannot be given: " in sentence
    assert "hidden" not in sentence


@pytest.mark.parametrize(
    ("role", "args"),
    [
        (None, ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "on", "--lora", "x.gguf"]),
        (None, ["-sm", "none"]),
        (None, ["--sleep-idle-seconds", "-1"]),
        (Role.DECODE, ["--cache-ram", "0"]),
        (Role.DECODE, ["-md", "draft.gguf", "--ctx-checkpoints", "1"]),
        (Role.PREFILL, ["--cache-ram", "8192", "-b", "2048", "-ub", "512", "--ctx-checkpoints", "8"]),
    ],
)
def test_harmless_arguments_pass(role: Role | None, args: list[str]) -> None:
    """What does not contradict a handover is the user's own business."""
    assert flags.refuse(args, role) == []


def test_all_faults_at_once() -> None:
    """Every fault of all three keys is reported, each once."""
    launch = Launch.model_validate(
        BASE
        | {
            "args": ["--port", 1, "--port", 2],
            "prefill_args": ["-np", 2, "--swa-full"],
            "decode_args": ["--cache-ram", 9, "-ngl", 99],
        }
    )
    starts = [" ".join(fault.split()[:2]) for fault in flags.launch_faults(launch)]
    assert starts == [
        "launch.args: --port",
        "launch.prefill_args: -np",
        "launch.prefill_args: --swa-full",
        "launch.decode_args: --cache-ram",
        "launch.decode_args: -ngl",
    ]


@pytest.mark.parametrize(
    ("card", "cuda", "hip", "vulkan"),
    [(None, "", "-1", ""), (0, "0", "0", "0"), (3, "3", "3", "3")],
)
def test_one_card_or_none_is_visible(card: int | None, cuda: str, hip: str, vulkan: str) -> None:
    """An engine sees its card by the number that nvidia-smi shows, whatever the proxy's own environment says."""
    env = flags.environment({"CUDA_VISIBLE_DEVICES": "5,6", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, card, None)
    assert env == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": cuda,
        "HIP_VISIBLE_DEVICES": hip,
        "GGML_VK_VISIBLE_DEVICES": vulkan,
    }


def test_environment_sets_no_flag_behind_our_back() -> None:
    """Flags by environment, our own settings and keys stay out; the engine's own key goes in."""
    base = {
        "PATH": "/bin",
        "LLAMA_ARG_SWA_FULL": "1",
        "LLAMA_API_KEY": "other",
        "LLAMA_SERVER_SLOTS_DEBUG": "1",
        "SPLITPROXY_API_KEYS": "secret",
    }
    kept = {name: value for name, value in flags.environment(base, None, "own").items() if "_VISIBLE_" not in name}
    assert kept == {"PATH": "/bin", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "LLAMA_API_KEY": "own"}
    assert "LLAMA_API_KEY" not in flags.environment(base, None, None)


@pytest.mark.parametrize(
    ("physical", "decode", "prefill"),
    [
        ([{0}], (1, set()), (1, set())),
        ([{0, 1}], (1, set()), (1, set())),
        ([{0}, {1}], (1, {0}), (1, {1})),
        ([{1}, {0}, {2}], (1, {0}), (2, {1, 2})),
        ([{0, 4}, {1, 5}, {2, 6}, {3, 7}], (2, {0, 4, 1, 5}), (2, {2, 6, 3, 7})),
        ([{0, 1}, {2, 3}, {4, 5}], (1, {0, 1}), (2, {2, 3, 4, 5})),
    ],
)
def test_cores_are_halved(
    physical: list[set[int]], decode: tuple[int, set[int]], prefill: tuple[int, set[int]]
) -> None:
    """Each engine gets whole cores of its own, one thread for each; a lone core is shared."""
    shared = flags.share_cores([frozenset(core) for core in physical])
    assert {role: (part.threads, set(part.cpus)) for role, part in shared.items()} == {
        Role.DECODE: decode,
        Role.PREFILL: prefill,
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, False),
        ({"args": ["-t", 3]}, True),
        ({"prefill_args": ["--threads-batch=3"]}, True),
        ({"prefill_args": ["--numa", "distribute"]}, True),
        ({"decode_args": ["-t", 3]}, False),
    ],
)
def test_users_placement_wins(keys: dict[str, Any], expected: bool) -> None:
    """An engine is not pinned when the user's arguments say where or on how many threads it computes."""
    assert flags.places_itself(Launch.model_validate(BASE | keys), Role.PREFILL) is expected
