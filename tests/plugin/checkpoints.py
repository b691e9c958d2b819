"""Quantization configs as checkpoints carry them, and folders that hold just a config.json."""

import copy
import json
from pathlib import Path

# As the converter writes it with --hadamard 0.
NATIVE = {"quant_method": "w8a8", "weight_dtype": "int8", "scale_dtype": "fp32", "hadamard": 0, "ignore": ["lm_head"]}

# As llm-compressor writes it.
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "output_activations": None,
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
                "group_size": None,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
                "group_size": None,
                "actorder": None,
                "block_structure": None,
                "observer": None,
                "observer_kwargs": {},
            },
        }
    },
}

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def changed(config: dict, path: str, value: object) -> dict:
    """A copy of `config` with the entry at a dotted `path` set."""
    result = copy.deepcopy(config)
    *parents, last = path.split(".")
    node = result
    for key in parents:
        node = node[key]
    node[last] = value
    return result


def model_folder(folder: Path, quantization_config: dict | None) -> Path:
    """A folder with the config.json of a tiny Llama."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY_LLAMA | ({} if quantization_config is None else {"quantization_config": quantization_config})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
