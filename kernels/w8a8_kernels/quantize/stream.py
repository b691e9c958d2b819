"""Triton quantizer of many transformed rows, alone or fused with RMSNorm or SiLU·mul: a few programs for each multiprocessor,
which go from row to row while the loads of the next ones are under way.

A program of `w8a8_kernels.quantize.row` loads a row, transforms it, and ends: memory waits while it computes. Its rows also
have to change layout before the product with the Hadamard matrix. Here a row is loaded as that product takes it, [blocks,
block size], through shared memory, and Triton's pipeliner loads ahead. Microseconds on an H200 in blocks of 64: 2,048 rows of
4,096 8.2 instead of 11.2, of 12,288 21.7 instead of 33.7; 8,192 rows of 12,288 75 instead of 120, where vLLM's quantizer
without a transform takes 78.
"""

import torch
import triton
import triton.language as tl

from w8a8_kernels.launch import launch_options
from w8a8_kernels.quantize.config import StreamConfig
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
    silu_mul,
    square_sum,
    transform,
)
from w8a8_kernels.quantize.tensors import row_stride

# The capability on which streaming was measured, and on which alone it is used.
STREAM_MEASURED = (9, 0)


@triton.jit(do_not_specialize=["M", "programs"])
def quantize_stream_kernel(
    codes_ptr,
    scale_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    rstd_ptr,
    M,
    K,
    x_row_stride,
    residual_row_stride,
    eps,
    weight_offset,
    programs,
    OP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    HADAMARD: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every `programs`-th ROWS rows of x to codes [M, K] int8 and scale [M] fp32, in CHUNKS tiles of BLOCKS Hadamard blocks.

    OP: "quantize", of x [M, K]; "rms_norm" and "silu_mul" (x [M, 2K]) first do that, as the kernels of those names, with the
    same arguments. With rstd [M] fp32, "rms_norm" sums up no squares, and there is no residual. PDL as in
    `quantize_row_kernel`.
    """
    b_signs = hadamard_signs(x_ptr.dtype.element_ty, HADAMARD, True)
    if PDL:
        chain_launches()
    TILE: tl.constexpr = BLOCKS * HADAMARD
    HAS_RESIDUAL: tl.constexpr = residual_ptr is not None
    HAS_RSTD: tl.constexpr = rstd_ptr is not None
    o_block = tl.arange(0, ROWS * BLOCKS)[:, None]
    o_row = o_block // BLOCKS  # [ROWS * BLOCKS, 1]
    o_column = o_block % BLOCKS * HADAMARD + tl.arange(0, HADAMARD)[None, :]  # [ROWS * BLOCKS, HADAMARD]
    for i_step in tl.range(tl.program_id(0) * ROWS, M, programs * ROWS, num_stages=STAGES):
        # What `rms_kernel` has read last is in L2: the last rows first.
        i_m = (M - 1) // ROWS * ROWS - i_step if HAS_RSTD else i_step
        rows = tl.full((), 0, tl.int64) + i_m + o_row  # in this order: i_m has no `to` in the interpreter
        o_m = tl.full((), 0, tl.int64) + i_m + tl.arange(0, ROWS)  # [ROWS]
        chunks, weights = (), ()
        for i in tl.static_range(CHUNKS):
            o_k = i * TILE + o_column
            mask = o_k < K if ROWS == 1 else (rows < M) & (o_k < K)
            b_x = load_sum(x_ptr, residual_ptr, rows, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL)
            if OP == "rms_norm":
                if not HAS_RSTD:
                    weights += (tl.load(weight_ptr + o_k, mask=o_k < K, other=0.0),)
                if HAS_RESIDUAL:
                    tl.store(sum_ptr + rows * K + o_k, b_x, mask=mask)
            elif OP == "silu_mul":
                b_x = silu_mul(b_x, tl.load(x_ptr + rows * x_row_stride + K + o_k, mask=mask, other=0.0))
            chunks += (b_x,)
        if OP == "rms_norm":
            if HAS_RSTD:
                b_rstd = tl.load(rstd_ptr + o_m, mask=o_m < M, other=0.0)
            else:
                b_square_sum = tl.zeros([ROWS], dtype=tl.float32)
                for i in tl.static_range(CHUNKS):
                    b_square_sum += square_sum(tl.reshape(chunks[i], (ROWS, TILE)))
                b_rstd = reciprocal_rms(b_square_sum, K, eps)
            if ROWS > 1:
                b_rstd = tl.reshape(tl.broadcast_to(b_rstd[:, None], (ROWS, BLOCKS)), (ROWS * BLOCKS,))
        b_amax = tl.zeros([ROWS], dtype=tl.int32)
        transformed = ()
        for i in tl.static_range(CHUNKS):
            b_x = chunks[i]
            if OP == "rms_norm":
                if HAS_RSTD:
                    o_k = i * TILE + o_column
                    # Loads in branches are not pipelined. Pipelined, the weight would be copied from L2 to shared memory with
                    # every row, past L1: as much traffic as x, and 152 KB instead of 88 for rows of 16384. A load in each:
                    # with a constant in one, Triton changes the layout there, and reads x with bank conflicts.
                    if (i + 1) * TILE <= K:
                        b_weight = tl.load(weight_ptr + o_k)
                    else:
                        b_weight = tl.load(weight_ptr + o_k, mask=o_k < K, other=0.0)
                else:
                    b_weight = weights[i]
                b_x = normalize(b_x, b_rstd, b_weight, weight_offset)
            b_y = tl.reshape(transform(b_x, ROWS * BLOCKS, HADAMARD, HADAMARD, b_signs), (ROWS, TILE))
            b_amax = tl.maximum(b_amax, amax_bits(b_y))
            transformed += (b_y,)
        b_scale, b_stored_scale, b_coded = row_scale(b_amax, HADAMARD)
        tl.store(scale_ptr + o_m, b_stored_scale, mask=o_m < M)
        b_factor, b_multiply, multiply_all = row_reciprocal(b_amax, b_scale, b_coded, False)
        for i in tl.static_range(CHUNKS):
            o_k = i * TILE + tl.arange(0, TILE)[None, :]
            b_codes = encode(transformed[i], b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD)
            mask = o_k < K if ROWS == 1 else (o_m < M)[:, None] & (o_k < K)
            tl.store(codes_ptr + o_m[:, None] * K + o_k, b_codes, mask=mask)


def launch_stream(
    codes: torch.Tensor,
    scale: torch.Tensor,
    x: torch.Tensor,
    K: int,
    hadamard: int,
    config: StreamConfig,
    *,
    num_sms: int,
    pdl: bool,
    op: str = "quantize",
    norm: tuple[torch.Tensor, float, float] | None = None,
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
) -> None:
    """Launch the kernel on x [M, K], or [M, 2K] for SiLU·mul, rows as `unit_rows` makes them, M from 1.

    Args:
        codes, scale: [M, K] int8 and [M, 1] fp32, written.
        num_sms: multiprocessors of the GPU.
        op: as OP of the kernel.
        norm: weight [K], eps and weight_offset of RMSNorm; `residual` [M, K] is added before, and the sum written to `summed`.
        rstd: [M] fp32 of `rms_kernel`, if it has run: then x is what it normalizes, and there is no residual.
    """
    M = x.shape[0]
    weight, eps, weight_offset = norm or (None, 0.0, 0.0)
    programs = min(triton.cdiv(M, config.rows), num_sms * config.per_sm)
    quantize_stream_kernel[(programs,)](
        codes,
        scale,
        summed,
        x,
        residual,
        weight,
        rstd,
        M,
        K,
        row_stride(x),
        0 if residual is None else row_stride(residual),
        eps,
        weight_offset,
        programs,
        OP=op,
        ROWS=config.rows,
        BLOCKS=config.block_k // hadamard,
        CHUNKS=config.chunks,
        HADAMARD=hadamard,
        STAGES=config.num_stages,
        PDL=pdl,
        num_warps=config.num_warps,
        # With the 134 that Triton 3.6 takes for rows of 16384, two programs of 256 threads do not fit a multiprocessor.
        maxnreg=128 if rstd is not None and config.num_warps == 8 else None,
        **launch_options(pdl),
    )
