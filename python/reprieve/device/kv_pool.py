"""The KV pool of the reference device: blocks of keys and values, and copies of whole blocks; what any pool may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from reprieve.errors import InvalidArgument
from reprieve.model.weights import bf16_to_f32, f32_to_bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reprieve.model.config import ModelConfig

KvKind: TypeAlias = Literal["f32", "f16", "bf16"]


def check_pool(num_blocks: int, block_size: int, num_slots: int, kind: str) -> None:
    """Raise `InvalidArgument` for the settings of a pool that no device could have."""
    for name, value in (("num_slots", num_slots), ("num_blocks", num_blocks), ("block_size", block_size)):
        if value < 1:
            raise InvalidArgument(name, f"must be at least 1, not {value}")
    if kind not in get_args(KvKind):
        raise InvalidArgument("kv", f'must be "f32", "f16" or "bf16", not {kind!r}')


class KvPool:
    """Keys and values of `num_blocks` blocks in all layers.

        data  [num_blocks, layers, 2, block_size, kv_heads, head_size]  f32, f16, or u16 holding bf16

    One block is one run of bytes, so an image of a sequence is its blocks one after another. A *place* is where layer 0
    keeps the key of one position, counted in positions from the beginning of the pool: see `places`.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, kind: KvKind) -> None:
        self.kind = kind
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_shape = (config.num_layers, 2, block_size, config.num_kv_heads, config.head_size)
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[kind]
        self.data: NDArray[Any] = np.zeros((num_blocks, *self.block_shape), dtype)
        # One line per layer, key or value, and position.
        self._lines = self.data.reshape(-1, config.num_kv_heads * config.head_size)
        self._block_lines = config.num_layers * 2 * block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return int(self.data[0].nbytes)

    def places(self, table: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each of `positions` in the sequence whose block table is `table`."""
        blocks = table[positions // self.block_size].astype(np.int64)
        return blocks * self._block_lines + positions % self.block_size

    def append(self, layer: int, places: NDArray[np.int64], k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
        """Write k and v [tokens, kv_heads * head_size], rounded to the pool's type, to `places` [tokens]."""
        keys = places + layer * 2 * self.block_size
        self._lines[keys] = self._rounded(k)
        self._lines[keys + self.block_size] = self._rounded(v)

    def read(self, layer: int, places: NDArray[np.int64], out: NDArray[np.float64]) -> None:
        """Write keys and values at `places` [positions] into out [2, positions, kv_heads, head_size]."""
        keys = places + layer * 2 * self.block_size
        for kv, lines in enumerate((keys, keys + self.block_size)):
            values = np.take(self._lines, lines, axis=0)
            out[kv] = (bf16_to_f32(values) if self.kind == "bf16" else values).reshape(out.shape[1:])

    def gather_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a new array with the bytes of `blocks`, in this order."""
        return self.data[self._checked(blocks)].view(np.uint8).reshape(-1)

    def scatter_blocks(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        """Write the bytes of `image`, as `gather_blocks` gave them, into `blocks`. Each may be named once."""
        indices = self._checked(blocks)
        expected = len(indices) * self.block_bytes
        if image.dtype != np.uint8 or image.ndim != 1 or len(image) != expected:
            raise InvalidArgument(
                "image",
                f"must be {expected} bytes in one dimension ({len(indices)} blocks of {self.block_bytes}), "
                f"not {image.dtype} {list(image.shape)}",
            )
        if len(np.unique(indices)) != len(indices):
            raise InvalidArgument("blocks", f"names a block twice: {list(blocks)}")
        self.data[indices] = np.ascontiguousarray(image).view(self.data.dtype).reshape(-1, *self.block_shape)

    def _rounded(self, values: NDArray[np.float32]) -> NDArray[Any]:
        return f32_to_bf16(values) if self.kind == "bf16" else values.astype(self.data.dtype)

    def _checked(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        indices = np.asarray(blocks, np.int64).reshape(-1)
        bad = indices[(indices < 0) | (indices >= self.num_blocks)]
        if bad.size:
            raise InvalidArgument("blocks", f"{bad.tolist()} are not among the pool's {self.num_blocks} blocks")
        return indices
