"""Tiny models that the tests build."""

from pathlib import Path

RESIDUAL = ("o_proj.weight", "down_proj.weight")


def random_qwen3(out: Path, *, residual_gain: float = 1.0, **sizes) -> Path:
    """Write a random Qwen3 whose weights keep activations of ordinary size and whose predictions are far from uniform.

    Args:
        out: folder to make.
        residual_gain: scale of what o_proj and down_proj add to the residual stream.
        sizes: arguments of `Qwen3Config`.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _write(out, Qwen3ForCausalLM, Qwen3Config, residual_gain, sizes)


def random_qwen3_moe(out: Path, **sizes) -> Path:
    """`random_qwen3` with mixture-of-experts layers; `sizes` are arguments of `Qwen3MoeConfig`."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return _write(out, Qwen3MoeForCausalLM, Qwen3MoeConfig, 1.0, sizes)


def _write(out: Path, model_class: type, config_class: type, residual_gain: float, sizes: dict) -> Path:
    import torch

    torch.manual_seed(0)
    model = model_class(config_class(max_position_embeddings=1024, tie_word_embeddings=False, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                gain = 4.0 if "lm_head" in name else residual_gain if name.endswith(RESIDUAL) else 1.0
                parameter.normal_(std=gain / parameter.shape[-1] ** 0.5)
        model.model.embed_tokens.weight.normal_(std=1.0)
    model.to(torch.bfloat16).save_pretrained(out)
    return out
