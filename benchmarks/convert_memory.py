"""Anonymous memory of `convert` on a synthetic checkpoint, against the bound that it promises.

Run: python benchmarks/convert_memory.py --gigabytes 4.2 --work /tmp --save

The bound is twice the largest tensor in fp32 plus one output shard, above what the imports take. Pages of the mapped source
file do not count: the kernel drops them when memory is short. The last line of stdout is one JSON object.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "converters"))

FORMATS = ("w8a8", "compressed-tensors", "bf16")
SAMPLE_SECONDS = 0.002


def rss_anon() -> int:
    """Anonymous resident bytes of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@contextmanager
def sampled_rss_anon() -> Iterator[list[int]]:
    """`rss_anon` at the begin and every SAMPLE_SECONDS from then on, while the block runs."""
    samples = [rss_anon()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            samples.append(rss_anon())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()


def write_checkpoint(folder: Path, total_bytes: int) -> tuple[int, int]:
    """Writes a bf16 Llama checkpoint of at least `total_bytes`; returns its size and its largest tensor's size in fp32."""
    import torch

    from w8a8_converters.plan import parse_size
    from w8a8_converters.writer import OutputTensor, ShardWriter, split_into_shards

    hidden = 4096 if total_bytes > 2e9 else 2048
    inner, vocab = 3 * hidden, 2 * hidden
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    n_layers = 0
    while sum(2 * rows[0] * (rows[1] if len(rows) > 1 else 1) for rows in shapes.values()) < total_bytes:
        shapes |= {f"model.layers.{n_layers}.{name}.weight": shape for name, shape in layer.items()}
        n_layers += 1

    tensors = [OutputTensor(name, shape, torch.bfloat16) for name, shape in shapes.items()]
    noise = torch.randn(4 * 1024**2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight_map = {}
    shards = split_into_shards([[tensor] for tensor in tensors], parse_size("1GB"))
    for i, shard in enumerate(shards, 1):
        file_name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        with ShardWriter(folder / file_name, shard, {"format": "pt"}) as writer:
            for tensor in shard:
                weight_map[tensor.name] = file_name
                elements = tensor.nbytes // 2
                for start in range(0, elements, len(noise)):
                    writer.write(tensor.name, start, noise[: elements - start])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    return sum(tensor.nbytes for tensor in tensors), max(2 * tensor.nbytes for tensor in tensors)


def measure(src: Path, out: Path, fmt: str, max_shard_size: str) -> dict[str, float]:
    """Converts in this process while a thread samples RssAnon."""
    from w8a8_converters.convert import convert

    imports = rss_anon()
    started = time.monotonic()
    with sampled_rss_anon() as samples:
        report = convert(src, out, format=fmt, max_shard_size=max_shard_size)
    return {
        "imports_bytes": imports,
        "peak_bytes_above_imports": max(samples) - imports,
        "samples": len(samples),
        "seconds": round(time.monotonic() - started, 1),
        "output_bytes": report.output_bytes,
        "files": len(report.files),
    }


def commit() -> str:
    result = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return result.stdout.strip() or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.2, help="size of the synthetic checkpoint")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="where to put the data, removed again")
    parser.add_argument("--max-shard-size", default="500MB")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/convert-memory-DATE.json")
    parser.add_argument("--child", nargs=3, metavar=("SRC", "OUT", "FORMAT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        src, out, fmt = args.child
        print(json.dumps(measure(Path(src), Path(out), fmt, args.max_shard_size)))
        return

    from w8a8_converters.plan import parse_size

    result = {
        "command": shlex.join(["python", "benchmarks/convert_memory.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
        "cpus": os.cpu_count(),
        "formats": {},
    }
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        src = Path(work) / "src"
        src.mkdir()
        checkpoint_bytes, largest_fp32 = write_checkpoint(src, int(args.gigabytes * 1e9))
        shard = parse_size(args.max_shard_size)
        result |= {
            "checkpoint_bytes": checkpoint_bytes,
            "largest_tensor_fp32_bytes": largest_fp32,
            "shard_bytes": shard,
            "bound_bytes": 2 * largest_fp32 + shard,
        }
        for fmt in args.formats:
            out = Path(work) / fmt
            command = [sys.executable, __file__, "--max-shard-size", args.max_shard_size, "--child", src, out, fmt]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            result["formats"][fmt] = json.loads(child.stdout.splitlines()[-1])
            for path in out.iterdir():
                path.unlink()
    if args.save:
        path = ROOT / "benchmarks" / "results" / f"convert-memory-{result['date'][:10]}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    if any(run["peak_bytes_above_imports"] > result["bound_bytes"] for run in result["formats"].values()):
        sys.exit("above the bound")


if __name__ == "__main__":
    main()
