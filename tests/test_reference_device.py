"""The reference device: what a forward pass means, and what it keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from device_kinds import CPU, REFERENCE, DeviceKind
from reprieve.device.reference import ReferenceDevice
from reprieve.device.reference_weights import ReferenceWeights
from reprieve.device.row_tiles import blas_product, same_bits
from reprieve.model.config import Architecture, ModelConfig, rope_frequencies
from reprieve.model.llama import forward
from reprieve.model.weights import LayerWeights, ModelWeights, Rounding, Tensor, rounded
from tiny_models import Row, Runner, tiny_config, tiny_weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mistral", "qwen2", "qwen3")


# Meaning.


def naive_logits(config: ModelConfig, weights: ModelWeights, tokens: list[int]) -> NDArray[np.float64]:
    """Return the logits of every position in float64, with full matrices, a causal mask and no cache."""

    def value(tensor: Tensor) -> NDArray[np.float64]:
        return np.asarray(tensor.float32(), np.float64)

    def linear(x: NDArray[np.float64], weight: Tensor, bias: Tensor | None = None) -> NDArray[np.float64]:
        product: NDArray[np.float64] = x @ value(weight).T
        return product if bias is None else product + value(bias)

    def norm(x: NDArray[np.float64], weight: Tensor) -> NDArray[np.float64]:
        scale: NDArray[np.float64] = np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps)
        normed: NDArray[np.float64] = x / scale * value(weight)
        return normed

    def heads(x: NDArray[np.float64], weight: Tensor | None) -> NDArray[np.float64]:
        split = x.reshape(length, -1, config.head_size).swapaxes(0, 1)
        return split if weight is None else norm(split, weight)

    def turned(x: NDArray[np.float64]) -> NDArray[np.float64]:
        half = config.head_size // 2
        swapped = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        result: NDArray[np.float64] = x * np.cos(angles) + swapped * np.sin(angles)
        return result

    def attention(layer: LayerWeights, x: NDArray[np.float64]) -> NDArray[np.float64]:
        q = turned(heads(linear(x, layer.q, layer.q_bias), layer.q_norm))
        k = turned(heads(linear(x, layer.k, layer.k_bias), layer.k_norm))
        v = heads(linear(x, layer.v, layer.v_bias), None)
        k, v = (np.repeat(each, config.num_heads // config.num_kv_heads, axis=0) for each in (k, v))
        scores = q @ k.swapaxes(1, 2) / math.sqrt(config.head_size)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = shares / shares.sum(-1, keepdims=True) @ v
        return linear(mixed.swapaxes(0, 1).reshape(length, -1), layer.o, layer.o_bias)

    length = len(tokens)
    angles = np.tile(np.outer(np.arange(length), rope_frequencies(config)), 2)
    x = value(weights.embedding)[tokens]
    for layer in weights.layers:
        x = x + attention(layer, norm(x, layer.attention_norm))
        normed = norm(x, layer.mlp_norm)
        gate = linear(normed, layer.gate)
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, layer.up), layer.down)
    return linear(norm(x, weights.final_norm), weights.output)


@pytest.mark.parametrize("kind", [REFERENCE, CPU], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("heads", [(4, 2, 16), (9, 3, 8), (6, 6, 8)])
def test_a_step_is_the_plain_forward_pass(
    architecture: Architecture, heads: tuple[int, int, int], kind: DeviceKind
) -> None:
    config = tiny_config(heads, architecture)
    weights = tiny_weights(config, seed=5)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 30).tolist()
    expected = naive_logits(config, weights, tokens)
    runner = Runner.of(kind.device(kind.weights(config, weights)))
    for at, chunk in ((0, 11), (11, 1), (12, 18)):
        got = runner.run([Row(1, at, tokens[at : at + chunk])])[1]
        assert np.allclose(got, expected[at + chunk - 1], rtol=1e-4, atol=1e-4)


def test_weights_are_rounded_to_the_kind_asked_for() -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    kinds: tuple[Rounding, ...] = ("f16", "bf16")
    for kind in kinds:
        kept = ReferenceWeights(config, weights, kind)
        assert same_bits(kept[weights.layers[1].up].T.copy(), rounded(weights.layers[1].up.float32(), kind))
        assert not same_bits(kept[weights.final_norm], weights.final_norm.float32())
    kinds = ("file", "f32")
    for kind in kinds:
        assert same_bits(ReferenceWeights(config, weights, kind)[weights.output].T.copy(), weights.output.float32())


def test_a_tied_embedding_is_kept_once_and_two_devices_share_the_weights() -> None:
    config = tiny_config(architecture="qwen2")
    model = tiny_weights(config)
    weights = ReferenceWeights(config, model)
    assert weights[model.embedding] is weights[model.output]
    devices = [ReferenceDevice(weights, num_blocks=3, block_size=4, num_slots=1) for _ in range(2)]
    first, second = (Runner.of(device).run([Row(0, 0, [3, 1, 4])])[0] for device in devices)
    assert same_bits(first, second)


def test_each_weight_shape_is_probed_once_and_a_failing_height_is_not_used() -> None:
    config = tiny_config()
    heights: list[int] = []

    def product(tile: NDArray[np.float32], weight: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        heights.append(len(tile))
        blas_product(tile, weight, out)
        if len(tile) == 8:
            out[5] = np.nextafter(out[5], np.float32(0))

    weights = ReferenceWeights(config, tiny_weights(config), product=product)
    assert heights.count(4) == 6 * (1 + 3 * 4)  # six shapes: q, k and v, o, gate and up, down, output
    heights.clear()
    weights.linear(np.ones((9, config.hidden_size), np.float32), weights.model.output, None)
    assert heights == [4, 4, 4]


class NamedCalls:
    """`Ops` that records: a buffer is the number of the call that made it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> Any:
            self.calls.append((name, *arguments))
            made = f"{name} {len(self.calls)}"
            return (made, f"sum {len(self.calls)}") if name == "add_rms_norm" else made

        return call


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_architecture_looks_into_no_buffer_so_a_device_may_record_it(architecture: Architecture) -> None:
    config = tiny_config(architecture=architecture)
    weights = tiny_weights(config)
    first, second = NamedCalls(), NamedCalls()
    for ops in (first, second):
        forward(ops, config, weights)
    assert first.calls == second.calls
    names = [call[0] for call in first.calls]
    assert names[:2] == ["embed", "rms_norm"]
    assert names[-3:] == ["select_readback", "linear", "argmax"]
    assert names.count("linear") == 2 * 7 + 1
    assert names.count("head_norm") == (4 if architecture == "qwen3" else 0)
