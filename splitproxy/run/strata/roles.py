"""The configs of both roles, made from one run config: what each server, or the engine itself, is given. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from splitproxy.config import Process
from splitproxy.model import Role
from splitproxy.run.strata.runconfig import ARENA_FLAG, CARD_VARIABLES, PROFILE_FLAG, SECTION, Run

# Keys that neither role has, and why.
DROPPED = {
    SECTION: "the server does not know it",
    **dict.fromkeys(
        ("gpu_roles", "gpu_order", "gpus_asked", "hip_ordinal", "layer_split", "split_skip_if_fits"),
        "each engine has one card",
    ),
    **dict.fromkeys(("replicas", "replica_cpus", "replica_load_tokens", "parallel"), "each engine has one slot"),
    **dict.fromkeys(("lazy_load", "idle_unload_s"), "an engine that is not loaded takes no session"),
    **dict.fromkeys(("host", "port"), "splitproxy says where the servers listen"),
    "api_key": "clients show it to splitproxy",
}

PREFILL_DROPPED = {"vision": "to the prefill engine: requests with pictures are not for it"}


def role_config(run: Run, role: Role, session_dir: Path, arena: Path | None) -> dict[str, Any]:
    """The run config of one role. `arena` is the file in which both find the experts, None for none."""
    dropped = DROPPED | PREFILL_DROPPED if role is Role.PREFILL else DROPPED
    config = {key: value for key, value in run.tree.items() if key not in dropped}
    args = [*_suffixed_profile(run.args(role), role)]
    config |= {
        "gpu": run.split.card(role),
        "args": args if arena is None else [*args, ARENA_FLAG, str(arena)],
        "slot_save_path": str(session_dir),
        "open_browser": False,
    }
    for key in ("log", "expert_profile_save"):
        if isinstance(path := config.get(key), str) and path:
            config[key] = suffixed(path, role)
    return config


def not_passed_on(run: Run) -> list[str]:
    """What the run config says to neither engine, or to one of them alone: key and reason each."""
    told = (DROPPED | PREFILL_DROPPED).items()
    return [f"{key} ({why})" for key, why in told if key != SECTION and run.tree.get(key) is not None]


def suffixed(path: str, role: Role) -> str:
    """A file of one role's own: engine.log becomes engine.prefill.log."""
    whole = PurePath(path)
    return str(whole.with_name(f"{whole.stem}.{role}{whole.suffix}"))


def _suffixed_profile(args: Sequence[str], role: Role) -> Iterator[str]:
    """Two engines that save what they learned to one file would overwrite each other's."""
    before = ""
    for word in args:
        flag, equals, path = word.partition("=")
        if flag == PROFILE_FLAG and equals:
            yield f"{flag}={suffixed(path, role)}"
        else:
            yield suffixed(word, role) if before == PROFILE_FLAG else word
        before = word


def card_environment(run: Run, role: Role) -> dict[str, str]:
    """The variables that show one role's process its card and no other."""
    card = str(run.split.card(role))
    if run.config.backend == "hip":
        return {"HIP_VISIBLE_DEVICES": card}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": card}


def server_environment(base: Mapping[str, str], run: Run, role: Role, api_key: str | None) -> dict[str, str]:
    """The environment of one role's server: `base` without what would choose a card, a key or our own settings."""
    hidden = (*CARD_VARIABLES, "STRATA_API_KEY")
    env = {name: value for name, value in base.items() if name not in hidden and not name.startswith("SPLITPROXY_")}
    env |= card_environment(run, role)
    if api_key:
        env["STRATA_API_KEY"] = api_key
    return env


def prefill_process(config: Mapping[str, Any], run: Run, home: Path) -> Process:
    """The prefill engine as a process of the proxy's own. `config` is its role's, `home` the folder it is started in.

    What the engine has learned about its experts is not saved, unless its arguments say so: reading it again is the
    server's doing.
    """
    return Process(
        exe=str(home / run.config.exe),
        args=tuple(config["args"]),
        gpu=run.split.prefill_gpu,
        log=str(home / config["log"]) if config.get("log") else "",
        cwd=str(home),
        lib_dirs=tuple(run.config.lib_dirs),
        env={name: str(value) for name, value in run.config.env.items()},
        backend="hip" if run.config.backend == "hip" else "cuda",
    )
