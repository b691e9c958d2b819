"""A checkpoint with operations on its tensors, computed while it is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from w8a8_converters.checkpoint import Source, TensorInfo
from w8a8_converters.folding.rotation import Rotation


class Operation(Protocol):
    """Something done to a tensor in fp32.

    Attributes:
        needs_all_rows: whether a row of the result depends on other rows.
    """

    needs_all_rows: bool

    def apply(self, values: Tensor, start: int) -> Tensor:
        """Rows of the tensor, the first of which is row `start`, fp32 -> the same rows of the result."""


@dataclass(frozen=True)
class ScaleInput:
    """Multiplies the input channels of a weight by `scale` [K]."""

    scale: Tensor
    needs_all_rows = False

    def apply(self, values: Tensor, start: int) -> Tensor:
        return values * self.scale


@dataclass(frozen=True)
class ScaleOutput:
    """Multiplies the output channels of a weight, or a bias, by `scale` [N]."""

    scale: Tensor
    needs_all_rows = False

    def apply(self, values: Tensor, start: int) -> Tensor:
        scale = self.scale[start : start + len(values)]
        return values * (scale if values.ndim == 1 else scale[:, None])


@dataclass(frozen=True)
class RotateInput:
    """For a layer that gets `x R` instead of `x`, block by block."""

    rotation: Rotation
    needs_all_rows = False

    def apply(self, values: Tensor, start: int) -> Tensor:
        return self.rotation.apply(values)


@dataclass(frozen=True)
class RotateOutput:
    """For a layer that gives `y R` instead of `y`, block by block: a weight or a bias."""

    rotation: Rotation
    needs_all_rows = True

    def apply(self, values: Tensor, start: int) -> Tensor:
        return self.rotation.apply_to_rows(values)


@dataclass(frozen=True)
class Replace:
    """Puts other values into a one-dimensional tensor."""

    values: Tensor
    needs_all_rows = False

    def apply(self, values: Tensor, start: int) -> Tensor:
        return self.values[start : start + len(values)]


class FoldedSource:
    """A source whose tensors have operations applied, in the order in which they were added.

    `rows` gives fp32 for tensors with operations, so that they are rounded once, when they are written; `TensorInfo.dtype`
    stays that of the checkpoint. Where an operation mixes rows, the whole result is held while it is read
    in parts.

    Args:
        source: stays as it is.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.path: Path = source.path
        self.files: list[Path] = source.files
        self.config: dict[str, Any] = source.config
        self.tensors: dict[str, TensorInfo] = dict(source.tensors)
        self.side_files: Mapping[str, Path | bytes] = source.side_files
        self.notes: list[str] = list(source.notes)
        self._operations: dict[str, list[Operation]] = {}
        self._copies: dict[str, str] = {}
        self._whole: tuple[str, Tensor] | None = None

    def copy(self) -> "FoldedSource":
        """Another one with the same operations; what is added to either does not change the other."""
        other = FoldedSource(self._source)
        other.config, other.tensors, other.notes = self.config, dict(self.tensors), list(self.notes)
        other._operations = {name: list(operations) for name, operations in self._operations.items()}
        other._copies = dict(self._copies)
        return other

    def add(self, name: str, operation: Operation) -> None:
        self._operations.setdefault(name, []).append(operation)
        self.tensors[name] = replace(self.tensors[name], computed=True)
        self._whole = None

    def add_copy(self, name: str, of: str) -> None:
        """A new tensor with the values that `of` has in the checkpoint, without its operations."""
        self._copies[name] = of
        self.tensors[name] = replace(self._source.tensors[of], name=name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        stored = self._copies.get(name, name)
        operations = self._operations.get(name)
        if not operations:
            return self._source.rows(stored, start, stop)
        if self._whole is not None and self._whole[0] == name:
            return self._whole[1][start:stop]
        whole = any(operation.needs_all_rows for operation in operations)
        first, last = (0, self.tensors[name].n_rows) if whole else (start, stop)
        values = self._source.rows(stored, first, last).float()
        for operation in operations:
            values = operation.apply(values, first)
        if not whole or (start, stop) == (first, last):
            return values
        self._whole = name, values
        return values[start:stop]

    def known_finite(self, name: str) -> bool:
        return name not in self._operations and self._source.known_finite(self._copies.get(name, name))

    def whole(self, name: str) -> Tensor:
        """A tensor in fp32, all of it."""
        return self.rows(name, 0, self.tensors[name].n_rows).float()
