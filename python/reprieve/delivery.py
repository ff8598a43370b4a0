"""The delivery of a settled step: its tokens become events, each once, even if an interrupt falls in between."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reprieve.step import (
    OUTCOME_LENGTH,
    OUTCOME_NAN,
    OUTCOME_NOTHING_ALLOWED,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from reprieve.journal import Journal, Live
    from reprieve.request import FinishReason
    from reprieve.step import Books, Step, StepResult

_HAS_TOKEN: Final = frozenset({OUTCOME_TOKEN, OUTCOME_STOP, OUTCOME_LENGTH})

_FINISH_REASONS: Final[dict[int, FinishReason]] = {
    OUTCOME_STOP: "stop",
    OUTCOME_LENGTH: "length",
    OUTCOME_NOTHING_ALLOWED: "constraint",
    OUTCOME_NAN: "nan",
}


@dataclass(frozen=True, slots=True)
class _Row:
    """One row that was committed; `index` is the number of its token, if it has one."""

    live: Live
    start: int
    num_new: int
    token_id: int
    outcome: int
    index: int


class Delivery:
    """Rows that are committed in the books and not told to their streams yet."""

    def __init__(self, books: Books, journal: Journal) -> None:
        self._books = books
        self._journal = journal
        self._rows: deque[_Row] = deque()

    def add(self, step: Step, result: StepResult, outcomes: NDArray[np.uint8]) -> None:
        """Take over what a step came to; `outcomes` [>= rows] are those that the books wrote."""
        columns = (step.seqs, step.starts, step.num_new, result.tokens, outcomes[: step.num_rows])
        rows = []
        for seq, start, num_new, token_id, outcome in zip(*(column.tolist() for column in columns), strict=True):
            live = self._journal.by_seq(seq)
            if live is not None:
                rows.append(_Row(live, start, num_new, token_id, outcome, len(live.handle.tokens)))
        self._rows.extend(rows)
        self._journal.stats.steps += 1

    def run(self) -> None:
        """Deliver all rows, in slot order. After an interrupt, call it again: what was told is not told twice."""
        while self._rows:
            self._deliver(self._rows[0])
            self._rows.popleft()

    def _deliver(self, row: _Row) -> None:
        live, outcome = row.live, row.outcome
        self._journal.chunk(live, row.start, row.num_new)
        if outcome in _HAS_TOKEN and len(live.handle.tokens) == row.index:
            self._journal.token(live, row.token_id, shown=outcome != OUTCOME_STOP)
        if outcome in _FINISH_REASONS:
            self._journal.finish(live, _FINISH_REASONS[outcome])
        elif live.has_stopped:
            self._books.release(live.seq, reuse=True)
            self._journal.finish(live, "stop")
