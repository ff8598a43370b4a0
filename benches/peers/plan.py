"""What is compared: the duels, their cases, and how big the pools are."""

from __future__ import annotations

import ctypes.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from benches.peers.prepare import bf16_folder, f16_gguf

from reprieve.hub import demo_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Pool: TypeAlias = Literal["ample", "half"]

GRAIN: Final = 256
"""Positions to which llama.cpp rounds its KV cache up. Every pool is a multiple of it, and so the same for all."""

TO_SPARE: Final = 32
"""Positions of an ample pool for each sequence beyond those it needs: two blocks of 16, or one of vLLM's."""


@dataclass(frozen=True, slots=True)
class Duel:
    """Reprieve and one peer, on weights and KV of one kind. `model` gives the peer's file, made in a folder."""

    weights: str
    rounding: str
    kv: str
    peer: str
    worker: str
    model: Callable[[Path], Path]


DUELS: Final = (
    Duel("Q4_1", "file", "f16", "llama.cpp", "benches.peers.worker_llama_cpp", lambda _: demo_model()),
    Duel("F16", "f16", "f16", "llama.cpp", "benches.peers.worker_llama_cpp", f16_gguf),
    Duel("BF16", "bf16", "bf16", "vLLM", "benches.peers.worker_vllm", bf16_folder),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `halved` is how many sequences share the pool that holds half of what they need."""

    batches: tuple[int, ...]
    halved: int
    new_tokens: int
    pairs: int
    threads: int

    def cases(self) -> tuple[tuple[Pool, tuple[int, ...]], ...]:
        """Return each pool with its numbers of sequences, the ample one first: the other is compared with it."""
        return ("ample", self.batches), ("half", (self.halved,))

    def most_sequences(self, pool: Pool) -> int:
        """Return how many sequences decode at once at most."""
        return max(self.batches) if pool == "ample" else self.halved

    def positions(self, pool: Pool, prompts: Sequence[list[int]]) -> int:
        """Return the positions of a pool; half of what is needed is half to the nearest grain."""
        sharing = prompts[: self.most_sequences(pool)]
        needed = sum(len(prompt) + self.new_tokens for prompt in sharing)
        if pool == "half":
            return max(round(needed / 2 / GRAIN), 1) * GRAIN
        return rounded_up(needed + TO_SPARE * len(sharing))

    def context(self, prompts: Sequence[list[int]]) -> int:
        """Return the most positions of one sequence."""
        return rounded_up(max(map(len, prompts)) + self.new_tokens)


def rounded_up(positions: int) -> int:
    """Return the next multiple of the grain."""
    return -(-positions // GRAIN) * GRAIN


def environment(engine: str, threads: int, installed: Path, cache: Path) -> dict[str, str]:
    """Return the environment variables of an engine's worker. `installed` is the folder of the peers' environment.

    vLLM gets what its manual advises for a CPU, Intel's OpenMP and tcmalloc (where the system has it), and the settings
    of that OpenMP which it makes itself for an engine in another process: one thread a core, 5 ms of spinning.
    """
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if engine == "vLLM":
        openmp = installed / "lib" / "libiomp5.so"
        preloaded = [str(openmp)] if openmp.exists() else []
        preloaded += [name for name in [ctypes.util.find_library("tcmalloc_minimal")] if name]
        preloaded += filter(None, [os.environ.get("LD_PRELOAD")])  # what the user has there stays
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        settings |= {
            "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
            "KMP_BLOCKTIME": "5",
            "KMP_TPAUSE": "0",
            "LD_PRELOAD": ":".join(preloaded),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # gigabytes; the blocks are counted out by the worker
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "vllm" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
        }
    return settings
