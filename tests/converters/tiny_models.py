"""Random models of transformers, and checkpoints in fp32 made from them: for tests of what keeps a model's function."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from w8a8_converters.folding.source import FoldedSource

VOCAB = 61
# (hidden, head_dim, query heads, key-value heads): sizes that are no power of two, and one key-value head for three.
SIZES = [(96, 12, 4, 2), (80, 20, 4, 2), (144, 16, 3, 1)]
MODELS = {
    "llama": {"tie_word_embeddings": False},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 8},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}


def make_model(folder: Path, name: str, sizes: tuple[int, int, int, int] = SIZES[0]) -> torch.nn.Module:
    """Writes a random fp32 model, a key of MODELS, to `folder` and returns it."""
    transformers = pytest.importorskip("transformers")
    hidden, head_dim, heads, kv_heads = sizes
    config = transformers.AutoConfig.for_model(
        name.partition("-")[0],
        **{
            "hidden_size": hidden,
            "head_dim": head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **MODELS[name],
        },
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms far from 1 and biases far from 0: what is not folded shows.
            middle = 1.0 if parameter_name.endswith("norm.weight") and "gemma" not in name else 0.0
            parameter.copy_(middle + noise * (0.2 if parameter.ndim > 1 else 0.5))
    model.save_pretrained(folder)
    return model


def tokens(count: int = 24) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, count), generator=torch.Generator().manual_seed(1))


def logits(model: torch.nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    with torch.inference_mode():
        return model(tokens() if ids is None else ids).logits


def folded_logits(source: FoldedSource, folder: Path) -> torch.Tensor:
    """Logits of the folded weights in fp32, loaded by transformers from a checkpoint that the library wrote."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    state = {name: source.whole(name).contiguous() for name in source.tensors}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.AutoConfig.for_model(**source.config).save_pretrained(folder)
    return logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())
