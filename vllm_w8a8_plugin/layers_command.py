"""The command `vllm-w8a8 report`: the layers of a converted folder as a table, Markdown and a plot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_w8a8_plugin import plots
from vllm_w8a8_plugin.files import write_whole
from vllm_w8a8_plugin.markdown import plain
from vllm_w8a8_plugin.markdown import table as markdown_table

if TYPE_CHECKING:
    from w8a8_converters.layer_report import FolderReport, LayerFigures

MARKDOWN, PLOT = "conversion_report.md", "conversion_report.png"
_WORST = 5
_LEGEND = """\
SNR: energy of what is quantized over that of the rounding error. Outliers: largest magnitude over root mean square of a row,
the mean of all rows, in the unquantized model and behind the Hadamard transform, as int8 sees them; a row of normally
distributed values has 3 to 4. Each further factor of two costs 6 dB."""
_LEGEND_INPUTS = """\
Inputs are those of the unquantized model on the text. Predicted KL: what int8 weights and inputs of one layer alone add to the
divergence from the unquantized model, in nats per token, by the gradients of its log-probabilities."""


def report_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What vllm-w8a8 convert wrote, of a format in int8.")],
    activations: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text, UTF-8: also measure the layers' inputs on it, and propose layers to leave unquantized. Runs the "
            "unquantized model with transformers on the CPU, one layer in memory at a time.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC", help="The unquantized model. Default: where FOLDER was converted from.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the files go. Default: FOLDER.", show_default=False)
    ] = None,
) -> None:
    """Show what int8 does to each layer of a converted model: signal-to-noise ratio, outliers; with a text, of its inputs too.

    Writes conversion_report.md and, with matplotlib, conversion_report.png.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from w8a8_converters.errors import ConversionError, one_line

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        from w8a8_converters.layer_report import report_layers  # in here, as torch comes with it and takes seconds

        with Progress(*columns, console=console, transient=True) as bars:
            tasks = {}

            def progress(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                    if stage == "activations":  # a line, too, as only a terminal shows the bar
                        line = f"running the unquantized model on {activations}: {total // 2} layers, forth and back"
                        bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
                bars.update(tasks[stage], completed=done)

            found = report_layers(folder, activations, source, progress)
        files = write(found, out or folder, console.print)
    except (ConversionError, OSError) as error:
        typer.secho(f"error: {one_line(error)}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("interrupted: nothing was written", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None
    _show(found, Console())
    for file in files:
        typer.echo(file)


def write(found: "FolderReport", out: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the files and return them."""
    drawn = plot(found, out / PLOT)
    if not drawn:
        (out / PLOT).unlink(missing_ok=True)  # of older figures
        say(f"note: no plot, as matplotlib is not installed: {plots.INSTALL}")
    write_whole(out / MARKDOWN, markdown(found, PLOT if drawn else None))
    return [out / MARKDOWN, *([out / PLOT] if drawn else [])]


def _show(found: "FolderReport", console) -> None:
    from rich.markup import escape
    from rich.table import Table

    for columns, rows in by_kind(found):
        table = Table(*columns, box=None)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    worst = Table("layers with the lowest signal-to-noise ratio", "dB", box=None)
    for layer in _worst(found.layers):
        worst.add_row(escape(layer.name), _number(layer.sqnr_db, 1))
    console.print(worst)
    for line in [*proposal(found), *found.notes]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def by_kind(found: "FolderReport") -> list[tuple[list[str], list[list[str]]]]:
    """Tables of columns and rows, a row of means for each kind of layers: of weights, and of inputs where there is a text."""
    weights, inputs = [], []
    total = found.proposal.total if found.proposal else 0.0
    for kind, layers in _kinds(found.layers).items():
        sqnr, costs = _values(layers, "sqnr_db"), _values(layers, "predicted_kl")
        row = [plain(kind), str(len(layers)), _mean(sqnr, 1), _number(min(sqnr, default=None), 1)]
        weights.append(row + [_mean(_values(layers, name), 2) for name in ("weight_outliers", "weight_outliers_int8")])
        row = [plain(kind), _mean(_values(layers, "input_sqnr_db"), 1)]
        row += [_mean(_values(layers, name), 2) for name in ("input_outliers", "input_outliers_int8")]
        inputs.append(
            [*row, _number(sum(costs) if costs else None, 6), f"{sum(costs) / total:.0%}" if costs and total else ""]
        )
    tables = [(["weights of", "layers", "SNR, dB", "lowest", "outliers", "in int8"], weights)]
    if found.text:
        tables.append((["inputs of", "SNR, dB", "outliers", "in int8", "predicted KL", "share"], inputs))
    return tables


def markdown(found: "FolderReport", plot: str | None = None) -> str:
    """The whole report.

    Args:
        found: what to say.
        plot: name of a picture beside it.
    """
    name = plain(found.folder.resolve().name)
    parts = [f"# Layers of {name}", _LEGEND]
    if found.text:
        parts.append(f"{_LEGEND_INPUTS} The text: {plain(found.text)}.")
    parts += [*(markdown_table(*each) for each in by_kind(found)), *proposal(found), *found.notes]
    if plot:
        parts.append(f"![signal-to-noise ratio and outliers by layer and kind]({plot})")
    return "\n\n".join([*parts, "## Layer by layer", markdown_table(*_all(found))]) + "\n"


def proposal(found: "FolderReport") -> list[str]:
    """What to leave unquantized, in sentences."""
    if found.proposal is None:
        return []
    skip, gain, total = found.proposal.skip, found.proposal.gain, found.proposal.total
    if not skip:
        return ["No layer costs so much more than others that leaving it unquantized is worth its bytes."]
    options = " ".join(f"--skip {name}" for name in skip)
    return [
        f"Proposed: leave {len(skip)} layers unquantized, for {found.proposal.extra_bytes / 1e6:.1f} MB more: "
        f"the predicted KL falls by {gain / total:.0%}, from {total:.5f} to {total - gain:.5f}.",
        f"    vllm-w8a8 convert SRC OUT {options}",
    ]


def plot(found: "FolderReport", file: Path) -> bool:
    """Draw signal-to-noise ratio and outliers by layer, a line for each kind.

    Returns:
        False without matplotlib.
    """
    figures = plots.matplotlib_figures()
    if figures is None:
        return False
    panels = [
        ("SNR of the weight, dB", "sqnr_db", None, "linear"),
        ("outliers of the weight", "weight_outliers_int8", "weight_outliers", "linear"),
    ]
    if found.text:
        panels.append(("outliers of the input", "input_outliers_int8", "input_outliers", "log"))
        panels.append(("predicted KL, nats", "predicted_kl", None, "log"))
    figure = figures.Figure(figsize=(9, 3.2 * len(panels)), layout="constrained")
    for axes, (label, name, before, scale) in zip(figure.subplots(len(panels)), panels, strict=True):
        for number, (kind, layers) in enumerate(_kinds(found.layers).items()):
            axes.plot(*_line(layers, name), color=f"C{number}", marker=".", label=kind)
            if before:
                axes.plot(*_line(layers, before), color=f"C{number}", linestyle=":")
        title = f"{label} (dotted: without the transform)" if before else label
        axes.set(title=title, ylabel=label, xlabel="decoder layer", yscale=scale)
        axes.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize="small")
    figure.suptitle(found.folder.resolve().name)
    plots.save(figure, file)
    return True


def _line(layers: "list[LayerFigures]", name: str) -> tuple[list[int], list[float]]:
    """Numbers of decoder layers and the mean of a figure in each: experts of one layer are one point."""
    values: dict[int, list[float]] = {}
    for layer in layers:
        value = getattr(layer, name)
        if layer.number is not None and value is not None:
            values.setdefault(layer.number, []).append(value)
    return sorted(values), [fmean(values[number]) for number in sorted(values)]


def _all(found: "FolderReport") -> tuple[list[str], Iterator[list[str]]]:
    columns = ["layer", "shape", "transform", "SNR, dB", "weight outliers", "in int8"]
    if found.text:
        columns += ["input SNR, dB", "input outliers", "in int8", "predicted KL"]

    def rows() -> Iterator[list[str]]:
        for layer in found.layers:
            row = [
                plain(layer.name),
                "x".join(map(str, layer.shape)),
                str(layer.hadamard or "none"),
                _number(layer.sqnr_db, 1),
            ]
            row += [_number(layer.weight_outliers, 2), _number(layer.weight_outliers_int8, 2)]
            if found.text:
                row += [_number(layer.input_sqnr_db, 1), _number(layer.input_outliers, 2)]
                row += [_number(layer.input_outliers_int8, 2), _number(layer.predicted_kl, 6)]
            yield row

    return columns, rows()


def _kinds(layers: "list[LayerFigures]") -> "dict[str, list[LayerFigures]]":
    kinds: dict[str, list[LayerFigures]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    return kinds


def _worst(layers: "list[LayerFigures]") -> "list[LayerFigures]":
    return sorted((layer for layer in layers if layer.sqnr_db is not None), key=lambda layer: layer.sqnr_db)[:_WORST]


def _values(layers: "list[LayerFigures]", name: str) -> list[float]:
    return [value for layer in layers if (value := getattr(layer, name)) is not None]


def _mean(values: list[float], digits: int) -> str:
    return _number(fmean(values) if values else None, digits)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
