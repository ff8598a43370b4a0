"""What reaches the callers of a scripted lane: the journal and the receiver in one, and the masks of the host."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from reprieve.errors import CannotPark
from reprieve.step import (
    OUTCOME_LENGTH,
    OUTCOME_NAN,
    OUTCOME_NOTHING_ALLOWED,
    OUTCOME_OVERRUN,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
    READ_ARGMAX,
)
from scripted import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from lane_asks import Ask
    from reprieve.park import Park, Parker
    from reprieve.request import FinishReason, ParkBy
    from reprieve.step import Step, StepBuffers, StepCounts, StepResult, Ticket
    from scripted_books import ScriptedBooks
    from scripted_entry import Entry
    from scripted_holdings import Call
    from scripted_oracle import Mask

UNSETTLED: Final = 255
HAVE_TOKEN: Final = {OUTCOME_TOKEN, OUTCOME_STOP, OUTCOME_LENGTH}
END: Final[dict[int, FinishReason]] = {
    OUTCOME_STOP: "stop",
    OUTCOME_LENGTH: "length",
    OUTCOME_NOTHING_ALLOWED: "constraint",
    OUTCOME_NAN: "nan",
}


class Watched:
    """A ticket that remembers what it came to."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.result: StepResult | None = None

    @property
    def step(self) -> Step:
        return self.ticket.step

    def ready(self) -> bool:
        return self.ticket.ready()

    def settle(self) -> StepResult:
        self.result = self.ticket.settle()
        return self.result


class Streams(Journal):
    """The listener and the receiver: each sequence's events in the order in which they reach its caller."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.outcomes: NDArray[np.uint8] = np.full(num_slots, UNSETTLED, np.uint8)
        self.streams: dict[int, list[Call]] = {}
        self.asks: dict[int, Ask] = {}
        self.over_runs = 0
        self.num_sat_out: Counter[int] = Counter()
        self.watched: Watched | None = None
        self.to_park: list[tuple[int, ParkBy]] = []
        self.parker: Parker | None = None  # which needs its listener first

    def push(self, seq: int, *event: object) -> None:
        stream = self.streams.setdefault(seq, [])
        assert not stream or stream[-1][0] != "ended", f"{event} of {seq} came after its end"
        stream.append(event)

    def parked(self, seq: int, park: Park) -> None:
        super().parked(seq, park)
        self.push(seq, "paused")

    def resumed(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        super().resumed(seq, by, restored_bytes)
        self.push(seq, "resumed")

    def ended(self, seq: int, code: FinishReason, cause: BaseException | None) -> None:
        super().ended(seq, code, cause)
        self.push(seq, "ended", code)

    # The receiver.

    def launched(self, ticket: Ticket) -> Watched:
        return Watched(ticket)

    def watch(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Watched)
        self.outcomes.fill(UNSETTLED)
        self.watched = ticket

    def sat_out(self, seqs: list[int]) -> None:
        self.num_sat_out += Counter(seqs)

    def run(self) -> None:
        watched, self.watched = self.watched, None
        if watched is None or watched.result is None or self.outcomes[0] == UNSETTLED:
            return
        tokens = watched.result.tokens.tolist()
        for seq, token, outcome in zip(watched.step.seqs.tolist(), tokens, self.outcomes.tolist(), strict=False):
            self.over_runs += outcome == OUTCOME_OVERRUN
            if outcome in HAVE_TOKEN:
                self.push(seq, "token", token)
            if outcome in END:
                self.ended(seq, END[outcome], None)
            elif outcome == OUTCOME_TOKEN:
                self.meddle(seq, len(self.tokens(seq)) - 1)

    def meddle(self, seq: int, index: int) -> None:
        """Do to a sequence what is asked for after this token of it."""
        ask = self.asks.get(seq)
        if ask is None or self.parker is None:
            return
        if index == ask.cancelled_at:
            self.parker.end(seq, "cancelled", reuse=True)
        elif index in ask.parks:
            self.to_park.append((seq, ask.parks[index]))

    def delivered(self, step: Step) -> None:
        while self.to_park:
            seq, by = self.to_park.pop()
            try:
                if self.parker is not None and seq not in self.ends:
                    self.parker.park(seq, "forced", by)
            except CannotPark:
                pass

    def tokens(self, seq: int) -> list[object]:
        """Return the tokens that were delivered."""
        return [event[1] for event in self.streams.get(seq, []) if event[0] == "token"]


class ScriptedMasks:
    """Masks that come `delay` collections after they were asked for; a function that raises ends its sequence."""

    def __init__(self, books: ScriptedBooks, delay: int) -> None:
        self.books = books
        self.delay = delay
        self.masks: dict[int, Mask] = {}
        self.asked: dict[int, tuple[int, int]] = {}  # after how many tokens, and how many collections are left
        self.answers: dict[int, NDArray[np.uint32] | None] = {}
        self.parker: Parker | None = None
        self.calls: list[tuple[int, int]] = []

    def collect(self, ready: Callable[[], bool] | None) -> None:
        for seq, mask in list(self.masks.items()):
            entry = self.books.of(seq)
            if entry.state == "finished":
                del self.masks[seq]
                continue
            generated = entry.generated
            count, left = self.asked.get(seq, (-1, 0))
            if count != generated:
                self.asked[seq] = (generated, self.delay)
            elif left:
                self.asked[seq] = (generated, left - 1)
            if self.asked[seq] == (generated, 0):
                self.asked[seq] = (generated, -1)
                self.answer(entry, mask)

    def answer(self, entry: Entry, mask: Mask) -> None:
        self.calls.append((entry.seq, entry.generated))
        try:
            self.answers[entry.seq] = mask(tuple(entry.tokens[len(entry.prompt) :]))
        except ArithmeticError as error:
            if self.parker is not None:
                self.parker.end(entry.seq, "constraint", error)
            return
        self.books.mask_ready(entry.seq)

    def write(self, buffers: StepBuffers, counts: StepCounts) -> int:
        rows = [row for row in range(counts.rows) if buffers.readback[row] == READ_ARGMAX]
        bound = [(row, bits) for row in rows if (bits := self.answers.get(int(buffers.seqs[row]))) is not None]
        buffers.make_room_for_masks(len(bound))
        for index, (row, bits) in enumerate(bound):
            buffers.mask_rows[index] = row
            buffers.masks[index] = bits
        return len(bound)
