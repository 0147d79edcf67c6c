"""An answer's share of the pool: it grows while there is room, and the answer ends alone when there is none."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import cast

import pytest

from splitproxy.books import growth
from splitproxy.books.growth import Share
from splitproxy.books.ledger import NOTHING, Lease, Ledger
from splitproxy.engines.adapter import Engine, SlotState
from splitproxy.errors import Fault, RequestError
from splitproxy.fleet import watch
from splitproxy.fleet.watch import SlotWatch
from splitproxy.model import Role
from tests.harness import until

CONTEXT = 1000


class Pool:
    """A pool of two slots, and an engine that tells how full the first one is."""

    def __init__(self, reserved: int, beside: int = 0) -> None:
        self.ledger = Ledger(0)
        self.ledger.open("w", Role.DECODE, 2, CONTEXT)
        self.lease, self.filled, self.looks = self._claim(reserved), 0, 0
        self.beside = self._claim(beside)
        self.share = Share(self.lease, 100, self.ledger, SlotWatch(cast("Engine", self)), self.erase)
        self.erased: list[int] = []

    def _claim(self, cells: int) -> Lease:
        lease = self.ledger.claim("w", NOTHING, cells, 0)
        assert lease is not None
        return lease

    async def slots(self) -> Mapping[int, SlotState]:
        self.looks += 1
        return {0: SlotState(True, self.filled), 1: SlotState(True, 10**6)}

    async def write(self, tokens: int) -> None:
        if not self.share.written(tokens):
            await self.share.make_room()

    async def erase(self, lease: Lease, slots: Iterable[int]) -> None:
        self.erased += slots
        self.ledger.erased(lease, self.erased)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and take small steps."""
    monkeypatch.setattr(growth, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(growth, "STEP_TOKENS", 50)
    monkeypatch.setattr(watch, "LOOK_INTERVAL_S", 0.001)


async def test_what_was_reserved_is_enough_for_what_fits() -> None:
    """Nothing is taken from the pool for tokens that were expected."""
    pool = Pool(reserved=300)
    await pool.write(200)
    assert pool.share.cells == 300
    await pool.write(1)
    assert pool.share.cells == 351


async def test_idle_slots_give_way() -> None:
    """More than is free is had by erasing what is idle."""
    pool = Pool(reserved=300, beside=600)
    pool.ledger.release(pool.beside)
    await pool.write(401)
    assert (pool.erased, pool.share.cells) == ([1], 551)


async def test_a_full_pool_ends_the_answer() -> None:
    """What runs beside it does not give way."""
    pool = Pool(reserved=300, beside=600)
    with pytest.raises(RequestError, match="set max_tokens") as caught:
        await pool.write(401)
    assert (caught.value.fault, pool.erased) == (Fault.OUT_OF_ROOM, [])


async def test_the_engine_itself_tells_how_much_is_filled() -> None:
    """A whole answer is followed by looks at its slot, and gets more before it has used up what it had."""
    pool = Pool(reserved=300)
    async with pool.share.followed(limited=False):
        pool.filled = 260
        await until(lambda: pool.share.cells > 300)
        pool.filled = 600
        await until(lambda: pool.share.cells >= 700)
    looks = pool.looks
    await asyncio.sleep(0.02)
    assert pool.looks == looks


async def test_a_long_prompt_is_no_fast_answer() -> None:
    """A prompt that was estimated at 100 tokens and has more is not taken for an answer that goes on at that speed."""
    pool = Pool(reserved=300, beside=570)
    async with pool.share.followed(limited=False):
        pool.filled = 320
        await until(lambda: pool.looks > 2)
        assert pool.share.cells == 420


async def test_a_fast_answer_needs_room_for_as_much_again() -> None:
    """What was written between two looks is had for the time until the next one, or the answer ends: an overflow would
    end all others with it."""
    pool = Pool(reserved=300, beside=570)
    pool.filled = 200

    async def answer() -> None:
        async with pool.share.followed(limited=False):
            await until(lambda: pool.looks > 1)
            pool.filled = 400
            await asyncio.get_running_loop().create_future()

    with pytest.raises(RequestError) as caught:
        await answer()
    assert caught.value.fault is Fault.OUT_OF_ROOM


async def test_a_step_that_does_not_fit_is_made_smaller() -> None:
    """An answer gets as little as it needs now before it is ended for want of room."""
    pool = Pool(reserved=300, beside=690)
    await pool.write(205)
    assert pool.share.cells == 305
    with pytest.raises(RequestError):
        await pool.write(10)


async def test_a_look_at_a_full_pool_ends_the_answer() -> None:
    """Whatever waits for the answer is ended with the reason."""
    pool = Pool(reserved=300, beside=600)
    pool.filled = 380

    async def answer() -> None:
        async with pool.share.followed(limited=False):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(RequestError) as caught:
        await answer()
    assert caught.value.fault is Fault.OUT_OF_ROOM


async def test_a_limited_answer_needs_no_more_than_it_has() -> None:
    """Near its limit it asks for nothing; only a prompt that was estimated too short makes it grow."""
    pool = Pool(reserved=300)
    async with pool.share.followed(limited=True):
        pool.filled = 300
        await until(lambda: pool.looks > 2)
        assert pool.share.cells == 300
        pool.filled = 301
        await until(lambda: pool.share.cells > 300)


@pytest.mark.parametrize("error", [TimeoutError, KeyError, asyncio.CancelledError])
async def test_the_answers_own_errors_pass(error: type[BaseException]) -> None:
    """Following an answer changes nothing about how it ends by itself."""
    pool = Pool(reserved=300)
    with pytest.raises(error):
        async with pool.share.followed(limited=False):
            raise error
