"""What streams cost that do not move: the memory of thousands that wait, and of one whose client reads hardly anything.

    python -m bench.idle [--streams 2000] [--megabytes 100] [--seconds 60] [--json FILE]

The first figure is the proxy's resident memory with so many streams open that have had one event and wait for the next.
The second: a client reads one byte a second from an answer of so many megabytes, which the engine sends as fast as it
is read; meanwhile another client reads a paced stream beside it, and how late its events are is what it felt of that.
"""

import argparse
import asyncio
import resource
import socket
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from bench.relay import (
    EVENTS_PER_S,
    PATH,
    PROGRAM,
    Reader,
    Target,
    Upstream,
    free_port,
    serve_upstream,
    start_splitproxy,
    started,
)  # fmt: skip

BLOCK = b'data: {"choices":[{"delta":{"content":"' + b"x" * 16_000 + b'"},"index":0}]}\n\n'
EVENT = b'data: {"choices":[{"delta":{"content":"word"},"index":0}]}\n\n'
LOOKS_PER_S = 5
OPENED_AT_ONCE = 50


class Engine(Upstream):
    """Streams that say one word and wait, that say nothing, that come as fast as they are read, or that are paced."""

    slots = 4096

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self._paused = False

    def answer(self, asked: dict[str, Any]) -> None:
        match asked["kind"]:
            case "idle":
                self.write(EVENT)
            case "silent":
                pass
            case "flood":
                self._left = asked["bytes"]
                self._flood()
            case _:
                super().answer(asked)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flood()

    def _flood(self) -> None:
        while self._left > 0 and not self._paused:
            self._left -= len(BLOCK)
            self.write(BLOCK)
            if self._left <= 0:
                self.transport.write(b"0\r\n\r\n")

    def write(self, event: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))


def request(**asked: Any) -> bytes:
    body = orjson.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 64, **asked})
    return f"POST {PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def resident_bytes(pid: int) -> int:
    """The memory that a process has in use."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def idle_streams(proxy: Target, count: int) -> dict[str, Any]:
    """Memory before, and with so many streams open."""
    before = resident_bytes(proxy.pids[0])
    gate = asyncio.Semaphore(OPENED_AT_ONCE)

    async def open_one() -> asyncio.StreamWriter:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(request(kind="idle"))
            await reader.readuntil(b"}\n\n")
            return writer

    writers = await asyncio.gather(*(open_one() for _ in range(count)))
    found = {"streams": count, "before_bytes": before, "open_bytes": resident_bytes(proxy.pids[0])}
    for writer in writers:
        writer.close()
    return found


async def slow_client(proxy: Target, flood_bytes: int, seconds: int) -> dict[str, Any]:
    """Memory while a client reads a byte a second, and how late the events of a stream beside it are."""
    loop, latencies_ms = asyncio.get_running_loop(), list[float]()
    before = highest = resident_bytes(proxy.pids[0])
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", proxy.port))
        await loop.sock_sendall(slow, request(kind="flood", bytes=flood_bytes))
        make = partial(Reader, round(seconds * EVENTS_PER_S), latencies_ms, {"kind": "paced"})
        _, beside = await loop.create_connection(make, "127.0.0.1", proxy.port)
        for look in range(seconds * LOOKS_PER_S):
            if look % LOOKS_PER_S == 0:
                await loop.sock_recv(slow, 1)
            highest = max(highest, resident_bytes(proxy.pids[0]))
            await asyncio.sleep(1 / LOOKS_PER_S)
        await beside.done
    return {
        "bytes": flood_bytes,
        "seconds": seconds,
        "before_bytes": before,
        "highest_bytes": highest,
        "beside_p50_ms": statistics.median(latencies_ms),
        "beside_p99_ms": statistics.quantiles(latencies_ms, n=100)[98],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.serve:
        asyncio.run(serve_upstream(options.serve, Engine))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitproxy-bench-", dir="/dev/shm")))
        folder.chmod(0o700)
        upstream = free_port()
        me = [sys.executable, "-m", "bench.idle", "--serve", str(upstream)]
        stack.enter_context(started(me, upstream, "/health"))
        pid, port = start_splitproxy(stack, folder, "splitproxy", upstream, PROGRAM)
        proxy = Target("splitproxy", port, [pid])
        slow = asyncio.run(slow_client(proxy, options.megabytes * 10**6, options.seconds))
        idle = asyncio.run(idle_streams(proxy, options.streams))
    mb = 1e-6
    console = Console(width=120)
    console.print(
        f"a byte a second of {options.megabytes} MB: {slow['before_bytes'] * mb:.0f} MB before, at most "
        f"{slow['highest_bytes'] * mb:.0f} MB; a stream beside it was late by {slow['beside_p50_ms']:.2f} ms "
        f"(median), {slow['beside_p99_ms']:.2f} ms (p99)"
    )
    console.print(
        f"{idle['streams']} idle streams: {idle['open_bytes'] * mb:.0f} MB, {idle['before_bytes'] * mb:.0f} MB before"
    )
    if options.json:
        options.json.write_bytes(orjson.dumps({"slow": slow, "idle": idle}, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
