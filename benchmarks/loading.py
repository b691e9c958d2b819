"""Peak memory of loading bf16 weights of Qwen3-8B's shape and quantizing them meanwhile, against loading them as they are.

Run: python benchmarks/loading.py [--layers 36] [--work /tmp]

The checkpoint has random weights, in shards of at most 2 GB. Each way has an engine in a process of its own, eager, of which
only the loading counts: GPU memory as PyTorch allocates it, the host's anonymous memory sampled every 2 ms (pages of mapped
files are not). Writes benchmarks/results/loading-<gpu>-<date>.json; exits with 1 if a limit is exceeded: GPU memory 10 % above
the loaded int8 model, host memory one shard above the bf16 load's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from convert_memory import sampled_rss_anon
from engine import MODELS
from gpu_timing import RESULTS, provenance

SHARD_BYTES = 2 * 10**9
MOST_ABOVE_MODEL = 1.10
WAYS = {"bf16": {}, "online": {"quantization": "w8a8"}}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The model's tensors by name."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (size,),
        "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    names = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    names |= {f"model.layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (names | {"lm_head": (config["vocab_size"], hidden)}).items()}


def write_checkpoint(folder: Path, config: dict) -> None:
    """Random weights, made on the GPU."""
    import torch
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config))
    shard, size, where = {}, 0, {}

    def save() -> None:
        name = f"model-{len(set(where.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes(config).items():
        tensor = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5).cpu()
        if shard and size + tensor.nbytes > SHARD_BYTES:
            save()
            size = 0
        shard[name], size = tensor, size + tensor.nbytes
    save()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def child(folder: Path, way: str) -> None:
    """Load the model and print what that took, as the last line."""
    import torch
    from vllm import LLM
    from vllm.v1.worker.gpu_worker import Worker

    load_model, said = Worker.load_model, {}

    def watched(self, *args, **kwargs) -> None:
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        with sampled_rss_anon() as samples:
            load_model(self, *args, **kwargs)
            torch.cuda.synchronize()
        said["seconds"] = round(time.perf_counter() - start, 1)
        said["model_bytes"] = torch.cuda.memory_allocated() - before
        said["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        said["host_anonymous_peak_bytes"] = max(samples)

    Worker.load_model = watched
    LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
        **WAYS[way],
    )
    print(json.dumps(said), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=MODELS["qwen3-8b"]["num_hidden_layers"])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where the checkpoint is written")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where the source tree has no git history")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(Path(args.child[0]), args.child[1])
    result = provenance(args.commit) | {"layers": args.layers, "ways": {}}
    with tempfile.TemporaryDirectory(dir=args.work) as tmp:
        write_checkpoint(Path(tmp), MODELS["qwen3-8b"] | {"num_hidden_layers": args.layers})
        result["largest_shard_bytes"] = max(file.stat().st_size for file in Path(tmp).glob("*.safetensors"))
        env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        for way in WAYS:
            done = subprocess.run(
                [sys.executable, __file__, "--child", tmp, way],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode != 0:
                raise SystemExit(f"{way}: the engine ended with an error:\n{done.stdout[-3000:]}")
            result["ways"][way] = json.loads(done.stdout.strip().splitlines()[-1])
            print(way, result["ways"][way], flush=True)
    bf16, online = result["ways"]["bf16"], result["ways"]["online"]
    result["gpu_peak_of_model"] = round(online["peak_bytes"] / online["model_bytes"], 4)
    result["host_above_bf16_of_shard"] = round(
        (online["host_anonymous_peak_bytes"] - bf16["host_anonymous_peak_bytes"]) / result["largest_shard_bytes"], 4
    )
    out = args.out or RESULTS / f"loading-{result['gpu'].lower().replace(' ', '-')}-{result['date'][:10]}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"GPU {result['gpu_peak_of_model']} of the model, host {result['host_above_bf16_of_shard']} of a shard above: {out}")
    sys.exit(result["gpu_peak_of_model"] > MOST_ABOVE_MODEL or result["host_above_bf16_of_shard"] > 1)


if __name__ == "__main__":
    main()
