"""The layer below the engine: books, retry loop and parking around a model runner of your own.

The "model" adds up the tokens before it, read back from its KV pool: whatever got lost or mixed up would change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import reprieve as rp

VOCAB, BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 1000, 4, 12, 4


@dataclass
class DoneTicket:
    step: rp.Step
    result: rp.StepResult

    def ready(self) -> bool:
        return True

    def settle(self) -> rp.StepResult:
        return self.result


class AddingDevice:
    """A `reprieve.Device`: the next token is the sum of all tokens so far, modulo the vocabulary."""

    default_depth, kv_dtype, kv_shape, block_bytes = 1, "i32", (BLOCK_SIZE,), 4 * BLOCK_SIZE

    def __init__(self) -> None:
        self.pool = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.int32)
        self.tables = np.zeros((NUM_SLOTS, NUM_BLOCKS), np.int32)

    def launch(self, step: rp.Step) -> DoneTicket:
        slots, entries, blocks = step.table_changes.T
        self.tables[slots, entries] = blocks
        blocks = self.tables[np.repeat(step.slots, step.num_new), step.positions // BLOCK_SIZE]
        self.pool[blocks, step.positions % BLOCK_SIZE] = step.token_ids
        rows = zip(step.slots, step.kv_lengths, strict=True)
        sums = [self.pool[self.tables[slot]].reshape(-1)[:length].sum() for slot, length in rows]
        return DoneTicket(step, rp.StepResult(np.array(sums, np.int32) % VOCAB))

    def gather(self, blocks: Sequence[int]) -> np.ndarray:
        return self.pool[list(blocks)].view(np.uint8).reshape(-1)

    def scatter(self, blocks: Sequence[int], image: np.ndarray) -> None:
        self.pool[list(blocks)] = image.view(np.int32).reshape(-1, BLOCK_SIZE)

    def probe(self) -> None: ...
    def close(self) -> None: ...


def main() -> None:
    device = AddingDevice()
    books = rp.Ledger(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, context_length=64,
                      vocab_size=VOCAB, step_tokens=32, row_tile=8)  # fmt: skip
    parker = rp.Parker(books, device, rp.HostStore(6 * device.block_bytes), rp.NullListener())
    buffers, outcomes = rp.StepBuffers(books.step_shape()), np.zeros(NUM_SLOTS, np.uint8)
    answers: dict[int, list[int]] = {books.submit(range(n, n + 6), max_new_tokens=12): [] for n in range(5)}
    while books.num_live:
        parker.bring_in()
        try:
            if (ticket := rp.launch_with_preemption(books, device, parker, buffers)) is None:
                continue  # whoever was resident has ended: see who comes in
            result = rp.settle(books, device, ticket, outcomes)
        except rp.errors.StepAborted as failure:  # `DeviceLost` goes through: nothing can be computed any more
            rp.end_rows(parker, failure)
            continue
        for seq, token, outcome in zip(ticket.step.seqs, result.tokens, outcomes, strict=False):
            answers[int(seq)] += [int(token)] if outcome else []
        print(f"rows {ticket.step.seqs.tolist()}, waiting {books.waiting()}, {books.free_blocks} blocks free")
    print(*(f"{seq} {tokens}" for seq, tokens in answers.items()), sep="\n")


if __name__ == "__main__":
    main()
