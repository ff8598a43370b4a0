"""What a trace is made of, and how it becomes events of Chrome's trace event format."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from reprieve.request import FinishReason, Paused

RowKind: TypeAlias = Literal["prefill", "replay", "decode"]
Event: TypeAlias = dict[str, Any]

SLOTS: Final = 1
PAUSES: Final = 2
STEPS: Final = 3
POOL: Final = 4
_GROUPS: Final = {SLOTS: "slots", PAUSES: "paused requests", STEPS: "steps in flight", POOL: "pool"}
"""Groups of tracks, which the format calls processes; a track is a thread."""


class RowRecord(NamedTuple):
    """One row of a settled step; the request is None where nobody knows it any more, as of an over-run."""

    request_id: str | None
    slot: int
    kind: RowKind
    start: int
    num_new: int
    is_over_run: bool = False


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A settled step: its number, when it was launched and when it was settled, its rows."""

    number: int
    began: float
    ended: float
    rows: tuple[RowRecord, ...]


class PoolRecord(NamedTuple):
    """The pool at a time: its blocks by what becomes of them, how many requests wait, and how many of these paused."""

    at: float
    held: int
    free: int
    fenced: int
    waiting: int
    paused: int


class PauseRecord(NamedTuple):
    """A request gave way."""

    at: float
    request_id: str
    event: Paused


class ResumeRecord(NamedTuple):
    """A request came back."""

    at: float
    request_id: str


class EndRecord(NamedTuple):
    """A request ended, wherever it was."""

    at: float
    request_id: str
    finish_reason: FinishReason


Record: TypeAlias = StepRecord | PoolRecord | PauseRecord | ResumeRecord | EndRecord


def cost(record: Record) -> int:
    """Return how many events a record becomes at most."""
    match record:
        case StepRecord(rows=rows):
            return 2 + len(rows)
        case PoolRecord():
            return 2
        case PauseRecord():
            return 6  # its begin and end, and two arrows of two events each
        case ResumeRecord():
            return 0  # counted with the pause
        case EndRecord():
            return 1


class _Place(NamedTuple):
    """Where a request was seen last: the track of its newest row or pause, and when that began, in nanoseconds."""

    group: int
    track: int
    began: int


class Events:
    """Turns records, in the order in which they came, into events; `zero` is the time that they count from.

    Each row is a slice on the track of its slot. Steps are computed one after another, so the slices of a step that
    was launched ahead begin where the step before it ended: no two on a track overlap. Steps in flight do overlap;
    they are asynchronous slices. A pause lies on the first track of its group that is free; arrows lead to it from
    the request's last row, and from it to the first row afterwards. Times are whole nanoseconds.
    """

    def __init__(self, zero: float) -> None:
        self._zero = zero
        self._settled = 0  # when the newest step was, ns
        self._places: dict[str, _Place] = {}
        self._pauses: dict[str, int] = {}  # the tracks of those that have not ended
        self._free_tracks: list[int] = []
        self._tracks: dict[tuple[int, int], str] = {}
        self._num_arrows = 0

    def of(self, records: Iterable[Record], end: float) -> Iterator[Event]:
        """Yield the events of all records; pauses that have not ended then are cut off at `end`."""
        for record in records:
            match record:
                case StepRecord():
                    yield from self._step(record)
                case PoolRecord():
                    yield from self._pool(record)
                case PauseRecord():
                    yield from self._pause(record)
                case ResumeRecord(at, request_id):
                    yield from self._end_pause(request_id, self._ns(at), "resumed")
                case EndRecord():
                    yield from self._finish(record)
        for request_id in list(self._pauses):
            yield from self._end_pause(request_id, self._ns(end), "the trace ends")
        yield from self._names()

    def _ns(self, time: float) -> int:
        return max(0, round((time - self._zero) * 1e9))

    def _step(self, step: StepRecord) -> Iterator[Event]:
        launched = self._ns(step.began)
        began, self._settled = max(launched, self._settled), max(self._ns(step.ended), self._settled, launched)
        flight = {"name": f"step {step.number}", "cat": "step", "id": step.number, "pid": STEPS, "tid": 1}
        yield flight | {"ph": "b", "ts": launched / 1e3, "args": {"rows": len(step.rows)}}
        for row in step.rows:
            name = "over-run" if row.is_over_run else row.kind
            args = {"request": row.request_id, "step": step.number, "start": row.start, "tokens": row.num_new}
            place = _Place(SLOTS, self._track(SLOTS, row.slot, "slot"), began)
            yield {
                "ph": "X",
                "name": name if row.request_id is None else f"{name} {row.request_id}",
                "cat": row.kind,
                "pid": SLOTS,
                "tid": place.track,
                "ts": began / 1e3,
                "dur": (self._settled - began) / 1e3,
                "args": args | {"over_run": row.is_over_run},
            }
            if row.request_id is None or row.is_over_run:
                continue
            before, self._places[row.request_id] = self._places.get(row.request_id), place
            if before is not None and before.group == PAUSES:
                yield from self._arrow("comes back", before, place)
        yield flight | {"ph": "e", "ts": self._settled / 1e3}

    def _pool(self, pool: PoolRecord) -> Iterator[Event]:
        counter = {"ph": "C", "pid": POOL, "tid": 1, "ts": self._ns(pool.at) / 1e3}
        yield counter | {"name": "KV blocks", "args": {"held": pool.held, "fenced": pool.fenced, "free": pool.free}}
        yield counter | {"name": "requests", "args": {"new": pool.waiting - pool.paused, "paused": pool.paused}}

    def _pause(self, pause: PauseRecord) -> Iterator[Event]:
        request_id, event = pause.request_id, pause.event
        index = heapq.heappop(self._free_tracks) if self._free_tracks else len(self._pauses)
        self._pauses[request_id] = index
        place = _Place(PAUSES, self._track(PAUSES, index, "paused"), self._ns(pause.at))
        args = {"request": request_id, "reason": event.reason, "by": event.by, "parked_by": event.parked_by}
        yield {
            "ph": "B",
            "name": f"paused {request_id}",
            "cat": event.by,
            "pid": PAUSES,
            "tid": place.track,
            "ts": place.began / 1e3,
            "args": args | {"ahead_of_you": event.ahead_of_you},
        }
        before, self._places[request_id] = self._places.get(request_id), place
        if before is not None:
            yield from self._arrow("gives way", before, place)

    def _end_pause(self, request_id: str, at: int, how: str) -> Iterator[Event]:
        """Yield the end of a request's pause, if it is paused."""
        index = self._pauses.pop(request_id, None)
        if index is not None:
            heapq.heappush(self._free_tracks, index)
            yield {"ph": "E", "pid": PAUSES, "tid": index + 1, "ts": at / 1e3, "args": {"ended_by": how}}

    def _finish(self, end: EndRecord) -> Iterator[Event]:
        """Yield a mark on the track on which the request ended; over all of them, if it never was on one."""
        yield from self._end_pause(end.request_id, self._ns(end.at), end.finish_reason)
        place = self._places.pop(end.request_id, None)
        yield {
            "ph": "i",
            "name": f"{end.request_id}: {end.finish_reason}",
            "cat": "end",
            "s": "p" if place is None else "t",
            "pid": SLOTS if place is None else place.group,
            "tid": 1 if place is None else place.track,
            "ts": self._ns(end.at) / 1e3,
            "args": {"request": end.request_id, "finish_reason": end.finish_reason},
        }

    def _arrow(self, name: str, start: _Place, to: _Place) -> Iterator[Event]:
        """Yield an arrow between the slices that begin at two places."""
        self._num_arrows += 1
        for phase, place in ({"ph": "s"}, start), ({"ph": "f", "bp": "e"}, to):
            where = {"pid": place.group, "tid": place.track, "ts": place.began / 1e3}
            yield phase | {"name": name, "cat": "arrow", "id": self._num_arrows} | where

    def _track(self, group: int, index: int, what: str) -> int:
        """Return the number of a track in its group, from 1, as 0 has a meaning of its own to viewers."""
        self._tracks[group, index + 1] = f"{what} {index}"
        return index + 1

    def _names(self) -> Iterator[Event]:
        """Yield the names of all tracks."""
        for group, name in _GROUPS.items():
            about = {"ph": "M", "pid": group, "tid": 0}
            yield about | {"name": "process_name", "args": {"name": name}}
            yield about | {"name": "process_sort_index", "args": {"sort_index": group}}
        for (group, track), name in sorted(self._tracks.items()):
            about = {"ph": "M", "pid": group, "tid": track}
            yield about | {"name": "thread_name", "args": {"name": name}}
            yield about | {"name": "thread_sort_index", "args": {"sort_index": track}}
