"""Triton int8 GEMM on the `dp4a` instruction (four int8 products added to an int32), for GPUs whose tensor cores Triton cannot
use with int8: sm_70 and sm_75. Same contract as `scaled_mm_split_k`, and the same bits.

A word is 4 or 8 codes that lie side by side along K. Two forms: few rows of x stream the weight once, each thread of a warp
holding other words of the same rows; many rows keep a tile of sums in registers, each thread holding whole sums.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from w8a8_kernels.scaled_mm.split_k import reduce_split_k_kernel

# Rows of x that the streaming form takes: at 16, a thread needs 206 of 255 registers (sm_75, Triton 3.6.0 and 3.9.0).
MAX_STREAM_M = 16

MAX_SPLIT_K = 8

# K of one step of the streaming form: 16 bytes for each of 32 lanes.
STREAM_BLOCK_K = tl.constexpr(512)

# K of one step of the tiled form: one 16-byte load per row. Parts of a split begin at multiples of a cache line.
TILED_BLOCK_K = tl.constexpr(16)
TILED_PART_K = tl.constexpr(128)

# Triton's interpreter runs no inline assembly: there, an equal expression takes its place.
USE_ASM = tl.constexpr(not triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class Dp4aTile:
    """Tile of one program, how many programs share one tile's K dimension, and the form (`tiled` or streaming).

    The tiled form wants 2 * block_m and 2 * block_n of at least 32 * num_warps: below, Triton no longer shares the loads
    between threads (seen in the code for 3.6.0 and 3.9.0: 66 loads instead of 6 for 256 dp4a).
    """

    block_m: int
    block_n: int
    num_warps: int
    tiled: bool
    split_k: int = 1


@triton.jit
def _dp4a(b_x, b_weight, b_acc):
    """b_acc + the sum over the int8 products of each pair of words (int32: 4 products, int64: 8), broadcast."""
    BITS: tl.constexpr = b_x.dtype.primitive_bitwidth
    if not USE_ASM:
        for i in tl.static_range(BITS // 8):
            b_x_code = ((b_x << (BITS - 8 - 8 * i)) >> (BITS - 8)).to(tl.int32)
            b_weight_code = ((b_weight << (BITS - 8 - 8 * i)) >> (BITS - 8)).to(tl.int32)
            b_acc += b_x_code * b_weight_code
    elif BITS == 32:
        b_acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [b_x, b_weight, b_acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        b_acc = tl.inline_asm_elementwise(
            """{
            .reg .b32 x0, x1, w0, w1, sum;
            mov.b64 {x0, x1}, $1;
            mov.b64 {w0, w1}, $2;
            dp4a.s32.s32 sum, x0, w0, $3;
            dp4a.s32.s32 $0, x1, w1, sum;
            }""",
            "=r,l,l,r",
            [b_x, b_weight, b_acc],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return b_acc


@triton.jit
def _load_words(p_rows, o_word, K, WORD: tl.constexpr, PACKED: tl.constexpr):
    """Words o_word of rows of K codes, zeros beyond K. PACKED: p_rows points to whole words, K divides into them."""
    BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    if PACKED:
        b_words = tl.load(p_rows + o_word, mask=o_word < K // BYTES, other=0)
    else:
        o_k = o_word * BYTES
        b_words = tl.load(p_rows + o_k, mask=o_k < K, other=0).to(WORD) & 255
        for i in tl.static_range(1, BYTES):
            b_words |= (tl.load(p_rows + o_k + i, mask=o_k + i < K, other=0).to(WORD) & 255) << (8 * i)
    return b_words


@triton.jit
def _store(
    b_acc,
    out_ptr,
    partial_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    o_m,
    o_n,
    i_split,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    o_out = o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    m_out = (o_m < M)[:, None] & (o_n < N)[None, :]
    if SPLIT_K == 1:
        b_x_scale = tl.load(x_scale_ptr + o_m, mask=o_m < M, other=0.0)
        b_weight_scale = tl.load(weight_scale_ptr + o_n, mask=o_n < N, other=0.0)
        b_out = b_acc.to(tl.float32) * b_x_scale[:, None] * b_weight_scale[None, :]
        if HAS_BIAS:
            b_out += tl.load(bias_ptr + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + o_out, b_out.to(out_ptr.dtype.element_ty), mask=m_out)
    else:
        tl.store(partial_ptr + i_split.to(tl.int64) * M * N + o_out, b_acc, mask=m_out)


@triton.jit(do_not_specialize=["M", "N"])
def scaled_mm_dp4a_stream_kernel(
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
    PACKED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One [BLOCK_M, BLOCK_N] tile of x [M, K] @ weight [N, K].T over one of SPLIT_K ranges of K.

    PACKED: x and weight are int32 words, 4 codes each; otherwise int8. K and the row strides count codes. SPLIT_K 1 writes out
    [M, N]; otherwise the int32 sums go to partial [SPLIT_K, M, N].
    """
    BLOCK_W: tl.constexpr = STREAM_BLOCK_K // 4
    UNIT: tl.constexpr = 4 if PACKED else 1  # codes per element behind the pointers
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    n_tiles_m = tl.cdiv(M, BLOCK_M)
    o_m = i_tile % n_tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_n = i_tile // n_tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    o_w = tl.arange(0, BLOCK_W)[None, None, :]  # [1, 1, BLOCK_W]
    # Rows beyond the matrix wrap around: they are read in bounds and never stored.
    p_x = x_ptr + (o_m % M).to(tl.int64)[:, None, None] * (x_row_stride // UNIT)
    p_weight = weight_ptr + (o_n % N).to(tl.int64)[None, :, None] * (weight_row_stride // UNIT)

    steps = tl.cdiv(tl.cdiv(K, STREAM_BLOCK_K), SPLIT_K)
    w_first = i_split * steps * BLOCK_W
    w_last = tl.minimum(w_first + steps * BLOCK_W, tl.cdiv(K, 4))
    # Three dimensions from the load on: Triton then keeps the weight in the registers that it was loaded to (16 bytes each).
    # Sums are added up over BLOCK_W once, after the loop.
    b_acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_W), dtype=tl.int32)
    for i_w in range(w_first, w_last, BLOCK_W):
        b_weight = _load_words(p_weight, i_w + o_w, K, tl.int32, PACKED)  # [1, BLOCK_N, BLOCK_W]
        b_x = _load_words(p_x, i_w + o_w, K, tl.int32, PACKED)  # [BLOCK_M, 1, BLOCK_W]
        b_acc = _dp4a(b_x, b_weight, b_acc)
    b_acc = tl.sum(b_acc, axis=2)
    _store(
        b_acc,
        out_ptr,
        partial_ptr,
        x_scale_ptr,
        weight_scale_ptr,
        bias_ptr,
        o_m,
        o_n,
        i_split,
        M,
        N,
        HAS_BIAS,
        SPLIT_K,
    )


@triton.jit(do_not_specialize=["M", "N"])
def scaled_mm_dp4a_tiled_kernel(
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
    PACKED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As `scaled_mm_dp4a_stream_kernel`, in int64 words, 8 codes each, where PACKED."""
    BLOCK_W: tl.constexpr = TILED_BLOCK_K // 8
    UNIT: tl.constexpr = 8 if PACKED else 1
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    n_tiles_m = tl.cdiv(M, BLOCK_M)
    # Neighbouring programs share a weight tile.
    o_m = i_tile % n_tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    o_n = i_tile // n_tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    o_w = tl.arange(0, BLOCK_W)[None, :]  # [1, BLOCK_W]
    p_x = x_ptr + (o_m % M).to(tl.int64)[:, None] * (x_row_stride // UNIT)
    p_weight = weight_ptr + (o_n % N).to(tl.int64)[:, None] * (weight_row_stride // UNIT)

    part = tl.cdiv(tl.cdiv(K, TILED_PART_K), SPLIT_K) * (TILED_PART_K // 8)
    w_first = i_split * part
    w_last = tl.minimum(w_first + part, tl.cdiv(K, 8))
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    # These GPUs have no asynchronous copies, so Triton does not pipeline: the next step's words are loaded by hand before this
    # step's products. The last load of a part reads the next part's first words, or nothing beyond K.
    b_x = _load_words(p_x, w_first + o_w, K, tl.int64, PACKED)  # [BLOCK_M, BLOCK_W]
    b_weight = _load_words(p_weight, w_first + o_w, K, tl.int64, PACKED)  # [BLOCK_N, BLOCK_W]
    for i_w in range(w_first, w_last, BLOCK_W):
        b_x_first, b_x_second = tl.split(b_x)
        b_weight_first, b_weight_second = tl.split(b_weight)
        b_x = _load_words(p_x, i_w + BLOCK_W + o_w, K, tl.int64, PACKED)
        b_weight = _load_words(p_weight, i_w + BLOCK_W + o_w, K, tl.int64, PACKED)
        b_acc = _dp4a(b_x_first[:, None], b_weight_first[None, :], b_acc)
        b_acc = _dp4a(b_x_second[:, None], b_weight_second[None, :], b_acc)
    _store(
        b_acc,
        out_ptr,
        partial_ptr,
        x_scale_ptr,
        weight_scale_ptr,
        bias_ptr,
        o_m,
        o_n,
        i_split,
        M,
        N,
        HAS_BIAS,
        SPLIT_K,
    )


def default_tile(M: int, N: int, K: int, num_sms: int) -> Dp4aTile:
    """A tile chosen by reading the machine code for sm_75 (3.6.0 and 3.9.0; no such GPU was at hand to measure on).

    Up to 4 rows, one warp holds 8 weight rows: 8 loads of 16 bytes in flight per thread, no shared memory, no barriers.
    8 and 16 rows: four warps share x through shared memory. More: 8 dp4a per 16-byte load from shared memory, which keeps both
    busy; larger tiles spill. K is split until every multiprocessor has 8 warps, and a part keeps at least 1024 columns.
    """
    if M <= MAX_STREAM_M:
        block_m = triton.next_power_of_2(M)
        tile = Dp4aTile(block_m, 8, num_warps=1 if block_m <= 4 else 4, tiled=False)
    else:
        tile = Dp4aTile(32, 128, num_warps=2, tiled=True)
    if K % 8 and tile.block_m >= 16:
        # Loaded code by code, with more addresses: the whole tile spills 52 to 408 bytes on sm_70 (Triton 3.9.0).
        tile = replace(tile, block_n=tile.block_n // 2)
    warps = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n) * tile.num_warps
    split_k = 1
    # A power of two bounds the number of compiled variants.
    while split_k < MAX_SPLIT_K and warps * split_k < 8 * num_sms and 2048 * split_k <= K:
        split_k *= 2
    return replace(tile, split_k=split_k)


def _as_words(codes: torch.Tensor, word: torch.dtype) -> torch.Tensor | None:
    """Rows [R, K] int8 as rows of words, without a copy; None where K or a row's address is not a multiple of a word."""
    size = word.itemsize
    if codes.shape[1] % size or codes.stride(0) % size or codes.data_ptr() % size or codes.storage_offset() % size:
        return None
    return codes.view(word)


def scaled_mm_dp4a(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    num_sms: int,
    tile: Dp4aTile | None = None,
) -> torch.Tensor:
    """Launch the GEMM; shapes as in `w8a8_kernels.scaled_mm`.

    Args:
        num_sms: multiprocessors of the GPU, for `default_tile`.
        tile: instead of `default_tile`.
    """
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
    x_row_stride, weight_row_stride = x.stride(0), weight.stride(0)
    word = torch.int64 if tile.tiled else torch.int32
    x_words, weight_words = _as_words(x, word), _as_words(weight, word)
    packed = x_words is not None and weight_words is not None
    if packed:
        x, weight = x_words, weight_words
    kernel = scaled_mm_dp4a_tiled_kernel if tile.tiled else scaled_mm_dp4a_stream_kernel
    kernel[(triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n), split_k)](
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
        x_row_stride,
        weight_row_stride,
        HAS_BIAS=bias is not None,
        PACKED=packed,
        SPLIT_K=split_k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=1,
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
            PDL=False,
        )
    return out
