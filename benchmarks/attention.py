"""Paged attention against vLLM's FLASH_ATTN and TRITON_ATTN, in microseconds, and each one's error against fp32.

Run: python benchmarks/attention.py

32 query heads, 8 key/value heads of 128, bf16, blocks of 16 tokens in random order. The GPU tests must pass first. Times
are those of CUDA graphs over rotating caches, together over four times the L2; decoding is planned for sequences of up to
32,768 tokens, as a graph is that vLLM captures once and replays for all lengths.

- `ours`, `ours_int8kv`: the configuration of capability 12.0 (at most 99 KB of shared memory), compiled to the `mma.sync`
  instructions that such GPUs have (DISABLE_MMA_V3=1), in a process of its own.
- `ours_own`, `ours_own_int8kv`: this GPU's own configuration.

Writes benchmarks/results/attention-<gpu>-<date>.json.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import geometric_mean

import torch
from gpu_timing import RESULTS, copy_bandwidth, provenance, require_gpu_tests

from w8a8_kernels.attention import int8_cache_views, page_bytes, paged_attention, paged_attention_reference, write_cache
from w8a8_kernels.attention.config import attention_plan
from w8a8_kernels.timing import compare_us

HEADS, KV_HEADS, D, BLOCK = 32, 8, 128, 16
SCALE = D**-0.5
DECODE = [(batch, context, 1) for context in (1024, 8192, 32768) for batch in (1, 8, 32, 128)]
PREFILL = [(1, 8192, 8192), (8, 2048, 2048), (8, 8192, 512)]
MOST_KEYS = 32768
CONSUMER_BLACKWELL = (12, 0)
TIMED_BYTES = 4 * 60e6  # four times the L2 of an H200


class Batch:
    """`batch` sequences of `context` keys, the last `queries` of each asked for; copies of the cache, in bf16 and in int8."""

    def __init__(self, batch: int, context: int, queries: int) -> None:
        self.context, self.queries, self.batch = context, queries, batch
        blocks = batch * context // BLOCK
        self.bytes = 4 * blocks * BLOCK * KV_HEADS * D
        torch.manual_seed(0)
        self.q = torch.randn(batch * queries, HEADS, D, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.lens = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * queries
        self.caches, self.pages = [], []
        for _ in range(max(1, math.ceil(TIMED_BYTES / self.bytes))):
            table = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(batch, -1)
            cache = torch.randn(blocks, 2, BLOCK, KV_HEADS, D, device="cuda", dtype=torch.bfloat16)
            self.caches.append((cache[:, 0], cache[:, 1], table))
            pages = torch.empty(blocks, page_bytes(BLOCK, KV_HEADS, D), device="cuda", dtype=torch.int8)
            views = int8_cache_views(pages, BLOCK, KV_HEADS, D)
            key, value = (x.reshape(-1, KV_HEADS, D) for x in self.caches[-1][:2])
            write_cache(key, value, *views[:2], torch.arange(len(key), device="cuda"), *views[2:])
            self.pages.append((*views, table))

    def calls(self, own: bool) -> dict:
        """Provider: one call for each copy of the cache."""
        most_keys = MOST_KEYS if self.queries == 1 else self.context
        device = torch.cuda.current_device()
        capability = torch.cuda.get_device_capability(device) if own else CONSUMER_BLACKWELL
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        args = (self.lens, self.starts, SCALE)
        options = {"most_queries": self.queries, "most_keys": most_keys, "out": self.out}

        def plan(int8: bool):
            shape = (D, HEADS // KV_HEADS, KV_HEADS, self.batch, self.queries, most_keys)
            return attention_plan(*shape, int8=int8, capability=capability, num_sms=num_sms)

        plans = {int8: plan(int8) for int8 in (False, True)}
        name = "ours_own" if own else "ours"
        calls = {
            name: [
                lambda k=k, v=v, table=table: paged_attention(self.q, k, v, table, *args, plan=plans[False], **options)
                for k, v, table in self.caches
            ],
            f"{name}_int8kv": [
                lambda k=k, v=v, ks=ks, vs=vs, table=table: paged_attention(
                    self.q, k, v, table, *args, plan=plans[True], key_scale=ks, value_scale=vs, **options
                )
                for k, v, ks, vs, table in self.pages
            ],
        }
        return calls | self.peers() if own else calls

    def peers(self) -> dict:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        segments = [torch.empty(16, HEADS, 16, *last, device="cuda") for last in ((D,), (), ())]
        shared = {"cu_seqlens_q": self.starts, "max_seqlen_q": self.queries, "seqused_k": self.lens, "softmax_scale": SCALE}
        shared |= {"out": self.out, "max_seqlen_k": self.context, "causal": True}

        def triton(k, v, table):
            unified_attention(
                q=self.q, k=k, v=v, block_table=table, window_size=(-1, -1), softcap=0, q_descale=None, k_descale=None,
                v_descale=None, seq_threshold_3D=16, num_par_softmax_segments=16, softmax_segm_output=segments[0],
                softmax_segm_max=segments[1], softmax_segm_expsum=segments[2], **shared,
            )  # fmt: skip

        def flash(k, v, table):
            flash_attn_varlen_func(q=self.q, k=k, v=v, block_table=table, fa_version=3, **shared)

        peers = {"triton_attn": triton, "flash_attn": flash}
        return {name: [lambda c=c, peer=peer: peer(*c) for c in self.caches] for name, peer in peers.items()}

    def reference(self) -> torch.Tensor:
        """fp32 output of the last queries of the last sequence, from the first cache in bf16."""
        queries = min(self.queries, 64)
        k, v, table = self.caches[0]
        starts = torch.tensor([0, queries], dtype=torch.int32)
        return paged_attention_reference(self.q[-queries:], k, v, table[-1:], self.lens[-1:], starts, SCALE)


def measure(own: bool) -> list[dict]:
    """Microseconds and errors of this process's providers, for every shape."""
    cells = []
    for shape in DECODE + PREFILL:
        batch = Batch(*shape)
        calls, expected = batch.calls(own), batch.reference()
        errors = {}
        for name, (first, *_) in calls.items():
            batch.out.fill_(float("nan"))
            first()
            got = batch.out[-len(expected) :].float()
            errors[name] = float((got - expected).norm() / expected.norm())
        # One call is long where there are many queries or keys.
        n_calls = 2 if batch.queries > 1 else max(len(batch.caches), 20 if batch.bytes < 1e9 else 4)
        us = compare_us({name: [each[i % len(each)] for i in range(n_calls)] for name, each in calls.items()})
        phase = "decode" if batch.queries == 1 else "prefill"
        shape = {"phase": phase, "batch": batch.batch, "context": batch.context, "queries": batch.queries}
        cells.append(shape | {"bytes": batch.bytes, "us": us, "error": errors})
        print(*shape.values(), {name: round(t, 1) for name, t in us.items()}, flush=True)
        del batch, calls
    return cells


def in_process(own: bool, out: Path) -> list[dict]:
    env = os.environ | ({} if own else {"DISABLE_MMA_V3": "1"})
    subprocess.run([sys.executable, __file__, "--child", str(out), *(["--own"] if own else [])], env=env, check=True)
    return json.loads(out.read_text())


def summary(cells: list[dict], copy_bytes_per_s: float) -> dict:
    """The figures that the targets are about."""
    decode = [cell for cell in cells if cell["phase"] == "decode"]
    prefill = [cell for cell in cells if cell["phase"] == "prefill"]
    long = [cell for cell in decode if cell["context"] >= 8192 and cell["batch"] >= 8]
    one = next(cell for cell in decode if (cell["batch"], cell["context"]) == (32, 8192))

    def ratios(of: list[dict], ours: str, peer: str) -> list[float]:
        return [cell["us"][ours] / cell["us"][peer] for cell in of]

    return {
        "decode_worst_of_triton_attn": max(ratios(decode, "ours", "triton_attn")),
        "decode_mean_of_triton_attn": geometric_mean(ratios(decode, "ours", "triton_attn")),
        "decode_mean_of_flash_attn": geometric_mean(ratios(decode, "ours", "flash_attn")),
        "decode_own_mean_of_flash_attn": geometric_mean(ratios(decode, "ours_own", "flash_attn")),
        "decode_32_8k_of_copy_bandwidth": one["bytes"] / one["us"]["ours"] * 1e6 / copy_bytes_per_s,
        "int8kv_worst_of_bf16": max(ratios(long, "ours_int8kv", "ours")),
        "own_int8kv_worst_of_bf16": max(ratios(long, "ours_own_int8kv", "ours_own")),
        "prefill_worst_of_triton_attn": max(ratios(prefill, "ours", "triton_attn")),
        "prefill_own_worst_of_flash_attn": max(ratios(prefill, "ours_own", "flash_attn")),
        "error_worst_of_flash_attn": max(
            cell["error"][ours] / cell["error"]["flash_attn"] for cell in cells for ours in ("ours", "ours_own")
        ),
        "error_int8kv_worst": max(cell["error"][ours] for cell in cells for ours in ("ours_int8kv", "ours_own_int8kv")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="instead of benchmarks/results/attention-<gpu>-<date>.json")
    parser.add_argument("--commit", help="where the source tree has no git history")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.child.write_text(json.dumps(measure(args.own)))
        return
    require_gpu_tests("test_attention.py")
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = (in_process(own, Path(folder) / f"{own}.json") for own in (True, False))
    for cell, other in zip(theirs, ours, strict=True):
        cell["us"] |= other["us"]
        cell["error"] |= other["error"]
    copied = copy_bandwidth()
    head = provenance(args.commit)
    result = head | {"copy_bytes_per_s": copied, "summary": summary(theirs, copied), "cells": theirs}
    out = args.out or RESULTS / f"attention-{head['gpu'].lower().replace(' ', '-')}-{head['date'][:10]}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"result": str(out)} | result["summary"]))


if __name__ == "__main__":
    main()
