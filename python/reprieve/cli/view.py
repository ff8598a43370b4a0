"""What people see while requests are decoded: lines, or a live picture of the slots where there is a terminal."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reprieve.request import Done, Failed, Paused, Resumed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from rich.console import Console

    from reprieve.handle import Handle
    from reprieve.request import Event
    from reprieve.stats import EngineSnapshot, SlotView

_REFRESH_S: Final = 0.08
"""Seconds between two pictures at least: steps of a small model are faster than a terminal."""

_LAST_EVENTS: Final = 6
_POOL_WIDTH: Final = 20
_BAR_WIDTH: Final = 16

_VISIBLE: Final = {code: 0xFFFD for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters: what a model writes must not steer the terminal."""


def printable(text: str) -> str:
    """Return `text` with U+FFFD for control characters other than newlines and tabs."""
    return text.translate(_VISIBLE)


class LineView:
    """Prints what happens to requests, a line each, and their answers when they have ended."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> Self:
        """Return the view."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing to undo."""

    def event(self, handle: Handle, event: Event, step: int) -> None:
        """Show an event of a request that came out of step number `step`."""
        name = printable(handle.id)
        match event:
            case Paused(reason=reason, by=by):
                self.happened(step, Text.assemble((name, "bold"), " gave way by ", (by, "yellow"), f" ({reason})"))
            case Resumed(paused_s=paused_s):
                self.happened(step, Text.assemble((name, "bold"), f" is back after {paused_s:.2f} s"))
            case Done(finish_reason=reason) | Failed(code=reason):
                style = "green" if isinstance(event, Done) else "bold red"
                tokens = f" after {len(handle.tokens)} tokens"
                self.line(Text.assemble(f"step {step:4}  ", (name, "bold"), " ended by ", (reason, style), tokens))
                answer = printable(handle.text).strip()
                if answer:
                    self.line(Text(textwrap.indent(answer, "    ")))

    def happened(self, step: int, what: Text) -> None:
        """Show a pause or its end."""
        self.line(Text(f"step {step:4}  ").append_text(what))

    def show(self, snapshot: Callable[[], EngineSnapshot], step: int) -> None:
        """Show who sits where after step number `step`; `snapshot` is called only if it is drawn."""

    def line(self, text: Text) -> None:
        """Print text as it is."""
        self.console.print(text, soft_wrap=True)


class LiveView(LineView):
    """Shows the slots, the pool and who waits, drawn anew in place; answers stay above it. Needs a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._events: deque[Text] = deque(maxlen=_LAST_EVENTS)
        self._parked: dict[str, str] = {}
        self._next_refresh_s = 0.0
        self._num_shown = 0  # slots that were ever taken: rows come, and never go

    def __enter__(self) -> Self:
        """Take the lower part of the terminal."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the terminal back as it was."""
        self._live.stop()

    def event(self, handle: Handle, event: Event, step: int) -> None:
        """Show an event, and remember how its request was parked."""
        if isinstance(event, Paused):
            self._parked[handle.id] = event.by
        elif isinstance(event, (Resumed, Done, Failed)):
            self._parked.pop(handle.id, None)
        super().event(handle, event, step)

    def happened(self, step: int, what: Text) -> None:
        """Keep the last few pauses and resumes in the picture."""
        self._events.append(Text(f"step {step:4}  ", "dim").append_text(what))

    def show(self, snapshot: Callable[[], EngineSnapshot], step: int) -> None:
        """Draw the picture anew, unless it was drawn just now."""
        now = time.monotonic()
        if now < self._next_refresh_s:
            return
        self._live.update(self.picture(snapshot(), step), refresh=True)
        self._next_refresh_s = now + _REFRESH_S

    def picture(self, snapshot: EngineSnapshot, step: int) -> Group:
        """Return the pool, the slots, who waits, and what happened last."""
        used = snapshot.num_blocks - snapshot.free_blocks - snapshot.fenced_blocks
        fenced = f", {snapshot.fenced_blocks} fenced" if snapshot.fenced_blocks else ""
        pool = Text.assemble(
            f"step {step:4}  pool ",
            _bar(used, snapshot.num_blocks, _POOL_WIDTH),
            f" {used} of {snapshot.num_blocks} blocks used, {snapshot.free_blocks} free{fenced}",
        )
        slots = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("slot", "sequence", "state", "blocks", "", "tokens"):
            slots.add_column(heading, justify="right" if heading in {"slot", "tokens"} else "left")
        most = max((slot.blocks for slot in snapshot.slots if slot is not None), default=1)
        taken = [number for number, slot in enumerate(snapshot.slots) if slot is not None]
        self._num_shown = max([self._num_shown, *(number + 1 for number in taken)])
        for number, slot in enumerate(snapshot.slots[: self._num_shown]):
            slots.add_row(str(number), *_slot_cells(slot, most))
        waiting = Text("waiting: ")
        names = (f"{printable(name)} ({self._parked.get(name, 'new')})" for name in snapshot.waiting)
        waiting.append(", ".join(names) or "nobody", "yellow" if snapshot.waiting else "dim")
        waiting.append(f"; {snapshot.host_bytes / 1e6:.1f} MB spilled")
        return Group(pool, slots, waiting, Text(), *self._events)


def _slot_cells(slot: SlotView | None, most_blocks: int) -> tuple[str | Text, ...]:
    if slot is None:
        return ("", Text("free", "dim"), "", "", "")
    style = "cyan" if slot.state == "decoding" else "magenta"
    bar = _bar(slot.blocks, most_blocks, _BAR_WIDTH)
    return (
        Text(printable(slot.request_id), "bold"),
        Text(slot.state, style),
        str(slot.blocks),
        bar,
        str(slot.generated),
    )


def _bar(part: int, whole: int, width: int) -> Text:
    """Return a bar of `width` characters, of which a share of `part` in `whole` is filled, some of it if any is."""
    filled = min(width, -(-part * width // whole))
    return Text.assemble(("━" * filled, "cyan"), ("─" * (width - filled), "dim"))
