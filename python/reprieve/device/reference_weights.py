"""The weights of the reference device: float32, rounded once, probed once, shared by any number of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from threadpoolctl import ThreadpoolController

from reprieve.device.row_tiles import Product, blas_product, tile_height, tiled_product
from reprieve.model.layout import checked_tensors
from reprieve.model.weights import rounded

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import ModelWeights, Rounding, Tensor


class ReferenceWeights:
    """Every weight of a model as float32, after rounding to `kind`.

    A linear weight is kept as [inputs, outputs], C-contiguous; the embedding too, so that a tied one is kept once. The
    tile height of each weight shape is probed here. Loads everything: seconds and four bytes per parameter. Raises
    `InexactProduct`, `InvalidArgument` for a weight whose shape does not fit `config`, and what reading a file raises.
    """

    def __init__(
        self, config: ModelConfig, model: ModelWeights, kind: Rounding = "file", product: Product = blas_product
    ) -> None:
        self.config = config
        self.model = model
        self._product = product
        self._blas = ThreadpoolController()
        # By identity: a tensor lives as long as `model`, and the same tensor may stand in two places.
        self._arrays: dict[int, NDArray[np.float32]] = {}
        self._heights: dict[tuple[int, ...], int] = {}
        tensors = checked_tensors(config, model)
        with self.one_blas_thread():
            for tensor in tensors:
                if id(tensor) not in self._arrays:
                    self._load(tensor, kind)

    def one_blas_thread(self) -> AbstractContextManager[object]:
        """Return a context in which this process's BLAS uses one thread.

        A product of 8 rows is too small to be shared: with two threads a step of SmolLM2 takes 76 ms in place of 108 ms
        on two idle cores, and 680 ms on two busy ones, where the threads spin for each other.
        """
        context: AbstractContextManager[object] = self._blas.limit(limits=1, user_api="blas")
        return context

    def __getitem__(self, tensor: Tensor) -> NDArray[np.float32]:
        """Return the values of a vector [size], or of a matrix as [inputs, outputs]."""
        return self._arrays[id(tensor)]

    def linear(self, x: NDArray[np.float32], weight: Tensor, bias: Tensor | None) -> NDArray[np.float32]:
        """Return x [rows, inputs] times the weight, plus bias: [rows, outputs], a new array, exact by row tiles."""
        matrix = self[weight]
        result = tiled_product(x, matrix, self._heights[matrix.shape], self._product)
        if bias is not None:
            result += self[bias]
        return result

    def _load(self, tensor: Tensor, kind: Rounding) -> None:
        values = np.ascontiguousarray(rounded(tensor.float32(), kind).T)
        self._arrays[id(tensor)] = values
        if values.ndim == 2 and values.shape not in self._heights:  # noqa: PLR2004 - a matrix
            self._heights[values.shape] = tile_height(values, self._product)
