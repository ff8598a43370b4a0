"""Each operation of the reference device means what a slow, plain float64 loop says, for each token alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from reprieve.device import reference_ops
from reprieve.device.kv_pool import KvKind, KvPool
from reprieve.device.reference_ops import KV_TILE, PagedAttention
from reprieve.device.row_tiles import (
    TILE_HEIGHTS,
    Product,
    blas_product,
    same_bits,
    tile_height,
    tiled_product,
)
from reprieve.errors import InexactProduct
from reprieve.model.config import rope_frequencies
from reprieve.step import TOKEN_ALL_NAN, TOKEN_NONE_ALLOWED
from tiny_models import mask_of, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

NAN = math.nan
NUM_ROWS = (1, 2, 3, 7, 8, 9, 33)
SIZES = (1, 2, 8, 24, 64, 72, 100, 576, 960, 1536, 8200)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Meaning.


def test_rms_norm_is_the_plain_loop() -> None:
    x, weight = normal(3, 24) * 5, normal(24, seed=1)
    for got, row in zip(reference_ops.rms_norm(x, weight, 1e-5), x.tolist(), strict=True):
        scale = math.sqrt(sum(value * value for value in row) / 24 + 1e-5)
        assert np.allclose(got, [value / scale * w for value, w in zip(row, weight.tolist(), strict=True)], rtol=1e-6)


def test_head_norm_norms_each_head_by_itself() -> None:
    x, weight = normal(5, 3 * 8), normal(8, seed=1)
    got = reference_ops.head_norm(x, weight, 1e-6)
    for head in range(3):
        part = slice(8 * head, 8 * head + 8)
        assert same_bits(got[:, part].copy(), reference_ops.rms_norm(x[:, part].copy(), weight, 1e-6))


def test_rope_turns_element_i_with_element_i_plus_half() -> None:
    head_size, positions = 8, np.array([0, 1, 5, 300])
    angles = np.outer(positions, rope_frequencies(tiny_config((4, 2, head_size))))
    x = normal(len(positions), 3 * head_size)
    got = reference_ops.rope(x, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    for token in range(len(positions)):
        for head in range(3):
            for i in range(4):
                a, b = float(x[token, head * 8 + i]), float(x[token, head * 8 + i + 4])
                turned = complex(a, b) * complex(math.cos(angles[token, i]), math.sin(angles[token, i]))
                assert got[token, head * 8 + i] == pytest.approx(turned.real, rel=1e-5, abs=1e-6)
                assert got[token, head * 8 + i + 4] == pytest.approx(turned.imag, rel=1e-5, abs=1e-6)
    assert same_bits(got[0], x[0])  # position 0 turns nothing


def test_swiglu_is_the_plain_loop_up_to_the_ends_of_float32() -> None:
    gate = np.array([[0.0, 1.5, -2.0, 90.0, -90.0, 3e38, -3e38]], np.float32)
    up = np.array([[2.0, 3.0, 5.0, 1.0, 1.0, 0.5, 1.0]], np.float32)
    with np.errstate(over="ignore"):
        got = reference_ops.swiglu(gate, up)
    expected = [
        0.0,
        1.5 * 3 / (1 + math.exp(-1.5)),
        -2 * 5 / (1 + math.exp(2)),
        90,
        -90 / (1 + math.exp(90)),
        1.5e38,
        0,
    ]
    assert np.allclose(got[0], expected, rtol=1e-6)


def test_tiled_product_is_the_plain_product_for_any_number_of_rows() -> None:
    weight = normal(24, 17, seed=1)
    for rows in (0, *NUM_ROWS):
        x = normal(rows, 24)
        got = tiled_product(x, weight, 8)
        assert got.shape == (rows, 17)
        assert np.allclose(got, x.astype(np.float64) @ weight.astype(np.float64), atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (576, 1536), (1536, 576), (576, 8192)])
def test_wide_products_are_exact_in_tiles_with_any_number_of_threads(inputs: int, outputs: int, threads: int) -> None:
    """The device holds BLAS to one thread; these are wide enough that OpenBLAS would share them among more."""
    with threadpool_limits(threads, user_api="blas"):
        assert tile_height(normal(inputs, outputs)) == 8


def test_the_last_tile_is_filled_up_with_rows_of_zeros() -> None:
    tiles: list[NDArray[np.float32]] = []

    def product(tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        tiles.append(tile.copy())
        blas_product(tile, weight, out)

    x = normal(11, 24)
    tiled_product(x, normal(24, 17, seed=1), 8, product)
    assert same_bits(np.concatenate(tiles), np.concatenate([x, np.zeros((5, 24), np.float32)]))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 8), (3, 3, 4), (5, 1, 80)])
def test_attention_is_the_plain_softmax_over_what_the_pool_holds(kind: KvKind, heads: tuple[int, int, int]) -> None:
    num_heads, kv_heads, head_size = heads
    length, new = 2 * KV_TILE + 9, KV_TILE + 3  # queries in each of three tiles
    pool = KvPool(tiny_config(heads), num_blocks=80, block_size=4, kind=kind)
    pool.data.fill(np.array(NAN).astype(np.float16) if kind == "f16" else 0x7FC0 if kind == "bf16" else NAN)
    table = np.random.default_rng(2).permutation(80).astype(np.int32)
    places = pool.places(table, np.arange(length))
    k, v = normal(length, kv_heads * head_size, seed=3), normal(length, kv_heads * head_size, seed=4)
    pool.append(1, places, k, v)
    stored = np.empty((2, length, kv_heads, head_size))
    pool.read(1, places, stored)
    assert np.allclose(stored[0].reshape(k.shape), k, rtol={"f32": 0, "f16": 2**-11, "bf16": 2**-8}[kind], atol=1e-6)
    q = normal(new, num_heads * head_size, seed=5) * 3
    got = PagedAttention(pool, num_heads).row(1, q, places)
    for query in range(new):
        seen = length - new + query + 1
        for head in range(num_heads):
            part = slice(head * head_size, (head + 1) * head_size)
            keys, values = stored[:, :seen, head // (num_heads // kv_heads)]
            scores = keys @ q[query, part].astype(np.float64) / math.sqrt(head_size)
            weights = np.exp(scores - scores.max())
            assert np.allclose(got[query, part], weights @ values / weights.sum(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 8), (3, 3, 4), (5, 1, 80), (9, 3, 64)])
def test_attention_has_the_same_float64_bits_for_any_chunk_block_size_and_pool_content(
    heads: tuple[int, int, int],
) -> None:
    num_heads, kv_heads, head_size = heads
    length = 2 * KV_TILE + 9
    k, v = normal(length, kv_heads * head_size, seed=3), normal(length, kv_heads * head_size, seed=4)
    q = normal(length, num_heads * head_size, seed=5) * 3
    expected = None
    for block_size, chunk, filling in ((1, 1, 0.0), (4, 7, NAN), (16, length, 1e30), (48, 129, NAN), (300, 40, 1e30)):
        num_blocks = -(-length // block_size) + 2
        pool = KvPool(tiny_config(heads), num_blocks=num_blocks, block_size=block_size, kind="f32")
        pool.data.fill(filling)
        table = np.random.default_rng(chunk).permutation(num_blocks).astype(np.int32)
        places = pool.places(table, np.arange(length))
        attention = PagedAttention(pool, num_heads)
        parts = []
        for at in range(0, length, chunk):
            new = slice(at, min(at + chunk, length))
            pool.append(0, places[new], k[new], v[new])
            parts.append(attention.row(0, q[new].copy(), places[: new.stop]))
        got = np.concatenate(parts).view(np.uint64)
        expected = got if expected is None else expected
        assert np.array_equal(got, expected), (block_size, chunk, filling)


# Masks and argmax.


def best_of(
    values: NDArray[np.float32],
    vocab_size: int,
    mask: NDArray[np.uint32] | NDArray[np.int32] | None = None,
    banned: Sequence[int] = (),
) -> int:
    """Return the token of one row, masked or not, between two rows that must not notice."""
    logits = np.stack([np.roll(values, 1), values, np.flip(values)])
    masks, bans = {} if mask is None else {1: mask}, {1: banned} if banned else {}
    tokens = reference_ops.masked_argmax(logits, vocab_size, masks, bans)
    assert tokens.dtype == np.int32
    others = reference_ops.masked_argmax(logits[[0, 2]], vocab_size, {}, {})
    assert tokens[[0, 2]].tolist() == others.tolist()
    return int(tokens[1])


def loop_best(values: list[float], allowed: Iterable[int]) -> int:
    """Return what the rule says of one row, id by id."""
    best, chosen = -math.inf, None
    only_nan = TOKEN_NONE_ALLOWED
    for token in sorted(allowed):
        only_nan = TOKEN_ALL_NAN
        if not math.isnan(values[token]) and (chosen is None or values[token] > best):
            best, chosen = values[token], token
    return only_nan if chosen is None else chosen


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([0.0, 7.0, 7.0, 1.0], 1),
        ([5.0, 5.0, 5.0, 5.0], 0),
        ([-0.0, 0.0, -1.0, -0.0], 0),
        ([-1.0, 0.0, -0.0, 0.0], 1),
        ([NAN, 1.0, 2.0, NAN], 2),
        ([NAN, -math.inf, -math.inf, NAN], 1),
        ([NAN, NAN, NAN, -math.inf], 3),
        ([math.inf, NAN, math.inf, 0.0], 0),
        ([NAN, NAN, NAN, NAN], TOKEN_ALL_NAN),
    ],
)
def test_argmax_takes_the_lowest_of_the_largest_and_never_a_nan(values: list[float], best: int) -> None:
    row = np.array(values, np.float32)
    assert best_of(row, 4) == best_of(row, 4, mask_of(range(4), 4)) == best


@pytest.mark.parametrize("vocab", [1, 31, 95, 96, 97, 512, 513, 128256, 151936])
def test_argmax_ties_go_to_the_lowest_id_at_any_width(vocab: int) -> None:
    logits = np.zeros((4, vocab), np.float32)
    logits[1, [vocab // 3, vocab - 1]] = 2
    logits[2, vocab - 1] = 2
    logits[3, [0, vocab - 1]] = 2
    everything = dict.fromkeys(range(4), mask_of(range(vocab), vocab))
    for masks in ({}, everything):
        assert reference_ops.masked_argmax(logits, vocab, masks, {}).tolist() == [0, vocab // 3, vocab - 1, 0]


def test_maxima_that_are_equal_only_after_masking_go_to_the_lowest_allowed_id() -> None:
    values = np.zeros(512, np.float32)
    values[[5, 256]], values[[4, 300]] = 3, 9
    rest = set(range(512)) - {4, 300}
    assert best_of(values, 512) == 4
    assert best_of(values, 512, mask_of(rest, 512)) == best_of(values, 512, banned=[4, 300]) == 5
    assert best_of(values, 512, mask_of(rest - {5}, 512)) == best_of(values, 512, mask_of(rest, 512), [5]) == 256
    assert best_of(values, 512, mask_of({400, 31, 511}, 512)) == 31


def test_an_unmasked_row_beside_masked_ones_is_as_it_is_alone() -> None:
    logits = normal(3, 70)
    masks = {0: mask_of({3}, 70), 2: mask_of({69}, 70)}
    assert reference_ops.masked_argmax(logits, 70, masks, {}).tolist() == [3, logits[1].argmax(), 69]
    assert reference_ops.masked_argmax(logits, 70, {}, {1: [logits[1].argmax()]})[[0, 2]].tolist() == [
        logits[0].argmax(),
        logits[2].argmax(),
    ]


def test_where_mask_and_bans_together_leave_nothing_no_token_is_chosen() -> None:
    values = normal(513)
    assert best_of(values, 513, mask_of({264}, 513)) == 264
    assert best_of(values, 513, mask_of({264}, 513), [264]) == TOKEN_NONE_ALLOWED
    assert best_of(values, 513, mask_of((), 513)) == TOKEN_NONE_ALLOWED
    assert best_of(values[:1], 1, banned=[0]) == TOKEN_NONE_ALLOWED
    assert best_of(values, 513, mask_of({264, 512}, 513), [264, 264, 3]) == 512


@pytest.mark.parametrize("vocab", [95, 96, 97, 513])
@pytest.mark.parametrize("token", [0, 31, 32, 63, 64, 94, -1])
def test_each_bit_of_a_mask_allows_its_own_id(token: int, vocab: int) -> None:
    values, token = normal(vocab, seed=vocab), token % vocab
    mask = mask_of({token}, vocab)
    strided = np.stack([mask, ~mask], axis=1)[:, 0]
    assert not strided.flags.c_contiguous
    for same in (mask, mask.view(np.int32), strided, np.append(mask, np.uint32(0xFFFFFFFF))):
        assert best_of(values, vocab, same) == token
        values[token] = -math.inf
        assert best_of(values, vocab, same) == token
    second = int(values.argmax())  # of all others
    values[token] = math.inf
    mask = mask_of(set(range(vocab)) - {token}, vocab)
    assert best_of(values, vocab, mask) == best_of(values, vocab, mask.view(np.int32)) == second


@pytest.mark.parametrize("vocab", [1, 31, 95, 96, 97, 513])
def test_masked_argmax_is_the_plain_loop(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    seen = set()
    for _ in range(60):
        values = random.integers(-2, 3, vocab).astype(np.float32)
        values[random.random(vocab) < random.choice([0, 0.5, 1])] = NAN
        allowed = set(np.flatnonzero(random.random(vocab) < random.choice([0, 0.02, 0.5, 1])).tolist())
        banned = random.integers(0, vocab, random.integers(0, 4)).tolist()
        expected = loop_best(values.tolist(), allowed - set(banned))
        assert best_of(values, vocab, mask_of(allowed, vocab), banned) == expected
        assert best_of(values, vocab, None, banned) == loop_best(values.tolist(), set(range(vocab)) - set(banned))
        seen.add(min(expected, 0))
    assert seen == {0, TOKEN_NONE_ALLOWED, TOKEN_ALL_NAN}


def test_a_nan_that_is_not_allowed_is_not_looked_at() -> None:
    values = np.array([NAN, 1.0, NAN, 2.0, NAN], np.float32)
    assert best_of(values, 5, mask_of({0, 1, 2}, 5)) == 1
    assert best_of(values, 5, banned=[3]) == 1
    assert best_of(values, 5, mask_of({0, 2}, 5)) == TOKEN_ALL_NAN
    assert best_of(values, 5, banned=[1, 3]) == TOKEN_ALL_NAN
    assert best_of(values, 5, mask_of({0}, 5), [0]) == TOKEN_NONE_ALLOWED


def test_argmax_never_chooses_past_the_vocabulary() -> None:
    logits = np.zeros((4, 96), np.float32)
    logits[:, 37:] = 9
    logits[1, 36] = 1
    logits[2, :37] = NAN
    expected = [0, 36, TOKEN_ALL_NAN, 0]
    assert reference_ops.masked_argmax(logits, 37, {}, {}).tolist() == expected
    everything = dict.fromkeys(range(4), mask_of(range(96), 96))
    assert reference_ops.masked_argmax(logits, 37, everything, {}).tolist() == expected
    beyond = dict.fromkeys(range(4), mask_of(range(37, 96), 96))
    assert reference_ops.masked_argmax(logits, 37, beyond, {}).tolist() == [TOKEN_NONE_ALLOWED] * 4


def test_a_mask_of_too_few_words_is_an_error() -> None:
    with pytest.raises(ValueError, match="a mask of 3 words is too short for 97 ids"):
        reference_ops.masked_argmax(normal(1, 97), 97, {0: mask_of({1}, 96)}, {})


# A row's bits depend on that row alone.

ROW_OPERATIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "rms_norm": lambda x: reference_ops.rms_norm(x, np.linspace(0.5, 2, x.shape[1], dtype=np.float32), 1e-5),
    "swiglu": lambda x: reference_ops.swiglu(x, np.flip(x, axis=0).copy() * 0 + np.float32(1.7)),
    "head_norm": lambda x: reference_ops.head_norm(x, np.ones(x.shape[1] // math.gcd(x.shape[1], 8), np.float32), 1e-5),
}


@pytest.mark.parametrize("operation", ROW_OPERATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_among_any_others_in_any_place(operation: str, size: int) -> None:
    compute = ROW_OPERATIONS[operation]
    row = normal(1, size, seed=size) * 3
    alone = compute(row)[0]
    for rows in NUM_ROWS:
        for place in {0, rows // 2, rows - 1}:
            x = normal(rows, size, seed=rows) * 3
            x[place] = row
            assert same_bits(compute(x)[place], alone), (rows, place)


@pytest.mark.parametrize("size", SIZES)
def test_a_float64_sum_over_the_last_axis_has_the_same_bits_among_any_rows(size: int) -> None:
    row = np.random.default_rng(size).standard_normal((1, size))
    alone = np.add.reduce(row, axis=-1, keepdims=True)[0, 0]
    for rows in NUM_ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, size))
        for place in range(rows):
            before = x[place].copy()
            x[place] = row
            for shape in ((rows, size), (rows, 1, size)):
                sums = np.add.reduce(x.reshape(shape), axis=-1, keepdims=True)
                assert sums.reshape(-1)[place] == alone, (rows, place, shape)
            x[place] = before


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp_gives_the_same_bits_in_every_place_of_an_array(dtype: type[np.float32 | np.float64]) -> None:
    values = (normal(50) * 9).astype(dtype)
    for value in values:
        alone = np.exp(np.full(1, value, dtype))[0]
        for length in (*range(1, 20), 33, 127, 129):
            assert np.all(np.exp(np.full(length, value, dtype)) == alone)


def test_operations_refuse_arrays_that_are_not_contiguous() -> None:
    x = normal(8, 16)
    for view in (x.T, x[:, :8], x[:, ::2]):
        with pytest.raises(ValueError, match="C-contiguous"):
            reference_ops.rms_norm(view, np.ones(view.shape[1], np.float32), 1e-5)
        with pytest.raises(ValueError, match="C-contiguous"):
            reference_ops.swiglu(view, view)


# The probe.


def product_failing(place: int, heights: set[int]) -> Product:
    """Return a product that gives the row in `place` other bits, in tiles of `heights` that have such a place."""

    def product(tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        blas_product(tile, weight, out)
        if len(tile) in heights and place < len(tile):
            out[place, -1] = np.nextafter(out[place, -1], np.float32(np.inf))

    return product


@pytest.mark.parametrize("place", range(8))
def test_the_probe_finds_one_last_bit_in_any_place_and_takes_another_height(place: int) -> None:
    weight = normal(24, 10)
    assert tile_height(weight, product_failing(place, {8})) == 4
    assert tile_height(weight, product_failing(place % 4, {8, 4})) == 1
    assert tile_height(weight, product_failing(place, set())) == 8


def test_the_probe_finds_a_product_that_looks_at_the_other_rows() -> None:
    def product(tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        blas_product(tile, weight, out)
        if not tile[-1].any():  # a row of zeros: the tile is not full
            np.nextafter(out, np.float32(np.inf), out=out)

    assert tile_height(normal(24, 10), product, heights=(8, 1)) == 1


def test_weights_that_are_infinite_or_nan_are_no_reason_to_fail_the_probe() -> None:
    weight = normal(24, 10)
    weight[3, 4], weight[5, 6], weight[7, 6] = NAN, math.inf, -math.inf
    assert tile_height(weight) == 8


def test_without_an_exact_height_the_error_names_the_shape_and_the_heights() -> None:
    random = np.random.default_rng(0)

    def product(tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        blas_product(tile, weight, out)
        out *= np.float32(1 + random.random())

    with pytest.raises(InexactProduct, match=r"24 inputs by 10 outputs .*8, 4, 1") as caught:
        tile_height(normal(24, 10), product)
    assert (caught.value.inputs, caught.value.outputs, caught.value.heights) == (24, 10, TILE_HEIGHTS)
