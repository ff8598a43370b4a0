"""Depth never shows: whatever happens, each request gets the tokens and the end of a solo run, at depth 1, 2 and 3."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from lane_worlds import World, worlds
from reprieve.errors import ReprieveError

DEPTHS = (1, 2, 3)


def check_all_depths(world: World) -> None:
    streams = [world.run(depth) for depth in DEPTHS]
    told = [{seq: [e for e in stream if e[0] in {"token", "ended"}] for seq, stream in s.items()} for s in streams]
    assert told[0] == told[1] == told[2]


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_tokens_and_ends_are_those_of_a_solo_run_at_every_depth(world: World) -> None:
    check_all_depths(world)


@pytest.mark.full
@settings(max_examples=1000, deadline=None)
@given(worlds())
def test_tokens_and_ends_are_those_of_a_solo_run_at_every_depth_in_many_more_worlds(world: World) -> None:
    check_all_depths(world)


@settings(max_examples=40, deadline=None)
@given(worlds(is_ample=True))
def test_with_room_for_all_every_event_is_the_same_at_every_depth(world: World) -> None:
    streams = [world.run(depth) for depth in DEPTHS]
    assert streams[0] == streams[1] == streams[2]


# Negative controls: with a rule switched off in the books, the test above fails.


def goes_wrong(world: World, depth: int, *, watches_fences: bool = True, **switches: bool) -> bool:
    """Return whether a run with these switches of the books fails what the tests above hold."""
    rig = world.rig(depth, dataclasses.replace(world.settings, **switches))
    rig.device.watches_fences = watches_fences
    try:
        rig.run(500)
        world.check(rig)
    except (AssertionError, ReprieveError, LookupError, ValueError):
        return True
    return False


CONTROL = settings(
    max_examples=2000, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("depth", [2, 3])
def test_without_the_discard_of_over_runs_a_random_world_goes_wrong(depth: int) -> None:
    world = find(
        worlds(), lambda world: goes_wrong(world, depth, discards_over_runs=False), settings=CONTROL, random=Random(0)
    )
    assert not goes_wrong(world, depth)
    assert not goes_wrong(world, 1, discards_over_runs=False), "there is nothing to discard"


@pytest.mark.parametrize(("depth", "watches_fences"), [(2, True), (3, True), (2, False)])
def test_without_fences_a_random_world_goes_wrong(depth: int, watches_fences: bool) -> None:
    # Even if nobody watches the fences themselves: somebody gets other tokens.
    world = find(
        worlds(),
        lambda world: goes_wrong(world, depth, watches_fences=watches_fences, fences=False),
        settings=CONTROL,
        random=Random(0),
    )
    assert not goes_wrong(world, depth)
    assert not goes_wrong(world, 1, fences=False), "nothing is in flight when somebody leaves"
