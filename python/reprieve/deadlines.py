"""The deadlines of live requests, nearest first."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """A queue of (time, sequence). Sequences that ended otherwise are passed over; `is_live` says which."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._is_live = is_live
        self._queue: list[tuple[float, int]] = []

    def add(self, time: float, seq: int, num_live: int) -> None:
        """Keep a deadline. Those of the dead are swept out once they outnumber the `num_live` sequences."""
        if len(self._queue) > 2 * num_live + 64:
            self._queue = [entry for entry in self._queue if self._is_live(entry[1])]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (time, seq))

    def next(self) -> float | None:
        """Return the time of the nearest deadline, or None."""
        while self._queue and not self._is_live(self._queue[0][1]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def due(self, now: float) -> int | None:
        """Return the live sequence whose deadline is the nearest and has come; None if there is none."""
        time = self.next()
        return None if time is None or time > now else self._queue[0][1]
