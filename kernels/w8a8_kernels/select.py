"""Which kernel runs, and why: pure functions of the device, the shape and what is installed.

Nothing here touches a device; `w8a8_kernels.ops` collects the facts (`Facts`) once per device and passes them in.
"""

import functools
import os
from dataclasses import dataclass

import torch

KERNEL_VARIABLE = "VLLM_W8A8_KERNEL"

# tl.dot on int8 compiles to tensor-core instructions from here on; below, Triton refuses it (seen on 3.6.0 and 3.9.0).
MIN_TRITON_CAPABILITY = (8, 0)

# dp4a itself is older, but Triton compiles for nothing below.
MIN_DP4A_CAPABILITY = (7, 0)

# From here on a kernel can start before the one before it ends (programmatic dependent launch).
MIN_DEPENDENT_LAUNCH_CAPABILITY = (9, 0)

# vLLM's CUTLASS int8 product: what it is built for, and from how many rows on it is taken before Triton. On an H200, at 512
# to 8192 rows and two weights, it ran at 1,305 to 1,567 TOPS, a persistent Triton kernel with tensor descriptors at 1,017 to
# 1,298 (benchmarks/results/split-k-tiles-nvidia-h200-2026-11-29.json).
# Tiles measured for a weight win more often: of 8 or 9 weights, at 256 rows for 7, at 512 for 5, at 1024 for 2
# (kernel-choice-nvidia-h200-2026-11-30.json); the bound is for weights without, by the rule's tiles.
MIN_CUTLASS_CAPABILITY, END_OF_CUTLASS_CAPABILITY = (7, 5), (10, 0)
MIN_CUTLASS_ROWS = 256

KERNELS = ("triton", "cutlass", "pingpong", "dp4a", "onednn", "torch")

# Those that `w8a8_kernels.tune` compares.
MEASURED_KERNELS = ("triton", "cutlass", "pingpong")

# What N and K are multiples of in CUTLASS and in the ping-pong product.
ALIGNMENT = 16

# The tensor-core instructions and barriers of this one only; first and last version of Triton.
PINGPONG_CAPABILITY = (9, 0)
GLUON_VERSIONS = ((3, 6), (3, 9))

# Sums of K products of two int8 values, each at most 128 * 127 in magnitude (-128 only in foreign weights), must fit int32.
MAX_K = (2**31 - 1) // (128 * 127)


def has_dependent_launch(capability: tuple[int, int] | None) -> bool:
    """Whether kernels on such a device can be launched to overlap the end of the kernel before; None is a CPU."""
    return capability is not None and capability >= MIN_DEPENDENT_LAUNCH_CAPABILITY


@dataclass(frozen=True)
class Facts:
    """What a device offers: `capability` is None for a CPU."""

    capability: tuple[int, int] | None
    has_triton: bool = False
    has_onednn: bool = False
    onednn_saturates: bool = False
    has_cutlass: bool = False
    has_gluon: bool = False


@dataclass(frozen=True)
class Choice:
    """A kernel's name (`triton`, `cutlass`, `pingpong`, `dp4a`, `onednn`, `torch`) and the reason why it was taken."""

    kernel: str
    reason: str


def _triton_refusal(facts: Facts, need: tuple[int, int], what: str) -> str | None:
    if facts.capability is None:
        return "the Triton kernels need a GPU"
    if facts.capability < need:
        got, least = (".".join(map(str, c)) for c in (facts.capability, need))
        return f"{what} needs compute capability {least}, this GPU has {got}"
    if not facts.has_triton:
        return "the package triton is not installed"
    return None


def _onednn_refusal(facts: Facts) -> str | None:
    if facts.capability is not None:
        return "oneDNN runs on CPUs only"
    if not facts.has_onednn:
        return "vLLM's CPU build, which brings the oneDNN int8 op, is not loaded"
    if facts.onednn_saturates:
        return "on this CPU, which has no VNNI instructions, the sums of oneDNN's int8 op saturate"
    return None


def _form_refusal(kernel: str, aligned: bool, half: bool) -> str | None:
    if not aligned:
        return f"{kernel} needs N and K to be multiples of {ALIGNMENT}"
    if not half:
        return f"{kernel} writes bf16 and fp16 only"
    return None


def _cutlass_refusal(facts: Facts, aligned: bool, half: bool) -> str | None:
    if facts.capability is None:
        return "CUTLASS runs on GPUs only"
    if facts.capability < MIN_CUTLASS_CAPABILITY or facts.capability >= END_OF_CUTLASS_CAPABILITY:
        return "vLLM's CUTLASS int8 product is built for compute capability 7.5 to 9.0 and raises elsewhere"
    if not facts.has_cutlass:
        return "vLLM's CUDA build, which brings the CUTLASS int8 op, is not loaded"
    return _form_refusal("CUTLASS", aligned, half)


def _pingpong_refusal(facts: Facts, aligned: bool, half: bool) -> str | None:
    if facts.capability != PINGPONG_CAPABILITY:
        return "the ping-pong product is made of instructions that only GPUs of compute capability 9.0 have"
    if not facts.has_triton:
        return "the package triton is not installed"
    if not facts.has_gluon:
        return "this version of triton has not the Gluon that the ping-pong product is written in (3.6 to 3.9 have)"
    return _form_refusal("the ping-pong product", aligned, half)


def pingpong_refusal(facts: Facts, N: int | None, K: int | None, out_dtype: torch.dtype) -> str | None:
    """Why the ping-pong product cannot run on this device, weight [N, K] and result, or None."""
    return _pingpong_refusal(facts, _aligned(N, K), out_dtype != torch.float32)


def cutlass_refusal(facts: Facts, N: int | None, K: int | None, out_dtype: torch.dtype) -> str | None:
    """Why vLLM's CUTLASS product cannot run on this device, weight [N, K] and result, or None."""
    return _cutlass_refusal(facts, _aligned(N, K), out_dtype != torch.float32)


def _aligned(N: int | None, K: int | None) -> bool:
    return all(size is None or size % ALIGNMENT == 0 for size in (N, K))


def select_scaled_mm(
    facts: Facts,
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    measured: str | None = None,
    forced: str | None = None,
) -> Choice:
    """Kernel for the int8 matrix product on this device.

    Args:
        facts: what the device offers.
        M, N, K: rows of activations and of the weight, and their length; default: few rows and an ordinary weight.
        out_dtype: of the result.
        measured: what a measurement on this GPU at this shape found fastest of triton, cutlass and pingpong, as
            `w8a8_kernels.tiles.kernel_for` says; taken if it can run. Else, and by default: a rule by the number of rows.
        forced: a kernel's name; default: the variable `VLLM_W8A8_KERNEL`, if set.

    Raises:
        ValueError: `measured` is no kernel's name; the forced kernel does not exist or cannot run here; the message says why.
    """
    aligned = _aligned(N, K)
    many_rows = M is not None and M >= MIN_CUTLASS_ROWS
    half = out_dtype != torch.float32
    return _select(facts, many_rows, aligned, half, measured, forced or os.environ.get(KERNEL_VARIABLE) or None)


@functools.cache  # asked at every call of the op: the sentences are made once
def _select(facts: Facts, many_rows: bool, aligned: bool, half: bool, measured: str | None, forced: str | None) -> Choice:
    candidates = {  # in order of preference: name -> (why it cannot run, why it is taken)
        "triton": (_triton_refusal(facts, MIN_TRITON_CAPABILITY, "int8 tl.dot"), "tensor-core int8 through Triton"),
        "cutlass": (_cutlass_refusal(facts, aligned, half), "vLLM's CUTLASS int8 product"),
        "pingpong": (_pingpong_refusal(facts, aligned, half), "two warpgroups in turns, through Gluon"),
        "dp4a": (_triton_refusal(facts, MIN_DP4A_CAPABILITY, "Triton"), "the dp4a instruction through Triton"),
        "onednn": (_onednn_refusal(facts), "vLLM's oneDNN int8 matrix product"),
        "torch": (None, "the reference in torch"),
    }
    if measured is not None and measured not in MEASURED_KERNELS:
        raise ValueError(f"got {measured!r} as the kernel measured fastest, expected one of {', '.join(MEASURED_KERNELS)}")
    first, because = measured, "fastest here by measurement"
    lost = None if measured is None else candidates[measured][0]
    if many_rows and (measured is None or lost is not None):
        first, because = "cutlass", f"faster from {MIN_CUTLASS_ROWS} rows on"
    if first is not None and candidates[first][0] is None:
        reason = f"{candidates[first][1]}, {because}"
        candidates = {first: (None, reason), **{k: v for k, v in candidates.items() if k != first}}
    if forced:
        if forced not in candidates:
            raise ValueError(
                f"{KERNEL_VARIABLE}={forced!r}: no such kernel. Known: {', '.join(KERNELS)}. Unset it for the default."
            )
        refusal, _ = candidates[forced]
        if refusal is not None:
            raise ValueError(f"{KERNEL_VARIABLE}={forced} cannot run here: {refusal}. Unset it for the default.")
        return Choice(forced, f"forced by {KERNEL_VARIABLE}")
    refusals: dict[str, list[str]] = {}  # why not -> the kernels for which that holds
    for name, (refusal, reason) in candidates.items():
        if name == "pingpong" != first or (name == measured and lost is not None):
            continue  # the first is taken by measurement or by force only, the second named below
        if refusal is None:
            others = [f"not {' or '.join(names)}: {why}" for why, names in refusals.items()]
            if lost is not None:
                others.append(f"not {measured}, fastest here by measurement: {lost}")
            return Choice(name, "; ".join([reason, *others]))
        refusals.setdefault(refusal, []).append(name)
    raise AssertionError("the torch reference never refuses")


def describe_scaled_mm(facts: Facts, out_dtype: torch.dtype) -> str:
    """What `select_scaled_mm` takes for few and for many rows of an ordinary weight, and why: for logs. Raises as that."""
    few, many = (select_scaled_mm(facts, M, out_dtype=out_dtype) for M in (None, MIN_CUTLASS_ROWS))
    text = f"{few.kernel} ({few.reason})"
    if many.kernel != few.kernel:
        text += f", from {MIN_CUTLASS_ROWS} rows on {many.kernel} where N and K are multiples of {ALIGNMENT}; weights "
        text += "measured on this GPU take what was fastest"
    return text


def select_quantize(facts: Facts, *, forced: str | None = None) -> Choice:
    """Kernel for the per-token quantizer: always ours, since other quantizers use other formulas. See `select_scaled_mm`."""
    choice = select_scaled_mm(facts, forced=forced)
    if choice.kernel == "onednn":
        return Choice("torch", "oneDNN only multiplies; the quantizer in torch")
    if choice.kernel in ("dp4a", "cutlass", "pingpong"):
        # The quantizer has no tl.dot, so it runs wherever Triton does.
        refusal = _triton_refusal(facts, MIN_DP4A_CAPABILITY, "Triton")
        if refusal is not None:
            return Choice("torch", f"the quantizer in torch; not triton: {refusal}")
        return Choice("triton", f"one pass over each row; the product: {choice.reason}")
    return choice
