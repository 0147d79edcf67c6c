"""Who makes token ids: the comparison with the engine, threads, cancellation, bounds."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import gguf
import pytest

from splitproxy.config import Config
from splitproxy.engines.adapter import Encode
from splitproxy.errors import Cause, ConfigError, EngineError, Step
from splitproxy.model import Api, Ask, Tokens
from splitproxy.serve.assembly import make_tokenizer
from splitproxy.tokens import gguf_file, tokenize, trials
from splitproxy.tokens.codec import Codec
from splitproxy.tokens.tokenize import NOT_COMPARED, EngineTokenizer, LocalTokenizer, surely_shorter
from splitproxy.tokens.vocabulary import Ends, Vocabulary
from tests.models import tiny_model

LONG = "many words " * 1000


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return gguf_file.read(tiny_model("dense"))


class Engine:
    """An engine that tokenizes by a codec, notes what it was asked, and can be told to fail."""

    name = "writer"

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.asked: list[str] = []
        self.rendered: list[bytes] = []
        self.errors: list[EngineError] = []

    async def render(self, body: bytes) -> str:
        self.rendered.append(body)
        return "<|im_start|>" + body.decode()

    async def tokenize(self, text: str) -> Tokens:
        if self.errors:
            raise self.errors.pop(0)
        self.asked.append(text)
        return self.codec.encode(text)

    async def disagreement(self, text: str, encode: Encode) -> str:
        theirs, ours = await self.tokenize(text), await encode(text)
        return "" if ours == theirs else trials.difference(text, ours, theirs)


@pytest.fixture
def engine(vocabulary: Vocabulary) -> Engine:
    return Engine(Codec(vocabulary))


@pytest.fixture
async def local(vocabulary: Vocabulary) -> AsyncIterator[LocalTokenizer]:
    tokenizer = LocalTokenizer(Codec(vocabulary))
    yield tokenizer
    tokenizer.close()


def ask(prompt: str | tuple[int, ...] | None, body: bytes = b"hello") -> Ask:
    """A request; without a prompt it is a chat."""
    if prompt is None:
        return Ask(Api.CHAT, "/", body, chat=body)
    return Ask(Api.COMPLETIONS, "/", body, prompt=prompt)


async def test_the_engine_is_asked_until_it_has_been_compared(local: LocalTokenizer, engine: Engine) -> None:
    """Ids are made here only after this engine was found to make the same."""
    assert local.verdict("writer") == NOT_COMPARED
    await local.tokens(ask("hello"), engine)  # type: ignore[arg-type]
    assert engine.asked == ["hello"]
    await local.meet(engine)  # type: ignore[arg-type]
    assert local.verdict("writer").local
    engine.asked.clear()
    assert await local.tokens(ask("hello"), engine) == engine.codec.encode("hello")  # type: ignore[arg-type]
    assert await local.tokens(ask(LONG), engine) == engine.codec.encode(LONG)  # type: ignore[arg-type]
    assert engine.asked == []
    assert not local.verdict("another").local


async def test_chat_messages_are_always_rendered_by_the_engine(local: LocalTokenizer, engine: Engine) -> None:
    """The template is the engine's; what it makes of the client's body is encoded here."""
    await local.meet(engine)  # type: ignore[arg-type]
    found = await local.tokens(ask(None), engine)  # type: ignore[arg-type]
    assert engine.rendered == [b"hello"]
    assert found == engine.codec.encode("<|im_start|>hello")


@pytest.mark.parametrize("make", [lambda _: EngineTokenizer(), LocalTokenizer], ids=["engine", "local"])
async def test_ids_are_taken_as_they_are(make: Callable[[Codec], tokenize.Tokenizer], engine: Engine) -> None:
    """A prompt of ids needs nobody."""
    tokenizer = make(engine.codec)
    assert (await tokenizer.tokens(ask((1, 2, 3)), engine)).to_list() == [1, 2, 3]  # type: ignore[arg-type]
    assert not engine.asked
    tokenizer.close()


def swapped(vocabulary: Vocabulary, one: bytes, other: bytes) -> Vocabulary:
    """A vocabulary that lies about two words."""
    words = vocabulary.words | {one: vocabulary.words[other], other: vocabulary.words[one]}
    return dataclasses.replace(vocabulary, words=words)


async def test_one_swapped_pair_of_words_is_found(
    vocabulary: Vocabulary, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Any difference, be it in one word of all, leaves the ids to the engine; the log says so once, with the place."""
    rare = [word for word in vocabulary.words if len(word) > 2 and not word.startswith(b"<")][-2:]
    tokenizer = LocalTokenizer(Codec(swapped(vocabulary, *rare)))
    await tokenizer.meet(engine)  # type: ignore[arg-type]
    verdict = tokenizer.verdict("writer")
    assert not verdict.local
    assert "from token" in verdict.why
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    engine.asked.clear()
    assert await tokenizer.tokens(ask("hello"), engine) == engine.codec.encode("hello")  # type: ignore[arg-type]
    assert engine.asked == ["hello"]
    tokenizer.close()


async def test_another_model_behind_the_same_name_is_found(
    vocabulary: Vocabulary, local: LocalTokenizer, engine: Engine
) -> None:
    """An engine that comes up again is compared again."""
    await local.meet(engine)  # type: ignore[arg-type]
    assert local.verdict("writer").local
    engine.codec = Codec(dataclasses.replace(vocabulary, ends=Ends(1, None)))
    await local.meet(engine)  # type: ignore[arg-type]
    assert not local.verdict("writer").local


async def test_while_it_is_compared_the_engine_is_asked(local: LocalTokenizer, engine: Engine) -> None:
    """A verdict of before does not hold for an engine that has just come up."""
    await local.meet(engine)  # type: ignore[arg-type]
    seen = []
    tokenize_there = engine.tokenize

    async def look(text: str) -> Tokens:
        seen.append(local.verdict("writer").local)
        return await tokenize_there(text)

    engine.tokenize = look  # type: ignore[method-assign]
    await local.meet(engine)  # type: ignore[arg-type]
    assert seen
    assert not any(seen)


async def test_an_engine_that_cannot_be_asked_now_is_asked_later(
    local: LocalTokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost connection is no verdict; a refusal is."""
    monkeypatch.setattr(tokenize, "RETRY_S", 0.0)
    engine.errors = [EngineError(Step.TOKENIZE, cause, "gone") for cause in (Cause.DIED, Cause.TIMEOUT)]
    await local.meet(engine)  # type: ignore[arg-type]
    assert local.verdict("writer").local
    engine.errors = [EngineError(Step.TOKENIZE, Cause.REFUSED, "no")]
    await local.meet(engine)  # type: ignore[arg-type]
    assert "would not tokenize" in local.verdict("writer").why


@pytest.mark.parametrize("ends", [Ends(), Ends(1, None), Ends(None, 2), Ends(1, 2)])
async def test_the_ends_that_a_file_does_not_tell_are_learnt(vocabulary: Vocabulary, ends: Ends) -> None:
    """A file of ranks does not say what stands around every prompt: the engine's ids do."""
    engine = Engine(Codec(dataclasses.replace(vocabulary, ends=ends)))
    tokenizer = LocalTokenizer(Codec(dataclasses.replace(vocabulary, ends=None)))
    for _ in range(2):
        await tokenizer.meet(engine)  # type: ignore[arg-type]
        assert tokenizer.verdict("writer").local
    assert await tokenizer.encode(LONG) == engine.codec.encode(LONG)
    tokenizer.close()


# -- the source --------------------------------------------------------------------------------------------------------


def made(tmp_path: Path, source: str = "auto", model: object = None) -> tokenize.Tokenizer:
    launch = {} if model is None else {"launch": {"model": str(model)}}
    engines = [{"name": "writer", "role": "decode", "url": "http://127.0.0.1:9"}]
    return make_tokenizer(Config.model_validate({"engines": engines, "tokenizer": {"source": source}, **launch}))


def test_auto_reads_the_model_that_is_started(tmp_path: Path) -> None:
    """The model file of [launch] where it can be read; without one the engine is asked, and the status says why."""
    assert isinstance(made(tmp_path, model=tiny_model("dense")), LocalTokenizer)
    for model in (None, tmp_path / "nothing.gguf"):
        assert "no model file" in made(tmp_path, model=model).verdict("writer").why
    assert "engine" in made(tmp_path, "engine", tiny_model("dense")).verdict("writer").why


def test_a_vocabulary_that_is_of_no_use_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A sentence-piece model is no fault: one line in the log, and the engine is asked."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    caplog.clear()
    tokenizer = made(tmp_path, str(path))
    assert isinstance(tokenizer, EngineTokenizer)
    (record,) = [record for record in caplog.records if record.name.startswith("splitproxy")]
    assert "not byte-level BPE" in record.getMessage()
    assert "not byte-level BPE" in tokenizer.verdict("writer").why


# -- threads -----------------------------------------------------------------------------------------------------------


class Gate:
    """Holds up every encoding in a thread until it is opened, and notes what was begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: LocalTokenizer) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()
        encode = tokenizer._codec.encode

        def held(text: str, *, remember: bool = True) -> Tokens:
            self.begun.append(text)
            assert self.open.wait(10)
            return encode(text, remember=remember)

        monkeypatch.setattr(tokenizer._codec, "encode", held)


def prompts(count: int) -> list[str]:
    return [f"{number} {LONG}" for number in range(count)]


async def test_a_long_text_does_not_block_the_loop(local: LocalTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a text is encoded, others are served."""
    gate = Gate(monkeypatch, local)
    job = asyncio.create_task(local.encode(LONG))
    async with asyncio.timeout(10):
        while not gate.begun:  # noqa: ASYNC110 - a thread sets no event of this loop
            await asyncio.sleep(0.001)
        assert not job.done()
        gate.open.set()
        await job


async def test_a_cancelled_job_that_waits_never_begins(local: LocalTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves takes its waiting text along; one that is being encoded is encoded in vain."""
    gate = Gate(monkeypatch, local)
    jobs = [asyncio.create_task(local.encode(text)) for text in prompts(tokenize.THREADS + 3)]
    async with asyncio.timeout(10):
        while len(gate.begun) < tokenize.THREADS:  # noqa: ASYNC110 - a thread sets no event of this loop
            await asyncio.sleep(0.001)
        for job in jobs[:-1]:
            job.cancel()
        await asyncio.wait(jobs[:-1])
        assert all(job.cancelled() for job in jobs[:-1])
        gate.open.set()
        await jobs[-1]
    assert len(gate.begun) == tokenize.THREADS + 1


async def test_when_too_much_waits_the_engine_is_asked(
    local: LocalTokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is bounded, and has its whole room again when all is done or cancelled."""
    await local.meet(engine)  # type: ignore[arg-type]
    engine.asked.clear()
    gate = Gate(monkeypatch, local)
    jobs = [asyncio.create_task(local.encode(text)) for text in prompts(tokenize.JOBS_MAX)]
    await asyncio.sleep(0)
    await local.tokens(ask(LONG), engine)  # type: ignore[arg-type]
    assert engine.asked == [LONG]
    for job in jobs[1::2]:
        job.cancel()
    gate.open.set()
    await asyncio.wait(jobs)
    engine.asked.clear()
    await asyncio.gather(*(local.tokens(ask(text), engine) for text in prompts(tokenize.JOBS_MAX)))  # type: ignore[arg-type]
    assert engine.asked == []


async def test_a_text_that_cannot_be_encoded_here_goes_to_the_engine(local: LocalTokenizer, engine: Engine) -> None:
    """It costs a call, not the request."""
    await local.meet(engine)  # type: ignore[arg-type]
    engine.asked.clear()
    blanks = " \t" * 300_000
    engine.codec.encode = lambda text, **_: Tokens([len(text)])  # type: ignore[method-assign]
    assert (await local.tokens(ask(blanks), engine)).to_list() == [600_000]  # type: ignore[arg-type]
    assert engine.asked == [blanks]


async def test_a_closed_tokenizer_leaves_texts_to_the_engine(local: LocalTokenizer, engine: Engine) -> None:
    """A request that still runs while the proxy stops gets its ids."""
    await local.meet(engine)  # type: ignore[arg-type]
    local.close()
    assert await local.tokens(ask(LONG), engine) == engine.codec.encode(LONG)  # type: ignore[arg-type]


# -- the comparison's texts --------------------------------------------------------------------------------------------


def test_the_comparison_holds_what_differs_between_tokenizers() -> None:
    """White space, digits, contractions, joiners, control characters, special tokens inside and at both ends."""
    texts = list(trials.scripted(["<|x|>"]))
    joined = "".join(texts)
    for wanted in (
        "\u00a0",
        "\u2028",
        "\u0085",
        "1234567",
        "'LL",
        "'ll",
        "\u017f",
        "\u200d",
        "\x00",
        "\x1b",
        "\ufffd",
        "\U0010ffff",
        "\u0301",
    ):
        assert wanted in joined
    assert any(text.startswith("<|x|>") for text in texts)
    assert any(text.endswith("<|x|>") for text in texts)
    assert any("<|x|>" in text[5:-5] for text in texts)
    assert max(len(word) for text in texts for word in text.split()) >= 400


def test_every_word_that_is_text_is_compared() -> None:
    """Each word of a vocabulary is in one of the texts, on a line of its own."""
    words = {f"w{number}".encode(): number for number in range(9000)} | {b"\xff": 9000}
    texts = list(trials.every_word(words))
    assert [line for text in texts for line in text.split("\n")] == [f"w{number}" for number in range(9000)]
    assert max(map(len, texts)) < 100_000


def test_mixes_are_random_and_repeatable() -> None:
    """Another seed, other mixes; they can be sent as JSON."""
    words, special = [b"one", b"two"], ["<|x|>"]
    first, again, other = (list(trials.mixes(words, special, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert any("<|x|>" in text for text in first)
    "".join(first).encode()


# -- the shortcut ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "shorter"),
    [
        (ask("x", body=b"x" * 89), True),
        (ask("x", body=b"x" * 90), False),
        (ask(None, body=b"x" * 89), True),
        (ask((1,) * 99, body=b"x" * 500), True),
        (ask((1,) * 100, body=b""), False),
    ],
)
def test_a_prompt_is_surely_short_by_its_bytes(asked: Ask, shorter: bool) -> None:
    """No text has more tokens than bytes, template included; ids are counted."""
    assert surely_shorter(asked, 100, 10) is shorter


@pytest.mark.parametrize("error", [OverflowError, RecursionError, UnicodeError])
def test_a_vocabulary_that_no_encoder_takes_ends_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Words or ids that contradict each other are a fault of the configuration, never a traceback."""

    def refuse(_vocabulary: object) -> None:
        raise error

    monkeypatch.setattr("splitproxy.serve.assembly.Codec", refuse)
    config = Config.model_validate({"tokenizer": {"source": str(tiny_model("dense"))}})
    with pytest.raises(ConfigError, match="contradict each other"):
        make_tokenizer(config)
