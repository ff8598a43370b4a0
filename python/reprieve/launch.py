"""Owns the retry loop: from picked rows to a launched step, and from a launched step to settled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from reprieve.step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reprieve.park import Parker
    from reprieve.step import Books, Device, StepBuffers, StepResult, Ticket


def launch_with_preemption(books: Books, device: Device, parker: Parker, buffers: StepBuffers) -> Ticket | None:
    """Launch the next step, parking victims until its blocks fit; return it unsettled, or None if no row is left.

    Nobody is admitted in here. Each round launches, raises, or makes a resident sequence leave (parked, or ended
    because it cannot grow or its row failed), so the loop ends. Everything that depends on the rows is written anew
    in each round. `buffers` belong to the ticket until it is settled.

    Raises `StepAborted` or `DeviceLost`, with the books as they were just before the last `reserve`.
    """
    while books.rows():
        try:
            books.reserve()
        except KvExhausted as shortage:
            parker.make_room(shortage)
            continue
        step = _filled(books, buffers)
        try:
            return _ticket(device.launch(step))
        except Exception as error:
            seqs = _handed_back(books, step)
            if not (isinstance(error, RowFailed) and error.row in range(len(seqs))):
                verdict = _verdict(device, seqs, error)
                raise verdict from verdict.__cause__
            if not parker.end(seqs[error.row], _finish_reason(error.code), error):
                raise BooksMisused(f"the books picked sequence {seqs[error.row]}, which had ended before") from error
        except BaseException:
            books.hand_back()
            raise
    return None


def settle(books: Books, device: Device, ticket: Ticket, outcomes: NDArray[np.uint8]) -> StepResult:
    """Wait for a launched step and commit its tokens; `outcomes` [>= rows] u8 gets an OUTCOME_ for each row.

    Raises `StepAborted` or `DeviceLost` if the step failed, or answered with anything but `tokens` [rows] i32 of the
    vocabulary; it is handed back then, so committed lengths and histories are as before it was launched.
    """
    try:
        result = ticket.settle()  # syncs
        _check_tokens(result.tokens, ticket.step.num_rows)
    except Exception as error:  # noqa: BLE001 any, to be classified
        seqs = _handed_back(books, ticket.step)
        verdict = _verdict(device, seqs, error)
        raise verdict from verdict.__cause__
    except BaseException:
        books.hand_back()
        raise
    try:
        books.commit(result.tokens, outcomes)
    except BaseException as error:
        seqs = _handed_back(books, ticket.step)
        if isinstance(error, InvalidArgument) and error.field == "tokens":  # the device's answer
            raise StepAborted(seqs) from StepFailed(f"the device answered with {error}")
        raise
    return result


def end_rows(parker: Parker, failure: StepAborted) -> None:
    """End the sequences of a failed step with `step_failed`; all others, parked ones too, do not notice.

    Their blocks are not kept for reuse. One that has ended in the meantime is passed over.
    """
    for seq in failure.seqs:
        parker.end(seq, "step_failed", failure.__cause__ or failure)


def _ticket(launched: Ticket | None) -> Ticket:
    """Return what a device launched; None, from a `launch` that forgot its `return`, would be taken for no rows."""
    if launched is None:
        raise TypeError("launch returned None, not a ticket")
    return launched


def _filled(books: Books, buffers: StepBuffers) -> Step:
    """Return the reserved step, written into `buffers`; a failure here is a bug, and goes through as it is."""
    try:
        return Step.of(buffers, books.fill(buffers))
    except BaseException:
        books.hand_back()
        raise


def _handed_back(books: Books, step: Step) -> tuple[int, ...]:
    """Undo the reservation of `step`; return the sequences of its rows, by row."""
    seqs = tuple(step.seqs.tolist())
    books.hand_back()
    return seqs


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
