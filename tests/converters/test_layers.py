"""Which layers are quantized unless the user says otherwise, by the names that checkpoints and vLLM give them."""

import pytest

from w8a8_converters.layers import is_quantized_by_default

QUANTIZED = {
    "Llama": ["model.layers.0.self_attn.q_proj", "model.layers.31.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"],
    "Qwen2": ["model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj"],
    "Qwen3": ["model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"],
    "Qwen3-MoE": ["model.layers.0.mlp.experts.127.gate_proj", "model.layers.0.mlp.experts.0.down_proj"],
    "Qwen2.5-VL": [
        "model.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.mlp.gate_proj",
        "language_model.model.layers.0.self_attn.qkv_proj",
    ],
    "Gemma 3": ["language_model.model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"],
    "Mixtral": ["model.layers.0.block_sparse_moe.experts.7.w2", "model.layers.0.block_sparse_moe.experts.0.w1"],
    "DeepSeek-V2": [
        "model.layers.1.self_attn.q_a_proj",
        "model.layers.1.self_attn.kv_a_proj_with_mqa",
        "model.layers.1.self_attn.fused_qkv_a_proj",
        "model.layers.1.self_attn.kv_b_proj",
        "model.layers.1.mlp.shared_experts.gate_up_proj",
        "model.layers.1.mlp.experts.159.up_proj",
    ],
    "gpt-oss": ["model.layers.0.self_attn.q_proj", "model.layers.0.attn.qkv_proj"],
    "Qwen3-Next": ["model.layers.3.self_attn.q_proj", "model.layers.0.mlp.shared_expert.down_proj"],
    "Nemotron-H": ["backbone.layers.7.mixer.q_proj", "backbone.layers.1.mixer.up_proj"],
}
KEPT = {
    "Llama": ["model.embed_tokens", "lm_head"],
    "Qwen3": ["model.layers.0.self_attn.q_norm", "model.layers.0.input_layernorm"],
    "Qwen3-MoE": ["model.layers.0.mlp.gate"],
    "Qwen2.5-VL": [
        "visual.blocks.0.attn.qkv",
        "visual.blocks.0.mlp.gate_proj",
        "visual.merger.mlp.0",
        "model.visual.blocks.31.attn.proj",
        "visual.patch_embed.proj",
    ],
    "Gemma 3": [
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1",
        "multi_modal_projector.mm_input_projection",
    ],
    "Mixtral": ["model.layers.0.block_sparse_moe.gate"],
    "DeepSeek-V2": ["model.layers.1.mlp.gate", "model.layers.61.eh_proj", "model.layers.61.shared_head.head"],
    "DeepSeek's MTP layer in vLLM": ["model.layers.61.mtp_block.self_attn.o_proj"],
    "gpt-oss": ["model.layers.0.mlp.router"],
    "Qwen3-Next": [
        "model.layers.0.linear_attn.in_proj_qkvz",
        "model.layers.0.linear_attn.in_proj_ba",
        "model.layers.0.linear_attn.out_proj",
        "model.layers.0.mlp.shared_expert_gate",
        "mtp.fc",
        "mtp.layers.0.self_attn.q_proj",
        "mtp.layers.0.mlp.experts.0.up_proj",
    ],
    "Mamba": ["backbone.layers.0.mixer.in_proj", "backbone.layers.0.mixer.x_proj", "backbone.layers.0.mixer.out_proj"],
    "Jamba": ["model.layers.0.mamba.in_proj", "model.layers.0.feed_forward.router"],
}
CASES = [(name, True) for names in QUANTIZED.values() for name in names]
CASES += [(name, False) for names in KEPT.values() for name in names]


@pytest.mark.parametrize(("module", "quantized"), CASES)
def test_defaults(module: str, quantized: bool) -> None:
    assert is_quantized_by_default(f"{module}.weight", ndim=2) is quantized
