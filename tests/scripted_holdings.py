"""Who holds what in the scripted books: blocks, slots and the remains that steps in flight still name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprieve.errors import BooksMisused, CannotPark, KvExhausted, UnknownRequest
from scripted_entry import Entry, Flight, Remains, Row

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from reprieve.request import ParkBy
    from reprieve.step import Arrival

Call = tuple[object, ...]


@dataclass(frozen=True)
class Settings:
    """How large everything is; the last two switch a rule off, to show that a test notices."""

    num_blocks: int = 16
    block_size: int = 4
    max_slots: int = 8
    step_tokens: int = 64
    head_room: int = 0
    immunity: int = 0
    park_constrained: bool = True
    discards_over_runs: bool = True
    fences: bool = True


class ScriptedHoldings:
    """The part of `ScriptedBooks` that knows of steps in flight only that they fence what they name."""

    def __init__(self, calls: list[Call], settings: Settings) -> None:
        self.calls = calls
        self.settings = settings
        self.num_blocks, self.block_size = settings.num_blocks, settings.block_size
        self.free = list(range(settings.num_blocks))
        self.slots = list(range(settings.max_slots))
        self.entries: dict[int, Entry] = {}
        self.flights: list[Flight] = []  # oldest first; only the newest may be unfilled
        self.remains: list[Remains] = []
        self.picked: list[Row] | None = None
        self.submitted = self.fronts = self.stays = 0

    # For tests.

    def submit(
        self,
        prompt: Sequence[int],
        budget: int,
        priority: int = 0,
        *,
        replayable: bool = True,
        stop: Collection[int] = (),
        constrained: bool = False,
    ) -> int:
        seq = 100 + self.submitted
        self.submitted += 1
        rest = (priority, replayable, frozenset(stop), constrained, list(prompt))
        self.entries[seq] = Entry(seq, list(prompt), budget, *rest)
        return seq

    def snapshot(self) -> Call:
        entries = tuple(repr(entry) for entry in self.entries.values())
        flights = tuple(tuple(row.entry.seq for row in flight.rows) for flight in self.flights)
        remains = tuple((left.slot, tuple(left.blocks), len(left.flights)) for left in self.remains)
        return (entries, tuple(self.free), tuple(self.slots), flights, remains)

    def check(self) -> None:
        held = [block for entry in self.entries.values() for block in entry.table]
        fenced = [block for left in self.remains for block in left.blocks]
        assert sorted(held + fenced + self.free) == list(range(self.num_blocks)), "a block is lost, or owned twice"
        taken = [entry.slot for entry in self.entries.values() if entry.slot is not None]
        taken += [left.slot for left in self.remains]
        assert sorted(taken + self.slots) == list(range(self.settings.max_slots)), "a slot is lost, or owned twice"
        assert all(left.flights and set(left.flights) <= set(self.flights) for left in self.remains), "fenced for ever"
        for entry in self.entries.values():
            assert entry.resident == (entry.state in {"prefilling", "decoding"}), entry
            assert entry.resident or not entry.table, entry
            rows = [row for flight in self.flights for row in flight.rows if row.entry is entry and row.is_live]
            assert entry.ahead == sum(row.samples for row in rows), entry
            if entry.resident:
                assert entry.reserved == (rows[-1].end if rows else entry.committed), entry
                assert len(entry.table) * self.block_size >= entry.reserved, entry

    def of(self, seq: int) -> Entry:
        if seq not in self.entries:
            raise UnknownRequest(seq)
        return self.entries[seq]

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _residents(self) -> list[Entry]:
        return sorted((e for e in self.entries.values() if e.resident), key=lambda e: e.slot or 0)

    def _waiting(self) -> list[Entry]:
        waiting = [e for e in self.entries.values() if e.state in {"queued", "parked_spill", "parked_replay"}]
        return sorted(waiting, key=lambda e: (-e.priority, -e.front, e.state == "queued", e.seq))

    def _in_flight(self, entry: Entry) -> bool:
        return any(flight.names(entry) for flight in self.flights)

    # Coming and going.

    def admit(self, seq: int) -> Arrival:
        entry = self.of(seq)
        self._open()
        needed = self._blocks(entry.target)
        if needed > len(self.free):
            raise KvExhausted(needed, len(self.free))
        if entry.resident or entry.state == "finished" or not self.slots:
            raise BooksMisused("admit: it is resident or finished, or no slot is free")
        self.calls.append(("admit", seq))
        arrivals: dict[str, Arrival] = {"queued": "start", "parked_replay": "replay", "parked_spill": "restore"}
        arrival = arrivals[entry.state]
        if arrival != "start":
            entry.immune_until = entry.generated + self.settings.immunity
        self.slots.sort()
        self.stays += 1
        entry.stay, entry.slot, entry.sent, entry.front = self.stays, self.slots.pop(0), 0, 0
        entry.table = [self.free.pop() for _ in range(needed)]
        entry.reserved = entry.committed
        self._settle_in(entry)
        self.picked = None
        return arrival

    def _open(self) -> None:
        if self.flights and not self.flights[-1].filled:
            raise BooksMisused("a step is reserved")

    def _settle_in(self, entry: Entry) -> None:
        whole = entry.committed >= entry.target and entry.generated > 0
        entry.state = "decoding" if whole else "prefilling"

    def drop_image(self, seq: int) -> None:
        entry = self.of(seq)
        if not entry.replayable:
            raise CannotPark(seq, "it is not replayable")
        self.calls.append(("drop_image", seq))
        entry.committed = entry.reserved = 0
        if entry.resident:
            self._settle_in(entry)
        else:
            entry.state = "parked_replay"

    def _vacate(self, entry: Entry) -> None:
        """Take slot and blocks away; what steps in flight name of them is fenced."""
        if entry.slot is not None:
            flights = [flight for flight in self.flights if flight.names(entry)]
            self.remains.append(Remains(entry.slot, entry.table, flights if self.settings.fences else []))
            self._lift_fences()
        entry.slot, entry.table, entry.sent = None, [], 0
        entry.reserved, entry.ahead = entry.committed, 0
        self.picked = None

    def _lift_fences(self, done: Flight | None = None) -> None:
        """Give back what only the step `done`, if anything, still fenced."""
        for left in list(self.remains):
            left.flights = [flight for flight in left.flights if flight is not done]
            if not left.flights:
                self.slots.append(left.slot)
                self.free += reversed(left.blocks)
                self.remains.remove(left)

    def park(self, seq: int, by: ParkBy) -> None:
        entry = self.of(seq)
        if not entry.resident:
            raise CannotPark(seq, "it is not resident")
        if (by == "spill" and entry.committed == 0) or (by == "replay" and not self.can_replay(seq)):
            raise CannotPark(seq, f"not by {by}")
        self.calls.append(("park", seq, by))
        if by == "replay":
            entry.committed = 0
        self._vacate(entry)
        entry.state = "parked_spill" if by == "spill" else "parked_replay"

    def resume(self, seq: int) -> bool:
        entry = self.of(seq)
        if entry.resident:
            return False
        self.fronts += 1
        entry.front = self.fronts
        return True

    def release(self, seq: int, *, reuse: bool) -> bool:
        entry = self.of(seq)
        if entry.state == "finished":
            return False
        self.calls.append(("release", seq, reuse))
        self._vacate(entry)
        entry.state = "finished"
        return True

    # Looking.

    def state(self, seq: int) -> str:
        return self.of(seq).state

    def image_blocks(self, seq: int) -> list[int]:
        entry = self.of(seq)
        return entry.table[: self._blocks(entry.committed)]

    def committed(self, seq: int) -> int:
        return self.of(seq).committed

    def generated(self, seq: int) -> int:
        return self.of(seq).generated

    def slot(self, seq: int) -> int | None:
        return self.of(seq).slot

    def can_replay(self, seq: int) -> bool:
        return self.of(seq).replayable or self.of(seq).committed == 0

    @property
    def free_blocks(self) -> int:
        return len(self.free)

    @property
    def fenced_blocks(self) -> int:
        return sum(len(left.blocks) for left in self.remains)

    def residents(self) -> list[int]:
        return [entry.seq for entry in self._residents()]

    def waiting(self) -> list[int]:
        return [entry.seq for entry in self._waiting()]
