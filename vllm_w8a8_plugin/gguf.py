"""A .gguf file given to vLLM as the model: its metadata become a folder that vLLM reads, its weights come from the file.

Imports neither vLLM nor torch. The loader, which does, is `gguf_loader`.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_w8a8_plugin import envs, log

LOAD_FORMAT = "w8a8_gguf"
_SUFFIX = ".gguf"
# Names of the folders that are made here: workers know by it that the weights are those of the file.
_FOLDER_PREFIX = "w8a8-gguf-"
# What vllm-gguf-plugin sets where it is called first.
_OTHER_PLUGIN = "gguf"
# Ways to guess tokens that read no weights.
_DRAFTS_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states", "custom_class")


def is_gguf(model: Any) -> bool:
    """Whether vLLM's argument `model` looks like a GGUF file."""
    return str(model or "").lower().endswith(_SUFFIX)


def is_metadata_folder(model: Any) -> bool:
    """Whether vLLM's `model` is a folder that `resolve` has made."""
    return Path(str(model)).name.startswith(_FOLDER_PREFIX)


def resolve(args: Any) -> None:
    """Let engine arguments whose model is a GGUF file, and which ask for W8A8, name what vLLM can read.

    The model becomes a folder made of the metadata, the file goes to `model_weights`, and `gguf_loader` reads it. What the
    user said of config, tokenizer, dtype and names stays. Arguments that were resolved before, or are no GGUF, do not change.

    Args:
        args: `vllm.EngineArgs`, changed in place.

    Raises:
        ValueError: no such file, a load format was given, a draft model is a GGUF, or the file cannot be served.
    """
    if not _asks_for_w8a8(args):
        return
    if is_gguf(args.model_weights) and args.load_format == _OTHER_PLUGIN:
        args.model, args.load_format, args.config_format = args.model_weights, "auto", "auto"
    _check_draft(args)
    path = locate(args.model)
    if path is None:
        return
    if args.load_format != "auto":
        raise ValueError(
            f"load_format is {args.load_format!r}, but the weights of {path} are read by this plugin: leave --load-format out"
        )
    folder = metadata_folder(path, args.hf_config_path)
    if args.served_model_name is None:
        args.served_model_name = args.model
    args.model, args.model_weights = str(folder), str(path.absolute())
    args.load_format, args.quantization = LOAD_FORMAT, "w8a8"
    register_loader()
    log.logger.info("%s is quantized to W8A8 while loading; its config and tokenizer are in %s", path, folder)


def locate(model: Any) -> Path | None:
    """The GGUF file that a user's `model` means, None for anything else.

    Raises:
        ValueError: there is no such file, or it is a folder that holds GGUF files and no model.
    """
    path = Path(os.path.expanduser(str(model or "")))
    if path.is_dir():
        files = sorted(file.name for file in path.iterdir() if is_gguf(file))
        if files and not (path / "config.json").is_file():
            more = "" if len(files) == 1 else f" (it holds {', '.join(files[:5])}{', ...' if len(files) > 5 else ''})"
            raise ValueError(f"{path} is a folder without config.json: give a GGUF file of it, as {path / files[0]}{more}")
        return None
    if not is_gguf(model):
        return None
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the path of a GGUF file, for a split one that of any part")
    return path


def weights_file(model_config: Any) -> Path | None:
    """The GGUF file that holds the weights of vLLM's `ModelConfig`; None if they are in a model folder."""
    # A reload names another model and, in some releases, leaves `model_weights` as it was.
    name = model_config.model_weights if is_metadata_folder(model_config.model) else model_config.model
    return Path(name) if is_gguf(name) else None


def local_config(hf_config_path: str | None) -> Path | None:
    """The user's `hf_config_path` if it is a folder; a name on the Hub is read by vLLM alone."""
    return Path(hf_config_path) if hf_config_path and Path(hf_config_path).is_dir() else None


def metadata_folder(path: Path, hf_config_path: str | None = None) -> Path:
    """Make, or find, the folder with config.json, generation_config.json and the tokenizer of a GGUF file.

    Its name is a hash of its content, so a changed file or other rules of conversion never meet an old one.

    Raises:
        ValueError: the file cannot be served, or the folder not be written.
    """
    from w8a8_converters.gguf.source import GGUFSource

    source = GGUFSource(path, hf_config=local_config(hf_config_path))
    source.refuse_zeros()
    for note in source.notes:
        log.once(f"{path}: {note}")
    files = {"config.json": (json.dumps(source.config, indent=2) + "\n").encode()}
    files |= {name: _bytes(content) for name, content in source.side_files.items()}
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = envs.cache_dir() / "gguf" / f"{_FOLDER_PREFIX}{digest.hexdigest()[:32]}"
    try:
        _fill(folder, files)
    except OSError as error:
        raise ValueError(
            f"the config and tokenizer of {path} cannot be written to {folder} ({error}): "
            f"set {envs.CACHE_DIR} to a folder that can be"
        ) from None
    return folder


def register_loader() -> None:
    """Tell vLLM of the load format in this process; children that are forked inherit it, others call this themselves."""
    from vllm_w8a8_plugin import gguf_loader

    gguf_loader.register()


def _asks_for_w8a8(args: Any) -> bool:
    if args.quantization is None:
        return envs.enabled()
    return str(args.quantization).lower() == "w8a8"


def _check_draft(args: Any) -> None:
    given = args.speculative_config or {}
    model, method = args.spec_model or given.get("model"), args.spec_method or given.get("method")
    if is_gguf(model):
        raise ValueError(
            f"the draft model {model} is a GGUF file, which only the model itself can be: "
            "make a folder of it first (vllm-w8a8 convert)"
        )
    if is_gguf(args.model) and method and not model and method not in _DRAFTS_WITHOUT_WEIGHTS:
        raise ValueError(
            f"the speculative method {method} needs weights beside the model's, which does not work with {args.model}: name a "
            "draft model, or make a folder of the file first (vllm-w8a8 convert)"
        )


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make the folder hold the files, with several processes at it: each file appears at once and complete.

    All write the same, and each goes on only when it has seen every file, so one that was stopped leaves nothing to mend.
    """
    for name, content in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
