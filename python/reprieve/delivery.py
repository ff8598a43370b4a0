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
    OUTCOME_OVERRUN,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
)
from reprieve.trace import RowRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.constraint import Masks
    from reprieve.journal import Journal, Live
    from reprieve.park import Parker
    from reprieve.request import FinishReason
    from reprieve.step import Step, StepResult, Ticket
    from reprieve.trace import Trace

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
    """A ticket that remembers what it came to, for the case that nobody else could, and how long that took.

    `lives` are the requests of its rows, which may have ended when it is settled.
    """

    def __init__(self, ticket: Ticket, lives: list[Live | None], timer: Callable[[], float]) -> None:
        self._ticket = ticket
        self._timer = timer
        self.lives = lives
        self.launched_at = self.settled_at = timer()
        self.waited_s = 0.0
        self.result: StepResult | None = None

    @property
    def step(self) -> Step:
        """The step as it was launched."""
        return self._ticket.step

    def ready(self) -> bool:
        """Return whether settling would not have to wait."""
        return self._ticket.ready()

    def settle(self) -> StepResult:
        """Settle the ticket and remember its result."""
        began = self._timer()
        self.result = self._ticket.settle()  # syncs
        self.settled_at = self._timer()
        self.waited_s = self.settled_at - began
        return self.result


@dataclass(slots=True)
class _Row:
    """One row of a settled step; `index` is the number of its token, if it has one."""

    live: Live
    start: int
    num_new: int
    token_id: int
    outcome: int
    index: int
    is_counted: bool = False


class Delivery:
    """Rows that are committed in the books and not told to their streams yet. The lane's `Receiver`.

    A launched step is watched from before it is settled. Whether it was committed stands in `outcomes` [slots] u8,
    which the books write in the same call: so no interrupt can fall between the commit and the knowledge of it.
    `between` is called once a step is delivered, with the sequences that have got a token and go on.
    """

    def __init__(  # noqa: PLR0913  keywords
        self,
        parker: Parker,
        journal: Journal,
        masks: Masks,
        *,
        num_slots: int,
        between: Callable[[list[int]], None],
        trace: Trace | None,
        timer: Callable[[], float],
    ) -> None:
        self.outcomes = np.full(num_slots, _UNSETTLED, np.uint8)
        self._parker = parker
        self._journal = journal
        self._masks = masks
        self._between = between
        self._trace = trace
        self._timer = timer
        self._watched: _WatchedTicket | None = None
        self._rows: deque[_Row] = deque()

    def launched(self, ticket: Ticket) -> Ticket:
        """Return a ticket to keep in place of `ticket`, which was just launched."""
        return _WatchedTicket(ticket, [self._journal.by_seq(seq) for seq in ticket.step.seqs.tolist()], self._timer)

    def watch(self, ticket: Ticket) -> None:
        """Take note that `ticket`, as `launched` gave it, is about to be settled, with `outcomes`."""
        if not isinstance(ticket, _WatchedTicket):
            raise TypeError(f"{ticket!r} was not launched here")
        self.outcomes.fill(_UNSETTLED)
        self._watched = ticket

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

    def sat_out(self, seqs: list[int]) -> None:
        """Count the rows that a launched step went without."""
        self._journal.sat_out(seqs)

    def delivered(self, step: Step) -> None:
        """Say who has got a token of `step`, which was just delivered, and goes on."""
        self._between(step.seqs[self.outcomes[: step.num_rows] == OUTCOME_TOKEN].tolist())

    def _committed(self, watched: _WatchedTicket) -> list[_Row]:
        """Return the rows of a step, none if it was not committed."""
        step, result = watched.step, watched.result
        if result is None or self.outcomes[0] == _UNSETTLED:
            return []
        stats = self._journal.stats
        stats.steps += 1
        stats.settle_s += watched.waited_s
        if self._trace is not None:
            self._trace.step(self._record(watched))
        columns = (step.starts, step.num_new, result.tokens, self.outcomes[: step.num_rows])
        rows = []
        for live, start, num_new, token_id, outcome in zip(
            watched.lives, *(column.tolist() for column in columns), strict=True
        ):
            if outcome == OUTCOME_OVERRUN:
                self._journal.over_run(live)
            elif live is not None:
                rows.append(_Row(live, start, num_new, token_id, outcome, len(live.handle.tokens)))
        return rows

    def _record(self, watched: _WatchedTicket) -> StepRecord:
        """Return what the trace is told of a step."""
        step = watched.step
        rows = []
        columns = (step.slots, step.starts, step.num_new, self.outcomes[: step.num_rows])
        for live, slot, start, num_new, outcome in zip(
            watched.lives, *(column.tolist() for column in columns), strict=True
        ):
            is_over_run = outcome == OUTCOME_OVERRUN
            if live is None:
                rows.append(RowRecord(None, slot, "decode", start, num_new, is_over_run))
            else:
                rows.append(RowRecord(live.handle.id, slot, live.kind(start), start, num_new, is_over_run))
        return StepRecord(self._journal.stats.steps, watched.launched_at, watched.settled_at, tuple(rows))

    def _deliver(self, row: _Row) -> None:
        live, outcome = row.live, row.outcome
        if live.handle.is_finished:
            self._journal.close(live)
            return
        if not row.is_counted:
            row.is_counted = True
            self._journal.stepped(live)
            self._journal.chunk(live, row.start, row.num_new)
        if outcome in _HAS_TOKEN and len(live.handle.tokens) == row.index:
            self._journal.token(live, row.token_id, shown=outcome != OUTCOME_STOP)
        if outcome in _FINISH_REASONS:
            self._journal.finish(live, _FINISH_REASONS[outcome])
        elif live.has_stopped and not self._parker.end(live.seq, "stop", reuse=True):
            self._journal.finish(live, "stop")  # the books had let go of it before an interrupt
        elif outcome == OUTCOME_TOKEN and live.seq in self._masks:
            self._masks.ask(live.seq, tuple(live.handle.tokens))
