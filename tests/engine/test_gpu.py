"""Engines on a GPU: compile and CUDA graphs on."""

from pathlib import Path

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


def test_qwen3_0_6b_shapes_generate(tmp_path: Path) -> None:
    """28 layers of dummy weights, compile and CUDA graphs on."""
    import json

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 28,
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
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = run_engine(
        tmp_path,
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
