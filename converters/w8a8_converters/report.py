"""What a conversion did: sizes, layers, quality."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class LayerReport:
    """One quantized weight: `sqnr_db` is None where the quantization is exact, `hadamard` the transform's block or 0."""

    name: str
    shape: tuple[int, int]
    sqnr_db: float | None = None
    hadamard: int = 0


@dataclass
class Report:
    """Result of `convert`.

    Attributes:
        source_bytes: weights on disk before, without other files.
        output_bytes: weights on disk after.
        tensors: dtype -> how many tensors were written in it, the most frequent first.
        bf16_bytes: the same tensors, all floating ones in bf16.
        layers: the quantized weights, in the order of the checkpoint.
        ignore: Linear modules that stayed unquantized.
        lm_head_extra_bytes: what an lm_head of its own adds where the embedding was tied.
        notes: what the user should know.
        folding: what was folded into the weights and why, of `rotate`, `equalize` and `quality` those that were done.
        quantized_source: how the source was quantized, where it was: `origin` of `quantized.source.QuantizedSource`.
    """

    source: str
    output: str
    format: str
    source_bytes: int = 0
    output_bytes: int = 0
    bf16_bytes: int = 0
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)
    tensors: dict[str, int] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    lm_head_extra_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    folding: dict[str, Any] = field(default_factory=dict)
    quantized_source: dict[str, Any] = field(default_factory=dict)

    def worst_layers(self, count: int = 10) -> list[LayerReport]:
        """The quantized weights with the lowest signal-to-quantization-noise ratio, worst first."""
        return sorted((la for la in self.layers if la.sqnr_db is not None), key=lambda la: la.sqnr_db)[:count]

    def hadamard_blocks(self) -> dict[int, int]:
        """Block, 0 for none -> how many layers have it; the largest first."""
        counts = Counter(layer.hadamard for layer in self.layers)
        return dict(sorted(counts.items(), reverse=True))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Noise:
    """Energy of a weight, or of some of its rows, and of what quantization changes in it; those of its blocks add up."""

    signal: float = 0.0
    noise: float = 0.0

    @classmethod
    def of(cls, values: Tensor, codes: Tensor, scale: Tensor) -> "Noise":
        """values [n, K] floating, codes int8 [n, K], scale fp32 [n, 1]."""
        exact = values.to(torch.float32)
        noise = codes.to(torch.float32).mul_(scale).sub_(exact)
        return cls(_energy(exact), _energy(noise))

    def __add__(self, other: "Noise") -> "Noise":
        return Noise(self.signal + other.signal, self.noise + other.noise)

    def decibels(self) -> float | None:
        """None where there is no noise at all."""
        return round(10 * math.log10(self.signal / self.noise), 2) if self.noise and self.signal else None


def _energy(values: Tensor) -> float:
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))
