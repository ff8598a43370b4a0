"""Random worlds for the lane: pools, requests with surprises, devices; and what must come out at every depth."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from lane_asks import Ask
from lane_rig import LaneRig
from scripted_holdings import Settings
from scripted_oracle import VOCAB, packed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from reprieve.request import ParkBy
    from scripted_holdings import Call
    from scripted_oracle import Mask

MOST_STEPS = 10_000  # with one token a step and no immunity, sequences that replay for each other have taken over 600


@functools.cache
def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length))


@functools.cache
def every_nth(nth: int, ends_after: int) -> Mask:
    """Return a mask that leaves every `nth` id, each time others; all at the first token, and none at the end."""

    def mask(generated: tuple[int, ...]) -> NDArray[np.uint32] | None:
        if not generated:
            return None
        if len(generated) >= ends_after:
            return packed(np.zeros(VOCAB, np.bool_))
        return packed(np.arange(VOCAB) % nth == generated[-1] % nth)

    return mask


@dataclass(frozen=True)
class World:
    """All of a run but its depth. Everybody can be parked at any time: the store is large, or all are replayable."""

    settings: Settings
    host_blocks: int
    computes_at_launch: bool
    mask_delay: int
    asks: tuple[Ask, ...]

    def rig(self, depth: int, settings: Settings | None = None) -> LaneRig:
        rig = LaneRig(
            depth,
            self.host_blocks,
            settings or self.settings,
            computes_at_launch=self.computes_at_launch,
            mask_delay=self.mask_delay,
        )
        rig.coming = sorted(self.asks, key=lambda ask: ask.arrives)
        return rig

    def run(self, depth: int) -> dict[int, list[Call]]:
        """Run it to the end, check it throughout, and return each request's events."""
        rig = self.rig(depth)
        rig.run(MOST_STEPS)
        self.check(rig)
        return rig.streams.streams

    def check(self, rig: LaneRig) -> None:
        assert not rig.device.settled_again
        positions = self.settings.num_blocks * self.settings.block_size
        for seq, ask in rig.asks.items():
            tokens, reason = ask.comes_to(positions)
            assert rig.streams.tokens(seq) == tokens
            assert rig.ends()[seq] == reason
            pauses = [event[0] for event in rig.streams.streams[seq] if event[0] in {"paused", "resumed"}]
            assert pauses == (["paused", "resumed"] * len(pauses))[: len(pauses)]


def or_none(strategy: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | st.none() | strategy


@st.composite
def asks(draw: st.DrawFn, most_prompt: int) -> Ask:
    length = draw(st.integers(1, most_prompt))
    last = length + 20
    fails_at = draw(or_none(st.integers(0, last)))
    nan_at = draw(or_none(st.integers(length - 1, last)))
    ways: st.SearchStrategy[ParkBy] = st.sampled_from(["spill", "replay"])
    is_bound = draw(st.sampled_from([False, False, True]))
    return Ask(
        prompt(draw(st.integers(0, 5)), length),
        budget=draw(st.integers(1, 20)),
        arrives=draw(st.integers(0, 8)),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1])),
        mask=every_nth(draw(st.integers(2, 5)), draw(st.integers(1, 30))) if is_bound else None,
        stops_at=draw(or_none(st.integers(0, 19))),
        cancelled_at=draw(or_none(st.integers(0, 19))),
        fails_at=fails_at if fails_at != nan_at else None,
        nan_at=nan_at,
        parks=draw(st.dictionaries(st.integers(0, 19), ways, max_size=3)),
    )


@st.composite
def worlds(draw: st.DrawFn, *, is_ample: bool = False) -> World:
    """Draw a world; an ample one has room for all, and parks nobody."""
    num_blocks = 100 if is_ample else draw(st.integers(4, 14))
    max_slots = 8 if is_ample else draw(st.integers(1, 6))
    settings = Settings(
        num_blocks=num_blocks,
        max_slots=max_slots,
        step_tokens=draw(st.integers(1, 12)),
        head_room=0 if is_ample else draw(st.sampled_from([0, 0, 1])),
        immunity=draw(st.integers(0, 4)),
    )
    return World(
        settings,
        host_blocks=1000 if is_ample else draw(st.sampled_from([0, 3, 8, 1000])),
        computes_at_launch=draw(st.booleans()),
        mask_delay=draw(st.integers(0, 2)),
        asks=tuple(draw(st.lists(asks(14), min_size=1, max_size=8))),
    )
