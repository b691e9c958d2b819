"""Tiny models that the tests build."""

from pathlib import Path


def random_qwen3(out: Path, **sizes) -> Path:
    """Write a random Qwen3 whose weights keep activations of ordinary size and whose predictions are far from uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(max_position_embeddings=1024, tie_word_embeddings=False, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                gain = 4.0 if "lm_head" in name else 1.0
                parameter.normal_(std=gain / parameter.shape[1] ** 0.5)
        model.model.embed_tokens.weight.normal_(std=1.0)
    model.to(torch.bfloat16).save_pretrained(out)
    return out
