"""What is counted, for each request and for all: fed by the journal, read in one call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine_kit import Clock
from reprieve.handle import Handle
from reprieve.journal import Journal, Live
from reprieve.park import Park
from reprieve.request import Done, Failed, Paused, Request, RequestStats, Resumed, Tally, Token
from reprieve.stats import EngineStats, ParkRecord


def opened(journal: Journal, seq: int, name: str, prompt_tokens: int = 5, **fields: Any) -> Live:
    """Return a live request without text."""
    handle = Handle(Request([1] * prompt_tokens), name, [1] * prompt_tokens, lambda _: None)
    live = Live(seq, handle, None, **fields)
    journal.open(live)
    return live


def spilled(positions: int = 4, ahead: int = 0, parked_by: int | None = None) -> Park:
    return Park("spill", "exhausted", positions, 100, ahead, parked_by)


def counted(tally: Tally) -> dict[str, object]:
    """Return what is not as it was at the beginning."""
    fresh = type(tally)()
    names = tally.__dataclass_fields__
    return {name: getattr(tally, name) for name in names if getattr(tally, name) != getattr(fresh, name)}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(clock: Clock) -> Journal:
    return Journal(clock)


def test_tokens_steps_over_runs_and_who_sat_out_are_counted_for_the_request_and_for_all(journal: Journal) -> None:
    first, second = opened(journal, 1, "first"), opened(journal, 2, "second")
    for live in (first, first, second):
        journal.stepped(live)
        journal.chunk(live, 0, 5)
        journal.token(live, 17, shown=True)
    journal.over_run(first)
    journal.over_run(None)
    journal.sat_out([1, 2, 99])
    journal.sat_out([2])
    assert counted(first.handle.stats) == {
        "prompt_tokens": 5, "tokens_generated": 2, "steps": 2, "over_runs": 1, "sat_out": 1
    }  # fmt: skip
    assert counted(second.handle.stats) == {"prompt_tokens": 5, "tokens_generated": 1, "steps": 1, "sat_out": 2}
    # One of those who sat out was not known, and is counted all the same; steps are counted where they are settled.
    assert counted(journal.stats) == {"tokens_generated": 3, "over_runs": 2, "sat_out": 4}
    assert [event for event in first.handle.take_events() if isinstance(event, Token)] == [Token(17, 0), Token(17, 1)]


def test_an_over_run_of_a_request_that_has_ended_is_still_counted_with_it(journal: Journal) -> None:
    live = opened(journal, 1, "first")
    journal.finish(live, "stop")
    journal.over_run(live)
    assert live.handle.stats.over_runs == journal.stats.over_runs == 1


def test_parks_are_counted_by_way_and_reason_and_by_whom_they_made_room_for(journal: Journal, clock: Clock) -> None:
    live, other = opened(journal, 1, "first"), opened(journal, 2, "other")
    journal.parked(1, spilled(ahead=3, parked_by=2))
    clock.now += 2
    journal.resumed(1, "restore", 90)
    journal.parked(1, Park("replay", "priority", 6, 0, 0, 2))
    clock.now += 5
    journal.resumed(1, "replay", 0)
    journal.parked(1, Park("replay", "by_hand", 7, 0, 1))
    journal.finish(other, "length")
    journal.parked(1, Park("replay", "exhausted", 7, 0, 0, 2))  # for one that is not live any more
    events = live.handle.take_events()
    assert events == [
        Paused("exhausted", "spill", 3, "other"),
        Resumed(2.0),
        Paused("priority", "replay", 0, "other"),
        Resumed(5.0),
        Paused("by_hand", "replay", 1, None),
        Paused("exhausted", "replay", 0, None),
    ]
    both = {
        "parks_by_spill": 1,
        "parks_by_replay": 3,
        "parks_by_reason": {"exhausted": 2, "priority": 1, "by_hand": 1},
        "spilled_bytes": 100,
        "restored_bytes": 90,
        "longest_pause_s": 5.0,
        "total_pause_s": 7.0,
    }
    assert counted(live.handle.stats) == {"prompt_tokens": 5, "parked_for": {"other": 2}} | both
    stats = journal.stats
    assert list(stats.last_parks) == [
        ParkRecord("first", "spill", "exhausted", "other", 100.0),
        ParkRecord("first", "replay", "priority", "other", 102.0),
        ParkRecord("first", "replay", "by_hand", None, 107.0),
        ParkRecord("first", "replay", "exhausted", None, 107.0),
    ]
    assert counted(stats) == both | {"last_parks": stats.last_parks, "requests_finished": {"length": 1}}
    assert counted(other.handle.stats) == {"prompt_tokens": 5}


def test_only_what_was_computed_before_counts_as_replayed(journal: Journal) -> None:
    live = opened(journal, 1, "first", prompt_tokens=6)
    assert [live.kind(start) for start in (0, 5, 6)] == ["prefill", "prefill", "decode"]
    journal.parked(1, Park("replay", "exhausted", 7, 0, 0))
    journal.resumed(1, "replay", 0)
    assert [live.kind(start) for start in (0, 6, 7)] == ["replay", "replay", "decode"]
    journal.chunk(live, 0, 4)
    journal.chunk(live, 4, 3)
    journal.chunk(live, 7, 1)
    assert live.handle.stats.tokens_replayed == journal.stats.tokens_replayed == 7


def test_requests_are_counted_by_how_they_ended_each_once(journal: Journal) -> None:
    lives = [opened(journal, seq, f"r{seq}") for seq in range(4)]
    for live, reason in zip(lives, ("length", "length", "cancelled", "nan"), strict=True):
        journal.finish(live, reason)  # type: ignore[arg-type]
        journal.finish(live, "stop")
    assert journal.stats.requests_finished == {"length": 2, "cancelled": 1, "nan": 1}
    assert lives[2].handle.take_events() == [Done("cancelled")]


def test_of_many_parks_the_newest_are_remembered(journal: Journal, clock: Clock) -> None:
    opened(journal, 1, "first")
    for number in range(200):
        clock.now = float(number + 100)
        journal.parked(1, spilled())
        journal.resumed(1, "restore", 0)
    parks = journal.stats.last_parks
    assert [record.at for record in parks] == [float(number) for number in range(236, 300)]


@pytest.mark.parametrize("stats", [EngineStats(), RequestStats()], ids=["engine", "request"])
def test_a_copy_is_equal_and_does_not_change_any_more(stats: Tally) -> None:
    for number, name in enumerate(stats.__dataclass_fields__):
        match getattr(stats, name):
            case dict() as table:
                table["length"] = number
            case int() | float():
                setattr(stats, name, number + 1)
            case remembered:
                remembered.append(ParkRecord("a", "spill", "forced", None, 1.0))
    snapshot = stats.copy()
    assert snapshot == stats
    assert len(counted(snapshot)) == len(stats.__dataclass_fields__)
    for name in stats.__dataclass_fields__:
        before = snapshot.copy()
        match getattr(stats, name):
            case dict() as table:
                table["stop"] = 1
            case int() | float():
                setattr(stats, name, -1)
            case remembered:
                remembered.extend(itertools.repeat(remembered[0], 100))
                assert len(remembered) == 64
        assert getattr(stats, name) != getattr(snapshot, name)
        assert snapshot == before


# How long a pause may last.


def test_a_pause_that_lasts_too_long_is_due_and_one_that_has_ended_never(journal: Journal, clock: Clock) -> None:
    live = opened(journal, 1, "first", max_pause_s=10.0)
    other = opened(journal, 2, "other")
    journal.parked(2, spilled())
    journal.parked(1, spilled())
    clock.now += 9
    assert (journal.deadlines.next(), journal.deadlines.due(clock.now)) == (110.0, None)
    journal.resumed(1, "restore", 0)
    clock.now += 9
    assert (journal.deadlines.next(), journal.deadlines.due(clock.now)) == (None, None)
    journal.parked(1, spilled())  # counts anew
    clock.now += 9
    assert journal.deadlines.due(clock.now) is None
    clock.now += 1
    assert journal.deadlines.due(clock.now) == (1, "max_pause")
    journal.ended(1, "max_pause", None)
    assert live.handle.take_events()[-1] == Failed("max_pause", retryable=True)
    assert live.handle.stats.longest_pause_s == 10.0
    assert (journal.deadlines.next(), len(journal.deadlines)) == (None, 0)
    assert other.handle.is_paused


def test_a_deadline_goes_on_while_paused_and_whichever_comes_first_ends_the_request(
    journal: Journal, clock: Clock
) -> None:
    opened(journal, 1, "hasty", deadline=105.0, max_pause_s=10.0)
    opened(journal, 2, "patient", deadline=115.0, max_pause_s=10.0)
    for seq in (1, 2):
        journal.parked(seq, spilled())
    ended = []
    clock.now = 120.0
    while (due := journal.deadlines.due(clock.now)) is not None:
        ended.append(due)
        journal.ended(*due, None)
    assert ended == [(1, "deadline"), (2, "max_pause")]
    assert len(journal.deadlines) == 0
