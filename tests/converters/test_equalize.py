"""Scales moved between operations, the search for them, and the choice among methods."""

import json
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import MODELS, SIZES, VOCAB, folded_logits, logits, make_model, relative_error, tokens
from torch.nn import functional as F
from typer.testing import CliRunner

from vllm_w8a8_plugin.cli import app
from w8a8_converters.checkpoint import HuggingFaceSource
from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.folding import options as folding_options
from w8a8_converters.folding import quality
from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.equalize import equalize, expand, move_scale, search
from w8a8_converters.folding.options import FoldingOptions
from w8a8_converters.folding.quality import Candidate, choose, divergence
from w8a8_converters.folding.rotate import rotate
from w8a8_converters.folding.sensitivity import Sensitive
from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.folding.stream import FakeQuantLinear, Streamer
from w8a8_kernels.nn import W8A8Linear


def open_model(folder):
    source = FoldedSource(HuggingFaceSource(folder))
    return source, Model(source, "--equalize")


def consumers(model):
    return {name for layer in model.layers for pair in layer.pairs for name in pair.consumers if not name.endswith(".gate")}


def sensitive(x, weight, gradient=1.0):
    """A layer whose outputs matter alike, but for random signs."""
    signs = torch.randint(0, 2, (2, len(x), len(weight)), generator=torch.Generator().manual_seed(3)) * 2 - 1
    return Sensitive(x, weight, gradient * signs)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_any_scales_keep_the_function(tmp_path, name, sizes):
    """At every pair, between 1/8 and 8; with norms' weights written in bf16, whose rounding the layers behind make up for."""
    unquantized = make_model(tmp_path / "src", name, sizes)
    source, model = open_model(tmp_path / "src")
    generator = torch.Generator().manual_seed(0)
    pairs = [pair for layer in model.layers for pair in layer.pairs]
    assert {pair.kind for pair in pairs} == ({"v_o", "up_down"} if name == "olmo2" else {"norm", "v_o", "up_down"})
    for pair in pairs:
        channels = source.tensors[f"{pair.producer}.weight"].shape[0]
        scale = 2 ** (6 * torch.rand(channels, generator=generator) - 3)
        move_scale(source, model, pair, scale, torch.bfloat16)
        stored = source.whole(f"{pair.producer}.weight")
        assert pair.kind != "norm" or torch.equal(stored.bfloat16().float(), stored)
    assert relative_error(folded_logits(source, tmp_path / "folded"), logits(unquantized)) < 1e-4


def test_a_channel_that_a_norm_turns_off_stays_off(tmp_path):
    unquantized = make_model(tmp_path / "src", "llama")
    with torch.no_grad():
        for layer in unquantized.model.layers:
            layer.input_layernorm.weight[:3] = 0
    unquantized.save_pretrained(tmp_path / "src")
    source, model = open_model(tmp_path / "src")
    for layer in model.layers:
        move_scale(source, model, layer.pairs[0], torch.full((96,), 3.0), torch.float32)
    assert relative_error(folded_logits(source, tmp_path / "folded"), logits(unquantized)) < 1e-4


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", MODELS)
def test_search_through_the_model_keeps_its_function(tmp_path, name, rotated):
    unquantized = make_model(tmp_path / "src", name)
    source, model = open_model(tmp_path / "src")
    if rotated:
        rotate(source, model, untie=True)
    blocks = dict.fromkeys(consumers(model), 0)
    pairs = equalize(source, Streamer(source, model), tokens(), blocks, lambda _: torch.float32)
    expected = [pair.producer for layer in model.layers for pair in layer.pairs]
    # Which experts get tokens depends on the text.
    assert {pair.producer for pair in pairs} == set(expected) or name == "mixtral"
    assert all(pair.cost <= pair.cost_before for pair in pairs)
    assert sum(pair.strength is not None for pair in pairs) > len(pairs) / 2
    assert relative_error(folded_logits(source, tmp_path / "folded"), logits(unquantized)) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_streaming_is_what_transformers_computes(tmp_path, name):
    unquantized = make_model(tmp_path / "src", name)
    source, model = open_model(tmp_path / "src")
    streamer = Streamer(source, model)
    hidden = streamer.start(source, tokens())
    names = set()
    for index, layer in streamer.layers(source):
        names |= streamer.linears(index, layer).keys()
        hidden = streamer.run(index, layer, hidden)
    got = torch.cat(list(streamer.logits(source, hidden, {})), dim=1)
    assert relative_error(got, logits(unquantized).flatten(0, 1)) < 1e-5
    assert consumers(model) <= names


def test_streamed_int8_layers_are_those_of_the_kernels():
    linear, x = torch.nn.Linear(64, 24).requires_grad_(False), torch.randn(3, 5, 64)
    for block in (0, 32):
        got = FakeQuantLinear(linear.weight, linear.bias, block)(x)
        module = W8A8Linear.from_linear(linear, block)
        assert relative_error(got, module(x)) < 1e-3
        assert relative_error(got, linear(x)) < 0.03


def test_search_moves_a_planted_outlier():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator)
    x[:, 7] *= 100
    weight = torch.randn(32, 64, generator=generator)
    weight[:, 7] /= 100
    found = search([(sensitive(x, weight), 0)])
    assert found.strength is not None
    assert found.cost < found.cost_before / 100
    exact = F.linear(x, weight)
    assert relative_error(F.linear(x / found.scale, weight * found.scale), exact) < 1e-5
    assert float(found.scale[7] / found.scale.median()) > 20


def test_search_looks_at_what_matters():
    """Two consumers that want opposite scales: the one whose outputs the model's predictions depend on gets its own."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(256, 64, generator=generator), torch.randn(2, 32, 64, generator=generator)
    x[:, 7] *= 30
    weights[0][:, 7] /= 30
    weights[1][:, 7] *= 30
    scales = []
    for matters in (0, 1):
        consumers = [(sensitive(x, weight, 1.0 if i == matters else 1e-3), 0) for i, weight in enumerate(weights)]
        alone = search([consumers[matters]])
        scales.append(search(consumers).scale)
        assert search(consumers).cost < 2 * alone.cost
    assert float(scales[0][7] / scales[0].median()) > 2 * float(scales[1][7] / scales[1].median())


def test_both_sizes_of_channels_are_tried():
    """A channel with one large value among small ones is small by its mean square, and large by its magnitude."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(256, 64, generator=generator), torch.randn(32, 64, generator=generator)
    x[5, ::2] *= 50
    assert search([(sensitive(x, weight), 64)]).size == "rms"
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(256, 64, generator=generator), torch.randn(32, 64, generator=generator)
    x[::10, 9] *= 100
    assert search([(sensitive(x, weight), 0)]).size == "amax", "the rows with the large value make the error"


def test_search_leaves_what_is_even():
    """Signs only: every channel is alike, no scale can be closer, and none is taken."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(0, 2, (64, 32), generator=generator).float() * 2 - 1 for _ in range(2))
    found = search([(sensitive(x, weight), 0)])
    assert found.strength is found.size is None
    assert found.cost == found.cost_before
    assert torch.equal(found.scale, torch.ones(32))


def test_search_with_unused_channels():
    x, weight = torch.randn(64, 32), torch.randn(8, 32)
    x[:, 3], weight[:, 5] = 0, 0
    scale = search([(sensitive(x, weight), 0)]).scale
    assert scale[3] == scale[5] == 1
    assert torch.isfinite(scale).all()
    assert search([(sensitive(torch.zeros(4, 32), weight), 0)]).strength is None


def test_query_heads_share_the_scales_of_their_values():
    scale = torch.arange(1.0, 7.0)  # 2 key-value heads of 3 channels, 4 query heads
    assert expand(scale, (3, 6), 12).tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6, 4, 5, 6]
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 12, generator=generator), torch.randn(8, 12, generator=generator)
    x[:, 4] *= 50  # channel 1 of the second query head: its values are those of the first key-value head
    found = search([(sensitive(x, weight), 0)], (3, 6))
    assert found.strength is not None
    assert found.scale.argmax() == 1


def test_divergence_in_pieces():
    generator = torch.Generator().manual_seed(0)
    a, b = (30 * torch.randn(5, 90, generator=generator) for _ in range(2))
    expected = F.kl_div(b.double().log_softmax(1), a.double().log_softmax(1), log_target=True, reduction="batchmean")
    assert divergence(a.split(40, 1), b.split(40, 1), 5) == pytest.approx(float(expected), rel=1e-9)
    assert divergence(a.split(7, 1), a.split(7, 1), 5) == pytest.approx(0, abs=1e-12)


def test_the_simplest_of_equals_is_chosen():
    def candidates(*kl):
        return [Candidate(None, hadamard, kl=value) for hadamard, value in zip((0, "auto"), kl, strict=True)]

    assert choose(candidates(0.102, 0.1)).name == "rtn"
    assert choose(candidates(0.11, 0.1)).name == "hadamard"
    assert choose(candidates(0.1, 0.2)).name == "rtn"


@pytest.fixture
def word_model(tmp_path):
    """A tiny model with a tokenizer of 61 tokens, and a text of 900 of them."""
    tokenizers = pytest.importorskip("tokenizers")

    def make(name="llama-tied"):
        model = make_model(tmp_path / "src", name)
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "src" / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        (tmp_path / "src" / "tokenizer_config.json").write_text(json.dumps(settings))
        words = torch.randint(3, VOCAB, (900,), generator=torch.Generator().manual_seed(2)).tolist()
        (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in words))
        return tmp_path / "src", model

    return make


@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors", "bf16"])
@pytest.mark.parametrize("name", ["llama-biases", "gemma3_text", "mixtral"])
def test_convert(word_model, tmp_path, name, fmt):
    src, _ = word_model(name)
    folding = FoldingOptions(equalize=True, calibration=tmp_path / "text.txt")
    report = convert(src, tmp_path / "out", format=fmt, folding=folding)
    said = report.folding["equalize"]
    assert "text.txt" in said["text"]
    assert sum(said["strengths"].values()) == len(said["pairs"])
    names = load_file(next((tmp_path / "out").glob("*.safetensors"))).keys()
    plain = convert(src, tmp_path / "plain", format=fmt)
    assert names == load_file(next((tmp_path / "plain").glob("*.safetensors"))).keys()
    assert report.output_bytes == plain.output_bytes


def test_quality_auto(word_model, tmp_path):
    src, _ = word_model()
    stages = set()

    def progress(stage, done, total):
        assert 0 <= done <= total
        stages.add(stage)

    folding = FoldingOptions(quality="auto", calibration=tmp_path / "text.txt")
    report = convert(src, tmp_path / "out", folding=folding, progress=progress)
    said = report.folding["quality"]
    assert {"rtn", "hadamard", "rotate", "hadamard + rotate"} <= said["kl"].keys()
    assert len(said["kl"]) >= 6
    assert said["kl"][said["chosen"]] <= 1.03 * min(said["kl"].values())
    assert stages == {"check", "write", "quality"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["quantization_config"]["hadamard"] != 0) == ("hadamard" in said["chosen"])
    assert config["tie_word_embeddings"], "no bytes are added without a budget"
    assert any(note.startswith("chosen: ") and said["chosen"] in note for note in report.notes)
    assert any("--quality-budget" in note for note in report.notes)

    folding = FoldingOptions(quality="auto", calibration=tmp_path / "text.txt", quality_budget="1MB")
    with_budget = convert(src, tmp_path / "larger", folding=folding)
    assert with_budget.folding["quality"]["kl"]["rtn"] == said["kl"]["rtn"]
    assert with_budget.folding["quality"]["kl"]["rotate"] != said["kl"]["rotate"], "the residual stream is rotated, too"
    assert with_budget.lm_head_extra_bytes <= 1e6

    folding = FoldingOptions(quality="auto", calibration=tmp_path / "text.txt")
    report = convert(src, tmp_path / "ct", format="compressed-tensors", folding=folding)
    assert not any("hadamard" in name for name in report.folding["quality"]["kl"])


@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors"])
def test_quality_auto_keeps_what_costs_most(word_model, tmp_path, fmt):
    """Attention of the first layer is made to depend on its scores: their error is most of all, and the budget pays for it."""
    src, model = word_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 2
    model.save_pretrained(src)
    fused = "model.layers.0.self_attn.qkv_proj"
    parts = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    text = tmp_path / "text.txt"
    without, with_budget = (FoldingOptions(quality="auto", calibration=text, quality_budget=size) for size in (0, "30kB"))
    plain = convert(src, tmp_path / "none", format=fmt, folding=without)
    report = convert(src, tmp_path / "out", format=fmt, folding=with_budget)
    said = report.folding["quality"]
    assert plain.folding["quality"]["unquantized"] == {}
    assert parts < plain.folding["quality"]["predicted_kl"].keys()
    assert list(said["unquantized"]) == [fused]
    assert said["chosen"].endswith(" + keep")
    assert said["kl"][said["chosen"]] < 0.9 * said["kl"][said["chosen"].removesuffix(" + keep")]
    extra = report.output_bytes - plain.output_bytes
    assert said["unquantized"][fused]["extra_bytes"] == pytest.approx(extra, abs=500)  # but for the header
    assert extra <= said["budget_bytes"] == 30_000
    assert set(report.ignore) == {*plain.ignore, *parts}
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert parts <= set(config["ignore"])
    tensors = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert all(tensors[f"{part}.weight"].dtype.is_floating_point for part in parts)
    assert not parts & said["predicted_kl"].keys()
    assert list(said["predicted_kl"].values()) == sorted(said["predicted_kl"].values(), reverse=True)
    assert any(note.startswith("left unquantized") and fused in note for note in report.notes)
    assert any(note.startswith("what is left comes from: ") for note in report.notes)


@pytest.mark.parametrize("name", ["gemma3_text", "mixtral"])
def test_quality_auto_of_other_architectures(word_model, tmp_path, name):
    src, _ = word_model(name)
    folding = FoldingOptions(quality="auto", calibration=tmp_path / "text.txt", quality_budget="50%")
    report = convert(src, tmp_path / "out", quantize_lm_head=True, folding=folding)
    said = report.folding["quality"]
    assert said["kl"][said["chosen"]] <= 1.03 * min(said["kl"].values())
    int8 = {layer.name for layer in report.layers if not layer.name.endswith("lm_head")}
    assert said["predicted_kl"].keys() == int8


def test_other_blocks_end_in_the_checkpoint(word_model, tmp_path, monkeypatch):
    src, _ = word_model("llama")
    names = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkv"]
    gains = {"qkv_proj": (32, 16, 2.0, 1.0)}
    monkeypatch.setattr(quality, "choose_blocks", lambda predicted, blocks: (dict.fromkeys(names, 16), gains))
    monkeypatch.setattr(quality, "choose", lambda candidates: candidates[-1])
    folding = FoldingOptions(quality="auto", calibration=tmp_path / "text.txt", quality_budget=0)
    report = convert(src, tmp_path / "out", folding=folding)
    assert {layer.name for layer in report.layers if layer.hadamard == 16 and layer.shape[1] == 96} == set(names)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["hadamard_blocks"] == dict.fromkeys(("q_proj", "k_proj", "v_proj"), 16)
    assert report.folding["quality"]["chosen"].endswith(" + blocks")
    assert report.folding["quality"]["blocks"]["qkv_proj"]["block"] == 16
    assert any(note.startswith("Hadamard blocks of 16 instead of 32 in qkv_proj") for note in report.notes)


def test_an_untied_head_is_paid_from_the_same_budget(word_model, tmp_path, monkeypatch):
    """61 x 96 fp32 values, and then too little is left for the 27 kB that q, k and v of one layer would add."""
    src, model = word_model("llama-tied")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 2
    model.save_pretrained(src)
    monkeypatch.setattr(quality, "choose", lambda candidates: [c for c in candidates if c.rotation and c.hadamard == 0][-1])
    reports = []
    for budget in ("30kB", "60kB"):
        folding = FoldingOptions(quality="auto", calibration=tmp_path / "text.txt", quality_budget=budget)
        reports.append(convert(src, tmp_path / budget, folding=folding).folding)
    assert [report["rotate"]["untied"] for report in reports] == ["lm_head.weight"] * 2
    assert [list(report["quality"]["unquantized"]) for report in reports] == [[], ["model.layers.0.self_attn.qkv_proj"]]


def test_command(word_model, tmp_path, monkeypatch):
    src, _ = word_model()
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the command's own handler must not stay in this process
    run = CliRunner().invoke
    text = str(tmp_path / "text.txt")
    result = run(app, ["convert", str(src), str(tmp_path / "a"), "--rotate", "--untie", "--equalize", "--calibration", text])
    assert result.exit_code == 0, result.output
    assert "lm_head, no longer tied to the embedding, adds 0.0 MB" in result.output
    folding = json.loads((tmp_path / "a" / "conversion_report.json").read_text())["folding"]
    assert folding["rotate"]["residual"]
    assert folding["equalize"]["pairs"]
    result = run(app, ["convert", str(src), str(tmp_path / "b"), "--quality", "auto", "--quality-budget", "1MB",
                       "--calibration", text])  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "chosen: " in result.output
    result = run(app, ["convert", str(src), str(tmp_path / "c"), "--untie"])
    assert result.exit_code == 1
    assert "error: --untie has no effect without --rotate" in result.output


@pytest.mark.parametrize(
    ("options", "match"),
    [({"format": "bf16"}, "no effect with --format bf16"), ({"hadamard": "64"}, "leave out --hadamard")],
    ids=str,
)
def test_quality_auto_refuses(word_model, tmp_path, options, match):
    src, _ = word_model()
    with pytest.raises(ConversionError, match=match):
        convert(src, tmp_path / "out", folding=FoldingOptions(quality="auto"), **options)


def test_transformers_is_missing(word_model, tmp_path, monkeypatch):
    src, _ = word_model()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConversionError, match="pip install transformers"):
        convert(src, tmp_path / "out", folding=FoldingOptions(equalize=True))
    assert convert(src, tmp_path / "out", folding=FoldingOptions(rotate=True)).layers


@pytest.mark.parametrize("text", [None, b"w3 w4", b"\xff\xfe\x00"], ids=["missing", "short", "binary"])
def test_bad_calibration_text(word_model, tmp_path, text):
    src, _ = word_model()
    if text is not None:
        (tmp_path / "bad.txt").write_bytes(text)
    with pytest.raises(ConversionError, match=r"calibration text .*bad\.txt (cannot be read|has 2 tokens)"):
        convert(src, tmp_path / "out", folding=FoldingOptions(equalize=True, calibration=tmp_path / "bad.txt"))


def test_tokenizer_is_missing_or_damaged(word_model, tmp_path):
    src, _ = word_model()
    (src / "tokenizer.json").write_text("{}")
    folding = FoldingOptions(equalize=True, calibration=tmp_path / "text.txt")
    with pytest.raises(ConversionError, match=r"its tokenizer cannot be loaded to read a text: \w+: .*[^.]\. Copy .* again$"):
        convert(src, tmp_path / "out", folding=folding)
    (src / "tokenizer.json").unlink()
    for tokenizer_config in ("kept", "removed"):
        if tokenizer_config == "removed":
            (src / "tokenizer_config.json").unlink()
        with pytest.raises(ConversionError) as raised:
            convert(src, tmp_path / "out", folding=folding)
        assert str(raised.value) == (
            f"{src} has no tokenizer, with which --equalize, --quality and --activations read a text: it has none of "
            "tokenizer.json, tokenizer.model, vocab.json, tekken.json. Copy the tokenizer's files of the original model into "
            "that folder"
        )


def test_damaged_weights_are_told_before_the_model_runs(word_model, tmp_path):
    src, model = word_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(src)
    for folding in (FoldingOptions(equalize=True), FoldingOptions(rotate=True), FoldingOptions(quality="auto")):
        with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.up_proj\.weight .* holds NaN"):
            convert(src, tmp_path / "out", folding=folding)


def test_nothing_is_left_where_it_is_interrupted(word_model, tmp_path, monkeypatch):
    src, _ = word_model()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(folding_options, "_add_scales", interrupt)
    folding = FoldingOptions(equalize=True, calibration=tmp_path / "text.txt")
    with pytest.raises(KeyboardInterrupt):
        convert(src, tmp_path / "out", folding=folding)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src", "text.txt"]
