"""A GGUF file seen as the Hugging Face checkpoint it was made from."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TensorInfo
from w8a8_converters.errors import BrokenFileError
from w8a8_converters.gguf.architectures import load_architecture
from w8a8_converters.gguf.architectures.recipe import Recipe
from w8a8_converters.gguf.checks import tensor_problems, type_problems
from w8a8_converters.gguf.dequant import known_finite, only_zeros
from w8a8_converters.gguf.hf_config import HFConfigFolder
from w8a8_converters.gguf.reader import GGUFFile, GGUFTensor
from w8a8_converters.gguf.tokenizer import build_tokenizer
from w8a8_converters.gguf.values import Stored, Values
from w8a8_converters.layers import is_linear, is_stacked_experts, is_token_embedding

RESIDUAL_WEIGHTS = (".o_proj.weight", ".down_proj.weight")


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
        problem = next(chain(tensor_problems(architecture, table), type_problems(self._file)), None)
        if problem is not None:
            raise problem
        self._values: dict[str, Values] = {}
        self._sources: dict[str, list[GGUFTensor]] = {}
        self._finite: dict[str, bool] = {}
        self._zero: dict[str, bool] = {}
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

    def stored_names(self, name: str) -> list[str]:
        """What the file calls the tensors that a tensor is made of."""
        return [tensor.name for tensor in self._sources[name]]

    def known_finite(self, name: str) -> bool:
        # What is done with a file's values keeps them finite.
        return all(map(self._is_known_finite, self._sources[name]))

    def refuse_zeros(self) -> None:
        """Reads the first values of embeddings and linear weights.

        What adds to the residual stream may be zero, as in layers put between others' (LLaMA Pro): that is a note.

        Raises:
            BrokenFileError: another one is zero as a whole, as where a download that was cut is filled up.
        """
        for name, info in self.tensors.items():
            ndim = len(info.shape)
            if not (is_linear(name, ndim) or is_token_embedding(name, ndim) or is_stacked_experts(name, ndim)):
                continue
            for tensor in filter(self._is_zero, self._sources[name]):
                if not name.endswith(RESIDUAL_WEIGHTS):
                    raise BrokenFileError(
                        f"tensor {tensor.name} of {self.path} holds nothing but zeros, expected weights: a download was cut, "
                        "or never filled the space that it had reserved; download it again"
                    )
                self.notes.append(f"tensor {tensor.name} holds nothing but zeros: its layer adds nothing")

    def _is_zero(self, tensor: GGUFTensor) -> bool:
        if tensor.name not in self._zero:  # experts ask for the same stack
            self._zero[tensor.name] = only_zeros(self._file.packed_rows(tensor), tensor.type)
        return self._zero[tensor.name]

    def _is_known_finite(self, tensor: GGUFTensor) -> bool:
        if tensor.name not in self._finite:  # experts ask for the same stack
            self._finite[tensor.name] = known_finite(self._file.packed_rows(tensor), tensor.type)
        return self._finite[tensor.name]

    def _add(self, name: str, recipe: Recipe) -> None:
        if any(source not in self._file.tensors for source in recipe.sources):
            return
        tensors = [self._file.tensors[source] for source in recipe.sources]
        shapes = recipe.sources.values()
        parts = [Stored(self._file.packed_rows(t), t.type, shape) for t, shape in zip(tensors, shapes, strict=True)]
        outputs = recipe.outputs(name, parts)
        nbytes = sum(tensor.nbytes for tensor in tensors) // len(outputs)
        self._values |= outputs
        self._sources |= dict.fromkeys(outputs, tensors)
        for output, values in outputs.items():
            self.tensors[output] = TensorInfo(output, values.shape, torch.float32, nbytes, keeps_dtype=recipe.keeps_fp32)


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
