"""A real model on the CPU device: logits are those of the reference, whatever its weights are kept in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from device_kinds import check_close
from reprieve import load
from reprieve.loading import DeviceSettings
from tiny_models import Row, Runner

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from reprieve import LoadedModel
    from reprieve.device.kv_pool import KvKind
    from reprieve.model.weights import Rounding

pytestmark = pytest.mark.smollm2


def logits(model: LoadedModel, kv: KvKind) -> NDArray[np.float32]:
    """Return the logits of a prompt of 150 tokens in three chunks, and of four more."""
    device = model.make_device(DeviceSettings(num_blocks=12, block_size=16, num_slots=2, kv=kv))
    runner = Runner.of(device)  # type: ignore[arg-type]  # both keep their logits
    tokens = np.random.default_rng(0).integers(0, 40_000, 154).tolist()
    chunks = [(0, 1), (1, 100), (101, 49), *((at, 1) for at in range(150, 154))]
    return np.stack([runner.run([Row(1, at, tokens[at : at + count])])[1] for at, count in chunks])


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16"])
def test_logits_are_those_of_the_reference(smollm2: LoadedModel, smollm2_reference: LoadedModel, kv: KvKind) -> None:
    check_close(logits(smollm2, kv), logits(smollm2_reference, kv), kv)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["f32", "f16", "bf16"])
def test_logits_are_those_of_the_reference_for_each_rounding(smollm2_path: Path, weights: Rounding) -> None:
    model, reference = (load(smollm2_path, device=device, weights=weights) for device in ("cpu", "reference"))
    check_close(logits(model, "f32"), logits(reference, "f32"))
