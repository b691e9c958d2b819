"""SmolLM2-135M on the real vLLM: every way to W8A8 says the same, and nearly what the unquantized model says."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import PROCESS, EngineFailed, Run, agreement, run_engine, text_chunks

pytestmark = pytest.mark.engine

TOKENS, CHUNK = 2000, 250
# Enough to see whether two ways are the same; quality takes all.
FEW_TOKENS = 500
QUALITY = ("bf16", "online", "online, no hadamard")

# name -> (format of the checkpoint, arguments of vllm.LLM, environment)
WAYS = {
    "bf16": ("bf16", {}, {}),
    "online": ("bf16", {"quantization": "w8a8"}, PROCESS),
    "online by variable": ("bf16", {}, {"VLLM_W8A8_ENABLE": "1"}),
    "gguf": ("gguf", {"quantization": "w8a8"}, {}),
    "w8a8": ("w8a8", {}, {}),
    "w8a8, int8 lm_head": ("w8a8 with lm_head", {}, {}),
    "online, no hadamard": ("bf16", {"quantization": "w8a8"}, {"VLLM_W8A8_HADAMARD": "0"}),
    "w8a8, no hadamard": ("w8a8 with no hadamard", {}, {}),
    "compressed-tensors": ("compressed-tensors", {"quantization": "w8a8"}, {}),
    "compressed-tensors, stock": ("compressed-tensors", {}, {"VLLM_PLUGINS": ""}),
}


@pytest.fixture(scope="module")
def run(smollm2: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The engine's answers to the text, one engine for each way; to its first tokens but for `QUALITY`."""
    runs: dict[str, Run] = {}
    cache = {"VLLM_W8A8_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}

    def get(way: str) -> Run:
        if way not in runs:
            format, engine, env = WAYS[way]
            prompts = text_chunks(smollm2("bf16"), TOKENS if way in QUALITY else FEW_TOKENS, CHUNK)
            runs[way] = run_engine(smollm2(format), prompts, engine=engine, env=env | cache)
        return runs[way]

    return get


@pytest.mark.parametrize(
    ("online", "way"),
    [
        ("online", "online by variable"),
        ("online", "gguf"),
        ("online", "w8a8"),
        ("online, no hadamard", "w8a8, no hadamard"),
        ("online, no hadamard", "compressed-tensors"),
    ],
)
def test_ways_to_w8a8_agree(run: Callable[[str], Run], online: str, way: str) -> None:
    """Codes and scales are the same bits, so in one mode the log-probabilities are the same, too."""
    pairs = zip(run(online).answers[: FEW_TOKENS // CHUNK], run(way).answers, strict=True)
    difference = max(
        abs(a - b) for one, other in pairs for a, b in zip(one.true_logprobs(), other.true_logprobs(), strict=True)
    )
    assert difference <= 1e-3
    kernel = "onednn" if torch.cpu._is_vnni_supported() else "torch"
    assert f"W8A8 linear layers run on {kernel}" in run(way).log


@pytest.mark.parametrize(("way", "most", "least"), [("online", 1.02, 0.92), ("online, no hadamard", 1.05, 0.87)])
def test_quality(run: Callable[[str], Run], way: str, most: float, least: float) -> None:
    ratio = run(way).perplexity() / run("bf16").perplexity()
    top1 = agreement(run(way).top1(), run("bf16").top1())
    print(f"{way}: perplexity {run('bf16').perplexity():.3f} -> x {ratio:.4f}, top-1 agreement {top1:.4f}")
    assert ratio <= most
    assert top1 >= least


def test_variable_that_contradicts_the_checkpoint_is_refused(smollm2: Callable[[str], Path]) -> None:
    with pytest.raises(
        EngineFailed, match="VLLM_W8A8_HADAMARD=0, but the checkpoint's weights were quantized with hadamard 64"
    ):
        run_engine(smollm2("w8a8"), [[1, 2, 3]], env={"VLLM_W8A8_HADAMARD": "0"})


def test_int8_lm_head(run: Callable[[str], Run]) -> None:
    """An int8 lm_head, here untied from the embedding, costs little more."""
    assert run("w8a8, int8 lm_head").perplexity() <= 1.02 * run("w8a8").perplexity()


def test_stock_vllm_reads_our_compressed_tensors(run: Callable[[str], Run]) -> None:
    """Stock quantizes activations by another formula: near, not equal."""
    stock, ours = run("compressed-tensors, stock"), run("compressed-tensors")
    assert "W8A8 linear layers" not in stock.log
    assert stock.perplexity() <= 1.1 * ours.perplexity()


def test_stock_vllm_refuses_w8a8(smollm2: Callable[[str], Path]) -> None:
    with pytest.raises(EngineFailed, match="Unknown quantization method: w8a8"):
        run_engine(smollm2("w8a8"), [[1, 2, 3]], env={"VLLM_PLUGINS": ""})


def test_int8_weights_without_their_config_are_refused(smollm2: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint whose config.json lost its quantization_config must not be quantized a second time."""
    import json
    import shutil

    folder = shutil.copytree(smollm2("compressed-tensors"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineFailed, match=r"weight of dtype torch\.int8 .* is expected"):
        run_engine(folder, [[1, 2, 3]], engine={"quantization": "w8a8"})
