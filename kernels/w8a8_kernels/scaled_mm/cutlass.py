"""The CUTLASS int8 matrix product that vLLM's CUDA build registers with torch; vLLM itself is not imported."""

import torch


def has_cutlass() -> bool:
    """Whether the process has loaded vLLM's CUDA build with its CUTLASS product."""
    return hasattr(torch.ops._C, "cutlass_scaled_mm")


def scaled_mm_cutlass(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Run it; shapes as in `w8a8_kernels.scaled_mm`, N and K multiples of 16, `out_dtype` bf16 or fp16."""
    if x.stride(-1) != 1 or x.stride(0) % 16 != 0:
        x = x.contiguous()
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel():
        bias = None if bias is None else bias.to(out_dtype)
        torch.ops._C.cutlass_scaled_mm(out, x, weight.t(), x_scale, weight_scale, bias)
    return out
