"""The exchange between a client and the engines: every request is run here, and ends in an answer or a clear error.

It speaks to engines through adapters and to the client through a Sink, and knows neither's HTTP library.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from splitproxy.api.client import Client, ClientLeft, Sink
from splitproxy.api.wire import allow_origin, to_client
from splitproxy.books.admission import Turn
from splitproxy.engines.adapter import content_length
from splitproxy.errors import Cause, EngineError, Fault, RequestError
from splitproxy.model import Api, Ask, Outcome, RequestRecord, Role
from splitproxy.serve.course import serve
from splitproxy.serve.drain import Drain
from splitproxy.serve.relay import pass_on
from splitproxy.serve.request import Request
from splitproxy.serve.service import Incoming, Service
from splitproxy.serve.trace import Trace

log = logging.getLogger(__name__)

NO_SUCH_ENDPOINT = frozenset({404, 405, 501})
MOST_LACKS = 64  # paths are clients' words


@dataclass(frozen=True, slots=True)
class Exchange(Service):
    """Serves requests, each by itself, and tells what became of them."""

    observe: Callable[[RequestRecord], None]
    drain: Drain

    async def run(self, incoming: Incoming, ask: Ask, sink: Sink) -> None:
        """Answer a generating request, whatever happens. To be cancelled when the client leaves."""
        trace = Trace(incoming.request_id, ask.api, ask.stream)
        client = Client(
            sink,
            ask.api,
            stream=ask.stream,
            keep_alive_s=self.settings.keep_alive_s,
            request_id=incoming.request_id,
            own=allow_origin(incoming.headers),
        )
        try:
            with self.admission.turn(incoming.client) as turn:
                async with client, self.drain.bounded():
                    await serve(Request(self, incoming, ask, client, trace, turn))
        except (RequestError, EngineError) as error:
            trace.outcome = Outcome.ERROR
            trace.status = await self.refuse(client, error, trace.engine, incoming.request_id)
        except (asyncio.CancelledError, ClientLeft):
            if not trace.answered:
                trace.outcome = Outcome.CANCELLED
            raise
        finally:
            self.observe(trace.record())

    async def forward(self, incoming: Incoming, sink: Sink, *, api: Api, takes_slots: bool) -> None:
        """Pass any other request on to a decode engine, which it gets to itself if it may take slots."""
        own = allow_origin(incoming.headers)
        client = Client(sink, api, stream=False, keep_alive_s=0, request_id=incoming.request_id, own=own)
        trace, tried = Trace(incoming.request_id, api, stream=False), list[str]()
        try:
            with self.admission.turn(incoming.client) as turn:
                while True:
                    try:
                        async with self.drain.bounded():
                            await self._forward(incoming, client, trace, turn if takes_slots else None, tried)
                        return
                    except EngineError as error:
                        if client.committed or not set(self.ledger.ready(Role.DECODE)) - set(tried):
                            raise
                        log.warning("decode engine %s failed, another takes over: %s", tried[-1], error)
                        self.fleet.health.suspect(tried[-1])
        except (RequestError, EngineError) as error:
            trace.outcome = Outcome.ERROR
            trace.status = await self.refuse(client, error, tried[-1] if tried else "", incoming.request_id)
        except (asyncio.CancelledError, ClientLeft):
            if not trace.answered:
                trace.outcome = Outcome.CANCELLED
            raise
        finally:
            self.observe(trace.record())

    async def _forward(
        self, incoming: Incoming, client: Client, trace: Trace, turn: Turn | None, tried: list[str]
    ) -> None:
        """Have an engine answer that has not been tried; with a turn, when it is that request's and no other's."""
        engines, lease = [name for name in self.decode_engines() if name not in tried], None
        engine = max(engines or self.decode_engines(), key=self._idleness)
        member, path = self.fleet.members[engine], incoming.target.partition("?")[0]
        if turn is not None and path not in member.lacks:
            claim, deadline = self.ledger.claim_engine, self.queue_deadline(0.0)
            lease = await self.admission.acquire(Role.DECODE, engine, claim, deadline, turn=turn, avoid=lambda: tried)
            engine, member = lease.engine, self.fleet.members[lease.engine]
        tried.append(engine)
        trace.engine = engine
        try:
            call = incoming.call(incoming.body or None)
            trace.start_decode()
            async with self.fleet.engine(engine).call(call, self.settings.deadlines) as answer:
                headers, trace.status = to_client(answer.headers), answer.status
                trace.outcome = Outcome.OK if answer.status < 400 else Outcome.ERROR
                if lease is not None and answer.status in NO_SUCH_ENDPOINT and len(member.lacks) < MOST_LACKS:
                    member.lacks.add(path)
                await client.begin(answer.status, headers, length=content_length(answer), one_piece=False)
                await pass_on(answer, client)
                trace.answered = True
                await client.finish()
        finally:
            if lease is not None:
                self.fleet.slots.end(lease, quiet=trace.answered)

    def _idleness(self, engine: str) -> int:
        return self.ledger.count(engine).free - self.admission.waiting_for(engine)

    async def refuse(self, client: Client, error: RequestError | EngineError, engine: str, request_id: str) -> int:
        """Tell the client that there is no answer; the status that it gets, or would have got."""
        if isinstance(error, EngineError):
            log.warning("request %s: decode engine %s failed: %s", request_id, engine, error)
            self.fleet.health.suspect(engine)
            fault = Fault.DECODE_TIMEOUT if error.cause is Cause.TIMEOUT else Fault.DECODE_FAILED
            error = RequestError(fault, f"the decode engine failed: {error}")
        await client.fail(error)
        return error.status
