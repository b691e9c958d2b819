"""Writing safetensors files whose tensors arrive in pieces: no shard is ever held in memory."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from w8a8_converters.checkpoint import DTYPE_NAMES


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def split_into_shards(groups: Iterable[Sequence[OutputTensor]], max_bytes: int) -> list[list[OutputTensor]]:
    """Fills shards in order. A group (a weight and its scale) is never split; one above the limit gets its own shard."""
    shards: list[list[OutputTensor]] = []
    filled = 0
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if not shards or filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(group)
        filled += size
    return shards


class ShardWriter:
    """One safetensors file. The header follows from names, dtypes and shapes, so it comes first and data in any order.

    Args:
        path: a file that does not exist.
        tensors: all that the file will hold.
        metadata: the header's `__metadata__`.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._begin: dict[str, int] = {}
        offset = 0
        # Wide dtypes first keeps every tensor aligned to its element size.
        for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):
            self._begin[tensor.name] = offset
            header[tensor.name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + tensor.nbytes],
            }
            offset += tensor.nbytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._data_start = 8 + len(encoded)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write_at(0, len(encoded).to_bytes(8, "little") + encoded)
        os.ftruncate(self._fd, self._data_start + offset)

    def write(self, name: str, first_element: int, values: Tensor) -> None:
        """Writes `values` (dtype of the planned tensor, CPU) from its element `first_element` on, in row-major order."""
        if values.numel():
            data = values.contiguous().reshape(-1).view(torch.uint8).numpy().data
            self._write_at(self._data_start + self._begin[name] + first_element * values.element_size(), data)

    def _write_at(self, offset: int, data: bytes | memoryview) -> None:
        data = memoryview(data)
        while data:
            written = os.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
