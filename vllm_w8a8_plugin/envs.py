"""Every environment variable of the plugin: name, default, effect."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from w8a8_kernels.hadamard import AUTO, parse_choice
from w8a8_kernels.names import name_matcher
from w8a8_kernels.select import KERNEL_VARIABLE
from w8a8_kernels.tiles import CONFIG_DIR_VARIABLE

ENABLE = "VLLM_W8A8_ENABLE"
SKIP_MODULES = "VLLM_W8A8_SKIP_MODULES"
FUSION = "VLLM_W8A8_FUSION"
HADAMARD = "VLLM_W8A8_HADAMARD"
TP_CONSISTENT_ACTIVATIONS = "VLLM_W8A8_TP_CONSISTENT_ACTIVATIONS"
LM_HEAD = "VLLM_W8A8_LM_HEAD"
ATTENTION = "VLLM_W8A8_ATTENTION"
PREFILL_ATTENTION = "VLLM_W8A8_PREFILL_ATTENTION"
CACHE_DIR = "VLLM_W8A8_CACHE_DIR"

PREFILL_KERNELS = (AUTO, "triton", "flash_attn", "flash_attn_4")


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default, and what it does."""

    name: str
    default: str
    effect: str


VARIABLES = (
    Variable(
        ENABLE,
        "0",
        "1: serve every model in W8A8 that can be: unquantized checkpoints are quantized while loading, int8 checkpoints that "
        "vLLM reads run on this plugin's kernels, other checkpoints stay on vLLM's own path.",
    ),
    Variable(
        SKIP_MODULES,
        "",
        "Comma-separated modules that stay unquantized when a checkpoint is quantized while loading: names, parents, globs, "
        "`re:` patterns, as for `vllm-w8a8 convert --skip`. A pattern cannot hold a comma.",
    ),
    Variable(FUSION, "1", "0: do not fold RMSNorm and SiLU·mul into the quantizer in compiled graphs."),
    Variable(
        HADAMARD,
        AUTO,
        "Block Hadamard transform of layers that are quantized while loading: auto (a rule chooses the blocks), 0 (none), or "
        "the largest block to use: 16, 32, 64 or 128. Int8 checkpoints have their own; a number that contradicts is refused.",
    ),
    Variable(
        TP_CONSISTENT_ACTIVATIONS,
        "0",
        "1: with tensor parallelism, row-parallel layers (o_proj, down_proj) quantize their inputs by the maximum over all "
        "ranks, so that codes equal those of one rank: one more collective a layer. Where set, it wins over the entry "
        "tp_consistent_activations of a checkpoint's quantization_config.",
    ),
    Variable(
        LM_HEAD,
        "0",
        "1: quantize an lm_head that is not int8 in the checkpoint while it loads. An embedding to which it is tied keeps its "
        "rows and gets an int8 copy beside them: half as much memory again. Where set, it wins over the entry lm_head of a "
        "checkpoint's quantization_config.",
    ),
    Variable(
        ATTENTION,
        "0",
        "1: models that are served in W8A8 use this plugin's attention backend, as with --attention-backend CUSTOM.",
    ),
    Variable(
        PREFILL_ATTENTION,
        AUTO,
        "What this plugin's attention backend runs batches on that have a query of more than 16 tokens: triton (its own "
        "kernel), flash_attn (vLLM's FlashAttention), flash_attn_4 (the package flash_attn_4_sm120; not supported yet), or "
        "auto: FlashAttention 3 where it runs, else triton.",
    ),
    Variable(
        CACHE_DIR,
        "",
        "Folder for the configs and tokenizers that are made of GGUF files' metadata. Default: $XDG_CACHE_HOME/vllm-w8a8, or "
        "~/.cache/vllm-w8a8.",
    ),
    Variable(
        KERNEL_VARIABLE,
        "",
        "Force one kernel by name: triton, cutlass, pingpong, dp4a, onednn or torch. Fails where it cannot run.",
    ),
    Variable(
        CONFIG_DIR_VARIABLE,
        "",
        "Folder with measured tiles of this GPU, as `vllm-w8a8 tune` writes them; wins over shipped ones.",
    ),
)


def enabled() -> bool:
    """Whether VLLM_W8A8_ENABLE asks for W8A8.

    Raises:
        ValueError: the variable is neither a yes nor a no.
    """
    return _yes(ENABLE, default=False)


def fusion() -> bool:
    """Whether VLLM_W8A8_FUSION leaves the compile pass on.

    Raises:
        ValueError: the variable is neither a yes nor a no.
    """
    return _yes(FUSION, default=True)


def hadamard() -> str | int:
    """What VLLM_W8A8_HADAMARD asks for: `"auto"`, 0 or a block.

    Raises:
        ValueError: the variable says something else.
    """
    return parse_choice(os.environ.get(HADAMARD, "").strip() or AUTO, HADAMARD)


def tp_consistent_activations(default: bool = False) -> bool:
    """What VLLM_W8A8_TP_CONSISTENT_ACTIVATIONS asks for; `default` where it is not set.

    Raises:
        ValueError: the variable is neither a yes nor a no.
    """
    return _yes(TP_CONSISTENT_ACTIVATIONS, default)


def lm_head(default: bool = False) -> bool:
    """What VLLM_W8A8_LM_HEAD asks for; `default` where it is not set.

    Raises:
        ValueError: the variable is neither a yes nor a no.
    """
    return _yes(LM_HEAD, default)


def attention() -> bool:
    """Whether VLLM_W8A8_ATTENTION asks for this plugin's attention backend.

    Raises:
        ValueError: the variable is neither a yes nor a no.
    """
    return _yes(ATTENTION, default=False)


def prefill_attention() -> str:
    """What VLLM_W8A8_PREFILL_ATTENTION asks for: one of `PREFILL_KERNELS`.

    Raises:
        ValueError: the variable says something else.
    """
    value = os.environ.get(PREFILL_ATTENTION, "").strip().lower() or AUTO
    if value not in PREFILL_KERNELS:
        raise ValueError(f"{PREFILL_ATTENTION}={value!r}: expected {', '.join(PREFILL_KERNELS[:-1])} or {PREFILL_KERNELS[-1]}")
    return value


def cache_dir() -> Path:
    """The folder of VLLM_W8A8_CACHE_DIR, or the default one. It need not exist."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_DIR, "").strip() or Path(cache_home, "vllm-w8a8")).absolute()


def check() -> None:
    """Raise ValueError for a variable with a value that cannot be."""
    for pattern in skip_modules():
        try:
            name_matcher(pattern)
        except ValueError as error:
            raise ValueError(f"{SKIP_MODULES}: {error}") from None
    enabled()
    fusion()
    hadamard()
    tp_consistent_activations()
    lm_head()
    attention()
    prefill_attention()


def _yes(name: str, default: bool) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value == "":
        return default
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}={value!r}: expected 1 or 0")


def skip_modules() -> list[str]:
    """Patterns in VLLM_W8A8_SKIP_MODULES."""
    return [pattern.strip() for pattern in os.environ.get(SKIP_MODULES, "").split(",") if pattern.strip()]


def readers() -> dict[str, Callable[[], str]]:
    """Readers in the form of `vllm.envs.environment_variables`.

    vLLM hashes every variable in that table into its compile cache's key, and does not warn that it does not know it.
    """

    def reader(variable: Variable) -> Callable[[], str]:
        return lambda: os.environ.get(variable.name, variable.default)

    return {variable.name: reader(variable) for variable in VARIABLES}
