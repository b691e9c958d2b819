from w8a8_kernels.quantize.config import QuantizeConfig, quantize_config, quantize_variants
from w8a8_kernels.quantize.reference import (
    add_rms_norm_quantize_reference,
    quantize_amax_reference,
    quantize_reference,
    rms_norm_quantize_reference,
    rms_norm_reference,
    silu_mul_quantize_reference,
    silu_mul_reference,
)

__all__ = [
    "QuantizeConfig",
    "add_rms_norm_quantize_reference",
    "quantize_amax_reference",
    "quantize_config",
    "quantize_reference",
    "quantize_variants",
    "rms_norm_quantize_reference",
    "rms_norm_reference",
    "silu_mul_quantize_reference",
    "silu_mul_reference",
]
