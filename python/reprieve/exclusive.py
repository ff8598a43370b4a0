"""Methods that one thread at a time may be in, and that Ctrl-C cannot break off halfway."""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from reprieve.errors import EngineBusy

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

Owner = TypeVar("Owner", bound="Exclusive")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Exclusive:
    """An object that one thread at a time is inside of; that thread may call `exclusive` methods from inside again."""

    def __init__(self) -> None:
        self.inside: int | None = None
        """The thread that is inside, or None."""


class _Deferred:
    """Keeps Ctrl-C back while it is entered, and lets it go at the end; a second one does not wait.

    Only where Ctrl-C would raise `KeyboardInterrupt`: in the main thread, with Python's own handler.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending:
            signal.default_int_handler(number, frame)
        self._is_pending = True

    def enter(self) -> None:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._is_installed = True  # first: whatever is raised from here on, `leave` takes it back
            signal.signal(signal.SIGINT, self._note)

    def leave(self) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_pending:
            raise KeyboardInterrupt


def exclusive(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Let `method` raise `EngineBusy`, and change nothing, while another thread is inside its object.

    Ctrl-C is taken when the method has done all that it does: so nobody's state is left between two others.
    """

    @functools.wraps(method)
    def guarded(self: Owner, /, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        thread, before = threading.get_ident(), self.inside
        if before == thread:
            return method(self, *arguments, **keywords)
        if before is not None:
            raise EngineBusy
        deferred = _Deferred()
        try:
            deferred.enter()
            self.inside = thread
            return method(self, *arguments, **keywords)
        finally:
            self.inside = None
            deferred.leave()

    return guarded
