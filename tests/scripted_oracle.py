"""The scripted model: what the KV of a history is, which token follows it, and what a request answers alone.

The KV of a position is its token and its position; a token depends on every byte of the KV before it. So KV that is
lost, stale, swapped or shared shows as another token than the one of `solo`.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from reprieve.step import TOKEN_NONE_ALLOWED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

VOCAB = 1000
MASK_WORDS = -(-VOCAB // 32)

Mask: TypeAlias = "Callable[[tuple[int, ...]], NDArray[np.uint32] | None]"


def kv_of(tokens: Sequence[int]) -> NDArray[np.uint32]:
    """Return the KV of a whole history: [positions, 2]."""
    return np.stack([np.asarray(tokens, np.uint32), np.arange(len(tokens), dtype=np.uint32)], axis=1)


def next_token(kv: NDArray[np.uint32], mask: NDArray[np.uint32] | None = None) -> int:
    """Return the token after the history whose KV this is; of those that a mask allows, the next one in a circle."""
    token = zlib.crc32(kv.tobytes()) % VOCAB
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])
    if not len(allowed):
        return TOKEN_NONE_ALLOWED
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def solo(
    prompt: Sequence[int], budget: int, stop: Collection[int] = (), mask: Mask | None = None, nan_at: int | None = None
) -> list[int]:
    """Return what a prompt answers alone in a huge pool: the oracle.

    A token in `stop` is the last one; a mask that allows nothing ends it, as the position `nan_at` does.
    """
    return list(_solo(tuple(prompt), budget, frozenset(stop), mask, nan_at))


@functools.cache
def _solo(
    prompt: tuple[int, ...], budget: int, stop: frozenset[int], mask: Mask | None, nan_at: int | None
) -> tuple[int, ...]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + budget and not (len(tokens) > len(prompt) and tokens[-1] in stop):
        bits = mask(tuple(tokens[len(prompt) :])) if mask is not None else None
        token = next_token(kv_of(tokens), bits)
        if token == TOKEN_NONE_ALLOWED or len(tokens) - 1 == nan_at:
            break
        tokens.append(token)
    return tuple(tokens[len(prompt) :])


def packed(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Return the bitmask of `allowed` [VOCAB]."""
    bits = np.zeros(MASK_WORDS * 32, np.uint8)
    bits[:VOCAB] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)
