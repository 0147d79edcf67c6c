"""The shared expert arena, with every reason for having none, and the room that a session file needs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from splitproxy.run.strata.memory import GIB, MIB, Arena, ArenaSite, arena, kept_free_bytes, longest_session, room

SHM = Path("/dev/shm")
SITE = ArenaSite(
    is_linux=True,
    pack="/packs/one",
    experts_bytes=40 * GIB,
    path=SHM / "run" / "experts.arena",
    folder=SHM,
    exists=False,
    free_bytes=41 * GIB,
)


def placed(shared: bool | str = True, args: tuple[str, ...] = (), **facts: Any) -> Arena:
    return arena(shared, args, dataclasses.replace(SITE, **facts))


def test_s5_one_copy_for_both() -> None:
    """S5: where experts.bin and 1 GiB fit, both engines share one file, and the log says where."""
    found = placed()
    assert (found.path, found.added_bytes) == (SITE.path, 40 * GIB)
    assert found.why == f"both engines share one copy of the experts in {SITE.path}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shared": False}, "split_serve.shared_arena is false"),
        ({"is_linux": False}, "only Linux can share one"),
        (
            {"args": ("--shared-expert-arena", "/x")},
            "the one that the engine arguments name with --shared-expert-arena",
        ),
        ({"experts_bytes": None}, "there is no experts.bin in /packs/one"),
        ({"free_bytes": 41 * GIB - 1}, "/dev/shm has 41.0 GiB free, and 41.0 GiB are needed; make room there"),
        ({"args": ("--mmap-experts",)}, "with --mmap-experts the experts stay in the pack"),
        ({"args": ("--resident-budget-gib", "8")}, "with --resident-budget-gib the experts stay in the pack"),
        ({"experts_bytes": None, "pack": None}, "the engine arguments name no --pack"),
    ],
    ids=[
        "off",
        "system",
        "in the arguments",
        "no experts.bin",
        "too big",
        "read in place",
        "partly read in place",
        "no pack",
    ],
)
def test_s5_why_there_is_none(change: dict[str, Any], reason: str) -> None:
    """S5: each engine keeps its own copy where a file cannot be shared, and one line says why."""
    found = placed(**change)
    assert (found.path, found.added_bytes) == (None, 0)
    assert reason in found.why
    assert "\n" not in found.why


def test_s5_too_big_says_what_to_do() -> None:
    """S5: an arena that does not fit is told with both sizes and two ways out."""
    why = placed(free_bytes=20 * GIB).why
    assert "20.0 GiB free, and 41.0 GiB are needed" in why
    assert "remount" in why
    assert "split_serve.shared_arena" in why


def test_s5_a_named_file_needs_no_pack() -> None:
    """S5: a file that the user names is shared although its size is not known, and one that is there needs no space."""
    assert placed("/fast/arena", path=Path("/fast/arena"), experts_bytes=None).path == Path("/fast/arena")
    there = placed("/fast/arena", path=Path("/fast/arena"), exists=True, free_bytes=0)
    assert (there.path, there.added_bytes) == (Path("/fast/arena"), 0)
    assert placed("/fast/arena", path=Path("/fast/arena"), free_bytes=0).path is None


@pytest.mark.parametrize(
    ("args", "mib"),
    [
        ((), 4096),
        (("--session-min-free-mib", "0"), 0),
        (("--session-min-free-mib", "100", "--kv", "int8", "--session-min-free-mib=512"), 512),
        (("--session-min-free-mib",), 4096),
        (("--session-min-free-mib", "lots"), 4096),
    ],
)
def test_space_that_strata_leaves_free(args: tuple[str, ...], mib: int) -> None:
    """A save leaves 4 GiB free unless the engine's arguments say otherwise."""
    assert kept_free_bytes(args) == mib * MIB


def test_size_of_a_session() -> None:
    """The estimate meets the measured file, and a smaller KV cache gives a longer session."""
    assert longest_session(1_198_691_396, 0, "int8") == pytest.approx(63_025, rel=0.01)
    lengths = [longest_session(8 * GIB, 0, kv) for kv in ("fp16", "int8", "k8v4", "q4_0")]
    assert lengths == sorted(lengths)
    assert longest_session(8 * GIB, 0, None) == longest_session(8 * GIB, 0, "int8")
    assert longest_session(0, 4 * GIB, "int8") == 0


def test_room_for_every_session() -> None:
    """A folder that takes the longest session is no matter for words."""
    found = room(("--max-context", "32768"), SHM, 8 * GIB, 2048)
    assert (found.fault, found.warning) == ("", "")


def test_no_room_for_any_session() -> None:
    """Where not even the shortest prompt of a handover could be saved, the fault has figures and remedies."""
    found = room(("--max-context", "32768"), SHM, 4 * GIB + 100 * MIB, 2048)
    assert found.fault.startswith("no session of 2,048 tokens could be saved: 4,196 MiB are free in /dev/shm")
    assert "Strata leaves 4,096 MiB free" in found.fault
    assert "--session-min-free-mib 0" in found.fault
    assert "split_serve.dir" in found.fault
    assert room(("--session-min-free-mib", "0"), SHM, 4 * GIB, 2048).fault == ""
    assert room((), SHM, 4 * GIB, 0).fault.startswith("no session of 1 tokens")


def test_room_for_short_sessions_only() -> None:
    """Where only the longest sessions have no room, a warning says from which length on."""
    found = room(("--max-context", "262144"), SHM, 5 * GIB, 2048)
    assert found.fault == ""
    assert found.warning.startswith("sessions of more than about 54,")
    assert room((), SHM, 5 * GIB, 2048).warning == ""
