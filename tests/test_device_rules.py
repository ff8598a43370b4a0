"""What every device must do alike: what it reads back, which blocks and settings it refuses, how it ends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, DeviceKind
from reprieve.device.row_tiles import same_bits
from reprieve.errors import DeviceLost, InvalidArgument
from reprieve.model.weights import bf16_to_f32, f32_to_bf16
from reprieve.step import READ_NOTHING, TOKEN_ALL_NAN, TOKEN_NOT_READ
from tiny_models import ArrayTensor, Row, Runner, make_step, tiny_config, tiny_weights

if TYPE_CHECKING:
    from device_kinds import LogitDevice
    from reprieve.device.kv_pool import KvKind

KINDS = (REFERENCE, CPU, DeviceKind("cpu", 3))


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> DeviceKind:
    kind: DeviceKind = request.param
    return kind


@pytest.fixture
def device(kind: DeviceKind) -> LogitDevice:
    config = tiny_config()
    return kind.device(kind.weights(config, tiny_weights(config)))


# What is read back.


def test_only_rows_that_are_read_back_have_a_token_and_logits(device: LogitDevice) -> None:
    changes = [(slot, 0, slot) for slot in range(3)]
    ticket = device.launch(make_step([Row(0, 0, [1]), Row(1, 0, [2, 3], read=False), Row(2, 0, [4])], changes))
    tokens = ticket.settle().tokens
    assert tokens.dtype == np.int32
    assert tokens[1] == TOKEN_NOT_READ
    assert ticket.logit_rows.tolist() == [0, 2]
    assert ticket.logits.argmax(axis=1).tolist() == tokens[[0, 2]].tolist()
    nothing = device.launch(make_step([Row(1, 2, [3], read=False)], []))
    assert nothing.settle().tokens.tolist() == [TOKEN_NOT_READ]
    assert len(nothing.logits) == len(nothing.logit_rows) == 0


def test_a_row_of_nan_is_that_rows_business_alone(kind: DeviceKind) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    table = weights.embedding.float32()
    healthy = Runner.of(kind.device(kind.weights(config, weights))).run([Row(0, 0, [1, 2])])[0]
    table[7] = np.nan
    table[8] = np.inf
    broken = replace(weights, embedding=ArrayTensor("embedding", table))
    device = kind.device(kind.weights(config, broken))
    changes = [(slot, 0, slot) for slot in range(3)]
    ticket = device.launch(make_step([Row(0, 0, [7]), Row(1, 0, [1, 2]), Row(2, 0, [8])], changes))
    assert ticket.settle().tokens.tolist() == [TOKEN_ALL_NAN, healthy.argmax(), TOKEN_ALL_NAN]
    assert same_bits(ticket.logits[1], healthy)


def test_an_id_past_the_vocabulary_is_never_chosen(kind: DeviceKind) -> None:
    config = tiny_config(vocab_size=37)
    weights = tiny_weights(config, extra_vocab=59)
    output = weights.output.float32()
    output[37:] *= 100
    wide = replace(weights, output=ArrayTensor("output", output))
    device = kind.device(kind.weights(config, wide))
    wider = 0
    for token in range(37):
        ticket = device.launch(make_step([Row(0, 0, [token])], [(0, 0, 0)]))
        assert ticket.settle().tokens[0] == ticket.logits[0, :37].argmax()
        wider += ticket.logits[0].argmax() >= 37
    assert wider > 0


# Blocks and the rest of the protocol.


@pytest.mark.parametrize(("kv", "item"), [("f32", 4), ("f16", 2), ("bf16", 2)])
def test_gathered_blocks_come_back_byte_for_byte(kv: KvKind, item: int, kind: DeviceKind) -> None:
    config = tiny_config()
    device = kind.device(kind.weights(config, tiny_weights(config)), kv=kv)
    assert device.kv_dtype == kv
    assert sorted(device.kv_shape) == [2, 2, 2, 4, 16]  # layers, keys and values, KV heads, positions, head size
    assert device.block_bytes == math.prod(device.kv_shape) * item
    image = np.random.default_rng(0).integers(0, 256, 3 * device.block_bytes, np.uint8)
    device.scatter([7, 0, 19], image)
    assert np.array_equal(device.gather([7, 0, 19]), image)
    assert np.array_equal(device.gather([19]), image[2 * device.block_bytes :])
    assert not device.gather([1, 18]).any()
    assert device.gather([]).size == 0


def test_bad_blocks_and_images_are_refused_and_nothing_is_written(device: LogitDevice) -> None:
    size = device.block_bytes
    image = np.ones(2 * size, np.uint8)
    with pytest.raises(InvalidArgument, match=r"\[20\] are not among the pool's 20 blocks"):
        device.gather([3, 20])
    for blocks, bad, message in (
        ([0, -1], image, r"\[-1\] are not among"),
        ([0], image, f"image: must be {size} bytes .*1 blocks of {size}.* not (uint8 .)?{2 * size}"),
        ([0, 1], image.view(np.float32), "image: must be"),
        ([0, 1], image.reshape(2, size), "image: must be"),
        ([4, 4], image, r"names a block twice: \[4, 4\]"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            device.scatter(blocks, bad)  # type: ignore[arg-type]
    assert not device.gather(range(20)).any()


def test_kv_is_rounded_to_the_nearest(kind: DeviceKind) -> None:
    config = tiny_config()
    weights = kind.weights(config, tiny_weights(config))
    step = make_step([Row(0, 0, [1, 2, 3])], [(0, 0, 0)])
    exact, half, coarse = (kind.device(weights, kv=kv) for kv in ("f32", "f16", "bf16"))
    images = []
    for device in (exact, half, coarse):
        device.launch(step)
        images.append(device.gather([0]))
    # Of the first layer: what comes after it depends on what was read back.
    layer = np.s_[: math.prod(exact.kv_shape[1:])]
    values = images[0].view(np.float32)[layer]
    assert values.any()
    assert np.array_equal(images[1].view(np.float16)[layer], values.astype(np.float16))
    assert np.array_equal(images[2].view(np.uint16)[layer], f32_to_bf16(values))
    assert not same_bits(bf16_to_f32(images[2].view(np.uint16)[layer]), values)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_blocks": 0}, "num_blocks: must be at least 1, not 0"),
        ({"block_size": -4}, "block_size: must be at least 1, not -4"),
        ({"num_slots": 0}, "num_slots: must be at least 1, not 0"),
        ({"block_size": 0}, "block_size: must be at least 1, not 0"),
        ({"kv": "f64"}, 'kv: must be "f32", "f16" or "bf16", not \'f64\''),
    ],
)
def test_bad_settings_are_refused_by_name(setting: dict[str, Any], message: str, kind: DeviceKind) -> None:
    config = tiny_config()
    weights = kind.weights(config, tiny_weights(config))
    with pytest.raises(InvalidArgument) as caught:
        kind.device(weights, **{"num_blocks": 4, "block_size": 4, "num_slots": 2} | setting)
    assert str(caught.value) == message


def test_a_closed_device_is_lost_and_closing_twice_is_fine(device: LogitDevice) -> None:
    step = make_step([Row(0, 0, [1])], [(0, 0, 0)])
    device.probe()
    device.close()
    device.close()
    image = np.zeros(device.block_bytes, np.uint8)
    for call in (
        device.probe,
        lambda: device.launch(step),
        lambda: device.gather([0]),
        lambda: device.scatter([0], image),
    ):
        with pytest.raises(DeviceLost):
            call()


def test_a_step_that_reads_nothing_still_writes_its_kv(device: LogitDevice) -> None:
    step = make_step([Row(3, 0, [1, 2])], [(3, 0, 9)])
    device.launch(replace(step, readback=np.array([READ_NOTHING], np.uint8)))
    block = device.gather([9])
    # Of two of four positions, whatever their layout.
    assert np.count_nonzero(block.view(np.float32)) == len(block) // 4 // 2
    device.launch(replace(step, table_changes=make_step([], [(3, 0, 8)]).table_changes))
    assert np.array_equal(device.gather([8]), block)


def test_a_weight_of_another_shape_is_refused_by_name(kind: DeviceKind) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    wrong = ArrayTensor("blk.0.odd", np.zeros((47, 64), np.float32))
    broken = replace(weights, layers=(replace(weights.layers[0], o=wrong), weights.layers[1]))
    with pytest.raises(InvalidArgument, match=r"blk\.0\.odd is \[47, 64\], the model needs \[48, 64\]"):
        kind.weights(config, broken)
    with pytest.raises(InvalidArgument, match="1 layers, the model needs 2"):
        kind.weights(config, replace(weights, layers=weights.layers[:1]))
