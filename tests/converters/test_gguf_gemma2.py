"""gemma2 against transformers."""

import pytest
import torch
from gguf_models import DENSE_NAMES, VOCAB, check_architecture, converted_config, random_model, renamed, write_gguf

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

WINDOW = 6
NAMES = {name: ours for name, ours in DENSE_NAMES.items() if name != "lm_head.weight"} | {
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "blk.{}.post_ffw_norm.weight",
}
LOCAL, FULL = "sliding_attention", "full_attention"


def metadata(layers=3):
    return {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 0.5,
    }


def gemma2(layers=3, **options):
    from transformers import Gemma2Config

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
    }
    return random_model(Gemma2Config(**{**sizes, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.5, **options}))


def to_gguf(tensors):
    layers = len([name for name in tensors if name.endswith("input_layernorm.weight")])
    names = renamed(NAMES, layers)
    for name, values in tensors.items():
        yield names[name], values + 1 if values.dim() == 1 else values


@pytest.mark.parametrize(
    ("layer_types", "pattern"),
    [([LOCAL, FULL, LOCAL], None), ([LOCAL, LOCAL, FULL], 3), ([FULL, LOCAL, FULL], [False, True, False])],
    ids=["by default", "every third", "named"],
)
def test_gemma2(tmp_path, layer_types, pattern):
    model = gemma2(layer_types=layer_types)
    check_architecture(tmp_path, model, "gemma2", metadata() | {"attention.sliding_window_pattern": pattern}, to_gguf)
    config = converted_config(tmp_path)
    assert config["architectures"] == ["Gemma2ForCausalLM"]
    assert (config["layer_types"], config["tie_word_embeddings"]) == (layer_types, True)


def test_values_by_default(tmp_path):
    """What files of the first weeks do not say."""
    model = gemma2(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096)
    absent = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"))
    check_architecture(tmp_path, model, "gemma2", metadata() | absent, to_gguf)
    assert converted_config(tmp_path)["sliding_window"] == 4096


def test_attention_scale_of_27b(tmp_path):
    """By depth, as in llama.cpp: the file itself does not say it."""
    path = write_gguf(tmp_path / "model.gguf", "gemma2", metadata(46), to_gguf(state(gemma2(46))))
    assert GGUFSource(path).config["query_pre_attn_scalar"] == 32 // 4


@pytest.mark.parametrize(
    ("changed", "extra", "match"),
    [
        ({}, ["output.weight"], "unknown for architecture gemma2: output.weight"),
        ({}, ["blk.0.attn_q_norm.weight"], "unknown for architecture gemma2: blk.0.attn_q_norm.weight"),
        ({"attention.key_length": None}, [], "lacks the metadata gemma2.attention.key_length"),
        ({"rope.freq_base_swa": 5000.0}, [], "rope.freq_base_swa is 5000.0, which is not supported; expected 10000.0"),
        ({"attention.sliding_window": 0}, [], "gemma2.attention.sliding_window must be one positive integer, got 0"),
        ({"attention.scale": 0.1}, [], "gemma2.attention.scale is not understood"),
    ],
)
def test_refusals(tmp_path, changed, extra, match):
    tensors = [*to_gguf(state(gemma2())), *((name, torch.ones(16)) for name in extra)]
    with pytest.raises(ConversionError, match=match):
        GGUFSource(write_gguf(tmp_path / "model.gguf", "gemma2", metadata() | changed, tensors))


def state(model):
    return {name: values for name, values in model.state_dict().items() if name != "lm_head.weight"}
