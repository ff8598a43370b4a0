"""Many clients of one asynchronous engine under pressure: who stays is answered as alone, and nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from async_kit import check_all_gone, check_as_alone, run, small_async_engine
from engine_kit import alone, ask
from reprieve import Done, Token
from reprieve.errors import RequestFinished
from reprieve.mailbox import Mailbox
from reprieve.stream import Stream

if TYPE_CHECKING:
    from reprieve import Request
    from reprieve.async_engine import AsyncEngine
    from reprieve.request import Event

NUM_CLIENTS = 64
BLOCKS_EACH = 8
"""Blocks that a request of these clients fills at its end, about: 7 to 9 of 4 positions."""


def check_beginning(stream: Stream, events: list[Event]) -> None:
    """Assert that a stream's tokens are the first ones of its solo run."""
    tokens = [event.id for event in events if isinstance(event, Token)]
    assert tokens == alone(stream.request).tokens[: len(tokens)]


async def some_events(stream: Stream, count: int) -> list[Event]:
    """Read `count` events, fewer if it ends before."""
    events: list[Event] = []
    while len(events) < count:
        try:
            events.append(await anext(stream))
        except StopAsyncIteration:
            break
    return events


async def closes_the_iterator(engine: AsyncEngine, request: Request, after: int) -> None:
    async with contextlib.aclosing(engine.stream(request)) as stream:
        check_beginning(stream, await some_events(stream, after))
    assert stream.is_finished


async def drops_the_iterator(engine: AsyncEngine, request: Request, after: int) -> None:
    left = after
    async for _ in engine.stream(request):
        left -= 1
        if left <= 0:
            break


async def cancels_the_task(engine: AsyncEngine, request: Request, after: int) -> None:
    async def client() -> None:
        stream = engine.stream(request)
        check_beginning(stream, await some_events(stream, after))
        reached.set()
        async for _ in stream:
            pass

    reached = asyncio.Event()
    task = asyncio.create_task(client())
    await reached.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def cancels_by_id(engine: AsyncEngine, request: Request, after: int) -> None:
    stream = engine.stream(request)
    events = await some_events(stream, after)
    engine.cancel(stream.id or stream)
    events += await some_events(stream, 10**6)
    check_beginning(stream, events)
    assert isinstance(events[-1], Done)


async def closes_in_another_task(engine: AsyncEngine, request: Request, after: int) -> None:
    stream = engine.stream(request)
    await some_events(stream, after)
    reader = asyncio.create_task(some_events(stream, 10**6))
    await asyncio.create_task(stream.aclose())
    await reader


LEAVES = [closes_the_iterator, drops_the_iterator, cancels_the_task, cancels_by_id, closes_in_another_task]


@pytest.mark.parametrize("seed", range(3))
def test_64_clients_of_which_a_third_leave_share_a_pool_for_eight(seed: int) -> None:
    chance = random.Random(seed)
    requests = [ask(3 + number % 5, 26 + number % 3, number % 16) for number in range(NUM_CLIENTS)]
    for request in requests:
        alone(request)
    leaving = set(chance.sample(range(NUM_CLIENTS), NUM_CLIENTS // 3))
    threads = threading.active_count()

    async def stays(engine: AsyncEngine, number: int) -> None:
        stream = engine.stream(requests[number])
        if number % 8 == 0:
            with contextlib.suppress(RequestFinished):
                await asyncio.to_thread(engine.park, stream)
        await check_as_alone(stream)

    async def main() -> None:
        async with small_async_engine(kv_blocks=8 * BLOCKS_EACH, max_slots=12, host_kv_bytes=300_000) as engine:
            clients = [
                LEAVES[number % len(LEAVES)](engine, requests[number], chance.randrange(28))
                if number in leaving
                else stays(engine, number)
                for number in range(NUM_CLIENTS)
            ]
            await asyncio.gather(*clients)
            await engine.drain()
            stats = engine.stats()
            assert stats.parks_by_spill + stats.parks_by_replay, "there was pressure"
            check_all_gone(engine)

    run(main())
    assert threading.active_count() == threads


def test_memory_stays_flat_over_2000_requests() -> None:
    async def client(engine: AsyncEngine, number: int) -> None:
        if number % 3 == 0:
            async with contextlib.aclosing(engine.stream(ask(3, 2, number % 10))) as stream:
                await anext(stream)
        elif number % 3 == 1:
            await engine.generate(ask(3, 2, number % 10))
        else:
            assert len(await some_events(engine.stream(ask(3, 2, number % 10)), 9)) == 3

    async def clients(engine: AsyncEngine, count: int) -> None:
        for _ in range(count // 50):
            await asyncio.gather(*(client(engine, number) for number in range(50)))

    async def main() -> None:
        async with small_async_engine(max_slots=16) as engine:
            await clients(engine, 200)
            gc.collect()
            tracemalloc.start()
            try:
                await clients(engine, 600)  # until the interpreter's own free lists are full
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
                await clients(engine, 2000)
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            # Nothing is kept of a request: 20 bytes for each would be too many.
            assert after - before < 40_000
            kinds = [type(thing) for thing in gc.get_objects()]
            assert kinds.count(Stream) == kinds.count(Mailbox) == 0
            check_all_gone(engine)

    run(main())
