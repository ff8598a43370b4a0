"""The journal of live requests: what happens to their sequences becomes their events and statistics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from reprieve.request import DONE_REASONS, RETRYABLE, Done, Failed, Paused, Resumed, Token
from reprieve.stats import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reprieve.handle import Handle
    from reprieve.request import FinishReason, ParkBy, PauseReason
    from reprieve.text import TextStream

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Live:
    """One live request.

    `positions_lost` is how many positions of KV were computed once and dropped: a chunk below it is a replay.
    """

    seq: int
    handle: Handle
    stream: TextStream | None
    paused_at: float | None = None
    positions_parked: int = 0
    positions_lost: int = 0

    @property
    def has_stopped(self) -> bool:
        """Whether one of its stop texts is complete."""
        return self.stream is not None and self.stream.stopped is not None


class Journal:
    """Maps sequences and request ids to live requests, and listens to the parker. See `reprieve.park.Listener`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stats = EngineStats()
        self._clock = clock
        self._now = float(clock())
        self._by_seq: dict[int, Live] = {}
        self._by_id: dict[str, Live] = {}

    def __len__(self) -> int:
        """Return how many requests are live."""
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Live]:
        """Iterate over the live requests in the order of submission; they may end meanwhile."""
        return iter(list(self._by_seq.values()))

    def now(self) -> float:
        """Return the clock's time; where the clock raises, or goes back, the last one: no event is lost by it."""
        try:
            self._now = max(self._now, float(self._clock()))
        except Exception:  # noqa: BLE001  the clock is the caller's
            _LOG.exception("the clock raised")
        return self._now

    def open(self, live: Live) -> None:
        """Begin to keep a request that was just submitted."""
        self._by_seq[live.seq] = live
        self._by_id[live.handle.id] = live

    def by_id(self, request_id: str) -> Live | None:
        """Return the live request of this id."""
        return self._by_id.get(request_id)

    def by_seq(self, seq: int) -> Live | None:
        """Return the live request of this sequence."""
        return self._by_seq.get(seq)

    # What a step did.

    def chunk(self, live: Live, start: int, num_new: int) -> None:
        """Record that a chunk of `num_new` positions from `start` was committed."""
        again = min(start + num_new, live.positions_lost) - start
        if again <= 0:
            return
        for stats in (live.handle.stats, self.stats):
            stats.tokens_replayed += again

    def token(self, live: Live, token_id: int, *, shown: bool) -> None:
        """Record a token; `shown` says whether its text is given out."""
        text = live.stream.push(token_id) if live.stream is not None and shown else ""
        handle = live.handle
        self.stats.tokens_generated += 1
        handle._push(Token(token_id, len(handle.tokens), text))  # noqa: SLF001  the journal fills handles

    def finish(self, live: Live, reason: FinishReason, cause: BaseException | None = None) -> None:
        """Record that a request has ended, with what was held back of its text, and stop keeping it."""
        if not live.handle.is_finished:
            self._close_pause(live)
            text = live.stream.finish() if live.stream is not None else ""
            if reason == "length" and live.has_stopped:
                reason = "stop"  # the stop text was complete with what was held back
            event = Done(reason, text) if reason in DONE_REASONS else Failed(reason, RETRYABLE[reason], cause, text)
            live.handle._push(event)  # noqa: SLF001  the journal fills handles
        self.close(live)

    def close(self, live: Live) -> None:
        """Stop keeping a request that has ended. Idempotent."""
        if self._by_seq.pop(live.seq, None) is not None:
            del self._by_id[live.handle.id]

    # What the parker did.

    def started(self, seq: int) -> None:
        """Do nothing: the first token says it."""

    def parked(self, seq: int, by: ParkBy, reason: PauseReason, positions: int, spilled_bytes: int) -> None:
        """Record that a request gave way."""
        live = self._by_seq[seq]
        live.paused_at = self.now()
        live.positions_parked = positions
        for stats in (live.handle.stats, self.stats):
            stats.spilled_bytes += spilled_bytes
            stats.parks_by_spill += by == "spill"
            stats.parks_by_replay += by == "replay"
        live.handle._push(Paused(reason, by))  # noqa: SLF001  the journal fills handles

    def resumed(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        """Record that a request is back."""
        live = self._by_seq[seq]
        for stats in (live.handle.stats, self.stats):
            stats.restored_bytes += restored_bytes
        if by == "replay":
            live.positions_lost = max(live.positions_lost, live.positions_parked)
        live.handle._push(Resumed(self._close_pause(live)))  # noqa: SLF001  the journal fills handles

    def ended(self, seq: int, code: FinishReason, cause: BaseException | None) -> None:
        """Record that a sequence ended before it was done."""
        self.finish(self._by_seq[seq], code, cause)

    def _close_pause(self, live: Live) -> float:
        """Return the length of the pause that ends now, in seconds; 0 if there is none."""
        if live.paused_at is None:
            return 0.0
        paused_s = self.now() - live.paused_at
        live.paused_at = None
        stats = live.handle.stats
        stats.total_pause_s += paused_s
        stats.longest_pause_s = max(stats.longest_pause_s, paused_s)
        return paused_s
