"""The native classes of the CPU device: what they refuse, by name, and that a refusal changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reprieve._native import CpuDevice, CpuModel
from reprieve.errors import InvalidArgument, StepFailed
from reprieve.model.config import rope_tables
from tiny_models import Row, make_step, tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG = tiny_config((2, 1, 8), vocab_size=5, hidden=16)


def new_model() -> CpuModel:
    return CpuModel(num_layers=1, num_heads=2, num_kv_heads=1, head_size=8, vocab_size=5)


def matrix(model: CpuModel, outputs: int, inputs: int) -> int:
    values = np.random.default_rng(outputs).standard_normal((outputs, inputs), np.float32)
    return model.add_matrix("m", values.view(np.uint8), "F32", "F16", outputs, inputs)


def record(model: CpuModel) -> int:
    """Record a layer of attention and return the logits."""
    x = model.embed(matrix(model, 5, 16))
    q, k, v = (model.linear(x, matrix(model, width, 16)) for width in (16, 8, 8))
    attended = model.paged_attention(0, model.rope_append(0, q, k, v))
    return model.linear(model.select_readback(attended), matrix(model, 5, 16))


def new_device(**changes: Any) -> CpuDevice:
    model = new_model()
    model.argmax(record(model))
    model.finish()
    cos, sin = rope_tables(CONFIG, 12)
    settings: dict[str, Any] = {"num_blocks": 3, "block_size": 4, "num_slots": 2, "context_length": 12, "threads": 1}
    return CpuDevice(model, **settings | {"kv": "f16", "cos": cos, "sin": sin} | changes)


def launch(device: CpuDevice) -> int:
    step = make_step([Row(0, 0, [1, 2])], [(0, 0, 1)])
    return device.launch(step)


RECORDINGS: list[tuple[str, Callable[[CpuModel], object]]] = [
    ("table", lambda model: model.embed(9)),
    ("x", lambda model: model.linear(9, matrix(model, 5, 16))),
    ("weight", lambda model: model.linear(model.embed(matrix(model, 5, 16)), matrix(model, 5, 12))),
    ("layer", lambda model: model.paged_attention(1, model.embed(matrix(model, 5, 16)))),
    ("argmax", lambda model: model.finish()),
    ("dtype", lambda model: model.add_matrix("m", np.zeros(4, np.uint8), "Q9", "F16", 1, 1)),
    ("store", lambda model: model.add_matrix("m", np.zeros(4, np.uint8), "F32", "Q8_0", 1, 1)),
    ("raw", lambda model: model.add_matrix("m", np.zeros(5, np.uint8), "F32", "F32", 1, 1)),
    ("raw", lambda model: model.add_matrix("m", np.zeros(4, np.uint8), "F32", "F32", 2**40, 2**60)),
    ("inputs", lambda model: model.add_matrix("m", np.zeros(0, np.uint8), "F32", "F32", 1, 0)),
    ("outputs", lambda model: model.add_matrix("m", np.zeros(0, np.uint8), "F32", "F32", 0, 1)),
    ("num_heads", lambda _: CpuModel(num_layers=1, num_heads=0, num_kv_heads=1, head_size=8, vocab_size=5)),
]


@pytest.mark.parametrize(("field", "call"), RECORDINGS)
def test_what_does_not_fit_a_program_is_named_and_nothing_is_lost(
    field: str, call: Callable[[CpuModel], object]
) -> None:
    model = new_model()
    logits = record(model)
    with pytest.raises(InvalidArgument) as caught:
        call(model)
    assert caught.value.field == field
    model.argmax(logits)
    model.finish()
    assert model.weight_bytes > 0
    with pytest.raises(RuntimeError, match="is finished"):
        model.finish()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("threads", {"threads": 1025}),
        ("threads", {"threads": 0}),
        ("num_slots", {"num_slots": 0}),
        ("context_length", {"context_length": 0}),
        ("kv", {"kv": "f64"}),
        ("instructions", {"instructions": "mmx"}),
        ("cos", {"cos": np.zeros((11, 4), np.float32)}),
        ("sin", {"sin": np.zeros((12, 3), np.float32)}),
    ],
)
def test_settings_that_no_device_can_have_are_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        new_device(**changes)
    assert caught.value.field == field


def test_a_pool_beyond_all_memory_is_refused_with_its_size() -> None:
    with pytest.raises(MemoryError, match=r"there is no memory of \d+ bytes"):
        new_device(num_blocks=2**32 - 1, block_size=2**32 - 1)


def test_logits_are_those_of_the_step_that_is_named_or_none() -> None:
    device = new_device()
    assert device.logits_shape == (0, 5)
    assert launch(device) == 1
    assert device.logits_shape == (1, 5)
    out = np.empty((1, 5), np.float32)
    device.logits(1, out)
    first = out.copy()
    for wrong in (np.empty((2, 5), np.float32), np.empty(5, np.float32), np.empty((5, 1), np.float32)):
        with pytest.raises(InvalidArgument) as caught:
            device.logits(1, wrong)
        assert caught.value.field == "out"
    with pytest.raises(InvalidArgument):  # a refused step leaves them
        device.launch(make_step([Row(1, 0, [1])], [(1, 0, 3)]))
    device.logits(1, out)
    assert np.array_equal(out, first)
    assert launch(device) == 2
    with pytest.raises(RuntimeError, match="another step was launched since"):
        device.logits(1, out)


def test_tokens_are_there_until_they_are_forgotten() -> None:
    device = new_device()
    unknown: list[Callable[[], object]] = [
        lambda: device.ready(1),
        lambda: device.settle(1, np.empty(1, np.int32)),
        lambda: device.settle(0, np.empty(1, np.int32)),
    ]
    for call in unknown:
        with pytest.raises(RuntimeError, match=r"there is no step [01]: 0 were launched, or it is forgotten"):
            call()
    device.forget(1)
    numbers = [launch(device) for _ in range(3)]
    assert numbers == [1, 2, 3]
    tokens = np.empty(1, np.int32)
    misfits: list[Any] = [np.empty(0, np.int32), np.empty(1, np.int64), np.empty((1, 1), np.int32)]
    for wrong in misfits:
        with pytest.raises(InvalidArgument) as caught:
            device.settle(2, wrong)
        assert caught.value.field == "tokens"
    for _ in range(2):
        device.settle(2, tokens)
        assert device.ready(2)
        assert 0 <= tokens[0] < 5
    for _ in range(2):
        device.forget(2)
    with pytest.raises(RuntimeError, match="there is no step 2: 3 were launched, or it is forgotten"):
        device.settle(2, tokens)
    assert device.ready(1), "it was computed before"
    device.settle(3, tokens)


def test_a_device_that_was_stopped_starts_again_and_what_was_behind_has_failed_or_was_computed() -> None:
    device = new_device(threads=2)
    tokens = np.empty(1, np.int32)
    numbers = [launch(device) for _ in range(50)]
    device.stop()
    device.stop()
    assert all(device.ready(number) for number in numbers)
    failed, said = [], set()
    for number in numbers:
        try:
            device.settle(number, tokens)
        except StepFailed as error:
            failed.append(number)
            said.add(str(error))
    assert said <= {"the device was closed before it computed this step"}
    assert failed == numbers[len(numbers) - len(failed) :], "in order"
    device.settle(launch(device), tokens)
    assert 0 <= tokens[0] < 5


def test_images_of_the_wrong_size_and_blocks_that_are_not_there_are_named() -> None:
    device = new_device()
    launch(device)
    image = np.empty(device.block_bytes, np.uint8)
    device.gather([1], image)
    kept = image.copy()
    strange: list[Any] = [[3], [-1], [2**70], [-(2**70)], [1.0], ["1"], [None]]
    for blocks in strange:
        for call in (device.gather, device.scatter):
            with pytest.raises(InvalidArgument) as caught:
                call(blocks, image)
            assert caught.value.field == "blocks"
    for size in (0, device.block_bytes - 1, 2 * device.block_bytes):
        with pytest.raises(InvalidArgument) as caught:
            device.gather([1], np.empty(size, np.uint8))
        assert caught.value.field == "out"
        with pytest.raises(InvalidArgument) as caught:
            device.scatter([1], np.zeros(size, np.uint8))
        assert caught.value.field == "image"
    read_only = image.copy()
    read_only.flags.writeable = False
    with pytest.raises(InvalidArgument):
        device.gather([1], read_only)
    device.gather([1], image)
    assert np.array_equal(image, kept)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_forked_while_the_device_computes_is_told_so_and_does_not_hang(threads: int) -> None:
    # Newer Pythons warn of any fork in a process with threads.
    script = [str(Path(__file__).parent / "fork_during_step_case.py"), str(threads)]
    command = [sys.executable, "-W", "ignore::DeprecationWarning", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *child, parent, idle = done.stdout.splitlines()
    told = "RuntimeError: the device was computing when this process was forked; make a new one"
    assert child == [told] * 5 + ["closed"]
    assert parent == "the parent's steps are done"
    assert idle == "a child of an idle device has its tokens and goes on"


def test_where_memory_is_short_a_call_fails_and_not_the_process() -> None:
    script = Path(__file__).parent / "short_memory_case.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "gather MemoryError\nscatter MemoryError\nweights MemoryError\nas before\n"
