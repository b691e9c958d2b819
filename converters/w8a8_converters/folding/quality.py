"""Chooses what to do to a model by what it does to the model's predictions.

Every method is tried with fake quantization, layer by layer, and its predictions are held against the unquantized model's on
tokens that no scale was fitted to: the mean Kullback-Leibler divergence over the whole vocabulary. What is chosen for single
layers, larger Hadamard blocks and layers to leave unquantized, is chosen by what their int8 outputs are predicted to add to it
(`sensitivity.py`), and has to show in the measured divergence, too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.equalize import EqualizedPair, equalize
from w8a8_converters.folding.rotate import RotateReport, rotate
from w8a8_converters.folding.sensitivity import predict
from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.folding.stream import Streamer
from w8a8_converters.rules import FUSED, expert_groups, fused_groups
from w8a8_kernels.hadamard import BLOCKS, RANKS, ranks_that_fit
from w8a8_kernels.names import is_row_parallel

# A method that adds a step must lower the divergence by more than this share.
MARGIN = 0.03
# So many of the methods that need no text are also tried with scales on top: the search is by far the longest part.
_EQUALIZED = 2
# A layer that is left unquantized must take off at least so many times its share of the bytes from the divergence.
_WORTH = 3
# Layers that share an input, and with it a block: vLLM's fused ones, and what Mixtral calls gate_proj and up_proj.
_KINDS = {part: fused for fused, parts in FUSED.items() for part in parts} | {"w1": "w1 and w3", "w3": "w1 and w3"}


@dataclass
class Candidate:
    """A way to quantize the model.

    Attributes:
        hadamard: choice of the run-time transform, as `convert` takes it.
        rotation: what was rotated; None for nothing.
        pairs: what was equalized; None for nothing.
        blocks: Hadamard blocks of layers that get others than the choice gives them.
        keep: layers left unquantized.
        kl: mean divergence from the unquantized model, in nats per token.
    """

    source: FoldedSource
    hadamard: str | int
    rotation: RotateReport | None = None
    pairs: list[EqualizedPair] | None = None
    blocks: dict[str, int] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    kl: float = field(default=float("inf"))

    @property
    def name(self) -> str:
        parts = ["hadamard"] if self.hadamard != 0 else []
        parts += ["rotate"] if self.rotation else []
        parts += ["equalize"] if self.pairs is not None else []
        parts += ["blocks"] if self.blocks else []
        parts += ["keep"] if self.keep else []
        return " + ".join(parts) or "rtn"


@dataclass(frozen=True)
class Settings:
    """What a candidate is written as.

    Attributes:
        blocks: linear layers that will be quantized -> block of their transform.
        dtype_of: the dtype in which a tensor will be written.
        saved: linear layers that will be quantized -> bytes that this takes off.
        output_bytes: of the whole checkpoint.
    """

    blocks: dict[str, int]
    dtype_of: Callable[[str], torch.dtype]
    saved: dict[str, int]
    output_bytes: int


@dataclass
class Outcome:
    """What came of the comparison.

    Attributes:
        candidates: all that were measured, the simplest first.
        best: the one to write.
        costs: its quantized layers -> what each alone is predicted to add to the divergence.
        gains: kinds of layers whose block was changed -> (block before, after, predicted cost before, after).
        kept: layers left unquantized, those together that vLLM runs as one -> (bytes, predicted cost that this takes off).
    """

    candidates: list[Candidate]
    best: Candidate
    costs: dict[str, float]
    gains: dict[str, tuple[int, int, float, float]]
    kept: dict[str, tuple[int, float]]


def try_all(
    base: FoldedSource,
    streamer: Streamer,
    fit: Tensor,
    held_out: Tensor,
    hadamards: Iterable[str | int],
    settings: Callable[[Candidate], Settings],
    untying: int,
    budget: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Measures all methods, and improves on the best.

    Args:
        base: the checkpoint, without operations.
        streamer: runs it.
        fit, held_out: int64 [chunks, length], the tokens to fit scales by and to compare by.
        hadamards: choices of the run-time transform that the output format can have.
        settings: of a candidate.
        untying: bytes that an lm_head would add which is tied now, 0 where none is or needs to be untied.
        budget: bytes that the result may be larger, by such an lm_head or by layers that are left unquantized.
        progress: called with (done, total).
    """
    hadamards = list(hadamards)
    # A pass over the held-out tokens is one step, searching scales or predicting costs about two.
    done, total = 0, 1 + 2 * len(hadamards) + 3 * _EQUALIZED + 4

    def tell(steps: int) -> None:
        nonlocal done
        done += steps
        progress(done, total)

    reference = _last_hidden(streamer, base, held_out, {})
    tell(1)

    def measure(candidate: Candidate) -> Candidate:
        blocks = settings(candidate).blocks
        hidden = _last_hidden(streamer, candidate.source, held_out, blocks)
        candidate.kl = divergence(
            streamer.logits(base, reference, {}), streamer.logits(candidate.source, hidden, blocks), reference[..., 0].numel()
        )
        tell(1)
        return candidate

    rotated = base.copy()
    rotation = rotate(rotated, Model(base, "--quality"), untie=0 < untying <= budget)
    plain = [Candidate(base.copy(), hadamard) for hadamard in hadamards]
    plain += [Candidate(rotated.copy(), hadamard, rotation) for hadamard in hadamards]
    candidates = [measure(candidate) for candidate in plain]
    for candidate in sorted(candidates, key=lambda candidate: candidate.kl)[:_EQUALIZED]:
        chosen = settings(candidate)
        source = candidate.source.copy()
        pairs = equalize(source, streamer, fit, chosen.blocks, chosen.dtype_of)
        tell(2)
        candidates.append(measure(replace(candidate, source=source, pairs=pairs)))

    best = choose(candidates)
    chosen = settings(best)
    heads = streamer.model.config["num_attention_heads"]
    # Not an lm_head: that is quantized where the user asks for it, and only there.
    inside = {name: block for name, block in chosen.blocks.items() if name.startswith(f"{streamer.model.prefix}layers.")}
    inputs = {name: base.tensors[f"{name}.weight"].shape[1] for name in inside}
    tried = {name: _blocks_to_try(name, inputs[name], block, heads) for name, block in inside.items()}
    predicted = predict(best.source, streamer, fit, tried)
    tell(2)
    blocks, gains = choose_blocks(predicted, inside)
    if blocks:
        candidates.append(measure(replace(best, blocks=blocks)))
        best = choose(candidates)
    gains = gains if best.blocks else {}
    chosen = settings(best)
    costs = {name: predicted[name][chosen.blocks[name]] for name in inside}
    spent = untying if best.rotation and best.rotation.untied else 0
    kept = choose_kept(costs, chosen.saved, budget - spent, chosen.output_bytes)
    if kept:
        groups = joint_layers(costs)
        candidates.append(measure(replace(best, keep=tuple(name for group in kept for name in groups[group]))))
        best = choose(candidates)
    kept = kept if best.keep else {}
    progress(total, total)
    costs = {name: cost for name, cost in costs.items() if name not in best.keep}
    return Outcome(candidates, best, costs, gains, kept)


def choose_blocks(
    predicted: dict[str, dict[int, float]], blocks: dict[str, int]
) -> tuple[dict[str, int], dict[str, tuple[int, int, float, float]]]:
    """Another block for whole kinds of layers, where that takes more than `MARGIN` of the predicted divergence off.

    Args:
        predicted: layer -> block -> predicted cost.
        blocks: layer -> the block that it has.

    Returns:
        layer -> its other block; and `Outcome.gains`.
    """
    total = sum(predicted[name][block] for name, block in blocks.items())
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, block in blocks.items():
        last = name.rpartition(".")[2]
        kinds.setdefault((_KINDS.get(last, last), block), []).append(name)
    changed, gains = {}, {}
    for (kind, block), names in kinds.items():
        common = set.intersection(*(set(predicted[name]) for name in names))
        costs = {other: sum(predicted[name][other] for name in names) for other in common}
        best = min(costs, key=costs.__getitem__)
        if costs[block] - costs[best] > MARGIN * total:
            changed |= dict.fromkeys(names, best)
            gains[kind] = (block, best, costs[block], costs[best])
    return changed, gains


def choose_kept(
    costs: dict[str, float], saved: dict[str, int], budget: int, output_bytes: int
) -> dict[str, tuple[int, float]]:
    """The layers whose quantization costs most for each byte that it saves, as many as the budget pays for.

    Args:
        costs: quantized layers -> predicted cost.
        saved: the same -> bytes that quantizing them takes off.
        budget: bytes that may be given back.
        output_bytes: of the whole checkpoint. Layers that cost less than `_WORTH` times their share of it are not worth it.

    Returns:
        layers that vLLM runs as one, by their common name, the dearest first -> (bytes, predicted cost).
    """
    total = sum(costs.values())
    groups = joint_layers(costs).items()
    sums = {group: (sum(saved[name] for name in names), sum(costs[name] for name in names)) for group, names in groups}
    kept = {}
    for group, (size, cost) in sorted(sums.items(), key=lambda item: -item[1][1] / max(1, item[1][0])):
        if 0 < size <= budget and cost * output_bytes > _WORTH * size * total:
            kept[group] = (size, cost)
            budget -= size
    return kept


def joint_layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Layers that are quantized all or none: the experts of a layer, and what vLLM fuses."""
    groups = expert_groups(names)
    others = [name for name in names if not any(name.startswith(f"{experts}.") for experts in groups)]
    for fused, parts in fused_groups(others).items():
        parent = fused.rpartition(".")[0]
        groups[fused] = [f"{parent}.{part}" if parent else part for part in parts]
    inside = {name for members in groups.values() for name in members}
    return groups | {name: [name] for name in others if name not in inside}


def _blocks_to_try(name: str, K: int, block: int, heads: int) -> set[int]:
    """The block of a layer, and others that fit every degree of tensor parallelism that it and the model's heads fit."""
    if block == 0:
        return {0}
    degrees = {ranks for ranks in ranks_that_fit(K, block, max(RANKS)) if heads % ranks == 0} if is_row_parallel(name) else {1}
    return {block} | {b for b in BLOCKS if K % b == 0 and degrees <= set(ranks_that_fit(K, b, max(RANKS)))}


def choose(candidates: list[Candidate]) -> Candidate:
    """The first, simplest one that is within `MARGIN` of the smallest divergence."""
    limit = (1 + MARGIN) * min(candidate.kl for candidate in candidates)
    return next(candidate for candidate in candidates if candidate.kl <= limit)


def divergence(reference: Iterable[Tensor], other: Iterable[Tensor], tokens: int) -> float:
    """Mean of KL(reference || other) over tokens, from logits that come in pieces of the vocabulary, in fp64.

    Args:
        reference, other: [tokens, columns] each, the same columns.
        tokens: how many.
    """
    # Sums of exp(r - top), exp(o - other_top) and exp(r - top) (r - o) over the columns so far.
    top, other_top = (torch.full((tokens, 1), -float("inf"), dtype=torch.float64) for _ in range(2))
    mass, other_mass, gap = (torch.zeros(tokens, 1, dtype=torch.float64) for _ in range(3))
    for r, o in zip(reference, other, strict=True):
        r, o = r.double(), o.double()
        new_top = torch.maximum(top, r.amax(dim=1, keepdim=True))
        new_other_top = torch.maximum(other_top, o.amax(dim=1, keepdim=True))
        shrink, weight = (top - new_top).exp(), (r - new_top).exp()
        mass = mass * shrink + weight.sum(dim=1, keepdim=True)
        gap = gap * shrink + (weight * (r - o)).sum(dim=1, keepdim=True)
        other_mass = other_mass * (other_top - new_other_top).exp() + (o - new_other_top).exp().sum(dim=1, keepdim=True)
        top, other_top = new_top, new_other_top
    return float((gap / mass - (top + mass.log()) + (other_top + other_mass.log())).mean())


def _last_hidden(streamer: Streamer, source: FoldedSource, ids: Tensor, blocks: dict[str, int]) -> Tensor:
    hidden = streamer.start(source, ids)
    for index, layer in streamer.layers(source):
        streamer.quantize(index, layer, blocks)
        hidden = streamer.run(index, layer, hidden)
        del layer  # before the next one comes
    return hidden
