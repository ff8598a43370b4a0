"""Compares steps in flight on the CPU device with a real model: `make bench-depths`.

For each batch, with 1, 2 and 3 steps in flight, in turn, several times over:

    tokens    generated tokens per second, end to end
    gap       microseconds between the end of one step on the device and the beginning of the next: a step's time from
              outside, less what the device's own threads took for it
    host      microseconds a step in the books and in launching, which run-ahead hides

A number is the median over all rounds, a ratio the median of the ratios of each round to its run with depth 1. Prompts
have 64 random tokens, the KV pool is ample, nobody ends early. `--over-runs` adds what ends cost: requests that stop at
a surprise after 24 tokens on average (prompts of 16), so that steps in flight are computed for nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

from benches.decode import device_of, random_prompt
from rich.console import Console
from rich.progress import Progress

from reprieve import Engine, Request, load

if TYPE_CHECKING:
    from reprieve import Handle, LoadedModel

DEPTHS: Final = (1, 2, 3)
PROMPT: Final = 64
SHORT: Final = 16


@dataclass
class Runs:
    """What the rounds of one batch and depth came to, one number each."""

    batch: int
    depth: int
    tokens: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    with_ends: list[float] = field(default_factory=list)


def engine_of(model: LoadedModel, runs: Runs) -> Engine:
    """Return an engine in which `batch` sequences never want for anything."""
    blocks = runs.batch * 24 + 8
    return Engine(model, kv_blocks=blocks, block_size=16, max_slots=runs.batch, depth=runs.depth)


def measure(model: LoadedModel, runs: Runs, steps: int) -> None:
    """Add one round: `steps` steps in which every sequence gets a token."""
    with engine_of(model, runs) as engine:
        budget = steps + runs.batch * PROMPT // 64 + 16
        handles = [
            engine.submit(Request(random_prompt(PROMPT, seed), max_new_tokens=budget, ignore_eos=True))
            for seed in range(runs.batch)
        ]
        while not all(len(handle.tokens) > 1 for handle in handles):
            engine.step()
        engine.drain()
        stats, device = engine.stats, device_of(engine)
        before = (
            stats.steps,
            stats.books_s + stats.launch_s,
            sum(device.op_seconds().values()),
            stats.tokens_generated,
        )
        begin = perf_counter()
        for _ in range(steps):
            engine.step()
        engine.drain()
        seconds = perf_counter() - begin
        num_steps = stats.steps - before[0]
        inside = sum(device.op_seconds().values()) - before[2]
        runs.tokens.append((stats.tokens_generated - before[3]) / seconds)
        runs.gap.append((seconds - inside) / num_steps * 1e6)
        runs.host.append((stats.books_s + stats.launch_s - before[1]) / num_steps * 1e6)
        assert not any(handle.is_finished for handle in handles), "every step had every sequence"


def measure_ends(model: LoadedModel, runs: Runs) -> None:
    """Add one round of requests of which each ends when nobody expects it, and another comes in."""
    lengths = random.Random(runs.batch)
    budgets = [lengths.randint(8, 40) for _ in range(2 * runs.batch)]
    with engine_of(model, runs) as engine:
        begin = perf_counter()
        waiting = list(enumerate(budgets))
        live: dict[Handle, int] = {}
        while waiting or live:
            while waiting and len(live) < runs.batch:
                index, budget = waiting.pop()
                request = Request(random_prompt(SHORT, index), max_new_tokens=256, ignore_eos=True)
                live[engine.submit(request)] = budget
            engine.step()
            for handle in [handle for handle, budget in live.items() if len(handle.tokens) >= budget]:
                engine.cancel(handle)  # as an end-of-sequence id would end it
                del live[handle]
        engine.drain()
        runs.with_ends.append(sum(budgets) / (perf_counter() - begin))


def report(all_runs: list[Runs], console: Console) -> None:
    """Print what was measured as a table that README can take."""
    first = {runs.batch: runs for runs in all_runs if runs.depth == 1}
    console.print("| batch | depth | tokens/s | to depth 1 | gap, µs | host, µs | tokens/s with ends | to depth 1 |")
    console.print("|---" * 8 + "|")
    for runs in all_runs:
        base = first[runs.batch]
        cells = [str(runs.batch), str(runs.depth), f"{median(runs.tokens):.0f}", ratio(runs.tokens, base.tokens)]
        cells += [f"{median(runs.gap):.0f}", f"{median(runs.host):.0f}"]
        cells += (
            [f"{median(runs.with_ends):.0f}", ratio(runs.with_ends, base.with_ends)] if runs.with_ends else ["", ""]
        )
        console.print(f"| {' | '.join(cells)} |")


def ratio(values: list[float], base: list[float]) -> str:
    """Return the median of the rounds' ratios."""
    return f"{median(value / other for value, other in zip(values, base, strict=True)):.3f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a case each time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads that compute; fewer than cores leave one for the host")
    parser.add_argument("--over-runs", action="store_true", help="also measure requests that end at a surprise")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    options = parser.parse_args()
    model = load("demo", device="cpu", threads=options.threads)
    all_runs = [Runs(batch, depth) for batch in options.batches for depth in DEPTHS]
    with Progress(console=Console(stderr=True)) as progress:
        work = progress.add_task("measuring", total=options.rounds * len(all_runs))
        for _ in range(options.rounds):
            for runs in all_runs:
                progress.update(work, description=f"batch {runs.batch}, depth {runs.depth}")
                measure(model, runs, options.steps)
                if options.over_runs:
                    measure_ends(model, runs)
                progress.advance(work)
    console = Console(width=200, highlight=False)
    console.print(f"{model.threads} of {os.cpu_count()} cores compute, weights as in the file\n")
    report(all_runs, console)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(runs) for runs in all_runs], indent=1), "utf-8")


if __name__ == "__main__":
    main()
