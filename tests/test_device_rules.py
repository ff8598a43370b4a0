"""What every device must do alike: what it reads back and feeds on, in which order, what it refuses, how it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, DeviceKind
from reprieve.device.row_tiles import same_bits
from reprieve.errors import DeviceLost, InvalidArgument
from reprieve.model.weights import bf16_to_f32, f32_to_bf16
from reprieve.step import ALWAYS, FROM_FEED, READ_NOTHING, TOKEN_ALL_NAN, TOKEN_NONE_ALLOWED, TOKEN_NOT_READ
from tiny_models import ArrayTensor, Row, Runner, make_step, mask_of, tiny_config, tiny_weights

if TYPE_CHECKING:
    from device_kinds import DeviceWeights, LogitDevice
    from reprieve.device.kv_pool import KvKind
    from reprieve.step import Step, Ticket

VOCAB = 61  # of `tiny_config`
KINDS = (REFERENCE, CPU, DeviceKind("cpu", 3))


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> DeviceKind:
    kind: DeviceKind = request.param
    return kind


@pytest.fixture
def weights(kind: DeviceKind) -> DeviceWeights:
    config = tiny_config()
    return kind.weights(config, tiny_weights(config))


@pytest.fixture
def device(kind: DeviceKind, weights: DeviceWeights) -> LogitDevice:
    return kind.device(weights)


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


# Bans and masks.


def test_bans_and_masks_bind_their_own_rows_alone(device: LogitDevice) -> None:
    rows = [Row(0, 0, [1, 2]), Row(1, 0, [1, 2]), Row(2, 0, [1, 2]), Row(3, 0, [1, 2])]
    changes = [(slot, 0, slot) for slot in range(4)]
    plain = device.launch(make_step(rows, changes))
    free, logits = plain.settle().tokens.tolist(), plain.logits
    order = np.argsort(-logits[2], kind="stable").tolist()
    assert free == [order[0]] * 4
    bound = device.launch(
        make_step(
            rows,
            changes,
            bans=[(2, order[1], ALWAYS), (2, order[0], ALWAYS), (3, order[2], ALWAYS)],
            masks={0: mask_of({order[5], order[9]}, VOCAB), 3: mask_of({order[2], order[3], order[50]}, VOCAB)},
        )
    )
    assert bound.settle().tokens.tolist() == [order[5], free[1], order[2], order[3]]
    assert same_bits(bound.logits, logits)


def test_a_ban_with_after_holds_only_behind_that_input(device: LogitDevice) -> None:
    rows = [Row(slot, 0, [1, 2]) for slot in range(4)]
    changes = [(slot, 0, slot) for slot in range(4)]
    ticket = device.launch(make_step(rows, changes))
    best, second = np.argsort(-ticket.logits[0], kind="stable").tolist()[:2]
    # Behind 2, the last input; 1 is an input too, but not the last.
    bans = [(0, best, 2), (1, best, 1), (2, best, 3), (3, best, best), (3, best, 2)]
    assert device.launch(make_step(rows, changes, bans=bans)).settle().tokens.tolist() == [second, best, best, second]


def test_a_ban_with_after_looks_at_what_the_cell_fed(kind: DeviceKind, weights: DeviceWeights) -> None:
    probe = Runner.of(kind.device(weights))
    first = int(probe.launch([Row(0, 0, [1, 2])]).settle().tokens[0])
    best, second = np.argsort(-probe.run([Row(0, 2, [first])])[0], kind="stable").tolist()[:2]
    for after, token in ((first, second), ((first + 1) % VOCAB, best), (2, best), (ALWAYS, second)):
        runner = Runner.of(kind.device(weights))
        launched = runner.launch([Row(0, 0, [1, 2])])
        fed = runner.launch([Row(0, 2, [FROM_FEED])], bans=[(0, best, after)])
        assert launched.settle().tokens.tolist() == [first]
        assert fed.settle().tokens.tolist() == [token]


def test_where_nothing_is_allowed_the_row_has_no_token_and_its_neighbours_have_theirs(device: LogitDevice) -> None:
    rows = [Row(0, 0, [1, 2]), Row(1, 0, [1, 2]), Row(2, 0, [1, 2], read=False), Row(3, 0, [1, 2])]
    changes = [(slot, 0, slot) for slot in range(4)]
    ticket = device.launch(
        make_step(
            rows,
            changes,
            bans=[(0, 33, ALWAYS), (2, 5, ALWAYS), (3, 34, ALWAYS)],
            masks={0: mask_of({33}, VOCAB), 2: mask_of({5}, VOCAB), 3: mask_of({34}, VOCAB)},
        )
    )
    best = ticket.logits[1].argmax()
    assert ticket.settle().tokens.tolist() == [TOKEN_NONE_ALLOWED, best, TOKEN_NOT_READ, TOKEN_NONE_ALLOWED]


def test_no_allowed_token_is_said_before_nothing_but_nan(kind: DeviceKind) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    table = weights.embedding.float32()
    table[7] = np.nan
    device = kind.device(kind.weights(config, replace(weights, embedding=ArrayTensor("embedding", table))))
    rows = [Row(slot, 0, [7]) for slot in range(4)]
    masks = {1: mask_of({3, 40}, VOCAB), 2: mask_of((), VOCAB), 3: mask_of({3}, VOCAB)}
    step = make_step(rows, [(slot, 0, slot) for slot in range(4)], bans=[(0, 3, ALWAYS), (3, 3, ALWAYS)], masks=masks)
    expected = [TOKEN_ALL_NAN, TOKEN_ALL_NAN, TOKEN_NONE_ALLOWED, TOKEN_NONE_ALLOWED]
    assert device.launch(step).settle().tokens.tolist() == expected


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 65, 95, 96, 97, 513])
def test_each_bit_of_a_mask_allows_its_own_id_up_to_the_vocabulary(vocab: int, kind: DeviceKind) -> None:
    config = tiny_config(vocab_size=vocab)
    device = kind.device(kind.weights(config, tiny_weights(config, extra_vocab=59)))
    row = [Row(0, 0, [vocab - 1])]
    for token in {0, 31, 32, 63, 64, 95, 96, vocab - 1}:
        mask = mask_of({token}, max(vocab, token + 1) + 32)  # wider than it need be
        chosen = device.launch(make_step(row, [(0, 0, 0)], masks={0: mask})).settle().tokens[0]
        assert chosen == (token if token < vocab else TOKEN_NONE_ALLOWED)
    everything = np.full(-(-vocab // 32), 0xFFFFFFFF, np.uint32)
    ticket = device.launch(make_step(row, [(0, 0, 0)], masks={0: everything}))
    best = int(ticket.logits[0, :vocab].argmax())
    assert ticket.settle().tokens[0] == best
    ticket = device.launch(make_step(row, [(0, 0, 0)], bans=[(0, best, ALWAYS)], masks={0: everything}))
    others = np.where(np.arange(vocab) == best, -np.inf, ticket.logits[0, :vocab])
    assert ticket.settle().tokens[0] == (others.argmax() if vocab > 1 else TOKEN_NONE_ALLOWED)


# Feed cells.


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_fed_from_its_cells_is_that_of_the_tokens_given(
    depth: int, kind: DeviceKind, weights: DeviceWeights
) -> None:

    def rows(at: int, tokens: list[int]) -> list[Row]:
        """Return two decode rows at positions 3 and 2 from `at`, with a chunk of a prefill between them."""
        return [Row(0, 3 + at, tokens[:1]), Row(1, 2 * at, [at, 9], read=at % 2 == 0), Row(3, 2 + at, tokens[-1:])]

    given = Runner.of(kind.device(weights))
    expected = [given.launch([Row(0, 0, [1, 2, 3]), Row(3, 0, [4, 5])]).settle().tokens.tolist()]
    for at in range(6):
        ticket = given.launch(rows(at, [expected[-1][0], expected[-1][-1]]))
        expected.append(ticket.settle().tokens.tolist())
    assert len({tuple(tokens) for tokens in expected}) > 3

    fed = Runner.of(kind.device(weights))
    flying = deque([fed.launch([Row(0, 0, [1, 2, 3]), Row(3, 0, [4, 5])])])
    got = []
    for at in range(6):
        if len(flying) == depth:
            got.append(flying.popleft().settle().tokens.tolist())
        flying.append(fed.launch(rows(at, [FROM_FEED])))
    newest = flying[-1]
    got += [each.settle().tokens.tolist() for each in flying]
    assert got == expected
    assert same_bits(newest.logits, ticket.logits)
    assert np.array_equal(fed.device.gather(range(20)), given.device.gather(range(20)))


def test_the_feed_holds_the_token_that_mask_and_bans_left(kind: DeviceKind, weights: DeviceWeights) -> None:
    given = Runner.of(kind.device(weights))
    first = np.argsort(-given.run([Row(0, 0, [1, 2])])[0], kind="stable").tolist()
    for bans, masks, token in (
        ([], {0: mask_of({first[7], first[30]}, VOCAB)}, first[7]),
        ([(0, first[0], ALWAYS)], {}, first[1]),
        ([(0, first[7], 2)], {0: mask_of({first[7], first[30]}, VOCAB)}, first[30]),
    ):
        fed = Runner.of(kind.device(weights))
        launched = fed.launch([Row(0, 0, [1, 2])], bans=bans, masks=masks)
        behind = fed.launch([Row(0, 2, [FROM_FEED])])
        assert launched.settle().tokens.tolist() == [token]
        assert behind.settle().tokens.tolist() == [behind.logits[0].argmax()]
        assert same_bits(behind.logits[0], given.run([Row(0, 2, [token])])[0])


def test_a_row_that_is_not_read_back_leaves_the_feed_as_it_was(device: LogitDevice) -> None:
    runner = Runner.of(device)
    token = int(runner.launch([Row(0, 0, [1, 2])]).settle().tokens[0])
    runner.run([Row(0, 2, [8, 9, 8], read=False)])
    fed = runner.run([Row(0, 5, [FROM_FEED])])[0]
    assert same_bits(fed, runner.run([Row(0, 5, [token])])[0])


def test_a_slot_that_changes_hands_forgets_its_feed(device: LogitDevice) -> None:
    def refused(step: Step) -> None:
        with pytest.raises(InvalidArgument, match=r"^step\.token_ids: "):
            device.launch(step)

    refused(make_step([Row(0, 0, [FROM_FEED])], [(0, 0, 3)]))
    device.launch(make_step([Row(0, 0, [1], read=False)], [(0, 0, 3)]))
    refused(make_step([Row(0, 1, [FROM_FEED])], []))
    first = device.launch(make_step([Row(0, 1, [2])], []))
    refused(make_step([Row(1, 0, [FROM_FEED])], [(1, 0, 7)]))  # a cell is its slot's own
    device.launch(make_step([Row(0, 2, [FROM_FEED])], [(0, 1, 4)])).settle()  # growing changes no hands
    assert first.settle().tokens[0] >= 0
    refused(make_step([Row(0, 0, [FROM_FEED])], [(0, 0, 5)]))
    device.launch(make_step([Row(0, 3, [FROM_FEED])], [])).settle()  # a refused step changes no hands
    device.launch(make_step([Row(0, 0, [3, 4], read=False)], [(0, 0, 5)])).settle()
    refused(make_step([Row(0, 2, [FROM_FEED])], []))


def test_a_cell_without_a_token_harms_no_neighbour(kind: DeviceKind, weights: DeviceWeights) -> None:
    alone = Runner.of(kind.device(weights))
    token = int(alone.launch([Row(1, 0, [4, 5])]).settle().tokens[0])
    expected = alone.run([Row(1, 2, [token])])[1]
    runner = Runner.of(kind.device(weights))
    first = runner.launch([Row(0, 0, [1]), Row(1, 0, [4, 5])], masks={0: mask_of((), VOCAB)})
    behind = runner.launch([Row(0, 1, [FROM_FEED]), Row(1, 2, [FROM_FEED])])
    assert first.settle().tokens.tolist() == [TOKEN_NONE_ALLOWED, token]
    behind.settle()
    assert same_bits(behind.logits[1], expected)


# Several steps in flight.


def wait_until_ready(ticket: Ticket) -> None:
    """Poll a ticket, for a minute at most: a device has no event to wait for but `settle`."""
    until = time.monotonic() + 60
    while not ticket.ready():
        assert time.monotonic() < until, "never ready"
        time.sleep(0.0005)


def test_a_device_names_a_depth(device: LogitDevice) -> None:
    assert device.default_depth in {1, 2, 3}


def test_tickets_become_ready_by_themselves_and_each_keeps_its_own_tokens(device: LogitDevice) -> None:
    runner = Runner.of(device)
    rows = [[Row(slot, 0, [slot, 5 + slot])] for slot in range(3)]
    expected = [device.launch(make_step(row, [(row[0].slot, 0, 19)])).settle().tokens.tolist() for row in rows]
    assert len({tuple(tokens) for tokens in expected}) > 1
    tickets = [runner.launch(row) for row in rows]
    wait_until_ready(tickets[2])
    assert all(ticket.ready() for ticket in tickets)
    assert [ticket.settle().tokens.tolist() for ticket in tickets] == expected
    assert [int(ticket.step.slots[0]) for ticket in tickets] == [0, 1, 2]


def test_blocks_are_gathered_as_the_launched_steps_leave_them(kind: DeviceKind, weights: DeviceWeights) -> None:
    settled, flying = Runner.of(kind.device(weights)), Runner.of(kind.device(weights))
    images = []
    settled.launch([Row(0, 0, [1, 2])]).settle()
    images.append(settled.device.gather(range(20)))
    settled.launch([Row(0, 2, [3, 4, 5])]).settle()
    images.append(settled.device.gather(range(20)))
    tickets = [flying.launch([Row(0, 0, [1, 2])])]
    assert np.array_equal(flying.device.gather(range(20)), images[0])
    tickets.append(flying.launch([Row(0, 2, [3, 4, 5])]))
    assert np.array_equal(flying.device.gather(range(20)), images[1])
    assert not np.array_equal(images[0], images[1])
    for ticket in tickets:
        ticket.settle()


def test_a_step_sees_the_blocks_scattered_before_its_launch_and_none_after(
    kind: DeviceKind, weights: DeviceWeights
) -> None:
    source = Runner.of(kind.device(weights))
    source.run([Row(0, 0, [1, 2, 3, 4])])
    image = source.device.gather(source.tables[0])
    expected = source.run([Row(0, 4, [5])])[0]
    device = kind.device(weights)
    other = device.launch(make_step([Row(2, 0, [9, 9, 9])], [(2, 0, 0)]))  # in flight meanwhile
    device.scatter([11], image)
    image[:] = 255  # the caller may overwrite it
    ticket = device.launch(make_step([Row(1, 4, [5])], [(1, 0, 11), (1, 1, 6)]))
    device.scatter([11], image)
    assert other.settle().tokens[0] >= 0
    assert ticket.settle().tokens[0] == expected.argmax()
    assert same_bits(ticket.logits[0], expected)
    assert np.array_equal(device.gather([11]), image)


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
