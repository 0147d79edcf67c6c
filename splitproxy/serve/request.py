"""One generating request on its way: route, leases, handover or local reading, relayed answer, settled books."""

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from splitproxy.api.answer_ids import IdReader
from splitproxy.api.client import Client
from splitproxy.api.figures import FigureReader, whole_request
from splitproxy.api.sse import MEDIA_TYPE, progress_event
from splitproxy.api.wire import to_client
from splitproxy.books.admission import Turn
from splitproxy.books.beliefs import falls_short, is_another, left_in_slot, left_unfinished
from splitproxy.books.growth import Share
from splitproxy.books.ledger import NOTHING, Holding, Lease, Reservation
from splitproxy.decide.forecast import Job, Phase
from splitproxy.decide.speeds import Reading
from splitproxy.decide.verdict import Circumstances, likely_cause
from splitproxy.engines.adapter import Answer, Engine, PrefillEngine, content_length
from splitproxy.errors import Cause, EngineError, Fault, RequestError, SplitproxyError, Step
from splitproxy.model import Api, Ask, Failure, HandoverFigures, Outcome, Prompt, Reason, Role, Route, Tokens
from splitproxy.serve import access
from splitproxy.serve.handover import Handover, Stage
from splitproxy.serve.relay import Relay
from splitproxy.serve.service import RETRY_AFTER_S, Incoming, Service
from splitproxy.serve.trace import Trace
from splitproxy.tokens.tokenize import surely_shorter

log = logging.getLogger(__name__)

REROUTES = 3  # at most, for one request
STALE_TOKENS = 256  # that a slot held when a request was routed, and holds no more when the request's turn comes
BYTES_PER_TOKEN_GUESS = 2  # of a body that could not be tokenized, for the pool's books


class StaleRoute(SplitproxyError):  # noqa: N818 - no error for anybody
    """While a request waited, another took the slot that held its conversation: it must be routed again."""


@dataclass(slots=True)
class Request:
    """One generating request on its way."""

    service: Service
    incoming: Incoming
    ask: Ask
    client: Client
    trace: Trace
    turn: Turn
    tokens: Tokens | None = None  # None: not known
    ids: IdReader = field(default_factory=IdReader)  # of the answer, where the API gives them
    filled: int = 0  # cells of the pool that the answer may have filled
    reroutes: int = 0
    tried: set[str] = field(default_factory=set)  # decode engines that failed this request before its first byte
    failed_readers: set[str] = field(default_factory=set)  # prefill engines that failed it

    async def serve(self) -> None:
        """Answer the request, or raise RequestError or EngineError where no engine did."""
        while True:
            try:
                await self._serve()
                return
            except StaleRoute:
                self.reroutes += 1

    async def _serve(self) -> None:
        route: Route | None = await self._route()
        while route is not None:
            self.trace.decide(route)
            log.debug("request %s: decided %s", self.incoming.request_id, access.decision(route))
            if route.prefill_engine is None or self.tokens is None:
                await self._answer(route)
                return
            route = await self._hand_over(route, self.service.fleet.prefill_engine(route.prefill_engine), self.tokens)

    async def _route(self) -> Route:
        route, self.tokens = await self.service.route(self.ask, self.tokens, self.trace, self.failed_readers)
        return route

    async def _hand_over(self, route: Route, source: PrefillEngine, tokens: Tokens) -> Route | None:
        """Have the prefill engine read and a decode engine answer. Where the first fails and another one is to take
        over: the route by that one."""
        fleet, settings = self.service.fleet, self.service.settings
        session_bytes = fleet.session_bytes(source.name, route.decode_engine, tokens)
        with self.service.ledger.reserve(session_bytes) as room:
            async with Handover(Prompt(tokens, self.ask), source, settings.deadlines) as handover:
                self.trace.handover = handover
                with fleet.reading(source.name, route) as job:
                    await self._read_ahead(handover, job)
                if handover.failure is not None:
                    if (other := await self._by_another_reader(source.name, handover.failure)) is not None:
                        return other
                    if settings.on_prefill_failure == "reject":
                        message = f"the prefill engine failed ({handover.failure.step}: {handover.failure.cause})"
                        raise RequestError(Fault.PREFILL_FAILED, message, retry_after_s=RETRY_AFTER_S)
                await self._answer(route, room)
        return None

    async def _by_another_reader(self, failed: str, failure: Failure) -> Route | None:
        """The route by a prefill engine that has not failed this request, where that is still worth it. A session that
        could not be kept would not be by another either: they share the folder."""
        self.failed_readers.add(failed)
        if failure.step != Step.PREFILL.value and failure.cause not in (Cause.DIED.value, Cause.TIMEOUT.value):
            return None
        route = await self._route()
        if route.prefill_engine is None:
            return None
        log.warning("prefill engine %s failed, %s takes over", failed, route.prefill_engine)
        self.trace.taken_over.append(failure)
        return route

    # -- before the answer ---------------------------------------------------------------------------------------------

    async def _read_ahead(self, handover: Handover, job: Job) -> None:
        """Have the prefill engine read the prompt and save its session. A failure is noted in the handover."""
        fleet, trace = self.service.fleet, self.trace
        try:
            lease = await self._prefill_lease(handover.source)
        except RequestError as error:
            # A decode slot that is free now will do; who must wait for that, too, has waited long enough.
            causes = {Fault.NO_DECODE_ENGINE: Cause.DIED, Fault.QUEUE_TIMEOUT: Cause.TIMEOUT}
            if (cause := causes.get(error.fault)) is None:
                raise
            handover.fail(EngineError(Step.PREFILL, cause, "the prefill engine was waited for in vain"))
            return

        tell = self._teller()

        def progress(step: Step, done: int, total: int) -> None:
            trace.step = step.value
            if step is Step.PREFILL:
                job.report(done, total)
                tell(done)
            elif step is Step.SAVE:
                job.saving()

        taken = False
        try:
            await fleet.slots.make_room(lease)
            trace.step = Step.PREFILL.value
            job.begin(Phase.READING)
            taken = await handover.take(lease.number, progress)
            trace.prefill_hindered = job.hindered
        finally:
            read = Holding(self.prefix, occupied=len(self.prefix)) if taken else None
            fleet.slots.end(lease, quiet=taken or _has_answered(handover), holding=read)
        if handover.ticket is not None:
            fleet.forecast.recall.learn(handover.source.name, self.prefix, lease.held, handover.ticket.cached_tokens)
        if not taken:
            if handover.failure is not None and handover.failure.cause != Cause.REFUSED.value:
                fleet.health.suspect(handover.source.name)  # a refusal may be about the prompt
        elif handover.ticket is not None:
            self._compare(lease, handover.ticket.cached_tokens, len(self.prefix), handover.ticket.tokens)

    def _compare(self, lease: Lease, cached_tokens: int, prompt_tokens: int, counted_tokens: int) -> None:
        """Compare what was believed of a slot with what its engine reused, of a prompt in which it counted so many."""
        believed = min(lease.held, prompt_tokens)
        if falls_short(believed * counted_tokens / max(prompt_tokens, 1), cached_tokens):
            self.trace.mistaken = True
        # A prompt that leaves a conversation in its middle proves nothing: some kinds of memory keep only the end.
        if lease.continues and is_another(believed, cached_tokens):
            self.service.fleet.health.distrust(lease.engine)

    def _teller(self) -> Callable[[int], None]:
        """Tells a client that asked for it how far the prefill engine is; the decode engine goes on from there."""
        if not (self.ask.progress and self.ask.stream):
            return lambda _done: None
        start, first = time.perf_counter(), -1

        def tell(done: int) -> None:
            nonlocal first
            first = done if first < 0 else first  # the first report is of what was reused
            time_ms = round(1000 * (time.perf_counter() - start))
            told = {"total": len(self.known), "cache": first, "processed": done, "time_ms": time_ms}
            if event := progress_event(self.ask.api, self.incoming.request_id, int(time.time()), told):
                self.client.tell(event)

        return tell

    @property
    def known(self) -> Tokens:
        """The prompt's ids as far as they are known."""
        return self.tokens if self.tokens is not None else NOTHING

    @property
    def prefix(self) -> Tokens:
        """What the prefill engine reads: all but the last token."""
        return self.known.head(len(self.known) - 1)

    async def _prefill_lease(self, source: PrefillEngine) -> Lease:
        def claim(engine: str) -> Lease | None:
            return self.service.ledger.claim(engine, self.prefix, len(self.prefix), 0)

        return await self._lease(Role.PREFILL, source.name, claim, bound=True)

    async def _lease(self, role: Role, engine: str, claim: Callable[[str], Lease | None], *, bound: bool) -> Lease:
        acquire, deadline = self.service.admission.acquire, self.service.queue_deadline(self.trace.queue_s)
        avoid = self._unfit if role is Role.DECODE else tuple[str]
        with self.trace.waiting():
            return await acquire(role, engine, claim, deadline, turn=self.turn, bound=bound, avoid=avoid)

    def _unfit(self) -> Collection[str]:
        """The decode engines that failed this request, and while a session waits, those that have yet to prove that
        they can take it, unless all have."""
        if not self.carries or (handover := self.trace.handover) is None:
            return self.tried
        left = set(self.service.ledger.ready(Role.DECODE)) - self.tried
        unproven = {name for name in left if not self.service.fleet.can_redeem(handover.source.name, name)}
        return self.tried if unproven == left else self.tried | unproven

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _answer(self, route: Route, room: Reservation | None = None) -> None:
        """Have a decode engine answer, and count it as work for the engine meanwhile."""
        answering = self.service.fleet.forecast.answering
        with answering(route, self.ask, self.prompt_tokens, moved=self.carries) as job:
            try:
                await self._answer_somewhere(route, job, room)
            finally:
                self.trace.crowded, self.trace.hindered = job.crowded, job.hindered

    async def _answer_somewhere(self, route: Route, job: Job, room: Reservation | None) -> None:
        """Have a decode engine answer; where one fails before its first byte, another may."""
        while True:
            lease = await self._ready_slot(route)
            self.trace.beside = self.service.ledger.beside(lease)
            job.begin(Phase.READING, lease.engine, self._reads(lease), lease.slot)
            if room is not None:
                room.release()  # the session file is gone
            try:
                await self._decode(lease, route, job)
                return
            except EngineError as error:
                self.tried.add(lease.engine)
                others = set(self.service.ledger.ready(Role.DECODE)) - self.tried
                if self.client.committed or not others:
                    raise
                log.warning("decode engine %s failed, another takes over: %s", lease.engine, error)
                self.service.fleet.health.suspect(lease.engine)
                if self.trace.handover is not None and self.trace.handover.stage is Stage.RESTORED:
                    self.trace.handover.fail(error)

    def _reads(self, lease: Lease) -> Reading | None:
        """What the decode engine has to read, as far as is known."""
        if self.tokens is None:
            return None
        moved = self.trace.handover is not None and self.trace.handover.stage is Stage.RESTORED
        held = len(self.known) - 1 if moved else min(lease.held, len(self.known) - 1)
        return Reading(held, len(self.known) - held, self.trace.beside)

    async def _ready_slot(self, route: Route) -> Lease:
        """A decode slot, with the waiting session restored into it if there is one."""
        while True:
            lease = await self._decode_lease(route)
            if await self._restore(lease):
                return lease

    async def _decode(self, lease: Lease, route: Route, job: Job) -> None:
        """Send the client's request to the slot, relay the answer, and settle the books."""
        service, trace = self.service, self.trace
        fleet, slots = service.fleet, service.fleet.slots
        share = Share(lease, self.prompt_tokens, service.ledger, fleet.watch(lease.engine), slots.erase)
        try:
            engine = fleet.engine(lease.engine)
            call = self.incoming.call(engine.pinned(self.ask, lease.slot), streams=self.ask.stream)
            trace.start_decode(others_at_work=service.ledger.has_company(lease))
            self.ids = IdReader()
            calling = engine.call(call, service.settings.deadlines)
            async with self._followed(share), slots.settling(share), calling as answer:
                share.lease = await slots.settle(share.lease)
                if answer.media_type == MEDIA_TYPE:
                    slots.begun(share.lease)
                self._require_ready(answer)
                await self._relay(answer, engine, route, share, job)
            if self.tokens is None and self.ask.not_splittable is None and trace.figures is not None:
                # The client has its answer; the next turn wants to know.
                self.tokens = await service.tokenize(self.ask, trace)
        finally:
            self.filled = share.cells
            self._judge(share.lease)
            slots.end(share.lease, quiet=trace.answered, holding=self._left())

    def _followed(self, share: Share) -> AbstractAsyncContextManager[None]:
        """Follow how much of the pool the answer fills, where nobody knows how much it will."""
        if self.bounded or share.lease.slot is None:
            return nullcontext()
        return share.followed(limited=self.ask.max_tokens is not None)

    @property
    def bounded(self) -> bool:
        """Whether the answer surely needs no more cells than were reserved for it."""
        return self.ask.max_tokens is not None and (self.tokens is not None or self.short)

    def _require_ready(self, answer: Answer) -> None:
        """An engine that loads its model again answers nothing else; where there is another, that one shall answer."""
        if answer.status == 503 and len(self.service.ledger.ready(Role.DECODE)) > 1:
            raise EngineError(Step.DECODE, Cause.REFUSED, "the engine is not ready", status=503)

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has, or an estimate."""
        if self.tokens is not None:
            return len(self.tokens)
        if self.short:  # a token is a byte at least
            return len(self.ask.body) + self.service.fleet.template_bytes
        return len(self.ask.body) // BYTES_PER_TOKEN_GUESS

    @property
    def short(self) -> bool:
        """Whether the prompt is surely short, though nobody has counted it."""
        least, template = self.service.settings.rules.least, self.service.fleet.template_bytes
        return self.ask.not_splittable is None and surely_shorter(self.ask, least, template)

    @property
    def carries(self) -> bool:
        """Whether the request has a session that waits to be restored."""
        return self.trace.handover is not None and self.trace.handover.stage is Stage.TICKETED

    async def _decode_lease(self, route: Route) -> Lease:
        ledger, count = self.service.ledger, self.prompt_tokens
        wanted = self.ask.max_tokens
        growth = self.service.settings.reserve_tokens if wanted is None else wanted
        alone, reads = not self.ask.pinned, 0 if self.carries else count

        def claim(engine: str) -> Lease | None:
            if self.ask.answers > 1:
                return ledger.claim_engine(engine)
            if self._is_stale(route, engine):
                raise StaleRoute
            order = self.service.fleet.order(engine, reads)
            return ledger.claim(engine, self.known, count, growth, order, alone=alone)

        # A conversation waits for the engine that holds it; what no engine holds goes wherever a slot is free. Who
        # needs a whole engine waits for one alone: it would keep all the others from being used as well.
        bound = 2 * (route.held_tokens or 0) >= max(count, 1) or self.ask.answers > 1
        async with self.service.fleet.slots.noticing() if alone else nullcontext():
            lease = await self._lease(Role.DECODE, route.decode_engine, claim, bound=bound)
        self.trace.engine = lease.engine
        return lease

    def _is_stale(self, route: Route, engine: str) -> bool:
        """Whether what made this request stay on the decode engine is gone, a conversation that was held or a pair that
        had yet to pass its self-test: reading it there would now hurt others."""
        ledger = self.service.ledger
        if self.trace.handover is not None or self.reroutes >= REROUTES or not ledger.count(engine).free:
            return False
        if route.reason is Reason.PAIR_UNPROVEN and self.service.fleet.pairs.any_proven(engine):
            return True
        return (route.held_tokens or 0) - ledger.held(engine, self.known) > STALE_TOKENS

    async def _restore(self, lease: Lease) -> bool:
        """Prepare the slot. False where the slot is not fit for use and another must be claimed."""
        fleet, handover = self.service.fleet, self.trace.handover
        usable = False
        try:
            await fleet.slots.make_room(lease)
            if handover is not None and handover.stage is Stage.TICKETED:
                usable = await self._redeem(handover, lease)
            else:
                usable = True
        finally:
            if not usable:
                fleet.slots.end(lease, quiet=False)
                fleet.health.suspect(lease.engine)
        return usable

    async def _redeem(self, handover: Handover, lease: Lease) -> bool:
        """Restore the waiting session. False where the engine may still be at work on the slot."""
        fleet = self.service.fleet
        if not fleet.can_redeem(handover.source.name, lease.engine):
            message = f"the pair of {handover.source.name} and {lease.engine} is not proven now"
            handover.fail(EngineError(Step.RESTORE, Cause.UNPROVEN, message))
            return True
        self.trace.step = Step.RESTORE.value
        return await handover.redeem(fleet.engine(lease.engine), lease.number) or _has_answered(handover)

    async def _relay(self, answer: Answer, engine: Engine, route: Route, share: Share, job: Job) -> None:
        """Pass the answer on as it comes, and read its figures on the way."""
        trace, handover, client = self.trace, self.trace.handover, self.client
        cost = handover.figures() if handover is not None and handover.stage is Stage.RESTORED else None
        streams = answer.media_type == MEDIA_TYPE
        one_piece = cost is not None and not streams
        reader = FigureReader(None if cost is None else whole_request(cost), whole=one_piece)
        headers = [*to_client(answer.headers), *_headers(trace, route, cost)]
        trace.status = answer.status
        await client.begin(answer.status, headers, length=content_length(answer), one_piece=one_piece)
        ids = self.ids if self.ask.api is Api.NATIVE else None
        relay = Relay(engine, client, trace, job, reader, ids, None if self.bounded else share)
        await relay.run(answer)
        trace.answered = True
        rest = reader.close()
        if answer.status >= 400 or (streams and reader.failed):
            trace.outcome = Outcome.ERROR
        trace.figures, trace.reasoned = reader.figures(), reader.reasoned
        await client.relay(rest)
        await client.finish()

    def _judge(self, lease: Lease) -> None:
        """Compare what was believed of the slot, or handed over, with what the decode engine says it reused."""
        handover, figures = self.trace.handover, self.trace.figures
        if figures is not None and handover is None:
            counted = figures.cached_tokens + figures.read_tokens - 1
            self._compare(lease, figures.cached_tokens, len(self.known) - 1, counted)
        if figures is None or handover is None or handover.stage is not Stage.ANSWERING or handover.ticket is None:
            return
        fleet, source = self.service.fleet, handover.source.name
        if not handover.prove(figures.cached_tokens):
            proven_tokens = fleet.pairs[source, lease.engine].proven_tokens
            read = figures.cached_tokens + figures.read_tokens
            counted = read if handover.prompt.tokens.may_be(read) else len(handover.prompt)
            seen = Circumstances(counted, figures, proven_tokens, self.trace.others_at_work)
            self.trace.in_vain = likely_cause(seen)
        bytes_per_token = handover.ticket.session_bytes / handover.ticket.tokens
        fleet.pairs.judge(source, lease.engine, len(handover.prompt), self.trace.in_vain, bytes_per_token)

    def _left(self) -> Holding | None:
        """What the slot is left with, as far as it is certain; after an error of the engine's own nothing is."""
        trace, tokens = self.trace, self.tokens
        if trace.figures is not None and trace.status == 200:
            ids = None if self.ask.progress else self.ids.ids(trace.figures.answer_tokens)
            return left_in_slot(tokens, trace.figures, ids, reasoned=trace.reasoned)
        begun = trace.first_byte is not None and trace.status == 200 and trace.outcome is Outcome.OK
        return left_unfinished(tokens, self.filled) if begun and not self.ask.progress else None


def _headers(trace: Trace, route: Route, cost: HandoverFigures | None) -> list[tuple[str, str]]:
    """What the client is told about the way its request took."""
    headers = [
        ("X-Splitproxy-Route", route.kind.value),
        ("X-Splitproxy-Reason", route.reason.value),
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


def _has_answered(handover: Handover) -> bool:
    """Whether the engine of a failed step has surely stopped working on its slot: it answered."""
    return handover.failure is not None and handover.failure.cause in (Cause.REFUSED, Cause.CORRUPT)
