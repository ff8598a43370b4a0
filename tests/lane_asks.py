"""Requests with surprises, and what each should come to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scripted_oracle import solo

if TYPE_CHECKING:
    from reprieve.request import FinishReason, ParkBy
    from scripted_oracle import Mask


@dataclass(frozen=True)
class Ask:
    """What somebody submits, and what happens to it; tokens are counted from 0, positions as everywhere.

    It comes before the engine's step number `arrives`. Token `stops_at` is one of its stop ids, if it has not come up
    before. It is cancelled as soon as token `cancelled_at` is delivered, and parked between two steps after each token
    of `parks`. The row of position `fails_at` fails at launch; the logits of `nan_at` are NaN.
    """

    prompt: tuple[int, ...]
    budget: int
    arrives: int = 0
    priority: int = 0
    replayable: bool = True
    mask: Mask | None = None
    stops_at: int | None = None
    cancelled_at: int | None = None
    fails_at: int | None = None
    nan_at: int | None = None
    parks: dict[int, ParkBy] = field(default_factory=dict)

    @property
    def stop(self) -> frozenset[int]:
        plain = solo(self.prompt, self.budget, (), self.mask, self.nan_at)
        return frozenset(plain[self.stops_at : self.stops_at + 1] if self.stops_at is not None else ())

    def comes_to(self, positions: int) -> tuple[list[int], FinishReason]:
        """Return the tokens and the end of a request that has a pool of so many positions for itself: the oracle."""
        tokens = solo(self.prompt, self.budget, self.stop, self.mask, self.nan_at)
        ends: list[tuple[int, int, FinishReason]] = []  # after how many tokens; of equals the lowest number wins
        if tokens and tokens[-1] in self.stop:
            ends.append((len(tokens), 0, "stop"))
        elif len(tokens) == self.budget:
            ends.append((len(tokens), 0, "length"))
        elif self.nan_at == len(self.prompt) - 1 + len(tokens):
            ends.append((len(tokens), 4, "nan"))
        else:
            ends.append((len(tokens), 4, "constraint"))
        if self.cancelled_at is not None:
            ends.append((self.cancelled_at + 1, 1, "cancelled"))
        ends.append((positions - len(self.prompt) + 1, 2, "capacity"))
        if self.fails_at is not None:
            ends.append((max(0, self.fails_at - len(self.prompt) + 1), 3, "step_failed"))
        count, _, reason = min(ends)
        return tokens[:count], reason
