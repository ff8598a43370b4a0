"""Models in GGUF files."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from reprieve.errors import ModelFileError
from reprieve.model.config import ModelConfig, RopeScaling
from reprieve.model.fields import Fields
from reprieve.model.gguf_header import scan
from reprieve.model.layout import BIASES, GGUF_NAMES, Layout, assemble
from reprieve.model.weights import FileTensor, map_file, plain_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from mmap import mmap
    from pathlib import Path

    from numpy.typing import NDArray

    from reprieve.model.config import Architecture
    from reprieve.model.gguf_header import Metadata, TensorPlace
    from reprieve.model.weights import ModelWeights

# "llama" stands for Mistral and SmolLM2 as well.
_ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NO_TOKEN = 2**32 - 1  # some writers' way to say that there is no such token
_ROPE_FACTORS = "rope_freqs.weight"


def load_gguf(path: Path) -> tuple[ModelConfig, ModelWeights, Metadata]:
    """Open the model in the GGUF file `path`; its weights stay in the file until they are asked for.

    Raises `ModelFileError` for a file that is damaged, incomplete or of a kind that is not supported.
    """
    data = map_file(path)
    header = scan(path, data)
    parts = Fields(path, header.metadata.undecoded()).integer("split.count", 1)
    if parts > 1:
        raise ModelFileError(path, f"is one of {parts} parts; join them first, with llama-gguf-split --merge")
    tensors = {place.name: _tensor(path, data, place) for place in header.tensors}
    config = _config(path, header.metadata, tensors)
    if config.architecture == "llama":
        tensors = _with_rows_in_order(tensors, config)
    layout = Layout(
        naming=GGUF_NAMES,
        tied=GGUF_NAMES.output not in tensors,
        optional=BIASES,
        ignored=frozenset({_ROPE_FACTORS}),
    )
    return config, assemble(path, config, layout, tensors), header.metadata


def _tensor(path: Path, data: mmap, place: TensorPlace) -> FileTensor:
    """Return the tensor at `place`, which lies in the file."""
    block, block_bytes = GGML_QUANT_SIZES[place.type]
    decode = plain_decoder(place.type.name) or _dequantizer(place.type)
    if decode is None:
        raise ModelFileError(path, f"the tensor {place.name} has the type {place.type.name}, which is not supported")
    rows = np.frombuffer(data, np.uint8, place.size, place.offset)
    return FileTensor(
        path=path,
        name=place.name,
        shape=place.shape,
        dtype=place.type.name,
        data=rows.reshape(*place.shape[:-1], place.shape[-1] // block * block_bytes),
        decode=decode,
    )


@cache
def _dequantizer(kind: GGMLQuantizationType) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]] | None:
    """Return what decodes a quantised type, or None where the library has only its name."""
    block_of_zeros = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    try:
        with np.errstate(all="ignore"):
            dequantize(block_of_zeros, kind)
    except NotImplementedError:
        return None
    return partial(dequantize, qtype=kind)


def _with_rows_in_order(tensors: Mapping[str, FileTensor], config: ModelConfig) -> dict[str, FileTensor]:
    """Undo the order in which "llama" files keep the rows of queries and keys.

    They interleave the halves of each head, for an engine that rotates neighbours: row 2 i + h of a head is its
    row i + h * head_size / 2. Whole rows move, so this holds for quantised types as well. A tensor of another number
    of rows is left alone, to be refused with the others.
    """
    ordered = dict(tensors)
    for kind, num_heads in (("attn_q", config.num_heads), ("attn_k", config.num_kv_heads)):
        of_kind = [tensor for tensor in tensors.values() if tensor.name.split(".")[2:3] == [kind]]
        fitting = [tensor for tensor in of_kind if tensor.shape[0] == num_heads * config.head_size]
        if fitting:  # so the order is no longer than a tensor in the file
            order = _row_order(num_heads, config.head_size)
            ordered |= {tensor.name: replace(tensor, row_order=order) for tensor in fitting}
    return ordered


def _row_order(num_heads: int, head_size: int) -> NDArray[np.intp]:
    """Return for each row in rotated-halves order its row in the file: [num_heads * head_size]."""
    in_file = np.arange(num_heads * head_size, dtype=np.intp).reshape(num_heads, head_size // 2, 2)
    return np.ascontiguousarray(in_file.swapaxes(1, 2)).reshape(-1)


def _config(path: Path, metadata: Metadata, tensors: Mapping[str, FileTensor]) -> ModelConfig:
    """Return the configuration that the keys of the file describe."""
    general = Fields(path, metadata.undecoded())
    name = general.text("general.architecture")
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise ModelFileError(path, f'the architecture "{name}" is not known; known are {", ".join(_ARCHITECTURES)}')
    fields = Fields(path, general.values, f"{name}.")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_size = _head_size(fields, hidden_size, num_heads)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=_vocab_size(fields, metadata, tensors),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
            head_size=head_size,
            context_length=_context_length(fields),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10000.0),
            rope_scaling=_rope_scaling(fields),
            rope_factors=_rope_factors(tensors, head_size),
            eos_ids=_special_ids(general, "eos_token_id", "eot_token_id", "eom_token_id"),
            bos_id=next(iter(_special_ids(general, "bos_token_id")), None),
        )
    except ModelFileError:
        raise
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error


def _head_size(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """Return the size of a head, which must be the same for keys and values, and rotated as a whole."""
    if fields.get("attention.key_length") is None and (num_heads < 1 or hidden_size % num_heads):
        raise fields.wrong("embedding_length", f"{hidden_size} is not a multiple of {num_heads} heads")
    head_size = fields.integer("attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_size) != head_size:
            raise fields.wrong(key, f"is {fields.integer(key)}, but only the head size {head_size} is supported")
    return head_size


def _vocab_size(fields: Fields, metadata: Metadata, tensors: Mapping[str, FileTensor]) -> int:
    """Return the rows of the embedding, which must be enough for the file's own vocabulary."""
    embedding = tensors.get(GGUF_NAMES.embedding)
    if embedding is None:
        raise ModelFileError(fields.path, f"the tensor {GGUF_NAMES.embedding} is missing")
    rows = embedding.shape[0]
    tokens = metadata.length("tokenizer.ggml.tokens")
    if tokens is not None and tokens > rows:
        raise ModelFileError(fields.path, f"tokenizer.ggml.tokens has {tokens} tokens, the embedding only {rows} rows")
    return fields.integer("vocab_size", rows)


def _context_length(fields: Fields) -> int:
    """Return the longest context in which every query may attend to its whole past."""
    context, window = fields.integer("context_length"), fields.integer("attention.sliding_window", 0)
    return min(context, window) if window > 0 else context


def _rope_scaling(fields: Fields) -> RopeScaling | None:
    """Return the scaling of rotary frequencies; "llama3" comes as factors in a tensor instead.

    A factor without a type is linear, and a factor of 0 is none: so these files have always been read.
    """
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0))
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in {"none", "linear"}:
        raise fields.wrong("rope.scaling.type", f'"{kind}" is not supported; "none" and "linear" are')
    return None if kind == "none" or factor == 0 else RopeScaling("linear", factor)


def _rope_factors(tensors: Mapping[str, FileTensor], head_size: int) -> tuple[float, ...] | None:
    """Return the divisors of the rotary frequencies, where the file has them."""
    tensor = tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.shape != (head_size // 2,):
        raise ModelFileError(tensor.path, f"{_ROPE_FACTORS} is {list(tensor.shape)}, not [{head_size // 2}]")
    return tuple(tensor.float32().tolist())


def _special_ids(general: Fields, *keys: str) -> tuple[int, ...]:
    """Return the token ids that the file gives for `keys`, each once."""
    ids = (general.integer(f"tokenizer.ggml.{key}", _NO_TOKEN) for key in keys)
    return tuple(dict.fromkeys(token for token in ids if token != _NO_TOKEN))
