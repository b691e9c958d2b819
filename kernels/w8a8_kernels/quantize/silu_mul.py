"""Triton SiLU·mul fused with the row quantizer."""

import torch
import triton
import triton.language as tl

from w8a8_kernels.quantize.config import QuantizeConfig, StreamConfig, row_config
from w8a8_kernels.quantize.device import (
    amax_bits,
    chain_launches,
    encode,
    hadamard_signs,
    row_reciprocal,
    row_scale,
    silu_mul,
    store_scale,
    tile_offsets,
    transform,
)
from w8a8_kernels.quantize.row import kernel_options
from w8a8_kernels.quantize.stream import launch_stream
from w8a8_kernels.quantize.tensors import empty_codes, row_stride, unit_rows


@triton.jit
def load_silu_mul(x_ptr, o_m, o_k, mask, K, x_row_stride):
    """Tile of silu(x[:, :K]) * x[:, K:], rounded to x's dtype after the activation and after the product."""
    p_x = x_ptr + o_m * x_row_stride + o_k
    return silu_mul(tl.load(p_x, mask=mask, other=0.0), tl.load(p_x + K, mask=mask, other=0.0))


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
            # The address first: after the codes, it made ptxas spill 16 bytes on sm_80 (Triton 3.9).
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
            b_codes = encode(b_y, b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD)
            tl.store(codes_ptr + o_m * K + o_k, b_codes, mask=mask)


def silu_mul_quantize_row(
    x: torch.Tensor,
    hadamard: int = 0,
    *,
    config: QuantizeConfig | StreamConfig | None = None,
    tensor_cores: bool = True,
    stream_sms: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu(x[:, :K]) * x[:, K:]`, quantized; see `silu_mul_quantize_reference` for the rounding.

    Args:
        x: [M, 2K], bf16, fp16 or fp32; rows of any stride. Results of more than
            `MAX_BLOCK_BYTES` in x's dtype take two passes over x.
        hadamard, config, tensor_cores, stream_sms, pdl: as in `quantize_row`.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.
    """
    x = unit_rows(x)
    M, K = x.shape[0], x.shape[1] // 2
    config = config or row_config(M, K, x.dtype, hadamard, "silu_mul", streams=stream_sms > 0)
    codes, scale = empty_codes(M, K, x.device)
    if M == 0:
        return codes, scale
    if isinstance(config, StreamConfig):
        launch_stream(codes, scale, x, K, hadamard, config, num_sms=stream_sms, pdl=pdl, op="silu_mul")
        return codes, scale
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
