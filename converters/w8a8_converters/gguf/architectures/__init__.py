"""GGUF architectures. One file per family says what is its own; base.py holds what all share."""

from importlib import import_module

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture
from w8a8_converters.gguf.reader import GGUFFile

# general.architecture -> module of this package with a class `Model`.
ARCHITECTURES = {"gemma3": "gemma3", "llama": "llama"}


def load_architecture(file: GGUFFile) -> Architecture:
    """The architecture that the file names.

    Raises:
        ConversionError: it is not known.
    """
    name = file.required("general.architecture")
    if name not in ARCHITECTURES:
        raise ConversionError(
            f"{file.path} is of architecture {name!r}, which is not known yet; known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return import_module(f"{__name__}.{ARCHITECTURES[name]}").Model(file)
