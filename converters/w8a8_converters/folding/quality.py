"""Chooses what to do to a model by what it does to the model's predictions.

Every method is tried with fake quantization, layer by layer, and its predictions are held against the unquantized model's on
tokens that no scale was fitted to: the mean Kullback-Leibler divergence over the whole vocabulary. Errors of single layers
are cheaper, but methods that look alike there can differ by half in what comes out at the end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.equalize import EqualizedPair, equalize
from w8a8_converters.folding.rotate import RotateReport, rotate
from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.folding.stream import Streamer

# A method that adds a step must lower the divergence by more than this share.
MARGIN = 0.03
# So many of the methods that need no text are also tried with scales on top: the search is by far the longest part.
_EQUALIZED = 2


@dataclass
class Candidate:
    """A way to quantize the model.

    Attributes:
        hadamard: choice of the run-time transform, as `convert` takes it.
        rotation: what was rotated; None for nothing.
        pairs: what was equalized; None for nothing.
        kl: mean divergence from the unquantized model, in nats per token.
    """

    source: FoldedSource
    hadamard: str | int
    rotation: RotateReport | None = None
    pairs: list[EqualizedPair] | None = None
    kl: float = field(default=float("inf"))

    @property
    def name(self) -> str:
        parts = ["hadamard"] if self.hadamard != 0 else []
        parts += ["rotate"] if self.rotation else []
        parts += ["equalize"] if self.pairs is not None else []
        return " + ".join(parts) or "rtn"


@dataclass(frozen=True)
class Settings:
    """What depends on the output format, for a source and a choice of the transform.

    Attributes:
        blocks: linear layers that will be quantized -> block of their transform.
        dtype_of: the dtype in which a tensor will be written.
    """

    blocks: dict[str, int]
    dtype_of: Callable[[str], torch.dtype]


def try_all(
    base: FoldedSource,
    streamer: Streamer,
    fit: Tensor,
    held_out: Tensor,
    hadamards: Iterable[str | int],
    settings: Callable[[FoldedSource, str | int], Settings],
    untie: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Candidate]:
    """All methods with their divergence, the simplest first.

    Args:
        base: the checkpoint, without operations.
        streamer: runs it.
        fit, held_out: int64 [chunks, length], the tokens to fit scales by and to compare by.
        hadamards: choices of the run-time transform that the output format can have.
        settings: of a source and such a choice.
        untie: whether an lm_head may be written that was tied.
        progress: called with (done, total).
    """
    hadamards = list(hadamards)
    total = 1 + 2 * len(hadamards) + 2 * _EQUALIZED
    reference = _last_hidden(streamer, base, held_out, {})
    done = 1
    progress(done, total)

    def measure(candidate: Candidate) -> Candidate:
        nonlocal done
        blocks = settings(candidate.source, candidate.hadamard).blocks
        hidden = _last_hidden(streamer, candidate.source, held_out, blocks)
        candidate.kl = divergence(
            streamer.logits(base, reference, {}), streamer.logits(candidate.source, hidden, blocks), reference[..., 0].numel()
        )
        done += 1
        progress(done, total)
        return candidate

    rotated = base.copy()
    rotation = rotate(rotated, Model(base, "--quality"), untie)
    plain = [Candidate(base.copy(), hadamard) for hadamard in hadamards]
    plain += [Candidate(rotated.copy(), hadamard, rotation) for hadamard in hadamards]
    candidates = [measure(candidate) for candidate in plain]
    for candidate in sorted(candidates, key=lambda candidate: candidate.kl)[:_EQUALIZED]:
        chosen = settings(candidate.source, candidate.hadamard)
        source = candidate.source.copy()
        pairs = equalize(source, streamer, fit, chosen.blocks, chosen.dtype_of)
        done += 1
        candidates.append(measure(Candidate(source, candidate.hadamard, candidate.rotation, pairs)))
    progress(total, total)
    return candidates


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
