"""Compiles what a served model can reach while the model loads, so that no request waits for a compiler.

vLLM's own warm-up is no substitute: it runs the largest batch and, with CUDA graphs, the sizes that it captures, but not every
size between them.
"""

import logging
import time
from weakref import WeakKeyDictionary

import torch
from vllm.config import VllmConfig, get_current_vllm_config_or_none

from vllm_w8a8_plugin import compat, log
from w8a8_kernels.compilation import compilations, warm_up_linear
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

    def expect(self, layer: torch.nn.Module) -> None:
        """Note the limits of the model that is being built; a layer outside of a model is not warmed up."""
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            # To the end of the bucket: with sequence parallelism vLLM pads a batch to a multiple of the ranks.
            most = bucket_of(vllm_config.scheduler_config.max_num_batched_tokens)
            self._waiting[layer] = most, _fuses(vllm_config)

    def ready(self, layer: torch.nn.Module) -> None:
        """Run all variants of a layer whose `weight` [N, K] int8 and `weight_scale` [N, 1] are final.

        Nothing runs on a CPU, nor when weights are loaded again. What a compiler raises is raised here: the model could not be
        served anyway.
        """
        limits = self._waiting.pop(layer, None)
        if limits is None:
            return
        if layer.weight is not None and _compiles_on(layer.weight.device):
            self._run(layer, *limits)
        if self._ran and not self._waiting:
            log.logger.info(
                "Compiled %d kernel variants, or loaded them from Triton's cache, in %.1f s: all that these layers can reach",
                self._compiled,
                self._seconds,
            )
            self._ran, self._compiled, self._seconds = False, 0, 0.0

    def _run(self, layer: torch.nn.Module, most: int, fused: bool) -> None:
        start, before = time.perf_counter(), _compilations()
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
        self._compiled += _compilations() - before
        self._seconds += time.perf_counter() - start


def _compiles_on(device: torch.device) -> bool:
    return device.type == "cuda" and device_facts(device).has_triton


def _compilations() -> int:
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
