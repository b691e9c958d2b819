"""Speed and memory of converting a synthetic Q4_K GGUF file, beside a plain loop over it.

Run: python benchmarks/convert_gguf.py --gigabytes 8 --work /tmp --save

The plain loop is what a short script would do: each tensor mapped by the gguf library, dequantized by it as a whole, rounded
to bf16, and written to safetensors files of the same size. Both get the same number of threads: the loop's take a tensor each.
The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import convert_memory
import numpy as np
import torch
from convert_memory import FORMATS, ROOT, measure
from gpu_timing import RESULTS, provenance

sys.path.insert(0, str(ROOT / "tests" / "converters"))

HIDDEN, INNER, KV = 4096, 14336, 1024
SHARD_BYTES = 2 * 1000**3
LEAST_SPEED = 0.6
SAMPLE_SECONDS = 0.05  # often enough for blocks of some megabytes; each sample takes the interpreter from the conversion


def write_gguf(path: Path, total_bytes: int) -> int:
    """A llama file of Q4_K matrices with random codes and small scales; returns its number of values in Q4_K."""
    import gguf
    from gguf_models import TOKENIZER, TOKENS

    kind = gguf.GGMLQuantizationType.Q4_K
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    layer = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (KV, HIDDEN),
        "attn_v": (KV, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    values = sum(rows * columns for rows, columns in layer.values())
    n_layers = max(1, round(total_bytes / (values // block * block_bytes)))
    pool = np.random.default_rng(0).integers(0, 256, (INNER * HIDDEN // block, block_bytes), dtype=np.uint8)
    pool[:, :4] = np.array([0.01, 0.005], dtype="<f2").view(np.uint8)  # scales of scales and of minima

    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    writer.add_block_count(n_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in TOKENIZER.items():
        {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)](key, value)
    ones = np.ones(HIDDEN, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(TOKENS), HIDDEN), np.float32))
    writer.add_tensor("output_norm.weight", ones)
    for i in range(n_layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", ones)
        for name, (rows, columns) in layer.items():
            packed = pool[: rows * columns // block].reshape(rows, columns // block * block_bytes)
            writer.add_tensor(f"blk.{i}.{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return n_layers * values


def plain_loop(path: Path, out: Path, threads: int) -> float:
    """Seconds that the loop takes."""
    import gguf
    from safetensors.torch import save_file

    started = time.monotonic()
    out.mkdir()

    def read(tensor) -> tuple[str, torch.Tensor]:
        return tensor.name, torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).bfloat16()

    def save(number: int, shard: dict[str, torch.Tensor]) -> None:
        save_file(shard, out / f"model-{number:05}.safetensors")

    shard, size, number = {}, 0, 1
    tensors = gguf.GGUFReader(path).tensors
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(tensors), threads):
            for name, values in pool.map(read, tensors[start : start + threads]):
                if shard and size + values.nbytes > SHARD_BYTES:
                    save(number, shard)
                    shard, size, number = {}, 0, number + 1
                shard[name] = values
                size += values.nbytes
    save(number, shard)
    return time.monotonic() - started


def run_child(mode: str, path: Path, out: Path, threads: int) -> dict:
    command = [sys.executable, __file__, "--child", mode, path, out, str(threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    for file in out.iterdir():
        file.unlink()
    out.rmdir()
    return json.loads(done.stdout.splitlines()[-1])


def child(mode: str, path: str, out: str, threads: str) -> dict:
    torch.set_num_threads(int(threads))
    if mode == "plain loop":
        return {"seconds": round(plain_loop(Path(path), Path(out), int(threads)), 1)}
    convert_memory.SAMPLE_SECONDS = SAMPLE_SECONDS
    return measure(Path(path), Path(out), mode, str(SHARD_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the file")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where to put the data, removed again")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/convert-gguf-DATE.json")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*args.child)))
        return
    result = provenance() | {"threads": args.threads, "cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        path, out = Path(work) / "model.gguf", Path(work) / "out"
        result["values"] = write_gguf(path, int(args.gigabytes * 1e9))
        result["file_bytes"] = path.stat().st_size
        result["largest_tensor_fp32_bytes"] = 4 * INNER * HIDDEN
        result["bound_bytes"] = 2 * result["largest_tensor_fp32_bytes"] + SHARD_BYTES
        result["runs"] = {mode: run_child(mode, path, out, args.threads) for mode in ("plain loop", *args.formats)}
    loop = result["runs"]["plain loop"]["seconds"]
    result["speed_to_loop"] = {mode: round(loop / result["runs"][mode]["seconds"], 3) for mode in args.formats}
    if args.save:
        path = RESULTS / f"convert-gguf-{result['date'][:10]}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    if min(result["speed_to_loop"].values()) < LEAST_SPEED:
        sys.exit(f"slower than {LEAST_SPEED} of the plain loop's speed")
    if any(result["runs"][mode]["peak_bytes_above_imports"] > result["bound_bytes"] for mode in args.formats):
        sys.exit("above the bound of memory")


if __name__ == "__main__":
    main()
