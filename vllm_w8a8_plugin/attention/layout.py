"""The KV cache as vLLM hands it over, and as the kernels take it.

| vLLM | 16 bits | int8_per_token_head |
|---|---|---|
| 0.25 | [blocks, 2, block size, kv heads, D] | [blocks, 2, block size, kv heads, D + 4] |
| 0.27 on | [blocks, kv heads, block size, 2 D] | [blocks, kv heads, block size, 2 (D + 4)] |

The axes lie in memory in any order, the blocks with any distance. An int8 page has as many bytes as vLLM's own, and only what
lies where inside of it is ours: see `int8_cache_views`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from vllm_w8a8_plugin import compat
from vllm_w8a8_plugin.attention import INT8_CACHE as INT8
from vllm_w8a8_plugin.attention import unsupported
from w8a8_kernels.attention.pages import SCALE_BYTES, int8_cache_views

BLOCK_SIZE_MULTIPLE = 16


def cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype: str) -> tuple[int, ...]:
    """Shape of the cache where vLLM asks the backend: that of its TRITON_ATTN, which all its other parts know."""
    if block_size % BLOCK_SIZE_MULTIPLE != 0:
        raise ValueError(f"got a KV cache block of {block_size} tokens, expected a multiple of {BLOCK_SIZE_MULTIPLE}")
    return compat.triton_attention_backend().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype)


def stride_order(with_layers: bool) -> tuple[int, ...]:
    """Order in memory of `cache_shape`'s axes, or of these with one of layers before them."""
    return compat.triton_attention_backend().get_kv_cache_stride_order(with_layers)


def block_compact_layouts() -> tuple:
    """vLLM's canonical layouts whose pages are contiguous, which int8 pages must be; in vLLM's order of preference."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    return KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC


def with_scales(spec):
    """A canonical cache's spec with room for an int8 cache's scales.

    Raises:
        ValueError: keys and values of different sizes.
    """
    if spec.head_size_v != spec.head_size:
        raise sizes_differ(spec.head_size, spec.head_size_v)
    if spec.state_content_bytes is not None or spec.kv_quant_mode.name != INT8.upper():
        return spec
    return replace(spec, state_content_bytes=2 * (spec.head_size + SCALE_BYTES))


def sizes_differ(keys: int, values: int) -> ValueError:
    """The error for a layer whose keys and values have different sizes."""
    return unsupported(f"keys have {keys} channels and values {values}, expected as many of both")


def cache_views(kv_cache: Tensor, head_size: int, int8: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Views of vLLM's cache as the kernels take it.

    Args:
        kv_cache: a layer's cache, as the table above has it.
        head_size: D.
        int8: whether it is int8 with scales.

    Returns:
        key_cache, value_cache [blocks, block size, kv heads, D]; key_scale, value_scale fp32 [blocks, block size, kv heads],
        or None for 16 bits.

    Raises:
        ValueError: an int8 cache whose pages are not contiguous.
    """
    # [blocks, block size, kv heads, content] of keys and values.
    halves = kv_cache.unbind(1) if kv_cache.dim() == 5 else kv_cache.transpose(1, 2).chunk(2, dim=-1)
    if int8:
        return int8_cache_views(pages(kv_cache), *halves[0].shape[1:3], head_size)
    return *halves, None, None


def pages(kv_cache: Tensor) -> Tensor:
    """The int8 pages [blocks, bytes] of a cache whose first axis is the blocks.

    Raises:
        ValueError: a page is not contiguous.
    """
    page = kv_cache[0].numel()
    span = 1 + sum((size - 1) * stride for size, stride in zip(kv_cache.shape[1:], kv_cache.stride()[1:], strict=True))
    if span != page:
        raise ValueError(
            f"W8A8 attention backend: an int8 KV cache needs contiguous pages, got strides {kv_cache.stride()} of "
            f"{tuple(kv_cache.shape)}: leave VLLM_KV_CACHE_LAYOUT alone"
        )
    return kv_cache.as_strided((kv_cache.shape[0], page), (kv_cache.stride(0), 1))


def example_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, int8: bool, vllm_config, device
) -> Tensor:
    """A small cache of zeros as vLLM will hand over the real one: the same axes in the same order in memory."""
    dtype = torch.int8 if int8 else dtype
    if compat.has_canonical_kv_layouts():
        content = 2 * (head_size + SCALE_BYTES if int8 else head_size)
        shape = (num_blocks, num_kv_heads, block_size, content)
        order = vllm_config.cache_config.get_resolved_kv_cache_layout().layer_view_order
    else:
        shape = cache_shape(num_blocks, block_size, num_kv_heads, head_size, INT8 if int8 else "auto")
        order = stride_order(with_layers=False)
    memory = torch.zeros([shape[axis] for axis in order], dtype=dtype, device=device)
    return memory.permute(*(order.index(axis) for axis in range(len(order))))
