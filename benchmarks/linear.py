"""One W8A8 linear layer, quantization included, against bf16 and vLLM's int8 kernels, in microseconds.

Run: python benchmarks/linear.py [--compare FILE]

The GPU tests of quantizer and product must pass first. Times are those of CUDA graphs over rotating weights, together over
four times the L2, on a warm GPU, the peers taking turns. `limit_us` is the larger of bytes at the measured copy bandwidth and
operations at 1,979 TOPS.
Writes benchmarks/results/linear-<gpu>-<date>.json.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import torch
from gpu_timing import RESULTS, copy_bandwidth, provenance, require_gpu_tests

import w8a8_kernels
from w8a8_kernels.timing import call_count, compare_us

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (57344, 8192), (6144, 1024), (1024, 3072))
BATCH_SIZES = (1, 16, 64, 128, 512, 2048, 8192)
INT8_OPS_PER_S = 1979e12  # dense, NVIDIA's datasheet of the H100 and H200 SXM
DTYPE = torch.bfloat16

# x [M, K], weight [N, K] int8, weight_scale [N, 1], weight [N, K] bf16.
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[], torch.Tensor]
Peer = Callable[[Operands], Call]


def ours(o: Operands) -> Call:
    return lambda: w8a8_kernels.int8_linear(o[0], o[1], o[2])


def bf16(o: Operands) -> Call:
    return lambda: torch.nn.functional.linear(o[0], o[3])


def vllm_peers() -> dict[str, Peer]:
    """vLLM's CUTLASS and Triton int8 products, each with vLLM's quantizer."""
    try:
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.compressed_tensors.triton_scaled_mm import triton_scaled_mm
        from vllm.platforms import current_platform
    except ImportError as error:
        print(f"vLLM is not here ({error})")
        return {}
    current_platform.import_kernels()

    def cutlass(o: Operands) -> Call:
        def call() -> torch.Tensor:
            x, x_scale, _ = ops.scaled_int8_quant(o[0])
            return ops.cutlass_scaled_mm(x, o[1].t(), x_scale, o[2].view(1, -1), DTYPE)

        return call

    def vllm_triton(o: Operands) -> Call:
        def call() -> torch.Tensor:
            x, x_scale, _ = ops.scaled_int8_quant(o[0])
            return triton_scaled_mm(x, o[1].t(), x_scale, o[2], DTYPE)

        return call

    return {"cutlass": cutlass, "vllm_triton": vllm_triton}


def gemlite_peers() -> dict[str, Peer]:
    """GemLite's int8 layer with dynamic activations, which tunes itself at a shape's first call, for long."""
    try:
        from gemlite.helper import A8W8_int8_dynamic
    except ImportError as error:
        print(f"GemLite is not here ({error})")
        return {}

    def gemlite(o: Operands) -> Call:
        layer = A8W8_int8_dynamic(device="cuda:0", dtype=DTYPE).from_weights(weight=o[1], bias=None, scales=o[2])
        return lambda: layer(o[0])

    return {"gemlite": gemlite}


def operands(M: int, N: int, K: int, copies: int) -> list[Operands]:
    """`copies` weights, and as many inputs."""
    result = []
    for _ in range(copies):
        weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
        scale = torch.rand(N, 1, device="cuda") / (127 * K**0.5)
        result.append((torch.randn(M, K, dtype=DTYPE, device="cuda"), weight, scale, weight.to(DTYPE)))
    return result


def measure(M: int, N: int, K: int, peers: dict[str, Peer], bandwidth: float) -> dict:
    """One cell of the result."""
    copies, n_calls = call_count(M, N, K)
    sets = operands(M, N, K, copies)
    bytes_moved = N * K + 4 * N + M * (2 * K + 2 * N)
    limit_us = max(bytes_moved / bandwidth, 2 * M * N * K / INT8_OPS_PER_S) * 1e6
    ways = {}
    for name, bind in {"ours": ours, "bf16": bf16, **peers}.items():
        calls = [bind(o) for o in sets]
        ways[name] = [calls[i % copies] for i in range(n_calls)]
    times = {name: round(us, 3) for name, us in compare_us(ways).items()}
    return {"N": N, "K": K, "M": M, "limit_us": round(limit_us, 3), "us": times}


def best_peer(cell: dict) -> tuple[str, float]:
    """Name and time of the fastest peer."""
    return min(((name, us) for name, us in cell["us"].items() if name != "ours"), key=lambda item: item[1])


def ratio(cell: dict) -> float:
    """Our time over the best peer's."""
    return cell["us"]["ours"] / best_peer(cell)[1]


def show(cell: dict, before: dict[tuple[int, int, int], dict]) -> None:
    key = cell["N"], cell["K"], cell["M"]
    columns = "  ".join(f"{name} {us:8.2f}" for name, us in cell["us"].items())
    change = f"  before {before[key]['us']['ours']:8.2f}" if key in before else ""
    print(
        f"{key[0]:6} {key[1]:6} {key[2]:6}  limit {cell['limit_us']:8.2f}  {columns}  ratio {ratio(cell):5.3f}{change}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="M")
    parser.add_argument("--compare", type=Path, help="an earlier result")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/linear-<gpu>-<date>.json")
    parser.add_argument("--commit", help="where the source tree has no git history")
    args = parser.parse_args()
    require_gpu_tests("test_quantize.py", "test_scaled_mm.py")
    before = {}
    if args.compare is not None:
        before = {(c["N"], c["K"], c["M"]): c for c in json.loads(args.compare.read_text())["cells"]}
    peers = vllm_peers() | gemlite_peers()
    bandwidth = copy_bandwidth()
    head = provenance(args.commit)
    print(f"{head['gpu']}, copies move {bandwidth / 1e12:.2f} TB/s; microseconds, quantization included")
    cells = []
    # By their work: after large products the card's clocks stay low for a while, and what came next looked up to 30 % slower.
    for M, N, K in sorted(((M, N, K) for M in args.batch_sizes for N, K in SHAPES), key=math.prod):
        cells.append(measure(M, N, K, peers, bandwidth))
        show(cells[-1], before)
    for label, chosen in (
        ("M <= 128", [c for c in cells if c["M"] <= 128]),
        ("M >= 512", [c for c in cells if c["M"] >= 512]),
    ):
        if chosen:
            worst = max(chosen, key=ratio)
            print(
                f"{label}: geometric mean of ours over the best peer {geometric_mean([ratio(c) for c in chosen]):.3f}, worst "
                f"{ratio(worst):.3f} at N {worst['N']}, K {worst['K']}, M {worst['M']} against {best_peer(worst)[0]}"
            )
    gpu = head["gpu"].lower().replace(" ", "-")
    out = args.out or RESULTS / f"linear-{gpu}-{head['date'][:10]}.json"
    out.write_text(json.dumps(head | {"copy_bytes_per_s": round(bandwidth), "cells": cells}, indent=1) + "\n")
    print(json.dumps({"result": str(out)}))


if __name__ == "__main__":
    main()
