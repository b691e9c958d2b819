"""qwen2: Qwen2 and Qwen2.5."""

from typing import Any

from gguf import PoolingType

from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored


class Model(DenseArchitecture):
    """Qwen2ForCausalLM."""

    def layer_table(self, layer: int) -> Table:
        return super().layer_table(layer) | self.biases()

    def biases(self) -> dict[str, Recipe]:
        """Of q, k and v, which Hugging Face's and vLLM's classes always have."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj.bias": stored("attn_q.bias", queries),
            "self_attn.k_proj.bias": stored("attn_k.bias", keys),
            "self_attn.v_proj.bias": stored("attn_v.bias", keys),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        self.expect_divided_heads()
        # Embedding models of the family have it; vLLM pools the last token of such a class by default.
        self.expect("pooling_type", int(PoolingType.LAST))
        return super().config() | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": False,  # no file says it, and llama.cpp has none
        }
