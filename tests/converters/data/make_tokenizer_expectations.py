"""Makes vocabularies.json and tokenizer_expectations.json: small vocabularies, and what llama.cpp makes of texts with them.

    pip install llama-cpp-python==0.3.36 gguf==0.19.0 tokenizers==0.23.3
    export PYTHONPATH=tests/converters:converters
    python tests/converters/data/make_tokenizer_expectations.py vocabularies
    python tests/converters/data/make_tokenizer_expectations.py ids smollm2.gguf gemma3.gguf

The first command needs no llama.cpp; its trainer breaks ties at random, so another run gives other vocabularies. The second
tokenizes with `parse_special` and with bos where the file asks for it.
"""

import functools
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

from gguf_vocabularies import DATA, SENTENCEPIECE, TEXTS, write_byte_level, write_sentencepiece

PRE_TOKENIZERS = [
    *(
        "default",
        "gpt-2",
        "phi-2",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "trillion",
        "granite-docling",
        "olmo",
        "smollm",
        "starcoder",
    ),
    *("refact", "minerva-7b", "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"),
    *("chatglm-bpe", "glm4", "glm5", "minicpm5", "qwen2", "deepseek-r1-qwen", "f2llmv2", "megrez", "solar-open", "qwen35"),
    *("seed-coder", "tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2", "deepseek-llm", "deepseek-coder", "deepseek-v3"),
    *("joyai-llm", "viking"),
]

# Tokens of the byte-level vocabulary that its merges do not make.
UNMERGED = ["whole", " ignored"]
# Texts with these are not learned from, lest a special token be made by merges.
NOT_LEARNED = ["<|", "<tool>", "<s>", "<unk>"]


def pieces_of_texts() -> list[str]:
    """The texts and, more often, short pieces of them from every position: merges learned of these cross every border."""
    choose = random.Random(0)
    texts = [text for text in TEXTS if not any(word in text for word in (*UNMERGED, *NOT_LEARNED))]
    pieces = [text for text in texts if text]
    for text in texts:
        for start in range(len(text)):
            pieces += [text[start : start + choose.randint(2, 7)] for _ in range(4)]
    return pieces


def merges_across_cuts(alphabet: list[str], merges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merges by which a cut too few or too many shows in the ids, wherever it does not show by `merges`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from w8a8_converters.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS

    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    model = models.BPE({token: index for index, token in enumerate(tokens)}, merges)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    @functools.cache
    def split(text: str) -> tuple[str, ...]:
        return tuple(token.value for token in model.tokenize(to_bytes.pre_tokenize_str(text)[0][0]))

    borders = set()
    for pre_tokenizer in dict.fromkeys(PRE_TOKENIZERS.values()):
        cutter = Tokenizer(models.BPE())
        pre_tokenizer.apply_to(cutter)
        for text in TEXTS:
            pieces = [text[start:end] for _, (start, end) in cutter.pre_tokenizer.pre_tokenize_str(text)]
            borders.update(itertools.pairwise(pieces))
            borders.update((piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece)))
    hidden = [(left, right) for left, right in sorted(borders) if split(left) + split(right) == split(left + right)]
    found = dict.fromkeys((split(left)[-1], split(right)[0]) for left, right in hidden)
    forbidden = [word.replace(" ", "Ġ") for word in (*UNMERGED, *NOT_LEARNED)]
    return [pair for pair in found if not any(word in "".join(pair) for word in forbidden)]


def make_vocabularies() -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2500, initial_alphabet=alphabet, show_progress=False, max_token_length=24)
    byte_level.train_from_iterator(pieces_of_texts(), trainer)
    merges = [tuple(pair) for pair in json.loads(byte_level.to_str())["model"]["merges"]]
    for _ in range(4):
        merges += merges_across_cuts(alphabet, merges)

    # Characters that come once are no pieces: they become bytes.
    sentencepiece = Tokenizer(models.BPE())
    sentencepiece.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=1500, limit_alphabet=250, show_progress=False, max_token_length=12)
    sentencepiece.train_from_iterator(pieces_of_texts(), trainer)
    model = json.loads(sentencepiece.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    pieces = [*dict.fromkeys(merged), *(token for token in model["vocab"] if len(token) == 1)]

    vocabularies = {
        "byte_level": {
            "alphabet": alphabet,
            "merges": [" ".join(pair) for pair in merges],
            "unmerged": [word.replace(" ", "Ġ") for word in UNMERGED],
        },
        "sentencepiece": pieces,
    }
    text = json.dumps(vocabularies, ensure_ascii=False, indent=0)
    (DATA / "vocabularies.json").write_text(text + "\n", encoding="utf-8")


def ids_of(path: Path) -> list[list[int]]:
    from llama_cpp import Llama

    model = Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]


def make_ids(smollm2: Path, gemma3: Path) -> None:
    groups: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for pre in PRE_TOKENIZERS:
            write_byte_level(path, pre)
            ids = ids_of(path)
            group = next((group for group in groups if group["ids"] == ids), None)
            if group is None:
                groups.append({"names": [pre], "ids": ids})
            else:
                group["names"].append(pre)
        for kind in SENTENCEPIECE:
            write_sentencepiece(path, kind)
            groups.append({"names": [kind], "ids": ids_of(path)})
    groups += [{"names": [name], "ids": ids_of(path)} for name, path in (("smollm2-135m", smollm2), ("gemma3-270m", gemma3))]
    lines = [
        f'{{"names": {json.dumps(group["names"])}, "ids": [\n' + ",\n".join(json.dumps(ids) for ids in group["ids"]) + "]}"
        for group in groups
    ]
    note = "llama-cpp-python 0.3.36; see make_tokenizer_expectations.py"
    text = f'{{"made_with": {json.dumps(note)}, "groups": [\n' + ",\n".join(lines) + "]}\n"
    (DATA / "tokenizer_expectations.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["vocabularies"]:
        make_vocabularies()
    elif sys.argv[1:2] == ["ids"]:
        make_ids(*map(Path, sys.argv[2:]))
    else:
        sys.exit(__doc__)
