"""starcoder2 against transformers."""

import pytest
from gguf_models import VOCAB, check_architecture, converted_config, random_model, renaming, write_gguf

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
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 1000000.0,
}
LINEAR_AND_NORMS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    **{
        f"model.layers.{{}}.{theirs}.{kind}": f"blk.{{}}.{ours}.{kind}"
        for theirs, ours in LINEAR_AND_NORMS.items()
        for kind in ("weight", "bias")
    },
}


def starcoder2(**options):
    from transformers import Starcoder2Config

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "norm_epsilon": 1e-5,
        "rope_theta": 1000000.0,
    }
    return random_model(Starcoder2Config(**sizes, **options))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_starcoder2(tmp_path, tied):
    check_architecture(tmp_path, starcoder2(tie_word_embeddings=tied), "starcoder2", METADATA, renaming(NAMES, LAYERS))
    config = converted_config(tmp_path)
    assert (config["architectures"], config["use_bias"]) == (["Starcoder2ForCausalLM"], True)


@pytest.mark.parametrize(
    ("without", "metadata", "match"),
    [
        ("ffn_up.bias", {}, "lacks 2 tensors: blk.0.ffn_up.bias, blk.1.ffn_up.bias"),
        (None, {"attention.layer_norm_epsilon": None}, "lacks the metadata .*layer_norm_epsilon"),
        (None, {"attention.layer_norm_rms_epsilon": 1e-5}, "starcoder2.attention.layer_norm_rms_epsilon is not understood"),
        (None, {"rope.dimension_count": 4}, "rope.dimension_count is 4, which is not supported; expected 8"),
    ],
)
def test_refusals(tmp_path, without, metadata, match):
    tensors = renaming(NAMES, LAYERS)(starcoder2(tie_word_embeddings=False).state_dict())
    kept = [(name, values) for name, values in tensors if without is None or not name.endswith(without)]
    with pytest.raises(ConversionError, match=match):
        GGUFSource(write_gguf(tmp_path / "model.gguf", "starcoder2", METADATA | metadata, kept))
