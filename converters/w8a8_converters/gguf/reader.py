"""A GGUF file's metadata and tensor table, checked against the file's size; its data stays on disk."""

import struct
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

from w8a8_converters.errors import ConversionError

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file: `shape` is in torch's order, rows first; a row takes `row_bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GGUFFile:
    """An opened GGUF file.

    Raises:
        ConversionError: not a GGUF file, one part of several, truncated, or a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != _MAGIC:
            raise ConversionError(f"{path} is not a GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
        try:
            self._reader = _HeaderReader(path)
        except (ValueError, KeyError, IndexError) as error:
            raise ConversionError(f"{path}: the GGUF header cannot be read ({error}); download the file again") from None
        self.metadata: dict[str, Any] = {key: field.contents() for key, field in self._reader.fields.items()}
        parts = self.metadata.get("split.count", 1)
        if parts > 1:
            raise ConversionError(
                f"{path} is one of {parts} parts of a split GGUF file: join them first (llama-gguf-split --merge)"
            )
        self.tensors = {tensor.name: tensor for tensor in map(self._tensor, self._reader.tensor_fields)}
        if len(self.tensors) != len(self._reader.tensor_fields):
            raise ConversionError(f"{path} names a tensor twice; download the file again")

    def packed_rows(self, tensor: GGUFTensor) -> np.ndarray:
        """The bytes of a tensor as uint8 [rows, row_bytes], mapped from the file."""
        data = self._reader.data[tensor.offset : tensor.offset + tensor.nbytes]
        return data.reshape(-1, tensor.row_bytes)

    def required(self, key: str) -> Any:
        """A metadata value that the conversion cannot do without."""
        if key not in self.metadata:
            raise ConversionError(f"{self.path} lacks the metadata {key}")
        return self.metadata[key]

    def _tensor(self, field: ReaderField) -> GGUFTensor:
        _, name_data, _, dims, raw_type, raw_offset = field.parts
        name = bytes(name_data).decode("utf-8")
        shape = tuple(int(size) for size in reversed(dims))
        try:
            kind = GGMLQuantizationType(int(raw_type[0]))
        except ValueError:
            raise ConversionError(f"{self.path}: tensor {name} has unknown type {int(raw_type[0])}; update gguf") from None
        block = GGML_QUANT_SIZES[kind][0]
        if shape[-1] % block:
            raise ConversionError(f"{self.path}: rows of tensor {name} hold {shape[-1]} values, no multiple of {block}")
        tensor = GGUFTensor(name, shape, kind, self._reader.tensor_data_start + int(raw_offset[0]))
        size = self.path.stat().st_size
        if tensor.offset + tensor.nbytes > size:
            raise ConversionError(
                f"{self.path} is truncated: tensor {name} ends at byte {tensor.offset + tensor.nbytes:,}, "
                f"the file has {size:,}; download it again"
            )
        return tensor


class _HeaderReader(GGUFReader):
    """The library's reader, for headers alone and faster.

    It stops before the tensor data, so that a short file or an unknown type can be named instead of a numpy error. Arrays
    are read as a whole: element by element, as the library does, 262,144 tokens with scores and types take 5 s, not 0.5.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray | memoryview], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if count > len(self.data) - start:
            raise ValueError(f"an array of {count:,} values at byte {orig_offs:,} is longer than the file")
        types = [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.STRING:
            strings, end = self._strings(start, count)
            return end - orig_offs, strings, list(range(count)), types
        if kind not in self.gguf_scalar_to_np:
            raise ValueError(f"an array of {kind.name} at byte {orig_offs:,}")
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        if len(values) != count:
            raise ValueError(f"an array of {count:,} values at byte {orig_offs:,} is longer than the file")
        return start + values.nbytes - orig_offs, [values], [0], types

    def _strings(self, offset: int, count: int) -> tuple[list[memoryview], int]:
        """The bytes of `count` strings from `offset` on, and where they end."""
        data = memoryview(self.data)
        little = (sys.byteorder == "little") == (self.byte_order == "I")
        read_size = struct.Struct("<Q" if little else ">Q").unpack_from
        strings = []
        for _ in range(count):
            begin = offset + 8
            end = begin + read_size(data, offset)[0] if begin <= len(data) else begin
            if end > len(data):
                raise ValueError(f"a string at byte {offset:,} is longer than the file")
            strings.append(data[begin:end])
            offset = end
        return strings, offset

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.tensor_data_start = int(start_offs)
        self.tensor_fields = fields
