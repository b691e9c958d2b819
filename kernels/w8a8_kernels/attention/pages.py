"""What an int8 page of the cache holds. Needs no Triton."""

import torch
from torch import Tensor

SCALE_BYTES = 4


def page_bytes(block_size: int, kv_heads: int, D: int) -> int:
    """Bytes of an int8 page of `block_size` tokens: codes and scales of keys and values."""
    return 2 * block_size * kv_heads * (D + SCALE_BYTES)


def int8_cache_views(pages: Tensor, block_size: int, kv_heads: int, D: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales in pages of int8.

    A page holds, head after head: K's codes [block_size, D], V's codes [D, block_size], K's fp32 scales [block_size], V's.
    A tile of V is then read as the tensor cores take it, its tokens side by side: bytes cannot be transposed on the way from
    shared memory, as 16-bit values can. And all that one program reads of a page is one run of memory.

    Args:
        pages: int8 [blocks, page_bytes(block_size, kv_heads, D)], each page contiguous.

    Returns:
        key_cache, value_cache int8 [blocks, block_size, kv_heads, D]; key_scale, value_scale fp32 [blocks, block_size,
        kv_heads]: views of the pages.

    Raises:
        ValueError: pages of another dtype, size or layout.
    """
    expected = page_bytes(block_size, kv_heads, D)
    if pages.dtype != torch.int8 or pages.dim() != 2 or pages.shape[1] != expected or pages.stride(1) != 1:
        raise ValueError(
            f"int8_cache_views: got {pages.dtype} {tuple(pages.shape)} with strides {pages.stride()}, "
            f"expected int8 [blocks, {expected}] with contiguous rows"
        )
    codes = block_size * D
    heads = pages.unflatten(1, (kv_heads, expected // kv_heads))
    key, value, scales = heads.split([codes, codes, 2 * block_size * SCALE_BYTES], dim=2)
    key = key.unflatten(2, (block_size, D)).transpose(1, 2)
    value = value.unflatten(2, (D, block_size)).permute(0, 3, 1, 2)
    key_scale, value_scale = scales.view(torch.float32).unflatten(2, (2, block_size)).transpose(1, 3).unbind(2)
    return key, value, key_scale, value_scale
