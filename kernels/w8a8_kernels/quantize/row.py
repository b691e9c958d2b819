"""Triton quantizer: a program reads one or several rows once, finds their scales and writes their codes.

Rows that do not fit registers (`MAX_BLOCK_BYTES`) are read a second time, from L2.
"""

import torch
import triton
import triton.language as tl

from w8a8_kernels.launch import launch_options
from w8a8_kernels.quantize.config import QuantizeConfig, StreamConfig, quantize_config, row_config
from w8a8_kernels.quantize.device import (
    amax_bits,
    chain_launches,
    encode,
    hadamard_signs,
    row_reciprocal,
    row_scale,
    store_scale,
    tile_offsets,
    transform,
)
from w8a8_kernels.quantize.stream import launch_stream
from w8a8_kernels.quantize.tensors import empty_codes, row_stride, unit_rows


@triton.jit(do_not_specialize=["M"])
def quantize_row_kernel(
    codes_ptr,
    scale_ptr,
    amax_ptr,
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
    AMAX: tl.constexpr,
):
    """ROWS rows of x [M, K] to codes [M, K] int8 and scale [M] fp32; see `quantize_reference`.

    A row is held in CHUNKS blocks of BLOCK_K, or, with 0, read twice in a loop.
    PDL: programmatic dependent launch, see `chain_launches`.
    AMAX: "own": the row's greatest magnitude is found here. "given": its fp32 bits are read from amax [M] int32. "only": they
    are found and written there, and nothing else is written.
    """
    b_signs = hadamard_signs(x_ptr.dtype.element_ty, HADAMARD, TENSOR_CORES)
    if PDL:
        chain_launches()
    DIVIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32 and HADAMARD == 0
    b_amax = tl.zeros([ROWS], dtype=tl.int32)
    if CHUNKS > 0:
        # All loads before the first use.
        chunks = ()
        for i in tl.static_range(CHUNKS):
            o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
            chunks += (tl.load(x_ptr + o_m * x_row_stride + o_k, mask=mask, other=0.0),)
        transformed = ()
        for i in tl.static_range(CHUNKS):
            b_y = transform(chunks[i], ROWS, BLOCK_K, HADAMARD, b_signs)
            if AMAX != "given":
                b_amax = tl.maximum(b_amax, amax_bits(b_y))
            transformed += (b_y,)
    elif AMAX != "given":
        for i_k in range(0, K, BLOCK_K):
            o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
            b_x = tl.load(x_ptr + o_m * x_row_stride + o_k, mask=mask, other=0.0)
            b_amax = tl.maximum(b_amax, amax_bits(transform(b_x, ROWS, BLOCK_K, HADAMARD, b_signs)))

    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if AMAX == "only":
        tl.store(amax_ptr + o_row, b_amax, mask=o_row < M)
    else:
        if AMAX == "given":
            b_amax = tl.load(amax_ptr + o_row, mask=o_row < M, other=0)
        b_scale, b_stored_scale, b_coded = row_scale(b_amax, HADAMARD)
        store_scale(scale_ptr, b_stored_scale, M, ROWS)
        b_factor, b_multiply, multiply_all = row_reciprocal(b_amax, b_scale, b_coded, DIVIDE)
        if CHUNKS > 0:
            for i in tl.static_range(CHUNKS):
                o_m, o_k, mask = tile_offsets(M, K, i * BLOCK_K, ROWS, BLOCK_K)
                b_codes = encode(transformed[i], b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD)
                tl.store(codes_ptr + o_m * K + o_k, b_codes, mask=mask)
        else:
            for i_k in range(0, K, BLOCK_K):
                o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
                b_x = tl.load(x_ptr + o_m * x_row_stride + o_k, mask=mask, other=0.0)
                b_y = transform(b_x, ROWS, BLOCK_K, HADAMARD, b_signs)
                b_codes = encode(b_y, b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD)
                tl.store(codes_ptr + o_m * K + o_k, b_codes, mask=mask)


def kernel_options(config: QuantizeConfig, K: int, hadamard: int, tensor_cores: bool, pdl: bool) -> dict:
    """Keyword arguments that the row-wise kernels share."""
    chunks = config.chunks if config.block_k * config.chunks >= K else 0
    return {
        "ROWS": config.rows,
        "BLOCK_K": config.block_k,
        "CHUNKS": chunks,
        "HADAMARD": hadamard,
        # In a loop, Triton 3.6 cannot compile the product for sm_90.
        "TENSOR_CORES": tensor_cores and chunks > 0,
        "PDL": pdl,
        "num_warps": config.num_warps,
        # Long rows are read in a loop: pipelined, its loads would take shared memory that smaller GPUs do not have.
        "num_stages": 1,
        **launch_options(pdl),
    }


def quantize_row(
    x: torch.Tensor,
    hadamard: int = 0,
    amax: torch.Tensor | None = None,
    *,
    config: QuantizeConfig | StreamConfig | None = None,
    tensor_cores: bool = True,
    stream_sms: int = 0,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every row of `x` in one pass; without a transform the same bits as `quantize_reference`.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows of any stride (other columns than neighbouring ones are copied first).
        hadamard: as in `quantize_reference`.
        amax: [M, 1] fp32, as in `quantize_reference`, of parts in x's dtype.
        config: tile; default: `row_config`. Streamed rows find their own maximum.
        tensor_cores: whether the transform may use those, see `transforms_on_tensor_cores`.
        stream_sms: multiprocessors of a GPU on which many rows are streamed (see `w8a8_kernels.quantize.stream`), else 0.
        pdl: programmatic dependent launch (capability 9.0 and newer): start while the kernel before is still running.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.
    """
    M, K = x.shape
    codes, scale = empty_codes(M, K, x.device)
    # Triton 3.6 cannot compile a streamed row whose maximum is given.
    config = config or row_config(M, K, x.dtype, hadamard, "quantize", streams=stream_sms > 0 and amax is None)
    if isinstance(config, StreamConfig):
        if amax is not None:
            raise ValueError(f"quantize_row: got amax and {config}, expected a QuantizeConfig")
        if M > 0:
            launch_stream(codes, scale, unit_rows(x), K, hadamard, config, num_sms=stream_sms, pdl=pdl)
        return codes, scale
    bits = None if amax is None else amax.contiguous().view(torch.int32)
    _launch(codes, scale, bits, x, hadamard, config, tensor_cores, pdl, AMAX="own" if amax is None else "given")
    return codes, scale


def quantize_amax_row(
    x: torch.Tensor,
    hadamard: int = 0,
    *,
    config: QuantizeConfig | None = None,
    tensor_cores: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """[M, 1] fp32: the greatest magnitudes that `quantize_row` finds with these arguments, see `quantize_amax_reference`."""
    amax = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    # With it, ptxas spills 104 bytes for one row in blocks of 128 on sm_90 and newer (Triton 3.9).
    pdl = pdl and hadamard != 128
    config = config or quantize_config(*x.shape, x.dtype, hadamard=hadamard)
    _launch(None, None, amax.view(torch.int32), x, hadamard, config, tensor_cores, pdl, AMAX="only")
    return amax


def _launch(
    codes: torch.Tensor | None,
    scale: torch.Tensor | None,
    amax_bits: torch.Tensor | None,
    x: torch.Tensor,
    hadamard: int,
    config: QuantizeConfig,
    tensor_cores: bool,
    pdl: bool,
    AMAX: str,
) -> None:
    x = unit_rows(x)
    M, K = x.shape
    if M > 0:
        quantize_row_kernel[(triton.cdiv(M, config.rows),)](
            codes,
            scale,
            amax_bits,
            x,
            M,
            K,
            row_stride(x),
            **kernel_options(config, K, hadamard, tensor_cores, pdl),
            AMAX=AMAX,
        )
