"""What names of modules tell: patterns that select some of them, and which linear layers tensor parallelism cuts along K."""

import fnmatch
import re
from collections.abc import Callable

# Last components of the names of layers that vLLM cuts along K, their input, in nearly all of its models. Where one is cut
# otherwise nothing breaks: its Hadamard block may only be smaller, or fit fewer ranks, than it could be.
ROW_PARALLEL = {"o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "wo", "w2", "c_proj"}


def is_row_parallel(module: str) -> bool:
    """Whether a module of this name is a linear layer whose input is cut by tensor parallelism."""
    return module.rpartition(".")[2] in ROW_PARALLEL


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a module's full name matches: the four kinds of patterns are described at `w8a8_converters.rules.SkipRules`.

    Raises:
        ValueError: a regular expression does not compile.
    """
    if pattern.startswith("re:"):
        try:
            regex = re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"skip pattern {pattern!r} is not a regular expression: {error}") from None
        return lambda name: regex.match(name) is not None
    if any(char in pattern for char in "*?["):
        glob = re.compile(fnmatch.translate(pattern))
        return lambda name: any(glob.match(path) for path in _self_and_parents(name))
    # Dots at both ends make a substring search one for whole components.
    path = f".{pattern}."
    return lambda name: path in f".{name}."


def _self_and_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
