"""int8 x int8 (W8A8) kernels for PyTorch: per-token quantization and the scaled matrix product."""

from w8a8_kernels.compilation import compilations, warmup
from w8a8_kernels.grouped_mm import select_experts
from w8a8_kernels.ops import (
    add_rms_norm_quantize,
    int8_experts,
    int8_linear,
    pack_weight,
    quantize,
    quantize_amax,
    release_packed_weight,
    rms_norm_quantize,
    scaled_mm,
    silu_mul_quantize,
)
from w8a8_kernels.select import Choice, select_quantize, select_scaled_mm

__all__ = [
    "Choice",
    "add_rms_norm_quantize",
    "compilations",
    "int8_experts",
    "int8_linear",
    "pack_weight",
    "quantize",
    "quantize_amax",
    "release_packed_weight",
    "rms_norm_quantize",
    "scaled_mm",
    "select_experts",
    "select_quantize",
    "select_scaled_mm",
    "silu_mul_quantize",
    "warmup",
]
