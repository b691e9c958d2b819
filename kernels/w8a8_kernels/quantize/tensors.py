"""Inputs and outputs of the row-wise kernels."""

import torch


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
