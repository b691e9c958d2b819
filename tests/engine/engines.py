"""Start engines in processes of their own and measure what they answer."""

import functools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import engine_runner
import forked
import torch

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("engine_runner.py")
TIMEOUT_S = 900
# Seen in 5 of some 60 engines of the CPU build, only on a busy machine, once before the model was loaded: a thread of vLLM's
# own process that was never joined. Such a run is repeated once, with a warning.
VLLM_ABORT = "terminate called without an active exception"

# Of an engine on a GPU: so much cache whatever else runs there, so several can be tested at a time.
GPU_MEMORY = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}

# Environment of an engine that runs in a process of its own, as vLLM does by default.
PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

# The position's true token and vLLM's top tokens, log-probabilities by token id.
Position = dict[int, float]


@dataclass
class Answer:
    """What an engine said to one prompt."""

    prompt: list[int]
    token_ids: list[int]
    text: str
    prompt_logprobs: list[Position]
    logprobs: list[Position]
    cached_tokens: int = 0

    def true_logprobs(self) -> list[float]:
        """Log-probability of every prompt token but the first."""
        return [position[token] for token, position in zip(self.prompt[1:], self.prompt_logprobs[1:], strict=True)]


@dataclass
class Run:
    """An engine's answers, its log, and, if counted, how many kernels it had compiled when it had started and at the end.

    `later` holds a run for each thing that was done then; `addresses`, where something was, the weights' in each worker at the
    start and after each thing but adapters; `accepted` counts a draft's tokens, with disable_log_stats=False.
    """

    answers: list[Answer]
    log: str
    compilations: tuple[int, ...] = ()
    later: "list[Run]" = field(default_factory=list)
    addresses: list[list[dict[str, int]]] = field(default_factory=list)
    accepted: int = 0

    def perplexity(self) -> float:
        values = [value for answer in self.answers for value in answer.true_logprobs()]
        return math.exp(-sum(values) / len(values))

    def top1(self) -> list[int]:
        """Most likely token at every prompt position but the first."""
        return [max(p, key=p.__getitem__) for answer in self.answers for p in answer.prompt_logprobs[1:]]


class EngineFailed(Exception):
    """The engine's process ended with an error; the message is the end of its log."""


def run_engine(
    model: Path | str,
    prompts: list[list[int]],
    *,
    engine: dict | None = None,
    sampling: dict | list[dict] | None = None,
    together: list[int] | None = None,
    count_compilations: bool = False,
    then: list[list] | None = None,
    backends: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Run:
    """Answers of a fresh engine.

    Args:
        model: checkpoint folder.
        prompts: token ids.
        engine: arguments of `vllm.LLM` beside the model; unless it says otherwise, eager mode, and one prompt at a time: when
            requests meet in a batch depends on timing, and a batch's shape moves bf16 results by more than 1e-3.
        sampling: arguments of `SamplingParams`, for all prompts or a list for each; default: one token, the prompt's
            log-probabilities with the top 20.
        together: how many prompts are handed over at a time, these when those before are answered; default: all at once.
        count_compilations: count the Triton kernels of ours that are compiled. The engine then runs in the runner's process.
        then: what is done after the prompts are answered, each followed by the same prompts: ["again"], ["adapter", FOLDER]
            for the answers with a LoRA adapter, or the name and the arguments of one of `engine_runner.ACTIONS`.
        backends: class paths of attention backends, put in place of vLLM's by name. The engine then runs in the runner's
            process.
        env: variables added to the environment.

    Raises:
        EngineFailed: it ended with an error.
    """
    job = {
        "engine": {"model": str(model), "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 1, "seed": 0}
        | (engine or {}),
        "prompts": prompts,
        "sampling": sampling or {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 20},
        "together": together or [],
        "count_compilations": count_compilations,
        "then": then or [],
        "backends": backends or {},
    }
    with tempfile.TemporaryDirectory() as tmp:
        job_file, result_file = Path(tmp, "job.json"), Path(tmp, "result.json")
        job_file.write_text(json.dumps(job))
        environment = engine_environment() | (env or {})
        if count_compilations or backends:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if then:
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to workers
        # Triton decides about its interpreter when it is imported, which the forked process has done.
        run = _run if torch.cuda.is_available() or "TRITON_INTERPRET" in environment else _run_forked
        status, log = run(job_file, result_file, environment, timeout_s)
        if status == -signal.SIGABRT and VLLM_ABORT in log:
            warnings.warn(f"vLLM aborted ({VLLM_ABORT}) and was started again", stacklevel=2)
            status, log = run(job_file, result_file, environment, timeout_s)
        if status != 0 or not result_file.exists():
            raise EngineFailed(f"exit status {status}\n{log[-12000:]}")
        results = json.loads(result_file.read_text())
    answers = [answer(prompt, result) for prompt, result in zip(prompts, results["answers"], strict=True)]
    later = [
        Run([answer(prompt, result) for prompt, result in zip(prompts, part, strict=True)], log) for part in results["later"]
    ]
    counted = tuple(results["compilations"])
    return Run(answers, log, counted, later, results["addresses"], results["accepted"])


def side_by_side(run: Callable[[T], Run], ways: Iterable[T], most: int | None = None) -> dict[T, Run]:
    """Runs of engines that are started together, up to `most` at a time, as starting takes long. See `GPU_MEMORY`."""
    ways = list(ways)
    with ThreadPoolExecutor(most) as pool:
        return dict(zip(ways, pool.map(run, ways), strict=True))


def _run(job_file: Path, result_file: Path, environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """Exit status and log of a runner."""
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(job_file), str(result_file)],
        env=environment,
        cwd=job_file.parent,
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def _run_forked(job_file: Path, result_file: Path, environment: dict[str, str], timeout_s: float) -> tuple[int, str]:
    """As `_run`, without the time to import vLLM."""
    log_file = job_file.with_name("log.txt")
    log_file.write_text("")
    arguments = (str(job_file), str(result_file), str(log_file), environment)
    process = forked.started().Process(target=engine_runner.run_forked, args=arguments)
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired("engine_runner", timeout_s, output=log_file.read_text(errors="replace"))
    return process.exitcode, log_file.read_text(errors="replace")


def answer(prompt: list[int], result: dict) -> Answer:
    logprobs = {
        key: [{int(token): value for token, value in position.items()} for position in result[key]]
        for key in ("prompt_logprobs", "logprobs")
    }
    return Answer(prompt, result["token_ids"], result["text"], **logprobs, cached_tokens=result["cached_tokens"])


def engine_environment() -> dict[str, str]:
    """The environment of an engine: offline, the CPU build's settings, none of the tests' own.

    On a CPU without vLLM's process for the engine, which takes 27 s to start, against 15 for all the rest. `PROCESS` gives it
    back, and so do the servers of other tests.
    """
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "VLLM_W8A8", "VLLM_PLUGINS", "PYTEST"))
    }
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if not torch.cuda.is_available():
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return kept | settings | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def mean_kl(reference: Run, other: Run) -> float:
    """Mean over positions of KL(reference || other) in nats; both must hold the whole vocabulary."""
    total, count = 0.0, 0
    for a, b in zip(reference.answers, other.answers, strict=True):
        for p, q in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert p.keys() == q.keys(), "positions hold different tokens: ask for the whole vocabulary"
            total += sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
            count += 1
    return total / count


def agreement(a: list[int], b: list[int]) -> float:
    """Share of positions where both lists agree."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


@functools.cache
def text_chunks(tokenizer_dir: Path, tokens: int, chunk: int) -> list[list[int]]:
    """The first `tokens` tokens of the committed English text, in prompts of `chunk` tokens."""
    from tokenizers import Tokenizer

    text = (Path(__file__).parent / "texts" / "alice.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert len(ids) >= tokens, f"the text has {len(ids)} tokens, {tokens} are wanted"
    return [ids[i : i + chunk] for i in range(0, tokens, chunk)]
