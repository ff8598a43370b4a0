"""What an engine says about itself: totals, a snapshot, and what a step did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True)
class EngineStats:
    """Totals since an engine was made; bytes are KV payload."""

    steps: int = 0
    tokens_generated: int = 0
    tokens_replayed: int = 0
    parks_by_spill: int = 0
    parks_by_replay: int = 0
    spilled_bytes: int = 0
    restored_bytes: int = 0


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
    total_blocks: int
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
