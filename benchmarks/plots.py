"""Draws the plots of the documentation as SVG, from values that report.py takes from the result files. Needs matplotlib."""

import io

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = ("#0072b2", "#56b4e9", "#003f63", "#8da0cb", "#4b0082")
GREY = "#8c8c8c"
OTHERS = ("#d55e00", "#e69f00", "#009e73", "#cc79a7")
MARKERS = "osD^vPX*"
# Text as text, which is small and can be read out; names of elements that do not change from run to run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "w8a8", "font.size": 9, "axes.axisbelow": True}


def colors(labels: list[str]) -> dict[str, str]:
    """Blue for ours, grey for bf16, other colors for the rest."""
    ours = [label for label in labels if label.startswith("ours")]
    others = [label for label in labels if label not in ours and label != "bf16"]
    palettes = ((ours, OURS), (others, OTHERS))
    return {"bf16": GREY} | {label: palette[i % len(palette)] for names, palette in palettes for i, label in enumerate(names)}


def linear(values: dict) -> Figure:
    """Shares of the limit over the rows, one panel for each weight.

    Args:
        values: `rows`, and `weights`: weight, implementation and its shares, None where there is none.
    """
    rows, weights = values["rows"], values["weights"]
    labels = list(dict.fromkeys(label for shares in weights.values() for label in shares))
    color = colors(labels)
    columns = min(4, len(weights))
    lines = -(-len(weights) // columns)
    figure = Figure(figsize=(2.6 * columns, 0.7 + 2.3 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, sharey=True, squeeze=False).flat)
    for axes, (weight, shares) in zip(panels, weights.items(), strict=False):
        axes.axhline(100, color="black", linestyle="--", linewidth=1, label="limit")
        for i, label in enumerate(labels):
            percent = [float("nan") if share is None else 100 * share for share in shares.get(label, [None] * len(rows))]
            ours = label.startswith("ours")
            style = {"linewidth": 2.2 if ours else 1.2, "zorder": 3 if ours else 2, "markersize": 4}
            axes.plot(rows, percent, label=label, color=color[label], marker=MARKERS[i % len(MARKERS)], **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [str(M) for M in rows], rotation=60)
        axes.minorticks_off()
        axes.set(title=weight, ylim=(0, None))
        axes.grid(alpha=0.3)
    for axes in panels[len(weights) :]:
        axes.remove()
    figure.supxlabel("rows", fontsize=9)
    figure.supylabel("share of the limit, %", fontsize=9)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(labels) + 1, frameon=False
    )
    return figure


def bars(axes: Axes, values: dict, color: dict[str, str], form: str) -> None:
    """Bars side by side, each with its value above and, if its runs differ, a line from the least to the greatest of them.

    Args:
        values: `groups`, and `series`: label and, for each group, height, least and greatest, or None.
        form: of the values that are written.
    """
    series = values["series"]
    width = 0.85 / len(series)
    top = max(most for heights in series.values() for _, _, most in filter(None, heights))
    text = {"ha": "center", "va": "bottom", "fontsize": 7, "rotation": 90 if len(series) > 3 else 0}
    text |= {"xytext": (0, 3), "textcoords": "offset points"}
    text |= {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}
    for i, (label, heights) in enumerate(series.items()):
        there = {group + (i - (len(series) - 1) / 2) * width: of for group, of in enumerate(heights) if of is not None}
        axes.bar(list(there), [of[0] for of in there.values()], 0.92 * width, color=color[label], label=label)
        for place, (height, least, most) in there.items():
            if least < most:
                axes.plot([place, place], [max(least, 0), most], color="black", linewidth=0.8)
            axes.annotate(format(height, form), (place, max(height, most)), **text)
    axes.set_xticks(range(len(values["groups"])), values["groups"])
    axes.set_ylim(0, 1.15 * top)
    axes.grid(axis="y", alpha=0.3)


def engine(values: dict) -> Figure:
    """Tokens per second over those of the better stock mode, one panel for each model.

    Args:
        values: for each model those of `bars`.
    """
    color = colors(list(dict.fromkeys(label for of in values.values() for label in of["series"])))
    figure = Figure(figsize=(10.4, 0.6 + 2.9 * len(values)), layout="constrained")
    for axes, (model, of) in zip(figure.subplots(len(values), squeeze=False).flat, values.items(), strict=True):
        bars(axes, of, color, ".2f")
        axes.axhline(1, color="black", linestyle="--", linewidth=1, zorder=0.5)
        axes.set(title=model, ylabel="tokens/s over those of\nthe better stock mode")
    named = {}
    for axes in figure.axes:
        named |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=len(named), frameon=False)
    return figure


def memory(values: dict) -> Figure:
    """Gigabytes, one panel for each thing measured.

    Args:
        values: for each panel's title `groups`, and `series`: label and gigabytes for each group.
    """
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    for axes, (title, of) in zip(figure.subplots(1, len(values), squeeze=False).flat, values.items(), strict=True):
        series = {label: [(size, size, size) for size in sizes] for label, sizes in of["series"].items()}
        groups = [name.replace("-", "-\n") for name in of["groups"]]  # beside each other in a third of the width
        bars(axes, {"groups": groups, "series": series}, dict(zip(series, (OURS[0], GREY), strict=False)), ".3g")
        axes.set(title=title, ylabel="GB")
        if len(series) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(series), frameon=False)
    return figure


DRAW = {"linear": linear, "engine": engine, "memory": memory}


def svg(name: str, values: dict, metadata: dict[str, str]) -> str:
    """One plot, the same text for the same values and the same matplotlib.

    Args:
        metadata: Dublin Core elements of the file; there is no date and no version.
    """
    with matplotlib.rc_context(matplotlib.rcParamsDefault | STYLE):
        file = io.StringIO()
        DRAW[name](values).savefig(file, format="svg", metadata={"Date": None, "Creator": None} | metadata)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())
