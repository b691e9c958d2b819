"""Triton int8 GEMM on tensor cores, K split over programs; int32 partial sums, so that any split gives the same bits."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from w8a8_kernels.launch import launch_options
from w8a8_kernels.tiles import Tile, default_tile

REDUCE_BLOCK_M, REDUCE_BLOCK_N = 16, 64

# Bytes: of addresses and rows, for the tensor memory accelerator and for prefetches.
TMA_ALIGNMENT = 16


@triton.jit
def prefetch_rows(p_rows, BYTES: tl.constexpr):
    """Ask L2 for BYTES, a multiple of 16, from each pointer on; no wait, and nothing to wait for."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [p_rows.to(tl.int64), BYTES],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# Fetching a descriptor adds to the first load's latency, unless it is asked for while the kernel before still runs (H200,
# quantizer and product: N 1024, K 3072, M 512 8.13 us, so 8.00; N 6144, K 4096, M 64 10.4, so 10.2). Triton has no name for
# it, so they are named as its parameters are in PTX by 3.6 to 3.9: five for each descriptor, the first of them itself.
DESCRIPTORS_NAMED = tl.constexpr((3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9))
PREFETCH_DESCRIPTORS = tl.constexpr(
    "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
    "@first prefetch.param.tensormap [scaled_mm_split_k_kernel_param_0]; "
    "@first prefetch.param.tensormap [scaled_mm_split_k_kernel_param_5]; mov.u32 $0, 0; }"
)


@triton.jit(do_not_specialize=["M"])
def scaled_mm_split_k_kernel(
    x_boxes,
    weight_boxes,
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
    TMA: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRELOAD: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of x [M, K] @ weight [N, K].T over one of SPLIT_K ranges of K.

    With TMA, x and weight are tensor descriptors with boxes of [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K], else pointers.
    SPLIT_K 1 writes out [M, N]; otherwise the int32 sums go to partial [SPLIT_K, M, N]. PDL: the launch may overlap the end of
    the kernel before it, so nothing that this one wrote is read before `gdc_wait`, and nothing is written. The weight is no
    kernel's result: its first PREFETCH bytes a row may be asked for earlier, its first PRELOAD blocks be in registers by then.
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

    if not TMA or PRELOAD > 0 or PREFETCH > 0:
        # Rows of x beyond the matrix are masked: read, they would cost L2 bandwidth (M 1 took 10 % longer than M 16 on an
        # H200). Rows of the weight beyond it wrap around: read in bounds and never stored, they cost no mask in the loop.
        p_x = x_ptr + o_m.to(tl.int64)[:, None] * x_row_stride + k_first + o_k[None, :]
        p_rows = weight_ptr + (o_n % N).to(tl.int64) * weight_row_stride + k_first
        p_weight = p_rows[:, None] + o_k[None, :]
        m_x = (o_m < M)[:, None] & (o_k >= 0)[None, :]
    if SPLIT_K == 1:
        # No kernel's results, so before the wait; and before the loop, behind which a load from DRAM would add its latency.
        b_weight_scale = tl.load(weight_scale_ptr + o_n, mask=o_n < N, other=0.0)
        if HAS_BIAS:
            b_bias = tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0)
    if TMA and PDL and DESCRIPTORS_NAMED:
        tl.inline_asm_elementwise(PREFETCH_DESCRIPTORS, "=r,r", [i_tile], dtype=tl.int32, is_pure=False, pack=1)
    preloaded = ()
    for i in tl.static_range(PRELOAD):
        preloaded += (tl.load(p_weight + i * BLOCK_K),)
    if PDL:
        # The next kernels may start at once, unless this one asks for its weight early: then theirs would, too, and take the
        # bandwidth (N 6144, K 1024, M 64 on an H200: 5.3 us with the bytes asked for, 5.5 with early starts, 5.6 with both).
        if PREFETCH == 0 and PRELOAD == 0:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        else:
            if PREFETCH > 0 and k_first + PREFETCH <= K:
                prefetch_rows(p_rows, PREFETCH)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    if SPLIT_K == 1:
        b_x_scale = tl.load(x_scale_ptr + o_m, mask=o_m < M, other=0.0)
    if SWAP:
        b_acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    else:
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    if PRELOAD > 0:
        x_blocks = ()
        for i in tl.static_range(PRELOAD):
            x_blocks += (tl.load(p_x + i * BLOCK_K, mask=m_x, other=0),)
        for i in tl.static_range(PRELOAD):
            if SWAP:
                b_acc = tl.dot(preloaded[i], tl.trans(x_blocks[i]), b_acc, out_dtype=tl.int32)
            else:
                b_acc = tl.dot(x_blocks[i], tl.trans(preloaded[i]), b_acc, out_dtype=tl.int32)
        p_x += PRELOAD * BLOCK_K
        p_weight += PRELOAD * BLOCK_K
    for i_k in range(k_first + PRELOAD * BLOCK_K, k_last, BLOCK_K):
        if TMA:
            # What is beyond the matrix is zero.
            b_x = x_boxes.load([i_m * BLOCK_M, i_k])
            b_weight = weight_boxes.load([i_n * BLOCK_N, i_k])
        elif EVEN_K:
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
        if not TMA:
            p_x += BLOCK_K
            p_weight += BLOCK_K

    if SWAP:
        b_acc = tl.trans(b_acc)
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = (o_m < M)[:, None] & (o_n < N)[None, :]
    if SPLIT_K == 1:
        b_out = b_acc.to(tl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
        if HAS_BIAS:
            b_out += b_bias.to(tl.float32)[None, :]
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
    b_weight_scale = tl.load(weight_scale_ptr + o_n, mask=o_n < N, other=0.0)
    if HAS_BIAS:
        b_bias = tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_x_scale = tl.load(x_scale_ptr + o_m, mask=o_m < M, other=0.0)
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    p_partial = partial_ptr + o_out
    for _ in tl.static_range(SPLIT_K):
        b_acc += tl.load(p_partial, mask=m_out, other=0)
        p_partial += M.to(tl.int64) * N
    b_out = b_acc.to(tl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
    if HAS_BIAS:
        b_out += b_bias.to(tl.float32)[None, :]
    tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)


def _product_options(tile: Tile, K: int, has_bias: bool, pdl: bool, aligned: bool) -> dict:
    return {
        "HAS_BIAS": has_bias,
        "EVEN_K": K % tile.block_k == 0,
        "SPLIT_K": tile.split_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SWAP": tile.swap,
        "TMA": tile.tma and aligned,
        "PDL": pdl,
        "PREFETCH": tile.prefetch if pdl and aligned else 0,
        # Every part of K must have as many whole blocks.
        "PRELOAD": 0 if K % (tile.block_k * tile.split_k) else min(tile.preload, K // (tile.block_k * tile.split_k)),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **launch_options(pdl),
    }


def _reduce_options(split_k: int, has_bias: bool, pdl: bool) -> dict:
    return {
        "HAS_BIAS": has_bias,
        "SPLIT_K": split_k,
        "BLOCK_M": REDUCE_BLOCK_M,
        "BLOCK_N": REDUCE_BLOCK_N,
        "PDL": pdl,
        **launch_options(pdl),
    }


def _boxes(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> tuple[TensorDescriptor, TensorDescriptor]:
    return (
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
    )


def compile_split_k(N: int, K: int, tile: Tile, out_dtype: torch.dtype, *, pdl: bool = False) -> None:
    """Compile into Triton's cache what `scaled_mm_split_k` launches with this tile, contiguous inputs and no bias."""
    # Positional only: Triton takes a dtype for a tensor there and nowhere else.
    out, partial = out_dtype, torch.int32 if tile.split_k > 1 else out_dtype
    x_boxes = weight_boxes = None
    if tile.tma and K % TMA_ALIGNMENT == 0:
        shapes = (torch.empty((rows, K), dtype=torch.int8, device="meta") for rows in (1, N))
        x_boxes, weight_boxes = _boxes(*shapes, tile)
    scaled_mm_split_k_kernel.warmup(
        x_boxes,
        weight_boxes,
        out,
        partial,
        torch.int8,
        torch.float32,
        torch.int8,
        torch.float32,
        None,
        1,
        N,
        K,
        K,
        K,
        grid=(1,),
        **_product_options(tile, K, False, pdl, K % TMA_ALIGNMENT == 0),
    )
    if tile.split_k > 1:
        reduce_split_k_kernel.warmup(
            out, partial, torch.float32, torch.float32, None, 1, N, grid=(1,), **_reduce_options(tile.split_k, False, pdl)
        )


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
    partial = torch.empty((split_k, M, N), dtype=torch.int32, device=x.device) if split_k > 1 else out
    tiles = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    aligned = all(t.data_ptr() % TMA_ALIGNMENT == 0 and t.stride(0) % TMA_ALIGNMENT == 0 for t in (x, weight))
    x_boxes, weight_boxes = _boxes(x, weight, tile) if tile.tma and aligned else (None, None)
    scaled_mm_split_k_kernel[(tiles, split_k)](
        x_boxes,
        weight_boxes,
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
        **_product_options(tile, K, bias is not None, pdl, aligned),
    )
    if split_k > 1:
        reduce_split_k_kernel[(triton.cdiv(M, REDUCE_BLOCK_M), triton.cdiv(N, REDUCE_BLOCK_N))](
            out,
            partial,
            x_scale,
            weight_scale,
            bias,
            M,
            N,
            **_reduce_options(split_k, bias is not None, pdl),
        )
    return out
