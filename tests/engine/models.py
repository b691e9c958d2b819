"""Tiny models that the tests build."""

from pathlib import Path

RESIDUAL = ("o_proj.weight", "down_proj.weight")

# A layer of Qwen3-8B.
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def random_qwen3(out: Path, *, residual_gain: float = 1.0, tied: bool = False, seed: int = 0, **sizes) -> Path:
    """Write a random Qwen3 whose weights keep activations of ordinary size and whose predictions are far from uniform.

    Args:
        out: folder to make.
        residual_gain: scale of what o_proj and down_proj add to the residual stream.
        tied: whether lm_head is tied to the embedding.
        seed: of the weights.
        sizes: arguments of `Qwen3Config`.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _write(out, Qwen3ForCausalLM, Qwen3Config, residual_gain, sizes, tied, seed)


def random_qwen3_moe(out: Path, *, seed: int = 0, **sizes) -> Path:
    """`random_qwen3` with mixture-of-experts layers; `sizes` are arguments of `Qwen3MoeConfig`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return _write(out, Qwen3MoeForCausalLM, Qwen3MoeConfig, 1.0, sizes, False, seed)


def random_gemma3(out: Path, *, seed: int = 0, **sizes) -> Path:
    """`random_qwen3` as a Gemma 3 without its vision tower; `sizes` are arguments of `Gemma3TextConfig`."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return _write(out, Gemma3ForCausalLM, Gemma3TextConfig, 1.0, sizes, True, seed)


def random_lora(out: Path, model: Path, *, rank: int = 8, zero: bool = False) -> Path:
    """Write an adapter of all linear layers of a dense model of `random_qwen3`, strong enough to change predictions.

    Args:
        out: folder to make.
        model: folder of the model.
        rank: of the two factors of each layer.
        zero: the second factors are zero, as before training, so that the adapter changes nothing.
    """
    import json

    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(2)
    tensors, targets = {}, set()
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            N, K = weight.shape
            first = torch.randn(rank, K, generator=generator) / K**0.5
            second = torch.zeros(N, rank) if zero else 0.3 * torch.randn(N, rank, generator=generator)
            tensors[f"base_model.model.{layer}.lora_A.weight"] = first.to(torch.bfloat16)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = second.to(torch.bfloat16)
            targets.add(layer.rpartition(".")[2])
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(targets), "bias": "none"}
    out.mkdir(parents=True)
    save_file(tensors, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))
    return out


def _write(out: Path, model_class: type, config_class: type, residual_gain: float, sizes: dict, tied: bool, seed: int) -> Path:
    import torch

    torch.manual_seed(seed)
    model = model_class(config_class(max_position_embeddings=1024, tie_word_embeddings=tied, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                gain = 4.0 if "lm_head" in name else residual_gain if name.endswith(RESIDUAL) else 1.0
                parameter.normal_(std=gain / parameter.shape[-1] ** 0.5)
        hidden = model.config.hidden_size
        model.model.embed_tokens.weight.normal_(std=4.0 / hidden**0.5 if tied else 1.0)  # tied, it is the lm_head
    model.to(torch.bfloat16).save_pretrained(out)
    return out
