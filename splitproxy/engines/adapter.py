"""What splitproxy asks of an engine, whatever its kind. Handover and exchange know engines through this alone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from splitproxy.errors import EngineError, Step
from splitproxy.model import Ask, EngineState, Figures, Identity, InVain, Prompt, Redeemed, Ticket, Tokens

T = TypeVar("T")

Progress = Callable[[Step, int, int], None]
"""Told as a prefill goes on: the step, tokens done, tokens in all."""

Encode = Callable[[str], Awaitable[Tokens]]
"""Makes token ids of a text. Raises ValueError for a text that it cannot encode."""

Take = Callable[[bytes], bool]
"""Takes a piece of an answer; False where it can take no more for now."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an engine may be silent or take, in seconds."""

    prefill_silence_s: float
    transfer_timeout_s: float
    decode_silence_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request on its way to an engine. `target` is path and query, as the client wrote them."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes | None
    streams: bool = False  # an event stream is expected: it must not fall silent


class Answer(Protocol):
    """An engine's answer while it arrives."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[str, str]]: ...

    @property
    def media_type(self) -> str: ...

    async def pour(self, take: Take) -> bool:
        """Hand the body to `take` in the pieces in which it comes, and at once: no task is woken for a piece.

        Returns False at the body's end, and True when `take` has returned False: it has that piece, and wants no more
        until `pour` is called again. Meanwhile nothing is read from the engine. Raises EngineError where the body
        breaks off, and whatever `take` raises.
        """
        ...


def content_length(answer: Answer) -> int | None:
    """The length that an engine gives its answer, if it does. Beside a transfer encoding it means nothing."""
    fields = {name.lower(): value for name, value in answer.headers}
    value = fields.get("content-length", "")
    return int(value) if value.isdigit() and "transfer-encoding" not in fields else None


@dataclass(frozen=True, slots=True)
class Sample:
    """A short greedy continuation, for comparing engines. Log-probabilities are those of the first token's rivals."""

    text: str
    logprobs: dict[int, float]
    figures: Figures


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot does at the moment. `filled` counts the tokens it holds, prompt and answer, as far as is told."""

    busy: bool
    filled: int


class PrefillEngine(Protocol):
    """An engine that reads prompts. Every method but `health` raises EngineError when the engine does not do as asked.

    Slot calls must be made under a lease of the slot, and run to their end even when the caller is cancelled: an engine
    cannot take back a save or restore that has begun.
    """

    @property
    def name(self) -> str: ...

    @property
    def spare_bytes(self) -> int:
        """What the engine wants to stay free beside a session file, as far as is known before it refuses."""
        ...

    async def health(self) -> EngineState: ...

    async def identify(self) -> Identity: ...

    async def slots(self) -> Mapping[int, SlotState]:
        """What each slot does, by number. Not to be asked more often than `watch` does."""
        ...

    async def reads_alike(self, text: str, prompt: Prompt) -> bool:
        """Whether this engine, too, would read a trial's text as its ids; true of one that makes none itself."""
        ...

    async def prefill(self, prompt: Prompt, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        """Read a prompt as far as a session can be taken up from, save that session, and check what was saved."""
        ...

    async def discard(self, ticket: Ticket) -> None:
        """Remove what a ticket stands for. Never fails; may be called twice."""
        ...

    async def erase(self, slot: int, deadlines: Deadlines) -> None:
        """Empty a slot, or have it hold something else where the engine cannot empty one."""
        ...

    def advice(self, error: EngineError) -> list[str]:
        """What to change when this engine failed this way."""
        ...

    def abort(self) -> None:
        """End all work that is under way, with an EngineError: the engine is given up."""
        ...

    async def close(self) -> None: ...


class Engine(PrefillEngine, Protocol):
    """An engine that answers requests. The rules of a PrefillEngine hold for it as well."""

    async def render(self, body: bytes) -> str:
        """The prompt text that a chat request's body becomes."""
        ...

    async def tokenize(self, text: str) -> Tokens:
        """The token ids of a prompt text, as the engine itself would read it; an Estimate where it does not tell."""
        ...

    async def disagreement(self, text: str, encode: Encode) -> str:
        """Where `encode` makes other ids of a text than the engine does, for people; empty where it does not."""
        ...

    async def trial(self, text: str, length_tokens: int) -> Prompt:
        """A prompt of at most so many tokens that begins as `text` does, for tests of the engine."""
        ...

    async def redeem(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> Redeemed:
        """Restore a saved session."""
        ...

    async def newest_task(self) -> int | None:
        """The slot that was given work last; None where no slot ever was."""
        ...

    @property
    def samples_compare(self) -> bool:
        """Whether samples tell two models apart. Where they do not, the engine itself refuses a foreign session."""
        ...

    async def sample(self, prompt: Prompt, slot: int, count: int, deadlines: Deadlines) -> Sample:
        """Continue a prompt greedily by `count` tokens. With 0 it is only read, up to where a handover would end."""
        ...

    def pinned(self, ask: Ask, slot: int | None) -> bytes:
        """The client's body, bound to a slot where the engine lets one be named, and else as it is."""
        ...

    def is_preamble(self, chunk: bytes) -> bool:
        """Whether a piece of a stream says no more than that the engine lives: nothing of the answer is in it."""
        ...

    def call(self, call: Call, deadlines: Deadlines) -> AbstractAsyncContextManager[Answer]:
        """Send a client's request. Leaving the context early tells the engine that nobody waits any more."""
        ...

    def remedy(self, cause: InVain | None) -> str:
        """What to change when this engine reads restored prompts again; without a cause, whatever may help."""
        ...


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled meanwhile; the cancellation then follows.

    `work` must have deadlines of its own.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
        except Exception:  # noqa: BLE001
            break  # the task's own error: raised by result() below
    if cancelled:
        if not task.cancelled():
            task.exception()  # it goes unheard: the caller has left
        raise asyncio.CancelledError
    return task.result()
