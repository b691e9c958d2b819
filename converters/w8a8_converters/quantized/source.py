"""A quantized Hugging Face checkpoint seen as the unquantized model that it stands for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import DTYPE_NAMES, W8A8_ALREADY, HuggingFaceSource, TensorInfo, read_json, within
from w8a8_converters.errors import AlreadyW8A8Error, BrokenFileError, ConversionError
from w8a8_converters.layers import is_quantized_by_default, module_of
from w8a8_converters.quantized.awq import Awq
from w8a8_converters.quantized.base import PackedWeight, QuantizedFormat
from w8a8_converters.quantized.compressed_tensors import CompressedTensors
from w8a8_converters.quantized.fp8 import Fp8
from w8a8_converters.quantized.gptq import Gptq
from w8a8_converters.rules import expert_groups, fused_groups

METHODS: dict[str, Callable[[Mapping[str, Any]], QuantizedFormat]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
}
_CONFIG_KEYS = ("quantization_config", "compression_config")
_SETTINGS_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Scales of activations and of the KV cache, and zero points of weights that have none: int8 has no use for them.
_DROPPED = {
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "k_scale",
    "kv_scale",
    "output_scale",
    "output_zero_point",
    "prob_scale",
    "q_scale",
    "v_scale",
    "weight_zero_point",
}
# What formats call their tensors: beside a weight that is not packed they mean that something is not understood.
_PARTS = {
    "g_idx",
    "input_global_scale",
    "qweight",
    "qzeros",
    "scales",
    "weight_g_idx",
    "weight_global_scale",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_shape",
}


class QuantizedSource:
    """A folder with quantized weights, as a `Source` of unquantized ones.

    `rows` gives fp32 for what was quantized, computed block by block; other tensors stay as they are.

    Attributes:
        origin: of the quantization: `method`, `description`, `weights` (how many), `dropped` (names of tensors without a use
            here), `quantization_config`.
        kept: projections that the source left unquantized, and that hence stay so.

    Raises:
        ConversionError: the folder is not quantized, or by a method that cannot be dequantized.
        BrokenFileError: as of `HuggingFaceSource`; a tensor is missing, unknown, or of another dtype or shape than the
            settings ask for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored = HuggingFaceSource(path, quantized=True)
        self.files = self._stored.files
        settings = _settings(self._stored)
        method = settings["quant_method"]
        self.config = _without_quantization(self._stored.config)
        self.side_files = {name: file for name, file in self._stored.side_files.items() if name not in _SETTINGS_FILES}
        self._packed: dict[str, PackedWeight] = {}
        self.tensors: dict[str, TensorInfo] = {}
        dropped: list[str] = []
        try:
            layout = _format(method, settings)
            self._sort_out(layout, dropped)
        except ConversionError as error:
            raise type(error)(f"{path}: {error}") from None
        if not self._packed:
            raise BrokenFileError(
                f"{path} is quantized by {method}, its config says, but no tensor is: the two do not belong together"
            )
        self.kept = self._left_unquantized()
        self.notes = [*self._stored.notes, f"the source was quantized ({layout.description}): what that changed stays so"]
        if dropped:
            self.notes.append(f"{len(dropped)} tensors with scales of activations are not carried over")
        self.origin: dict[str, Any] = {
            "method": method,
            "description": layout.description,
            "weights": len(self._packed),
            "dropped": dropped,
            "quantization_config": settings,
        }

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._packed:
            return self._stored.rows(name, start, stop)
        try:
            return self._packed[name].rows(self._stored.rows, start, stop)
        except ConversionError as error:
            raise type(error)(f"{self.path}: {error}") from None

    def known_finite(self, name: str) -> bool:
        return False

    def _sort_out(self, layout: QuantizedFormat, dropped: list[str]) -> None:
        """Every tensor of the folder becomes part of a weight, stays as it is, is dropped, or is refused."""
        modules: dict[str, dict[str, TensorInfo]] = {}
        for info in self._stored.tensors.values():
            modules.setdefault(module_of(info.name), {})[info.name.rpartition(".")[2]] = info
        dtype = _model_dtype(self._stored)
        for module, own in modules.items():
            packed = layout.weight(module, own, self._stored.rows)
            used: set[str] = set()
            if packed is not None:
                name = f"{module}.weight"
                nbytes = sum(info.nbytes for info in packed.parts)
                self._packed[name] = packed
                self.tensors[name] = TensorInfo(name, packed.shape, dtype, nbytes, computed=True)
                used = {info.name for info in packed.parts}
            for last, info in own.items():
                if info.name in used:
                    continue
                if last in _DROPPED:
                    dropped.append(info.name)
                elif last in _PARTS or (packed is not None and last != "bias") or _is_one_byte(info):
                    raise BrokenFileError(
                        f"tensor {info.name} ({DTYPE_NAMES[info.dtype]}, shape {list(info.shape)}) belongs to no weight as "
                        f"{layout.description} stores it: the config or the tensors are of another checkpoint, or of a layout "
                        "that is not supported"
                    )
                else:
                    self.tensors[info.name] = info

    def _left_unquantized(self) -> frozenset[str]:
        names = [name for name, info in self.tensors.items() if is_quantized_by_default(name, len(info.shape))]
        modules = [module_of(name) for name in names]
        plain = {module_of(name) for name in names if name not in self._packed}
        groups = list(expert_groups(modules).values())
        for fused, parts in fused_groups(modules).items():
            prefix = fused.rpartition(".")[0]
            groups.append([f"{prefix}.{part}" for part in parts])
        for group in groups:
            if not plain.issuperset(group):
                plain -= set(group)  # vLLM runs them as one
        return frozenset(plain)


def _settings(stored: HuggingFaceSource) -> dict[str, Any]:
    """The quantization_config, or the like, of the folder."""
    found: dict[str, Any] = {}
    for section in (stored.config, *(value for value in stored.config.values() if isinstance(value, dict))):
        for key in _CONFIG_KEYS:
            if section.get(key):
                found = found or section[key]
    if found and not isinstance(found, dict):
        raise ConversionError(f"{stored.path}: quantization_config must be an object, got {found!r}")
    method = found.get("quant_method") or ("compressed-tensors" if "config_groups" in found else None)
    gptq, awq, other = (_read_settings(stored.path / name) for name in _SETTINGS_FILES)
    if gptq and method in (None, "gptq"):
        # Only this file of older ones has checkpoint_format.
        return {**gptq, **found, "quant_method": "gptq"}
    if awq and not found and "w_bit" in awq:
        return {**awq, "quant_method": awq.get("quant_method", "awq")}
    if awq and not found:
        return {**awq, "quant_method": awq.get("quant_method", "w8a8" if "weight_dtype" in awq else "an unknown method")}
    if other and not found:
        return {**other, "quant_method": "modelopt"}
    if not found:
        if any(_is_one_byte(info) for info in stored.tensors.values()):
            raise ConversionError(f"{stored.path} has quantized tensors and no quantization_config that says how to read them")
        raise ConversionError(f"{stored.path} is not quantized: leave out --from-quantized")
    return {**found, "quant_method": str(method or "an unknown method")}


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_json(within(path.parent, path), unique=False)
    if not isinstance(content, dict):
        raise BrokenFileError(f"{path} must hold an object, got a {type(content).__name__}; copy it again")
    return content


def _format(method: str, settings: Mapping[str, Any]) -> QuantizedFormat:
    if method == "w8a8":
        raise AlreadyW8A8Error(W8A8_ALREADY)
    if method not in METHODS:
        raise ConversionError(
            f"it is quantized by {method}, which is not dequantized here, only {', '.join(METHODS)}: convert from the "
            "original bf16, fp16 or fp32 checkpoint"
        )
    return METHODS[method](settings)


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    def stripped(section: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in section.items() if key not in _CONFIG_KEYS}

    return {key: stripped(value) if isinstance(value, dict) else value for key, value in stripped(config).items()}


def _model_dtype(stored: HuggingFaceSource) -> torch.dtype:
    """The 16-bit dtype that the model ran in: what the config says, else that of most tensors, else bf16."""
    text = stored.config.get("text_config")
    for section in (stored.config, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            if str(section.get(key)) in _DTYPES:
                return _DTYPES[section[key]]
    dtypes = [info.dtype for info in stored.tensors.values()]
    return max(_DTYPES.values(), key=dtypes.count)


def _is_one_byte(info: TensorInfo) -> bool:
    return info.dtype.itemsize == 1 and info.dtype != torch.bool
