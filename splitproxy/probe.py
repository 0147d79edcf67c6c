"""The self-test of a pair: one short prompt handed over, checked step by step against the decode engine itself.

It drives two engines under leases that the caller holds, leaves their slots empty, and prints nothing.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from splitproxy.adapter import Deadlines, Engine, Sample, to_the_end
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.handover import is_proof
from splitproxy.model import Figures, Identity, Ticket, Tokens

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
    names = ("model", "vocabulary", "template", "special_tokens", "build")
    pairs = ((name, getattr(source, name), getattr(target, name)) for name in names)
    return [f"{name.replace('_', ' ')} differs: {a or 'none'} and {b or 'none'}" for name, a, b in pairs if a != b]


@dataclass(slots=True)
class Probe:
    """A self-test that is about to run on one slot of each engine."""

    source: Engine
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
            await self._answer(prompt, expected)
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
        self._note(
            "identity", not differences, "; ".join(differences) or f"{target.model}, build {target.build}", start
        )
        return source, target

    async def _prompt(self, length_tokens: int) -> Tokens:
        start = time.perf_counter()
        with self._step("tokens", start):
            text = random_text(length_tokens)
            prompt = (await self.target.tokenize(text)).head(length_tokens)
            same = (await self.source.tokenize(text)).head(length_tokens) == prompt
        self.report.tokens = len(prompt)
        if not same:
            self.report.advice.append("The engines tokenize differently: they do not run the same model file.")
        detail = f"{len(prompt)} tokens, the same ids from both" if same else "the engines give different ids"
        self._note("tokens", same and len(prompt) > 1, detail, start)
        return prompt

    async def _reference(self, prompt: Tokens) -> Sample:
        """The decode engine's own continuation from its own first n-1 tokens."""
        start = time.perf_counter()
        with self._step("own reading", start):
            await self.target.erase(self.target_slot, self.deadlines)
            head = prompt.head(len(prompt) - 1)
            read = (await self.target.sample(head, self.target_slot, 0, self.deadlines)).figures
            expected = await self.target.sample(prompt, self.target_slot, ANSWER_TOKENS, self.deadlines)
        self.report.decode_tokens_per_s = _speed(read)
        self._note("own reading", True, f"decode engine reads {_speed(read):,.0f} tokens/s", start)
        return expected

    async def _prefill(self, prompt: Tokens) -> Ticket:
        start = time.perf_counter()
        with self._step("saved", start):
            ticket = await self.source.prefill(
                prompt.head(len(prompt) - 1), self.source_slot, self.deadlines, lambda _step, _done, _all: None
            )
        self.report.session_bytes, self.report.save_ms = ticket.session_bytes, ticket.save_ms
        read = ticket.tokens - ticket.cached_tokens
        self.report.prefill_tokens_per_s = 1000 * read / ticket.prefill_ms if ticket.prefill_ms else 0.0
        now, saving_s = time.perf_counter(), ticket.save_ms / 1000
        speed = f"prefill engine reads {self.report.prefill_tokens_per_s:,.0f} tokens/s"
        self._note("read", True, speed, start + saving_s)
        detail = f"{ticket.tokens} tokens, {ticket.session_bytes / 2**20:.1f} MiB in {ticket.save_ms:.0f} ms"
        self._note("saved", True, detail, now - saving_s)
        self._note("file", True, "size, format and token list are as they should be", now)
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

    async def _answer(self, prompt: Tokens, expected: Sample) -> None:
        start = time.perf_counter()
        with self._step("reused", start):
            answer = await self.target.sample(prompt, self.target_slot, ANSWER_TOKENS, self.deadlines)
        cached = answer.figures.cached_tokens
        if not is_proof(cached, len(prompt)):
            self.report.advice += NOT_REUSED
        self._note("reused", is_proof(cached, len(prompt)), f"cache_n {cached} of {len(prompt)} tokens", start)
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
            self.probe.report.advice += advice(error)
            self.probe._note(FAILED_STEP.get(error.step, self.name), False, str(error), self.start)


FAILED_STEP = {Step.PREFILL: "read", Step.SAVE: "saved", Step.CHECK: "file", Step.RESTORE: "restored"}

NOT_REUSED = [
    "The restore reported success, yet the prompt was read again. For a model with a sliding window the decode engine "
    "needs a build that keeps checkpoints in session files and --ctx-checkpoints of 1 or more on both engines, or "
    "--swa-full on an older build.",
    "A decode engine with several slots must not clear idle ones: start it with --kv-unified --cache-ram 0.",
    "Other traffic on the decode engine, past the proxy, overwrites what was restored.",
]


def advice(error: EngineError) -> list[str]:
    """What to change when an engine failed this way."""
    if error.cause is Cause.DIED:
        return ["Is the engine running at this address? Its log tells why it ended."]
    if error.cause is Cause.TIMEOUT:
        return ["The engine is too slow for the deadline, or hangs: see its log."]
    if error.status in (401, 403):
        return ["The engine wants an API key: name the variable that holds it in api_key_env."]
    if error.status == 501:
        return [
            "Start the engine with --slot-save-path set to the folder of split.dir, and without --no-slots.",
        ]
    match error.step:
        case Step.SAVE:
            return ["Is the folder of --slot-save-path writable for the engine, and is there space left?"]
        case Step.CHECK:
            return ["split.dir and both engines' --slot-save-path must be the same folder, readable for this process."]
        case Step.RESTORE:
            return [
                "Both engines need the same build, the same -ctk, -ctv and -fa, and the same model.",
                "A decode engine with more than one slot needs --kv-unified; its context must hold the prompt.",
                "Both engines' --slot-save-path must be the folder of split.dir.",
                "The decode engine's log names the reason.",
            ]
        case _:
            return ["See the engine's log."]


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
