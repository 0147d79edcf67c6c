"""The self-test: its order, what each failure says and advises, and that it leaves both engines empty."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from splitproxy.engines.adapter import Deadlines, Engine, Progress, Sample
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.fleet.probe import Check, Probe, Report, compare
from splitproxy.model import Api, Ask, Figures, Identity, InVain, Prompt, Redeemed, Ticket, Tokens

DEADLINES = Deadlines(1, 1, 1)
IDENTITY = Identity("b1", "n_params=1", "type=2", "abc", "bos=1", context=4096, slots=2)
LENGTH = 128
PROOF = 111
LOGPROBS = {token: -1.0 - token for token in range(10)}


class Scripted:
    """An engine that tells what it is told to, and notes every call."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.identity = IDENTITY
        self.failing: dict[str, EngineError] = {}
        self.hanging = ""
        self.reached = asyncio.Event()
        self.vocabulary: Callable[[str], int] = len
        self.restored: int | None = None
        self.cached: int | None = None  # of the answer after the restore
        self.answer = Sample("hello", dict(LOGPROBS), Figures(0, 0, 0.0, 0, 0.0))
        self.restored_answer: Sample | None = None
        self.log = log
        self.redeemed = False
        self.samples_compare = True

    async def _call(self, name: str) -> None:
        self.log.append(f"{self.name} {name}")
        await asyncio.sleep(0)
        if name == self.hanging:
            self.reached.set()
            await asyncio.Event().wait()
        if name in self.failing:
            raise self.failing[name]

    async def identify(self) -> Identity:
        await self._call("identify")
        return self.identity

    async def trial(self, text: str, length_tokens: int) -> Prompt:
        await self._call("trial")
        tokens = Tokens(self.vocabulary(word) for word in text.split()).head(length_tokens)
        return Prompt(tokens, Ask(Api.CHAT, "/", b""))

    async def reads_alike(self, text: str, prompt: Prompt) -> bool:
        return (await self.trial(text, len(prompt))).tokens == prompt.tokens

    def advice(self, error: EngineError) -> list[str]:
        return [f"advice of {self.name}"]

    def remedy(self, cause: InVain | None) -> str:
        return f"remedy of {self.name}"

    async def erase(self, slot: int, deadlines: Deadlines) -> None:
        await self._call(f"erase {slot}")

    async def sample(self, prompt: Prompt, slot: int, count: int, deadlines: Deadlines) -> Sample:
        await self._call(f"sample {len(prompt)} {count} on {slot}")
        if not self.redeemed:
            read = len(prompt) if count else len(prompt) - 1
            return replace(self.answer, figures=Figures(0, read, 500.0, count, 1.0))
        cached = len(prompt) - 1 if self.cached is None else self.cached
        figures = Figures(cached, len(prompt) - cached, 1.0, count, 1.0)
        return replace(self.restored_answer or self.answer, figures=figures)

    async def prefill(self, prompt: Prompt, slot: int, deadlines: Deadlines, progress: Progress) -> Ticket:
        await self._call(f"prefill {len(prompt)} on {slot}")
        progress(Step.PREFILL, 1, len(prompt))
        return Ticket("t", len(prompt) - 1, 3 * 2**20, 27, prefill_ms=100.0, save_ms=12.0, proof_tokens=PROOF)

    async def redeem(self, ticket: Ticket, slot: int, deadlines: Deadlines) -> Redeemed:
        await self._call(f"redeem on {slot}")
        self.redeemed = True
        return Redeemed(ticket.tokens if self.restored is None else self.restored, 8.0)

    async def discard(self, ticket: Ticket) -> None:
        await self._call(f"discard {ticket.handle}")


class Pair:
    """Two scripted engines and the self-test between them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.seen: list[Check] = []
        self.source, self.target = Scripted("reader", self.log), Scripted("writer", self.log)

    async def run(self, length: int = LENGTH) -> Report:
        source, target = cast("Engine", self.source), cast("Engine", self.target)
        return await Probe(source, target, 3, 5, DEADLINES, self.seen.append).run(length)

    def assert_clean(self) -> None:
        """Both slots are erased at the very end, and what was saved is discarded."""
        assert set(self.log[-2:]) == {"writer erase 5", "reader erase 3"}
        saved = any("prefill" in call for call in self.log) and not any("prefill" in key for key in self.source.failing)
        assert ("reader discard t" in self.log) == saved


STEPS = ["identity", "tokens", "own reading", "read", "saved", "file", "restored", "reused", "text"]


async def test_the_order_of_the_self_test() -> None:
    """The decode engine reads by itself first; then a prompt is read, saved, restored to an empty slot, answered."""
    pair = Pair()
    report = await pair.run()
    assert report.passed
    assert (report.fault, report.advice) == ("", [])
    assert [check.name for check in report.checks] == STEPS
    assert pair.seen == report.checks
    assert pair.log == [
        "reader identify", "writer identify", "writer trial", "reader trial",
        "writer erase 5", f"writer sample {LENGTH} 0 on 5", f"writer sample {LENGTH} 8 on 5",
        f"reader prefill {LENGTH} on 3", "writer erase 5", "writer redeem on 5", f"writer sample {LENGTH} 8 on 5",
        "reader discard t", "writer erase 5", "reader erase 3",
    ]  # fmt: skip


async def test_where_samples_tell_nothing_no_texts_are_compared() -> None:
    """An engine that refuses foreign sessions itself is not asked for a text, and what it reads is another prompt."""
    pair = Pair()
    pair.target.samples_compare = False
    report = await pair.run()
    assert report.passed
    assert [check.name for check in report.checks] == STEPS[:-1]
    assert pair.log[4:7] == ["writer erase 5", "writer trial", f"writer sample {LENGTH} 0 on 5"]
    assert not any(f"sample {LENGTH} 8" in call for call in pair.log[: pair.log.index("writer redeem on 5")])


def test_what_is_not_told_is_no_difference() -> None:
    """Only what both engines tell can differ; what decides about session files is part of it."""
    assert compare(IDENTITY, replace(IDENTITY, model=None, session="context 1")) == []
    told = replace(IDENTITY, session="context 2")
    assert compare(told, replace(IDENTITY, session="context 1")) == ["session differs: context 2 and context 1"]


async def test_the_figures_of_the_self_test() -> None:
    """Speeds are those of reading, what was cached left out; sizes and times are the engines' own."""
    report = await Pair().run()
    assert (report.tokens, report.session_bytes, report.save_ms, report.restore_ms) == (LENGTH, 3 * 2**20, 12.0, 8.0)
    assert report.prefill_tokens_per_s == 1000.0  # 100 of 127 tokens in 100 ms
    assert report.decode_tokens_per_s == 254.0  # 127 tokens in 500 ms


async def test_the_prompt_fits_both_engines() -> None:
    """The prompt takes at most half of the smaller context."""
    pair = Pair()
    pair.source.identity = replace(IDENTITY, context=100)
    assert (await pair.run()).tokens == 50


@pytest.mark.parametrize("field", ["model", "vocabulary", "template", "special_tokens", "build"])
async def test_engines_that_differ_are_no_pair(field: str) -> None:
    """A difference that a session file could not show is found before anything is read, and named."""
    pair = Pair()
    pair.source.identity = replace(IDENTITY, **cast("Any", {field: "other"}))
    report = await pair.run()
    assert not report.passed
    assert report.fault.startswith(f"identity: {field.replace('_', ' ')} differs: other and ")
    assert "the same model file" in report.advice[0]
    assert not any("sample" in call or "prefill" in call for call in pair.log)
    pair.assert_clean()


@pytest.mark.parametrize("change", [{"context": 5}, {"slots": 9}])
def test_size_is_no_difference(change: dict[str, Any]) -> None:
    """Context and slots may differ; nothing else may, and an empty field is called none."""
    assert compare(IDENTITY, replace(IDENTITY, **change)) == []
    assert compare(IDENTITY, replace(IDENTITY, template="")) == ["template differs: abc and none"]


def refused(step: Step, status: int | None = 400) -> EngineError:
    return EngineError(step, Cause.REFUSED, "said no", status=status)


@pytest.mark.parametrize(
    ("engine", "call", "error", "name"),
    [
        ("source", "identify", refused(Step.CONTROL), "identity"),
        ("target", "identify", refused(Step.CONTROL), "identity"),
        ("target", "trial", refused(Step.TOKENIZE), "tokens"),
        ("source", "trial", refused(Step.TOKENIZE), "tokens"),
        ("target", "erase 5", refused(Step.CONTROL, 501), "own reading"),
        ("target", "sample 128 0 on 5", refused(Step.DECODE, 500), "own reading"),
        ("source", "prefill 128 on 3", EngineError(Step.PREFILL, Cause.TIMEOUT, "said no"), "read"),
        ("source", "prefill 128 on 3", refused(Step.SAVE, 501), "saved"),
        ("source", "prefill 128 on 3", EngineError(Step.CHECK, Cause.CORRUPT, "said no"), "file"),
        ("target", "redeem on 5", refused(Step.RESTORE), "restored"),
        ("target", "redeem on 5", EngineError(Step.RESTORE, Cause.DIED, "said no"), "restored"),
    ],
)
async def test_each_failing_step_gives_its_advice(engine: str, call: str, error: EngineError, name: str) -> None:
    """The step that failed is named, says what the engine said, and what to change; nothing is left behind."""
    pair = Pair()
    getattr(pair, engine).failing[call] = error
    report = await pair.run()
    assert not report.passed
    assert report.fault == f"{name}: said no"
    assert [check.passed for check in report.checks] == [True] * (len(report.checks) - 1) + [False]
    assert pair.seen == report.checks
    advised = "reader" if error.step in (Step.PREFILL, Step.SAVE, Step.CHECK) else "writer"
    assert report.advice == [f"advice of {advised}"]
    pair.assert_clean()


async def test_engines_that_read_text_differently_are_no_pair() -> None:
    """Other ids for the same text are found, whatever the engines say of themselves."""
    pair = Pair()
    pair.source.vocabulary = lambda word: len(word) + 1
    report = await pair.run()
    assert report.fault == "tokens: the engines give different ids"
    assert "do not run the same model file" in report.advice[0]
    pair.assert_clean()


async def test_a_restore_of_other_tokens_fails() -> None:
    """A restore that reports success must have restored all."""
    pair = Pair()
    pair.target.restored = LENGTH - 2
    report = await pair.run()
    assert report.fault == f"restored: {LENGTH - 2} of {LENGTH - 1} tokens in 8 ms"
    pair.assert_clean()


@pytest.mark.parametrize(("cached", "passed"), [(0, False), (PROOF - 1, False), (PROOF, True)])
async def test_a_restore_that_is_not_used_fails(cached: int, passed: bool) -> None:
    """What counts is the engine's own number of reused tokens; a few read again are a model's way."""
    pair = Pair()
    pair.target.cached = cached
    report = await pair.run()
    assert report.passed is passed
    if not passed:
        assert report.fault == f"reused: cache_n {cached} of {LENGTH} tokens"
        assert report.advice == ["remedy of writer"]
    pair.assert_clean()


def shifted(by: float, *, tokens: int = 10, first: int = 0) -> dict[int, float]:
    return {token + first: -1.0 - token - by for token in range(tokens)}


@pytest.mark.parametrize(
    ("text", "logprobs", "passed", "detail"),
    [
        ("hello", shifted(0), True, "equal to"),
        ("hello", shifted(0.14), True, "equal to"),
        ("other", shifted(0.14), True, "rounding alone"),
        ("other", shifted(0.0, tokens=8), True, "rounding alone"),
        ("other", shifted(0.0, tokens=7), False, "7 of the 10 likeliest"),
        ("other", shifted(0.16), False, "another text"),
        ("other", {}, False, "0 of the 10"),
        ("hello", shifted(0.3), False, "another text"),
        ("hello", shifted(0, first=20), False, "0 of the 10"),
    ],
    ids=["equal", "equal but for rounding", "rounding", "most rivals shared", "too few rivals", "too far apart",
         "no rivals", "same text by chance", "other rivals"],
)  # fmt: skip
async def test_other_weights_are_found_by_their_answer(
    text: str, logprobs: dict[int, float], passed: bool, detail: str
) -> None:
    """A session of other weights restores without an error; its answer gives it away, and rounding does not."""
    pair = Pair()
    pair.target.restored_answer = Sample(text, logprobs, Figures(0, 0, 0.0, 0, 0.0))
    report = await pair.run()
    assert report.passed is passed
    assert detail in report.checks[-1].detail
    if not passed:
        assert "use one model file" in report.advice[0]
    pair.assert_clean()


@pytest.mark.parametrize(
    ("engine", "call"),
    [
        ("source", "identify"),
        ("target", "trial"),
        ("target", "sample 128 0 on 5"),
        ("source", "prefill 128 on 3"),
        ("target", "redeem on 5"),
        ("target", "sample 128 8 on 5"),
    ],
)
async def test_a_cancelled_self_test_cleans_up(engine: str, call: str) -> None:
    """Stopped at any step, it erases both slots and discards what was saved before it ends."""
    pair = Pair()
    scripted: Scripted = getattr(pair, engine)
    scripted.hanging = call
    task = asyncio.create_task(pair.run())
    await scripted.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(pair.log[-2:]) == {"writer erase 5", "reader erase 3"}
    assert ("reader discard t" in pair.log) == (engine == "target" and ("redeem" in call))


async def test_an_engine_that_cannot_be_erased_is_no_exception() -> None:
    """Cleaning up is tried on both engines, and its failure hides no verdict."""
    pair = Pair()
    pair.source.failing["erase 3"] = refused(Step.CONTROL, 501)
    pair.target.failing["erase 5"] = refused(Step.CONTROL, 501)
    report = await pair.run()
    assert report.fault == "own reading: said no"
    pair.assert_clean()


def test_no_checks_are_no_proof() -> None:
    """A self-test that never ran has not passed."""
    assert not Report().passed
    assert Report().fault == ""
