"""Tiles of the attention kernel: pure functions of the shape and the GPU, which need neither GPU nor Triton."""

from dataclasses import dataclass

from w8a8_kernels.tiles import MAX_SHARED_BYTES, SMALL_MAX_SHARED_BYTES

# Below, `tl.dot` is no tensor-core instruction: products of few rows are plain multiplications, which need fewer registers.
MIN_DOT_CAPABILITY = (8, 0)
TURING_SHARED_BYTES = 64 * 1024

# A tensor-core instruction takes so many rows at least.
MIN_DOT_ROWS = 16
# Queries and heads of so many rows go together through the keys once; more are cut into tiles.
MAX_ONE_TILE_ROWS = 64

# Keys that a program reads at least, and programs on each multiprocessor that are enough: a split more costs a part to merge.
MIN_SPLIT_KEYS = 256
MAX_SPLITS = 64
PROGRAMS_PER_SM = 2


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


def max_shared_bytes(capability: tuple[int, int]) -> int:
    """Shared memory that one program can have."""
    if capability < MIN_DOT_CAPABILITY:
        return TURING_SHARED_BYTES
    return MAX_SHARED_BYTES.get(capability, SMALL_MAX_SHARED_BYTES)


def attention_tile(
    D: int, group: int, most_queries: int, *, itemsize: int, capability: tuple[int, int], shared_bytes: int | None = None
) -> AttentionTile:
    """A tile by rule.

    Args:
        D: head size.
        group: query heads of a key/value head.
        most_queries: of any sequence of the batch.
        itemsize: bytes of a cached value.
        capability: compute capability.
        shared_bytes: shared memory to stay under, that of the capability by default.
    """
    block_d, rows = power_of_two(D), power_of_two(group) * power_of_two(most_queries)
    budget = (shared_bytes or max_shared_bytes(capability)) * 9 // 10
    if capability < MIN_DOT_CAPABILITY:
        if rows <= MIN_DOT_ROWS:
            # [rows, keys, D] products stand in registers, 64 of each thread.
            num_warps = 4 if rows * block_d <= 2048 else 8
            block_n = max(1, 64 * 32 * num_warps // (rows * block_d))
            return AttentionTile(rows, min(32, block_n), num_warps, num_stages=1, dot=False)
        return AttentionTile(max(power_of_two(group), 16), 16, num_warps=4, num_stages=1)
    if rows <= MAX_ONE_TILE_ROWS:
        block_m, block_n, num_warps = max(rows, MIN_DOT_ROWS), max(16, min(64, 8192 // block_d)), 4
    else:
        block_m = max(power_of_two(group), min(128, 16384 // block_d))
        block_n, num_warps = max(16, min(64, 8192 // block_d)), 8 if block_m >= 128 else 4
    # A block's address comes from the block table, which takes a stage of its own: n blocks of keys and values are under way
    # with 2 n + 1 stages (Triton 3.6 and 3.9, by their shared memory).
    queries_bytes = 2 * block_m * block_d
    blocks = max(1, min(3, (budget - queries_bytes) // (2 * block_n * block_d * itemsize)))
    return AttentionTile(block_m, block_n, num_warps, num_stages=2 * blocks + 1)


def number_of_splits(n_tiles: int, kv_heads: int, most_keys: int, num_sms: int) -> int:
    """Programs that share one tile's keys: a power of two.

    Args:
        n_tiles: tiles of queries.
        kv_heads: key/value heads.
        most_keys: of any sequence; where the launch is replayed for longer ones, the most that there can be.
        num_sms: multiprocessors.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and n_tiles * kv_heads * splits < PROGRAMS_PER_SM * num_sms
        and most_keys // (2 * splits) >= MIN_SPLIT_KEYS
    ):
        splits *= 2
    return splits


def power_of_two(n: int) -> int:
    """The smallest power of two that is no smaller than n."""
    return 1 << max(0, n - 1).bit_length()
