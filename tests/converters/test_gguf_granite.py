"""granite against transformers."""

import pytest
from gguf_models import (
    DENSE_NAMES,
    QKV_BIAS_NAMES,
    VOCAB,
    check_architecture,
    converted_config,
    interleaved,
    random_model,
    renamed,
    write_gguf,
)

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS = 2
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000000.0,
    "rope.dimension_count": 8,
    "vocab_size": VOCAB,
    "logit_scale": 4.0,
}
FACTORS = {"attention.scale": 0.25, "embedding_scale": 6.0, "residual_scale": 0.22}
NAMES = DENSE_NAMES | QKV_BIAS_NAMES | {"model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias"}


def granite(**options):
    from transformers import GraniteConfig

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "logits_scaling": 4.0,
    }
    return random_model(GraniteConfig(**sizes, **options))


def to_gguf(tensors):
    names = renamed(NAMES, LAYERS)
    for name, values in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        yield names[name], values if heads is None else interleaved(values, heads)


@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_granite(tmp_path, tied, biases):
    model = granite(
        attention_multiplier=0.25, embedding_multiplier=6.0, residual_multiplier=0.22, tie_word_embeddings=tied,
        attention_bias=biases,
    )  # fmt: skip
    check_architecture(tmp_path, model, "granite", METADATA | FACTORS, to_gguf)
    config = converted_config(tmp_path)
    assert config["architectures"] == ["GraniteForCausalLM"]
    assert config["residual_multiplier"] == 0.22, "the shortest decimal of the file's fp32 value"


def test_factors_by_default(tmp_path):
    """llama.cpp's, not those of transformers, whose attention would not be divided by the root of the head size."""
    model = granite(attention_multiplier=8**-0.5)
    check_architecture(tmp_path, model, "granite", METADATA, to_gguf)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"logit_scale": None}, "lacks the metadata granite.logit_scale"),
        ({"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is False, which is not supported; expected True"),
        ({"expert_count": 8, "expert_used_count": 2}, "granite.expert_count is 8, which is not supported; expected 0"),
        ({"deepstack_mapping": [-1, 1]}, "granite.deepstack_mapping is not understood"),
    ],
)
def test_refusals(tmp_path, metadata, match):
    path = write_gguf(tmp_path / "model.gguf", "granite", METADATA | metadata, to_gguf(granite().state_dict()))
    with pytest.raises(ConversionError, match=match):
        GGUFSource(path)
