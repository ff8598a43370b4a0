"""Tests of several steps in flight as Python sees them: feeds, over-runs, fences, bans, who waits for the host."""

from __future__ import annotations

import pytest

from books_kit import admitted, launch, ledger, settle, snapshot, step
from reprieve.errors import KvExhausted
from reprieve.step import (
    ALWAYS,
    FROM_FEED,
    OUTCOME_LENGTH,
    OUTCOME_OVERRUN,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
    READ_ARGMAX,
    TOKEN_NONE_ALLOWED,
    ArrivalPlan,
)


def test_a_step_behind_another_feeds_on_the_tokens_that_it_has_yet_to_give() -> None:
    books = ledger()
    admitted(books, 7, 6)
    launch(books)
    behind = launch(books)
    assert books.num_in_flight == 2
    assert (behind.token_ids, behind.positions, behind.kv_lengths) == ([FROM_FEED] * 2, [7, 6], [8, 7])
    assert behind.readback == [READ_ARGMAX] * 2
    third = launch(books)
    assert (third.token_ids, third.positions, third.table_changes) == ([FROM_FEED] * 2, [8, 7], [[0, 2, 4]])
    assert [settle(books, 7, 5) for _ in range(3)] == [[OUTCOME_TOKEN] * 2] * 3
    assert (books.tokens(0)[7:], books.tokens(1)[6:]) == ([7] * 3, [5] * 3)
    assert launch(books).token_ids == [7, 5]


def test_steps_are_handed_back_newest_first_and_each_exactly() -> None:
    books = ledger()
    admitted(books, 7, 6)
    before, steps = [], []
    for _ in range(3):
        before.append(snapshot(books))
        steps.append(launch(books))
    for state in reversed(before):
        assert books.hand_back() == [0, 1]
        assert snapshot(books) == state
        books.check()
    assert [launch(books) for _ in range(3)] == steps


def test_who_leaves_in_flight_is_an_over_run_and_what_it_held_is_fenced_until_then() -> None:
    books = ledger()
    stays, parked, stops = admitted(books, 6, 5, 3, stop_token_ids=[9])
    step(books, 7, 7, 7)
    launch(books)
    launch(books)
    books.park(parked, "spill")
    assert (books.state(parked), books.committed(parked), books.slot(parked)) == ("parked_spill", 5, None)
    assert (books.fenced_blocks, books.free_blocks, books.free_slots) == (2, 2, 0)
    assert settle(books, 7, 7, 9) == [OUTCOME_TOKEN, OUTCOME_OVERRUN, OUTCOME_STOP]
    assert books.state(stops) == "finished"
    assert (books.fenced_blocks, books.free_slots) == (4, 0)
    assert settle(books, 7, 7, TOKEN_NONE_ALLOWED) == [OUTCOME_TOKEN, OUTCOME_OVERRUN, OUTCOME_OVERRUN]
    assert (books.fenced_blocks, books.free_blocks, books.free_slots) == (0, 6, 2)
    assert (books.generated(parked), books.generated(stays)) == (1, 3)


def test_a_handed_back_step_names_who_is_still_there() -> None:
    books = ledger()
    first, second, third = admitted(books, 6, 5, 3)
    launch(books)
    books.release(second, reuse=False)
    books.park(third, "replay")
    assert (books.fenced_blocks, books.free_slots) == (3, 0)
    assert books.hand_back() == [first]
    assert (books.fenced_blocks, books.free_slots) == (0, 2)


def test_no_row_is_picked_behind_a_last_token() -> None:
    books = ledger()
    admitted(books, 6, max_new_tokens=2)
    launch(books)
    launch(books)
    assert (books.rows(), books.sat_out()) == (0, [])
    assert settle(books, 7) == [OUTCOME_TOKEN]
    assert settle(books, 7) == [OUTCOME_LENGTH]


def test_a_constrained_sequence_sits_out_until_its_mask_is_there() -> None:
    books = ledger()
    masked, free = admitted(books, 6, constrained=True) + admitted(books, 5)
    assert (books.rows(), books.sat_out()) == (1, [masked])
    books.mask_ready(masked)
    assert launch(books).seqs == [masked, free]
    assert (launch(books).seqs, books.sat_out()) == ([free], [masked])
    assert settle(books, 7, 5) == [OUTCOME_TOKEN] * 2
    assert (books.rows(), books.sat_out()) == (1, [masked])
    books.mask_ready(masked)
    second = launch(books)
    assert (second.seqs, second.token_ids) == ([masked, free], [7, FROM_FEED])


def test_bans_cross_with_their_row_and_the_input_after_which_they_hold() -> None:
    books = ledger(num_blocks=16)
    plain = books.submit([1] * 3)
    early = books.submit([1] * 3, stop_token_ids=[8, 9], min_tokens=1)
    thinks = books.submit([1] * 3, think_tokens=(20, 21), banned_token_ids=[30])
    for seq in (plain, early, thinks):
        books.admit(seq)
    assert launch(books).bans == [[1, 8, ALWAYS], [1, 9, ALWAYS], [2, 30, ALWAYS]]
    assert launch(books).bans == [[2, 30, ALWAYS], [2, 20, 21], [2, 21, 21]]
    assert (books.rows(), books.sat_out()) == (2, [thinks])
    settle(books, 7, 7, 21)
    assert launch(books).bans == [[2, 30, ALWAYS], [2, 20, ALWAYS], [2, 21, ALWAYS]]


def test_a_shortage_is_settled_where_a_step_in_flight_frees_something_or_needs_all() -> None:
    books = ledger(num_blocks=4, head_room=0)
    long, short = admitted(books, 7, 5)
    step(books, 7, 7)
    launch(books)
    assert books.rows() == 2
    with pytest.raises(KvExhausted) as refusal:
        books.reserve()
    assert (refusal.value.needed, refusal.value.free) == (1, 0)
    assert books.growing() == [long]
    assert books.victim(0) == "settle"  # both are in flight
    settle(books, 7, 7)
    assert books.victim(0) == long
    books.release(short, reuse=True)
    assert books.victim(0) is None  # the only resident
    launch(books)
    assert books.victim(0) == "settle"  # it does not give way either, but something is in flight


def test_a_plan_waits_for_what_is_fenced_and_says_where_a_step_must_be_settled_first() -> None:
    books = ledger(num_slots=2)
    low, other = admitted(books, 5, 5)
    step(books, 7, 7)
    launch(books)
    high = books.submit([1] * 5, priority=1)
    assert books.next_arrival(0) == ArrivalPlan(high, [(low, "replay")], settle_first=True)
    books.release(other, reuse=True)
    assert books.next_arrival(0) is None
    assert settle(books, 7, 7) == [OUTCOME_TOKEN, OUTCOME_OVERRUN]
    assert books.next_arrival(0) == ArrivalPlan(high, [], settle_first=False)
