"""The thread that owns an engine: it takes commands from all others, steps, and fills the mailboxes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

from reprieve.commands import Command, CommandQueue, call, fail, succeed
from reprieve.errors import EngineClosed, EngineFailed, EngineForked, ReprieveError, UnknownRequest
from reprieve.mailbox import Mailbox, Sleeper, wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.engine import Engine
    from reprieve.handle import Handle
    from reprieve.request import Request
    from reprieve.stats import Progress

_LOG: Final = logging.getLogger(__name__)

_FIRST_NAP_S: Final = 0.001
_LONGEST_NAP_S: Final = 0.016
"""Seconds between two passes that launch nothing though there is work: doubled each time, up to the longest.

A deadline is met that exactly. The engine's watchdog ends the request that stands in the way after some passes.
"""

Result = TypeVar("Result")


class DecodeThread:
    """Makes an engine in a thread of its own, and steps it there for as long as a request is live.

    All methods may be called from any thread, and in the engine's own callbacks; none waits but `stop` and `join`.
    Commands are run in the order in which they were sent, between two steps. The thread sleeps while there is no work.
    `engine` is what it made, for its own use.

    It is a daemon, so that a program that forgot to close an engine ends all the same; but at the interpreter's end it
    is stopped and awaited, as a thread in the middle of native code must not see the interpreter go.

    Raises what `make_engine` does, for which the constructor waits.
    """

    def __init__(self, make_engine: Callable[[], Engine], max_unread: int) -> None:
        self._max_unread = max_unread
        self._pid = os.getpid()
        self._commands = CommandQueue()
        self._live: dict[Handle, Mailbox] = {}
        self._woken: list[Sleeper] = []
        self._drains: list[Future[None]] = []
        self._ends: list[Future[None]] = []
        self._nap_s = _FIRST_NAP_S
        self._is_draining = False
        self._is_stopping = False
        self._bug: BaseException | None = None
        made: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_engine, made), name="reprieve-decode", daemon=True)
        self._thread.start()
        try:
            self.engine = made.result()
        except BaseException:  # it could not be made, or Ctrl-C while it was
            self.end()
            raise
        atexit.register(self.stop)

    @property
    def is_over(self) -> bool:
        """Whether all requests have ended, and commands are refused."""
        return self._commands.is_over

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the thread's own. Then no lock may be touched: it may be held for ever."""
        return os.getpid() != self._pid

    @property
    def is_current(self) -> bool:
        """Whether the caller is the thread itself."""
        return threading.current_thread() is self._thread

    def require_ours(self) -> None:
        """Raise `EngineForked` in a forked process."""
        if self.is_forked:
            raise EngineForked

    # Commands. Each raises `EngineForked`.

    def submit(self, mailbox: Mailbox, request: Request) -> None:
        """Submit a request; what becomes of it comes into `mailbox`, a refusal as its error."""

        def run(engine: Engine) -> None:
            if self._is_draining:
                mailbox.end(EngineClosed("the engine is draining and takes no more requests"), self._woken)
                return
            try:
                handle = engine.submit(request)
            except Exception as error:  # noqa: BLE001  the caller's to see
                mailbox.end(error, self._woken)
                return
            self._live[handle] = mailbox
            mailbox.take_in(handle, self._woken)

        def refuse(error: ReprieveError) -> None:
            woken: list[Sleeper] = []
            mailbox.end(error, woken)
            wake(woken)

        self._send(Command(run, refuse))

    def cancel(self, request: Mailbox | str) -> None:
        """End a request with `cancelled`. No-op on one that has ended or is not known: it may end at any moment."""

        def run(engine: Engine) -> None:
            target = request.handle if isinstance(request, Mailbox) else request
            if target is None:
                return  # it was refused
            try:
                engine.cancel(target)
            except UnknownRequest:
                return

        self._send(Command(run, _accept))

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Call a function with the engine; the future gets what it returns or raises, or why it was not called."""
        command, future = call(function)
        if self.is_current:
            command.run(self.engine)  # to wait for it would be to wait for itself
        else:
            self._send(command)
        return future

    def drain(self) -> Future[None]:
        """Take no more requests; the future is done when the last live one has ended. A bug fails it."""
        future: Future[None] = Future()

        def run(_: Engine) -> None:
            self._is_draining = True
            self._drains.append(future)

        self._send(Command(run, lambda _: self._settle_drain(future)))
        return future

    def end(self) -> Future[None]:
        """End every live request with `cancelled`, close the engine and end the thread; the future says when."""
        future: Future[None] = Future()

        def run(_: Engine) -> None:
            self._is_stopping = True
            self._ends.append(future)

        self._send(Command(run, lambda _: succeed(future, None)))
        return future

    def stop(self) -> None:
        """Do as `end` does, and wait for it. No-op in a forked process; waits for nothing in the thread itself."""
        if not self.is_forked:
            self.end()
            self.join()

    def join(self) -> None:
        """Wait for the thread's last instruction."""
        if not self.is_current:
            self._thread.join()

    def _send(self, command: Command) -> None:
        self.require_ours()
        self._commands.send(command)

    # What runs in the thread.

    def _run(self, make_engine: Callable[[], Engine], made: Future[Engine]) -> None:
        try:
            engine = make_engine()
        except BaseException as error:  # noqa: BLE001  the maker's to see
            made.set_exception(error)
            self._let_everybody_go()
            return
        made.set_result(engine)
        try:
            self._serve(engine)
        except BaseException as bug:  # noqa: BLE001  everybody is told
            _LOG.critical("the engine's thread dies of a bug, and every live request with it", exc_info=bug)
            self._bug = bug
        self._close(engine)
        self._let_everybody_go()

    def _serve(self, engine: Engine) -> None:
        """Run commands and step, until told to stop."""
        pause: float | None = None
        while True:
            self._run_commands(engine, pause)
            if self._is_stopping:
                return
            progress = engine.step()
            self._deliver(engine)
            pause = self._pause(engine, progress)

    def _run_commands(self, engine: Engine, pause: float | None) -> None:
        """Run the commands that are there, having waited for one for `pause` seconds, or for ever; tell what came."""
        command = self._commands.next(pause)
        if command is None:
            return
        command.run(engine)
        # Those that come meanwhile wait for the next pass: nobody who sends without end keeps the engine from stepping.
        for _ in range(len(self._commands)):
            if self._is_stopping or (command := self._commands.next(0.0)) is None:
                break
            command.run(engine)
        self._deliver(engine)

    def _pause(self, engine: Engine, progress: Progress) -> float | None:
        """Return for how many seconds to wait for a command before the next pass; None without a bound."""
        if progress.state == "waiting" and engine.awaits_masks:
            return 0.0  # the engine has waited, and will see a mask sooner than this thread
        if progress.state == "waiting":
            pause, self._nap_s = self._nap_s, min(2 * self._nap_s, _LONGEST_NAP_S)
            return pause
        self._nap_s = _FIRST_NAP_S
        if progress.state == "progressed":
            return 0.0
        if self._live:
            names = ", ".join(repr(handle.id) for handle in self._live)
            raise RuntimeError(f"the engine is idle, and these have not ended: {names}")
        self._settle_drains()
        return None

    def _deliver(self, engine: Engine) -> None:
        """Move all new events into the mailboxes, and wake who waits for them."""
        ended = []
        for handle, mailbox in self._live.items():
            if (events := handle.take_events()) and mailbox.put(events, self._woken) >= self._max_unread:
                self._cut_off(engine, handle, mailbox)
            if handle.is_finished:
                ended.append(handle)
        for handle in ended:
            self._live.pop(handle).end(None, self._woken)
        self._wake()

    def _cut_off(self, engine: Engine, handle: Handle, mailbox: Mailbox) -> None:
        """Cancel a request whose reader has fallen behind; what has ended already is left as it is."""
        if handle.is_finished:
            return
        _LOG.warning("request %s is cancelled: %d of its events lie unread", handle.id, self._max_unread)
        mailbox.fell_behind = True
        engine.cancel(handle)
        mailbox.put(handle.take_events(), self._woken)

    def _wake(self) -> None:
        wake(self._woken)
        self._woken.clear()

    def _close(self, engine: Engine) -> None:
        """Close the engine; after a bug as far as that goes."""
        if self._bug is not None:
            self._fail_live()
        try:
            engine.close()
            self._deliver(engine)
        except BaseException as bug:  # noqa: BLE001  everybody is told
            _LOG.critical("the engine cannot be closed: a bug", exc_info=bug)
            self._bug = self._bug or bug
        self._fail_live()

    def _fail_live(self) -> None:
        """End the streams of all live requests with the bug."""
        for mailbox in self._live.values():
            mailbox.end(self._why_over(), self._woken)
        self._live.clear()

    def _let_everybody_go(self) -> None:
        """Answer everybody who waits for the thread, and refuse whoever comes from now on."""
        self._wake()
        self._commands.end(self._why_over)
        self._settle_drains()
        for future in self._ends:
            succeed(future, None)
        atexit.unregister(self.stop)

    def _settle_drains(self) -> None:
        while self._drains:
            self._settle_drain(self._drains.pop())

    def _settle_drain(self, future: Future[None]) -> None:
        """Say that nobody is live any more, or that the thread died of a bug."""
        if self._bug is None:
            succeed(future, None)
        else:
            fail(future, self._why_over())

    def _why_over(self) -> ReprieveError:
        """Return a new error that says why the thread takes no more commands."""
        if self._bug is None:
            return EngineClosed("the engine is closed")
        failure = EngineFailed()
        failure.__cause__ = self._bug
        return failure


def _accept(_: ReprieveError) -> None:
    """Take a refusal as it is."""
