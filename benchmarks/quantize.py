"""The quantizers, plain and fused with RMSNorm or SiLU·mul, against vLLM's kernels, in microseconds.

Run: python benchmarks/quantize.py --out quantize.json [--sweep]

Times are those of CUDA graphs of at least 20 calls over rotating inputs, the median of 11 replays in turns. Together the
inputs are four times the L2 cache where at most `MAX_CALLS` of them are enough for that (`cold` in the results; smaller ones
are in L2, as they are when the kernel before has just written them). `floor` is the bytes read and written at the copy
bandwidth, which is measured first. `ours` and `ours_h64`, with a Hadamard transform of blocks of 64, are launched as in a
served model, each to overlap the end of the kernel before it where the GPU can. `vllm` is the stock kernel and its int8
quantizer, `vllm_fused` its own kernel for both, where it has one. `--sweep` times every tile of ours instead. Results are
checked against the references before anything is timed.
"""

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from gpu_timing import ROOT, copy_bandwidth, provenance

sys.path.insert(0, str(ROOT / "kernels"))

from w8a8_kernels.ops import row_options
from w8a8_kernels.quantize import QuantizeConfig, quantize_config
from w8a8_kernels.quantize import reference as ref
from w8a8_kernels.quantize.rms_norm import add_rms_norm_quantize_row, rms_norm_quantize_row
from w8a8_kernels.quantize.row import quantize_row
from w8a8_kernels.quantize.silu_mul import silu_mul_quantize_row
from w8a8_kernels.timing import MIN_CALLS, compare_us

BATCH_SIZES = (1, 16, 64, 128, 512, 2048, 8192)
LENGTHS = (1024, 4096, 12288)
DTYPE = torch.bfloat16
EPS = 1e-6
MAX_CALLS = 500
BLOCK = 64  # of the Hadamard transform

# x [M, K] or [M, 2K], residual [M, K] or None, weight [K] or None.
Inputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Case:
    """One op: how wide x is, what it moves and holds per element of the result, who computes it (peers get vLLM's ops)."""

    name: str
    width: int
    has_residual: bool
    has_weight: bool
    elements_moved: int
    held: int
    ours: Callable[..., object]
    reference: Callable[[Inputs, int], tuple[torch.Tensor, ...]]
    peers: dict[str, Callable[[ModuleType, Inputs], object]]

    def inputs(self, M: int, K: int) -> Inputs:
        x = torch.randn(M, self.width * K, dtype=DTYPE, device="cuda")
        residual = torch.randn(M, K, dtype=DTYPE, device="cuda") if self.has_residual else None
        return x, residual, torch.ones(K, dtype=DTYPE, device="cuda") if self.has_weight else None

    def bytes_moved(self, M: int, K: int) -> int:
        weight = K * DTYPE.itemsize if self.has_weight else 0
        return M * K * (self.elements_moved * DTYPE.itemsize + 1) + 4 * M + weight


def _vllm_norm(ops: ModuleType, inputs: Inputs) -> object:
    x, _, weight = inputs
    y = torch.empty_like(x)
    ops.rms_norm(y, x, weight, EPS)
    return ops.scaled_int8_quant(y)


def _vllm_add_norm(ops: ModuleType, inputs: Inputs) -> object:
    x, residual, weight = inputs
    ops.fused_add_rms_norm(x, residual, weight, EPS)
    return ops.scaled_int8_quant(x)


def _vllm_silu_mul(ops: ModuleType, inputs: Inputs) -> object:
    x, _, _ = inputs
    y = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(y, x)
    return ops.scaled_int8_quant(y)


def _vllm_fused_norm(ops: ModuleType, inputs: Inputs) -> object:
    x, residual, weight = inputs
    return ops.rms_norm_dynamic_per_token_quant(x, weight, EPS, torch.int8, residual=residual)


CASES = (
    Case(
        "quantize",
        width=1,
        has_residual=False,
        has_weight=False,
        elements_moved=1,
        held=1,
        ours=lambda i, h=0, **options: quantize_row(i[0], h, **options),
        reference=lambda i, h: ref.quantize_reference(i[0], h),
        peers={"vllm": lambda ops, i: ops.scaled_int8_quant(i[0])},
    ),
    Case(
        "rms_norm_quantize",
        width=1,
        has_residual=False,
        has_weight=True,
        elements_moved=1,
        held=2,
        ours=lambda i, h=0, **options: rms_norm_quantize_row(i[0], i[2], EPS, 0.0, h, **options),
        reference=lambda i, h: ref.rms_norm_quantize_reference(i[0], i[2], EPS, 0.0, h),
        peers={"vllm": _vllm_norm, "vllm_fused": _vllm_fused_norm},
    ),
    Case(
        "add_rms_norm_quantize",
        width=1,
        has_residual=True,
        has_weight=True,
        elements_moved=3,
        held=2,
        ours=lambda i, h=0, **options: add_rms_norm_quantize_row(i[0], i[1], i[2], EPS, 0.0, h, **options),
        reference=lambda i, h: ref.add_rms_norm_quantize_reference(i[0], i[1], i[2], EPS, 0.0, h),
        peers={"vllm": _vllm_add_norm, "vllm_fused": _vllm_fused_norm},
    ),
    Case(
        "silu_mul_quantize",
        width=2,
        has_residual=False,
        has_weight=False,
        elements_moved=2,
        held=1,
        ours=lambda i, h=0, **options: silu_mul_quantize_row(i[0], h, **options),
        reference=lambda i, h: ref.silu_mul_quantize_reference(i[0], h),
        peers={"vllm": _vllm_silu_mul},
    ),
)


def vllm_ops() -> ModuleType | None:
    """vLLM's compiled ops, or None, with a line that says so."""
    try:
        ops = importlib.import_module("vllm._custom_ops")
    except ImportError as error:
        print(f"vLLM is not here ({error}): only ours is timed")
        return None
    if not hasattr(torch.ops._C, "dynamic_scaled_int8_quant"):
        print("this vLLM has no CUDA ops: only ours is timed")
        return None
    return ops


def check(case: Case) -> None:
    """A few rows against the reference: codes at most 1 apart, in at most 0.1 % of places."""
    for K, hadamard in itertools.product(LENGTHS, (0, BLOCK)):
        inputs = case.inputs(17, K)
        got, expected = case.ours(inputs, hadamard), case.reference(inputs, hadamard)
        apart = (got[0].int() - expected[0].int()).abs()
        if apart.max() > 1 or apart.sum() > 1e-3 * apart.numel():
            raise SystemExit(
                f"{case.name}, K {K}, Hadamard {hadamard}: {apart.sum()} of {apart.numel()} codes are not the reference's"
            )


def tiles(M: int, K: int, hadamard: int) -> Iterator[QuantizeConfig]:
    """Tiles with 8 to 64 elements for each thread."""
    rule = quantize_config(1, K, DTYPE, hadamard=hadamard)
    for rows, num_warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        if rows <= M and 8 <= rows * rule.block_k / (32 * num_warps) <= 64:
            yield QuantizeConfig(rows, rule.block_k, num_warps, rule.chunks)


def measure(case: Case, M: int, K: int, ops: ModuleType | None, sweep: bool, bandwidth: float) -> dict:
    bytes_moved = case.bytes_moved(M, K)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    n_cold = -(-4 * l2_bytes // bytes_moved)
    sets = [case.inputs(M, K) for _ in range(min(max(n_cold, MIN_CALLS), MAX_CALLS))]
    runs: dict[str, Callable[[Inputs], object]] = {}
    options = row_options(torch.device("cuda", torch.cuda.current_device()))
    if sweep:
        for hadamard in (0, BLOCK):
            rule = quantize_config(M, K, DTYPE, case.held, hadamard)
            for config in dict.fromkeys([rule, *tiles(M, K, hadamard)]):
                name = f"h{hadamard}:" + "x".join(map(str, config)) + ("*" if config == rule else "")
                runs[name] = lambda i, h=hadamard, config=config: case.ours(i, h, config=config, **options)
    else:
        runs["ours"] = lambda i: case.ours(i, **options)
        runs[f"ours_h{BLOCK}"] = lambda i: case.ours(i, BLOCK, **options)
        if ops is not None:
            # Last those that overwrite their inputs.
            for name, peer in case.peers.items():
                if name != "vllm_fused" or hasattr(ops, "rms_norm_dynamic_per_token_quant"):
                    runs[name] = lambda i, peer=peer: peer(ops, i)
    times = compare_us({name: [lambda i=i, run=run: run(i) for i in sets] for name, run in runs.items()})
    return {
        "op": case.name,
        "M": M,
        "K": K,
        "cold": n_cold <= MAX_CALLS,
        "floor_us": round(bytes_moved / bandwidth * 1e6, 3),
        "us": {name: round(us, 3) for name, us in times.items()},
    }


def show(cell: dict, sweep: bool) -> None:
    times = list(cell["us"].items())
    if sweep:
        times.sort(key=lambda item: item[1])
        by_kind = [[item for item in times if item[0].startswith(kind)] for kind in ("h0:", f"h{BLOCK}:")]
        times = [item for kind in by_kind for i, item in enumerate(kind) if i < 3 or item[0].endswith("*")]
    where = "cold" if cell["cold"] else "L2"
    columns = "  ".join(f"{name} {us:8.2f}" for name, us in times)
    print(f"{cell['op']:22} {cell['M']:6} {cell['K']:6} {where:4}  floor {cell['floor_us']:8.2f}  {columns}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--ops", nargs="+", choices=[case.name for case in CASES], default=[case.name for case in CASES])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES, help="M")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="K")
    parser.add_argument("--sweep", action="store_true", help="time every tile of ours; * is the one that is used")
    parser.add_argument("--commit", help="where the source tree has no git history")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, none is visible")
    ops = None if args.sweep else vllm_ops()
    cases = [case for case in CASES if case.name in args.ops]
    for case in cases:
        check(case)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copies move {bandwidth / 1e12:.2f} TB/s; microseconds")
    cells = []
    for case, K, M in itertools.product(cases, args.lengths, args.batch_sizes):
        cells.append(measure(case, M, K, ops, args.sweep, bandwidth))
        show(cells[-1], args.sweep)
    result = provenance(args.commit) | {"copy_bytes_per_s": round(bandwidth), "cells": cells}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
