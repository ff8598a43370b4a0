"""Parks, resumes and victims while steps are in flight, by example at every depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lane_asks import Ask
from lane_rig import LaneRig
from lane_worlds import every_nth, prompt
from scripted_oracle import solo

if TYPE_CHECKING:
    from reprieve.request import ParkBy

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
AHEAD = pytest.mark.parametrize("depth", [2, 3])


WAYS = pytest.mark.parametrize("by", ["spill", "replay"])


@DEPTHS
@WAYS
def test_parked_twice_with_steps_in_flight_each_token_is_delivered_once(depth: int, by: ParkBy) -> None:
    for tokens in range(1, 9):
        rig = LaneRig(depth, num_blocks=40)
        seq = rig.ask(Ask(prompt(0, 5), 12))
        rig.ask(Ask(prompt(1, 5), 12))
        rig.look_ahead(seq, tokens)
        assert rig.parker.park(seq, "by_hand", by) in {by, "replay"}
        assert rig.lane.bring_in() == 1
        rig.lane.fill()
        rig.check()
        assert rig.parker.park(seq, "by_hand", by) in {by, "replay"}
        assert rig.lane.bring_in() == 1
        rig.run()
        for seed in range(2):
            assert rig.streams.tokens(100 + seed) == solo(prompt(seed, 5), 12)
        pauses = [event for event in rig.streams.streams[seq] if event[0] in {"paused", "resumed"}]
        assert pauses == [("paused",), ("resumed",)] * 2


@DEPTHS
def test_blocks_of_a_spilled_one_are_prefilled_by_another_in_the_same_step_and_it_comes_back_intact(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=9)
    low = [rig.ask(Ask(prompt(seed, 13), 7)) for seed in range(2)]
    rig.look_ahead(low[0], 1)
    assert rig.books.free_blocks == 1
    table = set(rig.books.of(low[0]).table) | set(rig.books.of(low[1]).table)
    urgent = rig.ask(Ask(prompt(2, 30), 2, priority=1))
    rig.step()
    assert rig.books.of(urgent).reserved >= 30
    assert set(rig.books.of(urgent).table) & table
    assert {park.by for _, park in rig.streams.parks} == {"spill"}
    rig.check()
    rig.run()
    assert [rig.streams.tokens(seq) for seq in low] == [solo(prompt(seed, 13), 7) for seed in range(2)]


@DEPTHS
def test_admissions_chunks_and_parks_of_others_do_not_stop_the_lane(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=40, step_tokens=4)
    steady = rig.ask(Ask(prompt(0, 3), 20))
    rig.step()
    rig.ask(Ask(prompt(1, 19), 3, parks={0: "spill", 1: "replay"}))
    rig.ask(Ask(prompt(2, 9), 3, arrives=3))
    while rig.books.of(steady).state != "finished":
        rig.step()
        rig.check()
        assert rig.lane.num_in_flight == depth - 1 or rig.books.of(steady).generated + depth > 20
    assert len(rig.streams.parks) == 2
    rig.run()


@AHEAD
def test_a_victim_that_is_in_no_step_is_taken_before_one_of_its_tier_that_is(depth: int) -> None:
    # 100 and 101 are constrained and of the lowest priority; 101 has no mask yet, so it is in no step.
    rig = LaneRig(depth, num_blocks=5)
    bound = [rig.ask(Ask(prompt(seed, 6), 9, mask=every_nth(3, 99))) for seed in range(2)]
    urgent = rig.ask(Ask(prompt(2, 4), 9, priority=1))
    rig.lane.bring_in()
    assert rig.books.free_blocks == 0
    del rig.masks.masks[bound[1]]
    rig.lane.fill()
    assert rig.lane.num_in_flight == depth
    assert [call[0] for call in rig.calls if call[0] in {"settle", "park"}] == ["park"]
    assert [seq for seq, _ in rig.streams.parks] == [bound[1]]
    assert rig.streams.parks[0][1].parked_by == urgent
    rig.masks.masks[bound[1]] = every_nth(3, 99)
    rig.run()
    assert rig.streams.tokens(urgent) == solo(prompt(2, 4), 9)


@AHEAD
def test_a_fence_never_sends_the_choice_to_a_later_tier(depth: int) -> None:
    # As above, but 100 is not constrained: it is in flight, and gives way all the same.
    rig = LaneRig(depth, num_blocks=5)
    first = rig.ask(Ask(prompt(0, 6), 9))
    bound = rig.ask(Ask(prompt(1, 6), 9, mask=every_nth(3, 99)))
    rig.ask(Ask(prompt(2, 4), 9, priority=1))
    rig.lane.bring_in()
    del rig.masks.masks[bound]
    rig.lane.fill()
    assert [call[0] for call in rig.calls if call[0] in {"settle", "park"}] == ["settle", "park"]
    assert [seq for seq, _ in rig.streams.parks] == [first]
    rig.masks.masks[bound] = every_nth(3, 99)
    rig.run()


@DEPTHS
def test_one_block_short_with_all_in_flight_parks_one_at_most(depth: int) -> None:
    # 1 + 3 * 2 blocks: at position 4 the first needs one more, the others have room up to position 8.
    rig = LaneRig(depth, num_blocks=7)
    for seed, length in enumerate((4, 5, 5, 5)):
        rig.ask(Ask(prompt(seed, length), 3))
    rig.lane.bring_in()
    assert rig.books.free_blocks == 0
    rig.lane.fill()
    rig.check()
    assert len(rig.streams.parks) == int(depth > 1)
    rig.run()
    assert len(rig.streams.parks) == 1
    assert [rig.streams.tokens(100 + s) for s in range(4)] == [
        solo(prompt(s, length), 3) for s, length in enumerate((4, 5, 5, 5))
    ]


@AHEAD
def test_if_somebody_surely_ends_with_a_step_in_flight_waiting_for_it_beats_parking(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=4)
    rig.ask(Ask(prompt(0, 7), 2))
    rig.ask(Ask(prompt(1, 7), 4))
    rig.run()
    assert not rig.streams.parks
    assert rig.ends() == {100: "length", 101: "length"}
