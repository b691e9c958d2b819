"""`vllm-w8a8 inspect`: what it says of good checkpoints, of unusual and of broken ones."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize
from gguf_models import TOKENIZER, VOCAB
from gguf_vocabularies import add_value
from safetensors.torch import load_file
from typer.testing import CliRunner

from vllm_w8a8_plugin.cli import app
from w8a8_converters.checkpoint import HuggingFaceSource
from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf import values
from w8a8_converters.gguf.source import GGUFSource
from w8a8_converters.inspect import Inspection, inspect

ROOTS = os.pathsep.join(path for path in sys.path if path)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 256, 4, 2, 16, 2
LLAMA = {
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": HEAD_DIM,
}
SHAPES = {
    "attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
INT8_VALUES = LAYERS * sum(rows * columns for rows, columns in SHAPES.values())
INT8_ROWS = LAYERS * sum(rows for rows, _ in SHAPES.values())

Tensors = dict[str, tuple[tuple[int, ...], Q]]


def llama_tensors(matrices: Q = Q.Q8_0) -> Tensors:
    tensors: Tensors = {
        "token_embd.weight": ((VOCAB, HIDDEN), Q.F16),
        "output.weight": ((VOCAB, HIDDEN), matrices),
        "output_norm.weight": ((HIDDEN,), Q.F32),
    }
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}.weight": (shape, matrices) for name, shape in SHAPES.items()}
        tensors |= {f"blk.{i}.{name}.weight": ((HIDDEN,), Q.F32) for name in ("attn_norm", "ffn_norm")}
    return tensors


def write_gguf(path: Path, tensors: Tensors, metadata: Mapping[str, Any], architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, (shape, kind) in tensors.items():
        values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        if kind in (Q.Q8_K, Q.Q8_1):  # the library quantizes none of these
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = np.zeros((shape[0], shape[1] // block * size), dtype=np.uint8)
        else:
            data = quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata(architecture: str = "llama", **other: Any) -> dict[str, Any]:
    return {f"{architecture}.{key}": value for key, value in LLAMA.items()} | TOKENIZER | other


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON object."""
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def assert_said(problems: list[str], *expected: str) -> None:
    """Each of `expected` is part of one problem, and there are no others."""
    assert [sum(part in problem for problem in problems) for part in expected] == [1] * len(expected), problems
    assert len(problems) == len(expected), problems
    assert not any("\n" in problem for problem in problems)


@pytest.fixture
def llama(checkpoint) -> Callable[..., Path]:
    """A Hugging Face folder of these sizes."""

    def write(tensors: dict | None = None, config: dict | None = None, **options) -> Path:
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        merged = {
            "model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
            "model.norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": torch.ones(VOCAB, HIDDEN),
        }
        for i in range(LAYERS):
            for name, shape in zip(names, SHAPES.values(), strict=True):
                block = "self_attn" if name in names[:4] else "mlp"
                merged[f"model.layers.{i}.{block}.{name}.weight"] = torch.ones(shape)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                merged[f"model.layers.{i}.{norm}.weight"] = torch.ones(HIDDEN)
        merged = {name: tensor.to(torch.bfloat16) for name, tensor in merged.items()}
        sizes = {"hidden_size": HIDDEN, "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
        return checkpoint(tensors={**merged, **(tensors or {})}, config={**sizes, **(config or {})}, **options)

    return write


def test_a_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata(**{"tokenizer.chat_template": "{{ messages }}"}))
    code, found = run(path)
    assert code == 0
    assert found["problems"] == []
    assert found["broken"] is False
    assert found["format"] == "gguf"
    assert found["files"] == [{"name": "model.gguf", "bytes": path.stat().st_size}]
    assert (found["architecture"], found["model_type"]) == ("llama", "llama")
    assert found["quantization"] is None
    assert found["parameters"] == INT8_VALUES + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    q8 = (INT8_VALUES + VOCAB * HIDDEN) // 32 * 34
    norms = (2 * LAYERS + 1) * HIDDEN * 4
    assert found["tensor_types"] == [
        {"type": "Q8_0", "tensors": LAYERS * len(SHAPES) + 1, "bytes": q8},
        {"type": "F16", "tensors": 1, "bytes": VOCAB * HIDDEN * 2},
        {"type": "F32", "tensors": 2 * LAYERS + 1, "bytes": norms},
    ]
    assert (found["layers"], found["context_length"]) == (LAYERS, 256)
    assert found["tokenizer"] == {"kind": "gpt2", "pre": "gpt-2", "tokens": VOCAB}
    assert found["chat_template"] is True


def test_keys_of_the_json_are_stable(tmp_path):
    code, found = run(write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata()))
    assert code == 0
    assert list(found) == [
        "path", "format", "files", "architecture", "model_type", "quantization", "parameters", "tensor_types", "layers",
        "context_length", "tokenizer", "chat_template", "convert", "memory", "notes", "problems", "broken",
    ]  # fmt: skip
    assert list(found["convert"]) == ["int8", "kept", "hadamard", "output_bytes", "tensor_parallel"]
    assert list(found["memory"][0]) == ["tensor_parallel", "weight_bytes", "kv_bytes_per_token", "problem"]
    assert all(f"{key}:" in Inspection.__doc__ for key in found)


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_what_convert_would_make_is_what_it_makes(tmp_path, llama, kind):
    path = llama() if kind == "folder" else write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata())
    would = inspect(path).convert
    report = convert(path, tmp_path / "out")
    assert would["int8"] == {"layers": len(report.layers), "parameters": INT8_VALUES, "bytes": INT8_VALUES + 4 * INT8_ROWS}
    assert {row["block"]: row["layers"] for row in would["hadamard"]} == report.hadamard_blocks()
    written = load_file(tmp_path / "out" / "w8a8.safetensors")
    assert would["output_bytes"] == sum(tensor.nbytes for tensor in written.values())
    assert sorted(would["kept"], key=lambda row: row["what"]) == [
        {"what": "embeddings and projectors", "tensors": 1, "bytes": VOCAB * HIDDEN * 2},
        {"what": "lm_head", "tensors": 1, "bytes": VOCAB * HIDDEN * 2},
        {"what": "norms", "tensors": 2 * LAYERS + 1, "bytes": (2 * LAYERS + 1) * HIDDEN * 2},
    ]


def test_memory_of_each_rank(llama):
    """Blocks of 32 in o_proj (64 inputs, cut into 2) and down_proj (256 inputs, cut into 8), 4 attention heads, 2 of keys."""
    found = inspect(llama())
    assert found.problems == []
    assert found.convert["tensor_parallel"] == [1, 2]
    one, two, four, eight = found.memory
    vocabulary = -(-VOCAB // 64) * 64
    norms = (2 * LAYERS + 1) * HIDDEN * 2
    row_scales = 4 * LAYERS * 2 * HIDDEN  # of o_proj and down_proj: every rank has all of them
    other_scales = 4 * INT8_ROWS - row_scales
    assert one["weight_bytes"] == INT8_VALUES + 4 * INT8_ROWS + 2 * vocabulary * HIDDEN * 2 + norms
    assert two["weight_bytes"] == (INT8_VALUES + other_scales + 2 * vocabulary * HIDDEN * 2) // 2 + row_scales + norms
    assert (one["kv_bytes_per_token"], two["kv_bytes_per_token"]) == (
        LAYERS * 2 * KV_HEADS * HEAD_DIM * 2,
        LAYERS * 2 * KV_HEADS * HEAD_DIM,
    )
    assert (four["weight_bytes"], four["kv_bytes_per_token"]) == (None, None)
    assert (
        four["problem"] == "model.layers.0.self_attn.o_proj has 64 inputs in Hadamard blocks of 32, which cannot be cut into 4"
    )
    assert eight["problem"] == "4 attention heads are not divided by 8"


def test_memory_of_degrees_that_fit(llama):
    """Three heads with blocks of 16, each rank with one of them and a third of 240 inner values."""
    tensors: dict[str, torch.Tensor] = {}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (48, HIDDEN),
            "self_attn.k_proj": (48, HIDDEN),
            "self_attn.v_proj": (48, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 48),
            "mlp.gate_proj": (240, HIDDEN),
            "mlp.up_proj": (240, HIDDEN),
            "mlp.down_proj": (HIDDEN, 240),
        }.items():
            tensors[f"{layer}.{name}.weight"] = torch.ones(shape, dtype=torch.bfloat16)
    found = inspect(llama(tensors, {"num_attention_heads": 3, "num_key_value_heads": 3}))
    assert found.convert["tensor_parallel"] == [1, 3]
    assert [row["tensor_parallel"] for row in found.memory] == [1, 2, 3, 4, 8]
    assert [row["problem"] is None for row in found.memory] == [True, False, True, False, False]
    assert found.memory[2]["kv_bytes_per_token"] == LAYERS * 2 * HEAD_DIM * 2


def test_fewer_heads_of_keys_than_ranks(llama):
    tensors = {
        f"model.layers.{i}.self_attn.o_proj.weight": torch.ones(HIDDEN, 256, dtype=torch.bfloat16) for i in range(LAYERS)
    } | {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(256, HIDDEN, dtype=torch.bfloat16) for i in range(LAYERS)}
    one, two, four, eight = inspect(llama(tensors, {"num_attention_heads": 16})).memory
    assert [row["problem"] for row in (one, two, four, eight)] == [None] * 4
    assert four["kv_bytes_per_token"] == eight["kv_bytes_per_token"] == LAYERS * 2 * HEAD_DIM * 2
    keys = LAYERS * 2 * KV_HEADS * HEAD_DIM * (HIDDEN + 4)  # codes and scales of k and v, in two parts from two ranks on
    row_scales = 4 * LAYERS * 2 * HIDDEN
    norms = (2 * LAYERS + 1) * HIDDEN * 2
    rest = one["weight_bytes"] - keys - row_scales - norms
    assert eight["weight_bytes"] == rest // 8 + keys // 2 + row_scales + norms


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, 1 * 2 * 2 * 16 * 2),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 2 * 2 * 2 * 16 * 2),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 8}, 2 * 40 * 2),
        ({"num_kv_shared_layers": 1}, 1 * 2 * 2 * 16 * 2),
        ({"mamba_d_state": 16}, None),
        ({"hybrid_override_pattern": "M*"}, None),
        ({"num_hidden_layers": None}, None),
        ({"head_dim": None, "num_attention_heads": 2}, 2 * 2 * 2 * 32 * 2),
    ],
    ids=str,
)
def test_kv_cache(llama, config, expected):
    assert inspect(llama(config=config)).memory[0]["kv_bytes_per_token"] == expected


def test_a_folder(llama):
    src = llama(shards=2, tied=True, tensors={"lm_head.weight": None})
    (src / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    pieces = {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]}
    tokenizer = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "pre_tokenizer": pieces}
    (src / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = inspect(src)
    assert found.problems == []
    assert [file["name"] for file in found.files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert (found.architecture, found.model_type) == ("LlamaForCausalLM", "llama")
    assert found.parameters == INT8_VALUES + VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    assert [row["type"] for row in found.tensor_types] == ["BF16"]
    assert (found.layers, found.context_length) == (LAYERS, 64)
    assert found.tokenizer == {"kind": "BPE", "pre": "Split, ByteLevel", "tokens": 2}
    assert found.chat_template is True


def test_any_part_of_a_split_file(tmp_path):
    items = list(llama_tensors().items())
    for i in range(3):
        part = dict(items[i::3])
        split = {"split.no": i, "split.count": 3, "split.tensors.count": len(items)}
        write_gguf(tmp_path / f"model-{i + 1:05}-of-00003.gguf", part, metadata(**split) if i == 0 else split)
    for i in (1, 2, 3):
        found = inspect(tmp_path / f"model-{i:05}-of-00003.gguf")
        assert found.problems == []
        assert [file["name"] for file in found.files] == [f"model-{j:05}-of-00003.gguf" for j in (1, 2, 3)]
        assert found.convert["int8"]["layers"] == LAYERS * len(SHAPES)
    (tmp_path / "model-00003-of-00003.gguf").unlink()
    code, found = run(tmp_path / "model-00001-of-00003.gguf")
    assert code == 1
    assert "model-00003-of-00003.gguf" in found["problems"][0]


def test_kept_layers_by_what_they_are(llama):
    def matrix(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16)

    extra = {
        "model.layers.0.mlp.gate.weight": matrix(4, HIDDEN),
        "model.layers.0.linear_attn.in_proj_qkvz.weight": matrix(HIDDEN, HIDDEN),
        "model.layers.0.mixer.in_proj.weight": matrix(HIDDEN, HIDDEN),
        "visual.blocks.0.attn.qkv.weight": matrix(HIDDEN, HIDDEN),
        "mtp.layers.0.mlp.up_proj.weight": matrix(HIDDEN, HIDDEN),
        "model.layers.0.self_attn.q_proj.bias": matrix(HIDDEN),
        "score.weight": matrix(2, HIDDEN),
    }
    kept = {row["what"]: row["tensors"] for row in inspect(llama(extra)).convert["kept"]}
    assert kept == {
        "embeddings and projectors": 1,
        "lm_head": 1,
        "norms": 2 * LAYERS + 1,
        "routers": 1,
        "recurrent layers": 2,
        "vision and audio": 1,
        "MTP heads": 1,
        "biases and other vectors": 1,
        "others": 1,
    }


def fp8(config: dict | None = None, **other) -> dict:
    names = [f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS)]
    tensors = {f"{name}.weight": torch.ones(HIDDEN, INNER).to(torch.float8_e4m3fn) for name in names}
    scales = {f"{name}.weight_scale": torch.ones(1) for name in names}
    return {
        "tensors": {**tensors, **scales, **other},
        "config": {"quantization_config": {"quant_method": "fp8"}, **(config or {})},
    }


def test_a_quantized_checkpoint(llama):
    code, found = run(llama(**fp8()))
    assert code == 0
    assert found["quantization"] == "fp8"
    assert "convert it with --from-quantized" in found["notes"]
    assert found["parameters"] == INT8_VALUES + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    assert found["convert"]["int8"]["layers"] == LAYERS
    plain = {row["what"]: row["tensors"] for row in found["convert"]["kept"]}
    assert plain["projections that the source left unquantized"] == LAYERS * (len(SHAPES) - 1)


@pytest.mark.parametrize(
    ("method", "said", "where"),
    [
        ("bitsandbytes", "quantized by bitsandbytes, which is not dequantized here", "problems"),
        ("w8a8", "it is W8A8 already: serve it as it is", "notes"),
    ],
)
def test_a_checkpoint_that_is_quantized_otherwise(llama, method, said, where):
    """What is W8A8 has nothing wrong with it."""
    code, found = run(llama(config={"quantization_config": {"quant_method": method}}))
    assert code == (where == "problems")
    assert [said in message for message in found[where]] == [True]
    assert len(found["problems"]) == code
    assert (found["quantization"], found["layers"], found["convert"], found["parameters"]) == (method, LAYERS, None, None)
    assert found["tensor_types"]


def test_an_unknown_architecture(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata("starling"), "starling")
    code, found = run(path)
    assert code == 1
    assert found["broken"] is False
    assert [("'starling', which is not known" in problem) for problem in found["problems"]] == [True]
    assert (found["architecture"], found["model_type"], found["layers"]) == ("starling", None, LAYERS)
    assert found["context_length"] == 256
    assert found["parameters"] == INT8_VALUES + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    assert found["convert"] is None


UNKNOWN = r"architecture StarlingForCausalLM is known neither to vLLM \S+ nor to transformers \S+, so that it cannot be served"


def test_an_architecture_that_vllm_does_not_know(llama):
    pytest.importorskip("vllm", reason="vLLM is not installed: nothing can be said of what it serves")
    src = llama(config={"architectures": ["StarlingForCausalLM"]})
    code, found = run(src)
    assert (code, found["broken"]) == (1, False)
    (problem,) = found["problems"]
    assert re.match(UNKNOWN, problem)
    assert found["convert"], "what convert would do is said nevertheless"
    config = json.loads((src / "config.json").read_text()) | {"auto_map": {"AutoModel": "x.y"}}
    (src / "config.json").write_text(json.dumps(config))
    code, found = run(src)
    assert (code, found["problems"]) == (0, [])
    assert [re.match(UNKNOWN, note) is not None for note in found["notes"] if "--trust-remote-code" in note] == [True]


@pytest.mark.parametrize(
    "architectures",
    [
        ["LlamaForCausalLM"],
        ["StarlingForCausalLM", "LlamaForCausalLM"],
        ["LlamaForTokenClassification"],  # made of the generating one
        ["VitDetModel"],  # of transformers alone
        [],
        [7],
        "LlamaForCausalLM",
    ],
    ids=str,
)
def test_architectures_that_are_no_problem(llama, architectures):
    assert run(llama(config={"architectures": architectures}))[1]["problems"] == []


def test_vllm_is_not_imported_to_know_architectures(llama):
    code = (
        "import sys\nfrom vllm_w8a8_plugin.cli import app\n"
        f"try:\n    app(['inspect', {str(llama())!r}])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'vllm', 'transformers'} & sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": ROOTS}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def test_every_problem_is_named(tmp_path):
    """The architecture, the tokenizer, and each type that cannot be dequantized."""
    tensors = llama_tensors()
    for i in range(LAYERS):
        tensors[f"blk.{i}.ffn_down.weight"] = ((HIDDEN, INNER), Q.Q8_K)
    other = metadata("starling", **{"tokenizer.ggml.pre": "no-such-rule"})
    code, found = run(write_gguf(tmp_path / "model.gguf", tensors, other, "starling"))
    assert code == 1
    problems = found["problems"]
    assert len(problems) == 3
    assert any("'starling'" in problem for problem in problems)
    assert any("no-such-rule" in problem for problem in problems)
    assert any("blk.0.ffn_down.weight has type Q8_K" in p and p.endswith("(and 1 more of this type)") for p in problems)
    assert {"type": "Q8_K", "tensors": 2, "bytes": 2 * HIDDEN * 292} in found["tensor_types"]


def test_a_type_alone(tmp_path):
    tensors = {**llama_tensors(), "blk.0.ffn_down.weight": ((HIDDEN, INNER), Q.Q8_K)}
    code, found = run(write_gguf(tmp_path / "model.gguf", tensors, metadata()))
    assert code == 1
    assert len(found["problems"]) == 1
    assert "blk.0.ffn_down.weight has type Q8_K" in found["problems"][0]


def test_every_problem_of_tensors_and_metadata_is_named_and_convert_raises_the_first(tmp_path):
    tensors = llama_tensors() | {
        "blk.0.attn_q.weight": ((HEADS * HEAD_DIM, 2 * HIDDEN), Q.Q8_0),
        "blk.1.ffn_norm.weight": ((INNER,), Q.F32),
        "blk.0.attn_output.weight": ((HIDDEN, HEADS * HEAD_DIM), Q.Q8_1),
        "blk.0.ffn_down.weight": ((HIDDEN, INNER), Q.Q8_K),
        "blk.1.ffn_down.weight": ((HIDDEN, INNER), Q.Q8_K),
        "blk.0.extra.weight": ((2, 32), Q.F32),
        "extra.weight": ((2, 32), Q.F32),
    }
    for missing in ("blk.0.attn_norm.weight", "blk.1.attn_k.weight"):
        del tensors[missing]
    other = metadata(**{"llama.clamp": 1, "llama.residual_scale": 0.5, "tokenizer.ggml.pre": "no-such-rule"})
    path = write_gguf(tmp_path / "model.gguf", tensors, other)
    code, found = run(path)
    assert (code, found["broken"], found["convert"]) == (1, False, None)
    assert_said(
        found["problems"],
        "metadata llama.clamp, llama.residual_scale is not understood",
        "2 tensors are unknown for architecture llama: blk.0.extra.weight, extra.weight;",
        "lacks 2 tensors: blk.0.attn_norm.weight, blk.1.attn_k.weight;",
        "tensor blk.0.attn_q.weight has shape [64, 128], the metadata ask for [64, 64] "
        "(and 1 more have other shapes: blk.1.ffn_norm.weight)",
        "tensor blk.0.attn_output.weight has type Q8_1, which",
        "tensor blk.0.ffn_down.weight has type Q8_K, which",
        "no-such-rule",
    )
    with pytest.raises(ConversionError) as error:
        convert(path, tmp_path / "out")
    assert str(error.value) == next(problem for problem in found["problems"] if "llama.clamp" in problem)
    assert not (tmp_path / "out").exists()


def test_tensors_are_compared_where_the_metadata_give_no_config(tmp_path):
    """Which keys nothing reads cannot be told then."""
    tensors = llama_tensors()
    del tensors["blk.1.attn_k.weight"]
    other = metadata(**{"llama.rope.scaling.type": "spiral", "llama.clamp": 1})
    _, found = run(write_gguf(tmp_path / "model.gguf", tensors, other))
    assert_said(found["problems"], "rope scaling 'spiral' is not supported", "lacks 1 tensors: blk.1.attn_k.weight;")


def test_what_several_checks_would_say_is_said_once(tmp_path):
    """Without it there are neither shapes nor a config."""
    other = metadata()
    del other["llama.attention.head_count"]
    _, found = run(write_gguf(tmp_path / "model.gguf", llama_tensors(), other))
    assert_said(found["problems"], "lacks the metadata llama.attention.head_count")


def test_a_model_type_that_cannot_be_quantized(llama):
    found = inspect(llama(config={"model_type": "gpt2"}))
    assert (found.broken, len(found.problems), found.convert) == (False, 1, None)
    assert found.parameters
    assert "stores transposed weights" in found.problems[0]


@pytest.mark.parametrize("size", [0, 3, 20, 500, -1])
def test_a_broken_gguf_file(tmp_path, size):
    path = write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata())
    os.truncate(path, size if size >= 0 else path.stat().st_size - 5000)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 1
    problems = [line for line in result.output.splitlines() if line.startswith("problem: ")]
    assert len(problems) == 1
    assert "model.gguf" in problems[0]


def test_every_broken_file_of_a_folder_is_named(llama):
    src = llama(shards=3)
    for number in (1, 3):
        path = src / f"model-0000{number}-of-00003.safetensors"
        os.truncate(path, path.stat().st_size - 10)
    (src / "tokenizer.json").write_text("{")
    code, found = run(src)
    assert code == 1
    assert found["broken"] is True
    assert len(found["problems"]) == 3
    for name in (
        "model-00001-of-00003.safetensors is truncated",
        "model-00003-of-00003.safetensors is trunc",
        "tokenizer.json",
    ):
        assert any(name in problem for problem in found["problems"])
    assert (found["architecture"], found["model_type"], found["layers"]) == ("LlamaForCausalLM", "llama", LAYERS)
    assert found["tensor_types"]  # of the file that can be read


def test_a_missing_file(llama):
    src = llama(shards=3)
    (src / "model-00002-of-00003.safetensors").unlink()
    code, found = run(src)
    assert (code, found["broken"]) == (1, True)
    assert ["lacks 1 of the 3 files" in problem for problem in found["problems"]] == [True]


def test_no_checkpoint_at_all(tmp_path):
    code, found = run(tmp_path / "nowhere")
    assert (code, found["format"], found["broken"]) == (1, None, True)
    assert "nowhere does not exist" in found["problems"][0]
    (tmp_path / "link").symlink_to("nowhere")
    code, found = run(tmp_path / "link")
    assert (code, found["format"], found["broken"]) == (1, None, True)
    assert "link is a link to nowhere, which does not exist" in found["problems"][0]
    code, found = run(tmp_path)
    assert (code, found["format"], found["broken"]) == (1, None, False)
    assert "has no config.json" in found["problems"][0]


def test_a_folder_of_gguf_files(tmp_path):
    write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata())
    code, found = run(tmp_path)
    assert (code, found["format"]) == (1, "gguf")
    assert found["problems"][0].endswith(f"give one of them, as {tmp_path / 'model.gguf'}")


def test_tables(llama, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, ["inspect", str(llama())])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for expected in (
        "architecture LlamaForCausalLM",
        "context length 64",
        "chat template no",
        "as they are: lm_head 1 34.05 kB",
        "tensor parallelism that fits: 1, 2",
        "8 no: 4 attention heads are not divided by 8",
        f"int8 layers {LAYERS * len(SHAPES)} {(INT8_VALUES + 4 * INT8_ROWS) / 1000:.2f} kB",
    ):
        assert expected in lines


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_no_weights_are_read(tmp_path, llama, kind, monkeypatch):
    path = llama() if kind == "folder" else write_gguf(tmp_path / "model.gguf", llama_tensors(), metadata())

    def fail(*_):
        raise AssertionError("weights were read")

    for source in (HuggingFaceSource, GGUFSource):
        monkeypatch.setattr(source, "rows", fail)
    monkeypatch.setattr(values, "dequantize_rows", fail)
    assert inspect(path).problems == []
