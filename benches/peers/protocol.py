"""What the driver and a worker say to each other: one JSON object a line. Needs the standard library alone.

The driver sends a `Setup`, gets a `Ready`, then sends any number of `Task`s and gets a `Measurement` for each; the end
of its input ends a worker. What goes wrong comes back as a `Failure`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COME_TO_REST_S: Final = 0.5
"""Time for the threads of an engine to fall asleep after a run: an OpenMP may let them spin for 0.2 s."""


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine to open, with one pool: what is the same for all its runs.

    model         path of a file or folder
    weights, kv   "file" (weights alone), "f16" or "bf16"
    threads       to compute with
    sequences     most that decode at once
    context       most positions of a sequence, a multiple of 256
    kv_positions  of the pool, all sequences together, a multiple of 256
    """

    model: str
    weights: str
    kv: str
    threads: int
    sequences: int
    context: int
    kv_positions: int


@dataclass(frozen=True, slots=True)
class Ready:
    """An engine is open: its version, or device, and the positions that its pool really has."""

    version: str
    kv_positions: int


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to be submitted at once, each to get `new_tokens` tokens, greedily, whatever they are."""

    prompts: list[list[int]]
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a task, timed from submit to the last token.

    tokens          what each sequence got, perhaps too few
    first_s         seconds until each had its first token, None if that was never so
    tokens_by_then  how many all had by then
    parks           how often a sequence gave way
    stopped         why the run ended early, "" if it did not
    idle_share      processor time that the worker took while it waited for this task, per second of waiting;
                    0 if that was less than a second
    """

    tokens: list[list[int]]
    seconds: float
    first_s: float | None
    tokens_by_then: int
    parks: int = 0
    stopped: str = ""
    idle_share: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return _count(self.tokens) / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after each had its first; None if that was never so, or if that was all."""
        rest = _count(self.tokens) - self.tokens_by_then
        return None if self.first_s is None or not rest else rest / (self.seconds - self.first_s)


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a worker, in one line."""

    error: str


class Runner(Protocol):
    """An engine as a worker holds it."""

    @property
    def ready(self) -> Ready:
        """What the driver is told of it."""

    def run(self, task: Task) -> Measurement:
        """Do the task alone, with an empty KV pool."""


class Watch:
    """Times a run, from its making on: `look` after each step, `measurement` at the end."""

    def __init__(self, tokens: Sequence[list[int]]) -> None:
        self._tokens = tokens
        self._first_s: float | None = None
        self._tokens_by_then = 0
        self._begin = time.perf_counter()

    def look(self) -> None:
        """Note the time if each sequence has its first token now."""
        if self._first_s is None and all(self._tokens):
            self._first_s = time.perf_counter() - self._begin
            self._tokens_by_then = _count(self._tokens)

    def measurement(self, *, parks: int = 0, stopped: str = "") -> Measurement:
        """Stop the clock."""
        seconds = time.perf_counter() - self._begin
        tokens = [list(of_one) for of_one in self._tokens]
        return Measurement(tokens, seconds, self._first_s, self._tokens_by_then, parks, stopped)


def serve(open_engine: Callable[[Setup], Runner]) -> None:
    """Be a worker until the input ends. What libraries print goes to stderr; stdout belongs to the protocol."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: Ready | Measurement | Failure) -> None:
        answers.write(json.dumps(asdict(message)) + "\n")
        answers.flush()

    try:
        runner = open_engine(Setup(**json.loads(sys.stdin.readline())))
        answer(runner.ready)
        waiting, used = time.perf_counter(), time.process_time()
        for line in sys.stdin:
            waited = time.perf_counter() - waiting
            idle_share = (time.process_time() - used) / waited if waited >= 1 else 0.0
            measurement = runner.run(Task(**json.loads(line)))
            time.sleep(COME_TO_REST_S)
            answer(replace(measurement, idle_share=idle_share))
            waiting, used = time.perf_counter(), time.process_time()
    except Exception as error:  # noqa: BLE001  whatever an engine raises is told, and is in the log
        traceback.print_exc()
        answer(Failure(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))


def _count(tokens: Sequence[list[int]]) -> int:
    return sum(map(len, tokens))
