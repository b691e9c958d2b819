"""Launches the attention kernel."""

import torch
from torch import Tensor

from w8a8_kernels.attention.config import FEW_SPLITS, MAX_SPLITS, AttentionPlan, attention_plan
from w8a8_kernels.attention.device import device_of
from w8a8_kernels.attention.paged import merge_splits_kernel, paged_attention_kernel
from w8a8_kernels.launch import launch_options
from w8a8_kernels.select import has_dependent_launch
from w8a8_kernels.tiles import power_of_two


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    most_queries: int,
    most_keys: int,
    causal: bool = True,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    out: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Attention over a paged cache; arguments as in `paged_attention_reference`, with any strides but a last one of 1.

    The value cache may have its 1 between tokens instead (`int8_cache_views`).

    Args:
        most_queries, most_keys: of any sequence; upper bounds, where the launch is recorded to be replayed.
        out: [T, query heads, D] in q's dtype, made where it is None.
        plan: instead of the one by rule.

    Returns:
        out. Rows of no sequence are undefined.
    """
    T, heads, D = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    group, n_sequences = heads // kv_heads, len(seq_lens)
    out = torch.empty_like(q) if out is None else out
    if T == 0:
        return out
    capability, num_sms = device_of(q.device)
    int8, pdl = key_scale is not None, has_dependent_launch(capability)
    if plan is None:
        seen = most_keys if window is None or not causal else min(most_keys, window + most_queries)
        shape = (D, group, kv_heads, n_sequences, most_queries, seen)
        plan = attention_plan(*shape, int8=int8, capability=capability, num_sms=num_sms)
    tile, splits = plan.tile, plan.splits
    block_g, block_d = power_of_two(group), power_of_two(D)
    tile_queries = tile.block_m // block_g
    room = 1 if plan.one_query else tile_queries
    if room < (most_queries if plan.one_tile or plan.one_query else 1):
        raise ValueError(f"paged_attention: got a plan of {plan} for {most_queries} queries x {group} heads")
    n_tiles = n_sequences if plan.one_tile else T // tile_queries + n_sequences
    part = part_max = part_sum = out
    if splits > 1:
        part = torch.empty(splits, T, heads, D, dtype=torch.float32, device=q.device)
        part_max, part_sum = torch.empty(2, splits, T, heads, dtype=torch.float32, device=q.device)
    scale_strides = key_scale.stride() if int8 else (0, 0, 0)
    paged_attention_kernel[(n_tiles, kv_heads, splits)](
        out,
        part,
        part_max,
        part_sum,
        q,
        key_cache,
        value_cache,
        key_scale if int8 else q,
        value_scale if int8 else q,
        block_table,
        seq_lens,
        query_start_loc,
        q if sinks is None else sinks,
        q if alibi_slopes is None else alibi_slopes,
        n_sequences,
        T,
        scale,
        softcap,
        window or 0,
        *out.stride()[:2],
        *q.stride()[:2],
        key_cache.stride(0),
        key_cache.stride(2),
        value_cache.stride(0),
        value_cache.stride(2),
        *scale_strides,
        block_table.stride(0),
        STRIDE_KT=key_cache.stride(1),
        STRIDE_VT=value_cache.stride(1),
        STRIDE_VD=value_cache.stride(3),
        HEADS=heads,
        GROUP=group,
        BLOCK_G=block_g,
        D=D,
        BLOCK_D=block_d,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_SIZE=block_size,
        SPLIT=splits > 1,
        ONE_TILE=plan.one_tile,
        ONE_QUERY=plan.one_query,
        CAUSAL=causal,
        WINDOW=window is not None,
        SOFTCAP=softcap != 0,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        INT8=int8,
        DOT=tile.dot,
        INT8_DOT=tile.int8_dot,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )
    if splits > 1:
        merge_splits_kernel[(T, heads)](
            out,
            part,
            part_max,
            part_sum,
            T,
            splits,
            *out.stride()[:2],
            HEADS=heads,
            D=D,
            BLOCK_D=block_d,
            MAX_SPLITS=FEW_SPLITS if splits <= FEW_SPLITS else MAX_SPLITS,
            PDL=pdl,
            num_warps=1 if splits <= FEW_SPLITS else 4,
            **launch_options(pdl),
        )
    return out
