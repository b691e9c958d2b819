"""fp8 weights: a scale per tensor, per output channel or per block (DeepSeek, Qwen)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TensorInfo
from w8a8_converters.errors import ConversionError
from w8a8_converters.quantized.base import FLOATS, Read, check, check_matrix, one_of, part, whole

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Fp8:
    """`quant_method` fp8: `weight` F8_E4M3 [N, K] and `weight_scale` or, in spite of its name no inverse, `weight_scale_inv`.

    The scale is multiplied: one number, [N, 1], or where `weight_block_size` [n, k] is set [ceil(N / n), ceil(K / k)].
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        one_of(settings, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self._block = block_size(settings, "weight_block_size")
        self.description = f"fp8, blocks of {' x '.join(map(str, self._block))}" if self._block else "fp8"

    def weight(self, module: str, own: Mapping[str, TensorInfo], read: Read) -> "Fp8Weight | None":
        return fp8_weight(module, own, self._block)


def block_size(settings: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    """Rows and columns of a block, None where there are none."""
    block = settings.get(key)
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ConversionError(f"quantization_config: {key} must be two positive integers, got {block!r}")
    return block[0], block[1]


def fp8_weight(module: str, own: Mapping[str, TensorInfo], block: tuple[int, int] | None) -> "Fp8Weight | None":
    """A module's weight if it is fp8."""
    if "weight" not in own or own["weight"].dtype not in _FP8:
        return None
    weight = check_matrix(own["weight"], torch.float8_e4m3fn)
    scale = part(module, own, "weight_scale_inv" if "weight_scale_inv" in own else "weight_scale")
    N, K = weight.shape
    if block is None:
        check(scale, FLOATS, (), (1,), (1, 1), (N,), (N, 1))
    else:
        check(scale, FLOATS, (-(-N // block[0]), -(-K // block[1])))
    return Fp8Weight((N, K), (weight, scale), block)


@dataclass(frozen=True)
class Fp8Weight:
    """`parts` are the weight and its scale."""

    shape: tuple[int, int]
    parts: tuple[TensorInfo, TensorInfo]
    block: tuple[int, int] | None

    def rows(self, read: Read, start: int, stop: int) -> Tensor:
        weight, scale = self.parts
        values = read(weight.name, start, stop).float()
        if self.block is None:
            scales = whole(read, scale).float().reshape(-1, 1)
            return values.mul_(scales if len(scales) == 1 else scales[start:stop])
        rows, columns = self.block
        first = start // rows
        scales = read(scale.name, first, -(-stop // rows)).float()
        scales = scales.repeat_interleave(columns, dim=1)[:, : self.shape[1]]
        return values.mul_(scales[torch.arange(start, stop) // rows - first])
