"""What a step is: its buffers, its ticket and its result, and the two protocols between which it moves.

`launch` and `park` see only what is in this file, so they can be tested with scripted books and devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reprieve.request import ParkBy

Arrival: TypeAlias = Literal["start", "replay", "restore"]

# An input token id (`StepBuffers.token_ids`) that the host does not know yet: the newest token that was read back in
# the row's slot, which the device keeps in the slot's feed cell.
FROM_FEED = -1

# Of a ban (`StepBuffers.bans`): it holds whatever the row's input is.
ALWAYS = -1

# What is read back of a row (`StepBuffers.readback`).
READ_NOTHING = 0
READ_ARGMAX = 1

# What a device answers for a row that has no token (`StepResult.tokens`).
TOKEN_NONE_ALLOWED = -1  # the mask leaves nothing
TOKEN_ALL_NAN = -2  # every allowed logit is NaN
TOKEN_NOT_READ = -3  # the row reads nothing back

# What a settled row came to (`Books.commit`).
OUTCOME_CHUNK = 0  # a chunk was committed, nothing was sampled
OUTCOME_TOKEN = 1  # a token was sampled and committed; the sequence goes on
OUTCOME_STOP = 2  # likewise, and it is one of the sequence's stop ids
OUTCOME_LENGTH = 3  # likewise, and the budget or the context is used up
OUTCOME_NOTHING_ALLOWED = 4  # no token: the row's mask left nothing
OUTCOME_NAN = 5  # no token: all its logits are NaN
OUTCOME_OVERRUN = 6  # discarded: its sequence had left when the step was settled


@dataclass(frozen=True, slots=True)
class StepShape:
    """The most that one step can hold; every buffer is sized by it once.

    `tokens` bounds the step's flat token arrays, `rows` the rows (one per slot at most), `table_changes` the newly
    written block-table entries (every block of the pool at most once), `bans` the banned ids of all rows. `mask_words`
    is how many 32-bit words a mask has.
    """

    tokens: int
    rows: int
    table_changes: int
    bans: int
    mask_words: int


class StepBuffers:
    """One set of a step's arrays, allocated once, written by the books and read by the device.

    It belongs to the ticket from launch until settle.

        token_ids      [tokens]            i32  input token ids, row after row; FROM_FEED only in a row of one token
        positions      [tokens]            i32  position of each in its sequence
        seqs           [rows]              u64  sequence of each row
        slots          [rows]              i32  its slot; rows stand in ascending slot order
        starts         [rows]              i32  position of the row's first token
        num_new        [rows]              i32  how many tokens the row has: 1 to decode, more in a chunk
        kv_lengths     [rows]              i32  KV positions of the sequence once this step is done (start + num_new)
        readback       [rows]              u8   READ_NOTHING or READ_ARGMAX
        table_changes  [table_changes, 3]  i32  (slot, index in the slot's block table, block), to apply before the step
        bans           [bans, 3]           i32  (row, token id, after): the row must not choose this id; where `after`
                                                is not ALWAYS, only if it is the row's last input token. Rows ascend
        mask_rows      [masks]             i32  the row of each mask, ascending; the other rows have none
        masks          [masks, mask words] u32  bit v % 32 of word v / 32 set means that token v is allowed

    Masks are few and wide, so memory for them is made when they are first needed: see `make_room_for_masks`.
    """

    __slots__ = (
        "bans",
        "kv_lengths",
        "mask_rows",
        "masks",
        "num_new",
        "positions",
        "readback",
        "seqs",
        "slots",
        "starts",
        "table_changes",
        "token_ids",
    )

    def __init__(self, shape: StepShape) -> None:
        self.token_ids = np.zeros(shape.tokens, np.int32)
        self.positions = np.zeros(shape.tokens, np.int32)
        self.seqs = np.zeros(shape.rows, np.uint64)
        self.slots = np.zeros(shape.rows, np.int32)
        self.starts = np.zeros(shape.rows, np.int32)
        self.num_new = np.zeros(shape.rows, np.int32)
        self.kv_lengths = np.zeros(shape.rows, np.int32)
        self.readback = np.zeros(shape.rows, np.uint8)
        self.table_changes = np.zeros((shape.table_changes, 3), np.int32)
        self.bans = np.zeros((shape.bans, 3), np.int32)
        self.mask_rows = np.zeros(shape.rows, np.int32)
        self.masks = np.zeros((0, shape.mask_words), np.uint32)

    def make_room_for_masks(self, count: int) -> None:
        """Make `masks` large enough for `count` of them; what was in it is lost where it grows."""
        if count > len(self.masks):
            self.masks = np.zeros((max(count, 2 * len(self.masks)), self.masks.shape[1]), np.uint32)


class StepCounts(NamedTuple):
    """How much of a set of buffers one step uses, as the books fill it."""

    rows: int
    tokens: int
    table_changes: int
    bans: int


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass over one or more rows: views of the used part of `StepBuffers`, arrays as described there."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    seqs: NDArray[np.uint64]
    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    num_new: NDArray[np.int32]
    kv_lengths: NDArray[np.int32]
    readback: NDArray[np.uint8]
    table_changes: NDArray[np.int32]
    bans: NDArray[np.int32]
    mask_rows: NDArray[np.int32]
    masks: NDArray[np.uint32]

    @classmethod
    def of(cls, buffers: StepBuffers, counts: StepCounts, num_masks: int = 0) -> Step:
        """Return the step that the books wrote into `buffers`, with the masks that were added to it."""
        rows, tokens, table_changes, bans = counts
        return cls(
            token_ids=buffers.token_ids[:tokens],
            positions=buffers.positions[:tokens],
            seqs=buffers.seqs[:rows],
            slots=buffers.slots[:rows],
            starts=buffers.starts[:rows],
            num_new=buffers.num_new[:rows],
            kv_lengths=buffers.kv_lengths[:rows],
            readback=buffers.readback[:rows],
            table_changes=buffers.table_changes[:table_changes],
            bans=buffers.bans[:bans],
            mask_rows=buffers.mask_rows[:num_masks],
            masks=buffers.masks[:num_masks],
        )

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a settled step read back.

    `tokens` [rows] i32, C-contiguous: the sampled token of each row, or one of the negative TOKEN_ values. It is
    valid until the ticket's buffers are used again.
    """

    tokens: NDArray[np.int32]


class Ticket(Protocol):
    """A launched step that is not settled yet."""

    @property
    def step(self) -> Step:
        """The step as it was launched."""

    def ready(self) -> bool:
        """Return whether `settle` would not have to wait. Never waits; True for a step that has failed."""

    def settle(self) -> StepResult:
        """Wait for the step and return what it read back; raises `StepFailed` or `DeviceLost`.

        Tickets are settled in the order of launch, each once; after an interrupt perhaps again, to see that it is done:
        then it may raise anything.
        """


class Device(Protocol):
    """What computes steps. Bring your own, or use one of `reprieve.device`.

    It holds the KV pool: `num_blocks` blocks of `block_size` positions, in all layers, and one block table per slot,
    to which it applies a step's `table_changes` before it computes that step. Each slot has a feed cell, into which a
    step writes the token of each row that is read back. Everything it is told happens in the order of the calls: a
    step sees what earlier steps and `scatter` wrote, and `gather` what earlier steps wrote. Calls come from one thread.
    """

    @property
    def default_depth(self) -> int:
        """How many steps are best kept in flight: 1, 2 or 3."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of KV in all layers."""

    @property
    def kv_dtype(self) -> str:
        """Element type of the KV pool, 1 to 8 ASCII characters such as "bf16". Part of an image's header."""

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of one block, such as (layers, 2, block_size, kv_heads, head_size). Part of an image's header."""

    def launch(self, step: Step) -> Ticket:
        """Start computing `step`, and do not wait for it. Its arrays stay as they are until it is settled.

        A row whose feed cell holds no token (its last one was a negative TOKEN_ value) is computed with any token: what
        it comes to is discarded. Bans and masks bind the rows that are read back; an id at or beyond the vocabulary is
        never chosen.

        Raises `RowFailed` for one row that cannot be computed, `StepFailed`, `DeviceLost`; whatever it raises, nothing
        of the step may count as done. Any other exception is taken for `StepFailed` if `probe` succeeds.
        """

    def gather(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return a new array of `len(blocks) * block_bytes` bytes: a copy of these blocks, in this order."""

    def scatter(self, blocks: Sequence[int], image: NDArray[np.uint8]) -> None:
        """Write `image`, as `gather` gave it, into `blocks`. The caller may overwrite `image` once this returns."""

    def probe(self) -> None:
        """Raise `DeviceLost` if the device no longer works; change nothing."""

    def close(self) -> None:
        """Give the device's memory back. Idempotent."""


class InFlight(Protocol):
    """The steps in flight before the one that is being launched, and what the host adds to that one."""

    def settle_oldest(self) -> bool:
        """Settle the oldest step in flight, deliver what it came to and return True; False if there is none."""

    def add_masks(self, buffers: StepBuffers, counts: StepCounts) -> int:
        """Write the masks of the step that the books have just filled into its buffers; return how many there are."""

    def launch(self, device: Device, step: Step) -> Ticket:
        """Launch `step` on `device`, behind those in flight; raises what `Device.launch` does."""


class NothingInFlight:
    """No step before this one, and no masks: for a loop that settles each step before it launches the next."""

    def settle_oldest(self) -> bool:
        """Return False."""
        return False

    def add_masks(self, buffers: StepBuffers, counts: StepCounts) -> int:  # noqa: ARG002  as the protocol has it
        """Return 0."""
        return 0

    def launch(self, device: Device, step: Step) -> Ticket:
        """Launch `step`."""
        return device.launch(step)


class ArrivalPlan(NamedTuple):
    """Who comes in next, and who is to be parked first so that it fits (priority preemption, usually nobody).

    `settle_first` says that steps in flight may make the parks needless, or need who would be parked: settle one, and
    ask again.
    """

    seq: int
    victims: list[tuple[int, ParkBy]]
    settle_first: bool = False


class Books(Protocol):
    """The record of every sequence's state, slot and KV blocks. `_native.Ledger` is the real one.

    A refused call changes nothing. Between `fill` and `commit` or `hand_back` a step is in flight; several may be, and
    they are committed in the order in which they were filled. A later one feeds on tokens that an earlier one has yet
    to give. What a step in flight names is fenced: a sequence may be parked or released meanwhile, but its slot and
    blocks are free for others only when the last step that names it is committed or handed back; its rows in them are
    over-runs, which `commit` discards. `spill_blocks` is how many blocks of images the host store could still take; it
    decides who can be parked by spill.
    """

    # Who comes in.

    def next_arrival(self, spill_blocks: int) -> ArrivalPlan | None:
        """Return the head of the waiting order if it fits now, or would after the named parks; else None."""

    def admit(self, seq: int) -> Arrival:
        """Give a waiting sequence its slot and all blocks of its prompt or history.

        "restore" means that its image must be scattered into `image_blocks(seq)` before the next step; if that cannot
        be done, `drop_image(seq)` or `release(seq)` must follow. Raises `KvExhausted` if it does not fit.
        """

    def drop_image(self, seq: int) -> None:
        """Forget a restored or spilled image: the sequence replays its history instead."""

    # The step.

    def rows(self) -> int:
        """Pick the rows of the next step, in ascending slot order; return how many there are. Reserves nothing.

        Steps in flight count as done. A row that needs the host first sits out: see `sat_out`.
        """

    def sat_out(self) -> list[int]:
        """Return the residents that were passed over by the last `rows`, as their next input needs the host."""

    def mask_ready(self, seq: int) -> None:
        """Say that the mask for the next token of a constrained sequence is there; forgotten with each token."""

    def reserve(self) -> None:
        """Take the blocks by which the picked rows grow, for all or for none: `KvExhausted`."""

    def victim(self, spill_blocks: int) -> int | Literal["settle"] | None:
        """Return the sequence that gives way, or None if nobody can.

        "settle": a step in flight will give blocks back, or needs all who should give way; settle it and ask again.
        """

    def growing(self) -> list[int]:
        """Return the sequences of the picked rows that need a block, in slot order."""

    def capacity_row(self) -> int:
        """Return the picked row that should end with `capacity`: of those that need a block, the first victim."""

    def fill(self, buffers: StepBuffers) -> StepCounts:
        """Write the reserved step into `buffers`. The step is in flight from here on."""

    def hand_back(self) -> list[int]:
        """Undo `reserve` and `fill` of the newest step exactly: it was not launched, or failed.

        Returns the sequences of its rows, over-runs left out; [] if there is nothing to undo.
        """

    def commit(self, tokens: NDArray[np.int32], outcomes: NDArray[np.uint8]) -> None:
        """Settle the oldest step in flight with `tokens` [rows]; write an OUTCOME_ per row into `outcomes` [>= rows].

        Sequences whose outcome ends them are released.
        """

    # Parking and ending.

    def park(self, seq: int, by: ParkBy) -> None:
        """Take a resident sequence's slot and blocks away; raises `CannotPark`.

        For "spill", `image_blocks(seq)` must have been copied before. What it has in flight is discarded.
        """

    def resume(self, seq: int) -> bool:
        """Move a parked or queued sequence to the front of its priority; False if it is resident (a no-op)."""

    def release(self, seq: int, *, reuse: bool) -> bool:
        """End a sequence in any state: the one release. False, and no change, if it had ended before.

        `reuse` says whether its committed blocks hold what its tokens say, so that they may be kept for others.
        """

    # Looking.

    def state(self, seq: int) -> str:
        """Return "queued", "prefilling", "decoding", "parked_spill", "parked_replay" or "finished"."""

    def image_blocks(self, seq: int) -> list[int]:
        """Return the blocks that hold the sequence's committed positions, in order: what a spill copies."""

    def committed(self, seq: int) -> int:
        """Return how many positions of KV are committed (for a spilled one: how many its image has)."""

    def generated(self, seq: int) -> int:
        """Return how many tokens the sequence has generated."""

    def slot(self, seq: int) -> int | None:
        """Return its slot, or None if it is not resident."""

    def can_replay(self, seq: int) -> bool:
        """Return whether dropping its KV loses nothing: its token ids rebuild it, or none of it is committed yet."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds and that are not fenced."""

    @property
    def fenced_blocks(self) -> int:
        """Blocks of sequences that have left, which a step in flight still needs."""

    def residents(self) -> list[int]:
        """Return the resident sequences in slot order."""

    def waiting(self) -> list[int]:
        """Return the queued and parked sequences in the order in which they will come in."""
