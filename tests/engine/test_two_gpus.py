"""Two GPUs: ranks and stages over NCCL against one GPU, in layers of Qwen3-8B's shape."""

from pathlib import Path

import pytest
import torch
from engines import GPU_MEMORY, Run, mean_kl, run_engine, side_by_side
from models import QWEN3_8B, random_qwen3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(64)] for p in range(8)]
ONE, TENSOR, PIPELINE = {}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
ONLINE = {"quantization": "w8a8"}
SHARED = {"VLLM_W8A8_TP_CONSISTENT_ACTIVATIONS": "1"}
# At a time: each has up to two processes that compile.
ENGINES = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def runs(root: Path) -> dict[str, Run]:
    from w8a8_converters.convert import convert

    random_qwen3(root / "bf16", num_hidden_layers=2, vocab_size=VOCABULARY, **QWEN3_8B)
    random_qwen3(root / "one kv head", num_hidden_layers=2, vocab_size=VOCABULARY, **QWEN3_8B | {"num_key_value_heads": 1})
    convert(root / "bf16", root / "checkpoint", format="w8a8")
    ways = {
        "bf16, 1": ("bf16", ONE, {}, {}),
        "bf16, 2": ("bf16", TENSOR, {}, {}),
        "online, 1": ("bf16", ONE, ONLINE, {}),
        "online, 2": ("bf16", TENSOR, ONLINE, {}),
        "online, 2, shared": ("bf16", TENSOR, ONLINE, SHARED),
        "online, stages": ("bf16", PIPELINE, ONLINE, {}),
        "checkpoint, 1": ("checkpoint", ONE, {}, {}),
        "checkpoint, 2": ("checkpoint", TENSOR, {}, {}),
        "one kv head, 1": ("one kv head", ONE, ONLINE, {}),
        "one kv head, 2": ("one kv head", TENSOR, ONLINE, {}),
    }

    def run(way: str) -> Run:
        folder, parallel, quantization, env = ways[way]
        then = [["save_codes", str(root / way)]] if way in ("online, 1", "online, 2", "online, 2, shared") else []
        return run_engine(
            root / folder,
            PROMPTS,
            engine={"skip_tokenizer_init": True, "max_logprobs": VOCABULARY, **GPU_MEMORY, **parallel, **quantization},
            sampling={"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False},
            then=then,
            env=env,
        )

    return side_by_side(run, ways, ENGINES)


@pytest.mark.parametrize("way", ["online", "checkpoint"])
def test_divergence_does_not_grow_with_ranks(runs: dict[str, Run], way: str) -> None:
    one, two = (mean_kl(runs[f"bf16, {tp}"], runs[f"{way}, {tp}"]) for tp in (1, 2))
    print(f"{way}: KL {one:.5f} at TP=1, {two:.5f} at TP=2")
    assert one > 0, "the quantized model equals the unquantized one: it was not quantized"
    assert two <= 1.1 * one


def test_stages_change_nothing(runs: dict[str, Run]) -> None:
    quantized, stages = (mean_kl(runs[first], runs["online, 1"]) for first in ("bf16, 1", "online, stages"))
    print(f"KL of one GPU from two stages {stages:.2e}, from the unquantized model {quantized:.2e}")
    assert stages <= 1e-6


def test_fewer_kv_heads_than_ranks(runs: dict[str, Run]) -> None:
    ranks, other = mean_kl(runs["one kv head, 1"], runs["one kv head, 2"]), mean_kl(runs["bf16, 1"], runs["online, 1"])
    print(f"one key/value head: KL of two ranks from one {ranks:.2e}; of quantization {other:.2e}")
    assert 0 < ranks <= other


def test_codes_of_ranks_are_those_of_one(runs: dict[str, Run], root: Path) -> None:
    """With `tp_consistent_activations`; without, a rank does not see the other's outlier."""

    def codes(way: str, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return torch.load(root / way / f"{rank}.pt")

    one = codes("online, 1", 0)
    assert len(one) == 4
    for name, (whole, scale) in one.items():
        for way, same in (("online, 2, shared", True), ("online, 2", False)):
            parts, scales = zip(*(codes(way, rank)[name] for rank in range(2)), strict=True)
            assert torch.equal(torch.cat(parts, dim=1), whole) == same, (name, way)
            assert all(torch.equal(part, scale) for part in scales) == same, (name, way)
