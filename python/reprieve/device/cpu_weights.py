"""The weights of the CPU device: packed in their own types, with the program of a step that was recorded over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from reprieve.device.cpu import CpuModel
from reprieve.model.layout import checked_tensors
from reprieve.model.llama import forward
from reprieve.model.weights import rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import ModelWeights, Rounding, Tensor

_F16_MAX: Final = 65504.0

_KEPT: Final = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"})
"""Types that a matrix may be kept in. `CpuModel` knows how many bytes each takes, and refuses others by name."""


class CpuWeights:
    """Every weight of a model, packed in the order in which a step reads it; shared by any number of devices.

    `kind` "file" keeps a matrix in its own type if that is F32, F16, BF16, Q8_0, Q4_0 or Q4_1. Any other GGUF type is
    rounded to F16, or to BF16 where a finite value is beyond the range of F16 (65,504). "f32", "f16" and "bf16" keep
    every matrix in that type, rounded to nearest even. Norms and biases are float32, after the rounding of `kind`. A
    weight that stands in several places is kept once. The architecture runs here once, over calls that are recorded;
    `model` is not needed afterwards.

    Raises `InvalidArgument` for a weight that does not fit `config`, `MemoryError`, and what reading a file raises.
    """

    def __init__(self, config: ModelConfig, model: ModelWeights, kind: Rounding = "file") -> None:
        checked_tensors(config, model)
        self.config = config
        self.packed = CpuModel(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
        )
        forward(_Recorder(self.packed, kind), config, model)
        self.packed.finish()

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return self.packed.weight_bytes


class _Recorder:
    """`Ops` that records: a buffer is a number, and a weight is packed when it is first named."""

    def __init__(self, packed: CpuModel, kind: Rounding) -> None:
        self._packed = packed
        self._kind = kind
        # By identity: a tensor lives as long as its model, and the same tensor may stand in two places.
        self._numbers: dict[int, int] = {}

    def embed(self, table: Tensor) -> int:
        return self._packed.embed(self._number(table))

    def rms_norm(self, x: int, weight: Tensor, eps: float) -> int:
        return self._packed.rms_norm(x, self._number(weight), eps)

    def add_rms_norm(self, x: int, residual: int, weight: Tensor, eps: float) -> tuple[int, int]:
        return self._packed.add_rms_norm(x, residual, self._number(weight), eps)

    def linear(self, x: int, weight: Tensor, bias: Tensor | None = None) -> int:
        return self._packed.linear(x, self._number(weight), None if bias is None else self._number(bias))

    def head_norm(self, x: int, weight: Tensor, eps: float) -> int:
        return self._packed.head_norm(x, self._number(weight), eps)

    def rope_append(self, layer: int, q: int, k: int, v: int) -> int:
        return self._packed.rope_append(layer, q, k, v)

    def paged_attention(self, layer: int, q: int) -> int:
        return self._packed.paged_attention(layer, q)

    def swiglu(self, gate: int, up: int) -> int:
        return self._packed.swiglu(gate, up)

    def select_readback(self, x: int) -> int:
        return self._packed.select_readback(x)

    def argmax(self, logits: int) -> None:
        self._packed.argmax(logits)

    def _number(self, tensor: Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = self._add(tensor)
        return number

    def _add(self, tensor: Tensor) -> int:
        if len(tensor.shape) == 1:
            return self._packed.add_vector(tensor.name, rounded(tensor.float32(), self._kind))
        outputs, inputs = tensor.shape
        raw, dtype, store = _stored(tensor, self._kind)
        return self._packed.add_matrix(tensor.name, raw, dtype, store, outputs, inputs)


def _stored(tensor: Tensor, kind: Rounding) -> tuple[NDArray[np.uint8], str, str]:
    """Return the bytes of a matrix [outputs, bytes of a row], their type, and the type to keep."""
    if tensor.dtype in _KEPT:
        return np.ascontiguousarray(tensor.raw()), tensor.dtype, tensor.dtype if kind == "file" else kind.upper()
    values: NDArray[np.float32] = np.ascontiguousarray(tensor.float32(), np.float32)
    return values.view(np.uint8), "F32", _sixteen_bits(values) if kind == "file" else kind.upper()


def _sixteen_bits(values: NDArray[np.float32]) -> str:
    largest: Any = np.max(np.abs(values), where=np.isfinite(values), initial=0)
    return "BF16" if largest > _F16_MAX else "F16"
