"""A real model, parked by hand after its k-th token, by both ways and twice in a row: bit-equal to its solo run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from recording import Answer, check_nothing_left, check_stream, logits_of, recorded, solo_run
from reprieve import Engine, Request

if TYPE_CHECKING:
    from reprieve import LoadedModel
    from reprieve.request import ParkBy

BUDGET = 16
REQUEST = Request("Name three rivers of Europe.", max_new_tokens=BUDGET, chat=True, ignore_eos=True)
NEIGHBOUR = Request("Count from one to ten.", max_new_tokens=BUDGET, chat=True, ignore_eos=True)

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def answers(smollm2: LoadedModel) -> tuple[Answer, Answer]:
    """The solo runs of the request and of its neighbour."""
    return solo_run(smollm2, REQUEST), solo_run(smollm2, NEIGHBOUR)


def check_parked_after(smollm2: LoadedModel, answers: tuple[Answer, Answer], k: int, by: ParkBy, times: int) -> None:
    recording, devices = recorded(smollm2)
    with Engine(recording, kv_blocks=12, block_size=16, max_slots=2, step_tokens=24, depth=2) as engine:
        handle, neighbour = engine.submit(REQUEST), engine.submit(NEIGHBOUR)
        while len(handle.tokens) < k:
            engine.step()
        for _ in range(times):
            assert engine.park(handle, by) == by
            engine.drain()  # what is in flight of it needs its slot
            engine._parker.bring_in()
        engine.run()
        check_nothing_left(engine)
    for seq, (stream, answer) in enumerate(zip((handle, neighbour), answers, strict=True)):
        check_stream(stream.take_events(), answer)
        assert logits_of(devices[0], seq, len(handle.tokens)) == answer.logits


@pytest.mark.parametrize("by", ["spill", "replay"])
@pytest.mark.parametrize(("k", "times"), [(1, 1), (6, 2), (15, 1)])
def test_parked_after_some_k_it_goes_on_as_alone(
    smollm2: LoadedModel, answers: tuple[Answer, Answer], k: int, times: int, by: ParkBy
) -> None:
    check_parked_after(smollm2, answers, k, by, times)


@pytest.mark.full
@pytest.mark.parametrize("by", ["spill", "replay"])
@pytest.mark.parametrize("k", range(1, BUDGET))
@pytest.mark.parametrize("times", [1, 2])
def test_parked_after_every_k_it_goes_on_as_alone(
    smollm2: LoadedModel, answers: tuple[Answer, Answer], k: int, times: int, by: ParkBy
) -> None:
    check_parked_after(smollm2, answers, k, by, times)
