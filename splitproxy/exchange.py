"""The life of one request: ask, tokens, route, leases, handover or local reading, relayed answer, record.

It speaks to engines through adapters and to the client through a Sink, and knows neither's HTTP library.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from splitproxy.adapter import Answer, Call, Deadlines
from splitproxy.admission import Admission
from splitproxy.client import Client, ClientLeft, Sink
from splitproxy.errors import Cause, EngineError, Fault, RequestError, Step
from splitproxy.figures import FigureReader, whole_request
from splitproxy.fleet import Fleet
from splitproxy.handover import Handover, Stage
from splitproxy.ledger import NOTHING, Holding, Lease, Ledger, Reservation
from splitproxy.model import (
    Api,
    Ask,
    DecodeView,
    EngineState,
    Figures,
    HandoverFigures,
    Outcome,
    PrefillView,
    RequestRecord,
    Role,
    Route,
    RouteKind,
    Tokens,
)
from splitproxy.router import Demand, Rules, decide
from splitproxy.sse import MEDIA_TYPE
from splitproxy.tokenize import Tokenizer, surely_shorter
from splitproxy.wire import pin, to_client, to_engine

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
BYTES_PER_TOKEN_GUESS = 3  # of a body that was not tokenized, for the pool's books


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
    body: bytes = field(repr=False)


@dataclass(slots=True)
class Trace:
    """What is noted while a request runs; `record` freezes it."""

    request_id: str
    api: Api
    stream: bool
    start: float = field(default_factory=time.perf_counter)
    step: str = "accept"
    status: int = 0
    outcome: Outcome = Outcome.OK
    route: Route | None = None
    engine: str = ""
    queue_ms: float = 0.0
    tokenize_ms: float = 0.0
    first_byte: float | None = None
    decode_start: float | None = None
    last_chunk: float = 0.0
    figures: Figures | None = None
    handover: Handover | None = None
    reasoned: bool = False
    answered: bool = False  # the engine's answer has ended; whatever comes after cannot spoil it
    gaps_ms: list[float] = field(default_factory=list)

    def chunk(self) -> None:
        """A piece of the answer is on its way."""
        now = time.perf_counter()
        if self.first_byte is None:
            self.first_byte = now
        else:
            self.gaps_ms.append(1000 * (now - self.last_chunk))
        self.last_chunk = now

    def record(self) -> RequestRecord:
        now = time.perf_counter()
        first_ms = None if self.first_byte is None else 1000 * (self.first_byte - self.start)
        return RequestRecord(
            request_id=self.request_id,
            api=self.api,
            stream=self.stream,
            outcome=self.outcome,
            status=self.status,
            step=self.step,
            route=self.route,
            engine=self.engine,
            queue_ms=self.queue_ms,
            tokenize_ms=self.tokenize_ms,
            first_byte_ms=first_ms,
            total_ms=1000 * (now - self.start),
            decode_ms=None if self.decode_start is None else 1000 * (now - self.decode_start),
            figures=self.figures,
            handover=None if self.handover is None else self.handover.figures(),
            effective=_effective(self.handover),
            failure=None if self.handover is None else self.handover.failure,
            gaps_ms=tuple(self.gaps_ms),
        )


def _effective(handover: Handover | None) -> bool | None:
    stage = None if handover is None else handover.stage
    return {Stage.PROVEN: True, Stage.INEFFECTIVE: False}.get(stage) if stage is not None else None


class Exchange:
    """Serves requests, one `run` each; holds no state of its own."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        ledger: Ledger,
        admission: Admission,
        tokenizer: Tokenizer,
        observe: Callable[[RequestRecord], None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._ledger = ledger
        self._admission = admission
        self._tokenizer = tokenizer
        self._observe = observe

    async def run(self, incoming: Incoming, ask: Ask, sink: Sink) -> None:
        """Answer a generating request, whatever happens. To be cancelled when the client leaves."""
        trace = Trace(incoming.request_id, ask.api, ask.stream)
        keep_alive_s = self._settings.keep_alive_s
        client = Client(sink, ask.api, stream=ask.stream, keep_alive_s=keep_alive_s, request_id=incoming.request_id)
        try:
            async with client:
                await self._serve(incoming, ask, client, trace)
        except RequestError as error:
            await self._refuse(client, trace, error)
        except EngineError as error:
            log.warning("request %s: decode engine %s failed: %s", trace.request_id, trace.engine, error)
            self._fleet.suspect(trace.engine)
            await self._refuse(client, trace, _decode_fault(error))
        except (asyncio.CancelledError, ClientLeft):
            if not trace.answered:
                trace.outcome = Outcome.CANCELLED
            raise
        finally:
            self._observe(trace.record())

    async def _refuse(self, client: Client, trace: Trace, error: RequestError) -> None:
        trace.outcome, trace.status = Outcome.ERROR, error.status
        try:
            await client.fail(error)
        except ClientLeft:
            trace.outcome = Outcome.CANCELLED

    async def _serve(self, incoming: Incoming, ask: Ask, client: Client, trace: Trace) -> None:
        deadline = asyncio.get_running_loop().time() + self._settings.queue_timeout_s
        tokens, surely_short = await self._tokens(ask, trace)
        trace.route = self._decide(ask, tokens, surely_short)
        if trace.route.kind is RouteKind.LOCAL or tokens is None:
            await self._answer(incoming, ask, tokens, client, trace, deadline)
            return
        source = self._fleet.engine(trace.route.prefill_engine or "")
        pair = self._fleet.pairs[source.name, trace.route.decode_engine]
        with self._ledger.reserve(_session_bytes(pair.bytes_per_token, tokens)) as room:
            async with Handover(tokens, source, self._settings.deadlines) as handover:
                trace.handover = handover
                await self._read_ahead(handover, trace, deadline)
                self._insist(handover)
                await self._answer(incoming, ask, tokens, client, trace, deadline, room)

    def _insist(self, handover: Handover) -> None:
        """Where the configuration wants no local reading instead, a failed handover is an error."""
        if handover.failure is not None and self._settings.on_prefill_failure == "reject":
            message = f"the prefill engine failed ({handover.failure.step}: {handover.failure.cause})"
            raise RequestError(Fault.PREFILL_FAILED, message, retry_after_s=RETRY_AFTER_S)

    async def forward(self, incoming: Incoming, sink: Sink, *, api: Api, takes_slots: bool) -> None:
        """Pass any other request on to a decode engine, which it gets to itself if it may take slots."""
        deadline = asyncio.get_running_loop().time() + self._settings.queue_timeout_s
        client = Client(sink, api, stream=False, keep_alive_s=0, request_id=incoming.request_id)
        name, lease, finished = "", None, False
        try:
            name = self._decode_engines()[0]
            if takes_slots:
                lease = await self._admission.acquire(Role.DECODE, None, self._ledger.claim_engine, deadline)
                name = lease.engine
            call = Call(incoming.method, incoming.target, to_engine(incoming.headers), incoming.body or None)
            async with self._fleet.engine(name).call(call, self._settings.deadlines) as answer:
                headers = to_client(answer.headers)
                await client.begin(answer.status, headers, length=_length(answer), one_piece=False)
                async for chunk in answer.chunks():
                    await client.relay(chunk)
                await client.finish()
            finished = True
        except RequestError as error:
            await client.fail(error)
        except EngineError as error:
            log.warning("request %s: engine %s failed: %s", incoming.request_id, name, error)
            self._fleet.suspect(name)
            await client.fail(_decode_fault(error))
        finally:
            if lease is not None:
                self._end(lease, quiet=finished)

    # -- before the answer ---------------------------------------------------------------------------------------------

    async def _tokens(self, ask: Ask, trace: Trace) -> tuple[Tokens | None, bool]:
        """The prompt's ids, where they are needed and can be had, and whether it is short without them."""
        floor = self._settings.rules.floor
        if ask.not_splittable is not None:
            return None, False
        template_bytes = self._fleet.template_bytes
        if self._ledger.indifferent() and surely_shorter(ask, floor, template_bytes):
            return None, True
        return await self._tokenize(ask, trace), False

    async def _tokenize(self, ask: Ask, trace: Trace) -> Tokens | None:
        trace.step = Step.TOKENIZE.value
        start = time.perf_counter()
        try:
            return await self._tokenizer.tokens(ask, self._fleet.engine(self._decode_engines()[0]))
        except EngineError as error:
            if error.cause is not Cause.REFUSED:
                log.warning("cannot tokenize: %s", error)
            return None
        finally:
            trace.tokenize_ms = 1000 * (time.perf_counter() - start)

    def _decode_engines(self) -> list[str]:
        if not (ready := self._ledger.ready(Role.DECODE)):
            raise RequestError(Fault.NO_DECODE_ENGINE, "no decode engine is ready", retry_after_s=RETRY_AFTER_S)
        return ready

    def _decide(self, ask: Ask, tokens: Tokens | None, surely_short: bool) -> Route:
        ready = self._decode_engines()
        decode = [
            DecodeView(
                engine=name,
                held_tokens=0 if tokens is None else self._ledger.held(name, tokens),
                context=self._ledger.context(name),
                free_slots=self._ledger.count(name).free,
            )
            for name in ready
        ]
        prefill = [
            PrefillView(
                engine=pair.source.engine.name,
                decode_engine=pair.target.engine.name,
                up=pair.source.state is EngineState.READY,
                pair=pair.state,
                context=self._ledger.context(pair.source.engine.name),
                waiting=self._admission.waiting_for(pair.source.engine.name)
                + self._ledger.count(pair.source.engine.name).busy,
                room=self._ledger.has_room(_session_bytes(pair.bytes_per_token, tokens)),
            )
            for pair in self._fleet.pairs.values()
            if pair.target.engine.name in ready
        ]
        demand = Demand(
            tokens=None if tokens is None else len(tokens),
            splittable=ask.not_splittable is None,
            surely_short=surely_short,
        )
        return decide(demand, decode, prefill, self._settings.rules)

    async def _read_ahead(self, handover: Handover, trace: Trace, deadline: float) -> None:
        """Have the prefill engine read the prompt and save its session. Failure is noted in the handover."""
        route = trace.route
        assert route is not None
        name = handover.source.name
        with _waiting(trace):
            try:
                lease = await self._admission.acquire(
                    Role.PREFILL,
                    name,
                    lambda engine: self._ledger.claim(engine, NOTHING, len(handover.prompt), 0),
                    deadline,
                )
            except RequestError as error:
                if error.fault is not Fault.NO_DECODE_ENGINE:
                    raise
                handover.fail(EngineError(Step.PREFILL, Cause.DIED, "the prefill engine went while it was waited for"))
                return
        taken = False
        try:
            await self._fleet.make_room(lease)
            assert lease.slot is not None

            def progress(step: Step, _done: int, _total: int) -> None:
                trace.step = step.value

            trace.step = Step.PREFILL.value
            taken = await handover.take(lease.slot, progress)
        finally:
            self._end(lease, quiet=taken or _engine_is_idle(handover))
        if handover.failure is not None:
            self._fleet.suspect(name)

    def _end(self, lease: Lease, *, quiet: bool, holding: Holding | None = None) -> None:
        if quiet:
            self._admission.release(lease, holding)
        else:
            self._fleet.release_when_quiet(lease, holding)

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _answer(
        self,
        incoming: Incoming,
        ask: Ask,
        tokens: Tokens | None,
        client: Client,
        trace: Trace,
        deadline: float,
        room: Reservation | None = None,
    ) -> None:
        """Claim a decode slot, restore a waiting session into it, relay the answer, and settle the books."""
        route = trace.route
        assert route is not None
        while True:
            lease = await self._decode_lease(ask, tokens, route, trace, deadline)
            trace.engine = lease.engine
            if await self._restore(lease, trace):
                break
        if room is not None:
            room.release()  # the session file is gone
        assert lease.slot is not None
        try:
            body = pin(ask, lease.slot)
            call = Call(incoming.method, incoming.target, to_engine(incoming.headers), body, ask.stream)
            trace.step = Step.DECODE.value
            trace.decode_start = time.perf_counter()
            async with self._fleet.engine(lease.engine).call(call, self._settings.deadlines) as answer:
                await self._relay(answer, client, trace)
            if tokens is None and ask.not_splittable is None and trace.figures is not None:
                tokens = await self._tokenize(ask, trace)  # the client has its answer; the next turn wants to know
        finally:
            self._judge(lease, trace)
            self._end(lease, quiet=trace.answered, holding=_holding(ask, tokens, lease, trace))

    async def _decode_lease(
        self, ask: Ask, tokens: Tokens | None, route: Route, trace: Trace, deadline: float
    ) -> Lease:
        known = tokens if tokens is not None else NOTHING
        count = len(tokens) if tokens is not None else len(ask.body) // BYTES_PER_TOKEN_GUESS
        growth = self._settings.reserve_tokens if ask.max_tokens is None else ask.max_tokens
        with _waiting(trace):
            return await self._admission.acquire(
                Role.DECODE,
                route.decode_engine,
                lambda engine: self._ledger.claim(engine, known, count, growth),
                deadline,
            )

    async def _restore(self, lease: Lease, trace: Trace) -> bool:
        """Prepare the slot. False when the slot is not fit for use and another must be claimed."""
        ready = False
        usable = True
        try:
            await self._fleet.make_room(lease)
            handover = trace.handover
            if handover is not None and handover.stage is Stage.TICKETED:
                assert lease.slot is not None
                trace.step = Step.RESTORE.value
                if not await handover.redeem(self._fleet.engine(lease.engine), lease.slot):
                    usable = _engine_is_idle(handover)
                    self._fleet.suspect(lease.engine)
            ready = usable
            return usable
        finally:
            if not ready:
                self._fleet.release_when_quiet(lease)

    async def _relay(self, answer: Answer, client: Client, trace: Trace) -> None:
        """Pass the answer on as it comes, and read its figures on the way."""
        handover = trace.handover
        cost = handover.figures() if handover is not None and handover.stage is Stage.RESTORED else None
        reader = FigureReader(None if cost is None else whole_request(cost))
        one_piece = cost is not None and answer.media_type != MEDIA_TYPE
        headers = [*to_client(answer.headers), *_headers(trace, cost)]
        trace.status = answer.status
        await client.begin(answer.status, headers, length=_length(answer), one_piece=one_piece)
        async for chunk in answer.chunks():
            trace.chunk()
            if handover is not None:
                handover.answering()
            await client.relay(reader.feed(chunk))
        trace.answered = True
        trace.figures, trace.reasoned = reader.figures(), reader.reasoned
        await client.relay(reader.close())
        await client.finish()

    def _judge(self, lease: Lease, trace: Trace) -> None:
        """Compare a handover with what the decode engine says it reused."""
        handover, figures = trace.handover, trace.figures
        if figures is None or handover is None or handover.stage is not Stage.ANSWERING or handover.ticket is None:
            return
        proven = handover.prove(figures.cached_tokens)
        bytes_per_token = handover.ticket.session_bytes / handover.ticket.tokens
        self._fleet.judge(handover.source.name, lease.engine, proven, bytes_per_token)


def _holding(ask: Ask, tokens: Tokens | None, lease: Lease, trace: Trace) -> Holding | None:
    """What the slot is left with, as far as it is certain."""
    figures = trace.figures
    if figures is None or trace.status != 200:
        read = trace.first_byte is not None and trace.status == 200 and not ask.progress
        # An answer that was cut off has begun: the prompt was read, of the rest nothing is certain.
        return Holding(tokens, occupied=lease.cells) if read and tokens is not None else None
    prompt_tokens = figures.cached_tokens + figures.read_tokens
    occupied = prompt_tokens + figures.answer_tokens
    if tokens is None or len(tokens) != prompt_tokens:
        return Holding(occupied=occupied)  # the engine read another prompt than was counted here
    # The last token of an answer is never evaluated. Templates drop reasoning from history: not to be believed.
    return Holding(tokens, 0 if trace.reasoned else max(figures.answer_tokens - 1, 0), occupied)


@contextmanager
def _waiting(trace: Trace) -> Iterator[None]:
    """Time spent in the queue."""
    trace.step = "queue"
    start = time.perf_counter()
    try:
        yield
    finally:
        trace.queue_ms += 1000 * (time.perf_counter() - start)


def _headers(trace: Trace, cost: HandoverFigures | None) -> list[tuple[str, str]]:
    """What the client is told about the way its request took."""
    assert trace.route is not None
    headers = [
        ("X-Splitproxy-Route", trace.route.kind.value),
        ("X-Splitproxy-Reason", trace.route.reason.value),
        ("X-Splitproxy-Engine", trace.engine),
    ]
    if trace.handover is not None and (failure := trace.handover.failure) is not None:
        headers.append(("X-Splitproxy-Fallback", f"{failure.step}:{failure.cause}"))
    if cost is not None:
        headers += [
            ("X-Splitproxy-Prefill-Ms", f"{cost.prefill_ms:.1f}"),
            ("X-Splitproxy-Save-Ms", f"{cost.save_ms:.1f}"),
            ("X-Splitproxy-Restore-Ms", f"{cost.restore_ms:.1f}"),
            ("X-Splitproxy-Session-Bytes", str(cost.session_bytes)),
        ]
    return headers


def _length(answer: Answer) -> int | None:
    value = next((value for name, value in answer.headers if name.lower() == "content-length"), "")
    return int(value) if value.isdigit() else None


def _session_bytes(bytes_per_token: float, tokens: Tokens | None) -> int:
    return int(bytes_per_token * len(tokens)) if tokens is not None else 0


def _engine_is_idle(handover: Handover) -> bool:
    """Whether the engine of a failed step has surely stopped working on its slot: it answered."""
    return handover.failure is not None and handover.failure.cause in (Cause.REFUSED, Cause.CORRUPT)


def _decode_fault(error: EngineError) -> RequestError:
    fault = Fault.DECODE_TIMEOUT if error.cause is Cause.TIMEOUT else Fault.DECODE_FAILED
    return RequestError(fault, f"the decode engine failed: {error}")
