"""Compiles what a served model can reach while the model loads, so that no request waits for a compiler.

vLLM's own warm-up is no substitute: it runs the largest batch and, with CUDA graphs, the sizes that it captures, but not every
size between them.
"""

import logging
import time
from weakref import WeakKeyDictionary

import torch
from vllm.config import VllmConfig

from vllm_w8a8_plugin import compat, log
from w8a8_kernels.compilation import compilations, warm_up_experts, warm_up_linear
from w8a8_kernels.ops import device_facts
from w8a8_kernels.tiles import bucket_of


class Warmup:
    """Warm-up of one process: told of every W8A8 layer when it is built, and again when its weights are ready.

    Each distinct device, shape, dtype, Hadamard block, way to the scales and limit runs once. When no layer is waiting any
    more, one line is logged.
    """

    def __init__(self) -> None:
        # Layers that are built but not loaded -> the most rows that they will see, and whether graphs are fused.
        self._waiting: WeakKeyDictionary[torch.nn.Module, tuple[int, bool]] = WeakKeyDictionary()
        self._done: set[tuple] = set()
        self._ran, self._compiled, self._seconds = False, 0, 0.0

    def expect(self, layer: torch.nn.Module, fused: bool = True) -> None:
        """Note the limits of the model that is being built; a layer outside of a model is not warmed up.

        Args:
            layer: told of again, its limits are those of the last time.
            fused: whether the layer is in a graph, where its quantizer may be fused. Logits are not; with prompt_logprobs they
                have as many rows as other layers, without as many as there are sequences.
        """
        vllm_config = compat.current_vllm_config()
        if vllm_config is not None:
            # To the end of the bucket: with sequence parallelism vLLM pads a batch to a multiple of the ranks.
            most = bucket_of(vllm_config.scheduler_config.max_num_batched_tokens)
            self._waiting[layer] = most, fused and _fuses(vllm_config)

    def forget(self, layer: torch.nn.Module) -> None:
        """Wait no longer for a layer that gets no int8 weights after all."""
        self._waiting.pop(layer, None)

    def ready(self, layer: torch.nn.Module) -> None:
        """Run all variants of a layer whose `weight` [N, K] int8 and `weight_scale` [N, 1], or whose experts', are final.

        Nothing runs on a CPU, nor when weights are loaded again. What a compiler raises is raised here: the model could not be
        served anyway.
        """
        limits = self._waiting.pop(layer, None)
        if limits is None:
            return
        has_experts = hasattr(layer, "w13_weight")
        weight = layer.w13_weight if has_experts else layer.weight
        if weight is not None and compiles_on(weight.device):
            start, before = time.perf_counter(), compilations_or_zero()
            if has_experts:
                self._run_experts(layer, limits[0])
            else:
                self._run(layer, *limits)
            self._compiled += compilations_or_zero() - before
            self._seconds += time.perf_counter() - start
        if self._ran and not self._waiting:
            log.logger.info(
                "Compiled %d kernel variants, or loaded them from Triton's cache, in %.1f s: all that these layers can reach",
                self._compiled,
                self._seconds,
            )
            self._ran, self._compiled, self._seconds = False, 0, 0.0

    def _run(self, layer: torch.nn.Module, most: int, fused: bool) -> None:
        weight, scale, dtype = layer.weight.data, layer.weight_scale.data, layer.w8a8_dtype
        hadamard, shared_amax = layer.w8a8_hadamard, layer.w8a8_shares_amax
        bias = getattr(layer, "bias", None)
        # Without its bias, too: vLLM leaves it out on all ranks but one of a row-parallel layer, or adds it later.
        for given in (None,) if bias is None else (None, bias.data):
            key = (weight.device, *weight.shape, dtype, given is not None and given.dtype, most, fused, hadamard, shared_amax)
            if key not in self._done:
                warm_up_linear(weight, scale, given, most, dtype, fused=fused, hadamard=hadamard, shared_amax=shared_amax)
                self._done.add(key)
                self._ran = True

    def _run_experts(self, layer: torch.nn.Module, most: int) -> None:
        weights = [getattr(layer, name).data for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")]
        hadamard13, hadamard2 = layer.w8a8_hadamard
        on_input = layer.apply_router_weight_on_input
        expert_map = layer.expert_map
        ids = None if expert_map is None else expert_map.numel()
        key = ("experts", weights[0].device, *weights[0].shape, *weights[2].shape, ids, layer.top_k, most)
        key += (layer.w8a8_dtype, hadamard13, hadamard2, on_input)
        if key not in self._done:
            blocks = {"hadamard13": hadamard13, "hadamard2": hadamard2}
            warm_up_experts(
                *weights, expert_map, layer.top_k, most, layer.w8a8_dtype, **blocks, apply_weight_on_input=on_input
            )
            self._done.add(key)
            self._ran = True


def compiles_on(device: torch.device) -> bool:
    """Whether kernels are compiled for this device."""
    return device.type == "cuda" and device_facts(device).has_triton


def compilations_or_zero() -> int:
    """`compilations`, where Triton can tell; else 0, with a warning once."""
    try:
        return compilations()
    except RuntimeError as error:  # only the logged line needs the count
        log.once(str(error), logging.WARNING)
        return 0


def _fuses(vllm_config: VllmConfig) -> bool:
    if compat.fusion_problem() is not None:
        return False
    from vllm_w8a8_plugin import fusion

    return fusion.is_installed(vllm_config)


# One for all models of a process: a draft model meets what its target has compiled.
WARMUP = Warmup()
