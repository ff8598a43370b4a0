"""A program that asks for more threads than there is memory for; run by the tests of the CPU device, on Linux.

It prints how its first request ends, and the tokens of one that comes when there is memory again.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from device_kinds import DeviceKind
from engine_kit import ask, tiny_model
from reprieve import Engine

SPARE_BYTES = 128 * 2**20
"""What 200 threads, with stacks of two megabytes each, do not fit."""


def main() -> None:
    model = tiny_model(kind=DeviceKind("cpu", 200))
    with Engine(model, kv_blocks=40, block_size=4) as engine:
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1]))
        handle = engine.submit(ask(5, 9))
        engine.run()
        resource.setrlimit(resource.RLIMIT_AS, before)
        sys.stdout.write(f"{handle.finish_reason}\n")
        handle = engine.submit(ask(5, 9))
        engine.run()
        sys.stdout.write(f"{' '.join(map(str, handle.tokens))}\n")


if __name__ == "__main__":
    main()
