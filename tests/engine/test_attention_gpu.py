"""The attention backend on a GPU against vLLM's own: log-probabilities, cache size, CUDA graphs, a cache that is full."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from engines import GPU_MEMORY, Run, run_engine, side_by_side
from models import QWEN3_8B, random_gemma3, random_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

VOCABULARY = 320
STEPS = 8
# Longer than Gemma's window here, and than what one program takes of a context.
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(n)] for p, n in enumerate((400, 333, 31, 5))]
# Gemma 3 4B's layer; the window is short, so that it matters to short prompts.
GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
INT8 = {"kv_cache_dtype": "int8_per_token_head"}
OURS, FLASH, TRITON = "CUSTOM", "FLASH_ATTN", "TRITON_ATTN"


SHAPES = {"qwen3": QWEN3_8B, "gemma3": GEMMA3_4B}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of two layers with random weights."""
    root = tmp_path_factory.mktemp("attention")
    gemma3 = random_gemma3(root / "gemma3", num_hidden_layers=2, vocab_size=VOCABULARY, **GEMMA3_4B)
    # Tied to lm_head, the embedding would make every token all but certain to follow itself, and a KL divergence nothing.
    change_weights(gemma3, {"model.embed_tokens.weight": lambda w: w / 50, "model.norm.weight": lambda w: w + 36})
    return {
        "qwen3": random_qwen3(root / "qwen3", num_hidden_layers=2, vocab_size=VOCABULARY, **QWEN3_8B),
        "gemma3": gemma3,
    }


def change_weights(folder: Path, changes: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights |= {name: change(weights[name]).bfloat16().contiguous() for name, change in changes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def serve(folder: Path, backend: str, prefill: str = "auto", sampling: dict | None = None, prompts=PROMPTS, **engine) -> Run:
    """Compiled, with CUDA graphs; all models are forced to say the same, so that all backends see the same."""
    return run_engine(
        folder,
        prompts,
        engine={
            "attention_backend": backend,
            "skip_tokenizer_init": True,
            "max_logprobs": VOCABULARY,
            **GPU_MEMORY,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "enforce_eager": False,
        }
        | engine,
        sampling={
            "max_tokens": STEPS,
            "temperature": 0.0,
            "logprobs": VOCABULARY,
            "detokenize": False,
            "allowed_token_ids": [5],
            "ignore_eos": True,
        }
        | (sampling or {}),
        env={"VLLM_W8A8_PREFILL_ATTENTION": prefill},
    )


def kl(reference: Run, other: Run, part: str) -> float:
    """Mean KL(reference || other) in nats of the positions of the prompts or of the steps after them."""
    total, count = 0.0, 0
    for a, b in zip(reference.answers, other.answers, strict=True):
        for p, q in zip(getattr(a, part), getattr(b, part), strict=True):
            if p:  # the first token of a prompt has none
                total += sum(math.exp(p[token]) * (p[token] - q[token]) for token in p)
                count += 1
    return total / count


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_one_layer(tmp_path: Path, family: str) -> None:
    """The logits are the layer's output after the final norm, rotated: the embedding, tied to lm_head, is orthogonal.

    It gives the residual stream a root mean square of 1; attention and MLP each add about as much, or half of it in Gemma,
    whose norms behind them trained models keep below 1. FLASH_ATTN and TRITON_ATTN then differ by some 3e-3.
    """
    hidden = SHAPES[family]["hidden_size"]
    rotation = torch.nn.init.orthogonal_(torch.empty(hidden, hidden))
    if family == "qwen3":
        folder = random_qwen3(tmp_path / family, num_hidden_layers=1, vocab_size=hidden, tied=True, **QWEN3_8B)
        change_weights(folder, {"model.embed_tokens.weight": lambda _: rotation * hidden**0.5})
    else:
        sizes = GEMMA3_4B | {"layer_types": ["sliding_attention"]}
        folder = random_gemma3(tmp_path / family, num_hidden_layers=1, vocab_size=hidden, **sizes)
        # Gemma multiplies embeddings by the root of the hidden size, and by 1 more than a norm's weight.
        norms = (f"model.layers.0.post_{part}_layernorm.weight" for part in ("attention", "feedforward"))
        change_weights(folder, {"model.embed_tokens.weight": lambda _: rotation} | dict.fromkeys(norms, lambda w: w - 0.5))

    def outputs(backend: str) -> torch.Tensor:
        engine = {"logprobs_mode": "raw_logits", "max_logprobs": hidden}
        run = serve(folder, backend, "triton", sampling={"logprobs": hidden}, **engine)
        return torch.tensor([[[step[i] for i in range(hidden)] for step in a.logprobs] for a in run.answers])

    flash, triton, ours = map(outputs, (FLASH, TRITON, OURS))
    between, distance = (((x - flash).norm(dim=-1) / flash.norm(dim=-1)).max().item() for x in (triton, ours))
    print(f"{family}: relative L2 from FLASH_ATTN {distance:.2e}, of TRITON_ATTN {between:.2e}")
    assert 0 < distance <= min(5e-3, 5 / 3 * between)


PROMPT_LOGPROBS = {"prompt_logprobs": VOCABULARY}


@pytest.mark.parametrize("prefill", ["triton", "auto"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_as_far_from_flash_attention_as_vllms_triton_backend(folders: dict[str, Path], family: str, prefill: str) -> None:
    flash, triton, ours = (
        serve(folders[family], backend, prefill, sampling=PROMPT_LOGPROBS) for backend in (FLASH, TRITON, OURS)
    )
    assert "W8A8 attention: queries of up to 16 tokens run on triton" in ours.log
    for part in ("prompt_logprobs", "logprobs"):
        between, distance = kl(flash, triton, part), kl(flash, ours, part)
        print(f"{family}, prefill {prefill}, {part}: KL from FLASH_ATTN {distance:.2e}, of TRITON_ATTN {between:.2e}")
        assert 0 < distance <= 1.5 * between
    # vLLM's progress bar over graphs that hold attention, which by default are those of decode batches.
    assert re.search(r"Capturing CUDA graphs \((decode, )?FULL\)", ours.log), "no full graphs of decode batches were captured"


def test_an_int8_cache(folders: dict[str, Path]) -> None:
    """Nearly twice the tokens, and no farther from 16 bits than vLLM's own kernels are with theirs."""
    ways = {"flash": (FLASH, {}), "triton": (TRITON, INT8), "ours": (OURS, {}), "ours_int8": (OURS, INT8)}

    def run(way: str) -> Run:
        backend, cache = ways[way]
        return serve(folders["qwen3"], backend, sampling=PROMPT_LOGPROBS, **cache)

    flash, triton, ours, ours_int8 = side_by_side(run, ways).values()
    tokens = [int(re.search(r"GPU KV cache size: ([\d,]+) tokens", run.log)[1].replace(",", "")) for run in (ours, ours_int8)]
    print(f"tokens in the cache: {tokens[0]} in 16 bits, {tokens[1]} in int8, {tokens[1] / tokens[0]:.3f} times as many")
    assert tokens[1] >= 1.9 * tokens[0]
    for part in ("prompt_logprobs", "logprobs"):
        stock, distance = kl(flash, triton, part), kl(flash, ours_int8, part)
        print(f"{part}: KL of int8 from FLASH_ATTN in 16 bits: ours {distance:.2e}, TRITON_ATTN {stock:.2e}")
        assert distance <= 1.5 * stock


def test_a_full_cache_with_prefixes_and_chunks(folders: dict[str, Path]) -> None:
    """Prefixes are found in the cache, prompts come in chunks, and blocks are evicted: the answers stay.

    Such a run has other batches than one without, so every backend's last bits differ. As a floor for that noise stands what
    another correct bf16 backend changes, FLASH_ATTN to TRITON_ATTN.
    """
    random = Random(0)
    prefixes = [[random.randrange(VOCABULARY) for _ in range(256)] for _ in range(3)]
    prompts = [prefixes[i % 3] + [random.randrange(VOCABULARY) for _ in range(50 + 4 * i)] for i in range(24)]
    plain = {"enable_prefix_caching": False}
    # 24 prompts take some 330 blocks of 16 tokens, those of a prefix counted once.
    full = {"enable_prefix_caching": True, "num_gpu_blocks_override": 128, "block_size": 16, "max_num_batched_tokens": 128}
    ways = {(backend, name): options for backend in (FLASH, OURS) for name, options in (("plain", plain), ("full", full))}
    ways[TRITON, "plain"] = plain
    runs = side_by_side(lambda way: serve(folders["qwen3"], way[0], "triton", prompts=prompts, **ways[way]), ways)
    for backend in (FLASH, OURS):
        found = sum(answer.cached_tokens for answer in runs[backend, "full"].answers)
        print(f"{backend}: {found} of {sum(map(len, prompts))} tokens were found in the cache")
        assert found > 0
    floor = kl(runs[FLASH, "plain"], runs[TRITON, "plain"], "logprobs")
    flash, ours = (kl(runs[backend, "plain"], runs[backend, "full"], "logprobs") for backend in (FLASH, OURS))
    print(f"KL of a full cache from an empty one: FLASH_ATTN {flash:.2e}, ours {ours:.2e}; floor {floor:.2e}")
    assert ours <= max(flash, floor)


@pytest.mark.parametrize("cache", [{}, INT8], ids=["16 bits", "int8"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_no_request_compiles(folders: dict[str, Path], tmp_path: Path, cache: dict, enforce_eager: bool) -> None:
    """Requests of all lengths, alone and together, after a start from empty caches."""
    random = Random(0)
    prompts = [[random.randrange(VOCABULARY) for _ in range(random.randint(1, 900))] for _ in range(100)]
    prompts += [[random.randrange(VOCABULARY) for _ in range(random.randint(1, 20))] for _ in range(50)]
    together = []
    while sum(together) < len(prompts):
        together.append(min(random.randint(1, 24), len(prompts) - sum(together)))
    caches = {"TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    run = run_engine(
        folders["gemma3"],
        prompts,
        engine={
            "attention_backend": OURS,
            "enforce_eager": enforce_eager,
            "skip_tokenizer_init": True,
            **GPU_MEMORY,
            "max_model_len": 1024,
            "max_num_seqs": 32,
            **cache,
        },
        sampling={"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False},
        together=together,
        count_compilations=True,
        env={variable: str(tmp_path / folder) for variable, folder in caches.items()},
    )
    lines = re.findall(r"Compiled (\d+) attention kernel variants, or loaded .* in ([\d.]+) s", run.log)
    print(f"compiled before the first request: {lines}; in all, after the start and after {len(prompts)}: {run.compilations}")
    assert sum(int(count) for count, _ in lines) > 0
    assert run.compilations[0] == run.compilations[1]
