"""How far served, quantized models are from the unquantized one: perplexity, KL divergence, agreement, through vLLM itself.

The reference is the unquantized model in fp32 (or bf16), run in vLLM. Every mode runs in an engine of its own process, so that
one that fails loses no other, and its figures are kept as soon as it is done. `vllm-w8a8 eval` is the command.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_w8a8_plugin import compat, envs
from vllm_w8a8_plugin.divergence import KEPT, SUPPORT, Scores, divergence, figures, histogram, likeliest
from vllm_w8a8_plugin.files import whole, write_whole
from vllm_w8a8_plugin.quality_modes import MODE_VARIABLES, REFERENCES, Mode, Target
from vllm_w8a8_plugin.quality_prompts import CHUNK, ROOT, Prompts, continuation, readable

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORST = 10  # positions that are shown
CONTEXT = 16  # tokens before each
PLACES = 10  # tokens of a prompt that are one point of a plot
# A thread of vLLM's CPU build that was never joined: seen on busy machines, before the model is loaded. Repeated once.
VLLM_ABORT = "terminate called without an active exception"
_LOOK_S = 0.5
# What vLLM says in one process when another has failed.
GENERIC_FAILURES = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "EngineDeadError",
    "WorkerProc initialization failed",
)

# what runs, prompts done, prompts in all
Progress = Callable[[str, int, int], None]


class EngineFailed(Exception):
    """An engine ended with an error. The message is its reason, `log` all that it printed."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


@dataclass(frozen=True)
class Job:
    """What all engines of a measurement have in common.

    Args:
        reference: the unquantized model.
        prompts: the texts.
        tokenizer: with which they were read.
        support: number of the reference's likeliest tokens that are compared one by one.
        engine: arguments of `vllm.LLM` for every engine.
        timeout_s: longest time for one engine.
    """

    reference: Target
    prompts: Prompts
    tokenizer: "Tokenizer"
    support: int = SUPPORT
    engine: dict = field(default_factory=dict)
    timeout_s: float = 3600


def score(job: Job, mode: Mode, tell: Callable[[int], None] = lambda done: None) -> tuple[Scores, dict]:
    """What a fresh engine says to the prompts, and what that engine was.

    Args:
        job: what every engine gets.
        mode: what this one is.
        tell: called with the number of prompts done, while it runs.

    Raises:
        EngineFailed: it ended with an error, or was not what the mode asked for.
    """
    prompts = job.prompts
    arguments = {
        "model": str((mode.served or job.reference).path.absolute()),
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
        names = ("job.json", "scores.npz", "report.json", "progress")
        job_file, scores_file, report_file, progress_file = (Path(tmp, name) for name in names)
        job_file.write_text(json.dumps(engine_job | {"progress": str(progress_file)}))
        files = [str(file) for file in (job_file, scores_file, report_file)]
        command = [sys.executable, "-m", f"{__package__}.quality_engine", *files]

        def look() -> None:
            if progress_file.exists():
                tell(progress_file.stat().st_size)

        status, log = _run(command, engine_environment(mode), job.timeout_s, look)
        if status == -signal.SIGABRT and VLLM_ABORT in log and not report_file.exists():
            status, log = _run(command, engine_environment(mode), job.timeout_s, look)
        if not report_file.exists():  # once the figures are there, an error while vLLM ends changes nothing
            raise EngineFailed(_reason(status, log), log)
        report = json.loads(report_file.read_text())
        _check_report(report, mode, log)
        return Scores.load(scores_file), report


def _check_report(report: dict, mode: Mode, log: str) -> None:
    """A figure under a wrong name is worse than none: vLLM must have run what the mode asked for."""
    wanted = {key: mode.engine[key] for key in ("dtype", "kv_cache_dtype") if key in mode.engine}
    if not mode.stock and (mode.served is None or "quantization" in mode.engine):
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


def _run(
    command: list[str], env: dict[str, str], timeout_s: float, look: Callable[[], None] = lambda: None
) -> tuple[int | None, str]:
    """Exit status (None: out of time) and all that was printed. Whatever happens, no process of it is left.

    `look` is called some times a second meanwhile.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        status, end = None, time.monotonic() + timeout_s
        try:
            while status is None and (left := end - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(min(left, _LOOK_S))
                look()
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
    """One entry of the results: over all texts, text by text, position by position.

    `worst` are the positions with the largest divergence; `kl_by_index` holds, for every `PLACES` tokens of the prompts, the
    first of them and the mean and 99th percentile of the divergence; `differences` is a histogram of the true token's
    log-probability minus the reference's.
    """
    texts = {
        text: figures(reference_scores[positions], scores[positions], job.support) for text, positions in job.prompts.slices()
    }
    kl = divergence(reference_scores, scores, job.support).kl
    return (
        {"mode": name, "reference": reference}
        | figures(reference_scores, scores, job.support)
        | {"texts": texts}
        | {"worst": _worst(kl, scores, reference_scores, job), "kl_by_index": _by_index(kl, job.prompts)}
        | {"differences": histogram(scores.true_logprobs.astype(np.float64) - reference_scores.true_logprobs)}
    )


def _worst(kl: np.ndarray, scores: Scores, reference_scores: Scores, job: Job) -> list[dict]:
    places, worst = job.prompts.places(), []
    top, reference_top = likeliest(scores, 1), likeliest(reference_scores, 1)
    for i in np.argsort(-kl, kind="stable")[:WORST]:
        place = places[i]
        ids = job.prompts.ids[place.prompt]
        context = ids[max(job.prompts.prefix, place.index - CONTEXT) : place.index]
        worst.append(
            {
                "text": place.text,
                "token": place.token,
                "context": readable(job.tokenizer, context),
                "next": continuation(job.tokenizer, context, ids[place.index]),
                "kl": float(f"{kl[i]:.4g}"),
                "reference_top": continuation(job.tokenizer, context, int(reference_top[i, 0])),
                "reference_top_p": float(f"{np.exp(reference_scores.logprobs[i].max()):.4g}"),
                "top": continuation(job.tokenizer, context, int(top[i, 0])),
                "top_p": float(f"{np.exp(scores.logprobs[i].max()):.4g}"),
            }
        )
    return worst


def _by_index(kl: np.ndarray, prompts: Prompts) -> dict[str, list]:
    group = (prompts.indices() - prompts.first) // PLACES
    parts = [(int(number), kl[group == number]) for number in np.unique(group)]
    return {
        "first": [prompts.first + number * PLACES for number, _ in parts],
        "mean": [float(f"{part.mean():.4g}") for _, part in parts],
        "p99": [float(f"{np.percentile(part, 99):.4g}") for _, part in parts],
    }


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


RESULT, PARTIAL, LOCK = "eval.json", "eval.partial.json", "eval.partial.lock"
NO_RESULT = "is no result of this command: name another folder with --out"


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let no other run write to a folder meanwhile; the folder is made, and removed again if nothing was put there.

    Raises:
        ValueError: another run does, or it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / LOCK
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another run writes to {folder}: wait until it ends, or name another folder with --out"
            ) from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


@dataclass
class Results:
    """What was measured, and a cell for each mode and reference.

    While modes are missing it is in `eval.partial.json`, so that nothing unfinished looks finished, and what the references
    said in files beside it, which no cell can be made without.

    Args:
        folder: where it lies; written anew after every change.
        head: what the cells depend on. A file with another head is not continued.
        cells: (mode, reference) -> figures.
        failed: mode -> why it did not run.
    """

    folder: Path
    head: dict
    cells: dict[tuple[str, str], dict] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / RESULT

    @property
    def partial(self) -> Path:
        return self.folder / PARTIAL

    @classmethod
    def open(cls, folder: Path, head: dict, force: bool = False) -> "Results":
        """Continue what is in a folder, or begin.

        Raises:
            ValueError: it is of another model, commit, text or setting, and is not to be replaced.
        """
        results = cls(folder, head)
        file = results.partial if results.partial.exists() else results.file
        if not file.exists():
            return results
        try:
            old = json.loads(file.read_text(encoding="utf-8"))
            other = [key for key in head if old.get(key) != head[key]]
            cells = {(c["mode"], c["reference"]): c for c in old["cells"]}
            failed = {entry["mode"]: entry["reason"] for entry in old.get("failed", [])}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file} {NO_RESULT}") from None
        if not other:
            results.cells, results.failed = cells, failed
        elif not force:
            raise ValueError(
                f"{file} holds figures of another {', '.join(other)}: --force replaces them, --out names another folder"
            )
        return results

    def add(self, cell: dict) -> None:
        self.cells[cell["mode"], cell["reference"]] = cell
        self.failed.pop(cell["mode"], None)
        self._write()

    def fail(self, mode: str, reason: str) -> None:
        self.failed[mode] = reason
        self._write()

    def keep_reference(self, reference: str, scores: Scores) -> None:
        """Put aside what a reference said, until all is measured."""
        with whole(self._reference_file(reference)) as part:
            scores.save(part)

    def kept_reference(self, reference: str) -> Scores | None:
        """What it said to the same texts under the same settings; None where that is not there, or cannot be read."""
        try:
            return Scores.load(self._reference_file(reference))
        except (OSError, ValueError, TypeError, zipfile.BadZipFile):
            return None

    def _reference_file(self, reference: str) -> Path:
        """By all that its answers depend on, so that those of another model or text are never taken for them."""
        head = {key: value for key, value in self.head.items() if key != "model"}
        digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"eval.partial.{reference}-{digest}.npz"

    def unfinished(self) -> list[Path]:
        """Files of a run of these settings that is not finished."""
        return [file for file in (self.partial, *sorted(map(self._reference_file, REFERENCES))) if file.exists()]

    def finish(self) -> None:
        """All was measured that was asked for: the partial file becomes the result."""
        if self.partial.exists():
            self.partial.replace(self.file)
        for file in self.folder.glob("eval.partial.*.npz"):  # also those of other settings, which nobody asks for any more
            file.unlink()

    def content(self) -> dict:
        failed = [{"mode": mode, "reason": reason} for mode, reason in self.failed.items()]
        return self.head | {"cells": list(self.cells.values()), "failed": failed}

    def _write(self) -> None:
        date = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        write_whole(self.partial, json.dumps(self.content() | date, indent=1, ensure_ascii=False) + "\n")


def measure(
    job: Job,
    modes: dict[str, Mode],
    references: list[str],
    results: Results,
    *,
    force: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda what, done, total: None,
) -> list[str]:
    """Run what is missing in the results, one engine after another, and finish them.

    Args:
        job: what every engine gets.
        modes: what is measured.
        references: names in `REFERENCES`.
        results: where the figures go.
        force: measure again what is there.
        say: gets a line for the user at every step.
        progress: called while an engine runs.

    Returns:
        Modes that failed, but those of stock vLLM that do not run here.

    Raises:
        EngineFailed: a reference failed, so that nothing can be measured.
    """
    prints = {name: mode.served.fingerprint() if mode.served else None for name, mode in modes.items()}

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
        results.finish()
        return []

    def run(what: str, mode: Mode) -> tuple[Scores, dict]:
        started, total = time.monotonic(), len(job.prompts.ids)
        progress(what, 0, total)
        scores, report = score(job, mode, lambda done: progress(what, done, total))
        progress(what, total, total)
        return scores, report | {"seconds": round(time.monotonic() - started, 1)}

    against = {}
    for reference in references:
        scores = None if force else results.kept_reference(reference)
        if scores is None:
            say(f"reference {reference}: {job.prompts.positions} positions")
            scores, _ = run(f"reference {reference}", REFERENCES[reference])
            results.keep_reference(reference, scores)
        else:
            say(f"reference {reference}: already there")
        against[reference] = scores
    failed = []
    for name in pending:
        say(f"{name}: running")
        try:
            scores, report = run(name, modes[name])
        except EngineFailed as error:
            say(f"{name}: did not run: {error}{'' if modes[name].stock else keep_log(name, error.log)}")
            results.fail(name, str(error))
            if not modes[name].stock:
                failed.append(name)
            continue
        for reference in references:
            extra = report | ({"fingerprint": prints[name]} if prints[name] else {})
            results.add(cell(name, reference, scores, against[reference], job) | extra)
    results.finish()
    return failed


def keep_log(name: str, log: str) -> str:
    """Put an engine's log into a file, and say where."""
    handle, path = tempfile.mkstemp(prefix=f"quality-{name}-", suffix=".log", text=True)
    with os.fdopen(handle, "w") as file:
        file.write(log)
    return f"\n  its log: {path}"


def make_head(job: Job, name: str, commit: str | None = None) -> dict:
    """All that the figures depend on but the mode and the reference."""
    ours = {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_W8A8_") and k not in MODE_VARIABLES}
    return {
        "model": name,
        "versions": versions(),
        "commit": commit or commit_of_source(),
        "against": job.reference.name,
        "fingerprint": job.reference.fingerprint(),
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
