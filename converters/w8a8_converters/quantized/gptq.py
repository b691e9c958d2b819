"""GPTQ: integers of 4 or 8 bits packed along the input channels, with groups of them sharing a scale and a zero point."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TensorInfo
from w8a8_converters.errors import ConversionError
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
    setting,
    unpack,
    whole,
)

_BITS = (4, 8)
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


class Gptq:
    """`qweight` int32 [K * bits / 32, N], `qzeros` int32 [G, N * bits / 32], `scales` [G, N], often `g_idx` int32 [K].

    `checkpoint_format` gptq stores zero points less one, modulo 2^bits; gptq_v2 stores them as they are. `dynamic` gives
    modules that a pattern matches other settings.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        key = "checkpoint_format" if settings.get("checkpoint_format") else "format"
        self._zero_offset = 1 if one_of(settings, key, ("gptq", "gptq_v2"), "gptq") == "gptq" else 0
        one_of(settings, "is_marlin_format", (False,), False)
        one_of(settings, "pack_dtype", ("int32",), "int32")
        self._settings = settings
        self._dynamic = {}
        for pattern, entries in setting(settings, "dynamic", dict, {}).items():
            if not pattern.startswith("-:"):  # those are not quantized, and have no packed tensors
                self._dynamic[_compile(pattern.removeprefix("+:"))] = setting({"dynamic": entries}, "dynamic", dict)
        bits, group_size = self._sizes(settings)
        self.description = f"GPTQ, {bits} bit, " + (f"groups of {group_size}" if group_size > 0 else "by channel")

    def weight(self, module: str, own: Mapping[str, TensorInfo], read: Read) -> "GptqWeight | None":
        if own.keys().isdisjoint(_PARTS):
            return None
        matched = next((entries for pattern, entries in self._dynamic.items() if pattern.match(module)), {})
        bits, group_size = self._sizes({**self._settings, **matched})
        qweight = check_matrix(part(module, own, "qweight"), torch.int32)
        fields = 32 // bits
        K, N = qweight.shape[0] * fields, qweight.shape[1]
        groups = groups_of(K, group_size)
        scales = check(part(module, own, "scales"), FLOATS, (groups, N))
        qzeros = check(part(module, own, "qzeros"), (torch.int32,), (groups, -(-N // fields)))
        g_idx = check(own["g_idx"], (torch.int32, torch.int64), (K,)) if "g_idx" in own else None
        parts = (qweight, qzeros, scales) if g_idx is None else (qweight, qzeros, scales, g_idx)
        return GptqWeight((N, K), parts, bits, group_size, self._zero_offset)

    def _sizes(self, settings: Mapping[str, Any]) -> tuple[int, int]:
        group_size = group_size_of(settings)
        return one_of(settings, "bits", _BITS), group_size


def _compile(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConversionError(f"quantization_config: dynamic {pattern!r} is not a regular expression: {error}") from None


@dataclass(frozen=True)
class GptqWeight:
    """`parts` are qweight, qzeros, scales and, if there is one, g_idx.

    Its rows are columns of all of them: only those are unpacked.
    """

    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]
    bits: int
    group_size: int
    zero_offset: int

    def rows(self, read: Read, start: int, stop: int) -> Tensor:
        qweight, qzeros, scales, *g_idx = self.parts
        codes = unpack(whole(read, qweight)[:, start:stop].T, self.bits)
        fields = 32 // self.bits
        first = start // fields
        zeros = unpack(whole(read, qzeros)[:, first : -(-stop // fields)], self.bits)
        zeros = zeros[:, start - first * fields : stop - first * fields]
        zeros = (zeros + self.zero_offset) & ((1 << self.bits) - 1)
        scale = whole(read, scales)[:, start:stop]
        group_of = column_groups(self.shape[1], self.group_size, len(scale), read, g_idx[0] if g_idx else None)
        return dequantize(codes, scale.T, zeros.T, group_of)
