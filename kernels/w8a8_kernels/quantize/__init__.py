from w8a8_kernels.quantize.reference import quantize_reference

__all__ = ["quantize_reference"]
