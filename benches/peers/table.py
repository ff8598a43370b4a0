"""The table that README shows, made from what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benches.peers.protocol import Measurement

HEAD = (
    "| weights | sequences | KV pool | reprieve | peer | reprieve to peer |",
    "|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Side:
    """What one engine did in one case: a measurement of each pair, or why there is none.

    `ample` are the tokens of its first run of as many sequences in the ample pool, None if there was none.
    """

    engine: str
    runs: tuple[Measurement, ...]
    ample: list[list[int]] | None = None
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether each run gave all tokens that were asked for."""
        return bool(self.runs) and not self.error and not any(run.stopped for run in self.runs)

    @property
    def agrees(self) -> bool:
        """Whether every run gave the tokens that an ample pool gave, as far as it came."""
        return all(
            had == of_ample[: len(had)]
            for run in self.runs
            for had, of_ample in zip(run.tokens, self.ample or run.tokens, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One case: reprieve and a peer in turn, the run `i` of each made one after the other."""

    weights: str
    sequences: int
    new_tokens: int
    pool: Literal["ample", "half"]
    reprieve: Side
    peer: Side

    @property
    def ratio(self) -> float | None:
        """The median of the pairs' ratios of end-to-end rates; None where one side did not finish."""
        if not (self.reprieve.is_complete and self.peer.is_complete):
            return None
        pairs = zip(self.reprieve.runs, self.peer.runs, strict=True)
        return median(ours.rate / theirs.rate for ours, theirs in pairs)


def markdown(rows: Iterable[Row]) -> str:
    """Return the table, plain enough to be pasted."""
    return "\n".join([*HEAD, *map(_line, rows)])


def numbers(row: Row) -> dict[str, Any]:
    """Return all that was measured of a row but the tokens, of which only counts are kept."""

    def side(side: Side) -> dict[str, Any]:
        runs = [
            {
                "tokens_per_s": run.rate,
                "decode_tokens_per_s": run.decode_rate,
                "seconds": run.seconds,
                "tokens": list(map(len, run.tokens)),
                "parks": run.parks,
                "stopped": run.stopped,
                "idle_share": run.idle_share,
            }
            for run in side.runs
        ]
        return {"engine": side.engine, "error": side.error, "same_tokens": side.agrees, "runs": runs}

    agreed = None
    if row.reprieve.runs and row.peer.runs:
        agreed = shared_beginning(row.reprieve.runs[0].tokens, row.peer.runs[0].tokens)
    return {
        "weights": row.weights,
        "sequences": row.sequences,
        "pool": row.pool,
        "ratio": row.ratio,
        "engines_agree_up_to": agreed,
        "reprieve": side(row.reprieve),
        "peer": side(row.peer),
    }


def shared_beginning(left: Sequence[list[int]], right: Sequence[list[int]]) -> float:
    """Return the share of the tokens up to which two engines agree: 1 if they agree in all of them."""
    agreed = sum(_agreed(ours, theirs) for ours, theirs in zip(left, right, strict=True))
    return agreed / max(sum(map(len, left)), 1)


def _agreed(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(left), len(right)))


def _line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.1f}"
    cells = (row.weights, row.sequences, row.pool, _cell(row.reprieve, row), _cell(row.peer, row), ratio)
    return f"| {' | '.join(map(str, cells))} |"


def _cell(side: Side, row: Row) -> str:
    """Say the end-to-end rate, the decode rate in brackets, and what befell the sequences."""
    name = "" if side is row.reprieve else f"{side.engine} "
    if side.error or not side.runs:
        return f"{name}did not run: {side.error}".replace("|", "/")
    if not side.is_complete:
        return name + _stop(side.runs[-1], row.new_tokens)
    decode = [run.decode_rate for run in side.runs if run.decode_rate is not None]
    said = f"{name}{median(run.rate for run in side.runs):.0f}" + (f" ({median(decode):.0f})" if decode else "")
    if row.pool == "ample":
        return said if side.agrees else f"{said}; tokens vary from run to run"
    parks = median(run.parks for run in side.runs)
    counted = f"{parks:g} {'park' if parks == 1 else 'parks'}"
    return f"{said}; {counted}; same tokens: {'yes' if side.agrees else 'no'}"


def _stop(run: Measurement, new_tokens: int) -> str:
    """Say how far a run came that did not give all its tokens."""
    counts = sorted({len(had) for had in run.tokens})
    of_each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"stops after {of_each} of {new_tokens} tokens each: {run.stopped}"
