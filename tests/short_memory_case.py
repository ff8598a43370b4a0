"""A program whose memory is limited when the CPU device would copy much; run by a test of the native classes.

It prints which calls ended in `MemoryError`, and whether the device gives the same image afterwards.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from device_kinds import CPU
from reprieve._native import CpuModel
from tiny_models import Row, Runner, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = 64
ROOM = 16 * 2**20  # bytes, for whatever else is needed


def tell(what: str, call: Callable[[], object]) -> None:
    """Print what `call` ended in, under a limit that leaves no room for a copy."""
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        call()
    except MemoryError as error:
        sys.stdout.write(f"{what} {type(error).__name__}\n")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    config = tiny_config((8, 8, 128))
    weights = CPU.weights(config, tiny_weights(config))
    device = CPU.device(weights, num_blocks=BLOCKS, block_size=128)
    Runner.of(device).run([Row(0, 0, [1] * 300)])
    blocks = list(range(BLOCKS))
    image = device.gather(blocks)
    native = getattr(device, "_native")  # noqa: B009  not the reference's
    out = np.empty_like(image)
    tell("gather", lambda: native.gather(blocks, out))
    tell("scatter", lambda: native.scatter(blocks, image))
    model = CpuModel(num_layers=1, num_heads=1, num_kv_heads=1, head_size=2, vocab_size=1)
    rows = np.zeros(128 * 2**20, np.uint8)
    tell("weights", lambda: model.add_matrix("m", rows, "F32", "F32", 2**15, 2**10))
    sys.stdout.write("as before\n" if np.array_equal(device.gather(blocks), image) else "changed\n")


if __name__ == "__main__":
    main()
