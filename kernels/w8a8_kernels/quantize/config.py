"""Tile shapes of the row-wise kernels: pure functions of the shape, which need no GPU and no Triton."""

from typing import NamedTuple

import torch

# The longest row that stays in registers between finding its scale and writing its codes: 32 fp32 values for each of the
# 1024 threads that one program can have, for inputs of 16 bits. Longer rows are read once more, from L2.
MAX_BLOCK_BYTES = 65536

# Tile of the loop over longer rows.
LOOP_BLOCK_K = 8192

# Up to this many rows the GPU is not full, and a row's latency counts: more threads, fewer elements for each. Above, it is
# bandwidth: fewer threads, each with more 16-byte loads in flight.
# Microseconds on an H200, 512 rows, quantizer and product: K 1024 10.3 as four rows a program, 9.8 as one; K 4096 19.0 with 4
# warps, 18.3 with 8. K 3072, among peers that take turns and by itself: padded 8.44 and 8.03 with 4 warps, 8.29 and 8.26 with
# 8; in three chunks 8.34 and 8.07 with 2, 8.46 and 8.02 with 4.
LATENCY_ROWS, MIDDLE_ROWS = 256, 1024
LATENCY_BYTES_PER_THREAD = 32
BANDWIDTH_BYTES_PER_THREAD = 64

# At high M, short rows share a program until it has this many elements.
TILE_ELEMENTS = 4096
MAX_ROWS = 8

# Shorter rows are one tile, padded; for a middle number of rows, these are.
MIN_THREE_CHUNKS, MIN_MIDDLE_THREE_CHUNKS = 8192, 4096


class QuantizeConfig(NamedTuple):
    """Compile-time shape of one program: `rows` rows held in `chunks` tiles of `block_k` by `num_warps` warps.

    `chunks` 0: the rows are longer than registers hold, and are read more than once in a loop over tiles.
    """

    rows: int
    block_k: int
    num_warps: int
    chunks: int = 1


# Of streamed rows: tile, tile of the longest, lengths, Hadamard blocks.
STREAM_TILE, STREAM_LONG_TILE = 4096, 8192
MIN_STREAM_K, MAX_STREAM_K = 2049, 16384
STREAM_BLOCKS = (16, 32, 64)
FEW_ROWS, MANY_STREAM_ROWS = 32, 4096
STREAM_OPS = ("quantize", "rms_norm", "add_rms_norm", "silu_mul")


class StreamConfig(NamedTuple):
    """Compile-time shape of `quantize_stream_kernel`: `rows` rows at a time, held in `chunks` tiles of `block_k`.

    `num_stages`: how many times that is under way. `per_sm`: programs for each multiprocessor.
    """

    block_k: int
    chunks: int
    num_warps: int
    num_stages: int
    per_sm: int
    rows: int = 1


def stream_config(M: int, K: int, dtype: torch.dtype, hadamard: int, op: str = "quantize") -> StreamConfig | None:
    """Tile for streaming rows of length K, or None where `quantize_config`'s is faster or the only one. Of M as there.

    The best of 8 to 16 tiles and 5 numbers of programs on an H200: 128 to 8192 rows of 4096 and, for "quantize" and
    "silu_mul", of 12288. Microseconds of SiLU·mul streamed, and as rows of their own: 512 rows of 12288 17.3 and 15.4, 128
    rows of 1024 3.2 and 5.2, 128 rows of 4096 4.0 and 5.5, 64 rows of 4096 3.9 and 4.3; of the quantizer alone, 64 rows of
    4096 2.3 and 2.8. Norms of rows beyond 8192 spill registers: 14,451 us for 8192 rows of 12288. Those of 4097 to 8192
    elements have as many of them for each thread as those of 4096; they were not measured.

    Args:
        M: number of rows.
        K: elements of a row of codes.
        dtype: of the input.
        hadamard: size of the transform's blocks, or 0.
        op: "quantize", "rms_norm", "add_rms_norm" or "silu_mul".
    """
    if hadamard not in STREAM_BLOCKS or dtype.itemsize != 2 or K > MAX_STREAM_K or M <= FEW_ROWS:
        return None
    if op == "silu_mul" and K < MIN_STREAM_K and 2 * FEW_ROWS < M <= MIDDLE_ROWS:
        # Fewer blocks than the 64 that tensor cores of capability 9.0 multiply at least would be padded.
        block_k = max(1 << (K - 1).bit_length(), 16 * hadamard)
        return StreamConfig(block_k, 1, 4, num_stages=1, per_sm=6, rows=STREAM_TILE // block_k)
    if K < MIN_STREAM_K:
        return None
    if op in ("rms_norm", "add_rms_norm"):
        return _stream_norm_config(M, K, op)
    if K > STREAM_TILE and M <= (MIDDLE_ROWS if op == "silu_mul" else LATENCY_ROWS):
        return None
    block_k, num_warps = (STREAM_TILE, 4) if K <= 3 * STREAM_TILE else (STREAM_LONG_TILE, 8)
    chunks = -(-K // block_k)
    if chunks > 1:
        return StreamConfig(block_k, chunks, num_warps, num_stages=3, per_sm=2)
    if op == "silu_mul":
        return StreamConfig(block_k, chunks, num_warps, num_stages=4 if M <= LATENCY_ROWS else 2, per_sm=6)
    if M <= 2 * FEW_ROWS:
        return StreamConfig(block_k, chunks, num_warps, num_stages=2, per_sm=6)
    # Neither divides 2048 rows evenly among 132 multiprocessors: 6 rows a program at most with 3, 3 with 6.
    per_sm = 3 if MIDDLE_ROWS < M < MANY_STREAM_ROWS else 6
    return StreamConfig(block_k, chunks, num_warps, num_stages=4 if M <= MIDDLE_ROWS else 3, per_sm=per_sm)


def _stream_norm_config(M: int, K: int, op: str) -> StreamConfig | None:
    if K > STREAM_LONG_TILE or M <= 2 * FEW_ROWS:
        return None
    block_k, num_warps = (STREAM_TILE, 4) if K <= STREAM_TILE else (STREAM_LONG_TILE, 8)
    if op == "add_rms_norm":
        # Two rows a stage: with more than one, fewer programs fit a multiprocessor.
        return StreamConfig(block_k, 1, num_warps, num_stages=4 if M <= LATENCY_ROWS and num_warps == 4 else 1, per_sm=4)
    return StreamConfig(block_k, 1, num_warps, num_stages=3 if M > MIDDLE_ROWS else 1, per_sm=4)


def quantize_config(M: int, K: int, dtype: torch.dtype, held: int = 1, hadamard: int = 0) -> QuantizeConfig:
    """Tile for rows of length K. Of M only the side of a few bounds counts, so that K and dtype allow a few tiles.

    Args:
        M: number of rows.
        K: elements of a row of codes.
        dtype: of the input.
        held: values per element that a program holds at a time: 2 for the norms (the weight, too), 1 for the others. With
            tiles for 1, ptxas makes the norms spill up to 80 bytes on sm_80 and sm_90.
        hadamard: size of the transform's blocks, or 0.
    """
    padded = 1 << max(K - 1, 127).bit_length()
    if hadamard:
        return _transform_config(M, max(padded, 16 * hadamard), dtype, held, hadamard)
    block_k, chunks = padded, 1
    middle = LATENCY_ROWS < M <= MIDDLE_ROWS and held == 1
    if padded >= (MIN_MIDDLE_THREE_CHUNKS if middle else MIN_THREE_CHUNKS) and 4 * K <= 3 * padded:
        # Three quarters of a power of two, or less: a quarter of the program would have nothing to do.
        block_k, chunks = padded // 4, 3
    row_bytes = block_k * chunks * dtype.itemsize * held
    if row_bytes > MAX_BLOCK_BYTES:
        return QuantizeConfig(rows=1, block_k=LOOP_BLOCK_K, num_warps=16, chunks=0)
    rows, bytes_per_thread = 1, LATENCY_BYTES_PER_THREAD
    if middle and (chunks == 1 or padded < MIN_THREE_CHUNKS):
        # As many threads as for few rows, less those that padding leaves idle.
        bytes_per_thread = LATENCY_BYTES_PER_THREAD if K == padded or chunks > 1 else BANDWIDTH_BYTES_PER_THREAD
    elif M > LATENCY_ROWS:
        rows, bytes_per_thread = min(max(TILE_ELEMENTS // (block_k * chunks), 1), MAX_ROWS), BANDWIDTH_BYTES_PER_THREAD // held
    threads = rows * block_k * dtype.itemsize // bytes_per_thread
    # At high M, two programs of 512 threads overlap where one of 1024 would load, compute and store in turn. The longest rows
    # would leave those 512 no register for anything else.
    most = 16 if M > LATENCY_ROWS and row_bytes < MAX_BLOCK_BYTES else 32
    return QuantizeConfig(rows, block_k, min(max(threads // 32, 1), most), chunks)


def _transform_config(M: int, block_k: int, dtype: torch.dtype, held: int, hadamard: int) -> QuantizeConfig:
    """Tile for a Hadamard transform by matrix product; fewer than 4 warps are slow at that.

    Microseconds on an H200, rows of 4096: 1 row 1.4 with 4 or 8 warps, 1.7 with 16; 128 rows 3.0 with 8 and 2.8 with 16; 512
    rows 3.8 with 8, 4.7 as two rows on 4; 8192 rows 42 with 8, 32 as two rows on 4. 8192 rows of 12288: 112 with 8 warps, 192
    with 16; in three tiles without padding 125.
    """
    # Results are held in fp32.
    if block_k * dtype.itemsize * max(held, 2) > MAX_BLOCK_BYTES:
        return QuantizeConfig(rows=1, block_k=LOOP_BLOCK_K // 2, num_warps=8, chunks=0)
    rows, elements_per_thread = 1, 32
    if 2 * FEW_ROWS < M <= LATENCY_ROWS:
        elements_per_thread = 8
    elif LATENCY_ROWS < M <= MIDDLE_ROWS and block_k <= TILE_ELEMENTS:
        elements_per_thread = 16
    elif M > LATENCY_ROWS:
        rows, elements_per_thread = min(max(2 * TILE_ELEMENTS // block_k, 1), MAX_ROWS), 64 // held
    # Blocks of 128 spill 8 bytes in SiLU-mul on sm_86 with 4 warps (Triton 3.6).
    least_warps = 8 if hadamard == 128 else 4
    return QuantizeConfig(rows, block_k, min(max(rows * block_k // (32 * elements_per_thread), least_warps), 16))


def row_config(
    M: int, K: int, dtype: torch.dtype, hadamard: int, op: str, *, held: int = 1, streams: bool
) -> QuantizeConfig | StreamConfig:
    """`stream_config` where rows may be streamed and it has a tile, else `quantize_config`; arguments as there."""
    streamed = stream_config(M, K, dtype, hadamard, op) if streams else None
    return streamed or quantize_config(M, K, dtype, held, hadamard)


def quantize_variants(K: int, dtype: torch.dtype, held: int = 1, hadamard: int = 0) -> dict[int, QuantizeConfig]:
    """Every tile that rows of length K can get: the smallest M that gets it -> the tile of `quantize_config`.

    Calling an op once with each of these M, at the alignment and strides of serving, compiles all that it will need, those of
    `stream_config` too.
    """
    variants: dict[tuple, tuple[int, QuantizeConfig]] = {}
    for M in (1, FEW_ROWS + 1, 2 * FEW_ROWS + 1, LATENCY_ROWS + 1, MIDDLE_ROWS + 1):
        config = quantize_config(M, K, dtype, held, hadamard)
        streamed = (stream_config(M, K, dtype, hadamard, op) for op in STREAM_OPS)
        variants.setdefault((config, *streamed), (M, config))
    return dict(variants.values())
