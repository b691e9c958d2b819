"""The command `vllm-w8a8 eval`. What it needs is imported when it runs, so that `--help` answers at once."""

import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_w8a8_plugin.quality import Job, Progress, Results
    from vllm_w8a8_plugin.quality_modes import Mode

MARKDOWN, PLOT = "eval.md", "eval.png"


class Reference(str, Enum):
    """Values of --reference."""

    FP32 = "fp32"
    BF16 = "bf16"


def evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder, quantized or not, or a .gguf file.", show_default=False),
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="REF", help="Folder of the unquantized model. Default: MODEL, where it is not quantized."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A text, UTF-8. May be repeated. Default: English, code and Chinese texts."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of each text. Default: 2000, or all of a shorter one.", show_default=False),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="bf16, fp8: stock vLLM. rtn, hadamard: quantized while loading, without and with the transform. checkpoint: "
            "a quantized MODEL as it is. lmhead, kv-int8, tp-consistent: MODEL with an int8 lm_head, an int8 KV cache (GPUs), "
            "activations that do not depend on the tensor-parallel degree. May be repeated. Default: what suits MODEL.",
            show_default=False,
        ),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Another checkpoint of the same model, as a mode. May be repeated."),
    ] = None,
    reference: Annotated[
        list[Reference] | None,
        typer.Option(case_sensitive=False, help="Type in which REF runs. May be repeated. Default: fp32.", show_default=False),
    ] = None,
    support: Annotated[
        int, typer.Option(metavar="N", min=1, help="Likeliest tokens that are compared one by one; the others count together.")
    ] = 512,
    name: Annotated[str | None, typer.Option(help="What the results call MODEL. Default: its file name.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the results go, and go on. Default: eval-NAME in lower case."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="JSON", help="Further arguments of vllm.LLM for every engine, as '{\"tensor_parallel_size\": 2}'."
        ),
    ] = "{}",
    commit: Annotated[str | None, typer.Option(help="Commit for the results, where there is no git history.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Longest time for one engine.")] = 3600,
    force: Annotated[bool, typer.Option("--force", help="Measure again what is already there.")] = False,
) -> None:
    """Measure what quantization costs: served models against the unquantized one, all through vLLM, offline.

    Writes eval.json, eval.md and, with matplotlib, eval.png. Exits 1 where something could not be measured.
    """
    from rich.console import Console

    from vllm_w8a8_plugin import compat, quality, quality_report
    from vllm_w8a8_plugin import quality_prompts as prompting
    from vllm_w8a8_plugin.files import write_whole
    from vllm_w8a8_plugin.quality_modes import Target, choose_modes, find_reference

    # As Ctrl-C: no engine may be left when a job scheduler ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(stderr=True)
    references = [r.value for r in dict.fromkeys(reference or [Reference.FP32])]
    with _one_line_errors():
        target = Target.find(model)
        unquantized = find_reference(target, against)
        arguments = _engine(engine)
        gpu = "kv-int8" not in (mode or []) or _has_gpu()
        modes = choose_modes(mode or [], checkpoint or [], target, arguments, gpu, unquantized)
        texts = prompting.read_texts(text or [])
        tokenizer = prompting.load_tokenizer(unquantized.tokenizer_folder())
        prompts = prompting.make_prompts(tokenizer, texts, tokens)
        for served in {target: None, **{m.served: None for m in modes.values() if m.served}}:
            other = prompting.load_tokenizer(served.tokenizer_folder())
            prompting.check_same_vocabulary(tokenizer, other, texts, str(served.path))
        if compat.installed_vllm() is None:
            raise ValueError(compat.vllm_problem(None))
        job = quality.Job(unquantized, prompts, tokenizer, support, arguments, timeout)
        name = name or target.name
        head = quality.make_head(job, name, commit)
        folder = out or Path(f"eval-{_slug(name)}")
        with quality.alone(folder):
            results = quality.Results.open(folder, head, force)
            if results.cells and str(head["commit"]).endswith("-dirty"):
                console.print(f"note: {head['commit']} may be other code than before: --force measures again")
            failed = _measure(job, modes, references, results, force, console)
    content = results.content()
    if not content["cells"]:
        raise typer.Exit(1)
    drawn = quality_report.plot(content, results.folder / PLOT)
    if not drawn:
        (results.folder / PLOT).unlink(missing_ok=True)  # of older figures
        from vllm_w8a8_plugin.plots import INSTALL

        console.print(f"note: no plot, as matplotlib is not installed: {INSTALL}", markup=False, highlight=False)
    write_whole(results.folder / MARKDOWN, quality_report.markdown(content, PLOT if drawn else None))
    Console().print(quality_report.table(content))
    for file in (quality.RESULT, MARKDOWN, *([PLOT] if drawn else [])):
        typer.echo(results.folder / file)
    if failed:
        raise typer.Exit(1)


def _measure(
    job: "Job", modes: "dict[str, Mode]", references: list[str], results: "Results", force: bool, console: "Console"
) -> list[str]:
    """`quality.measure` with its progress shown; says what is left of an interrupted run."""
    from vllm_w8a8_plugin import quality

    try:
        with _progress(console) as (say, progress):
            return quality.measure(job, modes, references, results, force=force, say=say, progress=progress)
    except quality.EngineFailed as error:
        raise ValueError(f"the reference did not run: {error}{quality.keep_log('reference', error.log)}") from None
    except (KeyboardInterrupt, SystemExit) as stop:
        kept = results.unfinished()
        there = f"what was measured is in {', '.join(map(str, kept))}, the same command goes on from there"
        said = there if kept else "nothing was measured yet"
        typer.secho(f"interrupted: {said}", fg=typer.colors.RED, err=True)
        raise typer.Exit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None


@contextlib.contextmanager
def _progress(console: "Console") -> "Iterator[tuple[Callable[[str], None], Progress]]":
    """(prints a line, moves the bar of the engine that runs)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompts"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None, visible=False)

        def say(line: str) -> None:
            bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

        def progress(what: str, done: int, total: int) -> None:
            if done == 0 and bars.tasks[0].description != what:
                bars.reset(task, description=what, total=total, visible=True)
            bars.update(task, completed=done)

        yield say, progress


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("interrupted: nothing was measured yet", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _engine(text: str) -> dict:
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"--engine {text!r}: expected a JSON object with arguments of vllm.LLM")
    return arguments


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
