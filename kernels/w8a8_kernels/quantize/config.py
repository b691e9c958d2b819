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

# At high M, short rows share a program until it has this many elements.
TILE_ELEMENTS = 4096
MAX_ROWS = 8


class QuantizeConfig(NamedTuple):
    """Compile-time shape of one program: a tile of `rows` x `block_k`, held by `num_warps` warps."""

    rows: int
    block_k: int
    num_warps: int


def quantize_config(M: int, K: int, dtype: torch.dtype, held: int = 1) -> QuantizeConfig:
    """Tile for rows of length K; of M only the side of `LATENCY_ROWS` counts, so that K and dtype allow two tiles at most.

    Args:
        M: number of rows.
        K: elements of a row of codes.
        dtype: of the input.
        held: values per element that a program holds at a time: 2 for the norms (the weight, too), 1 for the others. With
            tiles for 1, ptxas makes the norms spill up to 80 bytes on sm_80 and sm_90.
    """
    block_k = 1 << max(K - 1, 127).bit_length()
    if block_k * dtype.itemsize * held > MAX_BLOCK_BYTES:
        return QuantizeConfig(rows=1, block_k=LOOP_BLOCK_K, num_warps=16)
    rows, bytes_per_thread = 1, LATENCY_BYTES_PER_THREAD
    if M > LATENCY_ROWS:
        rows, bytes_per_thread = min(max(TILE_ELEMENTS // block_k, 1), MAX_ROWS), BANDWIDTH_BYTES_PER_THREAD // held
    threads = rows * block_k * dtype.itemsize // bytes_per_thread
    # At high M, two programs of 512 threads overlap where one of 1024 would load, compute and store in turn. The longest rows
    # would leave those 512 no register for anything else.
    most = 16 if M > LATENCY_ROWS and block_k * dtype.itemsize * held < MAX_BLOCK_BYTES else 32
    return QuantizeConfig(rows, block_k, num_warps=min(max(threads // 32, 1), most))


def quantize_variants(K: int, dtype: torch.dtype, held: int = 1) -> dict[int, QuantizeConfig]:
    """Every tile that rows of length K can get: the smallest M that gets it -> the tile.

    Calling an op once with each of these M, at the alignment and strides of serving, compiles all that it will need.
    """
    variants: dict[int, QuantizeConfig] = {}
    for M in (1, LATENCY_ROWS + 1):
        config = quantize_config(M, K, dtype, held)
        if config not in variants.values():
            variants[M] = config
    return variants
