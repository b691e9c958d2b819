"""Markdown of reports."""

import re
from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; all columns but the first `left` are aligned to the right."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def plain(text: str) -> str:
    """A name, as text."""
    return re.sub(r"([\\|*`\[\]])", r"\\\1", text).replace("<", "&lt;")


def code(text: str) -> str:
    """Any text as code that also fits in a cell of a table.

    It is put in quotation marks, to show spaces; line breaks, control characters and the like become their escapes.
    """
    escaped = text.replace("\\", "\\\\").replace("|", "\\|")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in escaped)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f'{fence}"{shown}"{fence}'
