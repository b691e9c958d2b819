"""Compiling early, and counting what is compiled: a served model must not wait for a compiler."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from w8a8_kernels.ops import ACTIVATION_DTYPES, choose_scaled_mm, device_facts, int8_linear, measured_tile
from w8a8_kernels.quantize.config import quantize_config
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
    """Numbers of rows that reach every variant up to `most` rows: the first and the last of each power-of-two bucket.

    All rules change at the end of a bucket or, as CUTLASS's lower bound, at the last row of one.
    """
    buckets = [1 << i for i in range(bucket_of(most).bit_length())]
    return sorted({min(rows, most) for bucket in buckets for rows in (bucket // 2 + 1, bucket)})


def warmup(
    shapes: Iterable[tuple[int, int]],
    batch_sizes: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> int:
    """Run quantizer and product in every variant that these layers can reach, so that nothing compiles later.

    Args:
        shapes: (N, K) of the weights.
        batch_sizes: numbers of rows; all from 1 to the largest are covered.
        dtype: of the activations.
        bias: whether the layers have one.

    Returns:
        how many kernels were compiled or loaded from Triton's cache; 0 without a GPU, where nothing is compiled.

    Raises:
        ValueError: no batch size, or one below 1; another dtype.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"warmup: got batch sizes {list(batch_sizes)}, expected one at least, each from 1")
    if dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"warmup: got {dtype}, expected bf16, fp16 or fp32")
    if not torch.cuda.is_available():
        log.warning("warmup: PyTorch sees no GPU, so there is nothing to compile")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    if not device_facts(device).has_triton:
        log.warning("warmup: the package triton is not installed, so there is nothing to compile")
        return 0
    before = compilations()
    for N, K in dict.fromkeys(shapes):
        weight = torch.zeros((N, K), dtype=torch.int8, device=device)
        scale = torch.ones((N, 1), device=device)
        zeros = torch.zeros(N, dtype=dtype, device=device) if bias else None
        done = set()
        for M in warmup_rows(max(batch_sizes)):
            variant = quantize_config(M, K, dtype), _product_variant(device, M, N, K, dtype)
            if variant not in done:
                int8_linear(torch.zeros((M, K), dtype=dtype, device=device), weight, scale, zeros)
                done.add(variant)
    torch.cuda.synchronize(device)
    return compilations() - before


def _product_variant(device: torch.device, M: int, N: int, K: int, dtype: torch.dtype) -> tuple:
    kernel = choose_scaled_mm(device, M, N, K, dtype).kernel
    if kernel == "triton":
        return kernel, measured_tile(device, M, N, K)
    if kernel == "dp4a":
        from w8a8_kernels.scaled_mm.dp4a import default_tile

        return kernel, default_tile(M, N, K, torch.cuda.get_device_properties(device).multi_processor_count)
    return (kernel,)
