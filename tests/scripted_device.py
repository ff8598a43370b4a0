"""A device in NumPy that settles late, reads its inputs late, fails on command, and watches over fences and buffers."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np

from reprieve.errors import RowFailed
from reprieve.step import FROM_FEED, READ_ARGMAX, TOKEN_ALL_NAN, TOKEN_NOT_READ, Step, StepResult
from scripted_oracle import next_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from scripted_holdings import Call, Settings

GARBAGE = 0xDEADBEEF


class ScriptedTicket:
    """Computes when it is settled, from the very buffers that it was launched with; `held` are the blocks it names.

    With `computed` it was computed at launch already. It may be settled once, and again only after an interrupt.
    """

    def __init__(self, device: ScriptedDevice, step: Step, held: dict[tuple[int, int], set[int]]) -> None:
        self.device = device
        self.step = step
        self.held = held
        self.computed: NDArray[np.int32] | None = None
        self.is_settled = False
        self.copies = [np.array(getattr(step, field.name)) for field in fields(Step)]

    def ready(self) -> bool:
        return self.device.is_ready(self)

    def settle(self) -> StepResult:
        device = self.device
        if self.is_settled:
            device.settled_again += 1
            raise RuntimeError("this ticket is settled already")
        if device.unsettled[0] is not self:
            device.violations.append("settled out of order")
        for field, copy in zip(fields(Step), self.copies, strict=True):
            if not np.array_equal(getattr(self.step, field.name), copy):
                device.violations.append(f"{field.name} was overwritten before its step was settled")
        try:
            device.called("settle", self.step)
            computed = device.compute(self.step) if self.computed is None else self.computed
        except Exception:
            device.settled(self)
            raise
        device.settled(self)
        return StepResult(device.answer(computed))


class ScriptedDevice:
    """Raises whatever `fault(call, nth)` returns, `nth` counting from 0 for each kind of call.

    A call that fails leaves as much damage behind as a device may: garbage in the positions and the feed cells of its
    step, half an image. `row_faults` are for (sequence, position): a row that has the position fails at launch; with
    None in place of an error, its logits are NaN. `answer` may replace the tokens that a step reads back. What the
    caller must not do is written into `violations`.
    """

    kv_dtype = "u32"
    default_depth = 1

    def __init__(self, calls: list[Call], settings: Settings, *, computes_at_launch: bool = False) -> None:
        self.calls = calls
        self.counts: Counter[str] = Counter()
        self.fault: Callable[[str, int], BaseException | None] = lambda call, nth: None
        self.row_faults: dict[tuple[int, int], str | None] = {}
        self.answer: Callable[[NDArray[np.int32]], NDArray[np.int32]] = lambda tokens: tokens
        self.is_ready: Callable[[ScriptedTicket], bool] = lambda ticket: computes_at_launch
        self.computes_at_launch = computes_at_launch
        self.violations: list[str] = []
        self.watches_fences = True
        self.block_size = settings.block_size
        self.pool = np.full((settings.num_blocks, settings.block_size, 2), GARBAGE, np.uint32)
        self.feed = np.full(settings.max_slots, -1, np.int64)
        # Block tables as they are when a step is computed, and as they are when it is launched.
        self.tables = np.full((settings.max_slots, settings.num_blocks), -1, np.int64)
        self.tables_ahead = self.tables.copy()
        self.begun = [0] * settings.max_slots  # how many sequences began in each slot, as of the last launch
        self.unsettled: list[ScriptedTicket] = []
        self.settled_again = 0
        self.launched: list[list[int]] = []

    @property
    def block_bytes(self) -> int:
        return self.block_size * 8

    @property
    def kv_shape(self) -> tuple[int, ...]:
        return (self.block_size, 2)

    def called(self, call: str, step: Step | None = None, *what: object) -> None:
        """Record a call, and fail if the script says so."""
        nth = self.counts[call]
        self.counts[call] += 1
        self.calls.append((call, *what))
        if (error := self.fault(call, nth)) is not None:
            if step is not None:
                self._spoil(step)
            if step is not None and call == "settle":
                self._apply_table_changes(step)
                self.feed[step.slots] = 13  # any token
            raise error

    # Steps.

    def launch(self, step: Step) -> ScriptedTicket:
        self.launched.append(step.slots.tolist())
        self._watch_table_changes(step)
        held = self._named(step)
        self._watch_fences(step, held)
        self.called("launch", step, *step.seqs.tolist())
        for index, (seq, start, end) in enumerate(zip(step.seqs, step.starts, step.kv_lengths, strict=True)):
            for position in range(start, end):
                code = self.row_faults.get((int(seq), position))
                if code is not None:
                    self._spoil(step)
                    raise RowFailed(index, code)
        ticket = ScriptedTicket(self, step, held)
        if self.computes_at_launch:
            ticket.computed = self.compute(step)
        self.unsettled.append(ticket)
        return ticket

    def settled(self, ticket: ScriptedTicket) -> None:
        ticket.is_settled = True
        self.unsettled = [other for other in self.unsettled if other is not ticket]

    def compute(self, step: Step) -> NDArray[np.int32]:
        self._put(step)
        tokens = np.full(step.num_rows, TOKEN_NOT_READ, np.int32)
        masks = dict(zip(step.mask_rows.tolist(), step.masks, strict=True))
        for index in np.flatnonzero(step.readback == READ_ARGMAX).tolist():
            length, slot = int(step.kv_lengths[index]), step.slots[index]
            blocks = self.tables[slot, : -(-length // self.block_size)]
            tokens[index] = next_token(self.kv(blocks, length), masks.get(index))
            if self.row_faults.get((int(step.seqs[index]), length - 1), "") is None:
                tokens[index] = TOKEN_ALL_NAN
            self.feed[slot] = tokens[index]
        return tokens

    def _put(self, step: Step) -> None:
        """Write the KV of a step."""
        self._apply_table_changes(step)
        slots = np.repeat(step.slots, step.num_new)
        blocks = self.tables[slots, step.positions // self.block_size]
        inputs = np.where(step.token_ids == FROM_FEED, self.feed[slots], step.token_ids)
        self.pool[blocks, step.positions % self.block_size] = np.stack([inputs, step.positions], axis=1)

    def _spoil(self, step: Step) -> None:
        """Write garbage where the KV of a step belongs."""
        slots = np.repeat(step.slots, step.num_new)
        blocks = self.tables_ahead[slots, step.positions // self.block_size]
        self.pool[blocks, step.positions % self.block_size] = GARBAGE

    def _apply_table_changes(self, step: Step) -> None:
        for slot, place, block in step.table_changes.tolist():
            self.tables[slot, place] = block

    def kv(self, blocks: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.uint32]:
        """Return what the pool holds of a sequence's first `length` positions."""
        held: NDArray[np.uint32] = self.pool[np.asarray(blocks, np.int64)].reshape(-1, 2)[:length]
        return held

    # What the caller must not do.

    def _watch_table_changes(self, step: Step) -> None:
        for slot, place, block in step.table_changes.tolist():
            self.tables_ahead[slot, place] = block
            if place:
                continue
            self.begun[slot] += 1
            if self.watches_fences and any(slot == owner[0] for ticket in self.unsettled for owner in ticket.held):
                self.violations.append(f"a sequence begins in slot {slot}, which a step in flight still needs")

    def _named(self, step: Step) -> dict[tuple[int, int], set[int]]:
        """Return the blocks of each row, by its slot and the number of the sequence in it."""
        named = {}
        for slot, length in zip(step.slots.tolist(), step.kv_lengths.tolist(), strict=True):
            blocks = self.tables_ahead[slot, : -(-length // self.block_size)]
            named[slot, self.begun[slot]] = set(blocks.tolist())
        return named

    def _watch_fences(self, step: Step, held: dict[tuple[int, int], set[int]]) -> None:
        fed = step.slots[np.repeat(np.arange(step.num_rows), step.num_new)][step.token_ids == FROM_FEED]
        for slot in fed.tolist():
            if not any(
                slot in ticket.step.slots[ticket.step.readback == READ_ARGMAX].tolist() for ticket in self.unsettled
            ):
                self.violations.append(f"nothing in flight will write the feed cell of slot {slot}")
        for owner, blocks in held.items():
            self._watch_blocks(blocks, owner)

    def _watch_blocks(self, blocks: set[int], owner: tuple[int, int] | None = None) -> None:
        for ticket in self.unsettled if self.watches_fences else []:
            for other, fenced in ticket.held.items():
                if other != owner and fenced & blocks:
                    self.violations.append(f"blocks {fenced & blocks} were given away while a step still needs them")

    # Images.

    def gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        self.called("gather", None, *blocks)
        return np.frombuffer(bytearray(self.pool[list(blocks)].tobytes()), np.uint8)

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        self._watch_blocks(set(blocks))
        self.pool[list(blocks)] = GARBAGE
        self.called("scatter", None, *blocks)
        self.pool[list(blocks)] = image.view(np.uint32).reshape(-1, self.block_size, 2)
        image[:] = 0xEE  # as the caller may, once this returns

    def probe(self) -> None:
        self.called("probe")

    def close(self) -> None:
        self.called("close")
