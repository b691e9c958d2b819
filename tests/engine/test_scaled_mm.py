"""A checkpoint of vLLM's own int8 schemes, static and asymmetric, on our kernel and on vLLM's."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import COMPRESSED_TENSORS, changed
from engines import Run, mean_kl, run_engine

pytestmark = pytest.mark.engine

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(12)]
INPUTS = {"dynamic": False, "symmetric": False, "strategy": "tensor"}
# Two layers, each with q, k, v (one input), o, gate and up (one input), down.
SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def static_int8(source: Path, out: Path) -> Path:
    """Write `source` with weights quantized by tensor and inputs by their range over the prompts, as llm-compressor does."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ranges: dict[str, tuple[float, float]] = {}

    def note(name: str):
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
            low, high = ranges.get(name, (0.0, 0.0))
            ranges[name] = min(low, args[0].min().item()), max(high, args[0].max().item())

        return hook

    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    for name, module in layers.items():
        module.register_forward_pre_hook(note(name))
    with torch.no_grad():
        model(torch.tensor(PROMPTS))

    shutil.copytree(source, out)
    tensors = load_file(out / "model.safetensors")
    for name in layers:
        weight = tensors[f"{name}.weight"].float()
        scale = weight.abs().max() / 127
        tensors[f"{name}.weight"] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
        tensors[f"{name}.weight_scale"] = scale.reshape(1)
        parent, _, last = name.rpartition(".")
        low, high = ranges[f"{parent}.{SHARED_INPUT.get(last, last)}"]
        tensors[f"{name}.input_scale"] = torch.tensor([(high - low) / 255])
        tensors[f"{name}.input_zero_point"] = torch.tensor([round(-128 - low * 255 / (high - low))], dtype=torch.int8)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    group = "config_groups.group_0."
    quantization = changed(COMPRESSED_TENSORS, group + "weights.strategy", "tensor")
    for key, value in INPUTS.items():
        quantization = changed(quantization, group + "input_activations." + key, value)
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return out


@pytest.fixture(scope="module")
def runs(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    int8 = static_int8(tiny_qwen3, tmp_path_factory.mktemp("static") / "int8")
    asked = {"VLLM_W8A8_ENABLE": "1"}
    ways = {
        "bf16": (tiny_qwen3, {}, {"VLLM_PLUGINS": ""}),
        "stock": (int8, {}, {"VLLM_PLUGINS": ""}),
        "not asked": (int8, {}, {}),
        "ours": (int8, {}, asked),
        "ours, compiled": (int8, {"enforce_eager": False}, asked),
    }
    return {
        way: run_engine(
            model,
            PROMPTS,
            engine={"skip_tokenizer_init": True, "max_logprobs": VOCABULARY, **engine},
            sampling={"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False},
            env=env,
        )
        for way, (model, engine, env) in ways.items()
    }


SAID = "W8A8: vLLM's own int8 layers with per-tensor weights and static per-tensor asymmetric activations run on "


@pytest.mark.parametrize("way", ["ours", "ours, compiled"])
def test_our_kernel_runs_and_is_named_once(runs: dict[str, Run], way: str) -> None:
    log = runs[way].log
    assert log.count(SAID) == 1
    assert log.count("Selected W8A8Int8ScaledMMLinearKernel for CompressedTensorsW8A8Int8") == 1
    assert log.count("is already quantized (compressed-tensors); vLLM's own path serves it, int8 layers on this plugin's") == 1


def test_nothing_changes_unless_asked(runs: dict[str, Run]) -> None:
    assert SAID not in runs["not asked"].log
    assert "W8A8Int8ScaledMM" not in runs["not asked"].log
    assert mean_kl(runs["stock"], runs["not asked"]) == 0


@pytest.mark.parametrize("way", ["ours", "ours, compiled"])
def test_says_what_vllms_kernel_says(runs: dict[str, Run], way: str) -> None:
    ours, stock, bf16 = (runs[name] for name in (way, "stock", "bf16"))
    theirs, mine = mean_kl(bf16, stock), mean_kl(bf16, ours)
    print(
        f"KL from bf16: vLLM's kernel {theirs:.5f}, {way} {mine:.5f}; between them {mean_kl(stock, ours):.5f}; perplexity "
        f"{bf16.perplexity():.3f}, {stock.perplexity():.3f}, {ours.perplexity():.3f}"
    )
    assert mine <= 1.1 * theirs
    assert abs(math.log(ours.perplexity() / stock.perplexity())) <= 0.02
