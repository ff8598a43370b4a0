"""The engine that serving code awaits: one thread decodes, any thread and any event loop submits, reads and cancels."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Self

from reprieve.decode_thread import DecodeThread
from reprieve.engine import Engine
from reprieve.errors import InvalidArgument, UnknownRequest
from reprieve.mailbox import Mailbox
from reprieve.request import as_request, integer
from reprieve.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from reprieve.handle import Handle
    from reprieve.loading import LoadedModel
    from reprieve.request import ParkBy, Request
    from reprieve.stats import EngineSnapshot, EngineStats


class AsyncEngine:
    """An `Engine` in a thread of its own, for many clients at once.

        async with AsyncEngine("demo", kv_blocks=40) as engine:
            async for event in engine.stream("Why is the sky blue?", chat=True):
                ...

    Takes what `Engine` takes, and raises what it raises; it returns when the model is loaded, so load it before the
    event loop runs, or with `asyncio.to_thread`. `clock` and `on_device_lost` are called in the engine's thread.

    No reader holds up the decoding. A request of which `max_unread` events lie unread while it is live is cancelled,
    alone: its stream still gives them, then its last event, and says `fell_behind`.

    All methods may be called from any thread and in any event loop, one after the other or at once. Of those that are
    no coroutines, `submit`, `park`, `resume`, `snapshot` and `shutdown` wait for the step that is under way: in an
    event loop, call these with `asyncio.to_thread`. Once the engine is closed, what needs it raises `EngineClosed`, or
    `EngineFailed` if its thread died of a bug; in a forked process everything but closing raises `EngineForked`.

    A context manager, of either kind: leaving it closes the engine. The attributes `config` and `model` are the
    engine's.
    """

    def __init__(self, model: str | Path | LoadedModel, *, max_unread: int = 1024, **settings: Any) -> None:
        max_unread = integer("max_unread", max_unread, 1)
        self._thread = DecodeThread(functools.partial(Engine, model, **settings), max_unread)
        self.config = self._thread.engine.config
        self.model = self._thread.engine.model

    # Requests.

    def stream(self, /, request: Request | str | Sequence[int], **fields: Any) -> Stream:
        """Send a request, or a prompt with the other `fields` of a `Request`, and return its stream.

        Requests are taken in the order in which they were sent. Raises `InvalidArgument` that names the field; what
        only the engine can know (a prompt over the context, an id that is in use) comes from the first event awaited.
        """
        self._thread.require_ours()
        asked, mailbox = as_request(request, fields), Mailbox()
        self._thread.submit(mailbox, asked)
        return Stream(self, self._thread, mailbox, asked)

    def submit(self, /, request: Request | str | Sequence[int], **fields: Any) -> Stream:
        """Do as `stream` does, but wait until the engine has taken the request, and raise all that it refuses."""
        stream = self.stream(request, **fields)
        stream.wait_until_taken()
        return stream

    async def generate(self, /, request: Request | str | Sequence[int], **fields: Any) -> Stream:
        """Answer a request; return its stream, which has ended: `text`, `tokens`, `finish_reason`, `stats`.

        Raises `RequestFailed` if it failed, and what `submit` raises. If it is cancelled, so is the request.
        """
        stream = self.stream(request, **fields)
        await stream.aresult()
        return stream

    def cancel(self, request: Stream | str) -> None:
        """End a request with `cancelled`, whatever it is doing; its stream says when that has come to pass.

        No-op if no such request is live: it may have ended a moment ago.
        """
        if not isinstance(request, str | Stream):
            raise InvalidArgument("request", f"must be a stream or the id of a request, not {request!r}")
        self._thread.cancel(request if isinstance(request, str) else request._mailbox)  # noqa: SLF001

    def park(self, request: Stream | str, by: ParkBy | None = None) -> ParkBy | None:
        """Park a request by hand, as `Engine.park` does."""
        return self._thread.call(lambda engine: engine.park(_known(request), by)).result()

    def resume(self, request: Stream | str) -> bool:
        """Move a request to the front of its priority, as `Engine.resume` does."""
        return self._thread.call(lambda engine: engine.resume(_known(request))).result()

    def snapshot(self) -> EngineSnapshot:
        """Return who sits where and who waits."""
        return self._thread.call(lambda engine: engine.snapshot()).result()

    def stats(self) -> EngineStats:
        """Return a copy of the totals since the engine was made; also once it is closed."""
        self._thread.require_ours()
        return self._thread.engine.stats.copy()

    # The end.

    async def drain(self) -> None:
        """Take no more requests (`EngineClosed`), and wait until the live ones have ended, read or not.

        It goes on draining if this is cancelled. Raises `EngineFailed` if the engine's thread dies of a bug.
        """
        await asyncio.wrap_future(self._thread.drain())

    async def close(self) -> None:
        """End every live request with `cancelled`, and the engine's thread. Idempotent; no-op in a forked process."""
        if not self._thread.is_forked:
            await asyncio.wrap_future(self._thread.end())
            self._thread.join()  # it has a few instructions left

    def shutdown(self) -> None:
        """Do as `close` does, without an event loop; waits for the step that is under way."""
        self._thread.stop()

    async def __aenter__(self) -> Self:
        """Return the engine."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        await self.close()

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the engine."""
        self.shutdown()

    def __del__(self) -> None:
        """Let the thread end, if nobody closed the engine; waits for nothing."""
        thread = getattr(self, "_thread", None)  # None: it could not be made
        if thread is not None and not thread.is_over and not thread.is_forked:
            thread.end()


def _known(request: Stream | str) -> Handle | str:
    """Return what the engine knows a request by. Runs in its thread, after the request was submitted."""
    if isinstance(request, str):
        return request
    handle = request._mailbox.handle  # noqa: SLF001
    if handle is None:
        raise UnknownRequest(request.id)
    return handle
