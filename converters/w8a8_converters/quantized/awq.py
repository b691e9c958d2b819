"""AWQ, `gemm` layout: integers of 4 bits packed along the output channels, in an order of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TensorInfo
from w8a8_converters.quantized.base import (
    FLOATS,
    Read,
    check,
    check_matrix,
    column_groups,
    dequantize,
    group_size_of,
    groups_of,
    one_of,
    part,
    whole,
)

_BITS = 4
_FIELDS = 32 // _BITS
# The output channel, of the eight of a word, that each field holds, lowest bits first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SHIFTS = torch.tensor(_ORDER).argsort().int() * _BITS
_PARTS = ("qweight", "qzeros", "scales")


class Awq:
    """`qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], `scales` [G, N]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        one_of(settings, "version", ("gemm",), "gemm")
        one_of(settings, "bits" if "bits" in settings else "w_bit", (_BITS,))
        one_of(settings, "zero_point", (True,), True)
        self._group_size = group_size_of(settings, "group_size" if "group_size" in settings else "q_group_size")
        groups = f"groups of {self._group_size}" if self._group_size > 0 else "by channel"
        self.description = f"AWQ, {_BITS} bit, {groups}"

    def weight(self, module: str, own: Mapping[str, TensorInfo], read: Read) -> "AwqWeight | None":
        if own.keys().isdisjoint(_PARTS):
            return None
        qweight = check_matrix(part(module, own, "qweight"), torch.int32)
        K, N = qweight.shape[0], qweight.shape[1] * _FIELDS
        groups = groups_of(K, self._group_size)
        qzeros = check(part(module, own, "qzeros"), (torch.int32,), (groups, N // _FIELDS))
        scales = check(part(module, own, "scales"), FLOATS, (groups, N))
        return AwqWeight((N, K), (qweight, qzeros, scales), self._group_size)


@dataclass(frozen=True)
class AwqWeight:
    """`parts` are qweight, qzeros and scales. Its rows are columns of all of them: only those words are unpacked."""

    shape: tuple[int, int]
    parts: tuple[TensorInfo, TensorInfo, TensorInfo]
    group_size: int

    def rows(self, read: Read, start: int, stop: int) -> Tensor:
        qweight, qzeros, scales = self.parts
        codes, zeros = (_columns(whole(read, info), start, stop) for info in (qweight, qzeros))
        scale = whole(read, scales)[:, start:stop]
        group_of = column_groups(self.shape[1], self.group_size, len(scale), read, None)
        return dequantize(codes, scale.T, zeros, group_of)


def _columns(words: Tensor, start: int, stop: int) -> Tensor:
    """Words int32 [n, N / 8] -> columns [start, stop) of what they hold, as rows: int32 [stop - start, n]."""
    first = start // _FIELDS
    words = words[:, first : -(-stop // _FIELDS)].T.contiguous()
    columns = (words[:, None] >> _SHIFTS[:, None]).bitwise_and_(15).flatten(0, 1)
    return columns[start - first * _FIELDS : stop - first * _FIELDS]
