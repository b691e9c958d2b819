"""Files that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Gives the name of a file beside `file`, in its folder, which is made; it takes its place when the block ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    try:
        yield part
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    with whole(file) as part:
        part.write_text(text, encoding="utf-8")
