"""One sequence in the scripted books, its rows in flight, and what it leaves behind when it goes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Entry:
    """One sequence. `stay` is the number of its residency, a new one each time that it comes in."""

    seq: int
    prompt: list[int]
    budget: int
    priority: int
    replayable: bool
    stop: frozenset[int]
    constrained: bool
    tokens: list[int]
    state: str = "queued"
    stay: int = 0
    slot: int | None = None
    table: list[int] = field(default_factory=list)
    sent: int = 0
    committed: int = 0
    reserved: int = 0  # positions that are committed or that steps in flight fill
    ahead: int = 0  # tokens that steps in flight sample
    has_mask: bool = False  # for its next token
    front: int = 0
    immune_until: int = 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def target(self) -> int:
        """Positions to commit before it decodes: all tokens but a pending one."""
        return len(self.tokens) - (self.generated > 0)

    @property
    def resident(self) -> bool:
        return self.slot is not None

    @property
    def is_finishing(self) -> bool:
        """Whether its tokens in flight use up its budget, so that it surely ends with them."""
        return self.ahead > 0 and self.generated + self.ahead >= self.budget

    @property
    def needs_host(self) -> bool:
        """Whether nothing of it can be sampled before the host has seen its last token, or its next mask is there."""
        return self.constrained and (self.ahead > 0 or not self.has_mask)

    @property
    def decodes(self) -> bool:
        """Whether its next row is a decode, with all in flight taken for done."""
        return self.resident and self.reserved >= self.target and not self.is_finishing

    def growth(self, block_size: int) -> int:
        """Blocks by which its next decode row grows."""
        return int(self.decodes and self.reserved + 1 > len(self.table) * block_size)

    def coming_growth(self, block_size: int) -> int:
        """Likewise, also of the first decode after a replay."""
        if self.decodes or self.is_finishing:
            return self.growth(block_size)
        return int(self.generated > 0 and self.target % block_size == 0)


@dataclass
class Row:
    """One sequence's share of a step. `fed` says that its input is a token in flight."""

    entry: Entry
    stay: int
    slot: int
    start: int
    num_new: int
    samples: bool
    fed: bool
    growth: int
    sent_before: int

    @property
    def end(self) -> int:
        return self.start + self.num_new

    @property
    def is_live(self) -> bool:
        """Whether its sequence is in the residency for which it was picked."""
        return self.entry.resident and self.entry.stay == self.stay


@dataclass(eq=False)
class Flight:
    """A step that is reserved, and once `filled` in flight."""

    rows: list[Row]
    filled: bool = False

    def names(self, entry: Entry) -> bool:
        return any(row.entry is entry and row.stay == entry.stay for row in self.rows)


@dataclass
class Remains:
    """Slot and blocks of one that has left, fenced until none of `flights` is in flight any more."""

    slot: int
    blocks: list[int]
    flights: list[Flight]
