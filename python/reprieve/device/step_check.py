"""Checks that a step can be computed, before anything of it is written; what a device knows of its slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reprieve.errors import InvalidArgument
from reprieve.step import ALWAYS, FROM_FEED, READ_ARGMAX, READ_NOTHING, TOKEN_NOT_READ

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reprieve.step import Step

NO_BLOCK = -1
"""An entry of a block table that was never written."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a device has: counts of slots and blocks, positions in a block and in a sequence at most, token ids."""

    num_slots: int
    num_blocks: int
    block_size: int
    context_length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a device knows of each slot.

    tables  [num_slots, num_blocks] i32  block tables, NO_BLOCK where never written; one sequence may hold every block
    feed    [num_slots]             i32  feed cells: the newest token that was read back, or the negative TOKEN_ value
                                         that stood for it; TOKEN_NOT_READ if nothing was since the slot's table began
    """

    tables: NDArray[np.int32]
    feed: NDArray[np.int32]

    @classmethod
    def empty(cls, limits: StepLimits) -> SlotState:
        """Return that of a new device."""
        return cls(
            np.full((limits.num_slots, limits.num_blocks), NO_BLOCK, np.int32),
            np.full(limits.num_slots, TOKEN_NOT_READ, np.int32),
        )


def checked_slots(step: Step, slots: SlotState, limits: StepLimits) -> SlotState:
    """Check `step` and return new arrays: `slots` with the step's table changes applied.

    A change at index 0 begins the table of a slot's new sequence, so what the slot knew before is forgotten. A block
    may stand in several places as long as the step writes it for one of them at most. Raises `InvalidArgument` that
    names the array and the numbers; nothing is written then.
    """
    _check_arrays(step)
    _check_rows(step, limits)
    _check_tokens(step, limits)
    _check_bans(step, limits)
    _check_masks(step, limits)
    changes = step.table_changes
    for column, (what, end) in enumerate(
        (("slot", limits.num_slots), ("index", limits.num_blocks), ("block", limits.num_blocks))
    ):
        _check_range(f"step.table_changes ({what})", changes[:, column], 0, end)
    changed = SlotState(slots.tables.copy(), slots.feed.copy())
    begun = changes[changes[:, 1] == 0, 0]
    changed.tables[begun] = NO_BLOCK
    changed.feed[begun] = TOKEN_NOT_READ
    changed.tables[changes[:, 0], changes[:, 1]] = changes[:, 2]
    _check_known(step, changed, limits.block_size)
    _check_written(step, changed.tables, limits.block_size)
    return changed


def _check_known(step: Step, slots: SlotState, block_size: int) -> None:
    """Check that the slots have the blocks of their rows' positions, and the token of a row fed from one."""
    for slot, kv_length in zip(step.slots.tolist(), step.kv_lengths.tolist(), strict=True):
        unknown = np.flatnonzero(slots.tables[slot, : -(-kv_length // block_size)] == NO_BLOCK)
        if unknown.size:
            raise InvalidArgument(
                "step.table_changes",
                f"slot {slot} needs blocks for {kv_length} positions, its table lacks entries {unknown.tolist()}",
            )
    fed = np.repeat(step.slots, step.num_new)[step.token_ids == FROM_FEED]
    unfed = fed[slots.feed[fed] == TOKEN_NOT_READ]
    if unfed.size:
        raise InvalidArgument(
            "step.token_ids",
            f"cannot be {FROM_FEED} in slots {unfed.tolist()}: nothing was read back in them since their tables began",
        )


def _check_written(step: Step, tables: NDArray[np.int32], block_size: int) -> None:
    """Check that each block is written for one place: for two, the second would overwrite the first."""
    firsts, ends = step.starts // block_size, -(-step.kv_lengths // block_size)
    written = [tables[slot, first:end] for slot, first, end in zip(step.slots, firsts, ends, strict=True)]
    blocks, places = np.unique(np.concatenate(written), return_counts=True)
    twice = blocks[places > 1]
    if twice.size:
        raise InvalidArgument("step.table_changes", f"block {twice[0]} would be written for two places")


def _check_arrays(step: Step) -> None:
    """Check types, layouts and lengths."""
    rows, tokens = len(step.slots), len(step.token_ids)
    _check_array("token_ids", step.token_ids, np.int32, (tokens,))
    _check_array("positions", step.positions, np.int32, (tokens,))
    _check_array("seqs", step.seqs, np.uint64, (rows,))
    _check_array("slots", step.slots, np.int32, (rows,))
    _check_array("starts", step.starts, np.int32, (rows,))
    _check_array("num_new", step.num_new, np.int32, (rows,))
    _check_array("kv_lengths", step.kv_lengths, np.int32, (rows,))
    _check_array("readback", step.readback, np.uint8, (rows,))
    _check_array("table_changes", step.table_changes, np.int32, (len(step.table_changes), 3))
    _check_array("bans", step.bans, np.int32, (len(step.bans), 3))
    _check_array("mask_rows", step.mask_rows, np.int32, (len(step.mask_rows),))
    _check_array("masks", step.masks, np.uint32, (len(step.mask_rows), *step.masks.shape[-1:]))
    if rows == 0:
        raise InvalidArgument("step", "has no rows")


def _check_array(name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        layout = "C-contiguous" if array.flags.c_contiguous else "not C-contiguous"
        raise InvalidArgument(
            f"step.{name}",
            f"must be C-contiguous {np.dtype(dtype)} {list(shape)}, not {array.dtype} {list(array.shape)}, {layout}",
        )


def _check_rows(step: Step, limits: StepLimits) -> None:
    """Check what is said per row."""
    _check_range("step.slots", step.slots, 0, limits.num_slots)
    if np.any(np.diff(step.slots) <= 0):
        raise InvalidArgument("step.slots", f"must ascend, each slot once: {step.slots.tolist()}")
    max_positions = min(limits.num_blocks * limits.block_size, limits.context_length)
    _check_range("step.starts", step.starts, 0, max_positions)
    _check_range("step.num_new", step.num_new, 1, max_positions + 1)
    _check_range("step.kv_lengths", step.kv_lengths, 1, max_positions + 1)
    if np.any(step.kv_lengths != step.starts + step.num_new):
        raise InvalidArgument(
            "step.kv_lengths",
            f"must be starts + num_new, {step.starts.tolist()} + {step.num_new.tolist()}: {step.kv_lengths.tolist()}",
        )
    known = (step.readback == READ_NOTHING) | (step.readback == READ_ARGMAX)
    if not np.all(known):
        raise InvalidArgument("step.readback", f"unknown kinds {step.readback[~known].tolist()}")


def _check_tokens(step: Step, limits: StepLimits) -> None:
    """Check what is said per token."""
    total = int(step.num_new.sum())
    if total != len(step.token_ids):
        raise InvalidArgument("step.num_new", f"adds up to {total} tokens, token_ids has {len(step.token_ids)}")
    fed = step.token_ids == FROM_FEED
    rows = np.repeat(np.arange(step.num_rows), step.num_new)[fed]
    many = rows[step.num_new[rows] > 1]
    if many.size:
        raise InvalidArgument(
            "step.token_ids",
            f"may be {FROM_FEED}, from the feed cell, in a row of 1 token; row {many[0]} has {step.num_new[many[0]]}",
        )
    _check_range("step.token_ids", step.token_ids[~fed], 0, limits.vocab_size)
    firsts = np.cumsum(step.num_new) - step.num_new
    expected = np.arange(total) + np.repeat(step.starts - firsts, step.num_new)
    wrong = np.flatnonzero(step.positions != expected)
    if wrong.size:
        at = wrong[0]
        raise InvalidArgument(
            "step.positions",
            f"must count from each row's start: token {at} is at {expected[at]}, not {step.positions[at]}",
        )


def _check_bans(step: Step, limits: StepLimits) -> None:
    """Check what is said per ban."""
    rows, tokens, after = step.bans.T
    _check_range("step.bans (row)", rows, 0, step.num_rows)
    if np.any(np.diff(rows) < 0):
        raise InvalidArgument("step.bans (row)", f"must ascend: {rows.tolist()}")
    _check_range("step.bans (token id)", tokens, 0, limits.vocab_size)
    _check_range("step.bans (after)", after, ALWAYS, limits.vocab_size)


def _check_masks(step: Step, limits: StepLimits) -> None:
    """Check what is said per mask."""
    _check_range("step.mask_rows", step.mask_rows, 0, step.num_rows)
    if np.any(np.diff(step.mask_rows) <= 0):
        raise InvalidArgument("step.mask_rows", f"must ascend, each row once: {step.mask_rows.tolist()}")
    words, needed = step.masks.shape[1], -(-limits.vocab_size // 32)
    if len(step.masks) and words < needed:
        raise InvalidArgument(
            "step.masks", f"must have at least {needed} words for {limits.vocab_size} token ids, not {words}"
        )


def _check_range(name: str, values: NDArray[np.int32], lowest: int, end: int) -> None:
    bad = values[(values < lowest) | (values >= end)]
    if bad.size:
        raise InvalidArgument(name, f"must be from {lowest} to {end - 1}, not {bad[:8].tolist()}")
