"""A failure at every call of a run, at every depth: nothing is lost, and the others get their solo tokens."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import pytest

from lane_asks import Ask
from lane_worlds import World, every_nth, prompt
from reprieve.errors import DeviceLost, RowFailed, StepFailed
from scripted_holdings import Settings
from scripted_oracle import VOCAB

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from lane_rig import LaneRig

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
POSITIONS = 9 * 4

# Six in a pool for about three, of every kind: parked by both ways, in chunks, with surprising ends, bound by a mask.
WORLD = World(
    Settings(num_blocks=9, max_slots=4, step_tokens=9, immunity=1),
    host_blocks=9,
    computes_at_launch=False,
    mask_delay=1,
    asks=(
        Ask(prompt(0, 7), budget=9, parks={4: "spill", 6: "replay"}),
        Ask(prompt(1, 6), budget=8, stops_at=4),
        Ask(prompt(2, 5), budget=10, mask=every_nth(3, 99)),
        Ask(prompt(3, 11), budget=5, parks={1: "spill", 2: "spill"}),
        Ask(prompt(4, 3), budget=9, arrives=4, priority=1, parks={2: "replay"}),
        Ask(prompt(5, 4), budget=6, cancelled_at=3),
    ),
)


class Fault:
    """Raises `error` at the `nth` call of a kind, once; remembers who was in that call, and what was in flight."""

    def __init__(self, rig: LaneRig, call: str, nth: int, error: BaseException) -> None:
        self.rig, self.call, self.nth, self.error = rig, call, nth, error
        self.doomed: set[int] = set()  # the sequences of the step that fails which do not end, or give way, before it
        self.coming: dict[int, int] = {}  # tokens that a sequence has, or gets by steps in flight before this one
        rig.device.fault = self

    def __call__(self, call: str, nth: int) -> BaseException | None:
        if call == "probe" and isinstance(self.error, OSError):
            return DeviceLost("gone")
        if call == "probe" and isinstance(self.error, ArithmeticError):
            return KeyboardInterrupt()
        if (call, nth) != (self.call, self.nth):
            return None
        if call in {"launch", "settle"}:
            self.remember(-1 if call == "launch" else 0)
        return self.error

    def remember(self, index: int) -> None:
        before = self.rig.books.flights[:index]
        flight = self.rig.books.flights[index]
        for entry in self.rig.books.entries.values():
            ahead = [row.samples for other in before for row in other.rows if row.entry is entry and row.is_live]
            self.coming[entry.seq] = entry.generated + sum(ahead)
        for seq, coming in self.coming.items():
            ask, generated = self.rig.asks[seq], self.rig.books.generated(seq)
            # What is in flight behind a token that ends a request, or after which it is parked, is not delivered.
            last = [token + 1 for token in ask.parks if generated <= token < coming]
            self.coming[seq] = min([coming, len(ask.comes_to(POSITIONS)[0]), *last])
            rows = [index for index, row in enumerate(flight.rows) if row.entry.seq == seq and row.is_live]
            fails_alone = isinstance(self.error, RowFailed) and self.error.row < len(flight.rows)
            is_meant = not fails_alone or rows == [getattr(self.error, "row", None)]
            if (
                rows
                and is_meant
                and self.coming[seq] == coming < len(ask.comes_to(POSITIONS)[0])
                and coming not in last
            ):
                self.doomed.add(seq)


@functools.cache
def num_calls(depth: int) -> Counter[str]:
    """Return how often a run with no fault calls what."""
    rig = WORLD.rig(depth)
    rig.run()
    WORLD.check(rig)
    return rig.device.counts


def faulty_runs(depth: int, call: str, error: BaseException) -> Iterator[tuple[LaneRig, Fault]]:
    """Run the world once for each call of a kind, with that one failing."""
    assert num_calls(depth)[call] >= {"launch": 20, "settle": 20, "gather": 3, "scatter": 3}[call]
    for nth in range(num_calls(depth)[call]):
        rig = WORLD.rig(depth)
        fault = Fault(rig, call, nth, error)
        while rig.latch.lost is None and (rig.coming or rig.live() or rig.lane.num_in_flight):
            assert rig.num_steps < 1000
            with contextlib.suppress(KeyboardInterrupt):
                rig.step()
            rig.check()
        assert rig.device.counts[call] > nth, "the fault was met"
        rig.check_nothing_left()
        # Only after an interrupt is a ticket settled that was settled, or dropped, before.
        assert not rig.device.settled_again or isinstance(error, KeyboardInterrupt | ArithmeticError)
        yield rig, fault


def check_ends(rig: LaneRig, failed: dict[int, str]) -> None:
    """Check that each of `failed` ended so, and that everybody else got what it would have got alone."""
    for seq, ask in rig.asks.items():
        tokens, reason = ask.comes_to(POSITIONS)
        told = rig.streams.tokens(seq)
        if seq in failed:
            assert rig.ends()[seq] == failed[seq]
            assert told == tokens[: len(told)]
        else:
            assert rig.ends()[seq] == reason
            assert told == tokens


STEP_FAULTS = [StepFailed("no"), ValueError("hm"), MemoryError()]
ROW_FAULTS = [RowFailed(0), RowFailed(1), RowFailed(2, "constraint")]


@pytest.mark.parametrize("error", STEP_FAULTS, ids=repr)
@pytest.mark.parametrize("call", ["launch", "settle"])
@DEPTHS
def test_a_step_that_fails_ends_its_own_rows_after_the_tokens_before_it(
    depth: int, call: str, error: BaseException
) -> None:
    for rig, fault in faulty_runs(depth, call, error):
        check_ends(rig, dict.fromkeys(fault.doomed, "step_failed"))
        for seq in fault.doomed:
            assert len(rig.streams.tokens(seq)) == fault.coming[seq]


@pytest.mark.parametrize("error", ROW_FAULTS, ids=repr)
@DEPTHS
def test_a_row_that_fails_ends_alone_after_the_tokens_before_it(depth: int, error: RowFailed) -> None:
    num_doomed = 0
    for rig, fault in faulty_runs(depth, "launch", error):
        is_there = error.row < len(rig.device.launched[fault.nth])
        check_ends(rig, dict.fromkeys(fault.doomed, error.code if is_there else "step_failed"))
        for seq in fault.doomed:
            assert len(rig.streams.tokens(seq)) == fault.coming[seq]
        num_doomed += is_there and len(fault.doomed) == 1
    assert num_doomed > 3


@pytest.mark.parametrize("error", STEP_FAULTS, ids=repr)
@pytest.mark.parametrize("call", ["gather", "scatter"])
@DEPTHS
def test_a_copy_that_fails_harms_nobody(depth: int, call: str, error: BaseException) -> None:
    for rig, _ in faulty_runs(depth, call, error):
        check_ends(rig, {})


@pytest.mark.parametrize("call", ["launch", "settle", "gather", "scatter"])
@DEPTHS
def test_after_an_interrupt_everybody_goes_on(depth: int, call: str) -> None:
    for rig, _ in faulty_runs(depth, call, KeyboardInterrupt()):
        check_ends(rig, {})


@pytest.mark.parametrize("call", ["launch", "settle"])
@DEPTHS
def test_an_interrupt_while_a_failure_is_looked_into_fails_nobody(depth: int, call: str) -> None:
    for rig, _ in faulty_runs(depth, call, ArithmeticError("interrupt the probe")):
        check_ends(rig, {})


class Liar:
    """Answers with `bad` for every row of the `nth` step that is settled; remembers whom that hits."""

    def __init__(self, rig: LaneRig, nth: int, bad: int) -> None:
        self.rig, self.nth, self.bad = rig, nth, bad
        self.doomed: set[int] = set()
        rig.device.answer = self

    def __call__(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        if self.rig.device.counts["settle"] == self.nth + 1:
            rows = [row for row in self.rig.books.flights[0].rows if row.is_live]
            if any(row.samples for row in rows):  # of others the answer is not looked at
                self.doomed = {row.entry.seq for row in rows}
            tokens[:] = self.bad
        return tokens


@pytest.mark.parametrize("bad", [VOCAB, -3])
@DEPTHS
def test_an_answer_that_is_no_token_ends_the_rows_of_its_step_alone(depth: int, bad: int) -> None:
    num_doomed = 0
    for nth in range(num_calls(depth)["settle"]):
        rig = WORLD.rig(depth)
        liar = Liar(rig, nth, bad)
        rig.run()
        check_ends(rig, dict.fromkeys(liar.doomed, "step_failed"))
        num_doomed += len(liar.doomed)
    assert num_doomed > 20


@pytest.mark.parametrize("error", [DeviceLost("gone"), OSError("hm")], ids=repr)
@pytest.mark.parametrize("call", ["launch", "settle", "gather", "scatter"])
@DEPTHS
def test_a_lost_device_ends_everybody_once_after_the_tokens_that_it_had_computed(
    depth: int, call: str, error: BaseException
) -> None:
    for rig, fault in faulty_runs(depth, call, error):
        assert rig.latch.lost is not None
        early = {seq for seq, code in rig.ends().items() if code != "device_lost"}
        check_ends(rig, dict.fromkeys(set(rig.asks) - early, "device_lost"))
        for seq, coming in fault.coming.items():
            assert len(rig.streams.tokens(seq)) == coming
