"""The journal of live requests: what happens to their sequences becomes their events and statistics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from reprieve.deadlines import Deadlines
from reprieve.request import DONE_REASONS, RETRYABLE, Done, Failed, Paused, Resumed, Token
from reprieve.stats import EngineStats, ParkRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from reprieve.handle import Handle
    from reprieve.park import Park
    from reprieve.request import FinishReason, Tally
    from reprieve.text import TextStream
    from reprieve.trace import RowKind, Trace

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Live:
    """One live request.

    It ends at `deadline`, by the clock, and when a pause has lasted `max_pause_s` seconds, where they are given.
    `positions_lost` is how many positions of KV were computed once and dropped: a chunk below it is a replay.
    """

    seq: int
    handle: Handle
    stream: TextStream | None
    deadline: float | None = None
    max_pause_s: float | None = None
    paused_at: float | None = None
    positions_parked: int = 0
    positions_lost: int = 0

    @property
    def has_stopped(self) -> bool:
        """Whether one of its stop texts is complete."""
        return self.stream is not None and self.stream.stopped is not None

    def kind(self, start: int) -> RowKind:
        """Return what a row of it from position `start` does: its first positions, again after a park, or a token."""
        if start < self.positions_lost:
            return "replay"
        return "prefill" if start < len(self.handle.prompt_tokens) else "decode"


class Journal:
    """Maps sequences and request ids to live requests, and listens to the parker. See `reprieve.park.Listener`.

    `deadlines` are the times at which they end by themselves: whoever asks it must end who is due. What happens to
    requests is told to `trace` too, if there is one, and `closed` is called with each sequence that is kept no more.
    """

    def __init__(
        self, clock: Callable[[], float], trace: Trace | None = None, closed: Callable[[int], None] | None = None
    ) -> None:
        self.stats = EngineStats()
        self.deadlines = Deadlines()
        self._clock = clock
        self._trace = trace
        self._closed = closed
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
        if live.deadline is not None:
            self.deadlines.set(live.seq, "deadline", live.deadline)

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
        for stats in self._tallies(live):
            stats.tokens_replayed += again

    def stepped(self, live: Live) -> None:
        """Record that a step committed something of a request. The engine's own `steps` count what was settled."""
        live.handle.stats.steps += 1

    def over_run(self, live: Live | None) -> None:
        """Record that a row was discarded; its request may have ended, and is None if nobody knows it any more."""
        for stats in self._tallies(live):
            stats.over_runs += 1

    def sat_out(self, seqs: Iterable[int]) -> None:
        """Record that a step was launched without these sequences, whose next input needs the host first."""
        for seq in seqs:
            for stats in self._tallies(self._by_seq.get(seq)):
                stats.sat_out += 1

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
            finished = self.stats.requests_finished
            finished[reason] = finished.get(reason, 0) + 1
            if self._trace is not None:
                self._trace.ended(live.handle.id, reason)
            live.handle._push(event)  # noqa: SLF001  the journal fills handles
        self.close(live)

    def close(self, live: Live) -> None:
        """Stop keeping a request that has ended. Idempotent."""
        if self._by_seq.pop(live.seq, None) is not None:
            del self._by_id[live.handle.id]
            self.deadlines.drop(live.seq, "deadline", "max_pause")
            if self._closed is not None:
                self._closed(live.seq)

    # What the parker did.

    def started(self, seq: int) -> None:
        """Do nothing: the first token says it."""

    def parked(self, seq: int, park: Park) -> None:
        """Record that a request gave way."""
        live = self._by_seq[seq]
        live.paused_at = self.now()
        live.positions_parked = park.positions
        if live.max_pause_s is not None:
            self.deadlines.set(seq, "max_pause", live.paused_at + live.max_pause_s)
        other = None if park.parked_by is None else self._by_seq.get(park.parked_by)
        event = Paused(park.reason, park.by, park.ahead, None if other is None else other.handle.id)
        for stats in self._tallies(live):
            stats.spilled_bytes += park.spilled_bytes
            stats.parks_by_spill += park.by == "spill"
            stats.parks_by_replay += park.by == "replay"
            stats.parks_by_reason[park.reason] = stats.parks_by_reason.get(park.reason, 0) + 1
        if event.parked_by is not None:
            parked_for = live.handle.stats.parked_for
            parked_for[event.parked_by] = parked_for.get(event.parked_by, 0) + 1
        record = ParkRecord(live.handle.id, park.by, park.reason, event.parked_by, live.paused_at)
        self.stats.last_parks.append(record)
        if self._trace is not None:
            self._trace.paused(live.handle.id, event)
        live.handle._push(event)  # noqa: SLF001  the journal fills handles

    def resumed(self, seq: int, by: Literal["restore", "replay"], restored_bytes: int) -> None:
        """Record that a request is back."""
        live = self._by_seq[seq]
        for stats in self._tallies(live):
            stats.restored_bytes += restored_bytes
        if by == "replay":
            live.positions_lost = max(live.positions_lost, live.positions_parked)
        event = Resumed(self._close_pause(live))
        if self._trace is not None:
            self._trace.resumed(live.handle.id)
        live.handle._push(event)  # noqa: SLF001  the journal fills handles

    def ended(self, seq: int, code: FinishReason, cause: BaseException | None) -> None:
        """Record that a sequence ended before it was done."""
        self.finish(self._by_seq[seq], code, cause)

    def _close_pause(self, live: Live) -> float:
        """Return the length of the pause that ends now, in seconds; 0 if there is none."""
        if live.paused_at is None:
            return 0.0
        paused_s = self.now() - live.paused_at
        live.paused_at = None
        self.deadlines.drop(live.seq, "max_pause")
        for stats in self._tallies(live):
            stats.total_pause_s += paused_s
            stats.longest_pause_s = max(stats.longest_pause_s, paused_s)
        return paused_s

    def _tallies(self, live: Live | None) -> tuple[Tally, ...]:
        """Return where something is counted: the engine's totals, and the request's if it is known."""
        return (self.stats,) if live is None else (live.handle.stats, self.stats)
