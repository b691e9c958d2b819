"""One attention layer on this plugin's kernels."""

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl

from vllm_w8a8_plugin import envs, log
from vllm_w8a8_plugin.attention import layout, prefill, unsupported
from vllm_w8a8_plugin.attention.backend import W8A8AttentionBackend
from vllm_w8a8_plugin.attention.metadata import W8A8AttentionMetadata
from w8a8_kernels.attention import paged_attention, write_cache


class W8A8AttentionImpl(AttentionImpl):
    """Attention of one layer: `num_heads` query heads, `num_kv_heads` key/value heads of `head_size` channels."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
        **others,
    ) -> None:
        """As vLLM calls it while the model is built.

        Raises:
            ValueError: something of the layer is not supported, or a variable asks for what cannot run.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        problem = self._problem(head_size, kv_cache_dtype, attn_type, use_alibi_sqrt, chunk_lookback, others)
        if problem is None and sinks is not None and len(sinks) != num_heads:
            problem = f"got {len(sinks)} sinks, expected one for each of {num_heads} query heads"
        if problem is not None:
            raise unsupported(problem)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = sliding_window
        self.softcap = logits_soft_cap or 0.0
        self.sinks = sinks
        self.attn_type = attn_type
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.int8 = kv_cache_dtype == layout.INT8
        layer = prefill.Layer(head_size, self.int8, alibi_slopes is not None, sinks is not None, self.softcap != 0)
        self.prefill = prefill.choose_here(envs.prefill_attention(), layer, torch.get_default_dtype())
        # The views of the cache that they were made of; vLLM sets an attribute of this name to None when it frees a cache.
        self._k_scale_cache: tuple | None = None
        self._log()

    def _problem(
        self, head_size: int, kv_cache_dtype: str, attn_type: str, use_alibi_sqrt: bool, chunk_lookback: int, others: dict
    ) -> str | None:
        backend = W8A8AttentionBackend
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            return "it runs on NVIDIA GPUs"
        if not backend.supports_head_size(head_size):
            return f"got heads of {head_size} channels, expected a multiple of 8 from 64 to 512"
        if not backend.supports_kv_cache_dtype(kv_cache_dtype):
            return f"got a KV cache of {kv_cache_dtype}, expected one of {', '.join(backend.supported_kv_cache_dtypes)}"
        if not backend.supports_attn_type(attn_type):
            return f"attention of type {getattr(attn_type, 'value', attn_type)} is not supported, only that of decoders"
        if self.dcp_world_size > 1 or getattr(self, "pcp_world_size", 1) > 1:
            return "context parallelism (DCP, PCP) is not supported"
        if use_alibi_sqrt:
            return "ALiBi with a square root (use_alibi_sqrt) is not supported"
        if chunk_lookback > -1:
            return "chunked attention with a look back (chunk_lookback) is not supported"
        given = sorted(name for name, value in others.items() if value is not None)
        return f"{', '.join(given)} not supported" if given else None

    def _log(self) -> None:
        log.once(
            f"W8A8 attention: queries of up to {prefill.SHORT_QUERIES} tokens run on triton; batches with longer ones on "
            f"{self.prefill.kernel} ({self.prefill.reason})"
        )
        if self.int8:
            values = 2 * self.num_kv_heads
            log.once(
                f"W8A8 attention: the int8 KV cache takes {values * (self.head_size + layout.SCALE_BYTES)} bytes per token "
                f"and layer, its scales included; 16 bits take {values * self.head_size * 2}"
            )

    def views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """`layout.cache_views`, made once for a cache: they cost more than a launch."""
        key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if self._k_scale_cache is None or self._k_scale_cache[0] != key:
            self._k_scale_cache = (key, layout.cache_views(kv_cache, self.head_size, self.int8))
        return self._k_scale_cache[1]

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write a batch's tokens into the cache, unless it is another layer's.

        Args:
            layer: vLLM's layer.
            key, value: [T or more, kv heads, D].
            kv_cache: the layer's cache, see `layout`.
            slot_mapping: int64 [T], negative for padding.
        """
        if self.kv_sharing_target_layer_name is None:
            key_cache, value_cache, key_scale, value_scale = self.views(kv_cache)
            write_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)

    def forward(
        self,
        layer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: W8A8AttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch whose keys and values are in the cache.

        Args:
            layer: vLLM's layer.
            query: [T or more, heads, D] in fp16 or bf16.
            key, value: not read.
            kv_cache: the layer's cache, see `layout`.
            attn_metadata: the batch; None while vLLM measures memory.
            output: like `query`; written.

        Returns:
            output. Rows of padding are undefined.

        Raises:
            ValueError: a quantized output is asked for, or, while vLLM measures memory, a dtype or a value size that is not
                supported.
        """
        if output_scale is not None or output_block_scale is not None:
            raise unsupported("a quantized output is not supported")
        if attn_metadata is None:
            self._check(query, value)
            return output.fill_(0)
        n = attn_metadata.num_actual_tokens
        key_cache, value_cache, key_scale, value_scale = self.views(kv_cache)
        options = {
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "out": output[:n],
        }
        if (
            self.prefill.kernel == prefill.FLASH_ATTN
            and attn_metadata.max_query_len > prefill.SHORT_QUERIES
            and not attn_metadata.captured
        ):
            version = self.prefill.version
            prefill.flash_attention(query[:n], key_cache, value_cache, attn_metadata, self.scale, **options, version=version)
            return output
        paged_attention(
            query[:n],
            key_cache,
            value_cache,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            self.scale,
            most_queries=attn_metadata.max_query_len,
            most_keys=attn_metadata.max_seq_len,
            key_scale=key_scale,
            value_scale=value_scale,
            **options,
        )
        return output

    def _check(self, query: Tensor, value: Tensor | None) -> None:
        if not W8A8AttentionBackend.supports_dtype(query.dtype):
            raise unsupported(f"got activations of {query.dtype}, expected float16 or bfloat16")
        if value is not None and value.shape[-1] != self.head_size:
            raise layout.sizes_differ(self.head_size, value.shape[-1])
