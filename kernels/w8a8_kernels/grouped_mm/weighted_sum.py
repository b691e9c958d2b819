"""Triton sum of each token's experts, weighted, in fp32 and in one order."""

import torch
import triton
import triton.language as tl

from w8a8_kernels.grouped_mm.sort import load_experts
from w8a8_kernels.launch import launch_options

# Columns and warps of a program: 8 or 16 bytes a load and thread. Few tokens are spread over more multiprocessors.
FEW_TOKENS = 64
FEW_BLOCK_N, FEW_WARPS = 256, 2
MANY_BLOCK_N, MANY_WARPS = 1024, 4


@triton.jit
def weighted_sum_kernel(
    out_ptr,
    x_ptr,
    weights_ptr,
    ids_ptr,
    expert_map_ptr,
    N,
    num_ids,
    TOP_K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N columns of one row of out [T, N]: the sum of weights [T, TOP_K] * x [T * TOP_K, N], from the first pair on.

    Rows of pairs without an expert are not read. PDL and EARLY: as in `grouped_mm_kernel`; weights belong to the ids.
    """
    i_t = tl.program_id(0)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
    experts = ()
    weights = ()
    for j in tl.static_range(TOP_K):
        experts += (load_experts(ids_ptr, expert_map_ptr, i_t * TOP_K + j, True, num_ids, HAS_MAP),)
        if HAS_WEIGHTS:
            weights += (tl.load(weights_ptr + i_t * TOP_K + j).to(tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if EARLY:
            tl.extra.cuda.gdc_wait()
    b_out = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        # Masked, an absent pair is 0; its weight is not used either, as it may be NaN.
        p_x = x_ptr + (i_t.to(tl.int64) * TOP_K + j) * N + o_n
        b_x = tl.load(p_x, mask=o_n < tl.where(experts[j] >= 0, N, 0), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            b_x *= tl.where(experts[j] >= 0, weights[j], 0.0)
        b_out += b_x
    tl.store(out_ptr + i_t.to(tl.int64) * N + o_n, b_out.to(out_ptr.dtype.element_ty), mask=o_n < N)


def weighted_sum(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    *,
    pdl: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """Sum of each token's rows, weighted, in fp32, rounded once.

    Args:
        x: [T * top_k, N], bf16, fp16 or fp32, contiguous; rows of pairs without an expert are not read.
        weights: [T, top_k] floating, contiguous; None: all are 1.
        topk_ids: [T, top_k] int32 or int64, contiguous.
        expert_map: as in `local_experts_reference`, int32.
        experts: how many experts this rank holds.
        pdl: programmatic dependent launch (capability 9.0 and newer): start while the kernel before is still running.
        early: with `pdl`, whether weights and topk_ids are complete before the kernel before this one starts.

    Returns:
        [T, N] in x's dtype; zeros where a token has no expert here.
    """
    (T, top_k), N = topk_ids.shape, x.shape[1]
    out = torch.empty((T, N), dtype=x.dtype, device=x.device)
    few = T <= FEW_TOKENS
    block_n = FEW_BLOCK_N if few else MANY_BLOCK_N
    if T > 0 and N > 0:
        weighted_sum_kernel[(T, triton.cdiv(N, block_n))](
            out,
            x,
            weights,
            topk_ids,
            expert_map,
            N,
            experts if expert_map is None else expert_map.numel(),
            TOP_K=top_k,
            HAS_WEIGHTS=weights is not None,
            HAS_MAP=expert_map is not None,
            BLOCK_N=block_n,
            PDL=pdl,
            EARLY=early,
            num_warps=FEW_WARPS if few else MANY_WARPS,
            **launch_options(pdl),
        )
    return out
