"""The frozen records and closed enums that modules pass to each other. Nothing here acts."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Kind(StrEnum):
    LLAMA_SERVER = "llama-server"
    STRATA = "strata"


class Policy(StrEnum):
    AUTO = "auto"
    THRESHOLD = "threshold"
    ALWAYS = "always"
    NEVER = "never"


class RouteKind(StrEnum):
    LOCAL = "local"  # the decode engine reads the prompt itself
    HANDOVER = "handover"


class Reason(StrEnum):
    """Why a route was taken: metric label, log word and response header."""

    WORTH_MOVING = "worth_moving"
    FORCED = "forced"
    TOO_SHORT = "too_short"
    WARM = "warm"
    LOCAL_CHEAPER = "local_cheaper"
    PREFILL_BUSY = "prefill_busy"  # handing over would be cheaper without the queue at the prefill engine
    PREFILL_DOWN = "prefill_down"
    PAIR_UNPROVEN = "pair_unproven"
    PAIR_SWITCHED_OFF = "pair_switched_off"
    TOO_LONG = "too_long"
    NO_ROOM = "no_room"
    NOT_SPLITTABLE = "not_splittable"
    TOKENIZER_DOWN = "tokenizer_down"
    DISABLED = "disabled"


class Api(StrEnum):
    """The API that a client speaks. It decides the shape of errors and keep-alives."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    NATIVE = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    OTHER = "other"


class EngineState(StrEnum):
    DOWN = "down"
    LOADING = "loading"
    READY = "ready"
    UNLOADED = "unloaded"  # it takes requests, and loads its model when one comes: until then it holds nothing


class PairState(StrEnum):
    UNPROVEN = "unproven"  # no self-test has passed yet
    PROVEN = "proven"
    SWITCHED_OFF = "switched_off"  # handovers succeeded but nothing was reused


class InVain(StrEnum):
    """Why a session that was restored was likely read again all the same. A metric label, so the list is closed."""

    TEMPLATE_DRIFT = "template_drift"  # the decode engine read another text than was counted
    CLEARED_SLOTS = "cleared_slots"  # it clears slots that are idle while others work
    NO_CHECKPOINTS = "no_checkpoints"  # a sliding window or recurrent state that cannot be taken up again
    OTHER_TRAFFIC = "other_traffic"


class Outcome(StrEnum):
    """How a request ended for the client."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"  # the client left


_LEAST_BYTES, _MOST_BYTES = 256, 64 * 1024


class Tokens:
    """A sequence of token ids, 4 bytes each, compared as memory."""

    __slots__ = ("_raw",)
    _raw: bytes

    def __init__(self, ids: Iterable[int] = ()) -> None:
        packed = array("i", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        self._raw = packed.tobytes()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Little-endian 32-bit ids, as session files hold them."""
        if len(raw) % 4:
            raise ValueError("a token id is 4 bytes")
        tokens = cls.__new__(cls)
        tokens._raw = raw
        return tokens

    def __len__(self) -> int:
        return len(self._raw) // 4

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self._raw == other._raw

    def __hash__(self) -> int:
        return hash(self._raw)

    def __repr__(self) -> str:
        return f"<{len(self)} tokens>"  # ids are the prompt: they must not reach a log

    def to_bytes(self) -> bytes:
        return self._raw

    def to_list(self) -> list[int]:
        packed = array("i")
        packed.frombytes(self._raw)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tolist()

    def head(self, count: int) -> "Tokens":
        """The first `count` tokens."""
        return self.from_bytes(self._raw[: 4 * max(count, 0)])

    def may_be(self, count: int) -> bool:
        """Whether an engine that counted so many tokens can have read these."""
        return len(self) == count

    def agrees(self, other: "Tokens", start: int, end: int) -> bool:
        """Whether both have the same tokens from `start` to `end`, as far as this one reaches."""
        first, last = 4 * max(start, 0), min(4 * end, len(self._raw))
        return self._raw[first:last] == other._raw[first:last]

    def common_prefix(self, other: "Tokens", start: int = 0) -> int:
        """How many leading tokens both share; the first `start` of them are taken to.

        Blocks are compared as memory, larger ones as long as they agree, then smaller ones around the difference:
        strangers cost a microsecond, 128k tokens that are the same but for the last cost 20.
        """
        a, b = memoryview(self._raw), other._raw  # slices of it are no copies
        end = min(len(a), len(b))
        shared, block = min(4 * start, end), _LEAST_BYTES
        while shared + block <= end and b.startswith(a[shared : shared + block], shared):
            shared += block
            if block < _MOST_BYTES:
                block *= 2
        block = min(block, end - shared)  # they part in it, or it is the end
        while block > _LEAST_BYTES:
            half = block // 2
            if b.startswith(a[shared : shared + half], shared):
                shared += half
                block -= half
            else:
                block = half
        apart = int.from_bytes(a[shared : shared + block], "little")
        apart ^= int.from_bytes(b[shared : shared + block], "little")
        return (shared + (((apart & -apart).bit_length() - 1) // 8 if apart else block)) // 4


ESTIMATE_FACTOR = 2


class Estimate(Tokens):
    """Stand-ins for ids that nobody tells: equal where texts are equal, and roughly as many as an engine counts."""

    __slots__ = ()

    def may_be(self, count: int) -> bool:
        return len(self) <= ESTIMATE_FACTOR * count and count <= ESTIMATE_FACTOR * len(self)


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request, as far as routing needs to know it. `body` is what the client sent, byte for byte."""

    api: Api
    path: str
    body: bytes = field(repr=False)
    stream: bool = False
    max_tokens: int | None = None  # the longest answer that the client allows
    prompt: str | tuple[int, ...] | None = field(default=None, repr=False)  # None: it is in `chat`, or not known
    chat: bytes | None = field(default=None, repr=False)  # the chat request whose rendering is the prompt
    not_splittable: str | None = None  # the feature that keeps this request on the decode engine
    pinned: bool = True  # whether the engine lets this request be given a slot
    answers: int = 1  # to all its prompts; each takes a slot of its own
    keeps_cache: bool = True  # False: the client asked for cache_prompt = false
    progress: bool = False  # the client asked for progress events, which come before the prompt is read


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as its token ids and as the request that it comes from: an engine reads the one or the other."""

    tokens: Tokens
    ask: Ask

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Identity:
    """What an engine says about itself. Two engines of a pair must agree on all but `slots` and `context`.

    None is what this kind of engine does not tell, and cannot be compared.
    """

    build: str
    model: str | None
    vocabulary: str | None
    template: str | None  # a digest, or "" where there is none
    special_tokens: str | None
    context: int  # tokens a slot can hold
    slots: int
    session: str | None = None  # what else decides whether one engine takes another's session files


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a prefill engine gives and a decode engine redeems. `handle` means something to the adapters only."""

    handle: str
    tokens: int
    session_bytes: int
    cached_tokens: int  # what the prefill engine reused
    prefill_ms: float
    save_ms: float
    proof_tokens: int  # a decode engine that reuses at least so many has used this session


@dataclass(frozen=True, slots=True)
class Redeemed:
    """What a decode engine restored."""

    tokens: int
    restore_ms: float


@dataclass(frozen=True, slots=True)
class Figures:
    """An engine's own figures of one answer. `cached_tokens` + `read_tokens` = the prompt."""

    cached_tokens: int
    read_tokens: int
    prompt_ms: float
    answer_tokens: int
    answer_ms: float


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode engine, as the router sees it for one prompt."""

    engine: str
    held_tokens: int  # the longest prefix of the prompt that one of its slots holds
    context: int
    free_slots: int
    waiting: int = 0  # requests that wait for this very engine
    streams: int = 0  # requests that it reads or writes for now, which stand still while a prompt is read
    arrivals_per_s: float = 0.0  # requests, prompts and sessions, that wait when they come meanwhile
    slot: int | None = None  # the one that the prompt would get to be read in; None: not known
    restore_slot: int | None = None  # the one that a session of the prompt would be restored into
    beside: int = 0  # tokens that its other slots hold
    wait_s: float = 0.0  # until a slot is free
    reading_s: float = 0.0  # that it will read for others before this prompt
    before_restored_s: float = 0.0  # that it will read for others before the end of a restored prompt
    coming_s: tuple[float, ...] = ()  # in which time sessions are ready that are on their way to it
    slows: float = 0.0  # the part of its reading time by which those take longer
    read_s: float | None = None  # to read what it lacks of the prompt; None: not known yet
    added_s: float = 0.0  # what comes on top of its work


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill engine together with one decode engine, as the router sees them."""

    engine: str
    decode_engine: str
    up: bool
    pair: PairState
    context: int
    waiting: int  # requests that read or wait to read there
    room: bool  # the session file fits beside those in flight
    held_tokens: int = 0  # the longest prefix of the prompt that one of its slots holds
    backlog_tokens: int = 0  # that it reads, or is to read, for others
    queue_s: float = 0.0  # the same in seconds
    read_s: float | None = None  # to read what it lacks of the prompt; None: not known yet
    save_s: float = 0.0
    restore_s: float = 0.0
    added_s: float = 0.0  # what comes on top of the engines' work


@dataclass(frozen=True, slots=True)
class Route:
    """A decision and the figures behind it."""

    kind: RouteKind
    reason: Reason
    decode_engine: str
    prefill_engine: str | None = None
    prompt_tokens: int | None = None
    held_tokens: int | None = None
    uncached_tokens: int | None = None
    predicted_local_s: float | None = None  # until the first token, from the decision on
    predicted_handover_s: float | None = None  # the same, by the cheapest pair
    stall_s: float = 0.0  # for which others, taken together, would stand still or wait if it were read locally
    prefill_read_s: float | None = None  # the prefill engine's part

    @property
    def predicted_s(self) -> float | None:
        """Seconds to the first token on the route that was taken."""
        return self.predicted_local_s if self.kind is RouteKind.LOCAL else self.predicted_handover_s


@dataclass(frozen=True, slots=True)
class HandoverFigures:
    """What a handover cost."""

    prefill_ms: float
    save_ms: float
    restore_ms: float
    session_bytes: int
    prefill_read_tokens: int
    prefill_cached_tokens: int


# Buckets for the gaps between pieces of a stream, in seconds.
GAP_BOUNDS_S = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.075, 0.08, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.6, 0.75, 0.8, 1.0, 2.0, 2.5, 4.0, 5.0, 6.0, 7.5, 8.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of one stream by length: `counts[i]` of at most `GAP_BOUNDS_S[i]`, the last of longer ones."""

    counts: tuple[int, ...] = (0,) * (len(GAP_BOUNDS_S) + 1)
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Where and how a handover failed."""

    step: str
    cause: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request: the source of its metrics, its log line and the status page. Times are milliseconds."""

    request_id: str
    api: Api
    stream: bool
    outcome: Outcome
    status: int
    step: str  # the step it ended in, for cancelled requests
    route: Route | None
    engine: str  # the decode engine that answered
    queue_ms: float
    tokenize_ms: float
    first_byte_ms: float | None
    total_ms: float
    decode_ms: float | None = None
    figures: Figures | None = None
    handover: HandoverFigures | None = None
    effective: bool | None = None  # None: nothing was handed over
    mistaken: bool = False  # an engine held clearly less of the prompt than was believed
    failure: Failure | None = None
    taken_over: tuple[Failure, ...] = ()  # by prefill engines whose work another one took over
    gaps: Gaps = Gaps()
    decided_ms: float | None = None  # when the route was chosen
    beside: int = 0  # tokens that other slots of the decode engine held: they slow it down
    hindered: bool = False  # another engine read while the decode engine did
    prefill_hindered: bool = False  # the same for the prefill engine
    crowded: bool = False  # the decode engine read for others at the same time: its figures tell of both
    in_vain: InVain | None = None  # the likely cause, of a handover that was

    @property
    def path(self) -> str:
        """How the prompt was read: local, handover, or fallback after a failed handover."""
        if self.failure is not None:
            return "fallback"
        return self.route.kind.value if self.route is not None else RouteKind.LOCAL.value

    @property
    def added_first_byte_ms(self) -> float | None:
        """What the proxy itself added before the first byte: all that was no engine's work and no waiting."""
        if self.first_byte_ms is None or self.figures is None:
            return None
        engines_ms = self.figures.prompt_ms
        if self.handover is not None:
            engines_ms += self.handover.prefill_ms + self.handover.save_ms + self.handover.restore_ms
        return max(0.0, self.first_byte_ms - self.queue_ms - engines_ms)

    @property
    def unexplained_ms(self) -> float | None:
        """What passed between decision and first byte beside the engines' work and waiting for slots."""
        if self.added_first_byte_ms is None or self.decided_ms is None:
            return None
        return max(0.0, self.added_first_byte_ms - self.decided_ms)

    @property
    def prediction_error(self) -> float | None:
        """How far the first token came from its prediction, relative to what it really took."""
        predicted_s = None if self.route is None else self.route.predicted_s
        unforeseen = self.failure is not None or self.mistaken or self.effective is False
        if predicted_s is None or unforeseen or not self.stream or self.outcome is not Outcome.OK:
            return None
        if self.first_byte_ms is None or self.decided_ms is None:
            return None
        actual_s = max(self.first_byte_ms - self.decided_ms, 0.1) / 1000
        return (predicted_s - actual_s) / actual_s
