"""Which kernel serves batches with a long query: ours, or vLLM's FlashAttention."""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_w8a8_plugin import compat, envs

# Batches with a longer query are prefill; up to here the query heads of a key/value head and all queries fill one tile.
SHORT_QUERIES = 16

TRITON, FLASH_ATTN, FLASH_ATTN_4 = "triton", "flash_attn", "flash_attn_4"
FLASH_ATTN_4_PACKAGE = "flash_attn_4_sm120"


@dataclass(frozen=True)
class Layer:
    """What of a layer decides."""

    head_size: int
    int8_cache: bool = False
    alibi: bool = False
    sinks: bool = False
    softcap: bool = False


@dataclass(frozen=True)
class Prefill:
    """The choice: kernel, reason, and FlashAttention's version where it is that."""

    kernel: str
    reason: str
    version: int | None = None


def choose(asked: str, layer: Layer, version: int | None, problem: str | None, capability: tuple[int, int] | None) -> Prefill:
    """The kernel for long queries; pure.

    Args:
        asked: one of `envs.PREFILL_KERNELS`.
        layer: the layer.
        version: of vLLM's FlashAttention for it, None where there is none.
        problem: why vLLM's FlashAttention cannot run it, None where it can.
        capability: of the GPU; None for a CPU.

    Raises:
        ValueError: a kernel that was asked for by name cannot run.
    """
    if layer.int8_cache:
        problem = "it reads no int8 KV cache"
    elif problem is None and version is None:
        problem = "vLLM has none for this device"
    if asked == FLASH_ATTN_4:
        installed = importlib.util.find_spec(FLASH_ATTN_4_PACKAGE) is not None
        raise ValueError(
            f"{envs.PREFILL_ATTENTION}={asked} is not supported yet (the package {FLASH_ATTN_4_PACKAGE} is "
            f"{'' if installed else 'not '}installed): auto, {TRITON} and {FLASH_ATTN} are"
        )
    if asked == FLASH_ATTN:
        if problem is not None:
            raise ValueError(f"{envs.PREFILL_ATTENTION}={asked}: vLLM's FlashAttention cannot run this layer: {problem}")
        return Prefill(FLASH_ATTN, f"FlashAttention {version}, {envs.PREFILL_ATTENTION}={asked}", version)
    if asked == TRITON:
        return Prefill(TRITON, f"{envs.PREFILL_ATTENTION}={asked}")
    if problem is not None:
        return Prefill(TRITON, f"not FlashAttention: {problem}")
    if version != 3 or capability is None or capability[0] != 9:
        return Prefill(TRITON, f"FlashAttention {version} is not chosen by itself, only 3 on compute capability 9.0")
    return Prefill(FLASH_ATTN, "FlashAttention 3 is faster on compute capability 9.0", version)


def choose_here(asked: str, layer: Layer, dtype: torch.dtype) -> Prefill:
    """`choose` on vLLM's platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return choose(asked, layer, None, "vLLM has it for NVIDIA GPUs only", None)
    capability = current_platform.get_device_capability()
    version = compat.flash_attention_version(
        requires_alibi=layer.alibi, head_size=layer.head_size, has_sinks=layer.sinks, requires_softcap=layer.softcap
    )
    return choose(asked, layer, version, _flash_problem(layer, dtype, capability), (capability.major, capability.minor))


def _flash_problem(layer: Layer, dtype: torch.dtype, capability) -> str | None:
    """Why vLLM's own FLASH_ATTN would not take this layer, by its own answers."""
    try:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as stock
    except (ImportError, OSError) as error:
        return f"vLLM's FLASH_ATTN cannot be imported ({error})"
    reasons = stock.validate_configuration(
        head_size=layer.head_size,
        dtype=dtype,
        kv_cache_dtype="auto",
        block_size=None,
        use_mla=False,
        has_sink=layer.sinks,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=capability,
        attn_type="decoder",
    )
    return ", ".join(reasons) or None


def flash_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata,
    scale: float,
    *,
    window: int | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor,
    version: int,
) -> None:
    """vLLM's FlashAttention on a batch; tensors as for `paged_attention`."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    flash_attn_varlen_func(
        q=q,
        k=key_cache,
        v=value_cache,
        out=out,
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        seqused_k=metadata.seq_lens,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=scale,
        causal=True,
        alibi_slopes=alibi_slopes,
        window_size=None if window is None else [window - 1, 0],
        block_table=metadata.block_table,
        softcap=softcap,
        fa_version=version,
        s_aux=sinks,
    )
