"""A layer of experts on a GPU: the launches, in order."""

import torch

from w8a8_kernels.grouped_mm.config import ExpertsPlan
from w8a8_kernels.grouped_mm.product import grouped_mm
from w8a8_kernels.grouped_mm.sort import sort_pairs
from w8a8_kernels.grouped_mm.weighted_sum import weighted_sum
from w8a8_kernels.quantize.row import quantize_row
from w8a8_kernels.quantize.silu_mul import silu_mul_quantize_row


def int8_experts_grouped(
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
    *,
    plan: ExpertsPlan,
    tensor_cores: bool = True,
    stream_sms: int = 0,
    pdl: bool = False,
) -> torch.Tensor:
    """The whole layer; see `int8_experts_reference` for the rounding and `w8a8_kernels.int8_experts` for the arguments.

    The host waits for nothing, and every launch depends on shapes alone: a CUDA graph may be replayed on other ids.

    Args:
        plan: grouping and tiles, `experts_plan`.
        tensor_cores, stream_sms: as in `quantize_row`.
        pdl: programmatic dependent launch (capability 9.0 and newer): each kernel starts while the one before still runs.
    """
    E = w13.shape[0]
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    rows = {"tensor_cores": tensor_cores, "stream_sms": stream_sms, "pdl": pdl}
    blocks = None if plan.direct else sort_pairs(topk_ids, expert_map, E, plan.block_m, pdl=pdl)
    codes, scale = quantize_row(x, hadamard13, **rows)
    hidden = grouped_mm(
        codes,
        scale,
        w13,
        w13_scale,
        w13_bias,
        topk_ids,
        expert_map,
        blocks,
        x.dtype,
        tile=plan.gate_up,
        pair_scale=topk_weights if apply_weight_on_input else None,
        pdl=pdl,
    )
    codes, scale = silu_mul_quantize_row(hidden, hadamard2, **rows)
    # The quantizer started after all programs of the first product had waited, so ids and blocks are complete from then on.
    result = grouped_mm(
        codes,
        scale,
        w2,
        w2_scale,
        w2_bias,
        topk_ids,
        expert_map,
        blocks,
        x.dtype,
        tile=plan.down,
        pdl=pdl,
        early=pdl,
    )
    weights = None if apply_weight_on_input else topk_weights
    return weighted_sum(result, weights, topk_ids, expert_map, E, pdl=pdl, early=pdl)
