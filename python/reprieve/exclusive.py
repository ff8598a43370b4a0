"""Methods that only one thread may be in at a time, and that say so to a second one."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from reprieve.errors import EngineBusy

if TYPE_CHECKING:
    from collections.abc import Callable

Owner = TypeVar("Owner", bound="Exclusive")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Exclusive:
    """An object whose `exclusive` methods share one lock. A thread that is inside may call them again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @property
    def lock(self) -> threading.RLock:
        """Held while a thread is inside."""
        return self._lock


def exclusive(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Result]:
    """Let `method` raise `EngineBusy`, and change nothing, while another thread is inside its object."""

    @functools.wraps(method)
    def guarded(self: Owner, /, *arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        if not self.lock.acquire(blocking=False):
            raise EngineBusy
        try:
            return method(self, *arguments, **keywords)
        finally:
            self.lock.release()

    return guarded
