"""The reference device: NumPy, one step at a time, exact; what every other device is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from reprieve.device import reference_ops
from reprieve.device.kv_pool import KvKind, KvPool, check_pool
from reprieve.device.step_check import SlotState, StepLimits, checked_slots
from reprieve.errors import DeviceLost
from reprieve.model.config import rope_tables
from reprieve.model.llama import forward
from reprieve.step import ALWAYS, FROM_FEED, READ_NOTHING, TOKEN_NOT_READ, Step, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reprieve.device.reference_weights import ReferenceWeights
    from reprieve.model.weights import Tensor


class ReferenceOps:
    """`Ops` on NumPy arrays: each call computes at once, for one step.

    `tokens` [rows] i32 and `logits` [rows read back, width] f32 are there once `argmax` was called, which also writes
    the feed cells of `slots`.
    """

    def __init__(self, step: Step, slots: SlotState, memory: _Memory) -> None:
        self._step = step
        self._slots = slots
        self._weights = memory.weights
        self._pool = memory.pool
        self._attention = memory.attention
        self._cos = memory.cos[step.positions]
        self._sin = memory.sin[step.positions]
        # Per row: the pool places of all its positions.
        self._places = [
            self._pool.places(slots.tables[slot], np.arange(kv_length))
            for slot, kv_length in zip(step.slots, step.kv_lengths, strict=True)
        ]
        self._new_places = np.concatenate(
            [places[start:] for places, start in zip(self._places, step.starts, strict=True)]
        )
        self._ends = np.cumsum(step.num_new)
        # A cell that holds no token is taken for token 0: what becomes of it is discarded.
        fed = np.maximum(np.repeat(slots.feed[step.slots], step.num_new), 0)
        self._token_ids = np.where(step.token_ids == FROM_FEED, fed, step.token_ids)
        self.read_rows = np.flatnonzero(step.readback != READ_NOTHING)
        self.tokens = np.full(step.num_rows, TOKEN_NOT_READ, np.int32)
        self.logits = np.empty((0, 0), np.float32)

    def embed(self, table: Tensor) -> NDArray[np.float32]:
        """Return the embeddings of the step's tokens."""
        return np.ascontiguousarray(self._weights[table][:, self._token_ids].T)

    def rms_norm(self, x: NDArray[np.float32], weight: Tensor, eps: float) -> NDArray[np.float32]:
        """See `reference_ops.rms_norm`."""
        return reference_ops.rms_norm(x, self._weights[weight], eps)

    def add_rms_norm(
        self, x: NDArray[np.float32], residual: NDArray[np.float32], weight: Tensor, eps: float
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Norm the sum after it was rounded to float32."""
        total = x + residual
        return reference_ops.rms_norm(total, self._weights[weight], eps), total

    def linear(self, x: NDArray[np.float32], weight: Tensor, bias: Tensor | None = None) -> NDArray[np.float32]:
        """See `ReferenceWeights.linear`."""
        return self._weights.linear(x, weight, bias)

    def head_norm(self, x: NDArray[np.float32], weight: Tensor, eps: float) -> NDArray[np.float32]:
        """See `reference_ops.head_norm`."""
        return reference_ops.head_norm(x, self._weights[weight], eps)

    def rope_append(
        self, layer: int, q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """See `reference_ops.rope` and `KvPool.append`."""
        self._pool.append(layer, self._new_places, reference_ops.rope(k, self._cos, self._sin), v)
        return reference_ops.rope(q, self._cos, self._sin)

    def paged_attention(self, layer: int, q: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `reference_ops.PagedAttention`."""
        rows = zip(np.split(q, self._ends[:-1]), self._places, strict=True)
        return np.concatenate([self._attention.row(layer, *row) for row in rows]).astype(np.float32)

    def swiglu(self, gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `reference_ops.swiglu`."""
        return reference_ops.swiglu(gate, up)

    def select_readback(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a copy of the last token of each row that is read back."""
        return x[self._ends[self.read_rows] - 1]

    def argmax(self, logits: NDArray[np.float32]) -> None:
        """See `reference_ops.masked_argmax`."""
        step, rows = self._step, self.read_rows
        masks = dict(zip(step.mask_rows.tolist(), step.masks, strict=True))
        banned: dict[int, list[int]] = {}
        for row, token, after in step.bans.tolist():
            if after in {ALWAYS, self._token_ids[self._ends[row] - 1]}:
                banned.setdefault(row, []).append(token)
        self.logits = logits
        self.tokens[rows] = reference_ops.masked_argmax(
            logits,
            self._weights.config.vocab_size,
            {place: masks[row] for place, row in enumerate(rows.tolist()) if row in masks},
            {place: banned[row] for place, row in enumerate(rows.tolist()) if row in banned},
        )
        self._slots.feed[step.slots[rows]] = self.tokens[rows]


@dataclass(frozen=True, slots=True)
class ReferenceTicket:
    """A step that was computed at launch.

    `logits` [rows read back, width] f32 are those of the rows `logit_rows`, in this order; the caller may keep them.
    """

    step: Step
    result: StepResult
    logits: NDArray[np.float32]
    logit_rows: NDArray[np.intp]

    def ready(self) -> bool:
        """Return True."""
        return True

    def settle(self) -> StepResult:
        """Return what the step read back."""
        return self.result


class ReferenceDevice:
    """Computes steps with NumPy, at once.

    Exact: a token's bits depend on its own sequence alone. It allocates on every step. `weights` may be shared with
    other devices. Raises `InvalidArgument` for a bad setting, and from `launch` for a step that cannot be computed.
    """

    default_depth: Final = 1  # a step is done when it was launched

    def __init__(
        self, weights: ReferenceWeights, *, num_blocks: int, block_size: int, num_slots: int, kv: KvKind = "f32"
    ) -> None:
        check_pool(num_blocks, block_size, num_slots, kv)
        self._memory: _Memory | None = _Memory(weights, KvPool(weights.config, num_blocks, block_size, kv))
        self._limits = StepLimits(
            num_slots, num_blocks, block_size, weights.config.context_length, weights.config.vocab_size
        )
        self._slots = SlotState.empty(self._limits)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = self._memory.pool.block_bytes
        self.kv_dtype = kv
        self.kv_shape = self._memory.pool.block_shape

    @property
    def pool(self) -> KvPool:
        """The KV pool; raises `DeviceLost` once the device is closed."""
        return self._open().pool

    def launch(self, step: Step) -> ReferenceTicket:
        """Compute `step`; its table changes and feed cells count only if it succeeds.

        Raises `InvalidArgument` for a step that cannot be computed, and writes nothing.
        """
        memory = self._open()
        slots = checked_slots(step, self._slots, self._limits)
        ops = ReferenceOps(step, slots, memory)
        # Overflow and NaN are values like others here: they end one row, when its token is chosen.
        with np.errstate(all="ignore"), memory.weights.one_blas_thread():
            forward(ops, memory.weights.config, memory.weights.model)
        self._slots = slots
        return ReferenceTicket(step, StepResult(ops.tokens), ops.logits, ops.read_rows)

    def gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """See `Device.gather`; raises `InvalidArgument` for a block that is not there."""
        return self.pool.gather_blocks(blocks)

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        """See `Device.scatter`; raises `InvalidArgument` for a block that is not there or an image of another size."""
        self.pool.scatter_blocks(blocks, image)

    def probe(self) -> None:
        """Raise `DeviceLost` once the device is closed."""
        self._open()

    def close(self) -> None:
        """Let go of the pool and the weights."""
        self._memory = None

    def _open(self) -> _Memory:
        if self._memory is None:
            raise DeviceLost("the reference device is closed")
        return self._memory


class _Memory:
    """What the steps of one device share: weights, pool, scratch, and the rotary angles of each position.

    cos, sin  [positions, head_size / 2]  f32, computed in float64
    """

    def __init__(self, weights: ReferenceWeights, pool: KvPool) -> None:
        self.weights = weights
        self.pool = pool
        self.attention = reference_ops.PagedAttention(pool, weights.config.num_heads)
        num_positions = min(pool.num_blocks * pool.block_size, weights.config.context_length)
        self.cos, self.sin = rope_tables(weights.config, num_positions)
