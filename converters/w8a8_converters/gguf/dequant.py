"""Rows of GGUF tensors as fp32."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.tensor_types import BLOCK_SIZES, TensorType

# Values dequantized at a time: few calls, and what numpy makes on the way stays in a core's cache.
_PIECE = 256 * 1024
_FLOATS = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}

# Where the fp16 scales lie in a block, of types whose values are finite exactly where these are: all else is small integers.
_SCALES = (
    (slice(0, 2), "Q4_0 Q5_0 Q8_0 IQ1_S IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS Q1_0 Q2_0"),
    (slice(0, 4), "Q4_1 Q5_1 Q4_K Q5_K"),
    (slice(-2, None), "Q3_K Q6_K TQ1_0 TQ2_0"),
    (slice(-4, None), "Q2_K"),
)
_SCALES_OF: dict[int, slice] = {TensorType[name]: where for where, names in _SCALES for name in names.split()}

# The factors that a byte of Q1_0 and of Q2_0 holds: fp32 [256, 8] and [256, 4].
_BYTES = np.arange(256, dtype=np.uint8)[:, None]
_SIGNS = (_BYTES >> np.arange(8, dtype=np.uint8) & 1).astype(np.float32) * 2 - 1
_FOURTHS = (_BYTES >> np.arange(0, 8, 2, dtype=np.uint8) & 3).astype(np.float32) - 1


def check_type(name: str, kind: int) -> None:
    """Raises ConversionError where tensors of type `kind` cannot be dequantized."""
    block_bytes = BLOCK_SIZES[kind][1]
    try:
        _dequantize_blocks(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        raise ConversionError(
            f"tensor {name} has type {TensorType(kind).name}, which cannot be dequantized; use another file of the model"
        ) from None


def dequantize_rows(packed: np.ndarray, kind: int) -> Tensor:
    """Packed rows uint8 [rows, row_bytes] -> fp32 [rows, K], in memory of its own.

    Threads share the blocks where there are many: as many threads as torch uses.
    """
    block, block_bytes = BLOCK_SIZES[kind]
    shape = len(packed), packed.shape[1] // block_bytes * block
    if kind in _FLOATS:
        # A copy first: torch wants writable memory, and a file's data need not lie as the dtype wants it.
        return torch.from_numpy(packed.copy().reshape(-1)).view(_FLOATS[kind]).float().reshape(shape)
    blocks = packed.reshape(-1, block_bytes)
    values = np.empty((len(blocks), block), dtype=np.float32)

    def fill(start: int) -> None:
        piece = slice(start, start + _PIECE // block)
        values[piece] = _dequantize_blocks(blocks[piece], kind)

    starts = range(0, len(blocks), _PIECE // block)
    threads = min(torch.get_num_threads(), len(starts))
    if threads > 1:
        # Made for each call: threads that are kept do not survive a fork, and whoever waits for them hangs.
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, starts))
    else:
        for start in starts:
            fill(start)
    return torch.from_numpy(values).reshape(shape)


def known_finite(packed: np.ndarray, kind: int) -> bool:
    """Whether the scales alone say that all values are finite; False where they do not, or cannot, for this type.

    Args:
        packed: uint8 [rows, row_bytes].
        kind: their type.
    """
    if kind not in _SCALES_OF:
        return False
    blocks = packed.reshape(-1, BLOCK_SIZES[kind][1])
    rows = max(1, _PIECE // blocks.shape[1])
    pieces = (blocks[start : start + rows, _SCALES_OF[kind]] for start in range(0, len(blocks), rows))
    return all(np.isfinite(np.ascontiguousarray(piece).view("<f2")).all() for piece in pieces)


def only_zeros(packed: np.ndarray, kind: int) -> bool:
    """Whether packed rows uint8 [rows, row_bytes] hold no other value than zero. Mostly the first row tells."""
    start, count = 0, 1
    most = max(1, _PIECE // packed.shape[1])
    while start < len(packed):
        if dequantize_rows(packed[start : start + count], kind).any():
            return False
        start, count = start + count, min(2 * count, most)
    return True


def _dequantize_blocks(blocks: np.ndarray, kind: int) -> np.ndarray:
    """Blocks uint8 [n, bytes of a block] -> fp32 [n, values of a block]."""
    # Block scales may be inf or NaN; the converter's own check names the tensor.
    with np.errstate(invalid="ignore", over="ignore"):
        if kind in _OWN:
            return _OWN[kind](blocks)
        # As one long row: the library computes 16 rows at a time, which is slow where they are short.
        return dequantize(np.ascontiguousarray(blocks).reshape(1, -1), kind).reshape(len(blocks), -1)


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """An fp16 scale, then a bit for each value, lowest bit first: 0 is -scale, 1 is +scale."""
    return _scales(blocks) * _SIGNS[blocks[:, 2:]].reshape(len(blocks), -1)


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    """An fp16 scale, then two bits for each value, lowest first: 0, 1, 2, 3 are -1, 0, 1, 2 times the scale."""
    return _scales(blocks) * _FOURTHS[blocks[:, 2:]].reshape(len(blocks), -1)


def _scales(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


_OWN: dict[int, Callable[[np.ndarray], np.ndarray]] = {TensorType.Q1_0: _q1_0, TensorType.Q2_0: _q2_0}
