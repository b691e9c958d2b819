"""Triton RMSNorm, with and without a residual, fused with the row quantizer."""

import torch
import triton
import triton.language as tl

from w8a8_kernels.launch import launch_options
from w8a8_kernels.quantize.config import STREAM_LONG_TILE, QuantizeConfig, StreamConfig, row_config, stream_config
from w8a8_kernels.quantize.device import (
    amax_bits,
    chain_launches,
    encode,
    hadamard_signs,
    load_sum,
    normalize,
    reciprocal_rms,
    row_reciprocal,
    row_scale,
    square_sum,
    store_scale,
    tile_offsets,
    transform,
)
from w8a8_kernels.quantize.row import kernel_options
from w8a8_kernels.quantize.stream import launch_stream
from w8a8_kernels.quantize.tensors import empty_codes, row_stride, unit_rows


@triton.jit(do_not_specialize=["M"])
def rms_norm_quantize_kernel(
    codes_ptr,
    scale_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    M,
    K,
    x_row_stride,
    residual_row_stride,
    eps,
    weight_offset,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HADAMARD: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows: sum [M, K] = x + residual where there is one, its norm to codes [M, K] int8 and scale [M] fp32.

    See `add_rms_norm_quantize_reference`. PDL: as in `quantize_row_kernel`.
    """
    b_signs = hadamard_signs(x_ptr.dtype.element_ty, HADAMARD, TENSOR_CORES)
    if PDL:
        chain_launches()
    DIVIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32 and HADAMARD == 0
    b_square_sum = tl.zeros([ROWS], dtype=tl.float32)
    b_amax = tl.zeros([ROWS], dtype=tl.int32)
    if CHUNKS > 0:
        sums, weights = (), ()
        for i in tl.static_range(CHUNKS):
            o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
            # Before the sum: loads do not move up past the barrier in it, and a row would wait for memory twice.
            weights += (tl.load(weight_ptr + o_k, mask=o_k < K, other=0.0),)
            b_x = load_sum(x_ptr, residual_ptr, o_m, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(sum_ptr + o_m * K + o_k, b_x, mask=mask)
            sums += (b_x,)
        for i in tl.static_range(CHUNKS):
            b_square_sum += square_sum(sums[i])
        b_rstd = reciprocal_rms(b_square_sum, K, eps)
        transformed = ()
        for i in tl.static_range(CHUNKS):
            b_y = normalize(sums[i], b_rstd, weights[i], weight_offset)
            b_y = transform(b_y, ROWS, BLOCK_K, HADAMARD, b_signs)
            b_amax = tl.maximum(b_amax, amax_bits(b_y))
            transformed += (b_y,)
    else:
        for i_k in range(0, K, BLOCK_K):
            o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
            b_x = load_sum(x_ptr, residual_ptr, o_m, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(sum_ptr + o_m * K + o_k, b_x, mask=mask)
            b_square_sum += square_sum(b_x)
        b_rstd = reciprocal_rms(b_square_sum, K, eps)
        for i_k in range(0, K, BLOCK_K):
            o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
            b_x = load_sum(x_ptr, residual_ptr, o_m, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL)
            b_weight = tl.load(weight_ptr + o_k, mask=o_k < K, other=0.0)
            b_y = normalize(b_x, b_rstd, b_weight, weight_offset)
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
            b_x = load_sum(x_ptr, residual_ptr, o_m, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL)
            b_weight = tl.load(weight_ptr + o_k, mask=o_k < K, other=0.0)
            b_y = normalize(b_x, b_rstd, b_weight, weight_offset)
            b_y = transform(b_y, ROWS, BLOCK_K, HADAMARD, b_signs)
            tl.store(
                codes_ptr + o_m * K + o_k,
                encode(b_y, b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD),
                mask=mask,
            )


@triton.jit(do_not_specialize=["M"])
def rms_kernel(
    rstd_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    M,
    K,
    x_row_stride,
    residual_row_stride,
    eps,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows: sum [M, K] = x + residual where there is one, and rstd [M] fp32, the `reciprocal_rms` of x or of the sum.

    For `quantize_stream_kernel`, which then normalizes. PDL: as in `quantize_row_kernel`.
    """
    if PDL:
        chain_launches()
    HAS_RESIDUAL: tl.constexpr = residual_ptr is not None
    sums = ()
    for i in tl.static_range(CHUNKS):
        o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
        sums += (load_sum(x_ptr, residual_ptr, o_m, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL),)
    b_square_sum = tl.zeros([ROWS], dtype=tl.float32)
    for i in tl.static_range(CHUNKS):
        if HAS_RESIDUAL:
            # After all loads: those do not move up past a store, and a row would wait for memory once for each tile.
            o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
            tl.store(sum_ptr + o_m * K + o_k, sums[i], mask=mask)
        b_square_sum += square_sum(sums[i])
    store_scale(rstd_ptr, reciprocal_rms(b_square_sum, K, eps), M, ROWS)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    hadamard: int,
    config: QuantizeConfig | StreamConfig | None,
    tensor_cores: bool,
    stream_sms: int,
    pdl: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x = unit_rows(x)
    M, K = x.shape
    op = "rms_norm" if residual is None else "add_rms_norm"
    streams = stream_sms > 0
    # Long rows are read by two kernels: one finds rstd, one normalizes, transforms and quantizes. In one, registers spill.
    after = stream_config(M, K, x.dtype, hadamard) if config is None and streams and K > STREAM_LONG_TILE else None
    codes, scale = empty_codes(M, K, x.device)
    summed = None
    if residual is not None:
        residual = unit_rows(residual)
        summed = torch.empty((M, K), dtype=x.dtype, device=x.device)
    if M == 0:
        return codes, scale, summed
    weight = weight.contiguous()
    how = {"num_sms": stream_sms, "pdl": pdl, "op": "rms_norm", "norm": (weight, eps, weight_offset)}
    if after:
        rstd = _launch_rms(x, residual, summed, eps, after, pdl)
        launch_stream(codes, scale, x if summed is None else summed, K, hadamard, after, rstd=rstd, **how)
        return codes, scale, summed
    config = config or row_config(M, K, x.dtype, hadamard, op, held=2, streams=streams)
    if isinstance(config, StreamConfig):
        launch_stream(codes, scale, x, K, hadamard, config, residual=residual, summed=summed, **how)
        return codes, scale, summed
    rms_norm_quantize_kernel[(triton.cdiv(M, config.rows),)](
        codes,
        scale,
        summed,
        x,
        residual,
        weight,
        M,
        K,
        row_stride(x),
        0 if residual is None else row_stride(residual),
        eps,
        weight_offset,
        HAS_RESIDUAL=residual is not None,
        **kernel_options(config, K, hadamard, tensor_cores, pdl),
    )
    return codes, scale, summed


def _launch_rms(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    summed: torch.Tensor | None,
    eps: float,
    config: StreamConfig,
    pdl: bool,
) -> torch.Tensor:
    """Launch `rms_kernel` on x [M, K], M from 1: writes `summed` where there is a residual, returns rstd [M] fp32.

    `config`: the tile in which the rows are streamed then. 64 to 96 elements a thread keep many bytes in flight; with 32 of
    them, `quantize_config`'s tile for 16384, Triton 3.6 spills 16 bytes on sm_90.
    """
    M, K = x.shape
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    rms_kernel[(triton.cdiv(M, config.rows),)](
        rstd,
        summed,
        x,
        residual,
        M,
        K,
        row_stride(x),
        0 if residual is None else row_stride(residual),
        eps,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        CHUNKS=config.chunks,
        PDL=pdl,
        num_warps=config.num_warps,
        **launch_options(pdl),
    )
    return rstd


def rms_norm_quantize_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    hadamard: int = 0,
    *,
    config: QuantizeConfig | StreamConfig | None = None,
    tensor_cores: bool = True,
    stream_sms: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of every row of `x`, quantized; see `rms_norm_quantize_reference` for the rounding.

    Args:
        x: [M, K], bf16, fp16 or fp32, K >= 1; rows of any stride. Rows of more than half of
            `MAX_BLOCK_BYTES` are read three times.
        weight: [K] floating.
        eps: added to the mean of the squares.
        weight_offset: added to the weight in fp32.
        hadamard, config, tensor_cores, stream_sms, pdl: as in `quantize_row`.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.
    """
    codes, scale, _ = _launch(x, None, weight, eps, weight_offset, hadamard, config, tensor_cores, stream_sms, pdl)
    return codes, scale


def add_rms_norm_quantize_row(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
    hadamard: int = 0,
    *,
    config: QuantizeConfig | StreamConfig | None = None,
    tensor_cores: bool = True,
    stream_sms: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm_quantize_row` of `x + residual`, which is returned, too.

    Args:
        x, weight, eps, weight_offset, hadamard, config, tensor_cores, stream_sms, pdl: as in `rms_norm_quantize_row`.
        residual: [M, K] of x's dtype; rows of any stride.

    Returns:
        codes [M, K] int8, scale [M, 1] fp32 and the sum [M, K] in x's dtype.
    """
    codes, scale, summed = _launch(x, residual, weight, eps, weight_offset, hadamard, config, tensor_cores, stream_sms, pdl)
    assert summed is not None
    return codes, scale, summed
