"""A worker as the driver sees it: a process of its own, spoken to by `protocol`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from benches.peers.protocol import Measurement, Ready, Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from benches.peers.protocol import Setup

OPEN_WITHIN_S: Final = 15 * 60
RUN_WITHIN_S: Final = 10 * 60
END_WITHIN_S: Final = 30


class WorkerFailed(Exception):
    """A worker could not do what it was asked to; its log says more."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a worker is started: `module` by the Python of its environment, in `root`, with `settings` set there.

    Who takes more seconds to open its engine, or for a run, than it may is taken to hang, and is killed.
    """

    python: Path
    module: str
    root: Path
    log: Path
    settings: Mapping[str, str]
    open_within_s: float = OPEN_WITHIN_S
    run_within_s: float = RUN_WITHIN_S


class Worker:
    """A worker with its engine open. A context manager: leaving it ends the process.

    What a worker fails with once, it answers ever after.
    """

    def __init__(self, command: Command, setup: Setup) -> None:
        self._log = _shown(command.log, command.root)
        self._run_within_s = command.run_within_s
        self._failure: WorkerFailed | None = None
        if not command.python.exists():
            raise WorkerFailed(f"there is no {_shown(command.python, command.root)}; `make bench-peers` makes it")
        with command.log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [command.python, "-m", command.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=command.root,
                env={**os.environ, **command.settings},
                encoding="utf-8",
            )
        # A pipe is read with no limit of time, a queue with one. An empty line is the end of the worker's output.
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.ready = Ready(**self._ask(setup, command.open_within_s))
        except BaseException:
            self._end(within_s=0)
            raise

    def run(self, task: Task) -> Measurement:
        """Have the task done; raises `WorkerFailed`."""
        return Measurement(**self._ask(task, self._run_within_s))

    def _ask(self, message: Setup | Task, within_s: float) -> dict[str, Any]:
        if self._failure is None:
            try:
                return self._answer(message, within_s)
            except WorkerFailed as failure:
                self._failure = failure
        raise self._failure

    def _answer(self, message: Setup | Task, within_s: float) -> dict[str, Any]:
        stdin = self._process.stdin
        if stdin is None:
            raise WorkerFailed("its pipes are closed")
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading shows
            stdin.write(json.dumps(asdict(message)) + "\n")
            stdin.flush()
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            self._end(within_s=0)
            raise WorkerFailed(f"it gave no answer within {within_s:g} seconds; see {self._log}") from None
        if not line:
            raise WorkerFailed(f"it ended with status {self._end(END_WITHIN_S)}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{answer['error']}; see {self._log}")
        return answer

    def _read(self) -> None:
        """Pass on what the worker says, until its output ends."""
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _end(self, within_s: float) -> int:
        """Close the worker's input, which ends it; kill it where that takes longer. Return its exit status."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._reader.join(END_WITHIN_S)  # longer only where a process of the worker's own keeps the pipe open
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(END_WITHIN_S)


def _shown(path: Path, root: Path) -> Path:
    """Return `path` as people are told it: from the root on, where it lies below."""
    return path.relative_to(root) if path.is_relative_to(root) else path
