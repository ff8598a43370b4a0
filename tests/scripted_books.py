"""Small honest books in pure Python, which keep any number of steps in flight: the protocol `Books`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from reprieve.errors import BooksMisused, InvalidArgument, KvExhausted
from reprieve.step import (
    FROM_FEED,
    OUTCOME_CHUNK,
    OUTCOME_LENGTH,
    OUTCOME_NAN,
    OUTCOME_NOTHING_ALLOWED,
    OUTCOME_OVERRUN,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
    READ_ARGMAX,
    READ_NOTHING,
    TOKEN_ALL_NAN,
    TOKEN_NONE_ALLOWED,
    ArrivalPlan,
    StepBuffers,
    StepCounts,
)
from scripted_entry import Entry, Flight, Row
from scripted_holdings import Call, ScriptedHoldings, Settings
from scripted_oracle import VOCAB

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from reprieve.request import ParkBy


class ScriptedBooks(ScriptedHoldings):
    """Straightforward, and slow. `before_reserve` is the snapshot that the last `reserve` began with."""

    def __init__(self, calls: list[Call], settings: Settings) -> None:
        super().__init__(calls, settings)
        self.sitting_out: list[int] = []
        self.before_reserve: Call = ()

    # Who comes in.

    def _fits(self, head: Entry, leaving: Sequence[Entry] = (), *, fenced: bool) -> bool:
        """Whether `head` fits once `leaving` are gone, and with `fenced` once all fences are lifted."""
        stay = [entry for entry in self._residents() if entry not in leaving]
        free = len(self.free) + sum(len(entry.table) for entry in leaving) + fenced * self.fenced_blocks
        slots = len(self.slots) + len(leaving) + fenced * len(self.remains)
        own = self._blocks(head.target)
        if not slots:
            return False
        if not stay:
            return own <= free
        growth = sum(entry.coming_growth(self.block_size) for entry in [*stay, head])
        return own + growth + self.settings.head_room * (len(stay) + 1) <= free

    def next_arrival(self, spill_blocks: int) -> ArrivalPlan | None:
        head = next(iter(self._waiting()), None)
        if head is None:
            return None
        if self._fits(head, fenced=False):
            return ArrivalPlan(head.seq, [])
        if self._fits(head, fenced=True):
            return None  # it comes in without harm to anybody, a little later
        victims: list[tuple[int, ParkBy]] = []
        leaving: list[Entry] = []
        for entry in sorted(self._candidates(spill_blocks), key=self._rank):
            if entry.priority >= head.priority:
                continue
            image = self._blocks(entry.committed)
            if 0 < image <= spill_blocks:
                victims.append((entry.seq, "spill"))
                spill_blocks -= image
            elif self.can_replay(entry.seq):
                victims.append((entry.seq, "replay"))
            else:
                continue
            leaving.append(entry)
            if self._fits(head, leaving, fenced=True):
                return ArrivalPlan(head.seq, victims, self._gives_back() or any(map(self._in_flight, leaving)))
        return None

    # The step.

    def rows(self) -> int:
        self._open()
        rows, left, least = [], self.settings.step_tokens, 1
        self.sitting_out = []
        for entry in self._residents():
            if entry.decodes and entry.needs_host:
                self.sitting_out.append(entry.seq)
            elif entry.decodes:
                rows.append(self._row(entry, 1))
                left -= 1
        chunked = [e for e in self._residents() if e.reserved < e.target]
        for entry in sorted(chunked, key=lambda e: e.seq):
            row = self._row(entry, min(entry.target - entry.reserved, max(left, least)))
            if row.samples and entry.needs_host:
                self.sitting_out.append(entry.seq)
            elif row.num_new > 0:
                rows.append(row)
                left, least = left - row.num_new, 0
        self.picked = sorted(rows, key=lambda row: row.slot)
        return len(rows)

    def _row(self, entry: Entry, num_new: int) -> Row:
        if entry.slot is None:
            raise BooksMisused(f"{entry} has no slot")
        start = entry.reserved
        growth = entry.growth(self.block_size)
        samples = start + num_new == len(entry.tokens) + entry.ahead
        return Row(entry, entry.stay, entry.slot, start, num_new, samples, entry.ahead > 0, growth, entry.sent)

    def sat_out(self) -> list[int]:
        return sorted(self.sitting_out)

    def mask_ready(self, seq: int) -> None:
        self.of(seq).has_mask = True

    def reserve(self) -> None:
        if self.picked is None:
            raise BooksMisused("reserve: pick the rows first, and again after each change")
        self.before_reserve = self.snapshot()
        needed = sum(row.growth for row in self.picked)
        if needed > len(self.free):
            raise KvExhausted(needed, len(self.free))
        self.calls.append(("reserve", needed))
        for row in self.picked:
            row.entry.table += [self.free.pop() for _ in range(row.growth)]
            row.entry.reserved = row.end
            row.entry.ahead += row.samples
        self.flights.append(Flight(self.picked))
        self.picked = None

    def fill(self, buffers: StepBuffers) -> StepCounts:
        if not self.flights or self.flights[-1].filled:
            raise BooksMisused("fill: reserve the step first")
        token = change = 0
        flight = self.flights[-1]
        for index, row in enumerate(flight.rows):
            entry = row.entry
            buffers.seqs[index], buffers.slots[index] = entry.seq, row.slot
            buffers.starts[index], buffers.num_new[index], buffers.kv_lengths[index] = row.start, row.num_new, row.end
            buffers.readback[index] = READ_ARGMAX if row.samples else READ_NOTHING
            fed = [FROM_FEED] if row.fed else entry.tokens[row.start : row.end]
            buffers.token_ids[token : token + row.num_new] = fed
            buffers.positions[token : token + row.num_new] = range(row.start, row.end)
            token += row.num_new
            for place in range(entry.sent, len(entry.table)):
                buffers.table_changes[change] = (row.slot, place, entry.table[place])
                change += 1
            entry.sent = len(entry.table)
        flight.filled = True
        return StepCounts(len(flight.rows), token, change, 0)

    def hand_back(self) -> list[int]:
        if not self.flights:
            return []
        self.calls.append(("hand_back",))
        flight = self.flights.pop()
        live = [row for row in flight.rows if row.is_live]
        for row in reversed(live):
            entry = row.entry
            for _ in range(row.growth):
                self.free.append(entry.table.pop())
            entry.sent, entry.reserved = row.sent_before, row.start
            entry.ahead -= row.samples
        self._lift_fences(flight)
        self.picked = None
        return [row.entry.seq for row in live]

    def commit(self, tokens: NDArray[np.int32], outcomes: NDArray[np.uint8]) -> None:
        if not self.flights or not self.flights[0].filled:
            raise BooksMisused("commit: no step is in flight")
        for row, token in zip(self.flights[0].rows, tokens.tolist(), strict=True):
            if row.samples and row.is_live and not TOKEN_ALL_NAN <= token < VOCAB:
                raise InvalidArgument("tokens", f"{token} of sequence {row.entry.seq} is none")
        flight = self.flights.pop(0)
        self.calls.append(("commit", *[row.entry.seq for row in flight.rows]))
        for index, row in enumerate(flight.rows):
            is_taken = row.is_live or not self.settings.discards_over_runs
            outcomes[index] = self._commit(row, int(tokens[index])) if is_taken else OUTCOME_OVERRUN
        self._lift_fences(flight)
        self.picked = None

    def _commit(self, row: Row, token: int) -> int:
        entry = row.entry
        nothing = {TOKEN_NONE_ALLOWED: OUTCOME_NOTHING_ALLOWED, TOKEN_ALL_NAN: OUTCOME_NAN}
        if row.samples and token in nothing:
            self.release(entry.seq, reuse=False)
            return nothing[token]
        entry.committed = row.end
        if not row.samples:
            self._settle_in(entry)
            return OUTCOME_CHUNK
        entry.ahead -= 1
        entry.tokens.append(token)
        entry.has_mask = False
        stops = token in entry.stop
        if stops or entry.generated >= entry.budget:
            self.release(entry.seq, reuse=True)
            return OUTCOME_STOP if stops else OUTCOME_LENGTH
        self._settle_in(entry)
        return OUTCOME_TOKEN

    # Who gives way.

    def _candidates(self, spill_blocks: int) -> list[Entry]:
        return [
            entry
            for entry in self._residents()
            if (self.can_replay(entry.seq) or 0 < self._blocks(entry.committed) <= spill_blocks)
            and (self.settings.park_constrained or not entry.constrained)
        ]

    def _tier(self, entry: Entry) -> tuple[int, bool, bool]:
        return (entry.priority, entry.constrained, entry.generated < entry.immune_until)

    def _rank(self, entry: Entry) -> tuple[tuple[int, bool, bool], int, int]:
        return (self._tier(entry), entry.generated, entry.slot or 0)

    def _gives_back(self) -> bool:
        """Whether the steps in flight will surely give something back."""
        return bool(self.remains) or any(entry.is_finishing for entry in self._residents())

    def victim(self, spill_blocks: int) -> int | Literal["settle"] | None:
        if self._gives_back():
            return "settle"
        candidates = self._candidates(spill_blocks) if len(self._residents()) > 1 else []
        if not candidates:
            return "settle" if self.flights else None
        tier = min(map(self._tier, candidates))
        grounded = [e for e in candidates if self._tier(e) == tier and not self._in_flight(e)]
        return min(grounded, key=self._rank).seq if grounded else "settle"

    def growing(self) -> list[int]:
        return [row.entry.seq for row in self.picked or [] if row.growth]

    def capacity_row(self) -> int:
        return min((row.entry for row in self.picked or [] if row.growth), key=self._rank).seq
