"""What an engine says about itself: totals, a snapshot, and what a step did."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from reprieve.request import Tally

if TYPE_CHECKING:
    from reprieve.request import FinishReason, ParkBy, PauseReason

_LAST_PARKS: Final = 64
"""How many parks an engine remembers one by one."""


@dataclass(frozen=True, slots=True)
class ParkRecord:
    """Who gave way: by which way, why, for which request (None: for nobody in particular), and when, by the clock."""

    request_id: str
    by: ParkBy
    reason: PauseReason
    parked_by: str | None
    at: float


@dataclass(slots=True)
class EngineStats(Tally):
    """Totals since an engine was made; `steps` are those that were settled and committed.

    `books_s`, `launch_s` and `settle_s` are the seconds spent in the books, in launching and in waiting for steps;
    `requests_finished` counts by how they ended; `last_parks` are the newest parks, oldest first, a bounded number.
    """

    books_s: float = 0.0
    launch_s: float = 0.0
    settle_s: float = 0.0
    requests_finished: dict[FinishReason, int] = field(default_factory=dict)
    last_parks: deque[ParkRecord] = field(default_factory=lambda: deque(maxlen=_LAST_PARKS))


@dataclass(frozen=True, slots=True)
class SlotView:
    """Who sits in a slot: the request, its sequence's state ("prefilling", "decoding"), blocks and tokens so far."""

    request_id: str
    state: str
    blocks: int
    generated: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What an engine holds between two calls; `waiting` is in the order of coming in, None is a free slot.

    Of `num_blocks`, `free_blocks` can be taken, and `fenced_blocks` will be once the steps in flight that still need
    them are settled; the slots hold the rest. `host_bytes` are those of spilled images.
    """

    slots: tuple[SlotView | None, ...]
    waiting: tuple[str, ...]
    num_blocks: int
    free_blocks: int
    host_bytes: int
    fenced_blocks: int
    steps_in_flight: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What one `Engine.step` did.

    "progressed": tokens or chunks were committed, or requests ended. "waiting": there is work, but nothing could be
    launched; `waiting_for` is the request that should come next and `until` the clock's time at which the next request
    would end by its deadline or by the length of its pause, if there is one. "idle": no request is live.
    """

    state: Literal["progressed", "waiting", "idle"]
    waiting_for: str | None = None
    until: float | None = None
