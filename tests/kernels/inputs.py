"""Inputs that the kernel tests share."""

import torch

# Rows x columns, on purpose odd, prime, below one tile, one over a tile.
SMALL_SHAPES = [(0, 33), (1, 1), (1, 64), (3, 17), (16, 33), (17, 257), (65, 600)]
GPU_SHAPES = [(m, k) for m in (0, 1, 3, 16, 17, 64, 65, 257, 4096) for k in (1, 33, 257, 1024, 4096, 8191, 12288)]
# Longer than any tile; more rows than fit one grid dimension of 16 bits.
GPU_EXTREME_SHAPES = [(1, 131072), (17, 131072), (65536, 128)]


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


def short_squares(M: int, K: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[M, K] random multiples of 1/8 whose squares fp32 sums up exactly in any order, even those of the sum of two such rows.

    With a zero row, a NaN row and an inf row where M allows.
    """
    # Squares of sums are multiples of 1/64 up to (2 * most / 8)^2: fewer than 2^24 of them in a row for K up to 131,072.
    most = 16 if K <= 8192 else 5
    assert K * (2 * most) ** 2 <= 2**24
    x = torch.randint(-most, most + 1, (M, K), generator=torch.Generator().manual_seed(seed)) / 8
    if M > 4:
        x[1] = 0
        x[2, K // 2] = float("nan")
        x[3, K - 1] = -float("inf")
    return x.to(dtype).to(device)


def every_quotient(dtype: torch.dtype) -> torch.Tensor:
    """[A, X] with every significand of the row's greatest magnitude and, at most as large, every one of the other elements.

    Significands of `dtype` are p-bit integers with the highest bit set. Other elements are also taken halved up to 9 times:
    with 9, all codes are 0. Powers of two beside that change no quotient.
    """
    p = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    significands = torch.arange(2 ** (p - 1), 2**p, dtype=torch.float64)
    others = torch.cat([significands / 2**halvings for halvings in range(10)])
    others = torch.cat([others, -others])
    rows = torch.where(others.abs() <= significands[:, None], others, 0.0)
    x = torch.cat([significands[:, None], rows], dim=1).to(dtype)
    assert torch.equal(x.double(), torch.cat([significands[:, None], rows], dim=1))
    return x


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
