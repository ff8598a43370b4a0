"""Tests of the books as Python sees them: what crosses, and which error a refusal is; it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from books_kit import SETTINGS, admitted, buffers, ids, launch, ledger, snapshot, step
from reprieve._native import __version__
from reprieve.errors import (
    BooksMisused,
    CannotPark,
    InvalidArgument,
    KvExhausted,
    NeverFits,
    RequestFinished,
    StepInFlight,
    UnknownRequest,
)
from reprieve.step import (
    OUTCOME_CHUNK,
    OUTCOME_LENGTH,
    OUTCOME_NAN,
    OUTCOME_NOTHING_ALLOWED,
    OUTCOME_STOP,
    OUTCOME_TOKEN,
    READ_ARGMAX,
    READ_NOTHING,
    TOKEN_ALL_NAN,
    TOKEN_NONE_ALLOWED,
    TOKEN_NOT_READ,
    ArrivalPlan,
    StepShape,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# A life.


def test_a_step_crosses_as_its_arrays_say() -> None:
    books = ledger()
    assert admitted(books, 9, 6) == [0, 1]
    first = launch(books)
    assert first.seqs == [0, 1]
    assert first.slots == [0, 1]
    assert (first.starts, first.num_new, first.kv_lengths) == ([0, 0], [9, 6], [9, 6])
    assert first.readback == [READ_ARGMAX, READ_ARGMAX]
    assert first.token_ids == [1] * 15
    assert first.positions == [*range(9), *range(6)]
    assert first.table_changes == [[0, 0, 0], [0, 1, 1], [0, 2, 2], [1, 0, 3], [1, 1, 4]]
    outcomes = np.zeros(2, np.uint8)
    books.commit(ids(7, 5), outcomes)
    assert outcomes.tolist() == [OUTCOME_TOKEN, OUTCOME_TOKEN]
    second = launch(books)
    assert (second.token_ids, second.positions, second.table_changes) == ([7, 5], [9, 6], [])
    books.check()


def test_every_look_tells_what_is_so() -> None:
    books = ledger()
    seqs = [*admitted(books, 9), books.submit(range(3)), books.submit(np.arange(5), replayable=False)]
    assert step(books, 7) == [OUTCOME_TOKEN]
    assert [books.state(seq) for seq in seqs] == ["decoding", "queued", "queued"]
    assert (books.residents(), books.waiting()) == ([0], [1, 2])
    assert books.tokens(0) == [1] * 9 + [7]
    assert (books.tokens(1), books.tokens(2)) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert (books.committed(0), books.generated(0), books.slot(0)) == (9, 1, 0)
    assert (books.committed(1), books.generated(1), books.slot(1)) == (0, 0, None)
    assert books.block_table(0) == books.image_blocks(0) == [0, 1, 2]
    assert (books.block_table(1), books.image_blocks(1)) == ([], [])
    assert (books.num_blocks, books.free_blocks, books.free_slots, books.num_live) == (8, 5, 2, 3)
    assert books.step_shape() == StepShape(tokens=16, rows=3, table_changes=8, bans=3 * 16, mask_words=4)
    assert [books.can_replay(seq) for seq in seqs] == [True, True, True]  # nothing of the last is computed yet
    books.admit(2)
    step(books, 7, 7)
    assert not books.can_replay(2)
    assert __version__


def test_a_sequence_is_spilled_replayed_restored_resumed_and_released() -> None:
    books = ledger()
    (seq,) = admitted(books, 9)
    step(books, 7)
    assert books.victim(8) is None  # the only resident
    books.park(seq, "spill")
    assert (books.state(seq), books.committed(seq), books.free_blocks) == ("parked_spill", 9, 8)
    assert books.next_arrival(8) == ArrivalPlan(seq, [])
    assert books.admit(seq) == "restore"
    assert (books.state(seq), books.is_immune(seq)) == ("decoding", True)
    books.drop_image(seq)
    assert (books.state(seq), books.committed(seq)) == ("prefilling", 0)
    assert step(books, TOKEN_NOT_READ) == [OUTCOME_CHUNK]
    books.park(seq, "replay")
    assert (books.state(seq), books.committed(seq)) == ("parked_replay", 0)
    other = books.submit([1], priority=1)
    assert books.resume(seq)
    assert books.waiting() == [other, seq]
    assert books.admit(seq) == "replay"
    assert not books.resume(seq)
    assert books.next_arrival(0) == ArrivalPlan(other, [])
    assert books.admit(other) == "start"
    assert launch(books).readback == [READ_NOTHING, READ_ARGMAX]
    assert books.hand_back() == [seq, other]
    assert books.release(seq, reuse=True)
    assert not books.release(seq, reuse=False)
    assert books.state(seq) == "finished"
    books.check()


def test_a_plan_names_who_is_parked_and_how() -> None:
    books = ledger(num_slots=2)
    low = admitted(books, 9, 5)
    step(books, 7, 7)
    high = books.submit([1] * 21, priority=1)
    plan = books.next_arrival(3)
    assert plan == ArrivalPlan(high, [(low[0], "spill"), (low[1], "replay")])
    assert isinstance(plan, ArrivalPlan)
    assert books.victim(3) == low[0]


def test_outcomes_are_those_of_the_step_module() -> None:
    books = ledger()
    admitted(books, 1, stop_token_ids=[3])
    assert step(books, 3) == [OUTCOME_STOP]
    admitted(books, 1, max_new_tokens=1)
    assert step(books, 3) == [OUTCOME_LENGTH]
    admitted(books, 1, 1)
    assert step(books, TOKEN_NONE_ALLOWED, TOKEN_ALL_NAN) == [OUTCOME_NOTHING_ALLOWED, OUTCOME_NAN]
    assert (books.num_live, books.free_blocks, books.free_slots) == (0, 8, 3)


def test_a_handed_back_step_is_picked_again_as_it_was() -> None:
    books = ledger()
    admitted(books, 8, 20)
    before = snapshot(books)
    first = launch(books)
    assert books.hand_back() == [0, 1]
    assert books.hand_back() == []
    assert snapshot(books) == before
    assert launch(books) == first


# Refusals: the class, the numbers, and nothing changed.


@pytest.mark.parametrize(
    ("request_of", "field", "problem"),
    [
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": [1] * 65}, "prompt", "has 65 tokens, the context holds 64"),
        ({"prompt": [1] * 10**6}, "prompt", "has 1000000 tokens, the context holds 64"),
        ({"prompt": [1, 128]}, "prompt", "token id 128 at index 1 is not one of the 128 ids 0 to 127"),
        ({"prompt": [-1]}, "prompt", "token id -1 at index 0"),
        ({"prompt": [2**31]}, "prompt", "token id 2147483648 at index 0"),
        ({"prompt": [5279552648203111001]}, "prompt", "token id 5279552648203111001 at index 0"),
        ({"prompt": [1, 2**70]}, "prompt", "1180591620717411303424 at index 1 is not a token id"),
        ({"prompt": [1, 1.5]}, "prompt", "1.5 at index 1 is not a token id"),
        ({"prompt": "ab"}, "prompt", "'a' at index 0 is not a token id"),
        ({"prompt": np.ones((2, 2), np.int64)}, "prompt", "at index 0 is not a token id"),
        ({"prompt": [1], "stop_token_ids": [128]}, "stop_token_ids", "token id 128 at index 0"),
        ({"prompt": [1], "stop_token_ids": [5279552648203111001]}, "stop_token_ids", "5279552648203111001 at index 0"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens", "must be at least 1, not 0"),
        ({"prompt": [1], "max_new_tokens": 2, "min_tokens": 3}, "min_tokens", "must be at most 2, not 3"),
        ({"prompt": [1], "banned_token_ids": [0, 128]}, "banned_token_ids", "token id 128 at index 1"),
        ({"prompt": [1], "banned_token_ids": [None]}, "banned_token_ids", "None at index 0 is not a token id"),
        ({"prompt": [1], "banned_token_ids": range(17)}, "banned_token_ids", "17 ids are banned at once; at most 16"),
        ({"prompt": [1], "think_tokens": (-1, 2)}, "think_tokens", "token id -1 at index 0"),
        ({"prompt": [1], "think_tokens": (1, 2, 3)}, "think_tokens", "not 3 ids"),
        ({"prompt": [1], "think_tokens": [1]}, "think_tokens", "not 1 ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(
    request_of: dict[str, Any], field: str, problem: str
) -> None:
    books = ledger()
    admitted(books, 3)
    before = snapshot(books)
    with pytest.raises(InvalidArgument) as refusal:
        books.submit(**request_of)
    assert refusal.value.field == field
    assert problem in refusal.value.problem
    assert snapshot(books) == before
    assert books.submit([127], stop_token_ids=[127], max_new_tokens=2**40) == 1


def test_a_prompt_over_the_pool_never_fits() -> None:
    books = ledger(num_blocks=49, block_size=16, context_length=2048)
    with pytest.raises(NeverFits) as refusal:
        books.submit([1] * 1002)
    assert (refusal.value.field, refusal.value.needed, refusal.value.total) == ("prompt", 63, 49)
    assert books.num_live == 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_out_of_bounds_is_refused_by_name(setting: str) -> None:
    with pytest.raises(InvalidArgument, match="must be at least 1, not 0") as refusal:
        ledger(**{setting: 0})
    assert refusal.value.field == setting
    with pytest.raises(InvalidArgument, match="must be at most") as refusal:
        ledger(**{setting: 2**31})
    assert refusal.value.field == setting
    with pytest.raises((InvalidArgument, TypeError, OverflowError)):
        ledger(**{setting: -1})
    with pytest.raises((InvalidArgument, TypeError)):
        ledger(**{setting: None})


def test_a_policy_or_a_way_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match='not "oldest"') as refusal:
        ledger(victim="oldest")
    assert refusal.value.field == "victim"
    books = ledger()
    (seq,) = admitted(books, 3)
    way: Any = "swap"
    with pytest.raises(InvalidArgument, match='not "swap"') as refusal:
        books.park(seq, way)
    assert refusal.value.field == "by"
    assert books.state(seq) == "prefilling"


def test_a_shortage_says_how_many_are_needed_and_free() -> None:
    books = ledger(num_blocks=5)
    admitted(books, 8, 8)
    step(books, 7, 7)
    books.rows()
    before = snapshot(books)
    with pytest.raises(KvExhausted) as refusal:
        books.reserve()
    assert (refusal.value.needed, refusal.value.free) == (2, 1)
    waiting = books.submit([1] * 8)
    with pytest.raises(KvExhausted) as refusal:
        books.admit(waiting)
    assert (refusal.value.needed, refusal.value.free) == (2, 1)
    books.release(waiting, reuse=False)
    assert snapshot(books) == before
    assert books.capacity_row() == books.victim(0) == 0


def test_the_unknown_and_the_ended_are_told_apart() -> None:
    books = ledger()
    (ended,) = admitted(books, 3)
    books.release(ended, reuse=True)
    calls: list[Callable[[int], object]] = [
        *(books.admit, books.drop_image, books.resume, books.image_blocks, books.block_table, books.tokens),
        *(books.committed, books.generated, books.slot, books.can_replay, books.is_immune),
        *(books.mask_ready, lambda seq: books.park(seq, "spill"), lambda seq: books.park(seq, "replay")),
    ]
    for call in calls:
        with pytest.raises(UnknownRequest) as unknown:
            call(99)
        assert unknown.value.request_id == 99
        with pytest.raises(RequestFinished) as finished:
            call(ended)
        assert finished.value.request_id == ended
    with pytest.raises(UnknownRequest):
        books.state(99)
    with pytest.raises(UnknownRequest):
        books.release(99, reuse=True)
    assert not books.release(ended, reuse=True)


def test_an_image_is_not_dropped_while_a_step_in_flight_reads_it() -> None:
    books = ledger()
    (seq,) = admitted(books, 6)
    step(books, 7)
    launch(books)
    before = snapshot(books)
    with pytest.raises(StepInFlight) as refusal:
        books.drop_image(seq)
    assert refusal.value.seq == seq
    assert snapshot(books) == before


def test_a_way_that_is_not_open_says_why() -> None:
    books = ledger()
    (seq,) = admitted(books, 6, replayable=False)
    queued = books.submit([1])
    with pytest.raises(CannotPark, match="no position is committed"):
        books.park(seq, "spill")
    with pytest.raises(CannotPark, match="it is not resident"):
        books.park(queued, "replay")
    step(books, 7)
    before = snapshot(books)
    with pytest.raises(CannotPark, match="do not rebuild its KV") as refusal:
        books.park(seq, "replay")
    assert refusal.value.seq == seq
    with pytest.raises(CannotPark, match="do not rebuild its KV"):
        books.drop_image(seq)
    assert snapshot(books) == before


def test_calls_out_of_order_are_misuse() -> None:
    books = ledger()
    admitted(books, 6)
    out = np.zeros(3, np.uint8)
    open_calls: list[Callable[[], object]] = [
        *(books.reserve, lambda: books.fill(buffers(books)), lambda: books.commit(ids(1), out), books.capacity_row),
    ]
    before = snapshot(books)
    for call in open_calls:
        with pytest.raises(BooksMisused):
            call()
    queued = books.submit([1])
    books.rows()
    books.reserve()
    reserved_calls: list[Callable[[], object]] = [
        *(books.rows, books.reserve, lambda: books.admit(queued), lambda: books.commit(ids(1), out)),
        *(lambda: books.park(0, "replay"), lambda: books.release(0, reuse=True)),
    ]
    for call in reserved_calls:
        with pytest.raises(BooksMisused):
            call()
    books.fill(buffers(books))
    for call in (books.reserve, lambda: books.fill(buffers(books))):
        with pytest.raises(BooksMisused):
            call()
    books.release(queued, reuse=False)
    assert books.hand_back() == [0]
    assert snapshot(books) == before


def test_a_host_budget_beyond_all_blocks_is_as_good_as_one_for_all() -> None:
    books = ledger()
    first, second = admitted(books, 9, 5, replayable=False)
    step(books, 7, 7)
    for spill_blocks in (3, 2**31, 2**32, 2**40):
        assert books.victim(spill_blocks) == first
        assert books.next_arrival(spill_blocks) is None
    assert (books.victim(2), books.victim(1)) == (second, None)
