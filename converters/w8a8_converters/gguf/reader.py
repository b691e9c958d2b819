"""A GGUF file's metadata and tensor table, held against the file's size; its data stays on disk."""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType

from w8a8_converters.checkpoint import within
from w8a8_converters.errors import BrokenFileError, ConversionError
from w8a8_converters.gguf.tensor_types import BLOCK_SIZES, TensorType

_MAGIC = b"GGUF"
_LFS_POINTER = b"version https://git-lfs"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME_BYTES = 64  # of a tensor; the format's own limits, as that of keys
_MAX_KEY_BYTES = 2**16 - 1
_MAX_ELEMENTS = 2**63 - 1
# Far beyond every model's. They bound the memory that a damaged count or length can make the reader take.
_MAX_HEADER_BYTES = 100 * 1000**2
_MAX_ARRAY_VALUES = 8 * 1000**2  # of all arrays
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # key's length, key, type, value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name's length, name, number of dimensions, one of them, type, offset

_SCALARS = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor: `shape` is in torch's order, rows first; a row takes `row_bytes`; `offset` is that in file `part`."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    part: int = 0

    @property
    def row_bytes(self) -> int:
        block, size = BLOCK_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An opened GGUF file, or all parts of a split one, whichever of them is named.

    Attributes:
        path: the file that was named.
        files: all parts, in order.
        metadata: that of the first part: bool, int, float, str, or a list of one of them.
        tensors: of all parts, by name.

    Raises:
        BrokenFileError: not a GGUF file of version 2 or 3, truncated, damaged, or parts that are missing or do not match.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = _open_parts(path)
        self.files: list[Path] = [part.path for part in self._parts]
        self.metadata: dict[str, Any] = self._parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        for part in self._parts:
            for tensor in part.tensors:
                if tensor.name in self.tensors:
                    other = self.files[self.tensors[tensor.name].part]
                    raise BrokenFileError(
                        f"tensor {tensor.name} is in both {other} and {part.path}: download both again, from one place"
                    )
                self.tensors[tensor.name] = tensor

    def packed_rows(self, tensor: GGUFTensor) -> np.ndarray:
        """The bytes of a tensor as uint8 [rows, row_bytes], mapped from its file, read-only."""
        data = self._parts[tensor.part].data[tensor.offset : tensor.offset + tensor.nbytes]
        return data.reshape(-1, tensor.row_bytes)

    def required(self, key: str) -> Any:
        """A metadata value that the conversion cannot do without."""
        if key not in self.metadata:
            raise ConversionError(f"{self.path} lacks the metadata {key}")
        return self.metadata[key]


class _Part:
    """One file: its metadata, its tensors in the order of its table, and its mapped bytes."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.data = _map(path)
        header = _Header(path, self.data)
        n_tensors, n_entries = header.counts()
        self.metadata = header.metadata(n_entries)
        self.tensors = list(header.tensors(n_tensors, self._alignment(), number))
        self._check_layout(header.position)

    def split(self) -> tuple[int, int, int]:
        """Number from 0 of this part, how many parts there are, tensors in all of them."""
        values = tuple(self.metadata.get(key) for key in (_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS))
        if any(type(value) is not int or value < 0 for value in values) or values[0] >= values[1]:
            raise BrokenFileError(
                f"{self.path} is one of several parts by its name or metadata, but {_SPLIT_NO}, {_SPLIT_COUNT}, "
                f"{_SPLIT_TENSORS} are {', '.join(map(_shown, values))}: expected the part's number from 0, the number of "
                "parts, that of all tensors; download it again"
            )
        return values

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise BrokenFileError(
                f"{self.path}: metadata general.alignment is {_shown(alignment)}, expected a power of two; download it again"
            )
        return alignment

    def _check_layout(self, end_of_header: int) -> None:
        """Tensor data lies in the file, each tensor right after the one before it, as ggml itself has it."""
        tensors = sorted(self.tensors, key=lambda tensor: tensor.offset)
        for tensor in tensors:
            end = tensor.offset + tensor.nbytes
            if end > len(self.data):
                raise BrokenFileError(
                    f"{self.path} is truncated: tensor {tensor.name} ends at byte {end:,}, the file has {len(self.data):,}; "
                    "download it again"
                )
        alignment = self._alignment()
        position, before = _aligned(end_of_header, alignment), "the header"
        for tensor in tensors:
            where = f"{self.path}: tensor {tensor.name} begins at byte {tensor.offset:,}"
            if tensor.offset < position:
                raise BrokenFileError(f"{where}, before {before} has ended: they overlap; download it again")
            if tensor.offset > position:
                raise BrokenFileError(f"{where}, expected {position:,}, where {before} ends: a hole; download it again")
            position, before = _aligned(tensor.offset + tensor.nbytes, alignment), f"tensor {tensor.name}"


class _Header:
    """Reads what comes before the tensor data, from `position` on."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.position = len(_MAGIC)
        self._array_values_left = _MAX_ARRAY_VALUES
        self._path = path
        self._data = memoryview(data)

    def counts(self) -> tuple[int, int]:
        """Checks the version; returns how many tensors and metadata entries there are."""
        version = self._integer("<I", "the version")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
                raise BrokenFileError(f"{self._path} is a big-endian GGUF file, which is not read: use a little-endian one")
            age = "too old: use a newer file of the model" if version == 1 else "not known: download it again"
            raise BrokenFileError(f"{self._path} is a GGUF file of version {version}, {age} (2 and 3 are read)")
        counts = self._integer("<Q", "the number of tensors"), self._integer("<Q", "the number of metadata entries")
        smallest = ("tensors", _MIN_TENSOR_BYTES), ("metadata entries", _MIN_ENTRY_BYTES)
        for count, (what, size) in zip(counts, smallest, strict=True):
            if count * size > len(self._data) - self.position:
                self._fail(f"it counts {count:,} {what}, more than the file's {len(self._data):,} bytes can hold")
        return counts

    def metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._name(f"the key of metadata entry {index}", _MAX_KEY_BYTES)
            if key in metadata:
                raise BrokenFileError(f"{self._path} has the metadata {key} twice; download it again")
            metadata[key] = self._value(f"metadata {key}")
        return metadata

    def tensors(self, count: int, alignment: int, part: int) -> Iterator[GGUFTensor]:
        """The tensor table. Offsets count from the end of the table, which is known after the last entry."""
        entries: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
        for index in range(count):
            name = self._name(f"the name of tensor {index}", _MAX_NAME_BYTES)
            if name in entries:
                raise BrokenFileError(f"{self._path} has tensor {name} twice; download it again")
            entries[name] = self._tensor(name, alignment)
        start = _aligned(self.position, alignment)
        for name, (shape, kind, offset) in entries.items():
            yield GGUFTensor(name, shape, kind, start + offset, part)

    def _tensor(self, name: str, alignment: int) -> tuple[tuple[int, ...], TensorType, int]:
        what = f"tensor {name}"
        n_dims = self._integer("<I", what)
        if not 1 <= n_dims <= _MAX_DIMS:
            self._fail(f"{what} has {n_dims} dimensions, expected 1 to {_MAX_DIMS}")
        shape = tuple(reversed([self._integer("<Q", what) for _ in range(n_dims)]))
        code = self._integer("<I", what)
        offset = self._integer("<Q", what)
        if code not in BLOCK_SIZES:
            raise BrokenFileError(f"{self._path}: {what} has unknown type {code}; download it again, or update gguf")
        kind = TensorType(code)
        if 0 in shape:
            self._fail(f"{what} has a dimension of 0: shape {list(shape)}")
        if prod(shape) > _MAX_ELEMENTS:
            self._fail(f"{what} has more than 2^63 values: shape {list(shape)}")
        block, _ = BLOCK_SIZES[kind]
        if shape[-1] % block:
            self._fail(f"rows of {what} hold {shape[-1]:,} values, no multiple of the {block} in a block of {kind.name}")
        if offset % alignment:
            self._fail(f"{what} has offset {offset:,}, no multiple of the alignment {alignment}")
        return shape, kind, offset

    def _value(self, what: str) -> Any:
        kind = self._value_type(what)
        if kind == GGUFValueType.STRING:
            return self._text(what)
        if kind == GGUFValueType.ARRAY:
            return self._array(what)
        return self._scalars(_SCALARS[kind], 1, what)[0]

    def _array(self, what: str) -> list[Any]:
        kind = self._value_type(what)
        count = self._integer("<Q", what)
        if count > self._array_values_left:
            self._fail(f"{what} is an array of {count:,} values, expected {self._array_values_left:,} at most")
        self._array_values_left -= count
        if kind == GGUFValueType.ARRAY:
            self._fail(f"{what} is an array of arrays, which no model needs")
        return self._texts(count, what) if kind == GGUFValueType.STRING else self._scalars(_SCALARS[kind], count, what)

    def _value_type(self, what: str) -> GGUFValueType:
        code = self._integer("<I", what)
        try:
            return GGUFValueType(code)
        except ValueError:
            raise BrokenFileError(f"{self._path}: {what} has unknown value type {code}; download it again") from None

    def _integer(self, layout: str, what: str) -> int:
        start = self._take(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self._data, start)[0]

    def _scalars(self, dtype: np.dtype, count: int, what: str) -> list[Any]:
        start = self._take(count * dtype.itemsize, what)
        return np.frombuffer(self._data, dtype, count, start).tolist()

    def _name(self, what: str, limit: int) -> str:
        size = self._integer("<Q", what)
        if not 1 <= size <= limit:
            self._fail(f"{what} takes {size:,} bytes, expected 1 to {limit}")
        name = self._decoded(self._take(size, what), size, what)
        # Names go into messages of one line, and into JSON and safetensors headers.
        if not name.isprintable():
            self._fail(f"{what} holds control characters: {name[:_MAX_NAME_BYTES]!r}")
        return name

    def _text(self, what: str) -> str:
        size = self._integer("<Q", what)
        return self._decoded(self._take(size, what), size, what)

    def _decoded(self, start: int, size: int, what: str) -> str:
        try:
            return str(self._data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise BrokenFileError(f"{self._path}: {what} is not UTF-8 ({error.reason}); download it again") from None

    def _texts(self, count: int, what: str) -> list[str]:
        """As `count` calls of `_text`, which would take most of the time on a large vocabulary."""
        data, limit, size_at = self._data, min(len(self._data), _MAX_HEADER_BYTES), struct.Struct("<Q").unpack_from
        texts = []
        end = self.position
        for index in range(count):
            start = end + 8
            end = start + size_at(data, end)[0] if start <= limit else start
            if end > limit:
                self._take(end - self.position, f"{what}, value {index},")
            try:
                texts.append(str(data[start:end], "utf-8"))
            except UnicodeDecodeError as error:
                raise BrokenFileError(
                    f"{self._path}: {what}, value {index}, is not UTF-8 ({error.reason}); download it again"
                ) from None
        self.position = end
        return texts

    def _take(self, size: int, what: str) -> int:
        """Where the next `size` bytes begin; moves beyond them."""
        start, self.position = self.position, self.position + size
        if self.position > len(self._data):
            self._fail(f"{what} needs bytes up to {self.position:,}, the file has {len(self._data):,}")
        if self.position > _MAX_HEADER_BYTES:
            self._fail(f"{what} needs bytes up to {self.position:,}, expected {_MAX_HEADER_BYTES:,} at most")
        return start

    def _fail(self, problem: str) -> None:
        raise BrokenFileError(f"{self._path}: the GGUF header cannot be read: {problem}; download it again")


def _map(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None
    magic = start[: len(_MAGIC)]
    if not magic:
        raise BrokenFileError(f"{path} is empty: download it again")
    if start == _LFS_POINTER:
        raise BrokenFileError(f"{path} is a Git LFS pointer, not the GGUF file itself: fetch that (git lfs pull)")
    if magic != _MAGIC:
        raise BrokenFileError(f"{path} is not a GGUF file: it begins with {magic!r}, expected {_MAGIC!r}; download it again")
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    # Read ahead: where the page cache has not got the file, its scales came in 0.2 to 0.4 of the time.
    data.madvise(mmap.MADV_SEQUENTIAL)
    return np.frombuffer(data, dtype=np.uint8)


def _open_parts(path: Path) -> list[_Part]:
    """The file, or all parts of the split file that it is one of, in order."""
    name = _PART_NAME.fullmatch(path.name)
    number, count = (int(name["number"]) - 1, int(name["count"])) if name else (0, 1)
    named = _Part(path, number)
    # llama.cpp leaves 0 where it has joined the parts.
    if (number, count) == (0, 1) and named.metadata.get(_SPLIT_COUNT, 0) in (0, 1):
        return [named]
    split = named.split()
    if split[:2] != (number, count):
        raise BrokenFileError(
            f"{path} is part {split[0] + 1} of {split[1]} by its metadata: parts are named NAME-00001-of-0000N.gguf; "
            "give it the name that it had, or download it again"
        )
    paths = [path.with_name(f"{name['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise BrokenFileError(
            f"{path} is one of {count} parts, and {path.parent} lacks {len(missing)} of them: {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}; download them"
        )
    parts = [named if other == path else _Part(within(path.parent, other), i) for i, other in enumerate(paths)]
    _check_parts(parts)
    return parts


def _check_parts(parts: list[_Part]) -> None:
    first = parts[0]
    _, count, n_tensors = first.split()
    for number, part in enumerate(parts):
        if part.split() != (number, count, n_tensors):
            raise BrokenFileError(
                f"{part.path}: metadata {_SPLIT_NO}, {_SPLIT_COUNT}, {_SPLIT_TENSORS} are {part.split()}, expected "
                f"{(number, count, n_tensors)} as {first.path.name} has them; download the parts again, from one place"
            )
        for key, value in part.metadata.items():
            if key not in (_SPLIT_NO, "general.alignment") and first.metadata.get(key, value) != value:
                raise BrokenFileError(
                    f"{part.path} and {first.path.name} contradict each other in metadata {key}: they are parts of "
                    "different files; download all parts again, from one place"
                )
    found = sum(len(part.tensors) for part in parts)
    if found != n_tensors:
        raise BrokenFileError(
            f"{first.path}: metadata {_SPLIT_TENSORS} is {n_tensors:,}, its {count} parts hold {found:,} tensors; "
            "download the parts again"
        )


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:40]


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
