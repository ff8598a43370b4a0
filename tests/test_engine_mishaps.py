"""Interrupts, callbacks, clocks and devices that misbehave: nothing is lost, repeated, or left hanging."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine_kit import Clock, alone, ask, check_as_alone, faulty_engine, small_engine, tiny_model
from recording import check_nothing_left, check_stream, recorded
from reprieve import Engine, Handle, Request, Token
from reprieve import lane as lane_module
from reprieve.errors import DeviceLost, EngineBusy, InvalidArgument, RequestFailed
from reprieve.launch import settle
from reprieve.step import StepResult

if TYPE_CHECKING:
    from device_kinds import LogitTicket
    from reprieve.journal import Live
    from reprieve.step import Step


def interrupt_once(calls: int = 0) -> Any:
    """Return a function that lets `calls` calls pass and then interrupts, once."""
    left = [calls]

    def maybe() -> None:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    return maybe


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "where", ["before settle", "as settle returns", "after settle", "after a token", "before a token"]
)
def test_an_interrupt_anywhere_in_a_step_loses_and_repeats_no_token(
    where: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine(depth=depth) as engine:
        handles = [engine.submit(ask(5, 6, seed)) for seed in range(3)]
        engine.step()
        maybe = interrupt_once(1)
        token = engine._journal.token

        def interrupted_settle(*arguments: Any) -> StepResult:
            if where == "before settle":
                maybe()
            result = settle(*arguments)
            if where == "as settle returns":
                maybe()
            return result

        def interrupted_token(live: Live, token_id: int, *, shown: bool) -> None:
            if where == "before a token":
                maybe()
            token(live, token_id, shown=shown)
            if where == "after a token":
                maybe()

        monkeypatch.setattr(lane_module, "settle", interrupted_settle)
        monkeypatch.setattr(engine._journal, "token", interrupted_token)
        if where == "after settle":
            run = engine._delivery.run
            monkeypatch.setattr(engine._delivery, "run", lambda: (maybe(), run()))
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        engine._books.check()
        engine.run()
        assert engine.stats.tokens_generated == 3 * 6
        check_as_alone(*handles)
        check_nothing_left(engine)


def interrupted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step once, interrupted just before the first token is told to its stream."""
    with monkeypatch.context() as patch:
        patch.setattr(engine._journal, "token", lambda *_, **__: interrupt_once()())
        with pytest.raises(KeyboardInterrupt):
            engine.step()


@pytest.mark.parametrize("call", ["cancel", "park", "resume", "submit", "close"])
def test_after_an_interrupt_every_call_delivers_first(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        handle = engine.submit(ask(5, 6))
        engine.step()
        interrupted(engine, monkeypatch)
        assert len(handle.tokens) == 1
        calls = {
            "cancel": lambda: engine.cancel(handle),
            "park": lambda: engine.park(handle),
            "resume": lambda: engine.resume(handle),
            "submit": lambda: engine.submit((1,)),
            "close": engine.close,
        }
        calls[call]()
        events = handle.take_events()
        tokens = [event.id for event in events if isinstance(event, Token)]
        assert tokens == alone(handle.request).tokens[:2]
        assert isinstance(events[0], Token)
        assert isinstance(events[1], Token), "the token comes before whatever the call did"


def test_after_an_interrupt_the_last_token_still_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        handle = engine.submit(ask(5, 2))
        engine.step()
        interrupted(engine, monkeypatch)
        assert not handle.is_finished
        check_stream(list(handle), alone(handle.request))
        check_nothing_left(engine)


def test_what_a_replay_computed_again_is_counted_once_whatever_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine(step_tokens=8) as engine:
        first, second = engine.submit(ask(9, 6, seed=1)), engine.submit(ask(9, 6, seed=2))
        while len(second.tokens) < 2:
            engine.step()
        engine.park(second, "replay")
        lost = engine._journal.by_id(second.id)
        assert lost is not None
        for _ in range(2):
            interrupted(engine, monkeypatch)
        engine.run()
        assert second.stats.tokens_replayed == lost.positions_parked == 10
        check_as_alone(first, second)


def test_after_an_interrupt_close_ends_everybody_and_closes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, device = faulty_engine(kv_blocks=40, block_size=4)
    handles = [engine.submit(ask(5, 6, seed)) for seed in range(3)]
    maybe = interrupt_once()
    monkeypatch.setattr(lane_module, "settle", lambda *_: maybe())
    with pytest.raises(KeyboardInterrupt), engine:
        engine.run()
    assert [handle.finish_reason for handle in handles] == ["cancelled"] * 3
    with pytest.raises(DeviceLost):
        device._device.probe()


@pytest.mark.parametrize("deed", ["close", "step", "exit"])
def test_who_is_told_of_a_lost_device_finds_everybody_ended(deed: str) -> None:
    seen: list[str | None] = []
    engines: list[Engine] = []
    handles: list[Handle] = []

    def shut_down(lost: DeviceLost) -> None:
        seen.extend(handle.finish_reason for handle in handles)
        if deed == "close":
            engines[0].close()
        elif deed == "step":
            assert engines[0].step().state == "idle"
        else:
            sys.exit(3)

    engine, faults, _ = faulty_engine(kv_blocks=40, block_size=4, on_device_lost=shut_down)
    engines.append(engine)
    with engine:
        handles += [engine.submit(ask(5, 6, seed)) for seed in range(3)]
        engine.step()
        faults.is_lost = True
        faults.launch = RuntimeError("gone")
        if deed == "exit":
            with pytest.raises(SystemExit):
                engine.step()
        else:
            engine.step()
        assert seen == ["device_lost"] * 3
    assert [handle.finish_reason for handle in handles] == ["device_lost"] * 3


@dataclass(frozen=True)
class Answered:
    """A step that comes to the same token in each row."""

    step: Step
    token: int

    def settle(self) -> StepResult:
        return StepResult(np.full(self.step.num_rows, self.token, np.int32))


@pytest.mark.parametrize("token", [61, 10**6, -3, -(2**31)])
def test_a_device_that_answers_with_no_token_fails_its_step(token: int) -> None:
    recording, devices = recorded(tiny_model())
    with Engine(recording, kv_blocks=40, block_size=4) as engine:
        broken = [engine.submit(ask(5, 6, seed)) for seed in range(2)]
        launch = devices[0].launch

        def launch_once(step: Step) -> Answered:
            devices[0].launch = launch  # type: ignore[method-assign]
            return Answered(step, token)

        devices[0].launch = launch_once  # type: ignore[method-assign,assignment]
        engine.step()
        assert [handle.finish_reason for handle in broken] == ["step_failed"] * 2
        sound = engine.submit(ask(5, 6, seed=9))
        engine.run()
        check_as_alone(sound)
        check_nothing_left(engine)


def test_a_clock_that_raises_or_goes_back_loses_no_event() -> None:
    clock = Clock()
    with small_engine(clock=clock) as engine:
        handle = engine.submit(ask(6, 5))
        engine.step()
        clock.now = "broken"  # type: ignore[assignment]
        engine.park(handle)
        clock.now = 3.0
        engine.run()
        assert handle.stats.longest_pause_s == 0
        check_as_alone(handle)
        check_nothing_left(engine)


def test_ctrl_c_is_taken_at_the_end_of_the_call() -> None:
    engine, _, device = faulty_engine(kv_blocks=40, block_size=4, max_slots=4, depth=1)
    with engine:
        handles = [engine.submit(ask(5, 6, seed)) for seed in range(3)]
        launch, finished = device.launch, []

        def launch_with_a_signal(step: Step) -> LogitTicket:
            signal.raise_signal(signal.SIGINT)
            ticket = launch(step)
            finished.append(step.num_rows)
            return ticket

        device.launch = launch_with_a_signal  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert finished == [3]
        assert [len(handle.tokens) for handle in handles] == [1, 1, 1]
        device.launch = launch  # type: ignore[method-assign]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        engine.run()
        check_as_alone(*handles)
        check_nothing_left(engine)


def test_a_second_ctrl_c_does_not_wait() -> None:
    engine, _, device = faulty_engine(kv_blocks=40, block_size=4)
    with engine:
        handle = engine.submit(ask(5, 6))
        launch, finished = device.launch, []

        def launch_with_two_signals(step: Step) -> LogitTicket:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            finished.append(step)
            return launch(step)

        device.launch = launch_with_two_signals  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert not finished
        device.launch = launch  # type: ignore[method-assign]
        engine.run()
        check_as_alone(handle)
        check_nothing_left(engine)


def test_a_second_thread_is_told_so_and_changes_nothing() -> None:
    engine, _, device = faulty_engine(kv_blocks=40, block_size=4, depth=1)
    with engine:
        handle = engine.submit(ask(5, 6))
        launch, met = device.launch, []

        def launch_and_let_another_try(step: Step) -> LogitTicket:
            def try_all() -> None:
                for call in (engine.step, lambda: engine.cancel(handle), lambda: engine.submit((1,)), handle.result):
                    with pytest.raises(EngineBusy, match="one thread at a time"):
                        call()
                    met.append(call)

            other = threading.Thread(target=try_all)
            other.start()
            other.join()
            return launch(step)

        device.launch = launch_and_let_another_try  # type: ignore[method-assign]
        engine.step()
        assert len(met) == 4
        device.launch = launch  # type: ignore[method-assign]
        engine.run()
        check_as_alone(handle)
        check_nothing_left(engine)


def test_a_device_that_forgets_its_ticket_is_named_in_the_failure() -> None:
    engine, _, device = faulty_engine(kv_blocks=40, block_size=4)
    with engine:
        handle = engine.submit(ask(5, 6))
        device.launch = lambda _: None  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(RequestFailed, match="step_failed"):
            handle.result()
        assert "launch returned None, not a ticket" in str(handle.cause)


def test_a_clock_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="clock: must be a function, not None"):
        small_engine(clock=None)


@pytest.mark.parametrize("host_kv_bytes", [2**40, 2**50, 2**63 - 1])
def test_a_host_budget_beyond_all_counting_is_ample(host_kv_bytes: int) -> None:
    with small_engine(host_kv_bytes=host_kv_bytes, kv_blocks=12) as engine:
        handles = [engine.submit(ask(9, 20, seed)) for seed in range(3)]
        engine.run()
        assert engine.stats.parks_by_spill > 0
        check_as_alone(*handles)


def test_without_head_room_a_replay_does_not_storm_and_priority_is_kept() -> None:
    with small_engine(kv_blocks=32, max_slots=2, head_room=0, step_tokens=8, host_kv_bytes=0) as engine:
        low = engine.submit(ask(64, 12, seed=1))
        engine.step()
        high = engine.submit(ask(62, 12, seed=2, priority=1))
        steps = 0
        while not high.tokens:
            engine.step()
            steps += 1
        assert steps <= 24, "the higher priority waits for the lower one's replays"
        engine.run()
        assert engine.stats.tokens_replayed <= 2 * 64
        check_as_alone(low, high)
        check_nothing_left(engine)


def test_texts_and_ids_from_a_generator_are_kept() -> None:
    request = Request((n for n in (1, 2, 3)), stop=(text for text in ("a", "b")), stop_token_ids=iter((4,)))  # type: ignore[arg-type]
    assert (request.prompt, request.stop, request.stop_token_ids) == ((1, 2, 3), ("a", "b"), (4,))
    request = Request(np.array([5, 6], np.int32), max_new_tokens=np.int64(3))  # type: ignore[arg-type]
    assert [type(token_id) for token_id in request.prompt] == [int, int]
    assert type(request.max_new_tokens) is int


def test_two_streams_may_be_read_in_turn_and_new_requests_submitted_meanwhile() -> None:
    with small_engine(kv_blocks=14, max_slots=3) as engine:
        first, second = engine.submit(ask(9, 12, seed=1)), engine.submit(ask(9, 12, seed=2))
        third = None
        events: dict[str, list[Any]] = {first.id: [], second.id: []}
        for ours, theirs in zip(first, second, strict=False):
            events[first.id].append(ours)
            events[second.id].append(theirs)
            third = third or engine.submit(ask(3, 4, seed=3))
        assert third is not None
        events[first.id] += list(first)
        events[second.id] += list(second)
        third.result()
        check_as_alone(third)
        # zip takes from the first before it finds the second at its end
        assert len(events[first.id]) + len(events[second.id]) >= 26
        check_nothing_left(engine)


def test_an_image_left_by_an_interrupted_restore_does_no_harm() -> None:
    with small_engine() as engine:
        handle = engine.submit(ask(6, 9))
        engine.step()
        engine.park(handle, "spill")
        drop = engine._store.drop
        engine._store.drop = lambda seq: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine._store.drop = drop  # type: ignore[method-assign]
        engine.step()
        engine.park(handle, "spill")
        engine.run()
        assert handle.tokens == alone(handle.request).tokens
        check_nothing_left(engine)


def test_an_exception_as_ctrl_c_is_being_deferred_leaves_the_handler_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    install = signal.signal

    def install_and_raise(number: int, handler: Any) -> Any:
        install(number, handler)
        monkeypatch.setattr(signal, "signal", install)
        raise TimeoutError("an alarm of somebody's")

    with small_engine() as engine:
        handle = engine.submit(ask(5, 6))
        monkeypatch.setattr(signal, "signal", install_and_raise)
        with pytest.raises(TimeoutError):
            engine.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        engine.run()
        check_as_alone(handle)
