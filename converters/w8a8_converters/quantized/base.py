"""What the formats of quantized checkpoints share: typed settings, checked tensors, packed integers, groups of columns."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from w8a8_converters.checkpoint import DTYPE_NAMES, TensorInfo
from w8a8_converters.errors import BrokenFileError, ConversionError

Read = Callable[[str, int, int], Tensor]
"""Rows [start, stop) of a stored tensor, as `Source.rows`."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class PackedWeight(Protocol):
    """One weight as its format stores it.

    Attributes:
        shape: [N, K] of the weight.
        parts: the stored tensors that it is computed from.
    """

    shape: tuple[int, int]
    parts: tuple[TensorInfo, ...]

    def rows(self, read: Read, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the weight, fp32 [stop - start, K]."""


class QuantizedFormat(Protocol):
    """How one quantization method stores weights.

    Attributes:
        description: the method and its settings, for people.
    """

    description: str

    def weight(self, module: str, own: Mapping[str, TensorInfo], read: Read) -> PackedWeight | None:
        """The weight of a module, None where it is stored as it is or there is none.

        Args:
            module: its name.
            own: its tensors by the last component of their names.
            read: for tensors that hold sizes.

        Raises:
            BrokenFileError: a tensor is missing, or of another dtype or shape than the settings ask for.
        """


def setting(settings: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """An entry of quantization_config; required where there is no default.

    Raises:
        ConversionError: it is missing or of another type.
    """
    value = settings.get(key)
    value = default if value is None else value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConversionError(f"quantization_config: {key} must be of type {kind.__name__}, got {value!r}")
    return value


def one_of(settings: Mapping[str, Any], key: str, allowed: tuple, default: Any = None) -> Any:
    """An entry of quantization_config that must be one of `allowed`; text counts in lower case."""
    value = settings.get(key)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed or isinstance(value, bool) is not isinstance(allowed[0], bool):
        raise ConversionError(f"quantization_config: {key} {value!r} is not supported, only {', '.join(map(repr, allowed))}")
    return value


def group_size_of(settings: Mapping[str, Any], key: str = "group_size") -> int:
    """Columns that share a scale: positive, or -1 for all of a row."""
    size = setting(settings, key, int)
    if size < 1 and size != -1:
        raise ConversionError(f"quantization_config: group_size must be positive or -1, got {size}")
    return size


def groups_of(K: int, group_size: int) -> int:
    """How many groups of `group_size` columns there are, -1 for one group; the last may be smaller."""
    return 1 if group_size == -1 else -(-K // group_size)


def part(module: str, own: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    """A tensor that the module's weight needs."""
    if name not in own:
        raise BrokenFileError(
            f"tensor {module}.{name} is missing beside {next(iter(own.values())).name}: the checkpoint is incomplete; "
            "download it again"
        )
    return own[name]


def check(info: TensorInfo, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> TensorInfo:
    """The tensor itself, if it has one of these dtypes and one of these shapes."""
    if info.dtype not in dtypes:
        wanted = " or ".join(DTYPE_NAMES[dtype] for dtype in dtypes)
        raise BrokenFileError(f"tensor {info.name} is {DTYPE_NAMES[info.dtype]}, the quantization's settings ask for {wanted}")
    if shapes and info.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise BrokenFileError(
            f"tensor {info.name} has shape {list(info.shape)}, the quantization's settings and the other tensors of its "
            f"module ask for {wanted}"
        )
    return info


def check_matrix(info: TensorInfo, *dtypes: torch.dtype) -> TensorInfo:
    """The tensor itself, if it has one of these dtypes and two dimensions, neither 0."""
    check(info, dtypes)
    if len(info.shape) != 2 or 0 in info.shape:
        raise BrokenFileError(f"tensor {info.name} has shape {list(info.shape)}, expected a matrix: it cannot be dequantized")
    return info


def whole(read: Read, info: TensorInfo) -> Tensor:
    """All of a stored tensor; may be a view of the file."""
    return read(info.name, 0, info.n_rows)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The unsigned integers of 4 or 8 bits in int32 words [n, w], lowest bits first: uint8 [n, w * 32 / bits]."""
    # `contiguous` takes a transposed column as contiguous, which `view` does not.
    data = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(1)


def column_groups(K: int, group_size: int, groups: int, read: Read, g_idx: TensorInfo | None) -> Tensor | None:
    """The group of each column, int64 [K]; None where all groups are runs of K / groups columns.

    Args:
        g_idx: int32 [K], where groups need not be runs of `group_size` columns.

    Raises:
        BrokenFileError: g_idx names a group that does not exist.
    """
    if groups == 1:
        return None
    runs = torch.arange(K) // group_size
    index = runs if g_idx is None else whole(read, g_idx).long()
    low, high = index.min(), index.max()
    if low < 0 or high >= groups:
        raise BrokenFileError(
            f"tensor {g_idx.name} holds group {int(low if low < 0 else high)}, the scales are {groups} groups"
        )
    return None if K == groups * group_size and torch.equal(index, runs) else index


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, group_of: Tensor | None) -> Tensor:
    """(codes - zero) * scale in fp32.

    Args:
        codes: integers [n, K].
        scale: floating [n, groups] or [1, 1].
        zero: integers [n, groups] or [1, 1]; None for 0.
        group_of: of `column_groups`.

    Returns:
        fp32 [n, K], contiguous.
    """
    values = codes.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    scale = scale.float()
    zero = None if zero is None else zero.float().expand_as(scale)
    if group_of is None:
        grouped = values.view(len(values), scale.shape[1], -1)
        scale, zero = scale.unsqueeze(-1), None if zero is None else zero.unsqueeze(-1)
    else:
        grouped = values
        scale, zero = scale[:, group_of], None if zero is None else zero[:, group_of]
    if zero is not None:
        grouped -= zero
    grouped *= scale
    return values
