"""The self-test of a pair: one short prompt handed over, checked step by step against the decode engine itself.

It drives two engines under leases that the caller holds, leaves their slots empty, and prints nothing.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from splitproxy.engines.adapter import Deadlines, Engine, PrefillEngine, Sample, to_the_end
from splitproxy.errors import EngineError, Step
from splitproxy.model import Estimate, Figures, Identity, Prompt, Ticket

ANSWER_TOKENS = 8
# The likeliest first tokens of the restored answer against those of the engine's own. Measured: one model shares all
# ten, 0.003 apart at most; other weights of the same shape share nine at most, 0.28 apart or more on average, and now
# and then even write the same text. Between the two lies room for cards that round differently.
SHARED_RIVALS = 0.8
LOGPROB_LIMIT = 0.15
SAME_MODEL = "Start both engines from the same model file, with the same build and chat template."


@dataclass(frozen=True, slots=True)
class Check:
    """One step of the self-test."""

    name: str
    passed: bool
    detail: str
    seconds: float


@dataclass(slots=True)
class Report:
    """What the self-test found. `advice` says what to change where it failed."""

    checks: list[Check] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    tokens: int = 0
    session_bytes: int = 0
    save_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0  # reading, not writing

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def fault(self) -> str:
        """The first step that failed, in one sentence; empty when all passed."""
        return next((f"{check.name}: {check.detail}" for check in self.checks if not check.passed), "")


Watcher = Callable[[Check], None]


def compare(source: Identity, target: Identity) -> list[str]:
    """What keeps two engines from being a pair: one phrase for each difference, prefill engine first."""
    names = ("model", "vocabulary", "template", "special_tokens", "build", "session")
    pairs = ((name, getattr(source, name), getattr(target, name)) for name in names)
    told = ((name, a, b) for name, a, b in pairs if a is not None and b is not None)
    return [f"{name.replace('_', ' ')} differs: {a or 'none'} and {b or 'none'}" for name, a, b in told if a != b]


@dataclass(slots=True)
class Probe:
    """A self-test that is about to run on one slot of each engine."""

    source: PrefillEngine
    target: Engine
    source_slot: int
    target_slot: int
    deadlines: Deadlines
    watch: Watcher = lambda _check: None
    report: Report = field(default_factory=Report)

    async def run(self, length_tokens: int) -> Report:
        """Hand over a prompt of about `length_tokens`. Engine errors end in the report, never as exceptions."""
        ticket: Ticket | None = None
        try:
            identities = await self._identity()
            limit = min(length_tokens, *(identity.context // 2 for identity in identities))
            prompt = await self._prompt(limit)
            expected = await self._reference(prompt)
            ticket = await self._prefill(prompt)
            await self._restore(ticket)
            answer = await self._answer(prompt, ticket)
            if self.target.samples_compare:
                self._compare(answer, expected)
        except _StopProbe:
            pass
        finally:
            await to_the_end(self._clean(ticket))
        return self.report

    async def _identity(self) -> tuple[Identity, Identity]:
        start = time.perf_counter()
        with self._step("identity", start):
            source, target = await self.source.identify(), await self.target.identify()
        differences = compare(source, target)
        if differences:
            self.report.advice.append(SAME_MODEL)
        told = ", ".join(filter(None, (target.model, f"build {target.build}")))
        self._note("identity", not differences, "; ".join(differences) or told, start)
        return source, target

    async def _prompt(self, length_tokens: int) -> Prompt:
        start = time.perf_counter()
        with self._step("tokens", start):
            text = random_text(length_tokens)
            prompt = await self.target.trial(text, length_tokens)
            same = await self.source.reads_alike(text, prompt)
        self.report.tokens = len(prompt)
        if not same:
            self.report.advice.append("The engines tokenize differently: they do not run the same model file.")
        counted = f"about {len(prompt)} tokens" if isinstance(prompt.tokens, Estimate) else f"{len(prompt)} tokens"
        detail = f"{counted} for both" if same else "the engines give different ids"
        self._note("tokens", same and len(prompt) > 1, detail, start)
        return prompt

    async def _reference(self, prompt: Prompt) -> Sample:
        """The decode engine's own continuation from where a handover ends.

        Where it would be compared with nothing, another prompt is read: nobody can say that the engine has seen the one
        that is restored.
        """
        start = time.perf_counter()
        with self._step("own reading", start):
            await self.target.erase(self.target_slot, self.deadlines)
            if not self.target.samples_compare:
                prompt = await self.target.trial(random_text(len(prompt)), len(prompt))
            expected = await self.target.sample(prompt, self.target_slot, 0, self.deadlines)
            read = expected.figures
            if self.target.samples_compare:
                expected = await self.target.sample(prompt, self.target_slot, ANSWER_TOKENS, self.deadlines)
        self.report.decode_tokens_per_s = _speed(read)
        self._note("own reading", True, f"decode engine reads {_speed(read):,.0f} tokens/s", start)
        return expected

    async def _prefill(self, prompt: Prompt) -> Ticket:
        start = time.perf_counter()
        with self._step("saved", start):
            ticket = await self.source.prefill(
                prompt, self.source_slot, self.deadlines, lambda _step, _done, _all: None
            )
        self.report.session_bytes, self.report.save_ms = ticket.session_bytes, ticket.save_ms
        read = ticket.tokens - ticket.cached_tokens
        self.report.prefill_tokens_per_s = 1000 * read / ticket.prefill_ms if ticket.prefill_ms else 0.0
        now, saving_s = time.perf_counter(), ticket.save_ms / 1000
        speed = f"prefill engine reads {self.report.prefill_tokens_per_s:,.0f} tokens/s"
        self._note("read", True, speed, start + saving_s)
        detail = f"{ticket.tokens} tokens, {ticket.session_bytes / 2**20:.1f} MiB in {ticket.save_ms:.0f} ms"
        self._note("saved", True, detail, now - saving_s)
        self._note("file", True, "as it should be, as far as it can be read", now)
        return ticket

    async def _restore(self, ticket: Ticket) -> None:
        start = time.perf_counter()
        with self._step("restored", start):
            await self.target.erase(self.target_slot, self.deadlines)
            redeemed = await self.target.redeem(ticket, self.target_slot, self.deadlines)
        self.report.restore_ms = redeemed.restore_ms
        whole = redeemed.tokens == ticket.tokens
        detail = f"{redeemed.tokens} of {ticket.tokens} tokens in {redeemed.restore_ms:.0f} ms"
        self._note("restored", whole, detail, start)

    async def _answer(self, prompt: Prompt, ticket: Ticket) -> Sample:
        start = time.perf_counter()
        with self._step("reused", start):
            answer = await self.target.sample(prompt, self.target_slot, ANSWER_TOKENS, self.deadlines)
        cached, read = answer.figures.cached_tokens, answer.figures.read_tokens
        proven = cached >= ticket.proof_tokens
        if not proven:
            self.report.advice.append(self.target.remedy(None))
        self._note("reused", proven, f"cache_n {cached} of {cached + read} tokens", start)
        return answer

    def _compare(self, answer: Sample, expected: Sample) -> None:
        start = time.perf_counter()
        same, detail = _same(answer, expected)
        if not same:
            self.report.advice.append("Other weights with the same shape restore without an error: use one model file.")
        self._note("text", same, detail, start)

    async def _clean(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            await self.source.discard(ticket)
        for engine, slot in ((self.target, self.target_slot), (self.source, self.source_slot)):
            with suppress(EngineError):
                await engine.erase(slot, self.deadlines)

    def _note(self, name: str, passed: bool, detail: str, start: float) -> None:
        check = Check(name, passed, detail, time.perf_counter() - start)
        self.report.checks.append(check)
        self.watch(check)
        if not passed:
            raise _StopProbe

    def _step(self, name: str, start: float) -> "_Step":
        return _Step(self, name, start)


class _StopProbe(Exception):  # noqa: N818 - no error: the report holds what is wrong
    """A step failed; the report says so."""


@dataclass(slots=True)
class _Step:
    """Turns an engine's error inside a step into the step's result."""

    probe: Probe
    name: str
    start: float

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, EngineError):
            engine = self.probe.source if error.step in SOURCE_STEPS else self.probe.target
            self.probe.report.advice += engine.advice(error)
            self.probe._note(FAILED_STEP.get(error.step, self.name), False, str(error), self.start)


SOURCE_STEPS = frozenset({Step.PREFILL, Step.SAVE, Step.CHECK})
FAILED_STEP = {Step.PREFILL: "read", Step.SAVE: "saved", Step.CHECK: "file", Step.RESTORE: "restored"}


def _same(answer: Sample, expected: Sample) -> tuple[bool, str]:
    """Whether two continuations are those of one model; exactly equal, or apart by rounding alone."""
    rivals = len(expected.logprobs)
    shared = answer.logprobs.keys() & expected.logprobs.keys()
    distance = sum(abs(answer.logprobs[token] - expected.logprobs[token]) for token in shared) / max(len(shared), 1)
    close = len(shared) >= SHARED_RIVALS * rivals and distance <= LOGPROB_LIMIT
    if close and answer.text == expected.text:
        return True, "equal to the decode engine's own continuation"
    if close and rivals:
        return True, f"differs by rounding alone (log-probabilities {distance:.3f} apart)"
    told = f"{len(shared)} of the {rivals} likeliest first tokens are the same, {distance:.2f} apart"
    return False, f"another text than the decode engine's own: {told}"


def _speed(figures: Figures) -> float:
    return 1000 * figures.read_tokens / figures.prompt_ms if figures.prompt_ms else 0.0


def random_text(length_tokens: int) -> str:
    """Words that no engine has in its cache, enough of them for the length."""
    chance = random.Random()  # noqa: S311 - only has to differ from the last time
    syllables = ("ba", "ker", "lo", "mi", "tan", "ro", "se", "vi", "den", "ul", "gra", "po")
    words = ("".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(length_tokens))
    return " ".join(words)
