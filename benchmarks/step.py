"""Where the time of one engine step goes: microseconds of every GPU kernel, and the time in which none runs.

Run: python benchmarks/step.py [--models qwen3-8b] [--modes ours stock-int8] [--layers 4] [--decode 1 32] [--prefill 8192]

Model shapes and modes are those of `benchmarks/engine.py`, of which so many layers are built; weights are dummies, CUDA graphs
are on. Each engine runs in a process of its own; all are started at once, and one after the other is profiled by torch's
profiler: a decode step of `--decode` requests after prompts of 128 tokens, and a step of `--prefill` tokens in prompts of
1,024. `wall_us` is the step as the profiler saw it, which it makes longer; `kernels_us` the time in which a kernel ran, and a
kernel's `us` what of its own time lies after the end of every kernel that ended before it.
Writes benchmarks/results/step-<gpu>-<date>.json. Exits with 1 if an engine ended with an error.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from engine import (
    DECODE_PROMPT_TOKENS,
    MODELS,
    MODES,
    PROMPT_TOKENS,
    Engine,
    append,
    fill_int8_weights,
    positive,
    wait_for_turn,
)
from gpu_timing import RESULTS, provenance

WARM_STEPS = 8


def profiled_step(engine) -> dict:
    """One step of an engine of this process."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        engine.step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    if not events:
        raise RuntimeError("the profiler saw no kernel: the engine must run in this process")
    kernels: dict[str, list[float]] = defaultdict(list)
    before = 0.0
    for event in sorted(events, key=lambda event: event.time_range.end):
        # A kernel that is launched before its predecessor has ended waits for it: that time is not its own.
        kernels[event.name].append(max(0.0, event.time_range.end - max(before, event.time_range.start)))
        before = event.time_range.end
    rows = [{"name": name, "calls": len(us), "us": round(sum(us), 1)} for name, us in kernels.items()]
    rows.sort(key=lambda row: -row["us"])
    return {
        "wall_us": round(wall * 1e6),
        "kernels_us": round(sum(row["us"] for row in rows)),
        "launches": sum(row["calls"] for row in rows),
        "kernels": rows,
    }


def child(folder: Path) -> None:
    """Start the engine of job.json, wait to be told to go, and write its cells."""
    from vllm import LLM, SamplingParams

    job = json.loads((folder / "job.json").read_text())
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2 * PROMPT_TOKENS,
        max_num_batched_tokens=max(job["prefill"], 2048),
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=4 * 2**30,
        enable_prefix_caching=False,
        async_scheduling=False,  # a step returns when its kernels are done
        **job["engine"],
    )
    if job["fill"]:
        llm.collective_rpc(fill_int8_weights)
    wait_for_turn(folder)
    engine, names = llm.llm_engine, itertools.count()

    def add(count: int, length: int, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        for i in range(count):
            prompt = [(i * 7919 + j * 104729) % (job["vocab"] - 1) + 1 for j in range(length)]
            engine.add_request(str(next(names)), {"prompt_token_ids": prompt}, sampling)

    def finish() -> None:
        while engine.has_unfinished_requests():
            engine.step()

    for batch in job["decode"]:
        add(batch, DECODE_PROMPT_TOKENS, 64)
        for _ in range(WARM_STEPS):
            engine.step()
        append(folder, {"phase": "decode", "batch": batch} | profiled_step(engine))
        finish()
    for _ in range(2):  # the first time warms up
        add(job["prefill"] // PROMPT_TOKENS, PROMPT_TOKENS, 1)
        cell = {"phase": "prefill", "tokens": job["prefill"]} | profiled_step(engine)
        finish()
    append(folder, cell)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["ours", "stock-int8"])
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--decode", type=positive, nargs="+", default=[1, 32])
    parser.add_argument("--prefill", type=positive, default=8192)
    parser.add_argument("--show", type=int, default=12, help="kernels to print of each step")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/step-<gpu>-<date>.json")
    parser.add_argument("--commit", help="where the source tree has no git history")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return 0
    if args.prefill < PROMPT_TOKENS:
        parser.error(f"--prefill {args.prefill}: expected {PROMPT_TOKENS}, one prompt, or more")
    head = provenance(args.commit)
    out = args.out or RESULTS / f"step-{head['gpu'].lower().replace(' ', '-')}-{head['date'][:10]}.json"
    logs = out.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    cells, failed = [], False
    with ExitStack() as stack:
        engines = []
        for model, mode in itertools.product(args.models, args.modes):
            config = MODELS[model] | MODES[mode].config | {"num_hidden_layers": args.layers}
            job = {"engine": MODES[mode].engine, "vocab": config["vocab_size"]}
            job |= {"decode": args.decode, "prefill": args.prefill, "fill": MODES[mode].fill}
            env = {"VLLM_W8A8_ENABLE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | MODES[mode].env
            log = logs / f"{model}-{mode}.log"
            engines.append((model, mode, log, stack.enter_context(Engine(__file__, config, job, env, log))))
        for *_, engine in engines:
            engine.wait_until_started()
        for model, mode, log, engine in engines:
            measured, well = engine.measure()
            if not well:
                failed = True
                print(f"{model} {mode}: the engine ended with an error, see {log}")
            for cell in measured:
                cells.append({"model": model, "mode": mode, "layers": args.layers} | cell)
                size = cell.get("batch", cell.get("tokens"))
                print(
                    f"{model} {mode} {cell['phase']} {size}: {cell['kernels_us']:,} us in {cell['launches']} kernels, "
                    f"step {cell['wall_us']:,} us"
                )
                for row in cell["kernels"][: args.show]:
                    print(f"    {row['us']:10,.1f} us  {row['calls']:4} x  {row['name'][:110]}")
    out.write_text(json.dumps(head | {"cells": cells}, indent=1) + "\n")
    print(json.dumps({"result": str(out)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
