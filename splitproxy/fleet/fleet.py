"""The engines as a whole, as requests and the router see them. It puts together those who keep them."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from splitproxy.books.admission import Admission
from splitproxy.books.ledger import NOTHING, Ledger, Order
from splitproxy.decide.forecast import Forecast, Job
from splitproxy.decide.speeds import Reading
from splitproxy.engines.adapter import Deadlines, Engine, PrefillEngine
from splitproxy.fleet.health import Health
from splitproxy.fleet.member import Member
from splitproxy.fleet.pairs import Pairs
from splitproxy.fleet.slots import Slots
from splitproxy.fleet.tasks import Tasks
from splitproxy.fleet.watch import SlotWatch
from splitproxy.model import DecodeView, EngineState, PairState, PrefillView, Role, Route, Tokens

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 10.0


class Fleet:
    """All engines and pairs. An async context manager: inside, they are watched.

    `probe_tokens` is the length of the self-test; 0 switches it off, for a proxy that is to hand nothing over. `meet`
    is run in the background for each decode engine that comes up.
    """

    def __init__(
        self,
        engines: Mapping[str, tuple[PrefillEngine, Role]],
        ledger: Ledger,
        admission: Admission,
        deadlines: Deadlines,
        probe_tokens: int,
        sweep: Callable[[], int],
        meet: Callable[[Engine], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.members = {name: Member(engine, role) for name, (engine, role) in engines.items()}
        self.forecast = Forecast()
        self.tasks = Tasks()
        self.slots = Slots(self.members, ledger, admission, deadlines, self.tasks)
        self.pairs = Pairs(
            self.members.values(), ledger, admission, deadlines, self.slots, self.forecast.speeds, probe_tokens,
            self._take_stock,
        )  # fmt: skip
        self.health = Health(
            self.members, ledger, admission, deadlines, self.forecast.recall, self.tasks,
            self.pairs.unprove, self._take_stock, meet,
        )  # fmt: skip
        self._ledger = ledger
        self._admission = admission
        self._tests_pairs = probe_tokens > 0
        self._sweep = sweep
        self._judged = asyncio.Event()

    def engine(self, name: str) -> Engine:
        """A decode engine."""
        return self.members[name].writer

    def prefill_engine(self, name: str) -> PrefillEngine:
        return self.members[name].engine

    def watch(self, name: str) -> SlotWatch:
        return self.members[name].watch

    @property
    def template_bytes(self) -> int:
        """What the engines' chat templates add to a prompt by themselves, at most."""
        return max(member.template_bytes for member in self.members.values() if member.role is Role.DECODE)

    async def __aenter__(self) -> Self:
        self.tasks.start(self._keep_swept())
        for member in self.members.values():
            self.tasks.start(self.health.watch(member))
            self.tasks.start(self.health.feel_pulse(member))
        if self._tests_pairs:
            for pair in self.pairs.values():
                self.tasks.start(self.pairs.keep_proven(pair))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.tasks.__aexit__(kind, error, trace)

    async def _keep_swept(self) -> None:
        """A session file that an engine wrote after its deadline has no ticket: remove it."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            if removed := await asyncio.to_thread(self._sweep):
                log.warning("removed %d late session files", removed)

    async def first_verdicts(self) -> None:
        """Wait until every decode engine is ready, no engine is loading, and every pair that could be tested was."""
        await self._judged.wait()

    def _take_stock(self) -> None:
        seen = all(member.looks for member in self.members.values())
        up = all(
            member.state is EngineState.READY if member.role is Role.DECODE else member.state is not EngineState.LOADING
            for member in self.members.values()
        )
        tested = all(pair.tests > 0 or not pair.up for pair in self.pairs.values())
        if seen and up and (tested or not self._tests_pairs):
            self._judged.set()

    def views(self, tokens: Tokens | None, avoid: Collection[str] = ()) -> tuple[list[DecodeView], list[PrefillView]]:
        """The engines as the router sees them for one prompt: those that can answer, and the pairs they are in, without
        the prefill engines in `avoid`."""
        ledger = self._ledger
        ready = ledger.ready(Role.DECODE)
        known, count = tokens or NOTHING, None if tokens is None else len(tokens)
        outlooks = {name: ledger.outlook(name, known, self.order(name, count or 0)) for name in ready}
        decode = [
            DecodeView(
                engine=name,
                held_tokens=outlooks[name].held,
                slot=outlooks[name].slot,
                restore_slot=self._restore_slot(name, known, outlooks[name].slot),
                beside=outlooks[name].beside,
                context=ledger.context(name),
                free_slots=ledger.count(name).free,
                waiting=self._admission.waiting_for(name),
            )
            for name in ready
        ]
        prefill = [
            PrefillView(
                engine=source,
                decode_engine=target,
                up=pair.source.state is EngineState.READY and not pair.source.stuck,
                pair=pair.state,
                context=ledger.context(source),
                waiting=self._admission.waiting_for(source) + ledger.count(source).busy,
                room=ledger.has_room(self.session_bytes(source, target, tokens or NOTHING)),
                held_tokens=0 if tokens is None else ledger.held(source, tokens),
                backlog_tokens=pair.source.backlog_tokens,
            )
            for (source, target), pair in self.pairs.items()
            if target in ready and source not in avoid
        ]
        return (
            [self.forecast.decode_view(view, count) for view in decode],
            [self.forecast.prefill_view(view, tokens) for view in prefill],
        )

    def order(self, engine: str, read_tokens: int) -> Order:
        """What a decode engine reads now, and what a prompt of which it is to read so many tokens would add to it."""
        read_s = self.forecast.speeds.read_s(engine, Reading(0, read_tokens))
        return Order(read_s or 0.0, self.forecast.reading_s(engine))

    def _restore_slot(self, engine: str, tokens: Tokens, slot: int | None) -> int | None:
        """The slot that a session would be restored into: the same as the one to read in where nobody reads."""
        order = self.order(engine, 0)
        return self._ledger.place(engine, tokens, order) if order.others_s else slot

    @contextmanager
    def reading(self, source: str, route: Route) -> Iterator[Job]:
        """Count what a prefill engine has yet to read for a request."""
        member, tokens = self.members[source], route.uncached_tokens or 0
        member.backlog_tokens += tokens
        try:
            with self.forecast.reading_ahead(route) as job:
                yield job
        finally:
            member.backlog_tokens -= tokens

    def can_redeem(self, source: str, target: str) -> bool:
        """Whether a session of one engine may be restored by the other."""
        return self.pairs[source, target].state is PairState.PROVEN

    def session_bytes(self, source: str, target: str, tokens: Tokens) -> int:
        """How large a pair's session file of a prompt will be, going by the last ones."""
        expected = self.forecast.speeds.session_bytes(source, target, len(tokens))
        return max(expected, int(self.pairs[source, target].bytes_per_token * len(tokens)))
