"""What the tests of the command line share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reprieve.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def prompts_file(folder: Path, *lines: object) -> str:
    """Write a file of prompts, of objects or of text as it is, and return its name."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return str(path)


def generate(*arguments: object) -> int:
    """Run `reprieve generate`."""
    return main(["generate", *map(str, arguments)])


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line that `arguments` are refused with, with status 2."""
    try:
        status: object = generate(*arguments)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err
