"""Scales moved from an operation to the layers that read its result, so that both sides fit int8 better.

v_proj -> o_proj, up -> down and norm -> the layers behind it are linear in each channel in between: dividing there and
multiplying in the next weight changes nothing. The scale of channel j is size(x_j)^a / size(w_j)^(1-a) (SmoothQuant, arXiv
2211.10438). There the size is the largest magnitude and a one number for a model; here every pair of operations gets its own
a and its own kind of size, the largest magnitude or the root of the mean square, which suits layers behind a Hadamard
transform: those that cost the model's predictions least on a text (`sensitivity.py`), or no scale where none costs less.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from w8a8_converters.folding.architectures import Model, Pair
from w8a8_converters.folding.sensitivity import Sensitive, sensitivities
from w8a8_converters.folding.source import FoldedSource, Replace, ScaleInput, ScaleOutput
from w8a8_converters.folding.stream import Streamer

STRENGTHS = tuple(i / 8 for i in range(9))
# A scale beyond this says that a channel is all but unused; it would be lost on the other side.
_MAX_SCALE = 1e3
# Costs are measured on so many tokens or up to twice as many; sizes of channels come from all.
_SEARCH_TOKENS = 256
SIZES = ("amax", "rms")


@dataclass(frozen=True)
class EqualizedPair:
    """What was chosen for a pair: exponent and kind of size, None for no scale; what int8 costs without and with it.

    Costs are the consumers' shares of the mean divergence, in nats for each token that reaches them, as `search` found them.
    """

    producer: str
    strength: float | None
    size: str | None
    cost_before: float
    cost: float


def equalize(
    source: FoldedSource,
    streamer: Streamer,
    ids: Tensor,
    blocks: dict[str, int],
    dtype_of: Callable[[str], torch.dtype],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[EqualizedPair]:
    """Adds the scales to `source`.

    Args:
        source: a checkpoint, rotated or not.
        streamer: runs it.
        ids: int64 [chunks, length].
        blocks: linear layers that will be quantized -> block of their Hadamard transform, 0 for none.
        dtype_of: the dtype in which a tensor will be written. A norm's scaled weight is rounded to it, and the layers behind
            it make up for that.
        progress: called with (steps done, steps).
    """
    pairs: list[EqualizedPair] = []
    # From the last layer to the first. A layer's scales change neither its function nor other layers' weights.
    for index, layers in sensitivities(source, streamer, ids, progress):
        pairs = _equalize_layer(source, streamer.model, index, layers, blocks, dtype_of) + pairs
    return pairs


def _equalize_layer(
    source: FoldedSource,
    model: Model,
    index: int,
    layers: dict[str, Sensitive],
    blocks: dict[str, int],
    dtype_of: Callable[[str], torch.dtype],
) -> list[EqualizedPair]:
    pairs = []
    for pair in model.layers[index].pairs:
        consumers = [(layers[name], blocks[name]) for name in pair.consumers if name in blocks and name in layers]
        if not consumers:
            continue  # nothing is quantized there, or no token reached this expert
        heads = (model.head_dim, source.tensors[f"{pair.producer}.weight"].shape[0]) if pair.kind == "v_o" else None
        found = search(consumers, heads)
        pairs.append(EqualizedPair(pair.producer, found.strength, found.size, found.cost_before, found.cost))
        if found.strength is not None:
            move_scale(source, model, pair, found.scale, dtype_of(f"{pair.producer}.weight"))
    return pairs


@dataclass(frozen=True)
class Found:
    """The scale [channels of the producer] fp32, and what `EqualizedPair` says of it."""

    scale: Tensor
    strength: float | None
    size: str | None
    cost_before: float
    cost: float


def search(consumers: list[tuple[Sensitive, int]], heads: tuple[int, int] | None = None) -> Found:
    """The scale of a pair with which int8 consumers cost the model least.

    Args:
        consumers: the layers that read the producer's result, and the blocks of their Hadamard transforms.
        heads: (head_dim, channels of v_proj) where query heads share them: such channels get one scale.
    """

    def cost(scale: Tensor | None) -> float:
        total = 0.0
        for layer, block in consumers:
            per_input = None if scale is None else expand(scale, heads, layer.x.shape[1])
            total += layer.cost(block, per_input, every=max(1, len(layer.x) // _SEARCH_TOKENS))
        return total

    x, weights = torch.cat([layer.x for layer, _ in consumers]), torch.cat([layer.weight for layer, _ in consumers])
    before = cost(None)
    best = Found(torch.ones(heads[1] if heads else x.shape[1]), None, None, before, before)
    for size in SIZES:
        size_x, size_w = (_sizes(values, size, heads) for values in (x, weights))
        used = (size_x > 0) & (size_w > 0)
        if not bool(used.any()):
            return best
        for strength in STRENGTHS:
            scale = torch.where(used, size_x.pow(strength) / size_w.pow(1 - strength), 1.0)
            # Only ratios matter; around 1 nothing leaves the range of fp16.
            middle = scale[used].log().mean().exp()
            scale = torch.where(used, (scale / middle).clamp(1 / _MAX_SCALE, _MAX_SCALE), 1.0)
            if (after := cost(scale)) < best.cost:
                best = Found(scale, strength, size, before, after)
    return best


def move_scale(source: FoldedSource, model: Model, pair: Pair, scale: Tensor, dtype: torch.dtype) -> None:
    """Divides the producer's output channels by `scale`, and multiplies the consumers' input channels by it.

    Args:
        source: gets the operations.
        model: its names.
        pair: where.
        scale: [channels of the producer] fp32, positive.
        dtype: in which the producer is written, used for a norm.
    """
    if pair.kind == "norm":
        offset = model.architecture.norm_offset
        gain = source.whole(f"{pair.producer}.weight") + offset
        stored = (gain / scale - offset).to(dtype).float()
        # What the rounded weight really divides by. A channel that is off, or would be, keeps its weight.
        kept = (gain == 0) | (stored + offset == 0)
        stored = torch.where(kept, gain - offset, stored)
        scale = torch.where(kept, 1.0, gain / (stored + offset))
        source.add(f"{pair.producer}.weight", Replace(stored))
    else:
        source.add(f"{pair.producer}.weight", ScaleOutput(1 / scale))
        if model.has_bias(pair.producer):
            source.add(f"{pair.producer}.bias", ScaleOutput(1 / scale))
    for consumer in pair.consumers:
        weight = f"{consumer}.weight"
        heads = (model.head_dim, len(scale)) if pair.kind == "v_o" else None
        source.add(weight, ScaleInput(expand(scale, heads, source.tensors[weight].shape[1])))


def expand(scale: Tensor, heads: tuple[int, int] | None, channels: int) -> Tensor:
    """Scales of v's channels -> those of o_proj's inputs [channels]: every query head has its key-value head's."""
    if heads is None:
        return scale
    head_dim, v_channels = heads
    return scale.view(-1, 1, head_dim).expand(-1, channels // v_channels, -1).reshape(channels)


def _sizes(values: Tensor, size: str, heads: tuple[int, int] | None) -> Tensor:
    """Sizes of the channels of [rows, channels]; query heads' as one where they share a key-value head."""
    if heads is not None:
        head_dim, v_channels = heads
        shared = values.view(len(values), v_channels // head_dim, -1, head_dim).transpose(1, 2)
        values = shared.reshape(-1, v_channels)
    return values.abs().amax(dim=0) if size == "amax" else values.square().mean(dim=0).sqrt()


def strengths(pairs: Iterable[EqualizedPair]) -> dict[str, int]:
    """How often every exponent of every kind of size was chosen, as `rms 0.5`, `none` for no scale."""
    counts = Counter("none" if pair.strength is None else f"{pair.size} {pair.strength:g}" for pair in pairs)
    return dict(sorted(counts.items()))
