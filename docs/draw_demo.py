"""Draws the picture of the demo that README shows: the slots at a busy moment, and the table at the end."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from reprieve.cli.demo import demo_plan
from reprieve.cli.runner import decode
from reprieve.cli.view import LiveView

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Group

    from reprieve.stats import EngineSnapshot

WIDTH = 116


class Camera(LiveView):
    """A live view that shows nothing and keeps the picture of the step at which most have given way."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.best: Group | None = None
        self.most_waiting = 0

    def line(self, text: Text) -> None:
        """Leave the answers out."""

    def show(self, take_snapshot: Callable[[], EngineSnapshot], step: int) -> None:
        """Keep the picture if more than ever wait, parked both ways."""
        snapshot = take_snapshot()
        ways = {self._parked.get(name) for name in snapshot.waiting}
        if {"spill", "replay"} <= ways and len(snapshot.waiting) > self.most_waiting:
            self.most_waiting = len(snapshot.waiting)
            self.best = self.picture(snapshot, step)


def main(target: str) -> int:
    """Run the demo and write its picture to `target`."""
    with tempfile.TemporaryFile("w+") as nowhere:
        silent = Console(file=nowhere)
        camera = Camera(silent)
        report = decode(demo_plan(), silent, camera)
        if camera.best is None:
            raise RuntimeError("nobody ever waited by spill while somebody waited by replay")
        picture = Console(file=nowhere, record=True, width=WIDTH)
        picture.print(camera.best, report.table(), Text(report.sentence()))
        Path(target).write_text(picture.export_svg(title="reprieve demo"), "utf-8")
    return report.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
