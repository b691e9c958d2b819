"""What vLLM asks an attention backend before it uses it: every question that any supported release has, answered."""

from typing import ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from vllm_w8a8_plugin.attention import layout
from vllm_w8a8_plugin.attention.registration import NAME

HEAD_SIZES = range(64, 513, 8)
CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
MIN_CAPABILITY, MIN_BF16_CAPABILITY = (7, 0), (8, 0)

# What vLLM's short reasons leave open.
_DETAILS = {
    "head_size not supported": "multiples of 8 from 64 to 512 are",
    "dtype not supported": "float16 and bfloat16 are",
    "kv_cache_dtype not supported": f"auto, float16, bfloat16 and {layout.INT8} are",
    "block_size not supported": f"multiples of {layout.BLOCK_SIZE_MULTIPLE} are",
    "compute capability not supported": "7.0 and newer NVIDIA GPUs are",
    "partial multimodal token full attention not supported": "--attention-backend TRITON_ATTN has it",
}


class W8A8AttentionBackend(AttentionBackend):
    """Decoder attention over a paged cache in 16 bits or int8, on this plugin's Triton kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *CACHE_DTYPES, layout.INT8]
    forward_includes_kv_cache_update: bool = False
    # vLLM 0.33: its fused ops that write the cache write it as its own backends read it.
    supports_kv_cache_update_bypass: bool = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that stands for this class: vLLM looks it up by this name."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        from vllm_w8a8_plugin.attention.impl import W8A8AttentionImpl

        return W8A8AttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        from vllm_w8a8_plugin.attention.metadata import W8A8AttentionMetadataBuilder

        return W8A8AttentionMetadataBuilder

    # The cache.

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(layout.BLOCK_SIZE_MULTIPLE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % layout.BLOCK_SIZE_MULTIPLE == 0

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Asked by vLLM before canonical layouts (0.25 to 0.27)."""
        return layout.cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Asked by vLLM before canonical layouts (0.25 to 0.27)."""
        return layout.stride_order(include_num_layers_dimension)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple:
        """Asked by vLLM with canonical layouts (0.32 on)."""
        return layout.block_compact_layouts()

    @classmethod
    def customize_spec(cls, spec):
        """Asked by vLLM with canonical layouts (0.32 on)."""
        return layout.with_scales(spec)

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False

    # Features.

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @classmethod
    def supports_compute_capability(cls, capability) -> bool:
        from vllm.platforms import current_platform

        return current_platform.is_cuda() and (capability.major, capability.minor) >= MIN_CAPABILITY

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == "decoder"

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """No: vLLM gives such batches a flag for each sequence, which the kernels do not take."""
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: how many programs share a sequence's keys depends on the batch."""
        return False

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_dcp(cls) -> bool:
        return False

    @classmethod
    def supports_pcp(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Yes: the kernels read query and sequence lengths on the device."""
        return True

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def is_ssm(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability,
    ) -> str | None:
        capability = (device_capability.major, device_capability.minor)
        if torch.bfloat16 in (dtype, CACHE_DTYPES.get(kv_cache_dtype)) and capability < MIN_BF16_CAPABILITY:
            return f"bfloat16 needs compute capability 8.0, got {capability[0]}.{capability[1]}: --dtype float16"
        if kv_cache_dtype in CACHE_DTYPES and CACHE_DTYPES[kv_cache_dtype] != dtype:
            return f"a {kv_cache_dtype} KV cache needs activations of that dtype, got {dtype}: --kv-cache-dtype auto"
        return None

    @classmethod
    def validate_configuration(cls, *args, **kwargs) -> list[str]:
        """vLLM's reasons against this backend, each with what would do; empty where there are none."""
        reasons = [
            f"{reason} ({_DETAILS[reason]})" if reason in _DETAILS else reason
            for reason in super().validate_configuration(*args, **kwargs)
        ]
        if kwargs.get("kv_cache_dtype") == layout.INT8 and kwargs.get("use_kv_connector"):
            reasons.append("KV connector not supported with an int8 KV cache, whose pages are laid out otherwise than vLLM's")
        return reasons
