"""The example for people with a model runner of their own stays short, runs, and parks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_runner.py"


def test_the_example_runs_and_its_answers_are_the_sums() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    assert re.search(r"waiting \[\d", run.stdout), "somebody waited"
    answers = [line.split(" ", 1) for line in run.stdout.splitlines() if not line.startswith("rows")]
    assert [int(seq) for seq, _ in answers] == [0, 1, 2, 3, 4]
    for seq, tokens in answers:
        history = list(range(int(seq), int(seq) + 6))
        for token in ast.literal_eval(tokens):
            assert token == sum(history) % 1000
            history.append(token)
        assert len(history) == 18


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 80
