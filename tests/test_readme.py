"""README's examples of the Python interface run, pause and answer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.smollm2
def test_the_python_examples_run_and_show_a_pause(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smollm2_path.is_file()
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert [len(block.splitlines()) for block in blocks] == [11, 22]
    outputs = []
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})  # noqa: S102  it is what README tells people to run
        outputs.append(capsys.readouterr().out)
    assert "[Paused(" in outputs[0]
    assert "[Resumed(" in outputs[0]
    assert all("scattering" in output for output in outputs)
