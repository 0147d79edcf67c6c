"""The knobs of the fake engine: for each stage of a request, every way in which an engine can fail there."""

from dataclasses import dataclass, field, is_dataclass
from typing import Any


@dataclass
class Stage:
    """Trouble at one stage. `times` limits it to that many calls; afterwards the stage works."""

    fail: tuple[int, str] | None = None  # answer with this status and message
    hang: bool = False  # never answer
    die: bool = False  # the engine ends without an answer, and refuses connections until it is revived
    drop: bool = False  # close the connection without an answer; the engine lives
    delay_s: float = 0.0
    times: int = -1


@dataclass
class Run(Stage):
    """Trouble while a request runs, counted in tokens read (prefill) or in tokens answered (decode)."""

    die_after: int | None = None
    cut_after: int | None = None  # only the connection ends
    stall_after: int | None = None  # nothing more comes
    error_after: int | None = None  # an error event, then the end of the stream
    pause_s: float = 0.0  # before each event after the first
    odd_chunks: bool = False  # the stream is written in pieces that have nothing to do with its events


@dataclass
class Save(Stage):
    wrong_count: int = 0  # n_saved is this many too few
    truncate_bytes: int = 0  # the file is this much shorter than n_written says
    wrong_tokens: bool = False  # the file's token list names another last token
    wrong_magic: bool = False
    no_space: bool = False  # 500, and half a file stays behind
    plain_list: bool = False  # the older form of the token list


@dataclass
class Restore(Stage):
    short_count: int = 0  # n_restored is this many too few
    forgets: bool = False  # success, but nothing is reused afterwards
    forgets_from: int = 0  # tokens; shorter sessions are reused all the same


@dataclass
class Knobs:
    """How the engine behaves. May be changed at any time."""

    loading: bool = False  # 503 everywhere
    api_key: str = ""
    read_tps: float = 0.0  # tokens/s; 0: at once
    write_tps: float = 0.0
    answer_tokens: int = 0  # the end token comes after so many; 0: never if the request has a limit, else after 16
    notice_s: float = 0.0  # how long the work for a client that left goes on (the real engine: up to a second)
    tokenize: Stage = field(default_factory=Stage)
    template: Stage = field(default_factory=Stage)
    prefill: Run = field(default_factory=Run)
    save: Save = field(default_factory=Save)
    restore: Restore = field(default_factory=Restore)
    erase: Stage = field(default_factory=Stage)
    decode: Run = field(default_factory=Run)
    health: Stage = field(default_factory=Stage)
    props: Stage = field(default_factory=Stage)
    models: Stage = field(default_factory=Stage)
    slots: Stage = field(default_factory=Stage)
    metrics: Stage = field(default_factory=Stage)

    def update(self, changes: dict[str, Any]) -> None:
        """Take over the named knobs: {"prefill": {"hang": true}}. Raises AttributeError for one that does not exist."""
        _update(self, changes)


def _update(knobs: object, changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        held = getattr(knobs, name)
        if is_dataclass(held):
            _update(held, value)
        else:
            setattr(knobs, name, tuple(value) if isinstance(value, list) else value)
