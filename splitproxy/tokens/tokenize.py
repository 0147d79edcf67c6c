"""Prompt text to token ids, behind one interface.

Ids only steer: the engine always reads the client's own body, so wrong ids cost time, never text. Chat messages become
text by the engine's own template, always. The text is encoded here where that has been compared with the engine, and
by the engine otherwise.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from splitproxy.engines.adapter import Encode, Engine
from splitproxy.errors import Cause, EngineError
from splitproxy.model import Ask, Tokens
from splitproxy.tokens import trials
from splitproxy.tokens.codec import Codec, Unencodable
from splitproxy.tokens.vocabulary import Ends

log = logging.getLogger(__name__)

# Up to here a text is encoded at once: it takes as long as handing it to a thread and back, 0.1 ms.
INLINE_CHARACTERS = 2000
THREADS = 2
JOBS_MAX = 64  # that wait or run; beyond that the engine is asked
RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether ids for an engine are made here, and why."""

    local: bool
    why: str


class Tokenizer(Protocol):
    """Turns what a client asks into the token ids that an engine will read."""

    async def tokens(self, ask: Ask, engine: Engine) -> Tokens:
        """The prompt's ids. `engine` is a ready decode engine. Raises EngineError where it had to be asked in vain."""
        ...

    async def meet(self, engine: Engine) -> None:
        """A decode engine has come up, perhaps with another model than before."""
        ...

    def verdict(self, engine: str) -> Verdict:
        """Where the ids for an engine come from."""
        ...

    @property
    def encode(self) -> Encode | None:
        """Makes ids of text here, whichever engine they are for; None where only engines make them."""
        ...

    def close(self) -> None: ...


class EngineTokenizer:
    """Asks the engine for everything: it renders chat messages with its template and tokenizes the text."""

    def __init__(self, why: str = "the engine is asked") -> None:
        self._verdict = Verdict(False, why)

    async def tokens(self, ask: Ask, engine: Engine) -> Tokens:
        if isinstance(ask.prompt, tuple):
            return Tokens(ask.prompt)
        return await engine.tokenize(await _text(ask, engine))

    async def meet(self, engine: Engine) -> None:  # noqa: ARG002 - any will do
        return

    def verdict(self, engine: str) -> Verdict:  # noqa: ARG002 - the same for all
        return self._verdict

    @property
    def encode(self) -> Encode | None:
        return None

    def close(self) -> None:
        return


class LocalTokenizer:
    """Encodes text here, for every engine that was found to do it alike; for the others the engine is asked."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._jobs = _Jobs()
        self._verdicts: dict[str, Verdict] = {}

    async def tokens(self, ask: Ask, engine: Engine) -> Tokens:
        if isinstance(ask.prompt, tuple):
            return Tokens(ask.prompt)
        text = await _text(ask, engine)
        if self.verdict(engine.name).local:
            try:
                return await self.encode(text)
            except Unencodable as reason:
                log.info("the engine is asked for the ids of a prompt: %s", reason)
        return await engine.tokenize(text)

    async def encode(self, text: str) -> Tokens:
        """The ids of a text, for any engine. A cancelled job that has not begun never will. Raises Unencodable."""
        if len(text) <= INLINE_CHARACTERS:
            return self._codec.encode(text)
        return await self._jobs.run(self._codec, text)

    def verdict(self, engine: str) -> Verdict:
        return self._verdicts.get(engine, NOT_COMPARED)

    async def meet(self, engine: Engine) -> None:
        """Compare with an engine that has come up; until that is done it is asked."""
        mine = self._verdicts[engine.name] = Verdict(False, NOT_COMPARED.why)
        while True:
            try:
                verdict = await self._compared(engine)
                break
            except EngineError as error:
                if error.cause is Cause.REFUSED:
                    verdict = Verdict(False, f"the engine would not tokenize: {error}")
                    break
                await asyncio.sleep(RETRY_S)
            if self._verdicts[engine.name] is not mine:
                return  # it has come up again meanwhile
        if self._verdicts[engine.name] is mine:
            self._verdicts[engine.name] = verdict
            level = logging.INFO if verdict.local else logging.WARNING
            log.log(level, "ids for %s are made %s: %s", engine.name, "here" if verdict.local else "by it", verdict.why)

    async def _compared(self, engine: Engine) -> Verdict:
        if not self._codec.knows_ends:
            await self._learn_ends(engine)
        count = 0
        for text in self._trials():
            try:
                differs = await engine.disagreement(text, partial(self._jobs.run, self._codec, remember=False))
            except Unencodable as reason:
                return Verdict(False, f"a text of the comparison could not be encoded here: {reason}")
            if differs:
                return Verdict(False, f"the engine's ids differ from those made here: {differs}")
            count += 1
        return Verdict(True, f"compared with the engine on {count} texts")

    def _trials(self) -> Iterator[str]:
        special, words = list(self._codec.special), self._codec.words
        seed = random.randrange(2**32)  # noqa: S311 - only has to differ from the last time
        return chain(trials.scripted(special), trials.mixes(list(words), special, seed), trials.every_word(words))

    async def _learn_ends(self, engine: Engine) -> None:
        """A file of ranks does not tell what stands around every prompt; the engine does."""
        found, word = (await engine.tokenize("a")).to_list(), self._codec.plain("a").to_list()
        for place in range(len(found) - len(word) + 1):
            first, last = found[:place], found[place + len(word) :]
            if found[place : place + len(word)] == word and max(len(first), len(last)) <= 1:
                self._codec.ends = Ends(*(side[0] if side else None for side in (first, last)))

    def close(self) -> None:
        self._jobs.close()


NOT_COMPARED = Verdict(False, "not compared with the engine yet")


class _Jobs:
    """Encoding in threads: few of them, and no more work waiting than that."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "encode")
        self._room = threading.BoundedSemaphore(JOBS_MAX)

    async def run(self, codec: Codec, text: str, *, remember: bool = True) -> Tokens:
        """Encode a text. Raises Unencodable, also when too many wait."""
        if not self._room.acquire(blocking=False):
            raise Unencodable("too many prompts are being encoded")
        try:
            job = self._pool.submit(codec.encode, text, remember=remember)
        except RuntimeError:
            self._room.release()
            raise Unencodable("the proxy is stopping") from None
        job.add_done_callback(self._ended)
        # Cancelling the wait cancels the job, if it has not begun.
        return await asyncio.wrap_future(job)

    def _ended(self, _job: "Future[Tokens]") -> None:
        self._room.release()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _text(ask: Ask, engine: Engine) -> str:
    """The whole text that an engine reads for a request."""
    text = await engine.render(ask.chat) if ask.chat is not None else ask.prompt
    if not isinstance(text, str):
        raise ValueError("a request without a text prompt has no tokens")
    return text


def surely_shorter(ask: Ask, limit_tokens: int, template_bytes: int) -> bool:
    """Whether a prompt cannot reach `limit_tokens` even at one token a byte of its rendered text.

    `template_bytes` is what the chat template adds by itself. JSON spends more on a message's frame than templates do,
    so the body stands for the rest.
    """
    if isinstance(ask.prompt, tuple):
        return len(ask.prompt) < limit_tokens
    return len(ask.body) + template_bytes < limit_tokens
