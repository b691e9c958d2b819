"""Tensors of a GGUF file as lazy fp32 values that are read by rows: nothing is held but the rows in question."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from w8a8_converters.gguf.dequant import dequantize_rows

Index = slice | Tensor
"""Rows along the first dimension: a slice with both ends, or int64 numbers of rows."""


class Values:
    """A tensor of fp32 values.

    Args:
        shape: in torch's order.
        rows: Index -> fp32 [number of rows, *shape[1:]].
    """

    def __init__(self, shape: tuple[int, ...], rows: Callable[[Index], Tensor]) -> None:
        self.shape = shape
        self.rows = rows

    def whole(self) -> Tensor:
        """All of it, fp32 of `shape`."""
        return self.rows(slice(0, self.shape[0]))

    def take(self, order: Tensor) -> Values:
        """With its rows in another order: int64, the row that comes to each place."""
        return Values((len(order), *self.shape[1:]), lambda index: self.rows(order[index]))

    def take_columns(self, order: Tensor) -> Values:
        """With the last dimension in another order: int64 [shape[-1]]."""
        return Values((*self.shape[:-1], len(order)), lambda index: self.rows(index)[..., order])

    def map(self, function: Callable[[Tensor], Tensor]) -> Values:
        """With a function applied to each element."""
        return Values(self.shape, lambda index: function(self.rows(index)))

    def reshape(self, *shape: int) -> Values:
        """With other dimensions after the first."""
        return Values(shape, lambda index: self.rows(index).reshape(-1, *shape[1:]))

    def transposed(self) -> Values:
        """With the last two of three dimensions exchanged."""
        first, rows, columns = self.shape
        return Values((first, columns, rows), lambda index: self.rows(index).transpose(1, 2))


class Stored(Values):
    """Packed rows of a file.

    Args:
        packed: uint8 [all dimensions of `shape` but the last, multiplied; row_bytes].
        kind: their type.
        shape: in torch's order.
    """

    def __init__(self, packed: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> None:
        super().__init__(shape, self._read)
        self._packed = packed
        self._kind = kind

    def part(self, number: int) -> Stored:
        """One entry of the first dimension, as an expert's matrix of a stack."""
        per_entry = prod(self.shape[1:-1])
        return Stored(self._packed[number * per_entry : (number + 1) * per_entry], self._kind, self.shape[1:])

    def _read(self, index: Index) -> Tensor:
        if len(self.shape) == 1:
            return dequantize_rows(self._packed, self._kind).reshape(-1)[index]
        row_bytes = self._packed.shape[-1]
        entries = self._packed.reshape(self.shape[0], -1)
        packed = entries[index if isinstance(index, slice) else index.numpy()].reshape(-1, row_bytes)
        return dequantize_rows(packed, self._kind).reshape(-1, *self.shape[1:])


def concatenated(*parts: Values) -> Values:
    """Tensors of equal rows one after the other."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])

    def rows(index: Index) -> Tensor:
        wanted = torch.arange(shape[0])[index]
        out = torch.empty(len(wanted), *shape[1:])
        first = 0
        for part in parts:
            mine = (wanted >= first) & (wanted < first + part.shape[0])
            if mine.any():
                out[mine] = part.rows(wanted[mine] - first)
            first += part.shape[0]
        return out

    return Values(shape, rows)


def interleaved(even: Values, odd: Values) -> Values:
    """Two tensors of one shape, their entries along the second dimension by turns."""
    first, second, *others = even.shape
    shape = (first, 2 * second, *others)
    return Values(shape, lambda index: torch.stack([even.rows(index), odd.rows(index)], dim=2).reshape(-1, *shape[1:]))
