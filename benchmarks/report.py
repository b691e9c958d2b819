"""Writes the tables and plots of figures in README and docs from the newest files in benchmarks/results.

Run: python benchmarks/report.py [--check]

A table or plot stands between `<!-- report: NAME -->` and `<!-- end -->`, on any page; docs/benchmarks.md has all of them.
Plots are files in docs/images that say of what values they are; without matplotlib they stay as they are. `--check` changes
nothing, needs no matplotlib, and fails where a table or a plot differs.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
GPU = "nvidia-h200"

LINEAR = {"bf16": "bf16", "cutlass": "vLLM CUTLASS int8", "vllm_triton": "vLLM Triton int8"}
ENGINE = {
    "bf16": "bf16",
    "stock-int8": "stock int8",
    "stock-fp8": "stock fp8",
    "ours": "ours",
    "ours-lmhead": "+ int8 lm_head",
}
# Modes that the table has no column for.
FURTHER = {
    "ours-rtn": "ours, no transform",
    "ours-attention": "+ attention",
    "ours-attention-lmhead": "+ attention, int8 lm_head",
}
# Times of attention that are divided by others.
RATIOS = {
    ("ours_own", "flash_attn"): "ours / FLASH_ATTN",
    ("ours_own", "triton_attn"): "ours / TRITON_ATTN",
    ("ours_own_int8kv", "ours_own"): "int8 cache / 16 bits",
}


def files(name: str) -> list[Path]:
    """Result files of a benchmark, the newest last. `name`: all before the date."""
    return sorted(RESULTS.glob(f"{name}-????-??-??.json"))


def newest(name: str) -> tuple[Path, dict]:
    """The newest result file of a benchmark, and its content."""
    path = files(name)[-1]
    return path, json.loads(path.read_text())


def source(path: Path, text: str = "file") -> str:
    """A link, as it is in a page at the repository's root."""
    return f"[{text}]({path.relative_to(ROOT).as_posix()})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [list(row) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def linear() -> str:
    """Our time over the peers', by number of rows."""
    path, result = newest(f"linear-{GPU}")
    rows = []
    for M in sorted({cell["M"] for cell in result["cells"]}):
        times = [cell["us"] for cell in result["cells"] if cell["M"] == M]
        over = [[us["ours"] / us[name] for us in times] for name in LINEAR]
        best = [us["ours"] / min(us[name] for name in LINEAR) for us in times]
        rows.append([str(M), *(f"{geometric_mean(v):.2f}" for v in [*over, best]), f"{max(best):.2f}"])
    return f"{table(['rows', *LINEAR.values(), 'fastest of the three', 'worst weight'], rows)}\n\n{source(path)}"


def quantize() -> str:
    """Microseconds of quantizers of rows of 4096, alone and fused."""
    path, result = newest(f"quantize-{GPU}")
    ops = {
        "quantize": "quantize",
        "add_rms_norm_quantize": "residual + RMSNorm + quantize",
        "silu_mul_quantize": "SiLU·mul + quantize",
    }
    rows = []
    for M in (1, 128, 2048, 8192):
        row = [str(M)]
        for op in ops:
            us = next(c["us"] for c in result["cells"] if (c["op"], c["M"], c["K"]) == (op, M, 4096))
            row.append(
                f"{us['ours']:.1f} / {us['ours_h64']:.1f} / {min(us[name] for name in us if name.startswith('vllm')):.1f}"
            )
        rows.append(row)
    return f"{table(['rows', *ops.values()], rows)}\n\n{source(path)}"


def moe() -> str:
    """Microseconds of a layer of experts."""
    path, result = newest(f"moe-{GPU}")
    names = {"ours_h64": "ours", "vllm_bf16": "vLLM bf16", "vllm_int8": "vLLM int8", "limit": "limit"}
    rows = []
    for cell in result["cells"]:
        us = cell["us"] | {"limit": cell["limit_us"]}
        rows.append([str(cell["tokens"]), *(f"{us[name]:.0f}" for name in names)])
    return f"{table(['tokens', *names.values()], rows)}\n\n{source(path)}, commit {result['commit']}"


def rates(result: dict) -> list[tuple[tuple, dict[str, float]]]:
    """Tokens per second by mode of every model, phase and batch; prefill first."""
    found: dict[tuple, dict[str, float]] = {}
    for cell in result["cells"]:
        found.setdefault((cell["model"], cell["phase"], cell["batch"]), {})[cell["mode"]] = cell["tokens_per_s"]
    return sorted(found.items(), key=lambda item: (item[0][0], item[0][1] == "decode", item[0][2]))


def engine() -> str:
    """Tokens per second of whole engines."""
    path, result = newest(f"engine-{GPU}")
    rows = [
        [model, phase, str(batch), *(f"{of[mode]:,.0f}" if mode in of else "" for mode in ENGINE)]
        for (model, phase, batch), of in rates(result)
    ]
    return f"{table(['model', 'phase', 'batch', *ENGINE.values()], rows)}\n\n{source(path)}"


def engine_attention() -> str:
    """Tokens per second of whole engines with our attention backend, and over the better of stock int8 and stock fp8."""
    path, result = newest(f"engine-attention-{GPU}")
    stock, ours = ("stock-int8", "stock-fp8"), ("ours", "ours-attention", "ours-attention-lmhead")
    rows = []
    for (_, phase, batch), of in rates(result):
        best = max(of[mode] for mode in stock)
        over = (f"{of[mode]:,.0f} ({of[mode] / best:.2f})" for mode in ours)
        rows.append([phase, str(batch), *(f"{of[mode]:,.0f}" for mode in stock), *over])
    names = [(ENGINE | FURTHER)[mode] for mode in (*stock, *ours)]
    return f"{table(['phase', 'batch', *names], rows)}\n\n{source(path)}"


def attention() -> str:
    """Microseconds of paged attention, and our time over the peers'."""
    path, result = newest(f"attention-{GPU}")
    names = {
        "flash_attn": "FLASH_ATTN",
        "triton_attn": "TRITON_ATTN",
        "ours_own": "ours",
        "ours_own_int8kv": "ours, int8 cache",
    }
    rows = []
    for cell in result["cells"]:
        what = f"{cell['batch']} x {cell['context']:,}"
        if cell["phase"] == "prefill":
            what += f", {cell['queries']:,} queries each"
        times = [f"{cell['us'][name]:,.{1 if cell['us'][name] < 100 else 0}f}" for name in names]
        rows.append([cell["phase"], what, *times, *(f"{cell['us'][ours] / cell['us'][than]:.2f}" for ours, than in RATIOS)])
    head = ["phase", "batch x context", *names.values(), *RATIOS.values()]
    return f"{table(head, rows)}\n\n{source(path)}, commit {result['commit']}"


def attention_summary() -> str:
    """Our time of paged attention over the peers', by phase."""
    path, result = newest(f"attention-{GPU}")
    rows = []
    for phase in dict.fromkeys(cell["phase"] for cell in result["cells"]):
        times = [cell["us"] for cell in result["cells"] if cell["phase"] == phase]
        over = [[us[ours] / us[than] for us in times] for ours, than in RATIOS]
        rows.append([phase, *(f"{geometric_mean(v):.2f} ({min(v):.2f} to {max(v):.2f})" for v in over)])
    return f"{table(['phase', *RATIOS.values()], rows)}\n\n{source(path)}, commit {result['commit']}"


def quality() -> str:
    """Distance of served models from the unquantized one."""
    models = {"smollm2-135m": "SmolLM2-135M", "gemma-3-270m": "Gemma 3 270M"}
    modes = {
        "bf16": "bf16",
        "rtn": "W8A8, no transform",
        "hadamard": "W8A8 (default)",
        "lmhead": "W8A8, int8 lm_head",
        "auto": "W8A8, `--quality auto`",
    }
    paths, results = zip(*(newest(f"quality-{model}") for model in models), strict=True)
    cells = [{cell["mode"]: cell for cell in result["cells"]} for result in results]
    rows = []
    for mode, what in modes.items():
        found = [of[mode] for of in cells]
        figures = [(f"x {c['ppl_ratio']:.4f}", f"{c['kl_mean']:.4f}", f"{100 * c['top1']:.1f} %") for c in found]
        rows.append([what, *(figure for of in figures for figure in of)])
    head = [text for name in models.values() for text in (f"{name}: perplexity", "mean KL", "same top token")]
    links = ", ".join(source(path, name) for path, name in zip(paths, models.values(), strict=True))
    return f"{table(['', *head], rows)}\n\n{links}"


@dataclass(frozen=True)
class Plot:
    """Values of a plot, where they are from, and what the plot says to those who do not see it."""

    values: dict
    sources: tuple[Path, ...]
    alt: str

    def fingerprint(self) -> str:
        """Of all that the picture depends on but matplotlib itself."""
        code = Path(__file__).with_name("plots.py").read_text()
        content = json.dumps([code, [path.name for path in self.sources], self.values])
        return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def linear_plot() -> Plot:
    """Limit over time, by weight and number of rows."""
    path, result = newest(f"linear-{GPU}")
    cells = {(cell["N"], cell["K"], cell["M"]): cell for cell in result["cells"]}
    rows = sorted({M for _, _, M in cells})
    names = {"ours": "ours"} | LINEAR
    names |= {name: name for cell in result["cells"] for name in cell["us"] if name not in names}

    def share(name: str, *shape: int) -> float | None:
        cell = cells.get(shape, {"us": {}})
        return round(cell["limit_us"] / cell["us"][name], 4) if name in cell["us"] else None

    weights = {
        f"{N} x {K}": {label: [share(name, N, K, M) for M in rows] for name, label in names.items()}
        for N, K in dict.fromkeys(shape[:2] for shape in cells)
    }
    means = [geometric_mean([c["limit_us"] / c["us"]["ours"] for c in cells.values() if c["M"] == M]) for M in rows]
    alt = (
        f"Share of the limit that each implementation reaches over the rows, for {len(weights)} weights: ours reaches "
        + ", ".join(f"{100 * mean:.0f} % at {M:,}" for M, mean in zip(rows, means, strict=True))
        + " (geometric means)"
    )
    return Plot({"rows": rows, "weights": weights}, (path,), alt)


def engine_plot() -> Plot | None:
    """Tokens per second over those of the better of stock int8 and stock fp8; None where no model was run in either."""
    path, result = newest(f"engine-{GPU}")
    stock = {"stock-int8", "stock-fp8"}
    found: dict[str, dict[tuple, dict]] = {}
    for cell in result["cells"]:
        model = cell["model"] if cell["tp"] == 1 else f"{cell['model']}, {cell['tp']} GPUs"
        found.setdefault(model, {}).setdefault((cell["phase"], cell["batch"]), {})[cell["mode"]] = cell
    values, said = {}, []

    def ratios(cell: dict | None, over: float) -> list[float] | None:
        return cell and [round(rate / over, 4) for rate in (cell["tokens_per_s"], min(cell["runs"]), max(cell["runs"]))]

    for model, groups in found.items():
        best = {
            group: max(of[mode]["tokens_per_s"] for mode in stock if mode in of)
            for group, of in groups.items()
            if of.keys() & stock
        }
        there = {mode for group in best for mode in groups[group]}
        labels = {mode: re.sub(r"^\+", "ours +", label) for mode, label in (ENGINE | FURTHER).items() if mode in there}
        labels |= {mode: mode for mode in sorted(there - labels.keys())}
        series = {}
        for mode, label in labels.items():
            series[label] = [ratios(groups[group].get(mode), most) for group, most in best.items()]
            if mode not in stock:
                medians = [of[0] for of in series[label] if of is not None]
                said.append(f"{label} {min(medians):.2f} to {max(medians):.2f} ({model})")
        if series:
            values[model] = {"groups": [f"{phase}, batch {batch}" for phase, batch in best], "series": series}
    if not values:
        return None
    return Plot(values, (path,), f"Tokens per second over the better of stock int8 and stock fp8: {', '.join(said)}")


def memory_plot() -> Plot:
    """Gigabytes of weights by format, of converting to them and, where it was measured, of loading."""
    path, result = newest("convert-memory")
    sources, formats = [path], result["formats"]
    size = f"{result['checkpoint_bytes'] / 1e9:.1f} GB"

    def gigabytes(key: str) -> list[float]:
        return [round(of[key] / 1e9, 4) for of in formats.values()]

    values = {
        f"Files written from {size} of bf16": {"groups": list(formats), "series": {"files": gigabytes("output_bytes")}},
        "Host memory of converting": {
            "groups": list(formats),
            "series": {
                "peak": gigabytes("peak_bytes_above_imports"),
                "promised bound": [round(result["bound_bytes"] / 1e9, 4)] * len(formats),
            },
        },
    }
    if files(f"loading-{GPU}"):
        path, loading = newest(f"loading-{GPU}")
        sources.append(path)
        parts = {"model_bytes": "GPU, loaded", "peak_bytes": "GPU, peak", "host_anonymous_peak_bytes": "host, peak"}
        names = {"online": "ours, quantized meanwhile", "bf16": "bf16"}
        values[f"Loading Qwen3-8B's shape, {loading['layers']} layers"] = {
            "groups": list(parts.values()),
            "series": {name: [round(loading["ways"][way][part] / 1e9, 4) for part in parts] for way, name in names.items()},
        }
    said = [
        f"{title}: {label} " + ", ".join(f"{n:.3g} ({group})" for n, group in zip(sizes, panel["groups"], strict=True))
        for title, panel in values.items()
        for label, sizes in panel["series"].items()
    ]
    return Plot(values, tuple(sources), f"Gigabytes. {'; '.join(said)}")


PLOTS: dict[str, Callable[[], Plot | None]] = {"linear": linear_plot, "engine": engine_plot, "memory": memory_plot}


def image(name: str) -> str:
    """A plot in a page, nothing where the results do not have what it needs."""
    plot = PLOTS[name]()
    if plot is None:
        return ""
    links = ", ".join(source(path) for path in plot.sources)
    return f"![{plot.alt}]({(IMAGES / name).relative_to(ROOT).as_posix()}.svg)\n\n{links}"


def stale() -> list[Path]:
    """Files of plots that are of other values or other code, that are missing, or that nothing is drawn into."""
    found = []
    for name, make in PLOTS.items():
        path, plot = IMAGES / f"{name}.svg", make()
        has = re.search(r"<dc:identifier>(.*?)</dc:identifier>", path.read_text()) if path.exists() else None
        if (has and has[1]) != (plot and plot.fingerprint()):
            found.append(path)
    return found


def draw() -> None:
    """Write all plots, or say why not."""
    if find_spec("matplotlib") is None:
        print("The plots are left as they are, as matplotlib is not installed: pip install matplotlib")
        return
    import plots

    for name, make in PLOTS.items():
        path, plot = IMAGES / f"{name}.svg", make()
        if plot is None:
            path.unlink(missing_ok=True)
            continue
        metadata = {
            "Title": make.__doc__.splitlines()[0],
            "Source": ", ".join(file.name for file in plot.sources),
            "Identifier": plot.fingerprint(),
        }
        path.write_text(plots.svg(name, plot.values, metadata))


REPORTS: dict[str, Callable[[], str]] = {
    "linear": linear,
    "quantize": quantize,
    "moe": moe,
    "engine": engine,
    "engine-attention": engine_attention,
    "attention": attention,
    "attention-summary": attention_summary,
    "quality": quality,
    **{f"{name}-plot": partial(image, name) for name in PLOTS},
}


def filled(text: str, page: Path = README) -> tuple[str, set[str]]:
    """`text` of a page with every table and plot as the result files have it, and their names.

    Raises:
        ValueError: a marker names no report.
    """
    seen = set()

    def link(match: re.Match) -> str:
        return f"]({os.path.relpath(ROOT / match[1], page.parent)})"

    def fill(match: re.Match) -> str:
        name = match[1]
        if name not in REPORTS:
            raise ValueError(f"{page.relative_to(ROOT)}: no report {name!r}, there are {', '.join(REPORTS)}")
        seen.add(name)
        written = re.sub(r"\]\(([^)\s]+)\)", link, REPORTS[name]())
        return f"<!-- report: {name} -->\n{written}\n<!-- end -->"

    return re.sub(r"<!-- report: (\S+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL), seen


def fill_all(texts: dict[Path, str]) -> dict[Path, str]:
    """Every page with its tables as the result files have them.

    Raises:
        ValueError: a marker names no report, or a report stands nowhere.
    """
    done, seen = {}, set()
    for page, text in texts.items():
        done[page], names = filled(text, page)
        seen |= names
    if missing := REPORTS.keys() - seen:
        raise ValueError(f"no page has a marker for {', '.join(sorted(missing))}")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a table or a plot differs")
    args = parser.parse_args()
    before = {page: page.read_text() for page in PAGES}
    after = fill_all(before)
    changed = [page for page in PAGES if after[page] != before[page]]
    if args.check:
        if differ := changed + stale():
            names = ", ".join(str(path.relative_to(ROOT)) for path in differ)
            sys.exit(f"{names} differ from benchmarks/results: run python benchmarks/report.py")
        return
    for page in changed:
        page.write_text(after[page])
    draw()


if __name__ == "__main__":
    main()
