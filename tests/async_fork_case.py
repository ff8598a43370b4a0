"""A program that forks while an asynchronous engine decodes; run by a test of it.

The child prints what each call on the parent's engine comes to, and the tokens of an engine of its own; the parent the
tokens of the stream that it had when it forked. Both end as programs do, with all that they hold.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from async_kit import read, small_async_engine
from engine_kit import ask
from reprieve.errors import EngineForked

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.async_engine import AsyncEngine
    from reprieve.stream import Stream


def use(engine: AsyncEngine, stream: Stream) -> None:
    """Print the names of the calls that are refused as they should."""
    calls: dict[str, Callable[[], object]] = {
        "stream": lambda: engine.stream(ask(3, 3)),
        "submit": lambda: engine.submit(ask(3, 3)),
        "cancel": lambda: engine.cancel(stream),
        "park": lambda: engine.park(stream),
        "resume": lambda: engine.resume(stream),
        "snapshot": engine.snapshot,
        "stats": engine.stats,
        "generate": lambda: asyncio.run(engine.generate(ask(3, 3))),
        "drain": lambda: asyncio.run(engine.drain()),
        "next": lambda: next(stream),
        "anext": lambda: asyncio.run(read(stream)),
        "result": stream.result,
        "aresult": lambda: asyncio.run(stream.aresult()),
    }
    for name, call in calls.items():
        try:
            call()
        except EngineForked:
            sys.stdout.write(f"{name} ")
    asyncio.run(stream.aclose())
    stream.close()
    asyncio.run(engine.close())
    engine.shutdown()


def main() -> None:
    engine = small_async_engine()
    stream, dropped = engine.submit(ask(40, 100)), engine.submit(ask(9, 100))
    next(stream)
    child = os.fork()
    if child == 0:
        use(engine, stream)
        del dropped
        with small_async_engine() as own:
            answer = own.submit(ask(40, 24))
            answer.result()
        sys.stdout.write(f"\n{answer.tokens}\n")
        return
    _, status = os.waitpid(child, 0)
    stream.result()
    sys.stdout.write(f"{stream.tokens}\n")
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
