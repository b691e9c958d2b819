"""Triton SiLU·mul fused with the row quantizer."""

import torch
import triton
import triton.language as tl

from w8a8_kernels.quantize.config import QuantizeConfig, quantize_config
from w8a8_kernels.quantize.row import (
    amax_bits,
    chain_launches,
    empty_codes,
    encode,
    hadamard_signs,
    kernel_options,
    round_to,
    row_reciprocal,
    row_scale,
    row_stride,
    store_scale,
    tile_offsets,
    transform,
    unit_rows,
)


@triton.jit
def load_silu_mul(x_ptr, o_m, o_k, mask, K, x_row_stride):
    """Tile of silu(x[:, :K]) * x[:, K:], rounded to x's dtype after the activation and after the product."""
    p_x = x_ptr + o_m * x_row_stride + o_k
    b_gate = tl.load(p_x, mask=mask, other=0.0)
    b_up = tl.load(p_x + K, mask=mask, other=0.0)
    b_g = b_gate.to(tl.float32)
    # exp and this division are the GPU's approximations, a few units in the last place of fp32.
    b_silu = round_to(b_g / (1.0 + tl.exp(-b_g)), b_gate.dtype)
    return round_to(b_silu.to(tl.float32) * b_up.to(tl.float32), b_gate.dtype)


@triton.jit(do_not_specialize=["M"])
def silu_mul_quantize_kernel(
    codes_ptr,
    scale_ptr,
    x_ptr,
    M,
    K,
    x_row_stride,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of x [M, 2K]: SiLU·mul to codes [M, K] int8 and scale [M] fp32; see `silu_mul_quantize_reference`.

    PDL: as in `quantize_row_kernel`.
    """
    b_signs = hadamard_signs(x_ptr.dtype.element_ty, HADAMARD, TENSOR_CORES)
    if PDL:
        chain_launches()
    DIVIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32 and HADAMARD == 0
    b_amax = tl.zeros([ROWS], dtype=tl.int32)
    if CHUNKS > 0:
        transformed = ()
        for i in tl.static_range(CHUNKS):
            o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
            b_y = load_silu_mul(x_ptr, o_m, o_k, mask, K, x_row_stride)
            b_y = transform(b_y, ROWS, BLOCK_K, HADAMARD, b_signs)
            b_amax = tl.maximum(b_amax, amax_bits(b_y))
            transformed += (b_y,)
    else:
        for i_k in range(0, K, BLOCK_K):
            o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
            b_y = load_silu_mul(x_ptr, o_m, o_k, mask, K, x_row_stride)
            b_amax = tl.maximum(b_amax, amax_bits(transform(b_y, ROWS, BLOCK_K, HADAMARD, b_signs)))

    b_scale, b_stored_scale, b_coded = row_scale(b_amax, HADAMARD)
    store_scale(scale_ptr, b_stored_scale, M, ROWS)
    b_factor, b_multiply, multiply_all = row_reciprocal(b_amax, b_scale, b_coded, DIVIDE)
    if CHUNKS > 0:
        for i in tl.static_range(CHUNKS):
            o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
            tl.store(
                codes_ptr + o_m * K + o_k,
                encode(transformed[i], b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD),
                mask=mask,
            )
    else:
        for i_k in range(0, K, BLOCK_K):
            o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
            b_y = load_silu_mul(x_ptr, o_m, o_k, mask, K, x_row_stride)
            b_y = transform(b_y, ROWS, BLOCK_K, HADAMARD, b_signs)
            tl.store(
                codes_ptr + o_m * K + o_k,
                encode(b_y, b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD),
                mask=mask,
            )


def silu_mul_quantize_row(
    x: torch.Tensor,
    hadamard: int = 0,
    *,
    config: QuantizeConfig | None = None,
    tensor_cores: bool = True,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu(x[:, :K]) * x[:, K:]`, quantized; see `silu_mul_quantize_reference` for the rounding.

    Args:
        x: [M, 2K], bf16, fp16 or fp32; rows of any stride. Results of more than
            `MAX_BLOCK_BYTES` in x's dtype take two passes over x.
        hadamard, config, tensor_cores, pdl: as in `quantize_row`.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.
    """
    x = unit_rows(x)
    M, K = x.shape[0], x.shape[1] // 2
    config = config or quantize_config(M, K, x.dtype, hadamard=hadamard)
    codes, scale = empty_codes(M, K, x.device)
    if M > 0:
        silu_mul_quantize_kernel[(triton.cdiv(M, config.rows),)](
            codes,
            scale,
            x,
            M,
            K,
            row_stride(x),
            **kernel_options(config, K, hadamard, tensor_cores, pdl),
        )
    return codes, scale
