"""Slots under a lease: room made before use, slots that engines chose by themselves, and slots that are not quiet yet.

The lease of a slot whose request was cut off is kept until the engine has really stopped working there.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress

from splitproxy.books.admission import Admission
from splitproxy.books.growth import Share
from splitproxy.books.ledger import Holding, Lease, Ledger
from splitproxy.engines.adapter import Deadlines, SlotState
from splitproxy.errors import EngineError
from splitproxy.fleet.member import Member
from splitproxy.fleet.tasks import Tasks, beside
from splitproxy.model import Role

log = logging.getLogger(__name__)

# When a slot whose request was cut off is looked at: seconds after the end of the look before. A prefill engine answers
# a look after the batch that it reads, so that looks wait for the engine and not for a clock.
QUIET_LOOKS_S = {Role.DECODE: (0.25, 1.25, 1.5), Role.PREFILL: (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)}
NOTICE_S = 0.2  # between looks for what has begun; the watch keeps them apart where they are many
STUCK_S = 10.0  # more than an engine needs to finish a batch and to notice that its client has left


class Slots:
    """What is done to slots beside reading and writing."""

    def __init__(
        self, members: Mapping[str, Member], ledger: Ledger, admission: Admission, deadlines: Deadlines, tasks: Tasks
    ) -> None:
        self._members = members
        self._ledger = ledger
        self._admission = admission
        self._deadlines = deadlines
        self._tasks = tasks
        self._choosers = 0  # requests that wait for an engine to choose a slot for them

    async def make_room(self, lease: Lease) -> None:
        """Erase the idle slots that a lease needs out of its way."""
        await self.erase(lease, lease.erase)

    async def erase(self, lease: Lease, slots: Iterable[int]) -> None:
        """Erase the idle slots that a lease has claimed for this. A failure shows in what follows."""
        emptied: list[int] = []
        try:
            for slot in slots:
                with suppress(EngineError):
                    await self._members[lease.engine].engine.erase(slot, self._deadlines)
                    emptied.append(slot)
        finally:
            if slots:
                self._admission.erased(lease, emptied)

    async def settle(self, lease: Lease) -> Lease:
        """Learn which slot an engine chose by itself for a request that it has begun.

        Where it does not tell, the request keeps the engine to itself.
        """
        if not self._ledger.is_unsettled(lease):
            return lease
        member = self._members[lease.engine]
        member.watch.count()
        with suppress(EngineError):
            if (chosen := await member.writer.newest_task()) is not None:
                return self._admission.settle(lease, chosen)
        return lease

    @asynccontextmanager
    async def settling(self, share: Share) -> AsyncIterator[None]:
        """Settle a lease as soon as a look shows where its request runs: an answer that is not streamed tells nothing
        before its end."""
        async with beside(self._settle_by_looks(share)) if self._ledger.is_unsettled(share.lease) else nullcontext():
            yield

    async def _settle_by_looks(self, share: Share) -> None:
        engine = share.lease.engine
        while True:
            await asyncio.sleep(NOTICE_S)
            if not self._ledger.is_unsettled(share.lease):
                return
            others = self._ledger.at_work(engine)
            with suppress(EngineError):
                seen = await self._members[engine].watch.look()
                chosen = [slot for slot, state in seen.items() if state.busy and slot not in others]
                if len(chosen) == 1 and self._ledger.is_unsettled(share.lease):
                    share.lease = self._admission.settle(share.lease, chosen[0])

    def begun(self, lease: Lease) -> None:
        """The engine is seen to be at work for a lease: a request that it chooses a slot for may come beside it."""
        self._ledger.begun(lease)
        if self._choosers:
            self._admission.pump()

    @asynccontextmanager
    async def noticing(self) -> AsyncIterator[None]:
        """Look out for requests that have begun unseen, for one that waits until all have."""
        self._choosers += 1
        try:
            async with beside(self._notice()):
                yield
        finally:
            self._choosers -= 1

    async def _notice(self) -> None:
        while True:
            for name, member in self._members.items():
                if member.role is Role.DECODE and (leases := self._ledger.not_begun(name)):
                    with suppress(EngineError):
                        seen = await member.watch.look()
                        for lease in leases:
                            if (state := seen.get(lease.number)) is not None and state.busy:
                                self.begun(lease)
            await asyncio.sleep(NOTICE_S)

    def end(self, lease: Lease, *, quiet: bool, holding: Holding | None = None) -> None:
        """Release a lease: at once when its slot is `quiet`, else as soon as the engine has stopped working on it."""
        if quiet:
            self._admission.release(lease, holding)
        else:
            self._tasks.start(self._release_when_quiet(lease, holding))

    def _is_busy(self, lease: Lease, seen: Mapping[int, SlotState]) -> bool:
        """Whether the engine may still be at work for a lease: in its slot, or in any that is not another's where the
        engine has chosen one and it is not known which."""
        if self._ledger.is_unsettled(lease):
            others = self._ledger.at_work(lease.engine)
            return any(state.busy for slot, state in seen.items() if slot not in others)
        return any(state.busy for slot, state in seen.items() if lease.slot in (None, slot))

    async def _release_when_quiet(self, lease: Lease, holding: Holding | None) -> None:
        member = self._members[lease.engine]
        waits = QUIET_LOOKS_S[member.role]
        looks = itertools.chain(waits, itertools.repeat(waits[-1]))
        stuck, loop = 0, asyncio.get_running_loop()
        late = loop.time() + STUCK_S
        try:
            for wait_s in looks:
                await asyncio.sleep(wait_s)
                if not self._ledger.is_current(lease):
                    return
                with suppress(EngineError):
                    if not self._is_busy(lease, await member.watch.look()):
                        return
                if not stuck and loop.time() > late:
                    stuck = 1
                    member.stuck += stuck
                    log.warning("engine %s goes on long after a request was cut off; nothing moves there", lease.engine)
        finally:
            member.stuck -= stuck
            self._admission.release(lease, holding)
