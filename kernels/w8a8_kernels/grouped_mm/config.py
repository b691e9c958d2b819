"""How a layer of experts is computed: grouping and tiles, pure functions of the shape, which need no GPU and no Triton."""

import os
from dataclasses import dataclass, replace

from w8a8_kernels.select import (
    KERNEL_VARIABLE,
    MIN_TRITON_CAPABILITY,
    Choice,
    Facts,
    has_dependent_launch,
    select_scaled_mm,
)
from w8a8_kernels.tiles import MAX_SHARED_BYTES, SHARED_BYTES, SMALL_SHARED_BYTES, TMA_MEASURED, bucket_of

# Shared memory of one multiprocessor that is left to the stages where programs should run beside each other.
PER_SM_BYTES, SMALL_PER_SM_BYTES = 208 * 1024, 96 * 1024

# With two stages, of which Triton holds one where products are no wgmma, a step's loads would hardly overlap the one before.
MIN_STAGES = 3

# Each pair for itself up to so many pairs per expert of the whole layer. Experts that several pairs share are then read once
# per pair, all but once from L2: at one half, 1.27 times on average where ids are random. Sorting is one more kernel.
MAX_DIRECT_PAIRS_PER_EXPERT = 0.5

# Up to so many pairs per expert: so many rows of a block. Most experts should fit one: a second block reads the weight again,
# from L2, and takes more of the places for blocks, of which the host knows only how many there can be (`max_blocks`). Rows
# without a pair multiply zeros, which costs nothing as long as the weights' bandwidth is the limit.
BLOCK_ROWS = ((4, 16), (16, 32), (96, 64))
MAX_BLOCK_ROWS = 128

# Of each row of the second product's weight so many bytes are asked of L2 while the kernel before still runs.
PREFETCH = 512


@dataclass(frozen=True)
class GroupedTile:
    """Tile of one program of a grouped product, as `w8a8_kernels.tiles.Tile`.

    `swap` multiplies weight x activations.T: few rows of x take the instruction's narrow side. `prefetch`, capability 9.0 and
    newer: bytes of each weight row that are asked of L2 before the wait for the kernel before, where the experts are known by
    then. `tma`, the same: the weight's blocks are loaded by the tensor memory accelerator; rows of x are gathered by threads.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    prefetch: int = 0
    tma: bool = False

    @property
    def stage_bytes(self) -> int:
        """Shared memory of all stages; one holds a block of x and one of the weight, a byte a value."""
        return (self.block_m + self.block_n) * self.block_k * self.num_stages


@dataclass(frozen=True)
class ExpertsPlan:
    """Everything about a layer's launches that depends on the number of tokens.

    `direct`: every pair of a token and an expert is a block of its own, nothing is sorted. Otherwise pairs are sorted by
    expert, in blocks of `block_m` rows, which is the block_m of both tiles: `gate_up` of the first product, `down` of the
    second.
    """

    direct: bool
    gate_up: GroupedTile
    down: GroupedTile

    @property
    def block_m(self) -> int:
        return self.gate_up.block_m


def select_experts(facts: Facts, *, forced: str | None = None) -> Choice:
    """Kernel for layers of experts, `triton` or `torch`, and the reason. Arguments as in `select_scaled_mm`.

    Raises:
        ValueError: as `select_scaled_mm`; and onednn is forced, which has no product of many experts.
    """
    forced = forced or os.environ.get(KERNEL_VARIABLE)
    choice = select_scaled_mm(facts, forced=forced)
    if forced == "onednn":
        raise ValueError(
            f"{KERNEL_VARIABLE}=onednn cannot run mixture-of-experts layers: on CPUs they run on torch, on GPUs on triton. "
            "Unset it: other layers run on onednn by default where it is there"
        )
    if choice.kernel == "torch":
        return choice
    if facts.capability is None:
        return Choice("torch", "the reference in torch; not triton: the Triton kernels need a GPU")
    if facts.capability < MIN_TRITON_CAPABILITY:
        got, least = (".".join(map(str, c)) for c in (facts.capability, MIN_TRITON_CAPABILITY))
        return Choice(
            "torch", f"the reference in torch; not triton: int8 tl.dot needs compute capability {least}, this GPU has {got}"
        )
    if not facts.has_triton:
        return Choice("torch", "the reference in torch; not triton: the package triton is not installed")
    return Choice("triton", "grouped tensor-core int8 through Triton")


def max_blocks(pairs: int, experts: int, block_m: int) -> int:
    """Blocks that pairs sorted by expert can take, as `sort_pairs_kernel` numbers them, whatever their experts are."""
    return pairs // block_m + min(pairs, experts)


def experts_plan(
    T: int,
    top_k: int,
    *,
    experts: int,
    num_global_experts: int,
    hidden: int,
    intermediate: int,
    capability: tuple[int, int],
    num_sms: int,
) -> ExpertsPlan:
    """Grouping and tiles by rule, for capability 8.0 and newer. Of T only the power of two counts: `bucket_of(T)`.

    Not measured: the numbers follow what was measured for `w8a8_kernels.tiles.default_tile`.

    Args:
        T: tokens, from 1.
        top_k: experts of a token, from 1.
        experts: how many experts this rank holds.
        num_global_experts: how many all ranks hold.
        hidden: columns of x.
        intermediate: rows of the gate.
        capability: compute capability.
        num_sms: multiprocessors.
    """
    pairs = bucket_of(T) * top_k
    per_expert = pairs / num_global_experts
    direct = per_expert <= MAX_DIRECT_PAIRS_PER_EXPERT
    if direct:
        block_m = 16
    else:
        block_m = next((rows for most, rows in BLOCK_ROWS if per_expert <= most), MAX_BLOCK_ROWS)
    if hidden % 16 or intermediate % 16:
        # Rows are loaded code by code, with an address each: larger blocks spill registers.
        block_m = min(block_m, 32)
    # As many as can be expected on this rank.
    local_pairs = max(1, pairs * experts // num_global_experts)
    blocks = local_pairs if direct else max(min(local_pairs, experts), local_pairs // block_m)
    gate_up = default_tile(block_m, blocks, 2 * intermediate, hidden, capability=capability, num_sms=num_sms)
    down = default_tile(block_m, blocks, hidden, intermediate, capability=capability, num_sms=num_sms)
    if has_dependent_launch(capability) and block_m <= 32:
        down = replace(down, prefetch=PREFETCH)
    return ExpertsPlan(direct, gate_up, down)


def default_tile(block_m: int, blocks: int, N: int, K: int, *, capability: tuple[int, int], num_sms: int) -> GroupedTile:
    """A tile by rule for about `blocks` blocks of `block_m` rows and weights [N, K]."""
    large = capability in MAX_SHARED_BYTES
    if K % 16 != 0:
        return GroupedTile(min(block_m, 32), 32, 64, num_warps=4, num_stages=2)
    if block_m <= 32:
        # Weights are streamed: the more programs there are, the less each of them has under way, so that all run at once.
        programs = blocks * -(-N // 64)
        beside = min(3, max(1, -(-programs // num_sms)))
        shared_bytes = (PER_SM_BYTES if large else SMALL_PER_SM_BYTES) // beside
        block_k = 256 if K > 128 and (block_m + 64) * 256 * MIN_STAGES <= shared_bytes else 128
        return _with_stages(GroupedTile(block_m, 64, block_k, num_warps=4, num_stages=6, swap=True), shared_bytes, K)
    if capability == TMA_MEASURED:
        # Two programs beside each other: one computes while the other stores. Microseconds of a Qwen3-30B-A3B layer on an
        # H200: 8192 tokens 993 to 1069, and with 256 columns 1088; 1024 tokens 232, and in blocks of 128 rows 245; 2048 tokens
        # 370 and 374.
        return _with_stages(GroupedTile(block_m, 128, 128, num_warps=4, num_stages=3, tma=True), PER_SM_BYTES // 2, K)
    if block_m == 64:
        # 4 warps spill on sm_100.
        return _with_stages(
            GroupedTile(64, 128, 128, num_warps=8 if capability[0] == 10 else 4, num_stages=4),
            (PER_SM_BYTES if large else SMALL_PER_SM_BYTES) // 2,
            K,
        )
    # A mask along K takes registers.
    return _with_stages(
        GroupedTile(128, 128 if K % 128 == 0 else 64, 128, num_warps=8, num_stages=4),
        SHARED_BYTES if large else SMALL_SHARED_BYTES,
        K,
    )


def _with_stages(tile: GroupedTile, shared_bytes: int, K: int) -> GroupedTile:
    """`tile` with as many of its stages as fit, `MIN_STAGES` at least, and no more than K has steps."""
    stage = replace(tile, num_stages=1).stage_bytes
    fitting = max(MIN_STAGES, shared_bytes // stage)
    return replace(tile, num_stages=max(2, min(tile.num_stages, fitting, -(-K // tile.block_k))))
