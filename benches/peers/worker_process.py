"""A worker as the driver sees it: a process of its own, spoken to by `protocol`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from benches.peers.protocol import Measurement, Ready, Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from benches.peers.protocol import Setup

END_WITHIN_S: Final = 30


class WorkerFailed(Exception):
    """A worker could not do what it was asked to; its log says more."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a worker is started: `module` by the Python of its environment, in `root`, with `settings` set there."""

    python: Path
    module: str
    root: Path
    log: Path
    settings: Mapping[str, str]


class Worker:
    """A worker with its engine open. A context manager: leaving it ends the process."""

    def __init__(self, command: Command, setup: Setup) -> None:
        self._log = _shown(command.log, command.root)
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
        try:
            self.ready = Ready(**self._ask(setup))
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def run(self, task: Task) -> Measurement:
        """Have the task done; raises `WorkerFailed`."""
        return Measurement(**self._ask(task))

    def _ask(self, message: Setup | Task) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise WorkerFailed("its pipes are closed")
        with contextlib.suppress(BrokenPipeError):  # it has ended, which reading shows
            stdin.write(json.dumps(asdict(message)) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise WorkerFailed(f"it ended with status {self._process.wait(END_WITHIN_S)}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{answer['error']}; see {self._log}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the worker's input, which ends it; kill it where that takes too long."""
        try:
            self._process.communicate(timeout=END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _shown(path: Path, root: Path) -> Path:
    """Return `path` as people are told it: from the root on, where it lies below."""
    return path.relative_to(root) if path.is_relative_to(root) else path
