"""Runs the duels of a plan: opens the workers, lets them take turns, gathers the rows."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benches.peers.plan import environment
from benches.peers.prepare import prompts
from benches.peers.protocol import Setup, Task
from benches.peers.table import Row, Side
from benches.peers.worker_process import Command, Worker, WorkerFailed

from reprieve.hub import demo_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.peers.plan import Duel, Plan, Pool
    from benches.peers.protocol import Measurement

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = ROOT / "target" / "peers"
INSTALLED: Final = ROOT / ".venv-peers"
WARM_UP_TOKENS: Final = 8
BUSY: Final = 0.05
"""Share of a core from which on a waiting worker disturbs the one that is measured."""


class Turns:
    """One engine's part in a case: its runs so far, or why there are no more."""

    def __init__(self, worker: Worker | None, error: str = "") -> None:
        self._worker = worker
        self.error = error
        self.runs: list[Measurement] = []

    def take(self, task: Task, *, is_warm_up: bool = False) -> None:
        """Do the task, unless something has failed before."""
        if self._worker is None or self.error:
            return
        try:
            run = self._worker.run(task)
        except WorkerFailed as failure:
            self.error = str(failure)
            return
        if not is_warm_up:
            self.runs.append(run)


class Comparison:
    """All that is measured: `rows`, the engines' `versions`, and `warnings` about what may have disturbed them."""

    def __init__(self, plan: Plan) -> None:
        self.rows: list[Row] = []
        self.versions: dict[str, str] = {}
        self.warnings: list[str] = []
        self._plan = plan
        self._prompts = prompts()
        CACHE.mkdir(parents=True, exist_ok=True)
        for log in CACHE.glob("*.log"):  # workers add to them
            log.unlink()

    def num_turns(self) -> int:
        """Return how many turns a duel has, warm-ups included."""
        return sum(len(batches) for _, batches in self._plan.cases()) * (self._plan.pairs + 1) * 2

    def run(self, duel: Duel, after_turn: Callable[[], None]) -> None:
        """Measure all cases of a duel. An engine that fails has rows that say so."""
        ample: dict[tuple[str, int], list[list[int]]] = {}
        for pool, batches in self._plan.cases():
            with ExitStack() as stack:
                workers = [self._open(stack, duel, engine, pool) for engine in ("reprieve", duel.peer)]
                for batch in batches:
                    row = self._case(duel, pool, batch, workers, ample, after_turn)
                    self.rows.append(row)
                    self._warn_of_busy_waiting(row)

    def _open(self, stack: ExitStack, duel: Duel, engine: str, pool: Pool) -> tuple[Worker | None, str]:
        """Return a worker that the stack will end, or why there is none."""
        is_peer = engine == duel.peer
        setup = Setup(
            model=str(duel.model(CACHE) if is_peer else demo_model()),
            weights=duel.rounding,
            kv=duel.kv,
            threads=self._plan.threads,
            sequences=self._plan.most_sequences(pool),
            context=self._plan.context(self._prompts),
            kv_positions=self._plan.positions(pool, self._prompts),
        )
        command = Command(
            python=INSTALLED / "bin" / "python" if is_peer else Path(sys.executable),
            module=duel.worker if is_peer else "benches.peers.worker_reprieve",
            root=ROOT,
            log=CACHE / f"{engine}.log",
            settings=environment(engine, self._plan.threads, INSTALLED, CACHE),
        )
        try:
            worker = Worker(command, setup)
        except WorkerFailed as failure:
            return None, str(failure)
        stack.enter_context(worker)
        self.versions[engine] = worker.ready.version
        if worker.ready.kv_positions != setup.kv_positions:
            self.warnings.append(f"{engine} has {worker.ready.kv_positions} positions, not {setup.kv_positions}")
        return worker, ""

    def _case(
        self,
        duel: Duel,
        pool: Pool,
        batch: int,
        workers: list[tuple[Worker | None, str]],
        ample: dict[tuple[str, int], list[list[int]]],
        after_turn: Callable[[], None],
    ) -> Row:
        """Measure a case in pairs, after a warm-up of both engines; `ample` keeps what each gave in the ample pool."""
        prompts_of_case = self._prompts[:batch]
        task = Task(prompts_of_case, self._plan.new_tokens)
        warm_up = Task(prompts_of_case, min(WARM_UP_TOKENS, self._plan.new_tokens))
        both = [Turns(*worker) for worker in workers]
        for index in range(self._plan.pairs + 1):
            for turns in both:
                turns.take(task if index else warm_up, is_warm_up=not index)
                after_turn()
        sides = []
        for engine, turns in zip(("reprieve", duel.peer), both, strict=True):
            if pool == "ample" and turns.runs:
                ample[engine, batch] = turns.runs[0].tokens
            sides.append(Side(engine, tuple(turns.runs), ample.get((engine, batch)), turns.error))
        return Row(duel.weights, batch, self._plan.new_tokens, pool, *sides)

    def _warn_of_busy_waiting(self, row: Row) -> None:
        for side in (row.reprieve, row.peer):
            busiest = max((run.idle_share for run in side.runs), default=0.0)
            if busiest > BUSY:
                self.warnings.append(f"{side.engine} took {busiest:.0%} of a core while the other one was measured")
