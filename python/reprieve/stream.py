"""The stream of a request to an `AsyncEngine`: its events, for one thread or one event loop after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from reprieve.mailbox import Ended, LoopSleeper, Mailbox, Stage, ThreadSleeper
from reprieve.request import RequestStats

if TYPE_CHECKING:
    from reprieve.decode_thread import DecodeThread
    from reprieve.request import Event, FinishReason, Request


class Stream:
    """What happens to one request: `async for event in stream`, or `for event in stream` in a thread without a loop.

    The last event is `Done` or `Failed`. Each event is read once, in order, by whoever asks first: any thread, any
    event loop. `request` is what was submitted. `id`, `tokens`, `text`, `finish_reason` and `stats` say what has come
    so far, read or not, and stay right after the end.

    Closing the stream cancels the request: `close` or `aclose`; a task that is cancelled while it waits here (also by
    `asyncio.timeout`: for a time limit that others can see there is `deadline_s`); and dropping the last reference, as
    `break` does with `async for event in engine.stream(...)`. Where the reference may live on, as in a frame that an
    exception holds, use `contextlib.aclosing` or `contextlib.closing`. Unread events are gone then.

    Waiting raises what the engine refused the request with, `EngineFailed` if its thread died of a bug, and
    `EngineForked` in a forked process.
    """

    def __init__(self, owner: object, thread: DecodeThread, mailbox: Mailbox, request: Request) -> None:
        self.request = request
        self._owner = owner  # who would close the engine if nobody held it
        self._thread = thread
        self._mailbox = mailbox
        self._is_open = True

    @property
    def id(self) -> str | None:
        """The request's id. None until the engine has taken a request that names none itself."""
        handle = self._mailbox.handle
        return self.request.id if handle is None else handle.id

    @property
    def tokens(self) -> list[int]:
        """The ids generated so far, a stop id included."""
        handle = self._mailbox.handle
        return [] if handle is None else handle.tokens.copy()

    @property
    def text(self) -> str:
        """The text given out so far."""
        handle = self._mailbox.handle
        return "" if handle is None else handle.text

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended. None while it is live, and where it ended with an error instead of an event."""
        handle = self._mailbox.handle
        return None if handle is None or self._mailbox.error is not None else handle.finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._mailbox.has_ended

    @property
    def fell_behind(self) -> bool:
        """Whether it was cancelled because `max_unread` of its events lay unread."""
        return self._mailbox.fell_behind

    @property
    def stats(self) -> RequestStats:
        """A copy of what is counted for it."""
        handle = self._mailbox.handle
        return RequestStats() if handle is None else handle.stats.copy()

    def __repr__(self) -> str:
        """Return the request's id, where it is, and how many tokens it has."""
        state = self.finish_reason or ("ended" if self.is_finished else "live")
        return f"<Stream {self.id!r}: {state}, {len(self.tokens)} tokens>"

    # Reading.

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event once it is there."""
        while True:
            self._thread.require_ours()
            try:
                found = self._mailbox.next_event(LoopSleeper)
            except Ended:
                raise StopAsyncIteration from None
            if not isinstance(found, LoopSleeper):
                return found
            await self._wait_in_loop(found)

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Event:
        """Return the next event once it is there."""
        while True:
            self._thread.require_ours()
            try:
                found = self._mailbox.next_event(ThreadSleeper)
            except Ended:
                raise StopIteration from None
            if not isinstance(found, ThreadSleeper):
                return found
            self._wait_in_thread(found)

    async def aresult(self) -> str:
        """Wait until the request has ended; return its whole text. Drops what is unread.

        Raises `RequestFailed` if it failed: its text until then is in the error.
        """
        self._thread.require_ours()
        self._mailbox.stop_reading()
        await self._reach_in_loop(Stage.ENDED)
        return self._outcome()

    def result(self) -> str:
        """Do as `aresult` does, in a thread without an event loop."""
        self._thread.require_ours()
        self._mailbox.stop_reading()
        self._reach_in_thread(Stage.ENDED)
        return self._outcome()

    def wait_until_taken(self) -> None:
        """Wait until the engine has taken the request; raise what it was refused with."""
        self._reach_in_thread(Stage.TAKEN)
        if self._mailbox.handle is None and self._mailbox.error is not None:
            raise self._mailbox.error

    def _outcome(self) -> str:
        if self._mailbox.error is not None:
            raise self._mailbox.error
        handle = self._mailbox.handle
        return "" if handle is None else handle.answer()

    # Closing.

    def close(self) -> None:
        """Cancel the request if it is live, and wait until it has ended. No-op in a forked process."""
        if self._cancel():
            self._reach_in_thread(Stage.ENDED)

    async def aclose(self) -> None:
        """Do as `close` does, in an event loop."""
        if self._cancel():
            await self._reach_in_loop(Stage.ENDED)

    def __del__(self) -> None:
        """Cancel the request if it is live."""
        if self._is_open and not self._mailbox.has_ended and not self._thread.is_forked:
            self._thread.cancel(self._mailbox)

    def _cancel(self) -> bool:
        """Stop reading, and let the request be cancelled; return whether its end can be awaited."""
        if self._thread.is_forked:
            return False
        self._is_open = False
        self._mailbox.stop_reading()
        if not self._mailbox.has_ended:
            self._thread.cancel(self._mailbox)
        return True

    # Waiting.

    async def _reach_in_loop(self, stage: Stage) -> None:
        while (sleeper := self._mailbox.sleep_until(stage, LoopSleeper)) is not None:
            await self._wait_in_loop(sleeper)

    async def _wait_in_loop(self, sleeper: LoopSleeper) -> None:
        """Sleep; if that is broken off, the request is cancelled."""
        try:
            await sleeper.future
        except BaseException:
            self._cancel()
            raise
        finally:
            self._mailbox.forget(sleeper)

    def _reach_in_thread(self, stage: Stage) -> None:
        while (sleeper := self._mailbox.sleep_until(stage, ThreadSleeper)) is not None:
            self._wait_in_thread(sleeper)

    def _wait_in_thread(self, sleeper: ThreadSleeper) -> None:
        try:
            if self._thread.is_current:
                raise RuntimeError("a callback of the engine waits for the engine; it would wait for ever")
            sleeper.event.wait()
        finally:
            self._mailbox.forget(sleeper)
