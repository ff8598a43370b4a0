"""What a run gave: for people a table and a sentence, for programs JSON, and the exit status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from reprieve import __version__
from reprieve.cli.view import printable
from reprieve.request import DONE_REASONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reprieve.handle import Handle


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool of a run; `blocks_needed` hold all requests together at their full lengths."""

    blocks: int
    block_size: int
    blocks_needed: int


@dataclass(frozen=True, slots=True)
class Report:
    """A run that has ended.

    `requests` have all ended; `same_as_alone` says of each whether it ended in the same way with the same tokens when
    it ran alone, None where that was not tried. `seconds` were spent in `steps` steps, of which up to `depth` were in
    flight at once; `over_runs` of their rows were computed ahead and discarded.
    """

    model: str
    device: str
    threads: int
    weights: str
    kv: str
    host_kv_bytes: int
    pool: Pool
    depth: int
    steps: int
    over_runs: int
    seconds: float
    requests: Sequence[Handle]
    same_as_alone: Sequence[bool | None]

    @property
    def status(self) -> int:
        """The exit status: 1 if a request failed or differs from what it gives alone."""
        return int(bool(self.failed or self.different))

    @property
    def failed(self) -> list[Handle]:
        """The requests that could not go on to their end."""
        return [handle for handle in self.requests if handle.finish_reason not in DONE_REASONS]

    @property
    def different(self) -> list[Handle]:
        """The requests that differ from what they give alone."""
        return [handle for handle, same in zip(self.requests, self.same_as_alone, strict=True) if same is False]

    def to_json(self) -> dict[str, Any]:
        """Return everything, in types that JSON has."""
        generated = sum(len(handle.tokens) for handle in self.requests)
        return {
            "version": __version__,
            "model": self.model,
            "device": self.device,
            "threads": self.threads,
            "weights": self.weights,
            "kv": self.kv,
            "host_kv_bytes": self.host_kv_bytes,
            "pool": {
                "blocks": self.pool.blocks,
                "block_size": self.pool.block_size,
                "blocks_needed": self.pool.blocks_needed,
            },
            "depth": self.depth,
            "steps": self.steps,
            "over_runs": self.over_runs,
            "decode_tokens_per_s": generated / self.seconds if self.seconds else 0.0,
            "requests": [
                _request_json(handle, same) for handle, same in zip(self.requests, self.same_as_alone, strict=True)
            ],
        }

    def table(self) -> Table:
        """Return a row per request."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("request", overflow="fold")
        for heading in ("tokens", "ended\nby", "parks by\nspill", "parks by\nreplay", "tokens\nreplayed"):
            table.add_column(heading, justify="left" if heading == "ended\nby" else "right")
        table.add_column("longest\npause", justify="right")
        table.add_column("same as\nalone")
        for handle, same in zip(self.requests, self.same_as_alone, strict=True):
            stats = handle.stats
            table.add_row(
                Text(printable(handle.id)),
                str(len(handle.tokens)),
                str(handle.finish_reason),
                str(stats.parks_by_spill),
                str(stats.parks_by_replay),
                str(stats.tokens_replayed),
                f"{stats.longest_pause_s:.2f} s",
                _ANSWERS[same],
            )
        return table

    def sentence(self) -> str:
        """Say in one sentence what happened."""
        total = len(self.requests)
        spills = sum(handle.stats.parks_by_spill for handle in self.requests)
        replays = sum(handle.stats.parks_by_replay for handle in self.requests)
        said = f"{spills} parks by spill and {replays} by replay in {self.steps} steps"
        if self.over_runs:
            said += f" with {self.over_runs} over-runs"
        if self.failed:
            names = ", ".join(f"{printable(handle.id)} ({handle.finish_reason})" for handle in self.failed)
            said += f"; {len(self.failed)} of {total} failed: {names}"
        if self.different:
            names = ", ".join(printable(handle.id) for handle in self.different)
            said += f"; {len(self.different)} of {total} differ from what they give alone: {names}"
        elif all(self.same_as_alone):
            said += f"; every answer ({total} of {total}) equals the one that its request gives alone"
        return f"{said}."


_ANSWERS = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("-", "dim")}


def _request_json(handle: Handle, same_as_alone: bool | None) -> dict[str, Any]:
    stats = handle.stats
    return {
        "id": handle.id,
        "prompt_tokens": list(handle.prompt_tokens),
        "tokens": list(handle.tokens),
        "text": handle.text,
        "finish_reason": handle.finish_reason,
        "parks": {"spill": stats.parks_by_spill, "replay": stats.parks_by_replay},
        "replayed_tokens": stats.tokens_replayed,
        "spilled_bytes": stats.spilled_bytes,
        "over_runs": stats.over_runs,
        "longest_pause_s": stats.longest_pause_s,
        "same_as_alone": same_as_alone,
    }
