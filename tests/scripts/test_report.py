"""The tables and plots of figures in README and docs are those of the result files."""

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import report

BENCHMARKS = report.ROOT / "docs" / "benchmarks.md"
TEXTS = {page: page.read_text() for page in report.PAGES}
TABLES = [
    (page, name)
    for page, text in TEXTS.items()
    for name in re.findall(r"report: (\S+) -->", text)
    if not name.endswith("-plot")
]
MOST_BYTES = 150_000


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of results, which the reports read."""
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", folder)
    return folder


def write(folder: Path, name: str, content: dict) -> None:
    (folder / f"{name}-2020-01-01.json").write_text(json.dumps(content))


def cells(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]


def test_pages_have_the_figures_of_the_files() -> None:
    filled = report.fill_all(TEXTS)
    assert [page.name for page in filled if filled[page] != TEXTS[page]] == [], "run: make report"


@pytest.mark.parametrize(("page", "name"), TABLES, ids=lambda value: getattr(value, "name", value))
def test_every_figure_counts(page: Path, name: str) -> None:
    text = TEXTS[page]
    table = text[text.index(f"<!-- report: {name} -->") :].partition("<!-- end -->")[0]
    last = [line for line in table.splitlines() if line.startswith("|")][-1]
    place = text.index(last, text.index(f"<!-- report: {name} -->"))
    digit = place + max(i for i, letter in enumerate(last) if letter.isdigit())
    changed = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
    assert report.filled(changed, page)[0] == text


def test_one_page_has_all() -> None:
    assert report.filled(TEXTS[BENCHMARKS], BENCHMARKS)[1] == report.REPORTS.keys()


def test_refuses_unknown_and_missing_reports() -> None:
    with pytest.raises(ValueError, match=r"benchmarks\.md: no report 'speed'"):
        report.filled(TEXTS[BENCHMARKS].replace("report: moe", "report: speed"), BENCHMARKS)
    without = {page: text.replace("<!-- report: moe -->", "") for page, text in TEXTS.items()}
    with pytest.raises(ValueError, match="no page has a marker for moe"):
        report.fill_all(without)


def test_links_lead_to_files() -> None:
    filled = report.fill_all(TEXTS)
    for page, text in filled.items():
        for link in re.findall(r"<!-- report: .*?<!-- end -->", text, flags=re.DOTALL):
            for path in re.findall(r"\]\(([^)\s]+)\)", link):
                assert (page.parent / path).is_file(), f"{page.name}: {path}"


def test_every_report_names_its_file() -> None:
    for name, make in report.REPORTS.items():
        written = make()
        assert "](benchmarks/results/" in written or (name.endswith("-plot") and written == ""), name


def test_attention_divides_by_the_peers(results: Path) -> None:
    shapes = [("decode", 1, 4.0), ("decode", 1, 1.0), ("prefill", 512, 1234.0)]
    content = [
        {
            "phase": phase,
            "batch": 8,
            "context": 2048,
            "queries": queries,
            "us": {
                "ours": 1.0,
                "ours_int8kv": 1.0,
                "ours_own": us,
                "ours_own_int8kv": us / 4,
                "triton_attn": 2 * us,
                "flash_attn": 2.0,
            },
        }
        for phase, queries, us in shapes
    ]
    write(results, f"attention-{report.GPU}", {"commit": "abc", "cells": content})
    rows = cells(report.attention())[2:]
    assert rows[0] == ["decode", "8 x 2,048", "2.0", "8.0", "4.0", "1.0", "2.00", "0.50", "0.25"]
    assert rows[2] == ["prefill", "8 x 2,048, 512 queries each", "2.0", "2,468", "1,234", "308", "617.00", "0.50", "0.25"]
    # The geometric mean of 2 and 0.5.
    assert cells(report.attention_summary())[2][:2] == ["decode", "1.00 (0.50 to 2.00)"]


def engine_cell(mode: str, rate: float, **other) -> dict:
    cell = {"model": "m", "mode": mode, "tp": 1, "phase": "decode", "batch": 8, "tokens_per_s": rate, "runs": [rate - 5, rate]}
    return cell | other


def test_engine_is_compared_with_the_better_stock_mode(results: Path) -> None:
    rates = {"ours": 150.0, "stock-int8": 80.0, "stock-fp8": 100.0, "ours-lmhead": 160.0, "new": 20.0}
    content = [engine_cell(mode, rate) for mode, rate in rates.items()]
    content += [
        engine_cell("stock-int8", 50.0, tp=2),
        engine_cell("ours", 60.0, tp=2),
        engine_cell("ours", 1.0, model="alone"),
    ]
    content.append(engine_cell("stock-int8", 10.0, phase="prefill"))
    write(results, f"engine-{report.GPU}", {"cells": content})
    plot = report.engine_plot()
    assert plot.values.keys() == {"m", "m, 2 GPUs"}
    assert plot.values["m"] == {
        "groups": ["decode, batch 8", "prefill, batch 8"],
        "series": {
            "stock int8": [[0.8, 0.75, 0.8], [1.0, 0.5, 1.0]],
            "stock fp8": [[1.0, 0.95, 1.0], None],
            "ours": [[1.5, 1.45, 1.5], None],
            "ours + int8 lm_head": [[1.6, 1.55, 1.6], None],
            "new": [[0.2, 0.15, 0.2], None],
        },
    }
    assert plot.values["m, 2 GPUs"]["series"]["ours"] == [[1.2, 1.1, 1.2]]
    assert "ours 1.20 to 1.20 (m, 2 GPUs)" in plot.alt


def test_without_a_stock_mode_there_is_no_plot(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(results, f"engine-{report.GPU}", {"cells": [engine_cell("ours", 1.0)]})
    assert report.engine_plot() is None
    assert report.image("engine") == ""
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    monkeypatch.setattr(report, "PLOTS", {"engine": report.engine_plot})
    assert report.stale() == []
    (tmp_path / "engine.svg").write_text("<svg><dc:identifier>sha256:0</dc:identifier></svg>")
    assert report.stale() == [tmp_path / "engine.svg"]


def test_linear_is_the_share_of_the_limit(results: Path) -> None:
    content = [
        {"N": 6, "K": 4, "M": 1, "limit_us": 5.0, "us": {"ours": 10.0, "bf16": 20.0, "cutlass": 8.0, "vllm_triton": 50.0}},
        {"N": 6, "K": 4, "M": 16, "limit_us": 6.0, "us": {"ours": 8.0, "bf16": 20.0, "new": 12.0}},
    ]
    write(results, f"linear-{report.GPU}", {"cells": content})
    plot = report.linear_plot()
    assert plot.values == {
        "rows": [1, 16],
        "weights": {
            "6 x 4": {
                "ours": [0.5, 0.75],
                "bf16": [0.25, 0.3],
                "vLLM CUTLASS int8": [0.625, None],
                "vLLM Triton int8": [0.1, None],
                "new": [None, 0.5],
            }
        },
    }
    assert "50 % at 1, 75 % at 16" in plot.alt


def test_memory_has_loading_where_it_was_measured(results: Path) -> None:
    formats = {"w8a8": {"output_bytes": 2 * 10**9, "peak_bytes_above_imports": 10**8}}
    write(results, "convert-memory", {"checkpoint_bytes": 4 * 10**9, "bound_bytes": 10**9, "formats": formats})
    without = report.memory_plot()
    assert [panel["series"] for panel in without.values.values()] == [
        {"files": [2.0]},
        {"peak": [0.1], "promised bound": [1.0]},
    ]
    ways = {
        way: {"model_bytes": n * 10**9, "peak_bytes": (n + 1) * 10**9, "host_anonymous_peak_bytes": 5 * 10**8}
        for way, n in (("bf16", 16), ("online", 9))
    }
    write(results, f"loading-{report.GPU}", {"layers": 3, "ways": ways})
    plot = report.memory_plot()
    assert len(plot.sources) == 2
    assert plot.values["Loading Qwen3-8B's shape, 3 layers"]["series"] == {
        "ours, quantized meanwhile": [9.0, 10.0, 0.5],
        "bf16": [16.0, 17.0, 0.5],
    }


def test_images_are_of_the_result_files() -> None:
    assert report.stale() == [], "run: make report"
    for name in report.PLOTS:
        image = report.IMAGES / f"{name}.svg"
        assert not image.exists() or image.stat().st_size < MOST_BYTES, name


def change_linear(content: dict) -> None:
    content["cells"][0]["us"]["ours"] *= 1.01


def change_engine(content: dict) -> None:
    for cell in content["cells"]:
        cell["tokens_per_s"] *= 1.01 if cell["mode"] == "ours" else 1


def change_memory(content: dict) -> None:
    content["formats"]["w8a8"]["output_bytes"] += 10**6


CHANGES = [
    ("linear", f"linear-{report.GPU}", change_linear),
    ("engine", f"engine-{report.GPU}", change_engine),
    ("memory", "convert-memory", change_memory),
]


@pytest.mark.parametrize(("plot", "file", "change"), CHANGES, ids=[plot for plot, *_ in CHANGES])
def test_check_fails_where_a_value_of_a_plot_changed(
    plot: str, file: str, change, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = results.parents[1] / "docs" / "images"
    shutil.copytree(report.IMAGES, images)
    shutil.copytree(BENCHMARKS.parents[1] / "benchmarks" / "results", results, dirs_exist_ok=True)
    monkeypatch.setattr(report, "IMAGES", images)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.stale() == []
    path = report.files(file)[-1]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    assert report.stale() == [images / f"{plot}.svg"]
    # `--check` with pages that are right: it is the plot that fails it.
    page = results.parents[1] / "page.md"
    page.write_text("".join(f"<!-- report: {name} -->\n<!-- end -->\n" for name in report.REPORTS))
    page.write_text(report.filled(page.read_text(), page)[0])
    monkeypatch.setattr(report, "PAGES", (page,))
    monkeypatch.setattr(sys, "argv", ["report.py", "--check"])
    with pytest.raises(SystemExit, match=rf"^docs/images/{plot}\.svg differ"):
        report.main()


def test_a_newer_file_makes_the_plot_stale(results: Path) -> None:
    shutil.copytree(BENCHMARKS.parents[1] / "benchmarks" / "results", results, dirs_exist_ok=True)
    path = report.files(f"linear-{report.GPU}")[-1]
    shutil.copy(path, results / f"linear-{report.GPU}-9999-01-01.json")
    assert report.stale() == [report.IMAGES / "linear.svg"]


def test_without_matplotlib_the_plots_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    report.draw()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.splitlines() == [
        "The plots are left as they are, as matplotlib is not installed: pip install matplotlib"
    ]


def test_drawn_images_are_small_and_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: `make test` installs it")
    monkeypatch.setattr(report, "IMAGES", tmp_path)
    assert len(report.stale()) == len([make for make in report.PLOTS.values() if make()])
    report.draw()
    assert report.stale() == []
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report.draw()
    assert first == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name, content in first.items():
        assert ElementTree.fromstring(content).tag.endswith("}svg"), name
        assert len(content) < MOST_BYTES, name
        assert b"<dc:date>" not in content, name
        plot = report.PLOTS[name.removesuffix(".svg")]()
        assert ", ".join(path.name for path in plot.sources).encode() in content


def test_linear_draws_each_weight_and_the_limit() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: `make test` installs it")
    import plots

    shares = {"ours": [0.5, 1.0], "bf16": [0.25, None]}
    figure = plots.linear({"rows": [1, 16], "weights": {f"{i} x {i}": shares for i in range(5)}})
    assert [axes.get_title() for axes in figure.axes] == [f"{i} x {i}" for i in range(5)]
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[4].lines}
    assert lines["limit"] == [100, 100]
    assert lines["ours"] == [50, 100]
    assert lines["bf16"] == pytest.approx([25, float("nan")], nan_ok=True)


def test_bars_are_as_high_as_the_values() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: `make test` installs it")
    import plots

    series = {"stock int8": [[1.0, 0.9, 1.1], None], "ours": [[1.2, 1.2, 1.2], [0.5, -1.0, 0.6]]}
    (axes,) = plots.engine({"m": {"groups": ["prefill", "decode"], "series": series}}).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[1.0], [1.2, 0.5]]
    assert [text.get_text() for text in axes.texts] == ["1.00", "1.20", "0.50"]
    # Spans of the runs, not below zero, and the line of the stock mode.
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.9, 1.1], [0, 0.6], [1, 1]]
