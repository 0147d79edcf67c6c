"""An answer on its way: each piece leaves at once, who is slow is waited for, and nothing else delays it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from splitproxy.api.answer_ids import IdReader
from splitproxy.api.client import Client
from splitproxy.api.figures import FigureReader
from splitproxy.api.sse import is_comment
from splitproxy.decide.forecast import Phase
from splitproxy.engines.adapter import Answer, Take
from splitproxy.model import Api
from splitproxy.serve.relay import Relay, pass_on
from splitproxy.serve.trace import Trace

FIGURES = b'data: {"timings":{"cache_n":1,"prompt_n":2}}\n\n'


class FakeAnswer:
    """Pours its pieces, and notes after which of them it was stopped."""

    status, headers, media_type = 200, (), "text/event-stream"

    def __init__(self, *pieces: bytes) -> None:
        self._left = list(pieces)
        self.stops: list[bytes] = []

    async def pour(self, take: Take) -> bool:
        while self._left:
            piece = self._left.pop(0)
            if not take(piece):
                self.stops.append(piece)
                return True
        return False


class FakeClient:
    """Takes pieces, but those that are `slow` only when it is waited for."""

    def __init__(self, *slow: bytes) -> None:
        self._slow = slow
        self.got: list[bytes] = []
        self.waited: list[bytes] = []

    def send(self, data: bytes) -> bool:
        if data in self._slow:
            return False
        self.got.append(data)
        return True

    async def relay(self, data: bytes) -> None:
        if data:
            self.waited.append(data)
            self.got.append(data)


class FakeShare:
    """Has room for so many events, and gets more when it is waited for."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.extended = 0

    def written(self, tokens: int) -> bool:
        self.room -= tokens
        return self.room >= 0

    async def make_room(self) -> None:
        if self.room < 0:
            self.extended += 1
            self.room += 2


async def relayed(
    answer: FakeAnswer,
    client: FakeClient,
    *,
    share: FakeShare | None = None,
    ids: IdReader | None = None,
    is_preamble: Callable[[bytes], bool] = is_comment,
) -> tuple[Trace, list[Phase], FigureReader]:
    """What was noted of an answer."""
    trace, phases, reader = Trace("r1", Api.CHAT, True), list[Phase](), FigureReader()
    engine, job = SimpleNamespace(is_preamble=is_preamble), SimpleNamespace(begin=phases.append)
    relay = Relay(cast("Any", engine), cast("Client", client), trace, cast("Any", job), reader, ids, cast("Any", share))
    await relay.run(answer)
    return trace, phases, reader


async def test_each_piece_leaves_as_it_came() -> None:
    """While the client keeps up, nothing waits, and the figures are read in passing."""
    pieces = [b"data: 1\n\n", b"data: 2\n\n", FIGURES]
    answer, client = FakeAnswer(*pieces), FakeClient()
    trace, phases, reader = await relayed(answer, client)
    assert (client.got, client.waited, answer.stops) == (pieces, [], [])
    assert (trace.first_byte is not None, sum(trace.gaps), phases) == (True, 2, [Phase.WRITING])
    assert (figures := reader.figures()) is not None
    assert figures.read_tokens == 2


async def test_a_slow_client_is_waited_for() -> None:
    """A piece that cannot leave at once stops the answer until it has left; none is lost or sent twice."""
    pieces = [b"data: %d\n\n" % number for number in range(5)]
    answer, client = FakeAnswer(*pieces), FakeClient(pieces[1], pieces[3])
    await relayed(answer, client)
    assert (client.got, client.waited, answer.stops) == (pieces, [pieces[1], pieces[3]], [pieces[1], pieces[3]])


async def test_an_answer_without_room_waits_for_it() -> None:
    """An answer that has filled its share of the pool goes on when it has more; what was written is not held back."""
    pieces = [b"data: %d\n\n" % number for number in range(6)]
    share, answer, client = FakeShare(room=3), FakeAnswer(*pieces), FakeClient()
    await relayed(answer, client, share=share)
    assert (client.got, share.extended, answer.stops) == (pieces, 2, [pieces[3], pieces[5]])


async def test_signs_of_life_are_no_answer() -> None:
    """Comments count neither as the first byte nor as a gap, and a preamble is no beginning of the answer."""
    preamble = b'data: {"role":"assistant"}\n\n'
    trace, phases, _ = await relayed(FakeAnswer(b":\n\n", b": ping\n\n"), FakeClient())
    assert (trace.first_byte, phases) == (None, [])
    answer, client = FakeAnswer(preamble, b":\n\n", b"data: 1\n\n", b":\n\n", b"data: 2\n\n"), FakeClient()
    trace, phases, _ = await relayed(answer, client, is_preamble=lambda chunk: b"role" in chunk)
    assert (sum(trace.gaps), phases, len(client.got)) == (1, [Phase.WRITING], 5)


async def test_ids_are_read_where_there_are_some() -> None:
    """A native answer's ids are collected from the pieces that go by."""
    ids = IdReader()
    await relayed(FakeAnswer(b'data: {"tokens":[1]}\n\n', b'data: {"tokens":[2]}\n\n'), FakeClient(), ids=ids)
    assert (found := ids.ids(2)) is not None
    assert found.to_list() == [1, 2]


@pytest.mark.parametrize("slow", [(), (b"b",), (b"a", b"b", b"c")])
async def test_any_other_answer_is_passed_on_unread(slow: tuple[bytes, ...]) -> None:
    """Each piece leaves in its turn, however fast the client is."""
    answer, client = FakeAnswer(b"a", b"b", b"c"), FakeClient(*slow)
    await pass_on(cast("Answer", answer), cast("Client", client))
    assert (client.got, client.waited) == ([b"a", b"b", b"c"], list(slow))
