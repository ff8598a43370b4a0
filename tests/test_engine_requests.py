"""Requests that come, wait, are parked, cancelled, late, odd or unlucky."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from engine_kit import Clock, alone, ask, check_as_alone, faulty_engine, prompt, small_engine, tiny_model
from recording import check_nothing_left, check_stream
from reprieve import Done, Engine, EngineConfig, Failed, Handle, Paused, Request, Resumed
from reprieve.errors import (
    DeviceLost,
    EngineClosed,
    InvalidArgument,
    RequestFinished,
    StepFailed,
    UnknownRequest,
)

# Order.


def test_the_strictly_higher_priority_takes_a_slot_once_and_equals_never_do() -> None:
    with small_engine(kv_blocks=8, max_slots=1) as engine:
        low = engine.submit(ask(5, 12, seed=1, priority=0))
        engine.step()
        equal = engine.submit(ask(5, 4, seed=2, priority=0))
        engine.step()
        assert not low.is_paused, "equals take nothing"
        high = engine.submit(ask(5, 6, seed=3, priority=1))
        engine.step()
        assert engine.snapshot().waiting == (low.id, equal.id), "parked before new"
        second = engine.submit(ask(5, 4, seed=4, priority=1))
        engine.run()
        assert (low.stats.parks_by_spill, high.stats.parks_by_spill, second.stats.parks_by_spill) == (1, 0, 0)
        paused = [event for event in low.take_events() if isinstance(event, Paused)]
        assert paused == [Paused("priority", "spill", ahead_of_you=1, parked_by=high.id)]
        check_as_alone(equal, high, second)
        check_nothing_left(engine)


def test_a_parked_sequence_is_not_starved_by_short_requests_that_keep_coming() -> None:
    with small_engine(kv_blocks=16, max_slots=3) as engine:
        parked = engine.submit(ask(9, 16, seed=1))
        while len(parked.tokens) < 4:
            engine.step()
        engine.park(parked)
        others = []
        for seed in range(200):
            others.append(engine.submit(ask(3, 2, seed=seed + 10)))
            engine.step()
            if parked.is_finished:
                break
        assert parked.is_finished
        # It is first in the order of coming in, and decodes one token a step from then on.
        assert len(others) <= 20
        engine.run()
        check_as_alone(parked, *others)
        check_nothing_left(engine)


def test_resume_by_hand_moves_to_the_front_of_its_priority_and_parks_nobody() -> None:
    with small_engine(max_slots=1) as engine:
        running = engine.submit(ask(4, 6, seed=1))
        engine.step()
        second, third = (engine.submit(ask(4, 2, seed=seed)) for seed in (2, 3))
        assert engine.resume(third) is True
        assert engine.resume(third) is True, "twice changes nothing more"
        assert engine.resume(running) is False
        engine.step()
        assert engine.snapshot().waiting == (third.id, second.id)
        assert not running.is_paused
        engine.run()
        check_as_alone(running, second, third)


# Parking by hand.


def test_park_is_a_no_op_on_who_is_off_the_device_and_an_error_on_who_is_gone() -> None:
    with small_engine(max_slots=1) as engine:
        first, queued = engine.submit(ask(4, 6, seed=1)), engine.submit(ask(4, 2, seed=2))
        engine.step()
        before = engine.snapshot()
        assert engine.park(queued) is None
        with pytest.raises(UnknownRequest, match="nobody"):
            engine.park("nobody")
        with pytest.raises(InvalidArgument, match="by: must be"):
            engine.park(first, by="magic")  # type: ignore[arg-type]
        assert engine.snapshot() == before
        assert engine.park(first) == "spill"
        assert engine.park(first) is None
        engine.run()
        for call in (engine.park, engine.resume):
            with pytest.raises(RequestFinished):
                call(first)
            with pytest.raises(UnknownRequest):
                call(first.id)
        check_as_alone(first, queued)
        check_nothing_left(engine)


def test_a_pause_is_seen_and_measured() -> None:
    clock = Clock()
    with small_engine(clock=clock, max_slots=1) as engine:
        handle = engine.submit(ask(6, 5))
        engine.step()
        engine.park(handle, "replay")
        assert handle.is_paused
        clock.now += 2.5
        engine.step()
        engine.run()
        events = handle.take_events()
        assert [event for event in events if isinstance(event, Paused | Resumed)] == [
            Paused("by_hand", "replay"),
            Resumed(2.5),
        ]
        stats = handle.stats
        assert (stats.longest_pause_s, stats.total_pause_s, stats.tokens_replayed) == (2.5, 2.5, 6)
        check_stream(events, alone(handle.request))


@pytest.mark.parametrize("where", [0, 40, -1])
def test_a_spilled_image_that_rots_is_replayed(where: int) -> None:
    with small_engine() as engine:
        handle = engine.submit(ask(9, 8))
        while len(handle.tokens) < 3:
            engine.step()
        assert engine.park(handle, "spill") == "spill"
        engine._store._images[0].payload[where] ^= 1
        engine.run()
        assert handle.stats.tokens_replayed == 11
        assert handle.stats.restored_bytes == 0
        check_as_alone(handle)
        check_nothing_left(engine)


# Ending early.


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    clock = Clock()
    with small_engine(clock=clock, max_slots=2) as engine:
        late = [engine.submit(ask(4, 50, seed=seed, deadline_s=5)) for seed in range(3)]
        engine.step()
        engine.park(late[0])
        in_time = engine.submit(ask(4, 3, seed=9))
        clock.now += 5
        assert engine.step().state == "progressed"
        for handle in late:
            last = handle.take_events()[-1]
            assert isinstance(last, Failed)
            assert (last.code, last.retryable) == ("deadline", True)
        engine.run()
        check_as_alone(in_time)
        check_nothing_left(engine)


def test_cancelling_one_leaves_the_others_untouched() -> None:
    with small_engine(max_slots=1) as engine:
        running, queued = engine.submit(ask(4, 6, seed=1)), engine.submit(ask(4, 6, seed=2))
        engine.step()
        engine.cancel(queued)
        with pytest.raises(UnknownRequest):
            engine.cancel("nobody")
        engine.cancel(queued)  # once more is a no-op
        assert queued.take_events() == [Done("cancelled")]
        engine.run()
        check_as_alone(running)
        check_nothing_left(engine)


def test_cancelling_many_at_random_leaks_nothing() -> None:
    random = np.random.default_rng(4)
    with small_engine(max_slots=16, host_kv_bytes=40_000) as engine:
        waiting = [ask(int(random.integers(1, 30)), int(random.integers(1, 20)), seed=seed) for seed in range(120)]
        doomed = set(random.choice(120, 48, replace=False).tolist())
        handles: list[Handle] = []
        while waiting or len(engine._journal):
            arriving = min(int(random.integers(0, 4)), len(waiting))
            handles.extend(engine.submit(waiting.pop()) for _ in range(arriving))
            engine.step()
            for index, handle in enumerate(handles):
                if index in doomed and not handle.is_finished and random.random() < 0.2:
                    engine.cancel(handle)
            engine._books.check()
        check_as_alone(*(handle for handle in handles if handle.finish_reason != "cancelled"))
        assert sum(handle.finish_reason == "cancelled" for handle in handles) > 20
        check_nothing_left(engine)


def test_submit_three_steps_cancel_many_times_leaves_as_much_as_before() -> None:
    with small_engine() as engine:
        for seed in range(500):
            handle = engine.submit(ask(5, 30, seed=seed % 7))
            for _ in range(3):
                engine.step()
            engine.cancel(handle)
            seen = engine.snapshot()
            assert seen.free_blocks + seen.fenced_blocks == 40
            assert seen.steps_in_flight < engine.depth + 1
        check_nothing_left(engine)


def test_close_ends_everybody_and_takes_no_more() -> None:
    with small_engine(max_slots=1) as engine:
        handles = [engine.submit(ask(4, 6, seed=seed)) for seed in range(2)]
        engine.step()
    assert [handle.finish_reason for handle in handles] == ["cancelled", "cancelled"]
    engine.close()
    for call in (engine.step, lambda: engine.submit((1, 2))):
        with pytest.raises(EngineClosed):
            call()
    assert [type(event) for event in handles[1]] == [Done]


# Bad luck.


@pytest.mark.parametrize("error", [StepFailed("bad step"), RuntimeError("anything")])
def test_a_failing_step_ends_its_rows_and_nobody_else(error: Exception) -> None:
    engine, faults, _ = faulty_engine(kv_blocks=40, block_size=4, max_slots=2)
    with engine:
        rows = [engine.submit(ask(4, 9, seed=seed)) for seed in range(2)]
        engine.step()
        parked = rows.pop()
        engine.park(parked)
        queued = engine.submit(ask(4, 3, seed=7))
        engine._parker.bring_in = lambda *_: 0  # type: ignore[method-assign]  # who waits stays where it is
        faults.launch = error
        assert engine.step().state == "progressed"
        del engine._parker.bring_in
        assert rows[0].finish_reason == "step_failed"
        assert rows[0].is_retryable
        assert rows[0].cause is not None
        engine.run()
        check_as_alone(parked, queued)
        check_nothing_left(engine)


def test_a_spill_whose_copy_fails_becomes_a_replay() -> None:
    engine, faults, _ = faulty_engine(kv_blocks=40, block_size=4)
    with engine:
        handle = engine.submit(ask(9, 9))
        engine.step()
        faults.gather = RuntimeError("copy")
        assert engine.park(handle) == "replay"
        engine.run()
        check_as_alone(handle)
        check_nothing_left(engine)


@pytest.mark.parametrize("where", ["launch", "gather"])
def test_a_lost_device_ends_everybody_once_and_new_requests_are_refused(where: Literal["launch", "gather"]) -> None:
    lost: list[DeviceLost] = []
    engine, faults, _ = faulty_engine(kv_blocks=40, block_size=4, max_slots=2, on_device_lost=lost.append)
    with engine:
        handles = [engine.submit(ask(4, 9, seed=seed)) for seed in range(4)]
        engine.step()
        engine.park(handles[0])
        faults.is_lost = True
        setattr(faults, where, RuntimeError("gone"))
        if where == "gather":
            with pytest.raises(DeviceLost):
                engine.park(handles[1])
        else:
            engine.step()
        for handle in handles:
            events = handle.take_events()
            assert sum(isinstance(event, Failed | Done) for event in events) == 1
            assert isinstance(events[-1], Failed)
            assert events[-1].code == "device_lost"
        assert len(lost) == 1
        with pytest.raises(DeviceLost):
            engine.submit((1, 2, 3))
        assert engine.step().state == "idle"
        assert len(lost) == 1
        check_nothing_left(engine)


def test_the_watchdog_names_and_ends_who_makes_no_progress() -> None:
    with small_engine() as engine:
        handle = engine.submit(
            ask(4, 9),
        )
        engine._parker.bring_in = lambda *_: 0  # type: ignore[method-assign]
        reports = [engine.step() for _ in range(16)]
        assert {(report.state, report.waiting_for) for report in reports[:-1]} == {("waiting", handle.id)}
        assert (handle.finish_reason, handle.is_retryable) == ("no_progress", True)
        del engine._parker.bring_in
        check_nothing_left(engine)


def test_logits_that_are_all_nan_end_their_row_alone() -> None:
    engine, _, device = faulty_engine(kv_blocks=40, block_size=4)
    with engine:
        broken, sound = engine.submit(ask(4, 9, seed=1)), engine.submit(ask(4, 9, seed=2))
        engine.step()
        # The keys and values of the first block, which is the first sequence's.
        device._device.scatter([0], np.full(device.block_bytes, 0xFF, np.uint8))
        engine.run()
        assert (broken.finish_reason, broken.is_retryable) == ("nan", False)
        check_as_alone(sound)
        check_nothing_left(engine)


# Odd requests.


def test_an_id_is_taken_while_its_request_is_live() -> None:
    with small_engine() as engine:
        first = engine.submit(ask(4, 3, id="mine"))
        with pytest.raises(InvalidArgument, match="id: 'mine'"):
            engine.submit(ask(5, 3, id="mine"))
        engine.run()
        second = engine.submit(ask(5, 3, id="mine"))
        with pytest.raises(UnknownRequest):
            engine._live(Handle(first.request, "other", (1,), lambda _: None))
        engine.run()
        check_as_alone(first, second)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": ()}, "prompt: is empty"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": "text"}, "prompt: .* no tokenizer"),
        ({"prompt": (1,), "stop": ("x",)}, "stop: .* no tokenizer"),
        ({"prompt": (1,), "chat": True}, "chat"),
        ({"max_new_tokens": 0}, "max_new_tokens: .* not 0"),
        ({"max_new_tokens": -1}, "max_new_tokens: .* not -1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: .* not 1.5"),
        ({"deadline_s": 0}, "deadline_s: .* not 0"),
        ({"deadline_s": float("nan")}, "deadline_s: .* not nan"),
        ({"priority": 2**31}, "priority: must be an integer from -2147483648 to 2147483647, not 2147483648"),
        ({"prompt": (3, 61)}, "prompt: token id 61 at index 1 is not one of the 61 ids 0 to 60"),
        ({"prompt": (-1,)}, "prompt: token id -1 at index 0"),
        ({"prompt": (2**31,)}, "prompt: token id 2147483648"),
        ({"prompt": (5279552648203111001,)}, "prompt: token id 5279552648203111001"),
        ({"prompt": (2**70,)}, "prompt: 1180591620717411303424 at index 0"),
        ({"prompt": ("a",)}, r"prompt\[0\]: must be an integer, not 'a'"),
        ({"prompt": (1, 2.0)}, r"prompt\[1\]: must be an integer, not 2.0"),
        ({"prompt": (True,)}, r"prompt\[0\]: must be an integer, not True"),
        ({"prompt": None}, "prompt: must be a sequence of token ids, not None"),
        ({"prompt": {1: 2}}, "prompt: must be a sequence"),
        ({"prompt": np.int64(3)}, "prompt: must be a sequence"),
        ({"stop_token_ids": None}, "stop_token_ids: must be a sequence"),
        ({"stop_token_ids": (3, 61)}, "stop_token_ids: token id 61 at index 1"),
        ({"stop": None}, "stop: must be a sequence"),
        ({"id": 7}, "id: .* not 7"),
        ({"max_tokens": 4}, "max_tokens: is no field of a request"),
        ({"chat": []}, "chat: must be True or False"),
        ({"ignore_eos": "no"}, "ignore_eos: must be True or False, not 'no'"),
        ({"prompt": (-(2**200),)}, "prompt: -1606938044258990275541962092341162602522202993782792835301376 at index 0"),
        ({"deadline_s": 10**400}, "deadline_s: must be a number of seconds"),
        ({"deadline_s": "soon"}, "deadline_s: must be a number of seconds"),
        ({"max_new_tokens": True}, "max_new_tokens: .* not True"),
        ({"stop_token_ids": (61,)}, "stop_token_ids: token id 61"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids: token id -1"),
        ({"stop": "text"}, "stop: "),
        ({"stop": ("x", "")}, r"stop\[1\]: "),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_the_next_is_right(fields: dict[str, Any], named: str) -> None:
    with small_engine() as engine:
        with pytest.raises(InvalidArgument, match=named):
            engine.submit(**{"request": fields.pop("prompt", prompt(3))} | fields)
        check_nothing_left(engine)
        handle = engine.submit(ask(5, 4))
        engine.run()
        check_as_alone(handle)


def test_no_budget_runs_to_the_context_and_a_huge_one_is_never_reserved() -> None:
    with small_engine(context_length=32) as engine:
        for budget in (None, 2**40, 2**80):
            handle = engine.submit(Request(prompt(5), max_new_tokens=budget, ignore_eos=True))
            engine.run()
            assert (len(handle.tokens), handle.finish_reason) == (32 - 5 + 1, "length")
        check_nothing_left(engine)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_blocks": 0}, "kv_blocks: .* not 0"),
        ({"block_size": -4}, "block_size: .* not -4"),
        ({"kv_blocks": 2**31 - 1, "block_size": 2**20}, "kv_blocks: is 2147483647, and there is no memory"),
        ({"kv_blocks": 2**32}, "kv_blocks: must be an integer from 1 to 2147483647, not 4294967296"),
        ({"max_slots": 2**21}, "max_slots: must be an integer from 1 to 1048576, not 2097152"),
        ({"head_room": 2**40}, "head_room: "),
        ({"immunity_tokens": 2**64}, "immunity_tokens: "),
        ({"victim": []}, "victim: "),
        ({"park_constrained": 3}, "park_constrained: "),
        ({"max_slots": 0}, "max_slots"),
        ({"step_tokens": 0}, "step_tokens"),
        ({"host_kv_bytes": -1}, "host_kv_bytes: .* not -1"),
        ({"head_room": -1}, "head_room"),
        ({"immunity_tokens": -1}, "immunity_tokens"),
        ({"victim": "oldest"}, "victim: .* not 'oldest'"),
        ({"context_length": 4096}, "context_length: is 4096, the model was made for 2048"),
        ({"kv": "int4"}, "kv: .* not 'int4'"),
        ({"blocks": 3}, "blocks: is no setting"),
        ({"config": "x"}, "config: must be an EngineConfig"),
        ({"on_device_lost": 5}, "on_device_lost: must be a function, not 5"),
        ({"device": "reference"}, "device: is 'reference', given beside a model that is loaded"),
        ({"weights": "f16"}, "weights: is 'f16', given beside a model that is loaded"),
        ({"threads": 2}, "threads: is 2, given beside a model that is loaded"),
        ({"config": EngineConfig(), "kv_blocks": 3}, "kv_blocks: is given beside config"),
        ({"force_park_by": "magic"}, "force_park_by"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Engine(tiny_model(), **settings)


def test_iterating_one_stream_drives_all() -> None:
    with small_engine() as engine:
        first, second = engine.submit(ask(4, 5, seed=1)), engine.submit(ask(6, 5, seed=2))
        check_stream(list(first), alone(first.request))
        assert second.is_finished
        check_as_alone(second)
