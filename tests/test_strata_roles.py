"""One run config makes two: each role's card, files and arguments, and what neither has."""

from pathlib import Path
from typing import Any

import pytest

from splitproxy.model import Role
from splitproxy.run.strata.roles import (
    DROPPED,
    card_environment,
    not_passed_on,
    prefill_process,
    role_config,
    server_environment,
    suffixed,
)
from splitproxy.run.strata.runconfig import Run, parse

SESSIONS = Path("/dev/shm/sessions")


def run(section: Any = None, **keys: Any) -> Run:
    pair = {"prefill_gpu": 2, "decode_gpu": 0, **(section or {})}
    return parse({"exe": "build/strata", "split_serve": pair, **keys}, "strata-x.json")


def configs(found: Run, arena: Path | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    reader, writer = (role_config(found, role, SESSIONS, arena) for role in (Role.PREFILL, Role.DECODE))
    return reader, writer


def test_s8_card_of_each_role() -> None:
    """S8: each config names one card, whatever cards the run config had."""
    reader, writer = configs(run(gpu=[0, 1, 2]))
    assert (reader["gpu"], writer["gpu"]) == (2, 0)


def test_s8_files_of_each_role() -> None:
    """S8: log and learned profile get the role in their name, as a key and as an argument."""
    found = run(
        log="/logs/engine.log", expert_profile_save="learned.bin", args=["--expert-profile-save", "/p/x.bin", "-v"]
    )
    reader, writer = configs(found)
    assert (reader["log"], writer["log"]) == ("/logs/engine.prefill.log", "/logs/engine.decode.log")
    assert (reader["expert_profile_save"], writer["expert_profile_save"]) == (
        "learned.prefill.bin",
        "learned.decode.bin",
    )
    assert reader["args"] == ["--expert-profile-save", "/p/x.prefill.bin", "-v"]
    assert writer["args"] == ["--expert-profile-save", "/p/x.decode.bin", "-v"]
    assert role_config(run(args=["--expert-profile-save=x.bin"]), Role.DECODE, SESSIONS, None)["args"] == [
        "--expert-profile-save=x.decode.bin"
    ]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("engine.log", "engine.prefill.log"), ("/a.b/engine", "/a.b/engine.prefill"), ("x.tar.gz", "x.tar.prefill.gz")],
)
def test_s8_suffix(path: str, expected: str) -> None:
    """S8: the role comes before the last extension, and a folder's dot is none."""
    assert suffixed(path, Role.PREFILL) == expected


def test_s8_no_file_no_suffix() -> None:
    """S8: a run config without log and profile gets none."""
    reader, _ = configs(run(log=None))
    assert reader["log"] is None
    assert "expert_profile_save" not in reader


def test_s8_role_arguments_come_last() -> None:
    """S8: what is said for one role alone is appended, numbers as strings."""
    reader, writer = configs(run({"prefill_args": ["--prefill", 8192]}, args=["--kv", "int8", "--spec", 4]))
    assert reader["args"] == ["--kv", "int8", "--spec", "4", "--prefill", "8192"]
    assert writer["args"] == ["--kv", "int8", "--spec", "4"]


def test_s8_what_neither_has() -> None:
    """S8: the section, what names several cards or slots, and what the proxy decides are dropped; the rest stays."""
    gone = dict.fromkeys(DROPPED, None) | {
        "gpu_roles": {"0": "experts"}, "layer_split": "auto", "split_skip_if_fits": True, "parallel": 1,
        "lazy_load": True, "idle_unload_s": 60, "host": "0.0.0.0", "port": 8000, "api_key": "hush",
    }  # fmt: skip
    del gone["split_serve"]
    for config in configs(run(**gone, tokenizer="/packs/one/tokenizer", aliases=["a"], unheard_of={"x": 1})):
        assert not DROPPED.keys() & config.keys()
        assert (config["tokenizer"], config["aliases"], config["unheard_of"]) == (
            "/packs/one/tokenizer", ["a"], {"x": 1},
        )  # fmt: skip
        assert config["exe"] == "build/strata"


def test_s8_what_is_dropped_is_said() -> None:
    """S8: each key that is there and not passed on is told with its reason, and never its value."""
    found = run(gpu_roles={"0": "experts"}, api_key="hush", lazy_load=None, vision={})
    assert not_passed_on(found) == [
        "gpu_roles (each engine has one card)",
        "api_key (clients show it to splitproxy)",
        "vision (to the prefill engine: requests with pictures are not for it)",
    ]
    assert not_passed_on(run()) == []


def test_s15_pictures_are_for_the_decode_engine() -> None:
    """S15: the prefill engine has no encoder for pictures beside it."""
    reader, writer = configs(run(vision={"exe": "strata-vision"}))
    assert "vision" not in reader
    assert writer["vision"] == {"exe": "strata-vision"}


def test_s4_both_save_and_restore_in_one_folder() -> None:
    """S4: both servers get the proxy's session folder."""
    assert {config["slot_save_path"] for config in configs(run(slot_save_path="elsewhere"))} == {str(SESSIONS)}


def test_s5_both_name_one_arena() -> None:
    """S5: both engines get the same file, or neither a word."""
    for config in configs(run(args=["--kv", "int8"]), Path("/dev/shm/a")):
        assert config["args"] == ["--kv", "int8", "--shared-expert-arena", "/dev/shm/a"]
    assert configs(run(args=["--kv", "int8"]))[0]["args"] == ["--kv", "int8"]


def test_the_run_config_stays_as_it_was() -> None:
    """Making both configs changes nothing in the one they are made of."""
    found = run(log="engine.log", args=["--expert-profile-save", "x"])
    before = {**found.tree, "args": [*found.tree["args"]]}
    configs(found)
    assert found.tree == before


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        ("cuda", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}),
        (None, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}),
        ("hip", {"HIP_VISIBLE_DEVICES": "2"}),
    ],
)
def test_s1_card_in_the_environment(backend: str | None, variables: dict[str, str]) -> None:
    """S1: a process sees its card alone, numbered as nvidia-smi does; with HIP, as HIP does."""
    found = run(backend=backend)
    assert card_environment(found, Role.PREFILL) == variables
    base = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "x"}
    assert server_environment(base, found, Role.PREFILL, None) == {"PATH": "/bin", **variables}


def test_keys_in_the_environment() -> None:
    """A server asks for the key that the proxy knows, or for none: never for that of the clients, or an empty one."""
    base = {"STRATA_API_KEY": "clients", "SPLITPROXY_API_KEYS": "clients", "STRATA_POOL_CORES": "4"}
    without = server_environment(base, run(), Role.DECODE, None)
    assert "clients" not in without.values()
    assert "STRATA_API_KEY" not in without
    assert without["STRATA_POOL_CORES"] == "4"
    assert server_environment(base, run(), Role.DECODE, "ours")["STRATA_API_KEY"] == "ours"


def test_a_prefill_engine_of_its_own() -> None:
    """On stdio the prefill engine gets what its server would have given it, with absolute paths."""
    found = run(
        {"prefill_args": ["--prefill", "auto"]},
        log="logs/engine.log", lib_dirs=["/cuda"], env={"STRATA_KV_ROT": 1}, backend="hip", args=["--kv", "int8"],
    )  # fmt: skip
    config = role_config(found, Role.PREFILL, SESSIONS, Path("/dev/shm/a"))
    process = prefill_process(config, found, Path("/opt/strata"))
    assert process.model_dump() == {
        "exe": "/opt/strata/build/strata",
        "args": ("--kv", "int8", "--prefill", "auto", "--shared-expert-arena", "/dev/shm/a"),
        "gpu": 2,
        "log": "/opt/strata/logs/engine.prefill.log",
        "cwd": "/opt/strata",
        "lib_dirs": ("/cuda",),
        "env": {"STRATA_KV_ROT": "1"},
        "backend": "hip",
    }
    assert prefill_process(role_config(run(), Role.PREFILL, SESSIONS, None), run(), Path("/x")).log == ""
