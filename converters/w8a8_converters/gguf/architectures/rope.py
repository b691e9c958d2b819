"""Rotary embeddings: from a file's metadata to what transformers and vLLM read."""

from __future__ import annotations

import math
from typing import Any

import torch

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture
from w8a8_converters.gguf.metadata import POSITIVE

ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
# (low_freq_factor, high_freq_factor, original_max_position_embeddings): the only values that Llama 3.x was published with.
_LLAMA3 = (1.0, 4.0, 8192)


def rope_scaling(architecture: Architecture) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json, None where positions are not scaled.

    Raises:
        ConversionError: a scaling that is not supported.
    """
    # As in llama.cpp, a factor that has no type is linear.
    factor = architecture.value(_factor_key(architecture))
    kind = architecture.value("rope.scaling.type", "none" if factor is None else "linear")
    if any(name in architecture.file.tensors for name in ROPE_FACTORS):
        kind = "longrope"  # Phi-3's files do not say it
    if kind != "none" and factor is not None:
        _factor(architecture)
    for key in ("rope.scaling.finetuned", "rope.scaling.original_context_length"):
        architecture.value(key)  # says nothing where the kind has no use for it
    if kind != "longrope":
        architecture.expect("rope.scaling.attn_factor", 1.0)
    path = architecture.file.path
    if ROPE_FREQS in architecture.file.tensors and not architecture.values(ROPE_FREQS).eq(1).all():
        if kind != "none":
            raise ConversionError(f"{path} has both {ROPE_FREQS} and rope scaling {kind}, which is not supported")
        return _llama3(architecture)
    if kind == "none":
        return None
    if kind == "linear":
        return None if factor is None else {"rope_type": "linear", "factor": _factor(architecture)}
    if kind == "yarn":
        return _yarn(architecture)
    if kind == "longrope":
        return _longrope(architecture)
    raise ConversionError(f"{path}: rope scaling {kind!r} is not supported; known are none, linear, llama3, longrope, yarn")


def _factor_key(architecture: Architecture) -> str:
    """The factor's name: early files have another."""
    key, early = "rope.scaling.factor", "rope.scale_linear"
    return early if architecture.value(early) is not None and architecture.value(key) is None else key


def _factor(architecture: Architecture) -> float:
    return architecture.number(_factor_key(architecture), numbers=POSITIVE)


def _yarn(architecture: Architecture) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": _factor(architecture),
        "original_max_position_embeddings": architecture.integer(
            "rope.scaling.original_context_length", architecture.integer("context_length")
        ),
    }
    for key in ("beta_fast", "beta_slow"):
        if architecture.value(f"rope.scaling.yarn_{key}") is not None:
            scaling[key] = architecture.number(f"rope.scaling.yarn_{key}")
    architecture.expect("rope.scaling.yarn_ext_factor", 1.0)
    # llama.cpp computes the factor on attention. A file may name that factor, or 1, which says nothing.
    strength = architecture.number("rope.scaling.yarn_attn_factor", 1.0)
    if strength != 1.0:
        _expect_close(architecture, "rope.scaling.yarn_attn_factor", strength, 1 + 0.1 * math.log(max(scaling["factor"], 1.0)))
    return scaling


def _longrope(architecture: Architecture) -> dict[str, Any]:
    """In Phi-3's published spelling, and transformers 4 takes no other: no further key, `type` in place of `rope_type`."""
    path = architecture.file.path
    missing = [name for name in ROPE_FACTORS if name not in architecture.file.tensors]
    if missing:
        raise ConversionError(f"{path} lacks {len(missing)} tensors of rope scaling longrope: {', '.join(missing)}")
    long, short = ([float(str(factor)) for factor in architecture.values(name).numpy()] for name in ROPE_FACTORS)
    pairs = architecture.rotary_dim // 2
    if not all(math.isfinite(factor) and factor > 0 for factor in (*long, *short)):
        raise ConversionError(f"{path}: {' and '.join(ROPE_FACTORS)} must hold numbers above 0; download it again")
    if not len(long) == len(short) == pairs:
        raise ConversionError(
            f"{path}: {' and '.join(ROPE_FACTORS)} have {len(long)} and {len(short)} values, the metadata ask for {pairs}"
        )
    if architecture.value("rope.scaling.attn_factor") is not None:  # early files lack it
        length = architecture.integer("context_length")
        original = architecture.integer("rope.scaling.original_context_length", length, minimum=2)
        expected = math.sqrt(1 + math.log(max(length / original, 1.0)) / math.log(original))
        _expect_close(architecture, "rope.scaling.attn_factor", architecture.number("rope.scaling.attn_factor"), expected)
    return {"type": "longrope", "long_factor": long, "short_factor": short}


def _expect_close(architecture: Architecture, key: str, value: float, expected: float) -> None:
    if not math.isclose(value, expected, rel_tol=1e-4):
        raise ConversionError(
            f"{architecture.file.path}: {architecture.name}.{key} is {value}, which is not supported; expected {expected:.6g}"
        )


def _llama3(architecture: Architecture) -> dict[str, Any]:
    """The file holds what each frequency is divided by; Hugging Face the rule that gives these factors."""
    factors = architecture.values(ROPE_FREQS).double()
    dim = 2 * len(factors)
    low, high, original = _LLAMA3
    factor = float(factors.max())
    frequencies = architecture.rope_theta ** -(torch.arange(0, dim, 2).double() / dim)
    wavelengths = 2 * math.pi / frequencies
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if dim != architecture.head_dim or not torch.allclose(factors, expected, rtol=1e-4):
        raise ConversionError(f"{architecture.file.path}: {ROPE_FREQS} is not the scaling of Llama 3; no other is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
