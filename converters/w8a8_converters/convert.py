"""Converts a checkpoint: plan, check everything, write to a folder beside the output, rename."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from w8a8_converters.checkpoint import HuggingFaceSource, Source, TensorInfo, missing_source, write_side_files
from w8a8_converters.errors import BrokenFileError, ConversionError
from w8a8_converters.folding.options import Choice, FoldingOptions, fold
from w8a8_converters.formats import FORMATS
from w8a8_converters.layers import module_of
from w8a8_converters.plan import Plan, Step, make_plan
from w8a8_converters.quantized.source import QuantizedSource
from w8a8_converters.report import LayerReport, Noise, Report
from w8a8_converters.staging import check_output, remove_stale, staged_folder
from w8a8_converters.writer import ShardWriter
from w8a8_kernels.hadamard import hadamard_transform
from w8a8_kernels.quantize.weight import quantize_weight

logger = logging.getLogger(__name__)

REPORT_FILE = "conversion_report.json"
QUANT_CONFIG_FILE = "quant_config.json"

# stage ("check", "write", and of folding "equalize", "quality"), bytes of the source done, bytes in all
Progress = Callable[[str, int, int], None]
Result = TypeVar("Result")

# fp32 size of a block of rows. Blocks bound the memory: no tensor and no shard is ever held as a whole. Twice as much took 0.9
# of the time on two cores, and 35 MB more.
_BLOCK_BYTES = 1024**2
_KEPT_BYTES = 4 * _BLOCK_BYTES
# Threads that share the blocks: each has temporaries of its own, about ten blocks.
_MOST_THREADS = 8
_DISK_MARGIN = 64 * 1000**2


def convert(
    src: str | Path,
    out: str | Path,
    *,
    format: str = "w8a8",
    skip: Iterable[str] = (),
    quantize_lm_head: bool = False,
    max_shard_size: str | int = "4GB",
    overwrite: bool = False,
    hadamard: str | int | None = None,
    folding: FoldingOptions | None = None,
    from_quantized: bool = False,
    hf_config: str | Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Converts a model and returns what was done. `out` appears only when it is complete.

    Args:
        src: a Hugging Face folder with safetensors files, or a .gguf file.
        out: the folder to make.
        format: `w8a8`, `compressed-tensors` or `bf16`.
        skip: patterns of modules to leave unquantized, see `rules.SkipRules`.
        quantize_lm_head: write an int8 lm_head. Where it is tied to the embedding, it becomes a weight of its own.
        max_shard_size: limit of a weight file, as `4GB`.
        overwrite: replace `out` if it is a model folder. The old one stays until the new one is complete.
        hadamard: `"auto"`, 0 or the largest block of the Hadamard transform (`w8a8_kernels.hadamard.chosen_block`). Default:
            `"auto"` for format `w8a8`, 0 for the others, which cannot have one.
        folding: changes of the unquantized weights that keep the model's function; default: none.
        hf_config: of a .gguf file: a folder whose config.json, generation_config.json and tokenizer replace those that its
            metadata give.
        from_quantized: take a folder whose weights are quantized (fp8, GPTQ, AWQ, compressed-tensors), and dequantize them.
            Projections that it left unquantized stay so.
        progress: called with (stage, bytes done, bytes in all), stages `check` and `write`. Folding has stages of its own.

    Raises:
        ConversionError: the source, the options or the disk do not allow it. Nothing has been written then.
    """
    started = time.monotonic()
    src, out = Path(src).expanduser(), Path(out).expanduser()
    if format not in FORMATS:
        raise ConversionError(f"format {format!r} is not known; known are {', '.join(FORMATS)}")
    skip = tuple(skip)
    hf_config = None if hf_config is None else Path(hf_config).expanduser()
    source = open_source(src, from_quantized, hf_config)
    origin = source.origin if isinstance(source, QuantizedSource) else {}
    kept = source.kept if isinstance(source, QuantizedSource) else frozenset()
    check_output(out, [src, *source.files, *([hf_config] if hf_config else [])], overwrite)
    bf16_bytes = sum(_bf16_bytes(info) for info in source.tensors.values())
    plan = make_plan(source, FORMATS[format], skip, quantize_lm_head, max_shard_size, hadamard, keep=kept)
    remove_stale(out, logger.warning)
    # Made before the values are read, which takes long: a folder that cannot be made is an error at once.
    with staged_folder(out, overwrite) as folder:
        _check_disk(plan, source, out)
        folded = None
        if folding is not None and folding.asked:

            def plan_for(source: Source, choice: Choice) -> Plan:
                fmt = FORMATS[format]
                keep = kept.union(choice.keep)
                return make_plan(source, fmt, skip, quantize_lm_head, max_shard_size, choice.hadamard, choice.blocks, keep)

            _check_values(plan, source, progress)
            folded = fold(source, folding, hadamard, plan_for, progress)
            source, plan = folded.source, plan_for(folded.source, folded.choice)
            _check_disk(plan, source, out)
            untied = [tensor.nbytes for step in plan.steps if step.weight.name == folded.untied for tensor in step.outputs]
            plan.lm_head_extra_bytes = plan.lm_head_extra_bytes or sum(untied)
        _check_values(plan, source, progress)

        report = Report(
            source=str(src.resolve()),
            output=str(out),
            format=format,
            source_bytes=sum(path.stat().st_size for path in source.files),
            bf16_bytes=bf16_bytes,
            files=plan.files,
            tensors=plan.tensors,
            ignore=plan.ignore,
            lm_head_extra_bytes=plan.lm_head_extra_bytes,
            notes=[*source.notes, *plan.notes, *(folded.notes if folded else ())],
            folding=folded.report if folded else {},
            quantized_source=origin,
        )
        _write_weights(plan, source, folder, report, progress)
        report.output_bytes = sum((folder / name).stat().st_size for name in plan.files)
        report.seconds = round(time.monotonic() - started, 1)
        _write_side_files(plan, source, folder, report)
    return report


def open_source(src: Path, from_quantized: bool = False, hf_config: Path | None = None) -> Source:
    """The checkpoint that `convert` was given, see there."""
    if src.is_dir() and hf_config is not None:
        raise ConversionError(f"{src}: --hf-config is for GGUF files, a folder has its own config.json: leave it out")
    if src.is_dir():
        return QuantizedSource(src) if from_quantized else HuggingFaceSource(src)
    if not src.is_file():
        raise missing_source(src)
    if from_quantized:
        raise ConversionError(
            f"{src}: --from-quantized is for folders with safetensors files, a GGUF file needs none: leave it out"
        )
    # Imported here: a Hugging Face folder needs neither gguf nor tokenizers.
    from w8a8_converters.gguf.source import GGUFSource

    source = GGUFSource(src, hf_config)
    source.refuse_zeros()
    return source


def _check_disk(plan: Plan, source: Source, out: Path) -> None:
    side = sum(len(item) if isinstance(item, bytes) else item.stat().st_size for item in source.side_files.values())
    needed = plan.output_bytes + side + _DISK_MARGIN
    folder = next(parent for parent in out.resolve().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConversionError(
            f"{folder} has {free / 1e9:.2f} GB free, the conversion needs {needed / 1e9:.2f} GB: "
            "free some space or choose OUT on another disk"
        )


def _check_values(plan: Plan, source: Source, progress: Progress | None) -> None:
    tell = _Counter("check", plan.source_bytes, progress)
    with _threads() as threads:
        for step in plan.steps:
            if source.known_finite(step.source.name):
                tell.skip(step.source)
            elif not all(_map_blocks(step, source, threads, tell, lambda _, values: _is_finite(values))):
                raise _not_finite(step, source)


def _not_finite(step: Step, source: Source) -> ConversionError:
    name, dtype = step.source.name, str(step.values).removeprefix("torch.")
    if source.path.is_file():
        from w8a8_converters.gguf.source import GGUFSource

        if isinstance(source, GGUFSource):
            stored = ", ".join(source.stored_names(name))
            return BrokenFileError(
                f"tensor {stored} of {source.path} holds NaN, inf or values beyond {dtype}: download it again, or use another "
                "file of the model"
            )
    return ConversionError(
        f"tensor {name} of {source.path} holds NaN, inf or values beyond {dtype}: the checkpoint is damaged or needs a wider "
        "dtype in its config.json"
    )


def _is_finite(values: Tensor) -> bool:
    if not values.dtype.is_floating_point or not values.numel():
        return True
    # Both ends carry a NaN through, and no mask as large as the values is made.
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _write_weights(plan: Plan, source: Source, folder: Path, report: Report, progress: Progress | None) -> None:
    weight_map: dict[str, str] = {}
    tell = _Counter("write", plan.source_bytes, progress)
    for steps, file_name in zip(plan.shards, plan.files, strict=True):
        tensors = [tensor for step in steps for tensor in step.outputs]
        weight_map |= {tensor.name: file_name for tensor in tensors}
        # The threads end before the file is closed, also where an error or an interrupt ends both.
        with (
            ShardWriter(folder / file_name, tensors, {"format": plan.format.metadata_format}) as writer,
            _threads() as threads,
        ):
            for step in steps:
                layer = _write_step(step, source, writer, threads, tell)
                if layer is not None:
                    report.layers.append(layer)
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.output_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / f"{plan.format.stem}.safetensors.index.json", index)


def _write_step(step: Step, source: Source, writer: ShardWriter, threads: Executor, tell: "_Counter") -> LayerReport | None:
    row_elements = _row_elements(step.source)

    def write(start: int, values: Tensor) -> Noise:
        if step.scale is None:
            writer.write(step.weight.name, start * row_elements, values)
            return Noise()
        # The transform is orthonormal: the noise is as large in its values as in the weight's own.
        values = hadamard_transform(values, step.hadamard)
        codes, scale = quantize_weight(values)
        writer.write(step.weight.name, start * row_elements, codes)
        writer.write(step.scale.name, start, scale)
        return Noise.of(values, codes, scale)

    noise = sum(_map_blocks(step, source, threads, tell, write), Noise())
    if step.scale is None:
        return None
    return LayerReport(module_of(step.weight.name), step.weight.shape, noise.decibels(), step.hadamard)


def _write_side_files(plan: Plan, source: Source, folder: Path, report: Report) -> None:
    write_side_files(source, folder)
    _write_json(folder / "config.json", plan.config)
    if plan.format.name == "w8a8":
        _write_json(folder / QUANT_CONFIG_FILE, plan.quantization)
    _write_json(folder / REPORT_FILE, report.to_dict())


@contextmanager
def _threads() -> Iterator[Executor]:
    """Threads that share the blocks of a tensor: as many as torch uses, each of which then computes alone."""
    count = torch.get_num_threads()
    # How much free memory glibc keeps is twice the largest piece that was freed: below a block's temporaries it would be given
    # back after each block and come again page by page, which took a tenth of the time.
    torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    threads = ThreadPoolExecutor(min(count, _MOST_THREADS), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)
        torch.set_num_threads(count)  # this thread's is the same as before, that of threads to come is not


def _map_blocks(
    step: Step, source: Source, threads: Executor, tell: "_Counter", function: Callable[[int, Tensor], Result]
) -> Iterator[Result]:
    """What `function(first row, rows in the dtype of the step's values)` returns for each block of rows, in their order."""
    info = step.source
    n_rows = max(1, _BLOCK_BYTES // (4 * max(1, _row_elements(info))))

    def run(start: int) -> Result:
        return function(start, source.rows(info.name, start, min(start + n_rows, info.n_rows)).to(step.values))

    starts = range(0, info.n_rows, n_rows)
    # The first one here: a source may compute all of a tensor for it, which takes all of torch's threads.
    for some, map_them in ((starts[:1], map), (starts[1:], threads.map)):
        for start, result in zip(some, map_them(run, some), strict=True):
            tell.read(info, min(n_rows, info.n_rows - start))
            yield result


class _Counter:
    """Turns the rows read of each tensor into bytes of the source."""

    def __init__(self, stage: str, total: int, progress: Progress | None) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._done = 0.0

    def read(self, info: TensorInfo, n_rows: int) -> None:
        self._tell(info.nbytes * n_rows / info.n_rows)

    def skip(self, info: TensorInfo) -> None:
        self._tell(info.nbytes)

    def _tell(self, nbytes: float) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._stage, round(self._done), self._total)


def _row_elements(info: TensorInfo) -> int:
    elements = 1
    for size in info.shape[1:]:
        elements *= size
    return elements


def _bf16_bytes(info: TensorInfo) -> int:
    size = 2 if info.dtype.is_floating_point else info.dtype.itemsize
    return info.n_rows * _row_elements(info) * size


def _write_json(path: Path, content: Any) -> None:
    # Halves of surrogate pairs, which JSON and file names may have and UTF-8 has not, become what they are in JSON.
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
