"""What the architecture files share: typed metadata, head orders, the tables of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf import metadata
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.dequant import check_type, dequantize_rows
from w8a8_converters.gguf.metadata import ANY_NUMBER, EPSILON, POSITIVE, Numbers, shown
from w8a8_converters.gguf.reader import GGUFFile

Table = Mapping[str, Recipe]


class Architecture(ABC):
    """How the tensors and the metadata of one GGUF architecture map to a Hugging Face model.

    An architecture file has a class `Model` that fills these and gives `layer_table` and `config`.

    Class attributes:
        setting_tensors: tensors that hold settings, read by `config`: the only ones that may be in no table.
        ignored_keys: metadata under the architecture's prefix that change no result.

    Attributes:
        largest_dimension: of the file's tensors.
        notes: what the user should know about the model, for the report.
    """

    setting_tensors: ClassVar[Collection[str]] = ()
    ignored_keys: ClassVar[Collection[str]] = ()

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name: str = metadata.text(file, "general.architecture")
        self.notes: list[str] = []
        self._read_keys: set[str] = set()
        self.largest_dimension = max((size for tensor in file.tensors.values() for size in tensor.shape), default=0)
        self.hidden = self.size("embedding_length")
        self.n_layers = self.integer("block_count")
        self.bound("block_count", self.n_layers, len(file.tensors), "the number of tensors in the file")
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
        return self.size("feed_forward_length")

    @property
    def heads(self) -> int:
        return self.size("attention.head_count")

    @property
    def kv_heads(self) -> int:
        count = self.size("attention.head_count_kv", self.heads)
        if self.heads % count:
            raise ConversionError(
                f"{self.file.path}: {self.name}.attention.head_count {self.heads} must be a multiple of "
                f"{self.name}.attention.head_count_kv {count}"
            )
        return count

    @property
    def head_dim(self) -> int:
        """Of q, k and v; those of v must be as large."""
        has_own = self.value("attention.key_length") is not None
        size = self.size("attention.key_length") if has_own else self.divided_head_dim
        if size % 2:
            raise ConversionError(f"{self.file.path}: the size of a head must be even, got {size}, {self._head_dim_source}")
        most = self.largest_dimension // size
        self.bound(
            "attention.head_count", self.heads, most, f"the largest dimension of the file's tensors, in heads of {size}"
        )
        self.expect("attention.value_length", size)
        return size

    @property
    def divided_head_dim(self) -> int:
        """The size of a head where the model has none of its own."""
        if self.hidden % self.heads:
            raise ConversionError(
                f"{self.file.path}: {self.name}.embedding_length {self.hidden} must be a multiple of "
                f"{self.name}.attention.head_count {self.heads}"
            )
        return self.hidden // self.heads

    @property
    def rotary_dim(self) -> int:
        """How many values of each head the rotary embedding turns."""
        size = self.size("rope.dimension_count", self.head_dim)
        if size % 2 or size > self.head_dim:
            raise ConversionError(
                f"{self.file.path}: {self.name}.rope.dimension_count must be even and at most the {self.head_dim} of a head, "
                f"got {size}"
            )
        return size

    @property
    def rope_theta(self) -> float:
        return self.number("rope.freq_base", 10000.0, POSITIVE)

    @property
    def rms_norm_eps(self) -> float:
        return self.number("attention.layer_norm_rms_epsilon", numbers=EPSILON)

    @property
    def is_tied(self) -> bool:
        """Whether the lm_head is the embedding: where the file has no `output.weight`."""
        return "output.weight" not in self.file.tensors

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's prefix. What no architecture code asks for is refused by `check_keys`."""
        return self.file.metadata.get(self._read(key), default)

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer under the architecture's prefix; required where there is no default."""
        return metadata.integer(self.file, self._read(key), default, minimum)

    def size(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """The same, of which some tensor has so many rows or values, or a multiple: no more than the file's tensors allow."""
        value = self.integer(key, default, minimum)
        self.bound(key, value, self.largest_dimension, "the largest dimension of the file's tensors")
        return value

    def number(self, key: str, default: float | None = None, numbers: Numbers = ANY_NUMBER) -> float:
        """An fp32 number under the architecture's prefix, as the shortest decimal that means the same fp32 value."""
        return metadata.number(self.file, self._read(key), default, numbers)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean under the architecture's prefix."""
        return metadata.flag(self.file, self._read(key), default)

    def per_layer(self, key: str) -> list[Any]:
        """An array with an entry for each layer."""
        value = self.value(key)
        if not isinstance(value, list) or len(value) != self.n_layers:
            count = f"{len(value)} entries" if isinstance(value, list) else shown(value)
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

    def expect(self, key: str, expected: Any, because: str = "") -> None:
        """Refuses a file whose metadata has another value than the only one that the model can have; `because` may say why."""
        value = self.value(key, expected)
        if value != expected:
            raise ConversionError(
                f"{self.file.path}: {self.name}.{key} is {shown(value)}, which is not supported; expected {expected}{because}"
            )

    def bound(self, key: str, value: int, most: int, what: str) -> None:
        """Refuses a number that would have tables of a size made that no tensor of the file has."""
        if value > most:
            raise ConversionError(f"{self.file.path}: metadata {self.name}.{key} is {value}, expected {most} at most: {what}")

    def expect_whole_rotary(self) -> None:
        """Refuses files whose rotary embedding covers a part of each head."""
        self.expect("rope.dimension_count", self.head_dim, f", the size of a head, {self._head_dim_source}")

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

    def _read(self, key: str) -> str:
        """The key's full name, which counts as read from here on."""
        self._read_keys.add(key)
        return f"{self.name}.{key}"

    @property
    def _head_dim_source(self) -> str:
        if self.value("attention.key_length") is not None:
            return f"which is {self.name}.attention.key_length"
        return f"which is {self.name}.embedding_length {self.hidden} / {self.name}.attention.head_count {self.heads}"

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
