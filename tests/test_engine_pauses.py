"""Pauses as callers see them: who went first, for whom, for how long at most; and what the statistics say of it."""

from __future__ import annotations

import pytest

from engine_kit import Clock, alone, ask, faulty_engine, small_engine
from recording import check_nothing_left, check_stream
from reprieve import Failed, Paused, Resumed
from reprieve.errors import DeviceLost, InvalidArgument

each_depth = pytest.mark.parametrize("depth", [1, 2, 3])


@each_depth
def test_a_pause_that_lasts_too_long_ends_its_request_alone_and_trying_again_makes_sense(depth: int) -> None:
    clock = Clock()
    with small_engine(clock=clock, depth=depth) as engine:
        handle, other = engine.submit(ask(9, 30, max_pause_s=5.0)), engine.submit(ask(7, 30))
        while len(handle.tokens) < 3:
            engine.step()
        engine.park(handle)
        engine._parker.bring_in = lambda *_: 0  # type: ignore[method-assign]  # who waits stays where it is
        clock.now += 4.9
        engine.step()
        assert handle.is_paused
        clock.now += 0.2
        engine.step()
        del engine._parker.bring_in
        *_, paused, last = handle.take_events()
        assert isinstance(paused, Paused)
        assert last == Failed("max_pause", retryable=True)
        assert engine.stats.requests_finished == {"max_pause": 1}
        assert handle.stats.longest_pause_s == pytest.approx(5.1)
        engine.run()
        check_stream(other.take_events(), alone(other.request))
        check_nothing_left(engine)


def test_a_pause_that_ended_in_time_does_not_count_for_the_next() -> None:
    clock = Clock()
    with small_engine(clock=clock) as engine:
        handle = engine.submit(ask(9, 30, max_pause_s=5.0))
        for _ in range(3):
            engine.park(handle)
            clock.now += 4.0
            engine.step()
            engine.step()
        engine.run()
        check_stream(handle.take_events(), alone(handle.request))
        assert handle.stats.total_pause_s >= 4.0
        check_nothing_left(engine)


@each_depth
def test_who_gives_way_is_told_for_whom_and_how_many_come_in_before_it(depth: int) -> None:
    with small_engine(kv_blocks=10, max_slots=2, head_room=0, depth=depth) as engine:
        handles = [engine.submit(ask(12, 24, seed=seed)) for seed in range(2)]
        queued = engine.submit(ask(3, 4))
        engine.run()
        first, second = handles
        parked, other = (first, second) if first.stats.parks_by_reason else (second, first)
        events = parked.take_events()
        pauses = [event for event in events if isinstance(event, Paused)]
        assert pauses[0] == Paused("exhausted", "spill", ahead_of_you=0, parked_by=other.id)
        assert len([event for event in events if isinstance(event, Resumed)]) == len(pauses)
        assert parked.stats.parked_for == {other.id: len(pauses)}
        assert parked.stats.parks_by_reason == {"exhausted": len(pauses)}
        record = engine.stats.last_parks[0]
        assert (record.request_id, record.by, record.reason, record.parked_by) == (
            parked.id, "spill", "exhausted", other.id,
        )  # fmt: skip
        check_stream(events, alone(parked.request))
        check_stream(other.take_events(), alone(other.request))
        check_stream(queued.take_events(), alone(queued.request))
        check_nothing_left(engine)


@each_depth
def test_the_totals_are_the_sums_of_the_requests(depth: int) -> None:
    with small_engine(kv_blocks=14, head_room=0, depth=depth, force_park_every=9) as engine:
        handles = [engine.submit(ask(8, 20, seed=seed)) for seed in range(5)]
        engine.run()
        stats = engine.stats.copy()
        for name in ("tokens_generated", "over_runs", "tokens_replayed", "parks_by_spill", "parks_by_replay",
                     "spilled_bytes", "restored_bytes", "sat_out"):  # fmt: skip
            assert getattr(stats, name) == sum(getattr(handle.stats, name) for handle in handles), name
        assert stats.over_runs == 0 if depth == 1 else stats.over_runs > 0
        assert sum(stats.parks_by_reason.values()) == stats.parks_by_spill + stats.parks_by_replay > 0
        assert stats.requests_finished == {"length": 5}
        assert stats.books_s > 0
        assert stats.launch_s > 0
        engine.submit(ask(3, 3)).result()
        assert stats.requests_finished == {"length": 5}, "a copy stays as it is"


@each_depth
@pytest.mark.parametrize("nth", [0, 1, 2, 5])
def test_what_was_computed_before_the_device_was_lost_is_delivered(depth: int, nth: int) -> None:
    engine, faults, device = faulty_engine(kv_blocks=40, block_size=4, depth=depth)
    handles = [engine.submit(ask(length, 12)) for length in (3, 6)]
    launch, count = device.launch, iter(range(100))

    def lost_at_nth(step: object) -> object:
        if next(count) == nth:
            faults.is_lost = True
            raise OSError("pulled out")
        return launch(step)  # type: ignore[arg-type]

    device.launch = lost_at_nth  # type: ignore[method-assign,assignment]
    engine.run()
    for handle in handles:
        assert handle.finish_reason == "device_lost"
        assert handle.tokens == alone(handle.request).tokens[:nth]
    with pytest.raises(DeviceLost):
        engine.submit(ask(3, 3))
    engine.close()


def test_a_trace_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="trace: must be a Trace"):
        small_engine(trace="trace.json")
