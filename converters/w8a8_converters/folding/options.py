"""What a user can ask for, and doing it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from w8a8_converters.checkpoint import Source
from w8a8_converters.errors import ConversionError
from w8a8_converters.folding.architectures import Model
from w8a8_converters.folding.rotate import RotateReport, rotate, untied_bytes
from w8a8_converters.folding.source import FoldedSource
from w8a8_converters.layers import module_of
from w8a8_converters.plan import Plan, parse_size
from w8a8_kernels.hadamard import AUTO

# stage, bytes of the source done, bytes in all
Progress = Callable[[str, int, int], None]

# Of the bytes of the model in int8. What is left unquantized runs at the speed of bf16.
DEFAULT_BUDGET = "3%"


@dataclass(frozen=True)
class Choice:
    """How a source is quantized.

    Attributes:
        hadamard: the run-time transform, as `convert` takes it.
        blocks, keep: exceptions, as `make_plan` takes them.
    """

    hadamard: str | int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)
    keep: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoldingOptions:
    """Options of `convert`.

    Attributes:
        rotate: fold rotations into the weights.
        untie: give a tied lm_head a weight of its own where the rotation needs one.
        equalize: move scales between operations.
        calibration: a text for `equalize` and `quality`; default: the one of this package.
        quality: `auto` chooses among all methods, also the run-time transform; None: what the other options say.
        quality_budget: how much larger `auto` may make the model, as `500MB`, `2%` or a number of bytes; default:
            DEFAULT_BUDGET.

    Raises:
        ConversionError: options contradict each other, or one has no effect.
    """

    rotate: bool = False
    untie: bool = False
    equalize: bool = False
    calibration: Path | None = None
    quality: str | None = None
    quality_budget: str | int | None = None

    def __post_init__(self) -> None:
        if self.quality not in (None, "auto"):
            raise ConversionError(f"--quality {self.quality!r} is not known; known is auto")
        if self.quality is not None and (self.rotate or self.equalize or self.untie):
            raise ConversionError("--quality auto chooses by itself: leave out --rotate, --untie and --equalize")
        if self.untie and not self.rotate:
            raise ConversionError("--untie has no effect without --rotate: leave it out")
        if self.calibration is not None and not (self.equalize or self.quality):
            raise ConversionError("--calibration has no effect without --equalize or --quality auto: leave it out")
        if self.quality is None and self.quality_budget is not None:
            raise ConversionError("--quality-budget has no effect without --quality auto: leave it out")
        self.budget(0)

    def budget(self, model_bytes: int) -> int:
        """Bytes that a model of `model_bytes` may become larger by."""
        text = str(DEFAULT_BUDGET if self.quality_budget is None else self.quality_budget).strip()
        if share := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            if float(share[1]) > 100:
                raise ConversionError(f"quality budget {text} is more than the int8 model itself: write at most 100%")
            return int(model_bytes * float(share[1]) / 100)
        if text in ("0", ""):
            return 0
        if isinstance(self.quality_budget, str) and re.fullmatch(r"\d+(\.\d+)?", text):
            raise ConversionError(
                f"quality budget {self.quality_budget!r} has no unit, expected a share or size: write {text}% or {text}MB"
            )
        try:
            return parse_size(text)
        except ConversionError:
            raise ConversionError(
                f"quality budget {self.quality_budget!r} is not a size: write it as 500MB, 1GiB, 2% or 0"
            ) from None

    @property
    def asked(self) -> bool:
        return self.rotate or self.equalize or self.quality is not None

    @property
    def name(self) -> str:
        """The option to name in messages."""
        return "--quality auto" if self.quality else "--rotate" if self.rotate else "--equalize"


@dataclass
class Folded:
    """What came of it.

    Attributes:
        source: the checkpoint to write.
        choice: what to write it with.
        report: for the conversion's report.
        notes: what the user should know.
        untied: the lm_head's tensor where it was tied, else empty.
    """

    source: FoldedSource
    choice: Choice
    report: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    untied: str = ""


def fold(
    source: Source,
    options: FoldingOptions,
    hadamard: str | int | None,
    plan_for: Callable[[Source, Choice], Plan],
    progress: Progress | None = None,
) -> Folded:
    """Does what `options` ask for.

    Args:
        source: a checkpoint.
        options: at least one of them is asked for.
        hadamard: the user's choice of the run-time transform, None for the format's default.
        plan_for: the plan of a source under a choice.
        progress: called with (stage, bytes done, bytes in all), stages `equalize` and `quality`.

    Raises:
        ConversionError: the architecture is not known, or there is no transformers to run the model.
    """
    result = Folded(FoldedSource(source), Choice(hadamard))
    model = Model(result.source, options.name)
    plan = plan_for(result.source, result.choice)
    if options.quality:
        if not plan.format.quantized:
            raise ConversionError(f"--quality auto has no effect with --format {plan.format.name}, which quantizes nothing")
        if hadamard is not None:
            raise ConversionError("--quality auto chooses by itself: leave out --hadamard")
        _choose(result, model, options, plan_for, progress)
        return result
    if options.rotate:
        _add_rotation(result, rotate(result.source, model, options.untie))
        if options.untie and not result.untied:
            result.notes.append("--untie changed nothing: " + (model.architecture.no_r1 or "the lm_head is not tied"))
    if options.equalize:
        # Imported here: folding rotations needs no transformers.
        from w8a8_converters.folding.calibration import read_tokens
        from w8a8_converters.folding.equalize import equalize
        from w8a8_converters.folding.stream import Streamer

        tokens = read_tokens(source, options.calibration)
        plan = plan_for(result.source, result.choice)
        blocks = _blocks(plan)
        if not plan.format.quantized:
            # Whoever quantizes this later: to plain int8, as everybody can.
            int8 = {name for layer in model.layers for pair in layer.pairs for name in pair.consumers}
            blocks = {name: 0 for name in int8 if not name.endswith(".gate")}
        told = _in_bytes("equalize", plan.source_bytes, progress)
        pairs = equalize(result.source, Streamer(source, model), tokens.fit, blocks, _dtypes(plan), told)
        _add_scales(result, pairs, tokens.describe())
    return result


def _choose(
    result: Folded,
    model: Model,
    options: FoldingOptions,
    plan_for: Callable[[Source, Choice], Plan],
    progress: Progress | None,
) -> None:
    from w8a8_converters.folding.calibration import read_tokens
    from w8a8_converters.folding.quality import Candidate, Settings, try_all
    from w8a8_converters.folding.stream import Streamer

    base = result.source
    tokens = read_tokens(base, options.calibration)
    plain = plan_for(base, Choice(0))
    budget, untying = options.budget(plain.output_bytes), untied_bytes(base, model)

    def choice_of(candidate: Candidate) -> Choice:
        return Choice(candidate.hadamard, candidate.blocks, candidate.keep)

    def settings(candidate: Candidate) -> Settings:
        plan = plan_for(candidate.source, choice_of(candidate))
        saved = {module_of(step.weight.name): step.saved for step in plan.steps if step.scale is not None}
        return Settings(_blocks(plan), _dtypes(plan), saved, plan.output_bytes)

    told = _in_bytes("quality", plain.source_bytes, progress)
    outcome = try_all(
        base,
        Streamer(base, model),
        tokens.fit,
        tokens.held_out,
        (0, AUTO) if plain.format.name == "w8a8" else (0,),
        settings,
        untying,
        budget,
        told,
    )
    best = outcome.best
    result.source, result.choice = best.source, choice_of(best)
    result.report["quality"] = {
        "chosen": best.name,
        "by": f"mean KL divergence from the unquantized model on {tokens.held_out.numel()} tokens of {tokens.text}",
        "kl": {candidate.name: _rounded(candidate.kl) for candidate in outcome.candidates},
        "budget_bytes": budget,
        "untying_bytes": untying,
        "blocks": {
            kind: {"before": before, "block": block, "predicted_kl_before": _rounded(old), "predicted_kl": _rounded(new)}
            for kind, (before, block, old, new) in outcome.gains.items()
        },
        "unquantized": {
            name: {"extra_bytes": size, "predicted_kl": _rounded(cost)} for name, (size, cost) in outcome.kept.items()
        },
        # What is left, from the largest: what each layer alone would make.
        "predicted_kl": {name: _rounded(cost) for name, cost in sorted(outcome.costs.items(), key=lambda item: -item[1])},
    }
    if best.rotation is not None:
        _add_rotation(result, best.rotation)
    if best.pairs is not None:
        _add_scales(result, best.pairs, tokens.describe())
    figures = ", ".join(f"{candidate.name} {candidate.kl:.4f}" for candidate in outcome.candidates)
    result.notes.append(f"chosen: {best.name}, by its divergence from the unquantized model (mean KL: {figures})")
    for kind, (before, block, old, new) in outcome.gains.items():
        result.notes.append(f"Hadamard blocks of {block} instead of {before} in {kind}: predicted KL {new:.5f}, not {old:.5f}")
    if outcome.kept:
        size, cost = (sum(column) for column in zip(*outcome.kept.values(), strict=True))
        result.notes.append(
            f"left unquantized, for {size / 1e6:.1f} MB of a budget of {budget / 1e6:.1f} MB: {', '.join(outcome.kept)}; "
            f"in int8 they would make {cost / (cost + sum(outcome.costs.values())):.0%} of the divergence"
        )
    result.notes.append(f"what is left comes from: {_by_kind(outcome.costs)}")
    if untying > budget:
        result.notes.append(
            f"not tried: rotating the residual stream, which would add {untying / 1e6:.1f} MB for an lm_head that is not "
            f"tied, beyond --quality-budget ({budget / 1e6:.1f} MB)"
        )


def _by_kind(costs: dict[str, float]) -> str:
    """Shares of the kinds of layers in the predicted divergence, the largest first."""
    kinds: Counter[str] = Counter()
    for name, cost in costs.items():
        kinds[name.rpartition(".")[2]] += cost
    total = sum(kinds.values()) or 1.0
    return ", ".join(f"{kind} {cost / total:.0%}" for kind, cost in kinds.most_common())


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _add_rotation(result: Folded, rotation: RotateReport) -> None:
    result.report["rotate"] = asdict(rotation)
    result.untied = rotation.untied
    if not rotation.residual:
        again = "; --untie gives it one" if "tied" in rotation.why_not and "quality" not in result.report else ""
        result.notes.append(f"only values are rotated (R2), not the residual stream (R1): {rotation.why_not}{again}")


def _add_scales(result: Folded, pairs: list, text: str) -> None:
    from w8a8_converters.folding.equalize import strengths

    result.report["equalize"] = {"text": text, "strengths": strengths(pairs), "pairs": [asdict(pair) for pair in pairs]}


def _in_bytes(stage: str, size: int, progress: Progress | None) -> Callable[[int, int], None]:
    def tell(done: int, total: int) -> None:
        if progress is not None:
            progress(stage, size * done // total, size)

    return tell


def _blocks(plan: Plan) -> dict[str, int]:
    return {module_of(step.weight.name): step.hadamard for step in plan.steps if step.scale is not None}


def _dtypes(plan: Plan) -> Callable[[str], Any]:
    return {step.weight.name: step.values for step in plan.steps}.__getitem__
