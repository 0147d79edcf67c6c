"""What the adapter sends to a llama-server, what it makes of the answers, and where it puts the blame."""

import asyncio
import inspect
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import orjson
import pytest
from aioresponses import CallbackResult, aioresponses

from splitproxy.books.sessions import SessionStore
from splitproxy.engines.adapter import Call, Deadlines, SlotState
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.engines.slotfile import MAGIC
from splitproxy.errors import Cause, EngineError, Step
from splitproxy.model import Api, Ask, EngineState, Figures, InVain, Prompt, Ticket, Tokens
from tests.harness import until
from tests.raw_server import Exchange, Play, RawServer, raw_server

URL = "http://engine:8081/base"
DEADLINES = Deadlines(prefill_silence_s=11, transfer_timeout_s=22, decode_silence_s=33)
HEAD = Tokens([5, 6, 7, 8])
PROMPT = Prompt(Tokens([5, 6, 7, 8, 9]), Ask(Api.NATIVE, "/completion", b"{}"))
TIMINGS = {"cache_n": 1, "prompt_n": 3, "prompt_ms": 12.5, "predicted_n": 1, "predicted_ms": 2.0}
SECRET = "the prompt's text"


class Response(aiohttp.ClientResponse):
    """Takes the argument that aiohttp asks for since 3.14, and that aioresponses does not know yet."""

    def __init__(self, method: str, url: Any, **kwargs: Any) -> None:
        known = inspect.signature(aiohttp.ClientResponse.__init__).parameters
        if "stream_writer" in known:
            kwargs.setdefault("stream_writer", mock.Mock())
        super().__init__(method, url, **kwargs)


class Wire:
    """The HTTP that the adapter sees: answers by method and target, and every call as it was made."""

    def __init__(self, answers: aioresponses) -> None:
        self._answers = answers
        self.calls: list[tuple[str, Any]] = []
        self.options: list[dict[str, Any]] = []

    def on(
        self, method: str, target: str, answer: Any = None, *, status: int = 200, base: str = URL, **options: Any
    ) -> None:
        """Answer `target` with JSON, bytes, an exception, or what a function of the call returns."""

        async def called(_url: object, **kwargs: Any) -> CallbackResult:
            data = kwargs.get("data")
            self.calls.append((f"{method} {target}", orjson.loads(data) if data else data))
            self.options.append(kwargs)
            found = await answer() if callable(answer) else answer
            if isinstance(found, BaseException):
                raise found
            body = found if isinstance(found, bytes) else orjson.dumps(found)
            return CallbackResult(status=status, body=body, response_class=Response, **options)

        self._answers.add(f"{base}{target}", method=method, callback=called, repeat=True)

    @property
    def targets(self) -> list[str]:
        return [call for call, _ in self.calls]


@pytest.fixture
def wire() -> Iterator[Wire]:
    with aioresponses() as answers:
        yield Wire(answers)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SessionStore]:
    with SessionStore(tmp_path / "sessions") as opened:
        yield opened


@pytest.fixture
async def engine(store: SessionStore) -> AsyncIterator[LlamaServer]:
    adapter = LlamaServer("reader", URL, "", store)
    yield adapter
    await adapter.close()


def no_progress(step: Step, done: int, total: int) -> None:
    """Nobody looks."""


async def failure(work: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await work
    return caught.value


def blame(error: EngineError) -> tuple[Step, Cause, int | None]:
    return error.step, error.cause, error.status


def events(*found: Any) -> bytes:
    return b"".join(
        b"data: " + (event if isinstance(event, bytes) else orjson.dumps(event)) + b"\n\n" for event in found
    )


LAST = {"content": "", "stop": True, "timings": TIMINGS}


def session_file(tokens: Tokens, *, media: int = 0) -> bytes:
    words = struct.pack("<iii", -1, 1, len(tokens)) + tokens.to_bytes() + struct.pack("<ii", media, 0)
    return struct.pack("<III", MAGIC, 4, len(words) // 4) + words + b"KV" * 50


def saving(
    store: SessionStore, wire: Wire, *, data: bytes | None = None, n_saved: int = 4, lie: int = 0
) -> Callable[[], Any]:
    """What a save does: the file appears in the folder, and the answer counts it."""
    content = session_file(HEAD) if data is None else data

    async def save() -> dict[str, Any]:
        name = wire.calls[-1][1]["filename"]
        if content:
            (store.folder / name).write_bytes(content)
        return {"n_saved": n_saved, "n_written": len(content) + lie, "timings": {"save_ms": 4.5}}

    return save


# --- a prefill


async def test_the_prefill_is_built_from_ids_alone(engine: LlamaServer, store: SessionStore, wire: Wire) -> None:
    """The engine gets exactly these ids, pinned, generating nothing, streamed with progress; then it saves the slot."""
    seen: list[tuple[Step, int, int]] = []
    progress = [{"prompt_progress": {"processed": n, "total": 4}, "tokens": [0]} for n in (1, 4)]
    wire.on("POST", "/completion", events(*progress, {"content": "x", "tokens": [9]}, LAST))
    wire.on("POST", "/slots/2?action=save", saving(store, wire))
    ticket = await engine.prefill(PROMPT, 2, DEADLINES, lambda *told: seen.append(told))
    read, save = wire.calls
    assert read == (
        "POST /completion",
        {
            "prompt": [5, 6, 7, 8],
            "n_predict": 0,
            "id_slot": 2,
            "cache_prompt": True,
            "stream": True,
            "return_progress": True,
        },
    )
    assert save == ("POST /slots/2?action=save", {"filename": ticket.handle})
    size = len(session_file(HEAD))
    assert ticket == Ticket(ticket.handle, 4, size, cached_tokens=1, prefill_ms=12.5, save_ms=4.5, proof_tokens=-12)
    assert (store.folder / ticket.handle).stat().st_mode & 0o777 == 0o600
    assert seen == [(Step.PREFILL, 1, 4), (Step.PREFILL, 4, 4), (Step.SAVE, 4, 4)]


async def test_each_step_has_its_deadline(engine: LlamaServer, store: SessionStore, wire: Wire) -> None:
    """Reading may take any time but not fall silent; a transfer has a time as a whole."""
    wire.on("POST", "/completion", events(LAST))
    wire.on("POST", "/slots/0?action=save", saving(store, wire))
    await engine.prefill(PROMPT, 0, DEADLINES, no_progress)
    read, save = (options["timeout"] for options in wire.options)
    assert (read.total, read.sock_read) == (None, 11)
    assert (save.total, save.sock_read) == (22, None)


@pytest.mark.parametrize(
    ("answer", "status", "cause"),
    [
        ({"error": {"message": "too long", "type": "x"}}, 400, Cause.REFUSED),
        (b"no json", 500, Cause.REFUSED),
        (aiohttp.ServerDisconnectedError(), 200, Cause.DIED),
        (ConnectionResetError(104, "reset"), 200, Cause.DIED),
        (aiohttp.ClientPayloadError("cut"), 200, Cause.DIED),
        (TimeoutError(), 200, Cause.TIMEOUT),
        (events({"error": {"message": SECRET, "type": "server_error"}}), 200, Cause.REFUSED),
        (events({"prompt_progress": {"processed": 1, "total": 4}}), 200, Cause.DIED),
        (b"", 200, Cause.DIED),
        (events(b"{oops"), 200, Cause.CORRUPT),
        (events(b"[1]"), 200, Cause.CORRUPT),
        (events({**LAST, "timings": {**TIMINGS, "prompt_n": 2}}), 200, Cause.CORRUPT),
        (events({**LAST, "timings": None}), 200, Cause.CORRUPT),
        (events({**LAST, "truncated": True}), 200, Cause.CORRUPT),
    ],
)
async def test_a_reading_that_fails(
    engine: LlamaServer, store: SessionStore, wire: Wire, answer: Any, status: int, cause: Cause
) -> None:
    """Whatever goes wrong while a prompt is read is the prefill's failure; nothing is saved after it."""
    wire.on("POST", "/completion", answer, status=status)
    error = await failure(engine.prefill(PROMPT, 0, DEADLINES, no_progress))
    assert blame(error) == (Step.PREFILL, cause, status if status != 200 else None)
    assert SECRET not in str(error)
    assert wire.targets == ["POST /completion"]
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "step", "cause", "said"),
    [
        ({"data": b""}, Step.CHECK, Cause.CORRUPT, "must be the same folder"),
        ({"n_saved": 3}, Step.SAVE, Cause.CORRUPT, "3 tokens were saved instead of 4"),
        ({"lie": 1}, Step.CHECK, Cause.CORRUPT, "bytes, but"),
        ({"lie": -1}, Step.CHECK, Cause.CORRUPT, "bytes, but"),
        ({"data": session_file(Tokens([5, 6, 7, 9]))}, Step.CHECK, Cause.CORRUPT, "another prompt"),
        ({"data": session_file(Tokens([5, 6, 7]))}, Step.CHECK, Cause.CORRUPT, "another prompt"),
        ({"data": session_file(HEAD, media=1)}, Step.CHECK, Cause.CORRUPT, "another prompt"),
        ({"data": session_file(HEAD)[:20]}, Step.CHECK, Cause.CORRUPT, "unusable: its token list"),
        ({"data": b"GGUF" * 10}, Step.CHECK, Cause.CORRUPT, "unusable: it starts with"),
    ],
    ids=["no file", "too few tokens", "longer than written", "shorter than written", "another token",
         "a shorter list", "a picture", "cut off", "no session file"],
)  # fmt: skip
async def test_a_saved_file_is_checked(
    engine: LlamaServer, store: SessionStore, wire: Wire, options: Any, step: Step, cause: Cause, said: str
) -> None:
    """A file that is not exactly what was to be saved never becomes a ticket, and is removed."""
    wire.on("POST", "/completion", events(LAST))
    wire.on("POST", "/slots/0?action=save", saving(store, wire, **options))
    error = await failure(engine.prefill(PROMPT, 0, DEADLINES, no_progress))
    assert blame(error) == (step, cause, None)
    assert said in str(error)
    assert list(store.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "status", "cause"),
    [
        ({"error": {"message": "Unable to save slot"}}, 500, Cause.REFUSED),
        ({"error": {"message": "start with --slot-save-path"}}, 501, Cause.REFUSED),
        (aiohttp.ServerDisconnectedError(), 200, Cause.DIED),
        (TimeoutError(), 200, Cause.TIMEOUT),
        (b"done", 200, Cause.REFUSED),
        ([], 200, Cause.REFUSED),
    ],
)
async def test_a_save_that_fails(
    engine: LlamaServer, store: SessionStore, wire: Wire, answer: Any, status: int, cause: Cause
) -> None:
    """A failed save leaves half a file on disk, which would kill whoever restores it: it is removed."""

    async def half() -> Any:
        (store.folder / wire.calls[-1][1]["filename"]).write_bytes(b"half")
        return answer

    wire.on("POST", "/completion", events(LAST))
    wire.on("POST", "/slots/0?action=save", half, status=status)
    error = await failure(engine.prefill(PROMPT, 0, DEADLINES, no_progress))
    assert blame(error) == (Step.SAVE, cause, status if status != 200 else None)
    assert list(store.folder.iterdir()) == []


async def test_a_cancelled_save_is_waited_for_and_removed(engine: LlamaServer, store: SessionStore, wire: Wire) -> None:
    """An engine cannot take back a save: it runs to its end, and what it wrote is removed."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    save = saving(store, wire)

    async def slowly() -> Any:
        reached.set()
        await go_on.wait()
        return await save()

    wire.on("POST", "/completion", events(LAST))
    wire.on("POST", "/slots/0?action=save", slowly)
    task = asyncio.create_task(engine.prefill(PROMPT, 0, DEADLINES, no_progress))
    await asyncio.wait_for(reached.wait(), 20)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(store.folder.iterdir()) == []


async def test_a_cancelled_reading_ends_at_once(engine: LlamaServer, wire: Wire) -> None:
    """Reading is stopped by closing the connection, and nothing is saved."""
    reached = asyncio.Event()

    async def hang() -> Any:
        reached.set()
        await asyncio.Event().wait()

    wire.on("POST", "/completion", hang)
    task = asyncio.create_task(engine.prefill(PROMPT, 0, DEADLINES, no_progress))
    await asyncio.wait_for(reached.wait(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wire.targets == ["POST /completion"]


# --- tickets


async def test_a_ticket_is_redeemed_by_name(engine: LlamaServer, wire: Wire) -> None:
    """The slot restores the ticket's file, and says how many tokens it got."""
    wire.on("POST", "/slots/3?action=restore", {"n_restored": 99, "timings": {"restore_ms": 1.5}})
    redeemed = await engine.redeem(Ticket("name", 99, 1, 0, 0, 0, 99), 3, DEADLINES)
    assert (redeemed.tokens, redeemed.restore_ms) == (99, 1.5)
    assert wire.calls == [("POST /slots/3?action=restore", {"filename": "name"})]


@pytest.mark.parametrize("n_restored", [None, "99", 9.5])
async def test_a_restore_without_a_count_restored_nothing(engine: LlamaServer, wire: Wire, n_restored: object) -> None:
    """What is no number of tokens is none."""
    wire.on("POST", "/slots/0?action=restore", {"n_restored": n_restored})
    assert (await engine.redeem(Ticket("name", 99, 1, 0, 0, 0, 99), 0, DEADLINES)).tokens == 0


async def test_a_refused_restore_says_so(engine: LlamaServer, wire: Wire) -> None:
    """The engine's reason is passed on with its status."""
    wire.on("POST", "/slots/0?action=restore", {"error": {"message": "Unable to restore slot"}}, status=400)
    error = await failure(engine.redeem(Ticket("name", 99, 1, 0, 0, 0, 99), 0, DEADLINES))
    assert blame(error) == (Step.RESTORE, Cause.REFUSED, 400)
    assert "Unable to restore slot" in str(error)


async def test_a_discarded_ticket_leaves_no_file(engine: LlamaServer, store: SessionStore) -> None:
    """The file goes, and discarding again is no error."""
    name = store.new_name()
    (store.folder / name).touch()
    ticket = Ticket(name, 1, 1, 0, 0, 0, 1)
    await engine.discard(ticket)
    await engine.discard(ticket)
    assert list(store.folder.iterdir()) == []


async def test_a_slot_is_erased(engine: LlamaServer, wire: Wire) -> None:
    """Erasing names the slot and no file."""
    wire.on("POST", "/slots/1?action=erase", {"n_erased": 5})
    await engine.erase(1, DEADLINES)
    assert wire.calls == [("POST /slots/1?action=erase", {})]


async def test_what_each_slot_does(engine: LlamaServer, wire: Wire) -> None:
    """Slots tell whether they work and how many tokens they hold; one that never worked holds none."""
    wire.on(
        "GET",
        "/slots",
        [{"id": 1, "is_processing": True, "n_prompt_tokens": 70}, {"id": 0, "is_processing": False}],
    )
    assert await engine.slots() == {1: SlotState(True, 70), 0: SlotState(False, 0)}


# --- what it is


@pytest.mark.parametrize(
    ("status", "answer", "state"),
    [
        (200, {}, EngineState.READY),
        (503, {}, EngineState.LOADING),
        (404, {}, EngineState.DOWN),
        (500, {}, EngineState.DOWN),
        (200, ConnectionRefusedError(111, "refused"), EngineState.DOWN),
        (200, TimeoutError(), EngineState.DOWN),
    ],
)
async def test_health(engine: LlamaServer, wire: Wire, status: int, answer: Any, state: EngineState) -> None:
    """An engine is ready, loading, or down; asking never fails."""
    wire.on("GET", "/health", answer, status=status)
    assert await engine.health() is state


PROPS = {
    "build_info": "b1-abc",
    "total_slots": 4,
    "default_generation_settings": {"n_ctx": 8192},
    "chat_template": "{{ messages }}",
    "bos_token": "<s>",
    "eos_token": "</s>",
}
META = {"n_params": 7, "size": 8, "n_embd": 9, "n_ctx_train": 10, "ftype": "Q4", "vocab_type": 2, "n_vocab": 300}


async def identified(engine: LlamaServer, wire: Wire, base: str = URL, **changes: Any) -> Any:
    answers: dict[str, Any] = {
        "/props": PROPS, "/v1/models": {"data": [{"meta": META}]}, "/slots": [], "/tokenize": {"tokens": [1, 2]},
    }  # fmt: skip
    answers.update(changes)
    for target, answer in answers.items():
        wire.on("POST" if target == "/tokenize" else "GET", target, answer, base=base)
    return await engine.identify()


async def test_identity(engine: LlamaServer, wire: Wire) -> None:
    """An engine is known by its build, weights, vocabulary, template and special tokens; its sizes are read off."""
    identity = await identified(engine, wire)
    assert (identity.build, identity.context, identity.slots) == ("b1-abc", 8192, 4)
    assert identity.model == "n_params=7 size=8 n_embd=9 n_ctx_train=10 ftype=Q4"
    assert identity.special_tokens == "bos='<s>' eos='</s>'"
    assert "messages" not in repr(identity)


@pytest.mark.parametrize(
    ("target", "answer", "field"),
    [
        ("/props", {**PROPS, "build_info": "b2"}, "build"),
        ("/props", {**PROPS, "chat_template": "{{ other }}"}, "template"),
        ("/props", {**PROPS, "eos_token": "<eot>"}, "special_tokens"),
        ("/v1/models", {"data": [{"meta": {**META, "n_params": 8}}]}, "model"),
        ("/v1/models", {"data": [{"meta": {**META, "n_vocab": 301}}]}, "vocabulary"),
        ("/tokenize", {"tokens": [1, 3]}, "vocabulary"),
    ],
)
async def test_identities_differ_where_engines_do(
    store: SessionStore, wire: Wire, target: str, answer: Any, field: str
) -> None:
    """Each thing that must be the same on both engines shows in the identity, and nothing else changes with it."""
    one, other = LlamaServer("a", URL, "", store), LlamaServer("b", "http://other", "", store)
    first = await identified(one, wire)
    second = await identified(other, wire, "http://other", **{target: answer})
    await one.close()
    await other.close()
    assert {name for name in first.__slots__ if getattr(first, name) != getattr(second, name)} == {field}


@pytest.mark.parametrize(
    ("target", "answer"),
    [
        ("/props", {}),
        ("/props", []),
        ("/props", {**PROPS, "total_slots": None}),
        ("/props", {**PROPS, "default_generation_settings": 5}),
        ("/v1/models", {"data": []}),
        ("/v1/models", {"data": [5]}),
        ("/v1/models", {}),
        ("/v1/models", b"<html>"),
        ("/slots", {}),
        ("/tokenize", {"ids": []}),
        ("/tokenize", {"tokens": "abc"}),
        ("/tokenize", {"tokens": [{"id": 1, "piece": "a"}]}),
    ],
)
async def test_what_is_no_llama_server_is_refused(engine: LlamaServer, wire: Wire, target: str, answer: Any) -> None:
    """A server that lacks what a llama-server has is an engine that cannot be used, not a crash."""
    error = await failure(identified(engine, wire, **{target: answer}))
    assert error.cause is Cause.REFUSED
    assert target.rpartition("/")[2] in str(error)


# --- text and tokens


async def test_text_is_read_as_the_engine_would(engine: LlamaServer, wire: Wire) -> None:
    """Text becomes ids with the beginning token and with special tokens in it."""
    wire.on("POST", "/tokenize", {"tokens": [1, 2, 3]})
    assert await engine.tokenize("a b") == Tokens([1, 2, 3])
    assert wire.calls == [("POST /tokenize", {"content": "a b", "add_special": True, "parse_special": True})]


async def test_the_clients_body_is_rendered_as_it_is(engine: LlamaServer, wire: Wire) -> None:
    """The template gets the client's own body."""
    wire.on("POST", "/apply-template", {"prompt": "<user>hi"})
    assert await engine.render(b'{"messages": []}') == "<user>hi"
    assert wire.options[0]["data"] == b'{"messages": []}'


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("work", ["render", "tokenize"])
async def test_what_an_engine_says_of_a_prompt_stays_private(
    engine: LlamaServer, wire: Wire, work: str, status: int
) -> None:
    """An engine's error may quote the prompt, so it is not repeated; an answer without a result is refused."""
    for target in ("/apply-template", "/tokenize"):
        wire.on("POST", target, {"error": {"message": SECRET}}, status=status)
    error = await failure(engine.render(b"{}") if work == "render" else engine.tokenize(SECRET))
    assert blame(error) == (Step.TOKENIZE, Cause.REFUSED, 400 if status == 400 else None)
    assert SECRET not in str(error)


async def test_a_sample_is_greedy_and_pinned(engine: LlamaServer, wire: Wire) -> None:
    """A sample gives the text, the first token's rivals and the figures."""
    tops = [{"id": 4, "logprob": -0.5}, {"id": 9, "logprob": None}]
    answer = {"content": "yes", "completion_probabilities": [{"top_logprobs": tops}], "timings": TIMINGS}
    wire.on("POST", "/completion", answer)
    sample = await engine.sample(PROMPT, 6, 8, DEADLINES)
    assert (sample.text, sample.logprobs, sample.figures) == ("yes", {4: -0.5}, Figures(1, 3, 12.5, 1, 2.0))
    assert wire.calls[0][1] == {
        "prompt": [5, 6, 7, 8, 9], "n_predict": 8, "id_slot": 6, "cache_prompt": True, "temperature": 0, "n_probs": 10,
    }  # fmt: skip


# --- clients' requests

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CLIENTS_HEADERS = [("Content-Type", "x/y"), ("traceparent", "t")]


def clients_call(*, streams: bool = True) -> Call:
    return Call("POST", "/v1/chat/completions?a=%2F", CLIENTS_HEADERS, b'{"a":1}', streams)


@asynccontextmanager
async def answering(store: SessionStore, play: Play | bytes, key: str = "") -> AsyncIterator[tuple[RawServer, Any]]:
    """An adapter in front of a server that answers as told."""
    async with raw_server(play) as server:
        engine = LlamaServer("a", server.url, key, store)
        yield server, engine
        await engine.close()


async def test_a_clients_request_goes_as_it_came(store: SessionStore) -> None:
    """Method, target, headers and body are the client's, and the engine's own key is added."""
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return True

    async with answering(store, STREAM + b"3\r\n{}\n\r\n0\r\n\r\n", "k3y") as (server, engine):
        async with engine.call(clients_call(), DEADLINES) as answer:
            assert not await answer.pour(take)
        assert "k3y" not in repr(engine)
    head = server.exchanges[0].head
    assert head.startswith(b"POST /v1/chat/completions?a=%2F HTTP/1.1\r\n")
    assert b"\r\nContent-Type: x/y\r\ntraceparent: t\r\nAuthorization: Bearer k3y\r\n" in head
    assert (server.exchanges[0].body, pieces) == (b'{"a":1}', [b"{}\n"])


async def test_only_a_stream_must_not_fall_silent(store: SessionStore) -> None:
    """A stream has a deadline for each piece; a plain answer is silent until it is complete."""
    deadlines = Deadlines(prefill_silence_s=11, transfer_timeout_s=22, decode_silence_s=0.05)

    async def late(exchange: Exchange) -> None:
        await asyncio.sleep(0.3)
        with suppress(ConnectionError):
            await exchange.say(STREAM + b"0\r\n\r\n")

    async def ask(engine: LlamaServer, streams: bool) -> int:
        async with engine.call(clients_call(streams=streams), deadlines) as answer:
            return answer.status

    async with answering(store, late) as (_, engine):
        assert blame(await failure(ask(engine, streams=True))) == (Step.DECODE, Cause.TIMEOUT, None)
        assert await ask(engine, streams=False) == 200


async def test_abort_ends_every_call_and_no_later_one(store: SessionStore) -> None:
    """When an engine is given up, whoever waits for it is told at once, one that waits for its client included."""
    silent = 3
    reached = 0

    async def hang(exchange: Exchange) -> None:
        if len(server.exchanges) != silent:
            await exchange.say(STREAM + b"1\r\nx\r\n0\r\n\r\n")
        else:
            await exchange.gone()

    async def ask() -> int:
        nonlocal reached
        async with engine.call(clients_call(), DEADLINES) as answer:
            reached += 1
            if reached < silent:
                await asyncio.Event().wait()  # for a client that reads nothing
            return int(answer.status)

    async with answering(store, hang) as (server, engine):
        tasks = [asyncio.create_task(ask()) for _ in range(2)]
        await until(lambda: reached == 2)
        tasks.append(asyncio.create_task(ask()))
        await until(lambda: len(server.exchanges) == silent)
        engine.abort()
        engine.abort()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, EngineError) and error.step is Step.DECODE for error in found)
        assert await ask() == 200


async def test_a_key_goes_with_every_control_call(store: SessionStore, wire: Wire) -> None:
    """An engine that wants a key gets it."""
    engine = LlamaServer("a", URL, "k3y", store)
    wire.on("GET", "/health", {})
    await engine.health()
    await engine.close()
    assert wire.options[0]["headers"]["Authorization"] == "Bearer k3y"


# --- what to change


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (EngineError(Step.CONTROL, Cause.REFUSED, "x", status=401), "api_key_env"),
        (EngineError(Step.CONTROL, Cause.DIED, "x"), "running at this address"),
        (EngineError(Step.RESTORE, Cause.DIED, "x"), "log tells why"),
        (EngineError(Step.CONTROL, Cause.REFUSED, "x", status=501), "without --no-slots"),
        (EngineError(Step.SAVE, Cause.REFUSED, "x", status=501), "--slot-save-path set to the folder"),
        (EngineError(Step.SAVE, Cause.REFUSED, "x", status=500), "space left"),
        (EngineError(Step.CHECK, Cause.CORRUPT, "x"), "the same folder"),
        (EngineError(Step.RESTORE, Cause.REFUSED, "x", status=400), "--kv-unified"),
        (EngineError(Step.PREFILL, Cause.TIMEOUT, "x"), "too slow"),
        (EngineError(Step.TOKENIZE, Cause.REFUSED, "x"), "engine's log"),
    ],
)
async def test_advice_fits_the_failure(engine: LlamaServer, error: EngineError, advised: str) -> None:
    """What to change is said in this engine's own flags."""
    assert any(advised in text for text in engine.advice(error))


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("step", Step)
async def test_there_is_advice_for_every_failure(engine: LlamaServer, step: Step, cause: Cause) -> None:
    """No failure leaves its reader without a next step."""
    found = engine.advice(EngineError(step, cause, "x"))
    assert found
    assert all(text.endswith((".", "?")) for text in found)


@pytest.mark.parametrize("cause", [None, *InVain])
async def test_there_is_a_remedy_for_every_cause(engine: LlamaServer, cause: InVain | None) -> None:
    """Whatever the likely cause of a handover in vain, a warning says what to change."""
    assert engine.remedy(cause).endswith(".")
