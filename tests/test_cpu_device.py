"""The CPU device against the reference, and what is its own: steps in flight, tickets, settings and unusual numbers."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_kinds import CPU, REFERENCE, DeviceKind, check_close
from reprieve import Engine
from reprieve._native import cpu_instructions
from reprieve.device.cpu import CpuDevice
from reprieve.device.cpu_weights import CpuWeights
from reprieve.device.row_tiles import same_bits
from reprieve.errors import DeviceLost, InvalidArgument, ModelFileError, StepFailed
from reprieve.loading import from_weights, load
from reprieve.model.config import ModelConfig
from reprieve.step import ALWAYS, FROM_FEED, TOKEN_ALL_NAN, TOKEN_NONE_ALLOWED, StepResult
from tiny_models import ArrayTensor, Row, Runner, make_step, mask_of, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from reprieve.device.kv_pool import KvKind
    from reprieve.step import Step

HERE = Path(__file__).parent


# Meaning.


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Return a small model of odd sizes."""
    kv_heads = draw(st.integers(1, 4))
    return ModelConfig(
        architecture=draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"])),
        vocab_size=draw(st.integers(1, 90)),
        hidden_size=draw(st.integers(8, 80)),  # the norm of a few numbers near zero tells apart what is all but equal
        intermediate_size=draw(st.integers(1, 80)),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=kv_heads,
        head_size=2 * draw(st.integers(1, 20)),
        context_length=64,
        rms_norm_eps=1e-5,
        rope_theta=draw(st.sampled_from([100.0, 10000.0])),
    )


@given(
    config=models(),
    kv=st.sampled_from(["f32", "f16", "bf16"]),
    block_size=st.integers(1, 20),
    threads=st.integers(1, 4),
    chunks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_logits_and_kv_are_those_of_the_reference_whatever_the_sizes(
    config: ModelConfig, kv: KvKind, block_size: int, threads: int, chunks: list[int], seed: int
) -> None:
    chunks = [count for count, end in zip(chunks, np.cumsum(chunks), strict=True) if end <= 60]
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, 64).tolist()
    model = tiny_weights(config, seed)
    results = []
    for kind in (REFERENCE, DeviceKind("cpu", threads)):
        device = kind.device(kind.weights(config, model), -(-64 // block_size), block_size, 2, kv)
        runner = Runner.of(device, seed)
        steps, at = [], 0
        for count in chunks:
            steps.append(runner.run([Row(1, at, tokens[at : at + count])])[1])
            at += count
        results.append(np.stack(steps))
    expected, got = results
    check_close(got, expected, kv, least=1)  # the logits of a model so small may all be near zero


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_the_usual_head_sizes_mean_what_the_reference_says(head_size: int) -> None:
    config = tiny_config((4, 2, head_size))
    model = tiny_weights(config)
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, 40).tolist()
    expected, got = (
        Runner.of(kind.device(kind.weights(config, model))).run([Row(0, 0, tokens)])[0] for kind in (REFERENCE, CPU)
    )
    check_close(got, expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 65, 400])
def test_a_step_may_have_one_token_or_hundreds(num_tokens: int) -> None:
    config = tiny_config()
    model = tiny_weights(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, num_tokens).tolist()
    expected, whole = (
        Runner.of(kind.device(kind.weights(config, model), num_blocks=100)).run([Row(0, 0, tokens)])[0]
        for kind in (REFERENCE, DeviceKind("cpu", 2))
    )
    check_close(whole, expected)
    single = Runner.of(CPU.device(CPU.weights(config, model), num_blocks=100))
    for at, token in enumerate(tokens):
        one = single.run([Row(0, at, [token])])[0]
    assert same_bits(one, whole)


# Choosing.


@pytest.mark.parametrize("vocab_size", [1, 31, 512, 513, 5000])
def test_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    config = tiny_config(vocab_size=vocab_size)
    model = tiny_weights(config)
    output = model.output.float32()
    kind = DeviceKind("cpu", 3)
    device = kind.device(kind.weights(config, model))
    first = device.launch(make_step([Row(0, 0, [0])], [(0, 0, 0)]))
    best = first.settle().tokens[0]
    winner = output[best] * np.float32(2 if first.logits[0, best] > 0 else 0.5)
    equal_ones = ([0, vocab_size - 1], [vocab_size // 2, vocab_size - 1], [5, 256], range(vocab_size))
    for ids in equal_ones:
        if max(ids) >= vocab_size:
            continue
        tied = output.copy()
        tied[list(ids)] = winner
        weights = kind.weights(config, replace(model, output=ArrayTensor("output", tied)))
        ticket = kind.device(weights).launch(make_step([Row(0, 0, [0])], [(0, 0, 0)]))
        assert ticket.settle().tokens.tolist() == [min(ids)]
        assert len(np.unique(ticket.logits[0, list(ids)])) == 1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("threads", [1, 3])
def test_unusual_numbers_in_the_kv_of_one_row_stay_there(poison: float, threads: int) -> None:
    config = tiny_config()
    kind = DeviceKind("cpu", threads)
    weights = kind.weights(config, tiny_weights(config))
    device, sound = kind.device(weights), kind.device(weights)
    changes = [(0, 0, 5), (1, 0, 6), (2, 0, 7)]
    rows = [Row(slot, 0, [slot + 1, 4]) for slot in range(3)]
    for each in (device, sound):
        each.launch(make_step(rows, changes))
    image = np.full(device.block_bytes // 4, poison, np.float32)
    device.scatter([6], image.view(np.uint8))
    step = make_step([Row(slot, 2, [9]) for slot in range(3)], [])
    ticket, expected = device.launch(step), sound.launch(step)
    assert ticket.settle().tokens[1] == TOKEN_ALL_NAN
    for row in (0, 2):
        assert same_bits(ticket.logits[row], expected.logits[row])
        assert ticket.settle().tokens[row] == expected.settle().tokens[row]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_unusual_weight_shows_only_where_it_is_used(poison: float) -> None:
    config = tiny_config()
    model = tiny_weights(config)
    broken = model.output.float32()
    broken[[3, 60]] = poison
    results = []
    for kind in (REFERENCE, DeviceKind("cpu", 2)):
        changed = replace(model, output=ArrayTensor("output", broken))
        ticket = kind.device(kind.weights(config, changed)).launch(make_step([Row(0, 0, [1, 2])], [(0, 0, 0)]))
        assert not np.isfinite(ticket.logits[0, [3, 60]]).any()
        results.append(np.delete(ticket.logits[0], [3, 60]))
        assert ticket.settle().tokens[0] == np.nanargmax(ticket.logits[0])
    check_close(results[1], results[0])


# Tickets.


def test_logits_are_there_until_the_next_step_and_no_longer() -> None:
    config = tiny_config()
    device = CPU.device(CPU.weights(config, tiny_weights(config)))
    first = device.launch(make_step([Row(0, 0, [1, 2])], [(0, 0, 0)]))
    kept = first.logits
    with pytest.raises(InvalidArgument):
        device.launch(make_step([Row(1, 0, [1])], []))
    assert same_bits(first.logits, kept), "a refused step changes nothing"
    kept[:] = 0
    assert first.logits.any(), "each is a copy"
    second = device.launch(make_step([Row(0, 2, [3])], []))
    with pytest.raises(RuntimeError, match="the logits are gone: another step was launched since"):
        _ = first.logits
    assert second.logits.shape == (1, config.vocab_size)
    tokens = second.settle().tokens.copy()
    device.launch(make_step([Row(0, 3, [3])], []))
    assert np.array_equal(second.settle().tokens, tokens), "a ticket's tokens are its own"
    device.close()
    with pytest.raises(DeviceLost):
        _ = second.logits


def test_a_step_in_flight_is_settled_once_however_often_and_in_whatever_order() -> None:
    config = tiny_config()
    kind = DeviceKind("cpu", 2)
    weights = kind.weights(config, tiny_weights(config))
    one, many = Runner.of(kind.device(weights)), Runner.of(kind.device(weights))
    expected, token = [], 5
    for at in range(40):
        expected.append(one.launch([Row(0, at, [token])]).settle().tokens.tolist())
        token = expected[-1][0]
    tickets = [many.launch([Row(0, at, [5 if at == 0 else FROM_FEED])]) for at in range(40)]
    last = tickets[-1].settle()
    assert all(ticket.ready() for ticket in tickets), "steps are computed in order"
    assert [ticket.settle().tokens.tolist() for ticket in reversed(tickets)] == expected[::-1]
    assert tickets[-1].settle() is last
    assert np.array_equal(tickets[-1].logits, one.launch([Row(0, 39, [expected[38][0]])]).logits)


def test_a_launch_does_not_wait_and_a_ticket_is_ready_when_its_step_is_over() -> None:
    device, step = slow_device()
    first = [device.launch(step) for _ in range(10)]  # a second's work
    second = device.launch(make_step([Row(0, 400, [FROM_FEED])], [(0, 100, 100)]))
    assert not first[-1].ready()
    assert not second.ready()
    tokens = first[-1].settle().tokens
    assert all(ticket.ready() for ticket in first)
    assert second.settle().tokens[0] >= 0
    again = device.launch(make_step([Row(0, 400, tokens.tolist())], []))
    assert again.settle().tokens.tolist() == second.settle().tokens.tolist()


def slow_device() -> tuple[CpuDevice, Step]:
    """Return a device, and a step for it that takes a tenth of a second or so."""
    config = tiny_config((8, 8, 64), hidden=512)
    device = CpuDevice(CpuWeights(config, tiny_weights(config)), num_blocks=101, block_size=4, num_slots=2, kv="f32")
    return device, make_step([Row(0, 0, [1] * 400)], [(0, index, index) for index in range(100)])


def test_a_settle_that_was_interrupted_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    device = CPU.device(CPU.weights(config, tiny_weights(config)))
    assert isinstance(device, CpuDevice)
    tickets = [device.launch(make_step([Row(0, at, [4])], [(0, 0, 0)] if at == 0 else [])) for at in range(3)]
    expected = [ticket.settle().tokens.tolist() for ticket in tickets[1:]]
    settle, forget = CpuDevice.settle, CpuDevice.forget

    def interrupted(call: Callable[..., None]) -> Callable[..., None]:
        def late(*arguments: Any) -> None:
            call(*arguments)
            raise KeyboardInterrupt

        return late

    for name, call in (("settle", settle), ("forget", forget)):
        ticket = device.launch(make_step([Row(0, 1, [4])], []))
        with monkeypatch.context() as patch:
            patch.setattr(CpuDevice, name, interrupted(call))
            with pytest.raises(KeyboardInterrupt):
                ticket.settle()
        device.launch(make_step([Row(0, 2, [4])], [])).settle()
        assert ticket.settle().tokens.tolist() == expected[0]
    assert tickets[0].settle().tokens[0] >= 0, "one that was left alone is kept"


def test_closing_with_steps_in_flight_waits_for_one_of_them_at_most_and_hangs_nobody() -> None:
    device, step = slow_device()
    tickets = [device.launch(step) for _ in range(20)]
    answers: list[BaseException | StepResult] = []

    def settle() -> None:
        try:
            answers.append(tickets[-1].settle())
        except (StepFailed, DeviceLost) as error:
            answers.append(error)

    waiting = threading.Thread(target=settle)
    waiting.start()
    device.close()
    waiting.join()
    assert isinstance(answers[0], StepFailed | DeviceLost), "nobody waited for twenty"
    assert all(ticket.ready() for ticket in tickets)
    for ticket in tickets:
        with pytest.raises(DeviceLost):
            ticket.settle()
    device.close()


@pytest.mark.parametrize("vocab_size", [1, 31, 95, 96, 97, 513])
def test_masks_and_bans_choose_what_is_left_at_every_edge_of_the_vocabulary(vocab_size: int) -> None:
    config = tiny_config(vocab_size=vocab_size)
    kind = DeviceKind("cpu", 2)
    device = kind.device(kind.weights(config, tiny_weights(config)))
    launched = device.launch(make_step([Row(0, 0, [0])], [(0, 0, 0)]))
    order = np.argsort(-launched.logits[0], kind="stable").tolist()

    def chosen(bans: list[int], allowed: list[int] | None) -> int:
        masks = None if allowed is None else {0: mask_of(allowed, vocab_size)}
        step = make_step([Row(0, 0, [0])], [], bans=[(0, token, ALWAYS) for token in bans], masks=masks)
        return int(device.launch(step).settle().tokens[0])

    for token in {0, 31, 32, 63, 64, vocab_size - 1} & set(range(vocab_size)):
        assert chosen([], [token]) == token
        assert chosen([token], [token]) == TOKEN_NONE_ALLOWED
        others = [other for other in range(vocab_size) if other != token]
        assert chosen(others, None) == token
        if vocab_size > 1:
            expected = next(other for other in order if other != token)
            assert chosen([token], None) == chosen([], others) == chosen([token], list(range(vocab_size))) == expected
    assert chosen(list(range(vocab_size)), None) == chosen([], []) == TOKEN_NONE_ALLOWED
    for few in range(min(4, vocab_size - 1)):
        assert chosen(order[:few], None) == order[few]


def test_it_says_what_it_is_made_of_and_where_its_time_went() -> None:
    config = tiny_config()
    kind = DeviceKind("cpu", 2)
    device = kind.device(kind.weights(config, tiny_weights(config)))
    assert isinstance(device, CpuDevice)
    assert (device.threads, device.instructions) == (2, cpu_instructions()[0])
    assert device.default_depth == 1
    assert not any(device.op_seconds().values())
    Runner.of(device).run([Row(0, 0, list(range(40)))])
    seconds = device.op_seconds()
    assert seconds["linear"] > 0
    assert seconds["attention"] > 0
    device.close()
    with pytest.raises(DeviceLost):
        device.op_seconds()


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    config = tiny_config()
    weights = CpuWeights(config, tiny_weights(config))
    with pytest.raises(InvalidArgument, match="instructions: must be one of"):
        CpuDevice(weights, num_blocks=1, block_size=1, num_slots=1, kv="f32", instructions="mmx")


# Settings.


def test_the_cpu_is_the_default_and_a_bad_device_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    model = from_weights("tiny", config, tiny_weights(config))
    assert (model.device, model.kv) == ("cpu", "f16")
    with Engine(model, kv_blocks=4) as engine:
        assert engine.kv == "f16"
        assert isinstance(engine._device, CpuDevice)
    with Engine(model, kv_blocks=4, kv="bf16") as engine:
        assert engine.kv == "bf16"
    reference = from_weights("tiny", config, tiny_weights(config), device="reference")
    assert (reference.device, reference.kv) == ("reference", "f32")
    with pytest.raises(InvalidArgument, match="device: must be one of auto, cpu, reference, not 'gpu'"):
        from_weights("tiny", config, tiny_weights(config), device="gpu")
    with pytest.raises(ModelFileError):
        load(tmp_path, device="cpu")
