"""What int8 costs the model's predictions at each layer, and what is chosen by it: blocks, and layers left unquantized."""

import pytest
import torch
from tiny_models import make_model, tokens

from w8a8_converters.checkpoint import HuggingFaceSource
from w8a8_converters.errors import ConversionError
from w8a8_converters.folding import sensitivity, stream
from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.options import FoldingOptions
from w8a8_converters.folding.quality import _blocks_to_try, choose_blocks, choose_kept, divergence
from w8a8_converters.folding.sensitivity import predict, sensitivities
from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.folding.stream import Streamer
from w8a8_converters.formats import FORMATS
from w8a8_converters.plan import make_plan

MODEL_NAMES = ["llama-biases", "gemma2", "olmo2", "mixtral"]


def open_model(folder):
    source = FoldedSource(HuggingFaceSource(folder))
    return source, Streamer(source, Model(source, "--quality"))


def last_hidden(source, streamer, ids, blocks):
    hidden = streamer.start(source, ids)
    for index, layer in streamer.layers(source):
        streamer.quantize(index, layer, blocks)
        hidden = streamer.run(index, layer, hidden)
    return hidden


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_gradients_are_those_of_transformers(tmp_path, name, monkeypatch):
    """Through all layers, back to what the first one reads, and at every linear layer that transformers has by that name."""
    unquantized = make_model(tmp_path / "src", name)
    source, streamer = open_model(tmp_path / "src")
    above = torch.randn(2, 2, 24, 96, generator=torch.Generator().manual_seed(5))
    monkeypatch.setattr(streamer, "sampled_gradients", lambda *_: above)
    got = {}
    for _, layers in sensitivities(source, streamer, tokens()):
        got |= layers

    outputs, ends = {}, {}
    handles = [
        module.register_forward_hook(lambda _, args, output, name=name: outputs.__setitem__(name, output))
        for name, module in unquantized.named_modules()
        if name in got
    ]
    last = unquantized.model.layers[-1]
    handles.append(last.register_forward_hook(lambda _, args, output: ends.__setitem__("last", output)))
    unquantized(tokens())
    end = ends["last"][0] if isinstance(ends["last"], tuple) else ends["last"]
    compared = [name for name in got if name in outputs]
    assert len(compared) == (8 if name == "mixtral" else 14)
    for i, sample in enumerate(above):
        wanted = torch.autograd.grad(end, [outputs[name] for name in compared], sample, retain_graph=True)
        for name, gradient in zip(compared, wanted, strict=True):
            assert torch.allclose(got[name].gradients[i], gradient.flatten(0, -2), rtol=1e-3, atol=1e-4 * gradient.abs().max())
            assert got[name].x.shape == (48, got[name].weight.shape[1])


@pytest.mark.parametrize("name", ["llama-tied", "gemma2"])
def test_drawn_tokens_have_the_fisher_information(tmp_path, name, monkeypatch):
    """Over many draws, the mean square of gradient times error is the variance of what the error does to the logits."""
    make_model(tmp_path / "src", name)
    monkeypatch.setattr(stream, "_HEAD_PART_BYTES", 4 * 96 * 20)  # 61 rows of lm_head in four parts
    source, streamer = open_model(tmp_path / "src")
    hidden = last_hidden(source, streamer, tokens(), {})[:, :3]
    error = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(6)) * 1e-2

    def logits(of):
        return torch.cat(list(streamer.logits(source, of, {})), dim=1).double()

    gradients = streamer.sampled_gradients(source, hidden, 3000)
    got = (gradients * error).sum(dim=-1).square().mean(dim=0).flatten()
    probabilities = logits(hidden).softmax(dim=1)
    moved = (logits(hidden + error) - logits(hidden - error)) / 2
    wanted = (probabilities * moved.square()).sum(dim=1) - (probabilities * moved).sum(dim=1).square()
    assert torch.allclose(got.double(), wanted, rtol=0.25, atol=0.02 * float(wanted.max()))
    assert float(got.sum() / wanted.sum()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_predicted_costs_are_the_divergence(tmp_path, name, monkeypatch):
    """One layer in int8 at a time, without a transform and with one. Of Mixtral those with no router behind them."""
    monkeypatch.setattr(sensitivity, "_SAMPLES", 32)
    make_model(tmp_path / "src", name)
    source, streamer = open_model(tmp_path / "src")
    ids = tokens(48)
    ends = ("v_proj.weight", "down_proj.weight") if name == "llama" else ("w1.weight", "w2.weight")
    begin = "model.layers." if name == "llama" else "model.layers.1."
    names = [tensor.removesuffix(".weight") for tensor in source.tensors if tensor.endswith(ends) and tensor.startswith(begin)]
    predicted = predict(source, streamer, ids, dict.fromkeys(names, (0, 16)))
    reference = last_hidden(source, streamer, ids, {})
    for block in (0, 16):
        ratios = []
        for layer in names:
            moved = last_hidden(source, streamer, ids, {layer: block})
            pieces = streamer.logits(source, reference, {}), streamer.logits(source, moved, {})
            ratios.append(predicted[layer][block] / divergence(*pieces, ids.numel()))
        assert 0.8 < torch.tensor(ratios).log().mean().exp() < 1.25, ratios
        assert all(0.25 < ratio < 4 for ratio in ratios), ratios


def test_generators_of_logits_leave_no_mode_behind(tmp_path):
    make_model(tmp_path / "src", "llama")
    source, streamer = open_model(tmp_path / "src")
    hidden = last_hidden(source, streamer, tokens(), {})
    divergence(streamer.logits(source, hidden, {}), streamer.logits(source, hidden, {}), 48)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def layers_of(costs):
    """`0.q` -> the full name of a layer."""
    names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    return {f"model.layers.{key[0]}.{names[key[2:]]}": value for key, value in costs.items()}


def test_the_dearest_bytes_are_kept_first():
    costs = layers_of({"0.q": 3.0, "0.k": 0.0, "0.v": 0.0, "0.o": 4.0, "0.down": 9.0, "1.down": 8.0, "1.o": 0.1})
    saved = layers_of({"0.q": 10, "0.k": 5, "0.v": 5, "0.o": 20, "0.down": 100, "1.down": 60, "1.o": 20})
    qkv, o, down = "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
    other = "model.layers.1.mlp.down_proj"
    kept = choose_kept(costs, saved, 1000, 3000)
    assert list(kept) == [o, qkv, other, down], "1.o costs little more than its share of the bytes"
    assert kept[qkv] == (20, 3.0), "q, k and v are kept as one"
    assert list(choose_kept(costs, saved, 60, 3000)) == [o, qkv], "what does not fit is passed over"
    assert list(choose_kept(costs, saved, 99, 3000)) == [o, qkv]
    assert list(choose_kept(costs, saved, 100, 3000)) == [o, qkv, other]
    assert choose_kept(costs, saved, 0, 3000) == {}
    assert choose_kept(dict.fromkeys(costs, 1.0), dict.fromkeys(costs, 10), 1000, 70) == {}, "nothing stands out"


def test_experts_are_kept_all_or_none():
    experts = [f"model.layers.0.block_sparse_moe.experts.{i}.{w}" for i in range(2) for w in ("w1", "w2", "w3")]
    costs = {experts[0]: 50.0} | dict.fromkeys(experts[1:], 0.0) | {"model.layers.0.self_attn.o_proj": 1.0}
    saved = dict.fromkeys(costs, 10)
    assert choose_kept(costs, saved, 59, 10000) == {"model.layers.0.self_attn.o_proj": (10, 1.0)}
    assert choose_kept(costs, saved, 60, 10000) == {"model.layers.0.block_sparse_moe.experts": (60, 50.0)}


def test_blocks_of_a_kind():
    names = layers_of({"0.q": 0, "0.k": 0, "0.v": 0, "0.down": 0, "1.down": 0, "0.o": 0})
    blocks = dict.fromkeys(names, 64)
    predicted = {name: {64: 1.0, 128: 1.0} for name in names}
    q, k, v, down, other, o = predicted
    assert choose_blocks(predicted, blocks) == ({}, {})
    predicted[down][128], predicted[other][128] = 0.2, 1.1
    changed, gains = choose_blocks(predicted, blocks)
    assert changed == {down: 128, other: 128}, "one block for the whole kind"
    assert gains == {"down_proj": (64, 128, 2.0, pytest.approx(1.3))}
    predicted[q][128], predicted[k][128] = 0.5, 1.6
    assert choose_blocks(predicted, blocks)[0].keys() == {down, other}, "q gains less than k and v lose"
    predicted[k][128] = 1.0
    assert choose_blocks(predicted, blocks)[0].keys() == {q, k, v, down, other}
    predicted[o] = {64: 1.0, 32: 0.9}
    assert o not in choose_blocks(predicted, blocks)[0], "within the margin"
    predicted[o] = {64: 1.0, 32: 0.7}
    assert choose_blocks(predicted, blocks)[0][o] == 32
    del predicted[other][128]
    assert down not in choose_blocks(predicted, blocks)[0], "not every down_proj can have it"


@pytest.mark.parametrize(
    ("name", "K", "block", "heads", "expected"),
    [
        ("q_proj", 1536, 64, 9, {16, 32, 64, 128}),
        ("q_proj", 576, 64, 9, {16, 32, 64}),
        ("down_proj", 1536, 64, 9, {16, 32, 64, 128}),  # 9 heads run on 1 or 3 ranks: 512 each
        ("down_proj", 1536, 64, 8, {16, 32, 64}),  # 8 heads run on 8 ranks: 192 each
        ("down_proj", 12288, 64, 32, {16, 32, 64, 128}),
        ("down_proj", 1536, 0, 8, {0}),
    ],
    ids=str,
)
def test_blocks_to_try_cut_no_degree_off(name, K, block, heads, expected):
    assert _blocks_to_try(f"model.layers.0.mlp.{name}", K, block, heads) == expected


@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors"])
def test_plan_with_exceptions(checkpoint, fmt):
    source = HuggingFaceSource(checkpoint())
    keep = frozenset({"model.layers.1.self_attn.o_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"})
    blocks = {"model.layers.0.self_attn.o_proj": 0} if fmt == "w8a8" else {}
    plain, plan = (make_plan(source, FORMATS[fmt], (), False, "4GB", None, *more) for more in ((), (blocks, keep)))
    assert set(plan.quantization["ignore"]) == set(plain.quantization["ignore"]) | keep
    saved = {step.source.name.removesuffix(".weight"): step.saved for step in plain.steps}
    assert plan.output_bytes - plain.output_bytes == sum(saved[name] for name in keep) > 0
    assert not keep & {step.source.name.removesuffix(".weight") for step in plan.steps if step.scale is not None}
    if fmt == "w8a8":
        assert plan.quantization["hadamard_blocks"]["o_proj"] == 0


@pytest.mark.parametrize(
    ("text", "size"), [(None, 60_000), ("2.5%", 50_000), ("0", 0), (0, 0), ("0%", 0), ("3 kB", 3000), (77, 77)], ids=str
)
def test_budget(text, size):
    assert FoldingOptions(quality="auto", quality_budget=text).budget(2_000_000) == size


@pytest.mark.parametrize("text", ["3", " 2.5 "])
def test_budget_without_a_unit(text):
    """It would be some bytes, where per cent or megabytes are meant."""
    with pytest.raises(ConversionError, match=rf"{text!r} has no unit, .*: write {text.strip()}% or {text.strip()}MB"):
        FoldingOptions(quality="auto", quality_budget=text)


def test_budget_larger_than_the_model():
    with pytest.raises(ConversionError, match="quality budget 101% is more than the int8 model itself"):
        FoldingOptions(quality="auto", quality_budget="101%")


@pytest.mark.parametrize("text", ["much", "-1%", "%", "3 %%"])
def test_bad_budget(text):
    with pytest.raises(ConversionError, match=r"is not a size: write it as 500MB, 1GiB, 2% or 0"):
        FoldingOptions(quality="auto", quality_budget=text)
