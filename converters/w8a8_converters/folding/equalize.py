"""Scales moved from an operation to the layers that read its result, so that both sides fit int8 better.

v_proj -> o_proj, up -> down and norm -> the layers behind it are linear in each channel in between: dividing there and
multiplying in the next weight changes nothing. The scale of channel j is amax(x_j)^a / amax(w_j)^(1-a) (SmoothQuant, arXiv
2211.10438). There a is one number for a model; here every pair of operations gets its own, the one whose int8 outputs are
closest to the exact ones on a text, or no scale at all where none is closer.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from w8a8_converters.folding.architectures import Model, Pair
from w8a8_converters.folding.source import FoldedSource, Replace, ScaleInput, ScaleOutput
from w8a8_converters.folding.stream import Streamer, fake_quantize, fake_quantize_weight, recorded_inputs

STRENGTHS = tuple(i / 8 for i in range(9))
# A scale beyond this says that a channel is all but unused; it would be lost on the other side.
_MAX_SCALE = 1e3
# Errors are measured on so many tokens or up to twice as many; the largest magnitudes come from all.
_SEARCH_TOKENS = 256


@dataclass(frozen=True)
class EqualizedPair:
    """What was chosen for a pair: the exponent, None for no scale; the error that `search` measured without and with it."""

    producer: str
    strength: float | None
    error_before: float
    error: float


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
        progress: called with (layers done, layers).
    """
    pairs = []
    hidden = streamer.start(source, ids)
    for index, layer in streamer.layers(source):
        linears = streamer.linears(index, layer)
        with recorded_inputs(layer, linears) as inputs:
            hidden = streamer.run(index, layer, hidden)
        weights = {name: parent.get_submodule(last).weight for name, (parent, last) in linears.items()}
        pairs += _equalize_layer(source, streamer.model, index, inputs, weights, blocks, dtype_of)
        del layer, linears, inputs, weights  # before the next layer comes
        progress(index + 1, len(streamer.model.layers))
    return pairs


def _equalize_layer(
    source: FoldedSource,
    model: Model,
    index: int,
    inputs: dict[str, Tensor],
    weights: dict[str, Tensor],
    blocks: dict[str, int],
    dtype_of: Callable[[str], torch.dtype],
) -> list[EqualizedPair]:
    """`inputs` [tokens, K] and `weights` [N, K] of the layer's linear layers by name, fp32."""
    pairs = []
    for pair in model.layers[index].pairs:
        consumers = [(weights[name], blocks[name]) for name in pair.consumers if name in blocks and name in inputs]
        if not consumers:
            continue  # nothing is quantized there, or no token reached this expert
        x = next(inputs[name] for name in pair.consumers if name in inputs)
        heads = (model.head_dim, source.tensors[f"{pair.producer}.weight"].shape[0]) if pair.kind == "v_o" else None
        scale, strength, before, after = search(x, consumers, heads)
        pairs.append(EqualizedPair(pair.producer, strength, before, after))
        if strength is not None:
            move_scale(source, model, pair, scale, dtype_of(f"{pair.producer}.weight"))
    return pairs


def search(
    x: Tensor, consumers: list[tuple[Tensor, int]], heads: tuple[int, int] | None = None
) -> tuple[Tensor, float | None, float, float]:
    """The scale of a pair with the smallest error of its consumers' int8 outputs.

    Args:
        x: [tokens, K] fp32, what the consumers read.
        consumers: (weight [N, K] fp32, block of its Hadamard transform).
        heads: (head_dim, channels of v_proj) where query heads share them: such channels get one scale.

    Returns:
        scale [channels of the producer] fp32, the exponent or None for no scale, error without, error with. Errors are
        squared, relative to the exact output of each token (a few tokens have outputs a thousand times as large as others),
        averaged over tokens and added up over consumers.
    """
    amax_x = _shared_amax(x.abs().amax(dim=0), heads)
    x = x[:: max(1, len(x) // _SEARCH_TOKENS)]
    exact = [F.linear(x, weight) for weight, _ in consumers]
    amax_w = _shared_amax(torch.stack([weight.abs().amax(dim=0) for weight, _ in consumers]).amax(dim=0), heads)

    def error(scale: Tensor | None) -> float:
        per_input = None if scale is None else expand(scale, heads, x.shape[1])
        scaled = x if per_input is None else x / per_input
        codes = {block: fake_quantize(scaled, block) for block in {block for _, block in consumers}}
        total = 0.0
        for (weight, block), wanted in zip(consumers, exact, strict=True):
            got = F.linear(codes[block], fake_quantize_weight(weight if per_input is None else weight * per_input, block))
            noise, signal = (got - wanted).square().sum(dim=1), wanted.square().sum(dim=1)
            total += float((noise / signal.clamp_min(1e-30)).mean())
        return total

    before = error(None)
    best = (torch.ones_like(amax_x), None, before, before)
    used = (amax_x > 0) & (amax_w > 0)
    if not bool(used.any()):
        return best
    for strength in STRENGTHS:
        scale = torch.where(used, amax_x.pow(strength) / amax_w.pow(1 - strength), 1.0)
        # Only ratios matter; around 1 nothing leaves the range of fp16.
        middle = scale[used].log().mean().exp()
        scale = torch.where(used, (scale / middle).clamp(1 / _MAX_SCALE, _MAX_SCALE), 1.0)
        if (after := error(scale)) < best[3]:
            best = (scale, strength, before, after)
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


def _shared_amax(amax: Tensor, heads: tuple[int, int] | None) -> Tensor:
    if heads is None:
        return amax
    head_dim, v_channels = heads
    return amax.view(v_channels // head_dim, -1, head_dim).amax(dim=1).reshape(v_channels)


def strengths(pairs: Iterable[EqualizedPair]) -> dict[str, int]:
    """How often every exponent was chosen, `none` for no scale."""
    counts = Counter("none" if pair.strength is None else f"{pair.strength:g}" for pair in pairs)
    return dict(sorted(counts.items()))
