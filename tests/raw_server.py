"""A TCP server that plays one HTTP exchange after the other, byte for byte as a test says."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

WAIT_S = 20.0

Play = Callable[["Exchange"], Awaitable[None]]


@dataclass(slots=True)
class Exchange:
    """One connection, its request read."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes
    body: bytes
    left: asyncio.Event = field(default_factory=asyncio.Event)  # the peer has closed its end

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the peer has closed the connection."""
        with suppress(ConnectionError):
            await self.reader.read()
        self.left.set()


@dataclass(slots=True)
class RawServer:
    """Where it listens, and every exchange that has begun. `play` answers; the connection closes behind it."""

    play: Play
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
            body = await reader.readexactly(int(length.partition(b":")[2]))
            exchange = Exchange(reader, writer, head, body)
            self.exchanges.append(exchange)
            await self.play(exchange)
        writer.close()


@asynccontextmanager
async def raw_server(play: Play | bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Serve for as long as the context lasts, which must not be long; `play` may be the bytes of an answer."""

    async def say(exchange: Exchange) -> None:
        assert isinstance(play, bytes)
        await exchange.say(play)

    server = RawServer(say if isinstance(play, bytes) else play)
    listener = await asyncio.start_server(server._serve, "127.0.0.1", 0, ssl=tls)
    async with listener, asyncio.timeout(WAIT_S):
        host, port = listener.sockets[0].getsockname()
        server.url = f"{'https' if tls else 'http'}://{host}:{port}"
        yield server
