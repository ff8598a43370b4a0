"""What the tests of the asynchronous engine share: bounded waits, a device that computes on command, leak checks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from engine_kit import alone, tiny_model
from recording import RecordingDevice, check_nothing_left, check_stream
from reprieve.async_engine import AsyncEngine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from device_kinds import LogitTicket
    from reprieve import Engine, LoadedModel
    from reprieve.loading import DeviceSettings
    from reprieve.request import Event
    from reprieve.step import Step
    from reprieve.stream import Stream

PATIENCE_S: Final = 60.0
"""Seconds after which a test that waits has failed: far more than anything here takes."""

ENDLESS: Final = 60_000
"""A budget that takes longer than a test has patience: what asks for it ends because somebody ended it."""

Result = TypeVar("Result")


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in an event loop of its own; no task may be left over."""

    async def bounded() -> Result:
        async with asyncio.timeout(PATIENCE_S):
            result = await coroutine
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(bounded())


def in_thread(function: Callable[[], Result]) -> Result:
    """Return what `function` does in a thread of its own; it may not take for ever."""
    done: Future[Result] = Future()

    def run_it() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001  the caller's to see
            done.set_exception(error)

    threading.Thread(target=run_it, daemon=True).start()
    return done.result(PATIENCE_S)


def small_async_engine(model: LoadedModel | None = None, **settings: Any) -> AsyncEngine:
    """Return an engine of 40 blocks of 4 positions, 4 slots and depth 2, where nothing else is said."""
    return AsyncEngine(
        model or tiny_model(), **{"kv_blocks": 40, "block_size": 4, "max_slots": 4, "depth": 2} | settings
    )


def endless_engine(**settings: Any) -> AsyncEngine:
    """Return an engine in which a few `ENDLESS` requests fit, and readers may leave all their events unread."""
    model = tiny_model(context_length=2 * ENDLESS)
    return small_async_engine(model, **{"kv_blocks": ENDLESS, "max_unread": 2 * ENDLESS} | settings)


def ask_engine(engine: AsyncEngine, function: Callable[[Engine], Result]) -> Result:
    """Return what a function says about the engine, in its thread."""
    return engine._thread.call(function).result(PATIENCE_S)


def check_all_gone(engine: AsyncEngine) -> None:
    """Assert that nothing is left over of requests that have ended, in the engine and in its thread."""
    ask_engine(engine, check_nothing_left)
    assert not engine._thread._live
    assert not engine._thread._woken


def decode_threads() -> list[threading.Thread]:
    """Return the threads that decode."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("reprieve")]


async def read(stream: Stream, count: int | None = None) -> list[Event]:
    """Return the next `count` events, or all that are left."""
    events: list[Event] = []
    while count is None or len(events) < count:
        try:
            events.append(await anext(stream))
        except StopAsyncIteration:
            break
    return events


async def check_as_alone(stream: Stream) -> None:
    """Read a stream of which nothing was read; assert that it is that of its request alone."""
    check_stream(await read(stream), alone(stream.request))


async def within(awaitable: Awaitable[Result]) -> Result:
    """Await something that may not take for ever."""
    return await asyncio.wait_for(awaitable, PATIENCE_S)


class Gate:
    """Lets a device launch its steps one by one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = 0
        self._is_standing = False
        self._is_open = False

    def pass_through(self) -> None:
        """Stand at the gate until there is a permit; what a launch begins with."""
        with self._changed:
            self._is_standing = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._is_open or self._permits, PATIENCE_S)
            self._is_standing = False
            self._permits = max(self._permits - 1, 0)

    def wait(self) -> None:
        """Wait until a launch stands at the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_standing and not self._permits, PATIENCE_S)

    def step(self) -> None:
        """Let one launch through, and wait until the next one stands at the gate."""
        with self._changed:
            self._permits += 1
            self._changed.notify_all()
        self.wait()

    def open(self) -> None:
        """Let all launches through from now on."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


def gated_model() -> tuple[LoadedModel, Gate]:
    """Return the tiny model with devices whose launches wait at a gate."""
    gate, model = Gate(), tiny_model()

    def make_device(settings: DeviceSettings) -> RecordingDevice:
        device = RecordingDevice(model.make_device(settings))  # type: ignore[arg-type]  # one that keeps its logits
        launch = device.launch

        def gated_launch(step: Step) -> LogitTicket:
            gate.pass_through()
            return launch(step)

        device.launch = gated_launch  # type: ignore[method-assign]
        return device

    return replace(model, make_device=make_device), gate
