"""The block Hadamard transform: which block a layer gets, and the transform in plain torch.

Multiplying activations and weight by the same orthonormal matrix along K leaves their product as it is, and spreads a row's
outliers over the block, so that the row's int8 scale serves the other values better. The matrix here is block-diagonal, each
block Sylvester's Hadamard matrix over the square root of its size (QuaRot, arXiv 2404.00456, uses whole rows instead).
"""

import torch

BLOCKS = (128, 64, 32, 16)

# The rule takes no larger block: 128 lowers the divergence little further (mean KL 0.0017 instead of 0.0020 on a 0.5B model)
# and takes the quantizer twice the time (2.7 us instead of 1.5 for a row of 4096 on an H200).
MAX_RULE_BLOCK = 64

# Row-parallel inputs are cut along K: the rule looks for a block that no cut goes through, up to this many ranks.
MAX_RANKS = 8
MIN_SHARDED_BLOCK = 32


def block_size(K: int, *, row_parallel: bool = False) -> int:
    """Block for activations of length K, by rule, or 0 where none fits.

    Args:
        K: features of the whole layer, never of a tensor-parallel rank's part: the block belongs to the checkpoint.
        row_parallel: whether tensor parallelism cuts K (o_proj, down_proj).

    Returns:
        the largest of 64, 32, 16 that divides K; for a row-parallel layer the largest that divides K / 8, if that is at least
        32: so 8 ranks cut no block, for at most half of its size.
    """
    if row_parallel and K % MAX_RANKS == 0:
        block = _largest(K // MAX_RANKS)
        if block >= MIN_SHARDED_BLOCK:
            return block
    return _largest(K)


def _largest(K: int) -> int:
    return next((block for block in BLOCKS if block <= MAX_RULE_BLOCK and K % block == 0), 0)


def check_block(hadamard: int, K: int, what: str = "hadamard") -> None:
    """Raise ValueError unless `hadamard` is 0 or a block that divides K."""
    if hadamard != 0 and (hadamard not in BLOCKS or K % hadamard != 0):
        raise ValueError(f"{what}: got a block of {hadamard} for rows of {K}, expected 0, or one of {BLOCKS} that divides {K}")


def hadamard_transform(x: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply every row of x, block by block, by the orthonormal Hadamard matrix: a fast Walsh-Hadamard transform in fp32.

    Args:
        x: [..., K] floating.
        block: power of two that divides K; 0 for no transform.

    Returns:
        [..., K] fp32, contiguous.
    """
    x = x.float().contiguous()
    if block == 0 or x.numel() == 0:
        return x
    shape = x.shape
    half = 1
    while half < block:
        pairs = x.view(-1, 2, half)
        x = torch.empty_like(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=x[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=x[:, 1])
        half *= 2
    return x.view(shape).mul_(block**-0.5)
