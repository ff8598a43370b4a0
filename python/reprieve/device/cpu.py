"""The CPU device: a step is handed to Rust, whose threads execute the recorded program at the speed of memory."""

from __future__ import annotations

import os
from operator import index
from typing import TYPE_CHECKING, Final

import numpy as np

from reprieve._native import CpuDevice as NativeDevice
from reprieve._native import CpuModel
from reprieve.device.kv_pool import check_pool
from reprieve.errors import DeviceLost, InvalidArgument, StepFailed
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


class CpuTicket:
    """A step that the device computes, or has computed. Its arrays were copied."""

    __slots__ = ("_device", "_has_failed", "_number", "_result", "step")

    def __init__(self, step: Step, device: CpuDevice, number: int) -> None:
        self.step = step
        self._device = device
        self._number = number
        self._result: StepResult | None = None
        self._has_failed = False

    def ready(self) -> bool:
        """Return whether `settle` would not have to wait; True once the device is closed."""
        return self._has_failed or self._result is not None or self._device.ready(self._number)

    def settle(self) -> StepResult:
        """Wait for the step, without the GIL, and return what it read back. Allocates the array of its tokens.

        Where it was interrupted it may be called again. Raises `StepFailed` if a thread of the device panicked, or the
        device was closed meanwhile; `DeviceLost` once it is closed.
        """
        if self._result is None:
            tokens = np.empty(self.step.num_rows, np.int32)
            try:
                self._device.settle(self._number, tokens)
            except StepFailed:
                self._has_failed = True
                self._device.forget(self._number)
                raise
            self._result = StepResult(tokens)
        self._device.forget(self._number)
        return self._result

    @property
    def logit_rows(self) -> NDArray[np.intp]:
        """The rows of the step whose logits there are: [rows read back]."""
        return np.flatnonzero(self.step.readback != READ_NOTHING)

    @property
    def logits(self) -> NDArray[np.float32]:
        """A new copy of the logits of `logit_rows`: [rows read back, width] f32. Waits for the step.

        Raises `RuntimeError` once another step was launched, `DeviceLost` once the device is closed.
        """
        return self._device.logits(self._number)


class CpuDevice:
    """Computes steps in Rust, in the order of launch, with threads of its own that go from one step right to the next.

    A ticket that is never settled keeps its tokens in memory as long as the device is open.

    Exact: a token's bits depend on its own sequence alone, whatever the batch, the number of threads and the
    instruction set. `weights` may be shared with other devices. `threads` None is one per core that this process may
    use; `instructions` None is the best that the machine has, see `reprieve._native.cpu_instructions`. Raises
    `InvalidArgument` for a bad setting, and `MemoryError`.
    """

    default_depth: Final = 1
    """Where every core computes, the caller prepares the next step at the cost of one of them: `make bench-depths`
    shows no gain then, and what over-runs cost. With a core to spare 2 gains some percent."""

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
        """Let `step` be computed after those before it, and do not wait; its arrays are copied.

        Only where memory must be made for a larger step than any before are those before it waited for. Raises
        `InvalidArgument` for a step that cannot be computed, `MemoryError`, and `RuntimeError` where a thread cannot be
        started, or in a process that was forked during a step, with nothing changed; `DeviceLost` once it is closed.
        """
        return CpuTicket(step, self, self._open().launch(step))

    def ready(self, number: int) -> bool:
        """Return whether step `number` is over, as `CpuTicket.ready` does."""
        return self._native is None or self._native.ready(number)

    def settle(self, number: int, tokens: NDArray[np.int32]) -> None:
        """Wait for step `number` and write its tokens to `tokens` [rows], as `CpuTicket.settle` does."""
        self._open().settle(number, tokens)

    def forget(self, number: int) -> None:
        """Let go of the tokens of step `number`. Idempotent."""
        if self._native is not None:
            self._native.forget(number)

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
        """See `Device.gather`; waits for all launched steps. Raises `InvalidArgument` for a block that is not there."""
        image = np.empty(len(blocks) * self.block_bytes, np.uint8)
        self._open().gather(blocks, image)
        return image

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        """See `Device.scatter`; waits for all launched steps.

        Raises `InvalidArgument` for a block that is not there or an image of another size.
        """
        self._open().scatter(blocks, image)

    def probe(self) -> None:
        """Raise `DeviceLost` once the device is closed."""
        self._open()

    def close(self) -> None:
        """Let go of the pool, the threads and the weights, after the step that is being computed. The others fail."""
        native, self._native = self._native, None
        if native is not None:
            native.stop()

    def _open(self) -> NativeDevice:
        if self._native is None:
            raise DeviceLost("the CPU device is closed")
        return self._native
