"""GGUF files made here with the gguf library's writer, q and k rows permuted by the test's own loop."""

import json
import math
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_models import TOKENS, interleaved, write_gguf
from gguf_pieces import Entry, string, take_apart
from safetensors.torch import load_file
from tokenizers import Tokenizer

from w8a8_converters.convert import convert
from w8a8_converters.errors import BrokenFileError, ConversionError
from w8a8_converters.gguf.architectures.base import interleaved_to_halves
from w8a8_converters.gguf.reader import GGUFFile
from w8a8_kernels.hadamard import block_size
from w8a8_kernels.quantize.weight import quantize_weight

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 64, 2

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_tensors(biases: bool, tied: bool) -> dict[str, np.ndarray]:
    """Hugging Face order, keyed by GGUF name."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    tensors = {"token_embd.weight": draw(len(TOKENS), HIDDEN), "output_norm.weight": draw(HIDDEN)}
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.attn_norm.weight": draw(HIDDEN), f"blk.{i}.ffn_norm.weight": draw(HIDDEN)}
        for name, shape in shapes.items():
            tensors[f"blk.{i}.{name}.weight"] = draw(*shape)
            if biases and name.startswith("attn"):
                tensors[f"blk.{i}.{name}.bias"] = draw(shape[0])
    if not tied:
        tensors["output.weight"] = draw(len(TOKENS), HIDDEN)
    return tensors


METADATA = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 100000.0,
    "rope.dimension_count": HEAD_DIM,
    "vocab_size": len(TOKENS),
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}


@pytest.fixture
def model(tmp_path) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """Writes a tiny llama GGUF; returns its path and the values that must come out, by Hugging Face name.

    Options: qtype of the matrices; biases; tied; arch; metadata (merged, None removes a key); tensors (merged over what is
    stored, None removes one).
    """

    def write(qtype=Q.F32, biases=False, tied=True, arch="llama", metadata=None, tensors=None):
        stored = model_tensors(biases, tied)
        expected = {}
        for name, values in stored.items():
            kind = qtype if values.ndim == 2 else Q.F32
            as_read = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind) if kind != Q.F32 else values
            expected[hugging_face_name(name)] = torch.from_numpy(as_read.copy()).to(torch.bfloat16)
            for of_rotary, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                if of_rotary in name:
                    values = interleaved(torch.from_numpy(values), heads).numpy()
            stored[name] = (gguf.quants.quantize(values, kind), kind)
        stored |= {name: None if values is None else (values, Q.F32) for name, values in (tensors or {}).items()}
        written = [(name, *item) for name, item in stored.items() if item is not None]
        return write_gguf(tmp_path / "model.gguf", arch, {**METADATA, **(metadata or {})}, written), expected

    return write


def hugging_face_name(name: str) -> str:
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, layer, inner = stem.split(".")
    return f"model.layers.{layer}.{NAMES[inner]}.{kind}"


def refuses(path: Path, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=match) as error:
        convert(path, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("qtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1], ids=lambda q: q.name)
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
def test_every_tensor(model, tmp_path, qtype, biases):
    path, expected = model(qtype=qtype, biases=biases, tied=not biases)
    convert(path, tmp_path / "out", format="bf16")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.equal(got[name], values), name


def test_codes_equal_those_of_the_bf16_folder(model, tmp_path):
    path, expected = model(qtype=Q.Q8_0, tied=False)
    convert(path, tmp_path / "out")
    got = load_file(tmp_path / "out" / "w8a8.safetensors")
    for name, values in expected.items():
        if "_proj" in name:
            codes, scale = quantize_weight(
                values, hadamard=block_size(values.shape[1], row_parallel=name.split(".")[-2] in ("o_proj", "down_proj"))
            )
            assert torch.equal(got[name], codes), name
            assert torch.equal(got[f"{name}_scale"], scale), name
        else:
            assert torch.equal(got[name], values), name


def test_row_order_is_not_its_own_inverse():
    order = interleaved_to_halves(1, 8)
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert not torch.equal(order[order], torch.arange(8)), "head sizes in these tests must tell the two directions apart"


def test_config(model, tmp_path):
    path, _ = model(biases=True)
    convert(path, tmp_path / "out", format="bf16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": len(TOKENS),
    }
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, [2, 0], 2)


def test_untied_and_end_of_turn(model, tmp_path):
    path, _ = model(tied=False, metadata={"tokenizer.ggml.eot_token_id": 0})
    convert(path, tmp_path / "out", format="bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_transformers_reads_the_folder(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    path, expected = model(biases=True, tied=False)
    convert(path, tmp_path / "out", format="bf16")
    network, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert network.config.rope_parameters["rope_theta"] == 100000.0
    assert torch.equal(network.model.layers[1].self_attn.k_proj.weight, expected["model.layers.1.self_attn.k_proj.weight"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"


def llama3_factors(dim: int, base: float, factor: float) -> list[float]:
    """From the definition: long waves are stretched by the factor, short ones not, those between in part."""
    factors = []
    for i in range(dim // 2):
        wave = 2 * math.pi * base ** (2 * i / dim)
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192 / 1:
            factors.append(factor)
        else:
            part = (8192 / wave - 1) / (4 - 1)
            factors.append(1 / ((1 - part) / factor + part))
    return factors


def test_llama3_rope(model, tmp_path):
    factors = np.array(llama3_factors(HEAD_DIM, 500000.0, 32.0), dtype=np.float32)
    assert len(set(factors.tolist())) == 3, "all three cases must occur"
    path, expected = model(tensors={"rope_freqs.weight": factors}, metadata={"rope.freq_base": 500000.0})
    convert(path, tmp_path / "out", format="bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == expected.keys()


def test_linear_rope(model, tmp_path):
    path, _ = model(metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    convert(path, tmp_path / "out", format="bf16")
    scaling = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 4.0}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


NO_BIASES_IN_LAYER_1 = dict.fromkeys(f"blk.1.attn_{name}.bias" for name in ("q", "k", "v", "output"))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"arch": "mamba"}, "architecture 'mamba', which is not known yet; known are deepseek2, "),
        ({"tensors": {"blk.0.attn_sinks.weight": ones(4)}}, "unknown .*llama: blk.0.attn_sinks.weight"),
        ({"tensors": {"blk.2.attn_norm.weight": ones(HIDDEN)}}, "unknown .*blk.2.attn_norm.weight"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "lacks 1 tensors: blk.1.ffn_up.weight"),
        ({"tensors": {"blk.0.attn_q.weight": ones(40, HIDDEN)}}, r"has shape \[40, 32\], .* ask for \[32, 32\]"),
        ({"tensors": {"blk.0.attn_q.bias": ones(32)}}, "lacks 7 tensors: blk.0.attn_k.bias"),
        ({"biases": True, "tensors": NO_BIASES_IN_LAYER_1}, "lacks 4 tensors: blk.1.attn_k.bias"),
        ({"tensors": {"blk.0.ffn_up.bias": ones(INNER)}}, "lacks 5 tensors: blk.0.ffn_down.bias, blk.0.ffn_gate.bias, blk.1"),
        ({"tensors": {"blk.1.ffn_down.weight": ones(INNER, HIDDEN)}}, r"has shape \[64, 32\], .* \[32, 64\]"),
        ({"tensors": {"blk.0.attn_norm.weight": ones(16)}}, r"attn_norm.weight has shape \[16\], .* \[32\]"),
        ({"tensors": {"output_norm.weight": ones(2, HIDDEN)}}, r"output_norm.weight has shape \[2, 32\]"),
        ({"tied": False, "tensors": {"output.weight": ones(9, HIDDEN)}}, r"output.weight has shape \[9, 32\]"),
        ({"metadata": {"vocab_size": 9}}, r"token_embd.weight has shape \[266, 32\], the metadata ask for \[9, 32\]"),
        ({"tensors": {"token_embd.weight": None}}, "lacks 1 tensors: token_embd.weight"),
        ({"tensors": {"rope_freqs.weight": np.full(4, 3.0, np.float32)}}, "not the scaling of Llama 3"),
        (
            {"tensors": {"output_norm.weight": np.full(HIDDEN, np.nan, np.float32)}},
            r"tensor output_norm\.weight of .*holds NaN.*download it again",
        ),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "lacks the metadata llama.rope.scaling.factor"),
        ({"metadata": {"rope.scaling.type": "su"}}, "rope scaling 'su' is not supported; known are none, linear, llama3"),
        ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count is 4"),
        ({"metadata": {"expert_count": 8}}, "lacks the metadata llama.expert_used_count"),
        ({"metadata": {"expert_count": 8, "expert_used_count": 2}}, "unknown .*blk.0.ffn_down.weight, blk.0.ffn_gate.weight"),
        ({"metadata": {"expert_used_count": 2}}, "llama.expert_used_count is 2, which is not supported; expected 0"),
        ({"metadata": {"clamp": 1, "residual_scale": 0.5}}, "llama.clamp, llama.residual_scale is not understood"),
        ({"metadata": {"attention.clamp_kqv": 1.0}}, "llama.attention.clamp_kqv is not understood"),
        ({"metadata": {"rope.freq_base": float("nan")}}, "llama.rope.freq_base must be a number above 0, got nan"),
        ({"metadata": {"rope.freq_base": True}}, "llama.rope.freq_base must be a number above 0, got True"),
        ({"metadata": {"block_count": True}}, "llama.block_count must be one positive integer, got True"),
        ({"metadata": {"block_count": 0}}, "llama.block_count must be one positive integer, got 0"),
        ({"metadata": {"block_count": None}}, "lacks the metadata llama.block_count"),
        ({"metadata": {"attention.head_count_kv": [2, 1]}}, r"must be one positive integer, got \[2, 1\]"),
        ({"metadata": {"split.count": 3}}, "one of several parts .* are missing, 3, missing"),
        ({"metadata": {"tokenizer.ggml.pre": "bloom"}}, "pre-tokenizer 'bloom' is not known; known are a.x-4.0, chatglm-bpe"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer model 'bert' is not known; known are gpt2, llama"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 9999}}, "eos token id is 9999"),
        ({"metadata": {"tokenizer.ggml.merges": ["h zz"]}}, "tokenizer cannot be rebuilt"),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, "lacks the metadata tokenizer.ggml.tokens"),
    ],
    ids=lambda value: str(value)[:60].replace("/", "") if isinstance(value, str) else "",
)
def test_refusals(model, tmp_path, options, match):
    path, _ = model(**options)
    refuses(path, match, tmp_path)


HUGE = 2**32 - 1
LORA = {"blk.0.attn_q.weight.lora_a": ones(4, HIDDEN), "blk.0.attn_q.weight.lora_b": ones(HIDDEN, 4)}


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"block_count": HUGE}, r"metadata llama\.block_count is 4294967295, expected 20 at most: the number of tensors"),
        ({"expert_count": HUGE}, r"metadata llama\.expert_count is 4294967295, expected 266 at most: the largest dimension"),
        ({"attention.head_count": HUGE}, r"llama\.attention\.head_count is 4294967295, expected 266 at most"),
        ({"attention.head_count_kv": HUGE}, r"llama\.attention\.head_count_kv is 4294967295, expected 266 at most"),
        (
            {"attention.head_count": 200, "attention.key_length": 200},
            r"head_count is 200, expected 1 at most: .* in heads of 200",
        ),
        ({"attention.key_length": HUGE}, r"llama\.attention\.key_length is 4294967295, expected 266 at most"),
        ({"feed_forward_length": HUGE}, r"llama\.feed_forward_length is 4294967295, expected 266 at most"),
        ({"embedding_length": HUGE}, r"llama\.embedding_length is 4294967295, expected 266 at most"),
        ({"attention.head_count": 6}, r"llama\.embedding_length 32 must be a multiple of llama\.attention\.head_count 6"),
        (
            {"attention.head_count_kv": 3},
            r"llama\.attention\.head_count 4 must be a multiple of llama\.attention\.head_count_kv 3",
        ),
        ({"attention.key_length": 7}, r"size of a head must be even, got 7, which is llama\.attention\.key_length"),
        ({"attention.head_count": 32}, r"even, got 1, which is llama\.embedding_length 32 / llama\.attention\.head_count 32"),
        (
            {"attention.head_count": 8},
            r"dimension_count is 8, which is not supported; expected 4, the size of a head, which is llama\.embedding_length",
        ),
        ({"rope.freq_base": 0.0}, r"llama\.rope\.freq_base must be a number above 0, got 0\.0"),
        ({"rope.freq_base": -1.0}, r"llama\.rope\.freq_base must be a number above 0, got -1\.0"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": -4.0},
            r"rope\.scaling\.factor must be a number above 0, got -4\.0",
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.0},
            r"rope\.scaling\.factor must be a number above 0, got 0\.0",
        ),
        ({"attention.layer_norm_rms_epsilon": 0.0}, r"layer_norm_rms_epsilon must be a number between 0 and 1, got 0\.0"),
        ({"attention.layer_norm_rms_epsilon": 1.0}, r"layer_norm_rms_epsilon must be a number between 0 and 1, got 1\.0"),
        ({"attention.layer_norm_rms_epsilon": None}, r"lacks the metadata llama\.attention\.layer_norm_rms_epsilon"),
        ({"general.type": "adapter"}, "is a LoRA adapter: merge it into its model"),
        ({"general.type": "mmproj"}, "is the vision tower of a model"),
        ({"general.type": "vocab"}, "is a vocabulary without a model"),
        ({"general.type": "imatrix"}, "is an importance matrix"),
        ({"general.type": "other"}, r"general\.type is 'other', expected 'model'"),
    ],
    ids=lambda value: " ".join(f"{key}={value}" for key, value in value.items()) if isinstance(value, dict) else "",
)
def test_impossible_metadata(model, tmp_path, metadata, match):
    refuses(model(metadata=metadata)[0], match, tmp_path)


def test_fp64_beyond_fp32(model, tmp_path):
    path, _ = model(metadata={"rope.freq_base": None})
    pieces = take_apart(path)
    key = string("llama.rope.freq_base")
    pieces.extra_metadata.append(Entry(key, gguf.GGUFValueType.FLOAT64, struct.pack("<d", 1e300)))
    path.write_bytes(pieces.pack())
    refuses(path, r"llama\.rope\.freq_base must be a number above 0, got 1e\+300", tmp_path)


@pytest.mark.parametrize("arch", [["llama"], 3])
def test_architecture_is_one_string(model, tmp_path, arch):
    path, _ = model()
    pieces = take_apart(path)
    is_array = isinstance(arch, list)
    value = struct.pack("<IQ", gguf.GGUFValueType.STRING, 1) + string("llama") if is_array else struct.pack("<I", arch)
    pieces.metadata["general.architecture"].type = gguf.GGUFValueType.ARRAY if is_array else gguf.GGUFValueType.UINT32
    pieces.metadata["general.architecture"].value = value
    path.write_bytes(pieces.pack())
    refuses(path, rf"metadata general\.architecture must be one string, got {re.escape(repr(arch))}", tmp_path)


def test_adapter_without_a_type(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", METADATA, [(name, values, Q.F32) for name, values in LORA.items()])
    refuses(path, "is a LoRA adapter: merge it into its model", tmp_path)


def test_more_tokens_than_rows(model, tmp_path):
    """A prompt with the last of them would be beyond the embedding. Rows without a token are padding."""
    path, _ = model(metadata={"vocab_size": 265}, tensors={"token_embd.weight": ones(265, HIDDEN)})
    refuses(path, r"tokenizer\.ggml\.tokens has 266 tokens, more than the 265 rows of token_embd\.weight", tmp_path)
    path, _ = model(metadata={"vocab_size": 272}, tensors={"token_embd.weight": ones(272, HIDDEN)})
    convert(path, tmp_path / "out", format="bf16")


def test_frequencies_of_ones_scale_nothing(model, tmp_path):
    path, _ = model(tensors={"rope_freqs.weight": ones(HEAD_DIM // 2)})
    convert(path, tmp_path / "out", format="bf16")
    assert "rope_scaling" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.BF16], ids=lambda kind: kind.name)
def test_nan_in_one_block(model, tmp_path, kind):
    """Found by the scales of the blocks, or by the values themselves."""
    path, _ = model(qtype=kind)
    tensor = GGUFFile(path).tensors["blk.1.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(tensor.offset + 5 * tensor.row_bytes)
        file.write(b"\xff\x7f")  # NaN in fp16 and in bf16
    refuses(path, r"tensor blk\.1\.ffn_up\.weight of .*holds NaN", tmp_path)
    with pytest.raises(BrokenFileError):
        convert(path, tmp_path / "out")


def test_wrong_magic(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    refuses(path, r"is not a GGUF file: it begins with b'GGML', expected b'GGUF'; download it again", tmp_path)
    path.write_bytes(b"")
    refuses(path, r"model\.gguf is empty: download it again", tmp_path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuses(path, r"model\.gguf is a Git LFS pointer, not the GGUF file itself: fetch that", tmp_path)


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.02, 0.001])
def test_truncated(model, tmp_path, kept):
    path, _ = model()
    os.truncate(path, int(path.stat().st_size * kept))
    refuses(path, "is truncated: tensor|header cannot be read", tmp_path)


def test_unknown_tensor_type(model, tmp_path):
    path, _ = model()
    raw = bytearray(path.read_bytes())
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    raw[at : at + 4] = (250).to_bytes(4, "little")
    path.write_bytes(raw)
    refuses(path, "token_embd.weight has unknown type 250", tmp_path)


@pytest.fixture
def tokenizer(model, tmp_path) -> Callable[..., Tokenizer]:
    def build(**metadata) -> Tokenizer:
        rows = len(metadata.get("tokens", TOKENS))
        path, _ = model(
            metadata={"vocab_size": rows, **{f"tokenizer.ggml.{key}": value for key, value in metadata.items()}},
            tensors={"token_embd.weight": ones(rows, HIDDEN)},
        )
        convert(path, tmp_path / "out", format="bf16", overwrite=True)
        return Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))

    return build


def ids(*tokens: str) -> list[int]:
    return [TOKENS.index(token) for token in tokens]


def test_byte_level_tokenizer(tokenizer):
    smollm = tokenizer()
    assert smollm.encode("hello hello").ids == ids("hello", "Ġhello")
    assert smollm.encode("12").ids == ids("1", "2"), "smollm cuts digits apart before the merge `1 2`"
    assert smollm.encode("<|im_start|>he<tool>").ids == ids("<|im_start|>", "he", "<tool>")
    assert smollm.decode(ids("<|im_start|>", "he", "<tool>")) == "he<tool>"
    for text in ("naïve 日本 🙂", "  two  spaces\n\n\ttab", "<|im_end|> x 3.14"):
        assert smollm.decode(smollm.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer(pre="gpt-2").encode("12").ids == ids("12")
    assert tokenizer(pre="llama-bpe").encode("12").ids == ids("<|im_start|>", "12"), "llama-bpe begins with bos by default"
    assert tokenizer(pre="llama-bpe", add_bos_token=False).encode("12").ids == ids("12")
    assert tokenizer(pre="qwen2").encode("12").ids == ids("1", "2")


def test_bos_and_eos_are_added_once(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    both = tokenizer(add_bos_token=True, add_eos_token=True)
    expected = ids("<|im_start|>", "hello", "<|im_end|>")
    assert both.encode("hello").ids == expected
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("hello")["input_ids"] == expected


def test_sentencepiece_tokenizer(tokenizer, tmp_path):
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc"]
    scores = dict(zip(pieces, [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0], strict=True))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<tool>"]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(pieces), kind.USER_DEFINED]
    built = tokenizer(
        model="llama", pre=None, merges=None, tokens=tokens, token_type=types, scores=[scores.get(t, 0.0) for t in tokens],
        bos_token_id=None, eos_token_id=None, unknown_token_id=None, padding_token_id=None,
    )  # fmt: skip

    def split(text: str) -> list[str]:
        return [tokens[i] for i in built.encode(text).ids]

    # By the best score first: bc (-1); then ▁a (-3) goes before abc (-4).
    assert split("abc") == ["<s>", "▁a", "bc"]
    assert split("ab") == ["<s>", "▁", "ab"]
    assert split("a b") == ["<s>", "▁a", "▁", "b"]
    assert split("é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert split("a<tool>b") == ["<s>", "▁a", "<tool>", "▁", "b"]
    assert built.decode(built.encode("a bé").ids) == "a bé"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
