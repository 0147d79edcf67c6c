"""The prefill engine's half of a request: wait for a slot, have the prompt read and its session saved."""

import time
from collections.abc import Callable

from splitproxy.api.sse import progress_event
from splitproxy.books.ledger import Holding, Lease
from splitproxy.decide.forecast import Job, Phase
from splitproxy.engines.adapter import PrefillEngine
from splitproxy.errors import Cause, EngineError, Fault, RequestError, Step
from splitproxy.model import Role
from splitproxy.serve.handover import Handover
from splitproxy.serve.request import Request

# A decode slot that is free now will do instead; who must wait for that, too, has waited long enough.
_WAITED_IN_VAIN = {Fault.NO_DECODE_ENGINE: Cause.DIED, Fault.QUEUE_TIMEOUT: Cause.TIMEOUT}


async def read_ahead(request: Request, handover: Handover, job: Job) -> None:
    """Have the prefill engine read the prompt and save its session. A failure is noted in the handover.

    Raises RequestError where the request is over, such as when the queue is full.
    """
    try:
        lease = await _lease(request, handover.source)
    except RequestError as error:
        if (cause := _WAITED_IN_VAIN.get(error.fault)) is None:
            raise
        handover.fail(EngineError(Step.PREFILL, cause, "the prefill engine was waited for in vain"))
        return
    if await _read(request, handover, lease, job):
        _compare(request, handover, lease)
    elif handover.failure is not None and handover.failure.cause != Cause.REFUSED.value:
        request.service.fleet.health.suspect(handover.source.name)  # a refusal may be about the prompt


async def _lease(request: Request, source: PrefillEngine) -> Lease:
    prefix = request.prefix

    def claim(engine: str) -> Lease | None:
        return request.service.ledger.claim(engine, prefix, len(prefix), 0)

    return await request.lease(Role.PREFILL, source.name, claim, bound=True)


async def _read(request: Request, handover: Handover, lease: Lease, job: Job) -> bool:
    """Whether the session was saved; the slot is given back in any case."""
    slots, trace, prefix = request.service.fleet.slots, request.trace, request.prefix
    tell = _teller(request)

    def progress(step: Step, done: int, total: int) -> None:
        trace.step = step.value
        if step is Step.PREFILL:
            job.report(done, total)
            tell(done)
        elif step is Step.SAVE:
            job.saving()

    taken = False
    try:
        await slots.make_room(lease)
        trace.step = Step.PREFILL.value
        job.begin(Phase.READING)
        taken = await handover.take(lease.number, progress)
        trace.prefill_hindered = job.hindered
    finally:
        holding = Holding(prefix, occupied=len(prefix)) if taken else None
        slots.end(lease, quiet=taken or handover.was_answered, holding=holding)
    return taken


def _compare(request: Request, handover: Handover, lease: Lease) -> None:
    """What the engine reused tells what it remembers, and whether the slot held what was believed."""
    if (ticket := handover.ticket) is not None:
        recall, prefix = request.service.fleet.forecast.recall, request.prefix
        recall.learn(handover.source.name, prefix, lease.held, ticket.cached_tokens)
        request.compare(lease, ticket.cached_tokens, len(prefix), ticket.tokens)


def _teller(request: Request) -> Callable[[int], None]:
    """Tells a client that asked for it how far the prefill engine is; the decode engine goes on from there."""
    ask, incoming, total = request.ask, request.incoming, len(request.known)
    if not (ask.progress and ask.stream):
        return lambda _done: None
    start, first = time.perf_counter(), -1

    def tell(done: int) -> None:
        nonlocal first
        first = done if first < 0 else first  # the first report is of what was reused
        time_ms = round(1000 * (time.perf_counter() - start))
        told = {"total": total, "cache": first, "processed": done, "time_ms": time_ms}
        if event := progress_event(ask.api, incoming.request_id, int(time.time()), told):
            request.client.tell(event)

    return tell
