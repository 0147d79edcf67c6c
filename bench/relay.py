"""What passing an answer on costs: CPU per event and added latency of splitproxy, nginx and a 20-line aiohttp proxy.

    python -m bench.relay [--streams 1 16 64 256] [--seconds 5] [--rounds 3] [--json FILE]

One paced upstream writes events of 250 bytes, each with the time it left; one client notes when each arrives. Both, and
each proxy, are processes of their own on this machine, and the targets take turns at each number of streams, so that
they meet the same weather. splitproxy runs twice, with uvloop and on asyncio's own loop. CPU is what the kernel counted
for the proxy's threads. nginx (Debian's package is enough) runs with one worker and without buffering.
"""

import argparse
import asyncio
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
from aiohttp import web
from rich.console import Console
from rich.table import Table

EVENT_BYTES = 250
EVENTS_PER_S = 20.0  # of each stream
SETTLING_S = 3.0  # until every stream has begun
CONTEXT = 2**24
READY_S = 20.0
PATH = "/v1/chat/completions"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_STAMP = re.compile(rb'"t":(\d+)')
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://127.0.0.1:{upstream}; proxy_buffering off; proxy_http_version 1.1; proxy_read_timeout 3600s;
    }}
  }}
}}
"""
WITHOUT_UVLOOP = "import sys; sys.modules['uvloop'] = None; from splitproxy.cli import main; sys.exit(main())"
PROGRAM = ["-m", "splitproxy"]
SPLITPROXY = """
listen = "127.0.0.1:{port}"
[queue]
max = 4096
[[engines]]
name = "upstream"
role = "decode"
url = "http://127.0.0.1:{upstream}"
"""


# -- the upstream ------------------------------------------------------------------------------------------------------


class Upstream(asyncio.Protocol):
    """As much of a llama-server as a proxy asks for, and streams that write an event every now and then."""

    slots = 512

    def __init__(self) -> None:
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        if not found or len(body) < int(length[1] if length else 0):
            return
        self._data = b""
        path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
        if path == PATH:
            self.transport.write(HEAD)
            self.answer(orjson.loads(body))
        else:
            answer = orjson.dumps(control(path, self.slots))
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)

    def answer(self, asked: dict[str, Any]) -> None:
        """Write the stream that was asked for; its head is written already."""
        loop, events = asyncio.get_running_loop(), int(asked["max_tokens"])
        due = loop.time() + random.random() / EVENTS_PER_S
        self._timer = loop.call_at(due, self._event, events, due)

    def _event(self, left: int, due: float) -> None:
        if not left:
            self.transport.write(b"0\r\n\r\n")
            return
        event = b'data: {"choices":[{"delta":{"content":"word"},"index":0}],"t":%d' % time.monotonic_ns()
        event += b',"pad":"' + b"x" * (EVENT_BYTES - len(event) - 12) + b'"}\n\n'
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        due += 1 / EVENTS_PER_S
        self._timer = asyncio.get_running_loop().call_at(due, self._event, left - 1, due)


def control(path: str, slots: int) -> Any:
    """The answer to a control call."""
    answers: dict[str, Any] = {
        "/health": {"status": "ok"},
        "/props": {"default_generation_settings": {"n_ctx": CONTEXT}, "total_slots": slots, "chat_template": "x"},
        "/v1/models": {"data": [{"meta": {"n_vocab": 1}}]},
        "/slots": [{"id": number, "is_processing": False} for number in range(slots)],
        "/apply-template": {"prompt": "hi"},
        "/tokenize": {"tokens": [random.randrange(100) for _ in range(9)]},
    }
    return answers.get(path, {})


async def serve_upstream(port: int, protocol: type[Upstream] = Upstream) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# -- the plain proxy ---------------------------------------------------------------------------------------------------


async def serve_aiohttp(port: int, upstream: int) -> None:
    """A proxy as one would write it in an afternoon."""
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))

    async def relay(request: web.Request) -> web.StreamResponse:
        url, body = f"http://127.0.0.1:{upstream}{request.path_qs}", await request.read()
        async with http.request(request.method, url, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


# -- the client --------------------------------------------------------------------------------------------------------


class Reader(asyncio.Protocol):
    """One stream's client."""

    def __init__(self, events: int, latencies: list[float], more: Mapping[str, Any] | None = None) -> None:
        asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": events, **(more or {})}
        body = orjson.dumps(asked)
        head = f"POST {PATH} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._latencies = latencies
        self._tail = b""
        self._asked_ns = 0
        self.first_ms = 0.0  # from the request to the first byte of its answer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._asked_ns = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.first_ms = self.first_ms or (now - self._asked_ns) / 1e6
        for stamp in _STAMP.findall(data):
            self._latencies.append((now - int(stamp)) / 1e6)
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n":
            self._transport.close()
            self._end()

    def connection_lost(self, _error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def read_streams(target: "Target", streams: int, seconds: float) -> tuple[float, list[float], list[float]]:
    """CPU microseconds of the target for an event, each event's latency in milliseconds while all streams run, and how
    long each stream's first byte took, in milliseconds."""
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    readers = []
    events = round((seconds + SETTLING_S + 1) * EVENTS_PER_S)
    for _ in range(streams):
        _, reader = await loop.create_connection(partial(Reader, events, latencies), "127.0.0.1", target.port)
        readers.append(reader)
    await asyncio.sleep(SETTLING_S)
    latencies.clear()
    before = cpu_ns(target.pids)
    await asyncio.sleep(seconds)
    cpu_us, measured = (cpu_ns(target.pids) - before) / 1000 / len(latencies), latencies[:]
    await asyncio.gather(*(reader.done for reader in readers))
    return cpu_us, measured, [reader.first_ms for reader in readers]


# -- the measurement ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Target:
    """Something to send requests to; `pids` are its processes, none for the upstream itself."""

    name: str
    port: int
    pids: list[int]


@dataclass(slots=True)
class Cell:
    """One target at one number of streams."""

    target: str
    streams: int
    events: int = 0
    cpu_us: list[float] = field(default_factory=list)  # for an event; one figure a round, as in the next two
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)  # the median of all streams

    def add(self, cpu_us: float, latencies_ms: list[float], firsts_ms: list[float]) -> None:
        cuts = statistics.quantiles(latencies_ms, n=100)
        self.events += len(latencies_ms)
        self.cpu_us.append(cpu_us)
        self.p50_ms.append(cuts[49])
        self.p99_ms.append(cuts[98])
        self.first_ms.append(statistics.median(firsts_ms))

    def figures(self) -> dict[str, Any]:
        """Of each figure the lowest of all rounds: whatever else the machine does only adds."""
        return {
            "target": self.target,
            "streams": self.streams,
            "events": self.events,
            "cpu_us": min(self.cpu_us),
            "p50_ms": min(self.p50_ms),
            "p99_ms": min(self.p99_ms),
            "first_ms": min(self.first_ms),
        }


def cpu_ns(pids: list[int]) -> int:
    """What the threads of some processes have computed so far."""
    files = [path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(path.read_text().split()[0]) for path in files)


def measure(targets: list[Target], streams: int, seconds: float, rounds: int) -> Iterator[Cell]:
    cells = {target.name: Cell(target.name, streams) for target in targets}
    for _ in range(rounds):
        for target in targets:
            cells[target.name].add(*asyncio.run(read_streams(target, streams, seconds)))
    yield from cells.values()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def started(command: list[str], port: int, ready: str) -> Iterator[int]:
    """A process that serves on a port; its id."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + READY_S
        while not _answers(f"http://127.0.0.1:{port}{ready}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:  # noqa: S310 - always this machine
            return bool(answer.status == 200)
    except OSError:
        return False


def start_splitproxy(stack: ExitStack, folder: Path, name: str, upstream: int, program: list[str]) -> tuple[int, int]:
    """Start it in front of an upstream; its process and its port."""
    port, file = free_port(), folder / f"{name}.toml"
    file.write_text(SPLITPROXY.format(port=port, upstream=upstream))
    command = [sys.executable, *program, "serve", "-c", str(file), "--set", f"split.dir={folder / name}"]
    return stack.enter_context(started(command, port, "/health")), port


def start_targets(stack: ExitStack, folder: Path) -> list[Target]:
    me = [sys.executable, "-m", "bench.relay", "--serve"]
    upstream = free_port()
    stack.enter_context(started([*me, "upstream", str(upstream)], upstream, "/health"))
    targets = [Target("direct", upstream, [])]

    def add(name: str, command: list[str], port: int) -> None:
        pid = stack.enter_context(started(command, port, "/health"))
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        targets.append(Target(name, port, [pid, *map(int, children)]))

    if (nginx := shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")) is not None:
        port, file = free_port(), folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, port=port, upstream=upstream))
        add("nginx", [nginx, "-c", str(file)], port)
    port = free_port()
    add("aiohttp", [*me, "aiohttp", str(port), str(upstream)], port)
    for name, program in (("splitproxy", PROGRAM), ("on asyncio", ["-c", WITHOUT_UVLOOP])):
        pid, port = start_splitproxy(stack, folder, name, upstream, program)
        targets.append(Target(name, port, [pid]))
    return targets


def show(console: Console, cells: list[dict[str, Any]]) -> None:
    table = Table(title=f"relay of {EVENT_BYTES}-byte events, {EVENTS_PER_S:.0f} a second and stream")
    for name in ("streams", "target", "CPU per event", "of nginx's", "p50", "p99", "first byte"):
        table.add_column(name, justify="left" if name == "target" else "right")
    nginx = {cell["streams"]: cell["cpu_us"] for cell in cells if cell["target"] == "nginx"}
    for cell in cells:
        times = f"{cell['cpu_us'] / nginx[cell['streams']]:.2f}" if cell["cpu_us"] and nginx else ""
        cpu = f"{cell['cpu_us']:.1f} us" if cell["cpu_us"] else ""
        row = (str(cell["streams"]), cell["target"], cpu, times)
        table.add_row(*row, f"{cell['p50_ms']:.2f} ms", f"{cell['p99_ms']:.2f} ms", f"{cell['first_ms']:.2f} ms")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3, help="of each figure the lowest of all rounds counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        kind, *ports = options.serve
        port, *upstream = map(int, ports)
        asyncio.run(serve_upstream(port) if kind == "upstream" else serve_aiohttp(port, *upstream))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="splitproxy-bench-", dir="/dev/shm")))
        folder.chmod(0o700)
        targets = start_targets(stack, folder)
        cells = [
            cell.figures()
            for streams in options.streams
            for cell in measure(targets, streams, options.seconds, options.rounds)
        ]
    show(Console(width=100), cells)
    if options.json:
        options.json.write_bytes(orjson.dumps(cells, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
