"""Tests of the arrays that cross into the books, and of looking on from other threads."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from books_kit import FIELDS, admitted, buffers, ids, launch, ledger, snapshot
from reprieve.errors import InvalidArgument
from reprieve.step import ALWAYS, StepCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

DTYPES = {"seqs": np.uint64, "readback": np.uint8}

WRONG: dict[str, Callable[[NDArray[Any]], Any]] = {
    "another type": lambda right: right.astype(np.float32),
    "another sign": lambda right: right.astype(np.int8 if right.dtype == np.uint8 else np.uint32),
    "other bytes": lambda right: right.astype(right.dtype.newbyteorder()) if right.itemsize > 1 else right > 0,
    "one too few": lambda right: right[:1] if right.ndim == 2 else right[:0],
    "another shape": lambda right: np.zeros((*right.shape, 2), right.dtype),
    "every second": lambda right: np.zeros((2 * len(right), *right.shape[1:]), right.dtype)[::2],
    "backwards": lambda right: right[::-1],
    "read only": lambda right: np.frombuffer(right.tobytes(), right.dtype).reshape(right.shape),
    "a list": lambda right: right.tolist(),
    "a number": lambda right: right.dtype.type(0),
    "nothing": lambda right: None,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", FIELDS)
def test_a_wrong_buffer_is_refused_by_name_and_the_step_stays_reserved(field: str, wrong: str) -> None:
    books = ledger()
    admitted(books, 6, 5, banned_token_ids=[3])
    books.rows()
    books.reserve()
    array = WRONG[wrong](getattr(buffers(books), field))
    before = snapshot(books)
    with pytest.raises(InvalidArgument) as refusal:
        books.fill(buffers(books, **{field: array}))
    assert refusal.value.field == field
    assert snapshot(books) == before
    assert books.fill(buffers(books)) == StepCounts(2, 11, 4, 2)


def test_buffers_without_an_array_are_refused_and_the_step_stays_reserved() -> None:
    books = ledger()
    admitted(books, 6)
    books.rows()
    books.reserve()
    for field in FIELDS:
        lacking = buffers(books)
        delattr(lacking, field)
        with pytest.raises(AttributeError, match=field):
            books.fill(lacking)
    assert books.fill(buffers(books)) == StepCounts(1, 6, 2, 0)


@pytest.mark.parametrize("wrong", [*WRONG, "a wrong id"])
@pytest.mark.parametrize("field", ["tokens", "outcomes"])
def test_a_wrong_array_of_a_commit_is_refused_and_the_step_stays_in_flight(field: str, wrong: str) -> None:
    books = ledger()
    admitted(books, 6, 5)
    launch(books)
    right: dict[str, NDArray[Any]] = {"tokens": ids(7, 5), "outcomes": np.zeros(2, np.uint8)}
    if wrong == "a wrong id":
        arrays: list[Any] = (
            [ids(7, 128), ids(-3, 5), ids(2**31 - 1, 5)] if field == "tokens" else [np.zeros(1, np.uint8)]
        )
    elif field == "tokens" and wrong in {"every second", "backwards", "read only"}:
        arrays = [ids(7)]  # these can be read; so one too few in their place
    else:
        arrays = [WRONG[wrong](right[field])]
    before = snapshot(books)
    for array in arrays:
        with pytest.raises(InvalidArgument) as refusal:
            books.commit(**right | {field: array})
        assert refusal.value.field == field
        assert snapshot(books) == before
    books.commit(**right)
    assert (books.tokens(0)[-1], books.tokens(1)[-1]) == (7, 5)


def test_tokens_are_read_whatever_their_strides() -> None:
    books = ledger()
    admitted(books, 6, 5)
    launch(books)
    books.commit(ids(9, 5, 8, 7)[3:0:-2], np.zeros(4, np.uint8))
    assert (books.tokens(0)[-1], books.tokens(1)[-1]) == (7, 5)


def test_buffers_of_exactly_the_needed_size_do() -> None:
    books = ledger()
    admitted(books, 6, banned_token_ids=[3, 4])
    books.rows()
    books.reserve()
    sizes = dict.fromkeys(FIELDS, 1) | {"token_ids": 6, "positions": 6}
    exact = {field: np.zeros(size, DTYPES.get(field, np.int32)) for field, size in sizes.items()}
    exact["table_changes"] = np.zeros((2, 3), np.int32)
    exact["bans"] = np.zeros((2, 3), np.int32)
    assert books.fill(buffers(books, **exact)) == StepCounts(1, 6, 2, 2)
    assert exact["bans"].tolist() == [[0, 3, ALWAYS], [0, 4, ALWAYS]]
    assert exact["table_changes"].tolist() == [[0, 0, 0], [0, 1, 1]]
    assert exact["kv_lengths"].tolist() == [6]


# Threads.

LOOKING_ON = """
import sys, threading
from reprieve._native import Ledger
from reprieve.step import StepBuffers, StepShape

sys.setswitchinterval(1e-6)
books = Ledger(num_blocks=9, block_size=4, num_slots=2, context_length=64, vocab_size=5, step_tokens=8, row_tile=8)


class Curious(StepBuffers):
    def __getattribute__(self, name):
        books.free_blocks
        return super().__getattribute__(name)


buffers = Curious(books.step_shape())
books.admit(books.submit([1] * 5))
done = threading.Event()


def look():
    while not done.is_set():
        books.free_blocks, books.tokens(0), books.step_shape(), books.next_arrival(0)


watchers = [threading.Thread(target=look, daemon=True) for _ in range(2)]
for watcher in watchers:
    watcher.start()
for _ in range(2000):
    books.rows()
    books.reserve()
    books.fill(buffers)
    books.hand_back()
done.set()
for watcher in watchers:
    watcher.join()
books.check()
print("done")
"""


def test_looking_on_from_other_threads_and_from_the_buffers_stops_nobody() -> None:
    # In a process of its own: books that wait for the interpreter while it waits for them would stop this one too.
    run = subprocess.run([sys.executable, "-c", LOOKING_ON], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("done\n", "", 0)
