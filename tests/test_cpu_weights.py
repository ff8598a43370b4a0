"""The CPU device's weights: kept once and in their own types, and what they mean in each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, check_close
from encoded import EncodedTensor, decoded, encode, with_matrices
from reprieve.device.cpu_weights import CpuWeights
from reprieve.device.row_tiles import same_bits
from reprieve.errors import InvalidArgument
from reprieve.model.weights import rounded
from tiny_models import ArrayTensor, Row, Runner, tiny_config, tiny_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from device_kinds import DeviceKind
    from reprieve.model.config import Architecture, ModelConfig
    from reprieve.model.weights import ModelWeights, Rounding, Tensor

KEPT = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
BYTES = {"F32": 4.0, "F16": 2.0, "BF16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_1": 20 / 32}


def wide_config(architecture: Architecture = "llama") -> ModelConfig:
    """Return a model whose rows are whole blocks of every quantisation."""
    return replace(tiny_config((4, 2, 64), architecture, hidden=256), intermediate_size=512)


def logits(
    kind: DeviceKind, config: ModelConfig, model: ModelWeights, rounding: Rounding = "file"
) -> NDArray[np.float32]:
    """Return the logits of a prompt in two chunks and two further tokens, with KV in float32."""
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 33).tolist()
    runner = Runner.of(kind.device(kind.weights(config, model, rounding)))
    steps = [(0, 20), (20, 11), (31, 1), (32, 1)]
    return np.stack([runner.run([Row(1, at, tokens[at : at + count])])[1] for at, count in steps])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", KEPT)
def test_logits_are_those_of_the_reference_for_every_type_that_is_kept(dtype: str, architecture: Architecture) -> None:
    config = wide_config(architecture)
    model = with_matrices(tiny_weights(config), lambda tensor: encode(tensor, dtype))
    check_close(logits(CPU, config, model), logits(REFERENCE, config, model))


@pytest.mark.parametrize("dtype", ["Q6_K", "Q5_0"])
@pytest.mark.parametrize("factor", [1, 1e6])
def test_other_types_are_kept_in_16_bits_with_as_much_range_as_they_need(dtype: str, factor: float) -> None:
    config = wide_config()
    model = tiny_weights(config)
    # Only the values, whose size a norm takes out again, may be so large that half precision cannot hold them.
    value = model.layers[0].v
    large = ArrayTensor(value.name, (value.float32() * np.float32(factor)))
    layers = (replace(model.layers[0], v=large), *model.layers[1:])
    model = with_matrices(replace(model, layers=layers), lambda tensor: encode(tensor, dtype))
    kept = with_matrices(model, in_sixteen_bits)
    if factor > 1:
        assert np.abs(model.layers[0].v.float32()).max() > 65504
    got = logits(CPU, config, model)
    assert same_bits(got, logits(CPU, config, kept))
    check_close(got, logits(REFERENCE, config, kept))
    assert CpuWeights(config, model).num_bytes < 2.1 * num_values(model)


def in_sixteen_bits(tensor: Tensor) -> Tensor:
    values = tensor.float32()
    return ArrayTensor(tensor.name, rounded(values, "bf16" if np.abs(values).max() > 65504 else "f16"))


@pytest.mark.parametrize("dtype", KEPT)
def test_the_type_that_values_are_kept_in_does_not_show(dtype: str) -> None:
    config = wide_config("qwen2")
    model = with_matrices(tiny_weights(config), lambda tensor: encode(tensor, dtype))
    assert same_bits(logits(CPU, config, model), logits(CPU, config, with_matrices(model, decoded)))


@pytest.mark.parametrize("dtype", ["F32", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("rounding", ["f32", "f16", "bf16"])
def test_weights_are_rounded_to_the_kind_asked_for(dtype: str, rounding: Rounding) -> None:
    config = wide_config("qwen2")
    model = with_matrices(tiny_weights(config), lambda tensor: encode(tensor, dtype))
    got = logits(CPU, config, model, rounding)
    check_close(got, logits(REFERENCE, config, model, rounding))
    plain = with_matrices(model, decoded)
    assert same_bits(got, logits(CPU, config, plain, rounding))
    assert same_bits(got, logits(CPU, config, plain, "f32")) == (rounding == "f32")


def num_values(model: ModelWeights) -> int:
    """Return how many values the matrices have, each counted once."""
    seen: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        seen[id(tensor)] = int(np.prod(tensor.shape))
        return tensor

    with_matrices(model, count)
    return sum(seen.values())


@pytest.mark.parametrize("dtype", KEPT)
def test_weights_are_kept_once_and_in_their_own_type(dtype: str) -> None:
    for architecture, tied in (("llama", False), ("qwen3", True)):
        config = replace(wide_config(architecture), vocab_size=2048)  # type: ignore[arg-type]
        model = with_matrices(tiny_weights(config), lambda tensor: encode(tensor, dtype))
        assert (model.embedding is model.output) == tied
        kept = CpuWeights(config, model).num_bytes
        bare = BYTES[dtype] * num_values(model)
        # The rest is norms; an embedding kept twice would be a third of all.
        assert bare < kept < 1.02 * bare


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "said"),
    [
        ("Q4_1", 40, r"2440 bytes are not 61 rows of 48 weights of type Q4_1 \(the_output\)"),
        ("F16", 95, r"5795 bytes are not 61 rows of 48 weights of type F16 \(the_output\)"),
    ],
)
def test_bytes_that_do_not_fit_their_type_are_refused_by_name(dtype: str, row_bytes: int, said: str) -> None:
    config = tiny_config()
    output = EncodedTensor("the_output", (61, 48), dtype, np.zeros((61, row_bytes), np.uint8))
    with pytest.raises(InvalidArgument, match=said):
        CpuWeights(config, replace(tiny_weights(config), output=output))


def test_a_matrix_that_is_not_contiguous_is_taken_as_it_reads() -> None:
    config = tiny_config()
    model = tiny_weights(config)
    data = np.repeat(model.output.raw(), 2, axis=0)[::2]
    assert not data.flags.c_contiguous
    strided = replace(model, output=EncodedTensor("output", model.output.shape, "F32", data))
    assert same_bits(logits(CPU, config, strided), logits(CPU, config, model))
