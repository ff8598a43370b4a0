"""Models in folders of safetensors files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from reprieve.errors import ModelFileError
from reprieve.model.config_json import parse_json_object, read_folder_config, read_json_object
from reprieve.model.layout import BIASES, SAFETENSORS_NAMES, Layout, assemble
from reprieve.model.weights import FileTensor, map_file, plain_decoder

if TYPE_CHECKING:
    from pathlib import Path

    from reprieve.model.config import ModelConfig
    from reprieve.model.weights import ModelWeights

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8  # of the header, in front of it
_MAX_HEADER_BYTES = 100_000_000  # as the format says
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_OLD_BUFFER = "rotary_emb.inv_freq"  # which old files keep, computed from the configuration here


def load_folder(folder: Path) -> tuple[ModelConfig, ModelWeights]:
    """Open the model in `folder`; its weights stay in their files until they are asked for.

    Raises `ModelFileError` that names the file that is damaged, missing, too many, or of a kind that is not supported.
    """
    config = read_folder_config(folder)
    tensors = _open_shards(folder)
    # Without biases they have no place, which `assemble` says of any that are there.
    ignored = {name for name in tensors if name.endswith(_OLD_BUFFER)}
    if config.tied_embeddings:
        ignored.add(SAFETENSORS_NAMES.output)
    layout = Layout(
        naming=SAFETENSORS_NAMES,
        tied=config.tied_embeddings,
        required=BIASES if config.attention_biases else frozenset(),
        ignored=frozenset(ignored),
    )
    return config.model, assemble(folder, config.model, layout, tensors)


def _open_shards(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of all files of the model, and refuse a file that the index does not name."""
    index = folder / INDEX_FILE
    expected = _read_index(index) if index.is_file() else None
    names = [SINGLE_FILE] if expected is None else sorted(set(expected.values()))
    lies_there = sorted(path.name for path in folder.glob("*.safetensors"))
    strays = [name for name in lies_there if name not in names]
    missing = [name for name in names if name not in lies_there]
    if missing and expected is None:
        found = ", ".join(strays) or "no .safetensors file"
        raise ModelFileError(folder, f"has neither {SINGLE_FILE} nor {INDEX_FILE}, but {found}")
    if missing:
        raise ModelFileError(folder / missing[0], f"is named in {INDEX_FILE}, but is not there")
    if strays:
        owner = SINGLE_FILE if expected is None else INDEX_FILE
        raise ModelFileError(folder / strays[0], f"lies beside {owner}, which does not name it: move it away")
    tensors: dict[str, FileTensor] = {}
    for name in names:
        for tensor in open_file(folder / name).values():
            shard = name if expected is None else expected.get(tensor.name)
            if shard != name:
                raise ModelFileError(tensor.path, f"holds {tensor.name}, for which {INDEX_FILE} names {shard}")
            tensors[tensor.name] = tensor
    for tensor_name, shard in (expected or {}).items():
        if tensor_name not in tensors:
            raise ModelFileError(folder / shard, f"does not hold {tensor_name}, which {INDEX_FILE} says it does")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of the file that holds each tensor."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(path, "has no weight_map")
    for tensor, file in weight_map.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not {"/", "\\", "\0"} & set(file)
        if not plain:
            raise ModelFileError(path, f"names {file!r} for {tensor}, which is not a .safetensors file of the folder")
    return weight_map


def open_file(path: Path) -> dict[str, FileTensor]:
    """Return the tensors in one safetensors file.

    Its counts and offsets are checked against its size first; then the format's own library must find it valid too.
    Raises `ModelFileError` with the numbers.
    """
    data = map_file(path)
    size = len(data)
    if size < _LENGTH_BYTES:
        raise ModelFileError(path, f"has {size} bytes, and not even the {_LENGTH_BYTES} of a header's length")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if begin > size:
        raise ModelFileError(path, f"has a header of {length} bytes, but only {size - _LENGTH_BYTES} follow its length")
    if length > _MAX_HEADER_BYTES:
        raise ModelFileError(path, f"has a header of {length} bytes, at most {_MAX_HEADER_BYTES} are read")
    header = parse_json_object(path, data[_LENGTH_BYTES:begin])
    tensors = {
        name: _tensor(path, name, entry, memoryview(data)[begin:])
        for name, entry in header.items()
        if name != "__metadata__"
    }
    try:
        with safe_open(path, framework="numpy") as judged:
            judged.keys()
    except (SafetensorError, OSError) as error:
        raise ModelFileError(path, f"is not a valid safetensors file: {error}") from error
    return tensors


def _tensor(path: Path, name: str, entry: object, data: memoryview) -> FileTensor:
    """Return the tensor that a header's entry describes; `data` is the file behind its header."""

    def fail(problem: str) -> NoReturn:
        raise ModelFileError(path, f"the tensor {name} {problem}")

    if not isinstance(entry, dict):
        fail(f"is described by {type(entry).__name__}, not by an object")
    shape = _counts(entry.get("shape"))
    offsets = _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:  # noqa: PLR2004  a beginning and an end
        fail("lacks a shape or two data_offsets of whole numbers from 0 on")
    dtype = entry.get("dtype")
    decode = plain_decoder(dtype) if isinstance(dtype, str) else None
    if decode is None or not isinstance(dtype, str):
        fail(f"has the type {dtype!r}; {', '.join(_ITEM_BYTES)} are read")
    first, last = offsets
    if not first <= last <= len(data):
        fail(f"lies at bytes {first} to {last} behind the header, where the file has {len(data)}")
    needed = math.prod(shape) * _ITEM_BYTES[dtype]
    if last - first != needed:
        fail(f"is {list(shape)} of {dtype}, which is {needed} bytes, but has {last - first}")
    if not shape or needed == 0:
        fail(f"is {list(shape)}: at least one dimension, and none of 0, is expected")
    return FileTensor(
        path=path,
        name=name,
        shape=shape,
        dtype=dtype,
        data=np.frombuffer(data, np.uint8, needed, first).reshape(*shape[:-1], shape[-1] * _ITEM_BYTES[dtype]),
        decode=decode,
    )


def _counts(value: object) -> tuple[int, ...] | None:
    """Return a list of whole numbers from 0 on as a tuple, or None where it is something else."""
    if not isinstance(value, list):
        return None
    whole = all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value)
    return tuple(value) if whole else None
