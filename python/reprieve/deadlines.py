"""The times at which live requests end by themselves, nearest first."""

from __future__ import annotations

import heapq
from typing import Final, Literal, TypeAlias

Expiry: TypeAlias = Literal["deadline", "max_pause"]
"""What a sequence ends with when its time has come."""

_SWEPT_FROM: Final = 64
"""Entries below which what is void is not worth sweeping out."""


class Deadlines:
    """At most one time per sequence and expiry: a deadline of the request, and the most that a pause may last.

    A time that was taken back, or set anew, leaves a void entry in the queue; it is passed over when its turn comes,
    and all of them are swept out once they outnumber those that hold.
    """

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, int, Expiry]] = []
        self._numbers: dict[tuple[int, Expiry], int] = {}  # of the entry that holds
        self._next_number = 0

    def __len__(self) -> int:
        """Return how many times hold."""
        return len(self._numbers)

    def set(self, seq: int, expiry: Expiry, time: float) -> None:
        """Let `seq` end with `expiry` at `time`, in place of the time that was set before."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._numbers[seq, expiry] = number
        if len(self._queue) > 2 * len(self._numbers) + _SWEPT_FROM:
            self._queue = [entry for entry in self._queue if self._holds(entry)]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (time, number, seq, expiry))

    def drop(self, seq: int, *expiries: Expiry) -> None:
        """Take the times of `seq` back. Idempotent."""
        for expiry in expiries:
            self._numbers.pop((seq, expiry), None)

    def next(self) -> float | None:
        """Return the nearest time that holds, or None."""
        while self._queue and not self._holds(self._queue[0]):
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def due(self, now: float) -> tuple[int, Expiry] | None:
        """Return a sequence whose time has come, the nearest first, and what it ends with; None if there is none.

        It is returned until it is dropped.
        """
        time = self.next()
        if time is None or time > now:
            return None
        _, _, seq, expiry = self._queue[0]
        return seq, expiry

    def _holds(self, entry: tuple[float, int, int, Expiry]) -> bool:
        _, number, seq, expiry = entry
        return self._numbers.get((seq, expiry)) == number
