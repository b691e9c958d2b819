"""What vLLM offers beside running a model: adapters, other weights, saved states, offload, caching, speculation."""

import math
import shutil
from pathlib import Path

import pytest
from engines import Answer, Run, mean_kl, run_engine
from models import random_lora, random_qwen3, random_qwen3_moe

pytestmark = pytest.mark.engine

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(4)]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
}
EXPERTS = {
    "moe_intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
TINY = {"skip_tokenizer_init": True, "max_logprobs": VOCABULARY}
WHOLE_VOCABULARY = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False}
ONLINE = {"quantization": "w8a8"}
# The engine in the runner's process: with one of its own, it took three times as long on two cores.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense models and models with experts: `bf16-0`, `moe-bf16-1`, `moe-w8a8-0`, ... with the seed."""
    from w8a8_converters.convert import convert

    root = tmp_path_factory.mktemp("features")
    for seed in (0, 1):
        random_qwen3(root / f"bf16-{seed}", seed=seed, **SIZES)
        random_qwen3_moe(root / f"moe-bf16-{seed}", seed=seed, **SIZES, **EXPERTS)
    for name in ("0", "moe-0", "moe-1"):
        kind, _, seed = name.rpartition("-")
        prefix = f"{kind}-" if kind else ""
        convert(root / f"{prefix}bf16-{seed}", root / f"{prefix}w8a8-{seed}", format="w8a8")
    return root


def equal(a: list[Answer], b: list[Answer]) -> bool:
    """Whether two engines gave the same answers, to the last bit."""
    return all(x.prompt_logprobs == y.prompt_logprobs and x.token_ids == y.token_ids for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, Run]:
    """Answers without an adapter, then with one that is zero, then with a strong one."""
    lora = random_lora(folder / "lora", folder / "bf16-0")
    zero = random_lora(folder / "zero", folder / "bf16-0", zero=True)
    ways = {"bf16": ("bf16-0", {}), "online": ("bf16-0", ONLINE), "checkpoint": ("w8a8-0", {})}
    return {
        way: run_engine(
            folder / model,
            PROMPTS,
            engine={"enable_lora": True, **TINY, **engine},
            sampling=WHOLE_VOCABULARY,
            then=[["adapter", str(zero)], ["adapter", str(lora)]],
            env=IN_PROCESS,
        )
        for way, (model, engine) in ways.items()
    }


@pytest.mark.parametrize("way", ["online", "checkpoint"])
def test_lora(adapters: dict[str, Run], way: str) -> None:
    """An adapter adds to the quantized model what it adds to the unquantized one: it sees the activation before it is int8."""
    bf16, ours = adapters["bf16"], adapters[way]
    zero, strong = ours.later
    assert equal(ours.answers, zero.answers)
    without, with_adapter = mean_kl(bf16, ours), mean_kl(bf16.later[1], strong)
    effect = mean_kl(ours, strong)
    print(f"{way}: KL from bf16 {without:.5f}, with an adapter in both {with_adapter:.5f}; of the adapter itself {effect:.3f}")
    assert 0 < with_adapter <= 2 * without
    assert effect > 50 * with_adapter


def test_lora_online_equals_checkpoint(adapters: dict[str, Run]) -> None:
    assert equal(adapters["online"].later[1].answers, adapters["checkpoint"].later[1].answers)


@pytest.fixture(scope="module")
def reloads(folder: Path) -> dict[str, Run]:
    """Engines that get other weights, and engines that have had them from the start."""

    def run(model: str, *then: list, **engine) -> Run:
        env = {} if "tensor_parallel_size" in engine else IN_PROCESS
        return run_engine(folder / model, PROMPTS, engine=TINY | engine, sampling=WHOLE_VOCABULARY, then=list(then), env=env)

    def reload(model: str) -> list[str]:
        return ["reload_weights", str(folder / model)]

    ranks = {"tensor_parallel_size": 2}
    return {
        "two ranks": run("bf16-0", reload("bf16-1"), **ONLINE, **ranks),
        # With offload, which on a CPU moves nothing, weights are loaded in another way.
        "two ranks, fresh": run("bf16-1", cpu_offload_gb=1, **ONLINE, **ranks),
        "experts": run("moe-bf16-0", reload("moe-bf16-1"), ["finish_again"], cpu_offload_gb=1, **ONLINE),
        "experts, checkpoint": run("moe-w8a8-0", reload("moe-w8a8-1"), ["finish_again"]),
        "experts, fresh": run("moe-w8a8-1"),
    }


FRESH = {"two ranks": "two ranks, fresh", "experts": "experts, fresh", "experts, checkpoint": "experts, fresh"}


@pytest.mark.parametrize("way", FRESH)
def test_reloaded_weights(reloads: dict[str, Run], way: str) -> None:
    """Other weights give what a fresh engine gives, and lie where those before lay: CUDA graphs hold addresses."""
    run, fresh = reloads[way], reloads[FRESH[way]]
    assert not equal(run.answers, fresh.answers)
    assert equal(run.later[0].answers, fresh.answers)
    assert all(where == run.addresses[0] for where in run.addresses)


@pytest.mark.parametrize("way", ["experts", "experts, checkpoint"])
def test_finished_twice(reloads: dict[str, Run], way: str) -> None:
    reloaded, finished_again = reloads[way].later
    assert equal(reloaded.answers, finished_again.answers)


# Two blocks of the CPU's KV cache and more, the first of them the same in all.
LONG_PROMPTS = [[(7 * i * i + 13 * i + (p if i >= 140 else 0)) % VOCABULARY for i in range(300)] for p in range(4)]


@pytest.fixture(scope="module")
def served(folder: Path) -> dict[str, Run]:
    draft = {"method": "draft_model", "num_speculative_tokens": 3}
    counted = {"disable_log_stats": False}
    (folder / "state").mkdir()
    shutil.copy(folder / "bf16-0" / "config.json", folder / "state")
    ways = {
        "plain": ("bf16-0", {"enable_prefix_caching": False}, [["save_state", str(folder / "state")]]),
        "state": ("state", {"enable_prefix_caching": False, "load_format": "sharded_state"}, []),
        "cached, in chunks": ("bf16-0", {"enable_prefix_caching": True, "max_num_batched_tokens": 64}, [["again"]]),
        "bf16 draft": ("bf16-0", counted | {"speculative_config": draft | {"model": str(folder / "bf16-0")}}, []),
        "W8A8 draft": ("bf16-0", counted | {"speculative_config": draft | {"model": str(folder / "w8a8-0")}}, []),
    }
    return {
        way: run_engine(
            folder / model,
            LONG_PROMPTS,
            engine=TINY | ONLINE | engine,
            sampling={"max_tokens": 16, "temperature": 0.0, "logprobs": 5, "detokenize": False, "ignore_eos": True},
            then=then,
            env=IN_PROCESS,
        )
        for way, (model, engine, then) in ways.items()
    }


def differences(a: Run, b: Run) -> tuple[bool, float]:
    """Whether the tokens are the same, and the greatest difference of their log-probabilities."""
    pairs = list(zip(a.answers, b.answers, strict=True))
    largest = max(
        abs(p.get(token, -math.inf) - q.get(token, -math.inf))
        for x, y in pairs
        for token, p, q in zip(x.token_ids, x.logprobs, y.logprobs, strict=True)
    )
    return all(x.token_ids == y.token_ids for x, y in pairs), largest


def test_saved_state(served: dict[str, Run]) -> None:
    """What was quantized while it was loaded is int8 in the state."""
    assert differences(served["plain"], served["state"]) == (True, 0)


@pytest.mark.parametrize("again", [False, True], ids=["chunks", "cache"])
def test_prefix_caching_and_chunked_prefill(served: dict[str, Run], again: bool) -> None:
    run = served["cached, in chunks"]
    cached = [answer.cached_tokens for answer in (run.later[0] if again else run).answers]
    assert all(cached) if again else cached[0] == 0
    same, largest = differences(served["plain"], run.later[0] if again else run)
    print(f"log-probabilities differ by at most {largest:.4f}")
    assert same
    assert largest <= 0.05


@pytest.mark.parametrize("draft", ["bf16 draft", "W8A8 draft"])
def test_speculative_decoding(served: dict[str, Run], draft: str) -> None:
    same, largest = differences(served["plain"], served[draft])
    print(f"{draft}: {served[draft].accepted} tokens accepted, log-probabilities differ by at most {largest:.4f}")
    assert same
    # The draft is the model itself; without its own blocks, or with the target's quantization, little would be accepted.
    assert served[draft].accepted >= 40
