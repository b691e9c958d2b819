"""The oneDNN int8 matrix product that vLLM's CPU build registers with torch; vLLM itself is not imported.

Only the product is borrowed: the quantizer is ours (vLLM's multiplies by 127/amax and turns a NaN row into zeros).
"""

import functools

import torch

# By address, the weights that are packed: N, K and the dtype of their results. vLLM's op checks none of these.
_PACKED: dict[int, tuple[int, int, torch.dtype]] = {}

# vLLM's own value for linear layers: how many input shapes keep their compiled primitive.
PRIMITIVE_CACHE_SIZE = 32


def has_onednn() -> bool:
    """Whether the process has loaded vLLM's CPU build with its oneDNN int8 op."""
    return hasattr(torch.ops._C, "create_onednn_scaled_mm_handler") and hasattr(torch.ops._C, "onednn_scaled_mm")


def onednn_saturates() -> bool:
    """Whether oneDNN's int8 sums are wrong on this CPU; False where the op is not there.

    Without VNNI instructions (AVX2 alone, say) pairs of products are added in 16 bits, which saturate. Seen with vLLM 0.32 on
    a CPU with AVX2: off by up to a quarter of the greatest sum.
    """
    return has_onednn() and _saturates()


@functools.cache
def _saturates() -> bool:
    K, N = 64, 16
    x, weight = (torch.full((rows, K), 127, dtype=torch.int8) for rows in (1, N))
    scales = [torch.ones(rows, 1, dtype=torch.float32) for rows in (1, N)]
    packed = pack_weight_onednn(weight, scales[1], torch.float32)
    try:
        return bool((scaled_mm_onednn(x, scales[0], packed, N, None, torch.float32) != 127 * 127 * K).any())
    finally:
        release_packed_weight_onednn(packed)


def pack_weight_onednn(weight: torch.Tensor, weight_scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Repack weight [N, K] int8 for oneDNN.

    Returns:
        A scalar int64 tensor that holds the address of the packed copy. The copy lives until `release_packed_weight_onednn`
        and reads `weight_scale`, which must outlive it.
    """
    handler = torch.ops._C.create_onednn_scaled_mm_handler(
        weight.t(), weight_scale, out_dtype, True, False, PRIMITIVE_CACHE_SIZE
    )
    _PACKED[handler] = (*weight.shape, out_dtype)
    return torch.tensor(handler, dtype=torch.int64)


def check_packed(packed: torch.Tensor, N: int, K: int, out_dtype: torch.dtype) -> None:
    """Raise ValueError where `packed` is no weight [N, K] that this process has packed for results of `out_dtype`."""
    form = _PACKED.get(packed.item())
    if form != (N, K, out_dtype):
        got = "one that was released or packed by another process" if form is None else f"[{form[0]}, {form[1]}] for {form[2]}"
        raise ValueError(f"int8_linear: got a packed weight {got}, expected [{N}, {K}] for {out_dtype}")


def release_packed_weight_onednn(packed: torch.Tensor) -> None:
    """Free what `pack_weight_onednn` made; `packed` must not be used any more."""
    handler = packed.item()
    _PACKED.pop(handler, None)
    torch.ops._C.release_dnnl_matmul_handler(handler)


def scaled_mm_onednn(
    x: torch.Tensor, x_scale: torch.Tensor, packed: torch.Tensor, N: int, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`scaled_mm` on a weight that `pack_weight_onednn` packed for the same `out_dtype`."""
    out = torch.empty((x.shape[0], N), dtype=out_dtype)
    if out.numel():
        torch.ops._C.onednn_scaled_mm(out, x, x_scale, None, None, bias, packed)
    return out
