"""The registered ops `torch.ops.w8a8.*` and the public functions over them.

Ops are opaque to torch.compile and have fake implementations, so that eager and compiled code run the same kernels and
give the same codes. Which kernel runs is decided by `w8a8_kernels.select` from facts about the device, collected once.
"""

import functools
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import library

from w8a8_kernels.grouped_mm.config import ExpertsPlan, experts_plan, select_experts
from w8a8_kernels.grouped_mm.reference import int8_experts_reference
from w8a8_kernels.hadamard import check_block
from w8a8_kernels.quantize.reference import (
    add_rms_norm_quantize_reference,
    quantize_amax_reference,
    quantize_reference,
    rms_norm_quantize_reference,
    silu_mul_quantize_reference,
)
from w8a8_kernels.scaled_mm.cutlass import has_cutlass, scaled_mm_cutlass
from w8a8_kernels.scaled_mm.onednn import (
    check_packed,
    has_onednn,
    onednn_saturates,
    pack_weight_onednn,
    release_packed_weight_onednn,
    scaled_mm_onednn,
)
from w8a8_kernels.scaled_mm.reference import scaled_mm_reference
from w8a8_kernels.select import (
    GLUON_VERSIONS,
    KERNEL_VARIABLE,
    MAX_K,
    PINGPONG_CAPABILITY,
    Choice,
    Facts,
    has_dependent_launch,
    select_quantize,
    select_scaled_mm,
)
from w8a8_kernels.tiles import Tile, kernel_for, tile_for

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# The library object must stay alive: dropping it unregisters the ops.
_LIBRARY = library.Library("w8a8", "FRAGMENT")
_LIBRARY.define("quantize(Tensor x, int hadamard=0) -> (Tensor, Tensor)")
_LIBRARY.define("quantize_amax(Tensor x, int hadamard=0) -> Tensor")
_LIBRARY.define("quantize_with_amax(Tensor x, Tensor amax, int hadamard=0) -> (Tensor, Tensor)")
_LIBRARY.define(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, float weight_offset=0.0, int hadamard=0) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "add_rms_norm_quantize(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0, int hadamard=0)"
    " -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define("silu_mul_quantize(Tensor x, int hadamard=0) -> (Tensor, Tensor)")
_LIBRARY.define(
    "scaled_mm(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
_LIBRARY.define(
    "scaled_mm_packed(Tensor x, Tensor x_scale, Tensor packed, int N, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
_LIBRARY.define(
    "int8_experts(Tensor x, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor topk_weights, Tensor topk_ids,"
    " int hadamard13=0, int hadamard2=0, Tensor? expert_map=None, bool apply_weight_on_input=False, Tensor? w13_bias=None,"
    " Tensor? w2_bias=None) -> Tensor"
)


def device_facts(device: torch.device) -> Facts:
    """What `device` offers to `w8a8_kernels.select`. For a GPU: initializes CUDA."""
    if device.type == "cpu":
        return Facts(capability=None, has_onednn=has_onednn(), onednn_saturates=onednn_saturates())
    return _gpu_facts(device)


@functools.cache
def _gpu_facts(device: torch.device) -> Facts:
    has_triton = importlib.util.find_spec("triton") is not None
    capability = torch.cuda.get_device_capability(device)
    has_gluon = has_triton and capability == PINGPONG_CAPABILITY and _has_gluon()
    return Facts(capability, has_triton=has_triton, has_cutlass=has_cutlass(), has_gluon=has_gluon)


def _has_gluon() -> bool:
    """Whether Triton's Gluon, which changes from version to version, is one that the ping-pong product was compiled with."""
    import triton

    return GLUON_VERSIONS[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= GLUON_VERSIONS[1]


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def choose_scaled_mm(device: torch.device, M: int, N: int, K: int, out_dtype: torch.dtype = torch.bfloat16) -> Choice:
    """`select_scaled_mm` with what was measured on this device; M from 1. Raises as that and `w8a8_kernels.tiles.tile_for`."""
    facts = device_facts(device)
    measured = None
    if facts.has_cutlass or facts.has_gluon:
        measured = kernel_for(M, N, K, device_name=_device_name(device), capability=facts.capability)
    return select_scaled_mm(facts, M, N, K, out_dtype, measured=measured)


def measured_tile(device: torch.device, M: int, N: int, K: int) -> Tile:
    """`w8a8_kernels.tiles.tile_for` this GPU; M from 1."""
    capability = device_facts(device).capability
    return tile_for(M, N, K, device_name=_device_name(device), capability=capability, num_sms=_num_sms(device))


def row_options(device: torch.device) -> dict | None:
    """Keyword arguments of the Triton row-wise kernels, or None where the reference in torch runs instead."""
    facts = device_facts(device)
    if select_quantize(facts).kernel != "triton":
        return None
    from w8a8_kernels.quantize.device import transforms_on_tensor_cores
    from w8a8_kernels.quantize.stream import STREAM_MEASURED

    return {
        "tensor_cores": transforms_on_tensor_cores(facts.capability),
        "stream_sms": _num_sms(device) if facts.capability == STREAM_MEASURED else 0,
        "pdl": has_dependent_launch(facts.capability),
    }


def _quantize_cuda(x: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    options = row_options(x.device)
    if options is None:
        return quantize_reference(x, hadamard)
    from w8a8_kernels.quantize.row import quantize_row

    return quantize_row(x, hadamard, **options)


def _quantize_amax_cuda(x: torch.Tensor, hadamard: int = 0) -> torch.Tensor:
    options = row_options(x.device)
    if options is None:
        return quantize_amax_reference(x, hadamard)
    from w8a8_kernels.quantize.row import quantize_amax_row

    del options["stream_sms"]
    return quantize_amax_row(x, hadamard, **options)


def _quantize_with_amax_cpu(x: torch.Tensor, amax: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_reference(x, hadamard, amax)


def _quantize_with_amax_cuda(x: torch.Tensor, amax: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    options = row_options(x.device)
    if options is None:
        return quantize_reference(x, hadamard, amax)
    from w8a8_kernels.quantize.row import quantize_row

    return quantize_row(x, hadamard, amax, **options)


def _rms_norm_quantize_cuda(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    options = row_options(x.device)
    if options is None:
        return rms_norm_quantize_reference(x, weight, eps, weight_offset, hadamard)
    from w8a8_kernels.quantize.rms_norm import rms_norm_quantize_row

    return rms_norm_quantize_row(x, weight, eps, weight_offset, hadamard, **options)


def _add_rms_norm_quantize_cuda(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = row_options(x.device)
    if options is None:
        return add_rms_norm_quantize_reference(x, residual, weight, eps, weight_offset, hadamard)
    from w8a8_kernels.quantize.rms_norm import add_rms_norm_quantize_row

    return add_rms_norm_quantize_row(x, residual, weight, eps, weight_offset, hadamard, **options)


def _silu_mul_quantize_cuda(x: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    options = row_options(x.device)
    if options is None:
        return silu_mul_quantize_reference(x, hadamard)
    from w8a8_kernels.quantize.silu_mul import silu_mul_quantize_row

    return silu_mul_quantize_row(x, hadamard, **options)


def _scaled_mm_cpu(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    choice = select_scaled_mm(device_facts(x.device))  # raises where a kernel is forced that does not run here
    if choice.kernel == "onednn" and os.environ.get(KERNEL_VARIABLE) and x.numel() and weight.numel():
        # Forced, and not packed by `pack_weight`: right, but slow.
        packed = pack_weight_onednn(weight, weight_scale, out_dtype)
        try:
            return scaled_mm_onednn(x, x_scale, packed, weight.shape[0], bias, out_dtype)
        finally:
            release_packed_weight_onednn(packed)
    return scaled_mm_reference(x, x_scale, weight, weight_scale, bias, out_dtype)


def _on_cpu(reference: Callable, select: Callable[[Facts], Choice]) -> Callable:
    """The reference as an op of CPUs: it raises where a kernel is forced that does not run there."""

    @functools.wraps(reference)
    def op(*args, **kwargs):
        select(device_facts(torch.device("cpu")))
        return reference(*args, **kwargs)

    return op


def _scaled_mm_cuda(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    M, N, K = x.shape[0], *weight.shape
    if M == 0 or N == 0:
        return x.new_empty((M, N), dtype=out_dtype)
    kernel = choose_scaled_mm(x.device, M, N, K, out_dtype).kernel
    if kernel == "triton":
        from w8a8_kernels.scaled_mm.split_k import scaled_mm_split_k

        facts = device_facts(x.device)
        return scaled_mm_split_k(
            x,
            x_scale,
            weight,
            weight_scale,
            bias,
            out_dtype,
            num_sms=_num_sms(x.device),
            capability=facts.capability,
            tile=measured_tile(x.device, M, N, K),
            pdl=has_dependent_launch(facts.capability),
        )
    if kernel == "cutlass":
        return scaled_mm_cutlass(x, x_scale, weight, weight_scale, bias, out_dtype)
    if kernel == "pingpong":
        from w8a8_kernels.scaled_mm.pingpong import scaled_mm_pingpong

        pdl = has_dependent_launch(device_facts(x.device).capability)
        return scaled_mm_pingpong(x, x_scale, weight, weight_scale, bias, out_dtype, num_sms=_num_sms(x.device), pdl=pdl)
    if kernel == "dp4a":
        from w8a8_kernels.scaled_mm.dp4a import scaled_mm_dp4a

        return scaled_mm_dp4a(x, x_scale, weight, weight_scale, bias, out_dtype, num_sms=_num_sms(x.device))
    return scaled_mm_reference(x, x_scale, weight, weight_scale, bias, out_dtype)


def plan_experts(
    device: torch.device, T: int, top_k: int, w13: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None
) -> ExpertsPlan:
    """`experts_plan` for this GPU and these weights; T from 1."""
    experts, hidden, intermediate = w2.shape
    return experts_plan(
        T,
        top_k,
        experts=experts,
        num_global_experts=experts if expert_map is None else expert_map.numel(),
        hidden=hidden,
        intermediate=intermediate,
        capability=device_facts(device).capability,
        num_sms=_num_sms(device),
    )


def _int8_experts_cuda(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    hadamard13: int = 0,
    hadamard2: int = 0,
    expert_map: torch.Tensor | None = None,
    apply_weight_on_input: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    T, top_k = topk_ids.shape
    if x.numel() == 0 or top_k == 0:
        return x.new_zeros(x.shape)
    arguments = (x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, hadamard13, hadamard2, expert_map)
    arguments += (apply_weight_on_input, w13_bias, w2_bias)
    facts = device_facts(x.device)
    if select_experts(facts).kernel != "triton":
        return int8_experts_reference(*arguments)
    from w8a8_kernels.grouped_mm.experts import int8_experts_grouped

    return int8_experts_grouped(
        *arguments, plan=plan_experts(x.device, T, top_k, w13, w2, expert_map), **row_options(x.device)
    )


_LIBRARY.impl("quantize", _on_cpu(quantize_reference, select_quantize), "CPU")
_LIBRARY.impl("quantize", _quantize_cuda, "CUDA")
_LIBRARY.impl("quantize_amax", _on_cpu(quantize_amax_reference, select_quantize), "CPU")
_LIBRARY.impl("quantize_amax", _quantize_amax_cuda, "CUDA")
_LIBRARY.impl("quantize_with_amax", _on_cpu(_quantize_with_amax_cpu, select_quantize), "CPU")
_LIBRARY.impl("quantize_with_amax", _quantize_with_amax_cuda, "CUDA")
_LIBRARY.impl("rms_norm_quantize", _on_cpu(rms_norm_quantize_reference, select_quantize), "CPU")
_LIBRARY.impl("rms_norm_quantize", _rms_norm_quantize_cuda, "CUDA")
_LIBRARY.impl("add_rms_norm_quantize", _on_cpu(add_rms_norm_quantize_reference, select_quantize), "CPU")
_LIBRARY.impl("add_rms_norm_quantize", _add_rms_norm_quantize_cuda, "CUDA")
_LIBRARY.impl("silu_mul_quantize", _on_cpu(silu_mul_quantize_reference, select_quantize), "CPU")
_LIBRARY.impl("silu_mul_quantize", _silu_mul_quantize_cuda, "CUDA")
_LIBRARY.impl("scaled_mm", _scaled_mm_cpu, "CPU")
_LIBRARY.impl("scaled_mm", _scaled_mm_cuda, "CUDA")
_LIBRARY.impl("scaled_mm_packed", scaled_mm_onednn, "CPU")
_LIBRARY.impl("int8_experts", _on_cpu(int8_experts_reference, select_experts), "CPU")
_LIBRARY.impl("int8_experts", _int8_experts_cuda, "CUDA")


@library.register_fake("w8a8::quantize")
def _quantize_fake(x: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@library.register_fake("w8a8::quantize_amax")
def _quantize_amax_fake(x: torch.Tensor, hadamard: int = 0) -> torch.Tensor:
    return x.new_empty((x.shape[0], 1), dtype=torch.float32)


@library.register_fake("w8a8::quantize_with_amax")
def _quantize_with_amax_fake(x: torch.Tensor, amax: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_fake(x)


@library.register_fake("w8a8::rms_norm_quantize")
def _rms_norm_quantize_fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_fake(x)


@library.register_fake("w8a8::add_rms_norm_quantize")
def _add_rms_norm_quantize_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *_quantize_fake(x), x.new_empty(x.shape)


@library.register_fake("w8a8::silu_mul_quantize")
def _silu_mul_quantize_fake(x: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_fake(x.new_empty((x.shape[0], x.shape[1] // 2)))


@library.register_fake("w8a8::scaled_mm")
def _scaled_mm_fake(x, x_scale, weight, weight_scale, bias, out_dtype):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


@library.register_fake("w8a8::scaled_mm_packed")
def _scaled_mm_packed_fake(x, x_scale, packed, N, bias, out_dtype):
    return x.new_empty((x.shape[0], N), dtype=out_dtype)


@library.register_fake("w8a8::int8_experts")
def _int8_experts_fake(x, *arguments, **options):
    return x.new_empty(x.shape)


def quantize(x: torch.Tensor, hadamard: int = 0, amax: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization of every row by its own absolute maximum; the rule is in `quantize_reference`.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows of any stride; M and K from 0.
        hadamard: size of the blocks that are transformed first (`w8a8_kernels.hadamard`), a divisor of K; 0 for none.
        amax: [M, 1] fp32, where x holds only some columns of each row (a tensor-parallel shard, which must cut no block): the
            elementwise maximum of `quantize_amax` of all shards, NaN where one is NaN. It is not checked: values beyond it get
            arbitrary codes. Default: taken from x.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32, without a transform the same bits on every device and kernel; with `amax`
        those of whole rows.

    Raises:
        ValueError: x or amax has another shape or dtype, or no such block fits.
    """
    _check_rows("quantize", x, hadamard)
    if amax is None:
        return torch.ops.w8a8.quantize(x, hadamard)
    if amax.shape != (x.shape[0], 1) or amax.dtype != torch.float32:
        raise ValueError(
            f"quantize: got amax of shape {tuple(amax.shape)} and dtype {amax.dtype}, expected ({x.shape[0]}, 1) in fp32, as "
            "quantize_amax gives it"
        )
    return torch.ops.w8a8.quantize_with_amax(x, amax, hadamard)


def quantize_amax(x: torch.Tensor, hadamard: int = 0) -> torch.Tensor:
    """Greatest magnitude of every row, or of its Hadamard transform before that is normalized, for `quantize(..., amax=...)`.

    Args:
        x, hadamard: as in `quantize`.

    Returns:
        [M, 1] fp32, NaN or inf for a row that holds one. No sign bit is set: as int32 their bits have the same order, with NaN
        above inf.

    Raises:
        ValueError: x has another rank or dtype, or no such block fits.
    """
    _check_rows("quantize_amax", x, hadamard)
    return torch.ops.w8a8.quantize_amax(x, hadamard)


def _check_rows(op: str, x: torch.Tensor, hadamard: int) -> None:
    if x.dim() != 2 or x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"{op}: got x of shape {tuple(x.shape)} and dtype {x.dtype}, expected [M, K] in bf16, fp16 or fp32")
    check_block(hadamard, x.shape[1], op)


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` of the RMSNorm of every row, in one kernel on a GPU; the rounding is in `rms_norm_reference`.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows of any stride; M from 0, K from 1.
        weight: [K], bf16, fp16 or fp32.
        eps: added to the mean of the squares.
        weight_offset: added to the weight in fp32: 1.0 for Gemma's norm, 0.0 for others.
        hadamard: as in `quantize`.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_norm("rms_norm_quantize", x, None, weight)
    check_block(hadamard, x.shape[1], "rms_norm_quantize")
    return torch.ops.w8a8.rms_norm_quantize(x, weight, eps, weight_offset, hadamard)


def add_rms_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, hadamard: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm_quantize` of `x + residual`, and that sum; the rounding is in `add_rms_norm_quantize_reference`.

    Args:
        x, weight, eps, weight_offset, hadamard: as in `rms_norm_quantize`.
        residual: [M, K] of x's dtype; rows of any stride. It is not changed.

    Returns:
        codes [M, K] int8, scale [M, 1] fp32 and the sum [M, K] in x's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_norm("add_rms_norm_quantize", x, residual, weight)
    check_block(hadamard, x.shape[1], "add_rms_norm_quantize")
    return torch.ops.w8a8.add_rms_norm_quantize(x, residual, weight, eps, weight_offset, hadamard)


def silu_mul_quantize(x: torch.Tensor, hadamard: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` of `silu(x[:, :K]) * x[:, K:]`, in one kernel on a GPU; the rounding is in `silu_mul_reference`.

    Args:
        x: [M, 2K], bf16, fp16 or fp32; rows of any stride; M and K from 0.
        hadamard: as in `quantize`.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32.

    Raises:
        ValueError: x has another rank or dtype, or an odd number of columns.
    """
    if x.dim() != 2 or x.dtype not in ACTIVATION_DTYPES or x.shape[1] % 2:
        raise ValueError(
            f"silu_mul_quantize: got x of shape {tuple(x.shape)} and dtype {x.dtype}, expected [M, 2K] in bf16, fp16 or fp32"
        )
    check_block(hadamard, x.shape[1] // 2, "silu_mul_quantize")
    return torch.ops.w8a8.silu_mul_quantize(x, hadamard)


def _check_norm(op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    if x.dim() != 2 or x.dtype not in ACTIVATION_DTYPES or x.shape[1] == 0:
        raise ValueError(
            f"{op}: got x of shape {tuple(x.shape)} and dtype {x.dtype}, expected [M, K] with K >= 1 in bf16, fp16 or fp32"
        )
    if weight.shape != x.shape[1:] or weight.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"{op}: got weight of shape {tuple(weight.shape)} and dtype {weight.dtype}, expected {tuple(x.shape[1:])} in "
            "bf16, fp16 or fp32"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{op}: got residual of shape {tuple(residual.shape)} and dtype {residual.dtype}, expected {tuple(x.shape)} and "
            f"{x.dtype}, as x has"
        )


def scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`(x @ weight.T) * x_scale * weight_scale (+ bias)`: int32 sums, scales and bias in fp32, rounded once to `out_dtype`.

    Args:
        x: codes [M, K] int8.
        x_scale: [M, 1] fp32.
        weight: codes [N, K] int8.
        weight_scale: [N, 1] fp32.
        bias: [N] floating, or None. From compute capability 9.0 on, weight, weight_scale and bias are read before the op
            launched just before has ended: they may be no result of another op of this package. Those of `quantize_weight`
            may.
        out_dtype: bf16, fp16 (values beyond 65504 become inf) or fp32.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ValueError: shapes or dtypes do not fit, or K is so large that int32 sums could overflow.
    """
    if out_dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"scaled_mm: got out_dtype {out_dtype}, expected {' or '.join(map(str, ACTIVATION_DTYPES))}")
    M, K = x.shape if x.dim() == 2 else (0, 0)
    N = weight.shape[0] if weight.dim() == 2 else 0
    expected = {
        "x": (x, (M, K), (torch.int8,)),
        "x_scale": (x_scale, (M, 1), (torch.float32,)),
        "weight": (weight, (N, K), (torch.int8,)),
        "weight_scale": (weight_scale, (N, 1), (torch.float32,)),
        "bias": (bias, (N,), ACTIVATION_DTYPES),
    }
    _check_tensors("scaled_mm", expected, x.device)
    _check_sums("scaled_mm", K)
    return torch.ops.w8a8.scaled_mm(x, x_scale, weight, weight_scale, bias, out_dtype)


def pack_weight(weight: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor | None:
    """Weight in the form that this device's selected kernel wants, for `int8_linear(packed=...)`.

    Args:
        weight: codes [N, K] int8.
        weight_scale: [N, 1] fp32; must outlive the result.
        out_dtype: the activation dtype of the layer.

    Returns:
        An opaque tensor, or None where the kernel reads `weight` as it is (then keep the weight).

    Raises:
        ValueError: shapes or dtypes do not fit, or K is so large that int32 sums could overflow.
    """
    N, K = weight.shape if weight.dim() == 2 else (0, 0)
    expected = {"weight": (weight, (N, K), (torch.int8,)), "weight_scale": (weight_scale, (N, 1), (torch.float32,))}
    _check_tensors("pack_weight", expected, weight.device)
    _check_sums("pack_weight", K)
    if weight.numel() and select_scaled_mm(device_facts(weight.device)).kernel == "onednn":
        return pack_weight_onednn(weight, weight_scale, out_dtype)
    return None


def release_packed_weight(packed: torch.Tensor) -> None:
    """Free the memory of what `pack_weight` gave; it, and copies of it, must not be used any more."""
    release_packed_weight_onednn(packed)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
    hadamard: int = 0,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer with int8 weights whose input is quantized per token.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        weight: codes [N, K] int8; not read where `packed` is given.
        weight_scale: [N, 1] fp32.
        bias: [N] floating, or None.
        packed: what `pack_weight` returned for x's dtype.
        hadamard: the block with which the weight was transformed before it was quantized; 0 for none.
        amax: as in `quantize`, of the rows of x as a matrix [-1, K].

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or the block do not fit; not in compiled graphs.
    """
    if not torch.compiler.is_compiling():  # there, what is compared would become guards
        _check_linear(x, weight, weight_scale, bias, packed, hadamard, amax)
    rows = x.reshape(-1, x.shape[-1])
    if amax is None:
        codes, x_scale = torch.ops.w8a8.quantize(rows, hadamard)
    else:
        codes, x_scale = torch.ops.w8a8.quantize_with_amax(rows, amax, hadamard)
    N = weight_scale.shape[0]
    if packed is not None:
        out = torch.ops.w8a8.scaled_mm_packed(codes, x_scale, packed, N, bias, x.dtype)
    else:
        out = torch.ops.w8a8.scaled_mm(codes, x_scale, weight, weight_scale, bias, x.dtype)
    return out.reshape(*x.shape[:-1], N)


def _check_linear(x, weight, weight_scale, bias, packed, hadamard: int, amax) -> None:
    if x.dim() == 0 or x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"int8_linear: got x of shape {tuple(x.shape)} and dtype {x.dtype}, expected [..., K] in bf16, fp16 or fp32"
        )
    if weight is None and packed is None:
        raise ValueError("int8_linear: got neither weight nor packed, expected one of them")
    N, K = weight_scale.shape[0] if weight_scale.dim() else 0, x.shape[-1]
    rows = x.numel() // K if K else x.shape[:-1].numel()
    expected = {
        "weight": (weight if packed is None else None, (N, K), (torch.int8,)),
        "weight_scale": (weight_scale, (N, 1), (torch.float32,)),
        "bias": (bias, (N,), ACTIVATION_DTYPES),
        "amax": (amax, (rows, 1), (torch.float32,)),
    }
    _check_tensors("int8_linear", expected, x.device)
    check_block(hadamard, K, "int8_linear")
    _check_sums("int8_linear", K)
    if packed is not None:
        check_packed(packed, N, K, x.dtype)


def _check_tensors(
    op: str, expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]], device: torch.device
) -> None:
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"{op}: got {name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected {shape} and "
                f"{' or '.join(map(str, dtypes))}"
            )
        if tensor.device != device:
            raise ValueError(f"{op}: got {name} on {tensor.device}, expected {device}, where the other tensors are")


def _check_sums(op: str, K: int) -> None:
    if K > MAX_K:
        raise ValueError(f"{op}: got K = {K}, expected at most {MAX_K}: larger int32 sums could overflow")


def int8_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    hadamard13: int = 0,
    hadamard2: int = 0,
    expert_map: torch.Tensor | None = None,
    apply_weight_on_input: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """A layer of experts with int8 weights: the weighted sum of `w2 @ (silu(gate @ x) * (up @ x))` over each token's experts.

    Inputs of both products are quantized per row, as in `quantize` and `silu_mul_quantize`; the products are those of
    `scaled_mm`, rounded to x's dtype; weights and sum over the experts are in fp32, in the order of `topk_ids`, rounded once.

    Args:
        x: [T, hidden], bf16, fp16 or fp32; rows of any stride.
        w13: codes [E, 2 * intermediate, hidden] int8, each expert's gate above its up projection; neighbouring columns side by
            side.
        w13_scale: [E, 2 * intermediate, 1] fp32.
        w2: codes [E, hidden, intermediate] int8, likewise.
        w2_scale: [E, hidden, 1] fp32.
        topk_weights: [T, top_k], bf16, fp16 or fp32.
        topk_ids: [T, top_k] int32 or int64. An id that is no expert's, such as -1, contributes zero.
        hadamard13, hadamard2: the blocks with which w13 and w2 were transformed before they were quantized; 0 for none.
        expert_map: [num_global_experts] int32, for expert parallelism: index in w13 and w2 of each expert, -1 where another
            rank holds it, whose pairs contribute zero. Values are not checked. Default: ids are indices.
        apply_weight_on_input: multiply a pair's x (its scale, in fp32) by its weight, instead of its result.
        w13_bias: [E, 2 * intermediate] floating, or None.
        w2_bias: [E, hidden] floating, or None.
        activation: "silu", the only one there is.

    Returns:
        [T, hidden] in x's dtype.

    Raises:
        ValueError: shapes, dtypes, strides or blocks do not fit, another activation, or rows so long that int32 sums could
            overflow.
    """
    if activation != "silu":
        raise ValueError(f"int8_experts: got activation {activation!r}, expected 'silu', the only one that is implemented")
    if x.dim() != 2 or w2.dim() != 3 or topk_ids.dim() != 2:
        raise ValueError(
            f"int8_experts: got x of shape {tuple(x.shape)}, w2 of shape {tuple(w2.shape)} and topk_ids of shape "
            f"{tuple(topk_ids.shape)}, expected [T, hidden], [E, hidden, intermediate] and [T, top_k]"
        )
    (T, hidden), (E, _, intermediate), top_k = x.shape, w2.shape, topk_ids.shape[1]
    expected = {
        "x": (x, (T, hidden), ACTIVATION_DTYPES),
        "w13": (w13, (E, 2 * intermediate, hidden), (torch.int8,)),
        "w13_scale": (w13_scale, (E, 2 * intermediate, 1), (torch.float32,)),
        "w2": (w2, (E, hidden, intermediate), (torch.int8,)),
        "w2_scale": (w2_scale, (E, hidden, 1), (torch.float32,)),
        "topk_weights": (topk_weights, (T, top_k), ACTIVATION_DTYPES),
        "topk_ids": (topk_ids, (T, top_k), (torch.int32, torch.int64)),
    }
    if expert_map is not None:
        expected["expert_map"] = (expert_map, (expert_map.numel(),), (torch.int32,))
    if w13_bias is not None:
        expected["w13_bias"] = (w13_bias, (E, 2 * intermediate), ACTIVATION_DTYPES)
    if w2_bias is not None:
        expected["w2_bias"] = (w2_bias, (E, hidden), ACTIVATION_DTYPES)
    _check_tensors("int8_experts", expected, x.device)
    for name, (tensor, _, _) in expected.items():
        # Of x, topk_ids and topk_weights a copy is cheap, so theirs are free.
        whole = name.startswith("w") or name == "expert_map"
        if whole and not (tensor.is_contiguous() or (name in ("w13", "w2") and tensor.stride(2) == 1)):
            need = "columns side by side" if name in ("w13", "w2") else "a contiguous tensor"
            raise ValueError(
                f"int8_experts: got {name} with strides {tensor.stride()}, expected {need}: call contiguous() once"
            )
    if E == 0 or (expert_map is not None and expert_map.numel() == 0):
        raise ValueError("int8_experts: got no experts, expected one at least")
    for name, K in (("hidden", hidden), ("intermediate", intermediate)):
        if K > MAX_K:
            raise ValueError(f"int8_experts: got {name} {K}, expected at most {MAX_K}: larger int32 sums could overflow")
    check_block(hadamard13, hidden, "int8_experts, hadamard13")
    check_block(hadamard2, intermediate, "int8_experts, hadamard2")
    return torch.ops.w8a8.int8_experts(
        x,
        w13,
        w13_scale,
        w2,
        w2_scale,
        topk_weights,
        topk_ids,
        hadamard13,
        hadamard2,
        expert_map,
        apply_weight_on_input,
        w13_bias,
        w2_bias,
    )
