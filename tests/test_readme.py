"""README's example of the Python interface runs, pauses and answers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.smollm2
def test_the_python_example_runs_and_shows_a_pause(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2_path.is_file()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 12
    exec(compile(blocks[0], str(README), "exec"), {})  # noqa: S102  it is what README tells people to run
    out = capsys.readouterr().out
    assert "[Paused(" in out
    assert "[Resumed(" in out
    assert "scattering" in out
