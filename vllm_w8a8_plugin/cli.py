"""The `vllm-w8a8` command. Heavy imports stay inside the commands, so that `--help` answers at once."""

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from w8a8_converters.report import Report

app = typer.Typer(
    help="Int8 weights times int8 activations (W8A8) for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class OutputFormat(str, Enum):
    """Values of --format."""

    W8A8 = "w8a8"
    COMPRESSED_TENSORS = "compressed-tensors"
    BF16 = "bf16"


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder with safetensors files, or a .gguf file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make. It appears only when it is complete.")],
    format: Annotated[
        OutputFormat,
        typer.Option(
            help="w8a8: for this plugin. compressed-tensors: also for stock vLLM, SGLang, transformers. "
            "bf16: not quantized, turns a GGUF file into a plain Hugging Face folder."
        ),
    ] = OutputFormat.W8A8,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Modules to leave unquantized: a name (down_proj, model.layers.0), a glob, or re:REGEX. May be repeated.",
        ),
    ] = None,
    quantize_lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="Quantize lm_head too. If it is tied to the embedding, it gets a copy.")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file, as 4GB or 500MB.")] = "4GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is a model folder.")] = False,
) -> None:
    """Convert a checkpoint to W8A8. Everything is checked before anything is written."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from w8a8_converters import convert as converter
    from w8a8_converters.errors import ConversionError

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console) as bars:
            tasks = {}

            def progress(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=done)

            report = converter.convert(
                src,
                out,
                format=format.value,
                skip=skip or (),
                quantize_lm_head=quantize_lm_head,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                progress=progress,
            )
    except ConversionError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    _print_report(report, console)


@app.command()
def doctor() -> None:
    """Report versions, devices, which kernel runs and why, and whether vLLM sees the plugin. Exits 1 if something is wrong."""
    from rich.console import Console
    from rich.table import Table

    from vllm_w8a8_plugin.doctor import EXAMPLE_K, EXAMPLE_N, diagnose

    diagnosis = diagnose()
    console = Console()
    facts = Table(box=None, show_header=False)
    for name, value in diagnosis.facts:
        facts.add_row(name, value)
    console.print(facts)
    if diagnosis.kernels:
        kernels = Table("rows (M)", "quantizer + GEMM", "why", title=f"weight {EXAMPLE_N} x {EXAMPLE_K}", box=None)
        for row in diagnosis.kernels:
            kernels.add_row(*row)
        console.print(kernels)
    for problem in diagnosis.problems:
        typer.secho(f"problem: {problem}", fg=typer.colors.RED, err=True)
    if diagnosis.problems:
        raise typer.Exit(1)
    typer.echo("no problems found")


def _print_report(report: "Report", console: "Console") -> None:
    from rich.table import Table

    sizes = Table("weights", "GB", box=None, title_justify="left")
    sizes.add_row("source", f"{report.source_bytes / 1e9:.3f}")
    sizes.add_row("in bf16", f"{report.bf16_bytes / 1e9:.3f}")
    sizes.add_row(report.format, f"{report.output_bytes / 1e9:.3f}")
    console.print(sizes)
    if report.layers:
        worst = Table("layers with the lowest signal-to-quantization-noise ratio", "dB", box=None)
        for layer in report.worst_layers(5):
            worst.add_row(layer.name, f"{layer.sqnr_db:.1f}")
        console.print(worst)
    console.print(f"{len(report.layers)} layers quantized, {len(report.ignore)} left as they are, {report.seconds:.0f} s")
    if report.lm_head_extra_bytes:
        console.print(f"lm_head, no longer tied to the embedding, adds {report.lm_head_extra_bytes / 1e6:.1f} MB")
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    typer.echo(report.output)
