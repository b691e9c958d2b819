"""A folder appears under its name only when it is whole: write beside it, then rename."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from w8a8_converters.errors import ConversionError


def check_output(out: Path, sources: list[Path], overwrite: bool) -> None:
    """Raises ConversionError where `out` must not be written: it exists, or contains or lies in a source."""
    out = out.resolve()
    for source in sources:
        source = source.resolve()
        if out == source or out in source.parents or (source.is_dir() and source in out.parents):
            raise ConversionError(f"OUT {out} and the source {source} overlap: choose a folder elsewhere")
    try:
        if not out.exists():
            return
        if not out.is_dir():
            raise ConversionError(f"OUT {out} exists and is no folder: choose another name")
        if any(out.iterdir()):
            if not overwrite:
                raise ConversionError(f"OUT {out} exists and is not empty: choose another name or give --overwrite")
            _check_model_folder(out)
    except OSError as error:
        raise _cannot_write(out, error) from None


@contextmanager
def staged_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Gives a new folder beside `out`. It takes the place of `out` when the block ends, and is removed if it raises.

    Args:
        out: the folder to make.
        overwrite: replace `out` if it then is a model folder; else it must not exist or be empty.

    Raises:
        ConversionError: no folder can be made there, or, when the block ends, `out` holds what must not be replaced.
    """
    out = out.resolve()
    staging = _beside(out, "partial")
    made: list[Path] = []
    try:
        made += [folder for folder in (staging, *staging.parents) if not folder.exists()]
        staging.mkdir(parents=True)
    except OSError as error:
        _remove_empty(made)
        raise _cannot_write(out, error) from None
    try:
        yield staging
        _sync_tree(staging)
        _put_in_place(staging, out, overwrite)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_empty(made[1:])
        raise


def remove_stale(out: Path, log: Callable[[str], None]) -> None:
    """Removes what killed runs left beside `out`, and puts back a folder that one of them had moved away."""
    out = out.resolve()
    if not os.access(out.parent, os.R_OK | os.W_OK | os.X_OK):
        return  # also where it does not exist
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


def _check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConversionError(
            f"OUT {folder} holds no config.json or no safetensors file, so it is no model folder: it is not overwritten"
        )


def _cannot_write(out: Path, error: OSError) -> ConversionError:
    return ConversionError(f"OUT {out} cannot be made in {out.parent} ({error.strerror}): choose a folder elsewhere")


def _remove_empty(folders: list[Path]) -> None:
    """Removes folders, the deepest first, as far as they are there and empty."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _put_in_place(staging: Path, out: Path, overwrite: bool) -> None:
    replaced = None
    if overwrite and out.is_dir() and any(out.iterdir()):
        _check_model_folder(out)
        replaced = _beside(out, "replaced")
        out.rename(replaced)
    try:
        _rename(staging, out)
    except BaseException:
        if replaced is not None:
            try:
                os.rename(replaced, out)
            except OSError:
                raise ConversionError(
                    f"OUT {out} appeared while converting: what was to be replaced is in {replaced}, move it before you "
                    "convert again"
                ) from None
        raise
    _sync(out.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def _rename(folder: Path, out: Path) -> None:
    """Gives a folder the name `out`, which takes the place of nothing but an empty folder."""
    try:
        os.rename(folder, out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise ConversionError(
                f"OUT {out} appeared while converting: choose another name, or give --overwrite if it is a model to replace"
            ) from None
        raise


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
