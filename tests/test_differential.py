"""The oracle: whatever happens to the batch, each request's tokens, logits and end are those of its solo run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, DeviceKind, each_kind
from engine_kit import VOCAB, alone, position_bytes, tiny_model
from recording import check_nothing_left, check_stream, logits_of, recorded, solo_run
from reprieve import Engine, EngineConfig, LoadedModel, Request

if TYPE_CHECKING:
    from reprieve import Handle
    from reprieve.device.kv_pool import KvKind
    from reprieve.model.config import Architecture
    from reprieve.request import ParkBy

BUDGET = 32


def random_prompt(random: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(random.integers(0, VOCAB, length).tolist())


class Models(NamedTuple):
    """One model on the device that is tried, and on the one that its solo runs are made on."""

    tried: LoadedModel
    oracle: LoadedModel

    @classmethod
    def of(
        cls, kind: DeviceKind, architecture: Architecture = "llama", heads: tuple[int, int, int] = (4, 2, 16)
    ) -> Models:
        tried, oracle = (tiny_model(architecture, heads, kind=each) for each in (kind, kind.oracle))
        return cls(tried, oracle)


def check_equal_alone(oracle: LoadedModel, handles: list[Handle], device_logits: dict[str, list[bytes]]) -> None:
    for handle in handles:
        answer = alone(handle.request, oracle)
        assert handle.tokens == answer.tokens, handle.id
        assert handle.finish_reason == answer.finish_reason, handle.id
        assert device_logits[handle.id] == answer.logits, f"{handle.id}: other logits than alone"
        check_stream(handle.take_events(), answer)


def run_all(
    models: Models, requests: list[Request], config: EngineConfig, arrivals: list[int] | None = None
) -> list[Handle]:
    """Answer `requests`, each submitted before step `arrivals[i]`, checking the books after every step."""
    recording, devices = recorded(models.tried)
    handles: list[Handle] = []
    arrivals = arrivals or [0] * len(requests)
    with Engine(recording, config=config) as engine:
        step = 0
        while len(handles) < len(requests) or len(engine._journal):
            while len(handles) < len(requests) and arrivals[len(handles)] <= step:
                handles.append(engine.submit(requests[len(handles)]))
            engine.step()
            engine._books.check()
            engine._store.check()
            step += 1
            assert step < 20_000, "no end in sight"
        check_nothing_left(engine)
    # Sequence numbers are given out in the order of submission.
    logits = {handle.id: logits_of(devices[0], seq, len(handle.tokens)) for seq, handle in enumerate(handles)}
    check_equal_alone(models.oracle, handles, logits)
    return handles


def parks(handles: list[Handle]) -> tuple[int, int]:
    return (
        sum(handle.stats.parks_by_spill for handle in handles),
        sum(handle.stats.parks_by_replay for handle in handles),
    )


@each_kind
@pytest.mark.parametrize("host_blocks", [0, 9, 1000])
@pytest.mark.parametrize(("architecture", "heads"), [("llama", (4, 2, 16)), ("qwen2", (9, 3, 8)), ("qwen3", (6, 6, 8))])
def test_random_arrivals_priorities_and_pools_change_no_bit(
    architecture: Architecture, heads: tuple[int, int, int], host_blocks: int, kind: DeviceKind
) -> None:
    models = Models.of(kind, architecture, heads)
    block_bytes = 4 * position_bytes(models.tried)
    total = [0, 0]
    for seed in range(6):
        random = np.random.default_rng([seed, host_blocks])
        requests = [
            Request(
                random_prompt(random, int(random.integers(1, 40))),
                max_new_tokens=int(random.integers(1, BUDGET)),
                priority=int(random.integers(0, 3)),
            )
            for _ in range(10)
        ]
        # From just enough for one sequence (prompt 39 + budget 31 - 1 = 69 positions) up.
        config = EngineConfig(
            kv_blocks=int(random.choice([18, 22, 30, 45])),
            block_size=4,
            max_slots=int(random.integers(1, 7)),
            step_tokens=int(random.choice([1, 8, 13, 64])),
            host_kv_bytes=host_blocks * block_bytes,
            head_room=int(random.integers(0, 3)),
            immunity_tokens=int(random.choice([0, 4, 64])),
            victim=random.choice(["fewest_generated", "newest", "largest"]),
            depth=1 + seed % 3,
        )
        arrivals = np.cumsum(random.integers(0, 12, len(requests))).tolist()
        spills, replays = parks(run_all(models, requests, config, arrivals))
        total[0] += spills
        total[1] += replays
    assert total[0] > 0 if host_blocks == 1000 else total[0] == 0 or host_blocks > 0
    assert sum(total) > 0
    if host_blocks == 0:
        assert total[1] > 0


@each_kind
@pytest.mark.parametrize("by", ["spill", "replay"])
@pytest.mark.parametrize("times", [1, 2])
def test_parked_after_every_k_th_token_a_sequence_goes_on_as_alone(by: ParkBy, times: int, kind: DeviceKind) -> None:
    model, oracle = Models.of(kind)
    random = np.random.default_rng(5)
    request = Request(random_prompt(random, 3), max_new_tokens=BUDGET, ignore_eos=True)
    answer = alone(request, oracle)
    for k in range(1, BUDGET):
        recording, devices = recorded(model)
        with Engine(recording, kv_blocks=20, block_size=4, max_slots=2, depth=1 + k % 3) as engine:
            handle = engine.submit(request)
            while len(handle.tokens) < k:
                engine.step()
            for _ in range(times):
                assert engine.park(handle, by) == by
                assert engine.park(handle, by) is None, "parked already"
                engine._parker.bring_in()
            assert handle.result() == ""
            assert handle.tokens == answer.tokens
            assert logits_of(devices[0], 0, len(handle.tokens)) == answer.logits
            check_stream(handle.take_events(), answer)
            assert parks([handle]) == ((times, 0) if by == "spill" else (0, times))
            check_nothing_left(engine)


@each_kind
@pytest.mark.parametrize("by", ["spill", "replay", None])
@pytest.mark.parametrize(("every", "depth"), [(1, 1), (1, 3), (3, 1), (3, 2)])
def test_forced_parks_of_a_whole_batch_change_no_bit(
    every: int, depth: int, by: ParkBy | None, kind: DeviceKind
) -> None:
    random = np.random.default_rng([every])
    requests = [Request(random_prompt(random, int(n)), max_new_tokens=20) for n in random.integers(1, 30, 6)]
    config = EngineConfig(
        kv_blocks=40,
        block_size=4,
        max_slots=4,
        step_tokens=11,
        force_park_every=every,
        force_park_by=by,
        depth=depth,
    )
    spills, replays = parks(run_all(Models.of(kind), requests, config))
    assert (spills > 0, replays > 0) == (by != "replay", by == "replay")


@each_kind
@pytest.mark.parametrize("by", ["spill", "replay"])
@pytest.mark.parametrize("chunk", range(1, 5))
@pytest.mark.parametrize("phase", ["prefill", "replay"])
def test_parked_after_each_chunk_of_a_prefill_and_of_a_replay_it_samples_once(
    by: ParkBy, chunk: int, phase: Literal["prefill", "replay"], kind: DeviceKind
) -> None:
    model, oracle = Models.of(kind)
    request = Request(random_prompt(np.random.default_rng(9), 37), max_new_tokens=9, ignore_eos=True)
    answer = alone(request, oracle)
    recording, devices = recorded(model)
    with Engine(recording, kv_blocks=20, block_size=4, max_slots=1, step_tokens=8, depth=1) as engine:
        handle = engine.submit(request)
        if phase == "replay":
            while len(handle.tokens) < 4:
                engine.step()
            assert engine.park(handle, "replay") == "replay"
        for _ in range(chunk):
            engine.step()
        # Chunks of 8: four of them do not finish 37 or 40 positions.
        assert (engine._books.state(0), engine._books.committed(0)) == ("prefilling", 8 * chunk)
        assert engine.park(handle, by) == by
        handle.result()
        assert handle.tokens == answer.tokens
        assert logits_of(devices[0], 0, len(handle.tokens)) == answer.logits
        check_stream(handle.take_events(), answer)
        assert handle.stats.tokens_replayed == (0 if phase == "prefill" else 40) + (8 * chunk if by == "replay" else 0)
        check_nothing_left(engine)


@each_kind
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_every_kv_type_and_block_size_is_exact(kv: KvKind, block_size: int, kind: DeviceKind) -> None:
    model, oracle = Models.of(kind)
    random = np.random.default_rng(block_size)
    requests = [Request(random_prompt(random, int(n)), max_new_tokens=16, ignore_eos=True) for n in (3, 17, 26, 9)]
    answers = [solo_run(oracle, request, kv=kv) for request in requests]
    positions = 26 + 16 + 2 * block_size
    recording, devices = recorded(model)
    with Engine(
        recording,
        kv=kv,
        kv_blocks=-(-positions // block_size),
        block_size=block_size,
        force_park_every=5,
        head_room=0,
        depth=2,
    ) as engine:
        handles = [engine.submit(request) for request in requests]
        engine.run()
        for seq, (handle, answer) in enumerate(zip(handles, answers, strict=True)):
            check_stream(handle.take_events(), answer)
            assert logits_of(devices[0], seq, len(handle.tokens)) == answer.logits
        assert sum(parks(handles)) > 0
        check_nothing_left(engine)


@pytest.mark.parametrize("kind", [REFERENCE, CPU], ids=str)
def test_a_wrong_restore_would_be_noticed(kind: DeviceKind) -> None:
    """A negative control: an image that is restored wrong, but soundly, changes logits, and this file sees it."""
    model = tiny_model(kind=kind)
    request = Request(random_prompt(np.random.default_rng(1), 12), max_new_tokens=12, ignore_eos=True)
    recording, devices = recorded(model)
    with Engine(recording, kv_blocks=20, block_size=4, depth=1) as engine:
        handle = engine.submit(request)
        while len(handle.tokens) < 4:
            engine.step()
        engine.park(handle, "spill")
        device = devices[0]
        whole = device.scatter
        device.scatter = lambda blocks, image: whole(blocks, np.roll(image, 4))  # type: ignore[method-assign]
        handle.result()
    assert logits_of(device, 0, len(handle.tokens)) != alone(request, model).logits
