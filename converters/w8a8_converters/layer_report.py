"""What int8 does to each layer of a converted folder: noise and outliers of its weights, and, on a text, of its inputs."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w8a8_converters.checkpoint import SafetensorsFile, read_json, within
from w8a8_converters.convert import REPORT_FILE, open_source
from w8a8_converters.errors import BrokenFileError, ConversionError
from w8a8_converters.folding.options import DEFAULT_BUDGET, FoldingOptions
from w8a8_kernels.hadamard import hadamard_transform

_BLOCK_BYTES = 4 * 1024**2
_FIELDS = {"name": str, "shape": list, "hadamard": int}


@dataclass
class LayerFigures:
    """A quantized layer. An outlier ratio is the largest magnitude of a row over its root mean square, the mean of all rows.

    Attributes:
        name: of the module.
        shape: [N, K] of its weight.
        hadamard: block of its transform, 0 for none.
        sqnr_db: signal-to-quantization-noise ratio of its weight, None where that is exact.
        weight_outliers: outlier ratio of its weight as the unquantized model has it.
        weight_outliers_int8: the same after the transform, as it is quantized.
        input_outliers, input_outliers_int8: the same of its input on a text, None where there was none.
        input_sqnr_db: of its quantized input.
        predicted_kl: what int8 in this layer alone is predicted to add to the divergence, in nats per token.
    """

    name: str
    shape: tuple[int, int]
    hadamard: int
    sqnr_db: float | None
    weight_outliers: float = 0.0
    weight_outliers_int8: float = 0.0
    input_outliers: float | None = None
    input_outliers_int8: float | None = None
    input_sqnr_db: float | None = None
    predicted_kl: float | None = None

    @property
    def kind(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def number(self) -> int | None:
        """Which decoder layer it is in; None for others, as the lm_head."""
        found = re.search(r"(?:^|\.)(\d+)\.", self.name)
        return int(found[1]) if found else None


@dataclass
class Proposal:
    """Layers that cost most for each byte, and what leaving them unquantized is predicted to give.

    Attributes:
        skip: names of modules, as `convert` takes them.
        extra_bytes: by which the folder grows.
        gain: predicted divergence that goes, in nats per token.
        total: predicted divergence of all layers.
    """

    skip: list[str]
    extra_bytes: int
    gain: float
    total: float


@dataclass
class FolderReport:
    """Of a folder; `proposal` only where a text was given."""

    folder: Path
    layers: list[LayerFigures]
    text: str = ""
    proposal: Proposal | None = None
    notes: list[str] = field(default_factory=list)


def report_layers(
    folder: Path,
    activations: Path | None = None,
    source: Path | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> FolderReport:
    """Look at the layers of a folder that `convert` wrote.

    Args:
        folder: that folder.
        activations: a text, on which the unquantized model is run by transformers, one layer at a time, on the CPU.
        source: the unquantized model, where it is no longer where it was converted from.
        progress: called with (stage, steps done, steps in all), stages `weights` and `activations`, the latter two steps for
            each decoder layer, forth and back. Each stage begins with 0.

    Raises:
        ConversionError: the folder has no quantized layers or no report of them, a text or the unquantized model cannot be
            read, or the model's function was folded into other weights, which no text can then be run on.
    """
    conversion = _read(folder)
    layers = [_layer(folder, entry) for entry in conversion["layers"]]
    layers.sort(key=lambda layer: math.inf if layer.number is None else layer.number)
    if not layers:
        raise ConversionError(f"{folder} has no int8 layers: expected a folder of format w8a8 or compressed-tensors")
    if source is not None and activations is None:
        raise ConversionError("--source has no effect without --activations: leave it out")
    if activations is not None:
        _check_runs(folder, conversion)
    report = FolderReport(folder, layers)
    _add_weights(report, progress)
    if activations is not None:
        _add_activations(report, conversion, activations, source, progress)
    return report


def outlier_ratio(x: Tensor) -> Tensor:
    """Largest magnitude over root mean square of each row that is not zero: x [rows, K] floating -> [at most rows]."""
    x = x.float()
    rms = x.square().mean(dim=1).sqrt_()
    return (x.abs().amax(dim=1) / rms)[rms > 0]


def _read(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ConversionError(f"{folder}: there is no such folder; expected one that vllm-w8a8 convert wrote")
    path = folder / REPORT_FILE
    if not path.is_file():
        raise ConversionError(f"{folder} has no {REPORT_FILE}: expected a folder that vllm-w8a8 convert wrote")
    report = read_json(within(folder, path), unique=False)
    if not isinstance(report, dict) or not isinstance(report.get("layers"), list):
        raise BrokenFileError(f"{path} is no report of vllm-w8a8 convert: it has no list of layers; convert again")
    return report


def _layer(folder: Path, entry: Any) -> LayerFigures:
    given = entry if isinstance(entry, dict) else {}
    wrong = [key for key, kind in _FIELDS.items() if not isinstance(given.get(key), kind)]
    if wrong or not isinstance(given.get("sqnr_db"), int | float | None):
        what = f"{', '.join(wrong) or 'sqnr_db'} of layer {str(given.get('name'))[:60]}"
        raise BrokenFileError(f"{folder / REPORT_FILE}: {what} is missing or of another type; convert again")
    return LayerFigures(given["name"], tuple(given["shape"]), given["hadamard"], given.get("sqnr_db"))


def _add_weights(report: FolderReport, progress: Callable[[str, int, int], None]) -> None:
    files = [SafetensorsFile(within(report.folder, path)) for path in sorted(report.folder.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.tensors}
    for done, layer in enumerate(report.layers):
        progress("weights", done, len(report.layers))
        name = f"{layer.name}.weight"
        info = where[name].tensors[name] if name in where else None
        if info is None or info.dtype != torch.int8 or info.shape != layer.shape:
            found = "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
            raise BrokenFileError(
                f"{report.folder}: {name} should be int8 {list(layer.shape)} by {REPORT_FILE}, got {found}; convert again"
            )
        stored, before = zip(*_weight_ratios(where[name], name, layer.hadamard), strict=True)
        layer.weight_outliers_int8, layer.weight_outliers = _mean(torch.cat(stored)), _mean(torch.cat(before))
    progress("weights", len(report.layers), len(report.layers))


def _weight_ratios(file: SafetensorsFile, name: str, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outlier ratios of rows, as they are quantized and before the transform. A row's scale makes no difference to either."""
    info = file.tensors[name]
    step = max(1, _BLOCK_BYTES // (4 * info.shape[1]))
    for start in range(0, info.n_rows, step):
        codes = file.rows(name, start, min(start + step, info.n_rows)).float()
        stored = outlier_ratio(codes)
        # The transform is its own inverse.
        yield stored, outlier_ratio(hadamard_transform(codes, block)) if block else stored


def _check_runs(folder: Path, conversion: dict[str, Any]) -> None:
    folded = [name for name in ("rotate", "equalize") if name in (conversion.get("folding") or {})]
    if folded:
        raise ConversionError(
            f"{folder} was converted with weights changed by {' and '.join(folded)}, so that the unquantized model's "
            "activations are not this folder's: leave out --activations"
        )


def _add_activations(
    report: FolderReport,
    conversion: dict[str, Any],
    text: Path,
    path: Path | None,
    progress: Callable[[str, int, int], None],
) -> None:
    # Imported here: they need transformers, and tables of weights do not.
    from w8a8_converters.folding.architectures import Model
    from w8a8_converters.folding.calibration import read_tokens
    from w8a8_converters.folding.sensitivity import sensitivities
    from w8a8_converters.folding.source import FoldedSource
    from w8a8_converters.folding.stream import Streamer, fake_quantize

    was = Path(str(conversion.get("source")))
    if path is None and not was.exists():
        raise ConversionError(f"{was}, from which {report.folder} was converted, is not there: name the model with --source")
    source = FoldedSource(open_source(path or was, from_quantized=bool(conversion.get("quantized_source"))))
    tokens = read_tokens(source, text)
    model = Model(source, "--activations")
    streamer, ids = Streamer(source, model), tokens.fit
    by_name = {layer.name: layer for layer in report.layers}

    def told(done: int, total: int) -> None:
        progress("activations", done, total)

    told(0, 2 * len(model.layers))  # before the first layer, which takes a while
    for _, found in sensitivities(source, streamer, ids, told):
        for name, sensitive in found.items():
            layer = by_name.get(name)
            if layer is None:
                continue
            if tuple(sensitive.weight.shape) != tuple(layer.shape):
                raise ConversionError(f"{source.path} is another model than {report.folder}: {name} has another shape")
            x = hadamard_transform(sensitive.x, layer.hadamard)
            layer.input_outliers, layer.input_outliers_int8 = _mean(outlier_ratio(sensitive.x)), _mean(outlier_ratio(x))
            noise = fake_quantize(sensitive.x, layer.hadamard).sub_(x).square().sum().item()
            layer.input_sqnr_db = 10 * math.log10(x.square().sum().item() / noise) if noise else None
            layer.predicted_kl = sensitive.cost(layer.hadamard) * len(sensitive.x) / ids.numel()
    report.text = f"{text.name}, {ids.numel()} tokens"
    report.proposal = propose(report.layers, int(conversion["output_bytes"]))
    others = [layer.name for layer in report.layers if layer.predicted_kl is None]
    if others:
        some = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        report.notes.append(f"no token reached {some}, or it is in no decoder layer: nothing is said of its input")


def propose(layers: list[LayerFigures], output_bytes: int) -> Proposal:
    """The layers to leave unquantized with a budget of `DEFAULT_BUDGET`, by the rule of `convert --quality auto`.

    Args:
        layers: with `predicted_kl`, as far as a text says it.
        output_bytes: of the int8 folder.
    """
    from w8a8_converters.folding.quality import choose_kept, joint_layers

    costs = {layer.name: layer.predicted_kl for layer in layers if layer.predicted_kl is not None}
    # Two bytes for each value instead of one, and the scales go.
    saved = {layer.name: layer.shape[0] * (layer.shape[1] - 4) for layer in layers if layer.name in costs}
    budget = FoldingOptions(quality="auto", quality_budget=DEFAULT_BUDGET).budget(output_bytes)
    kept = choose_kept(costs, saved, budget, output_bytes)
    together = joint_layers(costs)
    skip = [name for group in kept for name in together[group]]
    return Proposal(skip, sum(size for size, _ in kept.values()), sum(cost for _, cost in kept.values()), sum(costs.values()))


def _mean(ratios: Tensor) -> float:
    return float(ratios.mean()) if len(ratios) else 0.0
