"""A program that forks while a device computes, and again when it is idle; run by a test of the CPU device.

The first child asks the device for all that it does, and prints what it is told. The second one, forked with a step
that is computed but not settled, goes on.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from device_kinds import DeviceKind
from reprieve.device.cpu_weights import CpuWeights
from reprieve.step import FROM_FEED
from tiny_models import Row, Runner, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 3000  # about a second's work


def told(call: Callable[[], object]) -> None:
    """Print what `call` raises."""
    try:
        call()
    except RuntimeError as error:
        os.write(1, f"RuntimeError: {error}\n".encode())


def in_child(work: Callable[[], None]) -> None:
    """Fork, do `work` in the child and wait for it; end with its status if it fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status != 0:
        sys.exit(os.waitstatus_to_exitcode(status))


def main(threads: int) -> None:
    config = replace(tiny_config((16, 4, 64), hidden=1024), context_length=4096)
    weights = CpuWeights(config, tiny_weights(config))
    runner = Runner.of(DeviceKind("cpu", threads).device(weights, num_blocks=256, block_size=16))
    device = runner.device
    first = runner.launch([Row(0, 0, [1] * TOKENS)])
    second = runner.launch([Row(0, TOKENS, [FROM_FEED])])

    def forked_in_the_middle() -> None:
        told(lambda: runner.launch([Row(1, 0, [2])]))
        told(first.ready)
        told(second.settle)
        told(lambda: device.gather([0]))
        told(lambda: device.scatter([0], np.zeros(device.block_bytes, np.uint8)))
        device.close()
        os.write(1, b"closed\n")

    in_child(forked_in_the_middle)
    if first.ready():
        sys.exit("the first step was over too soon for this to be a test")
    token = first.settle().tokens.tolist()
    again = runner.launch([Row(0, TOKENS, token)]).settle().tokens.tolist()
    if second.settle().tokens.tolist() != again:
        sys.exit("the parent's steps came to something else")
    os.write(1, b"the parent's steps are done\n")

    over = runner.launch([Row(0, TOKENS, token)])
    device.gather([0])  # waits for it

    def forked_when_idle() -> None:
        if over.settle().tokens.tolist() != again:
            sys.exit("the child has other tokens")
        if runner.launch([Row(0, TOKENS, [FROM_FEED])]).settle().tokens[0] < 0:
            sys.exit("the child computes something else")
        os.write(1, b"a child of an idle device has its tokens and goes on\n")

    in_child(forked_when_idle)


if __name__ == "__main__":
    main(int(sys.argv[1]))
