"""Writes small random models as GGUF files and as safetensors folders.

Weights are a dictionary with the names and row order that safetensors folders have. What differs in a GGUF file (names,
order of query and key rows, quantisation) comes from the gguf library and from the formula of llama.cpp's converter.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize

from reprieve.model.config import Architecture, ModelConfig, RopeScaling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

Weights = dict[str, "NDArray[np.float32]"]
FloatType = Literal["F32", "F16", "BF16"]
_GGUF_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def small_config(architecture: Architecture = "llama", **changes: Any) -> ModelConfig:
    """Return a model of two layers with 128 tokens; its rows are whole blocks of every 32-value quantisation."""
    fields: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "context_length": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_ids": (2,),
        "bos_id": 1,
    }
    return ModelConfig(architecture=architecture, **(fields | changes))


def random_weights(config: ModelConfig, *, tied: bool = False, biases: bool = False, seed: int = 0) -> Weights:
    """Return random weights by their safetensors names, scaled so that activations stay near 1.

    `biases` adds the four attention biases of Llama's `attention_bias`; Qwen2 has its three anyway.
    """
    random = np.random.default_rng(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def matrix(outputs: int, inputs: int) -> NDArray[np.float32]:
        return (random.standard_normal((outputs, inputs)) / math.sqrt(inputs)).astype(np.float32)

    def vector(size: int, mean: float) -> NDArray[np.float32]:
        return (mean + 0.1 * random.standard_normal(size)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden) * np.float32(8)}
    for index in range(config.num_layers):
        layer = {
            "input_layernorm.weight": vector(hidden, 1),
            "self_attn.q_proj.weight": matrix(queries, hidden),
            "self_attn.k_proj.weight": matrix(keys, hidden),
            "self_attn.v_proj.weight": matrix(keys, hidden),
            "self_attn.o_proj.weight": matrix(hidden, queries),
            "post_attention_layernorm.weight": vector(hidden, 1),
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
        if biases or config.architecture == "qwen2":
            sizes = {"q": queries, "k": keys, "v": keys}
            layer |= {f"self_attn.{part}_proj.bias": vector(size, 0) for part, size in sizes.items()}
        if biases:
            layer["self_attn.o_proj.bias"] = vector(hidden, 0)
        if config.architecture == "qwen3":
            layer["self_attn.q_norm.weight"] = vector(config.head_size, 1)
            layer["self_attn.k_norm.weight"] = vector(config.head_size, 1)
        weights |= {f"model.layers.{index}.{name}": values for name, values in layer.items()}
    weights["model.norm.weight"] = vector(hidden, 1)
    if not tied:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden)
    return weights


def write_folder(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: FloatType = "F32",
    num_shards: int = 1,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Write a safetensors folder and return it. `settings` overrides keys of `config.json`; None takes one out."""
    folder.mkdir(parents=True, exist_ok=True)
    written = config_json(config, weights) | dict(settings or {})
    kept = {key: value for key, value in written.items() if value is not None or key == "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")
    names = sorted(weights)
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(weights, dtype))
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = {name: weights[name] for name in names[shard::num_shards]}
        (folder / file).write_bytes(safetensors_bytes(held, dtype))
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return folder


def config_json(config: ModelConfig, weights: Weights) -> dict[str, object]:
    """Return what `config.json` says about such a model."""
    scaling: dict[str, object] | None = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        scaling = {
            **(scaling or {}),
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_context_length,
        }
    eos: int | list[int] | None = list(config.eos_ids) or None
    return {
        "model_type": config.architecture,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in weights,
        "eos_token_id": eos,
        "bos_token_id": config.bos_id,
    }


def safetensors_bytes(tensors: Mapping[str, NDArray[np.float32]], dtype: FloatType = "F32") -> bytes:
    """Return a safetensors file that holds `tensors` as `dtype`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, values in tensors.items():
        data = float_bytes(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


def float_bytes(values: NDArray[np.float32], dtype: FloatType) -> bytes:
    """Return `values` in a float type, little-endian. BF16 is what the gguf library makes of it."""
    if dtype == "BF16":
        return quantize(values, GGMLQuantizationType.BF16).tobytes()
    return values.astype("<f4" if dtype == "F32" else "<f2").tobytes()


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: str = "F32",
    keys: Mapping[str, object] | None = None,
) -> Path:
    """Write a GGUF file and return its path.

    Matrices whose rows are whole blocks are quantised to `dtype` (any type the gguf library can write, such as
    "Q4_1"), the rest is F32. `keys` adds keys, with texts, whole numbers, floats, truth values or lists of one kind.
    """
    architecture = _GGUF_ARCHITECTURES[config.architecture]
    writer = GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    _add_config(writer, architecture, config)
    for key, value in (keys or {}).items():
        _add_key(writer, key, value)
    names = get_tensor_name_map(
        {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}[architecture],
        config.num_layers,
    )
    for name, values in weights.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        in_order = interleaved(values, name, config) if architecture == "llama" else values
        kind = GGMLQuantizationType[dtype]
        if values.ndim == 1 or values.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, quantize(in_order, kind), raw_dtype=kind)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config, config.rope_scaling))
    elif config.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(config.rope_factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(values: NDArray[np.float32], name: str, config: ModelConfig) -> NDArray[np.float32]:
    """Return query and key rows in the order of GGUF "llama" files, and anything else as it is."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def llama3_divisors(config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    """Return what llama.cpp's converter stores for the "llama3" scaling."""
    divisors = []
    for pair in range(config.head_size // 2):
        wavelength = 2 * math.pi * config.rope_theta ** (2 * pair / config.head_size)
        if wavelength < scaling.original_context_length / scaling.high_freq_factor:
            divisors.append(1.0)
        elif wavelength > scaling.original_context_length / scaling.low_freq_factor:
            divisors.append(scaling.factor)
        else:
            smooth = (scaling.original_context_length / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.asarray(divisors, dtype=np.float32)


def _add_config(writer: GGUFWriter, architecture: str, config: ModelConfig) -> None:
    """Write the configuration as the converter does."""
    counts = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_size,
    }
    if config.head_size * config.num_heads != config.hidden_size:
        counts |= {"attention.key_length": config.head_size, "attention.value_length": config.head_size}
    for key, count in counts.items():
        writer.add_uint32(f"{architecture}.{key}", count)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", config.rope_scaling.factor)
    for key, token in zip(_EOS_KEYS, config.eos_ids, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}", token)
    if config.bos_id is not None:
        writer.add_uint32("tokenizer.ggml.bos_token_id", config.bos_id)


def _add_key(writer: GGUFWriter, key: str, value: object) -> None:
    """Write one key with the type that fits its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key}: no GGUF type for {type(value).__name__}")
