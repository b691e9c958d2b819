"""The `vllm-w8a8` command. Heavy imports stay inside the commands, so that `--help` answers at once."""

import os
import signal
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_w8a8_plugin.layers_command import report_folder
from vllm_w8a8_plugin.quality_command import evaluate

if TYPE_CHECKING:
    from rich.console import Console

    from w8a8_converters.report import Report
    from w8a8_kernels.tune import Gpu

app = typer.Typer(
    help="Int8 weights times int8 activations (W8A8) for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("eval")(evaluate)
app.command("report")(report_folder)


class OutputFormat(str, Enum):
    """Values of --format."""

    W8A8 = "w8a8"
    COMPRESSED_TENSORS = "compressed-tensors"
    BF16 = "bf16"


class Hadamard(str, Enum):
    """Values of --hadamard."""

    AUTO = "auto"
    NONE = "0"
    B16 = "16"
    B32 = "32"
    B64 = "64"
    B128 = "128"


class Quality(str, Enum):
    """Values of --quality."""

    AUTO = "auto"


@app.command()
def convert(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face folder with safetensors files, or a .gguf file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make. It appears only when it is complete.")],
    format: Annotated[
        OutputFormat,
        typer.Option(
            case_sensitive=False,
            help="w8a8: for this plugin. compressed-tensors: also for stock vLLM, SGLang, transformers. "
            "bf16: not quantized, turns a GGUF file into a plain Hugging Face folder.",
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
    hadamard: Annotated[
        Hadamard | None,
        typer.Option(
            case_sensitive=False,
            help="Block Hadamard transform that spreads outliers, for --format w8a8: a rule chooses the blocks, none, or the "
            "largest block to use. Default: auto for w8a8, 0 for the others, which cannot have one.",
            show_default=False,
        ),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option("--rotate", help="Fold rotations into the weights, which spread outliers: any format, same function."),
    ] = False,
    untie: Annotated[
        bool,
        typer.Option("--untie", help="With --rotate: give an lm_head that is tied to the embedding the copy that this needs."),
    ] = False,
    equalize: Annotated[
        bool,
        typer.Option("--equalize", help="Move scales between consecutive layers, chosen layer by layer on a text."),
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text for --equalize and --quality. Default: one of this package, prose, code and other languages.",
            show_default=False,
        ),
    ] = None,
    quality: Annotated[
        Quality | None,
        typer.Option(
            case_sensitive=False,
            help="auto: measure all of these on the text, and take what stays closest to the unquantized model.",
        ),
    ] = None,
    quality_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="How much larger --quality auto may make the model, leaving layers unquantized, as 500MB or 2%. Default: 3%.",
            show_default=False,
        ),
    ] = None,
    from_quantized: Annotated[
        bool,
        typer.Option(
            "--from-quantized",
            help="SRC is quantized, by fp8, GPTQ, AWQ or compressed-tensors: dequantize it, then quantize it anew.",
        ),
    ] = False,
    hf_config: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="SRC is a GGUF file: take the model's config.json, and tokenizer and generation config if it has them, from "
            "this Hugging Face folder instead of the file's metadata.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file, as 4GB or 500MB.")] = "4GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, with everything in it, if it is a model folder.")
    ] = False,
) -> None:
    """Convert a checkpoint to W8A8. Everything is checked before anything is written.

    Exits 1 where SRC or the options do not allow it.
    """
    import json

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from vllm_w8a8_plugin.compat import architecture_problem
    from w8a8_converters.errors import ConversionError, one_line
    from w8a8_converters.inspect import unserved_reason

    # As Ctrl-C: job schedulers, containers and lost terminals end a process so, and the partial folder must go.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) != signal.SIG_IGN:  # as nohup has it
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    try:
        # In here, as torch comes with them and takes seconds: an interrupted command says so then, too.
        from w8a8_converters import convert as converter
        from w8a8_converters.folding.options import FoldingOptions

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
                hadamard=hadamard.value if hadamard else None,
                folding=FoldingOptions(
                    rotate, untie, equalize, calibration, quality.value if quality else None, quality_budget
                ),
                from_quantized=from_quantized,
                hf_config=hf_config,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                progress=progress,
            )
    except ConversionError as error:
        typer.secho(f"error: {one_line(error)}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except OSError as error:  # the disk, or a limit on files
        typer.secho(f"error: {out} was not written: {one_line(error)}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except (KeyboardInterrupt, SystemExit) as stop:
        typer.secho(f"interrupted: {out} was not written", fg=typer.colors.RED, err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    _print_report(report, console)
    if reason := unserved_reason(json.loads((out / "config.json").read_text()), architecture_problem):
        console.print(f"note: {one_line(reason)}", markup=False, highlight=False)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, or whatever vllm serve takes.")],
) -> None:
    """Serve a model in W8A8: runs vllm serve MODEL --quantization w8a8. Behind MODEL, all options of vllm serve are taken."""
    from vllm_w8a8_plugin import compat, gguf

    try:
        if compat.installed_vllm() is None:
            raise ValueError(compat.vllm_problem(None))
        if model.startswith("-"):
            raise ValueError(f"{model}: MODEL comes first, options of vllm serve behind it")
        model = os.path.expanduser(model)
        gguf.locate(model)
    except ValueError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    command = compat.serve_command(model, ["--quantization", "w8a8", *context.args])
    os.execv(command[0], command)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .gguf file, any part of a split one, or a model folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what a checkpoint is, what convert would make of it, and what it takes to serve. Reads no weights.

    Exits 1 where there is a problem: the checkpoint cannot be converted, or the installed vLLM cannot serve it.
    """
    import json

    from rich.console import Console

    from vllm_w8a8_plugin.compat import architecture_problem
    from vllm_w8a8_plugin.inspection import tables
    from w8a8_converters.errors import one_line
    from w8a8_converters.inspect import inspect as look

    found = look(path, architecture_problem)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console = Console()
        for table in tables(found):
            console.print(table)
        for note in found.notes:
            console.print(f"note: {one_line(note)}", markup=False, highlight=False)
    for problem in found.problems:
        typer.secho(f"problem: {one_line(problem)}", fg=typer.colors.RED, err=True)
    if found.problems:
        raise typer.Exit(1)


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


@app.command()
def tune(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder with safetensors files, int8 or not.")],
    tp: Annotated[
        int, typer.Option("--tp", min=1, help="Degree of tensor parallelism: the shapes of one rank are measured.")
    ] = 1,
    batch_sizes: Annotated[
        str,
        typer.Option(metavar="M,M,...", help="Numbers of tokens at a time; each is taken to the next power of two."),
    ] = ",".join(str(1 << i) for i in range(14)),
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the file. Default: VLLM_W8A8_CONFIG_DIR, if set, else w8a8_tiles."),
    ] = None,
    lm_head: Annotated[
        bool, typer.Option("--lm-head", help="Measure the lm_head, too, for VLLM_W8A8_LM_HEAD=1. One that is int8 always is.")
    ] = False,
    list_shapes: Annotated[bool, typer.Option("--list", help="Only print the shapes. Needs no GPU.")] = False,
) -> None:
    """Measure the GEMM's tiles for a model's layers on this GPU. A stopped run goes on where it stopped."""
    from rich.console import Console
    from rich.table import Table

    from vllm_w8a8_plugin import compat
    from vllm_w8a8_plugin.shapes import linear_shapes
    from w8a8_kernels.tiles import CONFIG_DIR_VARIABLE

    console = Console(stderr=True)
    try:
        rows = _rows(batch_sizes)
        if not list_shapes:
            from w8a8_kernels.tune import current_gpu

            gpu = current_gpu()
        shapes = linear_shapes(model, tp, lm_head)
        table = Table("layers", "N", "K", "how many", box=None)
        for shape in shapes:
            table.add_row(", ".join(shape.names), str(shape.N), str(shape.K), str(shape.count))
        Console().print(table)
        if list_shapes:
            return
        if compat.installed_vllm() is not None:
            compat.load_vllm_ops()  # its CUTLASS product is measured, too
        folder = out or Path(os.environ.get(CONFIG_DIR_VARIABLE) or "w8a8_tiles")
        path = _tune(console, [(shape.N, shape.K) for shape in shapes], rows, folder, gpu)
    except (ValueError, RuntimeError, OSError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    if os.environ.get(CONFIG_DIR_VARIABLE) != str(folder):
        console.print(f"to use it: export {CONFIG_DIR_VARIABLE}={folder.resolve()}", markup=False, soft_wrap=True)
    typer.echo(path)


def _rows(text: str) -> list[int]:
    try:
        rows = [int(number) for number in text.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise ValueError(f"--batch-sizes {text!r}: expected numbers from 1 with commas between them, as 1,16,64")
    return rows


def _tune(console: "Console", shapes: list[tuple[int, int]], rows: list[int], folder: Path, gpu: "Gpu") -> Path:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from w8a8_kernels.tune import tune as measure_tiles

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        return measure_tiles(shapes, rows, folder, progress=progress, gpu=gpu)


def _print_report(report: "Report", console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    from w8a8_converters.errors import one_line

    sizes = Table("weights", "GB", box=None, title_justify="left")
    sizes.add_row("source", f"{report.source_bytes / 1e9:.3f}")
    sizes.add_row("in bf16", f"{report.bf16_bytes / 1e9:.3f}")
    sizes.add_row(report.format, f"{report.output_bytes / 1e9:.3f}")
    console.print(sizes)
    if report.layers:
        worst = Table("layers with the lowest signal-to-quantization-noise ratio", "dB", box=None)
        for layer in report.worst_layers(5):
            worst.add_row(escape(layer.name), f"{layer.sqnr_db:.1f}")
        console.print(worst)
    if report.layers:
        done = f"{len(report.layers)} layers quantized, {len(report.ignore)} left as they are"
    else:
        done = ", ".join(f"{count} tensors written in {dtype}" for dtype, count in report.tensors.items())
    console.print(f"{done}, {report.seconds:.0f} s")
    blocks = report.hadamard_blocks()
    if any(blocks):
        said = ", ".join(f"{block or 'none'} in {layers} layers" for block, layers in blocks.items())
        console.print(f"Hadamard blocks: {said}", highlight=False)
    if report.lm_head_extra_bytes:
        console.print(f"lm_head, no longer tied to the embedding, adds {report.lm_head_extra_bytes / 1e6:.1f} MB")
    for note in report.notes:
        console.print(f"note: {one_line(note)}", markup=False)
    typer.echo(report.output)
