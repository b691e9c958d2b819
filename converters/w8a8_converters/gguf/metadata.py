"""Typed metadata of a GGUF file. Every accessor raises one line that names the key, what it holds and what is expected."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.reader import GGUFFile


@dataclass(frozen=True)
class Numbers:
    """Which finite fp32 numbers a key may hold, in words and as a test."""

    what: str
    contain: Callable[[float], bool]


ANY_NUMBER = Numbers("a number", lambda number: True)
POSITIVE = Numbers("a number above 0", lambda number: number > 0)
NOT_NEGATIVE = Numbers("a number of at least 0", lambda number: number >= 0)
EPSILON = Numbers("a number between 0 and 1", lambda number: 0 < number < 1)
FRACTION = Numbers("a number from 0 to 1", lambda number: 0 <= number <= 1)
POSITIVE_FRACTION = Numbers("a number above 0, 1 at most", lambda number: 0 < number <= 1)


def integer(file: GGUFFile, key: str, default: int | None = None, minimum: int = 1) -> int:
    """An integer; required where there is no default that could be one."""
    if key not in file.metadata and default is not None and default >= minimum:
        return default
    value = file.required(key)
    if type(value) is not int or value < minimum:
        what = "one positive integer" if minimum == 1 else f"one integer of at least {minimum}"
        raise wrong(file, key, what)
    return value


def number(file: GGUFFile, key: str, default: float | None = None, numbers: Numbers = ANY_NUMBER) -> float:
    """An fp32 number, as the shortest decimal that means the same fp32 value; required where there is no default."""
    if key not in file.metadata and default is not None:
        return default
    value = file.required(key)
    if type(value) not in (int, float):
        raise wrong(file, key, numbers.what)
    with np.errstate(over="ignore"):  # of numbers stored as fp64
        rounded = float(str(np.float32(value)))
    if not math.isfinite(rounded) or not numbers.contain(rounded):
        raise wrong(file, key, numbers.what)
    return rounded


def flag(file: GGUFFile, key: str, default: bool) -> bool:
    value = file.metadata.get(key, default)
    if type(value) is not bool:
        raise wrong(file, key, "true or false")
    return value


def text(file: GGUFFile, key: str, default: str | None = None) -> str:
    """A string; required where there is no default."""
    value = file.required(key) if default is None else file.metadata.get(key, default)
    if type(value) is not str:
        raise wrong(file, key, "one string")
    return value


def array(file: GGUFFile, key: str, kinds: tuple[type, ...], what: str) -> list[Any]:
    """An array, which is required, of values of one of `kinds`, called `what`."""
    values = file.required(key)
    # All values of an array have one type.
    if not isinstance(values, list) or (values and type(values[0]) not in kinds):
        raise wrong(file, key, f"an array of {what}")
    return values


def wrong(file: GGUFFile, key: str, expected: str) -> ConversionError:
    """The error for a value that is not as expected."""
    return ConversionError(f"{file.path}: metadata {key} must be {expected}, got {shown(file.metadata[key])}")


def shown(value: Any) -> str:
    """For a message: in short."""
    text = repr(value[:80] if isinstance(value, list) else value)  # arrays may hold a vocabulary
    return text if len(text) <= 80 else f"{text[:77]}..."
