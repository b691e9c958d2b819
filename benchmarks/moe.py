"""One layer of int8 experts, quantization included, against vLLM's `fused_experts` in bf16 and int8, in microseconds.

Run: python benchmarks/moe.py [--tokens 1 32] [--sweep]

The GPU tests of the op must pass first. Shape of Qwen3-30B-A3B; every call has its own random routing and one of `COPIES` sets
of weights in turn. Times are those of CUDA graphs, the peers taking turns. `limit_us` is the larger of bytes at the measured
copy bandwidth, of the experts that have tokens, and operations at 1,979 TOPS. `--sweep` times tiles of ours instead: the
grouping first, with the rule's tiles, then each product's tile with the rule's for the other, then both together.
Writes benchmarks/results/moe-<gpu>-<date>.json, or moe-tiles-<gpu>-<date>.json.
"""

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gpu_timing import RESULTS, copy_bandwidth, provenance, require_gpu_tests

import w8a8_kernels
from w8a8_kernels.grouped_mm import ExpertsPlan, GroupedTile
from w8a8_kernels.grouped_mm.config import default_tile
from w8a8_kernels.ops import plan_experts
from w8a8_kernels.select import has_dependent_launch
from w8a8_kernels.tiles import max_shared_bytes
from w8a8_kernels.timing import MIN_CALLS, compare_us, graph_us

TOKENS = (1, 8, 32, 128, 1024, 8192)
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768  # Qwen3-30B-A3B
HADAMARD = 64
COPIES = 8  # one token reads 38 MB of one: what is read between two uses of it exceeds any L2
INT8_OPS_PER_S = 1979e12  # dense, NVIDIA's datasheet of the H100 and H200 SXM
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Weights:
    """One set: codes and scales as `int8_experts` takes them, and the same matrices in bf16."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w13_bf16: torch.Tensor
    w2_bf16: torch.Tensor


@dataclass(frozen=True)
class Operands:
    weights: Weights
    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def ours(self) -> tuple[torch.Tensor, ...]:
        """Leading arguments of `int8_experts`."""
        w = self.weights
        return self.x, w.w13, w.w13_scale, w.w2, w.w2_scale, self.topk_weights, self.topk_ids


Call = Callable[[], torch.Tensor]
Peer = Callable[[Operands], Call]


def ours(o: Operands) -> Call:
    return lambda: w8a8_kernels.int8_experts(*o.ours())


def ours_hadamard(o: Operands) -> Call:
    return lambda: w8a8_kernels.int8_experts(*o.ours(), hadamard13=HADAMARD, hadamard2=HADAMARD)


def vllm_peers() -> tuple[dict[str, Peer], contextlib.AbstractContextManager]:
    """vLLM's experts in bf16 and in int8 with a scale per token, and what they must run in."""
    try:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import fused_experts
        from vllm.model_executor.layers.fused_moe.config import int8_w8a8_moe_quant_config
    except ImportError as error:
        print(f"vLLM is not here ({error})")
        return {}, contextlib.nullcontext()

    def bf16(o: Operands) -> Call:
        return lambda: fused_experts(o.x, o.weights.w13_bf16, o.weights.w2_bf16, o.topk_weights, o.topk_ids)

    def int8(o: Operands) -> Call:
        w = o.weights
        config = int8_w8a8_moe_quant_config(
            w1_scale=w.w13_scale, w2_scale=w.w2_scale, a1_scale=None, a2_scale=None, per_act_token_quant=True
        )
        return lambda: fused_experts(o.x, w.w13, w.w2, o.topk_weights, o.topk_ids, quant_config=config)

    return {"vllm_bf16": bf16, "vllm_int8": int8}, set_current_vllm_config(VllmConfig())


def weight_sets() -> list[Weights]:
    def matrix(rows: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes = torch.randint(-127, 128, (EXPERTS, rows, K), dtype=torch.int8, device="cuda")
        scale = (0.5 + torch.rand(EXPERTS, rows, 1, device="cuda")) / (74 * K**0.5)
        return codes, scale, codes.to(DTYPE) * scale.to(DTYPE)

    sets = []
    for _ in range(COPIES):
        w13, w13_scale, w13_bf16 = matrix(2 * INTERMEDIATE, HIDDEN)
        w2, w2_scale, w2_bf16 = matrix(HIDDEN, INTERMEDIATE)
        sets.append(Weights(w13, w13_scale, w2, w2_scale, w13_bf16, w2_bf16))
    return sets


def operands(tokens: int, sets: list[Weights]) -> list[Operands]:
    """As many as there are calls to time."""
    result = []
    for i in range(max(MIN_CALLS, COPIES) if tokens < 4096 else COPIES):
        weights, ids = torch.rand(tokens, EXPERTS, device="cuda").softmax(dim=1).topk(TOP_K, dim=1)
        weights = weights / weights.sum(dim=1, keepdim=True)
        x = torch.randn(tokens, HIDDEN, dtype=DTYPE, device="cuda")
        result.append(Operands(sets[i % COPIES], x, weights, ids.int()))
    return result


def limit_us(calls: list[Operands], bandwidth: float) -> float:
    tokens = calls[0].x.shape[0]
    active = sum(o.topk_ids.unique().numel() for o in calls) / len(calls)
    bytes_moved = active * (3 * INTERMEDIATE * HIDDEN + 4 * (2 * INTERMEDIATE + HIDDEN)) + tokens * 4 * HIDDEN
    operations = 2 * tokens * TOP_K * 3 * INTERMEDIATE * HIDDEN
    return max(bytes_moved / bandwidth, operations / INT8_OPS_PER_S) * 1e6


def plan_of(o: Operands) -> ExpertsPlan:
    """The rule's."""
    return plan_experts(o.x.device, o.x.shape[0], TOP_K, o.weights.w13, o.weights.w2, None)


def measure(calls: list[Operands], peers: dict[str, Peer], bandwidth: float) -> dict:
    """One cell of the result."""
    ways = {"ours": ours, "ours_h64": ours_hadamard, **peers}
    times = compare_us({name: [bind(o) for o in calls] for name, bind in ways.items()})
    return {
        "tokens": calls[0].x.shape[0],
        "limit_us": round(limit_us(calls, bandwidth), 3),
        "plan": asdict(plan_of(calls[0])),
        "us": {name: round(us, 3) for name, us in times.items()},
    }


def groupings(rule: ExpertsPlan, tokens: int) -> Iterator[ExpertsPlan]:
    """Every pair for itself, where there are few, and sorted pairs in blocks of each size, with the rule's tiles for those."""
    capability = torch.cuda.get_device_capability()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    pairs = tokens * TOP_K
    for direct, block_m in itertools.product((True, False), (16, 32, 64, 128)):
        if direct and (block_m != 16 or tokens > 16):
            continue
        blocks = pairs if direct else max(min(pairs, EXPERTS), pairs // block_m)
        options = {"capability": capability, "num_sms": num_sms}
        gate_up = default_tile(block_m, blocks, 2 * INTERMEDIATE, HIDDEN, **options)
        down = replace(default_tile(block_m, blocks, HIDDEN, INTERMEDIATE, **options), prefetch=rule.down.prefetch)
        yield ExpertsPlan(direct, gate_up, down)


def tiles(rule: GroupedTile) -> Iterator[GroupedTile]:
    """Tiles of as many rows as `rule` that fit this GPU."""
    capability = torch.cuda.get_device_capability()
    tma = (False, True) if has_dependent_launch(capability) else (False,)
    few = rule.block_m <= 32
    for block_n, block_k, num_warps, num_stages, swap, use_tma in itertools.product(
        (32, 64, 128) if few else (64, 128, 256),
        (128, 256),
        (4,) if few else (4, 8),
        (3, 4, 6) if few else (3, 4),
        (True,) if few else (False, True),
        tma,
    ):
        tile = GroupedTile(rule.block_m, block_n, block_k, num_warps, num_stages, swap, rule.prefetch, use_tma)
        # Sums of more than 128 registers for each thread leave none for the rest.
        if tile.stage_bytes <= max_shared_bytes(capability) and rule.block_m * block_n <= 128 * 32 * num_warps:
            yield tile


def time_plan(calls: list[Operands], plan: ExpertsPlan) -> float | None:
    """Microseconds of the layer with `plan`; None where it does not fit the GPU."""
    from triton.runtime.errors import OutOfResources

    from w8a8_kernels.grouped_mm.experts import int8_experts_grouped

    pdl = has_dependent_launch(torch.cuda.get_device_capability())
    try:
        return graph_us([lambda o=o: int8_experts_grouped(*o.ours(), plan=plan, pdl=pdl) for o in calls])
    except OutOfResources:
        return None


def sweep(calls: list[Operands]) -> list[dict]:
    """Times of groupings and tiles and, last, of the best of each together with several prefetches."""
    tokens, rule = calls[0].x.shape[0], plan_of(calls[0])
    prefetches = (0, 128, 512) if has_dependent_launch(torch.cuda.get_device_capability()) else (0,)
    cells = []

    def best(what: str, plans: list[ExpertsPlan]) -> ExpertsPlan:
        timed = [(us, plan) for plan in dict.fromkeys(plans) if (us := time_plan(calls, plan)) is not None]
        cells.extend({"tokens": tokens, "what": what, "us": round(us, 3), "plan": asdict(plan)} for us, plan in timed)
        us, plan = min(timed, key=lambda item: item[0])
        print(f"{tokens:6}  {what:9} {us:8.2f}  {plan}", flush=True)
        return plan

    start = best("grouping", [rule, *groupings(rule, tokens)])
    gate_up = best("gate_up", [start, *(replace(start, gate_up=tile) for tile in tiles(start.gate_up))]).gate_up
    down = best("down", [start, *(replace(start, down=tile) for tile in tiles(start.down))]).down
    together = replace(start, gate_up=gate_up, down=down)
    best("together", [rule, *(replace(together, down=replace(down, prefetch=bytes_)) for bytes_ in prefetches)])
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="time tiles of ours")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/moe[-tiles]-<gpu>-<date>.json")
    parser.add_argument("--commit", help="where the source tree has no git history")
    args = parser.parse_args()
    require_gpu_tests("test_grouped_mm.py")
    bandwidth = copy_bandwidth()
    head = provenance(args.commit)
    print(f"{head['gpu']}, copies move {bandwidth / 1e12:.2f} TB/s; microseconds, quantization included")
    sets = weight_sets()
    peers, context = ({}, contextlib.nullcontext()) if args.sweep else vllm_peers()
    cells = []
    with context:
        for tokens in sorted(args.tokens):
            calls = operands(tokens, sets)
            if args.sweep:
                cells += sweep(calls)
                continue
            cells.append(measure(calls, peers, bandwidth))
            columns = "  ".join(f"{name} {us:8.2f}" for name, us in cells[-1]["us"].items())
            print(f"{tokens:6}  limit {cells[-1]['limit_us']:8.2f}  {columns}", flush=True)
    gpu = head["gpu"].lower().replace(" ", "-")
    name = "moe-tiles" if args.sweep else "moe"
    out = args.out or RESULTS / f"{name}-{gpu}-{head['date'][:10]}.json"
    out.write_text(json.dumps(head | {"copy_bytes_per_s": round(bandwidth), "cells": cells}, indent=1) + "\n")
    print(json.dumps({"result": str(out)}))


if __name__ == "__main__":
    main()
