"""Two ranks on the CPU build: as near to the unquantized model as one rank is."""

from pathlib import Path

import pytest
from engines import Run, mean_kl, run_engine

pytestmark = pytest.mark.engine

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(8)]


@pytest.fixture(scope="module")
def runs(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Run]:
    from w8a8_converters.convert import convert

    converted = tmp_path_factory.mktemp("tp") / "w8a8"
    convert(tiny_qwen3, converted, format="w8a8")
    ways = {"bf16": (tiny_qwen3, {}), "online": (tiny_qwen3, {"quantization": "w8a8"}), "checkpoint": (converted, {})}
    sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False}
    return {
        (way, tp): run_engine(
            model,
            PROMPTS,
            engine={
                "tensor_parallel_size": tp,
                "skip_tokenizer_init": True,
                "max_logprobs": VOCABULARY,
                **engine,
            },
            sampling=sampling,
        )
        for way, (model, engine) in ways.items()
        for tp in (1, 2)
    }


@pytest.mark.parametrize("way", ["online", "checkpoint"])
def test_divergence_does_not_grow_with_ranks(runs: dict[tuple[str, int], Run], way: str) -> None:
    one, two = (mean_kl(runs["bf16", tp], runs[way, tp]) for tp in (1, 2))
    print(f"{way}: KL {one:.5f} at TP=1, {two:.5f} at TP=2")
    assert one > 0, "the quantized model equals the unquantized one: it was not quantized"
    assert two <= 1.1 * one


@pytest.mark.parametrize("tp", [1, 2])
def test_online_equals_checkpoint(runs: dict[tuple[str, int], Run], tp: int) -> None:
    """The scales of row-parallel layers are those of the whole matrix, whichever rank quantizes."""
    pairs = zip(runs["online", tp].answers, runs["checkpoint", tp].answers, strict=True)
    assert max(abs(a - b) for x, y in pairs for a, b in zip(x.true_logprobs(), y.true_logprobs(), strict=True)) <= 1e-3
