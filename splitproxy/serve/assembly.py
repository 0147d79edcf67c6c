"""Everything that serves requests, put together from a configuration."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitproxy import config
from splitproxy.books.admission import Admission
from splitproxy.books.ledger import Ledger
from splitproxy.books.sessions import SessionStore
from splitproxy.decide.router import Rules
from splitproxy.engines.adapter import Deadlines, Encode, Engine, PrefillEngine
from splitproxy.engines.llama_server import LlamaServer
from splitproxy.engines.strata_process import StrataProcess
from splitproxy.engines.strata_server import StrataServer
from splitproxy.errors import ConfigError
from splitproxy.fleet.fleet import Fleet
from splitproxy.model import Kind, Policy, RequestRecord, Role
from splitproxy.serve import access, metrics
from splitproxy.serve.drain import Drain
from splitproxy.serve.exchange import Exchange
from splitproxy.serve.service import Settings
from splitproxy.tokens import files
from splitproxy.tokens.codec import Codec
from splitproxy.tokens.tokenize import EngineTokenizer, LocalTokenizer, Tokenizer
from splitproxy.tokens.vocabulary import UnsupportedVocabulary, Vocabulary

log = logging.getLogger(__name__)
access_log = logging.getLogger("splitproxy.access")  # one line for each request

RECENT_REQUESTS = 50
MIB = 2**20


@dataclass(slots=True)
class Proxy:
    """Everything that serves requests, put together."""

    config: config.Config
    store: SessionStore
    ledger: Ledger
    admission: Admission
    fleet: Fleet
    exchange: Exchange
    tokenizer: Tokenizer
    metrics: metrics.Metrics
    recent: deque[RequestRecord]
    stopping: bool = False
    running: set["asyncio.Task[Any]"] = field(default_factory=set)  # requests that an engine answers

    def observe(self, record: RequestRecord) -> None:
        self.fleet.forecast.speeds.learn(record)
        self.metrics.observe(record)
        self.recent.append(record)
        access_log.info("%s", access.line(record))


def make_prefill_engine(table: config.Engine, store: SessionStore, encode: Encode | None = None) -> PrefillEngine:
    """The adapter of one configured engine of role prefill."""
    if table.process is not None:
        return StrataProcess(table.name, table.process, store)
    return make_engine(table, store, encode)


def make_engine(table: config.Engine, store: SessionStore, encode: Encode | None = None) -> Engine:
    """The adapter of one configured engine that is a server. `encode` makes ids for those that tell none."""
    key = os.environ.get(table.api_key_env, "") if table.api_key_env else ""
    match table.kind:
        case Kind.LLAMA_SERVER:
            return LlamaServer(table.name, table.url, key, store)
        case Kind.STRATA:
            return StrataServer(table.name, table.url, key, store, encode)


def make_tokenizer(settings: config.Config) -> Tokenizer:
    """The configured tokenizer; reads its file and takes a second or two. Raises ConfigError for one that is broken."""
    table = settings.tokenizer
    source = table.source
    if source == "engine":
        return EngineTokenizer('tokenizer.source is "engine"')
    if source == "auto":
        source = settings.launch.model if settings.launch is not None else ""
        if not source or not Path(source).is_file():
            return EngineTokenizer("there is no model file to read; tokenizer.source can name one")
    try:
        return LocalTokenizer(_codec(source, files.read(source, table.pattern, table.special_tokens)))
    except UnsupportedVocabulary as reason:
        why = f"{source} is of no use here: {reason}"
        log.warning("token ids are made by the engine: %s", why)
        return EngineTokenizer(why)


def _codec(source: str, vocabulary: Vocabulary) -> Codec:
    """The encoder of a vocabulary. Raises ConfigError for ids or words that no encoder can be made of."""
    try:
        return Codec(vocabulary)
    except UnsupportedVocabulary:
        raise
    except BaseException as error:
        # tiktoken's native part panics on two words with one id, in an exception that has no public name.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            kind = type(error).__name__
            raise ConfigError([f"tokenizer: {source}: its words or ids contradict each other ({kind})"]) from None
        raise


def deadlines(split: config.Split) -> Deadlines:
    return Deadlines(split.prefill_silence_s, split.transfer_timeout_s, split.decode_silence_s)


@asynccontextmanager
async def assembled(
    settings: config.Config, store: SessionStore, made: Tokenizer | None = None
) -> AsyncGenerator[Proxy]:
    """Build the proxy in front of the configured engines and watch them while the context lasts.

    `made` is the configured tokenizer, for callers that have made it already. Raises ConfigError.
    """
    split = settings.split
    limit_bytes = split.max_session_mib * MIB or store.free_bytes() // 2
    tokenizer = made if made is not None else await asyncio.to_thread(make_tokenizer, settings)
    async with AsyncExitStack() as stack:
        stack.callback(tokenizer.close)
        engines: dict[str, tuple[PrefillEngine, Role]] = {}
        for table in settings.engines:
            prefills = table.role is Role.PREFILL
            engine = (make_prefill_engine if prefills else make_engine)(table, store, tokenizer.encode)
            stack.push_async_callback(engine.close)
            engines[table.name] = (engine, table.role)
        spare_bytes = max((engine.spare_bytes for engine, _ in engines.values()), default=0)
        ledger = Ledger(limit_bytes, lambda session_bytes: store.can_hold(session_bytes + spare_bytes))
        admission = Admission(ledger, settings.queue.max)
        probe_tokens = 0 if split.policy is Policy.NEVER else split.probe_tokens
        fleet = Fleet(engines, ledger, admission, deadlines(split), probe_tokens, store.sweep, tokenizer.meet)
        rules = Rules(split.policy, split.floor_tokens, split.force_handover_tokens, split.stall_weight)
        exchange = Exchange(
            Settings(
                rules=rules,
                deadlines=deadlines(split),
                on_prefill_failure=split.on_prefill_failure,
                keep_alive_s=settings.keep_alive_s,
                queue_timeout_s=settings.queue.timeout_s,
                reserve_tokens=split.reserve_tokens,
            ),
            fleet,
            ledger,
            admission,
            tokenizer,
            lambda record: proxy.observe(record),
            Drain(),
        )
        collectors = metrics.Metrics(fleet, ledger, admission, split.floor_tokens)
        proxy = Proxy(
            settings, store, ledger, admission, fleet, exchange, tokenizer, collectors, deque(maxlen=RECENT_REQUESTS)
        )
        await stack.enter_async_context(fleet)
        yield proxy
