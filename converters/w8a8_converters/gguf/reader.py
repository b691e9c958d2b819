"""A GGUF file's metadata and tensor table, checked against the file's size; its data stays on disk."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderField

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
    """Stops before the tensor data, so that a short file or an unknown type can be named instead of a numpy error."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        # Every token of the vocabulary is a few slices, and slicing a memmap costs several times what an array's does.
        self._data = mapped.view(np.ndarray)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.tensor_data_start = int(start_offs)
        self.tensor_fields = fields
