from w8a8_kernels.scaled_mm.reference import int32_mm_reference, scaled_mm_reference

__all__ = ["int32_mm_reference", "scaled_mm_reference"]
