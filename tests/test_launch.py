"""The retry loop: what each kind of failure does at every position, and that the loop ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from launch_kit import BUDGET, FAULTS, by_row, crowded, fails, prompt
from reprieve.errors import (
    BooksMisused,
    DeviceLost,
    InvalidArgument,
    KvExhausted,
    ReprieveError,
    RowFailed,
    StepAborted,
    StepFailed,
)
from reprieve.latch import FaultLatch, classified
from reprieve.launch import end_rows, settle
from reprieve.step import StepResult
from scripted import Rig
from scripted_oracle import solo

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from reprieve.step import Step, StepBuffers, StepCounts
    from scripted_holdings import Call

# A step that goes well.


@pytest.mark.parametrize("parks", [0, 1, 2])
def test_each_shortage_parks_one_victim_and_the_rest_are_launched_in_slot_order(parks: int) -> None:
    rig = crowded(parks)
    ticket = rig.launch()
    assert ticket is not None
    parked = rig.journal.named("parked")
    assert [event[1] for event in parked] == [100 + index for index in range(parks)], "ties go to the lower slot"
    assert rig.device.launched == [list(range(parks, 6))], "no partial step"
    rig.settle(ticket)
    rig.check()
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(6)]
    assert not rig.store.used_bytes


def test_blocks_are_counted_before_anybody_grows() -> None:
    # 12 blocks held, 2 free, and the step needs 6 at once: exactly two give way.
    rig = Rig(num_blocks=14)
    for seed in range(6):
        rig.books.submit(prompt(seed, 7), BUDGET)
    rig.step()
    rig.step()
    rig.device.launched.clear()
    rig.launch()
    assert len(rig.journal.named("parked")) == 2
    assert rig.device.launched == [[2, 3, 4, 5]]


def test_nothing_to_do_launches_nothing() -> None:
    rig = Rig()
    assert rig.launch() is None
    assert rig.calls == []


def test_nobody_is_admitted_inside_the_loop_and_a_victim_stays_out_of_the_step_that_parked_it() -> None:
    rig = crowded(2)
    late = rig.books.submit(prompt(9, 1), 2, priority=5)
    del rig.calls[:]
    ticket = rig.launch()
    assert ticket is not None
    assert not [call for call in rig.calls if call[0] == "admit"]
    victims = [event[1] for event in rig.journal.named("parked")]
    assert len(victims) == 2
    assert not set(victims) & set(ticket.step.seqs.tolist())
    assert late not in ticket.step.seqs
    assert set(rig.books.waiting()) == {*victims, late}


def test_the_buffers_hold_the_step_until_it_is_settled() -> None:
    rig = crowded(1)
    ticket = rig.launch()
    assert ticket is not None
    assert ticket.step.seqs.base is rig.buffers.seqs
    assert ticket.step.seqs.tolist() == rig.books.residents()
    rig.settle(ticket)
    rig.check()


# One row fails.


@pytest.mark.parametrize("parks", [0, 2])
@pytest.mark.parametrize("row", ["first", "middle", "last"])
@pytest.mark.parametrize("code", ["step_failed", "nan", "constraint", "no such reason"])
def test_a_failed_row_ends_alone_and_the_others_are_launched_again(parks: int, row: str, code: str) -> None:
    rig = crowded(parks)
    staying = [entry.seq for entry in by_row(rig)][parks:]
    index = {"first": 0, "middle": len(staying) // 2, "last": len(staying) - 1}[row]
    error = RowFailed(index, code)
    fails(rig, "launch", error)
    ticket = rig.launch()
    assert ticket is not None
    failed = staying.pop(index)
    assert ticket.step.seqs.tolist() == staying
    assert rig.journal.ends == {failed: (code if code != "no such reason" else "step_failed", error)}
    assert ("release", failed, False) in rig.calls, "its blocks are not kept for reuse"
    before = rig.calls.index(("release", failed, False))
    assert rig.calls[before - 1] == ("hand_back",), "nothing is in flight when it is released"
    assert rig.device.counts["probe"] == 0
    rig.settle(ticket)
    rig.check()
    rig.run()
    assert list(rig.journal.ends) == [failed, *(seq for seq in rig.journal.ends if seq != failed)]
    assert [rig.journal.ends[seq][0] for seq in staying] == ["length"] * len(staying)


def test_the_loop_ends_although_the_device_fails_a_row_each_time() -> None:
    rig = crowded(2)
    rig.device.fault = lambda call, nth: RowFailed(0) if call == "launch" else None
    assert rig.launch() is None
    assert rig.device.launched == [list(range(start, 6)) for start in range(2, 6)]
    assert len(rig.journal.ends) == 4
    assert len(rig.books.waiting()) == 2, "the parked do not notice"
    rig.check()
    rig.device.fault = lambda call, nth: None
    rig.run()
    assert [code for code, _ in rig.journal.ends.values()] == ["step_failed"] * 4 + ["length"] * 2


@pytest.mark.parametrize("row", [-1, 6, 10**6, "first", None])
def test_a_failed_row_that_does_not_exist_fails_the_step(row: int) -> None:
    rig = crowded(0)
    fails(rig, "launch", RowFailed(row))
    with pytest.raises(StepAborted) as failed:
        rig.launch()
    assert failed.value.seqs == tuple(rig.books.residents())
    assert rig.books.snapshot() == rig.books.before_reserve
    assert not rig.journal.ends


# The whole step fails.


@pytest.mark.parametrize("parks", [0, 1, 2])
@pytest.mark.parametrize(("error", "probe", "raised"), FAULTS)
def test_a_failed_launch_leaves_the_books_as_just_before_reserve(
    parks: int, error: BaseException, probe: BaseException | None, raised: type[BaseException]
) -> None:
    rig = crowded(parks)
    fails(rig, "launch", error, probe=probe)
    with pytest.raises(raised) as failed:
        rig.launch()
    assert rig.books.snapshot() == rig.books.before_reserve
    assert len(rig.journal.named("parked")) == parks, "parks made before it stand"
    assert not rig.journal.ends
    if isinstance(failed.value, StepAborted):
        assert failed.value.seqs == tuple(100 + index for index in range(parks, 6))
        assert isinstance(failed.value.__cause__, StepFailed)
        assert error in (failed.value.__cause__, failed.value.__cause__.__cause__)
    rig.check()
    rig.device.fault = lambda call, nth: None
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(6)]


@pytest.mark.parametrize("parks", [0, 1, 2])
@pytest.mark.parametrize(("error", "probe", "raised"), [*FAULTS, (RowFailed(0), None, StepAborted)])
def test_a_failed_settle_leaves_the_books_as_just_before_reserve(
    parks: int, error: BaseException, probe: BaseException | None, raised: type[BaseException]
) -> None:
    rig = crowded(parks)
    fails(rig, "settle", error, probe=probe)
    ticket = rig.launch()
    assert ticket is not None
    with pytest.raises(raised):
        rig.settle(ticket)
    assert rig.books.snapshot() == rig.books.before_reserve
    assert not rig.journal.ends
    rig.check()
    rig.device.fault = lambda call, nth: None
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(6)]


@pytest.mark.parametrize("call", ["launch", "settle"])
def test_the_rows_of_a_failed_step_end_and_the_others_do_not_notice(call: str) -> None:
    rig = crowded(2)
    error = StepFailed("no")
    fails(rig, call, error)
    assert not rig.step()
    assert rig.journal.ends == {100 + index: ("step_failed", error) for index in range(2, 6)}
    assert rig.books.residents() == []
    assert [rig.books.state(seq) for seq in (100, 101)] == ["parked_spill"] * 2
    assert rig.latch.lost is None
    rig.check()
    rig.run()
    assert [rig.tokens(100 + seed) for seed in range(2)] == [solo(prompt(seed, 7), BUDGET) for seed in range(2)]
    assert rig.books.free_blocks == 13


def test_a_row_that_has_ended_in_the_meantime_is_passed_over() -> None:
    rig = crowded(0)
    rig.parker.end(101, "cancelled")
    end_rows(rig.parker, StepAborted((100, 101)))
    assert [(seq, code) for seq, (code, _) in rig.journal.ends.items()] == [(101, "cancelled"), (100, "step_failed")]
    rig.check()


BAD_TOKENS: list[Callable[[NDArray[np.int32]], object]] = [
    lambda tokens: tokens[:-1],
    lambda tokens: np.append(tokens, np.int32(0)),
    lambda tokens: tokens.astype(np.int64),
    lambda tokens: tokens.reshape(-1, 1),
    lambda tokens: np.repeat(tokens, 2)[::2],
    lambda tokens: tokens.tolist(),
    lambda tokens: None,
]


@pytest.mark.parametrize("bad", BAD_TOKENS)
def test_a_device_that_answers_with_anything_but_the_tokens_fails_the_step(
    bad: Callable[[NDArray[np.int32]], NDArray[np.int32]],
) -> None:
    rig = crowded(1)
    ticket = rig.launch()
    assert ticket is not None
    rig.device.answer = bad
    with pytest.raises(StepAborted):
        rig.settle(ticket)
    assert rig.books.snapshot() == rig.books.before_reserve


def test_a_bug_of_the_books_goes_through_as_it_is_with_the_reservation_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(buffers: StepBuffers) -> StepCounts:
        raise InvalidArgument("token_ids", "is too short")

    rig = crowded(1)
    monkeypatch.setattr(rig.books, "fill", refuse)
    with pytest.raises(InvalidArgument):
        rig.launch()
    assert rig.books.snapshot() == rig.books.before_reserve
    monkeypatch.undo()
    ticket = rig.launch()
    assert ticket is not None

    def refuse_too(tokens: NDArray[np.int32], outcomes: NDArray[np.uint8]) -> None:
        raise InvalidArgument("outcomes", "is too short")

    monkeypatch.setattr(rig.books, "commit", refuse_too)
    with pytest.raises(InvalidArgument):
        rig.settle(ticket)
    assert rig.books.snapshot() == rig.books.before_reserve
    assert rig.device.counts["probe"] == 0


def test_an_answer_that_is_no_token_fails_the_step_and_not_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = crowded(0)
    ticket = rig.launch()
    assert ticket is not None

    def refuse(tokens: NDArray[np.int32], outcomes: NDArray[np.uint8]) -> None:
        raise InvalidArgument("tokens", "holds an id that is none")

    monkeypatch.setattr(rig.books, "commit", refuse)
    with pytest.raises(StepAborted) as aborted:
        rig.settle(ticket)
    assert list(aborted.value.seqs) == ticket.step.seqs.tolist()
    assert isinstance(aborted.value.__cause__, StepFailed)
    assert rig.books.snapshot() == rig.books.before_reserve


def test_settling_with_nothing_in_flight_is_refused() -> None:
    class Strange:
        """A ticket of nobody's."""

        def __init__(self, step: Step) -> None:
            self.step = step

        def ready(self) -> bool:
            return True

        def settle(self) -> StepResult:
            return StepResult(np.zeros(self.step.num_rows, np.int32))

    rig = crowded(0)
    ticket = rig.launch()
    assert ticket is not None
    rig.settle(ticket)
    before = rig.books.snapshot()
    with pytest.raises(BooksMisused):
        settle(rig.books, rig.device, Strange(ticket.step), rig.outcomes)
    assert rig.books.snapshot() == before


# Nobody can give way.


def test_only_the_rows_that_cannot_grow_end_and_the_others_go_on() -> None:
    # Two that can be neither spilled (no host budget) nor replayed; 4 blocks full, none free.
    rig = Rig(host_blocks=0, num_blocks=5)
    for seed in range(2):
        rig.books.submit(prompt(seed, 7), BUDGET, replayable=False)
    rig.step()
    rig.step()
    ticket = rig.launch()
    assert ticket is not None
    assert ticket.step.seqs.tolist() == [101]
    code, cause = rig.journal.ends[100]
    assert code == "capacity"
    assert isinstance(cause, KvExhausted)
    assert (cause.needed, cause.free) == (2, 1)
    assert ("release", 100, True) in rig.calls, "its tokens are right"
    rig.settle(ticket)
    rig.run()
    assert rig.journal.ends[101][0] == "length"
    assert rig.tokens(101) == solo(prompt(1, 7), BUDGET)


def test_a_lone_sequence_fills_the_pool_and_ends_with_its_tokens_and_the_next_is_served() -> None:
    rig = Rig(num_blocks=8)
    lone = rig.books.submit(prompt(0, 20), 40)
    rig.run()
    assert rig.journal.ends[lone][0] == "capacity"
    assert len(rig.tokens(lone)) == 32 - 20 + 1, "the last token is never fed"
    after = rig.books.submit(prompt(1, 20), 13)
    rig.run()
    assert rig.tokens(after) == solo(prompt(1, 20), 13)
    assert not rig.journal.named("parked")


# What a failure means.


def test_typed_failures_are_taken_as_they_are_and_others_by_the_probe_alone() -> None:
    rig = Rig()
    for typed in (StepFailed("device lost"), DeviceLost("fine")):
        assert classified(rig.device, typed) is typed
        assert typed.__cause__ is None
    assert rig.device.counts["probe"] == 0
    error = RuntimeError("CUDA error: device lost")
    verdict = classified(rig.device, error)
    assert type(verdict) is StepFailed
    assert verdict.__cause__ is error
    lost = DeviceLost("gone")
    rig.device.fault = lambda call, nth: lost
    assert classified(rig.device, error) is lost
    rig.device.fault = lambda call, nth: StepFailed("not even a probe")
    assert type(classified(rig.device, error)) is DeviceLost
    assert rig.device.counts["probe"] == 3


def test_the_latch_is_set_once_and_its_first_reason_stays() -> None:
    told: list[DeviceLost] = []
    latch = FaultLatch(told.append)
    first = DeviceLost("first")
    latch.trip(first)
    latch.trip(DeviceLost("second"))
    assert latch.lost is first
    assert told == [first]


def test_a_callback_that_raises_is_logged_and_masks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Call] = []

    def shut_down(lost: DeviceLost) -> None:
        calls.append(("shut down", latch.lost))
        latch.trip(DeviceLost("from inside"))
        raise ReprieveError("the shutdown failed")

    latch = FaultLatch(shut_down)
    first = DeviceLost("first")
    latch.trip(first)
    latch.trip(first)
    assert latch.lost is first
    assert calls == [("shut down", first)], "the latch is set before the callback, which is called once"
    assert [record.exc_info is not None for record in caplog.records if "callback" in record.message] == [True]


def test_a_latch_without_a_callback_only_keeps_the_reason() -> None:
    latch = FaultLatch()
    reasons = [latch.lost]
    latch.trip(DeviceLost("gone"))
    reasons.append(latch.lost)
    assert [repr(reason) for reason in reasons] == ["None", "DeviceLost('gone')"]


@pytest.mark.parametrize("call", ["launch", "settle", "gather", "scatter"])
def test_a_lost_device_trips_the_latch_wherever_it_is_found(call: str) -> None:
    rig = crowded(2)
    fails(rig, call, OSError("hm"), nth=0 if call in {"gather", "scatter"} else None, probe=DeviceLost("gone"))
    for _ in range(50):
        if rig.latch.lost is not None:
            break
        rig.step()
    assert rig.latch.lost is not None
    assert rig.latch.lost.args == ("gone",)
    assert not rig.live()
    rig.check()
    assert rig.books.free_blocks == rig.books.num_blocks
