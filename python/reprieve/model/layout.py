"""Which weights each architecture has, what they are called in a file, and what shapes they must have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from reprieve.errors import InvalidArgument, ModelFileError
from reprieve.model.weights import LayerWeights, ModelWeights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from reprieve.model.config import Architecture, ModelConfig
    from reprieve.model.weights import FileTensor, Tensor


@dataclass(frozen=True, slots=True)
class Naming:
    """Names of weights in one kind of file; `layers` maps the fields of `LayerWeights`, with {} for the layer."""

    embedding: str
    final_norm: str
    output: str
    layers: Mapping[str, str]


GGUF_NAMES = Naming(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    output="output.weight",
    layers={
        "attention_norm": "blk.{}.attn_norm.weight",
        "q": "blk.{}.attn_q.weight",
        "k": "blk.{}.attn_k.weight",
        "v": "blk.{}.attn_v.weight",
        "o": "blk.{}.attn_output.weight",
        "mlp_norm": "blk.{}.ffn_norm.weight",
        "gate": "blk.{}.ffn_gate.weight",
        "up": "blk.{}.ffn_up.weight",
        "down": "blk.{}.ffn_down.weight",
        "q_bias": "blk.{}.attn_q.bias",
        "k_bias": "blk.{}.attn_k.bias",
        "v_bias": "blk.{}.attn_v.bias",
        "o_bias": "blk.{}.attn_output.bias",
        "q_norm": "blk.{}.attn_q_norm.weight",
        "k_norm": "blk.{}.attn_k_norm.weight",
    },
)

SAFETENSORS_NAMES = Naming(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    output="lm_head.weight",
    layers={
        "attention_norm": "model.layers.{}.input_layernorm.weight",
        "q": "model.layers.{}.self_attn.q_proj.weight",
        "k": "model.layers.{}.self_attn.k_proj.weight",
        "v": "model.layers.{}.self_attn.v_proj.weight",
        "o": "model.layers.{}.self_attn.o_proj.weight",
        "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
        "gate": "model.layers.{}.mlp.gate_proj.weight",
        "up": "model.layers.{}.mlp.up_proj.weight",
        "down": "model.layers.{}.mlp.down_proj.weight",
        "q_bias": "model.layers.{}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{}.self_attn.v_proj.bias",
        "o_bias": "model.layers.{}.self_attn.o_proj.bias",
        "q_norm": "model.layers.{}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    },
)

BIASES = frozenset({"q_bias", "k_bias", "v_bias", "o_bias"})
_EVERY_LAYER = frozenset({"attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"})
_OF_ARCHITECTURE: dict[Architecture, frozenset[str]] = {
    "llama": frozenset(),
    "mistral": frozenset(),
    "qwen2": frozenset({"q_bias", "k_bias", "v_bias"}),
    "qwen3": frozenset({"q_norm", "k_norm"}),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a file must hold beside what its architecture always has, what else it may hold, and what means nothing.

    `tied` says that the output head is the embedding. `ignored` are names that may be there and are not loaded.
    """

    naming: Naming
    tied: bool
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()


def assemble(path: Path, config: ModelConfig, layout: Layout, tensors: Mapping[str, FileTensor]) -> ModelWeights:
    """Return the weights of a model, every one there and of the shape that the configuration gives it.

    Raises `ModelFileError` for a tensor that is missing, has another shape, or has no place in the architecture.
    """
    shelf = _Shelf(path, tensors)
    naming = layout.naming
    embedding = shelf.take(naming.embedding, (config.vocab_size, config.hidden_size))
    # Named first, and only then looked up: a count of layers that is too large stops at the first that is missing.
    layers = tuple(_layer(shelf, config, layout, index) for index in range(config.num_layers))
    final_norm = shelf.take(naming.final_norm, (config.hidden_size,))
    output = embedding if layout.tied else shelf.take(naming.output, (config.vocab_size, config.hidden_size))
    shelf.refuse_rest(layout.ignored, config.architecture)
    return ModelWeights(embedding, layers, final_norm, output)


def _layer(shelf: _Shelf, config: ModelConfig, layout: Layout, index: int) -> LayerWeights:
    """Take the weights of one layer from the shelf."""
    required = _EVERY_LAYER | _OF_ARCHITECTURE[config.architecture] | layout.required
    found = {}
    for field, shape in layer_shapes(config).items():
        name = layout.naming.layers[field].format(index)
        if field in required or (field in layout.optional and name in shelf.tensors):
            found[field] = shelf.take(name, shape)
    return LayerWeights(**found)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight that a layer can have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_size
    keys = config.num_kv_heads * config.head_size
    return {
        "attention_norm": (hidden,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "q_bias": (queries,),
        "k_bias": (keys,),
        "v_bias": (keys,),
        "o_bias": (hidden,),
        "q_norm": (config.head_size,),
        "k_norm": (config.head_size,),
    }


def checked_tensors(config: ModelConfig, model: ModelWeights) -> list[Tensor]:
    """Return every weight of `model`, one that stands in several places as often.

    The vocabulary may have more rows than its size. Raises `InvalidArgument` for a count of layers or a shape that does
    not fit `config`.
    """
    expected = list(_expected(config, model))
    for tensor, shape in expected:
        if tensor.shape != shape:
            raise InvalidArgument("weights", f"{tensor.name} is {list(tensor.shape)}, the model needs {list(shape)}")
    return [tensor for tensor, _ in expected]


def _expected(config: ModelConfig, model: ModelWeights) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Yield each weight with the shape that it must have."""
    shapes = layer_shapes(config)
    for tensor in (model.embedding, model.output):
        yield tensor, (max((config.vocab_size, *tensor.shape[:1])), config.hidden_size)
    yield model.final_norm, (config.hidden_size,)
    if len(model.layers) != config.num_layers:
        raise InvalidArgument("weights", f"have {len(model.layers)} layers, the model needs {config.num_layers}")
    for layer in model.layers:
        for field in fields(layer):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                yield tensor, shapes[field.name]


class _Shelf:
    """The tensors of a file, and which of them have been taken."""

    def __init__(self, path: Path, tensors: Mapping[str, FileTensor]) -> None:
        self.path = path
        self.tensors = tensors
        self.taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        """Return the tensor `name`, which must have this shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(self.path, f"the tensor {name} {list(shape)} is missing")
        if tensor.shape != shape:
            raise ModelFileError(
                tensor.path, f"the tensor {name} is {list(tensor.shape)}, the model's sizes make it {list(shape)}"
            )
        self.taken.add(name)
        return tensor

    def refuse_rest(self, ignored: Iterable[str], architecture: str) -> None:
        """Raise where a tensor was not taken: the model would not compute what its file says."""
        rest = self.tensors.keys() - self.taken - set(ignored)
        if rest:
            first = min(rest)
            raise ModelFileError(
                self.tensors[first].path,
                f"{len(rest)} tensors have no place in a model of the architecture {architecture}, such as {first}",
            )
