"""What all requests share: books, queue, engines, the configured rules, and the decision about a prompt."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from splitproxy.api.wire import to_engine
from splitproxy.books.admission import Admission
from splitproxy.books.ledger import Ledger
from splitproxy.decide.router import Demand, Rules, decide
from splitproxy.engines.adapter import Call, Deadlines
from splitproxy.errors import Cause, EngineError, Fault, RequestError, Step
from splitproxy.fleet.fleet import Fleet
from splitproxy.model import Ask, Role, Route, Tokens
from splitproxy.serve import access
from splitproxy.serve.trace import Trace
from splitproxy.tokens.tokenize import Tokenizer, surely_shorter

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class Settings:
    """The configured part of every exchange."""

    rules: Rules
    deadlines: Deadlines
    on_prefill_failure: Literal["local", "reject"]
    keep_alive_s: float
    queue_timeout_s: float
    reserve_tokens: int


@dataclass(frozen=True, slots=True)
class Incoming:
    """A client's request as it came."""

    request_id: str
    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    client: str  # who sends it, for the queue's fairness: a digest of a key, or an address
    body: bytes = field(repr=False)

    def call(self, body: bytes | None, *, streams: bool = False) -> Call:
        """The request as an engine gets it."""
        return Call(self.method, self.target, to_engine(self.headers), body, streams)


@dataclass(frozen=True, slots=True)
class Service:
    """What a request is served with. It holds no state of its own."""

    settings: Settings
    fleet: Fleet
    ledger: Ledger
    admission: Admission
    tokenizer: Tokenizer

    async def explain(self, ask: Ask) -> dict[str, Any]:
        """What would be decided about a request now, and by which figures. Raises RequestError."""
        trace = Trace("", ask.api, ask.stream)
        route, tokens = await self.route(ask, None, trace)
        source = "local" if self.tokenizer.verdict(route.decode_engine).local else "engine"
        reads = route.prompt_tokens if route.prefill_engine is None else 0
        order = self.fleet.order(route.decode_engine, reads or 0)
        slot = None if tokens is None else self.ledger.place(route.decode_engine, tokens, order)
        return access.decision(route) | {"tokenizer": source, "decode_slot": slot}

    async def route(
        self, ask: Ask, tokens: Tokens | None, trace: Trace, avoid: Collection[str] = ()
    ) -> tuple[Route, Tokens | None]:
        """Tokenize where it can matter and was not done before, and decide; prefill engines in `avoid` do not count."""
        rules = self.settings.rules
        splittable = ask.not_splittable is None
        short = splittable and surely_shorter(ask, rules.least, self.fleet.template_bytes)
        if tokens is None and splittable and not (short and self.ledger.indifferent()):
            tokens = await self.tokenize(ask, trace)
        self.decode_engines()
        decode, prefill = self.fleet.views(tokens, avoid)
        count = None if tokens is None else len(tokens)
        return decide(Demand(count, splittable, short), decode, prefill, rules), tokens

    async def tokenize(self, ask: Ask, trace: Trace) -> Tokens | None:
        """The prompt's ids, if they can be had."""
        trace.step = Step.TOKENIZE.value
        for name in self.decode_engines():
            try:
                with trace.tokenizing():
                    return await self.tokenizer.tokens(ask, self.fleet.engine(name))
            except EngineError as error:
                if error.cause is Cause.REFUSED:
                    return None  # a refusal is about this request: the engine will tell the client itself
                log.warning("cannot tokenize with %s: %s", name, error)
                self.fleet.health.suspect(name)
        return None

    def decode_engines(self) -> list[str]:
        """The decode engines that are ready, at least one. Raises RequestError."""
        if not (ready := self.ledger.ready(Role.DECODE)):
            raise RequestError(Fault.NO_DECODE_ENGINE, "no decode engine is ready", retry_after_s=RETRY_AFTER_S)
        return ready

    def queue_deadline(self, waited_s: float) -> float:
        """When a request that has waited so long already has waited long enough, on the loop's clock."""
        return asyncio.get_running_loop().time() + self.settings.queue_timeout_s - waited_s
