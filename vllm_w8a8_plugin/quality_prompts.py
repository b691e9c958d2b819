"""The texts that quality is measured on, as token ids in short prompts."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROOT = Path(__file__).parent
TEXTS = ("english", "code", "chinese")
TOKENS = 2000  # of each text
CHUNK = 250  # tokens of a prompt


@dataclass(frozen=True)
class Place:
    """Where a scored position is.

    Args:
        text: name of its text.
        token: which token of the text it predicts, from 0.
        prompt: which prompt that token is in.
        index: which token of the prompt it is.
    """

    text: str
    token: int
    prompt: int
    index: int


@dataclass(frozen=True)
class Prompts:
    """The texts as an engine gets them.

    Args:
        ids: token ids, text by text.
        first: the first position of a prompt that counts; before it stand special tokens, or a token without context.
        texts: text -> (number of prompts, number of positions that count), in the order of `ids`.
        hashes: text -> hash of its tokens.
        prefix: how many special tokens begin each prompt.
    """

    ids: list[list[int]]
    first: int
    texts: dict[str, tuple[int, int]]
    hashes: dict[str, str]
    prefix: int = 0

    @property
    def positions(self) -> int:
        return sum(positions for _, positions in self.texts.values())

    def slices(self) -> Iterator[tuple[str, slice]]:
        """Where the positions of each text are."""
        start = 0
        for name, (_, positions) in self.texts.items():
            yield name, slice(start, start + positions)
            start += positions

    def indices(self) -> np.ndarray:
        """int [positions]: which token of its prompt each scored position is."""
        return np.concatenate([np.arange(self.first, len(prompt)) for prompt in self.ids])

    def places(self) -> list[Place]:
        """Of every scored position."""
        places, prompt = [], 0
        for text, (count, _) in self.texts.items():
            before = 0
            for ids in self.ids[prompt : prompt + count]:
                places += [Place(text, before + i - self.prefix, prompt, i) for i in range(self.first, len(ids))]
                before += len(ids) - self.prefix
                prompt += 1
        return places


def read_text(name: str) -> str:
    """A text of this package."""
    return (ROOT / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def read_texts(files: Sequence[Path]) -> dict[str, str]:
    """Name -> text: these files, or without any the texts of this package.

    Raises:
        ValueError: a file cannot be read as UTF-8, is empty, or two have one name.
    """
    if not files:
        return {name: read_text(name) for name in TEXTS}
    texts: dict[str, str] = {}
    for file in files:
        if file.stem in texts:
            raise ValueError(f"--text {file}: another text is called {file.stem!r}, too: rename one, results go by the name")
        try:
            texts[file.stem] = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {file} is not UTF-8: {error}") from None
        except OSError as error:
            raise ValueError(f"--text {file} cannot be read: {error.strerror or error}") from None
        if not texts[file.stem].strip():
            raise ValueError(f"--text {file} is empty: expected a text of at least some hundred words")
    return texts


def load_tokenizer(folder: Path) -> "Tokenizer":
    """
    Raises:
        ValueError: the folder has no tokenizer.json, or one that cannot be read.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, which the texts are read with")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{file} cannot be read: {error}") from None


def make_prompts(tokenizer: "Tokenizer", texts: dict[str, str], tokens: int | None = None, chunk: int = CHUNK) -> Prompts:
    """The beginnings of all texts in short prompts, each after the special tokens that the model wants first.

    Args:
        tokenizer: of the model.
        texts: name -> text.
        tokens: tokens of each text; None for `TOKENS` of them, or all of a shorter one.
        chunk: tokens of each prompt.

    Raises:
        ValueError: a text is too short.
    """
    if tokens is not None and tokens < 2:
        raise ValueError(f"--tokens {tokens}: expected at least 2, as the first token has no context")
    prefix = _prefix(tokenizer)
    first = max(1, len(prefix))
    ids, counts, hashes = [], {}, {}
    for name, content in texts.items():
        text = tokenizer.encode(content, add_special_tokens=False).ids
        if len(text) < (tokens or 2):
            wanted = "at least 2 are needed" if tokens is None else f"--tokens asks for {tokens}"
            raise ValueError(f"text {name!r} is too short: {len(text)} tokens in this model, {wanted}")
        text = text[: tokens or TOKENS]
        chunks = [prefix + text[i : i + chunk] for i in range(0, len(text), chunk)]
        chunks = [prompt for prompt in chunks if len(prompt) > first]
        ids += chunks
        counts[name] = (len(chunks), sum(len(prompt) - first for prompt in chunks))
        hashes[name] = hashlib.sha256(json.dumps(chunks).encode()).hexdigest()[:16]
    return Prompts(ids, first, counts, hashes, len(prefix))


def check_same_vocabulary(tokenizer: "Tokenizer", other: "Tokenizer", texts: dict[str, str], what: str) -> None:
    """Raise ValueError where another tokenizer reads the texts in another way, or has other tokens: so predicts its model.

    Special and other added tokens may differ, as those that a chat model has renamed, and one vocabulary may be padded.

    Args:
        tokenizer, other: of the reference and of the other model.
        texts: name -> text.
        what: names the other model.
    """
    for name, text in texts.items():
        a, b = (each.encode(text, add_special_tokens=False).ids for each in (tokenizer, other))
        if a != b:
            at = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
            raise ValueError(
                f"{what} has another vocabulary than the reference ({other.get_vocab_size():,} and "
                f"{tokenizer.get_vocab_size():,} tokens; text {name!r} differs from token {at} on): their predictions cannot "
                "be compared. Expected the model that it was made from"
            )
    added = {*tokenizer.get_added_tokens_decoder(), *other.get_added_tokens_decoder()}
    ours, theirs = ({i: name for name, i in each.get_vocab(with_added_tokens=False).items()} for each in (tokenizer, other))
    differ = sorted(i for i in (ours.keys() & theirs.keys()) - added if ours[i] != theirs[i])
    if differ:
        first = differ[0]
        raise ValueError(
            f"{what} has another vocabulary than the reference ({len(differ):,} of {len(ours):,} tokens differ; token {first} "
            f"is {theirs[first]!r}, the reference's is {ours[first]!r}): their predictions cannot be compared. Expected the "
            "model that it was made from"
        )


def readable(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    """Text of tokens. Bytes that are no whole character, as a token may begin or end within one, are like `<0xE2>`."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    names = [tokenizer.id_to_token(token) or "" for token in ids]
    if tokenizer.token_to_id("<0x00>") is not None:  # SentencePiece, whose tokens for bytes are called so
        data = b"".join(_named_byte(name) or name.replace("\u2581", " ").encode() for name in names)
    else:
        data = b"".join(_byte_level(name) for name in names)
        if data.decode(errors="replace") != text:
            return text
    escaped = data.decode(errors="surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", escaped)


def continuation(tokenizer: "Tokenizer", context: Sequence[int], token: int) -> str:
    """What a token adds to the text of those before it; its bytes, or its own name, where that is no whole character."""
    before = tokenizer.decode(list(context), skip_special_tokens=False)
    after = tokenizer.decode([*context, token], skip_special_tokens=False)
    added = after[len(before) :] if after.startswith(before) else ""
    if added and "\ufffd" not in added:
        return added
    alone = tokenizer.decode([token], skip_special_tokens=False)
    return readable(tokenizer, [token]) if "\ufffd" in alone else tokenizer.id_to_token(token) or ""


def _named_byte(name: str) -> bytes | None:
    found = re.fullmatch("<0x([0-9A-F]{2})>", name)
    return bytes.fromhex(found[1]) if found else None


def _byte_level(name: str) -> bytes:
    """The bytes that a token's name stands for in byte-level vocabularies; what is no such name is text."""
    bytes_of = _byte_level_alphabet()
    return bytes(bytes_of[c] for c in name) if all(c in bytes_of for c in name) else name.encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte: printable ones of Latin-1 stand for themselves, the others are numbered from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _prefix(tokenizer: "Tokenizer") -> list[int]:
    """Special tokens that the tokenizer puts before a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    special = tokenizer.encode("a").ids
    ends = range(len(special) - len(plain) + 1)
    return special[: next((i for i in ends if special[i : i + len(plain)] == plain), 0)]
