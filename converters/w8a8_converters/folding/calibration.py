"""The text that activations are measured on, as token ids."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from w8a8_converters.checkpoint import TOKENIZER_FILES, Source, write_side_files
from w8a8_converters.errors import ConversionError

# Written for this: prose, letters, code, tables, a few languages. No text that quality is measured on is in it.
DEFAULT_TEXT = Path(__file__).with_name("calibration.txt")
CHUNK = 256
# Of three chunks one is kept for comparing methods, so that none is judged by what it was fitted to.
_HELD_OUT = 3
_MAX_CHUNKS = 9
_MIN_TOKENS = 64


@dataclass(frozen=True)
class Tokens:
    """Token ids of the text.

    Attributes:
        fit: int64 [chunks, length], to choose scales by.
        held_out: int64 [chunks, length], to compare methods by; other tokens than `fit`.
        text: the file's name, for reports.
    """

    fit: Tensor
    held_out: Tensor
    text: str

    def describe(self) -> str:
        return f"{self.text}: {self.fit.numel()} tokens, and {self.held_out.numel()} others to compare methods by"


def read_tokens(source: Source, path: Path | None = None) -> Tokens:
    """Tokens of a text, in chunks that begin with the model's own first token where it has one.

    Args:
        source: a checkpoint with its tokenizer.
        path: the text, UTF-8. Default: the one that comes with this package.

    Raises:
        ConversionError: transformers or a tokenizer is missing, or the text cannot be read or is too short.
    """
    transformers = require_transformers()
    file = path or DEFAULT_TEXT
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"calibration text {file} cannot be read: {error}") from None
    with model_folder(source) as folder:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:  # whatever a damaged or foreign tokenizer raises
            if not any(name in source.side_files for name in TOKENIZER_FILES):
                raise ConversionError(
                    f"{source.path} has no tokenizer, with which --equalize, --quality and --activations read a text: it has "
                    f"none of {', '.join(TOKENIZER_FILES)}. Copy the tokenizer's files of the original model into that folder"
                ) from None
            reason = " ".join(str(error).split())  # some are several lines long
            raise ConversionError(
                f"{source.path}: its tokenizer cannot be loaded to read a text: {type(error).__name__}: {reason.rstrip('.')}. "
                "Copy the tokenizer's files of the original model again"
            ) from None
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        first = tokenizer("a")["input_ids"][:1]
    first = first if tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id] else []
    if len(ids) < 2 * _MIN_TOKENS:
        raise ConversionError(f"calibration text {file} has {len(ids)} tokens: give one with at least {2 * _MIN_TOKENS}")
    length = min(CHUNK - len(first), len(ids) // _HELD_OUT)
    count = min(len(ids) // length, _MAX_CHUNKS)
    chunks = torch.tensor([first + ids[i * length : (i + 1) * length] for i in range(count)])
    held_out = torch.arange(count) % _HELD_OUT == _HELD_OUT - 1
    return Tokens(chunks[~held_out], chunks[held_out], file.name if path else "the text of this package")


def require_transformers():
    """The module.

    Raises:
        ConversionError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ConversionError(
            "--equalize, --quality and --activations run the model with transformers: pip install transformers"
        ) from None
    return transformers


@contextmanager
def model_folder(source: Source) -> Iterator[Path]:
    """A temporary folder with config.json and the tokenizer's files, without weights."""
    with tempfile.TemporaryDirectory(prefix="w8a8-") as name:
        folder = Path(name)
        write_side_files(source, folder)
        (folder / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
        yield folder
