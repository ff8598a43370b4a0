"""Order, cancels and isolation with steps in flight: nobody starves, nobody harms another, nothing leaks."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from lane_asks import Ask
from lane_rig import LaneRig
from lane_worlds import prompt
from reprieve.errors import UnknownRequest
from scripted_oracle import solo

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


@DEPTHS
def test_a_strictly_higher_priority_takes_the_slot_once_and_an_equal_one_never(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=8, max_slots=1)
    low = rig.ask(Ask(prompt(0, 5), 12))
    for _ in range(3):
        rig.step()
    equal = rig.ask(Ask(prompt(1, 5), 3))
    for _ in range(2):
        rig.step()
    assert not rig.streams.parks
    high = [rig.ask(Ask(prompt(2, 5), 4, priority=1))]
    rig.step()
    assert [(seq, park.reason, park.parked_by) for seq, park in rig.streams.parks] == [(low, "priority", high[0])]
    high.append(rig.ask(Ask(prompt(3, 5), 4, priority=1)))
    rig.run()
    assert len(rig.streams.parks) == 1, "no ping-pong"
    ended = [event[1] for event in rig.streams.events if event[0] == "ended"]
    assert ended == [*high, low, equal]
    assert all(rig.streams.tokens(seq) == solo(ask.prompt, ask.budget) for seq, ask in rig.asks.items())


@DEPTHS
def test_one_that_was_parked_finishes_in_bounded_time_though_a_new_request_comes_with_every_step(depth: int) -> None:
    rig = LaneRig(depth, num_blocks=12, max_slots=4)
    old = rig.ask(Ask(prompt(0, 12), 10))
    for _ in range(3):
        rig.step()
    assert rig.parker.park(old, "by_hand") == "spill"
    finished = None
    for step in range(200):
        rig.ask(Ask(prompt(step % 6, 3), 2))
        rig.step()
        rig.check()
        if finished is None and old in rig.ends():
            finished = step
    assert finished is not None
    assert finished <= 10 + 2 * depth, "it comes in before all new ones"
    assert rig.streams.tokens(old) == solo(prompt(0, 12), 10)
    rig.run()


@DEPTHS
def test_cancelling_the_queued_or_the_unknown_leaves_the_running_one_untouched(depth: int) -> None:
    alone = LaneRig(depth, max_slots=1)
    alone.ask(Ask(prompt(0, 5), 9))
    alone.run()
    rig = LaneRig(depth, max_slots=1)
    running = rig.ask(Ask(prompt(0, 5), 9))
    queued = rig.ask(Ask(prompt(1, 5), 9))
    rig.step()
    assert rig.parker.end(queued, "cancelled")
    with pytest.raises(UnknownRequest):
        rig.parker.end(999, "cancelled")
    rig.run()
    assert rig.streams.streams[running] == alone.streams.streams[running]
    assert rig.device.counts == alone.device.counts


@DEPTHS
def test_nothing_leaks_when_two_fifths_are_cancelled_wherever_they_are(depth: int) -> None:
    random = Random(4)
    rig = LaneRig(depth, host_blocks=12, num_blocks=40, max_slots=16, step_tokens=40, immunity=2)
    for number in range(120):
        rig.coming.append(Ask(prompt(number, 1 + random.randrange(9)), 10 + random.randrange(30), arrives=number // 4))
    where = ("queued", "parked", "prefilling", "decoding", "in flight")
    to_cancel = {100 + number: random.choice(where) for number in random.sample(range(120), 48)}
    seen: Counter[str] = Counter()
    while rig.coming or rig.live():
        rig.step()
        rig.lane.bring_in()
        rig.lane.fill()
        for entry in rig.live():
            is_there = entry.state.startswith(to_cancel.get(entry.seq, "nowhere"))
            if is_there or (entry.ahead and to_cancel.get(entry.seq) == "in flight"):
                seen[to_cancel[entry.seq]] += 1
                assert rig.parker.end(entry.seq, "cancelled", reuse=True)
        rig.check()
    rig.run()
    assert all(seen[state] for state in where), seen
    for seq, ask in rig.asks.items():
        if rig.ends()[seq] == "length":
            assert rig.streams.tokens(seq) == solo(ask.prompt, ask.budget)
    assert Counter(rig.ends().values())["cancelled"] == sum(seen.values())


@DEPTHS
def test_five_hundred_times_submit_three_steps_and_cancel_keep_the_free_count_and_the_work_per_round_constant(
    depth: int,
) -> None:
    rig = LaneRig(depth)
    rounds = []
    for number in range(500):
        rig.calls.clear()
        seq = rig.ask(Ask(prompt(number % 6, 6), 20))
        for _ in range(3):
            rig.step()
        assert rig.parker.end(seq, "cancelled", reuse=True)
        assert rig.lane.num_in_flight == depth - 1
        assert rig.books.free_blocks + rig.books.fenced_blocks == rig.books.num_blocks
        rounds.append(Counter(call[0] for call in rig.calls))
        del rig.books.entries[seq], rig.asks[seq]
    rig.lane.drain()
    rig.check_nothing_left()
    assert len({tuple(sorted(counts.items())) for counts in rounds[2:]}) == 1
