"""Reading Hugging Face checkpoints: every file is checked by its header before any data is read."""

import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from w8a8_converters.errors import AlreadyW8A8Error, BrokenFileError, ConversionError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# What transformers, Mistral and PEFT put beside a model's own weights.
_NOT_THE_MODEL = ("consolidated", "adapter_model", "training_args", "optimizer")
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".tflite"}
# Other files whose reading may run code.
_PICKLE_SUFFIXES = {".pkl", ".pickle", ".joblib", ".dill"}
# What the converter writes itself.
_OWN_FILES = ("config.json", "quant_config.json", "conversion_report.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# Those that the package `quantized` reads.
_DEQUANTIZED_METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
W8A8_ALREADY = "it is W8A8 already: serve it as it is"
_SIDE_FILE_LIMIT = 256 * 1000**2
_HEADER_LIMIT = 100 * 1000**2  # of the safetensors format itself
_JSON_LIMIT = 100 * 1000**2  # as a file; the largest tokenizers have some 35 MB, indices of a thousand experts some 30
_NAME_LIMIT = 1000  # characters of a tensor's name
_FILE_NAME_LIMIT = 255  # bytes, of file systems
_EMPTY_LIMIT = 2**31  # product of the dimensions beside the zeros, of a tensor without values


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a source: its name in the Hugging Face checkpoint, what `rows` returns, what it takes on disk.

    Where it is `computed`, `rows` returns fp32, and `dtype` is that of the tensors it was computed from. Where it
    `keeps_dtype`, it is written in that, whatever the config says of the model's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    computed: bool = False
    keeps_dtype: bool = False

    @property
    def n_rows(self) -> int:
        return self.shape[0] if self.shape else 1


class Source(Protocol):
    """A model to convert.

    Attributes:
        path: what the user named.
        files: every file that holds weights.
        config: the content of config.json.
        tensors: by name, in the order of the checkpoint.
        side_files: small files of the result: path in the folder -> a file to copy or the content.
        notes: what the user should know, for the report.
    """

    path: Path
    files: list[Path]
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    side_files: Mapping[str, Path | bytes]
    notes: list[str]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor (a scalar counts as one row), in its dtype; may be a view of the file.

        Once a first call for a tensor has returned, threads may ask for its other rows at the same time.
        """

    def known_finite(self, name: str) -> bool:
        """Whether all of a tensor's values are known to be finite without `rows`; False where only they tell."""


class SafetensorsFile:
    """One safetensors file: header parsed and held against the file's size, data mapped on first use.

    Raises:
        BrokenFileError: the file is missing, short, too long, or its header is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            size = _regular_size(path)
            with path.open("rb") as file:
                header, self._data_start = self._read_header(file, size)
        except OSError as error:
            raise BrokenFileError(f"{path} cannot be read: {error.strerror}; copy it again") from None
        self._begin: dict[str, int] = {}
        self.tensors: dict[str, TensorInfo] = {}
        ends: dict[str, int] = {}
        for name, entry in header.items():
            if not name.isprintable():
                raise BrokenFileError(f"{path}: the name of tensor {name[:60]!r} holds control characters; copy it again")
            if len(name) > _NAME_LIMIT:
                raise BrokenFileError(
                    f"{path}: the name of tensor {name[:60]!r}... has {len(name):,} characters, expected {_NAME_LIMIT:,} at "
                    "most; copy it again"
                )
            self.tensors[name], self._begin[name], ends[name] = self._read_entry(name, entry)
        end_of_data = 0
        for name in sorted(ends, key=lambda name: (self._begin[name], ends[name])):
            if self._begin[name] != end_of_data:
                what = "overlaps the tensor before it" if self._begin[name] < end_of_data else "leaves a hole before it"
                raise BrokenFileError(
                    f"{path}: tensor {name} {what}: its data begin at byte {self._begin[name]:,}, expected {end_of_data:,}; "
                    "copy the file again"
                )
            end_of_data = ends[name]
        if self._data_start + end_of_data != size:
            what = "truncated" if size < self._data_start + end_of_data else "longer than its header says"
            raise BrokenFileError(
                f"{path} is {what}: expected {self._data_start + end_of_data:,} bytes, the file has {size:,}; copy it again"
            )

    def _read_header(self, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
        """The header without `__metadata__`, and where the data begin."""
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise BrokenFileError(
                f"{self.path} is truncated: its header needs {8 + header_size:,} bytes, the file has {size:,}; copy it again"
            )
        if header_size > _HEADER_LIMIT:
            raise BrokenFileError(
                f"{self.path} has no valid safetensors header: it has {header_size:,} bytes, {_HEADER_LIMIT:,} are the "
                "format's limit; copy it again"
            )
        header = _parse_json(file.read(header_size), f"{self.path} has no valid safetensors header", unique=True)
        if not isinstance(header, dict):
            raise BrokenFileError(
                f"{self.path} has no valid safetensors header: it is a {type(header).__name__}, expected an object; "
                "copy it again"
            )
        header.pop("__metadata__", None)
        return header, 8 + header_size

    def _read_entry(self, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
        """What a header says of a tensor, and where its data begin and end, counted from the header's end."""
        try:
            dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            dtype_name = shape = begin = end = None
        # `type`, as a bool is an int, too.
        well_formed = isinstance(dtype_name, str) and isinstance(shape, list)
        if not well_formed or any(type(value) is not int or value < 0 for value in (*shape, begin, end)):
            raise BrokenFileError(
                f"{self.path}: header entry of tensor {name} is malformed: {str(entry)[:120]!r}; copy the file again"
            )
        if dtype_name not in DTYPES:
            raise BrokenFileError(
                f"{self.path}: tensor {name} has unknown dtype {dtype_name}; known are {', '.join(DTYPES)}: "
                "convert from the original bf16, fp16 or fp32 checkpoint"
            )
        dtype = DTYPES[dtype_name]
        expected = dtype.itemsize * prod(shape)
        if end - begin != expected:
            raise BrokenFileError(
                f"{self.path}: tensor {name} ({dtype_name}, shape {shape}) needs {expected:,} bytes, "
                f"its header gives it {end - begin:,}; copy the file again"
            )
        if not expected and prod(size or 1 for size in shape) > _EMPTY_LIMIT:
            raise BrokenFileError(f"{self.path}: tensor {name} has no values in a shape of {shape}; copy the file again")
        return TensorInfo(name, tuple(shape), dtype, expected), begin, end

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor as a view of the mapped file: not to be written to."""
        info = self.tensors[name]
        row_shape = info.shape[1:]
        row_bytes = info.nbytes // info.n_rows if info.n_rows else 0
        if row_bytes == 0 or stop <= start:
            return torch.empty((max(0, stop - start), *row_shape), dtype=info.dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                # Copy-on-write, since torch wants writable memory; read pages stay file pages, not anonymous memory.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        offset = self._data_start + self._begin[name] + start * row_bytes
        raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset, count=(stop - start) * row_bytes)
        if raw.data_ptr() % info.dtype.itemsize:
            raw = raw.clone()
        return raw.view(info.dtype).reshape(stop - start, *row_shape)


class HuggingFaceSource:
    """A folder with config.json and safetensors files.

    Args:
        path: the folder.
        quantized: take a checkpoint that is quantized, with its tensors as they are stored.

    Raises:
        ConversionError: no config.json, no safetensors files, files missing, damaged or contradicting the index,
            or a checkpoint that is already quantized.
    """

    def __init__(self, path: Path, quantized: bool = False) -> None:
        self.path = path
        self.notes: list[str] = []
        if not (path / "config.json").is_file():
            self._refuse_gguf_folder()
        self.config = read_config(path)
        weight_map, self.files = self._find_files()
        self._file_of: dict[str, SafetensorsFile] = {}
        for file_path in self.files:
            file = SafetensorsFile(file_path)
            for name in file.tensors:
                if name in self._file_of:
                    raise BrokenFileError(
                        f"tensor {name} is in both {self._file_of[name].path.name} and {file_path.name} of {path}: "
                        "remove the file that does not belong to the checkpoint"
                    )
                if weight_map is not None and name not in weight_map:
                    raise BrokenFileError(
                        f"{file_path} holds tensor {name}, which {_INDEX} does not name: index and files belong to "
                        "different checkpoints; copy both again"
                    )
                self._file_of[name] = file
        if weight_map is not None:
            self._check_index(weight_map)
        self.tensors: dict[str, TensorInfo] = {name: file.tensors[name] for name, file in self._file_of.items()}
        if not self.tensors:
            raise ConversionError(f"{path} holds no tensors")
        if not quantized:
            self._refuse_quantized()
        self.side_files: dict[str, Path | bytes] = self._find_side_files()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._file_of[name].rows(name, start, stop)

    def known_finite(self, name: str) -> bool:
        return False

    def _find_files(self) -> tuple[dict[str, str] | None, list[Path]]:
        present = sorted(p for p in self.path.glob("*.safetensors") if not p.name.startswith(_NOT_THE_MODEL))
        index_path = self.path / _INDEX
        if os.path.lexists(index_path):
            weight_map = _read_weight_map(index_path)
            names = list(dict.fromkeys(weight_map.values()))
            missing = [name for name in names if not (self.path / name).is_file()]
            if missing:
                raise BrokenFileError(
                    f"{self.path} lacks {len(missing)} of the {len(names)} files that {_INDEX} names: {_some(missing)}; "
                    "download them"
                )
            unused = [p.name for p in present if p.name not in names]
            if unused:
                self.notes.append(f"not in {_INDEX}, not used: {_some(unused)}")
            return weight_map, [within(self.path, self.path / name) for name in names]

        single = self.path / "model.safetensors"
        if single.is_file():
            unused = [p.name for p in present if p != single]
            if unused:
                self.notes.append(f"beside model.safetensors, not used: {_some(unused)}")
            return None, [within(self.path, single)]
        if not present:
            pickles = sorted(p.name for suffix in ("*.bin", "*.pt", "*.pth") for p in self.path.glob(suffix))
            if pickles:
                raise ConversionError(
                    f"{self.path} holds pickle files ({_some(pickles)}) and no safetensors; loading a pickle runs code from "
                    "it: save the model as safetensors first (transformers: save_pretrained)"
                )
            self._refuse_gguf_folder()
            raise ConversionError(f"{self.path} holds no *.safetensors files: give a model folder or a .gguf file")
        for match in filter(None, (_SHARD.fullmatch(p.name) for p in present)):
            count = int(match["count"])
            expected = [f"{match['stem']}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
            missing = [name for name in expected if not (self.path / name).is_file()]
            if missing:
                raise BrokenFileError(f"{self.path} lacks {_some(missing)}, and has no {_INDEX}: download them")
        return None, [within(self.path, path) for path in present]

    def _check_index(self, weight_map: dict[str, str]) -> None:
        missing = [name for name in weight_map if name not in self._file_of]
        if missing:
            files = sorted({weight_map[name] for name in missing})
            raise BrokenFileError(
                f"{self.path / _INDEX} names {len(missing)} tensors that no file holds: {_some(missing)} "
                f"(expected in {_some(files)}); download index and files again"
            )
        for name, file_name in weight_map.items():
            if self._file_of[name].path.name != file_name:
                raise BrokenFileError(
                    f"{self.path / _INDEX} puts tensor {name} into {file_name}, but {self._file_of[name].path.name} holds it: "
                    "download index and files again"
                )

    def _refuse_gguf_folder(self) -> None:
        files = gguf_names(self.path)
        if files:
            more = f" (it holds {_some(files)})" if len(files) > 1 else ""
            raise ConversionError(
                f"{self.path} is a folder of GGUF files, not of a Hugging Face model: give one of them, as "
                f"{self.path / files[0]}{more}"
            )

    def _refuse_quantized(self) -> None:
        advice = "convert from the original bf16, fp16 or fp32 checkpoint"
        from_quantized = f"{advice}, or dequantize this one with --from-quantized"
        sections = [self.config, *(value for value in self.config.values() if isinstance(value, dict))]
        for key in ("quantization_config", "compression_config"):
            for section in sections:
                if section.get(key):
                    method = section[key].get("quant_method", "?") if isinstance(section[key], dict) else "?"
                    if method == "w8a8" or has_w8a8_groups(section[key]):
                        raise AlreadyW8A8Error(f"{self.path}: {W8A8_ALREADY}")
                    hint = from_quantized if method in _DEQUANTIZED_METHODS else advice
                    raise ConversionError(f"{self.path} is already quantized ({key}, method {method}): {hint}")
        for name in ("quant_config.json", "hf_quant_config.json", "quantize_config.json"):
            if (self.path / name).is_file():
                hint = advice if name == "hf_quant_config.json" else from_quantized
                raise ConversionError(f"{self.path} is already quantized (it has {name}): {hint}")
        for info in self.tensors.values():
            low = info.dtype.itemsize == 1 and info.dtype != torch.bool
            if low and info.name.endswith("weight"):
                raise ConversionError(
                    f"{self.path} is already quantized: tensor {info.name} is {DTYPE_NAMES[info.dtype]}; {advice}"
                )

    def _find_side_files(self) -> dict[str, Path | bytes]:
        found: dict[str, Path | bytes] = {}
        links = []
        for path in sorted(self.path.rglob("*")):
            relative = path.relative_to(self.path)
            if any(part.startswith(".") for part in relative.parts):
                continue
            # Folders, too: one of the name of a file that is written would be in its way.
            if any(map(_is_not_carried, relative.parts)) or relative.parts[0] in _OWN_FILES:
                continue
            if not path.is_file():
                if path.is_symlink():
                    links.append(f"{relative} -> {os.readlink(path)}")
                continue
            if path.stat().st_size > _SIDE_FILE_LIMIT:
                self.notes.append(f"not carried over, too large: {relative}")
                continue
            found[str(relative)] = within(self.path, path)
        if links:
            # A folder behind a link may hold the whole machine, or the link itself.
            self.notes.append(f"not carried over, links that lead to no file: {_some(links)}; put the files themselves there")
        if not any(name in found for name in TOKENIZER_FILES):
            self.notes.append(f"no tokenizer to carry over: {self.path} has none of {', '.join(TOKENIZER_FILES)}")
        return found


def _is_not_carried(name: str) -> bool:
    return name.endswith(".index.json") or Path(name).suffix.lower() in _WEIGHT_SUFFIXES | _PICKLE_SUFFIXES


def gguf_names(folder: Path) -> list[str]:
    """Names of the GGUF files that lie in a folder."""
    return sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf")


def missing_source(path: Path) -> BrokenFileError:
    """The error of a source that is not there."""
    if path.is_symlink():
        return BrokenFileError(f"{path} is a link to {os.readlink(path)}, which does not exist: download the model again")
    return BrokenFileError(f"{path} does not exist: give the folder of a downloaded Hugging Face model or a .gguf file")


def has_w8a8_groups(settings: Any) -> bool:
    """Whether a config group of a compressed-tensors quantization_config has int8 weights and int8 activations."""
    groups = settings.get("config_groups") if isinstance(settings, dict) else None
    return isinstance(groups, dict) and any(map(is_w8a8_group, groups.values()))


def is_w8a8_group(group: Any) -> bool:
    """Whether one such group has them."""
    weights, activations = (group.get(key) if isinstance(group, dict) else None for key in ("weights", "input_activations"))
    if not isinstance(weights, dict) or not isinstance(activations, dict):
        return False
    kind, bits = weights.get("type") or "int", weights.get("num_bits") or 8
    return str(kind).lower() == "int" and bits == 8 and activations.get("num_bits") == 8


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json.

    Raises:
        ConversionError: it is missing or describes no model.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(f"{folder} has no config.json: give the folder of a Hugging Face model or a .gguf file")
    config = read_json(within(folder, path), unique=False)
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(model_type, str) or not model_type:
        raise ConversionError(f"{path} does not describe a model: it has no model_type")
    return config


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor -> name of a file in the index's own folder."""
    index = read_json(within(path.parent, path), unique=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenFileError(f"{path} is not a safetensors index: it has no weight_map with tensors; copy it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not (tensor + name).isprintable():
            raise BrokenFileError(
                f"{path} is not a safetensors index: it puts {tensor[:60]!r} into {str(name)[:60]!r}; copy it again"
            )
        if name in ("", ".", "..") or Path(name).name != name:
            raise BrokenFileError(f"{path} names a file outside its folder: {name[:60]!r}, for tensor {tensor}; copy it again")
        if not name.endswith(".safetensors") or len(name.encode()) > _FILE_NAME_LIMIT:
            raise BrokenFileError(
                f"{path} names no safetensors file: {name[:60]!r}, for tensor {tensor[:_NAME_LIMIT]}; copy it again"
            )
    return weight_map


def within(folder: Path, path: Path) -> Path:
    """The path of a file in a model folder: a link in a checkpoint must not make other files of the machine a part of it.

    In the Hub's cache, files of a snapshot are links to the blobs beside the snapshots.

    Raises:
        BrokenFileError: it is a link out of the folder.
    """
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    caches = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    # What is not there is for the reader to say.
    if path.exists() and not any(map(real.is_relative_to, (root, *caches))):
        raise BrokenFileError(
            f"{path} is a link out of its folder, to {real}: put the file itself there, or name the folder that it lies in"
        )
    return path


def check_side_file(folder: Path, path: Path) -> Path:
    """The path of a file beside the weights that is to be carried over.

    Raises:
        BrokenFileError: it is a link out of the folder, no regular file, or too large.
    """
    within(folder, path)
    try:
        size = _regular_size(path)
    except OSError as error:
        raise BrokenFileError(f"{path} cannot be read: {error.strerror}; copy it again") from None
    if size > _SIDE_FILE_LIMIT:
        raise BrokenFileError(f"{path} has {size:,} bytes, expected {_SIDE_FILE_LIMIT:,} at most; copy it again")
    return path


def _regular_size(path: Path) -> int:
    """Bytes of a file; a device or a pipe, which reading may not end, is refused."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BrokenFileError(f"{path} cannot be read: it is no regular file; copy it again")
    return status.st_size


def read_json(path: Path, unique: bool) -> Any:
    """The content of a JSON file of a checkpoint; where it is `unique`, no object has a key twice.

    Raises:
        BrokenFileError: it is no JSON, no regular file, or larger than any model's.
    """
    try:
        size = _regular_size(path)
        if size > _JSON_LIMIT:
            raise BrokenFileError(f"{path} has {size:,} bytes, expected {_JSON_LIMIT:,} at most; copy it again")
        data = path.read_bytes()
    except OSError as error:
        raise BrokenFileError(f"{path} cannot be read: {error.strerror}; copy it again") from None
    return _parse_json(data, f"{path} is not JSON", unique)


def _parse_json(data: bytes, problem: str, unique: bool) -> Any:
    """JSON; where it is `unique`, no object has a key twice."""
    try:
        return json.loads(data, object_pairs_hook=_no_duplicates if unique else None)
    except RecursionError:
        raise BrokenFileError(f"{problem}: it is nested too deeply; copy it again") from None
    except ValueError as error:
        raise BrokenFileError(f"{problem}: {error}; copy it again") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice!r} appears twice")
    return result


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def write_side_files(source: Source, folder: Path) -> None:
    """Copy or write a source's side files into a folder."""
    for name, content in source.side_files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            shutil.copyfile(content, path)
