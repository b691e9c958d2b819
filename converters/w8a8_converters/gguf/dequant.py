"""Rows of GGUF tensors as fp32, through the gguf library."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from w8a8_converters.errors import ConversionError


def check_type(name: str, kind: GGMLQuantizationType) -> None:
    """Raises ConversionError where the gguf library cannot dequantize `kind`."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        raise ConversionError(
            f"tensor {name} has type {kind.name}, which the gguf library cannot dequantize; use another file of the model"
        ) from None


def dequantize_rows(packed: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Packed rows uint8 [rows, row_bytes] -> fp32 [rows, K]."""
    # Block scales may be inf or NaN; the converter's own check names the tensor.
    with np.errstate(invalid="ignore", over="ignore"):
        values = dequantize(np.ascontiguousarray(packed), kind)
    return torch.from_numpy(np.array(values, dtype=np.float32, copy=not values.flags.writeable))
