"""What `vllm-w8a8 eval` compares: a model, the unquantized one, and the ways to serve them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from vllm_w8a8_plugin import envs, gguf
from vllm_w8a8_plugin.attention.layout import INT8

_ENDS = 1 << 20  # bytes of a weight file's head and end that its fingerprint holds


class Kind(Enum):
    """What a model's files hold."""

    UNQUANTIZED = "a folder in bf16, fp16 or fp32"
    QUANTIZED = "a quantized folder"
    GGUF = "a GGUF file"


@dataclass(frozen=True)
class Target:
    """A model on disk."""

    path: Path
    kind: Kind

    @classmethod
    def find(cls, model: str | Path, what: str = "") -> "Target":
        """
        Args:
            model: a folder, or a GGUF file.
            what: how errors name it. Default: its path.

        Raises:
            ValueError: there is none.
        """
        path = gguf.locate(model)
        if path is not None:
            return cls(path, Kind.GGUF)
        path = Path(model).expanduser()
        config = _config(path, what or str(model))
        return cls(path, Kind.QUANTIZED if config.get("quantization_config") else Kind.UNQUANTIZED)

    @property
    def name(self) -> str:
        return self.path.stem if self.kind is Kind.GGUF else self.path.resolve().name

    def tokenizer_folder(self) -> Path:
        """The folder with its tokenizer.json; of a GGUF file, the one that vLLM gets.

        Raises:
            ValueError: the file cannot be served.
        """
        return gguf.metadata_folder(self.path) if self.kind is Kind.GGUF else self.path

    def fingerprint(self) -> str:
        """Hash of config.json and of the size, head and end of every weight file: enough to tell two checkpoints apart."""
        digest = hashlib.sha256()
        if self.kind is Kind.GGUF:
            from w8a8_converters.gguf.source import GGUFSource

            files = GGUFSource(self.path).files
        else:
            digest.update((self.path / "config.json").read_bytes())
            files = sorted(self.path.glob("*.safetensors"))
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as data:
                digest.update(data.read(_ENDS))
                data.seek(max(0, size - _ENDS))
                digest.update(data.read())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Mode:
    """One way to serve a model.

    Args:
        engine: arguments of `vllm.LLM` beside the model.
        env: environment variables; those that this version of the plugin lacks are left out.
        needs: variable without which the mode does not exist.
        stock: nothing of ours; where it does not run, that is no failure.
        online: quantizes unquantized weights while they load.
        served: what is served instead of the unquantized model.
        kinds: kinds of models that are measured in this mode where none is asked for.
    """

    engine: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)
    needs: str | None = None
    stock: bool = False
    online: bool = False
    served: Target | None = None
    kinds: tuple[Kind, ...] = ()


# Variables that choose a mode. A mode sets its own, none inherits them; the other variables of the plugin hold for all.
MODE_VARIABLES = (envs.ENABLE, envs.HADAMARD, envs.LM_HEAD, envs.TP_CONSISTENT_ACTIVATIONS)
_BF16 = {"dtype": "bfloat16"}
_W8A8 = {"dtype": "bfloat16", "quantization": "w8a8"}
_AUTO = {envs.HADAMARD: "auto"}
REFERENCES = {"fp32": Mode({"dtype": "float32"}), "bf16": Mode(_BF16)}
MODES = {
    "bf16": Mode(_BF16, kinds=tuple(Kind)),
    "fp8": Mode(_BF16 | {"quantization": "fp8"}, stock=True, kinds=(Kind.UNQUANTIZED,)),
    "rtn": Mode(_W8A8, {envs.HADAMARD: "0"}, online=True, kinds=(Kind.UNQUANTIZED, Kind.GGUF)),
    "hadamard": Mode(_W8A8, _AUTO, envs.HADAMARD, online=True, kinds=(Kind.UNQUANTIZED, Kind.GGUF)),
    "checkpoint": Mode(_BF16, kinds=(Kind.QUANTIZED,)),
    "lmhead": Mode(_W8A8, _AUTO | {envs.LM_HEAD: "1"}, envs.LM_HEAD, kinds=(Kind.UNQUANTIZED,)),
    "kv-int8": Mode(_W8A8 | {"kv_cache_dtype": INT8}, _AUTO),
    "tp-consistent": Mode(_W8A8, _AUTO | {envs.TP_CONSISTENT_ACTIVATIONS: "1"}, envs.TP_CONSISTENT_ACTIVATIONS),
}


def available(mode: Mode) -> bool:
    return mode.needs is None or mode.needs in {variable.name for variable in envs.VARIABLES}


def find_reference(target: Target, against: Path | None) -> Target:
    """The unquantized model that others are measured against.

    Args:
        target: the model that is measured.
        against: a folder; None for the model itself.

    Raises:
        ValueError: it is none, or quantized, or the model is quantized and nothing else was named.
    """
    if against is None and target.kind is not Kind.UNQUANTIZED:
        what = "a GGUF file" if target.kind is Kind.GGUF else "quantized"
        make = f" (`vllm-w8a8 convert {target.path} FOLDER --format bf16` makes one)" if target.kind is Kind.GGUF else ""
        raise ValueError(f"{target.path} is {what}: name the unquantized model's folder{make} with --against")
    if against is None:
        return target
    reference = Target.find(against, f"--against {against}")
    if reference.kind is Kind.GGUF:
        raise ValueError(
            f"--against {against} is a GGUF file, which vLLM runs quantized alone: make a folder of it with "
            f"`vllm-w8a8 convert {against} FOLDER --format bf16`"
        )
    if reference.kind is Kind.QUANTIZED:
        raise ValueError(f"--against {against} is quantized: expected the unquantized model that others are measured by")
    return reference


def choose_modes(
    names: Sequence[str],
    checkpoints: Sequence[str],
    target: Target,
    engine: dict | None = None,
    gpu: bool = True,
    reference: Target | None = None,
) -> dict[str, Mode]:
    """The modes asked for, in order; without any, those that suit the model.

    Args:
        names: names in `MODES`.
        checkpoints: `NAME=PATH`, each a mode of its own.
        target: the model that is measured.
        engine: arguments of `vllm.LLM` for every engine.
        gpu: whether there is a GPU.
        reference: what it is measured against; None for the model itself.

    Raises:
        ValueError: a mode is unknown or cannot be, or a checkpoint is no folder with a model.
    """
    modes: dict[str, Mode] = {}
    if not names and not checkpoints:
        names = [name for name, mode in MODES.items() if available(mode) and target.kind in mode.kinds]
    for name in names:
        if name not in MODES:
            raise ValueError(
                f"unknown mode {name!r}: expected one of {', '.join(MODES)}; a converted folder is added with --checkpoint"
            )
        problem = _problem(name, target, engine or {}, gpu)
        if problem:
            raise ValueError(f"mode {name!r} {problem}")
        modes[name] = _served(name, target, reference or target)
    for checkpoint in checkpoints:
        name, equals, path = checkpoint.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"--checkpoint {checkpoint!r}: expected NAME=PATH")
        if name in MODES or name in modes:
            raise ValueError(f"--checkpoint {checkpoint!r}: there already is a mode {name!r}, choose another name")
        served = Target.find(path, f"--checkpoint {checkpoint!r}")
        modes[name] = Mode(_W8A8 if served.kind is Kind.GGUF else _BF16, served=served)
    return modes


def _problem(name: str, target: Target, engine: dict, gpu: bool) -> str | None:
    mode = MODES[name]
    if not available(mode):
        return f"needs {mode.needs}, which this version of the plugin does not have"
    if name == "checkpoint" and target.kind is not Kind.QUANTIZED:
        return f"serves a quantized folder as it is, and {target.path} is none"
    if name == "kv-int8" and not gpu:
        return f"keeps the KV cache in int8 ({INT8}), which vLLM does on GPUs alone: there is none here, leave it out"
    if name == "tp-consistent" and engine.get("tensor_parallel_size", 1) < 2:
        return "changes nothing on one rank: add --engine '{\"tensor_parallel_size\": 2}'"
    return None


def _served(name: str, target: Target, reference: Target) -> Mode:
    """A mode on the model: what is not quantized comes from the reference's folder, also where the model is quantized."""
    mode = MODES[name]
    if target.kind is Kind.UNQUANTIZED:
        same = target.path.resolve() == reference.path.resolve()
        return mode if same else replace(mode, served=target)
    stock = mode.engine.get("quantization") != "w8a8" and name != "checkpoint"
    if stock or (mode.online and target.kind is Kind.QUANTIZED):
        return mode
    return replace(mode, served=target)


def _config(folder: Path, what: str) -> dict:
    if not folder.is_dir():
        raise ValueError(f"{what}: there is no such folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{what}: the folder has no config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no JSON object")
    return config
