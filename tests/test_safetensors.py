"""Safetensors folders, and the float types in which weights are kept."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tracemalloc
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from model_files import float_bytes, random_weights, safetensors_bytes, small_config, write_folder
from reprieve.errors import ModelFileError
from reprieve.model import load_model
from reprieve.model.safetensors import open_file
from reprieve.model.weights import bf16_to_f32, f32_to_bf16, rounded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from model_files import FloatType
    from reprieve.model.config import Architecture

INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"


def file_of(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def one_tensor(**changes: object) -> bytes:
    return file_of({"t": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}, bytes(24))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    config = small_config()
    return write_folder(tmp_path / "sharded", config, random_weights(config), num_shards=3)


# Weights arrive as they are.


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_and_bytes_are_those_of_the_file(tmp_path: Path, dtype: FloatType) -> None:
    config = small_config()
    weights = random_weights(config)
    model = load_model(write_folder(tmp_path / "m", config, weights, dtype=dtype))
    tensor = model.weights.layers[0].q
    assert (tensor.name, tensor.shape, tensor.dtype) == (Q, (64, 64), dtype)
    assert tensor.raw().tobytes() == float_bytes(weights[Q], dtype)
    assert tensor.raw().shape == (64, 64 * (4 if dtype == "F32" else 2))
    kinds: dict[FloatType, Literal["f32", "f16", "bf16"]] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
    np.testing.assert_array_equal(tensor.float32(), rounded(weights[Q], kinds[dtype]))
    assert tensor.float32().flags.c_contiguous
    tensor.float32()[...] = 7  # a new array each time
    np.testing.assert_array_equal(tensor.float32(), rounded(weights[Q], kinds[dtype]))


def test_a_file_that_the_library_wrote_is_read(tmp_path: Path) -> None:
    config = small_config("qwen3")
    weights = random_weights(config)
    folder = write_folder(tmp_path / "m", config, weights)
    save_file(weights, folder / "model.safetensors")
    model = load_model(folder)
    norm = model.weights.layers[1].k_norm
    assert norm is not None
    np.testing.assert_array_equal(norm.float32(), weights["model.layers.1.self_attn.k_norm.weight"])
    assert model.name == "m"
    assert dict(model.metadata) == {}


@pytest.mark.parametrize("num_shards", [2, 5])
def test_shards_hold_the_same_weights_as_one_file(tmp_path: Path, num_shards: int) -> None:
    config = small_config("qwen2")
    weights = random_weights(config)
    folder = write_folder(tmp_path / "m", config, weights, num_shards=num_shards)
    assert len(list(folder.glob("*.safetensors"))) == num_shards
    model = load_model(folder)
    for index, layer in enumerate(model.weights.layers):
        assert layer.q_bias is not None
        np.testing.assert_array_equal(layer.q_bias.float32(), weights[f"model.layers.{index}.self_attn.q_proj.bias"])
        np.testing.assert_array_equal(layer.down.float32(), weights[f"model.layers.{index}.mlp.down_proj.weight"])
    np.testing.assert_array_equal(model.weights.output.float32(), weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("architecture", "biases", "expected"),
    [
        ("llama", False, set()),
        ("llama", True, {"q_bias", "k_bias", "v_bias", "o_bias"}),
        ("mistral", False, set()),
        ("qwen2", False, {"q_bias", "k_bias", "v_bias"}),
        ("qwen3", False, {"q_norm", "k_norm"}),
        ("qwen3", True, {"q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias"}),
    ],
)
def test_each_architecture_has_its_own_biases_and_norms(
    tmp_path: Path, architecture: Architecture, expected: set[str], *, biases: bool
) -> None:
    config = small_config(architecture)
    layer = load_model(write_folder(tmp_path / "m", config, random_weights(config, biases=biases))).weights.layers[0]
    optional = ("q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm")
    assert {field for field in optional if getattr(layer, field) is not None} == expected


def test_a_tied_output_is_the_embedding_even_where_the_file_has_a_head(tmp_path: Path) -> None:
    config = small_config()
    weights = random_weights(config)
    tied = load_model(write_folder(tmp_path / "m", config, weights, settings={"tie_word_embeddings": True}))
    assert tied.weights.output is tied.weights.embedding
    del weights["lm_head.weight"]
    untied = write_folder(tmp_path / "n", config, weights, settings={"tie_word_embeddings": False})
    with pytest.raises(ModelFileError, match=r"the tensor lm_head.weight \[128, 64\] is missing"):
        load_model(untied)


def test_buffers_of_old_files_are_passed_over(tmp_path: Path) -> None:
    config = small_config()
    weights = random_weights(config)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, dtype=np.float32)
    load_model(write_folder(tmp_path / "m", config, weights))


# Folders that are not whole.


def test_a_shard_that_is_missing_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match=f"is named in {INDEX}, but is not there") as caught:
        load_model(sharded)
    assert caught.value.path == str(sharded / "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("missing_bytes", [1, 100, 20000])
def test_a_shard_shorter_than_its_header_says_is_named(sharded: Path, missing_bytes: int) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    left = shard.stat().st_size - missing_bytes
    os.truncate(shard, left)
    behind_header = left - 8 - int.from_bytes(shard.read_bytes()[:8], "little")
    with pytest.raises(ModelFileError, match=f"behind the header, where the file has {behind_header}") as caught:
        load_model(sharded)
    assert caught.value.path == str(shard)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_stray_file_is_named_and_not_loaded(tmp_path: Path, num_shards: int) -> None:
    config = small_config()
    folder = write_folder(tmp_path / "m", config, random_weights(config), num_shards=num_shards)
    stray = folder / "model-00009-of-00009.safetensors"
    stray.write_bytes(b"never looked at")
    with pytest.raises(ModelFileError, match="does not name it: move it away") as caught:
        load_model(folder)
    assert caught.value.path == str(stray)


def test_a_single_file_beside_an_index_is_a_stray(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "model.safetensors")
    with pytest.raises(ModelFileError, match="does not name it") as caught:
        load_model(sharded)
    assert caught.value.path == str(sharded / "model.safetensors")


def test_an_index_and_its_shards_must_agree(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    home = index["weight_map"][Q]
    other = next(name for name in index["weight_map"].values() if name != home)
    index["weight_map"][Q] = other
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=f"holds {Q}, for which {INDEX} names {other}") as caught:
        load_model(sharded)
    assert caught.value.path == str(sharded / home)
    index["weight_map"] |= {Q: home, "extra": other}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=f"does not hold extra, which {INDEX} says") as caught:
        load_model(sharded)
    assert caught.value.path == str(sharded / other)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\0.safetensors", "model.bin", 3, None])
def test_an_index_names_files_of_its_own_folder_only(sharded: Path, name: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {Q: name}}))
    with pytest.raises(ModelFileError, match=r"not a \.safetensors file of the folder"):
        load_model(sharded)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {}, "weight_map": {}}']
)
def test_an_index_that_says_nothing_is_refused(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelFileError) as caught:
        load_model(sharded)
    assert caught.value.path == str(sharded / INDEX)


def test_a_folder_without_weights_or_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is neither a file nor a folder"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read: No such file"):
        load_model(str(tmp_path))
    config = small_config()
    folder = write_folder(tmp_path / "m", config, random_weights(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json, but no"):
        load_model(folder)


def test_a_tensor_that_is_missing_misshapen_or_too_many_is_named(tmp_path: Path) -> None:
    config = small_config()
    weights = random_weights(config)
    for number, (changed, problem) in enumerate(
        [
            ({name: values for name, values in weights.items() if name != Q}, rf"{Q} \[64, 64\] is missing"),
            (weights | {Q: weights[Q][:60]}, rf"{Q} is \[60, 64\], the model's sizes make it \[64, 64\]"),
            (weights | {Q: weights[Q].reshape(-1)}, rf"{Q} is \[4096\], the model's sizes make it"),
            (weights | {"model.norm.bias": weights[Q][0]}, "1 tensors have no place .* such as model.norm.bias"),
        ]
    ):
        with pytest.raises(ModelFileError, match=problem):
            load_model(write_folder(tmp_path / str(number), config, changed))


# Headers that cannot be.


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (bytes(7), "has 7 bytes, and not even the 8"),
        (struct.pack("<Q", 2**63) + bytes(9), f"a header of {2**63} bytes, but only 9 follow its length"),
        (file_of(b""), "is not JSON"),
        (file_of(b"[]"), "holds JSON, but not an object: list"),
        (file_of(b"\xff\xfe"), "is not JSON"),
        (file_of(b'{"a":' * 100_000), "is not JSON"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "is not JSON"),
        (file_of(b'{"t": 1, "t": 2}'), "has the key 't' twice"),
        (file_of({"t": [1]}), "the tensor t is described by list"),
        (one_tensor(shape=None), "lacks a shape"),
        (one_tensor(shape=[2, -3]), "lacks a shape or two data_offsets of whole numbers"),
        (one_tensor(shape=[2, True]), "lacks a shape"),
        (one_tensor(shape=[2, 3.0]), "lacks a shape"),
        (one_tensor(data_offsets=[0]), "lacks a shape or two data_offsets"),
        (one_tensor(dtype="F8_E4M3"), "has the type 'F8_E4M3'; F32, F16, BF16 are read"),
        (one_tensor(dtype=None), "has the type None"),
        (one_tensor(data_offsets=[1, 25]), "lies at bytes 1 to 25 behind the header, where the file has 24"),
        (one_tensor(data_offsets=[24, 0]), "lies at bytes 24 to 0"),
        (one_tensor(data_offsets=[0, 2**64]), f"lies at bytes 0 to {2**64}"),
        (one_tensor(shape=[2, 2]), r"is \[2, 2\] of F32, which is 16 bytes, but has 24"),
        (one_tensor(shape=[2**40, 2**40]), f"which is {2**82} bytes, but has 24"),
        (one_tensor(shape=[0], data_offsets=[0, 0]), "none of 0"),
        (one_tensor() + b"?", "is not a valid safetensors file"),  # bytes that no tensor has
        (one_tensor(shape=[1], data_offsets=[20, 24]), "is not a valid safetensors file"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_header_that_cannot_be_is_refused_with_the_numbers(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=problem) as caught:
        open_file(path)
    assert caught.value.path == str(path)


def test_a_huge_header_is_refused_without_a_big_allocation(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000))
    os.truncate(path, 300_000_000)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="200000000 bytes, at most 100000000"):
            open_file(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_cut_short_at_any_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    random = np.random.default_rng(0)
    data = safetensors_bytes({name: random.random((3, 5), np.float32) for name in ("a", "b")}, "BF16")
    path.write_bytes(data)
    assert list(open_file(path)) == ["a", "b"]
    for length in range(len(data) - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            open_file(path)


@pytest.fixture(scope="module")
def fuzzed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 199),
            st.one_of(
                st.binary(min_size=1, max_size=3), st.sampled_from([b"9", b"0", b"-", b'"', b"]", b"1e9", bytes(8)])
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_damaged_header_is_read_or_refused_and_nothing_else(
    fuzzed_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    damaged = bytearray(safetensors_bytes({name: np.ones((3, 4), np.float32) for name in ("a", "b")}))
    for offset, replaced in changes:
        damaged[offset : offset + len(replaced)] = replaced
    fuzzed_path.write_bytes(damaged)
    try:
        for tensor in open_file(fuzzed_path).values():
            assert tensor.float32().shape == tensor.shape
    except ModelFileError:
        pass


# Float types.


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    values = bf16_to_f32(np.array([0x3F80, 0xBF80, 0x7FC0, 0x0001], dtype=np.uint16))
    assert values.dtype == np.float32
    assert values[:2].tolist() == [1.0, -1.0]
    assert math.isnan(values[2])
    assert values[3] == pytest.approx(9.18e-41, rel=1e-3)
    every = np.arange(2**16, dtype=np.uint16)
    assert (bf16_to_f32(every).view(np.uint32) == every.astype(np.uint32) << 16).all()


def test_the_bfloat16_of_a_file_is_read_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    body = bytes.fromhex("803f 80bf c07f 0100")
    path.write_bytes(file_of({"t": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, body))
    values = open_file(path)["t"].float32()
    assert values[:2].tolist() == [1.0, -1.0]
    assert math.isnan(values[2])
    assert values[3] == pytest.approx(9.18e-41, rel=1e-3)


def test_bfloat16_keeps_every_value_that_it_has() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    back = f32_to_bf16(bf16_to_f32(every))
    nan = np.isnan(bf16_to_f32(every))
    assert (back[~nan] == every[~nan]).all()
    assert np.isnan(bf16_to_f32(back[nan])).all()
    assert nan.sum() == 2 * 127


@pytest.mark.parametrize(("kind", "narrow_bits"), [("bf16", 16), ("f16", 13)])
def test_rounding_takes_the_nearest_and_of_two_the_even_one(kind: Literal["bf16", "f16"], narrow_bits: int) -> None:
    random = np.random.default_rng(7)
    # Normal in both types; half of them exactly in the middle of two neighbours.
    values = (1 + random.random(20000)).astype(np.float32) * np.float32(2.0) ** random.integers(-14, 15, 20000).astype(
        np.float32
    )
    bits = values.view(np.uint32)
    bits[::2] = bits[::2] >> narrow_bits << narrow_bits | 1 << narrow_bits - 1
    below = (bits >> narrow_bits << narrow_bits).view(np.float32)
    above = ((bits >> narrow_bits) + 1 << narrow_bits).astype(np.uint32).view(np.float32)
    to_below, to_above = values.astype(np.float64) - below, above - values.astype(np.float64)
    even_below = (bits >> narrow_bits) % 2 == 0
    expected = np.where((to_below < to_above) | ((to_below == to_above) & even_below), below, above)
    assert (to_below == to_above).sum() >= 10000
    for signed in (1, -1):
        result = rounded(values * np.float32(signed), kind)
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, expected * np.float32(signed))


def test_rounding_keeps_zero_infinity_and_nan() -> None:
    quiet = np.array([0x7FC00000, 0xFFFFFFFF, 0x7F800001], dtype=np.uint32).view(np.float32)
    for kind in ("bf16", "f16"):
        assert np.isnan(rounded(quiet, kind)).all()
        special = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38], dtype=np.float32)
        result = rounded(special, kind)
        assert result[2:].tolist() == [np.inf, -np.inf, np.inf if kind == "f16" else rounded(special[4:], "bf16")[0]]
        assert np.signbit(result).tolist() == [False, True, False, True, False]
    largest = np.array([0x7F7FFFFF, 0x7F7F7FFF], dtype=np.uint32).view(np.float32)
    assert rounded(largest, "bf16").tolist() == [np.inf, bf16_to_f32(np.array([0x7F7F], dtype=np.uint16))[0]]


def test_file_and_f32_leave_values_alone_and_others_are_refused() -> None:
    values: NDArray[np.float32] = np.array([1 / 3], dtype=np.float32)
    assert rounded(values, "file") is values
    assert rounded(values, "f32") is values
    round_to: Callable[..., object] = rounded
    with pytest.raises(ValueError, match='"bf16" or "f16", not \'f8\''):
        round_to(values, "f8")
