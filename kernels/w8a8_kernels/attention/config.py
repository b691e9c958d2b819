"""Tiles of the attention kernel: pure functions of the shape and the GPU, which need neither GPU nor Triton."""

from dataclasses import dataclass

from w8a8_kernels.tiles import MAX_SHARED_BYTES, SMALL_MAX_SHARED_BYTES, power_of_two

# Below, `tl.dot` is no tensor-core instruction: products of few rows are plain multiplications, which need fewer registers.
MIN_DOT_CAPABILITY = (8, 0)
TURING_SHARED_BYTES = 64 * 1024

# A tensor-core instruction takes so many rows at least; in int8 each of them is two.
MIN_DOT_ROWS, MIN_INT8_DOT_ROWS = 16, 8
# Queries x heads of so many rows x columns go together through the keys once; more are cut into tiles.
MAX_ONE_TILE_ROWS, MAX_ONE_TILE_VALUES = 64, 64 * 256
# More rows than these, or rows x columns, do not fit the registers twice: codes are converted instead.
MAX_INT8_DOT_ROWS, MAX_INT8_DOT_VALUES = 16, 16 * 256

# Keys that a program reads at least, and programs on each multiprocessor that are enough: a split more costs a part to merge.
MIN_SPLIT_KEYS = 128
# Up to FEW_SPLITS are merged by one warp a row.
FEW_SPLITS, MAX_SPLITS = 8, 32
PROGRAMS_PER_SM = 2

# Where tiles for many queries were measured. 256 rows by 16 warps spill registers and were up to 5 % faster nevertheless; 128
# rows by 8 warps up to 5 % slower.
MEASURED = (9, 0)


@dataclass(frozen=True)
class AttentionTile:
    """Rows (queries x heads) and keys of one program's step.

    `dot` multiplies by `tl.dot`; `int8_dot` in int8, each row as two, where the cache is int8 and its values are transposed.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dot: bool = True
    int8_dot: bool = False


@dataclass(frozen=True)
class AttentionPlan:
    """How a batch is computed.

    The tile; whether it holds all queries of a sequence; programs that share its keys; whether no sequence has more than one
    query, which is said of int8 products in one warp only.
    """

    tile: AttentionTile
    one_tile: bool
    splits: int
    one_query: bool = False


def attention_plan(
    D: int,
    group: int,
    kv_heads: int,
    n_sequences: int,
    most_queries: int,
    most_keys: int,
    *,
    int8: bool,
    capability: tuple[int, int],
    num_sms: int,
) -> AttentionPlan:
    """The plan by rule.

    Args:
        D: head size.
        group: query heads of a key/value head.
        kv_heads: key/value heads.
        n_sequences: of the batch.
        most_queries, most_keys: of any sequence; where the launch is replayed for other batches, the most that there can be.
        int8: whether the cache is.
        capability: compute capability.
        num_sms: multiprocessors.
    """
    rows = power_of_two(group) * power_of_two(most_queries)
    most_rows = MIN_DOT_ROWS if capability < MIN_DOT_CAPABILITY else MAX_ONE_TILE_ROWS
    if rows > most_rows or rows * power_of_two(D) > MAX_ONE_TILE_VALUES:
        return AttentionPlan(_prefill_tile(D, group, int8, capability), one_tile=False, splits=1)
    splits = number_of_splits(n_sequences * kv_heads, most_keys, num_sms, int8)
    many = n_sequences * kv_heads * splits > PROGRAMS_PER_SM * num_sms
    tile = _decode_tile(D, rows, int8, many, capability)
    return AttentionPlan(tile, one_tile=True, splits=splits, one_query=tile.num_warps == 1 and most_queries == 1)


def _decode_tile(D: int, rows: int, int8: bool, many: bool, capability: tuple[int, int]) -> AttentionTile:
    block_d = power_of_two(D)
    if capability < MIN_DOT_CAPABILITY:
        # [rows, keys, D] products stand in registers: 64 of each thread, or 32 that were converted.
        num_warps = 4 if rows * block_d <= 2048 else 8
        block_n = max(1, (32 if int8 else 64) * 32 * num_warps // (rows * block_d))
        return AttentionTile(rows, min(32, block_n), num_warps, num_stages=1, dot=False)
    # A block's address comes from the block table, which takes a stage of its own: n blocks of keys and values are under way
    # with 2 n + 1 stages (Triton 3.6 and 3.9, by their shared memory).
    most = max_shared_bytes(capability) * 9 // 10
    if int8 and rows <= MAX_INT8_DOT_ROWS and rows * block_d <= MAX_INT8_DOT_VALUES:
        block_m, block_n = max(rows, MIN_INT8_DOT_ROWS), min(128, max(32, 8192 // block_d))
        # One warp exchanges no weights, but spills registers where sums are more than 1024, or padded; two warps do at 256.
        num_warps = 1 if block_m * block_d <= 1024 and block_d == D else 4 if block_d == 256 else 2
        blocks = max(1, min(3, most // (2 * block_n * block_d)))
        return AttentionTile(block_m, block_n, num_warps, num_stages=2 * blocks + 1, int8_dot=True)
    if rows > MIN_DOT_ROWS:
        return AttentionTile(rows, max(16, 4096 // block_d), num_warps=4, num_stages=3)
    block_n = min(64, max(16, 8192 // block_d))
    if many:
        # They hide each other's waiting: memory for loads under way is better left to more of them.
        return AttentionTile(MIN_DOT_ROWS, block_n, num_warps=2 if rows < MIN_DOT_ROWS else 4, num_stages=3)
    most -= 2 * MIN_DOT_ROWS * block_d
    blocks = max(1, min(3, most // (4 * block_n * block_d))) if block_d <= 128 else 1
    return AttentionTile(MIN_DOT_ROWS, block_n, num_warps=4, num_stages=2 * blocks + 1)


def _prefill_tile(D: int, group: int, int8: bool, capability: tuple[int, int]) -> AttentionTile:
    block_d, least = power_of_two(D), power_of_two(group)
    if capability < MIN_DOT_CAPABILITY:
        return AttentionTile(max(least, 16), 16, num_warps=4 if block_d <= 256 else 8, num_stages=1)
    if block_d > 128:
        return AttentionTile(max(least, 32 if int8 else 16384 // block_d), 32, num_warps=8, num_stages=3)
    if capability == MEASURED:
        if int8:
            return AttentionTile(128, 64, num_warps=8, num_stages=1)
        return AttentionTile(64, 64, num_warps=4, num_stages=5)
    return AttentionTile(128, 32 if int8 else 64, num_warps=8, num_stages=3)


def max_shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program can have."""
    if capability < MIN_DOT_CAPABILITY:
        return TURING_SHARED_BYTES
    return MAX_SHARED_BYTES.get(capability, SMALL_MAX_SHARED_BYTES)


def number_of_splits(programs: int, most_keys: int, num_sms: int, int8: bool) -> int:
    """How many share the keys of one of `programs`: a power of two."""
    enough = PROGRAMS_PER_SM * num_sms
    if int8 and programs >= 0.9 * enough:
        # 32 sequences of 1,024 keys, 8 heads, on an H200: 27 us whole, 33 to 38 in halves; in 16 bits 40 to 45 and 42.
        return 1
    splits = 1
    while splits < MAX_SPLITS and programs * splits < enough and most_keys // (2 * splits) >= MIN_SPLIT_KEYS:
        splits *= 2
    return splits
