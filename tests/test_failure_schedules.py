"""Random arrivals, parks, cancellations, damaged images and faults of every kind at every depth, checked throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from lane_asks import Ask
from lane_rig import LaneRig
from lane_worlds import MOST_STEPS, every_nth, prompt
from reprieve.errors import CannotPark, DeviceLost, RowFailed, StepFailed
from scripted_oracle import solo

if TYPE_CHECKING:
    from reprieve.request import ParkBy


@dataclass(frozen=True)
class Meddling:
    """What somebody does between two steps to one of the live sequences."""

    what: str
    which: int


ASKS = st.lists(
    st.builds(
        Ask,
        prompt=st.builds(prompt, st.integers(0, 5), st.integers(1, 14)),
        arrives=st.integers(0, 6),
        budget=st.integers(1, 24),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        replayable=st.sampled_from([True, True, False]),
        stops_at=st.sampled_from([None, None, 0, 3, 8]),
        mask=st.sampled_from([None, None, None, every_nth(3, 99)]),
    ),
    min_size=2,
    max_size=8,
)
MEDDLING = st.dictionaries(
    st.integers(0, 40),
    st.builds(
        Meddling, st.sampled_from(["spill", "replay", "resume", "cancel", "flip", "lose", "cut"]), st.integers(0, 7)
    ),
    max_size=10,
)
ROW_FAULTS = st.builds(RowFailed, st.integers(0, 4))
FAULTS = st.dictionaries(
    st.tuples(st.sampled_from(["launch", "settle", "gather", "scatter"]), st.integers(0, 12)),
    st.sampled_from([StepFailed, ValueError, MemoryError, KeyboardInterrupt]).map(lambda kind: kind("no")) | ROW_FAULTS,
    max_size=6,
)
BROKEN_FROM = st.sampled_from(
    [None, None, None, 5, 30, 60, 120]
)  # the call from which on the device is lost, if it ever is


@st.composite
def rigs(draw: st.DrawFn) -> LaneRig:
    return LaneRig(
        depth=draw(st.integers(1, 3)),
        host_blocks=draw(st.integers(0, 10)),
        computes_at_launch=draw(st.booleans()),
        mask_delay=draw(st.integers(0, 2)),
        num_blocks=draw(st.integers(4, 12)),
        max_slots=draw(st.integers(2, 6)),
        step_tokens=draw(st.integers(1, 12)),
        head_room=draw(st.sampled_from([0, 0, 1])),
        immunity=draw(st.integers(0, 4)),
    )


def meddle(rig: LaneRig, meddling: Meddling) -> None:
    live = rig.live()
    if not live:
        return
    entry = live[meddling.which % len(live)]
    ways: dict[str, ParkBy] = {"spill": "spill", "replay": "replay"}
    before = (rig.books.snapshot(), rig.store.used_bytes)
    if meddling.what in ways:
        try:
            rig.parker.park(entry.seq, "by_hand", ways[meddling.what])
        except (CannotPark, KeyboardInterrupt, DeviceLost):
            assert (rig.books.snapshot(), rig.store.used_bytes) == before
    elif meddling.what == "resume":
        rig.books.resume(entry.seq)
    elif meddling.what == "cancel":
        assert rig.parker.end(entry.seq, "cancelled")
    elif (image := rig.store._images.get(entry.seq)) is not None:
        if meddling.what == "flip":
            image.payload[meddling.which % image.num_bytes] ^= 1
        elif meddling.what == "cut":
            image.payload = image.payload[:-1]
        else:
            image.header = b""


@settings(max_examples=300, deadline=None)
@given(rigs(), ASKS, MEDDLING, FAULTS, BROKEN_FROM)
def test_whatever_fails_nothing_leaks_nobody_hangs_and_the_others_get_their_own_tokens(
    rig: LaneRig,
    asks: list[Ask],
    meddling: dict[int, Meddling],
    faults: dict[tuple[str, int], BaseException],
    broken_from: int | None,
) -> None:
    def broken() -> bool:
        return broken_from is not None and sum(rig.device.counts.values()) > broken_from

    def fault(call: str, nth: int) -> BaseException | None:
        if broken():
            return DeviceLost("gone") if call == "probe" else OSError("hm")
        return faults.get((call, nth))

    rig.device.fault = fault
    fits = rig.books.num_blocks * rig.books.block_size
    rig.coming = sorted((ask for ask in asks if len(ask.prompt) <= fits), key=lambda ask: ask.arrives)
    for step in range(MOST_STEPS):
        if step in meddling:
            meddle(rig, meddling[step])
            rig.check()
        try:
            rig.step()
        except KeyboardInterrupt:
            assert any(isinstance(error, KeyboardInterrupt) for error in faults.values())
        rig.check()
        if rig.latch.lost is not None or not (rig.coming or rig.live() or rig.lane.num_in_flight):
            break
    assert not rig.live(), "somebody hangs"
    rig.check_nothing_left()
    codes = set(rig.ends().values())
    assert codes <= {"length", "stop", "capacity", "cancelled", "step_failed", "device_lost"}
    assert ("device_lost" in codes) <= broken()
    harmed = any(entry.what in {"flip", "cut", "lose"} for entry in meddling.values())
    assert ("step_failed" in codes) <= (bool(faults) or harmed)
    if rig.latch.lost is None and not broken():
        rig.device.fault = lambda call, nth: None
        fresh = rig.ask(Ask((1, 2, 3), 3))
        rig.run()
        assert rig.streams.tokens(fresh) == solo([1, 2, 3], 3)
