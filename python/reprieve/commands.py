"""The queue of commands from any thread to the one that decodes; nobody's is lost at its end."""

from __future__ import annotations

from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.engine import Engine
    from reprieve.errors import ReprieveError

Result = TypeVar("Result")


class Command(NamedTuple):
    """What the thread shall do; `refuse` is called instead, in any thread, once no more commands are taken."""

    run: Callable[[Engine], object]
    refuse: Callable[[ReprieveError], object]


class CommandQueue:
    """Commands in the order in which they were sent. Each is taken by the one reader, or refused."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command] = SimpleQueue()  # one that the garbage collector may put into
        self._why: Callable[[], ReprieveError] | None = None

    def __len__(self) -> int:
        """Return about how many there are."""
        return self._queue.qsize()

    @property
    def is_over(self) -> bool:
        """Whether commands are refused."""
        return self._why is not None

    def send(self, command: Command) -> None:
        """Add a command. Waits for nothing."""
        self._queue.put(command)
        if self._why is not None:
            # It may have come after the reader's own look for who is to be refused.
            self._refuse(self._why)

    def next(self, pause: float | None) -> Command | None:
        """Take the oldest; if there is none, wait for one for `pause` seconds (None: for ever), and return None."""
        try:
            return self._queue.get(block=pause != 0.0, timeout=pause)
        except Empty:
            return None

    def end(self, why: Callable[[], ReprieveError]) -> None:
        """Refuse what is left and what comes, each with a new error from `why`."""
        self._why = why
        self._refuse(why)

    def _refuse(self, why: Callable[[], ReprieveError]) -> None:
        """Refuse what is there. Each round takes one out, and whoever adds one refuses it himself, so it ends."""
        while (command := self.next(0.0)) is not None:
            command.refuse(why())


def call(function: Callable[[Engine], Result]) -> tuple[Command, Future[Result]]:
    """Return a command that calls `function`, and the future of what it returns or raises."""
    future: Future[Result] = Future()

    def run(engine: Engine) -> None:
        if not future.set_running_or_notify_cancel():
            return  # who waited for it does no more
        try:
            result = function(engine)
        except Exception as error:  # noqa: BLE001  the caller's to see
            future.set_exception(error)
        else:
            future.set_result(result)

    return Command(run, lambda error: fail(future, error)), future


def succeed(future: Future[Result], result: Result) -> None:
    """Give a future its result, if anybody still waits for it."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def fail(future: Future[Result], error: BaseException) -> None:
    """Let a future fail, if anybody still waits for it."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
