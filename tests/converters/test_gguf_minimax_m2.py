"""minimax-m2 against transformers."""

import pytest
import torch
from gguf_models import VOCAB, check_architecture, random_model, renamed, write_gguf
from safetensors.torch import load_file

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, EXPERTS = 2, 4
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.block_sparse_moe.gate.weight": "blk.{}.ffn_gate_inp.weight",
    "model.layers.{}.block_sparse_moe.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
}
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 16,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": 16,
    "expert_gating_func": 2,
    "rope.dimension_count": 8,
    "rope.freq_base": 5000000.0,
}
BIAS = "e_score_correction_bias"


def minimax():
    from transformers import MiniMaxM2Config

    config = MiniMaxM2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rotary_dim=8, num_local_experts=EXPERTS, num_experts_per_tok=2,
        max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = random_model(config)
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith(BIAS):
            buffer.copy_(torch.randint(-64, 65, buffer.shape, generator=generator) / 64)
    return model


def to_gguf(tensors):
    names = renamed(NAMES, LAYERS)
    for layer in range(LAYERS):
        for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            parts = [tensors.pop(f"{prefix}.{expert}.{theirs}.weight") for expert in range(EXPERTS)]
            yield f"blk.{layer}.ffn_{ours}_exps.weight", torch.stack(parts)
    for name, values in tensors.items():
        yield names[name], values


def written(tmp_path, changes=()):
    minimax().save_pretrained(tmp_path / "saved")
    tensors = to_gguf(load_file(tmp_path / "saved" / "model.safetensors"))
    return write_gguf(tmp_path / "model.gguf", "minimax-m2", METADATA | dict(changes), tensors)


def test_minimax_m2(tmp_path):
    model = minimax()
    assert any(buffer.any() for name, buffer in model.named_buffers() if name.endswith(BIAS))
    source = check_architecture(tmp_path, model, "minimax-m2", METADATA, to_gguf)
    assert source.config["architectures"] == ["MiniMaxM2ForCausalLM"]
    # What vLLM's class reads and transformers' has no use for.
    for key, value in {"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True}.items():
        assert source.config[key] == value


def test_w8a8(tmp_path):
    report = convert(written(tmp_path), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "w8a8.safetensors")
    moe = "model.layers.0.block_sparse_moe"
    assert f"{moe}.gate" in report.ignore
    assert weights[f"{moe}.{BIAS}"].dtype == torch.float32
    for part in ("w1", "w2", "w3"):
        assert weights[f"{moe}.experts.3.{part}.weight"].dtype == torch.int8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 1}, "expert_gating_func is 1, which is not supported; expected 2"),
        ({"expert_feed_forward_length": None}, "lacks the metadata .*expert_feed_forward_length"),
        ({"feed_forward_length": 32}, "feed_forward_length is 32, which is not supported; expected 16"),
        ({"expert_shared_count": 1}, "minimax-m2.expert_shared_count is not understood"),
    ],
    ids=str,
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ConversionError, match=message):
        GGUFSource(written(tmp_path, changes))
