"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

import json
import math
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.metadata import array, flag, integer, shown, text, wrong
from w8a8_converters.gguf.reader import GGUFFile
from w8a8_converters.gguf.tokenizer.generation import (
    CHAT_TEMPLATE,
    NAMED_CHAT_TEMPLATES,
    chat_template,
    end_tokens,
    sampling_defaults,
)
from w8a8_converters.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from w8a8_converters.gguf.tokenizer.sentencepiece import sentencepiece_tokenizer

# Values of tokenizer.ggml.token_type, the last of which is 6.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_TYPES = range(1, 7)
_OR = "; or give the model's own tokenizer with --hf-config"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}
_READ_KEYS = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"),
    "eos_token_ids",
    *(f"{name}_token_id" for name in _ROLES.values()),
}
# They name tokens that take no part in making ids of text, or say what only other models of tokenizers can use.
_IGNORED_KEYS = {
    *("cls_token_id", "mask_token_id", "seperator_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id"),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    "token_type_count",
}
# They change the ids of text, or which are drawn, unless they have this value.
_OFF = {
    "add_sep_token": False,
    "normalizer.lowercase": False,
    "normalizer.strip_accents": False,
    "precompiled_charsmap": [],
    "remove_extra_whitespaces": False,
    "suppress_tokens": [],
}
# Outside of `tokenizer.ggml.`: the names of the chat templates, and a copy of tokenizer.json, which llama.cpp, too, ignores.
_OTHER_KEYS = (CHAT_TEMPLATE, "tokenizer.chat_templates", "tokenizer.huggingface.json")


@dataclass(frozen=True)
class TokenizerFiles:
    """What the metadata says about text.

    Attributes:
        files: file name -> content.
        special_ids: token ids for config.json.
        generation_ids: content of generation_config.json: token ids, where eos_token_id may be a list, and the defaults of
            sampling that the file names.
    """

    files: dict[str, str]
    special_ids: dict[str, int]
    generation_ids: dict[str, Any]


def build_tokenizer(file: GGUFFile) -> TokenizerFiles:
    """Raises ConversionError for a tokenizer model or pre-tokenizer that is not known, and for metadata that make no sense."""
    model = text(file, "tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        known = ", ".join(sorted(builders))
        raise ConversionError(f"{file.path}: tokenizer model {model!r} is not known; known are {known}{_OR}")
    _check_keys(file)
    tokens = _tokens(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConversionError(f"{file.path}: the vocabulary names a token twice")
    types = _token_types(file, len(tokens))
    ids = _special_ids(file, len(tokens), model)
    template = chat_template(file)
    ends = list(dict.fromkeys([*end_tokens(tokens, types, ids, template), *_more_ends(file, len(tokens))]))
    try:
        tokenizer, adds_bos = builders[model](file, vocabulary, types, ids)
    except ConversionError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConversionError(f"{file.path}: its tokenizer cannot be rebuilt: {error}") from None
    rstrip = model == "llama" and text(file, "general.architecture") == "phi3"
    _add_special_tokens(tokenizer, tokens, types, ends, rstrip)

    adds_bos = flag(file, "tokenizer.ggml.add_bos_token", adds_bos)
    adds_eos = flag(file, "tokenizer.ggml.add_eos_token", False)
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
    context_length = f"{text(file, 'general.architecture')}.context_length"
    if context_length in file.metadata:
        config["model_max_length"] = integer(file, context_length)
    if template:
        config["chat_template"] = template

    special_ids = {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad") if role in ids}
    generation: dict[str, Any] = {**special_ids, **sampling_defaults(file)}
    if ends:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return TokenizerFiles(
        files={
            "tokenizer.json": tokenizer.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        },
        special_ids=special_ids,
        generation_ids=generation,
    )


def _check_keys(file: GGUFFile) -> None:
    """Refuses metadata of the tokenizer that are not read and could give other ids."""
    unknown = []
    for key, value in file.metadata.items():
        if not key.startswith("tokenizer.") or key in _OTHER_KEYS or key.startswith(NAMED_CHAT_TEMPLATES):
            continue
        name = key.removeprefix("tokenizer.ggml.")
        if name in _OFF:
            if value != _OFF[name]:
                raise ConversionError(
                    f"{file.path}: metadata {key} is {shown(value)}, which is not supported; expected {_OFF[name]}{_OR}"
                )
        elif name not in _READ_KEYS and name not in _IGNORED_KEYS:
            unknown.append(key)
    if unknown:
        raise ConversionError(
            f"{file.path}: metadata {', '.join(unknown)} is not understood; ignoring it could give another tokenizer{_OR}"
        )


def _tokens(file: GGUFFile) -> list[str]:
    tokens = array(file, "tokenizer.ggml.tokens", (str,), "strings")
    if not tokens:
        raise ConversionError(f"{file.path}: metadata tokenizer.ggml.tokens is empty; download it again")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ConversionError(
            f"{file.path}: metadata tokenizer.ggml.tokens has {len(tokens)} tokens, more than the {embedding.shape[0]} rows "
            f"of token_embd.weight; download it again{_OR}"
        )
    # Rows that no text reaches are sometimes left without a name.
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _token_types(file: GGUFFile, n_tokens: int) -> list[int]:
    """Required, though llama.cpp takes all for text where they are missing: special tokens could not be told."""
    key = "tokenizer.ggml.token_type"
    if key not in file.metadata:
        raise ConversionError(f"{file.path} lacks the metadata {key}, without which no token is known to be special{_OR}")
    types = array(file, key, (int,), "integers")
    _check_length(file, key, types, n_tokens)
    strange = next((kind for kind in types if kind not in _TYPES), None)
    if strange is not None:
        raise ConversionError(f"{file.path}: metadata {key} holds {strange}, expected {_TYPES[0]} to {_TYPES[-1]}{_OR}")
    return types


def _check_length(file: GGUFFile, key: str, values: list[Any], n_tokens: int) -> None:
    if len(values) != n_tokens:
        raise ConversionError(
            f"{file.path}: metadata {key} has {len(values)} values for {n_tokens} tokens; download it again{_OR}"
        )


def _byte_level(file: GGUFFile, vocabulary: dict[str, int], types: list[int], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = text(file, "tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConversionError(f"{file.path}: pre-tokenizer {name!r} is not known; known are {known}{_OR}")
    pre = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(file, vocabulary, types), ignore_merges=pre.ignore_merges))
    pre.apply_to(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _merges(file: GGUFFile, vocabulary: dict[str, int], types: list[int]) -> list[tuple[str, ...]]:
    key = "tokenizer.ggml.merges"
    # The halves of a merge hold no space themselves: byte-level tokens write it as Ġ.
    merges = [tuple(merge.split(" ")) for merge in array(file, key, (str,), "strings")]
    for index, merge in enumerate(merges):
        if len(merge) != 2 or not all(merge):
            raise ConversionError(
                f"{file.path}: metadata {key} holds {shown(' '.join(merge))} at {index}, expected two parts with a space "
                f"between them; download it again{_OR}"
            )
    if not merges and any(kind == _NORMAL and len(token) > 1 for token, kind in zip(vocabulary, types, strict=True)):
        raise ConversionError(f"{file.path}: metadata {key} is empty, but tokens have several bytes; download it again{_OR}")
    return merges


def _sentencepiece(
    file: GGUFFile, vocabulary: dict[str, int], types: list[int], ids: dict[str, int]
) -> tuple[Tokenizer, bool]:
    key = "tokenizer.ggml.scores"
    scores = array(file, key, (int, float), "numbers")
    _check_length(file, key, scores, len(vocabulary))
    if not all(map(math.isfinite, scores)):
        raise ConversionError(f"{file.path}: metadata {key} holds NaN or infinity; download it again{_OR}")
    add_prefix = flag(file, "tokenizer.ggml.add_space_prefix", True)
    return sentencepiece_tokenizer(vocabulary, scores, ids["unk"], add_prefix), True


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], ends: list[int], rstrip: bool) -> None:
    """`rstrip`: control tokens take the spaces after them along, all but those that Phi-3 names here."""
    keep_spaces = ("<unk>", "<s>", "<|endoftext|>")
    added = [
        AddedToken(
            token,
            special=kind != _USER_DEFINED,
            normalized=False,
            rstrip=rstrip and (kind == _CONTROL or token == "</s>") and token not in keep_spaces,
        )
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or index in ends
    ]
    # One call in id order: the list in tokenizer.json must be sorted by id.
    tokenizer.add_tokens(added)


def _more_ends(file: GGUFFile, n_tokens: int) -> list[int]:
    """Ids of `eos_token_ids`, in which files made by Ollama name all ends, the first one again among them."""
    key = "tokenizer.ggml.eos_token_ids"
    if key not in file.metadata:
        return []
    ends = array(file, key, (int,), f"ids below {n_tokens}")
    if not all(0 <= index < n_tokens for index in ends):
        raise wrong(file, key, f"ids below {n_tokens}")
    return ends


def _special_ids(file: GGUFFile, n_tokens: int, model: str) -> dict[str, int]:
    ids = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    for role, name in _ROLES.items():
        key = f"tokenizer.ggml.{name}_token_id"
        if key in file.metadata:
            ids[role] = integer(file, key, minimum=0)
    for role, index in ids.items():
        if index >= n_tokens:
            raise ConversionError(f"{file.path}: the {role} token id is {index}, the vocabulary has {n_tokens} tokens{_OR}")
    return ids
