"""olmo2, with windows (Olmo 3) and without, against transformers."""

import pytest
from gguf_models import DENSE_NAMES, VOCAB, check_architecture, converted_config, random_model, renaming, write_gguf

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, WINDOW = 5, 6
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 500000.0,
}
NAMES = {name: ours for name, ours in DENSE_NAMES.items() if "input_layernorm" not in name} | {
    "model.layers.{}.self_attn.q_norm.weight": "blk.{}.attn_q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "blk.{}.attn_k_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.post_attention_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "blk.{}.post_ffw_norm.weight",
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
YARN_METADATA = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
    "rope.scaling.yarn_attn_factor": 1.2079441541679836,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
LOCAL, FULL = "sliding_attention", "full_attention"


def olmo3(**options):
    from transformers import Olmo3Config

    return random_model(Olmo3Config(**SIZES, rope_theta=500000.0, sliding_window=WINDOW, **options))


@pytest.mark.parametrize("windows", [{}, {"attention.sliding_window": 0}], ids=["", "window 0"])
def test_olmo2(tmp_path, windows):
    from transformers import Olmo2Config

    model = random_model(Olmo2Config(**SIZES, rope_theta=500000.0))
    check_architecture(tmp_path, model, "olmo2", METADATA | windows, renaming(NAMES, LAYERS))
    assert converted_config(tmp_path)["architectures"] == ["Olmo2ForCausalLM"]


@pytest.mark.parametrize(
    ("layer_types", "metadata"),
    [
        ([LOCAL, LOCAL, LOCAL, FULL, LOCAL], {}),
        ([LOCAL, FULL, LOCAL, FULL, LOCAL], {"attention.sliding_window_pattern": 2}),
        ([FULL, LOCAL, LOCAL, FULL, FULL], {"attention.sliding_window_pattern": [False, True, True, False, False]}),
    ],
    ids=["by default", "every second", "named"],
)
def test_olmo3(tmp_path, layer_types, metadata):
    """Rope scaling is that of the layers without windows."""
    model = olmo3(rope_scaling=dict(YARN), layer_types=layer_types)
    metadata = METADATA | YARN_METADATA | {"attention.sliding_window": WINDOW, "rope.freq_base_swa": 500000.0} | metadata
    check_architecture(tmp_path, model, "olmo2", metadata, renaming(NAMES, LAYERS))
    config = converted_config(tmp_path)
    assert config["architectures"] == ["Olmo3ForCausalLM"]
    assert (config["layer_types"], config["sliding_window"]) == (layer_types, WINDOW)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"rope.freq_base_swa": 10000.0}, r"rope.freq_base_swa is 10000.0, which is not supported; expected 500000.0"),
        ({"rope.freq_base": 10000.0}, r"rope.freq_base is 10000.0, which is not supported; expected 500000.0"),
        ({"attention.sliding_window_pattern": [True]}, r"sliding_window_pattern has 1 entries, expected one for each of 5"),
        ({"attention.clamp_kqv": 8.0}, "olmo2.attention.clamp_kqv is not understood"),
    ],
)
def test_refusals(tmp_path, metadata, match):
    tensors = renaming(NAMES, LAYERS)(olmo3().state_dict())
    path = write_gguf(tmp_path / "model.gguf", "olmo2", METADATA | {"attention.sliding_window": WINDOW} | metadata, tensors)
    with pytest.raises(ConversionError, match=match):
        GGUFSource(path)
