"""Gluon int8 GEMM for Hopper: persistent and warp-specialized, two warpgroups that take tiles in turns.

One warp loads blocks of x and of the weight into a ring of stages; the warpgroups multiply, each a tile of its own, so that
one writes its tile while the other has the tensor cores (CUTLASS calls that ping-pong).

Barriers: full[s] counts the bytes of stage s and one arrival, the loading warp's; empty[s] one, of whichever warpgroup read
it. The i-th use of a stage, from 0, has parity i % 2: readers wait for full with that, the loading warp for empty with the
other (a new barrier lets parity 1 pass). A wait by parity is right only if the use before is over. The loading warp waits for
every use; a warpgroup passes over the other's, so it starts a tile only when the other has waited for all of the tile before:
turn[c] counts one arrival, the other's after its last wait.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from w8a8_kernels.launch import launch_options

# Triton 3.6's names, and 3.9's.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Of the tiles 64 x 64 to 256 x 128 the fastest, or within 1.2 % of it, wherever any was faster than the other kernels, at 512
# to 8192 rows of seven weights on an H200. Six stages are 192 KB.
BLOCK_M, BLOCK_N, BLOCK_K, STAGES = 128, 128, 128, 6
# Tiles that share their rows of x run together, so many rows of tiles at a time: those stay in L2.
GROUP_M = 8
# Columns that one box of a store holds: 128 bytes.
STORE_N = 64
TMA_ALIGNMENT = 16
# What 3 * 128 threads have of them is what is shared out then: 2 * 128 * 240 + 128 * 24.
REGISTERS = 168


@gluon.jit
def wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def place_of(tile, n_tiles_m, n_tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile, in tiles: down GROUP rows, then on to the next column."""
    per_group = GROUP * n_tiles_n
    i_group = tile // per_group
    first_m = i_group * GROUP
    rows = gl.minimum(n_tiles_m - first_m, GROUP)
    i_in_group = tile - i_group * per_group
    i_n = i_in_group // rows
    return first_m + i_in_group - i_n * rows, i_n


@gluon.jit
def load_blocks(
    x_boxes,
    weight_boxes,
    x_blocks,
    weight_blocks,
    full,
    empty,
    n_tiles_m,
    n_tiles_n,
    k_steps,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    PDL: gl.constexpr,
):
    """The loading warp: all blocks of all tiles of this program, in the order in which they are multiplied."""
    ROWS: gl.constexpr = x_boxes.block_type.shape[0]
    COLUMNS: gl.constexpr = weight_boxes.block_type.shape[0]
    DEPTH: gl.constexpr = x_boxes.block_type.shape[1]
    BYTES: gl.constexpr = x_boxes.block_type.nbytes + weight_boxes.block_type.nbytes
    first_tile = gl.program_id(0)

    # The first stages are empty. The weight is no kernel's result, so its blocks come before the wait.
    i_m, i_n = place_of(first_tile, n_tiles_m, n_tiles_n, GROUP)
    early = gl.minimum(k_steps, STAGES)
    for i in range(early):
        mbarrier.expect(full.index(i), BYTES)
        tma_load(weight_boxes, [i_n * COLUMNS, i * DEPTH], full.index(i), weight_blocks.index(i))
    if PDL:
        wait_for_kernel_before()
    for i in range(early):
        tma_load(x_boxes, [i_m * ROWS, i * DEPTH], full.index(i), x_blocks.index(i))

    stage = early % STAGES
    parity = early // STAGES
    for tile in range(first_tile, n_tiles_m * n_tiles_n, gl.num_programs(0)):
        i_m, i_n = place_of(tile, n_tiles_m, n_tiles_n, GROUP)
        # Computed: Triton 3.6 gives every tile the value of a variable that is set to a constant after its first use.
        for i_k in range(gl.where(tile == first_tile, early, 0), k_steps):
            mbarrier.wait(empty.index(stage), parity ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            tma_load(weight_boxes, [i_n * COLUMNS, i_k * DEPTH], full.index(stage), weight_blocks.index(stage))
            tma_load(x_boxes, [i_m * ROWS, i_k * DEPTH], full.index(stage), x_blocks.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1


@gluon.jit
def store_columns(out_boxes, out_block, b_out, row, column):
    """Store b_out [rows, columns] through shared memory, a box's columns at a time."""
    HALF: gl.constexpr = b_out.shape[1] // 2
    if HALF >= out_boxes.block_type.shape[1]:
        b_left, b_right = b_out.reshape([b_out.shape[0], 2, HALF]).permute(0, 2, 1).split()
        store_columns(out_boxes, out_block, b_left, row, column)
        store_columns(out_boxes, out_block, b_right, row, column + HALF)
    else:
        # The store before, of the tile before too, has read the block.
        tma.store_wait(0)
        out_block.store(b_out)
        fence_async_shared()
        tma_store(out_boxes, [row, column], out_block)


@gluon.jit
def multiply_tiles(
    out_boxes,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    x_blocks,
    weight_blocks,
    out_blocks,
    full,
    empty,
    turns,
    M,
    N,
    n_tiles_m,
    n_tiles_n,
    k_steps,
    WHICH: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Warpgroup WHICH of two: every other tile of this program."""
    ROWS: gl.constexpr = x_blocks.shape[1]
    COLUMNS: gl.constexpr = weight_blocks.shape[1]
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, mma_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, mma_layout)
    # The other's first tile comes before this one's, if this is the second; a new barrier lets parity 1 pass.
    stage = WHICH * k_steps % STAGES
    parity = WHICH * k_steps // STAGES & 1
    turn = k_steps * 0 + 1 - WHICH
    if PDL:
        wait_for_kernel_before()

    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + WHICH * programs, n_tiles_m * n_tiles_n, 2 * programs):
        i_m, i_n = place_of(tile, n_tiles_m, n_tiles_n, GROUP)
        row, column = i_m * ROWS, i_n * COLUMNS
        o_m = row + gl.arange(0, ROWS, layout=row_layout)
        b_x_scale = gl.load(x_scale_ptr + o_m, mask=o_m < M, other=0.0)
        b_acc = gl.zeros([ROWS, COLUMNS], dtype=gl.int32, layout=mma_layout)
        mbarrier.wait(turns.index(WHICH), turn)
        turn ^= 1
        for i_k in range(k_steps):
            mbarrier.wait(full.index(stage), parity)
            b_acc = warpgroup_mma(x_blocks.index(stage), weight_blocks.index(stage).permute((1, 0)), b_acc, is_async=True)
            # All but this product are done, so the stage before is read. Computed: Triton 3.6 does not carry a variable from
            # step to step that begins as another's value.
            b_acc = warpgroup_mma_wait(1, deps=(b_acc,))
            mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)), pred=i_k > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        mbarrier.arrive(turns.index(1 - WHICH))

        # While the last product runs.
        o_n = column + gl.arange(0, COLUMNS, layout=column_layout)
        b_weight_scale = gl.load(weight_scale_ptr + o_n, mask=o_n < N, other=0.0)
        if HAS_BIAS:
            b_bias = gl.load(bias_ptr + o_n, mask=o_n < N, other=0.0)
        b_acc = warpgroup_mma_wait(0, deps=(b_acc,))
        mbarrier.arrive(empty.index(gl.where(stage == 0, STAGES - 1, stage - 1)))
        b_out = b_acc.to(gl.float32) * gl.expand_dims(b_x_scale, 1) * gl.expand_dims(b_weight_scale, 0)
        if HAS_BIAS:
            b_out += gl.expand_dims(b_bias.to(gl.float32), 0)
        store_columns(out_boxes, out_blocks.index(WHICH), b_out.to(out_boxes.dtype), row, column)
        # Past the other's tile.
        ahead = stage + k_steps
        parity ^= ahead // STAGES & 1
        stage = ahead % STAGES
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def scaled_mm_pingpong_kernel(
    x_boxes,
    weight_boxes,
    out_boxes,
    x_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [M, N] = x [M, K] @ weight [N, K].T with scales and bias applied, in boxes of [rows, BLOCK_K], [columns, BLOCK_K]
    and [rows, STORE_N]; what is beyond a matrix is loaded as zeros and not stored.

    PDL: as in `scaled_mm_split_k_kernel`.
    """
    # Gluon knows no starred lists.
    x_blocks = gl.allocate_shared_memory(gl.int8, [STAGES] + x_boxes.block_type.shape, x_boxes.layout)  # noqa: RUF005
    weight_blocks = gl.allocate_shared_memory(gl.int8, [STAGES] + weight_boxes.block_type.shape, weight_boxes.layout)  # noqa: RUF005
    out_blocks = gl.allocate_shared_memory(out_boxes.dtype, [2] + out_boxes.block_type.shape, out_boxes.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    if PDL:
        launch_dependents()

    n_tiles_m = gl.cdiv(M, x_boxes.block_type.shape[0])
    n_tiles_n = gl.cdiv(N, weight_boxes.block_type.shape[0])
    k_steps = gl.cdiv(K, x_boxes.block_type.shape[1])
    # Each warpgroup is a partition of its own: what Triton puts before an arrival, a barrier of the partition, would tie two.
    # Written out: constants stay constants only in a tuple that stands where it is passed.
    gl.warp_specialize(
        [
            (
                multiply_tiles,
                (
                    out_boxes, x_scale_ptr, weight_scale_ptr, bias_ptr, x_blocks, weight_blocks, out_blocks, full, empty,
                    turns, M, N, n_tiles_m, n_tiles_n, k_steps, 0, STAGES, GROUP, HAS_BIAS, PDL,
                ),
            ),
            (
                multiply_tiles,
                (
                    out_boxes, x_scale_ptr, weight_scale_ptr, bias_ptr, x_blocks, weight_blocks, out_blocks, full, empty,
                    turns, M, N, n_tiles_m, n_tiles_n, k_steps, 1, STAGES, GROUP, HAS_BIAS, PDL,
                ),
            ),
            (
                load_blocks,
                (
                    x_boxes, weight_boxes, x_blocks, weight_blocks, full, empty, n_tiles_m, n_tiles_n, k_steps, STAGES, GROUP,
                    PDL,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _boxes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[TensorDescriptor, ...]:
    codes = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    results = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return (
        TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K], codes),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], codes),
        TensorDescriptor.from_tensor(out, [BLOCK_M, STORE_N], results),
    )


def _aligned(t: torch.Tensor) -> torch.Tensor:
    """t [rows, columns], a copy where the tensor memory accelerator could not read it."""
    fits = t.stride(1) == 1 and t.stride(0) % TMA_ALIGNMENT == 0 and t.data_ptr() % TMA_ALIGNMENT == 0
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def scaled_mm_pingpong(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    num_sms: int,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch the GEMM; shapes as in `w8a8_kernels.scaled_mm`, N and K multiples of 16, out_dtype bf16 or fp16.

    The same bits as `scaled_mm_split_k`.

    Args:
        num_sms: multiprocessors of the GPU.
        pdl: programmatic dependent launch: start while the kernel before is still running.
    """
    M, K = x.shape
    N = weight.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=x.device)
    if M == 0 or N == 0:
        return out
    tiles = triton.cdiv(M, BLOCK_M) * triton.cdiv(N, BLOCK_N)
    scaled_mm_pingpong_kernel[(min(tiles, num_sms),)](
        *_boxes(_aligned(x), _aligned(weight), out),
        x_scale,
        weight_scale,
        bias,
        M,
        N,
        K,
        STAGES=STAGES,
        GROUP=GROUP_M,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        maxnreg=REGISTERS,
        **launch_options(pdl),
    )
    return out
