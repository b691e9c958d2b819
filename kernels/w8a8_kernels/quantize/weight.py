"""Weight rounding. Every int8 weight of this project, converted or quantized while loading, comes from here."""

from collections.abc import Iterator

import torch
from torch import Tensor

from w8a8_kernels.hadamard import check_block, hadamard_transform

INT8_MAX = 127

# The fp32 copy of some rows and its quotient are the temporaries, together as large as this. A GPU wants many rows at a time;
# on one Xeon core 8 MiB, which stay in the cache, took 0.4 of the time of 32 MiB.
_GPU_PART_BYTES = 64 * 1024**2
_CPU_PART_BYTES = 8 * 1024**2


def quantize_weight(weight: Tensor, amax: Tensor | None = None, hadamard: int = 0) -> tuple[Tensor, Tensor]:
    """Symmetric int8 quantization of a weight, or of its block Hadamard transform along K, one scale per output channel (row).

    `scale = amax(|row|) / 127` and `codes = round_half_to_even(row / scale)`, both true fp32 divisions; codes lie in
    [-127, 127]. A row whose scale is 0 (all zero, or so small that the division underflows) gets scale 1 and codes 0. Some
    rows are held in fp32 at a time, never the whole matrix.

    Args:
        weight: [N, K], any floating dtype, CPU or CUDA, any strides. It is not changed.
        amax: [N], the largest magnitude of each whole row, transformed, where `weight` holds only some of its columns (a
            tensor-parallel shard, which must cut no block): see `row_amax`. Default: taken from `weight`.
        hadamard: size of the transform's blocks, a divisor of K; 0 for none. The layer's input must be transformed alike.

    Returns:
        codes int8 [N, K] and scale fp32 [N, 1], on the weight's device. The transform is additions and one product, element
        by element, so codes and scales are the same bits on every device, and for every shard.

    Raises:
        ValueError: `weight` is not a 2-D floating tensor or holds NaN or inf; no such block fits; `amax` has another shape,
            is not finite, or is smaller than a magnitude in its row.
    """
    _check_weight(weight, hadamard)
    n, k = weight.shape
    if amax is not None and tuple(amax.shape) != (n,):
        raise ValueError(f"amax must hold one value for each of the {n} rows, got shape {tuple(amax.shape)}")

    codes = torch.empty((n, k), dtype=torch.int8, device=weight.device)
    own_amax = torch.zeros(n, dtype=torch.float32, device=weight.device)
    scale = torch.ones((n, 1), dtype=torch.float32, device=weight.device)
    # A tensor: PyTorch on CUDA divides by a Python number through its reciprocal, which rounds twice.
    int8_max = torch.tensor(float(INT8_MAX), device=weight.device)
    if amax is not None:
        amax = amax.to(device=weight.device, dtype=torch.float32)
    for part in _parts(weight.shape, weight.device):
        values = hadamard_transform(weight[part], hadamard)
        own_amax[part] = _amax(values)
        part_scale = (own_amax if amax is None else amax)[part, None] / int8_max
        scale[part] = torch.where(part_scale == 0, 1.0, part_scale)
        codes[part] = (values / scale[part]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)

    # Checked once at the end: a check per part would stop a GPU as often.
    if not torch.isfinite(own_amax).all():
        row = int(torch.isfinite(own_amax).logical_not().nonzero()[0])
        raise ValueError(f"weight holds NaN or inf in row {row}: it cannot be quantized")
    if amax is not None and not (torch.isfinite(amax) & (amax >= own_amax)).all():
        row = int((torch.isfinite(amax) & (amax >= own_amax)).logical_not().nonzero()[0])
        raise ValueError(
            f"amax must be finite and cover its row: row {row} reaches {float(own_amax[row])}, amax says {float(amax[row])}"
        )
    return codes, scale


def row_amax(weight: Tensor, hadamard: int = 0, device: torch.device | None = None) -> Tensor:
    """Largest magnitude of every row of a weight, or of its block Hadamard transform, some rows at a time.

    Args:
        weight: [N, K], any floating dtype, any strides. It is not changed.
        hadamard: as in `quantize_weight`.
        device: where to compute; default: the weight's.

    Returns:
        [N] fp32 on `device`; NaN or inf for a row that holds one.

    Raises:
        ValueError: `weight` is not a 2-D floating tensor, or no such block fits.
    """
    _check_weight(weight, hadamard)
    device = device or weight.device
    amax = torch.zeros(weight.shape[0], dtype=torch.float32, device=device)
    for part in _parts(weight.shape, device):
        amax[part] = _amax(hadamard_transform(weight[part].to(device), hadamard))
    return amax


def _check_weight(weight: Tensor, hadamard: int) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"weight must be a 2-D floating tensor, got {weight.dtype} with shape {tuple(weight.shape)}")
    check_block(hadamard, weight.shape[1], "weight")


def _parts(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Rows, as many at a time as the limits above allow; none for an empty matrix."""
    n, k = shape
    rows = max(1, (_GPU_PART_BYTES if device.type == "cuda" else _CPU_PART_BYTES) // (8 * max(1, k)))
    for start in range(0, n if k else 0, rows):
        yield slice(start, start + rows)


def _amax(values: Tensor) -> Tensor:
    # Apart: on a CPU `torch.aminmax` along rows takes ten times as long as both, and a magnitude of each value is a copy.
    return torch.maximum(-values.amin(dim=1), values.amax(dim=1))
