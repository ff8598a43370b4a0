"""Scripted books, device, store and parker together, the journal that listens to them, and what must always hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from reprieve.errors import DeviceLost, StepAborted
from reprieve.image_store import HostStore
from reprieve.latch import FaultLatch
from reprieve.launch import end_rows, launch_with_preemption, settle
from reprieve.park import Park, Parker
from reprieve.step import OUTCOME_LENGTH, OUTCOME_STOP, NothingInFlight, StepBuffers, StepShape
from scripted_books import ScriptedBooks
from scripted_device import ScriptedDevice
from scripted_holdings import Settings
from scripted_oracle import MASK_WORDS, kv_of, solo

if TYPE_CHECKING:
    from reprieve.request import FinishReason
    from reprieve.step import Ticket
    from scripted_entry import Entry
    from scripted_holdings import Call


class Journal:
    """A listener that writes everything down, and checks that pauses and resumes alternate."""

    def __init__(self) -> None:
        self.events: list[Call] = []
        self.parks: list[tuple[int, Park]] = []
        self.paused: set[int] = set()
        self.ends: dict[int, tuple[FinishReason, BaseException | None]] = {}

    def started(self, seq: int) -> None:
        assert seq not in self.ends
        self.events.append(("started", seq))

    def parked(self, seq: int, park: Park) -> None:
        assert seq not in self.paused
        assert seq not in self.ends
        self.paused.add(seq)
        self.parks.append((seq, park))
        self.events.append(("parked", seq, park.by, park.reason, park.positions, park.spilled_bytes))

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


class Before(NothingInFlight):
    """The steps in flight of a rig, for those who may ask to settle one."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def settle_oldest(self) -> bool:
        return self._rig.settle_oldest()


class Rig:
    """Everything together, and the step that an engine with one step in flight makes of it."""

    def __init__(
        self,
        host_blocks: int = 100,
        settings: Settings | None = None,
        *,
        computes_at_launch: bool = False,
        **sizes: Any,
    ) -> None:
        self.settings = settings or Settings(**sizes)
        self.calls: list[Call] = []
        self.books = ScriptedBooks(self.calls, self.settings)
        self.device = ScriptedDevice(self.calls, self.settings, computes_at_launch=computes_at_launch)
        self.store = HostStore(host_blocks * self.device.block_bytes)
        self.use(Journal())
        self.shape = StepShape(
            tokens=self.settings.step_tokens + self.settings.max_slots,
            rows=self.settings.max_slots,
            table_changes=self.settings.num_blocks,
            bans=0,
            mask_words=MASK_WORDS,
        )
        self.buffers = StepBuffers(self.shape)
        self.outcomes = np.zeros(self.settings.max_slots, np.uint8)
        self.latch = FaultLatch()
        self.tickets: list[Ticket] = []
        self.before = Before(self)

    def use(self, journal: Journal) -> None:
        """Let `journal` listen."""
        self.journal = journal
        self.parker = Parker(self.books, self.device, self.store, journal)

    # One step at a time, or several by hand.

    def launch(self) -> Ticket | None:
        """Launch the next step, behind those in flight, with buffers of its own."""
        self.buffers = StepBuffers(self.shape)
        ticket = launch_with_preemption(self.books, self.device, self.parker, self.buffers, self.before)
        if ticket is not None:
            self.tickets.append(ticket)
        return ticket

    def settle_oldest(self) -> bool:
        """Settle the oldest step in flight; False if there is none."""
        if self.tickets:
            self.settle(self.tickets[0])
            return True
        return False

    def settle(self, ticket: Ticket) -> None:
        behind = self.tickets[1:]
        self.tickets = behind
        try:
            settle(self.books, self.device, ticket, self.outcomes, behind)
        except BaseException:
            self.tickets = []
            raise
        for seq, outcome in zip(ticket.step.seqs.tolist(), self.outcomes, strict=False):
            if outcome in {OUTCOME_LENGTH, OUTCOME_STOP}:
                self.journal.ended(
                    seq, "length" if outcome == OUTCOME_LENGTH else "stop", None
                )  # released by the books

    def step(self) -> bool:
        """Bring in, launch, settle, and handle failures as an engine does; return whether a step was settled."""
        try:
            self.parker.bring_in(self.before)
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

    def run(self, most: int = 1000) -> None:
        """Step until everybody has ended, checking after every step."""
        for _ in range(most):
            if not self.live():
                return
            self.step()
            self.check()
        raise AssertionError(f"still live after {most} steps: {self.live()}")

    # Looking.

    def live(self) -> list[Entry]:
        return [entry for entry in self.books.entries.values() if entry.state != "finished"]

    def tokens(self, seq: int) -> list[int]:
        entry = self.books.of(seq)
        return entry.tokens[len(entry.prompt) :]

    def check(self) -> None:
        """Check every invariant between two calls: books, store, the device's KV, tokens."""
        self.books.check()
        self.store.check()
        assert not self.device.violations, self.device.violations
        assert all(flight.filled for flight in self.books.flights), "a reservation is left over"
        spilled = [entry for entry in self.books.entries.values() if entry.state == "parked_spill"]
        assert all(entry.seq in self.store for entry in spilled), "an image is missing"
        assert len(self.store) == len(spilled), "an image is left over"
        blocks = sum(-(-entry.committed // self.books.block_size) for entry in spilled)
        assert self.store.used_bytes == blocks * self.device.block_bytes, "a booking is left over"
        for entry in self.books.entries.values():
            self.check_kv(entry)

    def expected(self, seq: int, count: int) -> list[int]:
        """Return the first `count` tokens that a sequence answers alone."""
        return solo(self.books.of(seq).prompt, count)

    def check_kv(self, entry: Entry) -> None:
        """Check that a sequence has made the tokens of its solo run, and that the device holds its KV."""
        made = self.tokens(entry.seq)
        assert made == self.expected(entry.seq, len(made)), f"{entry} made other tokens than alone"
        if entry.resident:
            there = self.device.kv(entry.table, entry.committed)
            assert np.array_equal(there, kv_of(entry.tokens)[: entry.committed]), f"the KV of {entry} is not its own"

    def check_nothing_left(self) -> None:
        """Check that all is given back once everybody has ended and nothing is in flight."""
        self.check()
        assert not self.books.flights
        assert not self.device.unsettled
        assert self.books.free_blocks == self.books.num_blocks
        assert len(self.books.slots) == self.settings.max_slots
        assert self.store.used_bytes == 0
