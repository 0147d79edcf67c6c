"""Ids made here against real llama.cpp: every family of cutting rules, real vocabularies, files that lie."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitproxy.books.sessions import SessionStore
from splitproxy.config import Config
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.run.demo import demo_model
from splitproxy.tokens import gguf_file, rank_file
from splitproxy.tokens.codec import Codec
from splitproxy.tokens.patterns import PATTERNS
from splitproxy.tokens.tokenize import LocalTokenizer
from splitproxy.tokens.vocabulary import Vocabulary
from tests import live
from tests.live_pair import Caller, prompt, proxied, until
from tests.models import tiny_model
from tests.vocabularies import (
    LLAMA3,
    LLAMA3_SPECIALS,
    QWEN,
    QWEN_SPECIALS,
    Words,
    llama3,
    model_of,
    qwen,
    random_texts,
    visible,
    wheel_ranks,
)

pytestmark = pytest.mark.live
StartEngine = Callable[..., live.LiveEngine]

ROOT = Path(__file__).parent.parent
FLAGS = ("-np", "1", "-c", "512")
TEXTS, TEXTS_AT_ONCE = 10_000, 500


def separated(texts: Sequence[str], mark: str) -> Iterator[str]:
    """Many texts in few requests: a special token keeps them apart."""
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        yield mark.join(texts[start : start + TEXTS_AT_ONCE])


@asynccontextmanager
async def asked(engine: live.LiveEngine, folder: Path) -> AsyncIterator[LlamaServer]:
    """The adapter of a running engine."""
    with SessionStore(folder) as store:
        server = LlamaServer("writer", engine.url, "", store)
        try:
            yield server
        finally:
            await server.close()


# -- families ----------------------------------------------------------------------------------------------------------

FAMILIES = sorted({(pattern.expression, pattern.whole_words): name for name, pattern in PATTERNS.items()}.values())


@pytest.mark.parametrize("pre", FAMILIES)
async def test_each_family_cuts_as_the_engine_does(pre: str, live_engine: StartEngine, session_dir: Path) -> None:
    """With a vocabulary in which any two neighbours merge unless they are cut apart, random texts give equal ids."""
    model = model_of(visible(pre))
    codec = Codec(gguf_file.read(model))
    async with asked(live_engine(model, *FLAGS), session_dir) as server:
        for text in separated(random_texts(1500, pre, longest=12), "<|x|>"):
            assert codec.encode(text) == await server.tokenize(text)


@pytest.mark.parametrize("pre", PATTERNS)
def test_the_engine_knows_each_name(pre: str, live_engine: StartEngine) -> None:
    """A family's name that no engine knows would be a mistake here."""
    live_engine(model_of(visible(pre)), *FLAGS)


def test_families_are_told_apart() -> None:
    """The random texts show every difference between two families: no other one passes for the right one."""
    said = "<|x|>".join(random_texts(4000, "apart", longest=12))
    codecs = {}
    for pre in {pattern.expression: name for name, pattern in PATTERNS.items()}.values():
        read = gguf_file.read(model_of(visible("qwen2")))
        codecs[pre] = Codec(dataclasses.replace(read, pattern=PATTERNS[pre])).plain(said)
    assert len(set(codecs.values())) == len(codecs)


# -- real vocabularies -------------------------------------------------------------------------------------------------


@cache
def model(name: str) -> Path:
    """The model file of a vocabulary. The real ones are fetched once."""
    makers: dict[str, Callable[[], Words]] = {"qwen": qwen, "llama3": llama3}
    if name in makers:
        return model_of(makers[name]())
    return demo_model() if name == "smollm2" else tiny_model("dense")


NAMES = ("smollm2", "tiny", "qwen", "llama3")


@pytest.fixture(scope="module", params=NAMES)
def vocabulary_engine(request: pytest.FixtureRequest) -> Iterator[tuple[str, live.LiveEngine]]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    with live.engine(model(request.param), *FLAGS) as engine:
        yield request.param, engine


Running = tuple[str, live.LiveEngine]


@cache
def codec_of(name: str) -> Codec:
    return Codec(gguf_file.read(model(name)))


async def test_the_comparison_finds_no_difference(vocabulary_engine: Running, session_dir: Path) -> None:
    """What the proxy does at its start: made-up texts, random mixes, and each word of the vocabulary."""
    name, engine = vocabulary_engine
    tokenizer = LocalTokenizer(codec_of(name))
    async with asked(engine, session_dir) as server:
        await tokenizer.meet(server)
    tokenizer.close()
    assert tokenizer.verdict("writer").local, tokenizer.verdict("writer").why


async def test_our_own_sources_have_equal_ids(vocabulary_engine: Running, session_dir: Path) -> None:
    """Code, prose and tables, as people send them."""
    name, engine = vocabulary_engine
    files = [path for kind in ("py", "md", "toml", "yaml") for path in sorted(ROOT.glob(f"[!.]*/**/*.{kind}"))]
    assert len(files) > 50
    async with asked(engine, session_dir) as server:
        for path in files:
            text = path.read_text(encoding="utf-8")
            assert codec_of(name).encode(text) == await server.tokenize(text), path


async def test_random_strings_have_equal_ids(vocabulary_engine: Running, session_dir: Path) -> None:
    """Ten thousand strings as hypothesis makes them up, and mixes of the characters that rules are about."""
    name, engine = vocabulary_engine
    texts: list[str] = random_texts(TEXTS // 4, name)

    @settings(max_examples=100, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.text(max_size=25), min_size=75, max_size=75))
    def collect(more: list[str]) -> None:
        texts.extend(more)

    collect()
    assert len(texts) >= TEXTS
    codec = codec_of(name)
    mark = next(iter(codec.special))
    async with asked(engine, session_dir) as server:
        for text in separated(texts, mark):
            assert codec.encode(text) == await server.tokenize(text)


async def test_chats_are_counted_exactly(vocabulary_engine: Running, session_dir: Path) -> None:
    """The rendered text of a chat, whether or not it begins with the first token, has the ids that the engine reads."""
    name, engine = vocabulary_engine
    codec = codec_of(name)
    async with asked(engine, session_dir) as server, Caller(engine.url) as caller:
        for text in ("Hello", "a <|im_end|> inside", next(iter(codec.special)) + "at the front"):
            body = prompt("chat", text, 1)
            rendered = (await caller.post("/apply-template", body))["prompt"]
            reply = await caller.ask("/v1/chat/completions", body)
            assert reply.timings["cache_n"] + reply.timings["prompt_n"] == len(codec.encode(rendered))
            assert codec.encode(rendered) == await server.tokenize(rendered)


@pytest.mark.parametrize(
    ("name", "wheel", "special", "first_id", "family"),
    [("qwen", QWEN, QWEN_SPECIALS, 151643, "qwen2"), ("llama3", LLAMA3, LLAMA3_SPECIALS, 128000, "llama-bpe")],
)
async def test_a_file_of_ranks_stands_for_the_model(
    name: str,
    wheel: object,
    special: Sequence[str],
    first_id: int,
    family: str,
    live_engine: StartEngine,
    session_dir: Path,
) -> None:
    """The authors' own ranks, with a pattern and special tokens, make the ids of the model made from them."""
    _, path = wheel_ranks(wheel)  # type: ignore[arg-type]
    tokenizer = LocalTokenizer(
        Codec(rank_file.read(path, family, {text: first_id + n for n, text in enumerate(special)}))
    )
    async with asked(live_engine(model(name), *FLAGS), session_dir) as server:
        await tokenizer.meet(server)
    tokenizer.close()
    assert tokenizer.verdict("writer").local, tokenizer.verdict("writer").why


# -- the whole proxy ---------------------------------------------------------------------------------------------------


def configured(url: str, source: object, **tokenizer: object) -> Config:
    engines = [{"name": "writer", "role": "decode", "url": url}]
    split = {"policy": "always", "min_prompt_tokens": 16}
    values = {
        "listen": "127.0.0.1:0",
        "engines": engines,
        "split": split,
        "tokenizer": {"source": str(source), **tokenizer},
    }
    return Config.model_validate(values)


def shuffled(words: Words) -> Words:
    """The same model with a vocabulary that lies."""
    count = len(words.merges) + 256
    tokens = list(words.tokens[:count])
    random.Random(1).shuffle(tokens)
    return dataclasses.replace(words, tokens=[*tokens, *words.tokens[count:]], name="shuffled")


async def test_the_proxy_makes_the_ids_itself(live_engine: StartEngine, session_dir: Path) -> None:
    """With the model's file as source the engine is not asked for ids, and the count is the engine's own."""
    words = visible("qwen2")
    engine = live_engine(model_of(words), *FLAGS)
    async with proxied(configured(engine.url, model_of(words)), session_dir) as front:
        await until(lambda: front.proxy.tokenizer.verdict("writer").local)
        status = await front.get("/splitproxy/status")
        assert status["tokenizer"]["engines"]["writer"]["used"] == "local"
        reply = await front.ask("/completion", prompt("completion", "Strange letters <|x|> 123 " * 3, 2))
        assert reply.status == 200
        record = await front.record(reply)
        assert record.route is not None
        assert record.route.prompt_tokens == reply.timings["cache_n"] + reply.timings["prompt_n"]


async def test_a_file_that_lies_is_caught(
    live_engine: StartEngine, session_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A shuffled vocabulary is found out at the start; the proxy goes on with the engine's ids."""
    words = visible("qwen2")
    engine = live_engine(model_of(words), *FLAGS)
    async with proxied(configured(engine.url, model_of(shuffled(words))), session_dir) as front:
        await until(lambda: "differ" in front.proxy.tokenizer.verdict("writer").why)
        assert len([record for record in caplog.records if "ids for writer are made by it" in record.getMessage()]) == 1
        reply = await front.ask("/completion", prompt("completion", "Strange letters <|x|> 123 " * 3, 2))
        record = await front.record(reply)
        assert record.route is not None
        assert record.route.prompt_tokens == reply.timings["cache_n"] + reply.timings["prompt_n"]


def test_check_tells_the_first_difference(live_engine: StartEngine, session_dir: Path, tmp_path: Path) -> None:
    """`splitproxy check` says who makes the ids, and where another model's file first differs."""
    flags = ("-np", "1", "-c", "2048", "-b", "512", "--cache-ram", "0", "--slot-save-path", str(session_dir))
    reader, writer = (live_engine(model("tiny"), *flags) for _ in range(2))
    for source, expected in (("tiny", "ids are made here"), ("smollm2", "from token 0 on, the engine has [")):
        config = tmp_path / "c.toml"
        config.write_text(
            f'split.dir = "{session_dir}"\ntokenizer.source = "{model(source)}"\n'
            f'[[engines]]\nrole = "prefill"\nurl = "{reader.url}"\n[[engines]]\nrole = "decode"\nurl = "{writer.url}"\n'
        )
        command = [sys.executable, "-m", "splitproxy", "check", "-c", str(config)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert expected in ended.stdout


def test_a_vocabulary_of_the_demo_model_lacks_bytes() -> None:
    """What the tests above say of dropped bytes is put to the proof by one of the models."""
    words: Vocabulary = gguf_file.read(model("smollm2"))
    assert sum(bytes([byte]) not in words.words for byte in range(256)) > 10
