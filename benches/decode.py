"""Measures the CPU device with a real model, end to end, against what this machine can do: `make bench-cpu`.

In one run, after the machine's own rates (reading memory, and NumPy's matrix product on as many threads):

    decode    generated tokens per second at batch 1, 4, 8, 16 and 32, for each type of weights
    read      bytes of weights that a second's steps read, as a share of the measured rate
    where     shares of the step's time in products, attention, the rest of the device, and all else (books, events)
    prefill   prompt tokens per second in passes of 128 and 512 tokens, as a share of the measured product rate

    memory    what a process holds once the model is loaded and has decoded, beyond its weights and its KV pool

A number is the median of all steps of its case; cases are run in turn, several times over, so that what disturbs the
machine for a while does not fall on one of them alone. Prompts have 64 random tokens, the KV pool is ample.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from rich.console import Console
from rich.progress import Progress
from threadpoolctl import threadpool_limits

from encoded import encode, with_matrices
from reprieve import Engine, Request, load
from reprieve.device.cpu import CpuDevice, checked_threads
from reprieve.hub import demo_model
from reprieve.loading import from_weights
from reprieve.model import load_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve import LoadedModel
    from reprieve.model.weights import Rounding

PROMPT: Final = 64
TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
GIGA: Final = 1e9


@dataclass(frozen=True)
class Machine:
    """What the machine can do: bytes read per second, and float32 operations per second in a product of matrices."""

    read: float
    product: float

    @classmethod
    def measured(cls, threads: int) -> Machine:
        """Measure with `threads` threads: 1 GiB read five times, and a product of two matrices of 3072."""
        memory = np.ones(2**28, np.float32)
        parts = np.array_split(memory, threads)
        with ThreadPoolExecutor(threads) as pool:
            read = best_of(5, lambda: list(pool.map(np.max, parts)))
        square = np.random.default_rng(0).standard_normal((3072, 3072), np.float32)
        with threadpool_limits(threads):
            product = best_of(5, lambda: square @ square)
        return cls(memory.nbytes / read, 2 * 3072**3 / product)


def best_of(times: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run: what the machine can do when nobody disturbs it."""
    seconds = []
    for _ in range(times):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return min(seconds)


@dataclass
class Decode:
    """Steps of one type of weights and one batch."""

    batch: int
    seconds: list[float] = field(default_factory=list)
    inside: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.batch / median(self.seconds)

    def shares(self) -> tuple[float, float, float, float]:
        """Return the shares of products, attention, the rest of the device, and all else."""
        total = sum(self.seconds)
        device = sum(self.inside.values())
        linear, attention = self.inside["linear"], self.inside["attention"]
        rest = device - linear - attention
        return linear / total, attention / total, rest / total, 1 - device / total


@dataclass
class Case:
    """A loaded model and what was measured with it."""

    kind: str
    model: LoadedModel
    weight_bytes: int
    load_seconds: float
    extra_bytes: int | None
    decodes: list[Decode]
    prefills: dict[int, list[float]]


def loaded(kind: str, decodes: list[Decode], passes: list[int]) -> Case:
    """Load the demo's model with weights of one type."""
    model, seconds = model_of(kind)
    with engine_of(model, 1) as engine:
        num_bytes = device_of(engine).weight_bytes
    return Case(kind, model, num_bytes, seconds, extra_memory(kind), decodes, {tokens: [] for tokens in passes})


def model_of(kind: str) -> tuple[LoadedModel, float]:
    """Load the demo's model with weights of one type; what the file does not have is encoded first, and not timed."""
    begin = perf_counter()
    if kind in {"F32", "F16", "BF16"}:
        model = load("demo", device="cpu", weights=cast("Rounding", kind.lower()))
    elif kind == "Q4_1":
        model = load("demo", device="cpu")
    else:
        opened = load_model(demo_model())
        weights = with_matrices(opened.weights, lambda tensor: encode(tensor, kind))
        begin = perf_counter()
        model = from_weights(kind, opened.config, weights, device="cpu")
    return model, perf_counter() - begin


def extra_memory(kind: str) -> int | None:
    """Return the bytes that a process of its own holds beyond the weights and the pool, once it has decoded.

    None for types that the file does not have: encoding them leaves its traces in the memory.
    """
    if kind in {"Q8_0", "Q4_0"}:
        return None
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(extra_memory_here, kind).result()


def extra_memory_here(kind: str) -> int:
    """Load the model in this process, decode with it, and return what that took beyond the weights and the pool."""
    before = resident_bytes()
    model = model_of(kind)[0]
    # Eight sequences of 72 positions use up five blocks each, so that all of the pool is there.
    with Engine(model, kv_blocks=40, block_size=16, max_slots=8, head_room=0) as engine:
        for seed in range(8):
            engine.submit(Request(random_prompt(PROMPT, seed), max_new_tokens=8, ignore_eos=True))
        engine.run()
        device = device_of(engine)
        return resident_bytes() - before - device.weight_bytes - device.num_blocks * device.block_bytes


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds, those of files not counted."""
    status = Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def engine_of(model: LoadedModel, batch: int, step_tokens: int = 128) -> Engine:
    """Return an engine in which `batch` sequences of 640 positions never want for anything."""
    return Engine(model, kv_blocks=batch * 40 + 8, block_size=16, max_slots=batch, step_tokens=step_tokens)


def device_of(engine: Engine) -> CpuDevice:
    """Return the CPU device of `engine`."""
    device: Any = engine._device
    assert isinstance(device, CpuDevice)
    return device


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    """Return `length` random token ids."""
    return tuple(np.random.default_rng([length, seed]).integers(0, 49_000, length).tolist())


def measure_decode(case: Case, decode: Decode, steps: int) -> None:
    """Add `steps` decode steps, timed from outside the engine."""
    with engine_of(case.model, decode.batch) as engine:
        # The first go on decoding while the last are prefilled, a token in each step.
        budget = steps + decode.batch * PROMPT // 64 + 8
        handles = [
            engine.submit(Request(random_prompt(PROMPT, seed), max_new_tokens=budget, ignore_eos=True))
            for seed in range(decode.batch)
        ]
        while not all(handle.tokens for handle in handles):
            engine.step()
        before = device_of(engine).op_seconds()
        for _ in range(steps):
            begin = perf_counter()
            engine.step()
            decode.seconds.append(perf_counter() - begin)
        assert not any(handle.is_finished for handle in handles), "every step had every sequence"
        for kind, seconds in device_of(engine).op_seconds().items():
            decode.inside[kind] = decode.inside.get(kind, 0.0) + seconds - before[kind]


def measure_prefill(case: Case, tokens: int) -> None:
    """Add the prefill of one prompt in one pass of `tokens` tokens."""
    with engine_of(case.model, 1, step_tokens=tokens) as engine:
        engine.submit(Request(random_prompt(tokens, 0), max_new_tokens=1, ignore_eos=True))
        begin = perf_counter()
        engine.step()
        case.prefills[tokens].append(perf_counter() - begin)


def product_operations(model: LoadedModel, tokens: int) -> float:
    """Return the float32 operations of the products of a pass of `tokens` tokens, of which one is read back."""
    config = model.config
    width = config.head_size * (2 * config.num_heads + 2 * config.num_kv_heads) + 3 * config.intermediate_size
    return 2.0 * config.hidden_size * (tokens * config.num_layers * width + config.vocab_size)


def report(machine: Machine, cases: list[Case], console: Console) -> None:
    """Print what was measured, as tables that README can take."""
    threads = cases[0].model.threads
    console.print(
        f"{platform.processor() or platform.machine()}, {threads} threads: memory is read at "
        f"{machine.read / GIGA:.1f} GB/s, NumPy multiplies matrices at {machine.product / GIGA:.0f} GFLOP/s.\n"
    )
    batches = [decode.batch for decode in cases[0].decodes]
    console.print(
        "| weights | MB | load | " + " | ".join(f"batch {batch}" for batch in batches) + " | read at batch 1 |"
    )
    console.print("|---" * (len(batches) + 4) + "|")
    for case in cases:
        rates = " | ".join(f"{decode.rate:.0f}" for decode in case.decodes)
        read = case.weight_bytes * case.decodes[0].rate / case.decodes[0].batch
        console.print(
            f"| {case.kind} | {case.weight_bytes / 1e6:.0f} | {case.load_seconds:.1f} s | {rates} "
            f"| {read / GIGA:.1f} GB/s, {read / machine.read:.0%} |"
        )
    console.print("\n| weights, batch | products | attention | rest of the device | books and all else |")
    console.print("|---|---|---|---|---|")
    for case in cases:
        for decode in case.decodes:
            shares = " | ".join(f"{share:.1%}" for share in decode.shares())
            console.print(f"| {case.kind}, {decode.batch} | {shares} |")
    console.print(
        "\n| weights | " + " | ".join(f"prefill in passes of {tokens}" for tokens in cases[0].prefills) + " |"
    )
    console.print("|---" * (1 + len(cases[0].prefills)) + "|")
    for case in cases:
        cells = []
        for tokens, seconds in case.prefills.items():
            rate = product_operations(case.model, tokens) / median(seconds)
            cells.append(f"{tokens / median(seconds):.0f} tokens/s, {rate / machine.product:.0%} of NumPy's rate")
        console.print(f"| {case.kind} | {' | '.join(cells)} |")
    console.print("\n| weights | memory beyond the weights, the KV pool and what Python held before |")
    console.print("|---|---|")
    for case in cases:
        if case.extra_bytes is not None:
            console.print(f"| {case.kind} | {case.extra_bytes / 1e6:.0f} MB |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--types", nargs="+", default=list(TYPES), choices=TYPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--passes", nargs="+", type=int, default=[128, 512], help="tokens of a prefill's pass")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a case each time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    options = parser.parse_args()
    machine = Machine.measured(checked_threads(None))
    with Progress(console=Console(stderr=True)) as progress:
        work = progress.add_task("loading", total=len(options.types) * (1 + options.rounds))
        cases = []
        for kind in options.types:
            cases.append(loaded(kind, [Decode(batch) for batch in options.batches], options.passes))
            progress.advance(work)
        for number in range(options.rounds):
            for case in cases:
                progress.update(work, description=f"{case.kind}, round {number + 1} of {options.rounds}")
                for decode in case.decodes:
                    measure_decode(case, decode, options.steps)
                for tokens in case.prefills:
                    measure_prefill(case, tokens)
                progress.advance(work)
    report(machine, cases, Console(width=200, highlight=False))
    if options.json is not None:
        results = [
            {"weights": case.kind, "bytes": case.weight_bytes, "load_seconds": case.load_seconds}
            | {"extra_bytes": case.extra_bytes}
            | {"decode": {decode.batch: asdict(decode) for decode in case.decodes}, "prefill": case.prefills}
            for case in cases
        ]
        measured = {"cores": os.cpu_count(), "machine": asdict(machine), "cases": results}
        options.json.write_text(json.dumps(measured, indent=1), "utf-8")


if __name__ == "__main__":
    main()
