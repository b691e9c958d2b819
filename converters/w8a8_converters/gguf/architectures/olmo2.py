"""olmo2: OLMo 2, and Olmo 3, which has sliding windows."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored

# What llama.cpp takes where a file with windows says nothing.
_GLOBAL_EVERY = 4
# transformers 5 takes it for the layers with windows, whatever the `rope_theta` of a config in the published spelling.
_OLMO3_THETA = 500000.0


class Model(DenseArchitecture):
    """Olmo2ForCausalLM, or with windows Olmo3ForCausalLM: norms after attention and MLP, and on q and k as a whole."""

    def norms(self) -> dict[str, Recipe]:
        return {
            "post_attention_layernorm.weight": stored("post_attention_norm.weight", self.hidden),
            "post_feedforward_layernorm.weight": stored("post_ffw_norm.weight", self.hidden),
        }

    def layer_table(self, layer: int) -> Table:
        return super().layer_table(layer) | {
            "self_attn.q_norm.weight": stored("attn_q_norm.weight", self.heads * self.head_dim),
            "self_attn.k_norm.weight": stored("attn_k_norm.weight", self.kv_heads * self.head_dim),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        self.expect_divided_heads()
        config = super().config() | {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "attention_bias": False,
        }
        window = self.integer("attention.sliding_window", 0, minimum=0)
        layer_types = self.layer_types(_GLOBAL_EVERY)
        self.expect("rope.freq_base_swa", config["rope_theta"])
        if not window:
            return config
        self.expect("rope.freq_base", _OLMO3_THETA)
        return config | {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "layer_types": layer_types,
            "sliding_window": window,
        }
