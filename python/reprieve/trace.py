"""A trace of what an engine does, for people to look at in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from reprieve.request import integer
from reprieve.trace_events import (
    EndRecord,
    Events,
    PauseRecord,
    PoolRecord,
    Record,
    ResumeRecord,
    RowKind,
    RowRecord,
    StepRecord,
    cost,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.request import FinishReason, Paused

__all__ = ["PoolRecord", "RowKind", "RowRecord", "StepRecord", "Trace"]

MOST_EVENTS: Final = 1_000_000
"""What a trace holds where nothing is said: some 200 MB in memory and in the file."""


class Trace:
    """Remembers what an engine did, and writes it as a file that a person can look at.

    `timer` gives seconds that never go back. Of more than `most_events` events the first are kept; then the trace
    stops, and its file says when. Give it to one engine; whoever made it writes it, at any time.
    """

    def __init__(self, timer: Callable[[], float] = time.perf_counter, most_events: int = MOST_EVENTS) -> None:
        self._timer = timer
        self._most_events = integer("most_events", most_events, 1)
        self._zero = timer()
        self._records: list[Record] = []
        self._num_events = 0
        self._counts: tuple[int, ...] = ()
        self._stopped: float | None = None

    def now(self) -> float:
        """Return the time, in the timer's seconds."""
        return self._timer()

    # What happened. Cheap: it is remembered as it is.

    def step(self, step: StepRecord) -> None:
        """Remember a step that was settled, before anything that came of it."""
        self._keep(step)

    def pool(self, pool: PoolRecord) -> None:
        """Remember the pool at a time, if anything in it has changed."""
        counts = pool[1:]
        if counts != self._counts:
            self._counts = counts
            self._keep(pool)

    def paused(self, request_id: str, event: Paused) -> None:
        """Remember that a request gave way."""
        self._keep(PauseRecord(self._timer(), request_id, event))

    def resumed(self, request_id: str) -> None:
        """Remember that a request came back."""
        self._keep(ResumeRecord(self._timer(), request_id))

    def ended(self, request_id: str, finish_reason: FinishReason) -> None:
        """Remember how a request ended."""
        self._keep(EndRecord(self._timer(), request_id, finish_reason))

    def _keep(self, record: Record) -> None:
        if self._stopped is not None:
            return
        num_events = self._num_events + cost(record)
        if num_events > self._most_events:
            self._stopped = self._timer()
            return
        self._num_events = num_events
        self._records.append(record)

    # The file.

    def write(self, path: Path | str) -> None:
        """Write the trace so far, in the JSON object format of Chrome's trace events, one event a line.

        Times are microseconds since the trace was made. Raises `OSError`.
        """
        end = self._timer() if self._stopped is None else self._stopped
        stopped = None if self._stopped is None else (self._stopped - self._zero) * 1e6
        about = {"most_events": self._most_events, "is_complete": stopped is None, "stopped_at_us": stopped}
        with Path(path).open("w", encoding="utf-8") as file:
            file.write(f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(about)},\n"traceEvents": [\n')
            separator = ""
            for event in Events(self._zero).of(self._records, end):
                file.write(separator + json.dumps(event))
                separator = ",\n"
            file.write("\n]}\n")
