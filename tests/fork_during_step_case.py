"""A program that forks while a device computes on another thread; run by a test of the CPU device.

The child asks the device for a step and prints what it is told.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace

from device_kinds import CPU
from reprieve.device.cpu_weights import CpuWeights
from tiny_models import Row, Runner, tiny_config, tiny_weights

TOKENS = 3000  # about a second's work


def main() -> None:
    config = replace(tiny_config((16, 4, 64), hidden=1024), context_length=4096)
    weights = CpuWeights(config, tiny_weights(config))
    runner = Runner.of(CPU.device(weights, num_blocks=256, block_size=16))
    step = threading.Thread(target=runner.run, args=([Row(0, 0, [1] * TOKENS)],))
    used = time.process_time()
    step.start()
    while time.process_time() - used < 0.1:  # by then it is in the middle
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        try:
            runner.run([Row(1, 0, [2])])
        except RuntimeError as error:
            os.write(1, f"{error}\n".encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    step.join()
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
