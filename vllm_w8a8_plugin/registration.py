"""What `register()` does in every vLLM process: idempotent, light, silent unless something is wrong."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_w8a8_plugin import compat, envs, gguf, log, stock_int8
from vllm_w8a8_plugin.attention import registration as attention

QUANTIZATION = "w8a8"
# vLLM's methods that may have int8 layers in schemes that `QUANTIZATION` does not read.
METHODS_WITH_INT8 = ("compressed-tensors", "quark")
_PATCHED = "_w8a8_patched"


def register_plugin() -> None:
    """Register the quantization method `w8a8`; if VLLM_W8A8_ENABLE is set, also change what vLLM does by itself.

    Then unquantized checkpoints become W8A8, and our kernel stands in front of vLLM's int8 kernels. If it is not set, one
    warning is made ready for GPUs on which those fail. `EngineArgs` is wrapped, for models that ask for W8A8 alone.
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
    _wrap_engine_args()
    attention.register()
    if envs.enabled():
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


def _wrap_engine_args() -> None:
    """Let a GGUF file be the model, and VLLM_W8A8_ENABLE quantize unquantized checkpoints: vLLM asks plugins about neither.

    And say where VLLM_W8A8_LM_HEAD has no effect.
    """
    from vllm.engine import arg_utils

    _wrap(arg_utils.EngineArgs, "create_engine_config", _resolving_first)
    _wrap(arg_utils.EngineArgs, "create_model_config", _choosing_quantization)
    _wrap(arg_utils, "get_model_path", _explaining_missing_files)


def _wrap(owner: Any, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, _PATCHED):  # also where another plugin has wrapped ours since: wraps() copies the mark
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _PATCHED, True)
        setattr(owner, name, wrapped)


def _resolving_first(create_engine_config: Callable) -> Callable:
    # Here, since vLLM looks for a config beside the model before it calls create_model_config.
    def wrapped(self, *args, **kwargs):
        gguf.resolve(self)
        return create_engine_config(self, *args, **kwargs)

    return wrapped


def _choosing_quantization(create_model_config: Callable) -> Callable:
    def wrapped(self, *args, **kwargs):
        gguf.resolve(self)  # some commands call this one alone
        model_config = create_model_config(self, *args, **kwargs)
        if envs.enabled():
            request_w8a8(model_config)
        if _lm_head_is_asked_for() and model_config.quantization != QUANTIZATION:
            log.once(
                f"{envs.LM_HEAD}=1 has no effect on {model_config.model}, which is not served in W8A8 (its quantization is "
                f"{model_config.quantization}): --quantization w8a8 or {envs.ENABLE}=1 asks for that",
                logging.WARNING,
            )
        attention.select(self, asked=envs.enabled() or model_config.quantization == QUANTIZATION)
        return model_config

    return wrapped


def _explaining_missing_files(get_model_path: Callable) -> Callable:
    # With HF_HUB_OFFLINE, vLLM takes what is no path for a name on the Hub, before it calls anything that is wrapped above.
    def wrapped(model, *args, **kwargs):
        try:
            return get_model_path(model, *args, **kwargs)
        except Exception as error:
            if gguf.is_gguf(model):
                raise ValueError(f"{model} does not exist: give the path of a GGUF file") from error
            raise

    return wrapped


def _lm_head_is_asked_for() -> bool:
    try:
        return envs.lm_head()
    except ValueError:  # raised where a model asks for W8A8
        return False


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
