"""A lane of scripted parts, and the steps that an engine makes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lane_streams import ScriptedMasks, Streams
from reprieve.errors import BooksMisused, DeviceLost
from reprieve.lane import Lane
from scripted import Rig
from scripted_oracle import solo

if TYPE_CHECKING:
    from collections.abc import Callable

    from lane_asks import Ask
    from reprieve.request import FinishReason
    from scripted_holdings import Settings


@dataclass
class Seconds:
    """Where the lane counts its seconds."""

    books_s: float = 0.0
    launch_s: float = 0.0


class LaneRig(Rig):
    """A rig whose steps go through a lane of this depth."""

    def __init__(
        self,
        depth: int,
        host_blocks: int = 100,
        settings: Settings | None = None,
        *,
        computes_at_launch: bool = False,
        mask_delay: int = 0,
        timer: Callable[[], float] = time.perf_counter,
        **sizes: Any,
    ) -> None:
        super().__init__(host_blocks, settings, computes_at_launch=computes_at_launch, **sizes)
        self.depth = depth
        self.seconds = Seconds()
        self.streams = Streams(self.settings.max_slots)
        self.use(self.streams)
        self.masks = ScriptedMasks(self.books, mask_delay)
        self.streams.parker = self.masks.parker = self.parker
        self.lane = Lane(
            self.books,
            self.device,
            self.parker,
            self.streams,
            depth=depth,
            shape=self.shape,
            seconds=self.seconds,
            masks=self.masks,
            timer=timer,
        )
        self.coming: list[Ask] = []
        self.asks: dict[int, Ask] = self.streams.asks
        self.num_steps = 0

    # Requests.

    def ask(self, ask: Ask) -> int:
        """Submit a request."""
        seq = self.books.submit(
            ask.prompt,
            ask.budget,
            ask.priority,
            replayable=ask.replayable,
            stop=ask.stop,
            constrained=ask.mask is not None,
        )
        self.asks[seq] = ask
        if ask.mask is not None:
            self.masks.masks[seq] = ask.mask
        if ask.fails_at is not None:
            self.device.row_faults[seq, ask.fails_at] = "step_failed"
        if ask.nan_at is not None:
            self.device.row_faults[seq, ask.nan_at] = None
        return seq

    def expected(self, seq: int, count: int) -> list[int]:
        ask = self.asks[seq]
        return solo(ask.prompt, ask.budget, ask.stop, ask.mask, ask.nan_at)[:count]

    # Steps.

    def step(self) -> bool:
        """Do what an engine does in a step; return whether something was launched or settled.

        An exception that is no failure of the device goes through, after the lane has recovered from it.
        """
        while self.coming and self.coming[0].arrives <= self.num_steps:
            self.ask(self.coming.pop(0))
        self.num_steps += 1
        try:
            self.lane.bring_in()
            launched = self.lane.fill()
            return self.lane.settle_oldest() or launched > 0
        except DeviceLost as lost:
            self.lane.recover()
            self.streams.run()
            self.latch.trip(lost)
            for entry in self.books.entries.values():
                self.parker.end(entry.seq, "device_lost", lost)
            return False
        except BooksMisused:
            raise
        except BaseException:
            self.lane.recover()
            self.streams.run()
            raise

    def run(self, most: int = 1000) -> None:
        """Step until everybody has ended and nothing is in flight, checking after every step."""
        for _ in range(most):
            if not (self.coming or self.live() or self.lane.num_in_flight):
                self.check_nothing_left()
                return
            self.step()
            self.check()
        raise AssertionError(f"still live after {most} steps: {self.live()}")

    def check(self) -> None:
        super().check()
        assert self.lane.num_in_flight == len(self.books.flights) == len(self.device.unsettled)
        for seq in self.asks:
            entry, told = self.books.of(seq), self.streams.tokens(seq)
            assert told == self.tokens(seq), f"{entry} was told {told}"
            is_paused = seq in self.streams.paused and entry.state != "finished"
            assert is_paused == entry.state.startswith("parked"), entry

    def check_nothing_left(self) -> None:
        super().check_nothing_left()
        assert self.lane.num_in_flight == 0
        assert len({id(buffers) for buffers in self.lane._ring}) == self.depth + 1, "a set of buffers is lost"

    def look_ahead(self, seq: int, tokens: int) -> None:
        """Step until so many tokens of `seq` are sampled or in flight, and as many steps are in flight as can be."""
        entry = self.books.of(seq)
        while entry.generated + entry.ahead < tokens:
            self.step()
            self.lane.bring_in()
            self.lane.fill()
        self.check()
        assert entry.ahead

    def ends(self) -> dict[int, FinishReason]:
        return {seq: code for seq, (code, _) in self.streams.ends.items()}
