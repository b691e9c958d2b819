"""compressed-tensors: fp8 weights, int8 weights, and packed integers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import W8A8_ALREADY, TensorInfo, is_w8a8_group
from w8a8_converters.errors import AlreadyW8A8Error, BrokenFileError, ConversionError
from w8a8_converters.quantized.base import (
    FLOATS,
    PackedWeight,
    Read,
    check,
    check_matrix,
    column_groups,
    dequantize,
    groups_of,
    one_of,
    part,
    setting,
    unpack,
    whole,
)
from w8a8_converters.quantized.fp8 import block_size, fp8_weight

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class _Scheme:
    """How the weights of one config group are stored; group_size -1 where a scale serves whole rows."""

    targets: tuple[str, ...]
    is_float: bool
    bits: int
    symmetric: bool
    group_size: int
    block: tuple[int, int] | None


class CompressedTensors:
    """float-quantized, int-quantized without int8 activations, and pack-quantized, alone or mixed.

    | weights | tensors |
    |---|---|
    | fp8 | `weight` F8_E4M3, `weight_scale`: see `Fp8` |
    | int8 | `weight` I8 [N, K], `weight_scale` [N, G], one number or [N, 1], `weight_zero_point` likewise if asymmetric |
    | packed | `weight_packed` int32 [N, ceil(K / f)] with f = 32 / bits integers a word, offset by 2^(bits - 1);
      `weight_shape`, `weight_scale` as above; `weight_zero_point` int32 [ceil(N / f), G], packed along N |

    Either integer form may have `weight_g_idx` int32 [K], the group of each column.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        one_of(settings, "quantization_status", ("compressed",), "compressed")
        overall = one_of(settings, "format", _FORMATS)
        sparsity = setting(settings, "sparsity_config", dict, {})
        one_of({"sparsity_config.format": sparsity.get("format")}, "sparsity_config.format", ("dense",), "dense")
        if settings.get("transform_config"):
            raise ConversionError(
                "quantization_config: its transform_config changes weights and activations while the model runs, which is "
                "not supported"
            )
        groups = setting(settings, "config_groups", dict)
        self._schemes = [scheme for group in groups.values() if (scheme := _scheme(group, overall)) is not None]
        if not self._schemes:
            raise ConversionError("quantization_config: none of its config_groups quantizes weights")
        kinds = dict.fromkeys(_describe(scheme) for scheme in self._schemes)
        self.description = f"compressed-tensors, {' and '.join(kinds)}"

    def weight(self, module: str, own: Mapping[str, TensorInfo], read: Read) -> PackedWeight | None:
        packed = "weight_packed" in own or "weight_shape" in own
        if not packed and ("weight" not in own or own["weight"].dtype.itemsize != 1):
            return None
        scheme = self._scheme_of(module)
        if scheme.is_float:
            part(module, own, "weight")
            return fp8_weight(module, own, scheme.block)
        return _packed_weight(module, own, scheme, read) if packed else _int8_weight(module, own, scheme)

    def _scheme_of(self, module: str) -> _Scheme:
        """The scheme with the most specific target: a name, a regular expression, a class of modules."""
        for matches in (
            lambda target: target == module,
            lambda target: target.startswith("re:") and re.match(target[3:], module),
            lambda target: target in ("Linear", "Embedding", "ParallelLMHead"),
        ):
            for scheme in self._schemes:
                if any(map(matches, scheme.targets)):
                    return scheme
        raise ConversionError(f"quantization_config: no target of its config_groups matches {module}, which is quantized")


def _scheme(group: Any, overall: str) -> _Scheme | None:
    group = setting({"config_groups": group}, "config_groups", dict)
    weights = group.get("weights")
    if weights is None:
        return None
    weights = setting({"weights": weights}, "weights", dict)
    one_of(group, "format", _FORMATS, overall)
    kind = one_of(weights, "type", ("int", "float"), "int")
    bits = one_of(weights, "num_bits", (8,) if kind == "float" else (4, 8), 8)
    if is_w8a8_group(group):
        raise AlreadyW8A8Error(W8A8_ALREADY)
    strategy = one_of(weights, "strategy", _STRATEGIES, "group" if weights.get("group_size") else "tensor")
    if kind == "int" and strategy == "block":
        raise ConversionError("quantization_config: blocks of integers are not supported")
    group_size = setting(weights, "group_size", int) if strategy == "group" else -1
    if strategy == "group" and group_size < 1:
        raise ConversionError(f"quantization_config: group_size must be positive, got {group_size}")
    block = block_size(weights, "block_structure") if strategy == "block" else None
    targets = setting(group, "targets", list)
    for target in targets:
        try:
            re.compile(str(target).removeprefix("re:"))
        except re.error as error:
            raise ConversionError(f"quantization_config: target {target!r} is not a regular expression: {error}") from None
    symmetric = setting(weights, "symmetric", bool, True)
    return _Scheme(tuple(map(str, targets)), kind == "float", bits, symmetric, group_size, block)


def _describe(scheme: _Scheme) -> str:
    kind = "fp8" if scheme.is_float else f"int{scheme.bits}"
    if scheme.block:
        return f"{kind} in blocks of {' x '.join(map(str, scheme.block))}"
    return f"{kind} in groups of {scheme.group_size}" if scheme.group_size > 0 else kind


def _int8_weight(module: str, own: Mapping[str, TensorInfo], scheme: _Scheme) -> "IntWeight":
    weight = check_matrix(own["weight"], torch.int8)
    N, K = weight.shape
    if scheme.bits != 8:
        raise ConversionError(f"tensor {weight.name} is I8, quantization_config says {scheme.bits} bit: not supported")
    scale, g_idx = _scale_and_index(module, own, scheme, N, K)
    zero = None
    if not scheme.symmetric:
        zero = check(part(module, own, "weight_zero_point"), (torch.int8,), scale.shape)
    return IntWeight((N, K), weight, scale, zero, g_idx, scheme.group_size)


def _packed_weight(module: str, own: Mapping[str, TensorInfo], scheme: _Scheme, read: Read) -> "IntWeight":
    weight = check_matrix(part(module, own, "weight_packed"), torch.int32)
    sizes = check(part(module, own, "weight_shape"), (torch.int64, torch.int32), (2,))
    N, K = whole(read, sizes).tolist()
    fields = 32 // scheme.bits
    if weight.shape != (N, -(-K // fields)):
        raise BrokenFileError(
            f"tensor {weight.name} has shape {list(weight.shape)}, a weight of {[N, K]} in {scheme.bits} bit asks for "
            f"{[N, -(-K // fields)]}"
        )
    scale, g_idx = _scale_and_index(module, own, scheme, N, K)
    zero = None
    if not scheme.symmetric:
        zero = check(
            part(module, own, "weight_zero_point"), (torch.int32,), (-(-N // fields), groups_of(K, scheme.group_size))
        )
    return IntWeight((N, K), weight, scale, zero, g_idx, scheme.group_size, scheme.bits, (sizes,))


def _scale_and_index(
    module: str, own: Mapping[str, TensorInfo], scheme: _Scheme, N: int, K: int
) -> tuple[TensorInfo, TensorInfo | None]:
    groups = groups_of(K, scheme.group_size)
    shapes = [(N, groups)] if groups > 1 else [(N, 1), (), (1,), (1, 1)]
    scale = check(part(module, own, "weight_scale"), FLOATS, *shapes)
    g_idx = own.get("weight_g_idx")
    return scale, None if g_idx is None else check(g_idx, (torch.int32, torch.int64), (K,))


@dataclass(frozen=True)
class IntWeight:
    """Signed integers, int8 or packed.

    Attributes:
        bits: of packed integers, whose zero points are packed, too; None for int8.
        sizes: tensors that told the shape.
    """

    shape: tuple[int, int]
    weight: TensorInfo
    scale: TensorInfo
    zero: TensorInfo | None
    g_idx: TensorInfo | None
    group_size: int
    bits: int | None = None
    sizes: tuple[TensorInfo, ...] = ()

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        return tuple(filter(None, (self.weight, self.scale, self.zero, self.g_idx, *self.sizes)))

    def rows(self, read: Read, start: int, stop: int) -> Tensor:
        groups = groups_of(self.shape[1], self.group_size)
        group_of = column_groups(self.shape[1], self.group_size, groups, read, self.g_idx)
        codes = read(self.weight.name, start, stop)
        scale = _rows_of(self.scale, read, start, stop)
        if self.bits is None:
            zero = None if self.zero is None else _rows_of(self.zero, read, start, stop)
            return dequantize(codes, scale, zero, group_of)
        codes = unpack(codes, self.bits)[:, : self.shape[1]]
        if self.zero is None:
            return dequantize(codes, scale, torch.tensor([[1 << (self.bits - 1)]]), group_of)
        # Codes and zero points have the same offset, and their difference none.
        fields = 32 // self.bits
        first = start // fields
        zero = unpack(read(self.zero.name, first, -(-stop // fields)).T, self.bits).T
        return dequantize(codes, scale, zero[start - first * fields : stop - first * fields], group_of)


def _rows_of(info: TensorInfo, read: Read, start: int, stop: int) -> Tensor:
    """Rows of a scale or an int8 zero point [stop - start, groups], or one number that serves all rows, as [1, 1]."""
    if info.shape in ((), (1,), (1, 1)):
        return whole(read, info).reshape(1, 1)
    return read(info.name, start, stop)
