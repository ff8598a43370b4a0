"""The mailbox of one request: its events on their way from the thread that decodes to whoever reads them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reprieve.handle import Handle
    from reprieve.request import Event


class Stage(IntEnum):
    """How far a request has come: it was sent to the engine, the engine took it, its last event is in the mailbox."""

    SENT = 0
    TAKEN = 1
    ENDED = 2


class Ended(Exception):
    """There are no more events."""


class ThreadSleeper:
    """A thread that waits for something to happen to a mailbox."""

    def __init__(self) -> None:
        self.event = threading.Event()


class LoopSleeper:
    """A coroutine that does, in the event loop that runs."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()


Sleeper: TypeAlias = ThreadSleeper | LoopSleeper

AnySleeper = TypeVar("AnySleeper", ThreadSleeper, LoopSleeper)


def wake(sleepers: Iterable[Sleeper]) -> None:
    """Wake them all, those of one event loop by a single call into it. Waits for nobody."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for sleeper in sleepers:
        if isinstance(sleeper, ThreadSleeper):
            sleeper.event.set()
        else:
            by_loop.setdefault(sleeper.loop, []).append(sleeper.future)
    for loop, futures in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and who waited in it is gone
            loop.call_soon_threadsafe(_set_all, futures)


def _set_all(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class Mailbox:
    """Holds the unread events of one request.

    The thread that decodes calls the first half of the methods; they wait for nobody, and add whoever is to be woken
    to `woken`, for one `wake` after many calls. Readers call the second half, from any thread. `handle` is the
    request's, once the engine took it; `error` is what readers get after the last event, if there is one;
    `fell_behind` says that the request was cancelled because too many events lay unread, `has_ended` that its last
    event is in, read or not.
    """

    def __init__(self) -> None:
        self.handle: Handle | None = None
        self.error: BaseException | None = None
        self.fell_behind = False
        self.has_ended = False
        # It may be taken again: what the garbage collector runs inside may be the end of a reader.
        self._lock = threading.RLock()
        self._events: deque[Event] = deque()
        self._sleepers: list[Sleeper] = []
        self._stage = Stage.SENT
        self._is_read = True

    # The thread that decodes.

    def take_in(self, handle: Handle, woken: list[Sleeper]) -> None:
        """Note that the engine took the request."""
        with self._lock:
            self.handle = handle
            self._stage = Stage.TAKEN
            self._rouse(woken)

    def put(self, events: Sequence[Event], woken: list[Sleeper]) -> int:
        """Add events; return how many are unread now. If nobody reads any more, they are dropped."""
        with self._lock:
            if not self._is_read:
                return 0
            self._events.extend(events)
            self._rouse(woken)
            return len(self._events)

    def end(self, error: BaseException | None, woken: list[Sleeper]) -> None:
        """Let the stream end after what is unread, with `error` if it is given."""
        with self._lock:
            self.error = error
            self._stage = Stage.ENDED
            self.has_ended = True
            self._rouse(woken)

    def _rouse(self, woken: list[Sleeper]) -> None:
        woken += self._sleepers
        self._sleepers.clear()

    # Readers.

    def next_event(self, new_sleeper: Callable[[], AnySleeper]) -> Event | AnySleeper:
        """Return the oldest unread event, or a new sleeper, to be woken when it makes sense to ask again.

        Raises `Ended` after the last event, or `error`.
        """
        with self._lock:
            if self._events:
                return self._events.popleft()
            if self._stage is Stage.ENDED:
                raise Ended if self.error is None else self.error
            return self._sleep(new_sleeper)

    def sleep_until(self, stage: Stage, new_sleeper: Callable[[], AnySleeper]) -> AnySleeper | None:
        """Return None if the request has come as far as `stage`, else a new sleeper, as `next_event` does."""
        with self._lock:
            return None if self._stage >= stage else self._sleep(new_sleeper)

    def _sleep(self, new_sleeper: Callable[[], AnySleeper]) -> AnySleeper:
        sleeper = new_sleeper()
        self._sleepers.append(sleeper)
        return sleeper

    def forget(self, sleeper: Sleeper) -> None:
        """Wake it no more. No-op if it was woken."""
        with self._lock, contextlib.suppress(ValueError):
            self._sleepers.remove(sleeper)

    def stop_reading(self) -> None:
        """Drop what is unread and what comes."""
        with self._lock:
            self._is_read = False
            self._events.clear()
