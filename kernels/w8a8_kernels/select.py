"""Which kernel runs, and why: pure functions of the device, the shape and what is installed.

Nothing here touches a device; `w8a8_kernels.ops` collects the facts (`Facts`) once per device and passes them in.
"""

import os
from dataclasses import dataclass

KERNEL_VARIABLE = "VLLM_W8A8_KERNEL"

# tl.dot on int8 compiles to tensor-core instructions from here on; below, Triton refuses it (seen on 3.6.0 and 3.9.0).
MIN_TRITON_CAPABILITY = (8, 0)

# Sums of K products of two int8 values, each at most 128 * 127 in magnitude (-128 only in foreign weights), must fit int32.
MAX_K = (2**31 - 1) // (128 * 127)


@dataclass(frozen=True)
class Facts:
    """What a device offers: `capability` is None for a CPU."""

    capability: tuple[int, int] | None
    has_triton: bool = False
    has_onednn: bool = False


@dataclass(frozen=True)
class Choice:
    """A kernel's name (`triton`, `onednn`, `torch`) and the reason why it was taken."""

    kernel: str
    reason: str


def _triton_refusal(facts: Facts) -> str | None:
    if facts.capability is None:
        return "the Triton kernels need a GPU"
    if facts.capability < MIN_TRITON_CAPABILITY:
        got, need = (".".join(map(str, c)) for c in (facts.capability, MIN_TRITON_CAPABILITY))
        return f"int8 tl.dot needs compute capability {need}, this GPU has {got}"
    if not facts.has_triton:
        return "the package triton is not installed"
    return None


def _onednn_refusal(facts: Facts) -> str | None:
    if facts.capability is not None:
        return "oneDNN runs on CPUs only"
    if not facts.has_onednn:
        return "vLLM's CPU build, which brings the oneDNN int8 op, is not loaded"
    return None


def select_scaled_mm(facts: Facts, *, forced: str | None = None) -> Choice:
    """Kernel for the int8 matrix product on this device.

    Args:
        facts: what the device offers.
        forced: a kernel's name; default: the variable `VLLM_W8A8_KERNEL`, if set.

    Raises:
        ValueError: the forced kernel does not exist or cannot run here; the message says why.
    """
    candidates = {  # in order of preference: name -> (why it cannot run, why it is taken)
        "triton": (_triton_refusal(facts), "tensor-core int8 through Triton"),
        "onednn": (_onednn_refusal(facts), "vLLM's oneDNN int8 matrix product"),
        "torch": (None, "the reference in torch"),
    }
    forced = forced or os.environ.get(KERNEL_VARIABLE)
    if forced:
        if forced not in candidates:
            raise ValueError(
                f"{KERNEL_VARIABLE}={forced!r}: no such kernel. Known: {', '.join(candidates)}. Unset it for the default."
            )
        refusal, _ = candidates[forced]
        if refusal is not None:
            raise ValueError(f"{KERNEL_VARIABLE}={forced} cannot run here: {refusal}. Unset it for the default.")
        return Choice(forced, f"forced by {KERNEL_VARIABLE}")
    refusals = []
    for name, (refusal, reason) in candidates.items():
        if refusal is None:
            return Choice(name, "; ".join([reason, *refusals]))
        refusals.append(f"not {name}: {refusal}")
    raise AssertionError("the torch reference never refuses")


def select_quantize(facts: Facts, *, forced: str | None = None) -> Choice:
    """Kernel for the per-token quantizer: always ours, since other quantizers use other formulas. See `select_scaled_mm`."""
    choice = select_scaled_mm(facts, forced=forced)
    if choice.kernel == "onednn":
        return Choice("torch", "oneDNN only multiplies; the quantizer in torch")
    return choice
