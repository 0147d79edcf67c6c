"""The course of one generating request: routed, read elsewhere where that is worth it, and answered."""

import logging

from splitproxy.engines.adapter import PrefillEngine
from splitproxy.errors import Cause, Fault, RequestError, Step
from splitproxy.model import Failure, Prompt, Route, Tokens
from splitproxy.serve import access
from splitproxy.serve.answering import StaleRoute, answer
from splitproxy.serve.handover import Handover
from splitproxy.serve.reading import read_ahead
from splitproxy.serve.request import Request
from splitproxy.serve.service import RETRY_AFTER_S

log = logging.getLogger(__name__)


async def serve(request: Request) -> None:
    """Answer the request, or raise RequestError or EngineError where no engine did."""
    while True:
        try:
            await _serve(request)
            return
        except StaleRoute:
            request.reroutes += 1


async def _serve(request: Request) -> None:
    route: Route | None = await request.route()
    while route is not None:
        request.trace.decide(route)
        log.debug("request %s: decided %s", request.incoming.request_id, access.decision(route))
        if route.prefill_engine is None or request.tokens is None:
            await answer(request, route)
            return
        source = request.service.fleet.prefill_engine(route.prefill_engine)
        route = await _hand_over(request, route, source, request.tokens)


async def _hand_over(request: Request, route: Route, source: PrefillEngine, tokens: Tokens) -> Route | None:
    """Have the prefill engine read and a decode engine answer. Where the first fails and another one is to take over:
    the route by that one."""
    fleet, settings = request.service.fleet, request.service.settings
    session_bytes = fleet.session_bytes(source.name, route.decode_engine, tokens)
    with request.service.ledger.reserve(session_bytes) as room:
        async with Handover(Prompt(tokens, request.ask), source, settings.deadlines) as handover:
            request.trace.handover = handover
            with fleet.reading(source.name, route) as job:
                await read_ahead(request, handover, job)
            if handover.failure is not None:
                if (other := await _by_another_reader(request, source.name, handover.failure)) is not None:
                    return other
                if settings.on_prefill_failure == "reject":
                    message = f"the prefill engine failed ({handover.failure.step}: {handover.failure.cause})"
                    raise RequestError(Fault.PREFILL_FAILED, message, retry_after_s=RETRY_AFTER_S)
            await answer(request, route, room)
    return None


async def _by_another_reader(request: Request, failed: str, failure: Failure) -> Route | None:
    """The route by a prefill engine that has not failed this request, where that is still worth it. A session that
    could not be kept would not be by another either: they share the folder."""
    request.failed_readers.add(failed)
    if failure.step != Step.PREFILL.value and failure.cause not in (Cause.DIED.value, Cause.TIMEOUT.value):
        return None
    route = await request.route()
    if route.prefill_engine is None:
        return None
    log.warning("prefill engine %s failed, %s takes over", failed, route.prefill_engine)
    request.trace.taken_over.append(failure)
    return route
