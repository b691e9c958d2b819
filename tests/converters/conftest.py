"""Tiny checkpoints, written with the libraries themselves and never with the code under test."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

HIDDEN, INNER, KV, VOCAB, LAYERS = 16, 24, 8, 32, 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama_tensors(dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": random(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": random(HIDDEN),
            f"{layer}.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": random(KV, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": random(KV, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    if not tied:
        tensors["lm_head.weight"] = random(VOCAB, HIDDEN)
    return tensors


def write_checkpoint(folder: Path, shards: list[dict[str, torch.Tensor]], config: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny Llama checkpoint to `tmp_path/src` and returns the folder.

    Options: dtype; tied; shards (how many files); tensors (merged over the model's, None removes one); config (merged).
    """

    def write(
        dtype: torch.dtype = torch.bfloat16,
        tied: bool = False,
        shards: int = 1,
        tensors: dict[str, torch.Tensor | None] | None = None,
        config: dict | None = None,
    ) -> Path:
        merged = {**llama_tensors(dtype, tied), **(tensors or {})}
        items = [(name, tensor) for name, tensor in merged.items() if tensor is not None]
        parts = [dict(items[i::shards]) for i in range(shards)]
        folder = tmp_path / "src"
        write_checkpoint(folder, parts, {**CONFIG, "tie_word_embeddings": tied, **(config or {})})
        return folder

    return write
