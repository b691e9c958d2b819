"""qwen3: Qwen3, dense."""

from typing import Any

from gguf import PoolingType

from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import stored


class Model(DenseArchitecture):
    """Qwen3ForCausalLM: a norm on each head of q and k."""

    def layer_table(self, layer: int) -> Table:
        return super().layer_table(layer) | {
            "self_attn.q_norm.weight": stored("attn_q_norm.weight", self.head_dim),
            "self_attn.k_norm.weight": stored("attn_k_norm.weight", self.head_dim),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        # Embedding models of the family have it; vLLM pools the last token of such a class by default.
        self.expect("pooling_type", int(PoolingType.LAST))
        return super().config() | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": self.head_dim,
            "use_sliding_window": False,  # no file says it, and llama.cpp has none
        }
