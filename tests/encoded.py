"""Weights in the types that files have: the same model, encoded, and the values that its bytes stand for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from reprieve.model.weights import LayerWeights, ModelWeights
from tiny_models import ArrayTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from reprieve.model.weights import Tensor


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """A `Tensor` of any GGUF type that lies in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: NDArray[np.uint8]

    def raw(self) -> NDArray[np.uint8]:
        return self.data

    def float32(self) -> NDArray[np.float32]:
        values = dequantize(self.data, GGMLQuantizationType[self.dtype])
        return np.ascontiguousarray(values, np.float32).reshape(self.shape)


def encode(tensor: Tensor, dtype: str) -> Tensor:
    """Return `tensor` in another type; for Q6_K, which nothing here quantises to, random values in its place."""
    if dtype == "Q6_K":
        return _random_q6_k(tensor)
    data = np.ascontiguousarray(quantize(tensor.float32(), GGMLQuantizationType[dtype])).view(np.uint8)
    return EncodedTensor(tensor.name, tensor.shape, dtype, data)


def decoded(tensor: Tensor) -> Tensor:
    """Return the exact values of `tensor` as float32."""
    return ArrayTensor(tensor.name, tensor.float32())


def with_matrices(model: ModelWeights, change: Callable[[Tensor], Tensor]) -> ModelWeights:
    """Return `model` with each of its matrices changed, one that stands in two places once."""
    changed: dict[int, Tensor] = {}

    def new(tensor: Tensor) -> Tensor:
        if len(tensor.shape) == 1:
            return tensor
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    def new_layer(layer: LayerWeights) -> LayerWeights:
        tensors = {field.name: getattr(layer, field.name) for field in fields(layer)}
        return replace(layer, **{name: new(tensor) for name, tensor in tensors.items() if tensor is not None})

    return ModelWeights(
        embedding=new(model.embedding),
        layers=tuple(new_layer(layer) for layer in model.layers),
        final_norm=model.final_norm,
        output=new(model.output),
    )


def _random_q6_k(tensor: Tensor) -> EncodedTensor:
    """Return random blocks of about the size of the values of `tensor`."""
    values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType.Q6_K]
    outputs, inputs = tensor.shape
    random = np.random.default_rng([outputs, inputs])
    blocks = random.integers(0, 256, (outputs, inputs // values, block_bytes), np.uint8)
    # The last two bytes of a block are its scale; six bits and an 8-bit scale make a standard deviation near 1,300.
    scale = np.float16(float(np.std(tensor.float32())) / 1300)
    blocks[..., -2:] = np.array([scale]).view(np.uint8)
    return EncodedTensor(tensor.name, tensor.shape, "Q6_K", blocks.reshape(outputs, -1))
