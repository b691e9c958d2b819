"""`vllm-w8a8 report`: its tables, Markdown and plot of given figures, and its errors."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from vllm_w8a8_plugin import cli, layers_command, plots
from w8a8_converters.convert import convert
from w8a8_converters.layer_report import FolderReport, LayerFigures, Proposal

pytestmark = pytest.mark.without_vllm

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head")


def figures(text: bool) -> FolderReport:
    layers = [LayerFigures(name, (8, 16), 16 * (name != "lm_head"), 40.0 + i, 4.0 + i, 3.0) for i, name in enumerate(NAMES)]
    if not text:
        return FolderReport(Path("some_folder"), layers)
    for layer in layers[:3]:
        layer.input_outliers, layer.input_outliers_int8, layer.input_sqnr_db, layer.predicted_kl = 20.0, 4.0, 39.0, 0.001
    return FolderReport(Path("some_folder"), layers, "mine.txt, 9 tokens", Proposal([NAMES[2]], 2_000_000, 0.001, 0.003))


def test_tables_by_kind() -> None:
    ((columns, rows),) = layers_command.by_kind(figures(False))
    assert columns == ["weights of", "layers", "SNR, dB", "lowest", "outliers", "in int8"]
    assert rows == [
        ["up_proj", "2", "40.5", "40.0", "4.50", "3.00"],
        ["down_proj", "1", "42.0", "42.0", "6.00", "3.00"],
        ["lm_head", "1", "43.0", "43.0", "7.00", "3.00"],
    ]
    _, (_, inputs) = layers_command.by_kind(figures(True))
    assert inputs == [
        ["up_proj", "39.0", "20.00", "4.00", "0.002000", "67%"],
        ["down_proj", "39.0", "20.00", "4.00", "0.001000", "33%"],
        ["lm_head", "", "", "", "", ""],
    ]


def test_markdown() -> None:
    said = layers_command.markdown(figures(True), "picture.png")
    lines = said.splitlines()
    assert lines[0] == "# Layers of some_folder"
    assert "| up_proj | 2 | 40.5 | 40.0 | 4.50 | 3.00 |" in lines
    assert "| lm_head | 8x16 | none | 43.0 | 7.00 | 3.00 |  |  |  |  |" in lines
    assert "| model.layers.0.mlp.down_proj | 8x16 | 16 | 42.0 | 6.00 | 3.00 | 39.0 | 20.00 | 4.00 | 0.001000 |" in lines
    assert "The text: mine.txt, 9 tokens." in said
    assert "the predicted KL falls by 33%, from 0.00300 to 0.00200" in said
    assert "    vllm-w8a8 convert SRC OUT --skip model.layers.0.mlp.down_proj" in lines
    assert "![signal-to-noise ratio and outliers by layer and kind](picture.png)" in lines
    assert "Proposed" not in layers_command.markdown(figures(False))
    found = figures(True)
    found.proposal = Proposal([], 0, 0.0, 0.003)
    assert "No layer costs so much more than others" in layers_command.markdown(found)


def test_plot_has_a_line_for_each_kind_of_a_decoder_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: `make test` installs it")
    drawn = []
    monkeypatch.setattr(plots, "save", lambda figure, file: drawn.append(figure))
    for text in (False, True):
        assert layers_command.plot(figures(text), tmp_path / "p.png")
    assert [len(figure.axes) for figure in drawn] == [2, 4]
    sqnr, weights, inputs, costs = drawn[1].axes
    lines = {line.get_label(): line for line in sqnr.get_lines()}
    assert list(lines["up_proj"].get_xdata()) == [0, 1]
    assert list(lines["up_proj"].get_ydata()) == [40.0, 41.0]
    assert [list(line.get_ydata()) for line in weights.get_lines()[:2]] == [[3.0, 3.0], [4.0, 5.0]]
    assert list(inputs.get_lines()[0].get_ydata()) == [4.0, 4.0]
    assert list(costs.get_lines()[0].get_ydata()) == [0.001, 0.001]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {f"model.layers.{i}.mlp.{kind}_proj.weight": torch.randn(32, 32) for i in (0, 1) for kind in ("up", "down")}
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text('{"model_type": "llama"}')
    save_file(tensors, tmp_path / "src" / "model.safetensors")
    convert(tmp_path / "src", tmp_path / "out")
    return tmp_path / "out"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)], env={"COLUMNS": "120"})


def test_command(folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    result = run(folder, "--out", tmp_path / "deep" / "report")
    assert result.exit_code == 0, result.output
    assert "up_proj" in result.output
    files = sorted(file.name for file in (tmp_path / "deep" / "report").iterdir())
    assert files in (["conversion_report.md", "conversion_report.png"], ["conversion_report.md"])
    assert all(str(tmp_path / "deep" / "report" / name) in result.output.splitlines() for name in files)
    assert sorted(folder.iterdir()) == before
    assert run(folder).exit_code == 0
    assert (folder / "conversion_report.md").read_text().startswith("# Layers of out")


def test_without_matplotlib_there_is_no_plot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "matplotlib_figures", lambda: None)
    (folder / "conversion_report.png").write_bytes(b"older figures")
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert "note: no plot, as matplotlib is not installed" in result.output
    assert not (folder / "conversion_report.png").exists()
    assert "![" not in (folder / "conversion_report.md").read_text()


def test_errors_are_one_line(folder: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "src")
    assert result.exit_code == 1
    assert result.output.strip().startswith("error: ")
    assert len(result.output.strip().splitlines()) == 1
    (folder / "w8a8.safetensors").unlink()
    result = run(folder)
    assert result.exit_code == 1
    assert "should be int8" in result.output
    assert not (folder / "conversion_report.md").exists()
