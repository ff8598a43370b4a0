"""The asynchronous engine: streams and how they end, back-pressure, pauses, and the end of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from async_kit import (
    ENDLESS,
    ask_engine,
    check_all_gone,
    check_as_alone,
    decode_threads,
    endless_engine,
    gated_model,
    in_thread,
    read,
    run,
    small_async_engine,
)
from engine_kit import Clock, alone, ask, prompt
from recording import check_stream
from reprieve import Done, Failed, Paused, Request, Resumed, Token
from reprieve.errors import (
    EngineClosed,
    InvalidArgument,
    NeverFits,
    RequestFailed,
    RequestFinished,
    UnknownRequest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reprieve import Engine
    from reprieve.async_engine import AsyncEngine
    from reprieve.stream import Stream


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not decode_threads()


# Streams.


def test_a_stream_gives_the_events_of_the_request_alone_in_a_loop_and_in_a_thread() -> None:
    async def main() -> None:
        async with small_async_engine() as engine:
            streams = [engine.stream(ask(5 + seed, 12, seed)) for seed in range(6)]
            await asyncio.gather(*(check_as_alone(stream) for stream in streams))
            check_all_gone(engine)

    run(main())
    with small_async_engine() as engine:
        stream = engine.submit(ask(5, 12))
        check_stream(list(stream), alone(stream.request))


def test_a_stream_says_what_has_come_so_far_and_keeps_it() -> None:
    with small_async_engine() as engine:
        stream = engine.submit(prompt(9), max_new_tokens=12, ignore_eos=True)
        assert stream.id == "request-0"
        first = next(stream)
        assert isinstance(first, Token)
        assert stream.tokens[0] == first.id
        rest = list(stream)
        assert rest[-1] == Done("length")
    expected = alone(stream.request)
    assert (stream.tokens, stream.text, stream.finish_reason) == (expected.tokens, expected.text, "length")
    assert stream.stats.tokens_generated == 12
    assert stream.stats is not stream.stats, "a copy"
    assert stream.is_finished
    assert not stream.fell_behind
    assert list(stream) == [], "an ended stream stays ended"
    assert repr(stream) == "<Stream 'request-0': length, 12 tokens>"


def test_generate_returns_the_whole_answer_or_raises_how_it_failed() -> None:
    clock = Clock()

    async def main() -> None:
        async with endless_engine(clock=clock) as engine:
            answer = await engine.generate(prompt(4), max_new_tokens=9, ignore_eos=True)
            assert answer.tokens == alone(answer.request).tokens
            late = engine.stream(ask(4, ENDLESS, deadline_s=5))
            await anext(late)
            clock.now += 5
            with pytest.raises(RequestFailed) as failure:
                await late.aresult()
            assert (failure.value.code, failure.value.retryable) == ("deadline", True)
            check_all_gone(engine)

    run(main())


def test_bad_input_is_refused_to_its_caller_alone() -> None:
    gate = threading.Event()

    def held(_: tuple[int, ...]) -> None:
        assert gate.wait(60)

    async def main() -> None:
        async with small_async_engine(context_length=64, kv_blocks=12) as engine:
            good = engine.stream(ask(5, 40, id="good", mask=held))
            refused: list[tuple[str, Request | tuple[int, ...], dict[str, int]]] = [
                ("prompt", (), {}),
                ("max_new_tokens", (1,), {"max_new_tokens": 0}),
                ("magic", (1,), {"magic": 1}),
                ("priority", ask(1, 1), {"priority": 1}),
            ]
            for field, bad, fields in refused:
                with pytest.raises(InvalidArgument) as refusal:
                    engine.stream(bad, **fields)
                assert refusal.value.field == field
            for kind, request in (
                (InvalidArgument, ask(2, 2, id="good")),
                (InvalidArgument, ask(64, 4)),
                (InvalidArgument, Request([10**9])),
                (NeverFits, ask(60, 2)),
            ):
                stream = engine.stream(request)
                for _ in range(2):  # it does not hang the second time either
                    with pytest.raises(kind):
                        await anext(stream)
                assert (stream.finish_reason, stream.tokens, stream.is_finished) == (None, [], True)
                with pytest.raises(kind):
                    await asyncio.to_thread(engine.submit, request)
                with pytest.raises(kind):
                    await engine.generate(request)
            gate.set()
            await check_as_alone(good)
            check_all_gone(engine)

    run(main())
    for setting in ("max_unread", "kv_blocks", "magic"):
        with pytest.raises(InvalidArgument) as refusal:
            small_async_engine(None, **{setting: 0})
        assert refusal.value.field == setting


# Closing a stream.


async def _closes(engine: AsyncEngine) -> None:
    stream = engine.stream(ask(5, ENDLESS))
    await read(stream, 3)
    await stream.aclose()
    await stream.aclose()
    assert stream.finish_reason == "cancelled"
    assert await read(stream) == [], "what was unread is gone"


async def _closes_before_it_is_taken(engine: AsyncEngine) -> None:
    stream = engine.stream(ask(5, ENDLESS))
    await stream.aclose()
    assert stream.finish_reason == "cancelled"


async def _breaks(engine: AsyncEngine) -> None:
    async for _ in engine.stream(ask(5, ENDLESS)):
        break


async def _breaks_aclosing(engine: AsyncEngine) -> None:
    async with contextlib.aclosing(engine.stream(ask(5, ENDLESS))) as stream:
        async for _ in stream:
            break
    assert stream.finish_reason == "cancelled"


async def _drops(engine: AsyncEngine) -> None:
    engine.stream(ask(5, ENDLESS))


async def _drops_in_a_circle(engine: AsyncEngine) -> None:
    circle: list[object] = [engine.stream(ask(5, ENDLESS))]
    circle.append(circle)
    del circle
    gc.collect()


async def _task_is_cancelled(engine: AsyncEngine) -> None:
    stream = engine.stream(ask(5, ENDLESS))
    await read(stream, 3)
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0)  # it reads what there is, and waits
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await read(stream) == []


async def _generate_is_cancelled(engine: AsyncEngine) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(ask(5, ENDLESS)), 0.01)


async def _thread_closes(engine: AsyncEngine) -> None:
    def close() -> None:
        with contextlib.closing(engine.submit(ask(5, ENDLESS))) as stream:
            next(stream)
        assert stream.finish_reason == "cancelled"

    await asyncio.to_thread(close)


@pytest.mark.parametrize(
    "leave",
    [
        _closes,
        _closes_before_it_is_taken,
        _breaks,
        _breaks_aclosing,
        _drops,
        _drops_in_a_circle,
        _task_is_cancelled,
        _generate_is_cancelled,
        _thread_closes,
    ],
)
def test_who_closes_a_stream_cancels_its_request_alone(leave: object) -> None:
    async def main() -> None:
        async with endless_engine() as engine:
            other = engine.stream(ask(7, 30))
            await leave(engine)  # type: ignore[operator]
            await check_as_alone(other)
            await engine.drain()
            assert engine.stats().tokens_generated < ENDLESS
            check_all_gone(engine)

    run(main())


def test_a_cancelled_request_ends_its_stream_with_what_was_computed() -> None:
    async def main() -> None:
        async with endless_engine() as engine:
            by_id, by_stream = engine.stream(ask(5, ENDLESS, id="a")), engine.stream(ask(6, ENDLESS))
            for stream in (by_id, by_stream):
                events = await read(stream, 3)
                engine.cancel("a" if stream is by_id else stream)
                events += await read(stream)
                assert events[-1] == Done("cancelled")
                tokens = [event.id for event in events if isinstance(event, Token)]
                assert tokens == stream.tokens
                solo = alone(ask(len(stream.request.prompt), 300)).tokens
                assert tokens[:300] == solo[: len(tokens)]
                assert await stream.aresult() == "", "as for a handle, no failure"
                engine.cancel(stream)  # it has ended: a no-op
            engine.cancel("nobody")
            check_all_gone(engine)

    run(main())


# Back-pressure.


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_who_leaves_exactly_so_many_events_unread_is_cancelled_alone(limit: int) -> None:
    async def main() -> None:
        async with small_async_engine(max_unread=limit) as engine:
            in_time = engine.stream(ask(5, limit))  # its last event comes with the last token
            late = engine.stream(ask(6, limit + 1))
            whole = await engine.generate(ask(8, 40))
            assert whole.tokens == alone(ask(8, 40)).tokens, "who waits for the whole leaves nothing unread"
            await engine.drain()
            await check_as_alone(in_time)
            assert (in_time.fell_behind, late.fell_behind) == (False, True)
            events = await read(late)
            assert [type(event) for event in events] == [Token] * limit + [Done]
            assert events[-1] == Done("cancelled")
            assert late.tokens == alone(late.request).tokens[:limit]
            check_all_gone(engine)

    run(main())


def test_a_reader_that_stops_holds_up_nobody() -> None:
    async def main() -> None:
        # The others have too few events to ever leave so many unread.
        async with small_async_engine(kv_blocks=300, max_unread=100) as engine:
            stalled = engine.stream(ask(5, 1000))
            await read(stalled, 2)
            await asyncio.gather(*(check_as_alone(engine.stream(ask(5, 60, seed))) for seed in range(8)))
            await engine.drain()
            assert stalled.fell_behind
            events = await read(stalled)
            assert len(events) >= 101, "what came in one step with the last that it could leave is not lost"
            assert events[-1] == Done("cancelled")
            check_all_gone(engine)

    run(main())


# Pauses.


def test_a_pause_reaches_the_stream_before_the_next_step() -> None:
    model, gate = gated_model()
    with small_async_engine(model) as engine:
        stream = engine.stream(ask(5, 20, id="a"))
        gate.wait()
        while len(stream.tokens) < 3:
            gate.step()
        parked = engine._thread.call(lambda inner: inner.park("a", "replay"))
        while not parked.done():
            gate.step()
        events = in_thread(lambda: list(iter(lambda: next(stream), Paused("by_hand", "replay"))))  # no launch meanwhile
        assert all(isinstance(event, Token) for event in events)
        gate.open()
        rest = list(stream)
        assert isinstance(rest[0], Resumed)
        check_stream([*events, Paused("by_hand", "replay"), *rest], alone(stream.request))


def test_a_deadline_ends_the_stream_of_a_parked_request() -> None:
    clock = Clock()

    async def main() -> None:
        async with endless_engine(max_slots=1, clock=clock) as engine:
            low = engine.stream(ask(5, ENDLESS, deadline_s=5))
            before = await read(low, 3)
            high = engine.stream(ask(6, ENDLESS, priority=1))
            while not isinstance(before[-1], Paused):
                before += await read(low, 1)
            clock.now += 5
            last = (await read(low))[-1]
            assert isinstance(last, Failed)
            assert (last.code, last.retryable) == ("deadline", True)
            await high.aclose()
            check_all_gone(engine)

    run(main())


def test_parks_by_hand_change_no_token_and_refusals_reach_their_caller() -> None:
    with endless_engine() as engine:
        stream = engine.submit(ask(9, ENDLESS, id="a"))
        next(stream)
        assert engine.park("a", "spill") == "spill"
        assert isinstance(engine.resume("a"), bool)
        engine.park(stream)
        with pytest.raises(InvalidArgument, match="by: must be"):
            engine.park("a", "magic")  # type: ignore[arg-type]
        for call in (engine.park, engine.resume):
            with pytest.raises(UnknownRequest):
                call("nobody")
        snapshot = engine.snapshot()
        assert "a" in [*snapshot.waiting, *(slot.request_id for slot in snapshot.slots if slot is not None)]
        refused = engine.stream([10**9], id="bad")
        with pytest.raises(UnknownRequest, match="bad"):
            engine.park(refused)
        engine.cancel(stream)
        assert stream.result() == ""
        assert stream.tokens[:300] == alone(ask(9, 300)).tokens[: len(stream.tokens)]
        assert stream.stats.parks_by_spill >= 1
        for call in (engine.park, engine.resume):
            with pytest.raises(RequestFinished):
                call(stream)
        assert engine.stats().tokens_generated == len(stream.tokens)
        check_all_gone(engine)


# The end of the engine.


def test_drain_lets_the_live_end_and_takes_no_more() -> None:
    async def main() -> None:
        async with small_async_engine() as engine:
            streams = [engine.stream(ask(5, 20, seed)) for seed in range(8)]
            draining = [asyncio.create_task(engine.drain()) for _ in range(2)]
            while not engine._thread._is_draining:
                await read(streams[0], 0)
                await asyncio.to_thread(engine.snapshot)
            late = engine.stream(ask(5, 2))
            with pytest.raises(EngineClosed, match="draining"):
                await anext(late)
            with pytest.raises(EngineClosed, match="draining"):
                await engine.generate(ask(5, 2))
            await asyncio.gather(*draining)
            assert all(stream.is_finished for stream in streams), "nobody had to read"
            for stream in streams:
                await check_as_alone(stream)
            check_all_gone(engine)
            await engine.drain()
        await engine.drain()

    run(main())


def test_close_in_the_middle_ends_every_stream_and_is_idempotent() -> None:
    async def main() -> None:
        engine = endless_engine()
        streams = [engine.stream(ask(5, ENDLESS, seed)) for seed in range(8)]
        readers = [asyncio.create_task(read(stream)) for stream in streams[:3]]
        await read(streams[3], 2)
        drain = asyncio.create_task(engine.drain())
        await asyncio.gather(engine.close(), engine.close(), asyncio.to_thread(engine.shutdown))
        await drain
        assert not decode_threads()
        for reader in readers:
            assert (await reader)[-1] == Done("cancelled")
        for stream in streams[3:]:
            assert (await read(stream))[-1] == Done("cancelled")
        with pytest.raises(EngineClosed):
            await anext(engine.stream(ask(2, 2)))
        with pytest.raises(EngineClosed):
            await engine.generate(ask(2, 2))
        for call in (lambda: engine.submit(ask(2, 2)), engine.snapshot, lambda: engine.park("a")):
            with pytest.raises(EngineClosed):
                call()
        engine.cancel("a")
        await streams[0].aclose()
        assert engine.stats().tokens_generated == sum(len(stream.tokens) for stream in streams)
        await engine.close()
        engine.shutdown()

    run(main())


def test_an_engine_that_nobody_holds_closes_itself() -> None:
    engine = endless_engine()
    (thread,) = decode_threads()
    stream = engine.stream(ask(5, ENDLESS))
    del engine
    next(stream)
    assert thread.is_alive(), "its streams hold it"
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_commands_that_come_at_the_end_are_answered() -> None:
    model, gate = gated_model()
    engine = small_async_engine(model)
    running = engine.stream(ask(5, 100))
    gate.wait()
    closer = threading.Thread(target=engine.shutdown)
    closer.start()
    late: list[Stream] = [engine.stream(ask(5, 100)) for _ in range(5)]
    answers: list[BaseException] = []

    def look() -> None:
        try:
            engine.snapshot()
        except EngineClosed as error:
            answers.append(error)

    lookers = [threading.Thread(target=look) for _ in range(5)]
    for looker in lookers:
        looker.start()
    gate.open()
    for thread in (closer, *lookers):
        thread.join(60)
        assert not thread.is_alive()
    assert list(running)[-1] == Done("cancelled")
    for stream in late:
        with contextlib.suppress(EngineClosed):
            assert in_thread(functools.partial(list, stream)) == [Done("cancelled")]


def test_the_thread_sleeps_while_there_is_nothing_to_do() -> None:
    passes = []
    with small_async_engine() as engine:
        stream = engine.submit(ask(5, 3))
        stream.result()

        def count(inner: Engine) -> None:
            step = inner.step

            def counted() -> object:
                passes.append(0)
                return step()

            inner.step = counted  # type: ignore[method-assign,assignment]

        ask_engine(engine, count)
        for _ in range(10):
            engine.snapshot()
        assert len(passes) <= 11, "one pass after each command"
