"""The output formats as data: file names, header metadata, and the quantization_config of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """An output format.

    Attributes:
        stem: beginning of the weight files' names.
        metadata_format: the `format` entry of their headers.
        quantized: whether it holds int8 weights.
    """

    name: str
    stem: str
    metadata_format: str
    quantized: bool


# transformers skips a quant_method that it does not know with a warning and would cast the int8 codes to weights. It looks
# for files called model*.safetensors only, while vLLM takes every *.safetensors: under another name they cannot load by
# accident. Loaders that read the header's format (accelerate, transformers 4) refuse it as well.
FORMATS = {
    fmt.name: fmt
    for fmt in (
        Format("w8a8", stem="w8a8", metadata_format="w8a8", quantized=True),
        Format("compressed-tensors", stem="model", metadata_format="pt", quantized=True),
        Format("bf16", stem="model", metadata_format="pt", quantized=False),
    )
}


def quantization_config(
    fmt: Format, ignore: Sequence[str], hadamard: int = 0, hadamard_blocks: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The `quantization_config` of config.json.

    Args:
        fmt: a quantized format.
        ignore: exact names of the Linear modules left unquantized.
        hadamard: the block of every layer, or where that does not divide its K, the largest smaller one that does.
        hadamard_blocks: the same for the layers that are named here, by last component or full name. So a reader needs no
            rule of ours, nor to know which layers are row-parallel.
    """
    if fmt.name == "w8a8":
        return {
            "quant_method": "w8a8",
            "weight_dtype": "int8",
            "scale_dtype": "fp32",
            "hadamard": hadamard,
            **({"hadamard_blocks": dict(hadamard_blocks)} if hadamard_blocks else {}),
            "ignore": list(ignore),
        }
    if fmt.name == "compressed-tensors":
        int8 = {"num_bits": 8, "type": "int", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**int8, "strategy": "channel", "dynamic": False},
                    "input_activations": {**int8, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": list(ignore),
        }
    raise ValueError(f"format {fmt.name} is not quantized")


def shard_names(fmt: Format, count: int) -> list[str]:
    """File names of `count` shards."""
    if count == 1:
        return [f"{fmt.stem}.safetensors"]
    return [f"{fmt.stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
