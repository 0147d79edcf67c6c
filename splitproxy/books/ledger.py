"""The books: engines, slots, leases, what each slot is believed to hold, and session bytes in flight.

Pure state: every method is a plain function, claims succeed or fail at once, and nothing here waits or calls an engine.
What a slot holds is a belief. A wrong one costs reading time; it never reaches an answer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from splitproxy.model import Role, Tokens

NOTHING = Tokens()
WORTHWHILE_TOKENS = 256  # every prompt shares some with every other, and that must not decide whose slot is lost
LOOK_TOKENS = 256  # conversations that have parted do not agree in so many again
SAME_S = 0.1  # delays this close are no difference
LONG_S = 0.5  # a reading from which others that come meanwhile would notice


@dataclass(frozen=True, slots=True)
class Holding:
    """What a slot is left with. `believed` tokens follow `tokens`: an answer whose ids were not seen."""

    tokens: Tokens = NOTHING
    believed: int = 0
    occupied: int = 0  # cells of the KV pool that are surely not exceeded

    def prefix(self, tokens: Tokens) -> int:
        """How many leading tokens of a prompt are believed to be here."""
        shared = self.tokens.common_prefix(tokens)
        if shared and shared == len(self.tokens):
            return min(shared + self.believed, len(tokens))
        return shared

    def may_hold(self, tokens: Tokens, count: int) -> bool:
        """Whether the first `count` tokens of a prompt could be here: a look at the last of them, not a proof."""
        return len(self.tokens) + self.believed >= count and self.tokens.agrees(tokens, count - LOOK_TOKENS, count)


EMPTY = Holding()


@dataclass(frozen=True, slots=True)
class Order:
    """In which order an engine reads. It fills its batches slot by slot: a prompt in a lower slot overtakes the others.

    Unless it continues a conversation, a prompt goes where all that is read waits least for one another. A long one
    leaves lower slots to those that will come.
    """

    own_s: float = 0.0  # that the prompt takes to read; 0: next to nothing, or not known
    others_s: Mapping[int, float] = field(default_factory=dict)  # that is left of readings at work, by slot

    def delay_s(self, slot: int) -> float:
        """Seconds that the prompt would wait for others in this slot, and others for it."""
        return sum(left_s if other < slot else self.own_s for other, left_s in self.others_s.items())


ANY_ORDER = Order()


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prompt would meet on an engine if it came now."""

    slot: int | None = None  # that it would get; None: none is free
    held: int = 0  # leading tokens of the prompt that the slot is believed to hold
    beside: int = 0  # cells that all other slots fill


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one slot (or, with slot None, a whole engine) until it is released."""

    engine: str
    slot: int | None
    epoch: int
    cells: int  # of the KV pool, reserved for this request at first
    erase: tuple[int, ...] = ()  # idle slots to erase first, so that the request fits
    held: int = 0  # leading tokens of the prompt that the slot was believed to hold
    continues: bool = False  # whether the prompt begins with all that the slot was believed to hold for certain

    @property
    def number(self) -> int:
        """The slot's number, for a lease of one slot."""
        if self.slot is None:
            raise ValueError("this lease is of a whole engine")
        return self.slot


@dataclass(slots=True)
class _Slot:
    number: int
    lease: Lease | None = None
    begun: bool = False  # whether the engine is surely at work for the lease: it gives the slot to nobody else
    overtaken: Lease | None = None  # one whose answer had ended when the engine chose this slot for another request
    holding: Holding = EMPTY
    reserved: int = 0  # cells of the pool for the request that has the lease
    used: int = 0  # the ledger's own clock at the last release
    doomed_by: int | None = None  # the slot whose lease needs this one emptied; until then it cannot be had
    until_erased: int = 0  # cells that this slot and those that it dooms fill until then

    @property
    def cells(self) -> int:
        """Cells of the pool that this slot may fill."""
        if self.doomed_by is not None:
            return 0
        return max(self.reserved, self.until_erased) if self.lease is not None else self.holding.occupied


@dataclass(slots=True)
class _Engine:
    role: Role
    context: int
    epoch: int
    slots: list[_Slot]
    everything: Lease | None = None  # a lease of the whole engine, or of a slot that the engine has yet to choose

    def free(self) -> list[_Slot]:
        if self.everything:
            return []
        return [slot for slot in self.slots if slot.lease is None and slot.doomed_by is None]

    def may_choose(self) -> bool:
        """Whether the engine may choose a slot by itself: it knows of all that are taken."""
        return all(slot.begun if slot.lease is not None else slot.doomed_by is None for slot in self.slots)

    def make_room(self, slot: _Slot, cells: int) -> tuple[int, ...] | None:
        """The idle slots to erase, oldest first, so that `slot` may fill `cells` of the pool; None if they are few."""
        spare = self.context - sum(other.cells for other in self.slots if other is not slot)
        erase: list[_Slot] = []
        for idle in sorted((s for s in self.free() if s is not slot and s.cells), key=lambda s: s.used):
            if spare >= cells:
                break
            spare += idle.cells
            erase.append(idle)
        if spare < cells:
            return None
        if erase:
            slot.until_erased = slot.cells + sum(idle.cells for idle in erase)
        for idle in erase:
            idle.doomed_by = slot.number
            idle.holding = Holding(occupied=idle.holding.occupied)
        return tuple(idle.number for idle in erase)


@dataclass(frozen=True, slots=True)
class SlotCount:
    """Slots of one engine by state."""

    free: int
    busy: int
    holding: int  # free ones that hold a conversation


@dataclass(slots=True)
class Reservation:
    """Room for one session file. As a context manager it is given back at the latest at its end."""

    ledger: "Ledger"
    session_bytes: int

    def release(self) -> None:
        self.ledger.session_bytes -= self.session_bytes
        self.session_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(slots=True)
class Ledger:
    """All engines' books. `session_limit_bytes` bounds the session files in flight together, and so does what their
    folder `can_hold` in all, which others may fill."""

    session_limit_bytes: int
    can_hold: Callable[[int], bool] = lambda _session_bytes: True
    session_bytes: int = 0
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _clock: int = 0

    def open(self, engine: str, role: Role, slots: int, context: int) -> None:
        """An engine is ready. Whatever it held before is forgotten, and leases from before no longer count."""
        self._clock += 1
        self._engines[engine] = _Engine(role, context, self._clock, [_Slot(number) for number in range(slots)])

    def close(self, engine: str) -> None:
        """An engine is gone, with all it held."""
        self._engines.pop(engine, None)

    def ready(self, role: Role) -> list[str]:
        """The engines of a role that can be used, in the order in which they came."""
        return [name for name, engine in self._engines.items() if engine.role is role]

    def is_ready(self, engine: str) -> bool:
        return engine in self._engines

    def context(self, engine: str) -> int:
        """Tokens that the engine can hold; 0 for one that is gone."""
        return self._engines[engine].context if engine in self._engines else 0

    def count(self, engine: str) -> SlotCount:
        if engine not in self._engines:
            return SlotCount(0, 0, 0)
        books = self._engines[engine]
        free = books.free()
        return SlotCount(len(free), len(books.slots) - len(free), sum(bool(s.holding.occupied) for s in free))

    def has_free(self, engine: str) -> bool:
        return engine in self._engines and bool(self._engines[engine].free())

    def held(self, engine: str, tokens: Tokens) -> int:
        """How many leading tokens of a prompt the slot that it would get is believed to hold."""
        return self.outlook(engine, tokens).held

    def outlook(self, engine: str, tokens: Tokens, order: Order = ANY_ORDER) -> Outlook:
        """What a prompt would meet if it came now; while no slot is free, in the one that it would take of all."""
        if engine not in self._engines:
            return Outlook()
        books = self._engines[engine]
        free = books.free()
        slot, held = _choose(free or books.slots, tokens, order, len(books.slots))
        beside = sum(other.cells for other in books.slots if other is not slot)
        return Outlook(slot.number if free else None, held, beside)

    def beside(self, lease: Lease) -> int:
        """The cells of the pool that slots without a part in a lease may fill."""
        if not self.is_current(lease):
            return 0
        return sum(slot.cells for slot in self._engines[lease.engine].slots if slot.number != lease.slot)

    def has_company(self, lease: Lease) -> bool:
        """Whether other slots of the engine are leased, too."""
        if not self.is_current(lease):
            return False
        return any(slot.lease is not None for slot in self._engines[lease.engine].slots if slot.number != lease.slot)

    def place(self, engine: str, tokens: Tokens, order: Order = ANY_ORDER) -> int | None:
        """The slot that a prompt would get if it came now; None where none is free."""
        return self.outlook(engine, tokens, order).slot

    def indifferent(self) -> bool:
        """Whether a prompt's ids would change nothing about the slot it gets: there is one, or none holds anything."""
        slots = [slot for engine in self._engines.values() if engine.role is Role.DECODE for slot in engine.slots]
        return len(slots) == 1 or all(slot.holding is EMPTY and slot.lease is None for slot in slots)

    def claim(
        self,
        engine: str,
        tokens: Tokens,
        prompt_tokens: int,
        growth: int,
        order: Order = ANY_ORDER,
        *,
        alone: bool = False,
    ) -> Lease | None:
        """Claim a slot for a prompt and an answer of up to `growth` tokens; None if there is no room now.

        `tokens` are the prompt's, as far as they are known; `prompt_tokens` is their number or an estimate. The pool of
        cells is taken to be shared by all slots. A prompt that surely can never fit needs none: the engine refuses it.
        `alone` is for a request that no slot can be named for: the engine chooses among those that are idle, so all
        that are claimed must have begun, and none can be had until `settle` tells which it was.
        """
        books = self._engines.get(engine)
        if books is None or not (free := books.free()) or (alone and not books.may_choose()):
            return None
        slot, held = _choose(free, tokens, order, len(books.slots))
        never_fits = len(tokens) >= books.context
        cells = slot.cells if never_fits else min(prompt_tokens + growth, books.context)
        if (erase := books.make_room(slot, cells)) is None:
            return None
        certain = len(slot.holding.tokens)
        slot.lease = Lease(engine, slot.number, books.epoch, cells, erase, held, continues=held >= certain)
        slot.reserved, slot.begun = cells, False
        slot.holding = EMPTY  # until the request has ended well
        if alone and len(books.slots) > 1:
            books.everything = slot.lease
        return slot.lease

    def begun(self, lease: Lease) -> None:
        """The engine is at work for this lease."""
        if lease.slot is not None and self.is_current(lease):
            slot = self._engines[lease.engine].slots[lease.slot]
            slot.begun = slot.begun or slot.lease is lease

    def not_begun(self, engine: str) -> list[Lease]:
        """The leases for which an engine with a free slot may not be at work yet."""
        books = self._engines.get(engine)
        if books is None or not books.free():
            return []
        return [slot.lease for slot in books.slots if slot.lease is not None and not slot.begun]

    def at_work(self, engine: str) -> set[int]:
        """The slots in which the engine is, or was, at work for a lease."""
        slots = self._engines[engine].slots if engine in self._engines else []
        return {slot.number for slot in slots if slot.begun}

    def fits(self, engine: str, cells: int) -> bool:
        """Whether a slot for so many tokens can be claimed now."""
        books = self._engines.get(engine)
        if books is None or not (free := books.free()):
            return False
        return sum(slot.cells for slot in books.slots if slot not in free) + min(cells, books.context) <= books.context

    def is_unsettled(self, lease: Lease) -> bool:
        """Whether the engine chooses the slot of this lease, and it is not known yet."""
        return lease.slot is not None and self.is_current(lease) and self._engines[lease.engine].everything is lease

    def settle(self, lease: Lease, chosen: int) -> Lease:
        """The engine has chosen a slot: the lease is of that one, and the others can be had again."""
        if not self.is_unsettled(lease):
            return lease
        books = self._engines[lease.engine]
        books.everything = None
        claimed, slot = books.slots[lease.number], books.slots[chosen]
        if slot is claimed:
            slot.begun = True
            return lease
        self.erased(lease)
        slot.overtaken = slot.lease
        slot.lease, slot.reserved, slot.holding = replace(lease, slot=chosen, held=0), claimed.reserved, EMPTY
        slot.begun = True
        claimed.lease, claimed.holding = None, Holding(occupied=claimed.reserved)
        return slot.lease

    def grow(self, lease: Lease, cells: int) -> tuple[int, ...] | None:
        """An answer needs more cells than were reserved: the idle slots to erase for it; None if there is no room."""
        if lease.slot is None or not self.is_current(lease):
            return ()
        books = self._engines[lease.engine]
        slot = books.slots[lease.slot]
        wanted = min(cells, books.context)
        if wanted <= slot.reserved:
            return ()
        if (erase := books.make_room(slot, wanted)) is not None:
            slot.reserved = wanted
        return erase

    def erased(self, lease: Lease, emptied: Collection[int] = ()) -> None:
        """The idle slots that stood in a lease's way can be had again; those in `emptied` hold nothing any more."""
        if lease.slot is None or not self.is_current(lease):
            return
        slots = self._engines[lease.engine].slots
        slots[lease.slot].until_erased = 0
        for slot in slots:
            if slot.doomed_by == lease.slot:
                slot.doomed_by = None
                if slot.number in emptied:
                    slot.holding = EMPTY

    def claim_engine(self, engine: str) -> Lease | None:
        """Claim all slots at once, for a request that chooses its slot itself; what they held is forgotten."""
        books = self._engines.get(engine)
        if books is None or len(books.free()) < len(books.slots):
            return None
        for slot in books.slots:
            slot.holding = EMPTY
        books.everything = Lease(engine, None, books.epoch, books.context)
        return books.everything

    def release(self, lease: Lease, holding: Holding | None = None) -> None:
        """End a lease. Without a holding the slot is believed to hold nothing, and to fill what was reserved."""
        if not self.is_current(lease):
            return  # the engine was restarted meanwhile
        books = self._engines[lease.engine]
        self._clock += 1
        if books.everything is lease:
            books.everything = None
        if lease.slot is None:
            for slot in books.slots:
                slot.holding = Holding(occupied=books.context // len(books.slots))
            return
        slot = books.slots[lease.slot]
        if slot.overtaken is lease:
            slot.overtaken = None
            return
        if slot.lease is not lease:
            raise ValueError(f"slot {lease.slot} of {lease.engine} is not held by this lease")
        self.erased(lease)
        slot.lease, slot.begun = None, False
        slot.used = self._clock
        slot.holding = holding if holding is not None else Holding(occupied=slot.reserved)

    def distrust(self, engine: str) -> None:
        """The engine did not hold what was believed: forget what its idle slots hold, not that they are filled."""
        if engine in self._engines:
            for slot in self._engines[engine].free():
                slot.holding = Holding(occupied=slot.holding.occupied)

    def is_current(self, lease: Lease) -> bool:
        """Whether the engine is still the one that the lease was made for."""
        books = self._engines.get(lease.engine)
        return books is not None and books.epoch == lease.epoch

    def has_room(self, session_bytes: int) -> bool:
        """Whether one more session file of this size may be in flight."""
        together = self.session_bytes + session_bytes
        return together <= self.session_limit_bytes and self.can_hold(together)

    def reserve(self, session_bytes: int) -> Reservation:
        """Count a session file of about this size as in flight."""
        self.session_bytes += session_bytes
        return Reservation(self, session_bytes)

    def busy(self) -> int:
        """Leases that are out."""
        return sum(
            (engine.everything is not None and engine.everything.slot is None)
            + sum(slot.lease is not None for slot in engine.slots)
            for engine in self._engines.values()
        )


def _choose(slots: list[_Slot], tokens: Tokens, order: Order, count: int) -> tuple[_Slot, int]:
    """The slot whose use costs least, of an engine with `count`: the one that the prompt continues, else one where
    readings wait least for one another, else an empty one, else the oldest. With it comes how many of the prompt's
    tokens it is believed to hold.

    A prompt continues a slot when it keeps at least half of what the slot holds. Sharing no more than a system prompt
    is no reason to overwrite somebody's conversation while another slot is empty.
    """
    best, held, most = slots[0], 0, (False, -1, 0, False, 0, False, 0)
    long = order.own_s >= LONG_S
    for slot in sorted(slots, key=lambda slot: len(slot.holding.tokens), reverse=True):
        # Once a slot is continued, only one that holds as much can be better.
        if most[0] and not slot.holding.may_hold(tokens, held):
            continue
        shared = slot.holding.prefix(tokens)
        continues = shared > 0 and 2 * shared >= len(slot.holding.tokens)
        rank = (
            continues,
            shared if continues else 0,
            -round(order.delay_s(slot.number) / SAME_S),
            slot.cells == 0,
            shared // WORTHWHILE_TOKENS,
            long and 2 * slot.number >= count,
            -slot.used,
        )
        if rank > most:
            best, held, most = slot, shared, rank
    return best, held
