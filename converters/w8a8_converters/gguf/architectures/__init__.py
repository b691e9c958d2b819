"""GGUF architectures. One file per family says what is its own; base.py holds what all share."""

from importlib import import_module

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture
from w8a8_converters.gguf.metadata import shown, text
from w8a8_converters.gguf.reader import GGUFFile

# general.architecture -> module of this package with a class `Model`.
ARCHITECTURES = {
    "gemma3": "gemma3",
    "gemma2": "gemma2",
    "granite": "granite",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3moe",
    "starcoder2": "starcoder2",
    "llama": "llama",
    "deepseek2": "deepseek2",
    "glm4": "glm4",
    "glm4moe": "glm4moe",
    "mistral3": "mistral3",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "qwen3next": "qwen3next",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35moe",
}
_VISION_TOWER = "clip"
# Values of general.type.
_MODEL = "model"
_OTHER_FILES = {
    "adapter": "a LoRA adapter: merge it into its model, and give that model's GGUF file",
    "imatrix": "an importance matrix: give the GGUF file of the model",
    "mmproj": "the vision tower of a model (mmproj): give the GGUF file of its language model",
    "vocab": "a vocabulary without a model: give the GGUF file of the model",
}


def load_architecture(file: GGUFFile) -> Architecture:
    """The architecture that the file names.

    Raises:
        ConversionError: it is not known, or the file holds no model.
    """
    kind = _kind(file)
    if kind in _OTHER_FILES:
        raise ConversionError(f"{file.path} is {_OTHER_FILES[kind]}")
    if kind != _MODEL:
        raise ConversionError(f"{file.path}: metadata general.type is {shown(kind)}, expected 'model'")
    name = text(file, "general.architecture")
    if name not in ARCHITECTURES:
        raise ConversionError(
            f"{file.path} is of architecture {name!r}, which is not known yet; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return import_module(f"{__name__}.{ARCHITECTURES[name]}").Model(file)


def _kind(file: GGUFFile) -> str:
    """What the file holds, by its `general.type` or, where it has none, by what else tells it."""
    if file.metadata.get("general.architecture") == _VISION_TOWER:
        return "mmproj"
    if "general.type" in file.metadata:
        return text(file, "general.type")
    if not file.tensors:
        return "vocab"
    is_adapter = all(name.endswith((".lora_a", ".lora_b")) for name in file.tensors)
    return "adapter" if is_adapter else _MODEL
