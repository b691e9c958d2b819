"""Triton int8 GEMM on tensor cores, K split over programs; int32 partial sums, so that any split gives the same bits."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """Tile of one program and how many programs share one tile's K dimension."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


@triton.jit
def _epilogue(b_acc, x_scale_ptr, weight_scale_ptr, bias_ptr, o_m, o_n, M, N, HAS_BIAS: tl.constexpr):
    b_x_scale = tl.load(x_scale_ptr + o_m, mask=o_m < M, other=0.0)
    b_weight_scale = tl.load(weight_scale_ptr + o_n, mask=o_n < N, other=0.0)
    b_out = b_acc.to(tl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
    if HAS_BIAS:
        b_out += tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    return b_out


@triton.jit(do_not_specialize=["M"])
def scaled_mm_split_k_kernel(
    out_ptr,
    partial_ptr,
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    x_row_stride,
    weight_row_stride,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of x [M, K] @ weight [N, K].T over one of SPLIT_K ranges of K.

    SPLIT_K 1 writes out [M, N]; otherwise the int32 sums go to partial [SPLIT_K, M, N].
    """
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    n_tiles_m = tl.cdiv(M, BLOCK_M)
    # Neighbouring programs share a weight tile: for few rows of x each weight byte is read from DRAM once.
    i_m = i_tile % n_tiles_m
    i_n = i_tile // n_tiles_m

    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    o_k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    # Rows beyond the matrix wrap around: they are read in bounds and never stored, and the loop needs no mask over M and N.
    p_x = x_ptr + (o_m % M).to(tl.int64)[:, None] * x_row_stride + o_k[None, :]
    p_weight = weight_ptr + (o_n % N).to(tl.int64)[None, :] * weight_row_stride + o_k[:, None]

    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    k_first = i_split * steps * BLOCK_K
    k_last = tl.minimum(k_first + steps * BLOCK_K, K)
    p_x += k_first
    p_weight += k_first
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for i_k in range(k_first, k_last, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x)
            b_weight = tl.load(p_weight)
        else:
            b_x = tl.load(p_x, mask=(i_k + o_k < K)[None, :], other=0)
            b_weight = tl.load(p_weight, mask=(i_k + o_k < K)[:, None], other=0)
        b_acc = tl.dot(b_x, b_weight, b_acc, out_dtype=tl.int32)
        p_x += BLOCK_K
        p_weight += BLOCK_K

    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = (o_m < M)[:, None] & (o_n < N)[None, :]
    if SPLIT_K == 1:
        b_out = _epilogue(b_acc, x_scale_ptr, weight_scale_ptr, bias_ptr, o_m, o_n, M, N, HAS_BIAS)
        tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    else:
        p_partial = partial_ptr + i_split.to(tl.int64) * M * N
        tl.store(p_partial + o_out, b_acc, mask=m_out)


@triton.jit(do_not_specialize=["M"])
def reduce_split_k_kernel(
    out_ptr,
    partial_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum partial [SPLIT_K, M, N] int32 and write out [M, N] with scales and bias applied."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = (o_m < M)[:, None] & (o_n < N)[None, :]
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    p_partial = partial_ptr + o_out
    for _ in tl.static_range(SPLIT_K):
        b_acc += tl.load(p_partial, mask=m_out, other=0)
        p_partial += M.to(tl.int64) * N
    b_out = _epilogue(b_acc, x_scale_ptr, weight_scale_ptr, bias_ptr, o_m, o_n, M, N, HAS_BIAS)
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


def default_tile(M: int, N: int, K: int, num_sms: int) -> Tile:
    """A tile that is right everywhere and reasonable on tensor cores from sm_80 on; shared memory stays under 99 KB.

    Few rows: the weight is streamed once, and K is split until every multiprocessor has work.
    """
    if M <= 64:
        block_m = max(16, triton.next_power_of_2(M))
        block_n, block_k = 64, 256 if K % 256 == 0 else 128
        tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
        steps = triton.cdiv(K, block_k)
        split_k = 1
        # Each part keeps at least 4 steps; a power of two bounds the number of compiled variants.
        while tiles * split_k < num_sms and steps >= 8 * split_k and split_k < 8:
            split_k *= 2
        return Tile(block_m, block_n, block_k, num_warps=4, num_stages=3, split_k=split_k)
    return Tile(128, 128, 128, num_warps=8, num_stages=3)


def scaled_mm_split_k(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    num_sms: int,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Launch the GEMM; shapes as in `w8a8_kernels.scaled_mm`. `tile` overrides `default_tile`."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    N = weight.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=x.device)
    if M == 0 or N == 0:
        return out
    if tile is None:
        tile = default_tile(M, N, K, num_sms)
    split_k = tile.split_k
    partial = torch.empty((split_k, M, N), dtype=torch.int32, device=x.device) if split_k > 1 else out
    tiles = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    scaled_mm_split_k_kernel[(tiles, split_k)](
        out,
        partial,
        x,
        x_scale,
        weight,
        weight_scale,
        bias,
        M,
        N,
        K,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        EVEN_K=K % tile.block_k == 0,
        SPLIT_K=split_k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split_k > 1:
        block_m, block_n = 16, 64
        reduce_split_k_kernel[(triton.cdiv(M, block_m), triton.cdiv(N, block_n))](
            out,
            partial,
            x_scale,
            weight_scale,
            bias,
            M,
            N,
            HAS_BIAS=bias is not None,
            SPLIT_K=split_k,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
        )
    return out
