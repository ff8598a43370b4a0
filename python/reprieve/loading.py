"""A model ready to run: its configuration, its text side, and its weights on a kind of device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from reprieve.device.cpu import MOST_THREADS, CpuDevice, checked_threads
from reprieve.device.cpu_weights import CpuWeights
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

__all__ = ["DEVICES", "KV_TYPES", "MOST_THREADS", "WEIGHTS", "DeviceSettings", "LoadedModel", "from_weights", "load"]

DEVICES: Final = ("auto", "cpu", "reference")
WEIGHTS: Final = ("file", "f32", "bf16", "f16")
KV_TYPES: Final = ("auto", "f32", "bf16", "f16")

_CPU_ROW_TILE: Final = TILE_HEIGHTS[0]
"""Tokens by which a prefill moves on at least. Products on the CPU device have no tile; with that of the reference the
steps of both, and so who gives way when, are the same."""


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

    `text` is None where there is no tokenizer: token ids in and out only. `device` is "cpu" or "reference", `threads`
    how many compute, `kv` the element type of a KV pool where none is asked for. `row_tile` is the least by which a
    prefill moves on, `make_device` makes a device with a KV pool of its own on the shared weights.
    """

    name: str
    config: ModelConfig
    text: Text | None
    device: str
    weights: Rounding
    threads: int
    kv: KvKind
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
    model: str | Path,
    *,
    device: str = "auto",
    weights: Rounding = "file",
    threads: int | None = None,
    name: str | None = None,
) -> LoadedModel:
    """Load a model: a folder with safetensors, a GGUF file, "demo", or the name of a model on the Hugging Face hub.

    `device` is "auto" (the best there is, today the CPU), "cpu", or "reference", which defines what is computed and is
    slow; `weights` "file" keeps the values of the file, "f32", "bf16" and "f16" round them. `threads` is how many
    compute on the CPU device, None one per core. `name` is what to call it. Takes seconds; the weights are kept once,
    in their own types (see `CpuWeights`), on the reference device with four bytes each.

    Raises `InvalidArgument` for an unknown setting, `ModelFileError` for a file that is damaged or not supported, and,
    on the reference device, `InexactProduct` where this machine's BLAS cannot decode exactly.
    """
    choice = _Choice.of(device, weights, threads)  # refused before a model is looked for
    path = resolve_model(model)
    opened = load_model(path)
    text = load_text(path, opened.metadata)
    return _loaded(name or hub_name(model, path) or opened.name, opened.config, opened.weights, text, choice)


def from_weights(  # noqa: PLR0913  keywords, each with a default
    name: str,
    config: ModelConfig,
    model: ModelWeights,
    text: Text | None = None,
    *,
    device: str = "auto",
    weights: Rounding = "file",
    threads: int | None = None,
) -> LoadedModel:
    """Return a model whose weights come from anywhere, see `ModelWeights`; the rest is as for `load`."""
    return _loaded(name, config, model, text, _Choice.of(device, weights, threads))


@dataclass(frozen=True, slots=True)
class _Choice:
    """What was chosen to load a model with, checked: `device` is "cpu" or "reference", `threads` how many compute."""

    device: str
    weights: Rounding
    threads: int

    @classmethod
    def of(cls, device: str, weights: Rounding, threads: int | None) -> _Choice:
        """Return what these settings of `load` come to; `InvalidArgument` if no model could be loaded with them."""
        if device not in DEVICES:
            raise InvalidArgument("device", f"must be one of {', '.join(DEVICES)}, not {device!r}")
        if weights not in WEIGHTS:
            raise InvalidArgument("weights", f"must be one of {', '.join(WEIGHTS)}, not {weights!r}")
        num_threads = checked_threads(threads)
        if device != "reference":
            return cls("cpu", weights, num_threads)
        if threads is not None:
            raise InvalidArgument("threads", f"is {threads}, and the reference device computes with one thread")
        return cls("reference", weights, 1)


def _loaded(name: str, config: ModelConfig, model: ModelWeights, text: Text | None, choice: _Choice) -> LoadedModel:
    """Load the weights, for the ids that `text` has."""
    if text is not None and text.tokenizer.num_ids < config.vocab_size:
        # The output is padded to a round number of rows; an id that is no token must never be chosen.
        vocab_size = text.tokenizer.num_ids
        eos_ids = tuple(token_id for token_id in config.eos_ids if token_id < vocab_size)
        config = replace(config, vocab_size=vocab_size, eos_ids=eos_ids)
    is_reference = choice.device == "reference"
    make_device = _on_reference if is_reference else _on_cpu
    return LoadedModel(
        name=name,
        config=config,
        text=text,
        device=choice.device,
        weights=choice.weights,
        threads=choice.threads,
        kv="f32" if is_reference else "f16",
        row_tile=TILE_HEIGHTS[0] if is_reference else _CPU_ROW_TILE,
        make_device=make_device(config, model, choice),
    )


# The fields of `DeviceSettings` are keywords of every device.


def _on_cpu(config: ModelConfig, model: ModelWeights, choice: _Choice) -> Callable[[DeviceSettings], Device]:
    shared = CpuWeights(config, model, choice.weights)
    return lambda settings: CpuDevice(shared, **asdict(settings), threads=choice.threads)


def _on_reference(config: ModelConfig, model: ModelWeights, choice: _Choice) -> Callable[[DeviceSettings], Device]:
    shared = ReferenceWeights(config, model, choice.weights)
    return lambda settings: ReferenceDevice(shared, **asdict(settings))
