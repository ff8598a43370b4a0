"""Books of a tiny pool, whole steps on them, and all that can be seen of them: for the tests of the binding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from reprieve._native import Ledger
from reprieve.step import StepBuffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

SETTINGS: dict[str, Any] = {
    "num_blocks": 8,
    "block_size": 4,
    "num_slots": 3,
    "context_length": 64,
    "vocab_size": 128,
    "step_tokens": 16,
    "row_tile": 8,
}
# What the books write; masks are added to a step by others.
FIELDS = tuple(field for field in StepBuffers.__slots__ if field not in {"mask_rows", "masks"})


def ledger(**settings: Any) -> Ledger:
    return Ledger(**SETTINGS | settings)


def buffers(books: Ledger, **arrays: Any) -> Any:
    """Buffers that fit every step, some of them replaced."""
    whole = StepBuffers(books.step_shape())
    return SimpleNamespace(**{field: getattr(whole, field) for field in FIELDS} | arrays)


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def admitted(books: Ledger, *lengths: int, **request: Any) -> list[int]:
    seqs = [books.submit([1] * length, **request) for length in lengths]
    for seq in seqs:
        books.admit(seq)
    return seqs


def launch(books: Ledger) -> Any:
    """Pick, reserve and fill; return the buffers, cut to what was used."""
    books.rows()
    books.reserve()
    filled = buffers(books)
    rows, tokens, table_changes, bans = books.fill(filled)
    used = dict.fromkeys(FIELDS, rows) | {"token_ids": tokens, "positions": tokens, "table_changes": table_changes}
    used["bans"] = bans
    return SimpleNamespace(**{field: getattr(filled, field)[:count].tolist() for field, count in used.items()})


def step(books: Ledger, *tokens: int) -> list[int]:
    """Do a whole step with these tokens; return the outcomes."""
    launch(books)
    return settle(books, *tokens)


def settle(books: Ledger, *tokens: int) -> list[int]:
    """Settle the oldest step in flight, a token for each row; return the outcomes."""
    rows = len(tokens)
    outcomes = np.full(rows + 2, 99, np.uint8)
    books.commit(ids(*tokens), outcomes)
    assert outcomes[rows:].tolist() == [99, 99]
    books.check()
    told: list[int] = outcomes[:rows].tolist()
    return told


def snapshot(books: Ledger) -> list[object]:
    """All that can be seen of the books."""
    looks = (books.state, books.tokens, books.committed, books.generated, books.slot, books.block_table)
    more = (books.image_blocks, books.can_replay, books.is_immune)
    live = [*books.residents(), *books.waiting()]
    each = [[look(seq) for look in (*looks, *more)] for seq in live]
    counts = (books.free_blocks, books.fenced_blocks, books.free_slots, books.num_live, books.num_blocks)
    return [live, each, counts, books.num_in_flight]
