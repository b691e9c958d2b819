"""The compile pass in a compiled engine."""

import re
from pathlib import Path

import pytest
from engines import Run, mean_kl, run_engine

pytestmark = pytest.mark.engine

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(24)]
LAYERS = 2


@pytest.fixture(scope="module")
def runs(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All with one compile cache, so that a run that took another's compiled graph would be seen."""
    cache = tmp_path_factory.mktemp("cache")
    ways = {
        # Eager: compiled without our ops, it would share the roundings of norms with one of the two.
        "bf16": ({"enforce_eager": True}, {}),
        "on": ({"quantization": "w8a8"}, {}),
        "off": ({"quantization": "w8a8"}, {"VLLM_W8A8_FUSION": "0"}),
        "on again": ({"quantization": "w8a8"}, {}),
        "no hadamard": ({"quantization": "w8a8"}, {"VLLM_W8A8_HADAMARD": "0"}),
    }
    return {
        way: run_engine(
            tiny_qwen3,
            PROMPTS,
            engine={"enforce_eager": False, "skip_tokenizer_init": True, "max_logprobs": VOCABULARY, **engine},
            sampling={"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False},
            env={"VLLM_CACHE_ROOT": str(cache / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), **env},
        )
        for way, (engine, env) in ways.items()
    }


def test_everything_but_attention_is_fused(runs: dict[str, Run]) -> None:
    """One graph on the CPU; on a GPU three, as vLLM splits two layers at attention, no two of them alike."""
    lines = re.findall(r"folded (\d+) RMSNorm and (\d+) SiluAndMul .* (\d+) quantizers stay", runs["on"].log)
    norms, activations, stay = (sum(map(int, counts)) for counts in zip(*lines, strict=True))
    assert (norms, activations, stay) == (2 * LAYERS, LAYERS, LAYERS)


def test_switch_is_part_of_the_compile_cache_key(runs: dict[str, Run]) -> None:
    assert "folded" not in runs["off"].log
    assert mean_kl(runs["on"], runs["off"]) > 0, "the switched-off run took the compiled graph of the other"
    assert mean_kl(runs["on"], runs["on again"]) == 0


def test_hadamard_is_part_of_the_compile_cache_key(runs: dict[str, Run]) -> None:
    """With the other's graph, activations would be transformed and weights not: nonsense, as far off as no quantization is."""
    on, without = (mean_kl(runs["bf16"], runs[way]) for way in ("on", "no hadamard"))
    print(f"KL from bf16: {on:.5f} with Hadamard blocks, {without:.5f} without")
    assert mean_kl(runs["on"], runs["no hadamard"]) > 0
    assert without <= 4 * on + 0.01


def test_as_near_to_the_unquantized_model(runs: dict[str, Run]) -> None:
    on, off = (mean_kl(runs["bf16"], runs[way]) for way in ("on", "off"))
    print(f"KL from bf16: {on:.5f} with fusion, {off:.5f} without, {mean_kl(runs['off'], runs['on']):.5f} between them")
    assert on <= 1.1 * off
