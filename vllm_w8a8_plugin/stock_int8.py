"""What stock vLLM does with int8 layers on new GPUs, and the lines that say so. Imports nothing of vLLM's until it must."""

import logging

from vllm_w8a8_plugin import envs, log
from w8a8_kernels.select import END_OF_CUTLASS_CAPABILITY

# Where vLLM chooses the kernel of an int8 layer; it logs each choice there, by the kernel's class and the scheme's.
_LOGGER = "vllm.model_executor.kernels.linear"
_CHOSEN = "Selected %s for %s"
_INT8 = "Int8ScaledMMLinearKernel"  # how the names of all classes of int8 kernels end
_CUTLASS, _OURS = "Cutlass" + _INT8, "W8A8" + _INT8


def failure(capability: tuple[int, int] | None) -> str | None:
    """How stock vLLM fails to run int8 layers on a GPU of this capability, and what mends it; None where it runs them."""
    if capability is None or capability < END_OF_CUTLASS_CAPABILITY:
        return None
    major, minor = capability
    return (
        "vLLM's own CUTLASS int8 product, its first choice, raises at the first forward on compute capability "
        f"{major}.{minor}. {envs.ENABLE}=1 mends it: int8 layers then run on this plugin's kernels"
    )


class ChoiceFilter(logging.Filter):
    """Hears which kernel vLLM chooses for int8 layers, as it logs that at level INFO, and lets every message pass.

    So nothing of vLLM's is imported, wrapped or asked before an int8 layer is built.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg == _CHOSEN and isinstance(record.args, tuple) and len(record.args) == 2:
            comment = _comment(*map(str, record.args))
            if comment is not None:
                log.once(comment, logging.WARNING)
        return True


def _comment(kernel: str, scheme: str) -> str | None:
    if not kernel.endswith(_INT8) or kernel == _OURS:
        return None
    if envs.enabled():
        return (
            f"{envs.ENABLE}=1, but vLLM chose {kernel} for {scheme}: --linear-backend, linear_backend_per_quant or "
            "VLLM_DISABLED_KERNELS leaves this plugin's kernel out"
        )
    if kernel != _CUTLASS:
        return None
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    said = failure(None if capability is None else (capability.major, capability.minor))
    return None if said is None else f"{scheme}: {said}"


def watch() -> None:
    """Add the filter to the logger of vLLM's choice, unless it is there."""
    logger = logging.getLogger(_LOGGER)
    if not any(isinstance(present, ChoiceFilter) for present in logger.filters):
        logger.addFilter(ChoiceFilter())
