"""Triton quantizer: a program reads one or several rows once, finds their scales and writes their codes.

Rows that do not fit registers (`MAX_BLOCK_BYTES`) are read a second time, from L2. The fused quantizers share the device
functions here with the plain one, so that equal rows give equal codes.
"""

import torch
import triton
import triton.language as tl

from w8a8_kernels.launch import launch_options
from w8a8_kernels.quantize.config import QuantizeConfig, quantize_config
from w8a8_kernels.select import MIN_TRITON_CAPABILITY

# Added to an fp32 of magnitude below 2^22, 1.5 * 2^23 rounds it to the nearest integer, ties to even, on every target and in
# the interpreter, where libdevice.rint does not exist; the integer is then the low bits of the sum.
ROUND_MAGIC = tl.constexpr(12582912.0)

# Bits of fp32: infinity; the whole significand; what a significand of more than 4 bits sets at least one of.
INF_BITS = tl.constexpr(0x7F800000)
SIGNIFICAND_BITS = tl.constexpr(0x7FFFFF)
LONG_SIGNIFICAND_BITS = tl.constexpr(0xFFFFF)

# Below this scale (2^-100) reciprocals and their products could leave the normal range of fp32.
MIN_RECIPROCAL_SCALE = tl.constexpr(7.888609052210118e-31)

# 1 +- 2^-20.
NUDGE_UP = tl.constexpr(1.00000095367431640625)
NUDGE_DOWN = tl.constexpr(0.99999904632568359375)

# tcgen05, the tensor cores of capability 10 and 11: Triton 3.6 fails on the product of `transform` there, 3.9 does not.
TCGEN05_MAJORS = (10, 11)
HAS_TCGEN05_TRANSFORM = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

# Triton's interpreter cuts fp32 to bf16 (3.6.0 and 3.9.0), where a GPU rounds.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(b_x, dtype: tl.constexpr):
    """b_x, fp32, rounded to `dtype`, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & -0x10000
        b_x = tl.where(b_x == b_x, b_bits.to(tl.float32, bitcast=True), b_x)
    return b_x.to(dtype)


@triton.jit
def chain_launches():
    """Programmatic dependent launch: let the kernel after this one start now, then wait for the one before to end.

    What starts early is the launch itself. Waiting comes before every access to memory, writes too: the allocator may hand out
    memory that an earlier kernel still reads.
    """
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def tile_offsets(M, K, k_start, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows [ROWS, 1] int64, columns [1, BLOCK_K] and mask [ROWS, BLOCK_K] of this program's tile that begins at `k_start`."""
    o_m = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    o_k = k_start + tl.arange(0, BLOCK_K)[None, :]
    return o_m, o_k, (o_m < M) & (o_k < K)


def transforms_on_tensor_cores(capability: tuple[int, int]) -> bool:
    """Whether the Hadamard transform of 16-bit floats is a matrix product on a GPU of this capability."""
    return capability >= MIN_TRITON_CAPABILITY and (HAS_TCGEN05_TRANSFORM or capability[0] not in TCGEN05_MAJORS)


@triton.jit
def hadamard_signs(dtype: tl.constexpr, H: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """Sylvester's Hadamard matrix [H, H], not normalized, for a product on tensor cores; None where `transform` does without.

    An entry is -1 where row and column number share an odd count of bits.
    """
    if H == 0 or not TENSOR_CORES or dtype == tl.float32 or INTERPRETED:
        b_signs = None
    else:
        b_bits = tl.arange(0, H)[:, None] & tl.arange(0, H)[None, :]
        b_bits ^= b_bits >> 4
        b_bits ^= b_bits >> 2
        b_bits ^= b_bits >> 1
        b_signs = (1 - 2 * (b_bits & 1)).to(dtype)
    return b_signs


@triton.jit
def butterflies(b_x, ELEMENTS: tl.constexpr, H: tl.constexpr):
    """Fast Walsh-Hadamard transform of b_x [ELEMENTS], H neighbours at a time, not normalized."""
    for stage in tl.static_range(0, 7):
        if 2**stage < H:
            b_x = tl.permute(tl.reshape(b_x, (ELEMENTS // 2 ** (stage + 1), 2, 2**stage)), (0, 2, 1))
            b_low, b_high = tl.split(b_x)
            b_x = tl.permute(tl.join(b_low + b_high, b_low - b_high), (0, 2, 1))
            b_x = tl.reshape(b_x, (ELEMENTS,))
    return b_x


@triton.jit
def transform(b_x, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, HADAMARD: tl.constexpr, b_signs):
    """Block Hadamard transform of b_x [ROWS, BLOCK_K] in fp32; b_x itself where HADAMARD is 0. BLOCK_K is a multiple of it.

    Not normalized: `row_scale` does that to what is stored, once a row instead of once an element. With `b_signs`
    (`hadamard_signs`) a matrix product on tensor cores: ones and minus ones are exact, so products are, and their sums are in
    fp32. A product in fp32 would need more shared memory than capability 7.5 has.
    """
    if HADAMARD == 0:
        b_y = b_x
    elif b_signs is not None:
        b_y = tl.dot(tl.reshape(b_x, (ROWS * BLOCK_K // HADAMARD, HADAMARD)), b_signs, out_dtype=tl.float32)
        b_y = tl.reshape(b_y, (ROWS, BLOCK_K))
    else:
        b_y = butterflies(tl.reshape(b_x.to(tl.float32), (ROWS * BLOCK_K,)), ROWS * BLOCK_K, HADAMARD)
        b_y = tl.reshape(b_y, (ROWS, BLOCK_K))
    return b_y


@triton.jit
def amax_bits(b_x):
    """Greatest magnitude of each row of b_x [ROWS, BLOCK_K], as the bits of an fp32 [ROWS]."""
    # As integers, magnitudes order as they do as floats, and NaN lies above inf instead of being dropped.
    return tl.max(b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def row_scale(b_amax_bits, HADAMARD: tl.constexpr):
    """Scale fp32 [ROWS] of the values as they are held, the scale to store, and whether the codes are not all 0 by rule.

    The two scales differ by the factor that normalizes the Hadamard matrix. All codes of a row are 0 if it holds NaN or inf,
    or nothing but zeros or what is so small that its scale underflows.
    """
    b_held = tl.div_rn(b_amax_bits.to(tl.float32, bitcast=True), 127.0)
    b_stored = b_held
    if HADAMARD > 0:
        b_stored = b_held * HADAMARD**-0.5
    b_finite = b_amax_bits < INF_BITS
    b_coded = b_finite & (b_stored != 0.0)
    b_stored = tl.where(b_finite, tl.where(b_stored == 0.0, 1.0, b_stored), float("nan"))
    return tl.where(b_held == 0.0, 1.0, b_held), b_stored, b_coded


@triton.jit
def row_reciprocal(b_amax_bits, b_scale, b_coded, DIVIDE: tl.constexpr):
    """Factor [ROWS] with which `encode` may multiply instead of dividing by `b_scale`; for which rows; whether for all.

    An IEEE division is a dozen instructions and a branch; one multiplication per element gives the same codes, because x and
    amax are bf16 or fp16, that is, have p <= 11 significant bits. Write |x| = X 2^a and amax = A 2^(a+d) with integers X and A
    of p bits, d >= 0, and t = 127 |x| / amax, the code before rounding. For an integer n,

        t - (n + 1/2) = (254 X - (2n + 1) A 2^d) / (2 A 2^d)

    is either 0 or at least 1 / (2 A 2^d) = t / (254 X) > t 2^-19 in magnitude. The reference rounds RN(|x| / scale), with
    scale = RN(amax / 127): within t 2^-22 of t. The product with a factor within 2^-20 + 2^-23 (relative) of 1 / scale is
    within t 2^-19.5 of t, whether it is rounded to fp32 or the compiler contracts it with the addition of ROUND_MAGIC. Both
    give the same integer unless t is exactly n + 1/2. Then 127, a prime, divides 2n + 1 or A:

    - 127 divides 2n + 1: t = 63.5 and |x| = amax / 2. What RN(amax / 2 / scale) rounds to, 63 or 64, is found once per row,
      and the factor is 1 / scale moved by 2^-20 to the side that gives it: four times what roundings could undo.
    - 127 divides A: scale is exact and has at most 4 significant bits. If it is a power of two, so is the factor, and the
      product is exact, ties included. Else (never for bf16, 7 in 1024 rows for fp16) the row is divided.

    NaN, inf and tiny rows are divided, too. `test_every_quotient` goes through all X, A and d. Transformed rows have more
    significant bits: there, a quotient within 2^-19 of the middle of two codes may become the other one, always the same.
    """
    if DIVIDE:
        return b_scale, b_scale < 0.0, False
    b_half = tl.div_rn(b_amax_bits.to(tl.float32, bitcast=True) * 0.5, b_scale)
    b_scale_bits = b_scale.to(tl.int32, bitcast=True)
    power_of_two = (b_scale_bits & SIGNIFICAND_BITS) == 0
    b_factor = tl.div_rn(1.0, b_scale)
    b_factor = tl.where(power_of_two, b_factor, b_factor * tl.where(b_half < 63.5, NUDGE_DOWN, NUDGE_UP))
    long_or_exact = power_of_two | ((b_scale_bits & LONG_SIGNIFICAND_BITS) != 0)
    b_multiply = b_coded & (b_scale >= MIN_RECIPROCAL_SCALE) & long_or_exact
    return b_factor, b_multiply, tl.min(b_multiply.to(tl.int32), axis=0) != 0


@triton.jit
def encode(b_x, b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD: tl.constexpr):
    """Codes int8 of b_x [ROWS, BLOCK_K]; the other arguments come from `row_scale` and `row_reciprocal`."""
    b_x = b_x.to(tl.float32)
    if multiply_all:
        # No clamp: |x| <= amax, so that the product is at most 127 (1 + 2^-19).
        if HADAMARD > 0:
            b_sum = tl.fma(b_x, tl.broadcast_to(b_factor[:, None], b_x.shape), tl.full(b_x.shape, ROUND_MAGIC, tl.float32))
        else:
            b_sum = b_x * b_factor[:, None] + ROUND_MAGIC
        b_codes = b_sum.to(tl.int32, bitcast=True).to(tl.int8)
    else:
        b_q = tl.div_rn(b_x, b_scale[:, None])
        b_q = tl.minimum(tl.maximum(b_q, -127.0), 127.0)
        b_q = tl.where(b_coded[:, None], b_q, 0.0) + ROUND_MAGIC
        if HADAMARD > 0:
            # A row is multiplied, and rounded, the same way whatever its neighbours hold.
            b_sum = tl.fma(b_x, tl.broadcast_to(b_factor[:, None], b_x.shape), tl.full(b_x.shape, ROUND_MAGIC, tl.float32))
            b_q = tl.where(b_multiply[:, None], b_sum, b_q)
        b_codes = b_q.to(tl.int32, bitcast=True).to(tl.int8)
    return b_codes


@triton.jit
def store_scale(scale_ptr, b_stored_scale, M, ROWS: tl.constexpr):
    o_m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(scale_ptr + o_m, b_stored_scale, mask=o_m < M)


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
                tl.store(
                    codes_ptr + o_m * K + o_k,
                    encode(transformed[i], b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD),
                    mask=mask,
                )
        else:
            for i_k in range(0, K, BLOCK_K):
                o_m, o_k, mask = tile_offsets(M, K, i_k, ROWS, BLOCK_K)
                b_x = tl.load(x_ptr + o_m * x_row_stride + o_k, mask=mask, other=0.0)
                b_y = transform(b_x, ROWS, BLOCK_K, HADAMARD, b_signs)
                tl.store(
                    codes_ptr + o_m * K + o_k,
                    encode(b_y, b_scale, b_coded, b_factor, b_multiply, multiply_all, HADAMARD),
                    mask=mask,
                )


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


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, K] with neighbouring elements side by side and rows that begin as a contiguous tensor's: copied where they do not.

    Triton compiles a variant for each class of alignment of address and row stride. A view that begins elsewhere would get one
    of its own, at the first request that brings it.
    """
    M, K = x.shape
    side_by_side = x.stride(1) == 1 or K <= 1
    aligned = x.data_ptr() % 16 == 0 and (M <= 1 or (x.stride(0) % 16 == 0) == (K % 16 == 0))
    return x if side_by_side and aligned else x.clone(memory_format=torch.contiguous_format)


def row_stride(x: torch.Tensor) -> int:
    """Elements from one row of x [M, K] to the next. A lone row's stride is arbitrary and must not choose a variant."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def empty_codes(M: int, K: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten codes [M, K] int8 and scale [M, 1] fp32."""
    return (
        torch.empty((M, K), dtype=torch.int8, device=device),
        torch.empty((M, 1), dtype=torch.float32, device=device),
    )


def quantize_row(
    x: torch.Tensor,
    hadamard: int = 0,
    amax: torch.Tensor | None = None,
    *,
    config: QuantizeConfig | None = None,
    tensor_cores: bool = True,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize every row of `x` in one pass; without a transform the same bits as `quantize_reference`.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows of any stride (other columns than neighbouring ones are copied first).
        hadamard: as in `quantize_reference`.
        amax: [M, 1] fp32, as in `quantize_reference`, of parts in x's dtype.
        config: tile; default: `quantize_config`.
        tensor_cores: whether the transform may use those, see `transforms_on_tensor_cores`.
        pdl: programmatic dependent launch (capability 9.0 and newer): start while the kernel before is still running.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.
    """
    codes, scale = empty_codes(*x.shape, x.device)
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
    _launch(None, None, amax.view(torch.int32), x, hadamard, config, tensor_cores, pdl, AMAX="only")
    return amax


def _launch(
    codes: torch.Tensor | None,
    scale: torch.Tensor | None,
    amax_bits: torch.Tensor | None,
    x: torch.Tensor,
    hadamard: int,
    config: QuantizeConfig | None,
    tensor_cores: bool,
    pdl: bool,
    AMAX: str,
) -> None:
    x = unit_rows(x)
    M, K = x.shape
    config = config or quantize_config(M, K, x.dtype, hadamard=hadamard)
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
