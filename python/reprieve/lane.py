"""Owns the run-ahead lane: keeps steps in flight, settles the oldest, and sorts out what fails among them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reprieve.errors import DeviceLost, StepAborted
from reprieve.launch import drop, end_rows, launch_with_preemption, settle
from reprieve.step import StepBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from reprieve.park import Parker
    from reprieve.step import Books, Device, Step, StepCounts, StepShape, Ticket


class Receiver(Protocol):
    """Who is told what steps in flight come to."""

    @property
    def outcomes(self) -> NDArray[np.uint8]:
        """Where the books write what the rows of a settled step came to: [slots]."""

    def launched(self, ticket: Ticket) -> Ticket:
        """Return a ticket to keep in place of `ticket`, which was just launched."""

    def watch(self, ticket: Ticket) -> None:
        """Take note that `ticket`, as `launched` gave it, is about to be settled."""

    def run(self) -> None:
        """Deliver the step that was watched, if it was committed: its tokens, and whoever they end."""

    def sat_out(self, seqs: list[int]) -> None:
        """Take note of the residents that a launched step went without, as their next input needs the host."""

    def delivered(self, step: Step) -> None:
        """Do what is to be done between two steps, such as parking those who should be."""


class HostMasks(Protocol):
    """The masks that the host computes for constrained sequences while steps are in flight."""

    def collect(self, ready: Callable[[], bool] | None) -> None:
        """Tell the books which masks have come. With `ready`, wait a moment for others, unless it returns True."""

    def write(self, buffers: StepBuffers, counts: StepCounts) -> int:
        """Write the masks of a step that was just filled; return how many there are."""


class NoMasks:
    """Where nobody is constrained."""

    def collect(self, ready: Callable[[], bool] | None) -> None:
        """Do nothing."""

    def write(self, buffers: StepBuffers, counts: StepCounts) -> int:  # noqa: ARG002  as the protocol has it
        """Return 0."""
        return 0


class Seconds(Protocol):
    """Where the time of a lane goes."""

    books_s: float
    """In picking, reserving and writing steps, and in parks and resumes."""
    launch_s: float
    """In the device's `launch`."""


@dataclass(frozen=True, slots=True)
class _Flight:
    ticket: Ticket
    buffers: StepBuffers


class Lane:
    """Keeps up to `depth` steps in flight on one device; step t + 1 is launched before the tokens of t are known.

    It owns depth + 1 sets of buffers; one belongs to each ticket until it is settled. Steps are settled in the order of
    launch. One that fails takes those behind it along, as they fed on it: their reservations go back, the failed rows
    end, all others run again from what is committed. Raises `DeviceLost`; after any other exception (an interrupt, a
    bug) call `recover`.
    """

    def __init__(  # noqa: PLR0913  the parts that it joins
        self,
        books: Books,
        device: Device,
        parker: Parker,
        receiver: Receiver,
        *,
        depth: int,
        shape: StepShape,
        seconds: Seconds,
        masks: HostMasks | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds = seconds
        self._books = books
        self._device = device
        self._parker = parker
        self._receiver = receiver
        self._depth = depth
        self._masks = NoMasks() if masks is None else masks
        self._timer = timer
        self._elsewhere_s = 0.0  # seconds that are no time of the books, where one is nested in the other
        self._is_recovering = False
        self._flights: deque[_Flight] = deque()
        self._loose: Ticket | None = None  # launched, and not among the flights yet
        self._ring = tuple(StepBuffers(shape) for _ in range(depth + 1))

    @property
    def num_in_flight(self) -> int:
        """Steps in flight."""
        return len(self._flights)

    def bring_in(self) -> int:
        """Admit whoever fits; return how many. See `Parker.bring_in`."""
        self._finish_recovery()
        try:
            with self._counted_as_books():
                return self._parker.bring_in(self)
        except DeviceLost:
            self.salvage()
            raise

    def fill(self) -> int:
        """Launch steps until `depth` are in flight or no row is left; return how many were launched.

        A step whose launch fails takes its rows along, once what is in flight before it is settled.
        """
        self._finish_recovery()
        launched = 0
        while len(self._flights) < self._depth:
            self._masks.collect(self._flights[0].ticket.ready if self._flights else None)
            if not self._launch():
                break
            launched += 1
        return launched

    def settle_oldest(self) -> bool:
        """Settle the oldest step in flight and deliver what it came to; False if there is none."""
        self._finish_recovery()
        began = self._timer()
        try:
            return self._settle_oldest()
        finally:
            self._elsewhere_s += self._timer() - began

    def drain(self) -> None:
        """Settle all that is in flight. Raises `DeviceLost`, after which nothing is."""
        while self.settle_oldest():
            pass

    def salvage(self) -> None:
        """Deliver the steps in flight that a device had done before it was lost."""
        with contextlib.suppress(DeviceLost):  # the first one is the reason
            self.drain()

    def recover(self) -> None:
        """Drop whatever is in flight or reserved, after an exception; nothing that was committed is lost.

        Waits for the device. After an interrupt in here, whatever is called next goes on with it.
        """
        self._is_recovering = True
        loose = [] if self._loose is None else [self._loose]
        drop(self._books, [*(flight.ticket for flight in self._flights), *loose])
        # A reserved step that was not filled comes on top of those in flight; where there is none, nothing happens.
        self._books.hand_back()
        self._forget()
        self._is_recovering = False

    # `InFlight`, for the retry loop; `settle_oldest` above.

    def add_masks(self, buffers: StepBuffers, counts: StepCounts) -> int:
        """Write the masks of a step that was just filled; return how many there are."""
        return self._masks.write(buffers, counts)

    def launch(self, device: Device, step: Step) -> Ticket:
        """Launch a step, and count the time that it takes."""
        began = self._timer()
        try:
            self._loose = device.launch(step)
            return self._loose
        finally:
            elapsed = self._timer() - began
            self._seconds.launch_s += elapsed
            self._elsewhere_s += elapsed

    # The parts.

    def _settle_oldest(self) -> bool:
        """Settle the oldest step; one that fails takes those behind it along."""
        if not self._flights:
            return False
        flight = self._flights[0]
        step = flight.ticket.step
        self._receiver.watch(flight.ticket)
        behind = [other.ticket for other in self._flights if other is not flight]
        try:
            settle(self._books, self._device, flight.ticket, self._receiver.outcomes, behind)
        except StepAborted as failure:
            self._forget()
            end_rows(self._parker, failure)
            return True
        except DeviceLost:
            self._forget()
            raise
        self._flights.popleft()
        self._receiver.run()
        self._receiver.delivered(step)
        return True

    def _finish_recovery(self) -> None:
        if self._is_recovering:
            self.recover()

    def _launch(self) -> bool:
        """Launch one step; False if no row is left, or it failed."""
        buffers = self._spare_buffers()
        try:
            with self._counted_as_books():
                ticket = launch_with_preemption(self._books, self._device, self._parker, buffers, self)
        except StepAborted as failure:
            self.drain()  # tokens before it are its rows' own
            end_rows(self._parker, failure)
            return False
        except DeviceLost:
            self.salvage()
            raise
        if ticket is None:
            return False
        self._flights.append(_Flight(ticket, buffers))
        self._loose = None
        self._flights[-1] = _Flight(self._receiver.launched(ticket), buffers)
        if sat_out := self._books.sat_out():
            self._receiver.sat_out(sat_out)
        return True

    @contextlib.contextmanager
    def _counted_as_books(self) -> Iterator[None]:
        began, elsewhere = self._timer(), self._elsewhere_s
        try:
            yield
        finally:
            self._seconds.books_s += self._timer() - began - (self._elsewhere_s - elsewhere)

    def _spare_buffers(self) -> StepBuffers:
        """Return a set that no ticket has; there is one, as at most `depth` are in flight."""
        taken = [flight.buffers for flight in self._flights]
        return next(buffers for buffers in self._ring if not any(buffers is other for other in taken))

    def _forget(self) -> None:
        """Let go of all tickets, and so of their buffers; the books have handed back what was in flight."""
        self._flights.clear()
        self._loose = None
