"""qwen2, qwen2moe, qwen3 and qwen3moe against transformers."""

import json

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize
from gguf_models import (
    DENSE_NAMES,
    QKV_BIAS_NAMES,
    VOCAB,
    check_architecture,
    converted_config,
    random_model,
    renamed,
    renaming,
    write_gguf,
)
from safetensors.torch import load_file

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, EXPERTS = 2, 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1000000.0,
}
OWN_HEADS = {"attention.key_length": 16, "attention.value_length": 16}
QK_NORMS = {
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
}
ROUTER = {"model.layers.{}.mlp.gate.weight": "blk.{}.ffn_gate_inp.weight"}
SHARED_EXPERT = {
    "model.layers.{}.mlp.shared_expert.gate_proj.weight": "blk.{}.ffn_gate_shexp.weight",
    "model.layers.{}.mlp.shared_expert.up_proj.weight": "blk.{}.ffn_up_shexp.weight",
    "model.layers.{}.mlp.shared_expert.down_proj.weight": "blk.{}.ffn_down_shexp.weight",
    "model.layers.{}.mlp.shared_expert_gate.weight": "blk.{}.ffn_gate_inp_shexp.weight",
}
QWEN2_NAMES = DENSE_NAMES | QKV_BIAS_NAMES
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_METADATA = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


def qwen2(**options):
    from transformers import Qwen2Config

    return random_model(Qwen2Config(**{**SIZES, "rope_theta": 1000000.0, "tie_word_embeddings": False, **options}))


def qwen3(**options):
    from transformers import Qwen3Config

    return random_model(Qwen3Config(**{**SIZES, "head_dim": 16, "rope_theta": 1000000.0, **options}))


def with_experts(names, fused=False, early=False):
    """A file's experts are stacked; the gate of the shared expert is a row, a vector in early files."""

    def to_gguf(tensors):
        full = renamed(names, LAYERS)
        for layer in range(LAYERS):
            stacks = {}
            for name in ("gate", "up", "down"):
                parts = [tensors.pop(f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight") for e in range(EXPERTS)]
                stacks[name] = torch.stack(parts)
            if fused:
                stacks["gate_up"] = torch.cat([stacks.pop("gate"), stacks.pop("up")], dim=1)
            for name, values in stacks.items():
                yield f"blk.{layer}.ffn_{name}_exps.weight", values
        for name, values in tensors.items():
            yield full[name], values[0] if early and "shared_expert_gate" in name else values

    return to_gguf


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_qwen2(tmp_path, tied):
    model = qwen2(tie_word_embeddings=tied)
    check_architecture(tmp_path, model, "qwen2", METADATA, renaming(QWEN2_NAMES, LAYERS))
    config = converted_config(tmp_path)
    assert (config["architectures"], config["tie_word_embeddings"]) == (["Qwen2ForCausalLM"], tied)
    assert "rope_scaling" not in config


@pytest.mark.parametrize("strength", [{}, {"rope.scaling.yarn_attn_factor": 1.1386294361}], ids=["", "factor of attention"])
def test_yarn(tmp_path, strength):
    """Longer than the original context. A factor of attention in the file is what transformers computes by itself."""
    model = qwen2(rope_parameters={**YARN, "original_max_position_embeddings": 16})
    metadata = METADATA | YARN_METADATA | {"rope.scaling.original_context_length": 16} | strength
    check_architecture(tmp_path, model, "qwen2", metadata, renaming(QWEN2_NAMES, LAYERS))
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert converted_config(tmp_path)["rope_scaling"] == expected


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_qwen3(tmp_path, tied):
    model = qwen3(tie_word_embeddings=tied)
    metadata = METADATA | OWN_HEADS
    check_architecture(tmp_path, model, "qwen3", metadata, renaming(DENSE_NAMES | QK_NORMS, LAYERS))
    config = converted_config(tmp_path)
    assert (config["architectures"], config["head_dim"]) == (["Qwen3ForCausalLM"], 16)


def test_embedding_models_pool_the_last_token(tmp_path):
    """Their files differ in this key alone."""
    names = renaming(DENSE_NAMES | QK_NORMS, LAYERS)
    tensors = {name: values for name, values in qwen3().state_dict().items() if name != "lm_head.weight"}
    metadata = METADATA | OWN_HEADS
    source = GGUFSource(write_gguf(tmp_path / "last.gguf", "qwen3", metadata | {"pooling_type": 3}, names(tensors)))
    assert source.config["tie_word_embeddings"]
    mean = write_gguf(tmp_path / "mean.gguf", "qwen3", metadata | {"pooling_type": 1}, names(tensors))
    with pytest.raises(ConversionError, match=r"qwen3.pooling_type is 1, which is not supported; expected 3"):
        GGUFSource(mean)


@pytest.mark.parametrize("fused", [False, True], ids=["", "gate and up in one"])
def test_qwen3moe(tmp_path, fused):
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **SIZES, head_dim=16, rope_theta=1000000.0, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True,
    )  # fmt: skip
    metadata = METADATA | OWN_HEADS | {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 24}
    names = DENSE_NAMES | QK_NORMS | ROUTER
    check_architecture(tmp_path, random_model(config), "qwen3moe", metadata, with_experts(names, fused))
    written = converted_config(tmp_path)
    assert written["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (written["num_experts"], written["num_experts_per_tok"], written["norm_topk_prob"]) == (EXPERTS, 2, True)


def test_experts_of_three_types(tmp_path):
    """As files of few bits have them: down takes more than up and gate, and some layers more than others."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=64)
    random_model(config).save_pretrained(tmp_path / "reference")
    kinds = {"gate": [Q.Q4_1, Q.Q8_0], "up": [Q.Q8_0, Q.F16], "down": [Q.F16, Q.Q5_0]}
    tensors, expected = [], {}
    for name, values in with_experts(DENSE_NAMES | QK_NORMS | ROUTER)(load_file(tmp_path / "reference" / "model.safetensors")):
        if "exps" not in name:
            tensors.append((name, values))
            continue
        layer, kind = int(name.split(".")[1]), name.split("_")[1]
        packed = quantize(values.numpy(), kinds[kind][layer])
        tensors.append((name, packed, kinds[kind][layer]))
        as_read = torch.from_numpy(dequantize(packed, kinds[kind][layer]))
        for expert in range(EXPERTS):
            expected[f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"] = as_read[expert]
    metadata = METADATA | OWN_HEADS | {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 64}
    source = GGUFSource(write_gguf(tmp_path / "model.gguf", "qwen3moe", metadata, tensors))
    assert len(expected) == LAYERS * EXPERTS * 3
    for name, values in expected.items():
        assert torch.equal(source.rows(name, 0, len(values)), values), name
        assert torch.equal(source.rows(name, 5, 9), values[5:9]), name


@pytest.mark.parametrize("named", [True, False], ids=["", "early"])
def test_qwen2moe(tmp_path, named):
    """Without sizes of their own, the shared expert has that of an MLP and the others share it among those used."""
    from transformers import Qwen2MoeConfig

    inner, shared = (20, 40) if named else (24, 48)
    config = Qwen2MoeConfig(
        **SIZES, rope_theta=1000000.0, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=inner,
        shared_expert_intermediate_size=shared,
    )  # fmt: skip
    metadata = METADATA | {"expert_count": EXPERTS, "expert_used_count": 2}
    if named:
        metadata |= {"expert_feed_forward_length": inner, "expert_shared_feed_forward_length": shared}
    names = QWEN2_NAMES | ROUTER | SHARED_EXPERT
    check_architecture(tmp_path, random_model(config), "qwen2moe", metadata, with_experts(names, early=not named))
    written = converted_config(tmp_path)
    assert written["architectures"] == ["Qwen2MoeForCausalLM"]
    assert (written["moe_intermediate_size"], written["shared_expert_intermediate_size"]) == (inner, shared)
    assert written["norm_topk_prob"] is False

    convert(tmp_path / "model.gguf", tmp_path / "w8a8")
    kept = json.loads((tmp_path / "w8a8" / "config.json").read_text())["quantization_config"]["ignore"]
    gates = [f"model.layers.{layer}.mlp.{name}" for layer in range(LAYERS) for name in ("gate", "shared_expert_gate")]
    assert sorted(kept) == sorted(["lm_head", *gates])


@pytest.mark.parametrize(
    ("architecture", "metadata", "without", "match"),
    [
        ("qwen2", {}, "bias", r"lacks 6 tensors: blk.0.attn_k.bias"),
        ("qwen2", {}, "blk.1.attn_q.bias", r"lacks 1 tensors: blk.1.attn_q.bias"),
        ("qwen2", {"rope.dimension_count": 4}, None, "rope.dimension_count is 4, which is not supported; expected 8"),
        ("qwen2", {"attention.key_length": 16, "attention.value_length": 16}, None, "key_length is 16, .* expected 8"),
        ("qwen2", {"attention.causal": False}, None, "qwen2.attention.causal is not understood"),
        ("qwen2", YARN_METADATA | {"rope.scaling.yarn_attn_factor": 2.0}, None, "yarn_attn_factor is 2.0, .* expected 1.138"),
        ("qwen2", {"rope.scaling.type": "su"}, None, "rope scaling 'su' is not supported; known are none, linear"),
        ("qwen2", {"rope.scaling.type": "longrope"}, None, "lacks 2 tensors of rope scaling longrope: rope_factors_long"),
        ("qwen2", {"expert_count": 4}, None, "qwen2.expert_count is not understood"),
        ("qwen2moe", {"expert_count": 4}, None, "lacks the metadata qwen2moe.expert_used_count"),
        ("qwen3", {}, None, "6 tensors are unknown for architecture qwen3: blk.0.attn_k.bias"),
    ],
)
def test_refusals(tmp_path, architecture, metadata, without, match):
    tensors = renaming(QWEN2_NAMES, LAYERS)(qwen2().state_dict())
    kept = [(name, values) for name, values in tensors if without is None or not name.endswith(without)]
    path = write_gguf(tmp_path / "model.gguf", architecture, METADATA | metadata, kept)
    with pytest.raises(ConversionError, match=match) as error:
        convert(path, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
