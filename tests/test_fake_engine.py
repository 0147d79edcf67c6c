"""The fake engine keeps its own rules, shows every trouble that its knobs name, and speaks as the real engine does."""

import asyncio
import json
import struct
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fake_engine import FakeEngine
from tests.live import LiveEngine, free_port
from tests.models import tiny_model

Start = Callable[..., Awaitable[FakeEngine]]
Json = dict[str, Any]

PROMPT = list(b"The river runs past the garden and under the old bridge. " * 20)
CUT = (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientOSError)


class Talk:
    """A client of engines that are known by their address."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, url: str, path: str, body: object, **headers: str) -> tuple[int, Any]:
        async with self._session.post(url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def get(self, url: str, path: str) -> tuple[int, Any]:
        async with self._session.get(url + path) as answer:
            return answer.status, await answer.json(content_type=None)

    async def stream(self, url: str, path: str, body: Json) -> bytes:
        async with self._session.post(url + path, json={**body, "stream": True}) as answer:
            return await answer.read()

    async def events(self, url: str, path: str, body: Json) -> list[Json]:
        return parsed(await self.stream(url, path, body))

    async def read(self, engine: FakeEngine, prompt: list[int] = PROMPT, slot: int = 0) -> tuple[int, Any]:
        return await self.post(engine.url, "/completion", {"prompt": prompt, "n_predict": 0, "id_slot": slot})

    async def answer(self, engine: FakeEngine, prompt: list[int] = PROMPT, slot: int = 0, **more: object) -> Any:
        body = {"prompt": prompt, "n_predict": 12, "id_slot": slot, **more}
        return (await self.post(engine.url, "/completion", body))[1]

    async def act(self, engine: FakeEngine, action: str, name: str = "a", slot: int = 0) -> tuple[int, Any]:
        return await self.post(engine.url, f"/slots/{slot}?action={action}", {"filename": name})


@pytest.fixture
async def talk() -> AsyncIterator[Talk]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Talk(session)


def parsed(stream: bytes) -> list[Json]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def start_and_leave(fake: FakeEngine, call: Awaitable[object], condition: Callable[[], object]) -> None:
    """Begin a call, and hang up once the condition holds."""
    task = asyncio.ensure_future(call)
    await fake.until(condition)
    task.cancel()
    await asyncio.wait([task])


# ---- what it computes ----


async def test_equal_tokens_give_equal_text(fake: Start, talk: Talk) -> None:
    """Two engines with the same weights say the same after the same tokens, and one with other weights does not."""
    one, two, other = await fake(), await fake(), await fake(weights=2)
    texts = [(await talk.answer(engine))["content"] for engine in (one, two, other)]
    assert texts[0] == texts[1] != texts[2]
    assert (await talk.answer(one, PROMPT[1:]))["content"] != texts[0]


async def test_continuing_from_a_slot_changes_no_text(fake: Start, talk: Talk) -> None:
    """An answer is the same from an empty slot and from one that holds a part of the prompt."""
    warm, cold = await fake(), await fake()
    await talk.answer(warm, PROMPT[:300])
    warmed = await talk.answer(warm)
    assert warmed["timings"]["cache_n"] == 300
    assert warmed["content"] == (await talk.answer(cold))["content"]


async def test_a_slot_holds_the_prompt_and_the_answer_but_its_last_token(fake: Start, talk: Talk) -> None:
    """The last sampled token was never read, so it is not held."""
    engine = await fake()
    answer = await talk.answer(engine, return_tokens=True)
    assert engine.slots[0].held.ids == PROMPT + answer["tokens"][:-1]
    assert answer["tokens_cached"] == len(PROMPT) + 11


async def test_reading_alone_yields_one_token_and_holds_the_prompt(fake: Start, talk: Talk) -> None:
    """With n_predict 0 a token is sampled and told, and the slot holds exactly the prompt."""
    engine = await fake()
    status, answer = await talk.read(engine)
    assert (status, answer["tokens_predicted"], answer["tokens_cached"]) == (200, 1, len(PROMPT))
    assert engine.slots[0].held.ids == PROMPT
    assert engine.steps() == ["prefill"]


@pytest.mark.parametrize(("memory", "reread"), [("dense", 1), ("sliding", 6), ("hybrid", 1), ("none", len(PROMPT))])
async def test_what_a_restored_slot_reads_again(fake: Start, talk: Talk, memory: str, reread: int) -> None:
    """A session of all tokens but the last is continued as far as this kind of memory allows, with the same text."""
    reader, writer, alone = [await fake(memory=memory) for _ in range(3)]
    await talk.read(reader, PROMPT[:-1])
    _, saved = await talk.act(reader, "save")
    _, restored = await talk.act(writer, "restore")
    answer = await talk.answer(writer)
    assert saved["n_saved"] == restored["n_restored"] == len(PROMPT) - 1
    assert answer["timings"]["prompt_n"] == reread
    assert answer["content"] == (await talk.answer(alone))["content"]
    assert not reader.violations + writer.violations


async def test_chat_is_the_template_then_the_tokens(fake: Start, talk: Talk) -> None:
    """The rendered and tokenized prompt of a chat request is what the chat endpoint reads."""
    engine = await fake()
    body = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hällo <|im_end|>"}]}
    prompt = (await talk.post(engine.url, "/apply-template", body))[1]["prompt"]
    ids = (await talk.post(engine.url, "/tokenize", {"content": prompt, "parse_special": True}))[1]["tokens"]
    await talk.post(engine.url, "/v1/chat/completions", {**body, "id_slot": 0, "max_tokens": 0})
    assert engine.slots[0].held.ids == ids
    assert (await talk.post(engine.url, "/detokenize", {"tokens": ids}))[1]["content"] == prompt


async def test_an_answer_ends_by_itself_where_a_knob_says_so(fake: Start, talk: Talk) -> None:
    """The end token ends an answer before its limit."""
    engine = await fake()
    engine.knobs.answer_tokens = 3
    answer = await talk.answer(engine)
    assert (answer["stop_type"], len(answer["content"]), answer["tokens_predicted"]) == ("eos", 3, 4)


# ---- session files ----


@pytest.mark.parametrize("plain", [False, True])
async def test_the_layout_of_a_session_file(fake: Start, talk: Talk, session_dir: Path, plain: bool) -> None:
    """A file begins as the real one does: magic, version, the token list in one of two forms, then the memory."""
    engine = await fake()
    engine.knobs.save.plain_list = plain
    await talk.read(engine)
    _, saved = await talk.act(engine, "save")
    raw = (session_dir / "a").read_bytes()
    count = len(PROMPT)
    magic, version, words = struct.unpack_from("<4sII", raw)
    listed = list(struct.unpack_from(f"<{words}i", raw, 12))
    assert (magic, version, saved["n_written"]) == (b"qsgg", 4, len(raw))
    assert listed == (PROMPT if plain else [-1, 1, count, *PROMPT, 0])
    streams, cells, first, sequences, _ = struct.unpack_from("<IIiIi", raw, 12 + 4 * words)
    assert (streams, cells, first, sequences) == (1, count, 0, 1)
    # 4 bytes of token id, 12 of cell, and two rows of 64 bytes in each of two layers.
    assert len(raw) == 12 + 4 * words + 8 + 12 * count + 16 + 4 * (12 + 64 * count)


@pytest.mark.parametrize("memory", ["sliding", "hybrid"])
async def test_checkpoints_are_appended(fake: Start, talk: Talk, session_dir: Path, memory: str) -> None:
    """Where memory cannot be rolled back freely, the file ends with checkpoints, and losing these is survived."""
    engine = await fake(memory=memory)
    await talk.read(engine)
    _, saved = await talk.act(engine, "save")
    path = session_dir / "a"
    raw = path.read_bytes()
    place = raw.rindex(b"SCKP")
    version, entries, tokens = struct.unpack_from("<IIQ", raw, place + 4)
    assert (version, entries, tokens) == (1, 2, len(PROMPT) - 516)
    path.write_bytes(raw[:-3])
    assert (await talk.act(engine, "restore"))[0] == 200
    assert (await talk.answer(engine, PROMPT[:-1]))["timings"]["cache_n"] == 0
    assert saved["n_written"] == len(raw)


async def test_an_empty_slot_saves_an_empty_session(fake: Start, talk: Talk) -> None:
    """Saving nothing succeeds with a file of 36 bytes, and so does restoring it."""
    engine = await fake()
    assert (await talk.act(engine, "save"))[1]["n_written"] == 36
    assert (await talk.act(engine, "restore"))[1]["n_restored"] == 0


async def test_a_file_whose_tokens_lie_shows_in_the_text(fake: Start, talk: Talk) -> None:
    """Memory of one text under the token list of another answers differently: what a proxy must never let pass."""
    engine, honest = await fake(), await fake()
    other = [*PROMPT[:-2], PROMPT[-2] ^ 1]
    await talk.read(engine, other)
    engine.knobs.save.wrong_tokens = True
    await talk.act(engine, "save")
    await talk.act(engine, "restore")
    lied, true = await talk.answer(engine), await talk.answer(honest)
    assert lied["timings"]["cache_n"] == len(PROMPT) - 1
    assert lied["content"] != true["content"]


@pytest.mark.parametrize(
    "mismatch", [{"unified": False, "slots": 2}, {"k_type": 8}, {"context": 500}], ids=["streams", "keys", "context"]
)
async def test_a_file_that_does_not_fit_is_refused_and_clears_the_slot(
    fake: Start, talk: Talk, mismatch: dict[str, Any]
) -> None:
    """Engines that differ in what a file depends on refuse it in one sentence, and lose what the slot held."""
    reader, writer = await fake(), await fake(**mismatch)
    await talk.read(reader)
    await talk.act(reader, "save")
    await talk.read(writer, PROMPT[:100])
    status, refused = await talk.act(writer, "restore")
    assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
    assert writer.slots[0].held.ids == []


async def test_the_modulo_of_slot_numbers(fake: Start, talk: Talk) -> None:
    """A slot number that does not exist is taken modulo the number of slots and echoed as it was sent."""
    engine = await fake(slots=2)
    await talk.read(engine, slot=3)
    assert engine.slots[1].held.ids == PROMPT
    assert (await talk.act(engine, "save", slot=5))[1]["id_slot"] == 5


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.", " a", "a\n", "x" * 256])
async def test_file_names_are_checked(fake: Start, talk: Talk, name: str) -> None:
    """A name that could leave the folder is refused."""
    assert (await talk.act(await fake(), "save", name))[0] == 400


async def test_without_a_folder_there_are_no_slot_actions(fake: Start, talk: Talk) -> None:
    """An engine that was started without a folder for session files says so."""
    status, refused = await talk.act(await fake(slot_dir=None), "save")
    assert (status, refused["error"]["type"]) == (501, "not_supported_error")


# ---- its rules ----


async def test_a_busy_slot_makes_others_wait_in_order(fake: Start, talk: Talk) -> None:
    """Requests pinned to a busy slot run one after the other as they came, and each is a broken rule."""
    engine = await fake()
    engine.knobs.decode.pause_s = 0.005
    tasks = []
    for turn in range(3):
        tasks.append(asyncio.ensure_future(talk.answer(engine, PROMPT[turn:])))
        await engine.until(lambda: len(engine.calls) == len(tasks))
    await asyncio.gather(*tasks)
    ended = [call.finished for call in engine.calls]
    assert ended == sorted(ended, key=lambda moment: moment or 0.0)
    assert engine.violations == ["POST /completion was sent to slot 0 while it was busy"] * 2


async def test_a_save_behind_a_waiting_request_holds_the_wrong_prompt(fake: Start, talk: Talk) -> None:
    """A save that waits in line saves what the request before it left, and wakes nobody who waits behind it."""
    engine = await fake()
    engine.knobs.decode.pause_s = 0.005
    first = asyncio.ensure_future(talk.answer(engine))
    await engine.until(engine.busy)
    second = asyncio.ensure_future(talk.read(engine, PROMPT[5:200]))
    await engine.until(lambda: len(engine.calls) == 2)
    save = asyncio.ensure_future(talk.act(engine, "save"))
    await engine.until(lambda: len(engine.calls) == 3)
    third = asyncio.ensure_future(talk.read(engine))
    await asyncio.gather(first, second)
    assert (await save)[1]["n_saved"] == 195
    assert not engine.busy()
    assert not third.done()
    third.cancel()
    await asyncio.wait([third])


async def test_requests_without_a_slot_are_noticed(fake: Start, talk: Talk) -> None:
    """A request that is not pinned takes the slot that holds some of it, else the one that was used longest ago, and
    is a broken rule."""
    engine = await fake(slots=2)
    await talk.read(engine, slot=0)
    await talk.read(engine, prompt=[7] * 50, slot=-1)
    await talk.read(engine, slot=-1)
    assert [call.slot for call in engine.calls] == [0, 1, 0]
    assert engine.violations == ["/completion was not pinned to a slot"] * 2


async def test_a_conversation_header_is_noticed(fake: Start, talk: Talk) -> None:
    """The header that switches the engine's cancellation off must not arrive."""
    engine = await fake()
    body = {"prompt": "a", "n_predict": 1, "id_slot": 0}
    await talk.post(engine.url, "/completion", body, **{"X-Conversation-Id": "1"})
    assert len(engine.violations) == 1


async def test_polling_a_working_engine_is_noticed(fake: Start, talk: Talk) -> None:
    """Asking for slots more than once a second on average is a broken rule while something runs, and only then."""
    engine = await fake()
    for _ in range(5):
        await talk.get(engine.url, "/slots")
    assert not engine.violations
    engine.knobs.decode.hang = True
    task = asyncio.ensure_future(talk.answer(engine))
    await engine.until(engine.busy)
    for _ in range(4):
        await talk.get(engine.url, "/slots")
    task.cancel()
    await asyncio.wait([task])
    assert len(engine.violations) == 1


async def test_a_missing_session_file_clears_the_slot(fake: Start, talk: Talk) -> None:
    """Restoring what was never saved is refused, loses what the slot held, and is a broken rule."""
    engine = await fake()
    await talk.read(engine)
    assert (await talk.act(engine, "restore", "never"))[0] == 400
    assert engine.slots[0].held.ids == []
    assert engine.violations == ["slot 0 was to be restored from a file that does not exist"]


async def test_a_truncated_session_file_ends_the_engine(fake: Start, talk: Talk) -> None:
    """The engine does not survive a file whose memory is cut, and comes back empty on the same port."""
    engine = await fake()
    engine.knobs.save.truncate_bytes = 1
    await talk.read(engine)
    await talk.act(engine, "save")
    with pytest.raises(CUT):
        await talk.act(engine, "restore")
    with pytest.raises(aiohttp.ClientConnectorError):
        await talk.get(engine.url, "/health")
    assert engine.dead
    assert engine.violations == ["slot 0 was to be restored from a truncated file"]
    await engine.revive()
    assert (await talk.get(engine.url, "/health"))[0] == 200
    assert engine.slots[0].held.ids == []


async def test_a_shared_pool_purges_idle_slots_and_then_fails(fake: Start, talk: Talk) -> None:
    """In a unified pool a long prompt takes the room of idle slots, and what runs and does not fit fails together."""
    engine = await fake(slots=2, context=2000)
    await talk.read(engine, slot=0)
    await talk.read(engine, PROMPT[::-1], slot=1)
    assert [len(slot.held.ids) for slot in engine.slots.all] == [0, len(PROMPT)]
    assert not engine.violations
    await talk.act(engine, "erase", slot=1)
    engine.knobs.decode.stall_after = 1
    first = asyncio.ensure_future(talk.answer(engine, slot=0))
    await engine.until(lambda: engine.calls[-1].answered)
    status, failed = await talk.read(engine, PROMPT[::-1], slot=1)
    assert (status, failed["error"]["message"]) == (500, "Context size has been exceeded.")
    assert len(engine.violations) == 1
    first.cancel()
    await asyncio.wait([first])


async def test_a_restore_evicts_nobody(fake: Start, talk: Talk) -> None:
    """A session that does not fit beside what idle slots hold is refused."""
    engine = await fake(slots=2, context=2000)
    await talk.read(engine)
    await talk.act(engine, "save")
    assert (await talk.act(engine, "restore", slot=1))[0] == 400
    await talk.act(engine, "erase", slot=0)
    assert (await talk.act(engine, "restore", slot=1))[0] == 200


async def test_a_prompt_beyond_the_context_is_refused(fake: Start, talk: Talk) -> None:
    """The error names both sizes."""
    engine = await fake(context=100)
    status, refused = await talk.read(engine)
    assert status == 400
    assert refused["error"]["type"] == "exceed_context_size_error"
    assert (refused["error"]["n_prompt_tokens"], refused["error"]["n_ctx"]) == (len(PROMPT), 100)


async def test_an_answer_ends_at_the_context(fake: Start, talk: Talk) -> None:
    """An answer that fills the context is truncated."""
    answer = await talk.answer(await fake(context=110), PROMPT[:100], n_predict=500)
    assert (answer["truncated"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 10)


# ---- clients that leave ----


async def test_leaving_ends_the_reading_at_a_batch(fake: Start, talk: Talk) -> None:
    """When a client leaves, the batch in work is ended, the rest is not read, and what was read stays held."""
    engine = await fake(batch=100)
    engine.knobs.read_tps = 5000
    await start_and_leave(engine, talk.read(engine), lambda: engine.calls and engine.calls[0].read >= 200)
    call = engine.calls[0]
    await engine.until(lambda: not engine.busy())
    assert call.cancelled
    assert 200 <= call.read < len(PROMPT)
    assert engine.slots[0].held.ids == PROMPT[: call.read]


async def test_the_engine_notices_late(fake: Start, talk: Talk) -> None:
    """A slot stays busy until the engine notices that its client has left."""
    engine = await fake()
    engine.knobs.decode.hang, engine.knobs.notice_s = True, 0.2
    await start_and_leave(engine, talk.answer(engine), engine.busy)
    await engine.until(lambda: engine.calls[0].cancelled)
    assert engine.busy()
    await engine.until(lambda: not engine.busy())


async def test_leaving_the_line_gives_the_turn_to_the_next(fake: Start, talk: Talk) -> None:
    """A waiting request whose client leaves is gone, and those behind it are served."""
    engine = await fake()
    engine.knobs.decode.pause_s = 0.005
    first = asyncio.ensure_future(talk.answer(engine))
    await engine.until(engine.busy)
    await start_and_leave(engine, talk.answer(engine), lambda: len(engine.slots.deferred) == 1)
    await engine.until(lambda: not engine.slots.deferred)
    third = asyncio.ensure_future(talk.answer(engine))
    await asyncio.gather(first, third)
    assert not engine.busy()


# ---- knobs ----

STAGES: dict[str, tuple[str, Json]] = {
    "tokenize": ("/tokenize", {"content": "a"}),
    "template": ("/apply-template", {"messages": []}),
    "prefill": ("/completion", {"prompt": "abc", "n_predict": 0, "id_slot": 0, "stream": True}),
    "decode": ("/v1/chat/completions", {"messages": [], "max_tokens": 2, "id_slot": 0, "stream": True}),
    "save": ("/slots/0?action=save", {"filename": "b"}),
    "restore": ("/slots/0?action=restore", {"filename": "a"}),
    "erase": ("/slots/0?action=erase", {}),
    "health": ("/health", {}),
    "props": ("/props", {}),
    "models": ("/v1/models", {}),
    "slots": ("/slots", {}),
}


async def call_stage(talk: Talk, engine: FakeEngine, stage: str) -> tuple[int, Any]:
    path, body = STAGES[stage]
    if not body and stage != "erase":
        return await talk.get(engine.url, path)
    if body.get("stream"):
        raw = await talk.stream(engine.url, path, body)
        return (200, parsed(raw)) if raw.startswith(b"data: ") else (json.loads(raw)["error"]["code"], json.loads(raw))
    return await talk.post(engine.url, path, body)


@pytest.fixture
async def ready(fake: Start, talk: Talk) -> FakeEngine:
    """An engine whose slot holds a prompt that is also saved as "a"."""
    engine = await fake()
    await talk.read(engine)
    await talk.act(engine, "save")
    engine.forget_calls()
    return engine


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_fails_as_often_as_it_is_told(ready: FakeEngine, talk: Talk, stage: str) -> None:
    """A stage answers with the given error so many times, and then works."""
    ready.knobs.update({stage: {"fail": [503, "not now"], "times": 1}})
    status, refused = await call_stage(talk, ready, stage)
    assert (status, refused["error"]["message"], refused["error"]["type"]) == (503, "not now", "unavailable_error")
    assert (await call_stage(talk, ready, stage))[0] == 200
    assert [call.stage for call in ready.calls] == [stage, stage]
    assert not ready.busy()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_hangs_until_the_client_leaves(ready: FakeEngine, talk: Talk, stage: str) -> None:
    """A hanging stage gives no answer, and everything is free again once its client has left."""
    ready.knobs.update({stage: {"hang": True}})
    await start_and_leave(ready, call_stage(talk, ready, stage), lambda: ready.sent(stage))
    await ready.until(lambda: ready.calls[0].finished)
    assert ready.calls[0].cancelled
    assert not ready.busy()


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_ends_the_engine(ready: FakeEngine, talk: Talk, stage: str) -> None:
    """A stage can take the whole engine with it."""
    ready.knobs.update({stage: {"die": True}})
    with pytest.raises(CUT):
        await call_stage(talk, ready, stage)
    with pytest.raises(aiohttp.ClientConnectorError):
        await call_stage(talk, ready, "health")
    assert not ready.calls[0].cancelled
    await ready.revive()
    ready.knobs.update({stage: {"die": False}})
    assert (await call_stage(talk, ready, "health"))[0] == 200


@pytest.mark.parametrize("stage", STAGES)
async def test_a_stage_drops_the_connection(ready: FakeEngine, talk: Talk, stage: str) -> None:
    """A stage can lose its connection while the engine lives on."""
    ready.knobs.update({stage: {"drop": True}})
    with pytest.raises(CUT):
        await call_stage(talk, ready, stage)
    ready.knobs.update({stage: {"drop": False}})
    assert (await call_stage(talk, ready, stage))[0] == 200


@pytest.mark.parametrize("knob", ["die_after", "cut_after"])
async def test_reading_breaks_off_after_so_many_tokens(fake: Start, talk: Talk, knob: str) -> None:
    """A connection that is cut in the middle of a prompt leaves exactly the tokens before it read."""
    engine = await fake()
    engine.knobs.update({"prefill": {knob: 700}})
    body = {"prompt": PROMPT, "n_predict": 0, "id_slot": 0, "return_progress": True}
    with pytest.raises(CUT):
        await talk.stream(engine.url, "/completion", body)
    assert engine.calls[0].read == 700
    assert engine.dead == (knob == "die_after")


@pytest.mark.parametrize("knob", ["die_after", "cut_after"])
async def test_an_answer_breaks_off_after_so_many_events(fake: Start, talk: Talk, knob: str) -> None:
    """A connection that is cut in the middle of an answer is a torn stream."""
    engine = await fake()
    engine.knobs.update({"decode": {knob: 3}})
    with pytest.raises(CUT):
        await talk.stream(engine.url, "/completion", {"prompt": "a", "n_predict": 9, "id_slot": 0})
    assert engine.calls[0].answered == 3


@pytest.mark.parametrize(("stage", "limit"), [("prefill", 0), ("decode", 9)])
async def test_a_stream_goes_silent(fake: Start, talk: Talk, stage: str, limit: int) -> None:
    """A stream that stalls neither ends nor breaks."""
    engine = await fake()
    engine.knobs.update({stage: {"stall_after": 3}})
    call = talk.stream(engine.url, "/completion", {"prompt": PROMPT, "n_predict": limit, "id_slot": 0})
    await start_and_leave(engine, call, lambda: engine.calls and 3 in (engine.calls[0].read, engine.calls[0].answered))
    await engine.until(lambda: not engine.busy())


async def test_an_error_event_ends_a_stream(fake: Start, talk: Talk) -> None:
    """An engine that fails after the first byte says so in an event and closes the stream."""
    engine = await fake()
    engine.knobs.decode.error_after = 2
    events = await talk.events(engine.url, "/completion", {"prompt": "abc", "n_predict": 9, "id_slot": 0})
    assert len(events) == 3
    assert events[-1]["error"]["code"] == 500


async def test_odd_pieces_carry_the_same_bytes(fake: Start, talk: Talk) -> None:
    """However a stream is cut into pieces, its events are the same."""
    engine = await fake()
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "id_slot": 0}
    whole = await talk.events(engine.url, "/v1/chat/completions", body)
    engine.knobs.decode.odd_chunks = True
    pieces = await talk.events(engine.url, "/v1/chat/completions", body)
    assert [event["choices"] for event in pieces] == [event["choices"] for event in whole]


async def test_a_save_lies(fake: Start, talk: Talk, session_dir: Path) -> None:
    """Each way in which a save can go wrong shows in its reply or in its file."""
    engine = await fake()
    await talk.read(engine)
    true = (await talk.act(engine, "save"))[1]
    engine.knobs.save.wrong_count = 2
    assert (await talk.act(engine, "save"))[1]["n_saved"] == len(PROMPT) - 2
    engine.knobs.save.truncate_bytes = 5
    assert (await talk.act(engine, "save"))[1]["n_written"] == (session_dir / "a").stat().st_size + 5
    engine.knobs.save.wrong_magic = True
    await talk.act(engine, "save")
    assert (session_dir / "a").read_bytes()[:4] == b"oops"
    engine.knobs.save.no_space = True
    assert (await talk.act(engine, "save"))[0] == 500
    assert (session_dir / "a").stat().st_size == true["n_written"] // 2


async def test_a_restore_lies(ready: FakeEngine, talk: Talk) -> None:
    """A restore can tell too few tokens, and can succeed without anything to show for it."""
    ready.knobs.restore.short_count = 7
    assert (await talk.act(ready, "restore"))[1]["n_restored"] == len(PROMPT) - 7
    ready.knobs.restore.forgets = True
    assert (await talk.act(ready, "restore"))[0] == 200
    assert (await talk.answer(ready))["timings"]["cache_n"] == 0


async def test_a_loading_engine_refuses_everything(ready: FakeEngine, talk: Talk) -> None:
    """While its model loads, an engine answers 503 on every path."""
    ready.knobs.loading = True
    answers = [await call_stage(talk, ready, stage) for stage in STAGES]
    assert {(status, body["error"]["message"]) for status, body in answers} == {(503, "Loading model")}


async def test_a_key_opens_the_engine(fake: Start, talk: Talk) -> None:
    """With a key set, everything but the health needs it."""
    engine = await fake()
    engine.knobs.api_key = "secret"
    assert (await talk.get(engine.url, "/health"))[0] == 200
    assert (await talk.get(engine.url, "/v1/models"))[0] == 401
    assert (await talk.post(engine.url, "/tokenize", {}, Authorization="Bearer secret"))[0] == 200


async def test_speed_is_a_knob(fake: Start, talk: Talk) -> None:
    """Reading and writing take the time that their speeds say."""
    engine = await fake()
    engine.knobs.read_tps, engine.knobs.write_tps = 20000, 500
    timings = (await talk.answer(engine))["timings"]
    assert timings["prompt_ms"] >= 1000 * len(PROMPT) / 20000
    assert timings["predicted_ms"] >= 1000 * 11 / 500


@pytest.mark.parametrize(("first", "second", "overtakes"), [(1, 0, True), (0, 1, False)])
async def test_a_lower_slot_is_read_first(fake: Start, talk: Talk, first: int, second: int, overtakes: bool) -> None:
    """Each batch is filled slot by slot, so that a prompt in a lower slot overtakes one that came before it."""
    engine = await fake(slots=2, batch=100)
    engine.knobs.read_tps = 10_000
    early = asyncio.ensure_future(talk.read(engine, slot=first))
    await engine.until(lambda: engine.calls and engine.calls[0].read >= 200)
    late = asyncio.ensure_future(talk.read(engine, PROMPT[:500], slot=second))
    await asyncio.wait([early, late], return_when=asyncio.FIRST_COMPLETED)
    assert (late.done(), early.done()) == (overtakes, not overtakes)
    await asyncio.gather(early, late)


async def test_a_stream_closes_its_connection_unannounced(fake: Start) -> None:
    """After a stream the connection is closed although no header said so, which a pooled client meets as an error."""
    engine = await fake()
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "a", "n_predict": 1, "id_slot": 0, "stream": True}
        async with session.post(engine.url + "/completion", json=body) as answer:
            assert "Connection" not in answer.headers
            await answer.read()
        with pytest.raises(aiohttp.ClientError):
            await session.post(engine.url + "/tokenize", json={"content": "a"})


async def test_it_runs_as_a_program(session_dir: Path, talk: Talk) -> None:
    """By hand it takes llama-server's flags and its own knobs, tells its violations, and really ends in a crash."""
    port = free_port()
    command = [sys.executable, "-m", "tests.fake_engine", "--port", str(port), "-np", "2", "-kvu", "-c", "4000"]
    command += ["--no-such-flag", "--slot-save-path", str(session_dir), "--set", "save.truncate_bytes=9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220 - it says one line at once
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1].decode()
        body = {"prompt": "abc", "n_predict": 0}
        assert (await talk.get(url, "/props"))[1]["total_slots"] == 2
        assert (await talk.post(url, "/completion", body))[0] == 200
        assert (await talk.post(url, "/fake/knobs", {"decode": {"fail": [500, "x"]}}))[0] == 200
        assert (await talk.post(url, "/fake/knobs", {"nonsense": 1}))[0] == 400
        assert (await talk.get(url, "/fake/violations"))[1] == ["/completion was not pinned to a slot"]
        assert [call["stage"] for call in (await talk.get(url, "/fake/calls"))[1]] == ["props", "prefill"]
        await talk.post(url, "/slots/0?action=save", {"filename": "a"})
        with pytest.raises(CUT):
            await talk.post(url, "/slots/0?action=restore", {"filename": "a"})
        assert process.wait(5) == 134


# ---- beside the real engine ----

CHAT: Json = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0, "id_slot": 0}
PLAIN: Json = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "id_slot": 0}
NATIVE: Json = {"prompt": [5, 6, 7, 8], "n_predict": 3, "temperature": 0, "id_slot": 0}
USAGE: Json = {"stream_options": {"include_usage": True}}

SPOKEN: list[tuple[str, Json]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, **USAGE, "return_progress": True}),
    ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "timings_per_token": True}),
    ("/v1/completions", PLAIN),
    ("/v1/completions", {**PLAIN, "logprobs": 2}),
    ("/v1/completions", {**PLAIN, "stream": True}),
    ("/v1/completions", {**PLAIN, "stream": True, **USAGE, "return_progress": True}),
    ("/completion", NATIVE),
    ("/completion", {**NATIVE, "n_predict": 0, "return_tokens": True, "n_probs": 2}),
    ("/completion", {**NATIVE, "stream": True, "n_probs": 1}),
    ("/completion", {**NATIVE, "stream": True, "n_predict": 0, "return_progress": True}),
    ("/completion", {**NATIVE, "response_fields": ["content", "timings/cache_n"]}),
    ("/v1/messages", CHAT),
    ("/v1/messages", {**CHAT, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "id_slot": 0}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "id_slot": 0, "stream": True}),
    ("/v1/messages/count_tokens", CHAT),
    ("/tokenize", {"content": ["hi", 65, "<|im_end|>"], "add_special": True, "parse_special": True}),
    ("/tokenize", {"content": "hi", "with_pieces": True}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [65, 66]}),
    ("/apply-template", CHAT),
    ("/slots/0?action=save", {"filename": "shape"}),
    ("/slots/0?action=restore", {"filename": "shape"}),
    ("/slots/0?action=restore", {"filename": "missing"}),
    ("/slots/0?action=erase", {}),
]

REFUSED: list[tuple[str, Json]] = [
    ("/slots/0?action=restore", {"filename": "missing"}),
    ("/slots/0?action=nonsense", {"filename": "a"}),
    ("/slots/x?action=save", {"filename": "a"}),
    ("/slots/0?action=save", {"filename": "../a"}),
    ("/slots/0?action=save", {}),
    ("/nowhere", {}),
    ("/completion", {"n_predict": 1}),
    ("/completion", {"prompt": [], "n_predict": 1}),
    ("/completion", {"prompt": [99999], "n_predict": 1}),
    ("/completion", {"prompt": [65] * 600, "n_predict": 1, "stream": True}),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {}),
    ("/v1/chat/completions", {"messages": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("/apply-template", {}),
]


def shape(value: Any) -> Any:
    """A JSON value without its content: keys, and the kinds of what they name."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


async def spoken(talk: Talk, url: str, path: str, body: Json) -> Any:
    """What an engine answers, as shapes: of a stream, the event names and values in order without repetition."""
    if not body.get("stream"):
        status, answer = await talk.post(url, path, body)
        return status, list(answer) if path != "/v1/responses" else sorted(answer), shape(answer)
    raw = await talk.stream(url, path, body)
    blocks = [block.removeprefix("data: ") for block in raw.decode().strip().split("\n\n")]
    shapes = [[*block.split("data: ")[:-1], _value(block.split("data: ")[-1])] for block in blocks]
    return [now for before, now in zip([None, *shapes], shapes, strict=False) if now != before]


def _value(text: str) -> Any:
    return text if text == "[DONE]" else shape(json.loads(text))


@pytest.fixture
def real(live_engine: Callable[..., LiveEngine], tmp_path: Path) -> LiveEngine:
    folder = tmp_path / "real"
    folder.mkdir()
    flags = ("-np", "1", "-c", "512", "-cram", "0", "--slots", "--metrics", "--slot-save-path", str(folder))
    return live_engine(tiny_model("dense"), *flags)


@pytest.mark.live
async def test_it_speaks_as_the_real_engine(real: LiveEngine, fake: Start, talk: Talk) -> None:
    """Each answer has the keys, kinds and order of the real one's, event by event."""
    engine = await fake(context=512)
    differences = []
    for path, body in SPOKEN:
        true, copied = [await spoken(talk, url, path, body) for url in (real.url, engine.url)]
        if true != copied:
            differences.append(f"{path} {body}\n  real: {true}\n  fake: {copied}")
    assert not differences, "\n".join(differences)


@pytest.mark.live
async def test_it_refuses_as_the_real_engine(real: LiveEngine, fake: Start, talk: Talk) -> None:
    """Each error has the real one's status, type and words; of JSON faults only the beginning of the words."""
    engine = await fake(context=512)
    for path, body in REFUSED:
        true, copied = [await talk.post(url, path, {**body, "id_slot": 0}) for url in (real.url, engine.url)]
        assert (true[0], _told(true[1])) == (copied[0], _told(copied[1])), path


def _told(answer: Json) -> Json:
    error: Json = answer["error"]
    return {**error, "message": error["message"].partition(" parse error")[0]}


@pytest.mark.live
async def test_it_describes_itself_as_the_real_engine(real: LiveEngine, fake: Start, talk: Talk) -> None:
    """What the fake says of itself is a part of what the real engine says, in the same shape."""
    engine = await fake(context=512)
    for path in ("/health", "/props", "/v1/models", "/slots"):
        true, copied = [shape((await talk.get(url, path))[1]) for url in (real.url, engine.url)]
        assert _is_part(copied, true), (path, copied, true)
    await talk.read(engine, PROMPT[:9])
    await talk.post(real.url, "/completion", {**NATIVE, "n_predict": 0})
    true, copied = [(await talk.get(url, "/slots"))[1][0] for url in (real.url, engine.url)]
    assert list(true) == list(copied)
    with urllib.request.urlopen(real.url + "/metrics") as answer:  # noqa: ASYNC210, S310 - always this machine
        names = {line.split()[0] for line in answer.read().decode().splitlines() if not line.startswith("#")}
    async with aiohttp.ClientSession() as session, session.get(engine.url + "/metrics") as copy:
        assert {line.split()[0] for line in (await copy.text()).splitlines()} <= names


def _is_part(small: Any, large: Any) -> bool:
    if isinstance(small, dict) and isinstance(large, dict):
        return all(key in large and _is_part(value, large[key]) for key, value in small.items())
    if isinstance(small, list) and isinstance(large, list):
        return all(_is_part(a, b) for a, b in zip(small, large, strict=False))
    return bool(small == large)


@pytest.mark.live
@pytest.mark.parametrize("memory", ["dense", "sliding", "hybrid"])
async def test_it_reuses_as_the_real_engine(
    live_engine: Callable[..., LiveEngine], fake: Start, talk: Talk, tmp_path: Path, memory: str
) -> None:
    """For each kind of memory the fake reads again what the real engine reads again, restored or continued."""
    flags = ("-np", "1", "-c", "4096", "-cram", "0", "--ctx-checkpoints", "4", "--slot-save-path", str(tmp_path))
    urls = [live_engine(tiny_model(memory), *flags).url, (await fake(memory=memory)).url]
    prompt = [token % 50 + 40 for token in range(1500)]
    assert await cached_counts(talk, urls[0], prompt) == await cached_counts(talk, urls[1], prompt)


async def cached_counts(talk: Talk, url: str, prompt: list[int]) -> list[int]:
    """What is reused when a session of this prompt is restored and then asked for: one token more, the same, less."""

    async def cached(asked: list[int]) -> int:
        body = {"prompt": asked, "n_predict": 1, "id_slot": 0, "temperature": 0}
        return int((await talk.post(url, "/completion", body))[1]["timings"]["cache_n"])

    counts = [await cached(prompt[:-1])]
    await talk.post(url, "/slots/0?action=save", {"filename": "a"})
    for asked in (prompt, prompt[:-1], [*prompt[:1200], 33, 34]):
        await talk.post(url, "/slots/0?action=erase", {})
        await talk.post(url, "/slots/0?action=restore", {"filename": "a"})
        counts.append(await cached(asked))
    await talk.post(url, "/slots/0?action=erase", {})
    counts += [await cached(prompt[:-1]), await cached([*prompt, 41, 42]), await cached([*prompt[:-20], 33, 34])]
    return counts
