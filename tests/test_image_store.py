"""The host store: a budget that is kept exactly, and images that are either what was put or are found to be damaged."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprieve.errors import HostStoreFull, ImageCorrupt, InvalidArgument
from reprieve.image_store import HostStore, ImageHeader

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

HEADER = ImageHeader(dtype="bf16", block_shape=(2, 2, 4, 1, 4), num_blocks=3, committed=9, num_bytes=384)


def payload(num_bytes: int = 384, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def holding(seq: int = 1, budget: int = 1000) -> HostStore:
    store = HostStore(budget)
    store.book(seq, HEADER.num_bytes)
    store.put(seq, HEADER, payload())
    return store


def test_an_image_comes_back_as_it_was_put_and_gives_its_bytes_back_when_dropped() -> None:
    store = holding()
    assert (store.used_bytes, store.free_bytes, len(store), 1 in store) == (384, 616, 1, True)
    assert np.array_equal(store.get(1, HEADER), payload())
    assert np.array_equal(store.get(1, HEADER), payload()), "still pinned after it was read"
    assert store.used_bytes == 384
    for _ in range(2):
        store.drop(1)
        assert (store.used_bytes, len(store), 1 in store) == (0, 0, False)
    store.check()


def test_a_booking_counts_before_the_image_is_there_and_can_be_given_back() -> None:
    store = HostStore(500)
    store.book(1, 384)
    assert (store.free_bytes, len(store), 1 in store) == (116, 0, False)
    with pytest.raises(HostStoreFull) as refused:
        store.book(2, 117)
    assert (refused.value.needed, refused.value.free) == (117, 116)
    assert store.used_bytes == 384
    store.book(2, 116)
    store.drop(1)
    assert store.used_bytes == 500, "drop does not touch a booking"
    for _ in range(2):
        store.unbook(1)
        assert store.used_bytes == 116
    store.check()


def test_unbook_does_not_touch_an_image() -> None:
    store = holding()
    store.unbook(1)
    assert np.array_equal(store.get(1, HEADER), payload())
    assert store.used_bytes == 384


def test_a_budget_of_nothing_takes_nothing() -> None:
    store = HostStore(0)
    with pytest.raises(HostStoreFull):
        store.book(1, 1)
    store.check()


@pytest.mark.parametrize("budget", [-1, True, 1.5, None, "1"])
def test_a_budget_that_is_none_is_refused(budget: object) -> None:
    with pytest.raises(InvalidArgument, match="budget_bytes"):
        HostStore(budget)  # type: ignore[arg-type]


def test_bad_bookings_and_puts_are_refused_and_change_nothing() -> None:
    store = holding()
    store.book(2, 384)
    wrong: list[tuple[str, Callable[[], None]]] = [
        ("num_bytes", lambda: store.book(3, 0)),
        ("seq", lambda: store.book(1, 10)),
        ("seq", lambda: store.book(2, 10)),
        ("seq", lambda: store.put(3, HEADER, payload())),
        ("seq", lambda: store.put(1, HEADER, payload())),
        ("header", lambda: store.put(2, dataclasses.replace(HEADER, num_bytes=383), payload(383))),
        ("payload", lambda: store.put(2, HEADER, payload(383))),
        ("payload", lambda: store.put(2, HEADER, payload().reshape(2, 192))),
        ("payload", lambda: store.put(2, HEADER, payload().view(np.int8))),
    ]
    for field, call in wrong:
        with pytest.raises(InvalidArgument) as refused:
            call()
        assert refused.value.field == field
        assert (store.used_bytes, len(store), 2 in store) == (768, 1, False)
        store.check()
    store.put(2, HEADER, payload())


def test_the_array_is_handed_over_without_a_copy_and_a_later_write_to_it_is_found() -> None:
    store = HostStore(1000)
    store.book(1, 384)
    given_away = payload()
    store.put(1, HEADER, given_away)
    assert np.shares_memory(store.get(1, HEADER), given_away)
    given_away[200] ^= 1
    with pytest.raises(ImageCorrupt):
        store.get(1, HEADER)


def test_an_array_with_gaps_is_copied() -> None:
    store = HostStore(1000)
    store.book(1, 384)
    wide = payload(768)
    store.put(1, HEADER, wide[::2])
    expected = wide[::2].copy()
    wide[:] = 0
    assert np.array_equal(store.get(1, HEADER), expected)


def test_every_flipped_byte_of_header_and_payload_is_found() -> None:
    found = 0
    for place in range(len(HEADER.pack())):
        store = holding()
        damaged = bytearray(store._images[1].header)
        damaged[place] ^= 0x10
        store._images[1].header = bytes(damaged)
        with pytest.raises(ImageCorrupt, match="checksum"):
            store.get(1, HEADER)
        found += 1
    for place in range(HEADER.num_bytes):
        store = holding()
        store._images[1].payload[place] ^= 0x01
        with pytest.raises(ImageCorrupt):
            store.get(1, HEADER)
        found += 1
    assert found == 68 + 384


def test_a_payload_cut_short_or_a_missing_image_is_found_and_the_bytes_still_come_back() -> None:
    store = holding()
    store._images[1].payload = store._images[1].payload[:-1]
    with pytest.raises(ImageCorrupt, match="checksum"):
        store.get(1, HEADER)
    store.drop(1)
    assert store.used_bytes == 0
    with pytest.raises(ImageCorrupt, match="missing") as missing:
        store.get(1, HEADER)
    assert missing.value.seq == 1


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(HEADER, dtype="f16"),
        dataclasses.replace(HEADER, block_shape=(2, 2, 4, 4, 1)),
        dataclasses.replace(HEADER, block_shape=(2, 2, 4, 1, 4, 0)),
        dataclasses.replace(HEADER, num_blocks=2),
        dataclasses.replace(HEADER, committed=10),
        dataclasses.replace(HEADER, num_bytes=385),
    ],
)
def test_a_sound_image_of_something_else_is_refused(other: ImageHeader) -> None:
    with pytest.raises(ImageCorrupt, match="header"):
        holding().get(1, other)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", ""),
        ("dtype", "float8_e4m3fn"),
        ("dtype", "ƒ16"),
        ("block_shape", (1,) * 9),
        ("block_shape", (-1,)),
        ("block_shape", (2**32,)),
        ("num_blocks", 0),
        ("num_blocks", 2**32),
        ("committed", 0),
        ("committed", -5),
        ("num_bytes", 0),
        ("num_bytes", 2**64),
    ],
)
def test_a_header_that_cannot_be_packed_names_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as refused:
        dataclasses.replace(HEADER, **{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field


def test_check_finds_accounts_that_do_not_add_up() -> None:
    store = holding()
    store._used -= 1
    with pytest.raises(RuntimeError, match="384 bytes held"):
        store.check()
    store = holding()
    store._booked[1] = 10
    store._used += 10
    with pytest.raises(RuntimeError, match="at once"):
        store.check()


@given(st.lists(st.tuples(st.sampled_from(["book", "put", "drop", "unbook"]), st.integers(0, 3), st.integers(1, 60))))
def test_any_order_of_calls_keeps_the_accounts(calls: list[tuple[str, int, int]]) -> None:
    store = HostStore(100)
    booked: dict[int, int] = {}
    held: dict[int, int] = {}
    for call, seq, size in calls:
        free = 100 - sum(booked.values()) - sum(held.values())
        if call == "book" and seq not in booked and seq not in held:
            if size <= free:
                store.book(seq, size)
                booked[seq] = size
            else:
                with pytest.raises(HostStoreFull):
                    store.book(seq, size)
        elif call == "put" and seq in booked:
            held[seq] = booked.pop(seq)
            header = ImageHeader("f32", (1,), num_blocks=1, committed=1, num_bytes=held[seq])
            store.put(seq, header, payload(held[seq], seq))
        elif call == "drop":
            store.drop(seq)
            held.pop(seq, None)
        elif call == "unbook":
            store.unbook(seq)
            booked.pop(seq, None)
        store.check()
        assert store.used_bytes == sum(booked.values()) + sum(held.values())
        assert len(store) == len(held)
