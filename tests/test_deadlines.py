"""The queue of times at which requests end: the nearest that holds comes first, and what is void takes no memory."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from reprieve.deadlines import Deadlines

if TYPE_CHECKING:
    from reprieve.deadlines import Expiry


def test_the_nearest_time_that_has_come_is_due_until_it_is_dropped() -> None:
    deadlines = Deadlines()
    assert (deadlines.next(), deadlines.due(1e9), len(deadlines)) == (None, None, 0)
    deadlines.set(1, "deadline", 30.0)
    deadlines.set(2, "deadline", 10.0)
    deadlines.set(1, "max_pause", 20.0)
    assert (deadlines.next(), len(deadlines)) == (10.0, 3)
    assert deadlines.due(9.9) is None
    assert deadlines.due(10.0) == deadlines.due(25.0) == (2, "deadline")
    deadlines.drop(2, "deadline", "max_pause")
    assert deadlines.due(25.0) == (1, "max_pause")
    deadlines.drop(1, "max_pause")
    deadlines.drop(1, "max_pause")
    assert (deadlines.due(25.0), deadlines.next()) == (None, 30.0)
    assert deadlines.due(30.0) == (1, "deadline")


def test_a_time_that_is_set_anew_replaces_the_one_before() -> None:
    deadlines = Deadlines()
    deadlines.set(1, "max_pause", 10.0)
    deadlines.drop(1, "max_pause")
    deadlines.set(1, "max_pause", 50.0)
    assert (deadlines.due(49.0), deadlines.due(50.0)) == (None, (1, "max_pause"))
    deadlines.set(1, "max_pause", 5.0)
    assert (deadlines.next(), len(deadlines)) == (5.0, 1)


def test_random_sets_and_drops_are_those_of_a_plain_table_and_void_entries_are_bounded() -> None:
    chance = random.Random(5)
    deadlines, table = Deadlines(), dict[tuple[int, "Expiry"], float]()
    expiries: tuple[Expiry, Expiry] = ("deadline", "max_pause")
    most = 0
    for _ in range(20_000):
        seq, expiry = chance.randrange(12), chance.choice(expiries)
        if chance.random() < 0.7:
            table[seq, expiry] = chance.random()
            deadlines.set(seq, expiry, table[seq, expiry])
        else:
            table.pop((seq, expiry), None)
            deadlines.drop(seq, expiry)
        most = max(most, len(deadlines._queue))
        if chance.random() < 0.1:
            nearest = min(table, key=lambda key: table[key], default=None)
            assert deadlines.due(2.0) == nearest
            assert deadlines.next() == (None if nearest is None else table[nearest])
    assert most <= 2 * 24 + 64 + 1


def test_many_pauses_of_a_few_requests_take_no_more_memory_than_a_few() -> None:
    deadlines = Deadlines()
    deadlines.set(0, "deadline", 0.0)  # nearest: nothing behind it is popped
    for number in range(10_000):
        deadlines.set(1, "max_pause", 1.0 + number)
        deadlines.drop(1, "max_pause")
    assert len(deadlines) == 1
    assert len(deadlines._queue) <= 2 + 64 + 2
