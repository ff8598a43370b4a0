"""The operations in NumPy: what each of them means, whatever device computes it.

Every operation is float64 inside, but the matrix products, and gives float32. All get and give C-contiguous arrays, and
each element of a result depends on its own token's values alone: reductions run over the last axis only. Results are
new arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from reprieve.device.row_tiles import aligned_empty
from reprieve.step import TOKEN_ALL_NAN, TOKEN_NONE_ALLOWED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from reprieve.device.kv_pool import KvPool

    Mask: TypeAlias = NDArray[np.uint32] | NDArray[np.int32]

KV_TILE = 128
"""KV positions that attention takes at once. Constant: it must depend neither on the block size nor on the batch."""


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Return x / sqrt(mean(x²) + eps) * weight over the last axis of x [..., size], weight [size]."""
    wide = _contiguous(x).astype(np.float64)
    squares = np.square(wide)
    mean = np.add.reduce(squares, axis=-1, keepdims=True) / x.shape[-1]
    wide /= np.sqrt(mean + eps)
    wide *= weight
    return wide.astype(np.float32)


def head_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """Return `rms_norm` over each head of x [tokens, heads * head_size], weight [head_size]."""
    heads = _contiguous(x).reshape(len(x), -1, len(weight))
    return rms_norm(heads, weight, eps).reshape(x.shape)


def rope(x: NDArray[np.float32], cos: NDArray[np.float32], sin: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rotate each head of x [tokens, heads * head_size] by its token's angles: cos, sin [tokens, head_size / 2].

    Element i of a head's first half goes with element i of its second half.
    """
    tokens, half = cos.shape
    wide = _contiguous(x).reshape(tokens, -1, 2, half).astype(np.float64)
    first, second = wide[:, :, 0], wide[:, :, 1]
    result = np.empty(wide.shape, np.float32)
    result[:, :, 0] = first * cos[:, None] - second * sin[:, None]
    result[:, :, 1] = second * cos[:, None] + first * sin[:, None]
    return result.reshape(x.shape)


def swiglu(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return gate / (1 + exp(-gate)) * up, element by element."""
    wide = _contiguous(gate).astype(np.float64)
    result = np.exp(-wide)
    result += 1
    np.divide(wide, result, out=result)
    result *= _contiguous(up)
    return result.astype(np.float32)


def masked_argmax(
    logits: NDArray[np.float32],
    vocab_size: int,
    masks: Mapping[int, Mask],
    banned: Mapping[int, Sequence[int]],
) -> NDArray[np.int32]:
    """Return the id of the largest allowed one of the first `vocab_size` logits [rows, width] of each row: [rows] i32.

    masks   by row  [words] u32 or i32  bit v % 32 of word v / 32 set means that id v is allowed; without one all are
    banned  by row  ids of the vocabulary that are not allowed, whatever the mask says

    Ties go to the lowest id, +0 equals -0, a NaN never wins. A row that allows nothing gives TOKEN_NONE_ALLOWED; one
    whose allowed logits are nothing but NaN gives TOKEN_ALL_NAN. Logits and bits past the vocabulary are not looked at.
    Raises `ValueError` for a mask of too few words.
    """
    tokens = np.empty(len(logits), np.int32)
    for row, values in enumerate(logits[:, :vocab_size]):
        if row in masks or row in banned:
            allowed = _unpacked(masks[row], vocab_size) if row in masks else np.ones(vocab_size, np.bool_)
            allowed[list(banned.get(row, ()))] = False
            tokens[row] = _best(np.where(allowed, values, np.float32(np.nan))) if allowed.any() else TOKEN_NONE_ALLOWED
        else:
            tokens[row] = _best(values)
    return tokens


def _best(values: NDArray[np.float32]) -> int:
    """Return the lowest index of the largest of `values` that is no NaN, or TOKEN_ALL_NAN."""
    best = np.fmax.reduce(values)
    return TOKEN_ALL_NAN if np.isnan(best) else int(np.argmax(values == best))


def _unpacked(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """Return a new array [vocab_size] that says which ids a packed mask allows."""
    if 32 * len(mask) < vocab_size:
        raise ValueError(f"a mask of {len(mask)} words is too short for {vocab_size} ids")
    bits = mask[:, None] >> np.arange(32, dtype=mask.dtype) & 1
    allowed: NDArray[np.bool_] = bits.reshape(-1)[:vocab_size] != 0
    return allowed


class PagedAttention:
    """Attention of each query alone over the KV pool, in tiles of `KV_TILE` positions merged in order.

    The last tile ends at the query's own position, and the products' shapes depend on that position alone. Scratch is
    allocated once, so a query's bits cannot depend on addresses either.
    """

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        _, _, _, kv_heads, head_size = pool.block_shape
        self._pool = pool
        self._heads = (kv_heads, num_heads // kv_heads, head_size)
        self._kv: NDArray[np.float64] = aligned_empty((2, KV_TILE, kv_heads, head_size), np.float64)
        self._scores: NDArray[np.float64] = aligned_empty((num_heads * KV_TILE,), np.float64)

    def row(self, layer: int, q: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the attention of one row's queries q [num_new, heads * head_size], before rounding to float32.

        `places` [kv_length] are the pool places of its positions; the queries stand at the last `num_new` of them.
        """
        num_new, kv_length = len(q), len(places)
        start = kv_length - num_new
        kv_heads, group, head_size = self._heads
        queries = aligned_empty((num_new, kv_heads, group, head_size), np.float64)
        np.multiply(q.reshape(queries.shape), 1 / np.sqrt(head_size), out=queries)
        best = np.full((num_new, kv_heads, group, 1), -np.inf)
        total = np.zeros_like(best)
        mixed = np.zeros(queries.shape)
        for tile in range(0, kv_length, KV_TILE):
            present = places[tile : tile + KV_TILE]
            self._pool.read(layer, present, self._kv[:, : len(present)])
            for query in range(max(0, tile - start), num_new):
                visible = min(len(present), start + query + 1 - tile)
                self._merge(queries[query], visible, best[query], total[query], mixed[query])
        mixed /= total
        return mixed.reshape(q.shape)

    def _merge(
        self, query: NDArray[Any], visible: int, best: NDArray[Any], total: NDArray[Any], mixed: NDArray[Any]
    ) -> None:
        """Add the first `visible` positions of the tile to one query's running softmax, in place.

        query, mixed [kv_heads, group, head_size]; best (the largest score so far), total [kv_heads, group, 1].
        """
        kv_heads, group, _ = query.shape
        keys, values = self._kv[:, :visible]
        scores = self._scores[: kv_heads * group * visible].reshape(kv_heads, group, visible)
        np.matmul(query, keys.transpose(1, 2, 0), out=scores)
        new_best = np.maximum(best, np.maximum.reduce(scores, axis=-1, keepdims=True))
        scores -= new_best
        np.exp(scores, out=scores)
        fade = np.exp(best - new_best)
        total *= fade
        total += np.add.reduce(scores, axis=-1, keepdims=True)
        mixed *= fade
        mixed += np.matmul(scores, values.transpose(1, 0, 2))
        best[...] = new_best


def _contiguous(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return x itself; NumPy reduces other memory layouts in another order, so they are refused."""
    if not x.flags.c_contiguous:
        raise ValueError(f"an operation needs a C-contiguous array, not one of shape {x.shape} and strides {x.strides}")
    return x
