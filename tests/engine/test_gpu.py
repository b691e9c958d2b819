"""Engines on a GPU: compile and CUDA graphs on."""

import importlib
import json
import math
import pkgutil
import re
from pathlib import Path
from random import Random

import pytest
import torch
from engines import GPU_MEMORY, Run, mean_kl, run_engine
from models import random_lora, random_qwen3, random_qwen3_moe

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
            **GPU_MEMORY,
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
            **GPU_MEMORY,
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
            **GPU_MEMORY,
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


# A model whose layers are large enough for every kernel, and whose predictions are peaked: a last bit rarely decides a token.
VOCABULARY = 320
SMALL = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, **LAYER}
EXPERTS = {"moe_intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(8)]
ONLINE = {"quantization": "w8a8"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `bf16-0`, `bf16-1`, `moe-bf16-0`, ...: models with random weights by seed, and `w8a8-0`, ... of them."""
    from w8a8_converters.convert import convert

    root = tmp_path_factory.mktemp("small")
    for seed in (0, 1):
        random_qwen3(root / f"bf16-{seed}", seed=seed, **SMALL)
        random_qwen3_moe(root / f"moe-bf16-{seed}", seed=seed, norm_topk_prob=True, **SMALL, **EXPERTS)
        convert(root / f"bf16-{seed}", root / f"w8a8-{seed}", format="w8a8")
    return root


def serve(folder: Path, *then: list, env: dict[str, str] | None = None, sampling: dict | None = None, **engine) -> Run:
    """Compiled and with CUDA graphs, unless `engine` says otherwise; the log-probabilities of the whole vocabulary."""
    return run_engine(
        folder,
        PROMPTS,
        engine={
            "skip_tokenizer_init": True,
            "max_logprobs": VOCABULARY,
            **GPU_MEMORY,
            "enforce_eager": False,
        }
        | engine,
        sampling={"temperature": 0.0, "detokenize": False, "ignore_eos": True}
        | (sampling or {"max_tokens": 8, "prompt_logprobs": VOCABULARY, "logprobs": 2}),
        then=list(then),
        env=env,
    )


def assert_same(a: Run, b: Run) -> None:
    """Within 1e-3 in log-probability; of two tokens that are so close, either may follow."""
    for x, y in zip(a.answers, b.answers, strict=True):
        assert max(abs(p - q) for p, q in zip(x.true_logprobs(), y.true_logprobs(), strict=True)) <= 1e-3
        for p, q, step in zip(x.token_ids, y.token_ids, x.logprobs, strict=True):
            if p != q:
                assert step[p] - step.get(q, -math.inf) <= 1e-3, f"got {q} with {step.get(q)}, expected {p} with {step[p]}"
                break


@pytest.mark.parametrize(
    ("first", "second", "engine"),
    [("bf16-0", "bf16-1", ONLINE), ("w8a8-0", "w8a8-1", {}), ("moe-bf16-0", "moe-bf16-1", ONLINE)],
    ids=["online", "checkpoint", "experts"],
)
def test_sleep_and_reload(small: Path, first: str, second: str, engine: dict) -> None:
    """CUDA graphs that were captured before give the right answers after: nothing has moved, and nothing was forgotten."""
    run = serve(
        small / first,
        ["sleep_and_wake", 1],
        ["reload_weights", str(small / second)],
        ["sleep_and_wake", 2, str(small / first)],
        ["finish_again"],
        enable_sleep_mode=True,
        **engine,
    )
    slept, reloaded, slept_deep, finished_again = run.later
    assert_same(run, slept)
    assert_same(reloaded, serve(small / second, **engine))
    assert mean_kl(run, reloaded) > 0.1
    assert_same(run, slept_deep)
    assert_same(run, finished_again)
    assert all(where == run.addresses[0] for where in run.addresses)


@pytest.mark.parametrize("kind", ["bf16", "moe-bf16"])
def test_saved_state(small: Path, tmp_path: Path, kind: str) -> None:
    """What was quantized while loading is int8 in the state."""
    import shutil

    shutil.copy(small / f"{kind}-0" / "config.json", tmp_path)
    run = serve(small / f"{kind}-0", ["save_state", str(tmp_path)], **ONLINE)
    assert_same(run, serve(tmp_path, load_format="sharded_state", **ONLINE))


@pytest.mark.parametrize(
    ("offload", "env"),
    [
        ({"cpu_offload_gb": 1}, {}),
        ({"cpu_offload_gb": 1, "enforce_eager": True}, {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}),
        ({"offload_group_size": 2, "offload_num_in_group": 1}, {}),
    ],
    ids=["uva", "copies", "prefetch"],
)
@pytest.mark.parametrize("way", ["online", "checkpoint"])
def test_cpu_offload(small: Path, way: str, offload: dict, env: dict[str, str]) -> None:
    folder, engine = (small / "bf16-0", ONLINE) if way == "online" else (small / "w8a8-0", {})
    run = serve(folder, env=env, **offload, **engine)
    assert re.search(r"Total CPU offloaded parameters|Total GPU memory saved", run.log)
    assert_same(serve(folder, **{key: value for key, value in offload.items() if key == "enforce_eager"}, **engine), run)


@pytest.mark.parametrize("way", ["online", "checkpoint"])
def test_lora(small: Path, tmp_path: Path, way: str) -> None:
    """An adapter adds to the quantized model what it adds to the unquantized one."""
    adapters = random_lora(tmp_path / "zero", small / "bf16-0", zero=True), random_lora(tmp_path / "lora", small / "bf16-0")
    then = [["adapter", str(adapter)] for adapter in adapters]
    bf16 = serve(small / "bf16-0", *then, enable_lora=True)
    ours = serve(
        small / ("bf16-0" if way == "online" else "w8a8-0"),
        *then,
        enable_lora=True,
        **(ONLINE if way == "online" else {}),
    )
    zero, strong = ours.later
    assert mean_kl(ours, zero) <= 1e-6
    without, with_adapter, effect = mean_kl(bf16, ours), mean_kl(bf16.later[1], strong), mean_kl(ours, strong)
    print(f"KL from bf16 {without:.5f}, with an adapter in both {with_adapter:.5f}; of the adapter itself {effect:.3f}")
    assert 0 < with_adapter <= 2 * without
    assert effect > 50 * with_adapter


def test_lora_leaves_experts_unquantized(small: Path) -> None:
    run = serve(small / "moe-bf16-0", enable_lora=True, **ONLINE)
    assert "experts of mixture-of-experts layers stay unquantized: LoRA (enable_lora)" in run.log
    assert mean_kl(serve(small / "moe-bf16-0"), run) < 0.1


@pytest.mark.parametrize("draft", ["bf16-0", "w8a8-0"])
def test_speculative_decoding(small: Path, draft: str) -> None:
    """The draft is the model itself, so nearly all is accepted. A last bit may decide a token, and then all that follow."""
    sampling = {"max_tokens": 16}
    speculative = {"method": "draft_model", "model": str(small / draft), "num_speculative_tokens": 3}
    run = serve(small / "bf16-0", sampling=sampling, disable_log_stats=False, speculative_config=speculative, **ONLINE)
    plain = serve(small / "bf16-0", sampling=sampling, **ONLINE)
    same = [x.token_ids == y.token_ids for x, y in zip(plain.answers, run.answers, strict=True)]
    print(f"{run.accepted} tokens accepted, {sum(same)} of {len(same)} answers equal")
    assert run.accepted >= 8 * len(PROMPTS)
    assert sum(same) >= 6
