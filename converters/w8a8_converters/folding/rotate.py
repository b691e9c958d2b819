"""Rotations folded into the weights: R1 of the residual stream, R2 of every head's values.

R1 multiplies all that is written to the residual stream by an orthonormal matrix, and the input side of all that is read
from it by the same matrix. An RMSNorm commutes with a rotation only without its weight, so the weights of norms are folded
into the layers that read them first. R2 does the same between v_proj and o_proj, head by head: attention mixes tokens, never
channels of a head. Both spread outliers over channels. Sources: QuaRot (arXiv 2404.00456), SpinQuant (arXiv 2405.16406).
"""

from dataclasses import dataclass
from typing import Any

import torch

from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.rotation import Rotation
from w8a8_converters.folding.source import FoldedSource, Replace, RotateInput, RotateOutput, ScaleInput
from w8a8_converters.layers import lm_head_of

RESIDUAL_SEED = 4000
HEAD_SEED = 4001


@dataclass(frozen=True)
class RotateReport:
    """What `rotate` did.

    Attributes:
        residual: whether the residual stream is rotated (R1); `why_not` says why it is not.
        heads: whether values are rotated head by head (R2): always.
        seeds: of R1 and R2; see `rotation.Rotation`.
        untied: the lm_head's tensor where it is no longer tied to the embedding, else empty.
    """

    residual: bool
    heads: bool
    why_not: str
    seeds: tuple[int, int]
    untied: str


def untied_bytes(source: FoldedSource, model: Model) -> int:
    """Bytes that R1 adds, at most: those of an lm_head of its own, 0 where there is one already or R1 cannot be."""
    if model.architecture.no_r1 or model.head is not None:
        return 0
    info = source.tensors[model.embedding]
    # A checkpoint that is fp32 as a whole, as a GGUF file is here, is rounded to the 16-bit dtype that its config names.
    named = str(model.config.get("dtype") or model.config.get("torch_dtype"))
    size = 2 if named in ("bfloat16", "float16") else info.dtype.itemsize
    return info.shape[0] * info.shape[1] * size


def rotate(source: FoldedSource, model: Model, untie: bool) -> RotateReport:
    """Adds the rotations to `source`.

    Args:
        source: a checkpoint that holds `model`.
        model: its names.
        untie: give a tied lm_head a weight of its own where R1 needs that. Behind the folded final norm it is
            E diag(g) R while the embedding is E R, so that one matrix cannot be both. Without it such a model gets R2 only.
    """
    why_not = model.architecture.no_r1
    if not why_not and model.head is None and not untie:
        why_not = "its lm_head is tied to the embedding, and would need a weight of its own"
    untied = ""
    if not why_not:
        if model.head is None:
            untied = _untie(source, model)
        _rotate_residual(source, model, model.head or untied)
    rotation = Rotation(model.head_dim, HEAD_SEED)
    for layer in model.layers:
        source.add(f"{layer.v}.weight", RotateOutput(rotation))
        if model.has_bias(layer.v):
            source.add(f"{layer.v}.bias", RotateOutput(rotation))
        source.add(f"{layer.o}.weight", RotateInput(rotation))
    return RotateReport(not why_not, True, why_not, (RESIDUAL_SEED, HEAD_SEED), untied)


def _rotate_residual(source: FoldedSource, model: Model, head: str) -> None:
    rotation = Rotation(model.hidden, RESIDUAL_SEED)
    source.add(model.embedding, RotateInput(rotation))
    _fold_norm(source, model, model.norm, [head])
    source.add(head, RotateInput(rotation))
    for layer in model.layers:
        for norm, readers in layer.readers.items():
            weights = [f"{name}.weight" for name in readers]
            _fold_norm(source, model, norm, weights)
            for weight in weights:
                source.add(weight, RotateInput(rotation))
        for writer in layer.writers:
            source.add(f"{writer}.weight", RotateOutput(rotation))
            if model.has_bias(writer):
                source.add(f"{writer}.bias", RotateOutput(rotation))


def _fold_norm(source: FoldedSource, model: Model, norm: str, weights: list[str]) -> None:
    offset = model.architecture.norm_offset
    gain = source.whole(f"{norm}.weight") + offset
    for weight in weights:
        source.add(weight, ScaleInput(gain))
    source.add(f"{norm}.weight", Replace(torch.full_like(gain, 1 - offset)))


def _untie(source: FoldedSource, model: Model) -> str:
    head = f"{lm_head_of(model.embedding)}.weight"
    source.add_copy(head, model.embedding)
    source.config = _untied(source.config)
    return head


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    config = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        if section is config or "tie_word_embeddings" in section:
            section["tie_word_embeddings"] = False
    return config
