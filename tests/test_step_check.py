"""A step that cannot be computed is refused with its numbers, and nothing is written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, DeviceKind
from reprieve.device.reference import ReferenceDevice
from reprieve.device.row_tiles import same_bits
from reprieve.errors import InvalidArgument
from reprieve.model.llama import forward
from reprieve.step import ALWAYS, FROM_FEED
from tiny_models import Row, make_step, tiny_config, tiny_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from device_kinds import LogitDevice
    from reprieve.step import Step


@pytest.fixture(params=[REFERENCE, CPU, DeviceKind("cpu", 2)], ids=str)
def device(request: pytest.FixtureRequest) -> LogitDevice:
    return make_device(request.param)


def make_device(kind: DeviceKind) -> LogitDevice:
    config = tiny_config()
    return kind.device(kind.weights(config, tiny_weights(config)))


def good_step() -> Step:
    """Return two rows, in slots 0 and 2, at positions 3 and 0; block 0 of slot 0 is known from an earlier step."""
    return make_step([Row(0, 3, [5, 6]), Row(2, 0, [7, 8, 9])], [(0, 1, 4), (2, 0, 5)])


GOOD_TOKENS = [32, 32]


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def bans(*rows: tuple[int, int, int]) -> NDArray[np.int32]:
    return np.array(rows, np.int32)


MASKS = np.full((2, 2), 0xFFFFFFFF, np.uint32)

BAD_STEPS: dict[str, dict[str, NDArray[Any]]] = {
    "step.token_ids: must be from 0 to 60, not [61]": {"token_ids": int32(5, 6, 7, 61, 9)},
    "step.token_ids: must be from 0 to 60, not [-2]": {"token_ids": int32(5, 6, -2, 8, 9)},
    "step.token_ids: may be -1, from the feed cell, in a row of 1 token; row 1 has 3": {
        "token_ids": int32(5, 6, -1, 8, 9)
    },
    "step.token_ids: cannot be -1 in slots [2]: nothing was read back in them since their tables began": {
        "token_ids": int32(5, 6, -1),
        "positions": int32(3, 4, 0),
        "num_new": int32(2, 1),
        "kv_lengths": int32(5, 1),
    },
    "step.token_ids: must be C-contiguous int32 [5], not int64": {"token_ids": np.arange(5)},
    "step.token_ids: must be C-contiguous int32 [5], not int32 [5], not C-": {"token_ids": np.zeros(10, np.int32)[::2]},
    "step.positions: must be C-contiguous int32 [5], not int32 [4]": {"positions": int32(3, 4, 0, 1)},
    "step.positions: must count from each row's start: token 2 is at 0, not 1": {"positions": int32(3, 4, 1, 2, 3)},
    "step.slots: must ascend, each slot once: [2, 0]": {"slots": int32(2, 0)},
    "step.slots: must ascend, each slot once: [2, 2]": {"slots": int32(2, 2)},
    "step.slots: must be from 0 to 3, not [4]": {"slots": int32(0, 4)},
    "step.seqs: must be C-contiguous uint64 [2], not int32": {"seqs": int32(0, 2)},
    "step.starts: must be from 0 to 79, not [-1]": {"starts": int32(3, -1)},
    "step.num_new: must be from 1 to 80, not [0]": {"num_new": int32(2, 0)},
    "step.num_new: adds up to 6 tokens, token_ids has 5": {"num_new": int32(2, 4), "kv_lengths": int32(5, 4)},
    "step.kv_lengths: must be starts + num_new, [3, 0] + [2, 3]: [5, 4]": {"kv_lengths": int32(5, 4)},
    "step.kv_lengths: must be from 1 to 80, not [81]": {"kv_lengths": int32(5, 81)},
    "step.readback: unknown kinds [2]": {"readback": np.array([1, 2], np.uint8)},
    "step.table_changes: must be C-contiguous int32 [1, 3], not int32 [1, 2]": {
        "table_changes": np.zeros((1, 2), np.int32)
    },
    "step.table_changes (slot): must be from 0 to 3, not [4]": {"table_changes": int32(4, 0, 1).reshape(1, 3)},
    "step.table_changes (index): must be from 0 to 19, not [20]": {"table_changes": int32(0, 20, 1).reshape(1, 3)},
    "step.table_changes (block): must be from 0 to 19, not [-1]": {"table_changes": int32(2, 0, -1).reshape(1, 3)},
    "slot 0 needs blocks for 5 positions, its table lacks entries [1]": {"table_changes": int32(2, 0, 5).reshape(1, 3)},
    "slot 2 needs blocks for 3 positions, its table lacks entries [0]": {"table_changes": int32(0, 1, 5).reshape(1, 3)},
    "step.table_changes: block 3 would be written for two places": {
        "table_changes": int32(0, 1, 3, 2, 0, 5).reshape(2, 3)
    },
    "step.table_changes: block 4 would be written for two places": {
        "table_changes": int32(0, 1, 4, 2, 0, 4).reshape(2, 3)
    },
    # Two tables of the same two blocks, of which the lowest is named.
    "step.table_changes: block 6 would be written for two places": {
        "starts": int32(3, 3),
        "positions": int32(3, 4, 3, 4, 5),
        "kv_lengths": int32(5, 6),
        "table_changes": int32(0, 0, 7, 0, 1, 6, 2, 0, 6, 2, 1, 7).reshape(4, 3),
    },
    "step.bans: must be C-contiguous int32 [1, 3], not int32 [1, 2]": {"bans": int32(0, 1).reshape(1, 2)},
    "step.bans: must be C-contiguous int32 [1, 3], not int64 [1, 3]": {"bans": np.array([[0, 1, ALWAYS]])},
    "step.bans (row): must be from 0 to 1, not [2]": {"bans": bans((0, 1, ALWAYS), (2, 1, ALWAYS))},
    "step.bans (row): must be from 0 to 1, not [-1]": {"bans": bans((-1, 1, ALWAYS))},
    "step.bans (row): must ascend: [1, 1, 0]": {"bans": bans((1, 1, ALWAYS), (1, 2, ALWAYS), (0, 1, ALWAYS))},
    "step.bans (token id): must be from 0 to 60, not [61]": {"bans": bans((0, 61, ALWAYS))},
    "step.bans (token id): must be from 0 to 60, not [-1]": {"bans": bans((1, -1, 5))},
    "step.bans (after): must be from -1 to 60, not [-2]": {"bans": bans((0, 1, -2))},
    "step.bans (after): must be from -1 to 60, not [61]": {"bans": bans((0, 1, 61))},
    "step.mask_rows: must be C-contiguous int32 [1], not int64": {
        "mask_rows": np.zeros(1, np.int64),
        "masks": MASKS[1:],
    },
    "step.mask_rows: must be from 0 to 1, not [2]": {"mask_rows": int32(1, 2), "masks": MASKS},
    "step.mask_rows: must ascend, each row once: [1, 0]": {"mask_rows": int32(1, 0), "masks": MASKS},
    "step.mask_rows: must ascend, each row once: [1, 1]": {"mask_rows": int32(1, 1), "masks": MASKS},
    "step.masks: must be C-contiguous uint32 [1, 2], not uint32 [2, 2]": {"mask_rows": int32(1), "masks": MASKS},
    "step.masks: must be C-contiguous uint32 [2, 2], not uint32 [1, 2]": {"mask_rows": int32(0, 1), "masks": MASKS[1:]},
    "step.masks: must be C-contiguous uint32 [2, 2], not uint32 [2]": {"mask_rows": int32(0, 1), "masks": MASKS[0]},
    "step.masks: must be C-contiguous uint32 [2, 2], not int32 [2, 2]": {
        "mask_rows": int32(0, 1),
        "masks": MASKS.view(np.int32),
    },
    "step.masks: must be C-contiguous uint32 [2, 2], not uint32 [2, 2], not C-": {
        "mask_rows": int32(0, 1),
        "masks": MASKS.T,
    },
    "step.masks: must have at least 2 words for 61 token ids, not 1": {
        "mask_rows": int32(0, 1),
        "masks": MASKS[:, :1].copy(),
    },
    "step: has no rows": {
        name: np.zeros(0, np.uint64 if name == "seqs" else np.uint8 if name == "readback" else np.int32)
        for name in ("token_ids", "positions", "seqs", "slots", "starts", "num_new", "kv_lengths", "readback")
    },
}


IN_RUST: dict[str, str | None] = {
    "step.token_ids: must be C-contiguous int32 [5], not int64": "step.token_ids: must be an array of i32",
    "step.token_ids: must be C-contiguous int32 [5], not int32 [5], not C-": "step.token_ids: must be C-contiguous i32",
    "step.positions: must be C-contiguous int32 [5], not int32 [4]": "step.positions: has 4 tokens, token_ids 5",
    "step.seqs: must be C-contiguous uint64 [2], not int32": None,  # it does not look at them
    "step.table_changes: must be C-contiguous int32 [1, 3], not int32 [1, 2]": (
        "step.table_changes: must be C-contiguous i32 [any, 3], not [1, 2]"
    ),
}
"""What the CPU device says where it is something else."""
# Of the newer arrays it names the array, in words of its own.
IN_RUST |= {
    message: message.split(":")[0].split(" (")[0]
    for message in BAD_STEPS
    if message.startswith(("step.bans", "step.mask", "step.token_ids: may", "step.token_ids: cannot"))
}


@pytest.mark.parametrize("message", BAD_STEPS)
def test_a_bad_step_is_refused_with_its_numbers_and_nothing_is_written(device: LogitDevice, message: str) -> None:
    first = device.launch(make_step([Row(0, 0, [1, 2, 3])], [(0, 0, 3)]))
    pool, logits = device.gather(range(20)), first.logits
    said = message if isinstance(device, ReferenceDevice) else IN_RUST.get(message, message)
    if said is None:
        assert device.launch(replace(good_step(), **BAD_STEPS[message])).settle().tokens.tolist() == GOOD_TOKENS
        return
    with pytest.raises(InvalidArgument) as caught:
        device.launch(replace(good_step(), **BAD_STEPS[message]))
    assert said in str(caught.value)
    assert np.array_equal(device.gather(range(20)), pool)
    assert np.array_equal(first.logits, logits)
    # The table changes of the refused step are not known either.
    for slot, index in ((0, 1), (2, 0)):
        with pytest.raises(InvalidArgument, match=rf"slot {slot} needs .* its table lacks entries \[{index}\]"):
            device.launch(make_step([Row(slot, 4 * index, [1])], []))
    assert device.launch(good_step()).settle().tokens.tolist() == GOOD_TOKENS


def test_a_block_that_is_only_read_may_stand_in_two_tables(device: LogitDevice) -> None:
    first = device.launch(make_step([Row(0, 0, [1, 2, 3, 4])], [(0, 0, 3)]))
    assert first.settle().tokens.min() >= 0
    shared = device.gather([3])
    ticket = device.launch(make_step([Row(0, 4, [5]), Row(2, 4, [5])], [(0, 1, 4), (2, 0, 3), (2, 1, 6)]))
    assert same_bits(ticket.logits[0], ticket.logits[1])
    assert np.array_equal(device.gather([4]), device.gather([6]))
    assert np.array_equal(device.gather([3]), shared)


def test_a_slot_that_is_given_to_another_sequence_forgets_its_table(device: LogitDevice) -> None:
    device.launch(make_step([Row(0, 0, list(range(10)))], [(0, 0, 3), (0, 1, 4), (0, 2, 5)]))
    device.launch(make_step([Row(0, 0, [1, 2])], [(0, 0, 7)]))
    with pytest.raises(InvalidArgument, match=r"slot 0 needs blocks for 6 positions, its table lacks entries \[1\]"):
        device.launch(make_step([Row(0, 2, [3, 4, 5, 6])], []))


def test_a_refused_step_leaves_the_feed_cells_as_they_were(device: LogitDevice) -> None:
    token = int(device.launch(make_step([Row(0, 0, [1, 2, 3])], [(0, 0, 3)])).settle().tokens[0])
    # It would begin another sequence in slot 0, and has a row that cannot be computed.
    with pytest.raises(InvalidArgument, match=r"slot 2 needs blocks"):
        device.launch(make_step([Row(0, 0, [1]), Row(2, 0, [9])], [(0, 0, 8)]))
    fed = device.launch(make_step([Row(0, 3, [FROM_FEED])], []))
    logits, block = fed.logits, device.gather([3])
    given = device.launch(make_step([Row(0, 3, [token])], []))
    assert same_bits(given.logits, logits)
    assert np.array_equal(device.gather([3]), block)


def test_a_launch_that_breaks_off_leaves_block_tables_and_feed_cells_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = make_device(REFERENCE)
    assert isinstance(device, ReferenceDevice)
    device.launch(make_step([Row(0, 0, [1, 2])], [(0, 0, 3)]))
    before = device._slots
    tables, feed = before.tables.copy(), before.feed.copy()

    def fail(*arguments: Any) -> None:
        forward(*arguments)
        raise MemoryError

    step = make_step([Row(0, 0, [4]), Row(1, 0, [1, 2])], [(0, 0, 7), (1, 0, 5)])
    with monkeypatch.context() as patch:
        patch.setattr("reprieve.device.reference.forward", fail)
        with pytest.raises(MemoryError):
            device.launch(step)
    assert np.array_equal(device._slots.tables, tables)
    assert np.array_equal(device._slots.feed, feed)
    assert device.launch(step).settle().tokens.min() >= 0
