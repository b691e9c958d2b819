"""Weight rounding. Every int8 weight of this project, converted or quantized while loading, comes from here."""

import torch
from torch import Tensor

INT8_MAX = 127

# The fp32 copy of a block of rows and its quotient are the temporaries, together as large as this. A GPU wants long blocks;
# on one Xeon core 8 MiB, which stay in the cache, took 0.4 of the time of 32 MiB.
_GPU_BLOCK_BYTES = 64 * 1024**2
_CPU_BLOCK_BYTES = 8 * 1024**2


def quantize_weight(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Symmetric int8 quantization, one scale per output channel (row).

    `scale = amax(|row|) / 127` and `codes = round_half_to_even(row / scale)`, both true fp32 divisions; codes lie in
    [-127, 127]. A row whose scale is 0 (all zero, or so small that the division underflows) gets scale 1 and codes 0.

    Args:
        weight: [N, K], any floating dtype, CPU or CUDA, any strides. It is not changed.
        amax: [N], the largest magnitude of each whole row where `weight` holds only some of its columns (a
            tensor-parallel shard). Default: taken from `weight`.

    Returns:
        codes int8 [N, K] and scale fp32 [N, 1], on the weight's device.

    Raises:
        ValueError: `weight` is not a 2-D floating tensor or holds NaN or inf; `amax` has another shape, is not
            finite, or is smaller than a magnitude in its row.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(f"weight must be a 2-D floating tensor, got {weight.dtype} with shape {tuple(weight.shape)}")
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
    rows = max(1, (_GPU_BLOCK_BYTES if weight.is_cuda else _CPU_BLOCK_BYTES) // (8 * max(1, k)))
    for start in range(0, n if k else 0, rows):
        block = slice(start, start + rows)
        values = weight[block].to(torch.float32)
        low, high = torch.aminmax(values, dim=1)
        own_amax[block] = torch.maximum(-low, high)
        block_scale = (own_amax if amax is None else amax)[block, None] / int8_max
        scale[block] = torch.where(block_scale == 0, 1.0, block_scale)
        codes[block] = (values / scale[block]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)

    # Checked once at the end: a check per block would stop a GPU as often.
    if not torch.isfinite(own_amax).all():
        row = int(torch.isfinite(own_amax).logical_not().nonzero()[0])
        raise ValueError(f"weight holds NaN or inf in row {row}: it cannot be quantized")
    if amax is not None and not (torch.isfinite(amax) & (amax >= own_amax)).all():
        row = int((torch.isfinite(amax) & (amax >= own_amax)).logical_not().nonzero()[0])
        raise ValueError(
            f"amax must be finite and cover its row: row {row} reaches {float(own_amax[row])}, amax says {float(amax[row])}"
        )
    return codes, scale
