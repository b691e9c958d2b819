"""What `vllm-w8a8 eval` found, for people: a table, a Markdown file, a plot. All from the content of the JSON file alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_w8a8_plugin import plots
from vllm_w8a8_plugin.markdown import code, plain
from vllm_w8a8_plugin.markdown import table as markdown_table

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("mode", "against", "text", "PPL", "ratio", "KL mean", "KL 99 %", "top-1", "top-5")
_LEGEND = """\
Perplexity (PPL), its ratio to the reference's, mean and 99th percentile of the Kullback-Leibler divergence from the reference
in nats per token, and how often the likeliest token, and the five likeliest, are the reference's. The mode bf16 shows what
rounding to bf16 alone does: no quantized model can be expected to be nearer to a reference in fp32. As a scale, the mean KL
of two small models (SmolLM2-135M, Gemma 3 270M): 0.001 in bf16, 0.002 to 0.003 as `--quality auto` converts them, 0.005 to
0.007 quantized with the Hadamard transform, 0.04 without."""
# Fewer say little: on 40, bf16's perplexity was 1 % better than fp32's.
ENOUGH_POSITIONS = 1000


def rows(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows for `COLUMNS`: of each mode and reference one for all texts, and one for each where there are several."""
    for entry in content["cells"]:
        texts = entry["texts"] if len(entry["texts"]) > 1 else {}
        for text, values in {"all": entry, **texts}.items():
            yield (
                *((entry["mode"], entry["reference"]) if text == "all" else ("", "")),
                text,
                f"{values['ppl']:.3f}",
                f"{values['ppl_ratio']:.4f}",
                f"{values['kl_mean']:.5f}",
                f"{values['kl_p99']:.4f}",
                f"{100 * values['top1']:.1f} %",
                f"{100 * values['top5']:.1f} %",
            )


def table(content: dict[str, Any]) -> "Table":
    from rich.table import Table

    result = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        # Names are broken where there is no room, figures are never cut: 80 columns hold those of all modes.
        result.add_column(column, overflow="fold", no_wrap=column not in ("mode", "text"))
    for row in rows(content):
        result.add_row(*row)
    return result


def markdown(content: dict[str, Any], plot: str | None = None) -> str:
    """The whole report.

    Args:
        content: what the JSON file holds.
        plot: name of a picture beside it.
    """
    against = f" against {plain(content['against'])}" if content["against"] != content["model"] else ""
    parts = [f"# What quantization costs: {plain(content['model'])}{against}", _LEGEND]
    parts.append(markdown_table(COLUMNS, rows(content), left=3))
    positions = sum(text["positions"] for text in content["texts"].values())
    if positions < ENOUGH_POSITIONS:
        parts.append(f"Only {positions} positions were scored: differences of a few per cent are chance. Give more text.")
    if content["failed"]:
        parts.append("Did not run:\n\n" + "\n".join(f"- {plain(f['mode'])}: {code(f['reason'])}" for f in content["failed"]))
    if plot:
        parts.append(f"![divergence by token of the prompt, and differences of log-probabilities]({plot})")
    parts += [_worst(entry) for entry in content["cells"]]
    return "\n\n".join([*parts, _provenance(content)]) + "\n"


def _worst(entry: dict[str, Any]) -> str:
    columns = ("text", "token", "KL", "before it", "next", "reference's likeliest", "this mode's")
    found = (
        (
            plain(place["text"]),
            str(place["token"]),
            f"{place['kl']:.3f}",
            code(place["context"]),
            code(place["next"]),
            f"{code(place['reference_top'])} {100 * place['reference_top_p']:.0f} %",
            f"{code(place['top'])} {100 * place['top_p']:.0f} %",
        )
        for place in entry["worst"]
    )
    head = f"## Worst positions: {plain(entry['mode'])} against {entry['reference']}"
    return f"{head}\n\n{markdown_table(columns, found, left=len(columns))}"


def _provenance(content: dict[str, Any]) -> str:
    texts = ", ".join(f"{plain(name)} ({text['positions']:,} positions)" for name, text in content["texts"].items())
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items() if version)
    devices = sorted({entry["device"] for entry in content["cells"]})
    settings = content["settings"]
    lines = [
        f"- Texts: {texts}, in prompts of at most {settings['chunk']} tokens.",
        f"- KL over the reference's {settings['support']} likeliest tokens, all others together as one more.",
        f"- Device: {', '.join(devices) or 'none'}. Versions: {versions}. Commit: {content['commit'] or 'none'}.",
    ]
    if settings["engine"] or settings["environment"]:
        lines.append(f"- Further settings: {code(str(settings['engine'] | settings['environment']))}.")
    return "## How it was measured\n\n" + "\n".join(lines)


def plot(content: dict[str, Any], file: Path) -> bool:
    """Draw the divergence by token of the prompt and the differences of log-probabilities, against the first reference.

    Returns:
        False without matplotlib.
    """
    figures = plots.matplotlib_figures()
    if figures is None:
        return False
    reference = content["cells"][0]["reference"]
    cells = [entry for entry in content["cells"] if entry["reference"] == reference]
    figure = figures.Figure(figsize=(9, 8), layout="constrained")
    by_index, differences = figure.subplots(2)
    for number, entry in enumerate(cells):
        name, color = entry["mode"], f"C{number}"
        groups = entry["kl_by_index"]
        by_index.plot(groups["first"], groups["mean"], color=color, label=name)
        by_index.plot(groups["first"], groups["p99"], color=color, linestyle=":")
        counts, edges = entry["differences"]["counts"], entry["differences"]["edges"]
        width = edges[1] - edges[0]
        density = [count / sum(counts) / width for count in counts]
        differences.stairs(density, edges, color=color, label=name)
    by_index.set(yscale="log", xlabel="token of the prompt", ylabel="KL, nats", title="divergence: mean and 99 % (dotted)")
    differences.set(
        yscale="log",
        xlabel="log-probability of the true token, minus the reference's (beyond 99.9 %: in the last bins)",
        ylabel="density",
        title="differences of log-probabilities",
    )
    for axes in (by_index, differences):
        axes.grid(alpha=0.3)
    figure.legend(*differences.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(f"{content['model']} against {content['against']} in {reference}")
    plots.save(figure, file)
    return True
