"""The decode engine's half of a request: claim a slot, restore the session that waits, if any, relay the answer, and
settle the books."""

import logging
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from splitproxy.api.answer_ids import IdReader
from splitproxy.api.figures import FigureReader, whole_request
from splitproxy.api.sse import MEDIA_TYPE
from splitproxy.api.wire import to_client
from splitproxy.books.beliefs import left_in_slot, left_unfinished
from splitproxy.books.growth import Share
from splitproxy.books.ledger import Holding, Lease, Reservation
from splitproxy.decide.forecast import Job, Phase
from splitproxy.decide.speeds import Reading
from splitproxy.decide.verdict import Circumstances, likely_cause
from splitproxy.engines.adapter import Answer, Engine, content_length
from splitproxy.errors import Cause, EngineError, SplitproxyError, Step
from splitproxy.model import Api, HandoverFigures, Outcome, Reason, Role, Route
from splitproxy.serve.handover import Handover, Stage
from splitproxy.serve.relay import Relay
from splitproxy.serve.request import Request
from splitproxy.serve.trace import Trace

log = logging.getLogger(__name__)

REROUTES = 3  # at most, for one request
STALE_TOKENS = 256  # that a slot held when a request was routed, and holds no more when the request's turn comes


class StaleRoute(SplitproxyError):  # noqa: N818 - no error for anybody
    """While a request waited, another took the slot that held its conversation: it must be routed again."""


async def answer(request: Request, route: Route, room: Reservation | None = None) -> None:
    """Have a decode engine answer, and count it as work for the engine meanwhile.

    `room` is the session file's, given back as soon as the file is gone. Raises StaleRoute, RequestError, and
    EngineError where no engine answered.
    """
    counted = request.service.fleet.forecast.answering
    with counted(route, request.ask, request.prompt_tokens, moved=request.carries) as job:
        try:
            await _Answering(request, route, job, room).run()
        finally:
            request.trace.crowded, request.trace.hindered = job.crowded, job.hindered


@dataclass(slots=True)
class _Answering:
    """A request that a decode engine is to answer."""

    request: Request
    route: Route
    job: Job
    room: Reservation | None
    ids: IdReader = field(default_factory=IdReader)  # of the answer, where the API gives them
    filled: int = 0  # cells of the pool that the answer may have filled

    @property
    def trace(self) -> Trace:
        return self.request.trace

    async def run(self) -> None:
        """Have a decode engine answer; where one fails before its first byte, another may."""
        request, ledger = self.request, self.request.service.ledger
        while True:
            lease = await self._ready_slot()
            self.trace.beside = ledger.beside(lease)
            self.job.begin(Phase.READING, lease.engine, self._reads(lease), lease.slot)
            if self.room is not None:
                self.room.release()  # the session file is gone
            try:
                await self._decode(lease)
                return
            except EngineError as error:
                request.tried.add(lease.engine)
                others = set(ledger.ready(Role.DECODE)) - request.tried
                if request.client.committed or not others:
                    raise
                log.warning("decode engine %s failed, another takes over: %s", lease.engine, error)
                request.service.fleet.health.suspect(lease.engine)
                if (restored := self._restored) is not None:
                    restored.fail(error)

    @property
    def _restored(self) -> Handover | None:
        """The handover whose session the decode engine has, and has not begun to answer from."""
        handover = self.trace.handover
        return handover if handover is not None and handover.stage is Stage.RESTORED else None

    def _reads(self, lease: Lease) -> Reading | None:
        """What the decode engine has to read, as far as is known."""
        if self.request.tokens is None:
            return None
        count = len(self.request.tokens)
        held = count - 1 if self._restored is not None else min(lease.held, count - 1)
        return Reading(held, count - held, self.trace.beside)

    # -- a slot --------------------------------------------------------------------------------------------------------

    async def _ready_slot(self) -> Lease:
        """A decode slot, with the waiting session restored into it if there is one."""
        while True:
            lease = await self._lease()
            if await self._prepare(lease):
                return lease

    async def _lease(self) -> Lease:
        request, service, ask = self.request, self.request.service, self.request.ask
        ledger, fleet, count = service.ledger, service.fleet, request.prompt_tokens
        growth = service.settings.reserve_tokens if ask.max_tokens is None else ask.max_tokens
        alone, reads = not ask.pinned, 0 if request.carries else count

        def claim(engine: str) -> Lease | None:
            if ask.answers > 1:
                return ledger.claim_engine(engine)
            if self._is_stale(engine):
                raise StaleRoute
            order = fleet.order(engine, reads)
            return ledger.claim(engine, request.known, count, growth, order, alone=alone)

        # A conversation waits for the engine that holds it; what no engine holds goes wherever a slot is free. Who
        # needs a whole engine waits for one alone: it would keep all the others from being used as well.
        bound = 2 * (self.route.held_tokens or 0) >= max(count, 1) or ask.answers > 1
        async with fleet.slots.noticing() if alone else nullcontext():
            lease = await request.lease(Role.DECODE, self.route.decode_engine, claim, bound=bound)
        self.trace.engine = lease.engine
        return lease

    def _is_stale(self, engine: str) -> bool:
        """Whether what made this request stay on the decode engine is gone, a conversation that was held or a pair that
        had yet to pass its self-test: reading it there would now hurt others."""
        request, service = self.request, self.request.service
        if self.trace.handover is not None or request.reroutes >= REROUTES or not service.ledger.count(engine).free:
            return False
        if self.route.reason is Reason.PAIR_UNPROVEN and service.fleet.pairs.any_proven(engine):
            return True
        return (self.route.held_tokens or 0) - service.ledger.held(engine, request.known) > STALE_TOKENS

    async def _prepare(self, lease: Lease) -> bool:
        """False where the slot is not fit for use and another must be claimed."""
        fleet, handover = self.request.service.fleet, self.trace.handover
        usable = False
        try:
            await fleet.slots.make_room(lease)
            usable = handover is None or handover.stage is not Stage.TICKETED or await self._redeem(handover, lease)
        finally:
            if not usable:
                fleet.slots.end(lease, quiet=False)
                fleet.health.suspect(lease.engine)
        return usable

    async def _redeem(self, handover: Handover, lease: Lease) -> bool:
        """Restore the waiting session. False where the engine may still be at work on the slot."""
        fleet = self.request.service.fleet
        if not fleet.can_redeem(handover.source.name, lease.engine):
            message = f"the pair of {handover.source.name} and {lease.engine} is not proven now"
            handover.fail(EngineError(Step.RESTORE, Cause.UNPROVEN, message))
            return True
        self.trace.step = Step.RESTORE.value
        return await handover.redeem(fleet.engine(lease.engine), lease.number) or handover.was_answered

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _decode(self, lease: Lease) -> None:
        """Send the client's request to the slot, relay the answer, and settle the books."""
        request, service, trace = self.request, self.request.service, self.trace
        fleet, slots, ask = service.fleet, service.fleet.slots, request.ask
        share = Share(lease, request.prompt_tokens, service.ledger, fleet.watch(lease.engine), slots.erase)
        try:
            engine = fleet.engine(lease.engine)
            call = request.incoming.call(engine.pinned(ask, lease.slot), streams=ask.stream)
            trace.start_decode(others_at_work=service.ledger.has_company(lease))
            self.ids = IdReader()
            calling = engine.call(call, service.settings.deadlines)
            async with self._followed(share), slots.settling(share), calling as found:
                share.lease = await slots.settle(share.lease)
                if found.media_type == MEDIA_TYPE:
                    slots.begun(share.lease)
                self._require_ready(found)
                await self._relay(found, engine, share)
            if request.tokens is None and ask.not_splittable is None and trace.figures is not None:
                # The client has its answer; the next turn wants to know.
                request.tokens = await service.tokenize(ask, trace)
        finally:
            self.filled = share.cells
            self._judge(share.lease)
            slots.end(share.lease, quiet=trace.answered, holding=self._left())

    def _followed(self, share: Share) -> AbstractAsyncContextManager[None]:
        """Follow how much of the pool the answer fills, where nobody knows how much it will."""
        if self.request.is_bounded or share.lease.slot is None:
            return nullcontext()
        return share.followed(limited=self.request.ask.max_tokens is not None)

    def _require_ready(self, found: Answer) -> None:
        """An engine that loads its model again answers nothing else; where there is another, that one shall answer."""
        if found.status == 503 and len(self.request.service.ledger.ready(Role.DECODE)) > 1:
            raise EngineError(Step.DECODE, Cause.REFUSED, "the engine is not ready", status=503)

    async def _relay(self, found: Answer, engine: Engine, share: Share) -> None:
        """Pass the answer on as it comes, and read its figures on the way."""
        trace, client = self.trace, self.request.client
        cost = None if self._restored is None else self._restored.figures()
        streams = found.media_type == MEDIA_TYPE
        one_piece = cost is not None and not streams
        reader = FigureReader(None if cost is None else whole_request(cost), whole=one_piece)
        headers = [*to_client(found.headers), *_headers(trace, self.route, cost)]
        trace.status = found.status
        await client.begin(found.status, headers, length=content_length(found), one_piece=one_piece)
        ids = self.ids if self.request.ask.api is Api.NATIVE else None
        relay = Relay(engine, client, trace, self.job, reader, ids, None if self.request.is_bounded else share)
        await relay.run(found)
        trace.answered = True
        rest = reader.close()
        if found.status >= 400 or (streams and reader.failed):
            trace.outcome = Outcome.ERROR
        trace.figures, trace.reasoned = reader.figures(), reader.reasoned
        await client.relay(rest)
        await client.finish()

    # -- the books -----------------------------------------------------------------------------------------------------

    def _judge(self, lease: Lease) -> None:
        """Compare what was believed of the slot, or handed over, with what the decode engine says it reused."""
        handover, figures = self.trace.handover, self.trace.figures
        if figures is not None and handover is None:
            counted = figures.cached_tokens + figures.read_tokens - 1
            self.request.compare(lease, figures.cached_tokens, len(self.request.known) - 1, counted)
        if figures is None or handover is None or handover.stage is not Stage.ANSWERING or handover.ticket is None:
            return
        fleet, source = self.request.service.fleet, handover.source.name
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
        trace, tokens, progress = self.trace, self.request.tokens, self.request.ask.progress
        if trace.figures is not None and trace.status == 200:
            ids = None if progress else self.ids.ids(trace.figures.answer_tokens)
            return left_in_slot(tokens, trace.figures, ids, reasoned=trace.reasoned)
        begun = trace.first_byte is not None and trace.status == 200 and trace.outcome is Outcome.OK
        return left_unfinished(tokens, self.filled) if begun and not progress else None


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
