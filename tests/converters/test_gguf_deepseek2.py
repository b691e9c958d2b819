"""deepseek2: DeepSeek V2 and V3 and GLM-4.7-Flash against transformers."""

import json

import pytest
import torch
from gguf_models import VOCAB, check_architecture, converted_config, random_model, renamed, write_gguf

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, HEADS, RANK, NOPE, ROPE, VALUE, EXPERTS = 3, 4, 16, 8, 4, 6, 8
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.q_a_proj.weight": "blk.{}.attn_q_a.weight",
    "model.layers.{}.self_attn.q_a_layernorm.weight": "blk.{}.attn_q_a_norm.weight",
    "model.layers.{}.self_attn.q_b_proj.weight": "blk.{}.attn_q_b.weight",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight": "blk.{}.attn_kv_a_mqa.weight",
    "model.layers.{}.self_attn.kv_a_layernorm.weight": "blk.{}.attn_kv_a_norm.weight",
    "model.layers.{}.self_attn.kv_b_proj.weight": "blk.{}.attn_kv_b.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
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
    "attention.head_count": HEADS,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.q_lora_rank": 12,
    "attention.kv_lora_rank": RANK,
    "attention.key_length": RANK + ROPE,
    "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE,
    "attention.value_length_mla": VALUE,
    "rope.dimension_count": ROPE,
    "rope.freq_base": 10000.0,
    "leading_dense_block_count": 1,
    "vocab_size": VOCAB,
    "expert_count": EXPERTS,
    "expert_used_count": 3,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 16,
    "expert_gating_func": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
}
# Of files from before the compressed attention: no names of its own for the sizes of a head.
UNSPLIT = {
    "attention.head_count_kv": HEADS,
    "attention.key_length": NOPE + ROPE,
    "attention.value_length": VALUE,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}
SOFTMAX = {
    "expert_gating_func": 1,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": None,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
ROPE_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.707,
    "mscale_all_dim": 0.707,
}  # fmt: skip


def sizes(**other):
    return {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "n_shared_experts": 2,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "kv_lora_rank": RANK, "q_lora_rank": 12,
        "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "first_k_dense_replace": 1,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **other,
    }  # fmt: skip


def v2(**other):
    from transformers import DeepseekV2Config

    return random_model(DeepseekV2Config(**sizes(n_group=1, topk_group=1, topk_method="greedy", **other)))


def v3(**other):
    from transformers import DeepseekV3Config

    own = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
    return with_biases(random_model(DeepseekV3Config(**sizes(**own | other))))


def with_biases(model):
    """Router biases that bf16 does not hold."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def mtp_layer(model, number):
    """The tensors of a multi-token prediction layer, whose block is like the model's last."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, values in model.state_dict().items():
        last = f"model.layers.{number - 1}."
        if name.startswith(last) and ".experts." not in name:
            tensors[name.replace(last, f"model.layers.{number}.")] = torch.randn(values.shape, generator=generator)
    hidden, inner = model.config.hidden_size, model.config.moe_intermediate_size
    for expert in range(model.config.n_routed_experts):
        for projection, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            name = f"model.layers.{number}.mlp.experts.{expert}.{projection}_proj.weight"
            tensors[name] = torch.randn(shape, generator=generator)
    prefix = f"model.layers.{number}."
    shapes = {
        "eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "embed_tokens": (VOCAB, hidden),
        "shared_head.norm": (hidden,), "shared_head.head": (VOCAB, hidden),
    }  # fmt: skip
    tensors |= {f"{prefix}{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: values.bfloat16().float() for name, values in tensors.items()}


def writer(split=True, layers=LAYERS, fuse=False, experts=EXPERTS):
    """The checkpoint's tensors -> those of a file."""

    def to_gguf(tensors):
        names = renamed(NAMES, layers)
        for layer in range(layers):
            stacks = {}
            for part in ("gate", "up", "down"):
                found = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for expert in range(experts)]
                if found[0] in tensors:
                    stacks[part] = torch.stack([tensors.pop(name) for name in found])
            if stacks and fuse:
                stacks["gate_up"] = torch.cat([stacks.pop("gate"), stacks.pop("up")], dim=1)
            for part, values in stacks.items():
                yield f"blk.{layer}.ffn_{part}_exps.weight", values
        for name, values in tensors.items():
            if "kv_b_proj" not in name or not split:
                yield names[name], values
                continue
            heads = values.reshape(HEADS, NOPE + VALUE, RANK)
            yield names[name].replace("kv_b", "k_b"), torch.stack([head[:NOPE].T for head in heads])
            yield names[name].replace("kv_b", "v_b"), torch.stack([head[NOPE:] for head in heads])

    return to_gguf


def test_v3_with_groups_and_a_layer_for_mtp(tmp_path):
    model = v3()
    metadata = METADATA | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    mtp = mtp_layer(model, LAYERS)
    source = check_architecture(tmp_path, model, "deepseek2", metadata, writer(layers=LAYERS + 1), extra=mtp)
    config = converted_config(tmp_path)
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")  # what vLLM reads
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (LAYERS, 1)
    assert source.tensors["model.layers.1.mlp.gate.e_score_correction_bias"].keeps_dtype


def test_mtp_layers_that_the_file_names_but_leaves_out(tmp_path):
    metadata = METADATA | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    source = check_architecture(tmp_path, v3(), "deepseek2", metadata, writer())
    assert (source.config["num_hidden_layers"], source.config["num_nextn_predict_layers"]) == (LAYERS, 0)


def test_v3_with_yarn_and_fused_experts(tmp_path):
    model = v3(rope_parameters={**ROPE_YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    metadata = METADATA | YARN | {"rope.scaling.yarn_log_multiplier": 0.1}
    source = check_architecture(tmp_path, model, "deepseek2", metadata, writer(fuse=True))
    assert source.config["rope_scaling"]["mscale"] == source.config["rope_scaling"]["mscale_all_dim"] == 1.0


@pytest.mark.parametrize("split", [True, False])
def test_v2_lite(tmp_path, split):
    metadata = METADATA | SOFTMAX | YARN | {"attention.q_lora_rank": None} | ({} if split else UNSPLIT)
    model = v2(q_lora_rank=None, rope_parameters=ROPE_YARN)
    source = check_architecture(tmp_path, model, "deepseek2", metadata, writer(split))
    assert source.config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert source.config["rope_scaling"]["mscale_all_dim"] == 0.707
    assert source.config["q_lora_rank"] is None


def test_v2_with_groups(tmp_path):
    model = v2()
    for module in model.modules():  # as with n_group=4, topk_group=2, topk_method="group_limited_greedy"
        if type(module).__name__ == "DeepseekV2TopkRouter":
            module.num_group, module.topk_group, module.topk_method = 4, 2, "group_limited_greedy"
            module.routed_scaling_factor = 16.0
    metadata = METADATA | SOFTMAX | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 16.0}
    source = check_architecture(tmp_path, model, "deepseek2", metadata, writer())
    assert source.config["topk_method"] == "group_limited_greedy"


def test_early_v2_files_say_nothing_of_gating_and_groups(tmp_path):
    early = dict.fromkeys(SOFTMAX)
    source = check_architecture(tmp_path, v2(), "deepseek2", METADATA | early | UNSPLIT, writer(split=False))
    assert source.config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert source.notes == []


def test_glm_flash(tmp_path):
    from transformers import Glm4MoeLiteConfig

    own = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5}
    model = with_biases(random_model(Glm4MoeLiteConfig(**sizes(**own, mlp_layer_types=["dense", "sparse", "sparse"]))))
    groups = {"expert_group_count": 1, "expert_group_used_count": 1}
    other = {"expert_weights_scale": 1.8, "attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.pre": "chatglm-bpe"}
    source = check_architecture(tmp_path, model, "deepseek2", METADATA | groups | other, writer())
    assert source.config["architectures"] == ["Glm4MoeLiteForCausalLM"]
    assert source.config["first_k_dense_replace"] == 1  # vLLM reads this one


def test_a_file_without_the_groups_of_v3_gets_a_note(tmp_path):
    model = v3(n_routed_experts=256, n_group=1, topk_group=1, moe_intermediate_size=4)
    metadata = METADATA | {"expert_count": 256, "expert_feed_forward_length": 4}
    metadata |= {"expert_group_count": None, "expert_group_used_count": None}
    source = check_architecture(tmp_path, model, "deepseek2", metadata, writer(experts=256))
    assert "--hf-config" in source.notes[0]
    assert json.loads((tmp_path / "converted" / "conversion_report.json").read_text())["notes"] == source.notes


def test_what_is_quantized(tmp_path):
    model = v3()
    model.save_pretrained(tmp_path / "reference")
    metadata = METADATA | {"block_count": LAYERS + 1, "nextn_predict_layers": 1}
    tensors = saved(tmp_path / "reference") | mtp_layer(model, LAYERS)
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", metadata, writer(layers=LAYERS + 1)(tensors))
    report = convert(path, tmp_path / "out", format="w8a8", hadamard=0)
    layer = "model.layers.{}."
    routers = [layer.format(number) + "mlp.gate" for number in (1, 2, 3)]
    mtp = [layer.format(3) + name for name in ("eh_proj", "shared_head.head")]
    assert set(report.ignore) == {"lm_head", *routers, *mtp}
    quantized = {entry.name for entry in report.layers}
    assert {
        layer.format(1) + name for name in ("self_attn.kv_b_proj", "mlp.experts.7.up_proj", "mlp.shared_experts.down_proj")
    } < (quantized)


def saved(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func is 3, which is not supported; expected 1 .softmax. or 2"),
        ({"expert_gating_func": 1}, "softmax gating with deepseek2.expert_weights_norm is not supported"),
        ({"expert_count": None}, "lacks the metadata deepseek2.expert_count"),
        ({"expert_group_used_count": None}, "lacks the metadata deepseek2.expert_group_used_count"),
        ({"nextn_predict_layers": 3}, "nextn_predict_layers is 3, expected fewer than all 3 layers"),
        ({"attention.key_length": 99}, "deepseek2.attention.key_length is 99, which is not supported; expected 20"),
        (
            {"attention.key_length_mla": ROPE},
            "attention.key_length_mla is 4, expected more than the 4 of rope.dimension_count",
        ),
        (
            {"rope.dimension_count": 3, "attention.key_length": 19},
            "deepseek2.rope.dimension_count must be even, got 3",
        ),
        ({"attention.temperature_scale": 0.1}, "attention.temperature_scale is not understood"),  # Mistral Large 3
        ({**YARN, "rope.scaling.yarn_log_multiplier": None}, "only as yarn with rope.scaling.yarn_log_multiplier"),
        ({**YARN, "rope.scaling.yarn_log_multiplier": 0.0}, "only as yarn with rope.scaling.yarn_log_multiplier"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "rope scaling linear is supported only as yarn"),
        ({"attention.q_lora_rank": None}, "9 tensors are unknown for architecture deepseek2: blk.0.attn_q_a.weight"),
    ],
)
def test_refused(tmp_path, other, message):
    model = v3()
    model.save_pretrained(tmp_path / "reference")
    tensors = writer()(saved(tmp_path / "reference"))
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", METADATA | other, tensors)
    with pytest.raises(ConversionError, match=message):
        GGUFSource(path)


def test_softmax_with_a_router_bias_is_refused(tmp_path):
    model = v3()
    model.save_pretrained(tmp_path / "reference")
    tensors = writer()(saved(tmp_path / "reference"))
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", METADATA | SOFTMAX, tensors)
    with pytest.raises(ConversionError, match=r"2 tensors are unknown for architecture deepseek2: blk\.1\.exp_probs_b\.bias"):
        GGUFSource(path)
