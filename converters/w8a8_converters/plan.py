"""Decides, before any data is read, what becomes of every tensor."""

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from w8a8_converters.checkpoint import Source, TensorInfo
from w8a8_converters.errors import ConversionError
from w8a8_converters.formats import Format, quantization_config, shard_names
from w8a8_converters.layers import (
    TRANSPOSED_MODEL_TYPES,
    UNQUANTIZED_EXPERTS_MODEL_TYPES,
    experts_module,
    is_linear,
    is_lm_head,
    is_quantized_by_default,
    is_stacked_experts,
    is_token_embedding,
    lm_head_of,
    module_of,
)
from w8a8_converters.rules import SkipRules, expert_groups, fused_groups
from w8a8_converters.writer import OutputTensor, split_into_shards
from w8a8_kernels.hadamard import AUTO, MAX_RULE_BLOCK, chosen_block, largest_block, parse_choice
from w8a8_kernels.names import is_row_parallel

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Step:
    """One tensor of the source and what is written from it.

    Attributes:
        values: the tensor in the dtype in which it is written or, where quantized, from which it is quantized.
        scale: the scale to write beside int8 codes; None where the values are written as they are.
        hadamard: size of the blocks that are transformed before the scale is taken; 0 for none.
        saved: bytes that quantizing takes off.
    """

    source: TensorInfo
    weight: OutputTensor
    values: torch.dtype
    scale: OutputTensor | None = None
    hadamard: int = 0
    saved: int = 0

    @property
    def outputs(self) -> list[OutputTensor]:
        return [self.weight] if self.scale is None else [self.weight, self.scale]


@dataclass
class Plan:
    """Everything about the output but the data."""

    format: Format
    config: dict[str, Any]
    quantization: dict[str, Any] | None
    shards: list[list[Step]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    ignore: list[str] = field(default_factory=list)
    lm_head_extra_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [step for shard in self.shards for step in shard]

    @property
    def output_bytes(self) -> int:
        return sum(tensor.nbytes for step in self.steps for tensor in step.outputs)

    @property
    def tensors(self) -> dict[str, int]:
        """dtype -> how many tensors are written in it, the most frequent first."""
        dtypes = Counter(tensor.dtype for step in self.steps for tensor in step.outputs)
        return {str(dtype).removeprefix("torch."): count for dtype, count in dtypes.most_common()}

    @property
    def source_bytes(self) -> int:
        return sum(step.source.nbytes for step in self.steps)


def make_plan(
    source: Source,
    fmt: Format,
    skip: Iterable[str],
    quantize_lm_head: bool,
    max_shard_size: str | int,
    hadamard: str | int | None = None,
    blocks: Mapping[str, int] | None = None,
    keep: Collection[str] = (),
) -> Plan:
    """Raises ConversionError where the options do not fit the checkpoint.

    Args:
        source, fmt, skip, quantize_lm_head, max_shard_size, hadamard: as in `convert`.
        blocks: Hadamard blocks of modules that get others than `hadamard` gives them.
        keep: exact names of modules to leave unquantized beside those that `skip` matches.
    """
    blocks = blocks or {}
    limit = parse_size(max_shard_size)
    try:
        rules = SkipRules(skip)
    except ValueError as error:
        raise ConversionError(str(error)) from None
    if not fmt.quantized and (rules or quantize_lm_head):
        option = "--skip" if rules else "--quantize-lm-head"
        raise ConversionError(f"{option} has no effect with --format {fmt.name}, which quantizes nothing: leave it out")
    hadamard = _choose_hadamard(hadamard, fmt)
    if fmt.quantized and source.config["model_type"] in TRANSPOSED_MODEL_TYPES:
        raise ConversionError(
            f"{source.path}: model type {source.config['model_type']} stores transposed weights, which are not supported"
        )
    _check_patterns(rules, source)

    targets = _values_dtypes(source, fmt)
    quantized = _quantized_tensors(source, rules, quantize_lm_head) if fmt.quantized else set()
    config = _copy_config(source.config)
    plan = Plan(fmt, config, None)
    steps: list[Step] = []
    for info in source.tensors.values():
        module = module_of(info.name)
        int8 = info.name in quantized and module not in keep
        steps.append(_step(info, info.name, targets[info.name], int8, hadamard, blocks.get(module)))
    if fmt.quantized:
        kept = [step.weight for step in steps if step.scale is None]
        plan.ignore = [module_of(weight.name) for weight in kept if is_linear(weight.name, len(weight.shape))]
        experts = dict.fromkeys(experts_module(w.name) for w in kept if is_stacked_experts(w.name, len(w.shape)))
        # vLLM asks by the names that single experts have; in compressed-tensors a name is of one module alone.
        plan.ignore += [rf"re:{re.escape(name)}\..*" if fmt.name == "compressed-tensors" else name for name in experts]
        if experts and config["model_type"] in UNQUANTIZED_EXPERTS_MODEL_TYPES:
            plan.notes.append(
                f"the experts stay unquantized: those of {config['model_type']} have biases and an activation that int8 "
                "experts do not have"
            )

    embedding = _tied_embedding(source)
    if fmt.quantized and embedding is not None:
        head = lm_head_of(embedding.name)
        if quantize_lm_head:
            steps = [step for step in steps if step.weight.name != f"{head}.weight"]
            plan.ignore = [name for name in plan.ignore if name != head]
            own_head = _step(embedding, f"{head}.weight", targets[embedding.name], True, hadamard)
            steps.append(own_head)
            plan.lm_head_extra_bytes = sum(tensor.nbytes for tensor in own_head.outputs)
            _set_everywhere(config, "tie_word_embeddings", False, add=True)
        elif head not in plan.ignore:
            plan.ignore.append(head)

    if fmt.quantized:
        if not any(step.scale is not None for step in steps):
            raise ConversionError(f"{source.path}: no weight is left to quantize; with --skip like this use --format bf16")
        plan.quantization = quantization_config(fmt, plan.ignore, *_hadamard_entries(hadamard, steps))
        config["quantization_config"] = plan.quantization
    else:
        for key in ("dtype", "torch_dtype"):
            _set_everywhere(config, key, "bfloat16", add=key == "torch_dtype" and "dtype" not in config)

    by_name = {step.weight.name: step for step in steps}
    shards = split_into_shards([step.outputs for step in steps], limit)
    plan.shards = [[by_name[tensor.name] for tensor in shard if tensor.name in by_name] for shard in shards]
    plan.files = shard_names(fmt, len(shards))
    return plan


def parse_size(text: str | int) -> int:
    """Bytes of `4GB`, `500MB`, `2GiB` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS or (size := int(float(match[1]) * _UNITS[match[2].upper()])) < 1:
        raise ConversionError(f"max shard size {text!r} is not a size: write it as 4GB, 500MB or 2GiB")
    return size


def _choose_hadamard(hadamard: str | int | None, fmt: Format) -> str | int:
    if hadamard is None:
        return AUTO if fmt.name == "w8a8" else 0
    try:
        hadamard = parse_choice(hadamard, "--hadamard")
    except ValueError as error:
        raise ConversionError(str(error)) from None
    if hadamard != 0 and fmt.name != "w8a8":
        why = (
            "its other readers would not transform the activations, and compute nonsense"
            if fmt.quantized
            else "nothing is quantized there"
        )
        raise ConversionError(f"--hadamard {hadamard} is for --format w8a8 only, not for {fmt.name}: {why}; leave it out")
    return hadamard


def _hadamard_entries(hadamard: str | int, steps: list[Step]) -> tuple[int, dict[str, int]]:
    """What the config says of the blocks: the general one, and those of layers that it does not give theirs."""
    general = MAX_RULE_BLOCK if hadamard == AUTO else hadamard
    quantized = {module_of(step.weight.name): step for step in steps if step.scale is not None}
    other = {
        module: step.hadamard
        for module, step in quantized.items()
        if step.hadamard != largest_block(step.weight.shape[1], general)
    }
    # By last component where that says the same of all layers called so, as `down_proj`, else by full name.
    blocks: dict[str, int] = {}
    for module, block in other.items():
        last = module.rpartition(".")[2]
        alike = all(
            largest_block(step.weight.shape[1], block) == step.hadamard
            for name, step in quantized.items()
            if name.rpartition(".")[2] == last
        )
        blocks[last if alike else module] = block
    return general, blocks


def _step(
    info: TensorInfo, name: str, values: torch.dtype, quantize: bool, hadamard: str | int, block: int | None = None
) -> Step:
    if not quantize:
        return Step(info, OutputTensor(name, info.shape, values), values)
    weight = OutputTensor(name, info.shape, torch.int8)
    scale = OutputTensor(f"{name}_scale", (info.shape[0], 1), torch.float32)
    saved = OutputTensor(name, info.shape, values).nbytes - weight.nbytes - scale.nbytes
    if block is None:
        block = chosen_block(hadamard, info.shape[1], row_parallel=is_row_parallel(module_of(name)))
    if info.computed:
        values = torch.float32  # rounded once, to int8
    return Step(info, weight, values, scale, block, saved)


def _quantized_tensors(source: Source, rules: SkipRules, quantize_lm_head: bool) -> set[str]:
    candidates = [
        module_of(info.name)
        for info in source.tensors.values()
        if is_quantized_by_default(info.name, len(info.shape))
        or (quantize_lm_head and is_linear(info.name, len(info.shape)) and is_lm_head(module_of(info.name)))
    ]
    skipped = {module for module in candidates if rules.skips(module)}
    experts = expert_groups(candidates)
    others = set(candidates).difference(*experts.values())
    try:
        for prefix, names in experts.items():
            rules.skips_experts(prefix, names)
        for fused, parts in fused_groups(name for name in candidates if name in others).items():
            if rules.skips_fused(fused, {fused.rpartition(".")[2]: parts}):
                parent = fused.rpartition(".")[0]
                skipped |= {f"{parent}.{part}" if parent else part for part in parts}
    except ValueError as error:
        raise ConversionError(str(error)) from None
    keeps_experts = source.config["model_type"] in UNQUANTIZED_EXPERTS_MODEL_TYPES
    for info in source.tensors.values():
        module = module_of(info.name) if info.name.endswith(".weight") else info.name
        if is_stacked_experts(info.name, len(info.shape)) and not keeps_experts and not rules.skips(module):
            raise ConversionError(
                f"{source.path}: tensor {info.name} {list(info.shape)} stacks the weights of several experts, which cannot be "
                "quantized yet: leave them out with --skip experts"
            )
    names = {f"{module}.weight" for module in candidates if module not in skipped}
    embedding = _tied_embedding(source)
    head = lm_head_of(embedding.name) if embedding is not None else next(filter(is_lm_head, candidates), None)
    if quantize_lm_head and head is not None and rules.skips(head):
        raise ConversionError(f"--quantize-lm-head and --skip both name {head}: give one of them")
    if quantize_lm_head and head is None:
        raise ConversionError(f"{source.path} has no lm_head, nor an embedding tied to one: leave out --quantize-lm-head")
    return names


def _check_patterns(rules: SkipRules, source: Source) -> None:
    modules = {module_of(name) if name.endswith((".weight", ".bias")) else name for name in source.tensors}
    if (embedding := _tied_embedding(source)) is not None:
        modules.add(lm_head_of(embedding.name))
    unmatched = rules.unmatched(modules)
    if not unmatched:
        return
    pattern = unmatched[0]
    paths = {".".join(parts[i:]) for name in modules for parts in [name.split(".")] for i in range(len(parts))}
    near = difflib.get_close_matches(pattern, sorted(paths), n=3, cutoff=0.6)
    layers = [module_of(info.name) for info in source.tensors.values() if is_quantized_by_default(info.name, len(info.shape))]
    example = layers[0].rpartition(".")[2] if layers else min(modules)
    hint = f"; near names: {', '.join(near)}" if near else f"; a name is like {example}"
    raise ConversionError(f"--skip {pattern} matches no module of {source.path}{hint}")


def _tied_embedding(source: Source) -> TensorInfo | None:
    """The embedding whose weight is the lm_head's too, None where the lm_head has its own or there is none."""
    text = source.config.get("text_config")
    text = text if isinstance(text, dict) else {}
    tied = text.get("tie_word_embeddings", source.config.get("tie_word_embeddings"))
    if tied is False or (tied is None and any(is_lm_head(module_of(name)) for name in source.tensors)):
        return None
    for info in source.tensors.values():
        if is_token_embedding(info.name, len(info.shape)):
            return info
    return None


def _values_dtypes(source: Source, fmt: Format) -> dict[str, torch.dtype]:
    """The dtype of each tensor's values in the output.

    An fp32 tensor among 16-bit ones is fp32 for a reason and stays so. A checkpoint that is fp32 as a whole is rounded to
    the dtype that its config names, since that is what is served; every format then starts from the same values.
    """
    floating = {info.dtype for info in source.tensors.values() if info.dtype.is_floating_point}
    mixed = bool(floating & {torch.bfloat16, torch.float16})
    named = source.config.get("dtype") or source.config.get("torch_dtype")
    if named is None and isinstance(source.config.get("text_config"), dict):
        named = source.config["text_config"].get("dtype") or source.config["text_config"].get("torch_dtype")
    wide = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(str(named), torch.float32)
    result = {}
    for info in source.tensors.values():
        dtype = info.dtype
        if info.keeps_dtype:
            result[info.name] = dtype
            continue
        if dtype in (torch.float32, torch.float64):
            dtype = torch.float32 if mixed else wide
        if dtype.is_floating_point and not fmt.quantized and not (mixed and dtype == torch.float32):
            dtype = torch.bfloat16
        result[info.name] = dtype
    return result


def _copy_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}


def _set_everywhere(config: dict[str, Any], key: str, value: Any, add: bool) -> None:
    if add:
        config[key] = value
    for section in (config, *(v for v in config.values() if isinstance(v, dict))):
        if key in section:
            section[key] = value
