"""Depth never shows: tokens, logits and ends are those of depth 1, and with room for all so is every event."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, DeviceKind
from engine_kit import VOCAB, Clock, alone, ask, prompt, tiny_model
from recording import check_nothing_left, check_stream, logits_of, recorded
from reprieve import Done, Engine, EngineConfig, Failed, Paused, Request, Resumed, Token
from reprieve.errors import RowFailed, StepFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from device_kinds import LogitTicket
    from recording import RecordingDevice
    from reprieve import Handle, LoadedModel
    from reprieve.request import Event, ParkBy
    from reprieve.step import Step

DEPTHS = (1, 2, 3)
each_depth = pytest.mark.parametrize("depth", DEPTHS)
TWO = DeviceKind("cpu", 2)
each_device = pytest.mark.parametrize("kind", [CPU, TWO], ids=str)
WORDS = -(-VOCAB // 32)


def allowing(*ids: int) -> NDArray[np.uint32]:
    """Return the mask that allows these ids alone."""
    words = np.zeros(WORDS, np.uint32)
    for token_id in ids:
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words


@dataclass(frozen=True)
class RandomMask:
    """Allows other ids after each token, all of them now and then, and none at token `ends_at`."""

    seed: int
    ends_at: int | None = None
    raises_at: int | None = None

    def __call__(self, generated: tuple[int, ...]) -> NDArray[np.uint32] | None:
        if self.raises_at == len(generated):
            raise LookupError("on purpose")
        if self.ends_at == len(generated):
            return allowing()
        random = np.random.default_rng([self.seed, *generated])
        if random.integers(4) == 0:
            return None
        return random.integers(0, 2**32, WORDS, dtype=np.uint32) | allowing(int(random.integers(VOCAB)))


@dataclass
class Plan:
    """What is asked of an engine: requests by the step before which they come, and cancels by token index."""

    requests: list[Request]
    arrivals: list[int]
    cancels: dict[int, int] = field(default_factory=dict)
    row_faults: frozenset[tuple[int, int]] = frozenset()


@dataclass
class Outcome:
    """What became of them."""

    handles: list[Handle]
    events: list[list[Event]]
    logits: list[list[bytes]]
    over_runs: int
    sat_out: int


def cancelling(engine: Engine, plan: Plan, handles: list[Handle]) -> None:
    """Let `engine` cancel requests as soon as they have so many tokens."""
    delivery = engine._delivery
    between = delivery._between

    def then_cancel(seqs: list[int]) -> None:
        between(seqs)
        for index, count in plan.cancels.items():
            if index < len(handles) and len(handles[index].tokens) == count and not handles[index].is_finished:
                engine.cancel(handles[index])

    delivery._between = then_cancel


def failing_rows(device: RecordingDevice, faults: frozenset[tuple[int, int]]) -> None:
    """Let `device` refuse the rows of these (sequence, position)."""
    launch = device.launch

    def faulty(step: Step) -> LogitTicket:
        for row, (seq, start, num_new) in enumerate(
            zip(step.seqs.tolist(), step.starts.tolist(), step.num_new.tolist(), strict=True)
        ):
            if any((seq, position) in faults for position in range(start, start + num_new)):
                raise RowFailed(row)
        return launch(step)

    device.launch = faulty  # type: ignore[method-assign]


def run(model: LoadedModel, plan: Plan, **settings: Any) -> Outcome:
    """Let an engine do all of it, checking its books after every step."""
    recording, devices = recorded(model)
    handles: list[Handle] = []
    with Engine(recording, clock=Clock(), config=EngineConfig(**settings)) as engine:
        cancelling(engine, plan, handles)
        failing_rows(devices[0], plan.row_faults)
        step = 0
        while len(handles) < len(plan.requests) or len(engine._journal):
            while len(handles) < len(plan.requests) and plan.arrivals[len(handles)] <= step:
                handles.append(engine.submit(plan.requests[len(handles)]))
            engine.step()
            engine._books.check()
            engine._store.check()
            step += 1
            assert step < 20_000, "no end in sight"
        check_nothing_left(engine)
        stats = engine.stats
        logits = [logits_of(devices[0], seq, len(handle.tokens)) for seq, handle in enumerate(handles)]
        events = [handle.take_events() for handle in handles]
        return Outcome(handles, events, logits, stats.over_runs, stats.sat_out)


def random_request(random: np.random.Generator) -> Request:
    fields: dict[str, Any] = {}
    if random.integers(4) == 0:
        ends_at, raises_at = (index if index < 6 else None for index in random.integers(3, 10, 2).tolist())
        fields["mask"] = RandomMask(int(random.integers(1000)), ends_at, raises_at)
    if random.integers(3) == 0:
        fields["banned_token_ids"] = tuple(random.integers(0, VOCAB, 3).tolist())
    if random.integers(3) == 0:
        fields["think_tokens"] = tuple(random.choice(VOCAB, 2, replace=False).tolist())
    budget = int(random.integers(1, 32))
    return Request(
        prompt(int(random.integers(1, 30)), int(random.integers(1000))),
        max_new_tokens=budget,
        min_tokens=int(random.choice([0, 0, min(budget, 7)])),
        stop_token_ids=tuple(random.integers(0, VOCAB, 3).tolist()),
        priority=int(random.integers(0, 3)),
        **fields,
    )


def random_plan(random: np.random.Generator, count: int = 8) -> Plan:
    requests = [random_request(random) for _ in range(count)]
    arrivals = np.cumsum(random.integers(0, 8, count)).tolist()
    cancels = {index: int(random.integers(1, 12)) for index in range(count) if random.integers(4) == 0}
    faults = {(int(random.integers(count)), int(random.integers(50))) for _ in range(random.integers(0, 3))}
    return Plan(requests, arrivals, cancels, frozenset(faults))


def end_of(events: Sequence[Event]) -> str:
    last = events[-1]
    assert isinstance(last, Done | Failed)
    return last.finish_reason if isinstance(last, Done) else last.code


def of_itself(event: Event) -> Event:
    """Return an event without what it says of others."""
    if isinstance(event, Paused):
        return replace(event, ahead_of_you=0)
    if isinstance(event, Failed):
        return replace(event, cause=None)
    return event


def check_alternates(events: Sequence[Event]) -> None:
    paused = False
    for event in events:
        if isinstance(event, Paused | Resumed):
            assert isinstance(event, Resumed) == paused
            paused = not paused
        assert not (paused and isinstance(event, Token))


@pytest.mark.parametrize(
    ("seed", "kind"),
    [(0, REFERENCE), *((seed, CPU) for seed in range(8)), *((seed, TWO) for seed in range(8, 16))],
    ids=str,
)
def test_any_mix_under_pressure_gives_each_request_what_depth_one_gives(seed: int, kind: DeviceKind) -> None:
    random = np.random.default_rng(seed)
    plan = random_plan(random)
    settings: dict[str, Any] = {
        "kv_blocks": int(random.choice([18, 22, 30])),
        "block_size": 4,
        "max_slots": int(random.integers(2, 7)),
        "step_tokens": int(random.choice([1, 8, 13, 64])),
        "host_kv_bytes": int(random.choice([0, 8_000, 10**7])),
        "head_room": int(random.integers(0, 2)),
        "immunity_tokens": int(random.choice([0, 4, 64])),
        "force_park_every": int(random.choice([0, 0, 5])),
    }
    results = {depth: run(tiny_model(kind=kind), plan, depth=depth, **settings) for depth in DEPTHS}
    first = results[1]
    assert first.over_runs == 0
    for depth in DEPTHS[1:]:
        other = results[depth]
        for index in range(len(plan.requests)):
            assert other.handles[index].tokens == first.handles[index].tokens, (depth, index)
            assert other.logits[index] == first.logits[index], (depth, index)
            assert end_of(other.events[index]) == end_of(first.events[index]), (depth, index)
            check_alternates(other.events[index])
    for index, (request, events) in enumerate(zip(plan.requests, first.events, strict=True)):
        if end_of(events) in {"stop", "length"} and index not in plan.cancels:
            assert first.handles[index].tokens == alone(request, tiny_model(kind=kind.oracle)).tokens


@each_device
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("every", [0, 4])
def test_with_room_for_all_every_event_is_that_of_depth_one(seed: int, every: int, kind: DeviceKind) -> None:
    random = np.random.default_rng([seed, every])
    plan = random_plan(random)
    settings: dict[str, Any] = {"kv_blocks": 400, "block_size": 4, "max_slots": 16, "force_park_every": every}
    results = {depth: run(tiny_model(kind=kind), plan, depth=depth, **settings) for depth in DEPTHS}
    for depth in DEPTHS[1:]:
        for index in range(len(plan.requests)):
            given = [of_itself(event) for event in results[depth].events[index]]
            assert given == [of_itself(event) for event in results[1].events[index]], (depth, index)
            assert results[depth].logits[index] == results[1].logits[index], (depth, index)
    paused = [event for events in results[2].events for event in events if isinstance(event, Paused)]
    assert bool(paused) == bool(every)


@each_depth
def test_exactly_the_budget_asks_for_no_further_block_and_parks_nobody(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=4, block_size=4, depth=depth) as engine:
        handle = engine.submit(ask(13, 4))
        engine.run()
        check_stream(handle.take_events(), alone(handle.request))
        assert (len(handle.tokens), handle.finish_reason) == (4, "length")
        assert engine.stats.parks_by_reason == {}
        assert engine.stats.over_runs == 0
        check_nothing_left(engine)


@each_depth
@pytest.mark.parametrize("budget", [1, 2, 8])
def test_an_end_on_the_first_token_and_on_the_last_of_the_budget_is_a_stop(depth: int, budget: int) -> None:
    free = alone(ask(13, 8)).tokens
    stop_at = 0 if budget == 1 else min(budget, free.index(free[budget - 1]) + 1) - 1
    request = ask(13, budget, stop_token_ids=(free[stop_at],))
    with Engine(tiny_model(), kv_blocks=8, block_size=4, depth=depth) as engine:
        handle = engine.submit(request)
        engine.run()
        assert handle.tokens == free[: free.index(free[stop_at]) + 1]
        assert handle.finish_reason == "stop"
        check_nothing_left(engine)


@each_depth
def test_parked_twice_while_in_flight_each_token_is_delivered_once(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=40, block_size=4, max_slots=4, depth=depth) as engine:
        handle, other = engine.submit(ask(6, 24)), engine.submit(ask(9, 24))
        while len(handle.tokens) < 3:
            engine.step()
        ways: tuple[ParkBy, ...] = ("spill", "replay")
        for by in ways:
            assert engine.park(handle, by) == by
            engine._books.check()
            engine.step()
        engine.run()
        check_stream(handle.take_events(), alone(handle.request))
        check_stream(other.take_events(), alone(other.request))
        check_nothing_left(engine)


@each_depth
def test_a_cancelled_sequence_in_flight_is_released_once_and_its_slot_goes_to_one_newcomer(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=40, block_size=4, max_slots=2, depth=depth) as engine:
        first = engine.submit(ask(5, 30))
        while len(first.tokens) < 3:
            engine.step()
        engine.cancel(first)
        assert isinstance(first.take_events()[-1], Done)
        second, third = engine.submit(ask(7, 6)), engine.submit(ask(8, 6))
        seen = set()
        while not third.is_finished:
            engine.step()
            engine._books.check()
            views = [view.request_id for view in engine.snapshot().slots if view is not None]
            assert len(views) == len(set(views))
            seen.update(views)
        engine.run()
        assert seen >= {second.id}
        check_stream(second.take_events(), alone(second.request))
        check_stream(third.take_events(), alone(third.request))
        assert first.take_events() == []
        check_nothing_left(engine)


@each_depth
def test_a_mask_that_ends_is_never_asked_again(depth: int) -> None:
    asked: list[int] = []

    def ending(generated: tuple[int, ...]) -> NDArray[np.uint32]:
        asked.append(len(generated))
        assert len(generated) < 3
        return allowing(7) if len(generated) == 2 else allowing(20, 21)

    with Engine(tiny_model(), kv_blocks=40, block_size=4, depth=depth) as engine:
        handle = engine.submit(prompt(5), mask=ending, max_new_tokens=20)
        other = engine.submit(ask(9, 24))
        engine.run()
        assert (handle.tokens[2], handle.finish_reason) == (7, "stop")  # 7 is an end-of-sequence id of the tiny model
        assert asked == [0, 1, 2]
        check_stream(other.take_events(), alone(other.request))
        check_nothing_left(engine)


@each_depth
def test_a_mask_that_raises_ends_its_row_alone_with_that_error(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=40, block_size=4, depth=depth) as engine:
        handle = engine.submit(prompt(5), mask=RandomMask(1, raises_at=2), max_new_tokens=20, ignore_eos=True)
        other = engine.submit(ask(9, 24))
        engine.run()
        assert (len(handle.tokens), handle.finish_reason) == (2, "constraint")
        assert isinstance(handle.cause, LookupError)
        check_stream(other.take_events(), alone(other.request))
        check_nothing_left(engine)


@each_depth
def test_masked_unmasked_and_masked_rows_of_one_batch_keep_to_themselves(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=60, block_size=4, depth=depth) as engine:
        three = engine.submit(prompt(5), mask=lambda _: allowing(3), max_new_tokens=6)
        free = engine.submit(ask(9, 24))
        sixty = engine.submit(prompt(6), mask=lambda _: allowing(60), max_new_tokens=6)
        engine.run()
        assert (three.tokens, sixty.tokens) == ([3] * 6, [60] * 6)
        check_stream(free.take_events(), alone(free.request))
        check_nothing_left(engine)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_row_whose_mask_needs_its_last_token_sits_out_and_the_others_go_on(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=60, block_size=4, depth=depth) as engine:
        masked = engine.submit(prompt(5), mask=RandomMask(5), max_new_tokens=12, ignore_eos=True)
        free = engine.submit(ask(5, 24))
        engine.run()
        check_stream(masked.take_events(), alone(masked.request))
        check_stream(free.take_events(), alone(free.request))
        assert masked.stats.sat_out > 0
        assert free.stats.sat_out == 0
        assert (masked.stats.steps, free.stats.steps) == (12, 24)
        assert engine.stats.steps < 36, "they shared no step"
        check_nothing_left(engine)


@each_depth
def test_a_row_with_nothing_allowed_ends_with_a_reason(depth: int) -> None:
    with Engine(tiny_model(), kv_blocks=60, block_size=4, depth=depth) as engine:
        both = engine.submit(prompt(5), mask=lambda _: allowing(26), banned_token_ids=[26], max_new_tokens=6)
        fifth = engine.submit(prompt(6), mask=RandomMask(3, ends_at=4), max_new_tokens=9, ignore_eos=True)
        engine.run()
        assert (both.tokens, both.finish_reason) == ([], "constraint")
        assert (len(fifth.tokens), fifth.finish_reason) == (4, "constraint")
        check_nothing_left(engine)


@each_depth
def test_no_end_comes_before_the_least_number_of_tokens(depth: int) -> None:
    free = alone(ask(13, 8)).tokens
    with Engine(tiny_model(), kv_blocks=60, block_size=4, depth=depth) as engine:
        handle = engine.submit(prompt(13), stop_token_ids=free[:4], min_tokens=6, max_new_tokens=20)
        engine.run()
        assert not set(handle.tokens[:6]) & {*free[:4], 7, 11}
        check_nothing_left(engine)


@each_depth
def test_after_thinking_has_ended_it_neither_ends_nor_begins_again(depth: int) -> None:
    free = alone(ask(13, 40)).tokens
    end = free[3]
    start = next(token for token in free[free.index(end) + 1 :] if token != end)
    with Engine(tiny_model(), kv_blocks=60, block_size=4, depth=depth) as engine:
        handle = engine.submit(ask(13, 40, think_tokens=(start, end)))
        engine.run()
        after = handle.tokens[handle.tokens.index(end) + 1 :]
        assert handle.tokens[: free.index(end) + 1] == free[: free.index(end) + 1]
        assert not {start, end} & set(after)
        assert len(after) > 30
        check_nothing_left(engine)


@each_depth
@pytest.mark.parametrize("nth", range(10))
def test_a_launch_that_fails_takes_its_rows_along_once_what_was_in_flight_is_delivered(depth: int, nth: int) -> None:
    def fail(step: Step, launch: Callable[[Step], LogitTicket], count: int) -> LogitTicket:
        if count == nth:
            raise StepFailed("on purpose")
        return launch(step)

    outcomes = []
    for each in (1, depth):
        recording, devices = recorded(tiny_model())
        with Engine(recording, kv_blocks=60, block_size=4, depth=each) as engine:
            launch, count = devices[0].launch, iter(range(1000))
            devices[0].launch = lambda step, launch=launch, count=count: fail(step, launch, next(count))  # type: ignore[method-assign,misc]
            handles = [engine.submit(ask(length, 10)) for length in (3, 5, 9)]
            engine.run()
            fresh = engine.submit(ask(4, 5))
            engine.run()
            check_stream(fresh.take_events(), alone(fresh.request))
            outcomes.append([(handle.tokens, handle.finish_reason) for handle in handles])
            check_nothing_left(engine)
    assert outcomes[0] == outcomes[1]
    assert any(reason == "step_failed" for _, reason in outcomes[0])
