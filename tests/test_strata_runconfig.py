"""Strata's run config: the section that asks for a pair, what excludes one, and that every fault is said at once."""

from typing import Any

import pytest

from splitproxy.errors import ConfigError
from splitproxy.model import Role
from splitproxy.run.strata.runconfig import Run, keys, parse, value_of

PAIR = {"prefill_gpu": 0, "decode_gpu": 1}


def tree(section: Any = None, **keys: Any) -> dict[str, Any]:
    """A run config; `section` adds to split_serve."""
    return {"exe": "/opt/strata", "args": ["--pack", "/packs/one"], "split_serve": {**PAIR, **(section or {})}, **keys}


def parsed(section: Any = None, **keys: Any) -> Run:
    return parse(tree(section, **keys), "strata-x.json")


def faults(found: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(found, "strata-x.json")
    assert all(fault.startswith("strata-x.json: ") for fault in caught.value.faults)
    return [fault.removeprefix("strata-x.json: ") for fault in caught.value.faults]


def the_fault(section: Any = None, **keys: Any) -> str:
    (fault,) = faults(tree(section, **keys))
    return fault


# -- the section -------------------------------------------------------------------------------------------------------


def test_s1_cards_are_numbers_or_numeric_strings() -> None:
    """S1: a card is a number as nvidia-smi lists it, or such a number in a string."""
    split = parsed({"prefill_gpu": "1", "decode_gpu": 0}).split
    assert (split.card(Role.PREFILL), split.card(Role.DECODE)) == (1, 0)


@pytest.mark.parametrize("value", [True, False, -1, "-1", "one", "", 1.0, None, [0], "0,1"])
@pytest.mark.parametrize("key", ["prefill_gpu", "decode_gpu"])
def test_s1_what_is_no_card_is_refused(key: str, value: Any) -> None:
    """S1: anything else is refused in words that name the key, and the value where it is a plain one."""
    fault = the_fault({"prefill_gpu": 8, "decode_gpu": 9, key: value})
    assert fault.startswith(f"split_serve.{key}")
    assert "must be the number of one card as nvidia-smi lists it" in fault
    assert repr(value) in fault or isinstance(value, list)


def test_s1_cards_must_differ() -> None:
    """S1: two engines on one card are refused, whichever way the number is written."""
    assert "prefill_gpu and decode_gpu are both 1" in the_fault({"prefill_gpu": "1"})


@pytest.mark.parametrize("missing", ["prefill_gpu", "decode_gpu"])
def test_s1_both_cards_are_required(missing: str) -> None:
    """S1: a section without one of the cards is refused by the key's name."""
    section = {key: value for key, value in PAIR.items() if key != missing}
    assert faults({"exe": "x", "split_serve": section}) == [f"split_serve.{missing} is missing"]


@pytest.mark.parametrize("absent", [{}, {"split_serve": None}, {"split_serve": False}])
def test_s1_the_split_is_opt_in(absent: dict[str, Any]) -> None:
    """S1: a run config without the section asks for no pair, and the fault says how to ask."""
    (fault,) = faults({"exe": "x", **absent})
    assert fault.startswith("split_serve is missing; ")
    assert '"prefill_gpu": 0' in fault


def test_s2_unknown_key_is_named_with_the_known_ones() -> None:
    """S2: a mistyped key is refused, with the nearest and all that are known."""
    assert the_fault({"prefill_gpus": 0}) == (
        "unknown key split_serve.prefill_gpus; did you mean 'prefill_gpu'? known keys here: "
        "decode_args, decode_gpu, dir, min_prompt_tokens, prefill_args, prefill_gpu, shared_arena"
    )


def test_s3_fewest_tokens() -> None:
    """S3: min_prompt_tokens is 2048 unless something else, 0 or more, is said."""
    assert parsed().split.min_prompt_tokens == 2048
    assert parsed({"min_prompt_tokens": 0}).split.min_prompt_tokens == 0
    assert the_fault({"min_prompt_tokens": -1}).startswith("split_serve.min_prompt_tokens = -1: ")
    assert the_fault({"min_prompt_tokens": True}).startswith("split_serve.min_prompt_tokens = True: ")


@pytest.mark.parametrize("value", [True, False, "/dev/shm/experts"])
def test_s5_shared_arena_is_a_switch_or_a_file(value: bool | str) -> None:
    """S5: true, false or a file name; true is the default."""
    assert parsed({"shared_arena": value}).split.shared_arena == value
    assert parsed().split.shared_arena is True


@pytest.mark.parametrize("value", [1, "", "  ", 0.5])
def test_s5_anything_else_is_no_arena(value: Any) -> None:
    """S5: another value is refused with what is allowed."""
    assert the_fault({"shared_arena": value}) == (
        f"split_serve.shared_arena = {value!r}: must be true, false, or the name of a file or folder"
    )


def test_s6_role_arguments_are_strings_and_numbers() -> None:
    """S6: arguments of one role come behind those of both; numbers are taken, other values are not."""
    run = parsed({"prefill_args": ["--prefill", 8192], "decode_args": ["--spec-min-p", 0.7]})
    assert run.args(Role.PREFILL) == ("--pack", "/packs/one", "--prefill", "8192")
    assert run.args(Role.DECODE) == ("--pack", "/packs/one", "--spec-min-p", "0.7")
    assert the_fault({"prefill_args": ["--x", True]}).startswith("split_serve.prefill_args.1 = True: ")


def test_every_fault_at_once() -> None:
    """S1, S2, S7: all that is wrong with a file is said together, one sentence each."""
    wrong = tree({"prefill_gpu": True, "dirr": "/x", "decode_args": ["--batch", 2]}, parallel=4, exe=None)
    assert [fault.split()[0].rstrip(":") for fault in faults(wrong)] == [
        "split_serve.prefill_gpu", "unknown", "exe", "parallel",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [[], "x", 3, None])
def test_only_an_object_is_a_run_config(content: object) -> None:
    """A file that holds something else than an object is refused by its type."""
    (fault,) = faults(content)
    assert fault == f"must hold one JSON object, not a {type(content).__name__}"


def test_section_of_another_type() -> None:
    """S1: a section that is no object is refused, value and all."""
    (fault,) = faults({"exe": "x", "split_serve": 3})
    assert fault == "split_serve = 3: must be an object with prefill_gpu and decode_gpu"


@pytest.mark.parametrize("keys", [{"api_key": {"hush": 1}}, {"api_key": ["hush", ["hush"]]}, {"env": "hush"}])
def test_secrets_are_not_shown(keys: dict[str, Any]) -> None:
    """A faulty key or environment is named and not quoted: it may hold a secret."""
    fault = the_fault(**keys)
    assert fault.startswith(next(iter(keys)))
    assert "hush" not in fault


# -- what excludes a pair ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"layer_split": "24"}, "layer_split = '24': "),
        ({"layer_split": [24, 36]}, "layer_split = [24, 36]: "),
        ({"parallel": 2}, "parallel = 2: "),
        ({"parallel": "2"}, "parallel = '2': "),
        ({"replicas": 2}, "replicas = 2: "),
        ({"replicas": [{"gpus": [0]}, {"gpus": [1]}]}, "replicas = [{'gpus': [0]}, {'gpus': [1]}]: "),
        ({"args": ["--layer-split", "auto"]}, "args: --layer-split auto cannot be given: "),
        ({"args": ["--layer-split=24"]}, "args: --layer-split 24 cannot be given: "),
        ({"args": ["--peer-device", 1]}, "args: --peer-device 1 cannot be given: "),
        ({"args": ["--batch", 4]}, "args: --batch 4 cannot be given: "),
        ({"args": ["--slots", 4]}, "args: --slots 4 cannot be given: "),
        ({"args": ["--gpu", "0,1"]}, "args: --gpu 0,1 cannot be given: "),
        ({"args": ["--prompt-cache", 0]}, "args: --prompt-cache 0 cannot be given: "),
        ({"args": ["--serve"]}, "args: --serve cannot be given: "),
        ({"batch": 4}, "batch = 4: "),
        ({"log": "/"}, "log = '/': "),
        ({"log": "."}, "log = '.': "),
        ({"args": ["--expert-profile-save", ""]}, "args: --expert-profile-save : must name a file"),
        ({"args": ["--expert-profile-save", "--adapt-every", 4]}, "args: --expert-profile-save: must name a file"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "env.CUDA_VISIBLE_DEVICES = '0,1': "),
        ({"env": {"HIP_VISIBLE_DEVICES": 0}}, "env.HIP_VISIBLE_DEVICES = '0': "),
        ({"env": {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}}, "env.CUDA_DEVICE_ORDER = 'FASTEST_FIRST': "),
    ],
)
def test_s7_what_session_files_exclude(keys: dict[str, Any], named: str) -> None:
    """S7: what Strata's session files do not go with is refused, with key, value and the reason."""
    fault = the_fault(**keys)
    assert fault.startswith(named)
    assert len(fault) > len(named) + 20


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_split": "auto", "gpu": [0, 1]},
        {"layer_split": None},
        {"parallel": 1},
        {"parallel": False},
        {"parallel": 0},
        {"replicas": 1},
        {"replicas": [{"gpus": [0, 1]}]},
        {"args": ["--prompt-cache", 6]},
        {"args": ["--prompt-cache-every", 0]},
        {"env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "STRATA_POOL_CORES": 4}},
    ],
)
def test_s7_what_does_no_harm_is_allowed(keys: dict[str, Any]) -> None:
    """S7: a key with a value that changes nothing for one card and one slot is no fault."""
    parsed(**keys)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "args", [["--batch", "2"], ["--layer-split", "24"], ["--peer-device", "1"], ["--prompt-cache", "0"]]
)
def test_s7_holds_for_role_arguments(role: Role, args: list[str]) -> None:
    """S7: the arguments of one role are judged like those of both."""
    assert the_fault({f"{role}_args": args}).startswith(f"split_serve.{role}_args: {' '.join(args)} cannot be given: ")


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    "args",
    [
        ["--kv", "int8"],
        ["--max-context", "8192"],
        ["--native-attn"],
        ["--rope-scale", "2"],
        ["--mtp", "/m"],
        ["--pack", "/p"],
    ],
)
def test_s24_what_must_match_is_for_both(role: Role, args: list[str]) -> None:
    """S24: what a session file checks cannot be given to one role, and is fine for both."""
    assert "both engines must have the same" in the_fault({f"{role}_args": args})
    parsed(args=args)


@pytest.mark.parametrize("value", ["lots", "-1", None])
def test_free_space_flag_is_a_number(value: str | None) -> None:
    """--session-min-free-mib is a number of MiB."""
    args = ["--session-min-free-mib"] + ([value] if value else [])
    assert "must be a number of MiB" in the_fault(args=args)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--kv", "int8"], "int8"),
        (["--kv=int8"], "int8"),
        (["--kv", "fp16", "--kv", "int8"], "int8"),
        (["--kv", "--mtp"], None),
        (["--kv-resident", "1"], None),
        (["--kv"], None),
    ],
)
def test_value_of_a_flag(args: list[str], expected: str | None) -> None:
    """The last value counts, and a flag is told from one that begins like it."""
    assert value_of(args, "--kv") == expected


def test_keys_in_a_text() -> None:
    """Several API keys in one text stand between commas; a list is taken as it is."""
    assert keys(" one, two,,") == ("one", "two")
    assert parsed(api_key="one,two").config.api_key == ("one", "two")
    assert parsed(api_key=["a,b"]).config.api_key == ("a,b",)
    assert parsed(api_key=None).config.api_key == ()
