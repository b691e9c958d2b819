"""llama, with and without experts, and mistral3 against transformers."""

import math

import pytest
import torch
from gguf_models import VOCAB, check_architecture, interleaved, random_model, renamed, write_gguf

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
    "model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
    "model.layers.{}.mlp.gate_proj.bias": "blk.{}.ffn_gate.bias",
    "model.layers.{}.mlp.up_proj.bias": "blk.{}.ffn_up.bias",
    "model.layers.{}.mlp.down_proj.bias": "blk.{}.ffn_down.bias",
    "model.layers.{}.block_sparse_moe.gate.weight": "blk.{}.ffn_gate_inp.weight",
}
METADATA = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 8,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def rope(kind="default", **other):
    return {"rope_type": kind, "rope_theta": 10000.0, **other}


def llama(**other):
    from transformers import LlamaConfig

    return random_model(LlamaConfig(**SIZES | {"rope_parameters": rope(), **other}))


def mixtral():
    from transformers import MixtralConfig

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return random_model(MixtralConfig(**SIZES, **experts, sliding_window=None, rope_parameters=rope()))


def to_gguf(tensors, stacked=True):
    names = renamed(NAMES, 2)
    for name in [name for name in tensors if ".experts.0." in name]:
        layer, part = name.split(".")[2], {"w1": "gate", "w2": "down", "w3": "up"}[name.split(".")[-2]]
        parts = [tensors.pop(name.replace(".experts.0.", f".experts.{expert}.")) for expert in range(4)]
        if stacked:
            yield f"blk.{layer}.ffn_{part}_exps.weight", torch.stack(parts)
            continue
        for expert, values in enumerate(parts):
            yield f"blk.{layer}.ffn_{part}.{expert}.weight", values
    for name, values in tensors.items():
        if ".q_proj" in name:
            values = interleaved(values, heads=4)
        if ".k_proj" in name:
            values = interleaved(values, heads=2)
        yield names[name], values


@pytest.mark.parametrize("stacked", [True, False])
def test_mixtral(tmp_path, stacked):
    # Early files hold each expert by itself.
    source = check_architecture(
        tmp_path, mixtral(), "llama", METADATA | EXPERTS, lambda tensors: to_gguf(tensors, stacked)
    )  # fmt: skip
    assert source.config["architectures"] == ["MixtralForCausalLM"]


def test_biases_everywhere(tmp_path):
    early = {"tensor_data_layout": "Meta AI original pth", "expert_count": 0, "expert_used_count": 0}
    source = check_architecture(tmp_path, llama(attention_bias=True, mlp_bias=True), "llama", METADATA | early, to_gguf)
    assert source.config["mlp_bias"] is True


def test_a_head_size_of_its_own_and_a_tied_head(tmp_path):
    # As Mistral Nemo: fewer columns of queries than the hidden size.
    sizes = {"attention.key_length": 6, "attention.value_length": 6, "rope.dimension_count": 6}
    check_architecture(tmp_path, llama(head_dim=6, tie_word_embeddings=True), "llama", METADATA | sizes, to_gguf)


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, rope("linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0}, rope("linear", factor=4.0)),
        ({"rope.scale_linear": 4.0}, rope("linear", factor=4.0)),  # of early files
        ({"rope.scaling.type": "linear"}, rope()),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, rope()),
        ({"rope.freq_base": None}, rope()),
        (YARN, rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        (
            YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 1.0},
            rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=16.0, beta_slow=2.0),
        ),
    ],
)
def test_rotary_embeddings(tmp_path, metadata, parameters):
    check_architecture(tmp_path, llama(rope_parameters=parameters), "llama", METADATA | metadata, to_gguf)


def test_llama3_rotary_embedding(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = llama(head_dim=32, rope_parameters={**rope("llama3", **scaling), "rope_theta": 500000.0})
    factors = []
    for pair in range(16):
        wavelength = 2 * math.pi * 500000.0 ** (2 * pair / 32)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 / ((1 - min(max(smooth, 0.0), 1.0)) / 8.0 + min(max(smooth, 0.0), 1.0)))
    assert {1.0, 8.0} < set(factors)

    def with_factors(tensors):
        yield "rope_freqs.weight", torch.tensor(factors)
        yield from to_gguf(tensors)

    sizes = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    metadata = METADATA | sizes | {"rope.freq_base": 500000.0}
    source = check_architecture(tmp_path, model, "llama", metadata, with_factors)
    assert source.config["rope_scaling"] == {"rope_type": "llama3", **scaling}


def test_mistral_small(tmp_path):
    from transformers import MistralConfig

    model = random_model(MistralConfig(**SIZES, sliding_window=None, rope_parameters=rope()))
    source = check_architecture(tmp_path, model, "mistral3", METADATA, to_gguf)
    assert source.config["architectures"] == ["MistralForCausalLM"]


@pytest.mark.parametrize("multiplier", [1.0, None])
def test_ministral(tmp_path, multiplier):
    from transformers import Ministral3Config

    mscale = {"mscale": 1.0, "mscale_all_dim": 1.0} if multiplier else {}
    # Positions beyond 16 have queries that grow.
    parameters = rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.25, **mscale)
    model = random_model(Ministral3Config(**SIZES, head_dim=8, pad_token_id=0, rope_parameters=parameters))
    other = {"attention.temperature_scale": 0.25, "rope.scaling.yarn_log_multiplier": multiplier}
    source = check_architecture(tmp_path, model, "mistral3", METADATA | YARN | other, to_gguf)
    assert source.config["architectures"] == ["Ministral3ForCausalLM"]
    assert source.config["llama_4_scaling"] == {"beta": 0.25, "original_max_position_embeddings": 16}  # what vLLM reads


@pytest.mark.parametrize(
    ("architecture", "other", "message"),
    [
        (
            "llama",
            {"rope.scaling.attn_factor": 1.2},
            "llama.rope.scaling.attn_factor is .*, which is not supported; expected 1.0",
        ),
        ("llama", {"attention.temperature_scale": 0.1}, "llama.attention.temperature_scale is not understood"),
        ("llama", {"attention.sliding_window": 4096}, "llama.attention.sliding_window is not understood"),
        ("llama", {"rope.dimension_count": 4}, "llama.rope.dimension_count is 4, which is not supported; expected 8"),
        ("llama", EXPERTS | {"expert_used_count": None}, "lacks the metadata llama.expert_used_count"),
        ("mistral3", EXPERTS, "mistral3 with experts or biases is not supported"),
        ("mistral3", {"attention.temperature_scale": 0.1}, "attention.temperature_scale asks for rope scaling yarn"),
        (
            "mistral3",
            YARN | {"rope.scaling.yarn_log_multiplier": 0.5},
            "mistral3.rope.scaling.yarn_log_multiplier is 0.5, which is not supported; expected 0 or 1",
        ),
    ],
)
def test_refused(tmp_path, architecture, other, message):
    model = mixtral() if "expert_count" in other else llama()
    model.save_pretrained(tmp_path / "reference")
    tensors = to_gguf(saved(tmp_path / "reference"))
    path = write_gguf(tmp_path / "model.gguf", architecture, METADATA | other, tensors)
    with pytest.raises(ConversionError, match=message):
        GGUFSource(path)


def saved(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
