"""Writes the demo's model in the forms that the peers read, and the prompts that all engines get.

The values are those of the Q4_1 file, widened and then rounded to 16 bits: an F16 GGUF for llama.cpp, a folder with
bfloat16 safetensors for vLLM.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize

from reprieve.errors import ModelFileError
from reprieve.hub import demo_model
from reprieve.model import load_model
from reprieve.model.layout import SAFETENSORS_NAMES
from reprieve.model.weights import f32_to_bf16
from reprieve.text import load_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reprieve.model import Model
    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import Tensor

WRITTEN_ANEW: Final = frozenset({"general.architecture", "general.file_type", "general.quantization_version"})

TOPICS: Final = (
    "the tides of the sea", "the baking of bread", "the printing press", "the migration of birds",
    "the Roman roads", "the violin", "the invention of glass", "the theory of evolution",
    "the steam engine", "the Silk Road", "the rings of Saturn", "the game of chess",
    "the human heart", "the telescope", "the making of cheese", "the Great Wall of China",
    "the bicycle", "the colours of autumn", "the compass", "the history of paper",
    "the life of bees", "the lighthouse", "the potato", "the northern lights",
    "the piano", "the growth of crystals", "the Olympic Games", "the calendar",
    "the weaving of cloth", "the volcano", "the umbrella", "the map of the world",
)  # fmt: skip
QUESTION: Final = (
    "Write a long article about {}. Begin with its history, explain how it works, "
    "and say at the end what people most often get wrong."
)


def write_once(target: Path, write: Callable[[Path], object]) -> Path:
    """Return `target`, written under another name first if it is missing: an interrupted run leaves nothing half."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"unfinished-{target.name}")
        write(unfinished)
        unfinished.rename(target)
    return target


def prompts() -> list[list[int]]:
    """Return as many chat prompts as there are topics, each of about 64 token ids."""
    path = demo_model()
    text = load_text(path, load_model(path).metadata)
    if text is None:
        raise ModelFileError(path, "has no tokenizer")
    return [text.encode_prompt(QUESTION.format(topic), chat=True) for topic in TOPICS]


def f16_gguf(folder: Path) -> Path:
    """Return the model as a GGUF whose matrices are F16. Rows keep the order of the file, which is llama.cpp's own."""
    return write_once(folder / "smollm2-f16.gguf", lambda target: _write_gguf(demo_model(), target))


def bf16_folder(folder: Path) -> Path:
    """Return the model as a folder in the layout of the Hugging Face hub, in bfloat16, without a tokenizer."""
    target = folder / "smollm2-bf16"
    model = load_model(demo_model())
    write_once(target / "model.safetensors", lambda path: _write_safetensors(model, path))
    config = json.dumps(_hub_config(model.config), indent=1)
    write_once(target / "config.json", lambda path: path.write_text(config, "utf-8"))
    return target


def _write_gguf(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    writer = GGUFWriter(target, arch="llama")
    for field in reader.fields.values():
        if field.name in WRITTEN_ANEW or field.name.startswith("GGUF."):
            continue
        kinds = [GGUFValueType(kind) for kind in field.types]
        writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type)).astype(np.float32)
        # Norms stay F32, as llama.cpp's own converter leaves them.
        writer.add_tensor(tensor.name, values if values.ndim == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_safetensors(model: Model, target: Path) -> None:
    tensors = {
        SAFETENSORS_NAMES.embedding: model.weights.embedding,
        SAFETENSORS_NAMES.final_norm: model.weights.final_norm,
    }
    for index, layer in enumerate(model.weights.layers):
        for field, name in SAFETENSORS_NAMES.layers.items():
            tensor: Tensor | None = getattr(layer, field)
            if tensor is not None:
                tensors[name.format(index)] = tensor
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with target.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(f32_to_bf16(tensor.float32()).astype("<u2").tobytes())


def _hub_config(config: ModelConfig) -> dict[str, object]:
    """Return what `config.json` says of a "llama" model with tied embeddings and no rope scaling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
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
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }
