"""A model ready to run: its configuration, its text side, and its weights on a kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from reprieve.device.reference import ReferenceDevice
from reprieve.device.reference_weights import ReferenceWeights
from reprieve.device.row_tiles import TILE_HEIGHTS
from reprieve.errors import InvalidArgument
from reprieve.hub import hub_name, resolve_model
from reprieve.model import load_model
from reprieve.text import load_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from reprieve.config import EngineConfig
    from reprieve.device.kv_pool import KvKind
    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import ModelWeights, Rounding
    from reprieve.step import Device
    from reprieve.text import Text

DEVICES: Final = ("auto", "reference")
WEIGHTS: Final = ("file", "f32", "bf16", "f16")
KV_TYPES: Final = ("auto", "f32", "bf16", "f16")


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """What a device is made with: its pool of `num_blocks` blocks of `block_size` positions, and its slots."""

    num_blocks: int
    block_size: int
    num_slots: int
    kv: KvKind


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are loaded once and shared by any number of engines.

    `text` is None where there is no tokenizer: token ids in and out only. `row_tile` is how many rows the device
    computes at once, `make_device` makes a device with a KV pool of its own on the shared weights.
    """

    name: str
    config: ModelConfig
    text: Text | None
    device: str
    weights: Rounding
    row_tile: int
    make_device: Callable[[DeviceSettings], Device]

    def context_length(self, config: EngineConfig) -> int:
        """Return the most positions of a sequence; `InvalidArgument` if `config` asks for more than the model's."""
        most = self.config.context_length
        if config.context_length is not None and config.context_length > most:
            problem = f"is {config.context_length}, the model was made for {most} positions"
            raise InvalidArgument("context_length", problem)
        return config.context_length or most

    def new_device(self, config: EngineConfig, kv: KvKind) -> Device:
        """Return a device with an empty KV pool; `InvalidArgument` if there is no memory for it."""
        try:
            return self.make_device(DeviceSettings(config.kv_blocks, config.block_size, config.max_slots, kv))
        except MemoryError as error:
            problem = f"is {config.kv_blocks}, and there is no memory for a pool of so many blocks: {error}"
            raise InvalidArgument("kv_blocks", problem) from error


def load(
    model: str | Path, *, device: str = "auto", weights: Rounding = "file", name: str | None = None
) -> LoadedModel:
    """Load a model: a folder with safetensors, a GGUF file, "demo", or the name of a model on the Hugging Face hub.

    `device` is "auto" (the best there is, today the reference) or "reference"; `weights` "file" keeps the values of
    the file, "f32", "bf16" and "f16" round them. `name` is what to call it. Takes seconds and, on the reference device,
    four bytes per weight.

    Raises `InvalidArgument` for an unknown setting, `ModelFileError` for a file that is damaged or not supported, and
    `InexactProduct` where this machine's BLAS cannot decode exactly.
    """
    if device not in DEVICES:
        raise InvalidArgument("device", f"must be one of {', '.join(DEVICES)}, not {device!r}")
    if weights not in WEIGHTS:
        raise InvalidArgument("weights", f"must be one of {', '.join(WEIGHTS)}, not {weights!r}")
    path = resolve_model(model)
    opened = load_model(path)
    text = load_text(path, opened.metadata)
    return from_weights(
        name or hub_name(model, path) or opened.name, opened.config, opened.weights, text, weights=weights
    )


def from_weights(
    name: str, config: ModelConfig, model: ModelWeights, text: Text | None = None, *, weights: Rounding = "file"
) -> LoadedModel:
    """Return a model on the reference device whose weights come from anywhere: see `ModelWeights`."""
    if text is not None and text.tokenizer.num_ids < config.vocab_size:
        # The output is padded to a round number of rows; an id that is no token must never be chosen.
        vocab_size = text.tokenizer.num_ids
        eos_ids = tuple(token_id for token_id in config.eos_ids if token_id < vocab_size)
        config = replace(config, vocab_size=vocab_size, eos_ids=eos_ids)
    shared = ReferenceWeights(config, model, weights)

    def make_device(settings: DeviceSettings) -> ReferenceDevice:
        return ReferenceDevice(
            shared,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            num_slots=settings.num_slots,
            kv=settings.kv,
        )

    return LoadedModel(name, config, text, "reference", weights, TILE_HEIGHTS[0], make_device)
