"""Compiling early, and counting what is compiled: a served model must not wait for a compiler."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from w8a8_kernels import ops
from w8a8_kernels.grouped_mm import select_experts
from w8a8_kernels.hadamard import check_block
from w8a8_kernels.quantize.config import quantize_variants
from w8a8_kernels.select import select_quantize
from w8a8_kernels.tiles import bucket_of

PACKAGE = __name__.partition(".")[0]

log = logging.getLogger(__name__)


class _Counter:
    """Counts this package's kernels through Triton's hook, which runs once for each new variant in a process."""

    def __init__(self, next_hook: Callable | None) -> None:
        self.count = 0
        self._next_hook = next_hook

    def __call__(self, **event) -> object:
        # What the hook is told differs between Triton's releases: `fn` is in all of them.
        if event["fn"].module.partition(".")[0] == PACKAGE:
            self.count += 1
        return None if self._next_hook is None else self._next_hook(**event)


@functools.cache
def _counter() -> _Counter:
    import triton

    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "jit_post_compile_hook"):
        raise RuntimeError(
            f"got Triton {triton.__version__} without triton.knobs.runtime.jit_post_compile_hook, which 3.6 and 3.9 have: "
            "compilations cannot be counted"
        )
    counter = _Counter(runtime.jit_post_compile_hook)
    runtime.jit_post_compile_hook = counter
    return counter


def compilations() -> int:
    """Variants of this package's kernels that this process has compiled, or loaded from Triton's cache, since the first call.

    Both count: another machine, or an emptied cache, would compile what this one loads.

    Raises:
        RuntimeError: the installed Triton has no hook to count with.
    """
    return _counter().count


def warmup_rows(most: int) -> list[int]:
    """Numbers of rows that reach every product up to `most` rows: the first and the last of each power-of-two bucket.

    All rules change at the end of a bucket or, as CUTLASS's lower bound, at the last row of one.
    """
    buckets = [1 << i for i in range(bucket_of(most).bit_length())]
    return sorted({min(rows, most) for bucket in buckets for rows in (bucket // 2 + 1, bucket)})


def warmup(
    shapes: Iterable[tuple[int, int]],
    batch_sizes: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    fused: bool = True,
    hadamard: int = 0,
) -> int:
    """Run quantizers and product in every variant that these layers can reach, so that nothing compiles later.

    Args:
        shapes: (N, K) of the weights.
        batch_sizes: numbers of rows; all from 1 to the largest are covered.
        dtype: of the activations.
        bias: whether the layers have one.
        fused: whether RMSNorm and SiLU·mul may come fused with the quantizer; False leaves these kernels out.
        hadamard: size of the blocks that the quantizer transforms first, a divisor of every K; 0 for none.

    Returns:
        how many kernels were compiled or loaded from Triton's cache; 0 without a GPU, where nothing is compiled.

    Raises:
        ValueError: no batch size, or one below 1; another dtype; no such block.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"warmup: got batch sizes {list(batch_sizes)}, expected one at least, each from 1")
    if dtype not in ops.ACTIVATION_DTYPES:
        raise ValueError(f"warmup: got {dtype}, expected bf16, fp16 or fp32")
    shapes = list(dict.fromkeys(shapes))
    for _, K in shapes:
        check_block(hadamard, K, "warmup")
    if not torch.cuda.is_available():
        log.warning("warmup: PyTorch sees no GPU, so there is nothing to compile")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    if not ops.device_facts(device).has_triton:
        log.warning("warmup: the package triton is not installed, so there is nothing to compile")
        return 0
    before = compilations()
    for N, K in shapes:
        weight = torch.zeros((N, K), dtype=torch.int8, device=device)
        scale = torch.ones((N, 1), dtype=torch.float32, device=device)
        zeros = torch.zeros(N, dtype=dtype, device=device) if bias else None
        warm_up_linear(weight, scale, zeros, max(batch_sizes), dtype, fused=fused, hadamard=hadamard)
    torch.cuda.synchronize(device)
    return compilations() - before


def warm_up_linear(
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    most: int,
    dtype: torch.dtype,
    *,
    fused: bool,
    hadamard: int = 0,
    shared_amax: bool = False,
) -> None:
    """Run what one layer calls once in every variant that 1 to `most` rows of contiguous activations reach.

    Each variant runs with the fewest rows that reach it. Where no Triton kernel serves the layer, nothing runs.

    Args:
        weight: codes [N, K] int8, as the layer holds it, on the GPU.
        weight_scale: [N, 1] fp32.
        bias: [N] floating, or None.
        most: the largest number of rows, from 1.
        dtype: of the activations: bf16, fp16 or fp32.
        fused: whether RMSNorm and SiLU·mul may come fused with the layer's quantizer.
        hadamard: the block with which the weight was transformed, 0 for none.
        shared_amax: whether `quantize_amax` and `quantize(..., amax=...)` serve the layer, instead of all other quantizers.
    """
    if weight.numel():
        _warm_up_quantizers(weight.shape[1], most, dtype, weight.device, fused, hadamard, shared_amax)
        _warm_up_product(weight, weight_scale, bias, most, dtype)


@torch.no_grad()
def warm_up_experts(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    expert_map: torch.Tensor | None,
    top_k: int,
    most: int,
    dtype: torch.dtype,
    *,
    hadamard13: int = 0,
    hadamard2: int = 0,
    apply_weight_on_input: bool = False,
) -> None:
    """Run `int8_experts` once in every variant that 1 to `most` tokens reach: tiles change at powers of two.

    Args:
        w13, w13_scale, w2, w2_scale, expert_map: as the layer holds them, on the GPU.
        top_k: experts of a token.
        most: the largest number of tokens, from 1.
        dtype: of the activations: bf16, fp16 or fp32.
        hadamard13, hadamard2, apply_weight_on_input: as in `int8_experts`.
    """
    if select_experts(ops.device_facts(w13.device)).kernel != "triton":
        return
    num_experts = w13.shape[0] if expert_map is None else expert_map.numel()
    for T in sorted({*warmup_rows(most), most}):
        x = torch.zeros((T, w13.shape[2]), dtype=dtype, device=w13.device)
        ids = torch.arange(T * top_k, dtype=torch.int32, device=w13.device).remainder_(num_experts).view(T, top_k)
        ops.int8_experts(
            x,
            w13,
            w13_scale,
            w2,
            w2_scale,
            torch.ones((T, top_k), dtype=torch.float32, device=w13.device),
            ids,
            hadamard13=hadamard13,
            hadamard2=hadamard2,
            expert_map=expert_map,
            apply_weight_on_input=apply_weight_on_input,
        )


@torch.no_grad()
def _warm_up_quantizers(
    K: int, most: int, dtype: torch.dtype, device: torch.device, fused: bool, hadamard: int, shared_amax: bool
) -> None:
    if select_quantize(ops.device_facts(device)).kernel != "triton":
        return

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    # Of all ops: where one keeps its tile, it is launched once more and compiles nothing.
    rows = {M for held in (1, 2) for M in quantize_variants(K, dtype, held, hadamard) if M <= most}
    for M in sorted(rows):
        if shared_amax:
            amax = torch.ops.w8a8.quantize_amax(zeros(M, K), hadamard=hadamard)
            torch.ops.w8a8.quantize_with_amax(zeros(M, K), amax, hadamard=hadamard)
            continue
        torch.ops.w8a8.quantize(zeros(M, K), hadamard=hadamard)
        if fused:
            torch.ops.w8a8.rms_norm_quantize(zeros(M, K), zeros(K), 1e-6, hadamard=hadamard)
            torch.ops.w8a8.add_rms_norm_quantize(zeros(M, K), zeros(M, K), zeros(K), 1e-6, hadamard=hadamard)
            torch.ops.w8a8.silu_mul_quantize(zeros(M, 2 * K), hadamard=hadamard)


@torch.no_grad()
def _warm_up_product(
    weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, most: int, dtype: torch.dtype
) -> None:
    N, K = weight.shape
    device = weight.device
    fewest: dict[object, int] = {}
    for M in warmup_rows(most):
        fewest.setdefault(_triton_tile(device, M, N, K, dtype), M)
    fewest.pop(None, None)
    for M in fewest.values():
        codes = torch.zeros((M, K), dtype=torch.int8, device=device)
        scale = torch.ones((M, 1), dtype=torch.float32, device=device)
        torch.ops.w8a8.scaled_mm(codes, scale, weight, weight_scale, bias, dtype)


def _triton_tile(device: torch.device, M: int, N: int, K: int, dtype: torch.dtype) -> object | None:
    """What tells the variants of the Triton kernel that multiplies M rows apart, its tile; None where none does."""
    kernel = ops.choose_scaled_mm(device, M, N, K, dtype).kernel
    if kernel == "triton":
        return ops.measured_tile(device, M, N, K)
    if kernel == "pingpong":
        return kernel
    if kernel == "dp4a":
        from w8a8_kernels.scaled_mm.dp4a import default_tile

        return default_tile(M, N, K, ops._num_sms(device))
    return None
