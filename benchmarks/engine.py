"""Whole engines: prefill and decode speed, time to the first token and memory of model shapes in several modes.

    python benchmarks/engine.py [--models qwen3-8b] [--modes bf16 ours] [--batches 1 8 32 128] [--tp 1] [--runs 3] [--together]

Weights are dummies, compiled code and CUDA graphs are on, as vLLM serves by default. Every model and mode has a process of its
own, which measures all its cells; one that crashes is started again, and the crash is counted. Cells are written as they come:
the same command goes on where it stopped. It exits with 1 if the engines of a model and mode crashed too often. With
`--together` all engines are started at once, since starting takes longer than measuring, and measure one after the other, the
others waiting; they must fit into the GPU's memory beside each other. Writes benchmarks/results/engine-<gpu>-<date>.json, and
beside it a table (.md) and, where matplotlib is installed, a plot (.png).

- prefill: `batch` prompts of 1,024 tokens, one token each; prompt tokens per second. `first_token_s` is the time of that call.
- decode: `batch` prompts of 128 tokens; tokens per second from the 32nd to the 160th token, as the difference of two calls.
- mixed: `batch` requests of 100 to 1,024 tokens in and 100 to 1,024 out, from a fixed seed; generated tokens per second.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpu_timing import RESULTS, STOCK_INT8, provenance

PROMPT_TOKENS, DECODE_PROMPT_TOKENS = 1024, 128
FEW_TOKENS, MANY_TOKENS = 32, 160
MIXED_LENGTHS = (100, 1024)
PHASES = ("prefill", "decode", "mixed")
MAX_CRASHES = 2

# Of vLLM's dummy weights, which are uniform.
DUMMY_AMAX = 1e-3

# KV cache of engines that start together, in tokens: 128 sequences of 288, 32 prompts of 1,024.
TOGETHER_KV_TOKENS = 45056

# Files by which a process says that its engine stands, is told to measure, and says what it has measured.
READY, GO, CELLS = "ready", "go", "cells.jsonl"

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
MODELS = {
    "qwen3-8b": QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    # One in six of its layers: the whole takes 61 GB in bf16.
    "qwen3-30b-a3b-8-layers": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "tie_word_embeddings": False,
    },
    "tiny": QWEN3
    | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Mode:
    """How a model is served: entries of config.json, arguments of `vllm.LLM`, environment."""

    config: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    fill: bool = False  # its weights are loaded as int8, which vLLM's dummies leave as they were allocated


MODES = {
    "bf16": Mode(),
    "stock-int8": Mode({"quantization_config": STOCK_INT8}, fill=True),
    "stock-fp8": Mode(engine={"quantization": "fp8"}),
    "ours": Mode(engine={"quantization": "w8a8"}),
    "ours-lmhead": Mode(engine={"quantization": "w8a8"}, env={"VLLM_W8A8_LM_HEAD": "1"}),
    "ours-rtn": Mode(engine={"quantization": "w8a8"}, env={"VLLM_W8A8_HADAMARD": "0"}),
    "ours-attention": Mode(engine={"quantization": "w8a8"}, env={"VLLM_W8A8_ATTENTION": "1"}),
    "ours-attention-lmhead": Mode(engine={"quantization": "w8a8"}, env={"VLLM_W8A8_ATTENTION": "1", "VLLM_W8A8_LM_HEAD": "1"}),
}


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    model: str
    mode: str
    tp: int
    batches: tuple[int, ...]
    prefill_batches: tuple[int, ...]
    phases: tuple[str, ...]
    runs: int
    engine: dict

    @property
    def name(self) -> str:
        return f"{self.model} {self.mode} tp {self.tp}"

    def cells(self) -> list[tuple[str, int]]:
        of = {"prefill": self.prefill_batches}
        return [(phase, batch) for phase in self.phases for batch in of.get(phase, self.batches)]


def prompts(rng: random.Random, batch: int, lengths: tuple[int, int], vocab: int) -> list[dict]:
    """`batch` prompts of random tokens, none a prefix of another."""
    return [{"prompt_token_ids": [rng.randrange(1, vocab) for _ in range(rng.randint(*lengths))]} for _ in range(batch)]


def measure(llm, phase: str, batch: int, runs: int, vocab: int) -> dict:
    """One cell: tokens per second of every run, and their median."""
    from vllm import SamplingParams

    rng = random.Random(f"{phase} {batch}")

    def timed(requests: list[dict], tokens: list[int]) -> float:
        sampling = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0, detokenize=False) for n in tokens]
        start = time.perf_counter()
        outputs = llm.generate(requests, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - start
        got = [len(output.outputs[0].token_ids) for output in outputs]
        if got != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, got {got}")
        return elapsed

    rates, first = [], []
    for run in range(runs + 1):  # the first run warms up
        # Fresh prompts each time: those of an earlier run would be in the prefix cache.
        if phase == "prefill":
            seconds = timed(prompts(rng, batch, (PROMPT_TOKENS, PROMPT_TOKENS), vocab), [1] * batch)
            rate = batch * PROMPT_TOKENS / seconds
        elif phase == "decode":
            lengths = (DECODE_PROMPT_TOKENS, DECODE_PROMPT_TOKENS)
            few = timed(prompts(rng, batch, lengths, vocab), [FEW_TOKENS] * batch)
            seconds = timed(prompts(rng, batch, lengths, vocab), [MANY_TOKENS] * batch) - few
            rate = batch * (MANY_TOKENS - FEW_TOKENS) / seconds
        else:
            wanted = [rng.randint(*MIXED_LENGTHS) for _ in range(batch)]
            seconds = timed(prompts(rng, batch, MIXED_LENGTHS, vocab), wanted)
            rate = sum(wanted) / seconds
        if run > 0:
            rates.append(round(rate, 2))
            first.append(seconds)
    cell = {"tokens_per_s": statistics.median(rates), "runs": rates}
    if phase == "prefill":
        cell["first_token_s"] = round(statistics.median(first), 5)
    return cell


def peak_bytes(worker) -> int:
    """Greatest memory that PyTorch has held on this worker's GPU since the process began; 0 without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def fill_int8_weights(worker) -> None:
    """Random codes in place of zeros: a GPU multiplies and reads zeros with less power, and so with a faster clock."""
    import torch

    for module in worker.get_model().modules():
        weight = getattr(module, "weight", None)
        if torch.is_tensor(weight) and weight.dtype == torch.int8:
            weight.random_(-127, 128)
            module.weight_scale.fill_(DUMMY_AMAX / 127)


def child(folder: Path) -> None:
    """Measure a job's cells and append each to cells.jsonl."""
    from vllm import LLM

    job = json.loads((folder / "job.json").read_text())
    start = time.perf_counter()
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=job["tp"],
        max_model_len=2 * MIXED_LENGTHS[1] + 8,
        **job["engine"],
    )
    start_s = round(time.perf_counter() - start, 1)
    if job["fill"]:
        llm.collective_rpc(fill_int8_weights)
    if job["waits"]:
        wait_for_turn(folder)
    for phase, batch in job["cells"]:
        cell = {"phase": phase, "batch": batch, **measure(llm, phase, batch, job["runs"], job["vocab"])}
        cell |= {"start_s": start_s, "peak_bytes": max(llm.collective_rpc(peak_bytes))}
        append(folder, cell)
    llm.llm_engine.engine_core.shutdown()
    # vLLM's CPU build can abort while it is taken down; all is measured by now.
    os._exit(0)


def wait_for_turn(folder: Path) -> None:
    """Say that the engine stands, and return when it is to measure."""
    (folder / READY).touch()
    while not (folder / GO).exists():
        time.sleep(0.1)


def append(folder: Path, cell: dict) -> None:
    """Say what was measured."""
    with (folder / CELLS).open("a") as file:
        file.write(json.dumps(cell) + "\n")


class Engine(AbstractContextManager):
    """A process in which a benchmark starts an engine and then, at once or when told to, measures cells.

    Args:
        script: the benchmark; it is run with `--child FOLDER`, where config.json and job.json are, and appends its cells to
            the file CELLS there.
        config: content of config.json.
        job: content of job.json.
        env: variables beside those of this process.
        log: file to which what it says is appended.
    """

    def __init__(self, script: str, config: dict, job: dict, env: dict[str, str], log: Path) -> None:
        self._tmp = tempfile.TemporaryDirectory()
        self._folder = Path(self._tmp.name)
        (self._folder / "config.json").write_text(json.dumps(config))
        (self._folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, script, "--child", self._tmp.name]
        with log.open("a") as output:
            # A session of its own, to end its workers with it.
            self._process = subprocess.Popen(
                command, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._tmp.cleanup()

    def wait_until_started(self) -> None:
        """Return when the engine stands, or its process has ended."""
        while self._process.poll() is None and not (self._folder / READY).exists():
            time.sleep(0.1)

    def measure(self) -> tuple[list[dict], bool]:
        """Let it measure.

        Returns:
            the cells that it measured, and whether it ended well.
        """
        (self._folder / GO).touch()
        code = self._process.wait()
        path = self._folder / CELLS
        measured = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return measured, code == 0


def start(job: Job, cells: list[tuple[str, int]], log: Path, waits: bool = False) -> Engine:
    """The process of a job; `waits`: until it is told to measure."""
    mode = MODES[job.mode]
    config = MODELS[job.model] | mode.config
    engine = mode.engine | job.engine
    if waits:
        # By size: each would take what the others leave.
        token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] // job.tp
        engine = {"kv_cache_memory_bytes": TOGETHER_KV_TOKENS * token_bytes, "gpu_memory_utilization": 0.05} | engine
    about = {"tp": job.tp, "cells": cells, "runs": job.runs, "vocab": config["vocab_size"], "waits": waits, "engine": engine}
    about["fill"] = mode.fill
    # The functions that the workers are sent are pickled.
    env = {"VLLM_W8A8_ENABLE": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | mode.env
    return Engine(__file__, config, about, env, log)


def key(cell: dict) -> tuple:
    return cell["model"], cell["mode"], cell["tp"], cell["phase"], cell["batch"]


def missing(job: Job, result: dict) -> list[tuple[str, int]]:
    """Cells of a job that `result` lacks."""
    have = {key(cell) for cell in result["cells"]}
    return [cell for cell in job.cells() if (job.model, job.mode, job.tp, *cell) not in have]


def run_together(jobs: list[Job], result: dict, out: Path, logs: Path) -> None:
    """Start an engine for every job, then let one after the other measure; `run` is for what fails here."""
    with ExitStack() as stack:
        engines = []
        for job in jobs:
            if left := missing(job, result):
                engines.append((job, stack.enter_context(start(job, left, log_of(job, logs), waits=True))))
        for _, engine in engines:
            engine.wait_until_started()
        for job, engine in engines:
            add(job, result, out, logs, *engine.measure())


def run(job: Job, result: dict, out: Path, logs: Path) -> bool:
    """Measure what `result` lacks of a job, and write it after every process.

    Returns:
        whether all is measured: no engine is started once more than MAX_CRASHES of the job's have crashed.
    """
    while left := missing(job, result):
        crashes = crashes_of(job, result)
        if crashes > MAX_CRASHES:
            failed = {"model": job.model, "mode": job.mode, "tp": job.tp, "crashes": crashes}
            if failed not in result.setdefault("failed", []):
                result["failed"].append(failed)
            write(result, out)
            return False
        with start(job, left, log_of(job, logs)) as engine:
            add(job, result, out, logs, *engine.measure())
    return True


def log_of(job: Job, logs: Path) -> Path:
    return logs / f"{job.model}-{job.mode}-tp{job.tp}.log"


def crashes_of(job: Job, result: dict) -> int:
    """How often an engine of this job has ended with an error."""
    return result.get("crashes", {}).get(job.name, 0)


def add(job: Job, result: dict, out: Path, logs: Path, measured: list[dict], well: bool) -> None:
    """Write what one engine has measured, and how it ended."""
    crashes = crashes_of(job, result)
    for cell in measured:
        where = {"model": job.model, "mode": job.mode, "tp": job.tp, "crashes": crashes}
        result["cells"].append(where | cell)
        print(f"{job.name} {cell['phase']} {cell['batch']}: {cell['tokens_per_s']:,.0f} tokens/s", flush=True)
    if not well:
        result.setdefault("crashes", {})[job.name] = crashes + 1
        print(f"{job.name}: the engine ended with an error, see {log_of(job, logs)}", flush=True)
    write(result, out)


def write(result: dict, out: Path) -> None:
    """The JSON file, at once, and the table beside it."""
    temporary = out.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(out)
    out.with_suffix(".md").write_text(table(result))


def table(result: dict) -> str:
    """Tokens per second as Markdown: a row for each model, phase and batch, a column for each mode."""
    modes = list(dict.fromkeys(cell["mode"] for cell in result["cells"]))
    rows: dict[tuple, dict[str, float]] = {}
    for cell in result["cells"]:
        rows.setdefault((cell["model"], cell["tp"], cell["phase"], cell["batch"]), {})[cell["mode"]] = cell["tokens_per_s"]
    lines = [
        f"{result['gpu']}, {result['date'][:10]}, vLLM {result['versions'].get('vllm')}, commit {result['commit']}; tokens/s",
        "",
        "| model | TP | phase | batch | " + " | ".join(modes) + " |",
        "|" + "---|" * (4 + len(modes)),
    ]
    for (model, tp, phase, batch), rates in sorted(
        rows.items(), key=lambda row: (row[0][:2], PHASES.index(row[0][2]), row[0][3])
    ):
        values = " | ".join(f"{rates[mode]:,.0f}" if mode in rates else "" for mode in modes)
        lines.append(f"| {model} | {tp} | {phase} | {batch} | {values} |")
    return "\n".join(lines) + "\n"


def plot(result: dict, path: Path) -> None:
    """Speed of every mode over the first one's, one panel for each model and phase."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((c["model"], c["tp"], c["phase"]) for c in result["cells"]))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        cells = [c for c in result["cells"] if (c["model"], c["tp"], c["phase"]) == panel]
        base = {c["batch"]: c["tokens_per_s"] for c in cells if c["mode"] == cells[0]["mode"]}
        for mode in dict.fromkeys(c["mode"] for c in cells):
            points = sorted(
                (c["batch"], c["tokens_per_s"] / base[c["batch"]]) for c in cells if c["mode"] == mode if c["batch"] in base
            )
            axis.plot(*zip(*points, strict=True), marker="o", label=mode)
        axis.set(title="{} TP {} {}".format(*panel), xlabel="batch", ylabel=f"speed / {cells[0]['mode']}", xscale="log")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def positive(text: str) -> int:
    """An argument that is a number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 1")
    return number


def engine_arguments(text: str) -> dict:
    """An argument that is a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object, as '{{\"max_num_seqs\": 64}}'")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--other-modes", nargs="+", choices=MODES, help="of all models but the first; default: --modes")
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 8, 32, 128])
    parser.add_argument("--prefill-batches", nargs="+", type=positive, help="default: those of --batches")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=["prefill", "decode"])
    parser.add_argument("--tp", type=positive, default=1)
    parser.add_argument("--runs", type=positive, default=3)
    parser.add_argument("--together", action="store_true", help="start all engines at once")
    parser.add_argument("--engine", type=engine_arguments, default={}, help="more arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/engine-<gpu>-<date>.json")
    parser.add_argument("--commit", help="where the source tree has no git history")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    head = provenance(args.commit)
    out = args.out or RESULTS / f"engine-{head['gpu'].lower().replace(' ', '-')}-{head['date'][:10]}.json"
    result = head | {"cells": []}
    if out.exists():
        before = json.loads(out.read_text())
        if (before["commit"], before["versions"], before["gpu"]) != (head["commit"], head["versions"], head["gpu"]):
            parser.error(f"{out} is of commit {before['commit']} on {before['gpu']}: name another file with --out")
        result = before
    logs = out.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    prefill_batches = tuple(args.prefill_batches or args.batches)
    jobs = [
        Job(model, mode, args.tp, tuple(args.batches), prefill_batches, tuple(args.phases), args.runs, args.engine)
        for model in args.models
        for mode in (args.modes if model == args.models[0] else args.other_modes or args.modes)
    ]
    if args.together:
        run_together(jobs, result, out, logs)
    complete = [run(job, result, out, logs) for job in jobs]
    plot(result, out.with_suffix(".png"))
    print(json.dumps({"result": str(out)}))
    return 0 if all(complete) else 1


if __name__ == "__main__":
    sys.exit(main())
