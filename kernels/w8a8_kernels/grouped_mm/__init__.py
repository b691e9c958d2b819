from w8a8_kernels.grouped_mm.config import ExpertsPlan, GroupedTile, experts_plan, select_experts
from w8a8_kernels.grouped_mm.reference import grouped_mm_reference, int8_experts_reference, local_experts_reference

__all__ = [
    "ExpertsPlan",
    "GroupedTile",
    "experts_plan",
    "grouped_mm_reference",
    "int8_experts_reference",
    "local_experts_reference",
    "select_experts",
]
