"""The engines as a whole: who is up, which pairs have proven themselves, and slots that are not quiet yet.

It watches every engine's health, opens and closes their books, runs self-tests in the background, and keeps the lease
of a slot whose request was cut off until the engine has really stopped. It serves no client.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from splitproxy.adapter import Deadlines, Engine, SlotState
from splitproxy.admission import Admission
from splitproxy.errors import Cause, EngineError, RequestError
from splitproxy.forecast import Forecast, Job
from splitproxy.ledger import EMPTY, NOTHING, Holding, Lease, Ledger
from splitproxy.model import DecodeView, EngineState, Identity, InVain, PairState, PrefillView, Role, Route, Tokens
from splitproxy.probe import SAME_MODEL, Probe, Report, compare
from splitproxy.verdict import ADVICE
from splitproxy.watch import SlotWatch

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 2.0
FAILURES_TO_DOWN = 2
PULSE_INTERVAL_S = 30.0
SWEEP_INTERVAL_S = 10.0
PROBE_RETRY_S = 60.0
PROBE_WAIT_S = 600.0
INEFFECTIVE_LIMIT = 3
IDENTIFY_INTERVAL_S = 5.0  # at most so often is an engine that went wrong asked again what it is
QUIET_LOOKS_S = (0.25, 1.25, 1.5)  # when a slot whose request was cut off is looked at
STUCK_S = 10.0  # more than an engine needs to finish a batch and to notice that its client has left


@dataclass(slots=True)
class Member:
    """One engine and what is known of it."""

    engine: Engine
    role: Role
    state: EngineState = EngineState.DOWN
    identity: Identity | None = None
    fault: str = "not seen yet"
    template_bytes: int = 0  # what the chat template adds to one message
    backlog_tokens: int = 0  # of prompts that a prefill engine is reading or has yet to read
    looks: int = 0
    failures: int = 0  # in a row
    stuck: int = 0  # slots that are still at work long after their requests were cut off
    doubted: bool = False  # something went wrong since it was identified: it may be another one by now
    identified: float = 0.0  # when, on the loop's clock
    nudge: asyncio.Event = field(default_factory=asyncio.Event)
    watch: SlotWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = SlotWatch(self.engine)


@dataclass(slots=True)
class Pair:
    """One prefill engine with one decode engine."""

    source: Member
    target: Member
    state: PairState = PairState.UNPROVEN
    fault: str = "no self-test yet"
    report: Report | None = None
    bytes_per_token: float = 0.0
    proven_tokens: int = 0  # the longest prompt that was handed over and reused
    ineffective: int = 0  # in a row
    tests: int = 0  # self-tests that came to a verdict
    nudge: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def up(self) -> bool:
        return self.source.state is EngineState.READY and self.target.state is EngineState.READY


class Fleet:
    """All engines and pairs. An async context manager: inside, they are watched.

    `probe_tokens` is the length of the self-test; 0 switches it off, for a proxy that is to hand nothing over. `meet`
    is run in the background for each decode engine that comes up.
    """

    def __init__(
        self,
        engines: Mapping[str, tuple[Engine, Role]],
        ledger: Ledger,
        admission: Admission,
        deadlines: Deadlines,
        probe_tokens: int,
        sweep: Callable[[], int],
        meet: Callable[[Engine], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.members = {name: Member(engine, role) for name, (engine, role) in engines.items()}
        self.pairs = {
            (source.engine.name, target.engine.name): Pair(source, target)
            for source, target in itertools.product(self._of(Role.PREFILL), self._of(Role.DECODE))
        }
        self.forecast = Forecast()
        self._ledger = ledger
        self._admission = admission
        self._deadlines = deadlines
        self._probe_tokens = probe_tokens
        self._sweep = sweep
        self._meet = meet
        self._judged = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def _of(self, role: Role) -> list[Member]:
        return [member for member in self.members.values() if member.role is role]

    def engine(self, name: str) -> Engine:
        return self.members[name].engine

    def watch(self, name: str) -> SlotWatch:
        return self.members[name].watch

    @property
    def template_bytes(self) -> int:
        """What the engines' chat templates add to a prompt by themselves, at most."""
        return max(member.template_bytes for member in self._of(Role.DECODE))

    async def __aenter__(self) -> Self:
        self._own(self._keep_swept())
        for member in self.members.values():
            self._own(self._watch(member))
            self._own(self._feel_pulse(member))
        if self._probe_tokens:
            for pair in self.pairs.values():
                self._own(self._prove(pair))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def _keep_swept(self) -> None:
        """A session file that an engine wrote after its deadline has no ticket: remove it."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            if removed := await asyncio.to_thread(self._sweep):
                log.warning("removed %d late session files", removed)

    # -- views ---------------------------------------------------------------------------------------------------------

    def views(self, tokens: Tokens | None) -> tuple[list[DecodeView], list[PrefillView]]:
        """The engines as the router sees them for one prompt: those that can answer, and the pairs they are in."""
        ledger = self._ledger
        ready = ledger.ready(Role.DECODE)
        outlooks = {name: ledger.outlook(name, tokens or NOTHING) for name in ready}
        decode = [
            DecodeView(
                engine=name,
                held_tokens=outlooks[name][0],
                beside=outlooks[name][1],
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
            if target in ready
        ]
        count = None if tokens is None else len(tokens)
        return (
            [self.forecast.decode_view(view, count) for view in decode],
            [self.forecast.prefill_view(view, tokens) for view in prefill],
        )

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

    # -- health --------------------------------------------------------------------------------------------------------

    def suspect(self, name: str) -> None:
        """A call to this engine went wrong: look at it now rather than at the next turn."""
        self.members[name].doubted = True
        self.members[name].nudge.set()

    def distrust(self, name: str) -> None:
        """This engine did not hold what was believed: it was restarted, slept, or is used by others. Forget it all."""
        log.warning("engine %s has lost what it held; does anything else use it, does it sleep or restart?", name)
        self._ledger.distrust(name)
        self.suspect(name)

    async def _watch(self, member: Member) -> None:
        while True:
            await self._look(member, await member.engine.health())
            member.looks += 1
            self._take_stock()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    await member.nudge.wait()
            member.nudge.clear()

    async def _look(self, member: Member, seen: EngineState) -> None:
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
        member.doubted, member.identified = False, now
        if identity != member.identity:
            self._part(member, EngineState.DOWN)
            await self._welcome(member)

    async def _welcome(self, member: Member) -> None:
        """The engine is up, for the first time or again: learn what it is, and believe nothing of before."""
        try:
            identity = await member.engine.identify()
            member.template_bytes = await _template_bytes(member.engine)
        except EngineError as error:
            if member.fault != str(error):
                log.warning("%s engine %s cannot be used: %s", member.role, member.engine.name, error)
            member.fault = str(error)
            return
        if any(state.busy for state in (await self._slots_of(member)).values()):
            # Work from before it was lost, or somebody else's: a busy slot must not be given to anybody.
            member.fault = "is still at work on what nobody waits for"
            return
        member.identity, member.state, member.fault = identity, EngineState.READY, ""
        member.doubted, member.identified = False, asyncio.get_running_loop().time()
        self._ledger.open(member.engine.name, member.role, identity.slots, identity.context)
        self.forecast.recall.forget(member.engine.name)
        log.info(
            "%s engine %s is ready: %d slots, context %d, build %s",
            member.role, member.engine.name, identity.slots, identity.context, identity.build,
        )  # fmt: skip
        self._unprove(member, "no self-test since the engine came up")
        if self._meet is not None and member.role is Role.DECODE:
            self._own(self._meet(member.engine))
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

    async def _feel_pulse(self, member: Member) -> None:
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

    async def first_verdicts(self) -> None:
        """Wait until every decode engine is ready, and every pair of ready engines has been tested once."""
        await self._judged.wait()

    def _take_stock(self) -> None:
        seen = all(member.looks for member in self.members.values())
        up = all(member.state is EngineState.READY for member in self._of(Role.DECODE))
        tested = all(pair.tests > 0 or not pair.up for pair in self.pairs.values())
        if seen and up and (tested or not self._probe_tokens):
            self._judged.set()

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def _unprove(self, member: Member, fault: str) -> None:
        for pair in self.pairs.values():
            if member in (pair.source, pair.target):
                pair.state, pair.fault, pair.ineffective = PairState.UNPROVEN, fault, 0
                pair.nudge.set()

    async def _prove(self, pair: Pair) -> None:
        """Test a pair whenever it needs it: when both engines are up, and again while it is not proven."""
        while True:
            pair.nudge.clear()
            if pair.up and pair.state is not PairState.PROVEN:
                await self._test(pair)
                self._take_stock()
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_RETRY_S):
                    await pair.nudge.wait()

    async def _test(self, pair: Pair) -> None:
        source, target = pair.source, pair.target
        name = f"{source.engine.name} -> {target.engine.name}"
        assert source.identity is not None
        assert target.identity is not None
        if differences := compare(source.identity, target.identity):
            self._fail(pair, name, "; ".join(differences), [SAME_MODEL])
            return
        try:
            report = await self._probe(source.engine, target.engine)
        except RequestError as error:
            pair.fault = f"no slots for the self-test: {error}"
            return
        if not pair.up:
            return  # one of them went meanwhile; its return starts the next test
        pair.report = report
        if report.passed:
            pair.tests += 1
            pair.state, pair.fault, pair.ineffective = PairState.PROVEN, "", 0
            pair.bytes_per_token = report.session_bytes / report.tokens
            pair.proven_tokens = max(pair.proven_tokens, report.tokens)
            self._learn(source.engine.name, target.engine.name, report)
            log.info("pair %s is proven: %s", name, "; ".join(f"{c.name}: {c.detail}" for c in report.checks[2:]))
        else:
            self._fail(pair, name, report.fault, report.advice)

    def _learn(self, source: str, target: str, report: Report) -> None:
        """A self-test is the first that is known of a pair's speeds."""
        speeds, read = self.forecast.speeds, report.tokens - 1
        for engine, tokens_per_s in ((source, report.prefill_tokens_per_s), (target, report.decode_tokens_per_s)):
            if tokens_per_s > 0:
                speeds.learn_reading(engine, 0, read, 1000 * read / tokens_per_s)
        speeds.learn_move(source, target, read, report.session_bytes, report.save_ms, report.restore_ms)

    def _fail(self, pair: Pair, name: str, fault: str, advice: list[str]) -> None:
        if pair.fault != fault:
            log.warning("pair %s is not used for handovers: %s. %s", name, fault, " ".join(advice))
        pair.fault = fault
        pair.tests += 1

    async def _probe(self, source: Engine, target: Engine) -> Report:
        deadline = asyncio.get_running_loop().time() + PROBE_WAIT_S
        tokens = self._probe_tokens
        read = await self._admission.acquire(
            Role.PREFILL, source.name, lambda name: self._ledger.claim(name, NOTHING, tokens, 0), deadline
        )
        try:
            write = await self._admission.acquire(
                Role.DECODE, target.name, lambda name: self._ledger.claim(name, NOTHING, tokens, 64), deadline
            )
        except BaseException:
            self._admission.release(read)
            raise
        report = None
        try:
            if write.engine != target.name:
                return Report()
            await self.make_room(read)
            await self.make_room(write)
            report = await Probe(source, target, read.number, write.number, self._deadlines).run(tokens)
            return report
        finally:
            # The probe erases both slots; after a failure nobody knows.
            clean = report is not None and report.passed
            for lease in (read, write):
                self.end(lease, quiet=clean, holding=EMPTY if clean else None)

    def judge(self, source: str, target: str, tokens: int, in_vain: InVain | None, bytes_per_token: float) -> None:
        """A handover was judged by the engine's own figures. Three in vain, in a row, switch the pair off."""
        pair = self.pairs[source, target]
        pair.bytes_per_token = bytes_per_token
        if in_vain is None:
            pair.ineffective, pair.proven_tokens = 0, max(pair.proven_tokens, tokens)
            return
        pair.ineffective += 1
        if pair.ineffective >= INEFFECTIVE_LIMIT and pair.state is PairState.PROVEN:
            pair.state = PairState.SWITCHED_OFF
            pair.fault = f"the decode engine reads restored prompts again (likely {in_vain})"
            log.warning(
                "pair %s -> %s is switched off: %d handovers in a row were restored and read again all the same. "
                "Likely cause: %s. %s It is tested again every %.0f s.",
                source, target, pair.ineffective, in_vain, ADVICE[in_vain], PROBE_RETRY_S,
            )  # fmt: skip

    # -- slots that are not quiet --------------------------------------------------------------------------------------

    async def make_room(self, lease: Lease) -> None:
        """Erase the idle slots that a lease needs out of its way."""
        await self.erase(lease, lease.erase)

    async def erase(self, lease: Lease, slots: Iterable[int]) -> None:
        """Erase the idle slots that a lease has claimed for this. A failure shows in what follows."""
        emptied: list[int] = []
        try:
            for slot in slots:
                with suppress(EngineError):
                    await self.engine(lease.engine).erase(slot, self._deadlines)
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
        with suppress(EngineError):
            if (chosen := await self.engine(lease.engine).newest_task()) is not None:
                return self._admission.settle(lease, chosen)
        return lease

    def end(self, lease: Lease, *, quiet: bool, holding: Holding | None = None) -> None:
        """Release a lease: at once when its slot is `quiet`, else as soon as the engine has stopped working on it."""
        if quiet:
            self._admission.release(lease, holding)
        else:
            self._own(self._release_when_quiet(lease, holding))

    async def _release_when_quiet(self, lease: Lease, holding: Holding | None) -> None:
        member = self.members[lease.engine]
        looks = itertools.chain(QUIET_LOOKS_S, itertools.repeat(QUIET_LOOKS_S[-1]))
        stuck, loop = 0, asyncio.get_running_loop()
        late = loop.time() + STUCK_S
        try:
            for wait_s in looks:
                await asyncio.sleep(wait_s)
                if not self._ledger.is_current(lease):
                    return
                with suppress(EngineError):
                    seen = await member.watch.look()
                    if not any(state.busy for slot, state in seen.items() if lease.slot in (None, slot)):
                        return
                if not stuck and loop.time() > late:
                    stuck = 1
                    member.stuck += stuck
                    log.warning("engine %s goes on long after a request was cut off; nothing moves there", lease.engine)
        finally:
            member.stuck -= stuck
            self._admission.release(lease, holding)


async def _template_bytes(engine: Engine) -> int:
    try:
        return len((await engine.render(b'{"messages":[{"role":"user","content":""}]}')).encode())
    except EngineError as error:
        if error.cause is not Cause.REFUSED:
            raise
        return 0  # a model without a chat template
