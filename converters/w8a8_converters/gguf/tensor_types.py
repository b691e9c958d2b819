"""The types of GGUF tensors: those of the gguf library, and those that ggml has and the library not yet."""

from enum import IntEnum

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

# The values of the library's members, so that either compares with and looks up the other.
TensorType = IntEnum("TensorType", {**{kind.name: kind.value for kind in GGMLQuantizationType}, "Q1_0": 41, "Q2_0": 42})

# Values in a block, bytes of a block.
BLOCK_SIZES: dict[int, tuple[int, int]] = {
    **GGML_QUANT_SIZES,
    TensorType.Q1_0: (128, 2 + 128 // 8),
    TensorType.Q2_0: (64, 2 + 64 // 4),
}
