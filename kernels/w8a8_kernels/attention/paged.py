"""The attention kernel: prefill, decode and short speculative queries over a paged cache that is read in place.

The query heads that share a key/value head are packed with the queries into the rows of one tile, so that every block of
keys is read once for all of them. Softmax is online (Milakov and Gimelshein 2018), in fp32, by powers of two; a split of the
keys over several programs leaves unnormalized sums that `merge_splits_kernel` adds up (flash decoding).
"""

import triton
import triton.language as tl

from w8a8_kernels.quantize.device import INTERPRETED, ROUND_MAGIC, chain_launches, round_to

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(start_ptr, n_sequences, i_tile, TILE_QUERIES: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sequence of tile i_tile, where sequence b's tiles begin at `start[b] // TILE_QUERIES + b`.

    A sequence of n queries then has room for cdiv(n, TILE_QUERIES) tiles; the tiles between two sequences are empty. AT_ONCE
    loads all starts; a search by halves waits for memory at each.
    """
    if AT_ONCE:
        o_b = tl.arange(0, 128)
        count = 0
        for i_b in range(0, n_sequences, 128):
            b_start = tl.load(start_ptr + i_b + o_b, mask=i_b + o_b < n_sequences, other=1 << 30)
            count += tl.sum((b_start // TILE_QUERIES + i_b + o_b <= i_tile).to(tl.int32), axis=0)
        low = count - 1
    else:
        low = 0
        high = n_sequences
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(start_ptr + middle) // TILE_QUERIES + middle <= i_tile:
                low = middle
            else:
                high = middle
    return low


@triton.jit
def find_slots(table_ptr, i_n, n_keys, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Keys i_n to i_n + BLOCK_N, their blocks int64 and places there, and which there are; i_n is a multiple of BLOCK_N."""
    o_i = tl.arange(0, BLOCK_N)
    o_n = i_n + o_i
    m_n = o_n < n_keys
    if BLOCK_N % BLOCK_SIZE == 0:
        # The same in every step: address arithmetic that the loop is spared.
        o_slot = o_i % BLOCK_SIZE
        p_table = table_ptr + i_n // BLOCK_SIZE + o_i // BLOCK_SIZE
    else:
        o_slot = o_n % BLOCK_SIZE
        p_table = table_ptr + o_n // BLOCK_SIZE
    # Blocks are multiples of 16 tokens. That 16 of them lie side by side, Triton does not see.
    b_block = tl.load(p_table, mask=o_n // 16 * 16 < n_keys, other=0) if MASKED else tl.load(p_table)
    TOGETHER: tl.constexpr = 16 if BLOCK_N > 16 else BLOCK_N
    b_block = tl.max_constancy(b_block.to(tl.int64), TOGETHER)
    return o_n, b_block, tl.max_contiguous(tl.multiple_of(o_slot, TOGETHER), TOGETHER), m_n


@triton.jit
def adjust_scores(b_s, scale, softcap, b_slope, b_distance, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Soft cap and ALiBi of products b_s, times log2(e); without either b_s itself: its factor is left to `softmax_step`."""
    if SOFTCAP:
        # softcap * tanh(s / softcap)
        b_s = softcap * (1 - 2 / (1 + tl.exp2(b_s * (scale * 2 * LOG2E / softcap))))
    elif ALIBI:
        b_s *= scale
    if ALIBI:
        b_s += b_slope[:, None] * b_distance
    if SOFTCAP or ALIBI:
        b_s *= LOG2E
    return b_s


@triton.jit
def mask_scores(b_s, m_n, b_distance, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Minus infinity where a row does not see a key."""
    m_s = m_n[None, :]
    if CAUSAL:
        m_s = m_s & (b_distance <= 0)
    if WINDOW:
        m_s = m_s & (b_distance > -window)
    return tl.where(m_s, b_s, float("-inf"))


@triton.jit
def softmax_step(b_s, b_max, b_sum, b_factor, MASKED: tl.constexpr):
    """Weights of scores b_s * b_factor [M], and the rows' maximum, sum, and what earlier sums are multiplied with.

    The factor is part of one multiply-add with the maximum.
    """
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1) * b_factor)
    # A row that has seen no key yet has no maximum: its sums are 0, and stay so.
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
    b_p = tl.exp2(b_s * b_factor[:, None] - b_shift[:, None])
    b_rescale = tl.exp2(b_max - b_shift)
    return b_p, b_new, b_sum * b_rescale + tl.sum(b_p, axis=1), b_rescale


@triton.jit
def attend(
    b_acc,
    b_max,
    b_sum,
    b_q,
    b_position,
    b_slope,
    first,
    last,
    n_keys,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    scale,
    softcap,
    window,
    stride_kb,
    stride_vb,
    stride_sb,
    stride_st,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    STRIDE_VD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    INT8: tl.constexpr,
    DOT: tl.constexpr,
):
    """Adds keys [first, last) to the sums of the rows: b_acc [M, BLOCK_D], b_max, b_sum [M], all fp32.

    `first` is a multiple of BLOCK_N. Scores are multiplied by log2(e), so b_max is too. Without MASKED all rows see all keys.
    """
    V_TRANSPOSED: tl.constexpr = STRIDE_VD != 1
    b_factor = tl.full(b_max.shape, 1.0 if SOFTCAP or ALIBI else scale * LOG2E, tl.float32)
    o_d = tl.arange(0, BLOCK_D)
    first = tl.multiple_of(first, BLOCK_N)
    for i_n in range(first, last, BLOCK_N):
        o_n, b_block, o_slot, m_n = find_slots(table_ptr, i_n, n_keys, BLOCK_N, BLOCK_SIZE, MASKED)
        p_k = (k_ptr + b_block * stride_kb + o_slot * STRIDE_KT)[:, None] + o_d[None, :]
        if V_TRANSPOSED:
            p_v = (v_ptr + b_block * stride_vb + o_slot)[None, :] + (o_d * STRIDE_VD)[:, None]
        else:
            p_v = (v_ptr + b_block * stride_vb + o_slot * STRIDE_VT)[:, None] + o_d[None, :]
        if MASKED or D != BLOCK_D:
            m_kv = (o_d < D)[None, :] & (m_n[:, None] if MASKED else tl.full((BLOCK_N, 1), True, tl.int1))
            b_k = tl.load(p_k, mask=m_kv, other=0)
            if V_TRANSPOSED:
                # Whole groups of 16 tokens, whose bytes are loaded together: codes of none are finite, and their weight is 0.
                m_kv = (o_d < D)[:, None] & (o_n // 16 * 16 < n_keys)[None, :]
            b_v = tl.load(p_v, mask=m_kv, other=0)
        else:
            b_k = tl.load(p_k)
            b_v = tl.load(p_v)

        # Codes of int8 are exact in bf16 and fp16: their scales meet the scores and the weights instead.
        if DOT:
            b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
        else:
            b_s = tl.sum(b_q.to(tl.float32)[:, None, :] * b_k.to(tl.float32)[None, :, :], axis=2)
        if INT8:
            p_scale = b_block * stride_sb + o_slot * stride_st
            b_s *= tl.load(k_scale_ptr + p_scale, mask=m_n, other=0.0)[None, :]
            b_v_scale = tl.load(v_scale_ptr + p_scale, mask=m_n, other=0.0)
        b_distance = o_n[None, :] - b_position[:, None]
        b_s = adjust_scores(b_s, scale, softcap, b_slope, b_distance, SOFTCAP, ALIBI)
        if MASKED:
            b_s = mask_scores(b_s, m_n, b_distance, window, CAUSAL, WINDOW)
        b_p, b_max, b_sum, b_rescale = softmax_step(b_s, b_max, b_sum, b_factor, MASKED)
        b_acc *= b_rescale[:, None]
        if INT8:
            b_p *= b_v_scale[None, :]
        if DOT:
            b_v = b_v.to(b_q.dtype)
            b_acc += tl.dot(b_p.to(b_q.dtype), tl.trans(b_v) if V_TRANSPOSED else b_v, input_precision="ieee")
        elif V_TRANSPOSED:
            b_acc += tl.sum(b_p[:, None, :] * b_v.to(tl.float32)[None, :, :], axis=2)
        else:
            b_acc += tl.sum(b_p[:, :, None] * b_v.to(tl.float32)[None, :, :], axis=1)
    return b_acc, b_max, b_sum


@triton.jit
def prefetch_lines(p_lines, LEVEL: tl.constexpr):
    """Ask L1 or L2 for the lines of 128 bytes that hold what the pointers point to; no wait, and nothing to wait for."""
    tl.inline_asm_elementwise(
        "prefetch.global." + LEVEL + " [$1]; mov.u32 $0, 0;",
        "=r,l",
        [p_lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_cache(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    first,
    last,
    stride_kb,
    stride_vb,
    stride_sb,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    STRIDE_VD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Ask L2 for keys and values of one head, KEYS tokens from `first` on, fewer where there are none; first < last.

    What the kernel before is still to write, it writes to L2, too.
    """
    if STRIDE_VD == 1:
        LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
        o_n = tl.minimum(first + tl.arange(0, KEYS), last - 1)
        b_block = tl.load(table_ptr + o_n // BLOCK_SIZE).to(tl.int64)
        for i in tl.static_range(0, D, LINE):
            prefetch_lines(k_ptr + b_block * stride_kb + o_n % BLOCK_SIZE * STRIDE_KT + i, "L2")
            prefetch_lines(v_ptr + b_block * stride_vb + o_n % BLOCK_SIZE * STRIDE_VT + i, "L2")
    else:
        # `int8_cache_views`: keys, values and scales of one head and block are runs. The share of 16 tokens of each.
        o_n = tl.minimum(first + tl.arange(0, KEYS // 16) * 16, (last - 1) // 16 * 16)
        b_block = tl.load(table_ptr + o_n // BLOCK_SIZE).to(tl.int64)
        o_slot = o_n % BLOCK_SIZE
        o_line = (tl.minimum(tl.arange(0, BLOCK_D // 8), D // 8 - 1) * 128)[None, :]
        prefetch_lines((k_ptr + b_block * stride_kb + o_slot * D)[:, None] + o_line, "L2")
        prefetch_lines((v_ptr + b_block * stride_vb + o_slot * D)[:, None] + o_line, "L2")
        prefetch_lines(k_scale_ptr + b_block * stride_sb + o_slot, "L2")
        prefetch_lines(v_scale_ptr + b_block * stride_sb + o_slot, "L2")


@triton.jit
def unit_of(b_amax):
    """What an int8 code is worth where the greatest magnitude is b_amax, fp32."""
    return tl.where(b_amax == 0.0, 1.0, b_amax / 127.0)


@triton.jit
def split(b_x, b_unit):
    """b_x fp32 [rows, columns] in units of b_unit [rows], rounded, and what that leaves, in 254ths of one: int32 codes.

    Together 16 bits. As rows of their own they cost nothing: an instruction takes 16 rows, decoding has fewer.
    """
    b_x = b_x * (1.0 / b_unit)[:, None]
    b_high = b_x + ROUND_MAGIC
    b_low = (b_x - (b_high - ROUND_MAGIC)) * 254.0 + ROUND_MAGIC
    return b_high.to(tl.int32, bitcast=True), b_low.to(tl.int32, bitcast=True)


@triton.jit
def join_products(b_product, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 [ROWS, COLUMNS], in 254ths, of int32 [2 * ROWS, COLUMNS]: products of all units of `split`, then of the rest."""
    b_half = tl.reshape(b_product, (2, ROWS, COLUMNS)) * tl.where(tl.arange(0, 2) == 0, 254, 1)[:, None, None]
    # 127 * 127 * 254 * 512, for as many products, is below 2^31.
    return tl.sum(b_half, axis=0).to(tl.float32)


@triton.jit
def attend_int8(
    b_acc,
    b_max,
    b_sum,
    b_q,
    b_q_unit,
    b_position,
    b_slope,
    first,
    last,
    n_keys,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    scale,
    softcap,
    window,
    stride_kb,
    stride_vb,
    stride_sb,
    stride_st,
    STRIDE_KT: tl.constexpr,
    STRIDE_VD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """`attend` with int8 products of queries and of weights in 16 bits (`split`): no code is converted.

    Keys come to the scores in an order in which a thread's weights are those that it needs for the second product, four
    neighbours, where an accumulator holds two and two: in one warp, nothing is exchanged. All blocks are masked: a loop of its
    own for those that need no mask would be shorter, but a program begins with few of its instructions at hand.

    b_q int8 [2 * BLOCK_M, BLOCK_D], b_q_unit [BLOCK_M]: what one of the lower half is worth. The value cache has its 1 between
    tokens.
    """
    b_factor = tl.full(b_max.shape, 1.0 if SOFTCAP or ALIBI else scale * LOG2E, tl.float32)
    if not (SOFTCAP or ALIBI):
        b_factor *= b_q_unit
    o_d = tl.arange(0, BLOCK_D)
    o_i = tl.arange(0, BLOCK_N // 16)
    # Places within a group: bits 3 2 1 0 become 2 1 3 0.
    o_t = tl.arange(0, 16)
    o_t = (o_t & 6) << 1 | (o_t & 8) >> 2 | o_t & 1
    first = tl.multiple_of(first, BLOCK_N)
    for i_n in range(first, last, BLOCK_N):
        # By groups of 16 tokens, which lie in one block: keys [groups, 16, BLOCK_D], values [groups, BLOCK_D, 16]. Values as
        # [BLOCK_D, BLOCK_N], of which neighbouring threads read four blocks, made L2 the limit of an H200 (82 % of the time,
        # DRAM 66 %).
        o_g = i_n + o_i * 16
        b_block = tl.load(table_ptr + o_g // BLOCK_SIZE, mask=o_g < n_keys, other=0).to(tl.int64)
        o_slot = (o_i * 16 if BLOCK_N % BLOCK_SIZE == 0 else o_g) % BLOCK_SIZE
        p_k = (k_ptr + b_block * stride_kb + o_slot * STRIDE_KT)[:, None, None]
        p_k += (o_t * STRIDE_KT)[None, :, None] + o_d[None, None, :]
        p_v = (v_ptr + b_block * stride_vb + tl.multiple_of(o_slot, 16))[:, None, None]
        p_v += (o_d * STRIDE_VD)[None, :, None] + tl.arange(0, 16)[None, None, :]
        p_scale = (b_block * stride_sb + o_slot * stride_st)[:, None] + (o_t * stride_st)[None, :]
        o_n = o_g[:, None] + o_t[None, :]
        m_n = o_n < n_keys
        # Groups of 16 tokens are loaded together: codes beyond the sequence's end are finite, and their weight is 0.
        if D != BLOCK_D:
            b_k = tl.load(p_k, mask=(o_d < D)[None, None, :], other=0)
            b_v = tl.load(p_v, mask=(o_d < D)[None, :, None], other=0)
        else:
            b_k = tl.load(p_k)
            b_v = tl.load(p_v)
        b_k_scale = tl.reshape(tl.load(k_scale_ptr + p_scale, mask=m_n, other=0.0), (BLOCK_N,))
        b_v_scale = tl.reshape(tl.load(v_scale_ptr + p_scale, mask=m_n, other=0.0), (BLOCK_N,))
        o_n = tl.reshape(o_n, (BLOCK_N,))
        m_n = o_n < n_keys
        b_k = tl.reshape(b_k, (BLOCK_N, BLOCK_D))

        b_s = join_products(tl.dot(b_q, tl.trans(b_k), out_dtype=tl.int32), BLOCK_M, BLOCK_N)
        b_s *= b_k_scale[None, :]
        if SOFTCAP or ALIBI:
            b_s *= b_q_unit[:, None]
        b_distance = o_n[None, :] - b_position[:, None]
        b_s = adjust_scores(b_s, scale, softcap, b_slope, b_distance, SOFTCAP, ALIBI)
        # Rows of a causal query see no key behind the last one in any case.
        m_seen = tl.full((BLOCK_N,), True, tl.int1) if CAUSAL else m_n
        b_s = mask_scores(b_s, m_seen, b_distance, window, CAUSAL, WINDOW)
        b_p, b_max, b_sum, b_rescale = softmax_step(b_s, b_max, b_sum, b_factor, MASKED=True)
        b_p *= b_v_scale[None, :]
        b_unit = unit_of(tl.max(b_p, axis=1))
        b_high, b_low = split(b_p, b_unit)
        b_codes = tl.permute(tl.join(b_high.to(tl.int8), b_low.to(tl.int8)), (2, 0, 1))
        b_codes = tl.permute(tl.reshape(b_codes, (2 * BLOCK_M, BLOCK_N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
        b_codes = tl.reshape(b_codes, (2 * BLOCK_M, BLOCK_N))
        b_v = tl.reshape(tl.permute(b_v, (0, 2, 1)), (BLOCK_N, BLOCK_D))
        b_o = join_products(tl.dot(b_codes, b_v, out_dtype=tl.int32), BLOCK_M, BLOCK_D)
        b_acc = b_acc * b_rescale[:, None] + b_o * (b_unit * (1.0 / 254.0))[:, None]
    return b_acc, b_max, b_sum


@triton.jit(do_not_specialize=["n_sequences", "n_tokens", "window", "stride_tb"])
def paged_attention_kernel(
    out_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    lens_ptr,
    start_ptr,
    sinks_ptr,
    slopes_ptr,
    n_sequences,
    n_tokens,
    scale,
    softcap,
    window,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_vb,
    stride_vh,
    stride_sb,
    stride_st,
    stride_sh,
    stride_tb,
    STRIDE_KT: tl.constexpr,
    STRIDE_VT: tl.constexpr,
    STRIDE_VD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    INT8: tl.constexpr,
    DOT: tl.constexpr,
    INT8_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of BLOCK_M // BLOCK_G queries of one sequence, for the GROUP query heads of one key/value head.

    Row r of the tile is query r // BLOCK_G, head r % BLOCK_G. ONE_TILE: tile b is all of sequence b's queries. With SPLIT,
    program_id(2) takes a part of the keys and writes its sums: part fp32 [splits, n_tokens, HEADS, D], part_max and
    part_sum fp32 [splits, n_tokens, HEADS]; one without keys writes no sums but part_sum, 0.
    ONE_QUERY: no sequence has more. PDL: programmatic dependent launch, see `chain_launches`; lengths, starts, slopes and
    block table are read before the wait, so no kernel may have written them that lets the next ones start before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TILE_QUERIES: tl.constexpr = BLOCK_M // BLOCK_G
    # From the last tile, which has the most keys to see: what starts last should be short.
    i_tile = tl.program_id(0) if ONE_TILE else tl.num_programs(0) - 1 - tl.program_id(0)
    i_kv = tl.program_id(1)
    i_split = tl.program_id(2)
    if ONE_TILE:
        i_b = i_tile
        first_query = 0
    else:
        # All at once, ptxas spills 68 bytes in int8 on sm_100 (Triton 3.9) and 36 on sm_90 (3.6).
        i_b = find_sequence(start_ptr, n_sequences, i_tile, TILE_QUERIES, AT_ONCE=not INT8)
        first_query = (i_tile - tl.load(start_ptr + i_b) // TILE_QUERIES - i_b) * TILE_QUERIES
    start = tl.load(start_ptr + i_b)
    n_queries = tl.load(start_ptr + i_b + 1) - start
    n_keys = tl.load(lens_ptr + i_b)
    if first_query >= n_queries:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return

    o_row = tl.arange(0, BLOCK_M)
    o_query = first_query + o_row // BLOCK_G
    o_group = o_row % BLOCK_G
    o_head = i_kv * GROUP + o_group
    m_row = (o_query < n_queries) & (o_group < GROUP)
    o_token = (start + o_query).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    m_qd = m_row[:, None] & (o_d < D)[None, :]
    p_queries = q_ptr + (o_token * stride_qt + o_head * stride_qh)[:, None] + o_d[None, :]
    if not PDL:
        # Not where the other load is: there ptxas aims at fewer registers for D 256 on sm_86, and spills.
        b_q = tl.load(p_queries, mask=m_qd, other=0.0)
    b_position = n_keys - n_queries + o_query
    b_slope = tl.zeros((BLOCK_M,), tl.float32)
    if ALIBI:
        b_slope = tl.load(slopes_ptr + o_head, mask=m_row, other=0.0).to(tl.float32)

    # Keys that any row of the tile sees, and those that all of them see.
    first_position = n_keys - n_queries + first_query
    last_position = n_keys - n_queries + tl.minimum(first_query + TILE_QUERIES, n_queries) - 1
    first = 0
    last = n_keys
    first_full = 0
    last_full = n_keys
    if CAUSAL:
        last = tl.minimum(last, last_position + 1)
        last_full = tl.minimum(last_full, first_position + 1)
    if WINDOW:
        first = tl.maximum(first, first_position - window + 1)
        first_full = tl.maximum(first_full, last_position - window + 1)
    first = first // BLOCK_N * BLOCK_N
    if SPLIT:
        per_split = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK_N), tl.num_programs(2)) * BLOCK_N
        first = first + i_split * per_split
        last = tl.minimum(last, first + per_split)

    k_ptr += i_kv.to(tl.int64) * stride_kh
    v_ptr += i_kv.to(tl.int64) * stride_vh
    k_scale_ptr += i_kv.to(tl.int64) * stride_sh
    v_scale_ptr += i_kv.to(tl.int64) * stride_sh
    table_ptr += i_b.to(tl.int64) * stride_tb
    if PDL:
        # What a split program waits for first is memory, which the end of the kernel before leaves idle. Microseconds on an
        # H200 in int8, with these keys asked for and without: 8 sequences of 8,192 keys 40.0 and 41.2, one of 32,768 28.7 and
        # 32.5 (32.3 in a later run: how programs that start early are spread counts as much); with four times as many 40.3
        # and 28.7. Where sequences are not split, 32 of 8,192 took 148 instead of 140.
        if SPLIT and first < last:
            prefetch_cache(
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, first, last, stride_kb, stride_vb, stride_sb, STRIDE_KT,
                STRIDE_VT, STRIDE_VD, D, BLOCK_D, BLOCK_SIZE, KEYS=BLOCK_N,
            )  # fmt: skip
        tl.extra.cuda.gdc_wait()
        b_q = tl.load(p_queries, mask=m_qd, other=0.0)
    if SPLIT and first >= last and i_split > 0:
        o_part = (i_split * n_tokens + o_token) * HEADS + o_head
        tl.store(part_sum_ptr + o_part, tl.zeros((BLOCK_M,), tl.float32), mask=m_row)
        return
    # Whole blocks between the two; blocks before and after them need a mask.
    first_full = tl.minimum(tl.maximum(tl.cdiv(first_full, BLOCK_N) * BLOCK_N, first), tl.maximum(last, first))
    last_full = tl.maximum(tl.minimum(last_full, last) // BLOCK_N * BLOCK_N, first_full)

    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if SINKS:
        # In the first split only, where there are several.
        b_sink = tl.load(sinks_ptr + o_head, mask=m_row, other=0.0).to(tl.float32) * LOG2E
        b_max = tl.where(i_split == 0, b_sink, b_max)
        b_sum = tl.where(i_split == 0, 1.0, b_sum)

    if INT8_DOT:
        if not INTERPRETED:
            # The first blocks' addresses, while the queries are brought into codes.
            o_line = first // BLOCK_SIZE + tl.arange(0, 4) * 32
            prefetch_lines(table_ptr + tl.minimum(o_line, tl.maximum((last - 1) // BLOCK_SIZE, 0)), "L1")
        # Each row a second time, from memory: brought together in registers, the halves come in an order that makes reading
        # them back a matter of single bytes. Rows of queries that there cannot be repeat the others.
        QUERIES: tl.constexpr = 1 if ONE_QUERY else TILE_QUERIES
        o_twice = tl.arange(0, 2 * QUERIES * BLOCK_G)
        p_q = o_twice % (QUERIES * BLOCK_G)
        m_q = (first_query + p_q // BLOCK_G < n_queries) & (p_q % BLOCK_G < GROUP)
        p_q = (start + first_query + p_q // BLOCK_G).to(tl.int64) * stride_qt + (i_kv * GROUP + p_q % BLOCK_G) * stride_qh
        m_q = m_q[:, None] & (o_d < D)[None, :]
        b_q = tl.load(q_ptr + p_q[:, None] + o_d[None, :], mask=m_q, other=0.0).to(tl.float32)
        b_unit = unit_of(tl.max(tl.abs(b_q), axis=1))
        b_high, b_low = split(b_q, b_unit)
        b_q = tl.where((o_twice < QUERIES * BLOCK_G)[:, None], b_high, b_low).to(tl.int8)
        REPEATS: tl.constexpr = TILE_QUERIES // QUERIES
        b_q = tl.reshape(b_q, (2, 1, QUERIES * BLOCK_G, BLOCK_D))
        b_q = tl.reshape(tl.broadcast_to(b_q, (2, REPEATS, QUERIES * BLOCK_G, BLOCK_D)), (2 * BLOCK_M, BLOCK_D))
        b_unit = tl.max(tl.reshape(b_unit, (2, QUERIES * BLOCK_G)), axis=0) * (1.0 / 254.0)
        b_q_unit = tl.reshape(tl.broadcast_to(b_unit[None, :], (REPEATS, QUERIES * BLOCK_G)), (BLOCK_M,))
        b_acc, b_max, b_sum = attend_int8(
            b_acc, b_max, b_sum, b_q, b_q_unit, b_position, b_slope, first, last, n_keys, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, scale, softcap, window, stride_kb, stride_vb, stride_sb, stride_st,
            STRIDE_KT=STRIDE_KT, STRIDE_VD=STRIDE_VD, D=D, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D, BLOCK_N=BLOCK_N,
            BLOCK_SIZE=BLOCK_SIZE, CAUSAL=CAUSAL, WINDOW=WINDOW, SOFTCAP=SOFTCAP, ALIBI=ALIBI,
        )  # fmt: skip
    else:
        for part in tl.static_range(3):
            if part != 0 or WINDOW:
                begin = first if part == 0 else (first_full if part == 1 else last_full)
                end = first_full if part == 0 else (last_full if part == 1 else last)
                b_acc, b_max, b_sum = attend(
                    b_acc, b_max, b_sum, b_q, b_position, b_slope, begin, end, n_keys, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
                    table_ptr, scale, softcap, window, stride_kb, stride_vb, stride_sb, stride_st, STRIDE_KT=STRIDE_KT,
                    STRIDE_VT=STRIDE_VT, STRIDE_VD=STRIDE_VD, D=D, BLOCK_D=BLOCK_D, BLOCK_N=BLOCK_N, BLOCK_SIZE=BLOCK_SIZE,
                    MASKED=part != 1, CAUSAL=CAUSAL, WINDOW=WINDOW, SOFTCAP=SOFTCAP, ALIBI=ALIBI, INT8=INT8, DOT=DOT,
                )  # fmt: skip

    if SPLIT:
        o_part = (i_split * n_tokens + o_token) * HEADS + o_head
        tl.store(part_max_ptr + o_part, b_max, mask=m_row)
        tl.store(part_sum_ptr + o_part, b_sum, mask=m_row)
        tl.store(part_ptr + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_qd)
    else:
        b_out = b_acc / tl.where(b_sum == 0, 1.0, b_sum)[:, None]
        p_out = out_ptr + (o_token * stride_ot + o_head * stride_oh)[:, None] + o_d[None, :]
        tl.store(p_out, round_to(b_out, out_ptr.dtype.element_ty), mask=m_qd)


@triton.jit(do_not_specialize=["n_tokens", "n_splits"])
def merge_splits_kernel(
    out_ptr,
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    n_tokens,
    n_splits,
    stride_ot,
    stride_oh,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [n_tokens, HEADS, D] of the parts that `paged_attention_kernel` has left, one row a program."""
    if PDL:
        chain_launches()
    o_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_split = tl.arange(0, MAX_SPLITS)
    o_d = tl.arange(0, BLOCK_D)
    o_part = (o_split * n_tokens + o_token) * HEADS + i_head
    # All at once. A split without keys has left nothing but its sum of 0, and other memory than its own for the rest.
    m_split = o_split < n_splits
    b_sum = tl.load(part_sum_ptr + o_part, mask=m_split, other=0.0)
    b_max = tl.load(part_max_ptr + o_part, mask=m_split, other=0.0)
    b_acc = tl.load(part_ptr + o_part[:, None] * D + o_d[None, :], mask=m_split[:, None] & (o_d < D)[None, :], other=0.0)
    b_max = tl.where(b_sum > 0, b_max, float("-inf"))
    b_acc = tl.where((b_sum > 0)[:, None], b_acc, 0.0)
    most = tl.max(b_max, axis=0)
    b_weight = tl.exp2(b_max - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(b_sum * b_weight, axis=0)
    b_out = tl.sum(b_acc * b_weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    p_out = out_ptr + o_token * stride_ot + i_head * stride_oh + o_d
    tl.store(p_out, round_to(b_out, out_ptr.dtype.element_ty), mask=o_d < D)
