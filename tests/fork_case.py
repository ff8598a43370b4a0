"""A program that forks with a model loaded, before or after its threads were used; run by tests of the CPU device.

It prints the tokens of the child and of the parent, two lines each: from the engine that both have, and from one of
their own. "unused" is "after", but the child closes the engine that it got without having used it.
"""

from __future__ import annotations

import os
import sys

from device_kinds import DeviceKind
from engine_kit import ask, tiny_model
from reprieve import Engine, LoadedModel


def decode(engine: Engine) -> str:
    """Return what two requests come to together."""
    handles = [engine.submit(ask(length, 24, seed=length)) for length in (40, 9)]
    engine.run()
    return " ".join(str(token) for handle in handles for token in handle.tokens)


def small(model: LoadedModel) -> Engine:
    return Engine(model, kv_blocks=40, block_size=4)


def main(when: str, threads: int) -> None:
    model = tiny_model(kind=DeviceKind("cpu", threads))
    engine = small(model)
    if when != "before":
        decode(engine)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The engine that the fork copied, and one of the child's own.
        with os.fdopen(writer, "w") as pipe:
            if when == "unused":
                engine.close()
                engine = small(model)
            pipe.write(f"{decode(engine)}\n{decode(small(model))}\n")
            engine.close()
        os._exit(0)
    os.close(writer)
    ours = decode(engine)
    with os.fdopen(reader) as pipe:
        sys.stdout.write(pipe.read())
    _, status = os.waitpid(child, 0)
    sys.stdout.write(f"{ours}\n{decode(small(model))}\n")
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
