"""Measures one decode step in the books through Python: pick, reserve, fill, commit.

Also with another step in flight meanwhile, and with a pause in each step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import pytest

from reprieve._native import Ledger
from reprieve.step import StepBuffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

    from reprieve.request import ParkBy

BLOCK_SIZE = 16
WINDOW = 512  # steps measured; positions advance by as many
SPILL_BLOCKS = 2**31


class Decoding:
    """Books in which `residents` sequences decode from about `positions` on."""

    def __init__(self, residents: int, positions: int) -> None:
        most = positions + WINDOW + 16
        self.books = Ledger(
            num_blocks=residents * (most // BLOCK_SIZE + 3),
            block_size=BLOCK_SIZE,
            num_slots=residents,
            context_length=most,
            vocab_size=50_000,
            step_tokens=residents + most,
            row_tile=8,
        )
        self.buffers = StepBuffers(self.books.step_shape())
        self.tokens = np.full(residents, 7, np.int32)
        self.outcomes = np.zeros(residents, np.uint8)
        self.in_flight: deque[int] = deque()  # rows of each step in flight
        prompt = [1] * positions
        seqs = [self.books.submit(prompt, stop_token_ids=[2]) for _ in range(residents)]
        for seq in seqs:  # one at a time, spilled in between, so that nobody gets ahead of the others
            self.books.admit(seq)
            self.step()
            self.books.park(seq, "spill")
        for seq in seqs:
            self.books.admit(seq)

    def launch(self) -> None:
        """Put the next step in flight."""
        self.in_flight.append(self.books.rows())
        self.books.reserve()
        self.books.fill(self.buffers)

    def step(self) -> None:
        """Launch one step and settle the oldest, which is another one if one was in flight."""
        self.launch()
        self.books.commit(self.tokens[: self.in_flight.popleft()], self.outcomes)

    def step_with_pause(self, by: ParkBy) -> None:
        """Park the victim that a shortage would choose, let it in again, and do one step."""
        books = self.books
        spill_blocks = SPILL_BLOCKS if by == "spill" else 0
        victim = books.victim(spill_blocks)
        assert isinstance(victim, int)
        books.park(victim, by)
        plan = books.next_arrival(spill_blocks)
        assert plan is not None
        books.admit(plan.seq)
        self.step()


def measure(benchmark: BenchmarkFixture, step: Callable[[], None]) -> None:
    """Run `step` WINDOW times, and once where benchmarks are disabled."""
    # The fixture's method has no annotations.
    benchmark.pedantic(step, rounds=WINDOW - 8, warmup_rounds=8)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("positions", [1_024, 32_768])
@pytest.mark.parametrize("residents", [32, 256, 1_024])
def test_decode_step(benchmark: BenchmarkFixture, residents: int, positions: int, depth: int) -> None:
    decoding = Decoding(residents, positions)
    for _ in range(depth - 1):
        decoding.launch()
    measure(benchmark, decoding.step)
    assert (decoding.outcomes == 1).all()  # everybody got a token in the last step
    decoding.books.check()


@pytest.mark.parametrize("by", ["spill", "replay"])
@pytest.mark.parametrize("positions", [1_024, 32_768])
@pytest.mark.parametrize("residents", [32, 256, 1_024])
def test_decode_step_with_a_pause(benchmark: BenchmarkFixture, residents: int, positions: int, by: ParkBy) -> None:
    decoding = Decoding(residents, positions)
    measure(benchmark, lambda: decoding.step_with_pause(by))
    # By replay the victim computes its history and gets no token.
    assert (decoding.outcomes == 1).sum() == residents - (by == "replay")
    benchmark.extra_info["victim_blocks"] = len(decoding.books.block_table(decoding.books.residents()[0]))
    decoding.books.check()
