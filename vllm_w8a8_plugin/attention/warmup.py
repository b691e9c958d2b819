"""Compiles the attention kernels that a served model can reach, before the first request."""

import time
from dataclasses import replace

import torch

from vllm_w8a8_plugin import log
from vllm_w8a8_plugin.attention import layout, prefill
from vllm_w8a8_plugin.warmup import compilations_or_zero, compiles_on

# More queries of a sequence change nothing any more: they are cut into tiles.
MOST_QUERIES = 128


def plans(impl, most_keys: int, most_sequences: int, device: torch.device, long_queries: bool) -> dict:
    """Every plan that batches of a layer can lead to, with a number of queries for it; 2 splits stand for few, 32 for many.

    Args:
        impl: the layer's `W8A8AttentionImpl`.
        most_keys: tokens that a sequence can have.
        most_sequences: of a batch.
        device: the GPU.
        long_queries: whether ours serves queries of more than `prefill.SHORT_QUERIES`.
    """
    from w8a8_kernels.attention.config import FEW_SPLITS, MAX_SPLITS, attention_plan
    from w8a8_kernels.attention.device import device_of

    capability, num_sms = device_of(device)
    group = impl.num_heads // impl.num_kv_heads
    most_queries = min(most_keys, MOST_QUERIES if long_queries else prefill.SHORT_QUERIES)
    found = {}
    # The rule's bounds on queries and keys are powers of two.
    for queries in _powers_of_two(most_queries):
        for keys in (*_powers_of_two(most_keys), most_keys):
            for sequences in range(1, most_sequences + 1):
                shape = (impl.head_size, group, impl.num_kv_heads, sequences, queries, keys)
                plan = attention_plan(*shape, int8=impl.int8, capability=capability, num_sms=num_sms)
                splits = min(plan.splits, 2) if plan.splits <= FEW_SPLITS else MAX_SPLITS
                found.setdefault(replace(plan, splits=splits), queries)
    return found


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


class AttentionWarmup:
    """Warm-up of one process: each distinct kind of layer, cache and limit runs once."""

    def __init__(self) -> None:
        self._done: set[tuple] = set()

    def run(self, kv_cache_spec, layer_names: list[str], vllm_config, device: torch.device) -> None:
        """Run what these layers can reach; nothing on a CPU, which has no compiled kernels.

        Args:
            kv_cache_spec: the layers' cache, with the block size that the kernels see.
            layer_names: layers of one spec.
            vllm_config: of the model, which holds the layers by name.
            device: of the cache.
        """
        if not compiles_on(device):
            return
        start, before, ran = time.perf_counter(), compilations_or_zero(), False
        for name in layer_names:
            impl = vllm_config.compilation_config.static_forward_context[name].impl
            model = vllm_config.model_config
            sequences = vllm_config.scheduler_config.max_num_seqs
            limits = device, model.dtype, model.max_model_len, sequences, kv_cache_spec.block_size
            shape = impl.num_heads, impl.num_kv_heads, impl.head_size, impl.int8, impl.prefill.kernel
            features = impl.window is None, impl.softcap == 0, impl.alibi_slopes is None, impl.sinks is None
            kind = (*limits, *shape, *features)
            if kind not in self._done:
                warm_up(impl, kv_cache_spec.block_size, vllm_config, device)
                self._done.add(kind)
                ran = True
        if ran:
            torch.cuda.synchronize(device)
            log.logger.info(
                "Compiled %d attention kernel variants, or loaded them from Triton's cache, in %.1f s",
                compilations_or_zero() - before,
                time.perf_counter() - start,
            )


def warm_up(impl, block_size: int, vllm_config, device: torch.device) -> None:
    """Run every kernel variant of one kind of layer on a cache of two blocks, of zeros.

    Args:
        impl: the layer's `W8A8AttentionImpl`.
        block_size: tokens of a block.
        vllm_config: of the model.
        device: of the cache.
    """
    from w8a8_kernels.attention import paged_attention, write_cache
    from w8a8_kernels.attention.cache import MIN_TOKENS

    model = vllm_config.model_config
    heads, kv_heads, D = impl.num_heads, impl.num_kv_heads, impl.head_size
    cache = layout.example_cache(2, block_size, kv_heads, D, model.dtype, impl.int8, vllm_config, device)
    key_cache, value_cache, key_scale, value_scale = layout.cache_views(cache, D, impl.int8)
    for tokens in (1, MIN_TOKENS):
        key = torch.zeros(tokens, kv_heads, D, dtype=model.dtype, device=device)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        write_cache(key, key, key_cache, value_cache, nowhere, key_scale, value_scale)
    # The first block again and again.
    block_table = torch.zeros(1, -(-model.max_model_len // block_size), dtype=torch.int32, device=device)
    long_queries = impl.prefill.kernel == prefill.TRITON or _records_prefill(vllm_config)
    sequences = vllm_config.scheduler_config.max_num_seqs
    for plan, queries in plans(impl, model.max_model_len, sequences, device, long_queries).items():
        q = torch.zeros(queries, heads, D, dtype=model.dtype, device=device)
        paged_attention(
            q,
            key_cache,
            value_cache,
            block_table,
            torch.tensor([queries], dtype=torch.int32, device=device),
            torch.tensor([0, queries], dtype=torch.int32, device=device),
            impl.scale,
            most_queries=queries,
            most_keys=model.max_model_len,
            window=impl.window,
            softcap=impl.softcap,
            sinks=impl.sinks,
            alibi_slopes=impl.alibi_slopes,
            key_scale=key_scale,
            value_scale=value_scale,
            plan=plan,
        )


def _records_prefill(vllm_config) -> bool:
    """Whether CUDA graphs of batches with long queries are recorded with attention inside: then ours serves them."""
    from vllm.config import CUDAGraphMode

    return vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL


# One for all models of a process: a draft model meets what its target has compiled.
WARMUP = AttentionWarmup()
