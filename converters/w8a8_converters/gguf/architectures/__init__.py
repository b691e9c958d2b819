"""GGUF architectures. One file per family says what is its own; base.py holds what all share."""

from importlib import import_module

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture
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


def load_architecture(file: GGUFFile) -> Architecture:
    """The architecture that the file names.

    Raises:
        ConversionError: it is not known.
    """
    name = file.required("general.architecture")
    if name == _VISION_TOWER:
        raise ConversionError(f"{file.path} is the vision tower of a model (mmproj): give the GGUF file of its language model")
    if name not in ARCHITECTURES:
        raise ConversionError(
            f"{file.path} is of architecture {name!r}, which is not known yet; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return import_module(f"{__name__}.{ARCHITECTURES[name]}").Model(file)
