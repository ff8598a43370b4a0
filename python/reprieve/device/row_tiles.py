"""Matrix products over row tiles of one fixed height, and the probe that shows such a tile to be exact.

A library does not promise that a row of a product has the same bits whatever the number of rows and its place among
them. With a fixed height only the place is left to chance, and that is probed for each weight shape.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from reprieve.errors import InexactProduct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TILE_HEIGHTS = (8, 4, 1)
"""Heights to try, best first. OpenBLAS passes with 8 on every kernel tried; 1 passes unless a product is not
deterministic at all."""

CACHE_LINE = 64  # bytes


class Product(Protocol):
    """A matrix product of float32 arrays, C-contiguous."""

    def __call__(self, tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        """Write tile [height, inputs] times weight [inputs, outputs] into `out` [height, outputs]."""


def blas_product(tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """Write tile times weight into `out` with NumPy's BLAS."""
    np.matmul(tile, weight, out=out)


def aligned_empty(shape: tuple[int, ...], dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """Return a new C-contiguous array that begins at a cache line: no kernel can tell two of them apart."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
    skip = -memory.__array_interface__["data"][0] % CACHE_LINE
    return memory[skip : skip + num_bytes].view(dtype).reshape(shape)


def tile_height(
    weight: NDArray[np.float32], product: Product = blas_product, heights: Sequence[int] = TILE_HEIGHTS
) -> int:
    """Return the first of `heights` at which a row's bits do not depend on its place among other rows.

    `weight` is [inputs, outputs]; costs three products per place. Raises `InexactProduct` if none passes.
    """
    with np.errstate(all="ignore"):  # weights that are infinite or NaN are the file's business
        for height in heights:
            if _is_exact(weight, product, height):
                return height
    inputs, outputs = weight.shape
    raise InexactProduct(inputs, outputs, tuple(heights))


def _is_exact(weight: NDArray[np.float32], product: Product, height: int) -> bool:
    """Say whether each of `height` rows has the same bits in every place: the rows turned, joined by others, alone."""
    inputs, outputs = weight.shape
    random = np.random.default_rng(inputs * outputs + height)
    rows = random.standard_normal((height, inputs), np.float32)
    others = random.standard_normal((height, inputs), np.float32)
    tile = aligned_empty((height, inputs), np.float32)
    out = np.empty((height, outputs), np.float32)
    np.copyto(tile, rows)
    product(tile, weight, out)
    expected = out.copy()
    for place in range(height):
        np.copyto(tile, np.roll(rows, place, axis=0))
        product(tile, weight, out)
        if not same_bits(out, np.roll(expected, place, axis=0)):
            return False
        for neighbours in (others, np.zeros_like(others)):
            np.copyto(tile, neighbours)
            tile[place] = rows[0]
            product(tile, weight, out)
            if not same_bits(out[place], expected[0]):
                return False
    return True


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Say whether two C-contiguous float32 arrays are equal bit for bit; +0 differs from -0, any NaN equals any NaN."""
    if a.shape != b.shape:
        return False
    different = a.view(np.uint32) != b.view(np.uint32)
    return bool(np.all(np.isnan(a[different]) & np.isnan(b[different])))


def tiled_product(
    x: NDArray[np.float32], weight: NDArray[np.float32], height: int, product: Product = blas_product
) -> NDArray[np.float32]:
    """Return x [rows, inputs] times weight [inputs, outputs], a tile of `height` rows at a time; the result is new.

    The last tile is filled up with rows of zeros. Every tile is copied to the same aligned place, so that a row's
    address cannot matter either.
    """
    rows, inputs = x.shape
    num_tiles = -(-rows // height)
    result = np.empty((num_tiles * height, weight.shape[1]), np.float32)
    tile: NDArray[np.float32] = aligned_empty((height, inputs), np.float32)
    for first in range(0, rows, height):
        present = min(height, rows - first)
        tile[:present] = x[first : first + present]
        tile[present:] = 0
        product(tile, weight, result[first : first + height])
    return result[:rows]
