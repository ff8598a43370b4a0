"""The retry loop with other steps in flight: what is settled first, what goes back, and who ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from launch_kit import BUDGET, FAULTS, crowded, fails, prompt
from reprieve.errors import BooksMisused, InvalidArgument, RowFailed, StepAborted, StepFailed
from reprieve.launch import end_rows
from reprieve.step import FROM_FEED
from scripted import Rig
from scripted_oracle import solo

if TYPE_CHECKING:
    from reprieve.step import StepBuffers, StepCounts, Ticket


def running(depth: int = 3, num_blocks: int = 24) -> tuple[Rig, list[Ticket]]:
    """Return a rig of four sequences at KV length 8, with so many decode steps in flight."""
    rig = Rig(num_blocks=num_blocks)
    for seed in range(4):
        rig.books.submit(prompt(seed, 7), BUDGET)
    rig.step()
    rig.step()
    tickets = [ticket for _ in range(depth) if (ticket := rig.launch()) is not None]
    assert len(tickets) == depth
    return rig, tickets


def test_a_step_behind_others_feeds_on_them_and_is_settled_after_them() -> None:
    rig, tickets = running()
    assert [set(ticket.step.token_ids.tolist()) == {FROM_FEED} for ticket in tickets] == [False, True, True]
    assert [ticket.step.starts.tolist() for ticket in tickets] == [[8] * 4, [9] * 4, [10] * 4]
    while rig.settle_oldest():
        rig.check()
    assert [entry.generated for entry in rig.books.entries.values()] == [5] * 4
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(4)]


def test_a_shortage_that_needs_those_in_flight_settles_before_it_parks_and_no_more_than_it_must() -> None:
    # Positions 8 to 11 need a third block each, position 12 a fourth: 12 blocks are all there are.
    rig, _ = running(3, num_blocks=12)
    assert len(rig.tickets) == 3
    rig.launch()
    assert not rig.journal.parks
    del rig.calls[:]
    assert rig.launch() is not None, "position 12"
    assert [call[0] for call in rig.calls if call[0] in {"settle", "park", "launch"}] == [
        *["settle"] * 4,
        "park",
        "launch",
    ]
    assert len(rig.journal.parks) == 1
    assert [entry.generated for entry in rig.books.entries.values()] == [6] * 4, "they were all in flight"
    rig.check()
    while rig.settle_oldest():
        rig.check()
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(4)]


def test_books_that_wait_for_a_step_where_none_is_in_flight_are_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = crowded(1)
    monkeypatch.setattr(rig.books, "victim", lambda spill_blocks: "settle")
    with pytest.raises(BooksMisused):
        rig.launch()
    rig.check()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_row_ends_only_after_the_tokens_in_flight_before_it(depth: int) -> None:
    rig, _ = running(depth)
    error = RowFailed(1)
    fails(rig, "launch", error)
    ticket = rig.launch()
    assert ticket is not None
    assert rig.tickets == [ticket], "those before it are settled"
    assert rig.journal.ends == {101: ("step_failed", error)}
    assert rig.tokens(101) == solo(prompt(1, 7), 2 + depth)
    rig.check()
    rig.settle(ticket)
    rig.run()
    assert rig.books.fenced_blocks == 0
    assert all(rig.tokens(100 + seed) == solo(prompt(seed, 7), BUDGET) for seed in (0, 2, 3))


def test_a_failed_row_whose_sequence_ends_or_gives_way_with_what_was_in_flight_fails_nobody() -> None:
    rig, _ = running(1)
    stops = solo(prompt(1, 7), 3)[-1]
    rig.books.entries[101].stop = frozenset({stops})
    fails(rig, "launch", RowFailed(1))
    assert rig.launch() is not None
    assert rig.journal.ends == {101: ("stop", None)}
    rig.settle_oldest()
    rig.launch()
    fails(rig, "launch", RowFailed(1))
    settle_oldest = rig.settle_oldest

    def settle_and_park() -> bool:
        is_done = settle_oldest()
        rig.parker.park(102, "forced")
        return is_done

    rig.settle_oldest = settle_and_park  # type: ignore[method-assign]
    assert rig.launch() is not None
    rig.settle_oldest = settle_oldest  # type: ignore[method-assign]
    assert list(rig.journal.ends) == [101]
    assert rig.books.state(102) == "parked_spill"
    rig.settle_oldest()
    rig.run()
    assert all(rig.tokens(100 + seed) == solo(prompt(seed, 7), BUDGET) for seed in (0, 2, 3))


@pytest.mark.parametrize(("error", "probe", "raised"), [*FAULTS, (RowFailed(0), None, StepAborted)])
def test_a_failed_launch_leaves_those_in_flight_as_they_are(
    error: BaseException, probe: BaseException | None, raised: type[BaseException]
) -> None:
    if isinstance(error, RowFailed):
        error = RowFailed(17)  # no such row
    rig, tickets = running(2)
    fails(rig, "launch", error, probe=probe)
    with pytest.raises(raised) as failed:
        rig.launch()
    assert rig.books.snapshot() == rig.books.before_reserve
    assert rig.tickets == tickets
    assert not isinstance(failed.value, StepAborted) or failed.value.seqs == (100, 101, 102, 103)
    rig.device.fault = lambda call, nth: None
    while rig.settle_oldest():
        rig.check()
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(4)]


@pytest.mark.parametrize(("error", "probe", "raised"), [*FAULTS, (RowFailed(0), None, StepAborted)])
def test_a_failed_settle_takes_those_behind_it_along_and_their_reservations_go_back(
    error: BaseException, probe: BaseException | None, raised: type[BaseException]
) -> None:
    rig, tickets = running(0)
    before = rig.books.snapshot()
    tickets = [ticket for _ in range(3) if (ticket := rig.launch()) is not None]
    fails(rig, "settle", error, probe=probe)
    with pytest.raises(raised) as failed:
        rig.settle(tickets[0])
    assert rig.books.snapshot() == before
    assert not rig.device.unsettled, "those behind it were waited for"
    assert not isinstance(failed.value, StepAborted) or failed.value.seqs == (100, 101, 102, 103)
    rig.check()
    rig.device.fault = lambda call, nth: None
    rig.run()
    assert [rig.tokens(seq) for seq in rig.books.entries] == [solo(prompt(seed, 7), BUDGET) for seed in range(4)]


def test_rows_that_are_only_in_a_step_behind_the_failed_one_run_again() -> None:
    rig, tickets = running(1)
    late = rig.books.submit(prompt(9, 5), 4)
    rig.parker.bring_in(rig.before)
    behind = rig.launch()
    assert behind is not None
    assert late in behind.step.seqs
    assert late not in tickets[0].step.seqs
    fails(rig, "settle", StepFailed("no"))
    with pytest.raises(StepAborted) as failed:
        rig.settle(tickets[0])
    end_rows(rig.parker, failed.value)
    assert sorted(rig.journal.ends) == [100, 101, 102, 103]
    rig.check()
    rig.run()
    assert rig.tokens(late) == solo(prompt(9, 5), 4)
    assert rig.books.free_blocks == rig.books.num_blocks


def test_over_runs_of_a_failed_step_are_none_of_its_rows() -> None:
    rig, tickets = running(2)
    rig.parker.end(101, "cancelled")
    rig.parker.park(102, "forced")
    fails(rig, "settle", StepFailed("no"))
    with pytest.raises(StepAborted) as failed:
        rig.settle(tickets[0])
    assert failed.value.seqs == (100, 103)
    assert rig.books.fenced_blocks == 0
    end_rows(rig.parker, failed.value)
    assert {seq: code for seq, (code, _) in rig.journal.ends.items()} == {
        101: "cancelled",
        100: "step_failed",
        103: "step_failed",
    }
    rig.run()
    assert rig.tokens(102) == solo(prompt(2, 7), BUDGET)


def test_one_that_gave_way_after_its_step_failed_is_passed_over() -> None:
    rig = crowded(0)
    rig.parker.park(101, "forced")
    end_rows(rig.parker, StepAborted((100, 101)))
    assert list(rig.journal.ends) == [100]
    assert rig.books.state(101) == "parked_spill"


def test_masks_that_cannot_be_written_leave_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = crowded(1)

    def refuse(buffers: StepBuffers, counts: StepCounts) -> int:
        raise InvalidArgument("masks", "are not there")

    monkeypatch.setattr(rig.before, "add_masks", refuse)
    with pytest.raises(InvalidArgument):
        rig.launch()
    assert rig.books.snapshot() == rig.books.before_reserve
    assert rig.device.counts["launch"] == 2
