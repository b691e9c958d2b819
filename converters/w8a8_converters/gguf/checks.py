"""What keeps a GGUF file of a known architecture from being converted, all of it, found in its headers."""

from collections.abc import Iterator
from itertools import dropwhile

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture, Table
from w8a8_converters.gguf.dequant import check_type
from w8a8_converters.gguf.reader import GGUFFile

_MOST_NAMES = 5


def tensor_problems(architecture: Architecture, table: Table) -> Iterator[ConversionError]:
    """One error each, of one line, for tensors that are unknown, for those missing, and for those of other shapes.

    Args:
        table: that of the architecture.
    """
    file = architecture.file
    present = set(file.tensors)
    used = {source for recipe in table.values() for source in recipe.sources}
    unknown = sorted(present - used - set(architecture.setting_tensors))
    if unknown:
        yield ConversionError(
            f"{file.path}: {len(unknown)} tensors are unknown for architecture {architecture.name}: {_named(unknown)}; "
            "converting without them would give another model"
        )
    required = (r for r in table.values() if not (r.is_optional and present.isdisjoint(r.sources)))
    missing = sorted({source for recipe in required for source in recipe.sources} - present)
    if missing:
        yield ConversionError(f"{file.path} lacks {len(missing)} tensors: {_named(missing)}; download it again")
    wanted = {name: shape for recipe in table.values() for name, shape in recipe.sources.items() if name in present}
    wrong = [name for name, shape in wanted.items() if _significant(file.tensors[name].shape) != _significant(shape)]
    if wrong:
        name, *others = wrong
        more = f" (and {len(others)} more have other shapes: {_named(others)})" if others else ""
        yield ConversionError(
            f"{file.path}: tensor {name} has shape {list(file.tensors[name].shape)}, "
            f"the metadata ask for {list(wanted[name])}{more}"
        )


def type_problems(file: GGUFFile) -> Iterator[ConversionError]:
    """One error, of one line, for each type of tensors that cannot be dequantized."""
    said: dict[int, list[str]] = {}
    for tensor in file.tensors.values():
        try:
            check_type(tensor.name, tensor.type)
        except ConversionError as error:
            said.setdefault(tensor.type, []).append(str(error))
    for messages in said.values():
        more = f" (and {len(messages) - 1} more of this type)" if len(messages) > 1 else ""
        yield ConversionError(messages[0] + more)


def _named(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones, which files have or have not: ggml takes [1, 32] and [32] for the same."""
    return tuple(dropwhile(lambda size: size == 1, shape))
