"""A folder appears under its name only when it is whole: write beside it, then rename."""

import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from w8a8_converters.errors import ConversionError


def check_output(out: Path, sources: list[Path], overwrite: bool) -> None:
    """Raises ConversionError where `out` must not be written: it exists, or contains or lies in a source."""
    out = out.resolve()
    for source in sources:
        source = source.resolve()
        if out == source or out in source.parents or (source.is_dir() and source in out.parents):
            raise ConversionError(f"OUT {out} and the source {source} overlap: choose a folder elsewhere")
    if not out.exists():
        return
    if not out.is_dir():
        raise ConversionError(f"OUT {out} exists and is no folder: choose another name")
    if any(out.iterdir()):
        if not overwrite:
            raise ConversionError(f"OUT {out} exists and is not empty: choose another name or give --overwrite")
        if not (out / "config.json").is_file() or not any(out.glob("*.safetensors")):
            raise ConversionError(
                f"OUT {out} holds no config.json or no safetensors file, so it is no model folder: it is not overwritten"
            )


@contextmanager
def staged_folder(out: Path) -> Iterator[Path]:
    """Gives a new folder beside `out`. It takes the place of `out` when the block ends, and is removed if it raises."""
    out = out.resolve()
    staging = _beside(out, "partial")
    staging.mkdir(parents=True)
    try:
        yield staging
        _sync_tree(staging)
        _replace(staging, out)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def remove_stale(out: Path, log: Callable[[str], None]) -> None:
    """Removes what killed runs left beside `out`, and puts back a folder that one of them had moved away."""
    out = out.resolve()
    if not out.parent.is_dir():
        return
    name = re.compile(rf"\.{re.escape(out.name)}\.(partial|replaced)-{re.escape(socket.gethostname())}-(\d+)")
    for path in sorted(out.parent.iterdir()):
        match = name.fullmatch(path.name)
        if match is None or _is_alive(int(match[2])):
            continue
        if match[1] == "replaced" and not out.exists():
            log(f"put back {out}, which an interrupted run had moved away")
            path.rename(out)
        else:
            log(f"removed {path}, left by an interrupted run")
            shutil.rmtree(path)


def _beside(out: Path, what: str) -> Path:
    # The host's name too: on a shared disk a process id alone may be one of another machine.
    return out.parent / f".{out.name}.{what}-{socket.gethostname()}-{os.getpid()}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(staging: Path, out: Path) -> None:
    replaced = None
    if out.exists() and any(out.iterdir()):
        replaced = _beside(out, "replaced")
        out.rename(replaced)
    try:
        staging.rename(out)
    except BaseException:
        if replaced is not None:
            replaced.rename(out)
        raise
    _sync(out.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
