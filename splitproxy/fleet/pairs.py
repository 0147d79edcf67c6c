"""Which pairs of engines have proven themselves, by a self-test and by every handover since."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from splitproxy.books.admission import Admission, Turn
from splitproxy.books.ledger import EMPTY, NOTHING, Lease, Ledger
from splitproxy.decide.speeds import Reading, Speeds
from splitproxy.engines.adapter import Deadlines, Engine, PrefillEngine
from splitproxy.errors import Fault, RequestError
from splitproxy.fleet.member import Member
from splitproxy.fleet.probe import SAME_MODEL, Probe, Report, compare
from splitproxy.fleet.slots import Slots
from splitproxy.model import EngineState, InVain, PairState, Role

log = logging.getLogger(__name__)

PROBE_RETRY_S = 60.0  # after the first self-test that failed; twice as long after each further one
PROBE_RETRY_MAX_S = 3600.0
PROBE_PATIENCE_S = 30.0  # how long a self-test lets every client go first
PROBE_WAIT_S = 600.0
PROBE_ANSWER_TOKENS = 64  # more than it has written
INEFFECTIVE_LIMIT = 3


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
    relapses: int = 0  # times that it was switched off since a handover was last reused
    rests_until: float = 0.0  # on the monotonic clock; a self-test that passes proves nothing before
    nudge: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def epochs(self) -> tuple[int, int]:
        return self.source.epoch, self.target.epoch

    @property
    def rests(self) -> bool:
        """Whether its self-tests have passed where its handovers were in vain, so that the next one must wait."""
        return self.state is PairState.SWITCHED_OFF and time.monotonic() < self.rests_until

    @property
    def up(self) -> bool:
        return self.source.state is EngineState.READY and self.target.state is EngineState.READY


class Pairs(Mapping[tuple[str, str], Pair]):
    """All pairs, by the names of their prefill and decode engines.

    `probe_tokens` is the length of the self-test. `told` is called after each one that came to an end.
    """

    def __init__(
        self,
        members: Iterable[Member],
        ledger: Ledger,
        admission: Admission,
        deadlines: Deadlines,
        slots: Slots,
        speeds: Speeds,
        probe_tokens: int,
        told: Callable[[], None],
    ) -> None:
        by_role: dict[Role, list[Member]] = {role: [] for role in Role}
        for member in members:
            by_role[member.role].append(member)
        self._pairs = {
            (source.engine.name, target.engine.name): Pair(source, target)
            for source, target in itertools.product(by_role[Role.PREFILL], by_role[Role.DECODE])
        }
        self._ledger = ledger
        self._admission = admission
        self._deadlines = deadlines
        self._slots = slots
        self._speeds = speeds
        self._probe_tokens = probe_tokens
        self._told = told

    def __getitem__(self, names: tuple[str, str]) -> Pair:
        return self._pairs[names]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def any_proven(self, target: str) -> bool:
        """Whether a session of any prefill engine may be restored by this decode engine."""
        return any(pair.state is PairState.PROVEN for (_, name), pair in self.items() if name == target)

    def unprove(self, member: Member, fault: str) -> None:
        for pair in self.values():
            if member in (pair.source, pair.target):
                pair.state, pair.fault, pair.ineffective, pair.relapses = PairState.UNPROVEN, fault, 0, 0
                pair.proven_tokens = 0  # by engines that may have been started otherwise
                pair.nudge.set()

    async def keep_proven(self, pair: Pair) -> None:
        """Test a pair whenever it needs it: when both engines are up, and again while it is not proven.

        What fails again and again waits longer and longer, until one of both engines comes up anew: each test keeps
        clients waiting, and may leave a file where nobody removes it.
        """
        wait_s = PROBE_RETRY_S
        while True:
            pair.nudge.clear()
            tests = pair.tests
            if pair.up and pair.state is not PairState.PROVEN and not pair.rests:
                await self._test(pair)
                self._told()
            try:
                async with asyncio.timeout(wait_s):
                    await pair.nudge.wait()
                wait_s = PROBE_RETRY_S
            except TimeoutError:
                failed = pair.tests > tests and pair.state is not PairState.PROVEN
                wait_s = min(2 * wait_s, PROBE_RETRY_MAX_S) if failed else PROBE_RETRY_S

    async def _test(self, pair: Pair) -> None:
        source, target = pair.source, pair.target
        name = f"{source.engine.name} -> {target.engine.name}"
        assert source.identity is not None
        assert target.identity is not None
        epochs = pair.epochs
        if differences := compare(source.identity, target.identity):
            self._fail(pair, name, "; ".join(differences), [SAME_MODEL])
            return
        try:
            leases = await self._leases(source.engine, target.writer)
        except RequestError as error:
            pair.fault = f"no slots for the self-test: {error}"
            return
        report = None
        try:
            report = await self._probe(source.engine, target.writer, *leases)
            if pair.up and pair.epochs == epochs:  # else the return of the one that went starts the next test
                self._conclude(pair, name, report)
        finally:
            # Only now, so that whoever waits for the slot meets the verdict. The probe erases both slots; after a
            # failure nobody knows.
            clean = report is not None and report.passed
            for lease in leases:
                self._slots.end(lease, quiet=clean, holding=EMPTY if clean else None)

    def _conclude(self, pair: Pair, name: str, report: Report) -> None:
        source, target = pair.source, pair.target
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
        read = report.tokens - 1
        for engine, tokens_per_s in ((source, report.prefill_tokens_per_s), (target, report.decode_tokens_per_s)):
            if tokens_per_s > 0:
                self._speeds.learn_reading(engine, Reading(0, read), 1000 * read / tokens_per_s)
        self._speeds.learn_move(source, target, read, report.session_bytes, report.save_ms, report.restore_ms)

    def _fail(self, pair: Pair, name: str, fault: str, advice: list[str]) -> None:
        if pair.fault != fault:
            log.warning("pair %s is not used for handovers: %s. %s", name, fault, " ".join(advice))
        pair.fault = fault
        pair.tests += 1

    async def _leases(self, source: PrefillEngine, target: Engine) -> tuple[Lease, Lease]:
        """A slot of each engine. Clients go first; where they leave no gap, the self-test takes its turn among them.
        Raises RequestError."""
        try:
            return await self._both(source.name, target.name, PROBE_PATIENCE_S, self._admission.after_all())
        except RequestError as error:
            if error.fault is not Fault.QUEUE_TIMEOUT:
                raise
        return await self._both(source.name, target.name, PROBE_WAIT_S, None)

    async def _both(self, source: str, target: str, wait_s: float, turn: Turn | None) -> tuple[Lease, Lease]:
        """Both slots at once: none idles while the other is waited for."""
        tokens, read = self._probe_tokens, list[Lease]()

        def claim(engine: str) -> Lease | None:
            if engine != target:
                raise RequestError(Fault.NO_DECODE_ENGINE, f"decode engine {target} is not ready")
            if not (self._ledger.fits(source, tokens) and self._ledger.fits(target, tokens + PROBE_ANSWER_TOKENS)):
                return None
            if (lease := self._ledger.claim(source, NOTHING, tokens, 0)) is not None:
                read.append(lease)
            return self._ledger.claim(target, NOTHING, tokens, PROBE_ANSWER_TOKENS)

        deadline = asyncio.get_running_loop().time() + wait_s
        try:
            write = await self._admission.acquire(Role.DECODE, target, claim, deadline, turn=turn)
        except BaseException:
            for lease in read:
                self._admission.release(lease)
            raise
        return read[0], write

    async def _probe(self, source: PrefillEngine, target: Engine, read: Lease, write: Lease) -> Report:
        await self._slots.make_room(read)
        await self._slots.make_room(write)
        return await Probe(source, target, read.number, write.number, self._deadlines).run(self._probe_tokens)

    def judge(self, source: str, target: str, tokens: int, in_vain: InVain | None, bytes_per_token: float) -> None:
        """A handover was judged by the engine's own figures. Three in vain, in a row, switch the pair off.

        What is wrong may be such that the self-test passes all the same: it is short, and alone. A pair that is
        switched off again before one handover was reused rests longer each time, and nobody is warned again.
        """
        pair = self[source, target]
        pair.bytes_per_token = bytes_per_token
        if in_vain is None:
            pair.ineffective, pair.relapses, pair.proven_tokens = 0, 0, max(pair.proven_tokens, tokens)
            return
        pair.ineffective += 1
        if pair.ineffective >= INEFFECTIVE_LIMIT and pair.state is PairState.PROVEN:
            pair.state = PairState.SWITCHED_OFF
            pair.fault = f"the decode engine reads restored prompts again (likely {in_vain})"
            rest_s = min(PROBE_RETRY_S * 2**pair.relapses, PROBE_RETRY_MAX_S) if pair.relapses else 0.0
            pair.rests_until = time.monotonic() + rest_s
            log.log(
                logging.INFO if pair.relapses else logging.WARNING,
                "pair %s -> %s is switched off: %d handovers in a row were restored and read again all the same. "
                "Likely cause: %s. %s It is tested again within %.0f s.",
                source, target, pair.ineffective, in_vain, pair.target.writer.remedy(in_vain), rest_s + PROBE_RETRY_S,
            )  # fmt: skip
            pair.relapses += 1
