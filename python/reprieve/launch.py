"""Owns the retry loop: from picked rows to a launched step, and from a launched step to settled tokens."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from reprieve.errors import (
    BooksMisused,
    DeviceLost,
    InvalidArgument,
    KvExhausted,
    RowFailed,
    StepAborted,
    StepFailed,
)
from reprieve.latch import classified
from reprieve.request import DONE_REASONS, RETRYABLE, FinishReason
from reprieve.step import NothingInFlight, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reprieve.park import Parker
    from reprieve.step import Books, Device, InFlight, StepBuffers, StepResult, Ticket

_LOG: Final = logging.getLogger(__name__)


def launch_with_preemption(
    books: Books, device: Device, parker: Parker, buffers: StepBuffers, in_flight: InFlight | None = None
) -> Ticket | None:
    """Launch the next step, parking victims until its blocks fit; return it unsettled, or None if no row is left.

    Nobody is admitted in here. Each round launches, raises, settles one of the steps in flight before it, or makes a
    resident sequence leave (parked, or ended because it cannot grow or its row failed), so the loop ends. Everything
    that depends on the rows is written anew in each round. `buffers` belong to the ticket until it is settled.

    Raises `StepAborted` or `DeviceLost`, with the books as they were just before the last `reserve`; the steps before
    it are still in flight then, and so may tokens be that are those of its rows: settle them before its rows end.
    """
    in_flight = NothingInFlight() if in_flight is None else in_flight
    while books.rows():
        try:
            books.reserve()
        except KvExhausted as shortage:
            if not parker.make_room(shortage) and not in_flight.settle_oldest():
                raise BooksMisused("the books wait for a step in flight, and there is none") from shortage
            continue
        step = _filled(books, buffers, in_flight)
        try:
            return _ticket(in_flight.launch(device, step))
        except Exception as error:  # noqa: BLE001  any, to be classified
            seqs = tuple(step.seqs.tolist())
            books.hand_back()
            if not (isinstance(error, RowFailed) and error.row in range(len(seqs))):
                verdict = _verdict(device, seqs, error)
                raise verdict from verdict.__cause__
            _end_failed_row(parker, seqs[error.row], error, in_flight)
        except BaseException:
            books.hand_back()
            raise
    return None


def settle(
    books: Books, device: Device, ticket: Ticket, outcomes: NDArray[np.uint8], behind: Sequence[Ticket] = ()
) -> StepResult:
    """Wait for the oldest launched step and commit its tokens; `outcomes` [>= rows] u8 gets an OUTCOME_ for each row.

    `behind` are the other steps in flight, in the order of launch. Raises `StepAborted` or `DeviceLost` if the step
    failed, or answered with anything but `tokens` [rows] i32 of the vocabulary. Then it and those behind it, which fed
    on it, are handed back: committed lengths and histories are as before they were launched. Those behind are waited
    for first, as their slots and blocks are free after that.
    """
    try:
        result = ticket.settle()  # syncs
        _check_tokens(result.tokens, ticket.step.num_rows)
    except Exception as error:  # noqa: BLE001  any, to be classified
        drop(books, behind)
        verdict = _verdict(device, tuple(books.hand_back()), error)
        raise verdict from verdict.__cause__
    except BaseException:
        drop(books, (ticket, *behind))
        raise
    try:
        books.commit(result.tokens, outcomes)
    except BaseException as error:
        drop(books, behind)
        seqs = tuple(books.hand_back())
        if isinstance(error, InvalidArgument) and error.field == "tokens":  # the device's answer
            raise StepAborted(seqs) from StepFailed(f"the device answered with {error}")
        raise
    return result


def drop(books: Books, tickets: Sequence[Ticket]) -> None:
    """Wait for `tickets`, the newest in flight, whatever they come to, and hand them back.

    An interrupt leaves them in flight: drop them again.
    """
    for ticket in tickets:
        try:
            ticket.settle()  # syncs
        except Exception as error:  # noqa: BLE001  it would have been discarded anyway
            _LOG.debug("a step that was dropped failed: %r", error)
    for _ in tickets:
        books.hand_back()


def end_rows(parker: Parker, failure: StepAborted) -> None:
    """End the sequences of a failed step with `step_failed`; all others, parked ones too, do not notice.

    Their blocks are not kept for reuse. One that has ended or given way in the meantime is passed over.
    """
    for seq in failure.seqs:
        if parker.is_resident(seq):
            parker.end(seq, "step_failed", failure.__cause__ or failure)


def _end_failed_row(parker: Parker, seq: int, failure: RowFailed, in_flight: InFlight) -> None:
    """End the sequence of a row that cannot be computed, once the tokens before it are delivered."""
    has_settled = False
    while in_flight.settle_oldest():
        has_settled = True
    if has_settled and not parker.is_resident(seq):
        return  # it has ended or given way with what was in flight
    if not parker.end(seq, _finish_reason(failure.code), failure):
        raise BooksMisused(f"the books picked sequence {seq}, which had ended before") from failure


def _ticket(launched: Ticket | None) -> Ticket:
    """Return what a device launched; None, from a `launch` that forgot its `return`, would be taken for no rows."""
    if launched is None:
        raise TypeError("launch returned None, not a ticket")
    return launched


def _filled(books: Books, buffers: StepBuffers, in_flight: InFlight) -> Step:
    """Return the reserved step, written into `buffers`; a failure here is a bug, and goes through as it is."""
    try:
        counts = books.fill(buffers)
        return Step.of(buffers, counts, in_flight.add_masks(buffers, counts))
    except BaseException:
        books.hand_back()
        raise


def _verdict(device: Device, seqs: tuple[int, ...], error: Exception) -> StepAborted | DeviceLost:
    """Return what to raise for a step of `seqs` that failed with `error`."""
    failure = classified(device, error)
    if isinstance(failure, DeviceLost):
        return failure
    aborted = StepAborted(seqs)
    aborted.__cause__ = failure
    return aborted


def _finish_reason(code: str) -> FinishReason:
    """Return `code` if it is a way to fail, as a device of somebody's own may say anything."""
    return next((reason for reason in RETRYABLE if reason == code and reason not in DONE_REASONS), "step_failed")


def _check_tokens(tokens: NDArray[np.int32], num_rows: int) -> None:
    """Raise `StepFailed` for tokens that do not answer a step of `num_rows` rows."""
    if tokens.dtype != np.int32 or tokens.shape != (num_rows,) or not tokens.flags.c_contiguous:
        raise StepFailed(f"the device returned {tokens.dtype} {list(tokens.shape)} as tokens, not int32 [{num_rows}]")
