"""Per-token symmetric int8 quantization in plain torch: the definition that every other quantizer must equal bit for bit."""

import torch

from w8a8_kernels.hadamard import butterflies, hadamard_transform


def quantize_reference(
    x: torch.Tensor, hadamard: int = 0, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every row of `x`, or of its block Hadamard transform, by its own absolute maximum or a given one.

    `scale = amax(|row|) / 127` in fp32; codes are round-half-to-even(row / scale), a true fp32 division, clamped to
    [-127, 127]. A row whose scale is 0 (all zeros, or so small that the division underflows) gets scale 1 and codes 0. A row
    that holds NaN or inf gets scale NaN and codes 0, so that its product is NaN and no other row changes.

    Args:
        x: [M, K], bf16, fp16 or fp32, any strides.
        hadamard: size of the transform's blocks, a divisor of K; 0 for none. In fp32, not rounded. Its sums
            round by their order: quantizers that add in another order may differ by 1e-6 of a scale and by one in a code.
        amax: [M, 1] fp32, of whole rows of which x holds some columns: the greatest of what `quantize_amax_reference` says of
            all parts, NaN or inf if one of them has it. Default: that of x's own rows.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32; with `amax` the same bits as that part of the whole row's.
    """
    x = hadamard_transform(x, hadamard)
    if amax is None:
        amax = _greatest_magnitude(x)
    elif hadamard:
        # Rounding keeps order: the greatest of the rounded products is the rounded product of the greatest.
        amax = amax * hadamard**-0.5
    # A tensor, since torch on CUDA multiplies by the reciprocal of a number instead of dividing by it.
    scale = amax / amax.new_full((), 127)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    finite = amax < float("inf")  # False for NaN, too
    codes = (x / scale).round_().clamp_(-127, 127)
    codes = torch.where(finite, codes, torch.zeros_like(codes)).to(torch.int8)
    return codes, torch.where(finite, scale, torch.full_like(scale, float("nan")))


def quantize_amax_reference(x: torch.Tensor, hadamard: int = 0) -> torch.Tensor:
    """Greatest magnitude of every row, or of its block Hadamard transform before that is normalized.

    Args:
        x, hadamard: as in `quantize_reference`.

    Returns:
        [M, 1] fp32, NaN or inf for a row that holds one, 0 for an empty row. No sign bit is set.
    """
    # Once more: torch promises nothing about the sign of a maximum that is NaN.
    return _greatest_magnitude(butterflies(x, hadamard)).abs()


def _greatest_magnitude(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(x.shape[0], 1)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0) -> torch.Tensor:
    """`x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)` of every row: all in fp32, rounded once, to x's dtype.

    This is the rounding of vLLM's compiled CUDA op `_C.rms_norm` since 0.20 (the product with the weight is not preceded by a
    rounding of the normalized value, as it was up to 0.19 and still is in `RMSNorm.forward_native` run op by op), and of
    GemmaRMSNorm, whose weight is an fp32 `1 + w`: pass `weight_offset=1.0`. The square root and its reciprocal are correctly
    rounded, so that the kernels agree bit for bit wherever the sum of the squares does; a sum in another order can move the
    reciprocal by an fp32 unit in the last place, and a rounded result with it in about one place in 2^14 (bf16).

    Args:
        x: [M, K], bf16, fp16 or fp32, K >= 1.
        weight: [K] floating.
        eps: added to the mean of the squares.
        weight_offset: added to the weight in fp32.

    Returns:
        [M, K] in x's dtype.
    """
    value = x.float()
    # Not `mean`, which multiplies by a reciprocal on CUDA. And fp64's square root, rounded: torch's own for fp32 is off by a
    # unit in the last place in 0.6 % of cases on a CPU (2.13, x86-64).
    mean = value.square().sum(dim=-1, keepdim=True) / value.new_full((), value.shape[-1])
    rstd = 1 / (mean + eps).double().sqrt().float()
    return (value * rstd * (weight.float() + weight_offset)).to(x.dtype)


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[:, :K]) * x[:, K:]`: SiLU in fp32 as x / (1 + exp(-x)), rounded to x's dtype; the product, rounded again.

    This is the rounding of vLLM's `_C.silu_and_mul` and of `SiluAndMul.forward_native`. exp is not the same function on every
    device: results can differ by one unit in the last place of x's dtype, in about one place in 2^12 (bf16).

    Args:
        x: [M, 2K], bf16, fp16 or fp32.

    Returns:
        [M, K] in x's dtype.
    """
    gate, up = x.chunk(2, dim=-1)
    value = gate.float()
    silu = (value / (1 + (-value).exp())).to(x.dtype)
    return silu * up


def rms_norm_quantize_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_reference` of `rms_norm_reference`: the maximum and the codes are those of the rounded norm."""
    return quantize_reference(rms_norm_reference(x, weight, eps, weight_offset), hadamard)


def add_rms_norm_quantize_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm_quantize_reference` of `x + residual`, and that sum.

    The sum is rounded to x's dtype before the mean of its squares is taken, as in vLLM's `_C.fused_add_rms_norm`;
    `RMSNorm.forward_native` takes it from the unrounded sum.

    Args:
        x: [M, K], bf16, fp16 or fp32, K >= 1.
        residual: [M, K] of x's dtype.
        weight, eps, weight_offset: as in `rms_norm_reference`.
        hadamard: as in `quantize_reference`.

    Returns:
        codes [M, K] int8, scale [M, 1] fp32 and the sum [M, K] in x's dtype.
    """
    summed = (x + residual).contiguous()
    return *rms_norm_quantize_reference(summed, weight, eps, weight_offset, hadamard), summed


def silu_mul_quantize_reference(x: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_reference` of `silu_mul_reference`: the maximum and the codes are those of the rounded product."""
    return quantize_reference(silu_mul_reference(x), hadamard)
