"""A GGUF file seen as the Hugging Face checkpoint it was made from."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TensorInfo
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures import load_architecture
from w8a8_converters.gguf.dequant import check_type, dequantize_rows
from w8a8_converters.gguf.reader import GGUFFile, GGUFTensor
from w8a8_converters.gguf.tokenizer import build_tokenizer


class GGUFSource:
    """Tensors under their Hugging Face names and in its row order; config and tokenizer rebuilt from the metadata.

    `rows` gives fp32. Values are rounded to bf16, the dtype that the config names, by the converter.

    Raises:
        ConversionError: unknown architecture, tensor, type or tokenizer; a tensor missing or left over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        self.notes: list[str] = []
        self._file = GGUFFile(path)
        architecture = load_architecture(self._file)
        self._tensor_of: dict[str, GGUFTensor] = {}
        self._order_of: dict[str, Tensor] = {}
        self._plus_one: set[str] = set()
        unknown = []
        for tensor in self._file.tensors.values():
            check_type(tensor.name, tensor.type)
            if tensor.name in architecture.metadata_tensors:
                continue
            name = architecture.hugging_face_name(tensor.name)
            if name is None:
                unknown.append(tensor.name)
                continue
            self._tensor_of[name] = tensor
            if architecture.is_stored_plus_one(tensor.name):
                self._plus_one.add(name)
            order = architecture.row_order(tensor.name)
            if order is not None:
                if len(order) != tensor.shape[0]:
                    raise ConversionError(
                        f"{path}: tensor {tensor.name} has {tensor.shape[0]} rows, the head counts ask for {len(order)}"
                    )
                self._order_of[name] = order
        if unknown:
            raise ConversionError(
                f"{path}: {len(unknown)} tensors are unknown for architecture {architecture.name}: {', '.join(unknown[:5])}; "
                "converting without them would give another model"
            )
        missing = sorted(set(architecture.required_tensors()) - set(self._file.tensors))
        if missing:
            raise ConversionError(f"{path} lacks {len(missing)} tensors: {', '.join(missing[:5])}; download it again")

        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(name, tensor.shape, torch.float32, tensor.nbytes) for name, tensor in self._tensor_of.items()
        }
        tokenizer = build_tokenizer(self._file)
        self.config: dict[str, Any] = {
            **architecture.config(),
            **tokenizer.special_ids,
            "torch_dtype": "bfloat16",
        }
        self.side_files: dict[str, Path | bytes] = {
            "generation_config.json": _json({"_from_model_config": True, **tokenizer.generation_ids}),
            **{name: content.encode() for name, content in tokenizer.files.items()},
        }

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        values = self._stored_rows(name, start, stop)
        return values - 1 if name in self._plus_one else values

    def _stored_rows(self, name: str, start: int, stop: int) -> Tensor:
        tensor = self._tensor_of[name]
        packed = self._file.packed_rows(tensor)
        if len(tensor.shape) == 1:
            values = dequantize_rows(packed, tensor.type).reshape(-1)
            order = self._order_of.get(name)
            return (values if order is None else values[order])[start:stop]
        per_row = prod(tensor.shape[1:-1])
        if name in self._order_of:
            packed = packed[self._order_of[name][start:stop].numpy()]
        else:
            packed = packed[start * per_row : stop * per_row]
        return dequantize_rows(packed, tensor.type).reshape(stop - start, *tensor.shape[1:])


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
