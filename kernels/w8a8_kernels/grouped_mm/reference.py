"""int8 mixture of experts in plain torch: the definition that the kernels must equal.

A pair is a token and one of its experts; pair p is number `p % top_k` of token `p // top_k`.
"""

import torch

from w8a8_kernels.quantize.reference import quantize_reference, silu_mul_quantize_reference
from w8a8_kernels.scaled_mm.reference import scaled_mm_reference


def local_experts_reference(topk_ids: torch.Tensor, experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Index of each pair's expert among those that this rank holds.

    Args:
        topk_ids: [T, top_k], any integers.
        experts: how many experts this rank holds.
        expert_map: [num_global_experts], the index for each id, -1 where another rank holds the expert; None: id and index are
            the same.

    Returns:
        [T * top_k] int64, -1 for a pair whose id is none, or whose expert is elsewhere.
    """
    ids = topk_ids.reshape(-1).long()
    if expert_map is None:
        return torch.where((ids >= 0) & (ids < experts), ids, -1)
    known = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(known, expert_map.long()[torch.where(known, ids, 0)], -1)


def grouped_mm_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    pair_experts: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`scaled_mm_reference` of each pair's row of x and its expert's weight.

    Args:
        x: codes [R, K] int8; pair p has row `p // (P // R)`.
        x_scale: [R, 1] fp32, or [P, 1].
        weight: codes [E, N, K] int8.
        weight_scale: [E, N, 1] fp32.
        bias: [E, N] floating, or None.
        pair_experts: [P] int64, P a multiple of R; -1 for none.
        out_dtype: of the result.

    Returns:
        [P, N] of `out_dtype`; zeros for pairs without an expert.
    """
    P = pair_experts.numel()
    out = torch.zeros((P, weight.shape[1]), dtype=out_dtype, device=x.device)
    for e in pair_experts.unique().tolist():
        if e < 0:
            continue
        pairs = (pair_experts == e).nonzero().view(-1)
        rows = pairs // (P // x.shape[0])
        scale = x_scale[rows if x_scale.shape[0] == x.shape[0] else pairs]
        expert_bias = None if bias is None else bias[e]
        out[pairs] = scaled_mm_reference(x[rows], scale, weight[e], weight_scale[e], expert_bias, out_dtype)
    return out


def int8_experts_reference(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    hadamard13: int = 0,
    hadamard2: int = 0,
    expert_map: torch.Tensor | None = None,
    apply_weight_on_input: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole layer; arguments as in `w8a8_kernels.int8_experts`.

    Weights and sums over the experts are in fp32, in the order of `topk_ids`, and rounded once to x's dtype. The products are
    rounded to x's dtype, too.
    """
    T, top_k = topk_ids.shape
    weights = topk_weights.float()
    pairs = local_experts_reference(topk_ids, w13.shape[0], expert_map)
    codes, scale = quantize_reference(x, hadamard13)
    if apply_weight_on_input:
        scale = (scale * weights).reshape(-1, 1)
    hidden = grouped_mm_reference(codes, scale, w13, w13_scale, w13_bias, pairs, x.dtype)
    codes, scale = silu_mul_quantize_reference(hidden, hadamard2)
    result = grouped_mm_reference(codes, scale, w2, w2_scale, w2_bias, pairs, x.dtype).view(T, top_k, w2.shape[1])
    local = (pairs >= 0).view(T, top_k, 1)
    out = torch.zeros((T, w2.shape[1]), dtype=torch.float32, device=x.device)
    for j in range(top_k):
        term = result[:, j].float() if apply_weight_on_input else result[:, j].float() * weights[:, j, None]
        out += torch.where(local[:, j], term, 0.0)
    return out.to(x.dtype)
