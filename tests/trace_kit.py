"""What holds of every trace that is written: the format's schema, and what a schema cannot say."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema

from reprieve.trace_events import PAUSES, SLOTS

Event = dict[str, Any]

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trace_events.schema.json").read_text("utf-8"))


def checked(trace: dict[str, Any]) -> list[Event]:
    """Return the events of a trace, in order of time, that has passed all checks; names of tracks are left out."""
    jsonschema.Draft202012Validator(SCHEMA).validate(trace)
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "M"}
    events = sorted((event for event in trace["traceEvents"] if event["ph"] != "M"), key=lambda event: ns(event, "ts"))
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] in "XBE"} <= named
    check_rows(events)
    pauses = check_pauses(events)
    check_arrows(events, pauses)
    check_steps(events)
    check_counters(events)
    return events


def read(path: Path) -> list[Event]:
    """Return the events of a trace file that has passed all checks."""
    return checked(json.loads(path.read_text("utf-8")))


def ns(event: Event, key: str) -> int:
    """Return a time of an event, given there in microseconds, in whole nanoseconds."""
    return round(float(event[key]) * 1000)


def of_phase(events: list[Event], *phases: str) -> list[Event]:
    """Return the events of these phases."""
    return [event for event in events if event["ph"] in phases]


def check_rows(events: list[Event]) -> None:
    """Assert that no two slices of a slot overlap."""
    ends: dict[int, int] = defaultdict(int)
    for event in of_phase(events, "X"):
        assert event["pid"] == SLOTS
        assert ns(event, "ts") >= ends[event["tid"]], event
        ends[event["tid"]] = ns(event, "ts") + ns(event, "dur")


def check_pauses(events: list[Event]) -> list[Event]:
    """Assert that on each track, and of each request, pauses begin and end in turns; return them as slices."""
    open_of_track: dict[int, Event] = {}
    pauses: list[Event] = []
    # Of those at one time on one track an end comes first, and events were sorted without changing their order.
    for event in of_phase(events, "B", "E"):
        assert event["pid"] == PAUSES
        if event["ph"] == "B":
            assert event["tid"] not in open_of_track, event
            names = {pause["args"]["request"] for pause in open_of_track.values()}
            assert event["args"]["request"] not in names, event
            open_of_track[event["tid"]] = event
        else:
            begin = open_of_track.pop(event["tid"])
            pauses.append(begin | {"dur": event["ts"] - begin["ts"], "args": begin["args"] | event["args"]})
    assert not open_of_track
    return pauses


def check_arrows(events: list[Event], pauses: list[Event]) -> None:
    """Assert that each arrow leads forward in time from one slice to another, of one request."""
    slices = [*of_phase(events, "X"), *pauses]
    starts = {event["id"]: event for event in of_phase(events, "s")}
    heads = {event["id"]: event for event in of_phase(events, "f")}
    assert starts.keys() == heads.keys()
    for number, start in starts.items():
        head = heads[number]
        assert ns(start, "ts") <= ns(head, "ts")
        tail_requests, head_requests = (
            {
                piece["args"]["request"]
                for piece in slices
                if (piece["pid"], piece["tid"]) == (end["pid"], end["tid"])
                and ns(piece, "ts") <= ns(end, "ts") <= ns(piece, "ts") + ns(piece, "dur")
            }
            for end in (start, head)
        )
        assert tail_requests & head_requests, (start, head)


def check_steps(events: list[Event]) -> None:
    """Assert that each step that was launched was settled, no later one before it."""
    begun = {event["id"]: event for event in of_phase(events, "b")}
    settled = [event["id"] for event in of_phase(events, "e")]
    assert settled == sorted(begun)
    for event in of_phase(events, "e"):
        assert ns(event, "ts") >= ns(begun[event["id"]], "ts")


def check_counters(events: list[Event]) -> None:
    """Assert that the blocks of the pool always add up to the same."""
    pools = [event["args"] for event in of_phase(events, "C") if event["name"] == "KV blocks"]
    assert all(pool.keys() == {"held", "free", "fenced"} for pool in pools)
    assert len({sum(pool.values()) for pool in pools}) <= 1
