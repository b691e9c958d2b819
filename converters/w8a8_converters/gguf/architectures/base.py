"""What the architecture files share: typed metadata, head orders, the tables of tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.dequant import check_type, dequantize_rows
from w8a8_converters.gguf.reader import GGUFFile

Table = Mapping[str, Recipe]


class Architecture(ABC):
    """How the tensors and the metadata of one GGUF architecture map to a Hugging Face model.

    An architecture file has a class `Model` that fills these and gives `layer_table` and `config`.

    Class attributes:
        setting_tensors: tensors that hold settings, read by `config`: the only ones that may be in no table.
        ignored_keys: metadata under the architecture's prefix that change no result.

    Attributes:
        notes: what the user should know about the model, for the report.
    """

    setting_tensors: ClassVar[Collection[str]] = ()
    ignored_keys: ClassVar[Collection[str]] = ()

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name: str = file.required("general.architecture")
        self.notes: list[str] = []
        self._read_keys: set[str] = set()
        self.hidden = self.integer("embedding_length")
        self.n_layers = self.integer("block_count")
        self.vocab = self._vocabulary()

    # What an architecture gives.

    @abstractmethod
    def layer_table(self, layer: int) -> Table:
        """Name in the Hugging Face model after `model.layers.N.` -> its recipe, GGUF names after `blk.N.`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The content of config.json, without dtype and special token ids."""

    def model_table(self) -> Table:
        """The same outside the layers, with full names."""
        return {
            "model.embed_tokens.weight": stored("token_embd.weight", self.vocab, self.hidden),
            "model.norm.weight": stored("output_norm.weight", self.hidden),
            "lm_head.weight": stored("output.weight", self.vocab, self.hidden).optional(),
        }

    def layer_prefix(self, layer: int) -> str:
        """What stands before the names of `layer_table`."""
        return f"model.layers.{layer}."

    # What it can use.

    @property
    def inner(self) -> int:
        """Hidden size of the MLP."""
        return self.integer("feed_forward_length")

    @property
    def heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def kv_heads(self) -> int:
        return self.integer("attention.head_count_kv", self.heads)

    @property
    def head_dim(self) -> int:
        """Of q, k and v; those of v must be as large."""
        size = self.integer("attention.key_length", self.hidden // self.heads)
        self.expect("attention.value_length", size)
        return size

    @property
    def is_tied(self) -> bool:
        """Whether the lm_head is the embedding: where the file has no `output.weight`."""
        return "output.weight" not in self.file.tensors

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's prefix. What no architecture code asks for is refused by `check_keys`."""
        self._read_keys.add(key)
        return self.file.metadata.get(f"{self.name}.{key}", default)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer under the architecture's prefix; required where there is no default."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            what = "one positive integer" if minimum == 1 else f"one integer of at least {minimum}"
            raise ConversionError(f"{self.file.path}: metadata {self.name}.{key} must be {what}, got {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """An fp32 number under the architecture's prefix, as the shortest decimal that means the same fp32 value."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConversionError(f"{self.file.path}: metadata {self.name}.{key} must be a number, got {_shown(value)}")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean under the architecture's prefix."""
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise ConversionError(f"{self.file.path}: metadata {self.name}.{key} must be true or false, got {_shown(value)}")
        return value

    def per_layer(self, key: str) -> list[Any]:
        """An array with an entry for each layer."""
        value = self.value(key)
        if not isinstance(value, list) or len(value) != self.n_layers:
            count = f"{len(value)} entries" if isinstance(value, list) else _shown(value)
            raise ConversionError(
                f"{self.file.path}: metadata {self.name}.{key} has {count}, expected one for each of {self.n_layers} layers"
            )
        return value

    def layer_types(self, every: int) -> list[str]:
        """`layer_types` of config.json: the metadata's windows, or else in all layers but each `every`-th."""
        key = "attention.sliding_window_pattern"
        if isinstance(self.value(key), list):
            local = [bool(entry) for entry in self.per_layer(key)]
        else:
            every = self.integer(key, every)
            local = [layer % every != every - 1 for layer in range(self.n_layers)]
        return ["sliding_attention" if is_local else "full_attention" for is_local in local]

    def any_layer_has(self, *names: str) -> bool:
        """Whether any layer has any of these tensors, as biases: then `layer_table` asks them all of every layer."""
        return any(f"blk.{layer}.{name}" in self.file.tensors for layer in range(self.n_layers) for name in names)

    def values(self, name: str) -> Tensor:
        """The values of one of `setting_tensors`: fp32 [values]."""
        tensor = self.file.tensors[name]
        check_type(name, tensor.type)
        return dequantize_rows(self.file.packed_rows(tensor), tensor.type).reshape(-1)

    def expect(self, key: str, expected: Any) -> None:
        """Refuses a file whose metadata has another value than the only one that the model can have."""
        value = self.value(key, expected)
        if value != expected:
            raise ConversionError(
                f"{self.file.path}: {self.name}.{key} is {_shown(value)}, which is not supported; expected {expected}"
            )

    # What the source uses.

    def table(self) -> dict[str, Recipe]:
        """Name in the Hugging Face model -> its recipe, both with full names, for all layers."""
        table = dict(self.model_table())
        for layer in range(self.n_layers):
            for name, recipe in self.layer_table(layer).items():
                table[self.layer_prefix(layer) + name] = recipe.under(f"blk.{layer}.")
        return table

    def check_keys(self) -> None:
        """Refuses metadata under the architecture's prefix that nothing has read.

        Raises:
            ConversionError: with their names.
        """
        prefix = f"{self.name}."
        known = self._read_keys | set(self.ignored_keys)
        keys = (key for key in self.file.metadata if key.startswith(prefix))
        unknown = [key for key in keys if key.removeprefix(prefix) not in known]
        if unknown:
            raise ConversionError(
                f"{self.file.path}: metadata {', '.join(unknown)} is not understood for architecture {self.name}; "
                "ignoring it could give another model"
            )

    def _vocabulary(self) -> int:
        """Rows of the embedding, the metadata's `vocab_size` where the file has it."""
        tensor = self.file.tensors.get("token_embd.weight")
        if tensor is None:
            raise ConversionError(f"{self.file.path} lacks 1 tensors: token_embd.weight; download it again")
        return self.integer("vocab_size", tensor.shape[0])


def interleaved_to_halves(heads: int, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Row order of q and k where the file pairs neighbouring rows for the rotary embedding.

    Hugging Face pairs row i of a head with row i + rotary_dim/2; such a file stores the two next to each other. Rows from
    `rotary_dim` (default: `head_dim`) on stay where they are.

    Returns:
        int64 [heads * head_dim]: the stored row of each row in Hugging Face order.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    stored_rows = torch.arange(heads * head_dim).reshape(heads, head_dim)
    rotary = stored_rows[:, :rotary_dim].reshape(heads, rotary_dim // 2, 2).transpose(1, 2).reshape(heads, rotary_dim)
    return torch.cat([rotary, stored_rows[:, rotary_dim:]], dim=1).reshape(-1)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
