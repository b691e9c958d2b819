"""Rebuilds tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.reader import GGUFFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
# Control tokens that end a text whatever the metadata names as its end: an instruction-tuned Gemma names <end_of_turn>.
_ALWAYS_END = ("<eos>",)
# Those that end it where the chat template closes a turn with them. Gemma's metadata may name <eos> alone.
_TURN_ENDS = ("<end_of_turn>",)

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class TokenizerFiles:
    """What the metadata says about text.

    Attributes:
        files: file name -> content.
        special_ids: token ids for config.json.
        generation_ids: token ids for generation_config.json; eos_token_id may be a list.
    """

    files: dict[str, str]
    special_ids: dict[str, int]
    generation_ids: dict[str, int | list[int]]


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before the merges, for one value of tokenizer.ggml.pre."""

    build: Callable[[bool], pre_tokenizers.PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level(add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)


def _digits_then_byte_level(add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(add_prefix_space)])


def _split(pattern: str) -> Callable[[bool], pre_tokenizers.PreTokenizer]:
    def build(add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
            ]
        )

    return build


_LLAMA3 = _PreTokenizer(_split(_LLAMA3_SPLIT), ignore_merges=True, adds_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(_byte_level),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(_split(_QWEN2_SPLIT), nfc=True),
    "smollm": _PreTokenizer(_digits_then_byte_level),
    "starcoder": _PreTokenizer(_digits_then_byte_level),
}


def build_tokenizer(file: GGUFFile) -> TokenizerFiles:
    """Raises ConversionError for a tokenizer model or pre-tokenizer that is not known."""
    model = file.required("tokenizer.ggml.model")
    builders = {"gpt2": _gpt2, "llama": _sentencepiece}
    if model not in builders:
        raise ConversionError(f"{file.path}: tokenizer model {model!r} is not known; known are {', '.join(sorted(builders))}")
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConversionError(f"{file.path}: the vocabulary names a token twice")
    ids = _special_ids(file, len(tokens), model)
    try:
        tokenizer, adds_bos = builders[model](file, vocabulary, ids)
    except ConversionError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConversionError(f"{file.path}: its tokenizer cannot be rebuilt: {error}") from None
    _add_special_tokens(tokenizer, file, tokens)

    adds_bos = file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    before = [tokens[ids["bos"]]] if adds_bos and "bos" in ids else []
    after = [tokens[ids["eos"]]] if adds_eos and "eos" in ids else []
    if before or after:
        used = [(token, vocabulary[token]) for token in dict.fromkeys(before + after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{t}:1" for t in before), "$B:1", *(f"{t}:1" for t in after)],
            special_tokens=used,
        )

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{role}_token": tokens[ids[role]] for role in ("bos", "eos", "unk", "pad") if role in ids},
    }
    if context := file.metadata.get(f"{file.required('general.architecture')}.context_length"):
        config["model_max_length"] = context
    template = _chat_template(file)
    if template:
        config["chat_template"] = template

    end_of_text = _end_tokens(file, vocabulary, ids, template)
    special_ids = {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad") if role in ids}
    generation_ids: dict[str, int | list[int]] = dict(special_ids)
    if len(end_of_text) > 1:
        generation_ids["eos_token_id"] = end_of_text
    return TokenizerFiles(
        files={
            "tokenizer.json": tokenizer.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        },
        special_ids=special_ids,
        generation_ids=generation_ids,
    )


def _gpt2(file: GGUFFile, vocabulary: dict[str, int], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = file.required("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise ConversionError(
            f"{file.path}: pre-tokenizer {name!r} is not known; known are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    pre = _PRE_TOKENIZERS[name]
    # The halves of a merge hold no space themselves: byte-level tokens write it as Ġ.
    merges = [tuple(merge.split(" ")) for merge in file.required("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(file: GGUFFile, vocabulary: dict[str, int], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    scores = file.required("tokenizer.ggml.scores")
    unknown = file.metadata["tokenizer.ggml.tokens"][ids["unk"]]
    merges = _merges_from_scores(vocabulary, scores)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    add_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_prefix else spaces
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if add_prefix else decoding)
    return tokenizer, True


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece has the best score: that order, as a list of merges."""
    merges = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    # One call in id order: the list in tokenizer.json must be sorted by id.
    tokenizer.add_tokens(added)


def _special_ids(file: GGUFFile, n_tokens: int, model: str) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
    ids = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    for role, name in names.items():
        index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            ids[role] = index
    for role, index in ids.items():
        if not 0 <= index < n_tokens:
            raise ConversionError(f"{file.path}: the {role} token id is {index}, the vocabulary has {n_tokens} tokens")
    return ids


def _end_tokens(
    file: GGUFFile, vocabulary: dict[str, int], ids: dict[str, int], template: str | list[dict[str, str]] | None
) -> list[int]:
    """The ids at which generation stops, the one of config.json first."""
    templates = template if isinstance(template, list) else [{"template": template or ""}]
    implied = [token for token in _TURN_ENDS if any(token in one["template"] for one in templates)]
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    found = (vocabulary[token] for token in (*_ALWAYS_END, *implied) if token in vocabulary)
    ends = [ids[role] for role in ("eos", "eot", "eom") if role in ids]
    ends += [index for index in found if index < len(types) and types[index] in (_CONTROL, _USER_DEFINED)]
    return list(dict.fromkeys(ends))


def _chat_template(file: GGUFFile) -> str | list[dict[str, str]] | None:
    default = file.metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    if not named:
        return default
    if default is not None:
        named = {"default": default, **named}
    return [{"name": name, "template": template} for name, template in named.items()]
