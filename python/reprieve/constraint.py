"""Masks of constrained sequences: the threads that call for them, and the way of the answers into a step's buffers."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from reprieve.errors import BooksMisused, EngineClosed, InvalidArgument
from reprieve.step import READ_ARGMAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from reprieve.park import Parker
    from reprieve.request import Mask
    from reprieve.step import Books, StepBuffers, StepCounts

_LOG: Final = logging.getLogger(__name__)

_POLL_S: Final = 0.0002
"""Seconds between two looks at what somebody waits for beside the masks."""

_MOMENT_S: Final = 0.001
"""Seconds for which a launch waits for masks while the device is at work."""

_IDLE_S: Final = 10.0
"""Seconds after which a thread that has nothing to do ends; the next question starts a new one."""

_PATIENCE_S: Final = 1.0
"""Seconds for which `close` waits for callbacks that are under way."""


@dataclass(slots=True, eq=False)
class _Constrained:
    """A sequence with a mask.

    `words` [mask words] u32 and `allows_all` are its thread's from a question to the answer, and the decode thread's
    from then on.
    """

    seq: int
    mask: Mask
    history: tuple[int, ...] | None = None  # of the newest question
    num_answered: int = -1  # tokens of the history that the answer at hand belongs to; -1: there is none
    words: NDArray[np.uint32] | None = None  # made with the first mask
    allows_all: bool = False  # the answer was None
    is_queued: bool = False
    is_forgotten: bool = False
    thread: threading.Thread | None = None  # what calls `mask` now


class Masks:
    """Asks constrained sequences for the mask of their next token, off the decode thread.

    `mask_words` is how many 32-bit words a mask has in a step (`StepShape.mask_words`), of which `vocab_size` bits are
    read. Up to `workers` threads call the functions; they start with the first question and end when idle for long.

    All methods are the decode thread's. The functions run in threads of their own: a sequence's calls never overlap
    and come in order, those of different sequences overlap, also where they share a function. A function may be slow,
    may raise anything and may reuse its array from one call to the next; it must not call the engine. One that never
    returns holds a thread until its sequence is forgotten; then that thread is given up, and another takes its place.
    """

    def __init__(self, mask_words: int, vocab_size: int, *, workers: int = 4) -> None:
        if vocab_size < 1:
            raise InvalidArgument("vocab_size", f"must be at least 1, not {vocab_size}")
        self._needed_words = -(-vocab_size // 32)
        if mask_words < self._needed_words:
            problem = f"is {mask_words}; the {vocab_size} ids of the vocabulary need {self._needed_words}"
            raise InvalidArgument("mask_words", problem)
        if workers < 1:
            raise InvalidArgument("workers", f"must be at least 1, not {workers}")
        self._mask_words = mask_words
        self._vocab_size = vocab_size
        self._last_word = np.uint32(0xFFFF_FFFF >> (-vocab_size % 32))
        self._workers = workers
        # The decode thread's own.
        self._open: dict[int, _Constrained] = {}
        self._pending: set[int] = set()
        self._numbers = itertools.count()
        self._answered: dict[int, BaseException | None] = {}
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Make what is shared with the threads, of which there are none."""
        self._process = os.getpid()
        # It is one that may be taken again: what the garbage collector runs may end a request.
        self._lock = threading.RLock()
        self._asked = threading.Condition(self._lock)
        self._came = threading.Condition(self._lock)
        self._queue: deque[_Constrained] = deque()
        self._hired: set[threading.Thread] = set()
        self._threads: list[threading.Thread] = []  # the hired, the given up, some that have ended
        self._num_idle = 0

    def _follow_fork(self) -> None:
        """In a forked child, where the parent's threads are not, ask anew for what was not answered.

        No lock of the parent's is touched: it may be held for ever.
        """
        if os.getpid() == self._process:
            return
        self._begin()
        with self._lock:
            for seq, entry in self._open.items():
                entry.thread, entry.is_queued = None, False
                if seq in self._pending and seq not in self._answered:
                    self._enqueue(entry)
                    self._hire()

    # Questions.

    def open(self, seq: int, mask: Mask) -> None:
        """Let `mask` bind the tokens of a sequence. Asks nothing yet. Raises `EngineClosed`."""
        if self._is_closed:
            raise EngineClosed("the masks are closed")
        if seq in self._open:
            raise RuntimeError(f"sequence {seq} has a mask already: a bug")
        self._open[seq] = _Constrained(seq, mask)

    def ask(self, seq: int, generated: tuple[int, ...]) -> None:
        """Ask for the mask of the token that follows `generated`: at submit, and after each committed token.

        An answer to an earlier question is dropped, even if it is still on its way. No-op if that has been asked
        already, as after a park: the mask of a history stays valid. No-op too for a sequence without a mask, and for
        one that was forgotten.
        """
        entry = self._open.get(seq)
        if entry is None:
            return
        if entry.history is not None and len(generated) <= len(entry.history):
            if generated != entry.history:
                known = f"{len(entry.history)} generated tokens, asked for the mask after {len(generated)}"
                raise RuntimeError(f"sequence {seq} has {known} others: a bug")
            return
        self._follow_fork()
        with self._lock:
            entry.history = generated
            entry.num_answered = -1
            self._answered.pop(seq, None)
            self._pending.add(seq)
            if entry.is_queued or entry.thread is not None:
                return  # it will find the new history
            self._enqueue(entry)
            self._asked.notify()
            self._hire()

    def forget(self, seq: int) -> None:
        """Let go of a sequence that has ended. No-op if it has no mask.

        No call begins any more; one that is under way is left to itself, and its answer dropped.
        """
        if seq not in self._open:
            return
        self._follow_fork()
        entry = self._open.pop(seq)
        self._pending.discard(seq)
        with self._lock:
            entry.is_forgotten = True
            self._answered.pop(seq, None)
            if entry.is_queued:
                self._queue.remove(entry)
                entry.is_queued = False
            if entry.thread is not None:
                self._hired.discard(entry.thread)  # it may never return
                self._hire()

    # Answers.

    def __contains__(self, seq: int) -> bool:
        return seq in self._open

    @property
    def num_pending(self) -> int:
        """Number of sequences that were asked and whose answer has not been taken yet."""
        return len(self._pending)

    def take_ready(self) -> list[tuple[int, BaseException | None]]:
        """Return the sequences that were answered since the last call, each once per question, in the order of answers.

        With each comes None, or what went wrong: what its function raised, or `InvalidArgument` for a mask that is
        none. Its sequence cannot go on; it stays until it is forgotten.
        """
        if self._pending:
            self._follow_fork()
        if not self._answered:
            return []
        with self._lock:
            ready = list(self._answered.items())
            self._answered.clear()
        self._pending.difference_update(seq for seq, _ in ready)
        return ready

    def wait(self, is_enough: Callable[[], bool], timeout: float) -> bool:
        """Sleep until there is something to take, or `is_enough()`; False if neither came within `timeout` seconds.

        `is_enough` is asked about every 0.2 ms. It ends, as time passes.
        """
        self._follow_fork()
        end = time.monotonic() + timeout
        while not self._answered and not is_enough():
            left = end - time.monotonic()
            if left <= 0:
                return False
            with self._lock:
                if not self._answered:
                    self._came.wait(min(left, _POLL_S))
        return True

    def write(self, buffers: StepBuffers, counts: StepCounts) -> int:
        """Write `mask_rows` and `masks` of the step that was just filled; return how many there are.

        A row gets a mask if it is read back and the answer of its sequence is one; None means that anything goes. The
        bits at and beyond the vocabulary are cleared. Makes room in `buffers` where there is too little.

        Raises `BooksMisused`, and writes nothing, if such a row's sequence has no answer to its newest question.
        """
        if not self._open:
            return 0
        seqs, readback = buffers.seqs[: counts.rows].tolist(), buffers.readback[: counts.rows].tolist()
        rows: list[int] = []
        masks: list[NDArray[np.uint32]] = []
        for row, (seq, read) in enumerate(zip(seqs, readback, strict=True)):
            entry = self._open.get(seq)
            if entry is None or read != READ_ARGMAX:
                continue
            if entry.num_answered < 0:
                raise BooksMisused(f"row {row} reads back sequence {seq}, whose mask is not there yet")
            if entry.words is not None and not entry.allows_all:
                rows.append(row)
                masks.append(entry.words)
        buffers.make_room_for_masks(len(masks))
        for index, words in enumerate(masks):
            buffers.mask_rows[index] = rows[index]
            buffers.masks[index] = words
        return len(masks)

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """Forget all sequences and end the threads. Idempotent.

        Waits `patience_s` seconds for calls that are under way. One that takes longer is logged and left behind; its
        thread ends when it returns, and does not keep the interpreter from ending.
        """
        self._follow_fork()
        with self._lock:
            self._is_closed = True
            for seq in list(self._open):
                self.forget(seq)
            self._asked.notify_all()
            threads = self._threads
        end = time.monotonic() + patience_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        stuck = [thread.name for thread in threads if thread.is_alive()]
        if stuck:
            _LOG.warning("masks that have not returned are left behind, in the threads %s", ", ".join(stuck))

    # The threads.

    def _enqueue(self, entry: _Constrained) -> None:
        self._queue.append(entry)
        entry.is_queued = True

    def _hire(self) -> None:
        """Start a thread if the idle ones are too few. Called with the lock."""
        if self._is_closed or self._num_idle >= len(self._queue) or len(self._hired) >= self._workers:
            return
        thread = threading.Thread(target=self._work, name=f"reprieve-mask-{next(self._numbers)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            while self._queue and not self._hired:
                entry = self._queue.popleft()
                entry.is_queued = False
                self._deliver(entry, error)
            return
        self._hired.add(thread)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]

    def _work(self) -> None:
        """Answer questions, oldest first, until there have been none for long, or this thread was given up."""
        while self._answer_next():
            pass

    def _answer_next(self) -> bool:
        """Answer one question; False if the thread should end. Holds on to nothing while it waits for one."""
        this = threading.current_thread()
        with self._lock:
            if not self._await_question(this):
                self._hired.discard(this)
                return False
            entry = self._queue.popleft()
            entry.is_queued = False
            entry.thread = this
            history = entry.history
        error = self._outcome(entry, history or ())
        with self._lock:
            entry.thread = None
            if entry.is_forgotten:
                return True
            if entry.history is history:
                self._deliver(entry, error)
            else:  # stale
                self._enqueue(entry)
        return True

    def _await_question(self, thread: threading.Thread) -> bool:
        """Return whether there is a question for `thread`, once that is known. Called with the lock."""
        # Each round but the last is a question that another thread was faster to take.
        while thread in self._hired and not self._is_closed:
            if self._queue:
                return True
            self._num_idle += 1
            is_asked = self._asked.wait(_IDLE_S)
            self._num_idle -= 1
            if not is_asked and not self._queue:
                return False
        return False

    def _outcome(self, entry: _Constrained, history: tuple[int, ...]) -> BaseException | None:
        """Call for a mask and keep it; return what went wrong."""
        try:
            self._keep(entry, entry.mask(history))
        except BaseException as error:  # noqa: BLE001  it is the caller's function, and may do anything
            return error
        return None

    def _keep(self, entry: _Constrained, answer: object) -> None:
        """Copy a mask into the sequence's words; raises `InvalidArgument` if it is none."""
        entry.allows_all = answer is None
        if answer is None:
            return
        given = np.asarray(answer)
        if given.dtype not in (np.uint32, np.int32):
            raise InvalidArgument(
                "mask", f"gave {type(answer).__name__} of {given.dtype}; words of uint32 or int32 are wanted"
            )
        if given.ndim != 1:
            raise InvalidArgument("mask", f"gave an array of shape {given.shape}; one row of words is wanted")
        if len(given) < self._needed_words:
            need = f"the {self._vocab_size} ids of the vocabulary need {self._needed_words}"
            raise InvalidArgument("mask", f"gave {len(given)} words; {need}")
        if entry.words is None:
            entry.words = np.zeros(self._mask_words, np.uint32)
        entry.words[: self._needed_words] = given[: self._needed_words].view(np.uint32)
        entry.words[self._needed_words - 1] &= self._last_word

    def _deliver(self, entry: _Constrained, error: BaseException | None) -> None:
        """Let the decode thread take an answer. Called with the lock."""
        if error is None and entry.history is not None:
            entry.num_answered = len(entry.history)
        self._answered[entry.seq] = error
        self._came.notify()


class MaskFeed:
    """Tells the books which masks have come, and writes them into steps. The lane's `HostMasks`.

    A sequence whose function raised, or gave no mask, ends with `constraint`, alone.
    """

    def __init__(self, masks: Masks, books: Books, parker: Parker) -> None:
        self._masks = masks
        self._books = books
        self._parker = parker

    def collect(self, ready: Callable[[], bool] | None) -> None:
        """Take the masks that have come. With `ready`, wait up to 1 ms for others, unless it returns True."""
        if ready is not None and self._masks.num_pending:
            # A device at work loses nothing by it, and a row that needs a mask that is about to come need not sit out.
            self._masks.wait(ready, _MOMENT_S)
        for seq, error in self._masks.take_ready():
            if error is None:
                self._books.mask_ready(seq)
            else:
                self._parker.end(seq, "constraint", error)

    def write(self, buffers: StepBuffers, counts: StepCounts) -> int:
        """Write the masks of a step that was just filled; return how many there are."""
        return self._masks.write(buffers, counts)
