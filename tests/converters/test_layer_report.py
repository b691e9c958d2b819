"""`report_layers`: noise and outliers of weights and inputs, held against the unquantized model in transformers."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, make_model
from typer.testing import CliRunner

from vllm_w8a8_plugin.cli import app
from w8a8_converters.checkpoint import HuggingFaceSource
from w8a8_converters.convert import REPORT_FILE, convert
from w8a8_converters.errors import BrokenFileError, ConversionError
from w8a8_converters.folding.calibration import read_tokens
from w8a8_converters.folding.options import FoldingOptions
from w8a8_converters.layer_report import LayerFigures, outlier_ratio, propose, report_layers


def hadamard_matrix(size: int) -> torch.Tensor:
    """Sylvester's, orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5


def transformed(x: torch.Tensor, block: int) -> torch.Tensor:
    return (x.unflatten(-1, (-1, block)) @ hadamard_matrix(block)).flatten(-2) if block else x


def ratio(rows: torch.Tensor) -> float:
    return (rows.abs().amax(-1) / rows.square().mean(-1).sqrt()).mean().item()


@pytest.fixture
def unquantized(tmp_path: Path) -> torch.nn.Module:
    """A tiny model in `src` with a tokenizer of words, some columns of a weight far out; and a text of 900 words."""
    tokenizers = pytest.importorskip("tokenizers")
    model = make_model(tmp_path / "src", "llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, 5] *= 20
        model.model.layers[0].input_layernorm.weight[7] = 30
    model.save_pretrained(tmp_path / "src")
    words = [f"w{i}" for i in range(VOCAB - 1)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "src" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (tmp_path / "src" / "tokenizer_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(words), (900,), generator=generator).tolist()
    (tmp_path / "text.txt").write_text(" ".join(words[i] for i in chosen))
    return model


@pytest.fixture
def converted(unquantized: torch.nn.Module, tmp_path: Path) -> Path:
    convert(tmp_path / "src", tmp_path / "out")
    return tmp_path / "out"


def test_weights(unquantized: torch.nn.Module, converted: Path) -> None:
    report = report_layers(converted)
    assert [layer.number for layer in report.layers] == [0] * 7 + [1] * 7
    said = {entry["name"]: entry for entry in json.loads((converted / REPORT_FILE).read_text())["layers"]}
    assert {layer.hadamard for layer in report.layers} >= {16, 32}
    for layer in report.layers:
        weight = unquantized.get_submodule(layer.name).weight.detach()
        assert layer.shape == tuple(weight.shape)
        assert (layer.hadamard, layer.sqnr_db) == (said[layer.name]["hadamard"], said[layer.name]["sqnr_db"])
        # From int8 codes: a hundredth off.
        assert layer.weight_outliers == pytest.approx(ratio(weight), rel=0.01)
        assert layer.weight_outliers_int8 == pytest.approx(ratio(transformed(weight, layer.hadamard)), rel=0.01)
    far_out = next(layer for layer in report.layers if layer.name == "model.layers.1.mlp.down_proj")
    assert far_out.kind == "down_proj"
    assert far_out.weight_outliers >= 1.5 * far_out.weight_outliers_int8
    assert report.proposal is None
    assert report.layers[0].input_outliers is None


def test_compressed_tensors_has_no_transform(unquantized: torch.nn.Module, tmp_path: Path) -> None:
    convert(tmp_path / "src", tmp_path / "ct", format="compressed-tensors")
    for layer in report_layers(tmp_path / "ct").layers:
        assert layer.weight_outliers == layer.weight_outliers_int8
        assert layer.weight_outliers == pytest.approx(ratio(unquantized.get_submodule(layer.name).weight), rel=0.01)


def test_outlier_ratio_leaves_out_rows_of_zeros() -> None:
    found = outlier_ratio(torch.tensor([[0.0, 0.0, 0.0, 0.0], [3.0, -3.0, 3.0, 3.0], [0.0, -2.0, 0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0]))


def test_activations(unquantized: torch.nn.Module, converted: Path, tmp_path: Path) -> None:
    told = []
    report = report_layers(converted, tmp_path / "text.txt", progress=lambda *step: told.append(step))
    assert [step for step in told if step[0] == "activations"] == [("activations", done, 4) for done in range(5)]
    inputs: dict[str, torch.Tensor] = {}
    for layer in report.layers:
        hook = lambda _, args, name=layer.name: inputs.__setitem__(name, args[0].flatten(0, -2))  # noqa: E731
        unquantized.get_submodule(layer.name).register_forward_pre_hook(hook)
    ids = read_tokens(HuggingFaceSource(tmp_path / "src"), tmp_path / "text.txt").fit
    with torch.no_grad():
        unquantized(ids)
    for layer in report.layers:
        x = inputs[layer.name]
        y = transformed(x, layer.hadamard)
        scale = y.abs().amax(-1, keepdim=True) / 127
        noise = (y / scale).round() * scale - y
        assert layer.input_outliers == pytest.approx(ratio(x), rel=1e-3)
        assert layer.input_outliers_int8 == pytest.approx(ratio(y), rel=1e-3)
        assert layer.input_sqnr_db == pytest.approx(10 * math.log10(y.square().sum() / noise.square().sum()), abs=0.05)
        assert layer.predicted_kl > 0
    q_proj = next(layer for layer in report.layers if layer.name == "model.layers.0.self_attn.q_proj")
    assert q_proj.input_outliers >= 1.5 * q_proj.input_outliers_int8
    assert report.proposal.total == pytest.approx(sum(layer.predicted_kl for layer in report.layers))
    assert report.text == f"text.txt, {ids.numel()} tokens"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_command_says_that_the_model_runs(converted: Path, tmp_path: Path, terminal: bool) -> None:
    """A line everywhere, and a bar of its steps on a terminal."""
    arguments = ["report", str(converted), "--activations", str(tmp_path / "text.txt")]
    environment = {"COLUMNS": "120", "TERM": "xterm", "FORCE_COLOR": "1" if terminal else ""}
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    line = f"running the unquantized model on {tmp_path / 'text.txt'}: 2 layers, forth and back\n"
    assert line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stderr)
    assert ("4/4" in result.stderr) == terminal


def test_the_source_may_have_moved(converted: Path, tmp_path: Path) -> None:
    (tmp_path / "src").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ConversionError, match=r"src, from which .*out was converted, is not there: name the model with --source"
    ):
        report_layers(converted, tmp_path / "text.txt")
    assert report_layers(converted, tmp_path / "text.txt", tmp_path / "elsewhere").proposal is not None
    make_model(tmp_path / "other", "llama", (144, 16, 3, 1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).write_bytes((tmp_path / "elsewhere" / name).read_bytes())
    with pytest.raises(ConversionError, match=r"other is another model than .*out: .* has another shape"):
        report_layers(converted, tmp_path / "text.txt", tmp_path / "other")


def layers(costs: dict[str, float]) -> list[LayerFigures]:
    return [LayerFigures(name, (1000, 1004), 0, 40.0, predicted_kl=cost) for name, cost in costs.items()]


def test_proposal() -> None:
    names = [f"model.layers.{i}.mlp.{kind}_proj" for i in range(40) for kind in ("down", "gate", "up")]
    costs = dict.fromkeys(names, 1e-5) | {"model.layers.3.mlp.up_proj": 4e-3}
    size = 1000 * 1008 * len(names)
    found = propose([*layers(costs), LayerFigures("lm_head", (9, 9), 0, 40.0)], size)
    # vLLM runs gate_proj and up_proj as one: none is quantized without the other.
    assert found.skip == ["model.layers.3.mlp.gate_proj", "model.layers.3.mlp.up_proj"]
    assert found.extra_bytes == 2 * 1000 * 1000
    assert found.gain == pytest.approx(4e-3 + 1e-5)
    assert found.total == pytest.approx(sum(costs.values()))
    assert propose(layers(dict.fromkeys(names, 1e-5)), size).skip == [], "no layer costs more than others"
    assert propose(layers(costs), size // 100).skip == [], "beyond the budget"


def edit_report(folder: Path, **changes) -> None:
    file = folder / REPORT_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "model.layers.0.none", "shape": [96, 96]}, "model.layers.0.none.weight should be int8.*got no such tensor"),
        ({"shape": [1, 2]}, r"should be int8 \[1, 2\] by conversion_report.json, got torch.int8 \["),
        ({"hadamard": "x"}, "hadamard of layer .* is missing or of another type"),
        ({"sqnr_db": "x"}, "sqnr_db of layer .* is missing or of another type"),
        ({"shape": None}, "shape of layer .* is missing or of another type"),
    ],
)
def test_reports_that_do_not_fit(converted: Path, entry: dict, message: str) -> None:
    first = json.loads((converted / REPORT_FILE).read_text())["layers"][0]
    edit_report(converted, layers=[first | entry])
    with pytest.raises(BrokenFileError, match=message):
        report_layers(converted)


def test_a_report_without_layers_is_broken(converted: Path) -> None:
    (converted / REPORT_FILE).write_text("[]")
    with pytest.raises(BrokenFileError, match="is no report of vllm-w8a8 convert: it has no list of layers"):
        report_layers(converted)


def test_wrong_folders(unquantized: torch.nn.Module, converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="there is no such folder"):
        report_layers(tmp_path / "none")
    with pytest.raises(ConversionError, match=f"src has no {REPORT_FILE}: expected a folder that vllm-w8a8 convert wrote"):
        report_layers(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "bf16", format="bf16")
    with pytest.raises(ConversionError, match="bf16 has no int8 layers: expected a folder of format w8a8 or"):
        report_layers(tmp_path / "bf16")
    with pytest.raises(ConversionError, match="--source has no effect without --activations"):
        report_layers(converted, source=tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "rotated", folding=FoldingOptions(rotate=True))
    assert len(report_layers(tmp_path / "rotated").layers) == 14
    with pytest.raises(ConversionError, match=r"was converted with weights changed by rotate, .*: leave out --activations"):
        report_layers(tmp_path / "rotated", tmp_path / "text.txt")
