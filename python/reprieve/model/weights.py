"""The weights of a loaded model, in the file's own type until a device asks for them."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from reprieve.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

Rounding: TypeAlias = Literal["file", "f32", "bf16", "f16"]


class Tensor(Protocol):
    """One weight as it lies in its file: nothing is converted, and nothing is read, until it is asked for."""

    @property
    def name(self) -> str:
        """Its name in the file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in C order: a linear weight is (outputs, inputs)."""

    @property
    def dtype(self) -> str:
        """Element type in the file: "F32", "F16", "BF16", or a GGUF type such as "Q4_1"."""

    def raw(self) -> NDArray[np.uint8]:
        """Return its bytes as they are in the file, after reordering of rows where the format permutes them.

        The shape is (*shape[:-1], bytes of a row). The array may be a read-only view of the file.
        """

    def float32(self) -> NDArray[np.float32]:
        """Return a new C-contiguous array of its values as float32."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one transformer layer. None where the architecture has no such weight."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model; `output` is `embedding` itself where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A `Tensor` in a memory map of the file `path`.

    data       [*shape[:-1], bytes of a row], a read-only view of the map, which lives as long as the view does
    decode     gives the values [*shape] of such bytes as float32, perhaps a view of them
    row_order  [shape[0]] where the file permutes rows: row i of the tensor is row `row_order[i]` of `data`
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    data: NDArray[np.uint8]
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]
    row_order: NDArray[np.intp] | None = None

    def raw(self) -> NDArray[np.uint8]:
        """Return the bytes [*shape[:-1], bytes of a row], rows in order."""
        if self.row_order is None:
            return self.data
        if len(self.shape) == 1:  # a vector: its elements are what is permuted
            return self.data.reshape(self.shape[0], -1)[self.row_order].reshape(-1)
        return self.data[self.row_order]

    def float32(self) -> NDArray[np.float32]:
        """Return a new C-contiguous array [*shape] of the values as float32."""
        raw = self.raw()
        with np.errstate(all="ignore"):  # a scale that is infinite or NaN is the file's business
            values = self.decode(raw).reshape(self.shape)
        # Only a view of the bytes has to be copied; what was converted is new already.
        return np.array(values, dtype=np.float32, order="C", copy=True if np.may_share_memory(values, raw) else None)


def map_file(path: Path) -> mmap.mmap:
    """Map a file for reading. The map is released with the last array that looks into it.

    Raises `ModelFileError` where the file is empty or cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) > 0:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    raise ModelFileError(path, "is empty")


def plain_decoder(dtype: str) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]] | None:
    """Return what turns bytes of "F32", "F16" or "BF16" into float32, or None for any other type."""
    return _PLAIN_DECODERS.get(dtype)


def bf16_to_f32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Widen bfloat16, given as its bits, to float32: exact, NaN bits included. The array is new."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def f32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, and return its bits. The array is new.

    A NaN stays a NaN and becomes quiet; what is beyond the largest bfloat16 becomes infinite.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded_bits = (bits >> np.uint32(16)) & np.uint32(1)
    rounded_bits += np.uint32(0x7FFF)
    rounded_bits += bits  # wraps only for a NaN
    rounded_bits >>= np.uint32(16)
    narrow = rounded_bits.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        narrow[is_nan] = (bits[is_nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return narrow


def rounded(values: NDArray[np.float32], kind: Rounding) -> NDArray[np.float32]:
    """Return `values` rounded to nearest even in the type `kind`, as float32 again.

    "file" and "f32" give back `values` itself. In "f16" a magnitude over 65,504 becomes infinite.
    Raises `ValueError` for any other kind.
    """
    if kind in {"file", "f32"}:
        return values
    if kind == "bf16":
        return bf16_to_f32(f32_to_bf16(values))
    if kind == "f16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16).astype(np.float32)
    raise ValueError(f'kind must be "file", "f32", "bf16" or "f16", not {kind!r}')


# Files are little-endian, whatever the machine is.
_PLAIN_DECODERS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {
    "F32": lambda raw: raw.view("<f4"),
    "F16": lambda raw: raw.view("<f2").astype(np.float32),
    "BF16": lambda raw: bf16_to_f32(raw.view("<u2")),
}
