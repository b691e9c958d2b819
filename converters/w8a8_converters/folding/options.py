"""What a user can ask for, and doing it."""

from collections.abc import Callable
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


@dataclass(frozen=True)
class FoldingOptions:
    """Options of `convert`.

    Attributes:
        rotate: fold rotations into the weights.
        untie: give a tied lm_head a weight of its own where the rotation needs one.
        equalize: move scales between operations.
        calibration: a text for `equalize` and `quality`; default: the one of this package.
        quality: `auto` chooses among all methods, also the run-time transform; None: what the other options say.
        quality_budget: how many bytes larger `auto` may make the model, as `500MB` or a number.

    Raises:
        ConversionError: options contradict each other, or one has no effect.
    """

    rotate: bool = False
    untie: bool = False
    equalize: bool = False
    calibration: Path | None = None
    quality: str | None = None
    quality_budget: str | int = 0

    def __post_init__(self) -> None:
        if self.quality not in (None, "auto"):
            raise ConversionError(f"--quality {self.quality!r} is not known; known is auto")
        if self.quality is not None and (self.rotate or self.equalize or self.untie):
            raise ConversionError("--quality auto chooses by itself: leave out --rotate, --untie and --equalize")
        if self.untie and not self.rotate:
            raise ConversionError("--untie has no effect without --rotate: leave it out")
        if self.calibration is not None and not (self.equalize or self.quality):
            raise ConversionError("--calibration has no effect without --equalize or --quality auto: leave it out")
        if self.quality is None and self.budget:
            raise ConversionError("--quality-budget has no effect without --quality auto: leave it out")

    @property
    def budget(self) -> int:
        """Bytes."""
        if str(self.quality_budget).strip() in ("0", ""):
            return 0
        try:
            return parse_size(self.quality_budget)
        except ConversionError:
            raise ConversionError(
                f"quality budget {self.quality_budget!r} is not a size: write it as 500MB, 1GiB or 0"
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
        hadamard: the run-time transform to write it with.
        report: for the conversion's report.
        notes: what the user should know.
        untied: the lm_head's tensor where it was tied, else empty.
    """

    source: FoldedSource
    hadamard: str | int | None
    report: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    untied: str = ""


def fold(
    source: Source,
    options: FoldingOptions,
    hadamard: str | int | None,
    plan_for: Callable[[Source, str | int | None], Plan],
    progress: Progress | None = None,
) -> Folded:
    """Does what `options` ask for.

    Args:
        source: a checkpoint.
        options: at least one of them is asked for.
        hadamard: the user's choice of the run-time transform, None for the format's default.
        plan_for: the plan of a source under such a choice.
        progress: called with (stage, bytes done, bytes in all), stages `equalize` and `quality`.

    Raises:
        ConversionError: the architecture is not known, or there is no transformers to run the model.
    """
    result = Folded(FoldedSource(source), hadamard)
    model = Model(result.source, options.name)
    plan = plan_for(result.source, hadamard)
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
        plan = plan_for(result.source, hadamard)
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
    plan_for: Callable[[Source, str | int | None], Plan],
    progress: Progress | None,
) -> None:
    from w8a8_converters.folding.calibration import read_tokens
    from w8a8_converters.folding.quality import Settings, choose, try_all
    from w8a8_converters.folding.stream import Streamer

    base = result.source
    tokens = read_tokens(base, options.calibration)
    plain = plan_for(base, 0)
    extra = untied_bytes(base, model)
    untie = 0 < extra <= options.budget

    def settings(source: FoldedSource, hadamard: str | int) -> Settings:
        plan = plan_for(source, hadamard)
        return Settings(_blocks(plan), _dtypes(plan))

    told = _in_bytes("quality", plain.source_bytes, progress)
    candidates = try_all(
        base,
        Streamer(base, model),
        tokens.fit,
        tokens.held_out,
        (0, AUTO) if plain.format.name == "w8a8" else (0,),
        settings,
        untie,
        told,
    )
    best = choose(candidates)
    result.source, result.hadamard = best.source, best.hadamard
    result.report["quality"] = {
        "chosen": best.name,
        "by": f"mean KL divergence from the unquantized model on {tokens.held_out.numel()} tokens of {tokens.text}",
        "kl": {candidate.name: float(f"{candidate.kl:.4g}") for candidate in candidates},
        "budget_bytes": options.budget,
        "untying_bytes": extra,
    }
    if best.rotation is not None:
        _add_rotation(result, best.rotation)
    if best.pairs is not None:
        _add_scales(result, best.pairs, tokens.describe())
    figures = ", ".join(f"{candidate.name} {candidate.kl:.4f}" for candidate in candidates)
    result.notes.append(f"chosen: {best.name}, by its divergence from the unquantized model (mean KL: {figures})")
    if extra > options.budget:
        result.notes.append(
            f"not tried: rotating the residual stream, which would add {extra / 1e6:.1f} MB for an lm_head that is not tied, "
            f"beyond --quality-budget {options.budget}"
        )


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
