"""`config.json`: what it says arrives, and what it cannot mean here is refused with the numbers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from model_files import llama3_divisors, random_weights, small_config, write_folder, write_gguf
from reprieve.errors import ModelFileError
from reprieve.model import load_model
from reprieve.model.config import ModelConfig, RopeScaling, rope_frequencies
from reprieve.model.config_json import read_folder_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from reprieve.model.config import Architecture

ARCHITECTURES: list[Architecture] = ["llama", "mistral", "qwen2", "qwen3"]
SMOLLM2 = {  # as published with SmolLM2-135M-Instruct
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(folder: Path, **changes: object) -> ModelConfig:
    """Return the configuration of a folder with SmolLM2's `config.json` and these changes; `...` takes a key out."""
    kept = {key: value for key, value in (SMOLLM2 | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept), "utf-8")
    return read_folder_config(folder).model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_configuration_is_the_one_that_was_written(tmp_path: Path, architecture: Architecture) -> None:
    config = small_config(architecture, num_heads=6, num_kv_heads=3, head_size=8, eos_ids=(5, 3), bos_id=None)
    model = load_model(write_folder(tmp_path / "m", config, random_weights(config)))
    assert model.config == config


def test_smollm2_has_its_published_shape(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config == ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, eos_ids=(2,), bos_id=1)
    assert read_folder_config(tmp_path).tied_embeddings
    assert not read_folder_config(tmp_path).attention_biases


def test_what_a_file_leaves_out_is_what_its_class_has(tmp_path: Path) -> None:
    left_out = (
        "num_key_value_heads",
        "rope_theta",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
        "eos_token_id",
    )
    config = config_of(tmp_path, **dict.fromkeys(left_out, ...))
    assert (config.num_kv_heads, config.rope_theta, config.rms_norm_eps, config.eos_ids) == (9, 10000.0, 1e-6, ())
    assert not read_folder_config(tmp_path).tied_embeddings


# Heads.


def test_head_size_is_head_dim_or_a_head_s_share(tmp_path: Path) -> None:
    assert config_of(tmp_path).head_size == 64
    assert config_of(tmp_path, head_dim=None).head_size == 64
    assert config_of(tmp_path, head_dim=80).head_size == 80
    assert config_of(tmp_path, model_type="qwen2").head_size == 64
    with pytest.raises(ModelFileError, match="head_dim is missing"):
        config_of(tmp_path, model_type="qwen3")
    with pytest.raises(ModelFileError, match="hidden_size 577 is not a multiple of num_attention_heads 9"):
        config_of(tmp_path, hidden_size=577)


# End of sequence.


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [
        (2, ..., (2,)),
        ([2, 7, 2], ..., (2, 7)),
        (None, ..., ()),
        ([], ..., ()),
        (..., ..., ()),
        (2, [128, 9, 8], (128, 9, 8)),
        (2, 7, (7,)),
        (2, None, (2,)),
        (2, [], (2,)),
        (None, [4], (4,)),
        (0, ..., (0,)),
    ],
)
def test_end_of_sequence_ids_are_one_several_or_none(
    tmp_path: Path, config_eos: object, generation_eos: object, expected: tuple[int, ...]
) -> None:
    if generation_eos is not ...:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}), "utf-8")
    assert config_of(tmp_path, eos_token_id=config_eos).eos_ids == expected


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    for text, problem in (("{", "is not JSON"), ('{"eos_token_id": [2, "x"]}', r"eos_token_id\[1\] must be a whole")):
        path.write_text(text, "utf-8")
        with pytest.raises(ModelFileError, match=problem) as caught:
            config_of(tmp_path)
        assert caught.value.path == str(path)


# Sliding windows: every query attends to its whole past here, so a window is a limit.


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "llama", "sliding_window": 64}, 8192),
        ({"model_type": "mistral"}, 8192),
        ({"model_type": "mistral", "sliding_window": None}, 8192),
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": 10000}, 8192),
        ({"model_type": "qwen2", "sliding_window": 4096}, 8192),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 8192),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096),
        ({"model_type": "qwen3", "head_dim": 64, "sliding_window": 4096, "use_sliding_window": True}, 4096),
    ],
)
def test_a_sliding_window_in_use_limits_the_context(tmp_path: Path, settings: dict[str, object], expected: int) -> None:
    assert config_of(tmp_path, **settings).context_length == expected


# Rotary frequencies.


def frequencies_of(tmp_path: Path, **changes: object) -> list[float]:
    return [float(value) for value in rope_frequencies(config_of(tmp_path, **changes))]


def test_frequencies_are_powers_of_the_base(tmp_path: Path) -> None:
    expected = [1 / 100000 ** (2 * pair / 64) for pair in range(32)]
    for scaling in (None, {"rope_type": "default"}, {"type": "default"}):
        assert frequencies_of(tmp_path, rope_scaling=scaling) == pytest.approx(expected, rel=1e-14)
    parameters = {"rope_type": "default", "rope_theta": 100000.0}
    newer = frequencies_of(tmp_path, rope_theta=..., rope_scaling=..., rope_parameters=parameters)
    assert newer == pytest.approx(expected, rel=1e-14)
    assert frequencies_of(tmp_path, rope_parameters={"rope_theta": 100000.0}) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_linear_scaling_divides_each_frequency(tmp_path: Path, key: str, place: str) -> None:
    plain = frequencies_of(tmp_path)
    scaled = frequencies_of(tmp_path, **{place: {key: "linear", "factor": 2}})
    assert scaled == [value / 2 for value in plain]


def test_llama3_scaling_follows_the_published_formula(tmp_path: Path) -> None:
    config = config_of(tmp_path, rope_scaling=LLAMA3, rope_theta=500000.0)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    scaled = rope_frequencies(config)
    kinds = []
    for pair in range(32):
        plain = 1 / 500000 ** (2 * pair / 64)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            kinds.append("high")
            expected = plain
        elif wavelength > 8192 / 1:
            kinds.append("low")
            expected = plain / 32
        else:
            kinds.append("middle")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 32 + smooth * plain
        assert scaled[pair] == pytest.approx(expected, rel=1e-12), pair
    assert set(kinds) == {"high", "middle", "low"}


def test_llama3_scaling_is_the_same_from_a_gguf_file(tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", factor=8.0, original_context_length=64)
    config = small_config(rope_scaling=scaling)
    weights = random_weights(config)
    folder = load_model(write_folder(tmp_path / "m", config, weights))
    gguf = load_model(write_gguf(tmp_path / "m.gguf", config, weights))
    assert folder.config == config
    assert len(set(llama3_divisors(config, scaling).tolist())) > 3
    np.testing.assert_allclose(rope_frequencies(gguf.config), rope_frequencies(folder.config), rtol=1e-6)


def test_a_file_s_own_factors_come_on_top(tmp_path: Path) -> None:
    factors = tuple(1.0 + index for index in range(8))
    config = small_config(rope_scaling=RopeScaling("linear", 4.0), rope_factors=factors)
    plain = rope_frequencies(small_config())
    np.testing.assert_array_equal(rope_frequencies(config), plain / 4 / np.array(factors))
    assert rope_frequencies(config).dtype == np.float64


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"rope_scaling": {"rope_type": "foo"}},
            'rope_scaling.rope_type "foo" is not supported; known are default, linear',
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_scaling.type "yarn" is not supported'),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 'rope_parameters.rope_type "dynamic"'),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.rope_type is missing"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor must be more than 0, not 0\.0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a finite number, not '2'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null, not 'linear'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, r"high_freq_factor 1\.0 must be more than low_freq"),
        ({"rope_scaling": LLAMA3 | {"factor": float("inf")}}, "factor must be a finite number, not inf"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "low_freq_factor is missing"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}}, "original_context_length must be more"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "are both given and differ"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0\.5 is not"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor 0\.25 is not supported"),
    ],
)
def test_a_scaling_that_is_not_known_is_refused(tmp_path: Path, settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ModelFileError, match=problem) as caught:
        config_of(tmp_path, **settings)
    assert caught.value.path == str(tmp_path / "config.json")


# Sanity.


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model_type": "gemma3"}, 'model_type "gemma3" is not known; known are llama, mistral, qwen2, qwen3'),
        ({"model_type": ...}, "model_type is missing"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported; "silu" is'),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is not supported"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, not 'yes'"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size must be from 1 to 2147483647, not 0"),
        ({"vocab_size": 2**31}, "vocab_size must be from 1 to 2147483647, not 2147483648"),
        ({"hidden_size": 576.0}, r"hidden_size must be a whole number, not 576\.0"),
        ({"hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({"hidden_size": "9" * 200}, r"hidden_size must be a whole number, not '9{79}\.\.\."),
        ({"intermediate_size": -1}, "intermediate_size must be from 1 to 2147483647, not -1"),
        ({"num_hidden_layers": 0}, "num_layers must be from 1 to"),
        ({"num_attention_heads": 0}, "hidden_size 576 is not a multiple of num_attention_heads 0"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be from 1 to 2147483647, not 0"),
        ({"num_key_value_heads": 2}, "num_heads 9 is not a multiple of num_kv_heads 2"),
        ({"num_key_value_heads": ..., "model_type": "mistral"}, "num_key_value_heads is missing"),
        ({"head_dim": 63}, "head_size must be even, not 63"),
        ({"head_dim": -2}, "head_size must be from 1 to 2147483647, not -2"),
        ({"max_position_embeddings": 10**400}, "context_length must be from 1 to"),
        ({"max_position_embeddings": ...}, "max_position_embeddings is missing"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be at least 1, not 0"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps must be more than 0, not 0\.0"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps must be a finite number, not a whole number of about 10\*\*400"),
        ({"rope_theta": -1.0}, r"rope_theta must be more than 0, not -1\.0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number, not nan"),
        ({"eos_token_id": 49152}, "eos_ids: 49152 is outside the vocabulary of 49152 tokens"),
        ({"eos_token_id": -1}, "eos_ids: -1 is outside the vocabulary"),
        ({"eos_token_id": "2"}, "eos_token_id must be a whole number, not '2'"),
        ({"bos_token_id": 60000}, "bos_id: 60000 is outside the vocabulary"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_numbers(
    tmp_path: Path, settings: dict[str, object], problem: str
) -> None:
    with pytest.raises(ModelFileError, match=problem) as caught:
        config_of(tmp_path, **settings)
    assert caught.value.path == str(tmp_path / "config.json")


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelFileError) as caught:
        read_folder_config(tmp_path)
    assert caught.value.path == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_layers": 0}, "num_layers must be from 1 to 2147483647, not 0"),
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"head_size": 7}, "head_size must be even, not 7"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be more than 0, not nan"),
        ({"rope_factors": (1.0,) * 7}, "rope_factors must be 8 numbers, not 7"),
        ({"rope_factors": (1.0,) * 7 + (0.0,)}, r"rope_factors\[7\] must be more than 0, not 0\.0"),
        ({"eos_ids": (1, 128)}, "eos_ids: 128 is outside the vocabulary of 128 tokens"),
        ({"bos_id": -1}, "bos_id: -1 is outside"),
    ],
)
def test_a_configuration_made_by_hand_is_checked_too(changes: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        small_config(**changes)


def test_a_scaling_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match='kind must be "linear" or "llama3", not \'yarn\''):
        RopeScaling(cast("Any", "yarn"), 2.0)
    with pytest.raises(ValueError, match="factor must be more than 0, not nan"):
        RopeScaling("linear", math.nan)
