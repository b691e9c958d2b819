"""Attention over a paged key/value cache, in 16 bits or int8. The kernels are imported at the first use: they need Triton."""

import importlib
from typing import TYPE_CHECKING

from w8a8_kernels.attention.pages import int8_cache_views, page_bytes
from w8a8_kernels.attention.reference import paged_attention_reference

if TYPE_CHECKING:
    from w8a8_kernels.attention.cache import write_cache
    from w8a8_kernels.attention.launch import paged_attention

_MODULES = {"write_cache": "cache", "paged_attention": "launch"}

__all__ = ["int8_cache_views", "page_bytes", "paged_attention", "paged_attention_reference", "write_cache"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
