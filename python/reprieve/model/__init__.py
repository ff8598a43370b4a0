"""Models: their files, their configuration, their weights and their architectures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from reprieve.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import ModelWeights

__all__ = ["Model", "load_model"]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was opened, but whose weights are still in their files.

    path      the GGUF file or the folder it came from
    metadata  the keys of a GGUF file as plain Python values, lists decoded when asked for; empty for a folder
    """

    name: str
    config: ModelConfig
    weights: ModelWeights = field(repr=False)
    path: Path
    metadata: Mapping[str, object] = field(repr=False)


def load_model(path: str | Path) -> Model:
    """Open the model in `path`: a GGUF file, or a folder with `config.json` and safetensors files.

    Raises `ModelFileError` for anything that is missing, damaged or not supported, with the numbers.
    """
    # Only the format that is needed is imported: the gguf library alone takes 0.1 s.
    path = Path(path)
    if path.is_dir():
        from reprieve.model.safetensors import load_folder  # noqa: PLC0415  see above

        config, weights = load_folder(path)
        return Model(path.resolve().name, config, weights, path, MappingProxyType({}))
    if not path.is_file():
        raise ModelFileError(path, "is neither a file nor a folder")
    from reprieve.model.gguf import load_gguf  # noqa: PLC0415  see above

    config, weights, metadata = load_gguf(path)
    return Model(path.stem, config, weights, path, metadata)
