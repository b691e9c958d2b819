"""glm4: GLM-4-0414 and GLM-Z1, dense and text only."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Architecture
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored


class Model(DenseArchitecture):
    """Glm4ForCausalLM. It pairs neighbouring rows of q and k for the rotary embedding, as the file does."""

    def norms(self) -> dict[str, Recipe]:
        return {
            "input_layernorm.weight": stored("attn_norm.weight", self.hidden),
            "post_self_attn_layernorm.weight": stored("post_attention_norm.weight", self.hidden),
            "post_attention_layernorm.weight": stored("ffn_norm.weight", self.hidden),
            "post_mlp_layernorm.weight": stored("post_ffw_norm.weight", self.hidden),
        }

    def projections(self) -> dict[str, Recipe]:
        return super().projections() | biases(self)

    def mlp(self) -> dict[str, Recipe]:
        return {
            "mlp.gate_up_proj.weight": stored("ffn_up.weight", 2 * self.inner, self.hidden),
            "mlp.down_proj.weight": stored("ffn_down.weight", self.hidden, self.inner),
        }

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "attention_bias": bool(biases(self)),
            "head_dim": self.head_dim,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
        }


def biases(architecture: Architecture) -> dict[str, Recipe]:
    """Those of q, k and v, where the model has them."""
    if not architecture.any_layer_has("attn_q.bias", "attn_k.bias", "attn_v.bias"):
        return {}
    queries, keys = (count * architecture.head_dim for count in (architecture.heads, architecture.kv_heads))
    return {
        "self_attn.q_proj.bias": stored("attn_q.bias", queries),
        "self_attn.k_proj.bias": stored("attn_k.bias", keys),
        "self_attn.v_proj.bias": stored("attn_v.bias", keys),
    }
