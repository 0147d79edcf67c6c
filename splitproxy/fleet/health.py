"""Which engines are up: their health, their pulse under work, and what they turn out to be when they come back."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from splitproxy.books.admission import Admission
from splitproxy.books.ledger import Ledger
from splitproxy.decide.recall import Recall
from splitproxy.engines.adapter import Deadlines, Engine, SlotState
from splitproxy.errors import Cause, EngineError
from splitproxy.fleet.member import Member
from splitproxy.fleet.tasks import Tasks
from splitproxy.model import EngineState, Role

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 2.0
FAILURES_TO_DOWN = 2
PULSE_INTERVAL_S = 30.0
IDENTIFY_INTERVAL_S = 5.0  # at most so often is an engine that went wrong asked again what it is


class Health:
    """The watch over all engines.

    `unprove` is told of an engine whose pairs have to prove themselves again, and why; `told` is called after each
    look; `meet` is run in the background for each decode engine that comes up.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        ledger: Ledger,
        admission: Admission,
        deadlines: Deadlines,
        recall: Recall,
        tasks: Tasks,
        unprove: Callable[[Member, str], None],
        told: Callable[[], None],
        meet: Callable[[Engine], Coroutine[Any, Any, None]] | None,
    ) -> None:
        self._members = members
        self._ledger = ledger
        self._admission = admission
        self._deadlines = deadlines
        self._recall = recall
        self._tasks = tasks
        self._unprove = unprove
        self._told = told
        self._meet = meet

    def suspect(self, name: str) -> None:
        """A call to this engine went wrong: look at it now rather than at the next turn."""
        self._members[name].doubted = True
        self._members[name].nudge.set()

    def distrust(self, name: str) -> None:
        """This engine did not hold what was believed: it was restarted, slept, or is used by others. Forget it all."""
        log.warning("engine %s has lost what it held; does anything else use it, does it sleep or restart?", name)
        self._ledger.distrust(name)
        self.suspect(name)

    def lost(self, name: str) -> None:
        """This engine's process has ended: however soon another answers in its place, all that it held is gone."""
        member = self._members[name]
        member.epoch += 1
        if member.state is EngineState.READY:
            self._part(member, EngineState.DOWN)
            member.fault = "its process has ended"
        member.nudge.set()

    async def watch(self, member: Member) -> None:
        while True:
            await self._look(member, await member.engine.health())
            member.looks += 1
            self._told()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await member.nudge.wait()
            member.nudge.clear()

    async def _look(self, member: Member, seen: EngineState) -> None:
        if seen is EngineState.UNLOADED:
            self._ledger.distrust(member.engine.name)
            seen = EngineState.READY
        if seen is EngineState.READY:
            member.failures = 0
            if member.state is not EngineState.READY:
                await self._welcome(member)
            elif member.doubted:
                await self._recognise(member)
            return
        member.failures += 1
        if member.state is EngineState.READY:
            if seen is EngineState.DOWN and member.failures < FAILURES_TO_DOWN:
                member.nudge.set()  # look again at once: a single lost call is no death
                return
            self._part(member, seen)
        member.state = seen
        member.fault = "is loading" if seen is EngineState.LOADING else "does not answer"

    async def _recognise(self, member: Member) -> None:
        """The engine is up, but may have been restarted between two looks, even as another one."""
        now = asyncio.get_running_loop().time()
        if now - member.identified < IDENTIFY_INTERVAL_S:
            return  # later
        try:
            identity = await member.engine.identify()
        except EngineError:
            return
        if member.state is not EngineState.READY:
            return  # it has ended meanwhile
        member.doubted, member.identified = False, now
        if identity != member.identity:
            self._part(member, EngineState.DOWN)
            await self._welcome(member)

    async def _welcome(self, member: Member) -> None:
        """The engine is up, for the first time or again: learn what it is, and believe nothing of before."""
        epoch = member.epoch
        try:
            identity = await member.engine.identify()
            if member.role is Role.DECODE:
                member.template_bytes = await _template_bytes(member.writer)
        except EngineError as error:
            if member.fault != str(error):
                log.warning("%s engine %s cannot be used: %s", member.role, member.engine.name, error)
            member.fault = str(error)
            return
        slots = await self._slots_of(member)
        if member.epoch != epoch:
            return  # it has ended meanwhile
        if any(state.busy for state in slots.values()):
            # Work from before it was lost, or somebody else's: a busy slot must not be given to anybody.
            member.fault = "is still at work on what nobody waits for"
            return
        member.identity, member.state, member.fault = identity, EngineState.READY, ""
        member.doubted, member.identified = False, asyncio.get_running_loop().time()
        member.epoch += 1
        member.lacks.clear()
        self._ledger.open(member.engine.name, member.role, identity.slots, identity.context)
        self._recall.forget(member.engine.name)
        log.info(
            "%s engine %s is ready: %d slots, context %d, build %s",
            member.role, member.engine.name, identity.slots, identity.context, identity.build,
        )  # fmt: skip
        self._unprove(member, "no self-test since the engine came up")
        if self._meet is not None and member.role is Role.DECODE:
            self._tasks.start(self._meet(member.writer))
        self._admission.pump()

    async def _slots_of(self, member: Member) -> Mapping[int, SlotState]:
        with suppress(EngineError):
            return await member.engine.slots()  # past the shared looks: nobody has begun anything yet
        return {}

    def _part(self, member: Member, seen: EngineState) -> None:
        level = logging.ERROR if member.role is Role.DECODE else logging.WARNING
        log.log(level, "%s engine %s is gone: %s", member.role, member.engine.name, seen)
        self._ledger.close(member.engine.name)
        member.state = seen
        self._unprove(member, f"the {member.role} engine is {seen}")
        member.engine.abort()
        self._admission.pump()

    async def feel_pulse(self, member: Member) -> None:
        """Give an engine up whose HTTP server lives while its work stands still: /health alone would not tell.

        The list of slots comes from the engine's working thread, between two batches. Nobody else notices: an answer
        that is not streamed is silent until it is complete.
        """
        loop = asyncio.get_running_loop()
        silent_since = None
        while True:
            await asyncio.sleep(PULSE_INTERVAL_S)
            if member.state is not EngineState.READY or not self._ledger.count(member.engine.name).busy:
                silent_since = None
                continue
            asked = loop.time()
            try:
                await member.watch.look()
                silent_since = None
            except EngineError:
                silent_since = silent_since or asked
                if loop.time() - silent_since > self._deadlines.decode_silence_s:
                    silent_since = None
                    self._part(member, EngineState.DOWN)
                    member.fault = "its work stands still"


async def _template_bytes(engine: Engine) -> int:
    try:
        return len((await engine.render(b'{"messages":[{"role":"user","content":""}]}')).encode())
    except EngineError as error:
        if error.cause is not Cause.REFUSED:
            raise
        return 0  # a model without a chat template
