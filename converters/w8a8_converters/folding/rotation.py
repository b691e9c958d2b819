"""Orthonormal matrices of any size with entries of nearly equal magnitude, so that no outlier stays one."""

import math

import torch
from torch import Tensor

from w8a8_kernels.hadamard import hadamard_transform


class Rotation:
    """The orthonormal matrix R = D1 (C ⊗ H) D2 of a given size, for row vectors: `x R`.

    H is Sylvester's Hadamard matrix of the largest power of two in the size, C the discrete Hartley transform of the odd
    factor, `cos + sin` of 2 pi i j / n over sqrt(n) (Bracewell 1983), and D1 and D2 are random signs. No entry is larger than
    sqrt(2 / size). D1 keeps a constant offset of all channels from ending in one of them (QuaRot, arXiv 2404.00456). D2 is
    ours: the block Hadamard transform that runs before activations are quantized is a factor of H, and without signs in
    between it would take part of the rotation back.

    Args:
        size: 1 or larger.
        seed: of the signs.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._power = size & -size
        n = size // self._power
        angle = torch.outer(torch.arange(n), torch.arange(n)).remainder(n).double() * (2 * math.pi / n)
        self._odd = ((angle.cos() + angle.sin()) / math.sqrt(n)).float()
        generator = torch.Generator().manual_seed(seed)
        self._before, self._after = (torch.randint(0, 2, (2, size), generator=generator) * 2 - 1).float()

    def apply(self, x: Tensor) -> Tensor:
        """Multiplies every block of `size` elements of every row by R.

        Args:
            x: [..., k * size], floating.

        Returns:
            [..., k * size] fp32.
        """
        rows = x.float().reshape(-1, self.size) * self._before
        rows = hadamard_transform(rows, self._power).view(-1, self.size // self._power, self._power)
        if len(self._odd) > 1:
            rows = torch.einsum("rop,oq->rqp", rows, self._odd)
        return (rows.reshape(-1, self.size) * self._after).view(x.shape)

    def apply_to_rows(self, weight: Tensor) -> Tensor:
        """Multiplies every block of `size` rows by R transposed: a layer y = x Wᵀ then gives y R.

        Args:
            weight: [k * size, K], or a bias [k * size], floating.

        Returns:
            The same shape, fp32.
        """
        if weight.ndim == 1:
            return self.apply(weight)
        result = torch.empty(weight.shape, dtype=torch.float32)
        columns = max(1, _PART // weight.shape[0])
        for start in range(0, weight.shape[1], columns):
            part = weight[:, start : start + columns]
            result[:, start : start + columns] = self.apply(part.T).T
        return result


# Elements that are rotated at a time.
_PART = 4 * 1024**2
