"""Experts in int8 on the CPU build: as near to the unquantized model on two ranks as on one, online as from a checkpoint."""

import pytest
from engines import Run, mean_kl, run_engine
from models import random_qwen3_moe

pytestmark = pytest.mark.engine

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(4)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Run]:
    from w8a8_converters.convert import convert

    folder = tmp_path_factory.mktemp("moe")
    model = random_qwen3_moe(
        folder / "bf16",
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=192,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
    )
    convert(model, folder / "w8a8", format="w8a8")
    ways = {"bf16": (model, {}), "online": (model, {"quantization": "w8a8"}), "checkpoint": (folder / "w8a8", {})}
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False}
    return {
        (way, tp): run_engine(
            path,
            PROMPTS,
            engine={"tensor_parallel_size": tp, "skip_tokenizer_init": True, "max_logprobs": VOCABULARY, **options},
            sampling=sampling,
        )
        for way, (path, options) in ways.items()
        for tp in (1, 2)
    }


@pytest.mark.parametrize("way", ["online", "checkpoint"])
def test_divergence_does_not_grow_with_ranks(runs: dict[tuple[str, int], Run], way: str) -> None:
    assert "W8A8 experts run on" in runs[way, 1].log
    one, two = (mean_kl(runs["bf16", tp], runs[way, tp]) for tp in (1, 2))
    print(f"{way}: KL {one:.5f} at TP=1, {two:.5f} at TP=2")
    assert 0 < one < 0.1
    assert two <= 1.25 * one


@pytest.mark.parametrize("tp", [1, 2])
def test_online_equals_checkpoint(runs: dict[tuple[str, int], Run], tp: int) -> None:
    """The scales of the last projections are those of whole matrices, whichever rank quantizes."""
    pairs = zip(runs["online", tp].answers, runs["checkpoint", tp].answers, strict=True)
    assert max(abs(a - b) for x, y in pairs for a, b in zip(x.true_logprobs(), y.true_logprobs(), strict=True)) <= 1e-3
