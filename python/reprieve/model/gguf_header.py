"""The header of a GGUF file: every count, length and offset in it is checked against the file's size.

Nothing is allocated that the file could not fill, so a header of noise costs an error and no more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from reprieve.errors import ModelFileError

if TYPE_CHECKING:
    from mmap import mmap
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 1 has 32-bit counts, and is not written since 2023
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 2**16 - 1  # of a key, as the format says, and of a tensor
MAX_TEXT_BYTES = 2**26  # of any other text; the longest are chat templates of some 10,000 bytes
_LEAST_ENTRY_BYTES = 8 + 4 + 1  # an empty key, its type, one byte of value
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # an empty name, a count of dimensions, one dimension, a type, an offset
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


class TensorPlace(NamedTuple):
    """Where the `size` bytes of a tensor begin in the file. `shape` is in C order."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    size: int


class ArrayPlace(NamedTuple):
    """Where the items of an array begin, which is checked to lie in the file."""

    item: GGUFValueType
    length: int
    offset: int

    def __repr__(self) -> str:
        return f"an array of {self.length} {self.item.name}"


class Metadata(Mapping[str, object]):
    """The keys of a GGUF file and their plain Python values.

    An array is decoded into a list each time it is asked for (a vocabulary of 49,152 takes about 15 ms), so keep it.
    Raises `ModelFileError` where a text in the array is not UTF-8.
    """

    def __init__(self, path: Path, data: mmap, values: dict[str, object]) -> None:
        self._path = path
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> object:
        value = self._values[key]
        if not isinstance(value, ArrayPlace):
            return value
        if value.item is GGUFValueType.STRING:
            return list(self._texts(key, value))
        items = np.frombuffer(self._data, _SCALARS[value.item], value.length, value.offset)
        return items.tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metadata({str(self._path)!r}, {len(self)} keys)"

    def undecoded(self) -> Mapping[str, object]:
        """Return the same mapping with each array as an `ArrayPlace`, for whoever wants no array."""
        return self._values

    def length(self, key: str) -> int | None:
        """Return how many items the array `key` has, without decoding it; None where there is no such array."""
        value = self._values.get(key)
        return value.length if isinstance(value, ArrayPlace) else None

    def _texts(self, key: str, place: ArrayPlace) -> Iterator[str]:
        """Decode the texts of an array, one after another."""
        data, offset = self._data, place.offset
        for index in range(place.length):
            begin = offset + 8
            offset = begin + _U64.unpack_from(data, offset)[0]
            try:
                yield str(data[begin:offset], "utf-8")
            except UnicodeDecodeError as error:
                raise ModelFileError(self._path, f"item {index} of {key} is not UTF-8: {error}") from None


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a GGUF file says, and where its tensors lie."""

    metadata: Metadata
    tensors: tuple[TensorPlace, ...]


def scan(path: Path, data: mmap) -> Header:
    """Read the header of the GGUF file `path`, mapped as `data`.

    Raises `ModelFileError` with the numbers for a count, length or offset that the file has no room for, for a type
    that is not known, for a name that occurs twice, and for tensors that overlap.
    """
    reader = _Reader(path, data)
    magic = bytes(data[reader.skip(4, "the magic") : 4])
    if magic != MAGIC:
        reader.fail(f"begins with {magic!r} and not with {MAGIC!r}: not a GGUF file")
    version = reader.u32("the version")
    if version not in VERSIONS:
        advice = "; it was written for big-endian machines" if version & 0xFFFF == 0 else ""
        reader.fail(f"is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read{advice}")
    num_tensors = reader.u64("the tensor count")
    num_keys = reader.u64("the key count")
    reader.expect_room(num_tensors, _LEAST_TENSOR_BYTES, "tensors")
    reader.expect_room(num_keys, _LEAST_ENTRY_BYTES, "keys")
    values: dict[str, object] = {}
    for index in range(num_keys):
        key = reader.text(f"key {index}", MAX_NAME_BYTES)
        if key in values:
            reader.fail(f"has the key {key} twice")
        values[key] = reader.value(key)
    alignment = _alignment(reader, values)
    places = [_tensor(reader, index) for index in range(num_tensors)]
    begin = -(-reader.offset // alignment) * alignment  # rounded up
    tensors = tuple(place._replace(offset=begin + place.offset) for place in places)
    _check_places(reader, tensors, begin, alignment)
    return Header(Metadata(path, data, values), tensors)


def _alignment(reader: _Reader, values: dict[str, object]) -> int:
    """Return the alignment of tensors in bytes."""
    alignment = values.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"general.alignment must be a power of two, not {alignment!r}")
    return alignment


def _tensor(reader: _Reader, index: int) -> TensorPlace:
    """Read one entry of the list of tensors; its offset still counts from the first tensor's."""
    name = reader.text(f"the name of tensor {index}", MAX_NAME_BYTES)
    num_dimensions = reader.u32(f"the dimensions of {name}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        reader.fail(f"the tensor {name} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(reader.u64(f"dimension {axis} of {name}") for axis in range(num_dimensions))[::-1]
    number = reader.u32(f"the type of {name}")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        reader.fail(f"the tensor {name} has the type {number}, which is not known")
    offset = reader.u64(f"the offset of {name}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        reader.fail(f"rows of {name} have {shape[-1]} values, which is not a multiple of the {block} of {kind.name}")
    if min(shape) < 1:
        reader.fail(f"the tensor {name} is {list(shape)}: every dimension must be at least 1")
    return TensorPlace(name, shape, kind, offset, math.prod(shape) // block * block_bytes)


def _check_places(reader: _Reader, tensors: tuple[TensorPlace, ...], begin: int, alignment: int) -> None:
    """Check that each tensor is aligned and in the file, and that no two overlap or have one name."""
    names: set[str] = set()
    for place in tensors:
        if place.name in names:
            reader.fail(f"has the tensor {place.name} twice")
        names.add(place.name)
        if (place.offset - begin) % alignment:
            reader.fail(f"the offset {place.offset - begin} of {place.name} is not a multiple of {alignment}")
        if place.offset + place.size > reader.size:
            reader.fail(
                f"the tensor {place.name} has {place.size} bytes from byte {place.offset} on, "
                f"but the file ends at byte {reader.size}"
            )
    last = None
    for place in sorted(tensors, key=lambda place: place.offset):
        if last is not None and place.offset < last.offset + last.size:
            reader.fail(f"the tensors {last.name} and {place.name} overlap at byte {place.offset}")
        last = place


class _Reader:
    """A place in the header that moves on with each item, and never past the end of the file."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.offset = 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(self.path, problem)

    def expect_room(self, count: int, least_bytes: int, what: str) -> None:
        """Check that `count` items of at least `least_bytes` can follow."""
        left = self.size - self.offset
        if count * least_bytes > left:
            self.fail(f"{count} {what} need at least {count * least_bytes} bytes, {left} are left in the file")

    def skip(self, count: int, what: str) -> int:
        """Move on by `count` bytes and return where they begin."""
        begin = self.offset
        if count > self.size - begin:
            self.fail(f"is cut short: {what} needs {count} bytes from byte {begin} on, the file has {self.size}")
        self.offset = begin + count
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.skip(8, what))[0])

    def text(self, what: str, most_bytes: int) -> str:
        length = self.u64(f"the length of {what}")
        if length > most_bytes:
            self.fail(f"{what} has {length} bytes, at most {most_bytes} are read")
        begin = self.skip(length, what)
        try:
            return str(self.data[begin : begin + length], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def kind(self, key: str) -> GGUFValueType:
        number = self.u32(f"the type of {key}")
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{key} has the value type {number}, which is not known")

    def value(self, key: str) -> object:
        """Return the value of `key`: a plain one, or the place of an array."""
        kind = self.kind(key)
        if kind is GGUFValueType.STRING:
            return self.text(key, MAX_TEXT_BYTES)
        if kind is GGUFValueType.ARRAY:
            return self.array(key)
        dtype = _SCALARS[kind]
        return np.frombuffer(self.data, dtype, 1, self.skip(dtype.itemsize, key))[0].item()

    def array(self, key: str) -> ArrayPlace:
        """Pass over an array, one text after another where it has texts."""
        item = self.kind(f"the items of {key}")
        if item is GGUFValueType.ARRAY:
            self.fail(f"{key} is an array of arrays, which GGUF files do not hold")
        count = self.u64(f"the length of {key}")
        dtype = _SCALARS.get(item)
        self.expect_room(count, 8 if dtype is None else dtype.itemsize, f"items of {key}")
        begin = self.offset
        if dtype is not None:
            self.skip(count * dtype.itemsize, key)
            return ArrayPlace(item, count, begin)
        # 100,000 texts are usual, hence the bare loop.
        data, offset, size = self.data, begin, self.size
        for index in range(count):
            begin_of_text = offset + 8
            if begin_of_text > size:
                self.fail(f"is cut short: item {index} of the {count} of {key} begins at byte {offset} of {size}")
            offset = begin_of_text + _U64.unpack_from(data, offset)[0]
            if offset > size:
                self.fail(
                    f"item {index} of {key} has {offset - begin_of_text} bytes from byte {begin_of_text} on, "
                    f"the file has {size}"
                )
        self.offset = offset
        return ArrayPlace(item, count, begin)
