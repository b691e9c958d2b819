"""Triton quantizer, one program per row: a first pass takes the absolute maximum, a second writes the codes."""

import torch
import triton
import triton.language as tl

# Rows up to this length stay in registers between the two passes; longer ones are read twice (the second time from L2).
MAX_BLOCK_K = 8192

# Adding and subtracting 1.5 * 2^23 rounds an fp32 of magnitude below 2^22 to the nearest integer, ties to even, on every
# target and in the interpreter, where libdevice.rint does not exist.
ROUND_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _encode(b_x, scale, finite):
    b_q = tl.div_rn(b_x, scale)
    b_q = tl.minimum(tl.maximum(b_q, -127.0), 127.0)
    b_q = (b_q + ROUND_MAGIC) - ROUND_MAGIC
    return tl.where(finite, b_q, 0.0).to(tl.int8)


@triton.jit
def _amax(b_x):
    # Hardware maxima drop NaN: a value that is not below inf counts as inf.
    b_abs = tl.abs(b_x)
    return tl.max(tl.where(b_abs < float("inf"), b_abs, float("inf")), axis=0)


@triton.jit(do_not_specialize=["x_row_stride"])
def quantize_row_kernel(codes_ptr, scale_ptr, x_ptr, K, x_row_stride, BLOCK_K: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """One row of x [M, K] to codes [M, K] int8 and scale [M] fp32; see `quantize_reference`."""
    i_m = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK_K)
    p_x = x_ptr + i_m * x_row_stride
    p_codes = codes_ptr + i_m * K

    if ONE_BLOCK:
        b_x = tl.load(p_x + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        amax = _amax(b_x)
    else:
        amax = 0.0
        for i_k in range(0, K, BLOCK_K):
            b_x = tl.load(p_x + i_k + o_k, mask=i_k + o_k < K, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, _amax(b_x))

    finite = amax < float("inf")
    scale = tl.div_rn(amax, 127.0)
    scale = tl.where(scale == 0.0, 1.0, scale)

    if ONE_BLOCK:
        tl.store(p_codes + o_k, _encode(b_x, scale, finite), mask=o_k < K)
    else:
        for i_k in range(0, K, BLOCK_K):
            b_x = tl.load(p_x + i_k + o_k, mask=i_k + o_k < K, other=0.0).to(tl.float32)
            tl.store(p_codes + i_k + o_k, _encode(b_x, scale, finite), mask=i_k + o_k < K)
    tl.store(scale_ptr + i_m, tl.where(finite, scale, float("nan")))


def quantize_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `quantize_row_kernel` on x [M, K] (rows of any stride); same result as `quantize_reference`."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    codes = torch.empty((M, K), dtype=torch.int8, device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    if M > 0:
        block_k = min(max(triton.next_power_of_2(K), 32), MAX_BLOCK_K)
        quantize_row_kernel[(M,)](
            codes,
            scale,
            x,
            K,
            x.stride(0),
            BLOCK_K=block_k,
            ONE_BLOCK=block_k >= K,
            num_warps=8 if block_k >= 4096 else 4,
        )
    return codes, scale
