"""Parking and resuming: which way is taken, what is copied when, and that nothing is lost whatever fails."""

from __future__ import annotations

import logging
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reprieve.errors import (
    BooksMisused,
    CannotPark,
    DeviceLost,
    HostStoreFull,
    ImageCorrupt,
    InvalidArgument,
    KvExhausted,
    RequestFinished,
    StepFailed,
    UnknownRequest,
)
from reprieve.image_store import HostStore
from reprieve.park import NullListener, Park, Parker
from reprieve.step import OUTCOME_OVERRUN, OUTCOME_TOKEN, ArrivalPlan, NothingInFlight
from scripted import Rig
from scripted_device import ScriptedDevice
from scripted_holdings import Settings
from scripted_oracle import solo

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.request import ParkBy
    from scripted_holdings import Call


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 1000, length)]


def decoding(
    host_blocks: int = 100,
    num_blocks: int = 40,
    lengths: tuple[int, ...] = (18, 6),
    *,
    budget: int = 8,
    replayable: bool = True,
) -> Rig:
    """Return a rig whose sequences 100, 101, ... have prompts of these lengths committed and one token generated."""
    rig = Rig(host_blocks, num_blocks=num_blocks)
    for seed, length in enumerate(lengths):
        rig.books.submit(prompt(seed, length), budget, replayable=replayable)
    assert rig.step()
    assert [entry.generated for entry in rig.books.entries.values()] == [1] * len(lengths)
    del rig.calls[:]
    return rig


def ends_as_alone(rig: Rig) -> bool:
    """Run to the end and say whether everybody got the tokens of its solo run."""
    rig.run()
    entries = rig.books.entries.values()
    assert [rig.journal.ends[entry.seq][0] for entry in entries] == ["length"] * len(entries)
    return all(rig.tokens(entry.seq) == solo(entry.prompt, entry.budget) for entry in entries)


def everything(rig: Rig) -> tuple[Call, int, int]:
    return rig.books.snapshot(), rig.store.used_bytes, len(rig.store)


def failing(rig: Rig, call: str, error: BaseException | None, probe: BaseException | None = None) -> None:
    rig.device.fault = lambda name, nth: {call: error, "probe": probe}.get(name)


# Which way.


@pytest.mark.parametrize(("host_blocks", "way"), [(0, "replay"), (2, "replay"), (4, "replay"), (5, "spill")])
def test_spill_if_the_image_fits_the_budget_else_replay(host_blocks: int, way: str) -> None:
    rig = decoding(host_blocks)
    assert rig.parker.spill_blocks == host_blocks
    assert rig.parker.park(100, "by_hand") == way  # 18 positions: an image of 5 blocks
    assert rig.store.used_bytes == (5 * 32 if way == "spill" else 0)
    assert rig.parker.spill_blocks == (0 if way == "spill" else host_blocks)
    assert rig.journal.named("parked") == [("parked", 100, way, "by_hand", 18, 5 * 32 if way == "spill" else 0)]
    rig.check()
    assert ends_as_alone(rig)


def test_once_the_store_is_full_further_victims_are_replayed() -> None:
    rig = decoding(host_blocks=2, lengths=(18, 6, 7, 5))
    assert [rig.parker.park(seq, "by_hand") for seq in range(100, 104)] == ["replay", "spill", "replay", "replay"]
    rig.check()
    assert ends_as_alone(rig)


WAYS = list(product(["spill", "replay", None], [True, False], [True, False]))


@pytest.mark.parametrize(("by", "replayable", "fits"), WAYS)
def test_a_caller_can_force_either_way_and_gets_the_other_where_that_one_is_closed(
    by: ParkBy | None, replayable: bool, fits: bool
) -> None:
    rig = decoding(5 if fits else 4, replayable=replayable)
    before = everything(rig)
    spillable, wanted = fits, by or "spill"
    if not replayable and not spillable:
        with pytest.raises(CannotPark) as refused:
            rig.parker.park(100, "by_hand", by)
        assert refused.value.seq == 100
        assert isinstance(refused.value.__cause__, HostStoreFull)
        assert everything(rig) == before
        assert not rig.journal.named("parked")
    else:
        open_ways = {"spill": spillable, "replay": replayable}
        expected = wanted if open_ways[wanted] else {"spill": "replay", "replay": "spill"}[wanted]
        assert rig.parker.park(100, "by_hand", by) == expected
        assert rig.books.state(100) == f"parked_{expected}"
    rig.check()
    assert ends_as_alone(rig)


def test_with_nothing_committed_there_is_no_image() -> None:
    rig = Rig()
    rig.books.submit(prompt(0, 9), 20)
    rig.parker.bring_in()
    assert rig.parker.park(100, "by_hand", "spill") == "replay"
    assert rig.device.counts["gather"] == 0
    rig.check()
    assert ends_as_alone(rig)


def test_with_nothing_committed_and_not_replayable_the_books_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.books.submit(prompt(0, 9), 20, replayable=False)
    rig.parker.bring_in()

    def refuse(seq: int, by: ParkBy) -> None:
        raise CannotPark(seq, "they say no")

    monkeypatch.setattr(rig.books, "park", refuse)
    before = everything(rig)
    with pytest.raises(CannotPark, match="they say no"):
        rig.parker.park(100, "by_hand")
    assert everything(rig) == before
    monkeypatch.undo()
    assert rig.parker.park(100, "by_hand") == "replay", "nothing is lost by it"
    assert ends_as_alone(rig)


# Refusals change nothing.


def test_parking_the_queued_and_the_parked_is_no_change() -> None:
    rig = decoding()
    queued = rig.books.submit(prompt(9, 60), 1)
    for by in ("spill", "replay"):
        assert rig.parker.park(100, "by_hand", by) in {"spill", None}
        before = everything(rig)
        events = list(rig.journal.events)
        for seq in (100, queued):
            assert rig.parker.park(seq, "by_hand", by) is None
        assert everything(rig) == before
        assert rig.journal.events == events


def test_parking_the_unknown_and_the_finished_raises_and_changes_nothing() -> None:
    rig = decoding()
    rig.parker.end(100, "cancelled")
    before = everything(rig)
    with pytest.raises(RequestFinished):
        rig.parker.park(100, "by_hand")
    with pytest.raises(UnknownRequest):
        rig.parker.park(7, "by_hand")
    assert everything(rig) == before


@pytest.mark.parametrize("by", ["spill", "replay"])
def test_what_a_step_in_flight_computes_of_one_that_is_parked_is_discarded_and_fenced_until_then(by: ParkBy) -> None:
    rig = decoding()
    ticket = rig.launch()
    assert ticket is not None
    free, held = rig.books.free_blocks, len(rig.books.entries[100].table)
    assert rig.parker.park(100, "by_hand", by) == by
    assert (rig.books.free_blocks, rig.books.fenced_blocks) == (free, held)
    assert rig.books.generated(100) == 1
    assert rig.parker.bring_in(rig.before) == 1, "it comes back elsewhere at once"
    assert rig.books.slot(100) == 2
    rig.check()
    rig.settle(ticket)
    assert rig.outcomes[:2].tolist() == [OUTCOME_OVERRUN, OUTCOME_TOKEN]
    assert rig.books.fenced_blocks == 0
    assert rig.books.generated(100) == 1
    rig.check()
    assert ends_as_alone(rig)


FAULTS: list[tuple[BaseException, BaseException | None, type[BaseException]]] = [
    (StepFailed("no"), None, StepFailed),
    (MemoryError(), None, StepFailed),
    (KvExhausted(1, 0), None, StepFailed),
    (DeviceLost("gone"), None, DeviceLost),
    (RuntimeError("all is well"), DeviceLost("gone"), DeviceLost),
    (RuntimeError("all is well"), OSError("not even a probe"), DeviceLost),
    (KeyboardInterrupt(), None, KeyboardInterrupt),
]


@pytest.mark.parametrize("replayable", [True, False])
@pytest.mark.parametrize(("error", "probe", "meaning"), FAULTS)
def test_a_failed_copy_falls_back_to_replay_or_changes_nothing(
    error: BaseException, probe: BaseException | None, meaning: type[BaseException], replayable: bool
) -> None:
    rig = decoding(replayable=replayable)
    failing(rig, "gather", error, probe)
    before = everything(rig)
    if meaning is StepFailed and replayable:
        assert rig.parker.park(100, "by_hand") == "replay"
        assert rig.store.used_bytes == 0
    else:
        with pytest.raises(CannotPark if meaning is StepFailed else meaning):
            rig.parker.park(100, "by_hand")
        assert everything(rig) == before
        assert not rig.journal.named("parked")
    rig.check()
    rig.device.fault = lambda name, nth: None
    assert ends_as_alone(rig)


@pytest.mark.parametrize("bad", [lambda image: image[:-1], lambda image: image.view(np.uint32), lambda image: None])
def test_a_device_that_copies_something_else_counts_as_a_failed_copy(
    bad: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = decoding()
    gather = rig.device.gather
    monkeypatch.setattr(rig.device, "gather", lambda blocks: bad(gather(blocks)))
    assert rig.parker.park(100, "by_hand", "spill") == "replay"
    rig.check()


def test_a_device_whose_kv_no_header_can_hold_is_refused_at_once() -> None:
    class Odd(ScriptedDevice):
        kv_dtype = "float8_e4m3fn"

    rig = Rig()
    with pytest.raises(InvalidArgument, match="dtype"):
        Parker(rig.books, Odd([], Settings(num_blocks=4, max_slots=1)), rig.store, NullListener())


# The copy comes first.


def test_blocks_are_given_away_only_after_they_were_copied() -> None:
    rig = decoding()
    blocks = rig.books.image_blocks(100)
    rig.parker.park(100, "by_hand")
    assert rig.calls == [("gather", *blocks), ("park", 100, "spill")]


def test_blocks_that_are_reused_at_once_do_not_harm_the_image() -> None:
    rig = decoding(num_blocks=7)  # exactly full
    assert rig.books.free_blocks == 0
    late = rig.books.submit(prompt(5, 18), 8, priority=1)
    blocks = set(rig.books.entries[100].table)
    assert rig.parker.park(100, "by_hand") == "spill"
    assert rig.parker.bring_in() == 1
    assert set(rig.books.entries[late].table) == blocks
    rig.step()
    rig.check()
    assert ends_as_alone(rig)


@pytest.mark.parametrize("by", ["spill", "replay"])
@pytest.mark.parametrize("times", [1, 2])
def test_parked_after_any_number_of_tokens_a_sequence_goes_on_as_alone(by: ParkBy, times: int) -> None:
    seen = 0
    for generated in range(1, 32):
        rig = Rig(step_tokens=5)
        rig.books.submit(prompt(0, 3), 32)
        while rig.books.generated(100) < generated:
            rig.step()
        for _ in range(times):
            assert rig.parker.park(100, "forced", by) == by
            rig.check()
            assert rig.parker.bring_in() == 1
            rig.check()
        assert ends_as_alone(rig)
        seen += 1
    assert seen == 31


@pytest.mark.parametrize("by", ["spill", "replay"])
def test_parked_after_any_chunk_of_a_prefill_or_replay_a_sequence_goes_on_from_its_committed_length(by: ParkBy) -> None:
    seen = set()
    for steps in range(1, 30):
        rig = Rig(step_tokens=3)
        rig.books.submit(prompt(0, 10), 9)
        for step in range(steps):
            if step == 8:
                assert rig.parker.park(100, "forced", "replay") == "replay"  # so that the chunks after are of a replay
            rig.step()
            rig.check()
        if not rig.live():
            break
        committed, generated = rig.books.committed(100), rig.books.generated(100)
        assert rig.parker.park(100, "forced", by) == by
        assert rig.parker.bring_in() == 1
        assert rig.books.committed(100) == (committed if by == "spill" else 0)
        seen.add((committed, generated))
        assert ends_as_alone(rig)
    assert {(3, 0), (6, 0), (9, 0), (10, 1), (3, 5), (6, 5)} <= seen


# Coming back.


def test_an_image_stays_pinned_until_it_is_restored_so_the_second_victim_is_replayed() -> None:
    # Images of 4 and 4 blocks, a budget of 6. In one pass somebody new takes the free blocks, 101 gives way to 100.
    rig = decoding(host_blocks=6, num_blocks=8, lengths=(14, 15))
    rig.books.entries[100].priority = 1
    assert rig.parker.park(100, "by_hand") == "spill"
    rig.books.submit(prompt(7, 14), 3, priority=2)
    assert rig.parker.bring_in() == 2
    assert rig.journal.events[-3:] == [
        ("started", 102),
        ("parked", 101, "replay", "priority", 15, 0),
        ("resumed", 100, "restore", 4 * 32),
    ]
    assert rig.store.used_bytes == 0
    rig.check()
    assert ends_as_alone(rig)


def test_the_image_may_be_overwritten_as_soon_as_it_is_restored() -> None:
    rig = decoding()
    rig.parker.park(100, "by_hand")
    image = rig.store._images[100].payload
    assert rig.parker.bring_in() == 1
    assert set(image) == {0xEE}, "the scripted device overwrites it"
    rig.check()
    assert ends_as_alone(rig)


def flip_header(rig: Rig, place: int) -> None:
    image = rig.store._images[100]
    header = bytearray(image.header)
    header[place] ^= 1
    image.header = bytes(header)


def flip_payload(rig: Rig, place: int) -> None:
    rig.store._images[100].payload[place] ^= 0x80


def lose(rig: Rig, place: int) -> None:
    rig.store.drop(100)


def cut_short(rig: Rig, place: int) -> None:
    rig.store._images[100].payload = rig.store._images[100].payload[:place]


def swap(rig: Rig, place: int) -> None:
    """Put a sound image in its place that is one of another length."""
    rig.parker.park(101, "by_hand")
    rig.store._images[100], rig.store._images[101] = rig.store._images[101], rig.store._images[100]


DAMAGES: list[tuple[Callable[[Rig, int], None], int]] = [
    *[(flip_header, place) for place in (0, 4, 6, 8, 16, 48, 52, 60, 67)],  # one in each field
    *[(flip_payload, place) for place in (0, 1, 79, 143, 144, 159)],  # first, middle, last used, past the length
    (lose, 0),
    (cut_short, 0),
    (cut_short, 159),
    (swap, 0),
]


@pytest.mark.parametrize("replayable", [True, False])
@pytest.mark.parametrize(("damage", "place"), DAMAGES)
def test_a_damaged_or_missing_image_is_replayed_or_ends_that_one_sequence(
    damage: Callable[[Rig, int], None], place: int, replayable: bool
) -> None:
    rig = decoding(replayable=replayable)
    rig.parker.park(100, "by_hand")
    damage(rig, place)
    # On purpose in this order: with `swap` both are damaged.
    damaged = (100, 101) if damage is swap else (100,)
    rig.parker.bring_in()
    assert len(rig.store) == 0
    assert rig.store.used_bytes == 0
    for seq in damaged:
        if replayable:
            assert ("resumed", seq, "replay", 0) in rig.journal.events
        else:
            code, cause = rig.journal.ends[seq]
            assert code == "step_failed"
            assert isinstance(cause, ImageCorrupt)
            assert ("release", seq, False) in rig.calls
    rig.check()
    rig.run()
    for entry in rig.books.entries.values():
        if replayable or entry.seq not in damaged:
            assert rig.tokens(entry.seq) == solo(entry.prompt, entry.budget)


@pytest.mark.parametrize("replayable", [True, False])
@pytest.mark.parametrize(("error", "probe", "meaning"), FAULTS)
def test_a_failed_restore_is_replayed_or_ends_that_one_sequence(
    error: BaseException, probe: BaseException | None, meaning: type[BaseException], replayable: bool
) -> None:
    rig = decoding(replayable=replayable)
    rig.parker.park(100, "by_hand")
    failing(rig, "scatter", error, probe)
    if meaning is StepFailed:
        assert rig.parker.bring_in() == 1
    else:
        with pytest.raises(meaning):
            rig.parker.bring_in()
    if replayable:
        assert rig.journal.events[-1] == ("resumed", 100, "replay", 0)
    else:
        assert rig.journal.ends[100][0] == ("device_lost" if meaning is DeviceLost else "step_failed")
    assert rig.store.used_bytes == 0
    rig.check()
    rig.device.fault = lambda name, nth: None
    rig.run()
    assert rig.tokens(101) == solo(prompt(1, 6), 8)
    assert not replayable or rig.tokens(100) == solo(prompt(0, 18), 8)


def test_a_sequence_that_ends_while_parked_takes_its_image_along() -> None:
    rig = decoding()
    for seq in (100, 101):
        assert rig.parker.park(seq, "by_hand") == "spill"
    assert rig.parker.end(100, "cancelled")
    assert not rig.parker.end(100, "cancelled")
    assert rig.journal.named("ended") == [("ended", 100, "cancelled")]
    rig.check()
    assert rig.parker.end(101, "cancelled")
    assert rig.store.used_bytes == 0


# Who comes in.


def test_a_head_of_higher_priority_parks_the_planned_and_comes_in() -> None:
    rig = decoding(host_blocks=5, num_blocks=8)
    urgent = rig.books.submit(prompt(8, 31), 1, priority=3)
    assert rig.parker.bring_in() == 1
    # The image of 101 has 2 blocks, that of 100 has 5: only the first fits.
    by_then = {event[1]: event[2:4] for event in rig.journal.named("parked")}
    assert by_then == {100: ("spill", "priority"), 101: ("replay", "priority")}
    assert rig.books.residents() == [urgent]
    assert rig.journal.events[-1] == ("started", urgent)
    rig.check()
    rig.run()
    assert rig.tokens(100) == solo(prompt(0, 18), 8)


def test_a_planned_victim_that_cannot_be_parked_after_all_stops_admissions_for_this_step() -> None:
    rig = decoding(num_blocks=8, replayable=False)
    urgent = rig.books.submit(prompt(8, 31), 1, priority=3)
    failing(rig, "gather", StepFailed("no"))
    before = everything(rig)
    assert rig.parker.bring_in() == 0
    assert everything(rig) == before
    assert rig.books.waiting() == [urgent]
    rig.device.fault = lambda name, nth: None
    assert rig.parker.bring_in() == 1
    rig.check()
    rig.run()
    assert rig.tokens(100) == solo(prompt(0, 18), 8)


def test_one_parked_while_others_come_in_does_not_come_in_again_in_the_same_step() -> None:
    # Parking 100 (2 blocks) is not enough, so 101 (5 blocks) goes too: then 100 would fit again.
    rig = decoding(num_blocks=7, lengths=(6, 18))
    urgent = rig.books.submit(prompt(8, 19), 1, priority=3)
    assert rig.parker.bring_in() == 1
    assert rig.books.residents() == [urgent]
    assert rig.books.next_arrival(100) is not None, "it would fit"
    rig.check()
    assert rig.parker.bring_in() == 1
    assert rig.books.residents() == [urgent, 100]
    assert ends_as_alone(rig)


def test_admission_ends_whatever_the_books_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = decoding()
    monkeypatch.setattr(rig.books, "next_arrival", lambda spill_blocks: ArrivalPlan(100, [(100, "replay")]))
    assert rig.parker.bring_in() == 1
    assert rig.journal.named("parked", 100) == [("parked", 100, "replay", "priority", 18, 0)]


class Counting(NothingInFlight):
    """Steps in flight of which so many can be settled; `then` happens with the last one."""

    def __init__(self, left: int, then: Callable[[], object] = lambda: None) -> None:
        self.left, self.then = left, then

    def settle_oldest(self) -> bool:
        self.left -= 1
        assert self.left > -9, "asked for ever"
        if self.left == 0:
            self.then()
        return self.left >= 0


def test_a_head_waits_for_the_steps_in_flight_that_its_victims_are_in() -> None:
    rig = decoding(num_blocks=8)
    urgent = rig.books.submit(prompt(8, 31), 1, priority=3)
    tickets = [rig.launch(), rig.launch()]
    assert None not in tickets
    assert rig.parker.bring_in(rig.before) == 1
    assert not rig.tickets, "both were settled before anybody was parked"
    assert [event[1] for event in rig.journal.named("parked")] == [100, 101]
    assert [park.parked_by for _, park in rig.journal.parks] == [urgent, urgent]
    assert all(rig.books.generated(seq) == 3 for seq in (100, 101)), "nothing that was computed is lost"
    rig.check()
    assert ends_as_alone(rig)


def test_a_head_that_fits_once_the_fences_are_lifted_waits_and_parks_nobody() -> None:
    rig = decoding(num_blocks=8)
    rig.launch()
    rig.parker.end(100, "cancelled")
    urgent = rig.books.submit(prompt(8, 20), 1, priority=3)
    assert rig.parker.bring_in(rig.before) == 0
    assert rig.tickets, "and settles nothing"
    assert rig.settle_oldest()
    assert rig.parker.bring_in(rig.before) == 1
    assert rig.books.residents() == [urgent, 101]
    assert not rig.journal.parks


def test_a_plan_that_waits_for_steps_is_asked_again_after_each_and_a_wait_for_none_is_a_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = decoding()
    late = rig.books.submit(prompt(8, 3), 1)
    wait = ArrivalPlan(late, [(100, "replay")], settle_first=True)
    monkeypatch.setattr(rig.books, "next_arrival", lambda spill_blocks: wait)
    in_flight = Counting(3, then=monkeypatch.undo)
    assert rig.parker.bring_in(in_flight) == 1
    assert in_flight.left == 0
    assert not rig.journal.parks, "it fitted in the end"
    monkeypatch.setattr(rig.books, "next_arrival", lambda spill_blocks: wait)
    in_flight = Counting(2)
    with pytest.raises(BooksMisused):
        rig.parker.bring_in(in_flight)
    assert in_flight.left == -1


# Making room.


def test_room_is_made_by_nobody_while_a_step_in_flight_has_to_be_settled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = decoding()
    before = everything(rig)
    monkeypatch.setattr(rig.books, "victim", lambda spill_blocks: "settle")
    assert not rig.parker.make_room(KvExhausted(1, 0))
    assert everything(rig) == before
    assert not rig.journal.parks


def test_a_victim_that_cannot_be_copied_waits_too_if_whoever_needs_no_copy_is_in_flight() -> None:
    rig = decoding()
    rig.books.entries[100].replayable = False
    rig.books.entries[101].immune_until = 10  # so that 100 is the victim
    failing(rig, "gather", StepFailed("no"))
    before = everything(rig)
    choices = iter([100, "settle"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.books, "victim", lambda spill_blocks: next(choices))
        assert not rig.parker.make_room(KvExhausted(1, 0))
    assert everything(rig) == before


def test_who_gives_way_learns_for_whom() -> None:
    rig = decoding()
    rig.launch()  # all that was picked is launched, so nobody grows
    assert rig.parker.park(101, "by_hand", parked_by=100) == "spill"
    assert rig.journal.parks[-1] == (101, Park("spill", "by_hand", 6, 2 * 32, 0, 100))
    rig.books.submit(prompt(9, 3), 2, priority=1)
    assert rig.parker.park(100, "forced") == "spill"
    assert rig.journal.parks[-1] == (100, Park("spill", "forced", 18, 5 * 32, 1, None)), "one stands before it"


def test_a_victim_that_cannot_be_copied_lets_one_go_that_needs_no_copy() -> None:
    rig = decoding()
    rig.books.entries[100].replayable = False
    rig.books.entries[101].immune_until = 10  # so that 100 is the victim
    failing(rig, "gather", StepFailed("no"))
    rig.parker.make_room(KvExhausted(1, 0))
    assert rig.journal.events[-1] == ("parked", 101, "replay", "exhausted", 6, 0)
    assert rig.books.residents() == [100]
    rig.check()


def test_a_victim_that_can_be_parked_in_neither_way_ends_so_that_the_loop_does() -> None:
    rig = decoding(replayable=False)
    failing(rig, "gather", StepFailed("no"))
    rig.parker.make_room(KvExhausted(1, 0))
    code, cause = rig.journal.ends[100]
    assert code == "step_failed"
    assert isinstance(cause, CannotPark)
    assert ("release", 100, False) in rig.calls, "its blocks are not kept for reuse"
    assert rig.books.residents() == [101]
    rig.check()


def test_books_that_name_somebody_who_is_gone_are_a_bug_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = decoding()
    rig.parker.park(100, "by_hand")
    rig.parker.end(101, "cancelled")
    monkeypatch.setattr(rig.books, "victim", lambda spill_blocks: 100)
    with pytest.raises(BooksMisused):
        rig.parker.make_room(KvExhausted(1, 0))
    monkeypatch.setattr(rig.books, "victim", lambda spill_blocks: None)
    monkeypatch.setattr(rig.books, "capacity_row", lambda: 101)
    with pytest.raises(BooksMisused):
        rig.parker.make_room(KvExhausted(1, 0))


# What is said.


def test_each_park_and_each_resume_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = decoding(host_blocks=5)
    with caplog.at_level(logging.INFO, "reprieve.park"):
        rig.parker.park(100, "by_hand")
        rig.parker.park(100, "by_hand")
        rig.parker.park(101, "exhausted")
        rig.parker.bring_in()
    assert [record.getMessage() for record in caplog.records] == [
        "parked sequence 100 by spill (by_hand): slot 0, 5 blocks of KV, 1 tokens generated; sequences [101] stay",
        "parked sequence 101 by replay (exhausted): slot 1, 2 blocks of KV, 1 tokens generated; sequences [] stay",
        "resumed sequence 100 by restore: slot 0, 35 blocks free, 1 tokens generated; residents are [100]",
        "resumed sequence 101 by replay: slot 1, 33 blocks free, 1 tokens generated; residents are [100, 101]",
    ]


def test_a_loop_of_ones_own_needs_no_listener() -> None:
    rig = Rig(num_blocks=6)
    rig.parker = Parker(rig.books, rig.device, HostStore(64), NullListener())
    for seed in range(3):
        rig.books.submit(prompt(seed, 7), 12)
    for _ in range(200):
        rig.step()
    assert [rig.tokens(100 + seed) for seed in range(3)] == [solo(prompt(seed, 7), 12) for seed in range(3)]
    assert [call for call in rig.calls if call[0] == "park"]
