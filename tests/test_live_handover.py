"""The main job on real engines: a long prompt is read by one and answered by another, and the next turn is not."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import live, models
from tests.live_pair import (
    PATHS,
    READER_FLAGS,
    WRITER_FLAGS,
    Caller,
    Front,
    Reply,
    configured,
    prompt,
    proxied,
    sessions,
    words,
)

pytestmark = pytest.mark.live

ANSWER_TOKENS = 24

# How many tokens of a restored prompt each memory reads again: the last one, which nobody has read yet, and on sliding
# windows the five before it, back to the checkpoint that the file carries.
READ_AGAIN = {"dense": 1, "hybrid": 1, "sliding": 6}
# How far before the first token that differs each memory may have to start with the next turn. Keys and values can be
# cut off anywhere. A window or a state exists at checkpoints only, which the prefill engine took 4 and 4 + 512 tokens
# before the end of what it read, that is before n - 1: the first serves a turn that continues the prompt, the second
# one that differs within its last tokens.
CHECKPOINT = {"dense": 0, "hybrid": 1 + 4, "sliding": 1 + 4}
OLDER_CHECKPOINT = {"dense": 0, "hybrid": 4 + 512, "sliding": 4 + 512}


@dataclass(frozen=True)
class Engines:
    """A pair, and a third engine with the decode engine's flags that answers by itself."""

    kind: str
    folder: Path
    reader: str
    writer: str
    alone: str


@pytest.fixture(scope="module", params=["dense", "hybrid", "sliding"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    pytest.importorskip("xllamacpp", reason="xllamacpp, the engine of the live tests, is not installed")
    model, folder = models.tiny_model(request.param), tmp_path_factory.mktemp("sessions")
    common = ("-c", "8192", "--slot-save-path", str(folder))
    with contextlib.ExitStack() as stack:
        reader, writer, alone = (
            stack.enter_context(live.engine(model, *common, *flags)).url
            for flags in (READER_FLAGS, WRITER_FLAGS, WRITER_FLAGS)
        )
        yield Engines(request.param, folder, reader, writer, alone)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", PATHS)
async def test_handover(engines: Engines, api: str, stream: bool) -> None:
    """A prompt of 4,000 tokens is read by the prefill engine, and answered as the decode engine would have alone."""
    body = prompt(api, words(4000, (api, stream)), ANSWER_TOKENS, stream=stream)
    async with (
        Caller(engines.alone) as alone,
        proxied(configured(engines.reader, engines.writer), engines.folder) as front,
    ):
        expected = await alone.own_continuation(PATHS[api], body)
        reply = await front.ask(PATHS[api], body)
        assert (reply.status, reply.route, reply.reason) == (200, "handover", "worth_moving")
        assert reply.text == expected.text
        assert len(reply.text) >= ANSWER_TOKENS
        assert sessions(engines.folder) == []
        await reuses_the_session(front, reply, engines.kind)
        await counts_the_whole_request(front, reply)


async def reuses_the_session(front: Front, reply: Reply, kind: str) -> None:
    record = await front.record(reply)
    assert record.figures is not None
    assert record.route is not None
    assert record.route.prompt_tokens is not None
    assert record.route.prompt_tokens >= 3900
    assert record.figures.read_tokens == READ_AGAIN[kind]
    assert record.figures.cached_tokens == record.route.prompt_tokens - READ_AGAIN[kind]
    assert record.effective


async def counts_the_whole_request(front: Front, reply: Reply) -> None:
    record = await front.record(reply)
    cost, own, told = record.handover, record.figures, reply.timings
    assert cost is not None
    assert own is not None
    assert told["cache_n"] + told["prompt_n"] == own.cached_tokens + own.read_tokens
    assert told["cache_n"] <= cost.prefill_cached_tokens
    assert told["prompt_ms"] == pytest.approx(cost.prefill_ms + cost.save_ms + cost.restore_ms + own.prompt_ms)
    assert told["predicted_n"] == own.answer_tokens == ANSWER_TOKENS
    assert reply.last["split"] == {
        "prefill_ms": cost.prefill_ms,
        "save_ms": cost.save_ms,
        "restore_ms": cost.restore_ms,
        "bytes": cost.session_bytes,
    }
    assert reply.headers["X-Splitproxy-Session-Bytes"] == str(cost.session_bytes)
    if usage := reply.usage:
        assert usage["prompt_tokens"] == told["cache_n"] + told["prompt_n"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == told["cache_n"]
        assert usage["completion_tokens"] == ANSWER_TOKENS


@pytest.mark.parametrize("thinking", [True, False], ids=["same beginning", "mark dropped"])
async def test_second_turn(engines: Engines, thinking: bool) -> None:
    """The next turn of a handed-over chat stays on the decode engine, which reads no more than its memory makes it."""
    # With thinking off this template ends the prompt with an empty thought, which it drops from the history: the next
    # turn differs 6 tokens before the end of the first prompt.
    kind, extra = engines.kind, {"chat_template_kwargs": {"enable_thinking": thinking}}
    first = prompt("chat", words(4000, thinking), ANSWER_TOKENS, **extra)
    async with (
        Caller(engines.alone) as alone,
        proxied(configured(engines.reader, engines.writer), engines.folder) as front,
    ):
        said = await front.ask(PATHS["chat"], first)
        messages = [*first["messages"], {"role": "assistant", "content": said.text}]
        messages.append({"role": "user", "content": words(100, "second")})
        second = first | {"messages": messages}
        old, new = await alone.tokens(first), await alone.tokens(second)
        shared = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
        reply = await front.ask(PATHS["chat"], second)
        record = await front.record(reply)
        expected = await alone.own_continuation(PATHS["chat"], second)
    assert shared == len(old) - (0 if thinking else 6)
    assert (said.route, reply.route, reply.reason) == ("handover", "local", "warm")
    assert reply.text == expected.text
    assert record.figures is not None
    assert record.figures.read_tokens <= len(new) - shared + (CHECKPOINT if thinking else OLDER_CHECKPOINT)[kind]
    assert reply.timings["prompt_n"] == record.figures.read_tokens
    assert "split" not in reply.last
