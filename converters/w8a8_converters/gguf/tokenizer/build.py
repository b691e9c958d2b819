"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata."""

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.reader import GGUFFile
from w8a8_converters.gguf.tokenizer.generation import chat_template, end_tokens, sampling_defaults
from w8a8_converters.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from w8a8_converters.gguf.tokenizer.sentencepiece import sentencepiece_tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_OR = "; or give the model's own tokenizer with --hf-config"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot", "eom": "eom"}


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
    """Raises ConversionError for a tokenizer model or pre-tokenizer that is not known."""
    model = file.required("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        known = ", ".join(sorted(builders))
        raise ConversionError(f"{file.path}: tokenizer model {model!r} is not known; known are {known}{_OR}")
    tokens = _tokens(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ConversionError(f"{file.path}: the vocabulary names a token twice")
    types = _token_types(file, len(tokens))
    ids = _special_ids(file, len(tokens), model)
    template = chat_template(file)
    ends = end_tokens(tokens, types, ids, template)
    try:
        tokenizer, adds_bos = builders[model](file, vocabulary, ids)
    except ConversionError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConversionError(f"{file.path}: its tokenizer cannot be rebuilt: {error}") from None
    rstrip = model == "llama" and file.required("general.architecture") == "phi3"
    _add_special_tokens(tokenizer, tokens, types, ends, rstrip)

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


def _tokens(file: GGUFFile) -> list[str]:
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    # Rows that no text reaches are sometimes left without a name.
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _token_types(file: GGUFFile, n_tokens: int) -> list[int]:
    types: list[int] | None = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [1] * n_tokens
    if len(types) < n_tokens:
        raise ConversionError(f"{file.path}: the metadata hold {len(types)} token types for {n_tokens} tokens")
    return list(types[:n_tokens])


def _byte_level(file: GGUFFile, vocabulary: dict[str, int], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    name = file.required("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ConversionError(f"{file.path}: pre-tokenizer {name!r} is not known; known are {known}{_OR}")
    pre = PRE_TOKENIZERS[name]
    # The halves of a merge hold no space themselves: byte-level tokens write it as Ġ.
    merges = [tuple(merge.split(" ")) for merge in file.required("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    pre.apply_to(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(file: GGUFFile, vocabulary: dict[str, int], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    scores = file.required("tokenizer.ggml.scores")
    add_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
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


def _special_ids(file: GGUFFile, n_tokens: int, model: str) -> dict[str, int]:
    ids = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    for role, name in _ROLES.items():
        index = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None:
            ids[role] = index
    for role, index in ids.items():
        if not 0 <= index < n_tokens:
            raise ConversionError(f"{file.path}: the {role} token id is {index}, the vocabulary has {n_tokens} tokens")
    return ids
