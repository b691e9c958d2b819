"""Engines on a GPU: compile and CUDA graphs on."""

import importlib
import json
import pkgutil
import re
from pathlib import Path
from random import Random

import pytest
import torch
from engines import run_engine
from models import random_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

# Qwen3-0.6B's layer.
LAYER = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
# GPT-2's initialization: each layer adds its share of the whole model's output to the residual stream.
RESIDUAL_GAIN = (2 * 28) ** -0.5
STEPS = 8


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One decoder layer whose logits are the layer's output after the final norm: the lm_head is the identity."""
    from safetensors.torch import load_file, save_file

    hidden = LAYER["hidden_size"]
    folder = random_qwen3(
        tmp_path_factory.mktemp("gpu") / "layer", residual_gain=RESIDUAL_GAIN, num_hidden_layers=1, vocab_size=hidden, **LAYER
    )
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = torch.eye(hidden, dtype=torch.bfloat16)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def layer_outputs(folder: Path, **engine) -> torch.Tensor:
    """[prompts, steps, hidden]: the layer's outputs, one forced token after another, so that all modes see the same input."""
    prompts = [[(p * 37 + i * i) % 1024 for i in range(20 + p)] for p in range(3)]
    run = run_engine(
        folder,
        prompts,
        engine={
            "skip_tokenizer_init": True,
            "logprobs_mode": "raw_logits",
            "max_logprobs": 1024,
            "gpu_memory_utilization": 0.3,
            **engine,
        },
        sampling={
            "max_tokens": STEPS,
            "temperature": 0.0,
            "logprobs": 1024,
            "detokenize": False,
            "allowed_token_ids": [5],
            "ignore_eos": True,
        },
    )
    assert ("W8A8 linear layers run on triton" in run.log) == (engine.get("quantization") == "w8a8")
    return torch.tensor([[[step[i] for i in range(1024)] for step in a.logprobs] for a in run.answers])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest relative L2 distance of a step's output."""
    return ((a - b).norm(dim=-1) / a.norm(dim=-1)).max().item()


def test_layer_output_eager_against_graphs(one_layer: Path) -> None:
    """As served by default: Inductor, fusion of norms into the quantizer, CUDA graphs.

    Eager mode and graphs differ in the last bit of attention and, unfused, of the norms; each such bit before a quantizer can
    move a code by one.
    """
    eager = layer_outputs(one_layer, quantization="w8a8", enforce_eager=True)
    graphs = layer_outputs(one_layer, quantization="w8a8", enforce_eager=False)
    unquantized = layer_outputs(one_layer, enforce_eager=True)
    print(f"relative L2 from eager: graphs {distance(eager, graphs):.2e}, unquantized {distance(eager, unquantized):.2e}")
    assert distance(eager, graphs) <= 1e-2
    assert distance(eager, graphs) < distance(eager, unquantized), "graphs change more than quantization does"


def qwen3_0_6b(folder: Path, layers: int) -> Path:
    """Write the config.json of Qwen3-0.6B with so many layers; weights are dummies."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **LAYER,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_qwen3_0_6b_shapes_generate(tmp_path: Path) -> None:
    """28 layers of dummy weights, compile and CUDA graphs on."""
    run = run_engine(
        qwen3_0_6b(tmp_path, layers=28),
        [list(range(1, n)) for n in (2, 18, 300)],
        engine={
            "quantization": "w8a8",
            "enforce_eager": False,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "gpu_memory_utilization": 0.3,
            "max_model_len": 1024,
            "max_num_seqs": 64,
        },
        sampling={"max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
    )
    assert [len(a.token_ids) for a in run.answers] == [16, 16, 16]
    assert "W8A8 linear layers run on triton" in run.log
    assert "Capturing CUDA graphs" in run.log or "Graph capturing finished" in run.log


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_no_request_compiles(enforce_eager: bool, tmp_path: Path) -> None:
    """Requests of all lengths, alone and together, after a start from empty caches.

    Nothing is left to compile even for vLLM's own warm-up, which would hide gaps of ours at the sizes that it runs.
    """
    random = Random(0)
    requests = 200
    prompts = [[random.randrange(1, 100_000) for _ in range(random.randint(1, 1500))] for _ in range(requests)]
    sampling = [
        {"max_tokens": random.randint(1, 32), "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        for _ in range(requests)
    ]
    together = []
    while sum(together) < requests:
        together.append(min(random.randint(1, 24), requests - sum(together)))
    caches = {"TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    run = run_engine(
        qwen3_0_6b(tmp_path, layers=4),
        prompts,
        engine={
            "quantization": "w8a8",
            "enforce_eager": enforce_eager,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "gpu_memory_utilization": 0.3,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 64,
        },
        sampling=sampling,
        together=together,
        count_compilations=True,
        env={variable: str(tmp_path / folder) for variable, folder in caches.items()},
    )
    assert [len(a.token_ids) for a in run.answers] == [s["max_tokens"] for s in sampling]
    lines = re.findall(r"Compiled (\d+) kernel variants, or loaded .* in ([\d.]+) s", run.log)
    print(f"compiled while loading: {lines}; in all, after the start and after {requests} requests: {run.compilations}")
    ((count, _),) = lines
    assert int(count) > 0
    assert run.compilations == (int(count), int(count))
    # vLLM's own watch over late compilations, which names the kernel.
    assert "Kernel JIT monitor activated" in run.log
    late = set(re.findall(r"JIT compilation during inference: (\w+)", run.log))
    assert not late & package_kernels()


def package_kernels() -> set[str]:
    """Names of this package's kernels: its functions `*_kernel`."""
    import w8a8_kernels

    names = set()
    for module in pkgutil.walk_packages(w8a8_kernels.__path__, "w8a8_kernels."):
        names.update(name for name in vars(importlib.import_module(module.name)) if name.endswith("_kernel"))
    return names
