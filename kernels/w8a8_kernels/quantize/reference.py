"""Per-token symmetric int8 quantization in plain torch: the definition that every other quantizer must equal bit for bit."""

import torch


def quantize_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every row of `x` by its own absolute maximum.

    `scale = amax(|row|) / 127` in fp32; codes are round-half-to-even(row / scale), a true fp32 division, clamped to
    [-127, 127]. A row whose scale is 0 (all zeros, or so small that the division underflows) gets scale 1 and codes 0. A row
    that holds NaN or inf gets scale NaN and codes 0, so that its product is NaN and no other row changes.

    Args:
        x: [M, K], bf16, fp16 or fp32, any strides.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.
    """
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(x.shape[0], 1)
    scale = amax / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    finite = amax < float("inf")  # False for NaN, too
    codes = (x / scale).round_().clamp_(-127, 127)
    codes = torch.where(finite, codes, torch.zeros_like(codes)).to(torch.int8)
    return codes, torch.where(finite, scale, torch.full_like(scale, float("nan")))
