"""Triton grouped int8 GEMM on tensor cores: every pair of a token and an expert is a row of its own weight matrix."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from w8a8_kernels.grouped_mm.config import GroupedTile
from w8a8_kernels.grouped_mm.sort import load_experts
from w8a8_kernels.launch import launch_options
from w8a8_kernels.scaled_mm.split_k import TMA_ALIGNMENT, prefetch_rows


@triton.jit(do_not_specialize=["P"])
def grouped_mm_kernel(
    out_ptr,
    x_ptr,
    x_scale_ptr,
    pair_scale_ptr,
    weight_ptr,
    weight_boxes,
    weight_scale_ptr,
    bias_ptr,
    pairs_ptr,
    experts_ptr,
    expert_map_ptr,
    P,
    N,
    K,
    num_ids,
    x_row_stride,
    weight_expert_stride,
    weight_row_stride,
    PAIRS_PER_ROW: tl.constexpr,
    DIRECT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_PAIR_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """BLOCK_N columns of out [P, N] for one block of pairs of the same expert: x rows [K] @ weight [E, N, K][expert].T.

    DIRECT: a block is one pair, its expert that of experts [P], the ids. Otherwise a block is BLOCK_M entries of pairs, P for
    none, its expert that of experts [blocks], -1 for an unused block. Pair p reads row `p // PAIRS_PER_ROW` of x; its scale is
    multiplied by pair_scale [P] where there is one. With TMA, weight_boxes is a tensor descriptor of [E * N, K], its boxes
    [BLOCK_N, BLOCK_K].

    PDL: the launch may overlap the end of the kernel before it, so nothing that this one wrote is read before `gdc_wait`, and
    nothing is written. EARLY: the caller vouches that pairs and experts were complete before the kernel before it started.
    Then PREFETCH bytes of each weight row are asked of L2 before the wait. The next kernel may start only after the wait: that
    is what the EARLY of a later product rests on.
    """
    i_program = tl.program_id(0)
    n_tiles_n = tl.cdiv(N, BLOCK_N)
    if DIRECT:
        # Pairs are neighbours: what several of them read of one expert is read from DRAM once.
        i_block = i_program % P
        i_n = i_program // P
    else:
        # Columns are neighbours, then an expert's blocks: they share rows of x and the expert's weight through L2.
        i_block = i_program // n_tiles_n
        i_n = i_program % n_tiles_n

    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if DIRECT:
        expert = load_experts(experts_ptr, expert_map_ptr, i_block, True, num_ids, HAS_MAP)
    else:
        expert = tl.load(experts_ptr + i_block)
    if expert < 0:
        if PDL and EARLY:
            # Who waits for this kernel must find that all before it have ended, too.
            tl.extra.cuda.gdc_wait()
        return

    o_row = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    o_k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    if DIRECT:
        o_pair = i_block + tl.zeros((BLOCK_M,), dtype=tl.int32)
        m_pair = o_row == 0
    else:
        o_pair = tl.load(pairs_ptr + i_block * BLOCK_M + o_row)
        m_pair = o_pair < P
    o_x = (o_pair // PAIRS_PER_ROW).to(tl.int64)
    # Rows of the weight beyond it wrap around: read in bounds and never stored, they cost no mask in the loop.
    p_rows = weight_ptr + expert.to(tl.int64) * weight_expert_stride + (o_n % N).to(tl.int64) * weight_row_stride
    o_weight_scale = expert.to(tl.int64) * N + o_n
    # Before the loop, behind which a load from DRAM would add its latency.
    b_weight_scale = tl.load(weight_scale_ptr + o_weight_scale, mask=o_n < N, other=0.0)
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + o_weight_scale, mask=o_n < N, other=0.0)
    if PDL and EARLY:
        if PREFETCH > 0:
            prefetch_rows(p_rows, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_x_scale = tl.load(x_scale_ptr + o_x, mask=m_pair, other=0.0)
    if HAS_PAIR_SCALE:
        b_x_scale *= tl.load(pair_scale_ptr + o_pair, mask=m_pair, other=0.0).to(tl.float32)

    p_x = x_ptr + o_x[:, None] * x_row_stride + o_k[None, :]
    p_weight = p_rows[:, None] + o_k[None, :]
    m_x = m_pair[:, None] & (o_k >= 0)[None, :]
    if SWAP:
        b_acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    else:
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for i_k in range(0, K, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x, mask=m_x, other=0)
        else:
            m_k = (i_k + o_k < K)[None, :]
            b_x = tl.load(p_x, mask=m_x & m_k, other=0)
        if TMA:
            # Boxes may reach into the next expert's rows, which are not stored. What is beyond K is zero.
            b_weight = weight_boxes.load([expert * N + i_n * BLOCK_N, i_k])
        elif EVEN_K:
            b_weight = tl.load(p_weight)
        else:
            b_weight = tl.load(p_weight, mask=m_k, other=0)
        if SWAP:
            b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc, out_dtype=tl.int32)
        else:
            b_acc = tl.dot(b_x, tl.trans(b_weight), b_acc, out_dtype=tl.int32)
        p_x += BLOCK_K
        if not TMA:
            p_weight += BLOCK_K

    if SWAP:
        b_acc = tl.trans(b_acc)
    b_out = b_acc.to(tl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
    if HAS_BIAS:
        b_out += b_bias.to(tl.float32)[None, :]
    o_out = o_pair.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = m_pair[:, None] & (o_n < N)[None, :]
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


def grouped_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    blocks: tuple[torch.Tensor, torch.Tensor] | None,
    out_dtype: torch.dtype,
    *,
    tile: GroupedTile,
    pair_scale: torch.Tensor | None = None,
    pdl: bool = False,
    early: bool = False,
) -> torch.Tensor:
    """Launch the grouped GEMM: as `grouped_mm_reference`, but rows of pairs without an expert are not written.

    Args:
        x: codes [R, K] int8, R = T or T * top_k; the pairs of a token have the same row, or each its own.
        x_scale: [R, 1] fp32, contiguous.
        weight: codes [E, N, K] int8, rows and experts of any stride.
        weight_scale: [E, N, 1] fp32, contiguous.
        bias: [E, N] floating, contiguous, or None.
        topk_ids: [T, top_k] int32 or int64, contiguous.
        expert_map: as in `local_experts_reference`, int32.
        blocks: what `sort_pairs` returned for `tile.block_m`; None: every pair is a block of its own.
        out_dtype: bf16, fp16 or fp32.
        tile: of one program; `tma` is passed over where the weight does not suit it.
        pair_scale: [T, top_k] floating, contiguous: factors of the pairs' x_scale, or None.
        pdl: programmatic dependent launch (capability 9.0 and newer): start while the kernel before is still running.
        early: with `pdl`, whether topk_ids and blocks are complete before the kernel before this one starts.

    Returns:
        [T * top_k, N] of `out_dtype`.
    """
    P, (E, N, K) = topk_ids.numel(), weight.shape
    out = torch.empty((P, N), dtype=out_dtype, device=x.device)
    if P == 0 or N == 0:
        return out
    pairs, experts = (None, topk_ids) if blocks is None else blocks
    n_blocks = experts.numel()
    x_row_stride, weight_expert_stride, weight_row_stride = x.stride(0), weight.stride(0), weight.stride(1)
    aligned = weight.data_ptr() % TMA_ALIGNMENT == 0 and weight_row_stride % TMA_ALIGNMENT == 0
    weight_boxes = None
    if tile.tma and aligned and weight_expert_stride == N * weight_row_stride:
        rows = weight.as_strided((E * N, K), (weight_row_stride, 1))
        weight_boxes = TensorDescriptor.from_tensor(rows, [tile.block_n, tile.block_k])
    grouped_mm_kernel[(n_blocks * triton.cdiv(N, tile.block_n),)](
        out,
        x,
        x_scale,
        pair_scale,
        weight,
        weight_boxes,
        weight_scale,
        bias,
        pairs,
        experts,
        expert_map,
        P,
        N,
        K,
        E if expert_map is None else expert_map.numel(),
        x_row_stride,
        weight_expert_stride,
        weight_row_stride,
        PAIRS_PER_ROW=P // x.shape[0],
        DIRECT=blocks is None,
        HAS_MAP=expert_map is not None,
        HAS_PAIR_SCALE=pair_scale is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=K % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SWAP=tile.swap,
        TMA=weight_boxes is not None,
        PDL=pdl,
        EARLY=early,
        PREFETCH=tile.prefetch if early and aligned and tile.prefetch <= K else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )
    return out
