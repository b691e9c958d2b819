"""int8 matrix product with int32 sums in plain torch: the definition that every other kernel must equal."""

import torch

# 1024 products of two int8 values stay within 2^24, so that fp32 sums of them are exact in any order; TF32 holds int8
# exactly, too.
CHUNK_K = 1024


def int32_mm_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact `x @ weight.T`: [M, K] int8 and [N, K] int8 to [M, N] int32."""
    acc = torch.zeros((x.shape[0], weight.shape[0]), dtype=torch.int32, device=x.device)
    for k in range(0, x.shape[1], CHUNK_K):
        acc += (x[:, k : k + CHUNK_K].float() @ weight[:, k : k + CHUNK_K].float().t()).to(torch.int32)
    return acc


def scaled_mm_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`acc * x_scale * weight_scale (+ bias)` in fp32, rounded once to `out_dtype`. Shapes as in `w8a8_kernels.scaled_mm`."""
    out = int32_mm_reference(x, weight).float() * x_scale * weight_scale.view(1, -1)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
