"""What an engine says about itself: totals, a snapshot, and what a step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reprieve.request import Tally


@dataclass(slots=True)
class EngineStats(Tally):
    """Totals since an engine was made."""

    steps: int = 0


@dataclass(frozen=True, slots=True)
class SlotView:
    """Who sits in a slot: the request, its sequence's state ("prefilling", "decoding"), blocks and tokens so far."""

    request_id: str
    state: str
    blocks: int
    generated: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What an engine holds between two steps; `waiting` is in the order of coming in, None is a free slot."""

    slots: tuple[SlotView | None, ...]
    waiting: tuple[str, ...]
    num_blocks: int
    free_blocks: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """What one `Engine.step` did.

    "progressed": tokens or chunks were committed, or requests ended. "waiting": there is work, but nothing could be
    launched; `waiting_for` is the request that should come next and `until` the clock's time of the next deadline, if
    any. "idle": no request is live.
    """

    state: Literal["progressed", "waiting", "idle"]
    waiting_for: str | None = None
    until: float | None = None
