"""Scripted doubles: small honest books in pure Python, a device that fails on command, and the two driven together.

The device's KV of a position is its token and its position; a token depends on every byte of the KV before it. So KV
that is lost, stale, swapped or shared shows as another token than the one of `solo`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from reprieve.errors import BooksMisused, CannotPark, DeviceLost, KvExhausted, StepAborted, StepInFlight, UnknownRequest
from reprieve.image_store import HostStore
from reprieve.latch import FaultLatch
from reprieve.launch import end_rows, launch_with_preemption, settle
from reprieve.park import Parker
from reprieve.step import (
    OUTCOME_CHUNK,
    OUTCOME_LENGTH,
    OUTCOME_TOKEN,
    READ_ARGMAX,
    READ_NOTHING,
    TOKEN_NOT_READ,
    ArrivalPlan,
    StepBuffers,
    StepCounts,
    StepResult,
    StepShape,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from reprieve.request import FinishReason, ParkBy, PauseReason
    from reprieve.step import Arrival, Step

VOCAB = 1000
GARBAGE = 0xDEADBEEF
Call = tuple[object, ...]


def kv_of(tokens: Sequence[int]) -> NDArray[np.uint32]:
    """Return the KV of a whole history: [positions, 2]."""
    return np.stack([np.asarray(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32)], axis=1)


def next_token(kv: NDArray[np.uint32]) -> int:
    """Return the token after the history whose KV this is."""
    return zlib.crc32(kv.tobytes()) % VOCAB


def solo(prompt: Sequence[int], budget: int) -> list[int]:
    """Return what a prompt answers alone in a huge pool: the oracle."""
    tokens = list(prompt)
    for _ in range(budget):
        tokens.append(next_token(kv_of(tokens)))
    return tokens[len(prompt) :]


@dataclass
class Entry:
    """One sequence in the books."""

    seq: int
    prompt: list[int]
    budget: int
    priority: int
    replayable: bool
    tokens: list[int]
    state: str = "queued"
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    sent: int = 0
    committed: int = 0
    front: int = 0
    immune_until: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def target(self) -> int:
        """Positions to commit before it decodes: all tokens but a pending one."""
        return len(self.tokens) - (self.generated > 0)

    @property
    def resident(self) -> bool:
        return self.slot is not None

    def growth(self, block_size: int) -> int:
        decodes = self.resident and self.state == "decoding"
        return int(decodes and self.committed + 1 > len(self.table) * block_size)


@dataclass
class Row:
    entry: Entry
    start: int
    num_new: int
    growth: int
    sent_before: int


class ScriptedBooks:
    """The protocol `Books`, straightforwardly. `before_reserve` is the snapshot that the last `reserve` began with."""

    def __init__(
        self,
        calls: list[Call],
        num_blocks: int,
        block_size: int,
        max_slots: int,
        step_tokens: int,
        head_room: int,
        immunity: int,
    ) -> None:
        self.calls = calls
        self.block_size, self.max_slots, self.step_tokens = block_size, max_slots, step_tokens
        self.head_room, self.immunity = head_room, immunity
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.slots = list(range(max_slots))
        self.entries: dict[int, Entry] = {}
        self.picked: list[Row] = []
        self.phase: Literal["idle", "picked", "reserved", "in flight"] = "idle"
        self.fronts = 0
        self.before_reserve: Call = ()

    # For tests.

    def submit(self, prompt: Sequence[int], budget: int, priority: int = 0, *, replayable: bool = True) -> int:
        seq = 100 + len(self.entries)
        self.entries[seq] = Entry(seq, list(prompt), budget, priority, replayable, list(prompt))
        return seq

    def snapshot(self) -> Call:
        entries = tuple(repr(entry) for entry in self.entries.values())
        return (entries, tuple(self.free), tuple(self.slots), self.phase in {"reserved", "in flight"})

    def check(self) -> None:
        held = [block for entry in self.entries.values() for block in entry.table]
        assert sorted(held + self.free) == list(range(self.num_blocks)), "a block is lost, or owned twice"
        taken = [entry.slot for entry in self.entries.values() if entry.slot is not None]
        assert sorted(taken + self.slots) == list(range(self.max_slots)), "a slot is lost, or owned twice"
        for entry in self.entries.values():
            assert entry.resident == (entry.state in {"prefilling", "decoding"}), entry
            assert entry.resident or not entry.table, entry
            assert not entry.resident or len(entry.table) * self.block_size >= entry.committed, entry

    def of(self, seq: int) -> Entry:
        if seq not in self.entries:
            raise UnknownRequest(seq)
        return self.entries[seq]

    def _blocks(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def _open(self) -> None:
        if self.phase in {"reserved", "in flight"}:
            raise BooksMisused("a step is reserved or in flight")

    def _in_flight(self, entry: Entry) -> bool:
        return self.phase in {"reserved", "in flight"} and any(row.entry is entry for row in self.picked)

    def _residents(self) -> list[Entry]:
        return sorted((e for e in self.entries.values() if e.resident), key=lambda e: e.slot or 0)

    # Who comes in.

    def _waiting(self) -> list[Entry]:
        waiting = [e for e in self.entries.values() if e.state in {"queued", "parked_spill", "parked_replay"}]
        return sorted(waiting, key=lambda e: (-e.priority, -e.front, e.state == "queued", e.seq))

    def _fits(self, head: Entry, leaving: Sequence[Entry] = ()) -> bool:
        stay = [entry for entry in self._residents() if entry not in leaving]
        free = len(self.free) + sum(len(entry.table) for entry in leaving)
        own = self._blocks(head.target)
        if not self.slots and not leaving:
            return False
        if not stay:
            return own <= free
        own += int(head.committed == head.target and head.target % self.block_size == 0)
        growth = sum(entry.growth(self.block_size) for entry in stay)
        return own + growth + self.head_room * (len(stay) + 1) <= free

    def next_arrival(self, spill_blocks: int) -> ArrivalPlan | None:
        head = next(iter(self._waiting()), None)
        if head is None:
            return None
        if self._fits(head):
            return ArrivalPlan(head.seq, [])
        victims: list[tuple[int, ParkBy]] = []
        leaving: list[Entry] = []
        for entry in sorted(self._candidates(spill_blocks), key=self._rank):
            if entry.priority >= head.priority:
                continue
            image = self._blocks(entry.committed)
            if 0 < image <= spill_blocks:
                victims.append((entry.seq, "spill"))
                spill_blocks -= image
            elif entry.replayable:
                victims.append((entry.seq, "replay"))
            else:
                continue
            leaving.append(entry)
            if self._fits(head, leaving):
                return ArrivalPlan(head.seq, victims)
        return None

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
            entry.immune_until = entry.generated + self.immunity
        self.slots.sort()
        entry.slot, entry.sent, entry.front = self.slots.pop(0), 0, 0
        entry.table = [self.free.pop() for _ in range(needed)]
        self._settle_in(entry)
        return arrival

    def _settle_in(self, entry: Entry) -> None:
        whole = entry.committed == entry.target and entry.generated > 0
        entry.state = "decoding" if whole else "prefilling"

    def drop_image(self, seq: int) -> None:
        entry = self.of(seq)
        if not entry.replayable:
            raise CannotPark(seq, "it is not replayable")
        self.calls.append(("drop_image", seq))
        entry.committed = 0
        if entry.resident:
            self._settle_in(entry)
        else:
            entry.state = "parked_replay"

    # The step.

    def rows(self) -> int:
        self._open()
        rows, left, least = [], self.step_tokens, 1
        for entry in self._residents():
            if entry.state == "decoding":
                rows.append(Row(entry, entry.committed, 1, entry.growth(self.block_size), entry.sent))
                left -= 1
        for entry in sorted((e for e in self._residents() if e.state == "prefilling"), key=lambda e: e.seq):
            num_new = min(entry.target - entry.committed, max(left, least))
            if num_new > 0:
                rows.append(Row(entry, entry.committed, num_new, 0, entry.sent))
                left, least = left - num_new, 0
        self.picked = sorted(rows, key=lambda row: row.entry.slot or 0)
        self.phase = "picked"
        return len(rows)

    def reserve(self) -> None:
        if self.phase != "picked":
            raise BooksMisused("reserve: pick the rows first, and again after each change")
        self.before_reserve = self.snapshot()
        needed = sum(row.growth for row in self.picked)
        if needed > len(self.free):
            raise KvExhausted(needed, len(self.free))
        self.calls.append(("reserve", needed))
        for row in self.picked:
            row.entry.table += [self.free.pop() for _ in range(row.growth)]
        self.phase = "reserved"

    def fill(self, buffers: StepBuffers) -> StepCounts:
        if self.phase != "reserved":
            raise BooksMisused("fill: reserve the step first")
        token = change = 0
        for index, row in enumerate(self.picked):
            entry, end = row.entry, row.start + row.num_new
            slot = entry.slot if entry.slot is not None else -1
            samples = end == len(entry.tokens)
            buffers.seqs[index], buffers.slots[index] = entry.seq, slot
            buffers.starts[index], buffers.num_new[index], buffers.kv_lengths[index] = row.start, row.num_new, end
            buffers.readback[index] = READ_ARGMAX if samples else READ_NOTHING
            buffers.token_ids[token : token + row.num_new] = entry.tokens[row.start : end]
            buffers.positions[token : token + row.num_new] = range(row.start, end)
            token += row.num_new
            for place in range(entry.sent, len(entry.table)):
                buffers.table_changes[change] = (slot, place, entry.table[place])
                change += 1
            entry.sent = len(entry.table)
        self.phase = "in flight"
        return StepCounts(len(self.picked), token, change)

    def hand_back(self) -> None:
        if self.phase not in {"reserved", "in flight"}:
            return
        self.calls.append(("hand_back",))
        for row in reversed(self.picked):
            for _ in range(row.growth):
                self.free.append(row.entry.table.pop())
            row.entry.sent = row.sent_before
        self.phase = "idle"

    def commit(self, tokens: NDArray[np.int32], outcomes: NDArray[np.uint8]) -> None:
        if self.phase != "in flight":
            raise BooksMisused("commit: no step is in flight")
        self.phase = "idle"
        for index, row in enumerate(self.picked):
            entry = row.entry
            samples = row.start + row.num_new == len(entry.tokens)
            entry.committed = row.start + row.num_new
            outcomes[index] = OUTCOME_CHUNK
            if samples:
                entry.tokens.append(int(tokens[index]))
                outcomes[index] = OUTCOME_LENGTH if entry.generated == entry.budget else OUTCOME_TOKEN
            self._settle_in(entry)
            if outcomes[index] == OUTCOME_LENGTH:
                self.release(entry.seq, reuse=True)

    # Who gives way.

    def _candidates(self, spill_blocks: int) -> list[Entry]:
        return [e for e in self._residents() if e.replayable or 0 < self._blocks(e.committed) <= spill_blocks]

    def _rank(self, entry: Entry) -> tuple[int, bool, int, int]:
        return (entry.priority, entry.generated < entry.immune_until, entry.generated, entry.slot or 0)

    def victim(self, spill_blocks: int) -> int | None:
        candidates = self._candidates(spill_blocks)
        if not candidates or len(self._residents()) == 1:
            return None
        return min(candidates, key=self._rank).seq

    def capacity_row(self) -> int:
        return min((row.entry for row in self.picked if row.growth), key=self._rank).seq

    def _vacate(self, entry: Entry) -> None:
        if entry.slot is not None:
            self.slots.append(entry.slot)
        self.free += reversed(entry.table)
        entry.slot, entry.table, entry.sent = None, [], 0
        self.phase = "idle"

    def park(self, seq: int, by: ParkBy) -> None:
        entry = self.of(seq)
        if not entry.resident:
            raise CannotPark(seq, "it is not resident")
        if (by == "spill" and entry.committed == 0) or (by == "replay" and not entry.replayable):
            raise CannotPark(seq, f"not by {by}")
        if self._in_flight(entry):
            raise StepInFlight(seq)
        self.calls.append(("park", seq, by))
        self._vacate(entry)
        entry.state = "parked_spill" if by == "spill" else "parked_replay"
        if by == "replay":
            entry.committed = 0

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
        if self._in_flight(entry):
            raise StepInFlight(seq)
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

    def residents(self) -> list[int]:
        return [entry.seq for entry in self._residents()]

    def waiting(self) -> list[int]:
        return [entry.seq for entry in self._waiting()]


class ScriptedTicket:
    """Computes when it is settled, from the buffers that it was launched with."""

    def __init__(self, device: ScriptedDevice, step: Step) -> None:
        self.device = device
        self.step = step

    def settle(self) -> StepResult:
        self.device.called("settle", self.step)
        return StepResult(self.device.answer(self.device.compute(self.step)))


class ScriptedDevice:
    """A device in NumPy that raises whatever `fault(call, nth)` returns, `nth` counting from 0 for each kind of call.

    A call that fails leaves as much damage behind as a device may: garbage in the positions of its step, half an
    image. `answer` may replace the tokens that a step reads back.
    """

    kv_dtype = "u32"

    def __init__(self, calls: list[Call], num_blocks: int, block_size: int, max_slots: int) -> None:
        self.calls = calls
        self.counts: Counter[str] = Counter()
        self.fault: Callable[[str, int], BaseException | None] = lambda call, nth: None
        self.answer: Callable[[NDArray[np.int32]], NDArray[np.int32]] = lambda tokens: tokens
        self.block_size = block_size
        self.pool = np.full((num_blocks, block_size, 2), GARBAGE, np.uint32)
        self.tables = np.full((max_slots, num_blocks), -1, np.int64)
        self.launched: list[list[int]] = []

    @property
    def block_bytes(self) -> int:
        return self.block_size * 8

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.block_size, 2)

    def called(self, call: str, step: Step | None = None, *what: object) -> None:
        """Record a call, and fail if the script says so."""
        nth = self.counts[call]
        self.counts[call] += 1
        self.calls.append((call, *what))
        if (error := self.fault(call, nth)) is not None:
            if step is not None:
                self._put(step, garbage=True)
            raise error

    def _put(self, step: Step, *, garbage: bool = False) -> None:
        for entry in step.table_changes:
            slot, place, block = entry.tolist()
            self.tables[slot, place] = block
        slots = np.repeat(step.slots, step.num_new)
        blocks = self.tables[slots, step.positions // self.block_size]
        kv = np.stack([step.token_ids, step.positions], axis=1)
        self.pool[blocks, step.positions % self.block_size] = GARBAGE if garbage else kv

    def kv(self, blocks: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.uint32]:
        """Return what the pool holds of a sequence's first `length` positions."""
        held: NDArray[np.uint32] = self.pool[np.asarray(blocks, np.int64)].reshape(-1, 2)[:length]
        return held

    def compute(self, step: Step) -> NDArray[np.int32]:
        self._put(step)
        tokens = np.full(step.num_rows, TOKEN_NOT_READ, np.int32)
        for index in np.flatnonzero(step.readback == READ_ARGMAX):
            length = int(step.kv_lengths[index])
            blocks = self.tables[step.slots[index], : -(-length // self.block_size)]
            tokens[index] = next_token(self.kv(blocks, length))
        return tokens

    def launch(self, step: Step) -> ScriptedTicket:
        self.launched.append(step.slots.tolist())
        self.called("launch", step, *step.seqs.tolist())
        for entry in step.table_changes:
            slot, place, block = entry.tolist()
            self.tables[slot, place] = block
        return ScriptedTicket(self, step)

    def gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        self.called("gather", None, *blocks)
        return np.frombuffer(bytearray(self.pool[list(blocks)].tobytes()), np.uint8)

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        self.pool[list(blocks)] = GARBAGE
        self.called("scatter", None, *blocks)
        self.pool[list(blocks)] = image.view(np.uint32).reshape(-1, self.block_size, 2)
        image[:] = 0xEE  # as the caller may, once this returns

    def probe(self) -> None:
        self.called("probe")

    def close(self) -> None:
        self.called("close")


class Journal:
    """A listener that writes everything down, and checks that pauses and resumes alternate."""

    def __init__(self) -> None:
        self.events: list[Call] = []
        self.paused: set[int] = set()
        self.ends: dict[int, tuple[FinishReason, BaseException | None]] = {}

    def started(self, seq: int) -> None:
        assert seq not in self.ends
        self.events.append(("started", seq))

    def parked(self, seq: int, by: ParkBy, reason: PauseReason, positions: int, spilled_bytes: int) -> None:
        assert seq not in self.paused
        assert seq not in self.ends
        self.paused.add(seq)
        self.events.append(("parked", seq, by, reason, positions, spilled_bytes))

    def resumed(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        assert seq in self.paused
        self.paused.remove(seq)
        self.events.append(("resumed", seq, by, restored_bytes))

    def ended(self, seq: int, code: FinishReason, cause: BaseException | None) -> None:
        assert seq not in self.ends
        self.ends[seq] = (code, cause)
        self.events.append(("ended", seq, code))

    def named(self, *head: object) -> list[Call]:
        """Return the events that begin with `head`."""
        return [event for event in self.events if event[: len(head)] == head]


class Rig:
    """Books, device, store and parker together, and the step that an engine makes of them."""

    def __init__(
        self,
        host_blocks: int = 100,
        num_blocks: int = 16,
        block_size: int = 4,
        max_slots: int = 8,
        step_tokens: int = 64,
        head_room: int = 0,
        immunity: int = 0,
    ) -> None:
        self.calls: list[Call] = []
        self.books = ScriptedBooks(self.calls, num_blocks, block_size, max_slots, step_tokens, head_room, immunity)
        self.device = ScriptedDevice(self.calls, num_blocks, block_size, max_slots)
        self.store = HostStore(host_blocks * self.device.block_bytes)
        self.journal = Journal()
        self.parker = Parker(self.books, self.device, self.store, self.journal)
        most = step_tokens + max_slots
        self.buffers = StepBuffers(StepShape(tokens=most, rows=max_slots, table_changes=num_blocks))
        self.outcomes = np.zeros(max_slots, np.uint8)
        self.latch = FaultLatch()

    def launch(self) -> ScriptedTicket | None:
        ticket = launch_with_preemption(self.books, self.device, self.parker, self.buffers)
        assert ticket is None or isinstance(ticket, ScriptedTicket)
        return ticket

    def settle(self, ticket: ScriptedTicket) -> None:
        settle(self.books, self.device, ticket, self.outcomes)
        for seq, outcome in zip(ticket.step.seqs.tolist(), self.outcomes, strict=False):
            if outcome == OUTCOME_LENGTH:
                self.journal.ended(seq, "length", None)  # released by the books

    def step(self) -> bool:
        """Bring in, launch, settle, and handle failures as an engine does; return whether a step was settled."""
        try:
            self.parker.bring_in()
            ticket = self.launch()
            if ticket is not None:
                self.settle(ticket)
        except StepAborted as failure:
            end_rows(self.parker, failure)
            return False
        except DeviceLost as lost:
            self.latch.trip(lost)
            for entry in self.books.entries.values():
                self.parker.end(entry.seq, "device_lost", lost)
            return False
        return ticket is not None

    def live(self) -> list[Entry]:
        return [entry for entry in self.books.entries.values() if entry.state != "finished"]

    def run(self, most: int = 1000) -> None:
        """Step until everybody has ended, checking after every step."""
        for _ in range(most):
            if not self.live():
                return
            self.step()
            self.check()
        raise AssertionError(f"still live after {most} steps: {self.live()}")

    def check(self) -> None:
        """Check every invariant between two steps: books, store, the device's KV, tokens."""
        self.books.check()
        self.store.check()
        assert self.books.phase in {"idle", "picked"}
        spilled = [entry for entry in self.books.entries.values() if entry.state == "parked_spill"]
        assert all(entry.seq in self.store for entry in spilled), "an image is missing"
        assert len(self.store) == len(spilled), "an image is left over"
        blocks = sum(-(-entry.committed // self.books.block_size) for entry in spilled)
        assert self.store.used_bytes == blocks * self.device.block_bytes, "a booking is left over"
        for entry in self.books.entries.values():
            made = entry.tokens[len(entry.prompt) :]
            assert made == solo(entry.prompt, len(made)), f"{entry} made other tokens than alone"
            if entry.resident:
                there = self.device.kv(entry.table, entry.committed)
                assert np.array_equal(there, kv_of(entry.tokens)[: entry.committed]), (
                    f"the KV of {entry} is not its own"
                )

    def tokens(self, seq: int) -> list[int]:
        entry = self.books.of(seq)
        return entry.tokens[len(entry.prompt) :]
