"""The run-ahead lane by example at every depth: how far ahead, ends, fences, buffers, and where the time goes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from lane_asks import Ask
from lane_rig import LaneRig
from lane_worlds import every_nth, prompt
from reprieve.step import FROM_FEED, StepBuffers
from scripted_oracle import solo

if TYPE_CHECKING:
    from scripted_holdings import Call

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
AHEAD = pytest.mark.parametrize("depth", [2, 3])
WAYS = pytest.mark.parametrize("by", ["spill", "replay"])


def order(rig: LaneRig, *heads: Call) -> list[int]:
    """Return where these calls come first, which must be there."""
    return [next(i for i, call in enumerate(rig.calls) if call[: len(head)] == head) for head in heads]


def settled_at(rig: LaneRig, launch: int) -> int:
    """Return where the step is settled that was launched by this call."""
    nth = sum(call[0] == "launch" for call in rig.calls[:launch])
    return [index for index, call in enumerate(rig.calls) if call[0] == "settle"][nth]


# How far ahead.


@DEPTHS
def test_so_many_steps_are_in_flight_and_all_but_the_first_feed_on_the_device(depth: int) -> None:
    rig = LaneRig(depth)
    rig.ask(Ask(prompt(0, 3), 9))
    rig.lane.bring_in()
    assert rig.lane.fill() == depth
    assert rig.lane.num_in_flight == depth
    assert [ticket.step.token_ids.tolist() == [FROM_FEED] for ticket in rig.device.unsettled] == [
        False,
        *[True] * (depth - 1),
    ]
    assert rig.lane.fill() == 0
    assert rig.lane.settle_oldest()
    assert rig.streams.tokens(100) == solo(prompt(0, 3), 1), "delivered before the others are settled"
    assert rig.lane.num_in_flight == depth - 1
    rig.run()


@DEPTHS
def test_a_drained_lane_has_delivered_all_and_has_nothing_in_flight(depth: int) -> None:
    rig = LaneRig(depth)
    rig.ask(Ask(prompt(0, 3), 9))
    rig.lane.bring_in()
    rig.lane.fill()
    rig.lane.drain()
    assert not rig.lane.settle_oldest()
    assert rig.streams.tokens(100) == solo(prompt(0, 3), depth)
    rig.check()
    rig.run()


@DEPTHS
def test_what_is_dropped_is_sampled_again_to_the_same_value(depth: int) -> None:
    rig = LaneRig(depth)
    for seed in range(3):
        rig.ask(Ask(prompt(seed, 5), 9))
    while rig.live():
        rig.lane.bring_in()
        rig.lane.fill()
        if rig.num_steps % 2:
            rig.lane.recover()
            assert rig.lane.num_in_flight == 0
        rig.check()
        rig.step()
    rig.run()
    assert [rig.streams.tokens(100 + seed) for seed in range(3)] == [solo(prompt(seed, 5), 9) for seed in range(3)]


# The end of a request.


@DEPTHS
def test_exactly_the_budget_asks_for_no_further_block_and_parks_nobody(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=4)
    rig.ask(Ask(prompt(0, 13), 4))
    rig.run()
    assert rig.streams.streams[100] == [*[("token", token) for token in solo(prompt(0, 13), 4)], ("ended", "length")]
    assert sum(call[1] for call in rig.calls if call[0] == "reserve" and isinstance(call[1], int)) == 0
    assert rig.device.counts["launch"] == 4
    assert rig.streams.over_runs == 0


@DEPTHS
@pytest.mark.parametrize(
    ("budget", "stops_at", "reason"), [(1, None, "length"), (1, 0, "stop"), (9, 0, "stop"), (5, 4, "stop")]
)
def test_a_request_ends_with_its_first_stop_id_or_its_last_token_whichever_comes_first(
    depth: int, budget: int, stops_at: int | None, reason: str
) -> None:
    rig = LaneRig(depth)
    rig.ask(Ask(prompt(0, 5), budget, stops_at=stops_at))
    rig.run()
    count = budget if stops_at is None else stops_at + 1
    assert rig.streams.streams[100] == [("token", t) for t in solo(prompt(0, 5), count)] + [("ended", reason)]
    surprises = min(depth - 1, budget - count)
    assert rig.streams.over_runs == surprises, "what was computed behind a surprising end is discarded"


@DEPTHS
def test_a_request_that_fills_the_pool_ends_with_its_tokens_once_all_in_flight_is_settled(depth: int) -> None:
    for stops_at, reason, count in ((None, "capacity", 13), (5, "stop", 6)):
        rig = LaneRig(depth, num_blocks=8)
        rig.ask(Ask(prompt(0, 20), 40, stops_at=stops_at))
        rig.ask(Ask(prompt(1, 20), 13, arrives=1))
        rig.run()
        assert rig.ends() == {100: reason, 101: "length"}
        assert rig.streams.tokens(100) == solo(prompt(0, 20), count)
        assert rig.streams.tokens(101) == solo(prompt(1, 20), 13)


@DEPTHS
def test_one_that_ends_while_its_last_token_is_in_flight_is_released_once_and_its_slot_is_fenced(depth: int) -> None:
    rig = LaneRig(depth, max_slots=2)
    first = rig.ask(Ask(prompt(0, 5), 9, stops_at=3))
    rig.look_ahead(first, 4)
    assert rig.parker.end(first, "cancelled")
    others = [rig.ask(Ask(prompt(seed, 5), 4)) for seed in (1, 2)]
    assert rig.lane.bring_in() == 1, "one slot is fenced"
    rig.check()
    while rig.books.slot(others[1]) is None:
        assert rig.books.slot(others[0]) == 1
        rig.step()
        rig.check()
    assert rig.books.slot(others[1]) == 0
    rig.run()
    assert [call for call in rig.calls if call[:2] == ("release", first)] == [("release", first, False)]
    assert [event for event in rig.streams.events if event[:2] == ("ended", first)] == [("ended", first, "cancelled")]
    assert [rig.streams.tokens(seq) for seq in others] == [solo(prompt(seed, 5), 4) for seed in (1, 2)]


@DEPTHS
def test_a_slot_and_its_blocks_are_reused_only_after_the_last_step_that_reads_them(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=6, max_slots=2)
    ending = rig.ask(Ask(prompt(0, 5), 20, stops_at=4))
    staying = rig.ask(Ask(prompt(1, 5), 8))
    rig.lane.bring_in()
    waiting = rig.ask(Ask(prompt(2, 7), 6))
    rig.run()
    last = max(i for i, call in enumerate(rig.calls) if call[0] == "launch" and ending in call)
    (admitted,) = order(rig, ("admit", waiting))
    assert admitted > settled_at(rig, last)
    assert rig.streams.over_runs == depth - 1
    assert rig.ends() == {ending: "stop", staying: "length", waiting: "length"}
    assert rig.streams.tokens(waiting) == solo(prompt(2, 7), 6)


# Buffers.


@DEPTHS
def test_a_device_that_reads_its_inputs_when_it_is_settled_finds_them_as_they_were(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=40, step_tokens=5)
    for seed in range(4):
        rig.ask(Ask(prompt(seed, 6 + seed), 8, parks={2: "spill"}, mask=every_nth(3, 99) if seed == 2 else None))
    rig.run()
    assert not rig.device.violations
    assert rig.device.counts["settle"] == rig.device.counts["launch"] > 8


@AHEAD
def test_with_one_set_of_buffers_for_all_steps_that_device_finds_other_inputs(depth: int) -> None:
    rig = LaneRig(depth)
    shared = StepBuffers(rig.shape)
    rig.lane._spare_buffers = lambda: shared  # type: ignore[method-assign]
    rig.ask(Ask(prompt(0, 6), 8))
    with pytest.raises(AssertionError, match="was overwritten before its step was settled"):
        rig.run()


# Where the time goes.


@DEPTHS
def test_the_seconds_of_launches_and_of_the_books_are_told_apart_and_those_of_the_device_are_neither(
    depth: int,
) -> None:
    now = 0.0
    costs = {"launch": 1.0, "settle": 100.0, "gather": 10000.0, "scatter": 1000000.0}

    def pass_time(call: str, nth: int) -> None:
        nonlocal now
        now += costs[call]

    rig = LaneRig(depth, num_blocks=9, timer=lambda: now)
    rig.device.fault = pass_time
    for seed in range(3):
        rig.ask(Ask(prompt(seed, 9), 9))
    rig.run()
    counts = rig.device.counts
    assert counts["gather"] == counts["scatter"] > 0
    assert rig.seconds.launch_s == counts["launch"]
    assert rig.seconds.books_s == counts["gather"] * 10000 + counts["scatter"] * 1000000, "parks and resumes are theirs"


@pytest.mark.parametrize("call", ["launched", "watch", "run", "delivered", "sat_out"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_receiver_that_raises_costs_no_buffers_and_leaves_nothing_in_flight(call: str, depth: int) -> None:
    rig = LaneRig(depth)
    seqs = [rig.ask(Ask(prompt(seed, length), 6)) for seed, length in enumerate((3, 5))]
    receiver: Any = rig.lane._receiver
    honest = getattr(receiver, call)

    def broken(*arguments: object) -> None:
        setattr(receiver, call, honest)
        raise KeyboardInterrupt

    for _ in range(3):
        setattr(receiver, call, broken)
        with contextlib.suppress(KeyboardInterrupt):
            rig.lane.bring_in()
            rig.lane.fill()
            rig.lane.settle_oldest()
        setattr(receiver, call, honest)
        rig.lane.recover()
        receiver.run()  # what was committed and not told, as an engine does first in every call
        assert rig.lane.num_in_flight == 0
    rig.run()
    assert [rig.tokens(seq) for seq in seqs] == [rig.expected(seq, 6) for seq in seqs]
    rig.check_nothing_left()
