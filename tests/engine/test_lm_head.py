"""Engines with an int8 lm_head, of its own or tied to the embedding, whose vocabulary is padded, on one rank and on two."""

import re
from pathlib import Path

import pytest
from engines import Run, mean_kl, run_engine
from models import random_qwen3

pytestmark = pytest.mark.engine

# vLLM pads 300 tokens to 320.
VOCABULARY, HIDDEN = 300, 128
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(8)]
ASKED = {"VLLM_W8A8_LM_HEAD": "1"}
# way -> (folder, tensor-parallel degree, arguments of vllm.LLM, environment)
WAYS = {
    "bf16": ("model", 1, {}, {}),
    "bf16 lm_head": ("model", 1, {"quantization": "w8a8"}, {}),
    "online": ("model", 1, {"quantization": "w8a8"}, ASKED),
    "online, two ranks": ("model", 2, {"quantization": "w8a8"}, ASKED),
    "checkpoint, two ranks": ("int8", 2, {}, {}),
    "checkpoint with a bf16 lm_head": ("int8 but lm_head", 1, {}, ASKED),
}


@pytest.fixture(scope="module", params=["own", "tied"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    from w8a8_converters.convert import convert

    root: Path = tmp_path_factory.mktemp(request.param)
    random_qwen3(
        root / "model",
        tied=request.param == "tied",
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
    )
    convert(root / "model", root / "int8", quantize_lm_head=True)
    convert(root / "model", root / "int8 but lm_head")
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False}
    return {
        way: run_engine(
            root / folder,
            PROMPTS,
            engine={
                "tensor_parallel_size": tp,
                "skip_tokenizer_init": True,
                "max_logprobs": VOCABULARY,
                "gpu_memory_utilization": 0.3,
                **engine,
            },
            sampling=sampling,
            env=env,
        )
        for way, (folder, tp, engine, env) in WAYS.items()
    }


def largest_difference(a: Run, b: Run) -> float:
    """Of log-probabilities of the prompts' tokens."""
    pairs = zip(a.answers, b.answers, strict=True)
    return max(abs(p - q) for x, y in pairs for p, q in zip(x.true_logprobs(), y.true_logprobs(), strict=True))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("online", "checkpoint with a bf16 lm_head"),
        ("online, two ranks", "checkpoint, two ranks"),
    ],
)
def test_every_way_to_an_int8_lm_head_is_one(runs: dict[str, Run], one: str, other: str) -> None:
    assert largest_difference(runs[one], runs[other]) <= 1e-3


def test_lm_head_is_quantized(runs: dict[str, Run]) -> None:
    before, after = runs["bf16 lm_head"], runs["online"]
    assert largest_difference(before, after) > 1e-2
    kl = {way: mean_kl(runs["bf16"], run) for way, run in runs.items() if way != "bf16"}
    print(f"KL from bf16: {kl}")
    assert kl["online"] <= 1.3 * kl["bf16 lm_head"]
    assert kl["online, two ranks"] <= 1.1 * kl["online"]


def test_log_states_the_memory(runs: dict[str, Run], request: pytest.FixtureRequest) -> None:
    """320 rows of 128 codes and a scale are 0.04 MB."""
    tied = "tied" in request.node.callspec.params.values()
    said = {way: re.findall(r"lm_head is int8, (.*)", run.log) for way, run in runs.items()}
    size = "a copy of 0.0 MB on each rank beside the embedding" if tied else "0.0 MB on each rank instead of 0.1 MB"
    for way in ("online", "checkpoint with a bf16 lm_head"):
        assert len(said[way]) == 1
        assert said[way][0].startswith(size)
    assert said["bf16 lm_head"] == said["checkpoint, two ranks"] == []
