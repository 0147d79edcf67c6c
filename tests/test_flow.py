"""How an answer flows: its head does not wait, and a client that reads slowly is waited for by the engine alone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from bench.idle import EVENT, Engine, request
from splitproxy.books.sessions import SessionStore
from splitproxy.engines.http1 import AnswerReader
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import assembled
from tests.harness import TEST_S, configured, until

FLOOD_BYTES = 64_000_000  # several times what all buffers of two connections hold


class Flood(Engine):
    """Counts what it could write."""

    def __init__(self, written: list[int]) -> None:
        super().__init__()
        self._written = written

    def write(self, event: bytes) -> None:
        super().write(event)
        self._written.append(len(event))


@asynccontextmanager
async def flooded(folder: Path) -> AsyncIterator[tuple[str, int, list[int]]]:
    """A proxy in front of an engine that writes as fast as it is read: its address, and what the engine has written."""
    written: list[int] = []
    loop = asyncio.get_running_loop()
    engine = await loop.create_server(partial(Flood, written), "127.0.0.1", 0)
    port = engine.sockets[0].getsockname()[1]
    with SessionStore(folder) as store:
        config = configured(None, f"http://127.0.0.1:{port}", folder, {"keep_alive_s": 60})
        async with asyncio.timeout(TEST_S), engine, assembled(config, store) as proxy, listening(proxy) as url:
            await until(lambda: proxy.ledger.ready(proxy.fleet.members["writer"].role))
            host, _, number = url.removeprefix("http://").rpartition(":")
            yield host, int(number), written


async def settled(written: list[int]) -> int:
    """How much was written once nothing more can be."""
    before = -1
    while before != len(written):
        before = len(written)
        await asyncio.sleep(0.1)
    return sum(written)


async def test_the_head_does_not_wait_for_the_first_piece(session_dir: Path) -> None:
    """A client knows the engine's status and headers as soon as they are there."""
    async with flooded(session_dir) as (host, port, written):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request(kind="silent"))
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"X-Splitproxy-Route: local\r\n" in head
    assert not written


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_does_not_read_stops_the_engine(session_dir: Path, stream: bool) -> None:
    """What a client does not take stays with the engine, a stream beside it runs on, and later all of it arrives."""
    loop = asyncio.get_running_loop()
    async with flooded(session_dir) as (host, port, written):
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            await loop.sock_connect(slow, (host, port))
            await loop.sock_sendall(slow, request(kind="flood", bytes=FLOOD_BYTES, stream=stream))
            await until(lambda: written)
            assert await settled(written) < FLOOD_BYTES / 2

            reader, beside = await asyncio.open_connection(host, port)
            beside.write(request(kind="idle"))
            assert (await reader.readuntil(b"}\n\n")).endswith(EVENT)
            beside.close()

            answer, received = AnswerReader("POST"), 0
            while not answer.complete:
                data = await loop.sock_recv(slow, 2**20)
                assert data
                received += len(answer.feed(data))
        assert received == sum(size for size in written if size > len(EVENT)) >= FLOOD_BYTES
