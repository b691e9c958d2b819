"""Shapes of the int8 linear layers that vLLM builds from a checkpoint, told from headers and config.json. Needs no vLLM."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w8a8_converters.checkpoint import SafetensorsFile, TensorInfo
from w8a8_converters.layers import is_linear, is_lm_head, is_quantized_by_default, is_token_embedding, module_of
from w8a8_converters.rules import fused_groups
from w8a8_kernels.names import is_row_parallel

# Every rank holds these whole; others are cut along K where they are row-parallel, else along N.
REPLICATED = {"fused_qkv_a_proj", "q_a_proj", "kv_a_proj_with_mqa"}

# vLLM's DEFAULT_VOCAB_PADDING_SIZE: an lm_head has so many rows, or a multiple.
VOCAB_PADDING = 64

# Other programs' weights, or none of the model's own.
_NOT_THE_MODEL = ("consolidated", "adapter_model")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class LayerShape:
    """Layers of one shape on one rank: their names without the path, weight [N, K], and how many there are."""

    names: tuple[str, ...]
    N: int
    K: int
    count: int


def linear_shapes(folder: Path, tp: int = 1, lm_head: bool = False) -> list[LayerShape]:
    """Shapes of a checkpoint's quantized linear layers, fused as vLLM fuses them, on one of `tp` tensor-parallel ranks.

    Args:
        folder: config.json and safetensors files, unquantized or int8. Of these only the headers are read.
        tp: degree of tensor parallelism.
        lm_head: take the lm_head, too, where it is not int8 in the checkpoint (VLLM_W8A8_LM_HEAD), its own or a tied one.

    Returns:
        every (N, K) once, in the order of the checkpoint. Experts are left out: they are not quantized.

    Raises:
        ValueError: the folder is no such checkpoint, `tp` does not divide a layer, or there is no lm_head.
    """
    if tp < 1:
        raise ValueError(f"got tensor parallelism {tp}, expected 1 or more")
    config = _read_config(folder)
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        raise ValueError(f"tensor parallelism {tp} does not divide the model's {heads} heads: take a degree that does")
    tensors = _tensors(folder)
    weights = _quantized_weights(tensors)
    if not weights:
        raise ValueError(
            f"{folder} has no linear layers that are quantized: expected a language model in bf16, fp16, fp32 or int8"
        )
    if lm_head and not any(map(is_lm_head, weights)):
        weights["lm_head"] = _lm_head(tensors, folder)
    found: dict[tuple[int, int], dict[str, int]] = {}
    for name, parts in _vllm_layers(weights):
        last = name.rpartition(".")[2]
        N, K = _on_one_rank(name, {part: weights[_sibling(name, part)].shape for part in parts}, config, tp)
        counts = found.setdefault((N, K), {})
        counts[last] = counts.get(last, 0) + 1
    return [LayerShape(tuple(counts), N, K, sum(counts.values())) for (N, K), counts in found.items()]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a Hugging Face model, downloaded")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    return config.get("text_config") or config


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    files = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(_NOT_THE_MODEL)]
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors files: give the folder of a Hugging Face model, downloaded")
    return {name: info for path in files for name, info in SafetensorsFile(path).tensors.items()}


def _quantized_weights(tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """By module. An int8 checkpoint says itself which; from another one the converter's rule takes them."""
    experts = {name for name in tensors if "experts" in name.split(".")}
    linear = {name: info for name, info in tensors.items() if name not in experts and is_linear(name, len(info.shape))}
    int8 = {name: info for name, info in linear.items() if info.dtype == torch.int8}
    if not int8:
        linear = {name: info for name, info in linear.items() if info.dtype in _FLOATS}
        int8 = {name: info for name, info in linear.items() if is_quantized_by_default(name, len(info.shape))}
    return {module_of(name): info for name, info in int8.items()}


def _lm_head(tensors: dict[str, TensorInfo], folder: Path) -> TensorInfo:
    """The lm_head's weight, or that of the embedding to which it is tied."""
    own = [info for name, info in tensors.items() if name.endswith(".weight") and is_lm_head(module_of(name))]
    shared = [info for name, info in tensors.items() if is_token_embedding(name, len(info.shape))]
    if not own + shared:
        raise ValueError(f"{folder} has no lm_head, nor an embedding that it could be tied to: leave out --lm-head")
    return (own + shared)[0]


def _vllm_layers(modules: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Layers as vLLM names them, each with the last components of its parts."""
    modules = list(modules)
    groups = fused_groups(modules)
    fused_as = {_sibling(group, part): group for group, parts in groups.items() for part in parts}
    layers = {}
    for module in modules:
        group = fused_as.get(module, module)
        layers[group] = groups.get(group, (module.rpartition(".")[2],))
    return list(layers.items())


def _on_one_rank(name: str, parts: dict[str, tuple[int, ...]], config: dict[str, Any], tp: int) -> tuple[int, int]:
    """(N, K) of the layer on one rank."""
    last = name.rpartition(".")[2]
    K = next(iter(parts.values()))[1]
    if is_lm_head(name):
        ((rows, _),) = parts.values()
        return _divided(name, "N", -(-rows // VOCAB_PADDING) * VOCAB_PADDING, tp), K
    if last in REPLICATED:
        return sum(rows for rows, _ in parts.values()), K
    if is_row_parallel(last):
        return next(iter(parts.values()))[0], _divided(name, "K", K, tp)
    N = 0
    for part, (rows, _) in parts.items():
        kv_heads = config.get("num_key_value_heads") or tp
        if part in ("k_proj", "v_proj") and kv_heads < tp:
            # More ranks than heads of keys: each has one head, and some the same.
            N += rows // kv_heads
        else:
            N += _divided(name, f"N of {part}", rows, tp)
    return N, K


def _divided(name: str, what: str, size: int, tp: int) -> int:
    if size % tp:
        raise ValueError(f"tensor parallelism {tp} does not divide {what} of {name}, {size}: take a degree that does")
    return size // tp


def _sibling(name: str, last: str) -> str:
    parent = name.rpartition(".")[0]
    return f"{parent}.{last}" if parent else last
