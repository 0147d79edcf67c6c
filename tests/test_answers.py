"""The client for engines' answers: what it sends, when it stops reading, and how each way to fail is told."""

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from splitproxy.engines import answers
from splitproxy.engines.adapter import Answer, Call, content_length
from splitproxy.engines.answers import AnswerClient
from splitproxy.errors import Cause, EngineError, Step
from tests.harness import until
from tests.raw_server import Exchange, raw_server

CALL = Call("POST", "/v1/chat/completions?a=%2F", [("Content-Type", "x/y"), ("traceparent", "t")], b'{"a":1}')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; a=b\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def body(answer: Answer) -> list[bytes]:
    """All pieces; each is taken."""
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return True

    assert not await answer.pour(take)
    return pieces


async def failure(url: str, call: Call = CALL, silence_s: float | None = None) -> EngineError:
    """How a call fails, before its head or behind it."""
    with pytest.raises(EngineError) as caught:
        async with AnswerClient(url).call(call, silence_s) as answer:
            await body(answer)
    return caught.value


# --- an exchange


async def test_a_request_goes_as_it_came() -> None:
    """Method, target, headers and body are the caller's, and the client's own headers are added."""
    async with raw_server(HEAD + END) as server:
        client = AnswerClient(server.url + "/base", [("Authorization", "Bearer k3y")])
        async with client.call(CALL, None) as answer:
            assert await body(answer) == []
    host = server.url.removeprefix("http://").encode()
    assert server.exchanges[0].head == (
        b"POST /base/v1/chat/completions?a=%2F HTTP/1.1\r\nHost: " + host + b"\r\nContent-Type: x/y\r\n"
        b"traceparent: t\r\nAuthorization: Bearer k3y\r\nConnection: close\r\nContent-Length: 7\r\n\r\n"
    )
    assert server.exchanges[0].body == b'{"a":1}'


@pytest.mark.parametrize(("method", "length"), [("POST", b"Content-Length: 0\r\n"), ("GET", b""), ("DELETE", b"")])
async def test_a_request_without_a_body(method: str, length: bytes) -> None:
    """Where a body belongs its length is told even if it is nothing; elsewhere there is none."""
    call = Call(method, "/", [], None)
    async with (
        raw_server(b"HTTP/1.1 204 No Content\r\n\r\n") as server,
        AnswerClient(server.url).call(call, None) as answer,
    ):
        assert (answer.status, await body(answer)) == (204, [])
    assert server.exchanges[0].head.endswith(b"Connection: close\r\n" + length + b"\r\n")


async def test_a_large_body_arrives_whole() -> None:
    """A body that does not fit into the connection's buffers is sent to its end."""
    large = bytes(range(256)) * 32 * 1024
    call = Call("POST", "/", [], large)
    async with (
        raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as server,
        AnswerClient(server.url).call(call, None) as answer,
    ):
        assert await body(answer) == [b"{}"]
    assert server.exchanges[0].body == large


async def test_the_answer_is_the_engines() -> None:
    """Status, headers and media type are the engine's, and each piece arrives by itself, when it was sent."""
    seen: list[bytes] = []

    async def play(exchange: Exchange) -> None:
        await exchange.say(b"HTTP/1.1 418 I'm\r\nX-A: 1\r\nContent-Type: Text/Event-Stream; a=b\r\n")
        await exchange.say(b"Transfer-Encoding: chunked\r\n\r\n")
        for number in range(20):
            await exchange.say(chunk(b"data: %d\n\n" % number))
            await until(lambda: len(seen) == number + 1)  # noqa: B023
        await exchange.say(END)

    def take(piece: bytes) -> bool:
        seen.append(piece)
        return True

    async with raw_server(play) as server, AnswerClient(server.url).call(CALL, None) as answer:
        assert (answer.status, answer.media_type) == (418, "text/event-stream")
        assert ("X-A", "1") in answer.headers
        assert not await answer.pour(take)
        assert not await answer.pour(take)  # it stays at its end
    assert seen == [b"data: %d\n\n" % number for number in range(20)]


async def test_a_server_of_http_1_0() -> None:
    """An answer without a length ends when the engine closes the connection, and both ends stay open until then."""

    async def play(exchange: Exchange) -> None:
        await exchange.say(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        gone = asyncio.create_task(exchange.gone())
        await exchange.say(b"data: 1\n\n")
        await asyncio.sleep(0)
        assert not gone.done()
        gone.cancel()

    async with raw_server(play) as server, AnswerClient(server.url).call(CALL, None) as answer:
        assert b"".join(await body(answer)) == b"data: 1\n\n"


async def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An https address is spoken to over TLS, and its certificate is checked."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, [*command, *files], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    large = b"x" * 10**6
    async with raw_server(HEAD + chunk(large) + END, tls) as server:
        assert (await failure(server.url)).cause is Cause.DIED
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with AnswerClient(server.url).call(CALL, 20) as answer:
            assert b"".join(await body(answer)) == large


# --- back-pressure


async def test_what_is_not_taken_is_not_read() -> None:
    """Once `take` wants no more, nothing is read until the next call, and no byte is lost over it."""
    piece, count, sent = b"x" * 100_000, 300, 0

    async def play(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.say(HEAD)
        for _ in range(count):
            await exchange.say(chunk(piece))
            sent += 1
        await exchange.say(END)

    taken = 0

    def take(data: bytes) -> bool:
        nonlocal taken
        taken += len(data)
        return False

    async with raw_server(play) as server, AnswerClient(server.url).call(CALL, None) as answer:
        assert await answer.pour(take)
        before = -1
        while before != sent:  # until the engine cannot get rid of more
            before = sent
            await asyncio.sleep(0.05)
        assert sent < count / 2
        assert taken < 10 * len(piece)
        while await answer.pour(take):
            pass
    assert (sent, taken) == (count, count * len(piece))


async def test_a_piece_that_came_with_the_head_waits() -> None:
    """What arrives before anybody takes it is kept, and nothing more is read."""
    async with (
        raw_server(HEAD + chunk(b"a") + END) as server,
        AnswerClient(server.url).call(CALL, None) as answer,
    ):
        await asyncio.sleep(0.01)
        assert await body(answer) == [b"a"]


async def test_an_error_of_who_takes_ends_the_answer() -> None:
    """What `take` raises is raised where the answer is waited for, and the engine is told that nobody waits."""
    taken: list[bytes] = []

    async def play(exchange: Exchange) -> None:
        await exchange.say(HEAD + chunk(b"a"))
        await until(lambda: taken)
        await exchange.say(chunk(b"b"))
        await exchange.gone()

    def take(piece: bytes) -> bool:
        if taken:
            raise LookupError("mine")
        taken.append(piece)
        return True

    async def ask(url: str) -> None:
        async with AnswerClient(url).call(CALL, None) as answer:
            await answer.pour(take)

    async with raw_server(play) as server:
        with pytest.raises(LookupError, match="mine"):
            await ask(server.url)
        await server.exchanges[0].left.wait()


# --- leaving early


@pytest.mark.parametrize("answered", [False, True])
async def test_leaving_early_closes_the_connection(answered: bool) -> None:
    """An engine notices that nobody waits any more, before its head and in the middle of its body."""

    async def play(exchange: Exchange) -> None:
        if answered:
            await exchange.say(HEAD + chunk(b"a"))
        await exchange.gone()

    async with raw_server(play) as server:
        begun = asyncio.Event()

        async def ask() -> None:
            async with AnswerClient(server.url).call(CALL, None) as answer:
                begun.set()
                await body(answer)

        task = asyncio.create_task(ask())
        await until(lambda: server.exchanges and (begun.is_set() or not answered))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await server.exchanges[0].left.wait()


async def test_an_answer_that_nobody_wants_is_left() -> None:
    """Who leaves before the body's end closes the connection, too."""

    async def play(exchange: Exchange) -> None:
        await exchange.say(HEAD + chunk(b"a"))
        await exchange.gone()

    async with raw_server(play) as server:
        async with AnswerClient(server.url).call(CALL, None) as answer:
            assert answer.status == 200
        await server.exchanges[0].left.wait()


# --- failures


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "the engine closed the connection: there is none"),
        (b"HTTP/1.1 200 OK\r\n", "in the middle of its head"),
        (HEAD + chunk(b"a"), "in the middle of its body"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "in the middle of its body"),
        (b"nonsense\r\n\r\n", "does not begin as an HTTP/1 answer"),
        (HEAD + b"nonsense\r\n", "a chunk has no size"),
    ],
)
async def test_an_answer_that_breaks(answer: bytes, words: str) -> None:
    """An engine that breaks off or talks nonsense has died, and the words say how."""
    async with raw_server(answer) as server:
        error = await failure(server.url)
    assert (error.step, error.cause) == (Step.DECODE, Cause.DIED)
    assert words in str(error)


async def test_a_reset_is_no_end() -> None:
    """A connection that is reset has not ended its answer, not even where closing it would have."""

    async def play(exchange: Exchange) -> None:
        await exchange.say(b"HTTP/1.0 200 OK\r\n\r\ndata: 1\n\n")
        exchange.writer.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of no time
        exchange.writer.transport.abort()

    async with raw_server(play) as server:
        assert (await failure(server.url)).cause is Cause.DIED


async def test_an_engine_that_is_not_there() -> None:
    """A connection that is refused, or a host without an address, is told in the system's words."""
    async with raw_server(b"") as server:
        pass
    error = await failure(server.url)
    assert (error.cause, str(error)) == (Cause.DIED, "the connection to the engine failed: Connection refused")
    assert (await failure("http://engine.invalid:1")).cause is Cause.DIED


async def test_a_connection_that_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does not take the connection in time is not waited for."""

    async def hang(*_args: object, **_options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(answers, "CONNECT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", hang)
    error = await failure("http://127.0.0.1:1")
    assert (error.step, error.cause) == (Step.DECODE, Cause.TIMEOUT)


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + chunk(b"a")])
async def test_silence_ends_a_call(said: bytes) -> None:
    """An engine that falls silent, before its head or behind it, has failed after the time it was given."""

    async def play(exchange: Exchange) -> None:
        await exchange.say(said)
        await exchange.gone()

    async with raw_server(play) as server:
        error = await failure(server.url, silence_s=0.05)
        assert (error.step, error.cause) == (Step.DECODE, Cause.TIMEOUT)
        await server.exchanges[0].left.wait()


async def test_an_engine_that_speaks_is_not_silent() -> None:
    """Each word counts as a sign of life, however long all of them take."""

    async def play(exchange: Exchange) -> None:
        await exchange.say(HEAD)
        for _ in range(30):
            await exchange.say(chunk(b":\n\n"))
            await asyncio.sleep(0.02)
        await exchange.say(END)

    async with raw_server(play) as server, AnswerClient(server.url).call(CALL, 0.3) as answer:
        assert b"".join(await body(answer)) == b":\n\n" * 30


async def test_a_slow_client_is_not_the_engines_silence() -> None:
    """While the client is waited for, the engine's time does not run."""
    async with (
        raw_server(HEAD + chunk(b"a") + END) as server,
        AnswerClient(server.url).call(CALL, 0.05) as answer,
    ):
        assert await answer.pour(lambda _piece: False)
        await asyncio.sleep(0.2)
        assert await body(answer) == []


async def test_an_answer_without_a_length_ends_before_the_request_does() -> None:
    """An engine may answer at once, close its half, and read nothing more: its answer is whole."""
    done = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Type: application/json\r\n\r\n{}")
        writer.write_eof()
        await done.wait()
        writer.transport.abort()

    async with asyncio.timeout(10), await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        large = Call("POST", "/", [], bytes(32 * 2**20))
        async with AnswerClient(f"http://{host}:{port}").call(large, None) as answer:
            assert (answer.status, await body(answer)) == (413, [b"{}"])
        done.set()


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        (b"Content-Length: 3\r\n", 3),
        (b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n", None),
        (b"transfer-encoding: chunked\r\ncontent-length: 1\r\n", None),
    ],
)
async def test_a_length_beside_chunks_means_nothing(fields: bytes, length: int | None) -> None:
    """The body is read by its chunks, so the length that contradicts them is not the client's either."""
    text = b"abc" if length else chunk(b"abc") + END
    async with (
        raw_server(b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n" + text) as server,
        AnswerClient(server.url).call(CALL, None) as answer,
    ):
        assert (content_length(answer), await body(answer)) == (length, [b"abc"])
