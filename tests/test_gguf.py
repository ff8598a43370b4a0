"""GGUF files: what is in them arrives in order, and a damaged one is refused before anything is read."""

from __future__ import annotations

import os
import struct
import tracemalloc
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from model_files import interleaved, random_weights, small_config, write_folder, write_gguf
from reprieve.errors import ModelFileError
from reprieve.model import Model, load_model
from reprieve.model.config import rope_frequencies
from reprieve.model.gguf_header import MAX_NAME_BYTES, MAX_TEXT_BYTES
from reprieve.model.weights import LayerWeights

if TYPE_CHECKING:
    from pathlib import Path

    from reprieve.model.config import Architecture
    from reprieve.model.weights import Tensor

HEADS = [(32, 4, 8), (9, 3, 8), (14, 2, 8), (6, 6, 8)]
SOME_KEYS = {
    "tokenizer.ggml.tokens": [f"t{index}" for index in range(7)] + ["Ġé", "\U0001f999", ""],
    "tokenizer.ggml.token_type": [1, 3, 1],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


class Count(NamedTuple):
    """Where a count or length lies in a header."""

    what: str
    offset: int
    width: int


def tensors_of(model: Model) -> dict[str, Tensor]:
    """Return all weights of a model by the name of their place."""
    weights = model.weights
    found = {"embedding": weights.embedding, "final_norm": weights.final_norm, "output": weights.output}
    for index, layer in enumerate(weights.layers):
        for field in fields(LayerWeights):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                found[f"{index}.{field.name}"] = tensor
    return found


def assert_same_weights(one: Model, other: Model) -> None:
    left, right = tensors_of(one), tensors_of(other)
    assert left.keys() == right.keys()
    assert len(left) >= 3 + 9 * one.config.num_layers
    for place, tensor in left.items():
        np.testing.assert_array_equal(tensor.float32(), right[place].float32(), err_msg=place)
        assert tensor.shape == right[place].shape == tensor.float32().shape


def counts_in(path: Path) -> tuple[list[Count], list[Count], int]:
    """Walk a valid header on our own: its counts, the offsets of its tensors, and the header's length."""
    data = path.read_bytes()
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    counts = [Count("tensors", 8, 8), Count("keys", 16, 8)]
    offsets: list[Count] = []
    at = 24

    def number(width: int) -> int:
        return int.from_bytes(data[at : at + width], "little")

    def text(what: str) -> int:
        counts.append(Count(what, at, 8))
        return at + 8 + number(8)

    for _ in range(int.from_bytes(data[16:24], "little")):
        at = text("key")
        kind, at = number(4), at + 4
        if kind == 8:
            at = text("text")
        elif kind == 9:
            item, at = number(4), at + 4
            counts.append(Count("array", at, 8))
            length, at = number(8), at + 8
            for _ in range(length):
                at = text("item") if item == 8 else at + widths[item]
        else:
            at += widths[kind]
    for _ in range(int.from_bytes(data[8:16], "little")):
        at = text("tensor name")
        counts.append(Count("number of dimensions", at, 4))
        num_dimensions, at = number(4), at + 4
        counts += [Count("dimension", at + 8 * axis, 8) for axis in range(num_dimensions)]
        at += 8 * num_dimensions + 4
        offsets.append(Count("tensor offset", at, 8))
        at += 8
    return counts, offsets, at


def patch(path: Path, offset: int, value: int, width: int) -> bytes:
    """Overwrite a number in the file and return the bytes that were there."""
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(width)
        file.seek(offset)
        file.write(value.to_bytes(width, "little"))
    return before


def header(num_tensors: int = 0, num_keys: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def tensor_entry(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack("<I", len(dims))
        + packed
        + struct.pack("<IQ", kind, offset)
    )


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    config = small_config(num_layers=1, vocab_size=16, hidden_size=16, num_heads=2, num_kv_heads=1, head_size=8)
    weights = random_weights(config)
    return write_gguf(tmp_path / "small.gguf", config, weights, keys=SOME_KEYS)


# Weights arrive in order.


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("biases", [False, True])
def test_query_and_key_rows_equal_those_of_the_same_model_as_safetensors(
    tmp_path: Path, heads: tuple[int, int, int], *, biases: bool
) -> None:
    num_heads, num_kv_heads, head_size = heads
    config = small_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    weights = random_weights(config, biases=biases)
    query = weights["model.layers.0.self_attn.q_proj.weight"]
    assert not np.array_equal(interleaved(query, "x.q_proj.weight", config), query), "the file's order differs at all"
    gguf = load_model(write_gguf(tmp_path / "model.gguf", config, weights))
    folder = load_model(write_folder(tmp_path / "folder", config, weights))
    assert_same_weights(gguf, folder)
    assert (gguf.weights.layers[1].q_bias is not None) == biases
    np.testing.assert_array_equal(gguf.weights.layers[0].q.float32(), query)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_raw_rows_of_any_type_are_moved_whole(tmp_path: Path, dtype: str) -> None:
    config = small_config()
    weights = random_weights(config)
    model = load_model(write_gguf(tmp_path / "model.gguf", config, weights, dtype=dtype))
    for field, name in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("gate", "gate_proj")):
        tensor: Tensor = getattr(model.weights.layers[1], field)
        part = "mlp" if field == "gate" else "self_attn"
        values = weights[f"model.layers.1.{part}.{name}.weight"]
        expected = quantize(values, GGMLQuantizationType[dtype]).view(np.uint8)
        assert tensor.dtype == dtype
        assert tensor.shape == values.shape
        np.testing.assert_array_equal(tensor.raw(), expected)
        assert tensor.raw().ndim == 2
        assert np.abs(tensor.float32() - values).max() < 0.2
        assert tensor.float32().flags.c_contiguous


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_rows_stay_as_they_are_with_their_biases_and_norms(tmp_path: Path, architecture: Architecture) -> None:
    config = small_config(architecture, head_size=32)
    weights = random_weights(config)
    gguf = load_model(write_gguf(tmp_path / "model.gguf", config, weights))
    folder = load_model(write_folder(tmp_path / "folder", config, weights))
    assert_same_weights(gguf, folder)
    layer = gguf.weights.layers[0]
    assert (layer.q_bias is not None) == (architecture == "qwen2")
    assert (layer.k_norm is not None) == (architecture == "qwen3")
    assert layer.o_bias is None
    assert gguf.config.head_size == 32


@pytest.mark.parametrize("tied", [False, True])
def test_output_is_the_embedding_where_the_file_has_no_output(tmp_path: Path, *, tied: bool) -> None:
    config = small_config()
    weights = random_weights(config, tied=tied)
    model = load_model(write_gguf(tmp_path / "model.gguf", config, weights))
    assert (model.weights.output is model.weights.embedding) == tied


def test_float32_gives_a_new_array_each_time(small_file: Path) -> None:
    for place, tensor in tensors_of(load_model(small_file)).items():
        values = tensor.float32()
        before = values.copy()
        values[...] = 7
        np.testing.assert_array_equal(tensor.float32(), before, err_msg=place)


# The configuration.


def test_configuration_is_the_one_that_was_written(tmp_path: Path) -> None:
    config = small_config(rms_norm_eps=2.0**-17, eos_ids=(2, 5), head_size=8, num_heads=6, num_kv_heads=3)
    model = load_model(write_gguf(tmp_path / "a.name.gguf", config, random_weights(config)))
    assert model.config == config
    assert model.name == "a.name"
    assert model.path == tmp_path / "a.name.gguf"


@pytest.mark.parametrize("eos_ids", [(), (3,), (3, 4), (3, 4, 9)])
def test_each_end_of_sequence_id_is_kept(tmp_path: Path, eos_ids: tuple[int, ...]) -> None:
    config = small_config(eos_ids=eos_ids, bos_id=None)
    model = load_model(write_gguf(tmp_path / "m.gguf", config, random_weights(config)))
    assert model.config.eos_ids == eos_ids
    assert model.config.bos_id is None


def test_an_id_of_all_ones_means_that_there_is_none(tmp_path: Path) -> None:
    config = small_config(eos_ids=(), bos_id=None)
    keys = {"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.bos_token_id": 2**32 - 1}
    model = load_model(write_gguf(tmp_path / "m.gguf", config, random_weights(config), keys=keys))
    assert (model.config.eos_ids, model.config.bos_id) == ((), None)


@pytest.mark.parametrize(
    ("keys", "divisor"),
    [
        ({}, 1),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 3.0}, 1),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, 2),
        ({"llama.rope.scaling.factor": 4.0}, 4),
        ({"llama.rope.scale_linear": 8.0}, 8),
        ({"llama.rope.scaling.factor": 0.0}, 1),
    ],
)
def test_rotary_scaling_divides_the_frequencies(tmp_path: Path, keys: dict[str, object], divisor: float) -> None:
    config = small_config()
    model = load_model(write_gguf(tmp_path / "m.gguf", config, random_weights(config), keys=keys))
    np.testing.assert_array_equal(rope_frequencies(model.config), rope_frequencies(config) / divisor)


def test_factors_in_a_tensor_divide_the_frequencies(tmp_path: Path) -> None:
    factors = tuple(1.0 + index / 4 for index in range(8))
    config = small_config(rope_factors=factors)
    model = load_model(write_gguf(tmp_path / "m.gguf", config, random_weights(config)))
    assert model.config.rope_factors == factors
    np.testing.assert_array_equal(rope_frequencies(model.config), rope_frequencies(small_config()) / factors)


def test_a_window_limits_the_context(tmp_path: Path) -> None:
    config = small_config()
    keys = {"llama.attention.sliding_window": 100}
    model = load_model(write_gguf(tmp_path / "m.gguf", config, random_weights(config), keys=keys))
    assert model.config.context_length == 100


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"general.architecture": "falcon"}, r'architecture "falcon" is not known; known are llama, qwen2, qwen3'),
        ({"general.architecture": 3}, "general.architecture must be a text, not 3"),
        ({"llama.rope.scaling.type": "yarn"}, 'llama.rope.scaling.type "yarn" is not supported'),
        ({"llama.rope.scaling.factor": -2.0}, r"factor must be more than 0, not -2\.0"),
        ({"llama.attention.head_count": 0}, "embedding_length 64 is not a multiple of 0 heads"),
        ({"llama.attention.head_count_kv": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"llama.attention.head_count": [4, 4]}, "head_count must be a whole number, not an array of 2 INT32"),
        ({"llama.attention.key_length": 15}, "rope.dimension_count is 16, but only the head size 15"),
        ({"llama.attention.value_length": 8}, "value_length is 8, but only the head size 16"),
        ({"llama.block_count": 3}, r"tensor blk\.2\.attn_norm\.weight \[64\] is missing"),
        ({"llama.block_count": 1}, "9 tensors have no place .* such as blk.1.attn_k.weight"),
        ({"llama.block_count": 2**31}, "num_layers must be from 1 to 2147483647, not 2147483648"),
        ({"llama.block_count": 2**31 - 1}, r"tensor blk\.2\.attn_norm\.weight \[64\] is missing"),
        ({"llama.feed_forward_length": 95}, r"ffn_gate.weight is \[96, 64\], the model's sizes make it \[95, 64\]"),
        ({"llama.vocab_size": 127}, r"token_embd.weight is \[128, 64\], the model's sizes make it \[127, 64\]"),
        ({"llama.context_length": 0}, "context_length must be from 1 to"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base must be a finite number, not nan"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_norm_eps must be more than 0, not 0.0"),
        ({"tokenizer.ggml.eos_token_id": 128}, "eos_ids: 128 is outside the vocabulary of 128 tokens"),
        ({"tokenizer.ggml.tokens": ["x"] * 129}, "has 129 tokens, the embedding only 128 rows"),
        ({"split.count": 2}, "is one of 2 parts"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_numbers(
    tmp_path: Path, keys: dict[str, object], problem: str
) -> None:
    config = small_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), keys=keys)
    with pytest.raises(ModelFileError, match=problem) as caught:
        load_model(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "embedding_length", "context_length"])
def test_a_setting_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    config = small_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    renamed = path.read_bytes().replace(f"llama.{key}".encode(), f"llamb.{key}".encode())
    path.write_bytes(renamed)
    with pytest.raises(ModelFileError, match=f"llama.{key} is missing"):
        load_model(path)


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    config = small_config()
    weights = random_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_up.scales"))
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight \[96, 64\] is missing"):
        load_model(path)
    write_gguf(path, small_config(rope_factors=(1.0,) * 8), weights)
    path.write_bytes(path.read_bytes().replace(b"rope_freqs.weight", b"rope_other.weight"))
    with pytest.raises(ModelFileError, match=r"1 tensors have no place .* architecture llama, such as rope_other"):
        load_model(path)


def test_a_type_that_cannot_be_decoded_is_refused(small_file: Path) -> None:
    _, offsets, _ = counts_in(small_file)
    patch(small_file, offsets[1].offset - 4, GGMLQuantizationType.I32, 4)
    with pytest.raises(ModelFileError, match="has the type I32, which is not supported"):
        load_model(small_file)


# The header, value by value.


def test_metadata_and_tensors_equal_those_of_the_library(small_file: Path) -> None:
    model = load_model(small_file)
    reader = GGUFReader(small_file)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert dict(model.metadata) == expected
    assert model.metadata["tokenizer.ggml.tokens"] == SOME_KEYS["tokenizer.ggml.tokens"]
    assert len(expected) > 15
    for tensor in tensors_of(model).values():
        theirs = next(other for other in reader.tensors if other.name == tensor.name)
        assert tensor.shape == tuple(reversed(theirs.shape.tolist()))
        if not tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            np.testing.assert_array_equal(tensor.float32(), theirs.data)


def test_another_alignment_is_followed(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("token_embd.weight", np.ones((2, 3), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="head_count is missing"):  # so the header was right
        load_model(tmp_path / "m.gguf")
    path = tmp_path / "m.gguf"
    data = path.read_bytes()
    for wrong in (0, 3, 96):
        at = data.index(b"general.alignment") + len("general.alignment") + 4
        path.write_bytes(data[:at] + struct.pack("<I", wrong) + data[at + 4 :])
        with pytest.raises(ModelFileError, match=f"must be a power of two, not {wrong}"):
            load_model(path)


TWO_DIMS = (2**40, 2**40)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"GGUF", "cut short: the version needs 4 bytes from byte 4 on, the file has 4"),
        (b"PK\3\4" + bytes(40), "not a GGUF file"),
        (header(version=1), "GGUF version 1; versions 2 and 3 are read"),
        (header(version=0x03000000), "big-endian"),
        (header(num_tensors=2**64 - 1), f"{2**64 - 1} tensors need at least {32 * (2**64 - 1)} bytes, 0 are left"),
        (header(num_keys=2**63), f"{2**63} keys need at least"),
        (header(num_keys=1, body=entry("a" * 70000, 4, bytes(4))), f"has 70000 bytes, at most {MAX_NAME_BYTES}"),
        (header(num_keys=1, body=entry("a", 8, struct.pack("<Q", 2**62))), f"at most {MAX_TEXT_BYTES}"),
        (header(num_keys=1, body=entry("a", 13, bytes(8))), "a has the value type 13, which is not known"),
        (header(num_keys=1, body=entry("a", 9, struct.pack("<IQ", 9, 1))), "array of arrays"),
        (header(num_keys=1, body=entry("a", 9, struct.pack("<IQ", 77, 1))), "value type 77"),
        (header(num_keys=1, body=entry("a", 9, struct.pack("<IQ", 4, 2**61))), f"{2**61} items of a need at least"),
        (header(num_keys=1, body=entry("a", 9, struct.pack("<IQ", 8, 2**61))), f"{2**61} items of a need at least"),
        (header(num_keys=2, body=entry("a", 0, b"x") + entry("a", 0, b"y")), "has the key a twice"),
        (header(num_keys=1, body=struct.pack("<Q", 1) + b"\xff" + bytes(8)), "key 0 is not UTF-8"),
        (header(1, 0, tensor_entry("t", dims=()) + bytes(9)), "has 0 dimensions; 1 to 4 are possible"),
        (header(1, 0, tensor_entry("t", dims=(1,) * 5)), "has 5 dimensions; 1 to 4 are possible"),
        (header(1, 0, tensor_entry("t", dims=(0, 4))), r"the tensor t is \[4, 0\]: every dimension must be at least 1"),
        (header(1, 0, tensor_entry("t", dims=TWO_DIMS)), f"has {4 * 2**80} bytes from byte 96 on, .* ends at byte 65"),
        (header(1, 0, tensor_entry("t", kind=4)), "has the type 4, which is not known"),
        (
            header(1, 0, tensor_entry("t", dims=(33,), kind=2)),
            "have 33 values, which is not a multiple of the 32 of Q4_0",
        ),
        (
            header(1, 0, tensor_entry("t", offset=2**64 - 32)),
            f"from byte {2**64 + 32} on, but the file ends at byte 57",
        ),
        (header(1, 0, tensor_entry("t", offset=5) + bytes(99)), "offset 5 of t is not a multiple of 32"),
        (header(2, 0, tensor_entry("t") * 2 + bytes(99)), "has the tensor t twice"),
        (header(2, 0, tensor_entry("t") + tensor_entry("u") + bytes(99)), "t and u overlap at byte 96"),
        (header(1, 0, tensor_entry("t") + bytes(64)), "general.architecture is missing"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_header_that_cannot_be_is_refused_with_the_numbers(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=problem) as caught:
        load_model(path)
    assert caught.value.path == str(path)


def test_a_text_that_is_not_utf_8_is_an_error_when_the_list_is_asked_for(small_file: Path) -> None:
    small_file.write_bytes(small_file.read_bytes().replace("Ġé".encode(), b"\xff\xff\xff\xff"))
    model = load_model(small_file)
    with pytest.raises(ModelFileError, match=r"item 7 of tokenizer\.ggml\.tokens is not UTF-8"):
        model.metadata["tokenizer.ggml.tokens"]


def test_a_file_cut_short_at_any_byte_is_refused(small_file: Path) -> None:
    _, offsets, header_bytes = counts_in(small_file)
    reader = GGUFReader(small_file)
    end = max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
    del reader
    assert len(offsets) == 12
    assert header_bytes < 2000
    assert end > 8000
    lengths = [*range(end - 1, end - 70, -1), *range(end - 70, header_bytes, -211), *range(header_bytes, -1, -1)]
    for length in lengths:
        os.truncate(small_file, length)
        with pytest.raises(ModelFileError):
            load_model(small_file)


@pytest.mark.parametrize("huge", [2**31 - 1, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_huge_count_anywhere_is_refused_without_a_big_allocation(small_file: Path, huge: int) -> None:
    counts, offsets, _ = counts_in(small_file)
    assert {count.what for count in counts} == {
        "tensors",
        "keys",
        "key",
        "text",
        "array",
        "item",
        "tensor name",
        "number of dimensions",
        "dimension",
    }
    load_model(small_file)  # what is imported and cached on the way is not counted below
    tracemalloc.start()
    try:
        for count in counts + offsets:
            before = patch(small_file, count.offset, min(huge, 2 ** (8 * count.width) - 1), count.width)
            with pytest.raises(ModelFileError):
                load_model(small_file)
            patch(small_file, count.offset, int.from_bytes(before, "little"), count.width)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    load_model(small_file)


def test_a_tensor_past_the_end_is_refused_with_the_numbers(small_file: Path) -> None:
    _, offsets, _ = counts_in(small_file)
    size = small_file.stat().st_size
    for place in offsets:
        before = patch(small_file, place.offset, size // 32 * 32, 8)
        with pytest.raises(ModelFileError, match=f"the file ends at byte {size}"):
            load_model(small_file)
        patch(small_file, place.offset, int.from_bytes(before, "little"), 8)


def mutations(size: int) -> st.SearchStrategy[list[tuple[int, bytes]]]:
    """Return a strategy for a few overwritten bytes, words and double words in the first `size` bytes."""
    edges = [0, 1, 2, 7, 8, 9, 31, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    replaced = st.one_of(
        st.binary(min_size=1, max_size=4),
        st.sampled_from(edges).map(lambda value: (value % 2**32).to_bytes(4, "little")),
        st.sampled_from(edges).map(lambda value: value.to_bytes(8, "little")),
    )
    return st.lists(st.tuples(st.integers(0, size - 1), replaced), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def fuzzed_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    config = small_config(num_layers=1, vocab_size=16, hidden_size=16, num_heads=2, num_kv_heads=1, head_size=8)
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    write_gguf(path, config, random_weights(config), keys=SOME_KEYS)
    return path, path.read_bytes(), counts_in(path)[2]


@settings(max_examples=200, deadline=None, database=None)
@given(data=st.data())
def test_a_damaged_header_loads_or_is_refused_and_nothing_else(
    fuzzed_file: tuple[Path, bytes, int], data: st.DataObject
) -> None:
    path, original, header_bytes = fuzzed_file
    damaged = bytearray(original)
    for offset, replaced in data.draw(mutations(header_bytes)):
        damaged[offset : offset + len(replaced)] = replaced
    path.write_bytes(damaged)
    try:
        model = load_model(path)
        for tensor in tensors_of(model).values():
            assert tensor.float32().shape == tensor.shape
        assert len(dict(model.metadata)) == len(model.metadata)
        assert rope_frequencies(model.config).shape == (model.config.head_size // 2,)
    except ModelFileError:
        pass


# The real thing.


@pytest.mark.smollm2
def test_smollm2_has_its_published_shape(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    config = model.config
    assert (config.architecture, config.num_layers, config.vocab_size, config.hidden_size) == ("llama", 30, 49152, 576)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.intermediate_size) == (9, 3, 64, 1536)
    assert (config.context_length, config.rope_theta, config.eos_ids) == (8192, 100000.0, (2,))
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert model.weights.output is model.weights.embedding
    assert len(tensors_of(model)) == 272 + 1  # the embedding counts twice
    assert model.weights.layers[29].q.dtype == "Q4_1"
    assert model.weights.embedding.dtype == "Q8_0"
    key = model.weights.layers[0].k.float32()
    assert key.shape == (192, 576)
    assert 0.01 < float(np.abs(key).mean()) < 1
    tokens = model.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert len(tokens) == 49152
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
