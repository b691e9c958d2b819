"""GPU kernels launched for one decoder layer in one decode step: bf16, stock int8, and ours with and without fusion.

Run: python benchmarks/launches.py

Engines with dummy weights of Qwen3-8B's layer, as served by default: compiled, with CUDA graphs, whose kernels the profiler
sees. Two depths of each are profiled, and their difference over the difference in layers is a layer's share: embedding,
sampling and bookkeeping cancel out. Writes benchmarks/results/launches-<gpu>-<date>.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_timing import RESULTS, STOCK_INT8, provenance

DEPTHS = (2, 6)
BATCH = 8
PROMPT_TOKENS = 32
WARM_STEPS = 4
KERNELS = "kernels.json"  # what a child found

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}

# Entries of config.json, arguments of LLM, environment.
WAYS: dict[str, tuple[dict, dict, dict]] = {
    "bf16": ({}, {}, {}),
    "stock int8": ({"quantization_config": STOCK_INT8}, {}, {}),
    "ours": ({}, {"quantization": "w8a8"}, {}),
    "ours, fusion off": ({}, {"quantization": "w8a8"}, {"VLLM_W8A8_FUSION": "0"}),
}


def profile_decode_step(folder: Path, options: dict) -> Counter:
    """Names of the kernels of one decode step of BATCH requests, with their number."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=BATCH,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2**30,  # measured memory would be that of all engines on this GPU
        async_scheduling=False,  # a step returns when its kernels are done
        **options,
    )
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0, detokenize=False)
    engine = llm.llm_engine
    for i in range(BATCH):
        engine.add_request(str(i), {"prompt_token_ids": [i + 1] * PROMPT_TOKENS}, sampling)
    for _ in range(WARM_STEPS):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profiler:
        engine.step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        raise RuntimeError("the profiler saw no kernel: the engine must run in this process")
    return Counter(event.name for event in kernels if not event.is_user_annotation)


def run(way: str, layers: int) -> Counter:
    """`profile_decode_step` in a process of its own."""
    entries, options, env = WAYS[way]
    with tempfile.TemporaryDirectory() as tmp:
        Path(tmp, "config.json").write_text(json.dumps(CONFIG | entries | {"num_hidden_layers": layers}))
        subprocess.run(
            [sys.executable, __file__, "--child", tmp, json.dumps(options)],
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_W8A8_ENABLE": "0"} | env,
            check=True,
        )
        return Counter(json.loads(Path(tmp, KERNELS).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/launches-<gpu>-<date>.json")
    parser.add_argument("--commit", help="where the source tree has no git history")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        folder = Path(args.child[0])
        kernels = profile_decode_step(folder, json.loads(args.child[1]))
        (folder / KERNELS).write_text(json.dumps(kernels))
        return

    shallow, deep = DEPTHS
    ways = {}
    # All at once: kernels are counted, not timed.
    with ThreadPoolExecutor() as pool:
        counts = {(way, layers): pool.submit(run, way, layers) for way in WAYS for layers in DEPTHS}
    for way in WAYS:
        few, many = (counts[way, layers].result() for layers in DEPTHS)
        names = {name: (many[name] - few[name]) / (deep - shallow) for name in sorted(many | few)}
        ways[way] = {
            "per_layer": sum(names.values()),
            "per_step": {shallow: few.total(), deep: many.total()},
            "kernels_per_layer": {name: count for name, count in names.items() if count},
        }
        print(f"{way}: {ways[way]['per_layer']:g} kernels a layer")
    head = provenance(args.commit)
    result = head | {"layer": "Qwen3-8B", "batch": BATCH, "ways": ways}
    gpu = head["gpu"].lower().replace(" ", "-")
    out = args.out or RESULTS / f"launches-{gpu}-{head['date'][:10]}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"result": str(out)}))


if __name__ == "__main__":
    main()
