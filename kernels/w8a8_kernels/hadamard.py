"""The block Hadamard transform: which block a layer gets, and the transform in plain torch.

Multiplying activations and weight by the same orthonormal matrix along K leaves their product as it is, and spreads a row's
outliers over the block, so that the row's int8 scale serves the other values better. The matrix here is block-diagonal, each
block Sylvester's Hadamard matrix over the square root of its size (QuaRot, arXiv 2404.00456, uses whole rows instead).
"""

import torch

BLOCKS = (128, 64, 32, 16)

# What a user may ask for: the rule below, no transform, or the largest block to use.
AUTO = "auto"
CHOICES = (AUTO, 0, *sorted(BLOCKS))

# The rule takes no larger block: 128 lowers the divergence little further (mean KL 0.0017 instead of 0.0020 on a 0.5B model)
# and takes the quantizer twice the time (2.7 us instead of 1.5 for a row of 4096 on an H200).
MAX_RULE_BLOCK = 64

# Row-parallel inputs are cut along K: the rule looks for a block that no cut goes through, for as many ranks as it can. Blocks
# below 32 give too much away, except for long rows, whose models need the ranks.
RANKS = (8, 4, 2)
MIN_SHARDED_BLOCK = 32
LONG_ROW, MIN_LONG_SHARDED_BLOCK = 8192, 16


def block_size(K: int, *, row_parallel: bool = False) -> int:
    """Block for activations of length K, by rule, or 0 where none fits.

    Args:
        K: features of the whole layer, never of a tensor-parallel rank's part: the block belongs to the checkpoint.
        row_parallel: whether tensor parallelism cuts K (o_proj, down_proj).

    Returns:
        the largest of 64, 32, 16 that divides K; for a row-parallel layer the largest that divides K / 8, if that is at least
        32, or 16 for K from 8192 on, else that of K / 4 or of K / 2 likewise.
    """
    if row_parallel:
        least = MIN_LONG_SHARDED_BLOCK if K >= LONG_ROW else MIN_SHARDED_BLOCK
        for ranks in RANKS:
            if K % ranks == 0 and (block := largest_block(K // ranks)) >= least:
                return block
    return largest_block(K)


def largest_block(K: int, at_most: int = MAX_RULE_BLOCK) -> int:
    """The largest block up to `at_most` that divides K, or 0 where none does."""
    return next((block for block in BLOCKS if block <= at_most and K % block == 0), 0)


def chosen_block(hadamard: str | int, K: int, *, row_parallel: bool = False) -> int:
    """Block of a layer under the choice `hadamard`, one of CHOICES: `block_size` for auto, `largest_block` for a number."""
    if hadamard == AUTO:
        return block_size(K, row_parallel=row_parallel)
    return largest_block(K, hadamard)


def parse_choice(text: str | int, what: str = "hadamard") -> str | int:
    """The member of CHOICES that `text` says, as `"auto"`, `"64"` or 64.

    Raises:
        ValueError: it says none of them; the message begins with `what`.
    """
    for choice in CHOICES:
        if str(text).strip().lower() == str(choice):
            return choice
    raise ValueError(f"{what}={text!r}: expected {', '.join(map(str, CHOICES[:-1]))} or {CHOICES[-1]}")


def ranks_that_fit(K: int, block: int, most: int = 64) -> list[int]:
    """Degrees of tensor parallelism, up to `most`, that divide K and cut no block."""
    return [ranks for ranks in range(1, most + 1) if K % (ranks * max(1, block)) == 0]


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
    y = butterflies(x, block)
    return y.mul_(block**-0.5) if block else y


def butterflies(x: torch.Tensor, block: int) -> torch.Tensor:
    """`hadamard_transform` before it is normalized: the matrix is one of ones and minus ones."""
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
    return x.view(shape)
