"""Rotations folded into the weights: the function stays, and the report says what was done."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, SIZES, folded_logits, logits, make_model, relative_error

from w8a8_converters.checkpoint import HuggingFaceSource
from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.folding.architectures import ARCHITECTURES, Model
from w8a8_converters.folding.options import FoldingOptions
from w8a8_converters.folding.rotate import rotate
from w8a8_converters.folding.rotation import Rotation
from w8a8_converters.folding.source import FoldedSource
from w8a8_kernels.hadamard import block_size, hadamard_transform
from w8a8_kernels.quantize.weight import quantize_weight

ONLY_HEADS = {"gemma2", "gemma3_text", "olmo2"}


@pytest.mark.parametrize("size", [1, 2, 3, 12, 20, 64, 80, 96, 144, 576, 896, 1023, 1536])
def test_rotation_is_orthonormal_and_flat(size):
    matrix = Rotation(size, seed=1).apply(torch.eye(size)).double()
    assert float((matrix @ matrix.T - torch.eye(size)).abs().max()) < 3e-6
    assert float(matrix.abs().max()) <= math.sqrt(2 / size) + 1e-6
    again, other = Rotation(size, seed=1), Rotation(size, seed=2)
    assert torch.equal(again.apply(torch.eye(size)).double(), matrix)
    assert size < 4 or not torch.equal(other.apply(torch.eye(size)).double(), matrix)


def test_rotation_of_rows_is_that_of_the_outputs():
    rotation, x = Rotation(12, seed=0), torch.randn(5, 7)
    weight, bias = torch.randn(36, 7), torch.randn(36)
    rotated = x @ rotation.apply_to_rows(weight).T + rotation.apply_to_rows(bias)
    assert relative_error(rotated, rotation.apply(x @ weight.T + bias)) < 1e-6


def test_the_run_time_transform_does_not_take_the_rotation_back():
    """A channel with an outlier is still spread over the whole row behind it, not only over a block."""
    outlier = torch.zeros(512)
    outlier[100] = 1000.0
    assert float(hadamard_transform(Rotation(512, seed=0).apply(outlier), 64).abs().max()) < 1000 * 5 / math.sqrt(512)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_function_is_kept(tmp_path, name, sizes):
    model = make_model(tmp_path / "src", name, sizes)
    source = FoldedSource(HuggingFaceSource(tmp_path / "src"))
    before = {tensor: source.whole(tensor) for tensor in source.tensors}
    report = rotate(source, Model(source, "--rotate"), untie=True)
    assert report.residual == (name not in ONLY_HEADS)
    assert report.untied == ("lm_head.weight" if MODELS[name].get("tie_word_embeddings") else "")
    assert relative_error(folded_logits(source, tmp_path / "folded"), logits(model)) < 1e-4
    changed = {tensor.rpartition(".")[0].rpartition(".")[2] for tensor in before if not same(before, source, tensor)}
    assert {"v_proj", "o_proj"} <= changed
    assert changed == {"v_proj", "o_proj"} or report.residual
    assert not {"q_norm", "k_norm"} & changed
    if report.residual:
        assert source.whole("model.norm.weight").unique().tolist() == [1.0 - ARCHITECTURES[name.partition("-")[0]].norm_offset]


def same(before, source, tensor):
    return torch.equal(before[tensor], source.whole(tensor))


def test_a_rotation_left_out_is_seen(tmp_path):
    """The bound can fail: one layer's o_proj that is not rotated is far beyond it."""
    model = make_model(tmp_path / "src", "llama")
    source = FoldedSource(HuggingFaceSource(tmp_path / "src"))
    rotate(source, Model(source, "--rotate"), untie=False)
    source._operations["model.layers.1.self_attn.o_proj.weight"].pop()
    assert relative_error(folded_logits(source, tmp_path / "folded"), logits(model)) > 0.1


def test_tied_model_gets_only_head_rotations_unless_asked(tmp_path):
    make_model(tmp_path / "src", "llama-tied")
    report = convert(tmp_path / "src", tmp_path / "out", format="bf16", folding=FoldingOptions(rotate=True))
    assert report.folding["rotate"]["residual"] is False
    assert any("R1" in note and "tied" in note and "--untie" in note for note in report.notes)
    before, after = load_file(tmp_path / "src" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"].to(torch.bfloat16))

    report = convert(tmp_path / "src", tmp_path / "untied", format="bf16", folding=FoldingOptions(rotate=True, untie=True))
    head = load_file(tmp_path / "untied" / "model.safetensors")["lm_head.weight"]
    assert report.lm_head_extra_bytes == head.nbytes == 61 * 96 * 2
    assert report.folding["rotate"]["seeds"] == (4000, 4001)
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    written = json.loads((tmp_path / "untied" / "conversion_report.json").read_text())
    assert written["folding"]["rotate"]["untied"] == "lm_head.weight"


@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors"])
def test_codes_come_from_the_unrounded_folded_weights(checkpoint, tmp_path, fmt):
    src = checkpoint(tied=False)
    convert(src, tmp_path / "out", format=fmt, folding=FoldingOptions(rotate=True))
    source = FoldedSource(HuggingFaceSource(src))
    rotate(source, Model(source, "--rotate"), untie=False)
    after = load_file(next((tmp_path / "out").glob("*.safetensors")))
    for kind in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        name = f"model.layers.1.{kind}.weight"
        weight = source.whole(name)
        codes, scale = quantize_weight(weight, hadamard=block_size(weight.shape[1]) if fmt == "w8a8" else 0)
        assert torch.equal(after[name], codes), name
        assert torch.equal(after[f"{name}_scale"], scale), name
    assert after["model.norm.weight"].dtype == torch.bfloat16
    assert after["model.norm.weight"].unique().tolist() == [1.0]


def test_rows_in_parts_are_those_of_the_whole(tmp_path):
    make_model(tmp_path / "src", "llama-biases")
    source = FoldedSource(HuggingFaceSource(tmp_path / "src"))
    rotate(source, Model(source, "--rotate"), untie=False)
    for name, info in source.tensors.items():
        parts = [source.rows(name, start, min(start + 5, info.n_rows)) for start in range(0, info.n_rows, 5)]
        assert torch.allclose(torch.cat(parts), source.whole(name), atol=1e-6), name


def test_unknown_architecture(checkpoint, tmp_path):
    src = checkpoint(config={"model_type": "gpt_neox"})
    for options in ({"rotate": True}, {"equalize": True}, {"quality": "auto"}):
        with pytest.raises(ConversionError, match=r"'gpt_neox' .* known are llama, mistral, .*mixtral$"):
            convert(src, tmp_path / "out", folding=FoldingOptions(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        ("model.layers.0.input_layernorm.bias", "not part of a llama model"),  # LayerNorm
        ("model.layers.1.self_attn.extra.weight", "not part of a llama model"),
        ("model.norm.bias", "not part of a llama model"),
    ],
)
def test_unknown_tensor(checkpoint, tmp_path, tensor, match):
    src = checkpoint(tensors={tensor: torch.ones(16, dtype=torch.bfloat16)})
    with pytest.raises(ConversionError, match=match):
        convert(src, tmp_path / "out", folding=FoldingOptions(rotate=True))


def test_missing_tensor(checkpoint, tmp_path):
    src = checkpoint(tensors={"model.layers.1.mlp.down_proj.weight": None})
    with pytest.raises(ConversionError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        convert(src, tmp_path / "out", folding=FoldingOptions(rotate=True))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"untie": True}, "--untie has no effect without --rotate"),
        ({"quality": "auto", "rotate": True}, "chooses by itself"),
        ({"quality": "best"}, "known is auto"),
        ({"rotate": True, "calibration": "text"}, "--calibration has no effect"),
        ({"rotate": True, "quality_budget": "1GB"}, "--quality-budget has no effect"),
        ({"quality": "auto", "quality_budget": "much"}, "is not a size"),
    ],
    ids=str,
)
def test_options_that_contradict(options, match):
    with pytest.raises(ConversionError, match=match):
        FoldingOptions(**options)


def test_values_beyond_fp16_are_refused_before_anything_is_written(tmp_path):
    """Folding a norm's weight can leave the range that the checkpoint's dtype has."""
    make_model(tmp_path / "src", "llama")
    state = {name: tensor.half() for name, tensor in load_file(tmp_path / "src" / "model.safetensors").items()}
    state["model.norm.weight"].fill_(6e4)
    state["lm_head.weight"].fill_(6e4)
    save_file(state, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"lm_head\.weight .* beyond float16"):
        convert(tmp_path / "src", tmp_path / "out", folding=FoldingOptions(rotate=True))
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
