"""A batch: many requests submitted together and run to their ends, with a progress bar."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from reprieve.errors import InvalidArgument, NeverFits
from reprieve.request import Request, as_request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from reprieve.engine import Engine
    from reprieve.handle import Handle

_REFRESH_S: Final = 0.1
"""Seconds between two looks at the progress; counting looks at every live request."""


def generate(
    engine: Engine,
    requests: Iterable[Request | str | Sequence[int]],
    fields: Mapping[str, Any],
    *,
    progress: bool | None = None,
) -> list[Handle]:
    """Answer all requests, or prompts with the other `fields` of a `Request`; return their handles, in that order.

    Other live requests of the engine go on meanwhile. `progress` shows a bar on standard error, None only if that is a
    terminal. A request that fails says so in its handle, and the rest go on.

    Raises `InvalidArgument` for a bad request, with its place, before anything is computed; what `Engine.submit` and
    `Engine.step` raise, and `KeyboardInterrupt`. Whatever it raises, those that are left are cancelled. It ends, as
    every step makes progress or counts towards the engine's watchdog.
    """
    if progress not in (None, False, True):
        raise InvalidArgument("progress", f"must be None, True or False, not {progress!r}")
    if isinstance(requests, str | Request):
        raise InvalidArgument("requests", f"must be a sequence of requests or prompts, not {requests!r}")
    asked = []
    for index, request in enumerate(requests):
        try:
            asked.append(as_request(request, fields))
        except InvalidArgument as error:
            raise _placed(error, index) from None
    handles: list[Handle] = []
    try:
        _submit(engine, asked, handles)
        console = Console(stderr=True)
        with _View(console, handles, is_shown=console.is_terminal if progress is None else progress) as view:
            for handle in handles:
                while not handle.is_finished:
                    handle.advance()
                    view.show()
            engine.drain()  # what was computed ahead of the last ends
    except BaseException:
        for handle in handles:
            engine.cancel(handle)
        raise
    return handles


class _View:
    """A progress bar for the requests of `handles`, or nothing at all. A context manager: it stays on the screen."""

    def __init__(self, console: Console, handles: Sequence[Handle], *, is_shown: bool) -> None:
        self._handles = handles
        self._next_look = 0.0
        self._bar: Progress | None = None
        if is_shown:
            text = (
                "{task.completed}/{task.total} requests · {task.fields[tokens]:,} tokens · {task.fields[parks]} parks"
            )
            self._bar = Progress(BarColumn(), TextColumn(text), TimeElapsedColumn(), console=console)
            self._task = self._bar.add_task("", total=len(handles), tokens=0, parks=0)

    def show(self) -> None:
        """Count anew, if the last time was long enough ago."""
        if self._bar is not None and time.monotonic() >= self._next_look:
            self._count(self._bar)
            self._next_look = time.monotonic() + _REFRESH_S

    def _count(self, bar: Progress) -> None:
        bar.update(
            self._task,
            completed=sum(handle.is_finished for handle in self._handles),
            tokens=sum(handle.stats.tokens_generated for handle in self._handles),
            parks=sum(handle.stats.parks_by_spill + handle.stats.parks_by_replay for handle in self._handles),
        )

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Show how it ended, and leave the screen to others."""
        if self._bar is not None:
            self._count(self._bar)
            self._bar.stop()


def _submit(engine: Engine, requests: Iterable[Request], handles: list[Handle]) -> None:
    """Submit all requests; the handles are added as they come, so that the caller has them if one is refused."""
    for index, request in enumerate(requests):
        try:
            handles.append(engine.submit(request))
        except InvalidArgument as error:
            raise _placed(error, index) from None


def _placed(error: InvalidArgument, index: int) -> InvalidArgument:
    """Return the error of the request at `index`, with that place in its field."""
    field = f"requests[{index}].{error.field}"
    if isinstance(error, NeverFits):
        return NeverFits(field, error.needed, error.total)
    return InvalidArgument(field, error.problem)
