"""glm4 and glm4moe against transformers."""

import pytest
import torch
from gguf_models import VOCAB, check_architecture, converted_config, random_model, renamed, write_gguf
from test_gguf_deepseek2 import mtp_layer, saved, with_biases

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, EXPERTS = 3, 8
COMMON = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}
GLM4 = COMMON | {
    "model.layers.{}.post_self_attn_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.post_mlp_layernorm.weight": "blk.{}.post_ffw_norm.weight",
    "model.layers.{}.mlp.gate_up_proj.weight": "blk.{}.ffn_up.weight",
}
GLM4MOE = COMMON | {
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.gate.weight": "blk.{}.ffn_gate_inp.weight",
    "model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias",
    "model.layers.{}.mlp.shared_experts.gate_proj.weight": "blk.{}.ffn_gate_shexp.weight",
    "model.layers.{}.mlp.shared_experts.up_proj.weight": "blk.{}.ffn_up_shexp.weight",
    "model.layers.{}.mlp.shared_experts.down_proj.weight": "blk.{}.ffn_down_shexp.weight",
    "model.layers.{}.eh_proj.weight": "blk.{}.nextn.eh_proj.weight",
    "model.layers.{}.enorm.weight": "blk.{}.nextn.enorm.weight",
    "model.layers.{}.hnorm.weight": "blk.{}.nextn.hnorm.weight",
    "model.layers.{}.embed_tokens.weight": "blk.{}.nextn.embed_tokens.weight",
    "model.layers.{}.shared_head.norm.weight": "blk.{}.nextn.shared_head_norm.weight",
    "model.layers.{}.shared_head.head.weight": "blk.{}.nextn.shared_head_head.weight",
}
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 8,
    "rope.freq_base": 1000000.0,
}
EXPERT_METADATA = METADATA | {
    "leading_dense_block_count": 1,
    "expert_count": EXPERTS,
    "expert_used_count": 3,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 16,
    "expert_gating_func": 2,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
}


def sizes(**other):
    return {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}, **other,
    }  # fmt: skip


def glm4(**other):
    from transformers import Glm4Config

    return random_model(Glm4Config(**sizes(**other)))


def glm4moe(**other):
    from transformers import Glm4MoeConfig

    own = {
        "moe_intermediate_size": 16, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    return with_biases(random_model(Glm4MoeConfig(**sizes(**own | other))))


def writer(names, layers=LAYERS):
    def to_gguf(tensors):
        full = renamed(names, layers)
        for layer in range(layers):
            for part in ("gate", "up", "down"):
                found = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(EXPERTS)]
                if found[0] in tensors:
                    yield f"blk.{layer}.ffn_{part}_exps.weight", torch.stack([tensors.pop(name) for name in found])
        for name, values in tensors.items():
            yield full[name], values

    return to_gguf


@pytest.mark.parametrize("biases", [False, True])
def test_glm4(tmp_path, biases):
    source = check_architecture(tmp_path, glm4(attention_bias=biases), "glm4", METADATA, writer(GLM4))
    assert source.config["architectures"] == ["Glm4ForCausalLM"]
    assert source.config["partial_rotary_factor"] == 0.5


def test_glm4_where_all_of_a_head_rotates(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 1.0}
    metadata = METADATA | {"rope.dimension_count": None, "attention.head_count_kv": 4}
    model = glm4(attention_bias=False, num_key_value_heads=4, rope_parameters=rope)
    check_architecture(tmp_path, model, "glm4", metadata, writer(GLM4))


@pytest.mark.parametrize("air", [True, False])
def test_glm4moe(tmp_path, air):
    # GLM-4.5-Air has no norms of q and k.
    model = glm4moe(attention_bias=True, use_qk_norm=not air)
    metadata = EXPERT_METADATA | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    mtp = mtp_layer(model, LAYERS)
    source = check_architecture(tmp_path, model, "glm4moe", metadata, writer(GLM4MOE, LAYERS + 1), extra=mtp)
    config = converted_config(tmp_path)
    assert config["architectures"] == ["Glm4MoeForCausalLM"]
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (LAYERS, 1)
    assert source.tensors["model.layers.1.mlp.gate.e_score_correction_bias"].keeps_dtype


def test_glm4moe_without_what_the_file_need_not_say(tmp_path):
    keys = ("expert_gating_func", "expert_group_count", "expert_group_used_count")
    model = glm4moe(attention_bias=False)
    check_architecture(tmp_path, model, "glm4moe", EXPERT_METADATA | dict.fromkeys(keys), writer(GLM4MOE))


def test_what_is_quantized(tmp_path):
    model = glm4moe(attention_bias=True, use_qk_norm=True)
    model.save_pretrained(tmp_path / "reference")
    metadata = EXPERT_METADATA | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    tensors = saved(tmp_path / "reference") | mtp_layer(model, LAYERS)
    path = write_gguf(tmp_path / "model.gguf", "glm4moe", metadata, writer(GLM4MOE, LAYERS + 1)(tensors))
    report = convert(path, tmp_path / "out", format="w8a8", hadamard=0)
    routers = [f"model.layers.{number}.mlp.gate" for number in (1, 2, 3)]
    mtp = [f"model.layers.3.{name}" for name in ("eh_proj", "shared_head.head")]
    assert set(report.ignore) == {"lm_head", *routers, *mtp}


@pytest.mark.parametrize(
    ("architecture", "other", "message"),
    [
        ("glm4", {"rope.dimension_sections": [2, 2, 0, 0]}, "glm4.rope.dimension_sections is not understood"),  # GLM-4.1V
        ("glm4", {"nextn_predict_layers": 1}, "glm4.nextn_predict_layers is not understood"),  # GLM-OCR
        ("glm4moe", {"rope.dimension_sections": [2, 2, 0, 0]}, "glm4moe.rope.dimension_sections is not understood"),
        ("glm4moe", {"expert_gating_func": 1}, "glm4moe with softmax gating is not supported; expected sigmoid"),
    ],
)
def test_refused(tmp_path, architecture, other, message):
    model, metadata, names = (glm4, METADATA, GLM4) if architecture == "glm4" else (glm4moe, EXPERT_METADATA, GLM4MOE)
    model().save_pretrained(tmp_path / "reference")
    tensors = writer(names)(saved(tmp_path / "reference"))
    path = write_gguf(tmp_path / "model.gguf", architecture, metadata | other, tensors)
    with pytest.raises(ConversionError, match=message):
        GGUFSource(path)
