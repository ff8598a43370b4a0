"""The kinds of device that tests run on, and what all of them have beside the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import numpy as np
import pytest

from reprieve.device.cpu import CpuDevice
from reprieve.device.cpu_weights import CpuWeights
from reprieve.device.reference import ReferenceDevice
from reprieve.device.reference_weights import ReferenceWeights
from reprieve.step import Device, Ticket

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reprieve.device.kv_pool import KvKind
    from reprieve.loading import DeviceSettings
    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import ModelWeights, Rounding
    from reprieve.step import Step

DeviceWeights: TypeAlias = ReferenceWeights | CpuWeights

TOLERANCES: Final[dict[KvKind, float]] = {"f32": 2e-5, "f16": 2e-3, "bf16": 2e-2}
"""By how much of the largest logit the CPU device may differ from the reference, by the type of the KV pool. Sums in
float32 have another order; where one falls to the other side of a tie, a key or value differs by one unit in its last
place."""


def check_close(
    got: NDArray[np.float32], expected: NDArray[np.float32], kv: KvKind = "f32", least: float = 0.0
) -> None:
    """Assert that logits are those of the reference, within `TOLERANCES` of the largest one or of `least`."""
    assert got.shape == expected.shape
    assert np.isfinite(expected).all()
    assert np.abs(got - expected).max() <= TOLERANCES[kv] * max(least, np.abs(expected).max())


class LogitTicket(Ticket, Protocol):
    """A ticket of a device that keeps its newest logits."""

    @property
    def logits(self) -> NDArray[np.float32]: ...

    @property
    def logit_rows(self) -> NDArray[np.intp]: ...


class LogitDevice(Device, Protocol):
    """A device that keeps its newest logits, and says of how many blocks its pool is."""

    num_blocks: int
    block_size: int

    def launch(self, step: Step) -> LogitTicket: ...


@dataclass(frozen=True)
class DeviceKind:
    """A device, and on the CPU how many threads and which instructions compute (None: the best there are)."""

    name: Literal["reference", "cpu"]
    threads: int | None = None
    instructions: str | None = None

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.name, self.threads, self.instructions) if part is not None)

    @property
    def oracle(self) -> DeviceKind:
        """The kind whose bits this one must have."""
        return REFERENCE if self.name == "reference" else CPU

    def weights(self, config: ModelConfig, model: ModelWeights, rounding: Rounding = "file") -> DeviceWeights:
        """Return the weights of a device of this kind."""
        if self.name == "reference":
            return ReferenceWeights(config, model, rounding)
        return CpuWeights(config, model, rounding)

    def device(
        self, weights: DeviceWeights, num_blocks: int = 20, block_size: int = 4, num_slots: int = 4, kv: KvKind = "f32"
    ) -> ReferenceDevice | CpuDevice:
        """Return a device of this kind."""
        if isinstance(weights, ReferenceWeights):
            return ReferenceDevice(weights, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, kv=kv)
        return CpuDevice(
            weights,
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            kv=kv,
            threads=self.threads,
            instructions=self.instructions,
        )

    def make(self, weights: DeviceWeights, settings: DeviceSettings) -> ReferenceDevice | CpuDevice:
        """Return a device with the settings of an engine."""
        return self.device(weights, settings.num_blocks, settings.block_size, settings.num_slots, settings.kv)


REFERENCE = DeviceKind("reference")
CPU = DeviceKind("cpu", 1)
KINDS = (REFERENCE, CPU, DeviceKind("cpu", 2), DeviceKind("cpu", 3))

each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
