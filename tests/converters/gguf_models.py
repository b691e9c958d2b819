"""Tiny random models of transformers, written as GGUF files the way llama.cpp writes them, and what must come back."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf_vocabularies import add_value
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor

from w8a8_converters.convert import convert
from w8a8_converters.gguf.source import GGUFSource

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello", "Ġhello", "12", "<tool>"]
TYPES = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 4) + [gguf.TokenType.USER_DEFINED]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
VOCAB = len(TOKENS)

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

# Of models with plain attention and a gated MLP: Hugging Face name -> GGUF name.
DENSE_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{}.input_layernorm.weight": "blk.{}.attn_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blk.{}.attn_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "blk.{}.attn_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "blk.{}.attn_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "blk.{}.attn_output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "blk.{}.ffn_up.weight",
    "model.layers.{}.mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}
QKV_BIAS_NAMES = {f"model.layers.{{}}.self_attn.{name}_proj.bias": f"blk.{{}}.attn_{name}.bias" for name in "qkv"}

# GGUF name, fp32 values; or GGUF name, packed rows, their type
Written = Iterable[tuple[str, Tensor] | tuple[str, np.ndarray, Q]]


def random_model(config: Any, seed: int = 0) -> Any:
    """A model of transformers, fp32, whose values bf16 holds; each row of a matrix begins with its number.

    Vectors are multiples of 1/64 in [-1, 1], so that adding 1 and taking it off again is exact.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randint(-64, 65, parameter.shape, generator=generator) / 64)
                continue
            parameter.copy_((0.05 * torch.randn(parameter.shape, generator=generator)).bfloat16())
            if "experts" not in name:  # 256 numbers of rows are exact in bf16, and small enough for the logits
                rows = torch.arange(parameter.shape[0]) % 256 / 256
                parameter[..., 0] = rows.reshape(-1, *[1] * (parameter.dim() - 2))
    return model.eval()


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Written) -> Path:
    """A GGUF file, of F32 tensors where no other type is given.

    Metadata under the architecture's name are given without it. None leaves out what TOKENIZER has.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**TOKENIZER, **{_full(architecture, key): value for key, value in metadata.items()}}.items():
        if value is not None:
            add_value(writer, key, value)
    for name, values, *kind in tensors:
        if kind:
            writer.add_tensor(name, values, raw_dtype=kind[0])
        else:
            writer.add_tensor(name, np.ascontiguousarray(values.detach().float().numpy()), raw_dtype=Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check_architecture(
    tmp_path: Path,
    model: Any,
    architecture: str,
    metadata: Mapping[str, Any],
    to_gguf: Callable[[dict[str, Tensor]], Written],
    inexact: tuple[str, ...] = (),
    skip_logits: bool = False,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
) -> GGUFSource:
    """Names, shapes, order and values of the source equal the model's checkpoint; the converted folder gives its logits.

    Args:
        model: of `random_model`.
        architecture, metadata: of the file, as in `write_gguf`.
        to_gguf: from the checkpoint's tensors, by name, to the file's.
        inexact: ends of names whose values the file holds as a function of them: within 1e-6.
        skip_logits: where transformers has no such model. Say why beside it.
        extra: tensors of the checkpoint that transformers' class does not load, as those of MTP layers.
    """
    from transformers import AutoModelForCausalLM

    model.save_pretrained(tmp_path / "reference")
    expected = {}
    for file in sorted((tmp_path / "reference").glob("*.safetensors")):
        expected |= load_file(file)
    expected |= extra
    path = write_gguf(tmp_path / "model.gguf", architecture, metadata, to_gguf(dict(expected)))

    source = GGUFSource(path)
    assert set(source.tensors) == set(expected)
    for name, values in expected.items():
        got = source.rows(name, 0, len(values))
        assert source.tensors[name].shape == tuple(values.shape) == tuple(got.shape), name
        if name.endswith(inexact or "no name"):
            torch.testing.assert_close(got, values, rtol=1e-6, atol=1e-6, msg=name)
        else:
            assert torch.equal(got, values), name
        # By blocks of rows, as the converter reads them.
        middle = len(values) // 2
        blocks = [source.rows(name, 0, middle), source.rows(name, middle, len(values))]
        assert torch.equal(torch.cat(blocks), got), name

    convert(path, tmp_path / "converted", format="bf16")
    if skip_logits:
        return source
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "converted", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    # transformers joins the experts before it looks.
    unexpected, left_out = ({name.partition(".experts.")[0] for name in names} for names in (info["unexpected_keys"], extra))
    assert unexpected <= left_out  # a class may say that it expects them
    assert type(again) is type(model)
    ids = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, got = model(ids).logits, again.eval()(ids).logits
    assert wanted.std() > 0.01, "logits that say nothing"
    if inexact:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(got, wanted)
    return source


def converted_config(tmp_path: Path) -> dict[str, Any]:
    """The config.json that `check_architecture` has written."""
    return json.loads((tmp_path / "converted" / "config.json").read_text())


def renamed(names: Mapping[str, str], layers: int) -> dict[str, str]:
    """Hugging Face name -> GGUF name. Names that contain `{}` stand for one of every layer."""
    return {
        theirs.format(layer): ours.format(layer)
        for theirs, ours in names.items()
        for layer in (range(layers) if "{}" in theirs else range(1))
    }


def renaming(names: Mapping[str, str], layers: int) -> Callable[[dict[str, Tensor]], Written]:
    """The `to_gguf` of a model whose tensors a file holds as they are."""
    full = renamed(names, layers)
    return lambda tensors: [(full[name], values) for name, values in tensors.items()]


def interleaved(rows: Tensor, heads: int, rotary: int | None = None) -> Tensor:
    """As llama.cpp stores q and k of some models: row i of a head's rotary half beside row i of its other half."""
    dim = len(rows) // heads
    rotary = dim if rotary is None else rotary
    stored = rows.clone()
    for head in range(heads):
        for i in range(rotary // 2):
            stored[head * dim + 2 * i] = rows[head * dim + i]
            stored[head * dim + 2 * i + 1] = rows[head * dim + rotary // 2 + i]
    return stored


def _full(architecture: str, key: str) -> str:
    return key if key.startswith(("tokenizer.", "general.", "split.")) else f"{architecture}.{key}"
