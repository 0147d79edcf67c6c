"""The adapter for a Strata engine without a server: a process of ours that reads prompts and saves sessions.

It is told token ids, which are made elsewhere, and answers no client. One command runs at a time. A process that ends,
or whose lines make no sense, is started again in the background, at most once in `RESTART_S`.
"""

import asyncio
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from splitproxy.books.sessions import SessionStore
from splitproxy.config import Process
from splitproxy.engines import strata_lines as lines
from splitproxy.engines.adapter import Deadlines, Progress, SlotState, to_the_end
from splitproxy.engines.strata_file import read_head
from splitproxy.engines.strata_pipe import Command, Pipe
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import EngineState, Estimate, Identity, Prompt, Ticket, Tokens
from splitproxy.run.strata.memory import DEFAULT_MIN_FREE_MIB, kept_free_bytes
from splitproxy.run.strata.runconfig import MIN_FREE_FLAG

log = logging.getLogger(__name__)

_ID_LIST = re.compile(r"\d+(?:,\d+)+")

RESTART_S = 60.0
READY_S = 900.0
ASK_S = 5.0  # for an engine to answer whether it knows `prefill=1`


class StrataProcess:
    """One Strata engine, as role prefill. It is started when it is first asked for anything. Must be closed."""

    def __init__(self, name: str, process: Process, store: SessionStore, *, silence_s: float = lines.SILENCE_S) -> None:
        self.name = name
        self._command = command(process, os.environ)
        self.spare_bytes = kept_free_bytes(process.args)
        self._store = store
        self._silence_s = silence_s
        self._pipe: Pipe | None = None
        self._knows_prefill = False
        self._session = asyncio.Lock()  # held from the reading of a prompt to the end of its save
        self._turn = asyncio.Lock()  # held while a command runs
        self._tried_at = float("-inf")
        self._starting: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[Any]] = set()  # what goes on although nobody waits for it any more
        self._fault = ""

    async def close(self) -> None:
        for task in (self._starting, *self._running):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._starting, *self._running)), return_exceptions=True)
        if self._pipe is not None:
            await self._pipe.close()

    def abort(self) -> None:
        """End the process: the engine is given up. It is started again when its time comes."""
        if self._pipe is not None:
            self._pipe.abort()

    # -- life ----------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineState:
        if self._pipe is not None and self._pipe.alive:
            return EngineState.READY
        return EngineState.LOADING if self._start() else EngineState.DOWN

    def _start(self) -> "asyncio.Task[None] | None":
        """The start that is under way; a new one, if it is time for one."""
        now = asyncio.get_running_loop().time()
        if self._starting is not None and not self._starting.done():
            return self._starting
        if now - self._tried_at < RESTART_S:
            return None
        self._tried_at = now
        self._starting = asyncio.create_task(self._bring_up(), name=f"start {self.name}")
        return self._starting

    async def _bring_up(self) -> None:
        log.info("starting the prefill engine %s", self.name)
        try:
            pipe = await Pipe.open(self._command, READY_S)
            self._knows_prefill = await _knows_prefill(pipe, self._silence_s)
        except EngineError as error:
            self._fault = str(error)
            where = f"; see {self._command.log}" if self._command.log else ""
            log.warning("the prefill engine %s %s; next start in %.0f s%s", self.name, error, RESTART_S, where)
            return
        self._pipe, self._fault = pipe, ""
        way = "GEN 0 prefill=1" if self._knows_prefill else "GEN 1, without the last token"
        log.info("the prefill engine %s is told %s", self.name, way)

    async def _ready(self, step: Step) -> Pipe:
        """The running engine; one that has not been started yet is waited for."""
        start = None if self._pipe is not None and self._pipe.alive else self._start()
        if start is not None:
            await asyncio.shield(start)
        if self._pipe is None or not self._pipe.alive:
            raise EngineError(step, Cause.DIED, f"the engine is not running: {self._fault or 'it has ended'}")
        return self._pipe

    async def identify(self) -> Identity:
        pipe = await self._ready(Step.CONTROL)
        return Identity(
            build=pipe.info.get("engine", ""),
            model=None,
            vocabulary=None,
            template=None,
            special_tokens=None,
            context=pipe.context - lines.BESIDE_PROMPT_TOKENS,
            slots=1,
            session=f"context {pipe.context}",
        )

    async def slots(self) -> dict[int, SlotState]:
        await self._ready(Step.CONTROL)
        return {0: SlotState(self._turn.locked(), 0)}

    async def erase(self, slot: int, deadlines: Deadlines) -> None:
        """Nothing: what the process holds is replaced by the next prompt that does not continue it."""

    # -- a session on its way ------------------------------------------------------------------------------------------

    async def prefill(self, prompt: Prompt, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        if isinstance(prompt.tokens, Estimate):
            message = "the prompt's ids are not known: tokenizer.source does not read text as the decode engine does"
            raise EngineError(Step.PREFILL, Cause.REFUSED, message)
        held = len(prompt) - 1
        async with self._session:
            done = await self._read(prompt.tokens, progress)
            progress(Step.SAVE, held, held)
            name = self._store.new_name()
            try:
                saved = await to_the_end(self._transfer(Step.SAVE, "SAVE", name, deadlines))
                await self._check(name, saved, held)
            except BaseException:
                await to_the_end(self._store.remove(name))
                raise
        cached = min(done.reused_tokens, held)
        return Ticket(name, held, saved.session_bytes, cached, done.prompt_ms, saved.ms, proof_tokens=held)

    async def _read(self, ids: Tokens, progress: Progress) -> lines.Done:
        """Have a prompt read up to its last token, which stays for the decode engine."""
        pipe = await self._ready(Step.PREFILL)
        if (fits := pipe.context - lines.BESIDE_PROMPT_TOKENS) < len(ids):
            # The engine may keep its refusal to itself until it prints something else.
            message = f"a prompt of {len(ids)} tokens does not fit: the engine takes {fits}"
            raise EngineError(Step.PREFILL, Cause.REFUSED, message)
        if self._knows_prefill:
            asked, count = lines.generate(0, ids, prefill_only=True), len(ids)
        else:
            # The token that is written is not part of the session: it ends where a continuing request begins.
            asked, count = lines.generate(1, ids.head(len(ids) - 1)), len(ids) - 1
        done = await self._in_its_turn(pipe, asked, count, progress)
        if done.prompt_tokens != count or done.finish == "cancel":
            await pipe.kill()  # this may be the answer to an earlier prompt
            message = f"{done.prompt_tokens} tokens were read instead of {count}, and it ended with {done.finish}"
            raise EngineError(Step.PREFILL, Cause.CORRUPT, message)
        return done

    async def _in_its_turn(self, pipe: Pipe, asked: str, count: int, progress: Progress) -> lines.Done:
        """Have a prompt read. Left early, the engine is told to stop, and goes on to hold its turn until it has."""
        await self._turn.acquire()
        left = asyncio.Event()
        task = asyncio.create_task(self._reading(pipe, asked, count, progress, left))
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            left.set()
            if not task.done():
                _stop(pipe)
            raise

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._turn.release()
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # it may go unheard: the caller has left

    async def _reading(self, pipe: Pipe, asked: str, count: int, progress: Progress, left: asyncio.Event) -> lines.Done:
        seen = lines.Reading(count, self._silence_s)
        pipe.write(asked, Step.PREFILL)
        told = -1
        while seen.end is None:
            event = await self._next(pipe, Step.PREFILL, seen)
            if left.is_set() and seen.end is None:
                _stop(pipe)  # again: the engine forgets what came before it had begun
            if isinstance(event, lines.Read | lines.Reused) and event.tokens > told:
                told = event.tokens  # what is reused is told again when all is read
                progress(Step.PREFILL, min(told, count), count)
        match seen.end:
            case lines.Done() as done:
                return done
            case lines.Refused() as refusal:
                raise EngineError(Step.PREFILL, Cause.REFUSED, _said(refusal.reason))
            case lines.Fatal() as end:
                await pipe.kill()
                raise EngineError(Step.PREFILL, Cause.DIED, _said(end.reason))

    async def _transfer(self, step: Step, asked: str, name: str, deadlines: Deadlines) -> lines.Transferred:
        pipe = await self._ready(step)
        async with self._turn:
            seen = lines.Transfer(asked, self._silence_s)
            pipe.write(lines.transfer(asked, str(self._store.folder.resolve() / name)), step)
            try:
                async with asyncio.timeout(deadlines.transfer_timeout_s):
                    while seen.end is None:
                        await self._next(pipe, step, seen)
            except TimeoutError:
                await pipe.kill()
                raise EngineError(step, Cause.TIMEOUT, "the session file took too long") from None
        match seen.end:
            case lines.Transferred() as moved:
                return moved
            case lines.SessionRefused() as refusal:
                where = ", though the file is in place" if refusal.published else ""
                raise EngineError(step, Cause.REFUSED, f"{refusal.kind}: {_said(refusal.reason)}{where}")
            case lines.Refused(reason) | lines.Fatal(reason):
                await pipe.kill()
                raise EngineError(step, Cause.DIED, _said(reason))

    async def _next(self, pipe: Pipe, step: Step, seen: "lines.Reading | lines.Transfer") -> lines.Event:
        """The next line of an answer. An engine that is silent or out of step is killed."""
        try:
            event = await pipe.next(step, seen.limit_s)
            seen.feed(event)
        except lines.OutOfStep as reason:
            await pipe.kill()
            raise EngineError(step, Cause.CORRUPT, f"the engine is out of step: {reason}") from None
        except BaseException:
            await pipe.kill()
            raise
        return event

    async def _check(self, name: str, saved: lines.Transferred, held: int) -> None:
        """Compare a saved file with what was to be saved."""
        if saved.tokens != held:
            if self._pipe is not None:
                await self._pipe.kill()  # nobody knows any more what it holds
            raise EngineError(Step.SAVE, Cause.CORRUPT, f"{saved.tokens} tokens were saved instead of {held}")
        try:
            head = await self._store.read(name, read_head)
        except (OSError, ValueError) as error:
            raise EngineError(Step.CHECK, Cause.CORRUPT, f"the session file is unusable: {error}") from None
        if head.size_bytes != saved.session_bytes:
            message = f"the session file has {head.size_bytes} bytes, but {saved.session_bytes} were written"
            raise EngineError(Step.CHECK, Cause.CORRUPT, message)

    async def discard(self, ticket: Ticket) -> None:
        await self._store.remove(ticket.handle)

    async def reads_alike(self, text: str, prompt: Prompt) -> bool:
        return True

    # -- what to change ------------------------------------------------------------------------------------------------

    def advice(self, error: EngineError) -> list[str]:
        log_file = f"See the engine's log, {self._command.log}." if self._command.log else "process.log names no file."
        if error.step in ADVICE and error.cause is not Cause.DIED:
            return [*ADVICE[error.step], log_file]
        return [log_file]


ADVICE = {
    Step.PREFILL: ["tokenizer.source must be the tokenizer.json of the model that both engines run."],
    Step.SAVE: [
        "A session file needs a prompt cache (--prompt-cache of 1 or more), one card, and no --batch.",
        f"Beside the file {DEFAULT_MIN_FREE_MIB} MiB must stay free in split.dir, or as many as {MIN_FREE_FLAG} says.",
    ],
    Step.CHECK: ["split.dir must be on a disk that this process can read."],
}


def command(process: Process, env: Mapping[str, str]) -> Command:
    """The command line and environment of a configured engine. `env` is this process's own environment."""
    ours: dict[str, str] = {}
    if process.gpu is not None:
        names = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES"}
        # As nvidia-smi numbers them, and not by speed.
        ours = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if process.backend == "cuda" else {}
        ours[names[process.backend]] = str(process.gpu)
    if process.lib_dirs:
        ours["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (*process.lib_dirs, env.get("LD_LIBRARY_PATH", ""))))
    secrets = {name for name in env if name.startswith("SPLITPROXY_")}  # keys may be among them
    kept = {name: value for name, value in env.items() if name not in secrets}
    return Command(
        (process.exe, "--serve", *process.args), {**kept, **ours, **process.env}, cwd=process.cwd, log=process.log
    )


async def _knows_prefill(pipe: Pipe, silence_s: float) -> bool:
    """Whether the engine knows `GEN 0 prefill=1`. Raises EngineError.

    One that does not says so in a line that it may keep to itself until it prints something else. So where nothing
    comes, a request that every engine takes brings out what there is; both answers are read to their ends.
    """
    trial = Tokens([0, 0])
    seen = lines.Reading(len(trial), silence_s)
    try:
        pipe.write(lines.generate(0, trial, prefill_only=True))
        event = await _first_of_answer(pipe)
        if event is not None:
            seen.feed(event)
            return await _answer(pipe, seen)
        pipe.write(lines.generate(1, trial))
        known = await _answer(pipe, seen)
        await _answer(pipe, lines.Reading(len(trial), silence_s))
        return known
    except lines.OutOfStep as reason:
        await pipe.kill()
        raise EngineError(Step.CONTROL, Cause.CORRUPT, f"is out of step: {reason}") from None
    except BaseException:
        await pipe.kill()
        raise


async def _first_of_answer(pipe: Pipe) -> lines.Event | None:
    """The first line that belongs to an answer; None where none comes in time, whatever else is printed."""
    try:
        async with asyncio.timeout(ASK_S):
            while isinstance(event := await pipe.next(Step.CONTROL, ASK_S), lines.Other | lines.Info):
                pass
            return event
    except TimeoutError:
        return None
    except EngineError as error:
        if error.cause is not Cause.TIMEOUT:
            raise
        return None


async def _answer(pipe: Pipe, seen: lines.Reading) -> bool:
    """Read an answer to its end: whether it was none of refusal. Raises EngineError and OutOfStep."""
    while seen.end is None:
        seen.feed(await pipe.next(Step.CONTROL, seen.limit_s))
    match seen.end:
        case lines.Fatal(reason):
            raise EngineError(Step.CONTROL, Cause.DIED, _said(reason))
        case lines.Done() as done if done.prompt_tokens != seen.prompt_tokens:
            raise lines.OutOfStep(f"{done.prompt_tokens} tokens were read instead of {seen.prompt_tokens}")
    return isinstance(seen.end, lines.Done)


def _stop(pipe: Pipe) -> None:
    """Have the engine end what it does; one that cannot stop is ended itself."""
    if not pipe.stops:
        pipe.abort()
    elif pipe.alive:
        pipe.write(lines.STOP)


def _said(reason: str) -> str:
    """An engine's reason, without what may be a part of a prompt's ids."""
    return _ID_LIST.sub("...", reason)[:300] or "without a reason"
