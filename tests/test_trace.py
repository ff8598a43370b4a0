"""The trace: it is valid, it says what happened, and it stays within its bounds."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from engine_kit import ask, check_as_alone, small_engine
from reprieve import Paused
from reprieve.errors import InvalidArgument
from reprieve.trace import PoolRecord, RowRecord, StepRecord, Trace
from reprieve.trace_events import PAUSES, SLOTS
from trace_kit import check_pauses, checked, ns, of_phase, read

if TYPE_CHECKING:
    from pathlib import Path

    from trace_kit import Event


class Timer:
    """Seconds as the test sets them."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def step(number: int, began: float, ended: float, *rows: RowRecord) -> StepRecord:
    """Return a settled step; times count from when a `Timer` begins."""
    return StepRecord(number, 50 + began, 50 + ended, rows)


def decode(request_id: str | None, slot: int, start: int = 9, *, is_over_run: bool = False) -> RowRecord:
    return RowRecord(request_id, slot, "decode", start, 1, is_over_run)


def written(trace: Trace, folder: Path) -> list[Event]:
    """Return the events of a trace that was written and passed all checks."""
    path = folder / "trace.json"
    trace.write(path)
    return read(path)


def spans(events: list[Event]) -> list[tuple[str, float, float]]:
    """Return name, begin and end in seconds of all slices of slots."""
    return [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in of_phase(events, "X")]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_storm_is_told_completely_and_changes_nothing(depth: int, tmp_path: Path) -> None:
    trace = Trace()
    pressure = {"kv_blocks": 17, "host_kv_bytes": 6_000, "head_room": 0, "immunity_tokens": 2}
    with small_engine(**pressure, depth=depth, trace=trace) as engine:
        handles = [engine.submit(ask(9 + number, 24, seed=number)) for number in range(6)]
        engine.run()
        stats = engine.stats.copy()
    check_as_alone(*handles)
    events = written(trace, tmp_path)
    rows = of_phase(events, "X")
    assert {row["cat"] for row in rows} == {"prefill", "replay", "decode"}
    for handle in handles:
        mine = [row for row in rows if row["args"]["request"] == handle.id and not row["args"]["over_run"]]
        assert len(mine) == handle.stats.steps
        again = sum(row["args"]["tokens"] for row in mine if row["cat"] == "replay")
        assert again == handle.stats.tokens_replayed
        # The last chunk of a prompt samples the first token, each decode another one.
        assert sum(row["cat"] == "decode" for row in mine) == len(handle.tokens) - 1
    pauses = check_pauses(events)
    assert {pause["cat"] for pause in pauses} == {"spill", "replay"}
    assert len(pauses) == stats.parks_by_spill + stats.parks_by_replay
    assert {pause["args"]["ended_by"] for pause in pauses} == {"resumed"}
    assert len(of_phase(events, "b")) == stats.steps
    ends = {event["args"]["request"]: event["args"]["finish_reason"] for event in of_phase(events, "i")}
    assert ends == dict.fromkeys((handle.id for handle in handles), "length")
    pools = [event["args"] for event in of_phase(events, "C") if event["name"] == "KV blocks"]
    assert {sum(pool.values()) for pool in pools} == {17}
    assert pools[-1]["held"] == 0
    assert max(event["args"]["paused"] for event in of_phase(events, "C") if event["name"] == "requests") > 0


def test_a_step_launched_ahead_is_drawn_from_where_the_step_before_it_ended(tmp_path: Path) -> None:
    trace = Trace(Timer())
    trace.step(step(1, 1, 3, RowRecord("a", 0, "prefill", 0, 9), decode("b", 1)))
    trace.step(step(2, 2, 4, decode("a", 0), decode("b", 1, is_over_run=True)))
    trace.step(step(3, 6, 7, decode("a", 0), decode(None, 1, is_over_run=True)))
    events = written(trace, tmp_path)
    assert spans(events) == [
        ("prefill a", 1, 3),
        ("decode b", 1, 3),
        ("decode a", 3, 4),
        ("over-run b", 3, 4),
        ("decode a", 6, 7),
        ("over-run", 6, 7),
    ]
    assert [(event["ph"], event["id"], event["ts"] / 1e6) for event in of_phase(events, "b", "e")] == [
        ("b", 1, 1),
        ("b", 2, 2),
        ("e", 1, 3),
        ("e", 2, 4),
        ("b", 3, 6),
        ("e", 3, 7),
    ]


def test_a_pause_lasts_until_its_request_is_back_or_ends_or_the_trace_does(tmp_path: Path) -> None:
    timer = Timer()
    trace = Trace(timer)
    for name in ("back", "late", "open"):
        timer.now += 1
        trace.paused(name, Paused("exhausted", "spill", 2, "other"))
    timer.now += 1
    trace.resumed("back")
    trace.paused("next", Paused("by_hand", "replay"))
    timer.now += 1
    trace.ended("late", "deadline")
    trace.ended("next", "max_pause")
    trace.resumed("nobody")
    timer.now += 1
    events = written(trace, tmp_path)
    pauses = {pause["args"].pop("request"): pause for pause in check_pauses(events)}
    assert {name: (pause["tid"], pause["ts"] / 1e6, pause["dur"] / 1e6) for name, pause in pauses.items()} == {
        "back": (1, 1, 3),
        "late": (2, 2, 3),
        "open": (3, 3, 3),
        "next": (1, 4, 1),  # on the track that became free
    }
    assert pauses["back"]["args"] == {
        "reason": "exhausted", "by": "spill", "parked_by": "other", "ahead_of_you": 2, "ended_by": "resumed"
    }  # fmt: skip
    assert [pauses[name]["args"]["ended_by"] for name in ("late", "open", "next")] == [
        "deadline",
        "the trace ends",
        "max_pause",
    ]
    timer.now += 1
    # Written again, it has gone on.
    assert max(pause["dur"] for pause in check_pauses(written(trace, tmp_path))) == 4e6


def test_an_end_is_marked_where_its_request_was(tmp_path: Path) -> None:
    timer = Timer()
    trace = Trace(timer)
    trace.step(step(1, 1, 2, decode("resident", 3), decode("parked", 4)))
    timer.now += 2
    trace.paused("parked", Paused("exhausted", "spill"))
    for name in ("resident", "parked", "queued"):
        trace.ended(name, "cancelled")
    marks = {event["args"]["request"]: event for event in of_phase(written(trace, tmp_path), "i")}
    assert {name: (mark["s"], mark["pid"], mark["tid"]) for name, mark in marks.items()} == {
        "resident": ("t", SLOTS, 4),
        "parked": ("t", PAUSES, 1),
        "queued": ("p", SLOTS, 1),
    }


def test_arrows_lead_from_the_last_row_to_the_pause_and_on_to_the_first_row_afterwards(tmp_path: Path) -> None:
    timer = Timer()
    trace = Trace(timer)
    trace.step(step(1, 1, 2, decode("a", 0)))
    timer.now = 50 + 2
    trace.paused("a", Paused("exhausted", "replay"))
    trace.step(step(2, 2, 3, decode("a", 0, is_over_run=True)))  # in flight when it gave way
    timer.now = 50 + 5
    trace.resumed("a")
    trace.step(step(3, 5, 6, RowRecord("a", 2, "replay", 0, 9)))
    trace.step(step(4, 6, 7, decode("a", 2)))
    arrows = of_phase(written(trace, tmp_path), "s", "f")
    assert [(event["ph"], event["id"], event["pid"], event["tid"], event["ts"] / 1e6) for event in arrows] == [
        ("s", 1, SLOTS, 1, 1),
        ("f", 1, PAUSES, 1, 2),
        ("s", 2, PAUSES, 1, 2),
        ("f", 2, SLOTS, 3, 5),
    ]


def test_the_pool_is_written_when_something_in_it_has_changed(tmp_path: Path) -> None:
    trace = Trace(Timer())
    for at, held, fenced in ((1, 3, 0), (2, 3, 0), (3, 2, 1), (4, 3, 0)):
        trace.pool(PoolRecord(50 + at, held, 8 - held - fenced, fenced, 3, 1))
    counters = of_phase(written(trace, tmp_path), "C")
    assert [(event["ts"] / 1e6, event["args"]) for event in counters if event["name"] == "KV blocks"] == [
        (1, {"held": 3, "free": 5, "fenced": 0}),
        (3, {"held": 2, "free": 5, "fenced": 1}),
        (4, {"held": 3, "free": 5, "fenced": 0}),
    ]
    assert {tuple(event["args"].items()) for event in counters if event["name"] == "requests"} == {
        (("new", 2), ("paused", 1))
    }


@pytest.mark.parametrize("most_events", range(1, 40))
def test_what_is_too_much_is_left_out_and_the_file_says_so(most_events: int, tmp_path: Path) -> None:
    timer = Timer()
    trace, path = Trace(timer, most_events), tmp_path / "trace.json"
    for number in range(3):
        timer.now += 1
        trace.step(step(number, number, number + 1, decode("a", 0), decode("b", 1)))
        trace.pool(PoolRecord(timer.now, number, 8 - number, 0, 1, 1))
        trace.paused("a", Paused("exhausted", "spill"))
        trace.resumed("a")
    trace.ended("a", "length")
    timer.now += 1
    trace.write(path)
    about = json.loads(path.read_text("utf-8"))["otherData"]
    events = read(path)
    needed = 3 * (4 + 2 + 6) + 1
    assert len(events) <= most_events
    assert about["is_complete"] == (most_events >= needed)
    # The last pause has no row after it, to which an arrow could lead.
    assert (len(events) == needed - 2) == (most_events >= needed)
    if most_events < needed:
        assert all(ns(event, "ts") <= round(about["stopped_at_us"] * 1000) for event in events)


def test_a_trace_of_no_events_is_refused_and_so_is_a_file_in_no_folder(tmp_path: Path) -> None:
    for bad in (0, -1, 1.5, None):
        with pytest.raises(InvalidArgument, match="most_events"):
            Trace(most_events=bad)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        Trace().write(tmp_path / "absent" / "trace.json")


def test_names_of_requests_may_be_anything(tmp_path: Path) -> None:
    trace = Trace(Timer())
    names = ['"', "\\", "\n", "\u00e9", "\ud800", ""]
    trace.step(step(1, 1, 2, *(decode(name, slot) for slot, name in enumerate(names))))
    assert [event["args"]["request"] for event in of_phase(written(trace, tmp_path), "X")] == names


# That the checks above can fail.


def spoiled(number: int, **changes: Any) -> dict[str, Any]:
    """Return a good trace of two steps and a pause, with one event changed."""
    row = {"ph": "X", "name": "decode a", "cat": "decode", "pid": SLOTS, "tid": 1, "dur": 5.0}
    args = {"request": "a", "step": 1, "start": 3, "tokens": 1, "over_run": False}
    about = {"request": "a", "reason": "forced", "by": "spill", "parked_by": None, "ahead_of_you": 0}
    pause = {"name": "paused a", "cat": "spill", "pid": PAUSES, "tid": 1}
    events: list[Event] = [
        row | {"ts": 1.0, "args": args},
        row | {"ts": 6.0, "args": args},
        pause | {"ph": "B", "ts": 11.0, "args": about},
        pause | {"ph": "E", "ts": 12.0, "args": {"ended_by": "resumed"}},
        {"ph": "C", "name": "KV blocks", "pid": 4, "tid": 1, "ts": 1.0, "args": {"held": 1, "free": 2, "fenced": 0}},
        {"ph": "C", "name": "KV blocks", "pid": 4, "tid": 1, "ts": 2.0, "args": {"held": 2, "free": 1, "fenced": 0}},
        {"ph": "s", "name": "arrow", "cat": "arrow", "id": 1, "pid": SLOTS, "tid": 1, "ts": 6.0},
        {"ph": "f", "name": "arrow", "cat": "arrow", "id": 1, "pid": PAUSES, "tid": 1, "ts": 11.0, "bp": "e"},
        *({"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {}} for pid in (SLOTS, PAUSES)),
    ]
    events[number] = {key: value for key, value in (events[number] | changes).items() if value is not None}
    about_all = {"most_events": 9, "is_complete": True, "stopped_at_us": None}
    return copy.deepcopy({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about_all})


def test_the_unspoiled_trace_passes() -> None:
    assert len(checked(spoiled(0))) == 8


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (0, {"dur": None}),
        (0, {"dur": -1.0}),
        (0, {"cat": "sleep"}),
        (0, {"ph": "Z"}),
        (0, {"pid": None}),
        (0, {"args": {}}),
        (2, {"args": None}),
        (2, {"dur": 1.0}),
        (3, {"ts": None}),
        (4, {"args": {"held": 1.5, "free": 1, "fenced": 0}}),
        (6, {"id": None}),
        (7, {"bp": None}),
        (8, {"ts": 1.0}),
    ],
)
def test_an_event_that_lacks_what_its_phase_needs_is_invalid(number: int, changes: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        checked(spoiled(number, **changes))


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (1, {"ts": 5.999}),  # overlaps
        (3, {"tid": 2}),  # ends what has not begun
        (3, {"ts": 10.0}),
        (5, {"args": {"held": 2, "free": 2, "fenced": 0}}),
        (6, {"ts": 11.5}),  # on no slice
        (7, {"id": 2}),
        (8, {"tid": 2}),  # a track without a name
    ],
)
def test_a_trace_that_contradicts_itself_is_found(number: int, changes: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        checked(spoiled(number, **changes))
