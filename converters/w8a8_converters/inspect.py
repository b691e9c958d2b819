"""What a checkpoint is, what `convert` would make of it, and what it would take to serve: from headers alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w8a8_converters.checkpoint import (
    DTYPE_NAMES,
    TOKENIZER_FILES,
    HuggingFaceSource,
    SafetensorsFile,
    Source,
    gguf_names,
    missing_source,
    read_json,
    within,
)
from w8a8_converters.errors import AlreadyW8A8Error, BrokenFileError, ConversionError
from w8a8_converters.formats import FORMATS
from w8a8_converters.layers import is_lm_head, is_quantized_by_default, is_token_embedding, kind_of_kept, module_of
from w8a8_converters.plan import Plan, Step, make_plan
from w8a8_kernels.hadamard import ranks_that_fit
from w8a8_kernels.names import is_row_parallel

if TYPE_CHECKING:
    from w8a8_converters.gguf.reader import GGUFFile

RANKS = (1, 2, 4, 8)
# Every rank holds these whole.
_REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
_VOCABULARY_PADDING = 64  # of vLLM
_MAX_RANKS = 64
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass
class Inspection:
    """What `inspect` found. `to_dict` gives the JSON object of `vllm-w8a8 inspect --json`; its keys are stable.

    Attributes:
        path: what was named.
        format: `gguf` or `safetensors`; None where neither was found.
        files: `{"name", "bytes"}` of each file with weights.
        architecture: GGUF's `general.architecture`, or the class that config.json names.
        model_type: of the Hugging Face model.
        quantization: how a safetensors checkpoint is quantized; None where it is not. `convert` wants `--from-quantized` then.
        parameters: values in all tensors, dequantized.
        tensor_types: `{"type", "tensors", "bytes"}` as stored, the most bytes first.
        layers: transformer layers.
        context_length: positions that the config allows.
        tokenizer: `{"kind", "pre", "tokens"}`: its algorithm, what splits the text before it, size of the vocabulary.
        chat_template: whether there is one.
        convert: what `convert` would do without options: `int8` `{"layers", "parameters", "bytes"}`, scales included;
            `kept`, a list of `{"what", "tensors", "bytes"}`; `hadamard`, a list of `{"block", "layers"}`; `output_bytes`;
            `tensor_parallel`, the degrees up to 64 that fit.
        memory: for 1, 2, 4 and 8 ranks, and others up to 8 that fit, on one rank: `{"tensor_parallel", "weight_bytes",
            "kv_bytes_per_token", "problem"}`. Projections, embeddings and lm_head are divided, all else counts in full. Both
            are None where the degree does not fit, and `problem` says why; `kv_bytes_per_token` is for a 16-bit cache of all
            attention layers, and None where the config does not tell.
        notes: what else the user should know.
        problems: every problem found; empty if `convert` takes the checkpoint, or it is W8A8 already, and vLLM, as far as is
            asked, the model class.
        broken: whether one of them is a file that is damaged, incomplete or missing.
    """

    path: str
    format: str | None = None
    files: list[dict[str, Any]] = field(default_factory=list)
    architecture: str | None = None
    model_type: str | None = None
    quantization: str | None = None
    parameters: int | None = None
    tensor_types: list[dict[str, Any]] = field(default_factory=list)
    layers: int | None = None
    context_length: int | None = None
    tokenizer: dict[str, Any] | None = None
    chat_template: bool = False
    convert: dict[str, Any] | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    broken: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def attempt(self, step: Callable[[], Any]) -> Any:
        """The step's result; where it fails None, and the problem is kept."""
        try:
            return step()
        except ConversionError as error:
            self.add_problem(error)
        return None

    def add_problem(self, error: ConversionError) -> None:
        if isinstance(error, AlreadyW8A8Error):
            self.notes.append(str(error))
            return
        self.broken = self.broken or isinstance(error, BrokenFileError)
        if str(error) not in self.problems:
            self.problems.append(str(error))


def inspect(path: str | Path, unserved: Callable[[str], str | None] = lambda architecture: None) -> Inspection:
    """Looks at a .gguf file, any part of a split one, or a Hugging Face folder: reads no weights, writes nothing.

    It raises for nothing that it finds: that is in `problems`.

    Args:
        path: the file or folder.
        unserved: says in one line why a model class of config.json cannot be served, None where it can.
    """
    path = Path(path).expanduser()
    found = Inspection(str(path))
    if path.is_dir():
        found.format = _folder_format(path)
        source, kept = _inspect_folder(path, found)
    elif path.is_file():
        found.format = "gguf"
        source, kept = _inspect_gguf(path, found), frozenset()
    else:
        found.add_problem(missing_source(path))
        return found
    if source is None:
        return found
    found.model_type = source.config.get("model_type")
    _check_served(source.config, found, unserved)
    found.parameters = sum(prod(info.shape) for info in source.tensors.values())
    found.notes += source.notes
    text = _text_config(source.config)
    plan = found.attempt(lambda: make_plan(source, FORMATS["w8a8"], (), False, "4GB", keep=kept))
    if plan is not None:
        found.convert = _conversion(plan, text)
        fitting = [ranks for ranks in found.convert["tensor_parallel"] if ranks <= max(RANKS)]
        found.memory = [_memory(plan, text, ranks) for ranks in sorted({*RANKS, *fitting})]
    return found


def unserved_reason(config: Mapping[str, Any], unserved: Callable[[str], str | None]) -> str | None:
    """Why no model class of a config.json can be served, in one line; None where one can, or none is named.

    Args:
        config: content of config.json.
        unserved: as in `inspect`.
    """
    architectures = config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    problems = [unserved(name) for name in names]
    if not problems or None in problems:
        return None
    if config.get("auto_map"):
        return f"{problems[0]}; or try --trust-remote-code, which runs the checkpoint's own code"
    return problems[0]


def _check_served(config: Mapping[str, Any], found: Inspection, unserved: Callable[[str], str | None]) -> None:
    reason = unserved_reason(config, unserved)
    if reason is None:
        return
    if config.get("auto_map"):
        found.notes.append(reason)
    else:
        found.add_problem(ConversionError(reason))


def _folder_format(path: Path) -> str | None:
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return "safetensors"
    return "gguf" if gguf_names(path) else None


def _inspect_gguf(path: Path, found: Inspection) -> Source | None:
    from w8a8_converters.gguf.reader import GGUFFile
    from w8a8_converters.gguf.source import GGUFSource
    from w8a8_converters.gguf.tensor_types import TensorType

    file = found.attempt(lambda: GGUFFile(path))
    if file is None:
        return None
    metadata = file.metadata
    found.files = [_file(part) for part in file.files]
    found.architecture = metadata.get("general.architecture")
    found.parameters = sum(prod(tensor.shape) for tensor in file.tensors.values())
    found.tensor_types = _types((TensorType(t.type).name, t.nbytes) for t in file.tensors.values())
    found.context_length = _integer(metadata, f"{found.architecture}.context_length")
    found.layers = _integer(metadata, f"{found.architecture}.block_count")
    if "tokenizer.ggml.model" in metadata:
        tokens = metadata.get("tokenizer.ggml.tokens")
        found.tokenizer = {
            "kind": metadata["tokenizer.ggml.model"],
            "pre": metadata.get("tokenizer.ggml.pre"),
            "tokens": len(tokens) if isinstance(tokens, list) else None,
        }
    found.chat_template = any(key.startswith("tokenizer.chat_template") for key in metadata)
    _check_gguf(file, found)
    return found.attempt(lambda: GGUFSource(path))


def _check_gguf(file: "GGUFFile", found: Inspection) -> None:
    """Adds every problem of an opened GGUF file; the source made of it raises for the first."""
    from w8a8_converters.gguf.architectures import load_architecture
    from w8a8_converters.gguf.checks import tensor_problems, type_problems
    from w8a8_converters.gguf.tokenizer import build_tokenizer

    for problem in type_problems(file):
        found.add_problem(problem)
    found.attempt(lambda: build_tokenizer(file))
    architecture = found.attempt(lambda: load_architecture(file))
    if architecture is None:
        return
    table, config = found.attempt(architecture.table), found.attempt(architecture.config)
    if table is None:
        return
    if config is not None:  # else not all keys have been read
        found.attempt(architecture.check_keys)
    for problem in tensor_problems(architecture, table):
        found.add_problem(problem)


def _inspect_folder(path: Path, found: Inspection) -> tuple[Source | None, frozenset[str]]:
    _inspect_tokenizer(path, found)
    config = _read_object(path / "config.json", found)
    architectures = config.get("architectures")
    found.architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    found.model_type = config.get("model_type")
    text = _text_config(config)
    found.layers = _integer(text, "num_hidden_layers")
    found.context_length = _integer(text, "max_position_embeddings")
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        found.quantization = quantization.get("quant_method")
    stored = found.attempt(lambda: HuggingFaceSource(path, quantized=True))
    files = stored.files if stored is not None else sorted(path.glob("*.safetensors"))
    found.files = [_file(file) for file in files if file.is_file()]
    if stored is not None:
        infos = list(stored.tensors.values())
    else:
        readable = [found.attempt(lambda file=file: SafetensorsFile(file)) for file in files]
        infos = [info for file in readable if file is not None for info in file.tensors.values()]
    found.tensor_types = _types((DTYPE_NAMES[info.dtype], info.nbytes) for info in infos)
    if stored is None:
        return None, frozenset()
    return _unquantized(path, found)


def _unquantized(path: Path, found: Inspection) -> tuple[Source | None, frozenset[str]]:
    """The folder as `convert` takes it, with `--from-quantized` if need be, and the projections that then stay as they are."""
    from w8a8_converters.quantized.source import QuantizedSource

    try:
        return HuggingFaceSource(path), frozenset()
    except ConversionError:  # it is quantized
        source = found.attempt(lambda: QuantizedSource(path))
    if source is None:
        return None, frozenset()
    found.quantization = source.origin["description"]
    found.notes.append("convert it with --from-quantized")
    return source, source.kept


def _inspect_tokenizer(path: Path, found: Inspection) -> None:
    settings = _read_object(path / "tokenizer_config.json", found)
    templates = ("chat_template.jinja", "chat_template.json")
    found.chat_template = bool(settings.get("chat_template")) or any((path / name).is_file() for name in templates)
    present = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    if not present:
        return
    content = _read_object(path / "tokenizer.json", found)
    model, pre = content.get("model"), content.get("pre_tokenizer")
    model, pre = (part if isinstance(part, dict) else {} for part in (model, pre))
    steps = [step.get("type") for step in pre.get("pretokenizers") or [] if isinstance(step, dict)] or [pre.get("type")]
    vocabulary = model.get("vocab")
    found.tokenizer = {
        "kind": model.get("type") or settings.get("tokenizer_class") or present[0],
        "pre": ", ".join(map(str, filter(None, steps))) or None,
        "tokens": len(vocabulary) if isinstance(vocabulary, (dict, list)) else None,
    }


def _read_object(path: Path, found: Inspection) -> dict[str, Any]:
    """The content of a JSON file, empty where there is none."""
    if not path.is_file():
        return {}
    content = found.attempt(lambda: read_json(within(path.parent, path), unique=False))
    return content if isinstance(content, dict) else {}


def _conversion(plan: Plan, text: Mapping[str, Any]) -> dict[str, Any]:
    int8 = [step for step in plan.steps if step.scale is not None]
    kept: dict[str, list[int]] = {}
    for step in plan.steps:
        if step.scale is None:
            kept.setdefault(_kind(step), []).append(step.weight.nbytes)
    blocks: dict[int, int] = {}
    for step in int8:
        blocks[step.hadamard] = blocks.get(step.hadamard, 0) + 1
    return {
        "int8": {
            "layers": len(int8),
            "parameters": sum(prod(step.weight.shape) for step in int8),
            "bytes": sum(tensor.nbytes for step in int8 for tensor in step.outputs),
        },
        "kept": [
            {"what": what, "tensors": len(sizes), "bytes": sum(sizes)}
            for what, sizes in sorted(kept.items(), key=lambda item: -sum(item[1]))
        ],
        "hadamard": [{"block": block, "layers": count} for block, count in sorted(blocks.items(), reverse=True)],
        "output_bytes": plan.output_bytes,
        "tensor_parallel": [n for n in range(1, _MAX_RANKS + 1) if next(_misfits(plan, text, n), None) is None],
    }


def _kind(step: Step) -> str:
    name, ndim = step.weight.name, len(step.weight.shape)
    if is_quantized_by_default(name, ndim):
        return "projections that the source left unquantized"
    return kind_of_kept(name, ndim)


def _memory(plan: Plan, text: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    problem = next(_misfits(plan, text, ranks), None)
    weights = sum(_bytes_on_a_rank(step, text, ranks) for step in plan.steps)
    return {
        "tensor_parallel": ranks,
        "weight_bytes": weights if problem is None else None,
        "kv_bytes_per_token": _kv_bytes(text, ranks) if problem is None else None,
        "problem": problem,
    }


def _bytes_on_a_rank(step: Step, text: Mapping[str, Any], ranks: int) -> int:
    name, shape = step.weight.name, step.weight.shape
    module = module_of(name)
    nbytes = sum(tensor.nbytes for tensor in step.outputs)
    if len(shape) == 2 and (is_lm_head(module) or is_token_embedding(name, 2)):
        rows = -(-shape[0] // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        return nbytes * rows // max(1, shape[0]) // ranks
    if not is_quantized_by_default(name, len(shape)) or _last(module) in _REPLICATED:
        return nbytes
    if is_row_parallel(module):
        # Each rank has a part of every row, and the scales of all of them.
        return step.weight.nbytes // ranks + nbytes - step.weight.nbytes
    return nbytes // _shards(module, text, ranks)


def _misfits(plan: Plan, text: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Why the model cannot be cut for so many ranks."""
    heads, kv_heads = _integer(text, "num_attention_heads"), _integer(text, "num_key_value_heads")
    if heads and heads % ranks:
        yield f"{heads} attention heads are not divided by {ranks}"
    if kv_heads and kv_heads % ranks and ranks % kv_heads:
        yield f"{kv_heads} heads of keys neither divide {ranks} nor are divided by it"
    for step in plan.steps:
        name, shape = step.weight.name, step.weight.shape
        module = module_of(name)
        if not is_quantized_by_default(name, len(shape)) or _last(module) in _REPLICATED:
            continue
        if is_row_parallel(module):
            if ranks not in ranks_that_fit(shape[1], step.hadamard, ranks):
                block = f" in Hadamard blocks of {step.hadamard}" if step.hadamard else ""
                yield f"{module} has {shape[1]} inputs{block}, which cannot be cut into {ranks}"
        elif shape[0] % _shards(module, text, ranks):
            yield f"{module} has {shape[0]} outputs, which cannot be cut into {ranks}"


def _shards(module: str, text: Mapping[str, Any], ranks: int) -> int:
    """In how many parts the outputs of a layer are cut: heads of keys are shared where there are fewer than ranks."""
    kv_heads = _integer(text, "num_key_value_heads")
    return min(ranks, kv_heads) if kv_heads and _last(module) in ("k_proj", "v_proj") else ranks


def _kv_bytes(text: Mapping[str, Any], ranks: int) -> int | None:
    """16-bit keys and values of one token on one rank."""
    layers = _integer(text, "num_hidden_layers")
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        layers = sum(kind in _ATTENTION for kind in kinds)
    elif any("mamba" in key or key.endswith(("block_types", "block_type", "hybrid_override_pattern")) for key in text):
        return None
    if not layers:
        return None
    layers -= _integer(text, "num_kv_shared_layers") or 0
    latent = _integer(text, "kv_lora_rank")
    if latent:
        return layers * (latent + (_integer(text, "qk_rope_head_dim") or 0)) * 2
    heads = _integer(text, "num_attention_heads")
    kv_heads = _integer(text, "num_key_value_heads") or heads
    hidden = _integer(text, "hidden_size")
    size = _integer(text, "head_dim") or (hidden // heads if hidden and heads else None)
    if not kv_heads or not size or "global_head_dim" in text:
        return None
    return layers * 2 * max(1, kv_heads // ranks) * size * 2


def _types(tensors: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    counts: dict[str, list[int]] = {}
    for kind, nbytes in tensors:
        counts.setdefault(kind, []).append(nbytes)
    rows = [{"type": kind, "tensors": len(sizes), "bytes": sum(sizes)} for kind, sizes in counts.items()]
    return sorted(rows, key=lambda row: -row["bytes"])


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _integer(settings: Mapping[str, Any], key: str) -> int | None:
    value = settings.get(key)
    return value if type(value) is int and value > 0 else None


def _file(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size}


def _last(module: str) -> str:
    return module.rpartition(".")[2]
