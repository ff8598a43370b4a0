"""The delivery of a settled step: its tokens become events, each once, even if an interrupt falls in between."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from reprieve.step import (
    OUTCOME_LENGTH,
    OUTCOME_NAN,
    OUTCOME_NOTHING_ALLOWED,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
)

if TYPE_CHECKING:
    from reprieve.journal import Journal, Live
    from reprieve.park import Parker
    from reprieve.request import FinishReason
    from reprieve.step import Step, StepResult, Ticket

_UNSETTLED: Final = 255
"""No outcome: what stands in the outcomes until the books have committed a step."""

_HAS_TOKEN: Final = frozenset({OUTCOME_TOKEN, OUTCOME_STOP, OUTCOME_LENGTH})

_FINISH_REASONS: Final[dict[int, FinishReason]] = {
    OUTCOME_STOP: "stop",
    OUTCOME_LENGTH: "length",
    OUTCOME_NOTHING_ALLOWED: "constraint",
    OUTCOME_NAN: "nan",
}


class _WatchedTicket:
    """A ticket that remembers what it came to, for the case that nobody else could."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.result: StepResult | None = None

    @property
    def step(self) -> Step:
        """The step as it was launched."""
        return self._ticket.step

    def settle(self) -> StepResult:
        """Settle the ticket and remember its result."""
        self.result = self._ticket.settle()  # syncs
        return self.result


@dataclass(slots=True)
class _Row:
    """One row that was committed; `index` is the number of its token, if it has one."""

    live: Live
    start: int
    num_new: int
    token_id: int
    outcome: int
    index: int
    is_counted: bool = False


class Delivery:
    """Rows that are committed in the books and not told to their streams yet.

    A launched step is watched from before it is settled. Whether it was committed stands in `outcomes` [slots] u8,
    which the books write in the same call: so no interrupt can fall between the commit and the knowledge of it.
    """

    def __init__(self, parker: Parker, journal: Journal, num_slots: int) -> None:
        self.outcomes = np.full(num_slots, _UNSETTLED, np.uint8)
        self._parker = parker
        self._journal = journal
        self._watched: _WatchedTicket | None = None
        self._rows: deque[_Row] = deque()

    def watch(self, ticket: Ticket) -> Ticket:
        """Return a ticket to settle in place of `ticket`, with `outcomes`."""
        watched = _WatchedTicket(ticket)
        self.outcomes.fill(_UNSETTLED)
        self._watched = watched
        return watched

    def run(self) -> None:
        """Deliver all rows that are committed, in slot order.

        Each round takes one row off, so the loop ends. After an interrupt, call it again: nothing is told twice.
        """
        watched = self._watched
        if watched is not None:
            # One statement: an interrupt falls before it or after it.
            self._rows, self._watched = deque([*self._rows, *self._committed(watched)]), None
        while self._rows:
            self._deliver(self._rows[0])
            self._rows.popleft()

    def _committed(self, watched: _WatchedTicket) -> list[_Row]:
        """Return the rows of a step, none if it was not committed."""
        step, result = watched.step, watched.result
        if result is None or self.outcomes[0] == _UNSETTLED:
            return []
        self._journal.stats.steps += 1
        columns = (step.seqs, step.starts, step.num_new, result.tokens, self.outcomes[: step.num_rows])
        rows = []
        for seq, start, num_new, token_id, outcome in zip(*(column.tolist() for column in columns), strict=True):
            live = self._journal.by_seq(seq)
            if live is not None:
                rows.append(_Row(live, start, num_new, token_id, outcome, len(live.handle.tokens)))
        return rows

    def _deliver(self, row: _Row) -> None:
        live, outcome = row.live, row.outcome
        if live.handle.is_finished:
            self._journal.close(live)
            return
        if not row.is_counted:
            row.is_counted = True
            self._journal.chunk(live, row.start, row.num_new)
        if outcome in _HAS_TOKEN and len(live.handle.tokens) == row.index:
            self._journal.token(live, row.token_id, shown=outcome != OUTCOME_STOP)
        if outcome in _FINISH_REASONS:
            self._journal.finish(live, _FINISH_REASONS[outcome])
        elif live.has_stopped and not self._parker.end(live.seq, "stop", reuse=True):
            self._journal.finish(live, "stop")  # the books had let go of it before an interrupt
