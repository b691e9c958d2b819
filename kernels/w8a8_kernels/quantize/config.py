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
LATENCY_ROWS = 256
LATENCY_BYTES_PER_THREAD = 32
BANDWIDTH_BYTES_PER_THREAD = 64

# At high M, short rows share a program until it has this many elements; twice as many with a Hadamard transform, where
# 4 warps with 64 elements a thread were fastest (31.6 us for 8192 rows of 4096 on an H200, 42.2 with 8 warps and 16).
TILE_ELEMENTS = 4096
MAX_ROWS = 8
TRANSFORM_ELEMENTS_PER_THREAD = 64


# Shorter rows are one tile, padded.
MIN_THREE_CHUNKS = 8192


class QuantizeConfig(NamedTuple):
    """Compile-time shape of one program: `rows` rows held in `chunks` tiles of `block_k` by `num_warps` warps.

    `chunks` 0: the rows are longer than registers hold, and are read more than once in a loop over tiles.
    """

    rows: int
    block_k: int
    num_warps: int
    chunks: int = 1


def quantize_config(M: int, K: int, dtype: torch.dtype, held: int = 1, hadamard: int = 0) -> QuantizeConfig:
    """Tile for rows of length K; of M only the side of `LATENCY_ROWS` counts, so that K and dtype allow two tiles at most.

    Args:
        M: number of rows.
        K: elements of a row of codes.
        dtype: of the input.
        held: values per element that a program holds at a time: 2 for the norms (the weight, too), 1 for the others. With
            tiles for 1, ptxas makes the norms spill up to 80 bytes on sm_80 and sm_90.
        hadamard: size of the transform's blocks, or 0.
    """
    padded = 1 << max(K - 1, 127).bit_length()
    block_k, chunks = padded, 1
    if padded >= MIN_THREE_CHUNKS and 4 * K <= 3 * padded:
        # Three quarters of a power of two, or less: a quarter of the program would have nothing to do.
        block_k, chunks = padded // 4, 3
    if hadamard:
        # The matrix product's other side is at least 16, and its results are held in fp32.
        block_k = max(block_k, 16 * hadamard)
        chunks = -(-K // block_k) if chunks > 1 else 1
        held = max(held, 2)
    row_bytes = block_k * chunks * dtype.itemsize * held
    if row_bytes > MAX_BLOCK_BYTES:
        return QuantizeConfig(rows=1, block_k=LOOP_BLOCK_K, num_warps=16, chunks=0)
    rows, bytes_per_thread = 1, LATENCY_BYTES_PER_THREAD
    if M > LATENCY_ROWS:
        rows, bytes_per_thread = min(max(TILE_ELEMENTS // (block_k * chunks), 1), MAX_ROWS), BANDWIDTH_BYTES_PER_THREAD // held
        if hadamard and chunks == 1:
            rows = min(max(2 * TILE_ELEMENTS // block_k, 1), MAX_ROWS)
            bytes_per_thread = TRANSFORM_ELEMENTS_PER_THREAD * dtype.itemsize
    threads = rows * block_k * dtype.itemsize // bytes_per_thread
    # At high M, two programs of 512 threads overlap where one of 1024 would load, compute and store in turn. The longest rows
    # would leave those 512 no register for anything else.
    most = 16 if M > LATENCY_ROWS and row_bytes < MAX_BLOCK_BYTES else 32
    # Fewer than 4 warps are slow at the matrix product: 1.6 us instead of 1.3 for a row of 1024 on an H200.
    least = 4 if hadamard else 1
    return QuantizeConfig(rows, block_k, min(max(threads // 32, least), most), chunks)


def quantize_variants(K: int, dtype: torch.dtype, held: int = 1, hadamard: int = 0) -> dict[int, QuantizeConfig]:
    """Every tile that rows of length K can get: the smallest M that gets it -> the tile.

    Calling an op once with each of these M, at the alignment and strides of serving, compiles all that it will need.
    """
    variants: dict[int, QuantizeConfig] = {}
    for M in (1, LATENCY_ROWS + 1):
        config = quantize_config(M, K, dtype, held, hadamard)
        if config not in variants.values():
            variants[M] = config
    return variants
