"""The attention backend in an engine of the CPU build, in the place of vLLM's own for CPUs, in Triton's interpreter."""

from pathlib import Path

import pytest
import torch
from engines import Run, mean_kl, run_engine
from models import random_qwen3

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU build has no CPU attention"),
]

VOCABULARY = 320
PROMPTS = [[(7 * i * i + 13 * i + p) % VOCABULARY for i in range(20 + 9 * p)] for p in range(3)]
OURS = "vllm_w8a8_plugin.attention.backend.W8A8AttentionBackend"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two query heads to a key/value head."""
    return random_qwen3(
        tmp_path_factory.mktemp("attention") / "model",
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
    )


def answers(model: Path, dtype: str = "float16", ours: bool = False, **engine) -> Run:
    """Prompts together and in chunks: batches of chunks behind a prefix, whole prompts and single tokens."""
    return run_engine(
        model,
        PROMPTS,
        engine={
            "dtype": dtype,
            "skip_tokenizer_init": True,
            "max_model_len": 64,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "block_size": 32,
            "max_logprobs": VOCABULARY,
            "gpu_memory_utilization": 0.1,
        }
        | engine,
        sampling={"max_tokens": 4, "temperature": 0.0, "prompt_logprobs": VOCABULARY, "detokenize": False, "ignore_eos": True},
        backends={"CPU_ATTN": OURS} if ours else None,
        env={"TRITON_INTERPRET": "1"} if ours else None,
    )


def test_answers_as_vllms_own_attention(model: Path) -> None:
    exact = answers(model, "float32")
    stock, ours, int8 = (
        answers(model),
        answers(model, ours=True),
        answers(model, ours=True, kv_cache_dtype="int8_per_token_head"),
    )
    assert "W8A8 attention" not in stock.log
    assert "W8A8 attention: queries of up to 16 tokens run on triton" in ours.log
    assert "the int8 KV cache takes 272 bytes per token and layer, its scales included; 16 bits take 512" in int8.log
    distances = [mean_kl(exact, run) for run in (stock, ours, int8)]
    print("KL from fp32: vLLM's attention {:.2e}, ours {:.2e}, ours with an int8 cache {:.2e}".format(*distances))
    assert distances[1] <= 1.5 * distances[0]
    # 1.1e-4 was seen.
    assert distances[2] <= 1e-3
    assert [a.token_ids for a in ours.answers] == [a.token_ids for a in exact.answers]
