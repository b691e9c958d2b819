"""The registered ops `torch.ops.w8a8.*` and the public functions over them.

Ops are opaque to torch.compile and have fake implementations, so that eager and compiled code run the same kernels and
give the same codes. Which kernel runs is decided by `w8a8_kernels.select` from facts about the device, collected once.
"""

import functools
import importlib.util

import torch

from w8a8_kernels.quantize.reference import quantize_reference
from w8a8_kernels.scaled_mm.onednn import has_onednn, pack_weight_onednn, scaled_mm_onednn
from w8a8_kernels.scaled_mm.reference import scaled_mm_reference
from w8a8_kernels.select import MAX_K, Facts, select_quantize, select_scaled_mm

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# The library object must stay alive: dropping it unregisters the ops.
_LIBRARY = torch.library.Library("w8a8", "FRAGMENT")
_LIBRARY.define("quantize(Tensor x) -> (Tensor, Tensor)")
_LIBRARY.define(
    "scaled_mm(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
_LIBRARY.define(
    "scaled_mm_packed(Tensor x, Tensor x_scale, Tensor packed, int N, Tensor? bias, ScalarType out_dtype) -> Tensor"
)


def device_facts(device: torch.device) -> Facts:
    """What `device` offers to `w8a8_kernels.select`. For a GPU: initializes CUDA."""
    if device.type == "cpu":
        return Facts(capability=None, has_onednn=has_onednn())
    return _gpu_facts(device)


@functools.cache
def _gpu_facts(device: torch.device) -> Facts:
    return Facts(torch.cuda.get_device_capability(device), has_triton=importlib.util.find_spec("triton") is not None)


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _quantize_cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if select_quantize(device_facts(x.device)).kernel == "triton":
        from w8a8_kernels.quantize.row import quantize_row

        return quantize_row(x)
    return quantize_reference(x)


def _scaled_mm_cuda(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if select_scaled_mm(device_facts(x.device)).kernel == "triton":
        from w8a8_kernels.scaled_mm.split_k import scaled_mm_split_k

        return scaled_mm_split_k(x, x_scale, weight, weight_scale, bias, out_dtype, num_sms=_num_sms(x.device))
    return scaled_mm_reference(x, x_scale, weight, weight_scale, bias, out_dtype)


_LIBRARY.impl("quantize", quantize_reference, "CPU")
_LIBRARY.impl("quantize", _quantize_cuda, "CUDA")
_LIBRARY.impl("scaled_mm", scaled_mm_reference, "CPU")
_LIBRARY.impl("scaled_mm", _scaled_mm_cuda, "CUDA")
_LIBRARY.impl("scaled_mm_packed", scaled_mm_onednn, "CPU")


@torch.library.register_fake("w8a8::quantize")
def _quantize_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@torch.library.register_fake("w8a8::scaled_mm")
def _scaled_mm_fake(x, x_scale, weight, weight_scale, bias, out_dtype):
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


@torch.library.register_fake("w8a8::scaled_mm_packed")
def _scaled_mm_packed_fake(x, x_scale, packed, N, bias, out_dtype):
    return x.new_empty((x.shape[0], N), dtype=out_dtype)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantization of every row by its own absolute maximum; the rule is in `quantize_reference`.

    Args:
        x: [M, K], bf16, fp16 or fp32; rows of any stride; M and K from 0.

    Returns:
        codes [M, K] int8 and scale [M, 1] fp32, the same bits on every device and kernel.

    Raises:
        ValueError: x has another rank or dtype.
    """
    if x.dim() != 2 or x.dtype not in ACTIVATION_DTYPES:
        raise ValueError(
            f"quantize: got x of shape {tuple(x.shape)} and dtype {x.dtype}, expected [M, K] in bf16, fp16 or fp32"
        )
    return torch.ops.w8a8.quantize(x)


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
        bias: [N] floating, or None.
        out_dtype: bf16, fp16 (values beyond 65504 become inf) or fp32.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        ValueError: shapes or dtypes do not fit, or K is so large that int32 sums could overflow.
    """
    M, K = x.shape
    N = weight.shape[0]
    expected = {
        "x": (x, (M, K), (torch.int8,)),
        "x_scale": (x_scale, (M, 1), (torch.float32,)),
        "weight": (weight, (N, K), (torch.int8,)),
        "weight_scale": (weight_scale, (N, 1), (torch.float32,)),
    }
    if bias is not None:
        expected["bias"] = (bias, (N,), ACTIVATION_DTYPES)
    for name, (tensor, shape, dtypes) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"scaled_mm: got {name} of shape {tuple(tensor.shape)} and dtype {tensor.dtype}, expected {shape} and "
                f"{' or '.join(map(str, dtypes))}"
            )
    if K > MAX_K:
        raise ValueError(f"scaled_mm: got K = {K}, expected at most {MAX_K}: larger int32 sums could overflow")
    return torch.ops.w8a8.scaled_mm(x, x_scale, weight, weight_scale, bias, out_dtype)


def pack_weight(weight: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor | None:
    """Weight in the form that this device's selected kernel wants, for `int8_linear(packed=...)`.

    Args:
        weight: codes [N, K] int8.
        weight_scale: [N, 1] fp32; must outlive the result.
        out_dtype: the activation dtype of the layer.

    Returns:
        An opaque tensor, or None where the kernel reads `weight` as it is (then keep the weight).
    """
    if weight.numel() and select_scaled_mm(device_facts(weight.device)).kernel == "onednn":
        return pack_weight_onednn(weight, weight_scale, out_dtype)
    return None


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer with int8 weights whose input is quantized per token.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        weight: codes [N, K] int8; not read where `packed` is given.
        weight_scale: [N, 1] fp32.
        bias: [N] floating, or None.
        packed: what `pack_weight` returned for x's dtype.

    Returns:
        [..., N] in x's dtype.
    """
    codes, x_scale = torch.ops.w8a8.quantize(x.reshape(-1, x.shape[-1]))
    N = weight_scale.shape[0]
    if packed is not None:
        out = torch.ops.w8a8.scaled_mm_packed(codes, x_scale, packed, N, bias, x.dtype)
    else:
        out = torch.ops.w8a8.scaled_mm(codes, x_scale, weight, weight_scale, bias, x.dtype)
    return out.reshape(*x.shape[:-1], N)
