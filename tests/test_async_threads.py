"""The asynchronous engine's thread: used from many threads and loops, after a fork, dying of a bug, at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from async_kit import (
    ENDLESS,
    PATIENCE_S,
    ask_engine,
    check_all_gone,
    check_as_alone,
    decode_threads,
    endless_engine,
    in_thread,
    read,
    run,
    small_async_engine,
)
from engine_kit import alone, ask, tiny_model
from recording import check_stream
from reprieve import Done, Engine, Token
from reprieve.decode_thread import DecodeThread
from reprieve.errors import DeviceLost, EngineClosed, EngineFailed, RequestFailed, RequestFinished
from reprieve.stats import Progress

if TYPE_CHECKING:
    from reprieve.async_engine import AsyncEngine
    from reprieve.request import Event

HERE = Path(__file__).parent


# Many threads, many loops.


def test_many_threads_submit_read_and_cancel_at_once() -> None:
    requests = [ask(3 + number % 7, 10 + number % 5, number % 8) for number in range(48)]
    expected = [alone(request) for request in requests]
    with small_async_engine(kv_blocks=20) as engine:

        def client(number: int) -> None:
            stream = engine.submit(requests[number])
            if number % 4 == 0:
                next(stream)
                engine.cancel(stream)
                assert isinstance(list(stream)[-1], Done)
                return
            if number % 4 == 1:
                with contextlib.suppress(RequestFinished):
                    engine.park(stream)
            elif number % 4 == 2:
                engine.snapshot()
                engine.stats()
            check_stream(list(stream), expected[number])

        with ThreadPoolExecutor(12) as clients:
            for done in [clients.submit(client, number) for number in range(len(requests))]:
                done.result(PATIENCE_S)
        check_all_gone(engine)


def test_one_stream_read_by_many_gives_each_event_once() -> None:
    with small_async_engine() as engine:
        stream = engine.submit(ask(5, 60))
        with ThreadPoolExecutor(4) as readers:
            parts = [part.result(PATIENCE_S) for part in [readers.submit(list, stream) for _ in range(4)]]
        assert sum(map(len, parts)) == 61
        indices = [[event.index for event in part if isinstance(event, Token)] for part in parts]
        assert sorted(index for part in indices for index in part) == list(range(60))
        assert all(part == sorted(part) for part in indices), "each reader gets them in order"


def test_loops_in_several_threads_share_an_engine() -> None:
    requests = [ask(5, 20, seed) for seed in range(8)]
    for request in requests:
        alone(request)
    with small_async_engine() as engine:

        async def clients(number: int) -> None:
            await asyncio.gather(*(check_as_alone(engine.stream(request)) for request in requests[number::4]))

        with ThreadPoolExecutor(4) as loops:
            for done in [loops.submit(lambda number=number: run(clients(number))) for number in range(4)]:  # type: ignore[misc]
                done.result(PATIENCE_S)
        check_all_gone(engine)


def test_an_engine_and_its_streams_outlive_an_event_loop() -> None:
    alone(ask(5, 40))
    with small_async_engine() as engine:

        async def begin() -> tuple[object, list[Event]]:
            stream = engine.stream(ask(5, 40))
            return stream, await read(stream, 3)

        stream, events = run(begin())
        events += run(read(stream))  # type: ignore[arg-type]
        check_stream(events, alone(ask(5, 40)))
        run(check_as_alone(engine.stream(ask(5, 40))))
        check_all_gone(engine)


def test_a_loop_that_goes_away_takes_its_waiting_readers_with_it() -> None:
    with endless_engine() as engine:
        other = engine.stream(ask(6, 30))
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # that a task was destroyed while pending
        stream = engine.stream(ask(5, ENDLESS))
        task = loop.create_task(read(stream))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        check_stream(list(other), alone(other.request))
        del task
        gc.collect()
        run(engine.drain())
        assert stream.finish_reason == "cancelled"
        check_all_gone(engine)


# Bugs, and a lost device.


def break_step(engine: AsyncEngine, after: int) -> None:
    """Let the engine's step raise what no step should."""

    def replace_step(inner: Engine) -> None:
        step, left = inner.step, iter(range(after))

        def broken() -> Progress:
            if next(left, None) is None:
                raise ZeroDivisionError("a bug")
            return step()

        inner.step = broken  # type: ignore[method-assign]

    ask_engine(engine, replace_step)


def test_a_bug_in_the_thread_reaches_every_stream_and_every_later_call(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = endless_engine()
        streams = [engine.stream(ask(5, ENDLESS, seed)) for seed in range(8)]
        waiting = [asyncio.create_task(read(stream)) for stream in streams[:3]]
        waiting.append(asyncio.create_task(asyncio.to_thread(list, streams[3])))
        drain = asyncio.create_task(engine.drain())
        break_step(engine, 5)
        for task in (*waiting, drain):
            with pytest.raises(EngineFailed) as failure:
                await task
            assert isinstance(failure.value.__cause__, ZeroDivisionError)
            assert "a bug" in str(failure.value)
        for stream in streams[4:]:
            with pytest.raises(EngineFailed):
                await read(stream)  # what was computed before, and then the bug
            assert (stream.is_finished, stream.finish_reason) == (True, None)
        for call in (engine.snapshot, lambda: engine.submit(ask(2, 2)), lambda: engine.resume("a"), streams[0].result):
            with pytest.raises(EngineFailed):
                call()
        with pytest.raises(EngineFailed):
            await engine.generate(ask(2, 2))
        with pytest.raises(EngineFailed):
            await engine.drain()
        engine.cancel("a")
        await streams[0].aclose()
        await engine.close()
        engine.shutdown()
        assert not decode_threads()

    run(main())
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


def test_a_bug_in_closing_hangs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    engine = endless_engine()
    stream = engine.submit(ask(5, ENDLESS))

    def close() -> NoReturn:
        raise ZeroDivisionError("a bug")

    real_close = engine._thread.engine.close
    engine._thread.engine.close = close  # type: ignore[method-assign]
    engine.shutdown()
    with pytest.raises(EngineFailed):
        in_thread(stream.result)
    assert "cannot be closed" in caplog.text
    real_close()


def test_a_step_that_says_idle_while_somebody_is_live_is_a_bug() -> None:
    engine = small_async_engine()
    ask_engine(engine, lambda inner: setattr(inner, "step", lambda: Progress("idle")))
    with pytest.raises(EngineFailed, match="request-0"):
        in_thread(engine.submit(ask(5, 5)).result)
    engine.shutdown()


def test_a_lost_device_ends_the_streams_and_its_callback_may_use_the_engine() -> None:
    heard: list[object] = []

    def lost(_: DeviceLost) -> None:
        heard.append(engine.stats().tokens_generated)
        heard.append(engine.snapshot().waiting)
        try:
            stream.result()
        except RuntimeError as error:
            heard.append(str(error))
        engine.shutdown()

    engine = endless_engine(on_device_lost=lost)
    stream = engine.submit(ask(5, ENDLESS))

    def lose(inner: Engine) -> None:
        def fail(_: object) -> NoReturn:
            raise DeviceLost("pulled out")

        inner._device.launch = fail  # type: ignore[method-assign,assignment]

    ask_engine(engine, lose)
    with pytest.raises(RequestFailed, match="device_lost"):
        in_thread(stream.result)
    engine.shutdown()
    tokens, waiting, refusal = heard
    assert tokens == len(stream.tokens)
    assert waiting == ()
    assert "would wait for ever" in str(refusal)
    with pytest.raises(EngineClosed):
        engine.submit(ask(2, 2))


# Waiting.


def test_passes_that_launch_nothing_are_bounded_naps_and_no_busy_loop() -> None:
    states = [Progress("waiting", "a", until) for until in (None, 1e9) for _ in range(4)]
    states += [Progress("progressed"), Progress("waiting"), Progress("idle")]
    with small_async_engine() as engine:
        pauses = [engine._thread._pause(engine._thread.engine, state) for state in states]
    assert pauses[:8] == [0.001, 0.002, 0.004, 0.008, 0.016, 0.016, 0.016, 0.016]
    assert pauses[8:] == [0.0, 0.001, None]


def test_a_thread_that_waits_is_woken_by_a_command_and_steps_again() -> None:
    told = threading.Event()
    script = [Progress("waiting")] * 3 + [Progress("idle")]

    def make_engine() -> Engine:
        engine = Engine(tiny_model(), kv_blocks=4)

        def step() -> Progress:
            progress = script.pop(0) if script else Progress("idle")
            if not script:
                told.set()
            return progress

        engine.step = step  # type: ignore[method-assign]
        return engine

    thread = DecodeThread(make_engine, 1)
    assert thread.call(lambda _: len(script)).result(PATIENCE_S) == 4
    assert told.wait(PATIENCE_S), "the naps end by themselves"
    thread.stop()
    assert not decode_threads()


# The ends of processes.


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python, with the tests' modules and no warning of a fork with threads, which newer Pythons give."""
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=HERE)


def test_a_forked_process_is_refused_and_nothing_hangs() -> None:
    done = python("async_fork_case.py")
    assert (done.returncode, done.stderr) == (0, "")
    names, own, parents = done.stdout.splitlines()
    assert names.split() == [
        "stream", "submit", "cancel", "park", "resume", "snapshot", "stats", "generate", "drain", "next", "anext",
        "result", "aresult",
    ]  # fmt: skip
    assert own == str(alone(ask(40, 24)).tokens)
    assert parents == str(alone(ask(40, 100)).tokens)


@pytest.mark.parametrize("last_words", ["", "next(stream)", "raise SystemExit(0)", "del engine"])
def test_a_program_that_forgets_to_close_ends(last_words: str) -> None:
    program = f"""
import atexit, threading
from async_kit import ENDLESS, endless_engine
from engine_kit import ask
atexit.register(lambda: print(stream.finish_reason, threading.active_count()))  # after what comes later
engine = endless_engine()
stream = engine.submit(ask(5, ENDLESS))
{last_words}
"""
    done = python("-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled 1\n", "")
