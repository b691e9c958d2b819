"""How byte-level tokenizers cut text before the merges, for each value of `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizers. llama.cpp cuts by the same ones, except that it knows no case beyond
ASCII and no combining marks in those of `tekken`, `gpt-4o` and their like, and that it normalizes nothing, where some of the
models' own tokenizers compose characters (NFC).
"""

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _words(digits: str) -> str:
    """The pattern of cl100k: a word may begin with one other character, as a space; `digits` says how numbers are cut."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, contractions: str = "") -> str:
    """The pattern of o200k: a word ends before the next capital letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}{upper}*{lower}+{contractions}|{first}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(_DIGIT)
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = _cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_TEKKEN = _cased_words(_DIGIT)
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# Escaped are those that composing would change: they look like, and would become, other letters.
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ"
    r"ῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before the merges.

    Attributes:
        splits: patterns, each applied to the pieces that those before it leave; what none matches is a piece, too.
        nfc: characters are composed first, as by the models' own tokenizers.
        ignore_merges: a piece that is a token is taken whole, whatever the merges make of it.
        adds_bos: text begins with bos where the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def apply_to(self, tokenizer: Tokenizer) -> None:
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])


# One row for each way of cutting, with all its names. Names that only other architectures use are left out.
_ROWS: tuple[tuple[tuple[str, ...], PreTokenizer], ...] = (
    # What llama.cpp does where a file's maker knew no better; no model was trained with it.
    (("default",), PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"), PreTokenizer((_GPT2,))),
    (("olmo",), PreTokenizer((_GPT2,), nfc=True)),
    (("smollm", "starcoder", "refact", "minerva-7b"), PreTokenizer((_DIGIT, _GPT2))),
    (
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    (("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    (("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (("minicpm5",), PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True)),
    (("qwen2", "deepseek-r1-qwen", "f2llmv2"), PreTokenizer((_QWEN2,), nfc=True)),
    (("megrez", "solar-open"), PreTokenizer((_QWEN2,))),
    (("qwen35",), PreTokenizer((_QWEN35,), nfc=True)),
    (("seed-coder",), PreTokenizer((_SEED_CODER,))),
    (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True)),
    (("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((_GPT4O,))),
    (
        ("deepseek-llm",),
        PreTokenizer((r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_CJK, r"\p{N}+")),
    ),
    (("deepseek-coder",), PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT))),
    (("deepseek-v3", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3)),
    (("viking",), PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", _DIGIT))),
)
PRE_TOKENIZERS = {name: pre_tokenizer for names, pre_tokenizer in _ROWS for name in names}
