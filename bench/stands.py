"""Places to measure at: the proxy in front of two engines, real or fake, and a client of it, in one process.

Each stand starts what it needs and takes it down again. What is asked there is the measurement's business.
"""

import asyncio
import contextlib
import datetime
import itertools
import os
import platform
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from splitproxy.books.sessions import SessionStore, fresh_dir
from splitproxy.config import Config
from splitproxy.decide.speeds import Reading
from splitproxy.measure.bench import KEEP_ALIVE_S, words_per_token
from splitproxy.measure.load import Caller, client_session
from splitproxy.model import Policy, RequestRecord, Role
from splitproxy.run.demo import demo_model
from splitproxy.run.launch import Launcher
from splitproxy.serve.app import listening
from splitproxy.serve.assembly import Proxy, assembled
from tests.fake_engine import FakeEngine
from tests.models import SMALL, tiny_model

FLOOR_TOKENS = 32
REAL, SMOLLM2, EQUAL, SLOW_SAVE = "real", "SmolLM2", "simulated", "slow save"
FAKE_TPS, FAKE_WRITE_TPS = 4000.0, 200.0


@dataclass(slots=True)
class Stand:
    """A pair of engines, the proxy, a client, and numbers of texts that were not sent yet."""

    proxy: Proxy
    caller: Caller
    records: list[RequestRecord]  # of all requests so far, as they ended
    seeds: "itertools.count[int]" = field(default_factory=lambda: itertools.count(random.randrange(10**9)))

    def use(self, policy: Policy) -> None:
        exchange = self.proxy.exchange
        rules = replace(exchange.settings.rules, policy=policy)
        self.proxy.exchange = replace(exchange, settings=replace(exchange.settings, rules=rules))

    def decode_s(self, tokens: int) -> float:
        """What a decode engine that holds nothing takes to read a prompt, by what the proxy has learned."""
        engine = self.proxy.ledger.ready(Role.DECODE)[0]
        return self.proxy.fleet.forecast.speeds.read_s(engine, Reading(0, tokens)) or 1.0

    async def quiet(self) -> None:
        """Wait until nothing runs."""
        while self.proxy.ledger.busy():  # noqa: ASYNC110 - slots are released by nobody who could tell
            await asyncio.sleep(0.01)

    async def clear(self) -> None:
        """Empty every slot of engines that are quiet: which slot a prompt gets, and so who is read first, then depends
        on what is sent alone, and not on what was sent before."""
        ledger = self.proxy.ledger
        for name, member in self.proxy.fleet.members.items():
            slots = ledger.count(name).free
            for slot in range(slots):
                await member.engine.erase(slot, self.proxy.exchange.settings.deadlines)
            ledger.open(name, member.role, slots, ledger.context(name))

    async def noted(self, count: int) -> None:
        """Wait until so many requests have ended: a client has its answer a moment before that."""
        while len(self.records) < count:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.01)
        await self.quiet()


@asynccontextmanager
async def stand(config: Config, store: SessionStore) -> AsyncIterator[Stand]:
    """The proxy between a client and engines that run."""
    async with assembled(config, store) as proxy, listening(proxy) as url, client_session() as http:
        await proxy.fleet.first_verdicts()
        engine = proxy.fleet.engine(proxy.ledger.ready(Role.DECODE)[0])
        records, observe = list[RequestRecord](), proxy.exchange.observe

        def noted(record: RequestRecord) -> None:
            records.append(record)
            observe(record)

        proxy.exchange = replace(proxy.exchange, observe=noted)
        yield Stand(proxy, Caller(url, http, await words_per_token(engine)), records)


@asynccontextmanager
async def real(model: Callable[[], Path]) -> AsyncIterator[Stand]:
    """Two engines of this machine, one core each."""
    with tempfile.TemporaryDirectory() as logs, SessionStore(fresh_dir(), remove_at_close=True) as store:
        fields = {
            "listen": "127.0.0.1:0",
            "keep_alive_s": KEEP_ALIVE_S,
            "split": {"policy": "auto", "min_prompt_tokens": FLOOR_TOKENS, "dir": str(store.folder)},
            "launch": {
                "engine": "embedded", "model": str(model()), "log_dir": logs, "context": 12288, "decode_slots": 8,
            },
        }  # fmt: skip
        config = Config.model_validate(fields)
        launcher = Launcher(config, store.folder)
        try:
            await launcher.start()
            async with stand(config.model_copy(update={"engines": launcher.engines}), store) as found:
                yield found
        finally:
            await launcher.stop()


@asynccontextmanager
async def fake(reader_tps: float, save_s: float) -> AsyncIterator[Stand]:
    """Two fake engines, which take their time without computing."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(SessionStore(fresh_dir(), remove_at_close=True))
        reader = await stack.enter_async_context(FakeEngine(slot_dir=store.folder, context=65536))
        writer = await stack.enter_async_context(FakeEngine(slot_dir=store.folder, slots=8, context=65536))
        reader.knobs.read_tps, writer.knobs.read_tps, writer.knobs.write_tps = reader_tps, FAKE_TPS, FAKE_WRITE_TPS
        reader.knobs.save.delay_s = save_s
        fields = {
            "listen": "127.0.0.1:0",
            "split": {"policy": "auto", "min_prompt_tokens": FLOOR_TOKENS, "dir": str(store.folder)},
            "engines": [
                {"name": "reader", "role": "prefill", "url": reader.url},
                {"name": "writer", "role": "decode", "url": writer.url},
            ],
        }
        async with stand(Config.model_validate(fields), store) as found:
            yield found


STANDS: dict[str, Callable[[], AbstractAsyncContextManager[Stand]]] = {
    REAL: partial(real, lambda: tiny_model("dense", **SMALL)),
    SMOLLM2: partial(real, demo_model),
    EQUAL: partial(fake, FAKE_TPS, 0.01),
    SLOW_SAVE: partial(fake, 2 * FAKE_TPS, 0.35),  # as a disk would
}


def pin(pid: int, cpus: frozenset[int]) -> None:
    """Keep a running process, with all its threads, on these logical processors."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)


def publish(lines: Sequence[str], console: Console, markdown: Path | None) -> None:
    """Show a table as it is, and write it to a file if one is named."""
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if markdown:
        markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


def machine() -> str:
    """What a result is worth nothing without."""
    name = ""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = next((line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line), "")
    return f"{datetime.date.today().isoformat()}, {name or platform.processor()}, {os.cpu_count()} cores"
