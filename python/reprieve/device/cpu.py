"""The CPU device: a step is one call into Rust, which executes the recorded program at the speed of memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Final

import numpy as np

from reprieve._native import CpuDevice as NativeDevice
from reprieve._native import CpuModel
from reprieve.device.kv_pool import check_pool
from reprieve.errors import DeviceLost, InvalidArgument
from reprieve.model.config import rope_tables
from reprieve.step import READ_NOTHING, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reprieve.device.cpu_weights import CpuWeights
    from reprieve.device.kv_pool import KvKind
    from reprieve.step import Step

# `CpuModel` is for `cpu_weights`: this file alone, and the engine, name the extension.
__all__ = ["MOST_THREADS", "CpuDevice", "CpuModel", "CpuTicket", "checked_threads"]

MOST_THREADS: Final = 1024


def checked_threads(threads: int | None) -> int:
    """Return how many threads compute: `threads`, or for None one per core that this process may use.

    Raises `InvalidArgument` for anything but an integer of at least 1.
    """
    if threads is None:
        affinity = getattr(os, "sched_getaffinity", None)  # not on every platform
        return min(os.cpu_count() or 1 if affinity is None else len(affinity(0)), MOST_THREADS)
    try:
        number = None if isinstance(threads, bool) else index(threads)
    except TypeError:
        number = None
    if number is None or not 1 <= number <= MOST_THREADS:
        raise InvalidArgument("threads", f"must be None or an integer from 1 to {MOST_THREADS}, not {threads!r}")
    return number


@dataclass(frozen=True, slots=True)
class CpuTicket:
    """A step that was computed at launch."""

    step: Step
    result: StepResult
    device: CpuDevice = field(repr=False)
    number: int

    def settle(self) -> StepResult:
        """Return what the step read back."""
        return self.result

    @property
    def logit_rows(self) -> NDArray[np.intp]:
        """The rows of the step whose logits there are: [rows read back]."""
        return np.flatnonzero(self.step.readback != READ_NOTHING)

    @property
    def logits(self) -> NDArray[np.float32]:
        """A new copy of the logits of `logit_rows`: [rows read back, width] f32.

        Raises `RuntimeError` once the device has computed another step, `DeviceLost` once it is closed.
        """
        return self.device.logits(self.number)


class CpuDevice:
    """Computes steps at once, in Rust, with threads of its own; the caller's thread sleeps meanwhile, without the GIL.

    Exact: a token's bits depend on its own sequence alone, whatever the batch, the number of threads and the
    instruction set. `weights` may be shared with other devices. `threads` None is one per core that this process may
    use; `instructions` None is the best that the machine has, see `reprieve._native.cpu_instructions`. Raises
    `InvalidArgument` for a bad setting, and `MemoryError`.
    """

    def __init__(  # noqa: PLR0913  keywords
        self,
        weights: CpuWeights,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        kv: KvKind,
        threads: int | None = None,
        instructions: str | None = None,
    ) -> None:
        check_pool(num_blocks, block_size, num_slots, kv)
        num_threads = checked_threads(threads)
        config = weights.config
        cos, sin = rope_tables(config, min(num_blocks * block_size, config.context_length))
        native = NativeDevice(
            weights.packed,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            context_length=config.context_length,
            kv=kv,
            cos=cos,
            sin=sin,
            threads=num_threads,
            instructions=instructions,
        )
        self._native: NativeDevice | None = native
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = native.block_bytes
        self.weight_bytes = weights.num_bytes
        self.kv_dtype = kv
        self.kv_shape = native.kv_shape
        self.threads = native.threads
        self.instructions = native.instructions

    def launch(self, step: Step) -> CpuTicket:
        """Compute `step`; its table changes count only if it succeeds. Allocates the array of its tokens.

        Raises `InvalidArgument` for a step that cannot be computed, and writes nothing; `MemoryError`; `RuntimeError`
        where a thread cannot be started, or in a process that was forked during a step; `DeviceLost` once it is closed.
        """
        native = self._open()
        tokens = np.empty(step.num_rows, np.int32)
        number = native.launch(step, tokens)
        return CpuTicket(step, StepResult(tokens), self, number)

    def logits(self, number: int) -> NDArray[np.float32]:
        """Return a new copy of the logits of step `number`, as `CpuTicket.logits` does."""
        native = self._open()
        out = np.empty(native.logits_shape, np.float32)  # of a newer step, perhaps: then the number is refused
        native.logits(number, out)
        return out

    def op_seconds(self) -> dict[str, float]:
        """Return the seconds that each kind of operation has taken since the device was made."""
        return self._open().op_seconds()

    def gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """See `Device.gather`; raises `InvalidArgument` for a block that is not there."""
        image = np.empty(len(blocks) * self.block_bytes, np.uint8)
        self._open().gather(blocks, image)
        return image

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        """See `Device.scatter`; raises `InvalidArgument` for a block that is not there or an image of another size."""
        self._open().scatter(blocks, image)

    def probe(self) -> None:
        """Raise `DeviceLost` once the device is closed."""
        self._open()

    def close(self) -> None:
        """Let go of the pool, the threads and the weights."""
        self._native = None

    def _open(self) -> NativeDevice:
        if self._native is None:
            raise DeviceLost("the CPU device is closed")
        return self._native
