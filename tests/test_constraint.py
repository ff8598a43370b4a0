"""Masks: asked off the decode thread, in order, for the newest history only; checked, copied, written into the step."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reprieve import Ledger, constraint
from reprieve.constraint import Masks
from reprieve.errors import BooksMisused, EngineClosed, InvalidArgument
from reprieve.request import MAX_BANS
from reprieve.step import READ_ARGMAX, READ_NOTHING, Step, StepBuffers, StepCounts, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Answers = list[tuple[int, BaseException | None]]

LONG = 20.0
"""Seconds that nothing here takes unless it is broken."""


def words_for(allowed: Sequence[int], vocab: int, count: int | None = None) -> NDArray[np.uint32]:
    """Return a mask that allows these ids, of `count` words or as many as the vocabulary needs."""
    bits = np.zeros(32 * (count or -(-vocab // 32)), np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def allowed_in(words: NDArray[np.uint32]) -> list[int]:
    """Return the ids that a mask allows."""
    return [v for v in range(32 * len(words)) if int(words[v // 32]) >> (v % 32) & 1]


def answer_always(answer: Any, generated: tuple[int, ...]) -> Any:
    return answer


def mask_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reprieve-mask")]


@contextlib.contextmanager
def masks_for(vocab: int, **settings: int) -> Iterator[Masks]:
    """Give masks for a vocabulary; afterwards none of their threads is left."""
    masks = Masks(-(-vocab // 32), vocab, **settings)
    try:
        yield masks
    finally:
        masks.close(LONG)
    assert mask_threads() == []
    assert masks.num_pending == 0


def collect(masks: Masks, count: int = 1) -> Answers:
    """Wait for `count` answers and return them."""
    answers: Answers = []
    while len(answers) < count:
        assert masks.wait(lambda: False, LONG), f"{len(answers)} of {count} answers came"
        answers += masks.take_ready()
    assert len(answers) == count
    return answers


def answered(masks: Masks, seq: int, generated: tuple[int, ...] = ()) -> BaseException | None:
    """Ask, and return what went wrong, if anything."""
    masks.ask(seq, generated)
    ((who, error),) = collect(masks)
    assert who == seq
    return error


def written(masks: Masks, seqs: Sequence[int], unread: Sequence[int] = (), vocab: int = 70) -> dict[int, list[int]]:
    """Return the ids that are allowed in each row that has a mask, in a step with these sequences."""
    buffers = StepBuffers(
        StepShape(tokens=1, rows=max(1, len(seqs)), table_changes=1, bans=1, mask_words=-(-vocab // 32))
    )
    buffers.seqs[: len(seqs)] = seqs
    buffers.readback[: len(seqs)] = [READ_NOTHING if seq in unread else READ_ARGMAX for seq in seqs]
    counts = StepCounts(len(seqs), 0, 0, 0)
    step = Step.of(buffers, counts, masks.write(buffers, counts))
    assert step.mask_rows.tolist() == sorted(step.mask_rows.tolist())
    return {int(row): allowed_in(words) for row, words in zip(step.mask_rows, step.masks, strict=True)}


class Gate:
    """A mask that allows the id 3 and that, if told so, waits inside until it is let go."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.histories: list[tuple[int, ...]] = []
        if is_open:
            self.go.set()

    def __call__(self, generated: tuple[int, ...]) -> NDArray[np.uint32]:
        self.histories.append(generated)
        self.entered.release()
        assert self.go.wait(3 * LONG), "longer than anybody waits for what is stuck behind this"
        return words_for([3], 70)

    def await_entry(self) -> None:
        assert self.entered.acquire(timeout=LONG)


# What becomes of an answer.


def test_a_row_without_a_mask_has_none_beside_rows_that_have() -> None:
    with masks_for(70) as masks:
        masks.open(1, lambda _: words_for([3], 70))
        masks.open(3, lambda _: words_for([69], 70))
        assert [answered(masks, seq) for seq in (1, 3)] == [None, None]
        assert written(masks, [1, 2, 3]) == {0: [3], 2: [69]}


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 95, 96, 97])
@pytest.mark.parametrize(
    "shown",
    [
        lambda words: words,
        lambda words: words.view(np.int32),
        lambda words: np.repeat(words, 2)[::2],
        lambda words: words[::-1].copy()[::-1].view(np.int32),
        lambda words: np.append(words, [np.uint32(7), np.uint32(9)]),
        lambda words: np.broadcast_to(words, words.shape),
        memoryview,
    ],
    ids=["uint32", "int32", "strided", "reversed", "more words", "read-only", "no array"],
)
def test_the_same_bits_are_written_in_whatever_form_they_come(
    vocab: int, shown: Callable[[NDArray[np.uint32]], Any]
) -> None:
    edges = [v for v in (0, 31, 32, 63, 64, vocab - 1) if v < vocab]
    with masks_for(vocab) as masks:
        for seq, allowed in enumerate([*([v] for v in edges), list(range(vocab)), []]):
            words = shown(words_for(allowed, vocab))
            masks.open(seq, functools.partial(answer_always, words))
            assert answered(masks, seq) is None
            assert written(masks, [seq], vocab=vocab) == {0: sorted(set(allowed))}


def test_bits_beyond_the_vocabulary_are_cleared() -> None:
    masks = Masks(4, 37)  # logits that are wider than the vocabulary
    masks.open(5, lambda _: np.full(4, -1, np.int32))
    assert answered(masks, 5) is None
    assert written(masks, [5], vocab=128) == {0: list(range(37))}
    masks.close(LONG)


def test_a_mask_that_allows_nothing_is_passed_on_as_it_is() -> None:
    with masks_for(70) as masks:
        masks.open(1, lambda _: np.zeros(3, np.uint32))
        assert answered(masks, 1) is None
        assert written(masks, [1]) == {0: []}


def test_none_allows_everything_and_says_nothing_about_the_next_token() -> None:
    with masks_for(70) as masks:
        masks.open(1, lambda generated: None if len(generated) % 2 == 0 else words_for([len(generated)], 70))
        seen = []
        for count in range(4):
            assert answered(masks, 1, tuple(range(count))) is None
            seen.append(written(masks, [1]))
        assert seen == [{}, {0: [1]}, {}, {0: [3]}]


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (np.zeros(2, np.uint32), "gave 2 words; the 70 ids of the vocabulary need 3"),
        (np.zeros(0, np.int32), "gave 0 words"),
        (np.zeros(3, np.int64), "gave ndarray of int64; words of uint32 or int32 are wanted"),
        (np.zeros(3, ">u4"), "gave ndarray of >u4"),
        (np.zeros(70, bool), "gave ndarray of bool"),
        (np.zeros((1, 3), np.int32), r"gave an array of shape \(1, 3\); one row of words is wanted"),
        (np.uint32(7), r"gave an array of shape \(\)"),
        ([1, 2, 3], "gave list of int64"),
        ("anything", "gave str of <U8"),
        (object(), "gave object of object"),
    ],
)
def test_a_mask_that_is_none_is_an_error_that_names_the_numbers(answer: Any, named: str) -> None:
    with masks_for(70) as masks:
        masks.open(1, lambda _: answer)
        error = answered(masks, 1)
        assert isinstance(error, InvalidArgument)
        assert error.field == "mask"
        with pytest.raises(InvalidArgument, match=f"^mask: {named}"):
            raise error


def test_a_function_may_use_its_array_again() -> None:
    ours = np.zeros(3, np.uint32)

    def mask(generated: tuple[int, ...]) -> NDArray[np.uint32]:
        ours[:] = words_for([len(generated)], 70)
        return ours

    with masks_for(70) as masks:
        masks.open(1, mask)
        masks.open(2, mask)
        assert answered(masks, 1, (9, 9)) is None
        assert answered(masks, 2, (9, 9, 9)) is None
        assert written(masks, [1, 2]) == {0: [2], 1: [3]}


def test_a_row_that_is_not_read_back_has_no_mask_and_needs_none() -> None:
    with masks_for(70) as masks:
        for seq in (1, 2):
            masks.open(seq, lambda _: words_for([3], 70))
        assert answered(masks, 1) is None
        assert written(masks, [1, 2, 8], unread=[1, 2]) == {}
        assert written(masks, [2, 1, 8], unread=[2]) == {1: [3]}


def test_a_row_that_is_read_back_before_its_mask_is_there_is_a_bug_and_nothing_is_written() -> None:
    gate = Gate()
    with masks_for(70) as masks:
        masks.open(1, Gate(is_open=True))
        masks.open(2, gate)
        assert answered(masks, 1) is None
        with pytest.raises(BooksMisused, match="row 1 reads back sequence 2, whose mask is not there yet"):
            written(masks, [1, 2])
        masks.ask(2, ())
        with pytest.raises(BooksMisused):
            written(masks, [1, 2])
        gate.go.set()
        collect(masks)
        assert written(masks, [1, 2]) == {0: [3], 1: [3]}
        masks.ask(1, (3,))  # the mask at hand is for the token before
        with pytest.raises(BooksMisused, match="row 0"):
            written(masks, [1, 2])
        collect(masks)


def test_without_a_live_mask_buffers_are_not_looked_at() -> None:
    buffers = StepBuffers(StepShape(tokens=1, rows=4, table_changes=1, bans=1, mask_words=3))
    buffers.seqs[:] = 2**64 - 1
    buffers.readback[:] = READ_ARGMAX
    with masks_for(70) as masks:
        assert masks.write(buffers, StepCounts(4, 0, 0, 0)) == 0
        masks.open(2**64 - 1, lambda _: words_for([69], 70))
        assert answered(masks, 2**64 - 1) is None
        masks.forget(2**64 - 1)
        assert masks.write(buffers, StepCounts(4, 0, 0, 0)) == 0
        assert buffers.masks.shape == (0, 3)


# Who is asked, when, and how often.


def test_no_thread_is_started_before_the_first_question_and_one_is_enough_for_one_sequence_at_a_time() -> None:
    with masks_for(70) as masks:
        masks.open(1, Gate(is_open=True))
        assert mask_threads() == []
        assert answered(masks, 1) is None
        assert mask_threads() == ["reprieve-mask-0"]


def test_a_history_is_asked_about_once_as_a_park_changes_no_mask() -> None:
    gate = Gate(is_open=True)
    with masks_for(70) as masks:
        masks.open(1, gate)
        assert answered(masks, 1, (4,)) is None
        masks.ask(1, (4,))
        masks.ask(1, (4,))
        assert (masks.num_pending, masks.take_ready()) == (0, [])
        assert written(masks, [1]) == {0: [3]}
        assert gate.histories == [(4,)]


def test_a_history_that_was_rewritten_is_a_bug() -> None:
    with masks_for(70) as masks:
        masks.open(1, Gate(is_open=True))
        assert answered(masks, 1, (4, 5)) is None
        for rewritten in ((4, 6), (4,)):
            with pytest.raises(RuntimeError, match=r"sequence 1 has 2 generated tokens, .* others: a bug"):
                masks.ask(1, rewritten)


def test_an_answer_to_an_earlier_question_is_dropped_and_the_newest_is_asked() -> None:
    gate = Gate()
    with masks_for(70, workers=3) as masks:
        masks.open(1, gate)
        masks.ask(1, ())
        gate.await_entry()
        masks.ask(1, (7,))
        masks.ask(1, (7, 8))
        assert masks.num_pending == 1
        gate.go.set()
        assert collect(masks) == [(1, None)]
        assert gate.histories == [(), (7, 8)]
        assert masks.num_pending == 0


def test_an_answer_that_nobody_took_before_the_next_question_is_dropped() -> None:
    gate = Gate(is_open=True)
    with masks_for(70) as masks:
        masks.open(1, gate)
        masks.ask(1, ())
        assert masks.wait(lambda: False, LONG)
        gate.go.clear()
        masks.ask(1, (7,))
        assert masks.take_ready() == []
        gate.go.set()
        assert collect(masks) == [(1, None)]


def test_calls_of_a_sequence_come_in_order_and_never_overlap_while_others_do() -> None:
    inside: dict[int, int] = dict.fromkeys(range(3), 0)
    histories: dict[int, list[tuple[int, ...]]] = {seq: [] for seq in inside}
    together = threading.Barrier(3)

    def mask_of(seq: int) -> Callable[[tuple[int, ...]], None]:
        def mask(generated: tuple[int, ...]) -> None:
            inside[seq] += 1
            assert inside[seq] == 1
            histories[seq].append(generated)
            together.wait(LONG)  # passed only if all three sequences are inside at once
            inside[seq] -= 1

        return mask

    with masks_for(70, workers=3) as masks:
        for seq in inside:
            masks.open(seq, mask_of(seq))
        for count in range(6):
            for seq in inside:
                masks.ask(seq, tuple(range(count)))
            assert sorted(collect(masks, 3), key=lambda answer: answer[0]) == [(seq, None) for seq in inside]
    assert histories == {seq: [tuple(range(count)) for count in range(6)] for seq in inside}


def test_a_slow_mask_holds_up_nobody_else() -> None:
    slow = Gate()
    with masks_for(70, workers=2) as masks:
        masks.open(1, slow)
        masks.open(2, Gate(is_open=True))
        masks.ask(1, ())
        slow.await_entry()
        for count in range(5):
            assert answered(masks, 2, (3,) * count) is None
        assert masks.num_pending == 1
        slow.go.set()
        assert collect(masks) == [(1, None)]


@pytest.mark.parametrize("raised", [ValueError("at the third"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_a_mask_that_raises_at_its_third_token_fails_alone_and_with_what_it_raised(raised: BaseException) -> None:
    def mask(generated: tuple[int, ...]) -> None:
        if len(generated) == 2:
            raise raised

    with masks_for(70, workers=1) as masks:
        masks.open(1, mask)
        masks.open(2, Gate(is_open=True))
        for count in range(5):
            if count < 3:
                assert answered(masks, 1, (3,) * count) is (raised if count == 2 else None)
            assert answered(masks, 2, (3,) * count) is None
        with pytest.raises(BooksMisused):
            written(masks, [1, 2])
        masks.forget(1)
        assert written(masks, [1, 2]) == {1: [3]}
        assert mask_threads() == ["reprieve-mask-0"], "the thread outlives whatever a function raises"


def test_two_hundred_sequences_at_once_are_all_answered_by_few_threads() -> None:
    names: set[str] = set()

    def mask_of(seq: int) -> Callable[[tuple[int, ...]], NDArray[np.uint32]]:
        def mask(generated: tuple[int, ...]) -> NDArray[np.uint32]:
            names.add(threading.current_thread().name)
            assert generated == (seq,) * len(generated)
            return words_for([(seq + len(generated)) % 70], 70)

        return mask

    seqs = list(range(200))
    with masks_for(70, workers=3) as masks:
        for seq in seqs:
            masks.open(seq, mask_of(seq))
        for count in range(4):
            for seq in seqs:
                masks.ask(seq, (seq,) * count)
            assert masks.num_pending == 200
            assert sorted(collect(masks, 200), key=lambda answer: answer[0]) == [(seq, None) for seq in seqs]
            assert written(masks, seqs) == {seq: [(seq + count) % 70] for seq in seqs}
        for seq in seqs[::2]:
            masks.forget(seq)
        assert written(masks, seqs) == {seq: [(seq + 3) % 70] for seq in seqs[1::2]}
    assert names <= {f"reprieve-mask-{number}" for number in range(3)}


@pytest.mark.parametrize("workers", [1, 3])
def test_in_any_order_of_questions_and_ends_the_newest_history_of_the_living_is_answered_once(workers: int) -> None:
    random = np.random.default_rng(workers)
    calls: dict[int, list[int]] = {}
    inside: set[int] = set()
    live: dict[int, tuple[int, ...] | None] = {}
    owed: set[int] = set()  # asked, and not taken

    def mask_of(seq: int) -> Callable[[tuple[int, ...]], NDArray[np.uint32]]:
        def mask(generated: tuple[int, ...]) -> NDArray[np.uint32]:
            assert seq not in inside
            inside.add(seq)
            calls[seq].append(len(generated))
            inside.remove(seq)
            return words_for([len(generated)], 70)

        return mask

    def take(answers: Answers) -> None:
        for seq, error in answers:
            assert error is None
            owed.remove(seq)  # an error for the dead, and for a second answer to one question

    with masks_for(70, workers=workers) as masks:
        for seq in range(1500):
            masks.open(seq, mask_of(seq))
            live[seq], calls[seq] = None, []
            for chosen in random.choice(list(live), min(3, len(live)), replace=False).tolist():
                known = live[chosen]
                live[chosen] = () if known is None else (*known, 1)
                masks.ask(chosen, live[chosen] or ())
                owed.add(chosen)
            if len(live) > 12:
                leaver = int(random.choice(list(live)))
                masks.forget(leaver)
                del live[leaver]
                owed.discard(leaver)
            take(masks.take_ready())
            assert masks.num_pending == len(owed)
            if owed and seq % 2:  # else a busy machine would call none before the end
                assert masks.wait(lambda: False, LONG)
        while owed:
            assert masks.wait(lambda: False, LONG)
            take(masks.take_ready())
        asked = [seq for seq, history in live.items() if history is not None]
        assert written(masks, asked) == {row: [len(live[seq] or ())] for row, seq in enumerate(asked)}
    assert all(lengths == sorted(set(lengths)) for lengths in calls.values()), "in order, and none twice"
    assert sum(map(len, calls.values())) > 500, "each wait ends with an answer"


# The end of a sequence.


def test_a_mask_is_never_asked_after_its_end() -> None:
    gate = Gate(is_open=True)
    with masks_for(70) as masks:
        masks.open(1, gate)
        for count in range(3):
            assert answered(masks, 1, (3,) * count) is None
        masks.forget(1)
        masks.forget(1)
        assert 1 not in masks
        masks.ask(1, (3, 3, 3))
        assert (masks.num_pending, masks.take_ready()) == (0, [])
    assert gate.histories == [(), (3,), (3, 3)]


def test_a_call_under_way_when_its_sequence_ends_is_left_to_finish_and_its_answer_dropped() -> None:
    gate, waiting = Gate(), Gate(is_open=True)
    with masks_for(70, workers=1) as masks:
        masks.open(1, gate)
        masks.open(2, waiting)
        masks.ask(1, ())
        gate.await_entry()
        masks.ask(2, ())
        masks.forget(2)  # queued behind it
        masks.forget(1)
        assert masks.num_pending == 0
        gate.go.set()
        masks.open(2, Gate(is_open=True))
        assert answered(masks, 2, (8,)) is None
    assert gate.histories == [()]
    assert waiting.histories == []


def test_a_mask_that_never_returns_holds_up_nobody_once_its_sequence_has_ended() -> None:
    stuck = [Gate(), Gate()]
    with masks_for(70, workers=2) as masks:
        for seq, gate in enumerate(stuck):
            masks.open(seq, gate)
            masks.ask(seq, ())
            gate.await_entry()
        masks.open(5, Gate(is_open=True))
        masks.ask(5, ())
        assert not masks.wait(lambda: False, 0), "both threads are stuck"
        masks.forget(0)
        assert collect(masks) == [(5, None)]
        masks.forget(1)
        assert answered(masks, 5, (3,)) is None
        for gate in stuck:
            gate.go.set()


def test_an_answer_that_was_not_taken_when_its_sequence_ended_is_dropped() -> None:
    with masks_for(70) as masks:
        masks.open(1, Gate(is_open=True))
        masks.ask(1, ())
        assert masks.wait(lambda: False, LONG)
        masks.forget(1)
        assert masks.take_ready() == []


def test_a_sequence_has_one_mask() -> None:
    with masks_for(70) as masks:
        masks.open(1, Gate())
        assert 1 in masks
        with pytest.raises(RuntimeError, match="sequence 1 has a mask already"):
            masks.open(1, Gate())


# Waiting.


def test_waiting_ends_at_its_time_or_with_what_is_waited_for_beside_the_masks() -> None:
    asked = 0

    def is_enough() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    gate = Gate()
    with masks_for(70) as masks:
        masks.open(1, gate)
        masks.ask(1, ())
        begun = time.monotonic()
        assert not masks.wait(lambda: False, 0.01)
        assert time.monotonic() - begun >= 0.01
        assert masks.wait(is_enough, LONG)
        assert asked == 4
        gate.go.set()
        assert masks.wait(lambda: False, LONG)
        assert masks.wait(is_enough, 0), "an answer that nobody took ends it at once"
        assert asked == 4
        assert masks.take_ready() == [(1, None)]
    assert time.monotonic() - begun < LONG


# The threads.


def test_closing_lets_calls_under_way_finish_and_leaves_no_thread() -> None:
    gate = Gate()
    masks = Masks(3, 70, workers=2)
    for seq in range(2):
        masks.open(seq, gate)
        masks.ask(seq, ())
        gate.await_entry()
    release = threading.Thread(target=gate.go.set)
    release.start()
    masks.close(LONG)
    assert mask_threads() == []
    release.join()
    assert (masks.num_pending, masks.take_ready()) == (0, [])


def test_after_closing_nobody_is_called_any_more() -> None:
    gate = Gate()
    masks = Masks(3, 70, workers=1)
    for seq in range(5):
        masks.open(seq, gate)
        masks.ask(seq, ())
    gate.await_entry()
    masks.close(0)
    gate.go.set()
    masks.close(LONG)
    assert gate.histories == [()]
    with pytest.raises(EngineClosed):
        masks.open(9, gate)
    masks.ask(0, (1,))
    assert mask_threads() == []


def test_closing_does_not_wait_for_ever_for_a_mask_that_never_returns(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    masks = Masks(3, 70)
    masks.open(1, gate)
    masks.ask(1, ())
    gate.await_entry()
    with caplog.at_level(logging.WARNING):
        masks.close(0)
    assert "left behind, in the threads reprieve-mask-0" in caplog.text
    gate.go.set()
    caplog.clear()
    masks.close(LONG)  # it has returned now
    assert mask_threads() == []
    assert caplog.text == ""


def test_threads_that_are_idle_for_long_end_and_the_next_question_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "_IDLE_S", 0.001)
    with masks_for(70) as masks:
        masks.open(1, Gate(is_open=True))
        for count in range(3):
            assert answered(masks, 1, (3,) * count) is None
            for thread in masks._threads:
                thread.join(LONG)
            assert mask_threads() == []


def test_a_thread_that_cannot_be_started_fails_the_sequence_that_needed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = RuntimeError("can't start new thread")

    def refuse(thread: threading.Thread) -> None:
        raise refusal

    with masks_for(70) as masks:
        for seq in (1, 2):
            masks.open(seq, Gate(is_open=True))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert answered(masks, 1) is refusal
        masks.forget(1)
        assert answered(masks, 2) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((2, 70), "mask_words: is 2; the 70 ids of the vocabulary need 3"),
        ((1, 0), "vocab_size: must be at least 1, not 0"),
        ((3, 70, 0), "workers: must be at least 1, not 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Masks(*arguments[:2], **({"workers": arguments[2]} if len(arguments) > 2 else {}))


def test_a_forked_child_asks_anew_and_does_not_hang() -> None:
    gate = threading.Event()

    def held(generated: tuple[int, ...]) -> None:
        if os.getpid() == parent:
            assert gate.wait(60)

    parent = os.getpid()
    masks = Masks(2, 61)
    masks.open(1, held)
    masks.ask(1, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads is the point
        child = os.fork()
    if child == 0:  # the parent's thread is not here
        try:
            answered = masks.wait(lambda: False, 0.001) or masks.take_ready() or masks.wait(lambda: False, 30)
            os._exit(0 if answered and [seq for seq, _ in masks.take_ready()] == [1] else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    gate.set()
    assert os.waitstatus_to_exitcode(status) == 0
    assert masks.wait(lambda: False, 30)
    assert masks.take_ready() == [(1, None)]
    masks.close()


def test_the_books_ban_as_many_ids_as_a_request_may_name() -> None:
    shape = Ledger(
        num_blocks=4, block_size=4, num_slots=3, context_length=16, vocab_size=61, step_tokens=8, row_tile=8
    ).step_shape()
    assert shape.bans == 3 * MAX_BANS
    assert shape.mask_words == 2
