"""What `register()` does in every vLLM process: idempotent, light, silent unless something is wrong."""

import functools
import logging

from vllm_w8a8_plugin import compat, envs, log, stock_int8

QUANTIZATION = "w8a8"
# vLLM's methods that may have int8 layers in schemes that `QUANTIZATION` does not read.
METHODS_WITH_INT8 = ("compressed-tensors", "quark")
_PATCHED = "_w8a8_patched"


def register_plugin() -> None:
    """Register the quantization method `w8a8`; if VLLM_W8A8_ENABLE is set, also change what vLLM does by itself.

    Then `EngineArgs.create_model_config` is wrapped, and our kernel stands in front of vLLM's int8 kernels. If it is not set,
    one warning is made ready for GPUs on which those fail.
    """
    version = compat.installed_vllm()
    problem = compat.vllm_problem(version)
    if problem is not None:
        log.once(f"vllm-w8a8-plugin: {problem}", logging.WARNING)
    if version is None:
        return

    import vllm.envs
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from vllm_w8a8_plugin.config import W8A8Config

    vllm.envs.environment_variables.update(envs.readers())
    if QUANTIZATION not in QUANTIZATION_METHODS:
        register_quantization_config(QUANTIZATION)(W8A8Config)
    # The other variables are checked where a model asks for W8A8: a bad one must not stop those that do not.
    if envs.enabled():
        _wrap_create_model_config()
        _offer_int8_kernel()
    stock_int8.watch()


def _offer_int8_kernel() -> None:
    try:
        compat.int8_kernels()
    except LookupError as error:
        log.once(f"vLLM's own int8 schemes stay on its kernels: {error}", logging.WARNING)
        return
    from vllm_w8a8_plugin import scaled_mm

    scaled_mm.offer()


def _wrap_create_model_config() -> None:
    """Let VLLM_W8A8_ENABLE quantize unquantized checkpoints; vLLM asks plugins only about quantized ones."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_model_config
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def create_model_config(self, *args, **kwargs):
        model_config = original(self, *args, **kwargs)
        if envs.enabled():
            request_w8a8(model_config)
        return model_config

    setattr(create_model_config, _PATCHED, True)
    EngineArgs.create_model_config = create_model_config


def request_w8a8(model_config) -> None:
    """Set `quantization` of an unquantized model's config to w8a8; say so if the checkpoint is quantized in another way."""
    if model_config.quantization is None:
        model_config.quantization = QUANTIZATION
        log.logger.info("%s=1: %s is quantized to W8A8 while loading", envs.ENABLE, model_config.model)
    elif model_config.quantization != QUANTIZATION:
        log.logger.info(
            "%s=1: %s is already quantized (%s); vLLM's own path serves it%s",
            envs.ENABLE,
            model_config.model,
            model_config.quantization,
            ", int8 layers on this plugin's kernels" if model_config.quantization in METHODS_WITH_INT8 else "",
        )
