"""phi3 against transformers: Phi-3, its long contexts, and Phi-4."""

import math

import pytest
import torch
from gguf_models import DENSE_NAMES, VOCAB, check_architecture, converted_config, random_model, renaming, write_gguf

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource

LAYERS, ROTARY = 2, 6
METADATA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": 0,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 8,
    "rope.scaling.original_context_length": 256,
}
NAMES = {name: ours for name, ours in DENSE_NAMES.items() if "self_attn" not in name and "mlp" not in name} | {
    "model.layers.{}.self_attn.qkv_proj.weight": "blk.{}.attn_qkv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.mlp.gate_up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}
LONG, SHORT = [1.25, 3.5, 9.0], [1.0, 1.125, 2.0]


def phi3(**options):
    from transformers import Phi3Config

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "pad_token_id": 0,
    }
    return random_model(Phi3Config(**{**sizes, "original_max_position_embeddings": 256, **options}))


def long_metadata(original):
    factor = math.sqrt(1 + math.log(256 / original) / math.log(original))
    return METADATA | {
        "rope.dimension_count": ROTARY,
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": factor,
    }


def long_to_gguf(tensors):
    yield from renaming(NAMES, LAYERS)(tensors)
    yield "rope_factors_long.weight", torch.tensor(LONG)
    yield "rope_factors_short.weight", torch.tensor(SHORT)


@pytest.mark.parametrize("window", [0, 6], ids=["no window", "window"])
def test_phi3(tmp_path, window):
    model = phi3(sliding_window=window or None)
    metadata = METADATA | {"attention.sliding_window": window}
    check_architecture(tmp_path, model, "phi3", metadata, renaming(NAMES, LAYERS))
    config = converted_config(tmp_path)
    assert config["sliding_window"] == (window or None)
    assert "rope_scaling" not in config


@pytest.mark.parametrize("original", [16, 64], ids=["long factors", "short factors"])
@pytest.mark.parametrize("says", [{}, {"rope.scaling.type": "longrope"}, {"rope.scaling.attn_factor": None}])
def test_longrope(tmp_path, original, says):
    """24 positions, more than one of the original contexts; a part of each head turns; tied, as Phi-4-mini is."""
    model = phi3(
        rope_scaling={"type": "longrope", "long_factor": LONG, "short_factor": SHORT},
        original_max_position_embeddings=original, partial_rotary_factor=0.75, tie_word_embeddings=True,
    )  # fmt: skip
    check_architecture(tmp_path, model, "phi3", long_metadata(original) | says, long_to_gguf)
    config = converted_config(tmp_path)
    assert config["rope_scaling"] == {"type": "longrope", "long_factor": LONG, "short_factor": SHORT}
    assert (config["original_max_position_embeddings"], config["partial_rotary_factor"]) == (original, 0.75)


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"rope.scaling.attn_factor": 2.0}, "phi3.rope.scaling.attn_factor is 2.0, which is not supported; expected 1.41421"),
        ({"rope.scaling.factor": -1.0}, "phi3.rope.scaling.factor must be a number above 0, got -1.0"),
        ({"rope.dimension_count": 8}, "rope_factors_short.weight have 3 and 3 values, the metadata ask for 4"),
        ({"attention.key_length": 16, "attention.value_length": 16}, "key_length is 16, which is not supported; expected 8"),
    ],
)
def test_refusals_of_long_files(tmp_path, metadata, match):
    path = write_gguf(tmp_path / "model.gguf", "phi3", long_metadata(16) | metadata, long_to_gguf(phi3().state_dict()))
    with pytest.raises(ConversionError, match=match):
        GGUFSource(path)


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf])
def test_impossible_factors(tmp_path, factor):
    tensors = [
        (name, torch.full_like(values, factor) if name == "rope_factors_long.weight" else values)
        for name, values in long_to_gguf(phi3().state_dict())
    ]
    path = write_gguf(tmp_path / "model.gguf", "phi3", long_metadata(16), tensors)
    with pytest.raises(ConversionError, match=r"rope_factors_short\.weight must hold numbers above 0"):
        GGUFSource(path)


@pytest.mark.parametrize(
    ("metadata", "extra", "match"),
    [
        (
            {"rope.scaling.type": "longrope"},
            [],
            "lacks 2 tensors of rope scaling longrope: rope_factors_long.weight",
        ),
        ({"rope.scaling.factor": 2.0}, [], "phi3 with another rope scaling than longrope is not supported"),
        ({}, ["rope_factors_long.weight"], "lacks 1 tensors of rope scaling longrope: rope_factors_short.weight"),
        ({}, ["blk.0.attn_qkv.bias"], "unknown for architecture phi3: blk.0.attn_qkv.bias"),
        ({"expert_count": 16}, [], "phi3.expert_count is not understood"),
    ],
)
def test_refusals(tmp_path, metadata, extra, match):
    tensors = [*renaming(NAMES, LAYERS)(phi3().state_dict()), *((name, torch.ones(4)) for name in extra)]
    with pytest.raises(ConversionError, match=match):
        GGUFSource(write_gguf(tmp_path / "model.gguf", "phi3", METADATA | metadata, tensors))
