"""gpt-oss against transformers, its experts in MXFP4 as published."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_models import VOCAB, check_architecture, random_model, renamed, write_gguf
from safetensors.torch import load_file

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource
from w8a8_converters.rules import SkipRules

LAYERS, EXPERTS, HIDDEN, INNER = 3, 4, 32, 64
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blk.{}.attn_q.bias",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.k_proj.bias": "blk.{}.attn_k.bias",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.v_proj.bias": "blk.{}.attn_v.bias",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias",
    "model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight",
    "model.layers.{}.mlp.router.weight": "blk.{}.ffn_gate_inp.weight",
    "model.layers.{}.mlp.router.bias": "blk.{}.ffn_gate_inp.bias",
    "model.layers.{}.mlp.experts.down_proj_bias": "blk.{}.ffn_down_exps.bias",
}
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 8,
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": INNER,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
}


def gpt_oss():
    from transformers import GptOssConfig

    yarn = {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=256, rms_norm_eps=1e-5, rope_parameters=yarn, tie_word_embeddings=False,
    )  # fmt: skip
    model = random_model(config)
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            with torch.no_grad():
                stored = weight.transpose(1, 2).contiguous().numpy()  # MXFP4 has blocks along the inputs
                values = gguf.quants.dequantize(gguf.quants.quantize(stored, Q.MXFP4), Q.MXFP4)
                weight.copy_(torch.from_numpy(values).reshape(stored.shape).transpose(1, 2))
    return model


def to_gguf(tensors):
    names = renamed(NAMES, LAYERS)
    for name, values in tensors.items():
        experts = f"blk.{name.split('.')[2]}.ffn_" if ".experts." in name else ""
        if name.endswith("gate_up_proj"):
            gate, up = values[:, :, 0::2].transpose(1, 2), values[:, :, 1::2].transpose(1, 2)
            yield f"{experts}gate_exps.weight", mxfp4(gate), Q.MXFP4
            yield f"{experts}up_exps.weight", up  # quantizers give each tensor a type of its own
        elif name.endswith("gate_up_proj_bias"):
            yield f"{experts}gate_exps.bias", values[:, 0::2]
            yield f"{experts}up_exps.bias", values[:, 1::2]
        elif name.endswith("down_proj"):
            yield f"{experts}down_exps.weight", mxfp4(values.transpose(1, 2)), Q.MXFP4
        else:
            yield names[name], values


def mxfp4(values):
    return gguf.quants.quantize(values.contiguous().numpy(), Q.MXFP4)


def written(tmp_path, changes=()):
    gpt_oss().save_pretrained(tmp_path / "saved")
    tensors = to_gguf(load_file(tmp_path / "saved" / "model.safetensors"))
    return write_gguf(tmp_path / "model.gguf", "gpt-oss", METADATA | dict(changes), tensors)


def test_gpt_oss(tmp_path):
    source = check_architecture(tmp_path, gpt_oss(), "gpt-oss", METADATA, to_gguf)
    config = source.config
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 32,
    }  # fmt: skip


def test_betas_of_the_file(tmp_path):
    path = written(tmp_path, {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0})
    scaling = GGUFSource(path).config["rope_scaling"]
    assert (scaling["beta_fast"], scaling["beta_slow"]) == (16.0, 2.0)


@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors"])
def test_experts_stay_unquantized(tmp_path, fmt):
    """Without an option, and with one note. The config says so in the names by which vLLM asks for a layer's experts."""
    path = written(tmp_path)
    report = convert(path, tmp_path / "out", format=fmt)
    assert report.notes == [
        "the experts stay unquantized: those of gpt_oss have biases and an activation that int8 experts do not have"
    ]
    (file,) = report.files
    weights = load_file(tmp_path / "out" / file)
    assert weights["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert {"model.layers.1.mlp.router", "lm_head"} <= set(report.ignore)
    rules = SkipRules(report.ignore)
    for layer in range(LAYERS):
        assert rules.skips(f"model.layers.{layer}.mlp.experts.0.gate_proj")
    assert not rules.skips("model.layers.0.self_attn.q_proj")
    assert convert(path, tmp_path / "skipped", format=fmt, skip=["experts"]).ignore == report.ignore
    assert convert(path, tmp_path / "bf16", format="bf16").notes == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "none"}, "gpt-oss with rope scaling other than yarn"),
        ({"rope.scaling.type": "linear"}, "gpt-oss with rope scaling other than yarn"),
        ({"attention.sliding_window_pattern": 3}, "sliding_window_pattern is not supported"),
        ({"attention.sliding_window_pattern": [False, True, False]}, "sliding_window_pattern is not supported"),
        ({"attention.sliding_window": None}, "lacks the metadata .*attention.sliding_window"),
        ({"rope.freq_base_swa": 10000.0}, "rope.freq_base_swa is 10000.0"),
        ({"feed_forward_length": 48}, "feed_forward_length is 48, which is not supported; expected 64"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"expert_weights_scale": 2.0}, "gpt-oss.expert_weights_scale is not understood"),
    ],
    ids=str,
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ConversionError, match=message):
        GGUFSource(written(tmp_path, changes))
