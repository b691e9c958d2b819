"""Inputs that the kernel tests share."""

import torch

# Rows x columns, on purpose odd, prime, below one tile, one over a tile.
SMALL_SHAPES = [(0, 33), (1, 1), (1, 64), (3, 17), (16, 33), (17, 257), (65, 600)]
GPU_SHAPES = [(m, k) for m in (0, 1, 3, 16, 17, 64, 65, 257, 4096) for k in (1, 33, 257, 1024, 4096, 8191, 12288)]


def activations(M: int, K: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[M, K] random rows, with a zero row, a NaN row, an inf row, a subnormal row and an outlier where M allows."""
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    if M > 4:
        x[1] = 0
        x[2, K // 2] = float("nan")
        x[3, K - 1] = -float("inf")
        x[4] = 1e-7
    if M > 8:
        x[8] *= 1e-3
        x[8, 0] = 30000.0
    return x.to(dtype).to(device)


def codes(M: int, K: int, device: torch.device, seed: int = 1) -> torch.Tensor:
    """[M, K] random int8 codes over the whole range, -128 included."""
    return torch.randint(-128, 128, (M, K), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)).to(device)


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    return (
        got.dtype == expected.dtype
        and torch.equal(got.nan_to_num(-1e30), expected.nan_to_num(-1e30))
        and torch.equal(got.isnan(), expected.isnan())
    )
