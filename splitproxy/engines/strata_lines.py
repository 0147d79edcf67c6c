"""The line protocol of `strata --serve`: the commands, what each line that comes back means, and how long to wait for
it. Pure: text in, values out.

A line that is none of the protocol's is `Other`: engines print them, a sign of life while a prompt is read.
A line of the protocol whose values make no sense raises OutOfStep: whoever reads on would take one answer for another.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from splitproxy.model import Tokens

SILENCE_S = 300.0  # an engine may be silent for so long, whatever it does
SLOWEST_TOKENS_PER_S, LONGEST_COUNTED = 50, 32768  # before the first line about a prompt
BESIDE_PROMPT_TOKENS = 8 + 1  # of the context: what the engine keeps for itself, and one token of answer
CHUNK_FACTOR = 3  # a chunk may take so many times as long as the one before
WAIT_MAX_S = 3600
FIELDS_LEAST, FIELDS_READ, READ_FIELD, REUSED_FIELD = 5, 14, 13, 7
SESSION_ERRORS = frozenset({"invalid", "memory", "storage", "io"})


class OutOfStep(Exception):  # noqa: N818 - what it says is the state of a pipe
    """A line that cannot be an answer to what was asked."""


# -- commands ----------------------------------------------------------------------------------------------------------

STOP, QUIT = "STOP\n", "QUIT\n"


def generate(max_new: int, ids: Tokens, *, prefill_only: bool = False) -> str:
    """Read a prompt, and continue it greedily by `max_new` tokens."""
    keys = "prefill=1 " if prefill_only else ""
    return f"GEN {max_new} {keys}{','.join(map(str, ids.to_list()))}\n"


def transfer(command: str, path: str) -> str:
    """SAVE or RESTORE a session file. Raises ValueError for a path that would be two lines."""
    if "\n" in path or "\r" in path:
        raise ValueError("the path of a session file must not hold a line break")
    return f"{command} {path}\n"


# -- what comes back ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    context: int
    stops: bool  # whether STOP is honoured


@dataclass(frozen=True, slots=True)
class Info:
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reused:
    """How many tokens of the prompt need not be read. Told before the reading and after it."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk is read: how far, of how many tokens, and after how long."""

    tokens: int
    total: int
    ms: float


@dataclass(frozen=True, slots=True)
class Written:
    token: int


@dataclass(frozen=True, slots=True)
class Done:
    """A request has ended. `read_tokens` are those that were really read, where the engine tells."""

    written: int
    prompt_tokens: int
    prompt_ms: float
    decode_ms: float
    finish: str  # stop, length, cancel, or another word for the end of a reading
    reused_tokens: int = 0
    read_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Transferring:
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """A step of a session file in which nothing is printed, and how long that may take."""

    step: str
    allowance_s: int


@dataclass(frozen=True, slots=True)
class Transferred:
    command: str  # SAVED or RESTORED
    tokens: int
    session_bytes: int
    ms: float


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """A session file was not written or not taken, and the engine goes on."""

    kind: str
    published: bool  # the new file is in place all the same: only the folder could not be flushed
    reason: str


@dataclass(frozen=True, slots=True)
class Fatal:
    """The engine ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class Other:
    text: str


Event = (
    Ready | Info | Reused | Read | Written | Done | Transferring | Waiting | Transferred | SessionRefused | Fatal
    | Refused | Other
)  # fmt: skip


def parse(line: str) -> Event:
    """One line, without its end. Raises OutOfStep."""
    head, _, rest = line.partition(" ")
    made = _PARSERS.get(head)
    if made is None:
        return Other(line)
    try:
        return made(head, rest)
    except (ValueError, IndexError):
        raise OutOfStep(f"a line {head!r} that cannot be read") from None  # the rest may quote a prompt


def _ready(_: str, rest: str) -> Event:
    words = rest.split()
    return Ready(_count(words[0]), "stop" in words[1:])


def _info(_: str, rest: str) -> Event:
    pairs = (word.partition("=") for word in rest.split())
    return Info({key: value for key, equals, value in pairs if equals})


def _reused(_: str, rest: str) -> Event:
    return Reused(_count(rest.strip()))


def _read(_: str, rest: str) -> Event:
    done, total, ms, _ = _words(rest, 4)
    return Read(_count(done), _count(total), _real(ms))


def _written(_: str, rest: str) -> Event:
    return Written(_count(rest.strip()))


def _done(_: str, rest: str) -> Event:
    """Older engines end after fewer fields."""
    words = rest.split()
    if len(words) < FIELDS_LEAST:
        raise ValueError
    reused = _count(words[REUSED_FIELD]) if len(words) > REUSED_FIELD else 0
    read = _count(words[READ_FIELD]) if len(words) >= FIELDS_READ else None
    return Done(_count(words[0]), _count(words[1]), _real(words[2]), _real(words[3]), words[4], reused, read)


def _transferring(_: str, rest: str) -> Event:
    done, total = map(_count, _words(rest, 2))
    if done > total:
        raise ValueError
    return Transferring(done, total)


def _waiting(_: str, rest: str) -> Event:
    step, allowance = _words(rest, 2)
    if not re.fullmatch(r"[A-Za-z]+", step) or not 1 <= _count(allowance) <= WAIT_MAX_S:
        raise ValueError
    return Waiting(step, int(allowance))


def _transferred(head: str, rest: str) -> Event:
    tokens, size, ms = _words(rest, 3)
    return Transferred(head, _count(tokens), _count(size), _real(ms))


def _session_refused(_: str, rest: str) -> Event:
    kind, published, *reason = rest.split(" ", 2)
    if kind not in SESSION_ERRORS or published not in ("0", "1"):
        raise ValueError
    return SessionRefused(kind, published == "1", reason[0] if reason else "")


_PARSERS: Mapping[str, Callable[[str, str], Event]] = {
    "READY": _ready,
    "INFO": _info,
    "RESUME": _reused,
    "REUSED": _reused,
    "PP": _read,
    "T": _written,
    "DONE": _done,
    "SESSION": _transferring,
    "SWAIT": _waiting,
    "SAVED": _transferred,
    "RESTORED": _transferred,
    "SERR": _session_refused,
    "FATAL": lambda _, rest: Fatal(rest),
    "ERR": lambda _, rest: Refused(rest),
}


def _words(rest: str, count: int) -> Sequence[str]:
    words = rest.split()
    if len(words) != count:
        raise ValueError
    return words


def _count(word: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError
    return int(word)


def _real(word: str) -> float:
    value = float(word)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value


# -- one command and all that it prints --------------------------------------------------------------------------------


class Reading:
    """The lines of one prompt's reading, up to `end`. `limit_s` is how long the next line may take."""

    def __init__(self, prompt_tokens: int, silence_s: float = SILENCE_S) -> None:
        self.end: Done | Refused | Fatal | None = None
        self.prompt_tokens = prompt_tokens
        self.begun = False  # an engine that refuses afterwards ends
        self.limit_s = silence_s + min(prompt_tokens, LONGEST_COUNTED) / SLOWEST_TOKENS_PER_S
        self._silence_s = silence_s
        self._read_ms = 0.0

    def feed(self, event: Event) -> None:
        """The next line. Raises OutOfStep for one of a session file's."""
        match event:
            case Refused() if self.begun or event.reason.startswith("verify"):  # a DONE may follow such a one
                self.end = Fatal(event.reason)
            case Done() | Refused() | Fatal():
                self.end = event
            case Reused():
                self.begun = True
            case Read():
                self.begun = True
                chunk_s = max(event.ms - self._read_ms, 0.0) / 1000
                self._read_ms = event.ms
                self.limit_s = max(self._silence_s, CHUNK_FACTOR * chunk_s)
            case Transferring() | Waiting() | Transferred() | SessionRefused() | Ready():
                raise OutOfStep(f"{type(event).__name__} while a prompt is read")
            case _:
                pass


class Transfer:
    """The lines of a SAVE or RESTORE, up to `end`. `limit_s` is how long the next line may take."""

    def __init__(self, command: str, silence_s: float = SILENCE_S) -> None:
        self.end: Transferred | SessionRefused | Refused | Fatal | None = None
        self.limit_s = silence_s
        self._silence_s = silence_s
        self._wanted = {"SAVE": "SAVED", "RESTORE": "RESTORED"}[command]
        self._done = 0 if command == "SAVE" else None  # the first that a save tells is 0
        self._begun = False

    def feed(self, event: Event) -> None:
        """The next line. Raises OutOfStep for any that cannot come here."""
        self.limit_s = self._silence_s
        match event:
            case Transferred() if event.command == self._wanted:
                self.end = event
            case SessionRefused() | Fatal() | Refused():
                self.end = event
            case Transferring():
                if event.done < (self._done or 0) or (not self._begun and self._done == 0 and event.done > 0):
                    raise OutOfStep("a session file's progress that goes backwards, or begins in its middle")
                self._begun, self._done = True, event.done
            case Waiting():
                self.limit_s = max(self._silence_s, event.allowance_s)
            case Info():
                pass
            case Other() if event.text.startswith("WARN"):
                pass
            case _:
                raise OutOfStep(f"{type(event).__name__} while a session file is written or read")
