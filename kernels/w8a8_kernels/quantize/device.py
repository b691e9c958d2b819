"""Device functions that all Triton quantizers share, plain and fused, so that equal rows give equal codes."""

import triton
import triton.language as tl

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


@triton.jit
def load_sum(x_ptr, residual_ptr, o_m, o_k, mask, x_row_stride, residual_row_stride, HAS_RESIDUAL: tl.constexpr):
    """Tile of x, or of x + residual rounded to x's dtype."""
    b_x = tl.load(x_ptr + o_m * x_row_stride + o_k, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        b_residual = tl.load(residual_ptr + o_m * residual_row_stride + o_k, mask=mask, other=0.0)
        b_x = round_to(b_x.to(tl.float32) + b_residual.to(tl.float32), b_x.dtype)
    return b_x


@triton.jit
def square_sum(b_x):
    """Sum of the squares of each row of b_x [ROWS, BLOCK_K], fp32 [ROWS]."""
    b_x = b_x.to(tl.float32)
    return tl.sum(b_x * b_x, axis=1)


@triton.jit
def reciprocal_rms(b_square_sum, K, eps):
    """1 / sqrt(b_square_sum / K + eps)."""
    # Correctly rounded, unlike rsqrt, which is an approximation on a GPU: the reference gets the same bits from equal sums.
    # K * 1.0: K is a tensor or, where it is 1, a constant, which has no `to`.
    b_mean = tl.div_rn(b_square_sum, K * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(b_mean + eps))


@triton.jit
def normalize(b_x, b_rstd, b_weight, weight_offset):
    """b_x * b_rstd * (b_weight + weight_offset) in fp32, rounded once, to b_x's dtype; b_rstd [rows]."""
    return round_to(b_x.to(tl.float32) * b_rstd[:, None] * (b_weight.to(tl.float32) + weight_offset), b_x.dtype)


@triton.jit
def silu_mul(b_gate, b_up):
    """silu(b_gate) * b_up, rounded to their dtype after the activation and after the product."""
    b_g = b_gate.to(tl.float32)
    # exp and this division are the GPU's approximations, a few units in the last place of fp32.
    b_silu = round_to(b_g / (1.0 + tl.exp(-b_g)), b_gate.dtype)
    return round_to(b_silu.to(tl.float32) * b_up.to(tl.float32), b_gate.dtype)
