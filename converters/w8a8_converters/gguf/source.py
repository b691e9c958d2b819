"""A GGUF file seen as the Hugging Face checkpoint it was made from."""

import json
from collections.abc import Iterable
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TensorInfo
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures import load_architecture
from w8a8_converters.gguf.architectures.recipe import Recipe
from w8a8_converters.gguf.dequant import check_type
from w8a8_converters.gguf.hf_config import HFConfigFolder
from w8a8_converters.gguf.reader import GGUFFile, GGUFTensor
from w8a8_converters.gguf.tokenizer import build_tokenizer
from w8a8_converters.gguf.values import Stored, Values


class GGUFSource:
    """Tensors under their Hugging Face names and in its order of rows; config and tokenizer rebuilt from the metadata.

    `rows` gives fp32. Values are rounded to bf16, the dtype that the config names, by the converter.

    Args:
        path: the file, or any part of a split one.
        hf_config: a folder whose config.json, generation_config.json and tokenizer files replace those of the metadata.

    Raises:
        ConversionError: unknown architecture, metadata, tensor, type or tokenizer; a tensor missing, left over, or of another
            shape than the metadata say; a config.json that the weights do not fit.
    """

    def __init__(self, path: Path, hf_config: Path | None = None) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self.files = self._file.files
        architecture = load_architecture(self._file)
        self.notes = architecture.notes
        table = architecture.table()
        config = architecture.config()
        architecture.check_keys()
        self._check_names(table, architecture.setting_tensors)
        self._values: dict[str, Values] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, recipe in table.items():
            self._add(name, recipe)

        # Named even where the file has none: transformers would take the class's own, which may be beyond the vocabulary.
        special_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        self.config: dict[str, Any] = {**config, **special_ids, "torch_dtype": "bfloat16"}
        self.side_files: dict[str, Path | bytes] = {}
        folder = None if hf_config is None else HFConfigFolder(hf_config)
        if folder is None or not folder.has_tokenizer:
            tokenizer = build_tokenizer(self._file)
            self.config |= tokenizer.special_ids
            self.side_files |= {
                "generation_config.json": _json({"_from_model_config": True, **tokenizer.generation_ids}),
                **{name: content.encode() for name, content in tokenizer.files.items()},
            }
        if folder is not None:
            self.config = folder.config_for(path, self.config)
            self.side_files |= folder.side_files
            taken = ", ".join(["config.json", *folder.side_files])
            self.notes.append(f"taken from {hf_config} instead of the metadata: {taken}")

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._values[name].rows(slice(start, stop))

    def _check_names(self, table: dict[str, Recipe], settings: Iterable[str]) -> None:
        present = set(self._file.tensors)
        used = {source for recipe in table.values() for source in recipe.sources}
        unknown = sorted(present - used - set(settings))
        architecture = self._file.required("general.architecture")
        if unknown:
            raise ConversionError(
                f"{self.path}: {len(unknown)} tensors are unknown for architecture {architecture}: {', '.join(unknown[:5])}; "
                "converting without them would give another model"
            )
        required = (r for r in table.values() if not (r.is_optional and present.isdisjoint(r.sources)))
        missing = sorted({source for recipe in required for source in recipe.sources} - present)
        if missing:
            raise ConversionError(f"{self.path} lacks {len(missing)} tensors: {', '.join(missing[:5])}; download it again")

    def _add(self, name: str, recipe: Recipe) -> None:
        if any(source not in self._file.tensors for source in recipe.sources):
            return
        parts = [self._stored(self._file.tensors[source], shape) for source, shape in recipe.sources.items()]
        outputs = recipe.outputs(name, parts)
        nbytes = sum(self._file.tensors[source].nbytes for source in recipe.sources) // len(outputs)
        self._values |= outputs
        for output, values in outputs.items():
            self.tensors[output] = TensorInfo(output, values.shape, torch.float32, nbytes, keeps_dtype=recipe.keeps_fp32)

    def _stored(self, tensor: GGUFTensor, shape: tuple[int, ...]) -> Stored:
        check_type(tensor.name, tensor.type)
        if _significant(tensor.shape) != _significant(shape):
            raise ConversionError(
                f"{self.path}: tensor {tensor.name} has shape {list(tensor.shape)}, the metadata ask for {list(shape)}"
            )
        return Stored(self._file.packed_rows(tensor), tensor.type, shape)


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones, which files have or have not: ggml takes [1, 32] and [32] for the same."""
    return tuple(dropwhile(lambda size: size == 1, shape))


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
