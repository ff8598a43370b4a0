"""Draws the picture of the demo's trace that README shows: what each slot did when, who was paused, and the pool."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from rich.console import Console

from reprieve.cli.demo import demo_plan
from reprieve.cli.runner import decode
from reprieve.cli.view import LineView
from reprieve.trace_events import PAUSES, SLOTS

WIDTH: Final = 980
LEFT, RIGHT, TOP = 84, 18, 74
TRACK, BAR = 27, 21
"""Pixels from one track to the next, and of the bar on it."""
POOL: Final = 84
FONT: Final = "ui-sans-serif, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
LETTER: Final = 7.2
"""Pixels that a letter of 13 pixels takes, about."""

COLOURS: Final = {
    "prefill": "#2f9e6e",
    "decode": "#3f7fc4",
    "replay": "#d9822b",
    "over-run": "#b4b9c0",
    "paused by spill": "#c9bbec",
    "paused by replay": "#f3d3ae",
    "blocks held": "#8794a3",
    "fenced": "#cf5a53",
    "free": "#e6eaee",
}
INK, PALE = "#24292f", "#6b7480"

Event = dict[str, Any]


@dataclass(slots=True)
class Run:
    """Rows of one kind and one request in steps that follow each other in a slot; times are microseconds."""

    kind: str
    request: str | None
    track: int
    last_step: int
    steps: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Where things lie on the picture: `end` is the last time, in microseconds."""

    end: float
    num_slots: int
    num_pauses: int

    def x(self, time: float) -> float:
        """Return where a time lies."""
        return LEFT + (WIDTH - LEFT - RIGHT) * time / self.end

    def y(self, group: int, track: int) -> float:
        """Return the upper edge of a bar."""
        return TOP + TRACK * (track - 1) + (0 if group == SLOTS else TRACK * self.num_slots + 12)

    @property
    def pool(self) -> float:
        """The upper edge of the pool."""
        return self.y(PAUSES, self.num_pauses + 1) + 12

    @property
    def height(self) -> float:
        """The height of the picture."""
        return self.pool + POOL + 34


def main(target: str, trace: str | None = None) -> int:
    """Draw the file `trace`, or without it a trace of the demo, which runs for it, into `target`."""
    if trace is not None:
        Path(target).write_text(picture(json.loads(Path(trace).read_text("utf-8"))["traceEvents"]), "utf-8")
        return 0
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w") as nowhere:
        file = Path(folder) / "trace.json"
        silent = Console(file=nowhere)
        report = decode(demo_plan(trace_path=str(file)), silent, LineView(silent))
        return main(target, str(file)) or report.status


def picture(events: list[Event]) -> str:
    """Return the SVG of a trace's events."""
    events = sorted((event for event in events if "ts" in event), key=lambda event: float(event["ts"]))
    tracks = {group: [e["tid"] for e in events if e["ph"] in "XB" and e["pid"] == group] for group in (SLOTS, PAUSES)}
    end = max(event["ts"] + event.get("dur", 0) for event in events)
    sheet = Sheet(end, max(tracks[SLOTS]), max(tracks[PAUSES], default=0))
    labels = [
        *((f"slot {track - 1}", sheet.y(SLOTS, track)) for track in range(1, sheet.num_slots + 1)),
        *(("paused" if track == 1 else "", sheet.y(PAUSES, track)) for track in range(1, sheet.num_pauses + 1)),
    ]
    size = f'viewBox="0 0 {WIDTH} {sheet.height:.0f}"'
    title = text(18, 26, "What each slot did, step by step, while requests shared a KV pool too small for them")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="13">',
        f'<rect width="{WIDTH}" height="{sheet.height:.0f}" rx="8" fill="#ffffff"/>',
        f'<g font-size="15">{title}</g>',
        *legend(),
        *(text(LEFT - 10, y + 15, label, INK, "end") for label, y in labels),
        *axis(sheet),
        *slots(sheet, events),
        *pauses(sheet, events),
        *arrows(sheet, events),
        *ends(sheet, events),
        *pool(sheet, events),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, what: str, colour: str = INK, anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(what)}</text>'


def box(x: float, y: float, width: float, colour: str, title: str = "") -> str:
    """Return a bar of a track, with what a pointer over it is told."""
    about = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}">{about}</rect>'


def name(x: float, y: float, width: float, *candidates: str, colour: str = "#ffffff") -> list[str]:
    """Return the first of `candidates` that fits into a bar; none if none does."""
    return [text(x + 5, y + 15, what, colour) for what in candidates if len(what) * LETTER + 8 < width][:1]


def legend() -> list[str]:
    """Return what the colours mean."""
    parts, x = [], 18.0
    for what, colour in COLOURS.items():
        parts += [f'<rect x="{x:.1f}" y="42" width="13" height="13" rx="2" fill="{colour}"/>']
        parts += [text(x + 18, 53, what, INK)]
        x += 34 + len(what) * 6.6
    return [*parts, f'<circle cx="{x + 6:.1f}" cy="48.5" r="4" fill="{INK}"/>', text(x + 16, 53, "end", INK)]


def axis(sheet: Sheet) -> list[str]:
    """Return the seconds, at most ten of them."""
    bottom = sheet.pool + POOL
    step = next(size for size in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 600, 6000) if sheet.end / 1e6 / size <= 10)  # noqa: PLR2004
    parts = []
    for tick in range(int(sheet.end / 1e6 / step) + 1):
        x = sheet.x(tick * step * 1e6)
        parts += [f'<path d="M{x:.1f} {TOP - 6}V{bottom:.1f}" stroke="#eceff2"/>']
        parts += [text(x, bottom + 19, f"{tick * step:g} s", PALE, "middle")]
    return parts


def runs(events: list[Event]) -> list[Run]:
    """Join the slices of slots that go on from one step to the next."""
    newest: dict[int, Run] = {}
    joined = []
    for event in events:
        if event["ph"] != "X":
            continue
        args, track = event["args"], event["tid"]
        kind = "over-run" if args["over_run"] else event["cat"]
        run = newest.get(track)
        if run is None or (run.kind, run.request, run.last_step) != (kind, args["request"], args["step"] - 1):
            run = newest[track] = Run(kind, args["request"], track, args["step"], [])
            joined.append(run)
        run.last_step = args["step"]
        run.steps.append((event["ts"], event["ts"] + event["dur"]))
    return joined


def slots(sheet: Sheet, events: list[Event]) -> list[str]:
    """Return who was in which slot: bars, cuts where steps meet, and a name for each stay that is wide enough."""
    stays: list[list[Run]] = []
    newest: dict[int, list[Run]] = {}
    for run in runs(events):
        stay = newest.get(run.track)
        if stay is None or (stay[-1].request, stay[-1].last_step) != (run.request, run.last_step - len(run.steps)):
            stay = newest[run.track] = []
            stays.append(stay)
        stay.append(run)
    return [part for stay in stays for part in drawn_stay(sheet, stay)]


def drawn_stay(sheet: Sheet, stay: list[Run]) -> list[str]:
    """Return the runs of one request in a slot, one after another."""
    y, parts = sheet.y(SLOTS, stay[0].track), []
    for run in stay:
        x, right = sheet.x(run.steps[0][0]), sheet.x(run.steps[-1][1])
        cuts = "".join(f"M{sheet.x(began):.1f} {y:.1f}v{BAR}" for began, _ in run.steps)
        parts += [box(x, y, right - x, COLOURS[run.kind], f"{run.kind} {run.request}, {len(run.steps)} steps")]
        parts += [f'<path d="{cuts}" stroke="#ffffff" stroke-opacity="0.45" stroke-width="0.8"/>']
    x, right = sheet.x(stay[0].steps[0][0]), sheet.x(stay[-1].steps[-1][1])
    return [*parts, *name(x, y, right - x, stay[0].request or "")]


def pauses(sheet: Sheet, events: list[Event]) -> list[str]:
    """Return the pauses, each with whom it made room for where that is known and fits."""
    parts, begun = [], {}
    for event in events:
        if event["ph"] == "B":
            begun[event["tid"]] = event
        elif event["ph"] == "E":
            begin = begun.pop(event["tid"])
            args, y, x = begin["args"], sheet.y(PAUSES, begin["tid"]), sheet.x(begin["ts"])
            width, request = max(2.0, sheet.x(event["ts"]) - x), args["request"]
            made_room = request if args["parked_by"] is None else f"{request} for {args['parked_by']}"
            title = f"{made_room}: {args['by']}, {args['reason']}, {args['ahead_of_you']} ahead"
            parts += [box(x, y, width, COLOURS[f"paused by {args['by']}"], title)]
            parts += name(x, y, width, made_room, request, colour=INK)
    return parts


def arrows(sheet: Sheet, events: list[Event]) -> list[str]:
    """Return the ways from slots to pauses and back, where they end."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    parts = []
    for event in events:
        if event["ph"] == "f":
            x, start = sheet.x(event["ts"]), starts[event["id"]]
            tail, head = sheet.y(start["pid"], start["tid"]), sheet.y(event["pid"], event["tid"])
            down = head > tail
            tail, head, wing = (tail + BAR, head, -4) if down else (tail, head + BAR, 4)
            shape = f"M{x:.1f} {tail:.1f}V{head:.1f}m-3 {wing}l3 {-wing}l3 {wing}"
            parts += [f'<path d="{shape}" fill="none" stroke="{INK}" stroke-opacity="0.6"/>']
    return parts


def ends(sheet: Sheet, events: list[Event]) -> list[str]:
    """Return a mark where a request ended."""
    parts = []
    for event in events:
        if event["ph"] == "i" and event["s"] == "t":
            x, y = sheet.x(event["ts"]) - 5, sheet.y(event["pid"], event["tid"]) + BAR / 2
            title = f"<title>{escape(event['name'])}</title>"
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{INK}" stroke="#ffffff">{title}</circle>']
    return parts


def pool(sheet: Sheet, events: list[Event]) -> list[str]:
    """Return the pool: blocks that are held from below, then fenced, and free above."""
    counts = [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    if not counts:
        return []
    total, top, bottom = sum(counts[0][1].values()), sheet.pool, sheet.pool + POOL
    left, right = sheet.x(counts[0][0]), sheet.x(sheet.end)
    parts = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{POOL}" fill="{COLOURS["free"]}"/>'
    ]
    for kind, keys in (("fenced", ("held", "fenced")), ("blocks held", ("held",))):
        shape = f"M{left:.1f} {bottom:.1f}"
        for time, args in counts:
            level = bottom - POOL * sum(args[key] for key in keys) / total
            shape += f"H{sheet.x(time):.1f}V{level:.1f}"
        parts += [f'<path d="{shape}H{right:.1f}V{bottom:.1f}Z" fill="{COLOURS[kind]}"/>']
    parts += [text(LEFT - 10, top + 14, "pool", INK, "end")]
    parts += [text(LEFT - 10, top + 31, f"{total} blocks", PALE, "end")]
    return parts


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
