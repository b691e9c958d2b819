"""Two ranks with `tp_consistent_activations`, in compiled engines: they compute what one rank computes."""

import re
from pathlib import Path

import pytest
from engines import Run, mean_kl, run_engine

pytestmark = pytest.mark.engine

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(8)]


@pytest.fixture(scope="module")
def runs(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """In fp32, where sums over ranks hardly round; with one compile cache, so that a run that took another's graph is seen."""
    cache = tmp_path_factory.mktemp("cache")
    ways = {"one rank": (1, "1"), "own maxima": (2, "0"), "shared maximum": (2, "1")}
    return {
        way: run_engine(
            tiny_qwen3,
            PROMPTS,
            engine={
                "quantization": "w8a8",
                "tensor_parallel_size": tp,
                "dtype": "float32",
                "enforce_eager": False,
                "skip_tokenizer_init": True,
                "max_logprobs": VOCABULARY,
            },
            sampling={"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False},
            env={
                "VLLM_W8A8_TP_CONSISTENT_ACTIVATIONS": value,
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            },
        )
        for way, (tp, value) in ways.items()
    }


def test_two_ranks_answer_as_one(runs: dict[str, Run]) -> None:
    own, shared = (mean_kl(runs["one rank"], runs[way]) for way in ("own maxima", "shared maximum"))
    print(f"KL from one rank: {own:.2e} with each rank's own maxima, {shared:.2e} with the shared maximum")
    assert shared <= own / 10


def test_log_says_what_runs(runs: dict[str, Run]) -> None:
    shared, own = "quantized by the maximum over 2 ranks", "quantized by each rank's own part of a row"
    said = {way: [line in run.log for line in (shared, own)] for way, run in runs.items()}
    assert said == {"one rank": [False, False], "own maxima": [False, True], "shared maximum": [True, False]}


def test_only_the_shared_maximum_keeps_the_activation(runs: dict[str, Run]) -> None:
    """SiLU·mul is folded into the quantizer of down_proj, unless the codes must wait for the other rank."""
    folded = {
        way: {int(count) for count in re.findall(r"folded \d+ RMSNorm and (\d+) SiluAndMul", run.log)}
        for way, run in runs.items()
    }
    assert folded["one rank"] == folded["own maxima"] != {0}
    assert folded["shared maximum"] == {0}
