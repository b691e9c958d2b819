"""What the architecture files share: name tables, row orders, typed metadata."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.reader import GGUFFile

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


class Architecture(ABC):
    """How the tensors and the metadata of one GGUF architecture map to a Hugging Face model.

    Class attributes, which an architecture file fills:
        model_tensors: GGUF name -> Hugging Face name, outside the layers.
        layer_tensors: GGUF name after `blk.N.` -> Hugging Face name after `model.layers.N.`.
        optional: those of both that a file may lack.
        metadata_tensors: tensors that hold settings, read by `config` and not converted.
        known_keys: metadata under the architecture's prefix that `config` reads or that do not change the result.
        stored_plus_one: GGUF names as in the two tables of norms whose file holds 1 + weight.
    """

    model_tensors: ClassVar[Mapping[str, str]]
    layer_tensors: ClassVar[Mapping[str, str]]
    optional: ClassVar[frozenset[str]]
    metadata_tensors: ClassVar[frozenset[str]]
    known_keys: ClassVar[frozenset[str]]
    stored_plus_one: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name: str = file.required("general.architecture")
        prefix = f"{self.name}."
        unknown = [k for k in file.metadata if k.startswith(prefix) and k.removeprefix(prefix) not in self.known_keys]
        if unknown:
            raise ConversionError(
                f"{file.path}: metadata {', '.join(unknown)} is not understood for architecture {self.name}; "
                "ignoring it could give another model"
            )
        self.n_layers = self.integer("block_count")

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.heads)

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of config.json, without dtype and special token ids."""

    @abstractmethod
    def row_order(self, name: str) -> Tensor | None:
        """For a GGUF tensor whose rows are stored in another order: int64 [rows], the stored row of each row."""

    def hugging_face_name(self, name: str) -> str | None:
        """The Hugging Face name of a GGUF tensor, None if it is unknown."""
        if match := _LAYER.fullmatch(name):
            layer, inner = int(match[1]), self.layer_tensors.get(match[2])
            return f"model.layers.{layer}.{inner}" if inner and layer < self.n_layers else None
        return self.model_tensors.get(name)

    def is_stored_plus_one(self, name: str) -> bool:
        """Whether 1 must be subtracted from the values of a GGUF tensor."""
        match = _LAYER.fullmatch(name)
        return (match[2] if match else name) in self.stored_plus_one

    def required_tensors(self) -> Iterator[str]:
        """GGUF names without which the model is incomplete."""
        yield from (name for name in self.model_tensors if name not in self.optional)
        for layer in range(self.n_layers):
            yield from (f"blk.{layer}.{name}" for name in self.layer_tensors if name not in self.optional)

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's prefix."""
        return self.file.metadata.get(f"{self.name}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer under the architecture's prefix; required where there is no default."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConversionError(f"{self.file.path}: metadata {self.name}.{key} must be one positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """An fp32 number under the architecture's prefix, as the shortest decimal that means the same fp32 value."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConversionError(f"{self.file.path}: metadata {self.name}.{key} must be a number, got {value!r}")
        return float(str(np.float32(value)))


def interleaved_to_halves(heads: int, head_dim: int) -> Tensor:
    """Row order of q and k where the file pairs neighbouring rows for the rotary embedding.

    Hugging Face pairs row i of a head with row i + head_dim/2; such a file stores the two next to each other.

    Returns:
        int64 [heads * head_dim]: the stored row of each row in Hugging Face order.
    """
    stored = torch.arange(heads * head_dim)
    return stored.reshape(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)
