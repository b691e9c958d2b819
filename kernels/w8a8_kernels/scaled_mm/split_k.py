"""Triton int8 GEMM on tensor cores, K split over programs; int32 partial sums, so that any split gives the same bits."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

# Shared memory that a tile's stages may take. The limit is 163 KB (8.0) or 227 KB (9.0, 10.0, 10.3), and 99 KB elsewhere; the
# rest of it is for what Triton adds, and on the large ones for the next kernel's programs to start beside this one's.
LARGE_SHARED = ((8, 0), (9, 0), (10, 0), (10, 3))
SHARED_BYTES, SMALL_SHARED_BYTES = 144 * 1024, 80 * 1024


@dataclass(frozen=True)
class Tile:
    """Tile of one program, and how many programs share one tile's K dimension.

    `swap` multiplies weight x activations.T: the weight's rows take the instruction's wide side, so that few rows of x waste
    less of it.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    swap: bool = False


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
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of x [M, K] @ weight [N, K].T over one of SPLIT_K ranges of K.

    SPLIT_K 1 writes out [M, N]; otherwise the int32 sums go to partial [SPLIT_K, M, N]. PDL: the launch may overlap the end of
    the kernel before it, so nothing that this one wrote is read before `gdc_wait`.
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
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    k_first = i_split * steps * BLOCK_K
    k_last = tl.minimum(k_first + steps * BLOCK_K, K)

    # Rows of x beyond the matrix are masked: read, they would cost L2 bandwidth (M 1 took 10 % longer than M 16 on an H200).
    # Rows of the weight beyond it wrap around: they are read in bounds and never stored, and cost no mask in the loop.
    p_x = x_ptr + o_m.to(tl.int64)[:, None] * x_row_stride + k_first + o_k[None, :]
    p_weight = weight_ptr + (o_n % N).to(tl.int64)[:, None] * weight_row_stride + k_first + o_k[None, :]
    m_x = (o_m < M)[:, None] & (o_k >= 0)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP:
        b_acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    else:
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for i_k in range(k_first, k_last, BLOCK_K):
        if EVEN_K:
            b_x = tl.load(p_x, mask=m_x, other=0)
            b_weight = tl.load(p_weight)
        else:
            m_k = (i_k + o_k < K)[None, :]
            b_x = tl.load(p_x, mask=m_x & m_k, other=0)
            b_weight = tl.load(p_weight, mask=m_k, other=0)
        if SWAP:
            b_acc = tl.dot(b_weight, tl.trans(b_x), b_acc, out_dtype=tl.int32)
        else:
            b_acc = tl.dot(b_x, tl.trans(b_weight), b_acc, out_dtype=tl.int32)
        p_x += BLOCK_K
        p_weight += BLOCK_K
    if SWAP:
        b_acc = tl.trans(b_acc)

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
    PDL: tl.constexpr,
):
    """Sum partial [SPLIT_K, M, N] int32 and write out [M, N] with scales and bias applied."""
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = (o_m < M)[:, None] & (o_n < N)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    p_partial = partial_ptr + o_out
    for _ in tl.static_range(SPLIT_K):
        b_acc += tl.load(p_partial, mask=m_out, other=0)
        p_partial += M.to(tl.int64) * N
    b_out = _epilogue(b_acc, x_scale_ptr, weight_scale_ptr, bias_ptr, o_m, o_n, M, N, HAS_BIAS)
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


def _with_stages(tile: Tile, shared_bytes: int) -> Tile:
    """`tile` with as many of its stages as fit: a stage holds one block of x and one of the weight, one byte a value."""
    stage = (tile.block_m + tile.block_n) * tile.block_k
    return replace(tile, num_stages=max(2, min(tile.num_stages, shared_bytes // stage)))


def default_tile(M: int, N: int, K: int, *, num_sms: int, capability: tuple[int, int]) -> Tile:
    """A tile by rule, for capability 8.0 and newer.

    The numbers are the best of 392 tiles on an H200 at seven shapes of weights and M 16, 64 and 128
    (benchmarks/results/split-k-tiles-nvidia-h200-2026-11-29.json); few rows stream the weight once, in blocks small enough
    that every multiprocessor has one, and K is split where there are too few.
    """
    shared_bytes = SHARED_BYTES if capability in LARGE_SHARED else SMALL_SHARED_BYTES
    steps = K // 256
    if K % 16 != 0:
        # Rows are loaded code by code, with an address each: larger blocks spill registers.
        return Tile(16 if M <= 16 else 32, 32, 64, num_warps=4, num_stages=2)
    if M <= 16:
        block_n = 128 if N >= 96 * num_sms else 64
        split_k = 4 if triton.cdiv(N, block_n) * 4 <= num_sms and steps >= 8 else 1
        return _with_stages(Tile(16, block_n, 256, num_warps=4, num_stages=6, split_k=split_k, swap=True), shared_bytes)
    if M <= 64:
        block_n = 32 if N <= 32 * num_sms else 64 if N < 256 * num_sms else 128
        split_k = 2 if triton.cdiv(N, block_n) * 2 <= 2 * num_sms and steps >= 32 else 1
        block_k = 128 if 96 * num_sms <= N < 256 * num_sms else 256
        return _with_stages(Tile(64, block_n, block_k, num_warps=4, num_stages=5, split_k=split_k), shared_bytes)
    if M <= 128:
        block_n = 128 if N >= 256 * num_sms else 64
        split_k = 2 if triton.cdiv(N, block_n) * 2 <= num_sms and steps >= 8 else 1
        return _with_stages(Tile(128, block_n, 128, num_warps=4, num_stages=5, split_k=split_k), shared_bytes)
    # A mask along K takes registers: with 128 columns 16 bytes were spilled on sm_120 (Triton 3.6).
    return _with_stages(Tile(128, 128 if K % 128 == 0 else 64, 128, num_warps=8, num_stages=4), shared_bytes)


def scaled_mm_split_k(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    num_sms: int,
    capability: tuple[int, int],
    tile: Tile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch the GEMM; shapes as in `w8a8_kernels.scaled_mm`.

    Args:
        num_sms: multiprocessors of the GPU.
        capability: its compute capability.
        tile: instead of `default_tile`.
        pdl: programmatic dependent launch (capability 9.0 and newer): start while the kernel before is still running.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    N = weight.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=x.device)
    if M == 0 or N == 0:
        return out
    if tile is None:
        tile = default_tile(M, N, K, num_sms=num_sms, capability=capability)
    split_k = tile.split_k
    # Triton knows the option only for NVIDIA targets that have it; the interpreter for none.
    launch_options = {"launch_pdl": True} if pdl else {}
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
        SWAP=tile.swap,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options,
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
            PDL=pdl,
            **launch_options,
        )
    return out
