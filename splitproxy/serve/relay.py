"""An answer on its way from an engine to a client: each piece leaves as it came, and is only looked at in passing."""

from dataclasses import dataclass

from splitproxy.api.answer_ids import IdReader
from splitproxy.api.client import Client
from splitproxy.api.figures import FigureReader
from splitproxy.api.sse import is_comment
from splitproxy.books.growth import Share
from splitproxy.decide.forecast import Job, Phase
from splitproxy.engines.adapter import Answer, Engine
from splitproxy.serve.trace import Trace


@dataclass(slots=True)
class Relay:
    """Passes one answer on. What is done for a piece is done for every token, so it is little."""

    engine: Engine
    client: Client
    trace: Trace
    job: Job
    reader: FigureReader
    ids: IdReader | None  # where the API gives them
    share: Share | None  # of the pool, where it must be followed
    writing: bool = False  # whether the engine has begun with the answer itself
    waiting: bytes = b""  # for the client, which has to catch up

    async def run(self, answer: Answer) -> None:
        """Pass the body on, but for what the reader holds back at its end."""
        while await answer.pour(self.take):
            await self.client.relay(self.waiting)
            self.waiting = b""
            if self.share is not None:
                await self.share.make_room()

    def take(self, chunk: bytes) -> bool:
        """Pass a piece on, if that needs no waiting; whether the next one may come."""
        if not is_comment(chunk):
            if not self.writing:
                self._first(chunk)
            if self.writing:
                self.trace.chunk()
        if self.ids is not None:
            self.ids.feed(chunk)
        data = self.reader.feed(chunk)
        if data and not self.client.send(data):
            self.waiting = data
        fits = self.share is None or self.share.written(chunk.count(b"\n\n"))  # an event is about a token
        return fits and not self.waiting

    def _first(self, chunk: bytes) -> None:
        if self.trace.handover is not None:
            self.trace.handover.answering()
        if not self.engine.is_preamble(chunk):
            self.writing = True
            self.job.begin(Phase.WRITING)


async def pass_on(answer: Answer, client: Client) -> None:
    """Pass an answer on unread."""
    waiting = b""

    def take(chunk: bytes) -> bool:
        nonlocal waiting
        waiting = chunk
        return client.send(chunk)

    while await answer.pour(take):
        await client.relay(waiting)
