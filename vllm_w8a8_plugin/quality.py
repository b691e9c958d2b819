"""How far served, quantized models are from the unquantized one: perplexity, KL divergence, agreement, through vLLM itself.

    python -m vllm_w8a8_plugin.quality MODEL --mode bf16 --mode rtn --checkpoint rotate=CONVERTED_FOLDER

The reference is MODEL in fp32 (or bf16), run in vLLM. Every mode runs in an engine of its own process, so that one that fails
loses no other, and its figures are written as soon as it is done. Run again, the same command goes on where it stopped.
"""

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_w8a8_plugin import compat, envs
from vllm_w8a8_plugin.divergence import KEPT, SUPPORT, Scores, figures

if TYPE_CHECKING:
    from rich.table import Table

ROOT = Path(__file__).parent
TEXTS = ("english", "code", "chinese")
TOKENS = 2000  # of each text
CHUNK = 250  # tokens of a prompt
RESULTS = Path("benchmarks", "results")
HADAMARD = "VLLM_W8A8_HADAMARD"
# Variables that choose a mode. A mode sets its own, none inherits them; the other variables of the plugin hold for all.
MODE_VARIABLES = (envs.ENABLE, HADAMARD, envs.LM_HEAD)
# A thread of vLLM's CPU build that was never joined: seen on busy machines, before the model is loaded. Repeated once.
VLLM_ABORT = "terminate called without an active exception"
# What vLLM says in one process when another has failed.
GENERIC_FAILURES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "WorkerProc initialization failed",
)


@dataclass(frozen=True)
class Mode:
    """One way to serve the model.

    Args:
        engine: arguments of `vllm.LLM` beside the model.
        env: environment variables; those that this version of the plugin lacks are left out.
        needs: variable without which the mode does not exist.
        stock: nothing of ours; where it does not run, that is no failure.
        checkpoint: folder that is served instead of the model.
    """

    engine: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    needs: str | None = None
    stock: bool = False
    checkpoint: Path | None = None


REFERENCES = {"fp32": Mode({"dtype": "float32"}), "bf16": Mode({"dtype": "bfloat16"})}
MODES = {
    "bf16": Mode({"dtype": "bfloat16"}),
    "fp8": Mode({"dtype": "bfloat16", "quantization": "fp8"}, stock=True),
    "rtn": Mode({"dtype": "bfloat16", "quantization": "w8a8"}, {HADAMARD: "0"}),
    "hadamard": Mode({"dtype": "bfloat16", "quantization": "w8a8"}, {HADAMARD: "auto"}, needs=HADAMARD),
    "lmhead": Mode({"dtype": "bfloat16", "quantization": "w8a8"}, {HADAMARD: "auto", envs.LM_HEAD: "1"}, needs=envs.LM_HEAD),
}


class Reference(str, Enum):
    """Values of --reference."""

    FP32 = "fp32"
    BF16 = "bf16"


class EngineFailed(Exception):
    """An engine ended with an error. The message is its reason, `log` all that it printed."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


@dataclass(frozen=True)
class Prompts:
    """The texts as an engine gets them.

    Args:
        ids: token ids, text by text.
        first: the first position of a prompt that counts; before it stand special tokens, or a token without context.
        texts: text -> (number of prompts, number of positions that count), in the order of `ids`.
        hashes: text -> hash of its tokens.
    """

    ids: list[list[int]]
    first: int
    texts: dict[str, tuple[int, int]]
    hashes: dict[str, str]

    def slices(self) -> Iterator[tuple[str, slice]]:
        """Where the positions of each text are."""
        start = 0
        for name, (_, positions) in self.texts.items():
            yield name, slice(start, start + positions)
            start += positions


@dataclass(frozen=True)
class Job:
    """What all engines of a measurement have in common.

    Args:
        model: folder of the unquantized model.
        prompts: the texts.
        support: number of the reference's likeliest tokens that are compared one by one.
        engine: arguments of `vllm.LLM` for every engine.
        timeout_s: longest time for one engine.
    """

    model: Path
    prompts: Prompts
    support: int = SUPPORT
    engine: dict = field(default_factory=dict)
    timeout_s: float = 3600


def read_text(name: str) -> str:
    return (ROOT / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def make_prompts(model: Path, tokens: int, chunk: int = CHUNK) -> Prompts:
    """The beginnings of all texts in short prompts, each after the special tokens that the model wants first.

    Args:
        model: folder with tokenizer.json.
        tokens: tokens of each text.
        chunk: tokens of each prompt.

    Raises:
        ValueError: there is no tokenizer, or a text is too short.
    """
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{model} has no tokenizer.json, which the texts are read with")
    if tokens < 2:
        raise ValueError(f"--tokens {tokens}: expected at least 2, as the first token has no context")
    tokenizer = Tokenizer.from_file(str(file))
    prefix = _prefix(tokenizer)
    first = max(1, len(prefix))
    ids, texts, hashes = [], {}, {}
    for name in TEXTS:
        text = tokenizer.encode(read_text(name), add_special_tokens=False).ids
        if len(text) < tokens:
            raise ValueError(f"text {name!r} is too short: {len(text)} tokens in this model, --tokens asks for {tokens}")
        chunks = [prefix + text[i : min(i + chunk, tokens)] for i in range(0, tokens, chunk)]
        chunks = [prompt for prompt in chunks if len(prompt) > first]
        ids += chunks
        texts[name] = (len(chunks), sum(len(prompt) - first for prompt in chunks))
        hashes[name] = _sha256(json.dumps(chunks).encode())
    return Prompts(ids, first, texts, hashes)


def _prefix(tokenizer) -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    special = tokenizer.encode("a").ids
    ends = range(len(special) - len(plain) + 1)
    return special[: next((i for i in ends if special[i : i + len(plain)] == plain), 0)]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint(model: Path) -> str:
    """Hash of a checkpoint's config.json and of the size, head and end of every weight file: enough to tell two apart."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            digest.update(data.read(1 << 20))
            data.seek(max(0, size - (1 << 20)))
            digest.update(data.read())
    return digest.hexdigest()[:16]


def check_model(model: Path) -> None:
    """Raise ValueError unless this is a folder with an unquantized Hugging Face model."""
    config = _config(model, str(model))
    if config.get("quantization_config"):
        raise ValueError(
            f"{model} is quantized: expected the unquantized model, against which others are measured; add this one with "
            "--checkpoint NAME=PATH"
        )


def _config(folder: Path, what: str) -> dict:
    if not folder.is_dir():
        raise ValueError(f"{what}: there is no such folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{what}: the folder has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    return config


def available(mode: Mode) -> bool:
    return mode.needs is None or mode.needs in {variable.name for variable in envs.VARIABLES}


def choose_modes(names: list[str], checkpoints: list[str]) -> dict[str, Mode]:
    """The modes asked for, in order; without any, all that this version of the plugin has.

    Args:
        names: names in `MODES`.
        checkpoints: `NAME=PATH`, each a mode of its own.

    Raises:
        ValueError: a mode is unknown or not there, or a checkpoint is no folder with a model.
    """
    modes: dict[str, Mode] = {}
    if not names and not checkpoints:
        names = [name for name, mode in MODES.items() if available(mode)]
    for name in names:
        if name not in MODES:
            raise ValueError(
                f"unknown mode {name!r}: expected one of {', '.join(MODES)}; a converted folder is added with --checkpoint"
            )
        if not available(MODES[name]):
            raise ValueError(f"mode {name!r} needs {MODES[name].needs}, which this version of the plugin does not have")
        modes[name] = MODES[name]
    for checkpoint in checkpoints:
        name, equals, path = checkpoint.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"--checkpoint {checkpoint!r}: expected NAME=PATH")
        if name in MODES or name in modes:
            raise ValueError(f"--checkpoint {checkpoint!r}: there already is a mode {name!r}, choose another name")
        folder = Path(path)
        _config(folder, f"--checkpoint {checkpoint!r}")
        modes[name] = Mode({"dtype": "bfloat16"}, checkpoint=folder)
    return modes


def check_same_tokens(modes: dict[str, Mode], prompts: Prompts, tokens: int) -> None:
    """Raise ValueError for a checkpoint whose tokenizer reads the texts in another way: it is of another model."""
    for name, mode in modes.items():
        if mode.checkpoint is not None and make_prompts(mode.checkpoint, tokens).hashes != prompts.hashes:
            raise ValueError(f"checkpoint {name!r} has another tokenizer than the model: their predictions cannot be compared")


def score(job: Job, mode: Mode) -> tuple[Scores, dict]:
    """What a fresh engine says to the prompts, and what that engine was.

    Raises:
        EngineFailed: it ended with an error, or was not what the mode asked for.
    """
    prompts = job.prompts
    arguments = {
        "model": str((mode.checkpoint or job.model).resolve()),
        "enforce_eager": True,
        "max_num_seqs": 1,
        "max_model_len": max(map(len, prompts.ids)) + 1,
        "seed": 0,
    }
    engine_job = {
        "engine": arguments | job.engine | mode.engine,
        "prompts": prompts.ids,
        "first": prompts.first,
        "kept": KEPT * job.support,
    }
    with tempfile.TemporaryDirectory() as tmp:
        job_file, scores_file, report_file = (Path(tmp, name) for name in ("job.json", "scores.npz", "report.json"))
        job_file.write_text(json.dumps(engine_job))
        files = [str(file) for file in (job_file, scores_file, report_file)]
        command = [sys.executable, "-m", f"{__package__}.quality_engine", *files]
        status, log = _run(command, engine_environment(mode), job.timeout_s)
        if status == -signal.SIGABRT and VLLM_ABORT in log and not report_file.exists():
            status, log = _run(command, engine_environment(mode), job.timeout_s)
        if not report_file.exists():  # once the figures are there, an error while vLLM ends changes nothing
            raise EngineFailed(_reason(status, log), log)
        report = json.loads(report_file.read_text())
        _check_report(report, mode, log)
        return Scores.load(scores_file), report


def _check_report(report: dict, mode: Mode, log: str) -> None:
    """A figure under a wrong name is worse than none: vLLM must have run what the mode asked for."""
    wanted = {"dtype": mode.engine["dtype"]}
    if mode.checkpoint is None and not mode.stock:
        wanted["quantization"] = mode.engine.get("quantization")
    for key, value in wanted.items():
        if report[key] != value:
            raise EngineFailed(f"vLLM ran it with {key} {report[key]}, expected {value}", log)


def engine_environment(mode: Mode) -> dict[str, str]:
    """This process's environment without the variables that choose a mode, and with those of this mode."""
    known = {variable.name for variable in envs.VARIABLES}
    kept = {name: value for name, value in os.environ.items() if name not in MODE_VARIABLES}
    # The CPU build asks for a size of its KV cache; the prompts are short, so that one GiB is plenty.
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return defaults | kept | {name: value for name, value in mode.env.items() if name in known}


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status (None: out of time) and all that was printed. Whatever happens, no process of it is left."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # engine and workers are processes of their own
            process.wait()
        log.seek(0)
        return status, log.read().decode(errors="replace")


def _reason(status: int | None, log: str) -> str:
    """One line for what went wrong: the last error in the log that says something, else the last one."""
    if status is None:
        return "it took longer than --timeout allows"
    lines = [line for line in log.splitlines() if not re.search(r"\b(INFO|WARNING) \d", line)]
    generic = None
    for i in range(len(lines) - 1, -1, -1):
        found = re.search(r"(?:^|[\s.])(\w*(?:Error|Exception)): (\S.*)", lines[i])
        if found is None:
            continue
        reason = f"{found[1]}: {found[2]}".strip()
        if any(text in lines[i] for text in GENERIC_FAILURES):
            generic = generic or reason
            continue
        if re.search(r"validation errors? for \w+$", reason) and i + 1 < len(lines):  # pydantic says more on the next line
            reason += f": {lines[i + 1].strip()}"
        return reason if len(reason) <= 300 else f"{reason[:300]}..."
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return generic or f"exit status {status}: {lines[-1].strip() if lines else 'it printed nothing'}"


def cell(name: str, reference: str, scores: Scores, reference_scores: Scores, job: Job) -> dict:
    """One entry of the results: over all texts, and text by text."""
    texts = {
        text: figures(reference_scores[positions], scores[positions], job.support) for text, positions in job.prompts.slices()
    }
    return {"mode": name, "reference": reference} | figures(reference_scores, scores, job.support) | {"texts": texts}


def commit_of_source() -> str | None:
    """Commit of the source tree that runs, or None for an installed copy."""
    root = ROOT.parent
    if not (root / ".git").exists():  # some other repository may lie further up
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


def versions() -> dict[str, str | None]:
    import vllm_w8a8_plugin

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "vllm-w8a8-plugin": vllm_w8a8_plugin.__version__,
        "python": sys.version.split()[0],
        "vllm": compat.installed_vllm(),
        "torch": installed("torch"),
        "triton": installed("triton"),
    }


@dataclass
class Results:
    """The result file: what was measured, and a cell for each mode and reference.

    Args:
        file: where it lies; written anew after every change.
        head: what the cells depend on. A file with another head is not continued.
        cells: (mode, reference) -> figures.
        failed: mode -> why it did not run.
    """

    file: Path
    head: dict
    cells: dict[tuple[str, str], dict] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path, head: dict, force: bool = False) -> "Results":
        """Continue a file, or begin one.

        Raises:
            ValueError: the file is of another model, commit, text or setting, and is not to be replaced.
        """
        results = cls(file, head)
        if not file.exists():
            return results
        try:
            old = json.loads(file.read_text())
            other = [key for key in head if old.get(key) != head[key]]
            cells = {(c["mode"], c["reference"]): c for c in old["cells"]}
            failed = {entry["mode"]: entry["reason"] for entry in old.get("failed", [])}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} is no result of this command: name another file with --out") from None
        if not other:
            results.cells, results.failed = cells, failed
        elif not force:
            raise ValueError(
                f"{file} holds figures of another {', '.join(other)}: --force replaces them, --out names another file"
            )
        return results

    def add(self, cell: dict) -> None:
        self.cells[cell["mode"], cell["reference"]] = cell
        self.failed.pop(cell["mode"], None)
        self.write()

    def fail(self, mode: str, reason: str) -> None:
        self.failed[mode] = reason
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        failed = [{"mode": mode, "reason": reason} for mode, reason in self.failed.items()]
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        content = self.head | {"date": date, "cells": list(self.cells.values()), "failed": failed}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_name(self.file.name + ".part")
        part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(self.file)


def measure(
    job: Job,
    modes: dict[str, Mode],
    references: list[str],
    results: Results,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Run what is missing in the results, one engine after another.

    Args:
        job: what every engine gets.
        modes: what is measured.
        references: names in `REFERENCES`.
        results: where the figures go.
        force: measure again what is there.
        say: gets a line for the user at every step.

    Returns:
        Modes that failed, but those of stock vLLM that do not run here.

    Raises:
        EngineFailed: a reference failed, so that nothing can be measured.
    """
    prints = {name: fingerprint(mode.checkpoint) if mode.checkpoint else None for name, mode in modes.items()}

    def missing(name: str, reference: str) -> bool:
        old = results.cells.get((name, reference))
        return old is None or old.get("fingerprint") != prints[name]

    pending = []
    for name, mode in modes.items():
        if not force and mode.stock and name in results.failed:
            say(f"{name}: does not run here: {results.failed[name]}")
        elif force or any(missing(name, reference) for reference in references):
            pending.append(name)
        else:
            say(f"{name}: already there")
    if not pending:
        return []

    def run(mode: Mode) -> tuple[Scores, dict]:
        started = time.monotonic()
        scores, report = score(job, mode)
        return scores, report | {"seconds": round(time.monotonic() - started, 1)}

    against = {}
    for reference in references:
        say(f"reference {reference}: {sum(positions for _, positions in job.prompts.texts.values())} positions")
        against[reference], _ = run(REFERENCES[reference])
    failed = []
    for name in pending:
        say(f"{name}: running")
        try:
            scores, report = run(modes[name])
        except EngineFailed as error:
            say(f"{name}: did not run: {error}{'' if modes[name].stock else _keep_log(name, error.log)}")
            results.fail(name, str(error))
            if not modes[name].stock:
                failed.append(name)
            continue
        for reference in references:
            extra = report | ({"fingerprint": prints[name]} if prints[name] else {})
            results.add(cell(name, reference, scores, against[reference], job) | extra)
    return failed


def _keep_log(name: str, log: str) -> str:
    handle, path = tempfile.mkstemp(prefix=f"quality-{name}-", suffix=".log", text=True)
    with os.fdopen(handle, "w") as file:
        file.write(log)
    return f"\n  its log: {path}"


def result_table(results: Results) -> "Table":
    from rich.table import Table

    table = Table("mode", "against", "text", *("perplexity", "ratio", "KL mean", "KL 99 %", "top-1", "top-5"), box=None)
    for (mode, reference), entry in results.cells.items():
        for text, values in {"all": entry, **entry["texts"]}.items():
            table.add_row(
                *((mode, reference) if text == "all" else ("", "")),
                text,
                f"{values['ppl']:.3f}",
                f"{values['ppl_ratio']:.4f}",
                f"{values['kl_mean']:.5f}",
                f"{values['kl_p99']:.4f}",
                f"{values['top1']:.4f}",
                f"{values['top5']:.4f}",
            )
    return table


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


@contextlib.contextmanager
def _one_line_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except EngineFailed as error:
        where = _keep_log("reference", error.log)
        typer.secho(f"error: the reference did not run: {error}{where}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        said = f"what was measured is in {out}" if out.exists() else "nothing was measured yet"
        typer.secho(f"interrupted: {said}", fg=typer.colors.RED, err=True)
        raise typer.Exit(130) from None


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder of the unquantized model.")],
    mode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"One of {', '.join(MODES)}. May be repeated. Default: all, or none beside --checkpoint."
        ),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="A folder that `vllm-w8a8 convert` wrote, as a mode. May be repeated."),
    ] = None,
    reference: Annotated[
        list[Reference] | None,
        typer.Option(case_sensitive=False, help="Type in which the reference runs. May be repeated. Default: fp32."),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each text.")] = TOKENS,
    support: Annotated[
        int, typer.Option(metavar="N", min=1, help="Likeliest tokens that are compared one by one; the others count together.")
    ] = SUPPORT,
    name: Annotated[str | None, typer.Option(help="What the results call the model. Default: its folder's name.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Default: {RESULTS}/quality-NAME-DATE.json in the current folder."),
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
    """Measure how far served, quantized models are from the unquantized model."""
    from rich.console import Console

    # As Ctrl-C: no engine may be left when a job scheduler ends this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    name = name or model.resolve().name
    references = [r.value for r in dict.fromkeys(reference or [Reference.FP32])]
    out = out or RESULTS / f"quality-{_slug(name)}-{datetime.now(timezone.utc):%Y-%m-%d}.json"
    with _one_line_errors(out):
        modes = choose_modes(mode or [], checkpoint or [])
        check_model(model)
        prompts = make_prompts(model, tokens)
        check_same_tokens(modes, prompts, tokens)
        if compat.installed_vllm() is None:
            raise ValueError(compat.vllm_problem(None))
        job = Job(model, prompts, support, _engine(engine), timeout)
        head = make_head(job, name, commit)
        results = Results.open(out, head, force)
        if results.cells and str(head["commit"]).endswith("-dirty"):
            console.print(
                f"note: {head['commit']} may be other code than what {out} was measured with: --force measures again"
            )

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        failed = measure(job, modes, references, results, force=force, say=say)
    Console().print(result_table(results))
    typer.echo(out)
    if failed:
        raise typer.Exit(1)


def _engine(text: str) -> dict:
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"--engine {text!r}: expected a JSON object with arguments of vllm.LLM")
    return arguments


def make_head(job: Job, name: str, commit: str | None = None) -> dict:
    """All that the figures depend on but the mode and the reference."""
    ours = {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_W8A8_") and k not in MODE_VARIABLES}
    return {
        "model": name,
        "versions": versions(),
        "commit": commit or commit_of_source(),
        "fingerprint": fingerprint(job.model),
        "settings": {
            "chunk": CHUNK,
            "support": job.support,
            "kept": KEPT * job.support,
            "engine": job.engine,
            "environment": ours,
        },
        "texts": {
            text: {"positions": positions, "sha256": job.prompts.hashes[text]}
            for text, (_, positions) in job.prompts.texts.items()
        },
    }


if __name__ == "__main__":
    app()
