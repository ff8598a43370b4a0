"""What `config.json` and `generation_config.json` of a model folder say, as a `ModelConfig`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reprieve.errors import ModelFileError
from reprieve.model.config import ModelConfig, RopeScaling
from reprieve.model.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from reprieve.model.config import Architecture

_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_SCALINGS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class FolderConfig:
    """The configuration of a folder, with the two facts that only its weights need."""

    model: ModelConfig
    tied_embeddings: bool
    attention_biases: bool


def read_folder_config(folder: Path) -> FolderConfig:
    """Read the configuration of the model in `folder`.

    End-of-sequence ids come from `generation_config.json` where that names any, else from `config.json`.
    Raises `ModelFileError` for what is missing, senseless, or not supported.
    """
    path = folder / "config.json"
    fields = Fields(path, read_json_object(path))
    name = fields.text("model_type")
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelFileError(path, f'the model_type "{name}" is not known; known are {", ".join(_ARCHITECTURES)}')
    _refuse_unsupported(fields)
    try:
        model = _model_config(folder, fields, architecture)
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error
    return FolderConfig(
        model=model,
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        attention_biases=architecture in {"llama", "qwen3"} and fields.flag("attention_bias", default=False),
    )


def read_json_object(path: Path) -> Mapping[str, object]:
    """Read a JSON file that holds one object. Raises `ModelFileError` where it cannot be."""
    try:
        return parse_json_object(path, path.read_bytes())
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error


def parse_json_object(path: Path, text: bytes) -> Mapping[str, object]:
    """Return the JSON object `text`, which came from `path`. A key that occurs twice is an error."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values: dict[str, object] = {}
        for key, item in pairs:
            if key in values:
                raise ModelFileError(path, f"has the key {key!r} twice in one object")
            values[key] = item
        return values

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply, a number of 5,000 digits
        raise ModelFileError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"holds JSON, but not an object: {type(value).__name__}")
    return value


def _refuse_unsupported(fields: Fields) -> None:
    """Raise for settings under which the model would compute something else than it does here."""
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.wrong("hidden_act", f'"{activation}" is not supported; "silu" is')
    if fields.get("quantization_config") is not None:
        raise fields.wrong("quantization_config", "is not supported; quantised weights are read from GGUF files")
    if fields.flag("mlp_bias", default=False):
        raise fields.wrong("mlp_bias", "true is not supported")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", f"{fields.number('partial_rotary_factor')} is not supported; 1 is")


def _model_config(folder: Path, fields: Fields, architecture: Architecture) -> ModelConfig:
    """Return the configuration proper. Raises `ModelFileError`, or `ValueError` that names a field."""
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    rope = _rope_fields(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        # Left out, the others take a number of their own class, which no file is known to rely on.
        num_kv_heads=fields.integer("num_key_value_heads", num_heads if architecture == "llama" else None),
        head_size=_head_size(fields, architecture, hidden_size, num_heads),
        context_length=_context_length(fields, architecture),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        eos_ids=_eos_ids(folder, fields),
        bos_id=None if fields.get("bos_token_id") is None else fields.integer("bos_token_id"),
    )


def _head_size(fields: Fields, architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    """Return `head_dim`, or the hidden size shared among the heads."""
    if fields.get("head_dim") is not None or architecture == "qwen3":  # whose class has 128, whatever the others are
        return fields.integer("head_dim")
    if num_heads < 1 or hidden_size % num_heads:
        raise fields.wrong("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def _context_length(fields: Fields, architecture: Architecture) -> int:
    """Return the longest context in which every query may attend to its whole past, as it does here.

    So a sliding window, where the model uses one, is the limit.
    """
    context = fields.integer("max_position_embeddings")
    if architecture == "llama" or fields.get("sliding_window") is None:
        return context
    if not fields.flag("use_sliding_window", default=architecture == "mistral"):
        return context
    window = fields.integer("sliding_window")
    if window < 1:
        raise fields.wrong("sliding_window", f"must be at least 1, not {window}")
    return min(context, window)


def _rope_fields(fields: Fields) -> Fields:
    """Return the settings of the rotary embedding: `rope_parameters`, or `rope_scaling` as older files call it."""
    given = [key for key in ("rope_parameters", "rope_scaling") if fields.get(key) is not None]
    if not given:
        return Fields(fields.path, {})
    if len(given) > 1 and fields.get(given[0]) != fields.get(given[1]):
        raise fields.wrong("rope_parameters", "and rope_scaling are both given and differ")
    value = fields.get(given[0])
    if not isinstance(value, dict):
        raise fields.wrong(given[0], f"must be an object or null, not {value!r}")
    return Fields(fields.path, {f"{given[0]}.{key}": item for key, item in value.items()}, f"{given[0]}.")


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    """Return the scaling of rotary frequencies. A kind that is not known is refused: guessing would change tokens."""
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.wrong("partial_rotary_factor", f"{rope.number('partial_rotary_factor')} is not supported; 1 is")
    key = "type" if rope.get("rope_type") is None and rope.get("type") is not None else "rope_type"
    # Only `rope_scaling` must name a kind: without a prefix nothing is given at all.
    kind = rope.text(key, None if rope.prefix == "rope_scaling." else "default")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context_length=rope.integer("original_max_position_embeddings"),
        )
    raise rope.wrong(key, f'"{kind}" is not supported; known are {", ".join(_SCALINGS)}')


def _eos_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """Return the ids that end a sequence, each once; there may be none."""
    path = folder / "generation_config.json"
    if path.is_file():
        ids = _ids(Fields(path, read_json_object(path)), "eos_token_id")
        if ids:
            return ids
    return _ids(fields, "eos_token_id")


def _ids(fields: Fields, key: str) -> tuple[int, ...]:
    """Return a setting that is one id, several or none."""
    value = fields.get(key)
    if isinstance(value, list):
        each = Fields(fields.path, {f"{key}[{index}]": item for index, item in enumerate(value)})
        return tuple(dict.fromkeys(each.integer(name) for name in each.values))
    return () if value is None else (fields.integer(key),)
