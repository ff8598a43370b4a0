"""What `make bench-peers` makes of its measurements: pools, rates, the table; and of a worker that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from benches.peers.plan import GRAIN, Plan, environment
from benches.peers.protocol import Measurement, Setup, Task
from benches.peers.table import HEAD, Row, Side, markdown, numbers, shared_beginning
from benches.peers.worker_process import Command, Worker, WorkerFailed

if TYPE_CHECKING:
    from benches.peers.plan import Pool

TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]
PROMPTS = [[0] * 62 for _ in range(32)]
SETUP = Setup("demo", "file", "f16", 1, 1, 256, 256)
PLAN = Plan(batches=(1, 8, 32), halved=8, new_tokens=128, pairs=5, threads=2)


def run(seconds: float, tokens: list[list[int]] = TOKENS, *, parks: int = 0, stopped: str = "") -> Measurement:
    return Measurement(tokens, seconds, first_s=1.0, tokens_by_then=2, parks=parks, stopped=stopped)


def side(*runs: Measurement, error: str = "") -> Side:
    return Side("peer", runs, TOKENS, error)


def cells(ours: Side, theirs: Side, pool: Pool = "half") -> list[str]:
    row = Row("F16", 2, 4, pool, ours, theirs)
    lines = markdown([row]).splitlines()
    assert lines[: len(HEAD)] == list(HEAD)
    return [cell.strip() for cell in lines[-1].strip("|").split("|")][3:]


def test_rates_are_tokens_per_second_with_and_without_prefill() -> None:
    assert run(4.0).rate == 2
    assert run(4.0).decode_rate == 2
    assert Measurement(TOKENS, 4.0, None, 0).decode_rate is None
    assert Measurement([[1], [2]], 4.0, 4.0, 2).decode_rate is None


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    row = Row("F16", 2, 4, "ample", side(run(2), run(2), run(2)), side(run(4), run(100), run(2)))
    assert row.ratio == 2
    assert json.loads(json.dumps(numbers(row)))["engines_agree_up_to"] == 1


def test_a_pool_too_small_is_said_in_the_table() -> None:
    other = [[1, 2, 3, 4], [5, 6, 0, 8]]
    ours, theirs, ratio = cells(side(run(4, parks=1)), side(run(4, other, parks=3)))
    assert ours == "2 (2); 1 park; same tokens: yes"
    assert theirs == "peer 2 (2); 3 parks; same tokens: no"
    assert ratio == "1.0"


def test_who_stops_early_has_no_rate_but_its_number_of_tokens() -> None:
    stopped = run(4, [[1, 2], [5]], stopped="no place left")
    assert cells(side(run(4)), side(stopped))[1:] == ["peer stops after 1 to 2 of 4 tokens each: no place left", ""]


def test_an_engine_that_fails_has_a_row_that_says_so() -> None:
    assert cells(side(run(4)), side(error="a | b"))[1:] == ["peer did not run: a / b", ""]


def test_tokens_that_vary_in_an_ample_pool_are_told() -> None:
    assert cells(side(run(4), run(4)), side(run(4), run(4, [[1, 2, 3, 4], [5, 6, 7, 9]])), "ample") == [
        "2 (2)",
        "peer 2 (2); tokens vary from run to run",
        "1.0",
    ]


def test_engines_are_compared_up_to_where_they_part() -> None:
    assert shared_beginning(TOKENS, [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8


def test_pools_are_whole_grains_and_the_half_one_is_half() -> None:
    needed = 8 * (62 + 128)
    assert PLAN.positions("half", PROMPTS) % GRAIN == 0
    assert abs(PLAN.positions("half", PROMPTS) - needed / 2) <= GRAIN / 2
    assert PLAN.positions("ample", PROMPTS) >= 32 * (62 + 128 + 32)
    assert PLAN.context(PROMPTS) == 256


@pytest.mark.parametrize(
    ("python", "module", "problem"),
    [
        (Path(sys.executable), "benches.peers.no_such_worker", "ended with status 1"),
        (Path("no-such-python"), "benches.peers.worker_vllm", "make bench-peers"),
    ],
)
def test_a_worker_that_does_not_start_says_why(tmp_path: Path, python: Path, module: str, problem: str) -> None:
    command = Command(python, module, tmp_path, tmp_path / "log", {})
    with pytest.raises(WorkerFailed, match=problem):
        Worker(command, SETUP)


def small_worker(folder: Path, program: str, **limits: float) -> Command:
    """Return a worker that runs `program`."""
    (folder / "small_worker.py").write_text(program, "utf-8")
    return Command(Path(sys.executable), "small_worker", folder, folder / "log", {}, **limits)


READY = 'print(\'{"version": "1", "kv_positions": 256}\', flush=True)'


def test_a_worker_that_hangs_fails_in_time_and_ever_after(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"it gave no answer within 0\.2 seconds; see log"):
        Worker(small_worker(tmp_path, "import time; time.sleep(60)", open_within_s=0.2), SETUP)
    program = f"import sys, time; sys.stdin.readline(); {READY}; time.sleep(60)"
    with Worker(small_worker(tmp_path, program, run_within_s=0.2), SETUP) as worker:
        assert worker.ready.kv_positions == 256
        for _ in range(2):
            with pytest.raises(WorkerFailed, match=r"it gave no answer within 0\.2 seconds; see log"):
                worker.run(Task([[1]], 1))


def test_a_worker_that_ends_in_a_run_says_with_what_and_ever_after(tmp_path: Path) -> None:
    program = f"import sys; sys.stdin.readline(); {READY}; sys.stdin.readline(); sys.exit(3)"
    with Worker(small_worker(tmp_path, program), SETUP) as worker:
        for _ in range(2):
            with pytest.raises(WorkerFailed, match="it ended with status 3; see log"):
                worker.run(Task([[1]], 1))


def test_what_a_user_preloads_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert environment("vLLM", 1, tmp_path, tmp_path)["LD_PRELOAD"] == str(openmp)
    monkeypatch.setenv("LD_PRELOAD", "libtheirs.so")
    assert environment("vLLM", 1, tmp_path, tmp_path)["LD_PRELOAD"] == f"{openmp}:libtheirs.so"
    assert "LD_PRELOAD" not in environment("llama.cpp", 1, tmp_path, tmp_path)
