"""Small vocabularies as GGUF files without weights, and the texts on which tokenizers are compared with llama.cpp.

The byte-level one joins across every border at which a pre-tokenizer may cut, so that each cut shows in the ids; see
data/make_tokenizer_expectations.py.
"""

import json
import unicodedata
from pathlib import Path

import gguf
from gguf import TokenType

DATA = Path(__file__).parent / "data"

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "Hello world",
    " Hello  world ",
    "   three   spaces   ",
    "tab\tand\n\nnewline\n\n\n",
    "\t\t\tif x:\n\t\t\t\treturn",
    "a\r\nb\r\n\r\nc",
    " \n \n\n  x",
    "it's I'll don't we've you're he'd I'm",
    "IT'S I'LL DON'T WE'VE YOU'RE",
    "'s 'tis ''quoted''",
    "3.14159 12345 1,000,000",
    "1 12 123 1234 12345 123456 1234567",
    "x1y22z333 v2.0-rc1",
    "٣٤٥ ١٢٣٤ ५६७ ½ Ⅷ ²³",
    "CamelCaseWords HTTPServer iPhone XMLHttpRequest",
    "snake_case_words SHOUTING_CASE kebab-case",
    "ÜberGröße ÉCOLEécole ÑandÚ",
    "naïve café",
    "nai\u0308ve cafe\u0301",
    "Ünïcödé Straße",
    "ПриветМир как дела?",
    "ΑθήναΕλλάδα Ελληνικά",
    "日本語のテキストです。カタカナ",
    "中文文本：人工智能，2024年。",
    "한국어 텍스트입니다",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8",
    "한국",
    "مرحبا بالعالم، كيف الحال؟",
    "שלום עולם!",
    "हिन्दी में पाठ",
    "ภาษาไทยง่ายนิดเดียว",
    "ქართული",
    "አማርኛ",
    "Việt Nam Tiếng Việt",
    "Viê\u0323t Nam",
    "Vi\u1ec7t Nam",
    "x\u0301\u0302 zalgo\u0335",
    "👩‍👩‍👧‍👦 family 🙂🇫🇷",
    "✅ 🦙🦙 ❤️",
    "def f(x):\n    return x**2  # 2²\n",
    "for (int i=0;i<10;++i){a[i]+=1;}\n\n\n}",
    '<div class="a">&nbsp;</div>',
    "http://example.com/a?b=c&d=e#f",
    "C:\\path\\to/file.txt //x",
    "$$$ ### @@@ --- ... !!! ???",
    "“quotes” — dash… ‘single’",
    "！？。，、：；「」",
    "\u200bzero\u00a0width\u3000wide\u2003em",
    "\x00\x01\x1b[0m\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "ʰˣ ɐɪ ﬁ ﬀ ǅ",
    "\ufeffBOM",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Donaudampfschifffahrtsgesellschaftskapitänsmützenabzeichen" * 3,
    " " * 35 + "x",
    "\n" * 20,
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
    " <|endoftext|> x<|endoftext|>\n\ny",
    "<tool>call</tool> <tool><tool>",
    "<s>[INST] hi [/INST]</s> next",
    "<|user|>\nHi there\n<|end|>\n<|assistant|>\n",
    "a/b\n/c\n\n//\n",
    "1\n2\n 3\t4",
    "mixed中文and한국어と日本語text",
    "whole ignored",
    "<unk> <0x41> <|im_",
    "end with space ",
    "\n end\n ",
    "x  12   345\n 6 7",
    "don't2 it's3 1st 2nd A1B2",
    ".hello !World (paren) [x] #tag @you",
    "~=+<>|^` <== ~~> ||",
    "a.b.c,d;e:f x=1;y=2",
    "\u0300lone mark",
    "re\u0301sume\u0301 s\u0323\u0307",
    "クリーム①②㋿",
    "«да» №5 §3 10€ £20 ¥30",
    "wait...what?!\n\nnext  line",
    "𠀀𠮷野家 龥龦 ꡀ ᄀ",
    "$100.50 -5% +3",
    "f(x)\n/y end.\n//\n/next",
    "ok 🙂  ",
]

# For each text that composing changes, the composed one.
TEXTS += [text for text in (unicodedata.normalize("NFC", text) for text in TEXTS) if text not in TEXTS]

BYTE_LEVEL_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SENTENCEPIECE = {
    # Keyed by what distinguishes them; Mistral's is like Llama 2's.
    "llama-spm": {"arch": "llama"},
    "gemma-spm": {
        "arch": "gemma3",
        "add_space_prefix": False,
        "user_defined": ["  ", "   ", "    ", "\n\n", "\n\n\n", "\t\t", "<tool>"],
    },
    "phi3-spm": {"arch": "phi3", "name": "Phi-3-mini", "control": ["<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>"]},
}


def write_byte_level(path: Path, pre: str, **extra: object) -> list[str]:
    """Writes the byte-level vocabulary with pre-tokenizer `pre`; `extra` is metadata. Returns the tokens."""
    read = json.loads((DATA / "vocabularies.json").read_text(encoding="utf-8"))["byte_level"]
    # Several merges may make the same token; some tokens are made by none.
    merged = dict.fromkeys(merge.replace(" ", "") for merge in read["merges"])
    normal = [*read["alphabet"], *merged, *read["unmerged"]]
    tokens = [*BYTE_LEVEL_CONTROL, *normal, "<tool>"]
    types = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * len(normal) + [TokenType.USER_DEFINED]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.merges": read["merges"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    write_metadata(path, "llama", metadata | extra)
    return tokens


def write_sentencepiece(path: Path, kind: str) -> list[str]:
    """Writes one of `SENTENCEPIECE`; returns the tokens."""
    options = SENTENCEPIECE[kind]
    pieces = json.loads((DATA / "vocabularies.json").read_text(encoding="utf-8"))["sentencepiece"]
    control, user_defined = options.get("control", []), options.get("user_defined", [])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    columns = [
        *[("<unk>", TokenType.UNKNOWN, 0.0), ("<s>", TokenType.CONTROL, 0.0), ("</s>", TokenType.CONTROL, 0.0)],
        *((token, TokenType.BYTE, 0.0) for token in bytes_),
        *((piece, TokenType.NORMAL, -float(rank)) for rank, piece in enumerate(pieces) if piece not in user_defined),
        *((token, TokenType.CONTROL, -1000.0) for token in control),
        *((token, TokenType.USER_DEFINED, -1000.0) for token in user_defined),
    ]
    tokens, types, scores = zip(*columns, strict=True)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if "name" in options:
        metadata["general.name"] = options["name"]
    if "add_space_prefix" in options:
        metadata["tokenizer.ggml.add_space_prefix"] = options["add_space_prefix"]
    write_metadata(path, options["arch"], metadata)
    return list(tokens)


def add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Metadata in the type that fits the value: uint32, float32, or an array."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_metadata(path: Path, arch: str, metadata: dict[str, object]) -> None:
    """A GGUF file without tensors; a value None leaves its key out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if value is not None:
            add_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
