"""Pairs of a token and an expert, sorted by expert on the GPU, with nothing that the host must wait for."""

import torch
import triton
import triton.language as tl

from w8a8_kernels.grouped_mm.config import max_blocks
from w8a8_kernels.launch import launch_options
from w8a8_kernels.quantize.device import chain_launches

# Pairs that a program looks at together, and its warps: few pairs are one look.
FEW_PAIRS, FEW_PAIRS_WARPS = 1024, 4
MANY_PAIRS, MANY_PAIRS_WARPS = 4096, 8

# Blocks whose expert a program writes together.
BLOCKS = tl.constexpr(64)


@triton.jit
def load_experts(ids_ptr, expert_map_ptr, o_p, m_p, num_ids, HAS_MAP: tl.constexpr):
    """Local experts int32 of the pairs o_p where m_p holds, -1 where there is none; see `local_experts_reference`."""
    b_ids = tl.load(ids_ptr + o_p, mask=m_p, other=-1)
    m_known = (b_ids >= 0) & (b_ids < num_ids)
    if HAS_MAP:
        b_expert = tl.load(expert_map_ptr + b_ids, mask=m_known, other=-1)
    else:
        b_expert = tl.where(m_known, b_ids, -1)
    return b_expert.to(tl.int32)


@triton.jit(do_not_specialize=["P", "n_blocks"])
def sort_pairs_kernel(
    pairs_ptr,
    block_experts_ptr,
    ids_ptr,
    expert_map_ptr,
    P,
    n_blocks,
    num_ids,
    HAS_MAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert's blocks: block_experts [n_blocks] int32 and, in ascending order, pairs [n_blocks * BLOCK_M] int32.

    Of the other experts a program needs to know no more than how many pairs those before its own have together, `before`: its
    blocks begin at `before // BLOCK_M + min(before, e)`. An expert with pairs moves the second term by one at least, which
    makes up for its last block, so no two experts' blocks overlap. What is between them gets expert -1, and so does the rest,
    up to n_blocks (`max_blocks`). Rows of a block beyond the expert's pairs hold P. PDL: see `chain_launches`.
    """
    i_e = tl.program_id(0)
    if PDL:
        chain_launches()
    b_before = tl.zeros((CHUNK,), dtype=tl.int32)
    b_own = tl.zeros((CHUNK,), dtype=tl.int32)
    for i_p in range(0, P, CHUNK):
        o_p = i_p + tl.arange(0, CHUNK)
        b_expert = load_experts(ids_ptr, expert_map_ptr, o_p, o_p < P, num_ids, HAS_MAP)
        b_before += ((b_expert >= 0) & (b_expert < i_e)).to(tl.int32)
        b_own += (b_expert == i_e).to(tl.int32)
    before = tl.sum(b_before, axis=0)
    count = tl.sum(b_own, axis=0)
    after = before + count
    first_block = before // BLOCK_M + tl.minimum(before, i_e)
    last_block = first_block + tl.cdiv(count, BLOCK_M)
    next_block = after // BLOCK_M + tl.minimum(after, i_e + 1)
    if i_e == tl.num_programs(0) - 1:
        next_block = n_blocks
    for i_b in range(first_block, next_block, BLOCKS):
        o_b = i_b + tl.arange(0, BLOCKS)
        tl.store(block_experts_ptr + o_b, tl.where(o_b < last_block, i_e, -1), mask=o_b < next_block)

    if count > 0:
        first_row = first_block * BLOCK_M
        o_rest = first_row + count + tl.arange(0, BLOCK_M)
        tl.store(pairs_ptr + o_rest, tl.zeros((BLOCK_M,), dtype=tl.int32) + P, mask=o_rest < last_block * BLOCK_M)
        for i_p in range(0, P, CHUNK):
            o_p = i_p + tl.arange(0, CHUNK)
            b_expert = load_experts(ids_ptr, expert_map_ptr, o_p, o_p < P, num_ids, HAS_MAP)
            b_mine = (b_expert == i_e).to(tl.int32)
            o_row = first_row + tl.cumsum(b_mine, axis=0) - 1
            tl.store(pairs_ptr + o_row, o_p, mask=b_mine != 0)
            first_row += tl.sum(b_mine, axis=0)


def sort_pairs(
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    experts: int,
    block_m: int,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert, stably, into blocks of `block_m` rows.

    Args:
        topk_ids: [T, top_k] int32 or int64, contiguous.
        expert_map: as in `local_experts_reference`, int32.
        experts: how many experts this rank holds, from 1.
        block_m: rows of a block, a power of two.
        pdl: programmatic dependent launch (capability 9.0 and newer): start while the kernel before is still running.

    Returns:
        pairs [blocks * block_m] int32, T * top_k where a row has none, and the blocks' experts [blocks] int32, -1 for a block
        without pairs, whose rows are not written. The number of blocks depends on nothing but shapes.
    """
    P = topk_ids.numel()
    n_blocks = max_blocks(P, experts, block_m)
    pairs = torch.empty(n_blocks * block_m, dtype=torch.int32, device=topk_ids.device)
    block_experts = torch.empty(n_blocks, dtype=torch.int32, device=topk_ids.device)
    few = P <= FEW_PAIRS
    if P > 0:
        sort_pairs_kernel[(experts,)](
            pairs,
            block_experts,
            topk_ids,
            expert_map,
            P,
            n_blocks,
            experts if expert_map is None else expert_map.numel(),
            HAS_MAP=expert_map is not None,
            BLOCK_M=block_m,
            CHUNK=FEW_PAIRS if few else MANY_PAIRS,
            PDL=pdl,
            num_warps=FEW_PAIRS_WARPS if few else MANY_PAIRS_WARPS,
            num_stages=1,
            **launch_options(pdl),
        )
    return pairs, block_experts
