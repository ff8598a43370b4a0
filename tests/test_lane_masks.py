"""Constrained rows in the lane, by example at every depth: they sit out, the others go on, and each ends alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from lane_asks import Ask
from lane_rig import LaneRig
from lane_worlds import every_nth, prompt
from scripted_oracle import VOCAB, packed, solo

if TYPE_CHECKING:
    from numpy.typing import NDArray


DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
AHEAD = pytest.mark.parametrize("depth", [2, 3])


@DEPTHS
def test_a_constrained_row_sits_out_until_its_mask_is_there_and_the_others_go_on(depth: int) -> None:
    rig = LaneRig(depth, mask_delay=2 * depth)
    mask = every_nth(3, 99)
    bound = rig.ask(Ask(prompt(0, 5), 6, mask=mask))
    free = rig.ask(Ask(prompt(1, 5), 20))
    rig.run()
    launches = [call[1:] for call in rig.calls if call[0] == "launch"]
    assert sum(bound in seqs for seqs in launches) == 6
    assert sum(free in seqs for seqs in launches) == 20
    assert rig.streams.num_sat_out[bound] >= 6
    assert rig.streams.num_sat_out[free] == 0
    assert rig.streams.over_runs == 0
    assert rig.streams.tokens(bound) == solo(prompt(0, 5), 6, (), mask)
    assert rig.streams.tokens(free) == solo(prompt(1, 5), 20)


@AHEAD
def test_a_constrained_row_is_in_every_other_step_while_the_rest_are_in_each(depth: int) -> None:
    rig = LaneRig(depth)
    bound = rig.ask(Ask(prompt(0, 5), 6, mask=every_nth(3, 99)))
    rig.ask(Ask(prompt(1, 5), 30))
    rig.run()
    launches = [bound in call for call in rig.calls if call[0] == "launch"]
    first = launches.index(True)
    assert launches[first : first + 5 * depth + 1] == ([True, *[False] * (depth - 1)] * 6)[: 5 * depth + 1]


@DEPTHS
def test_a_grammar_that_has_ended_is_never_asked_for_a_mask(depth: int) -> None:
    end = 77

    def mask(generated: tuple[int, ...]) -> NDArray[np.uint32]:
        return packed(np.arange(VOCAB) == end if len(generated) == 3 else np.arange(VOCAB) % 2 == 0)

    rig = LaneRig(depth)
    bound = rig.ask(Ask(prompt(0, 5), 20, mask=mask, stops_at=3))
    rig.ask(Ask(prompt(1, 5), 20))
    rig.run()
    assert rig.ends() == {bound: "stop", 101: "length"}
    assert rig.streams.tokens(bound)[-1] == end
    assert rig.masks.calls == [(bound, count) for count in range(4)]


@DEPTHS
def test_a_mask_that_raises_at_its_third_token_ends_that_row_alone(depth: int) -> None:
    def mask(generated: tuple[int, ...]) -> NDArray[np.uint32] | None:
        if len(generated) == 2:
            raise ZeroDivisionError
        return None

    rig = LaneRig(depth)
    rig.ask(Ask(prompt(0, 5), 20, mask=every_nth(3, 99)))
    bound = rig.books.submit(prompt(1, 5), 20, constrained=True)
    rig.masks.masks[bound] = mask
    rig.ask(Ask(prompt(2, 5), 20))
    for _ in range(200):
        rig.step()
    code, cause = rig.streams.ends[bound]
    assert (code, type(cause)) == ("constraint", ZeroDivisionError)
    assert rig.tokens(bound) == solo(prompt(1, 5), 2)
    assert ("release", bound, False) in rig.calls, "its blocks are not kept for reuse"
    assert {100: "length", 102: "length"}.items() <= rig.ends().items()
    assert rig.streams.tokens(102) == solo(prompt(2, 5), 20)
    assert rig.books.free_blocks == rig.books.num_blocks


@DEPTHS
def test_a_mask_that_leaves_nothing_at_the_fifth_token_ends_that_row_alone(depth: int) -> None:
    rig = LaneRig(depth)
    bound = rig.ask(Ask(prompt(0, 5), 20, mask=every_nth(3, 4)))
    rig.ask(Ask(prompt(1, 5), 9))
    rig.run()
    assert rig.ends() == {bound: "constraint", 101: "length"}
    assert len(rig.streams.tokens(bound)) == 4
