"""What two Strata engines put into memory beside their models: one copy of the experts, and session files.

Pure: sizes and places in, a decision and its one-line reason out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from splitproxy.run.strata.runconfig import ARENA_FLAG, IN_PLACE_FLAGS, MIN_FREE_FLAG, SECTION, is_given, value_of

MIB, GIB = 2**20, 2**30

ARENA_MARGIN_BYTES = GIB  # for the arena's own header and what else is put there while it is filled
DEFAULT_MIN_FREE_MIB = 4096  # what Strata leaves free when it saves

# A session file, measured: 1,198,691,396 bytes for 63,025 tokens with an 8-bit KV cache, of which two copies of the
# recurrent state do not depend on the length.
SESSION_FIXED_BYTES = 236_000_000
SESSION_BYTES_PER_TOKEN = 15_300
_KV_FACTOR = {"fp16": 2.0, "int8": 1.0, "k8v4": 0.77, "q4_0": 0.5}


@dataclass(frozen=True, slots=True)
class ArenaSite:
    """What there is to know before an arena is placed. `experts_bytes` is None where the pack has no experts.bin.

    `folder` is how people know the place that `path` lies in, and `free_bytes` what is free there.
    """

    is_linux: bool
    pack: str | None  # as the engine's arguments name it
    experts_bytes: int | None
    path: Path
    folder: Path
    exists: bool  # somebody has made it before
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Where both engines find the experts, None: each keeps its own. `why` is for the log."""

    path: Path | None
    added_bytes: int  # to what lies in the folder of `path`
    why: str


def arena(shared: bool | str, args: Sequence[str], site: ArenaSite) -> Arena:
    """Decide whether both engines share one copy of the experts. `shared` is split_serve.shared_arena."""
    if shared is False:
        return _own(f"{SECTION}.shared_arena is false")
    if not site.is_linux:
        return _own("only Linux can share one")
    if is_given(args, ARENA_FLAG):
        return Arena(None, 0, f"the shared expert arena is the one that the engine arguments name with {ARENA_FLAG}")
    if found := next((flag for flag in IN_PLACE_FLAGS if is_given(args, flag)), None):
        return _own(f"with {found} the experts stay in the pack, and there is nothing to share")
    if site.experts_bytes is None and not isinstance(shared, str):
        return _own(
            f"there is no experts.bin in {site.pack}" if site.pack else "the engine arguments name no --pack to find it"
        )
    needed_bytes = (site.experts_bytes or 0) + ARENA_MARGIN_BYTES
    if not site.exists and site.free_bytes < needed_bytes:
        return _own(
            f"{site.folder} has {site.free_bytes / GIB:.1f} GiB free, and {needed_bytes / GIB:.1f} GiB are needed; "
            f"make room there (mount -o remount,size=...G enlarges a folder in RAM), or name a file elsewhere with "
            f"{SECTION}.shared_arena"
        )
    added_bytes = 0 if site.exists else site.experts_bytes or 0
    return Arena(site.path, added_bytes, f"both engines share one copy of the experts in {site.path}")


def _own(reason: str) -> Arena:
    return Arena(None, 0, f"each engine keeps its own copy of the experts: {reason}")


def kept_free_bytes(args: Sequence[str]) -> int:
    """What an engine with these arguments leaves free where it saves a session."""
    mib = value_of(args, MIN_FREE_FLAG) or ""
    return (int(mib) if mib.isascii() and mib.isdigit() else DEFAULT_MIN_FREE_MIB) * MIB


def longest_session(free_bytes: int, kept_bytes: int, kv: str | None) -> int:
    """About how many tokens a session may have to be saved there. `kv` is the engine's --kv; unknown: as int8."""
    per_token = SESSION_BYTES_PER_TOKEN * _KV_FACTOR.get(kv or "", 1.0)
    return max(0, int((free_bytes - kept_bytes - SESSION_FIXED_BYTES) / per_token))


@dataclass(frozen=True, slots=True)
class Room:
    """What the free space of the session folder allows. At most one of both is said."""

    fault: str = ""
    warning: str = ""


def room(args: Sequence[str], folder: Path, free_bytes: int, least_tokens: int) -> Room:
    """Whether sessions can be saved in `folder` at all; `args` are the prefill engine's.

    `least_tokens` is the shortest prompt that is handed over. Sizes are estimates: the engine has the last word.
    """
    kept_bytes = kept_free_bytes(args)
    longest = longest_session(free_bytes, kept_bytes, value_of(args, "--kv"))
    there = f"{free_bytes / MIB:,.0f} MiB are free in {folder}"
    rule = f"Strata leaves {kept_bytes / MIB:,.0f} MiB free there beside a session file"
    remedy = f"{MIN_FREE_FLAG} 0 in args, or {SECTION}.dir in a place with more room, would change that"
    if longest < max(1, least_tokens):
        return Room(
            fault=f"no session of {max(1, least_tokens):,} tokens could be saved: {there}, and {rule}; {remedy}"
        )
    context = value_of(args, "--max-context") or ""
    if context.isascii() and context.isdigit() and longest < int(context):
        return Room(
            warning=f"sessions of more than about {longest:,} tokens cannot be saved: {there}, and {rule}; {remedy}"
        )
    return Room()
