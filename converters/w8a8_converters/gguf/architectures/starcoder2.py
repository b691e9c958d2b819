"""starcoder2: StarCoder2."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Architecture, Table
from w8a8_converters.gguf.architectures.recipe import stored
from w8a8_converters.gguf.architectures.rope import rope_scaling
from w8a8_converters.gguf.metadata import EPSILON


class Model(Architecture):
    """Starcoder2ForCausalLM: LayerNorms, biases everywhere, an MLP without gate.

    The published models have a window of 4,096 tokens, which files do not hold: as in llama.cpp, each token attends to all.
    """

    def model_table(self) -> Table:
        return {**super().model_table(), "model.norm.bias": stored("output_norm.bias", self.hidden)}

    def layer_table(self, layer: int) -> Table:
        hidden, inner = self.hidden, self.inner
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm.weight": stored("attn_norm.weight", hidden),
            "input_layernorm.bias": stored("attn_norm.bias", hidden),
            "self_attn.q_proj.weight": stored("attn_q.weight", queries, hidden),
            "self_attn.q_proj.bias": stored("attn_q.bias", queries),
            "self_attn.k_proj.weight": stored("attn_k.weight", keys, hidden),
            "self_attn.k_proj.bias": stored("attn_k.bias", keys),
            "self_attn.v_proj.weight": stored("attn_v.weight", keys, hidden),
            "self_attn.v_proj.bias": stored("attn_v.bias", keys),
            "self_attn.o_proj.weight": stored("attn_output.weight", hidden, queries),
            "self_attn.o_proj.bias": stored("attn_output.bias", hidden),
            "post_attention_layernorm.weight": stored("ffn_norm.weight", hidden),
            "post_attention_layernorm.bias": stored("ffn_norm.bias", hidden),
            "mlp.c_fc.weight": stored("ffn_up.weight", inner, hidden),
            "mlp.c_fc.bias": stored("ffn_up.bias", inner),
            "mlp.c_proj.weight": stored("ffn_down.weight", hidden, inner),
            "mlp.c_proj.bias": stored("ffn_down.bias", hidden),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        self.expect("attention.key_length", self.divided_head_dim)
        config = {
            "architectures": ["Starcoder2ForCausalLM"],
            "model_type": "starcoder2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.integer("context_length"),
            "norm_epsilon": self.number("attention.layer_norm_epsilon", numbers=EPSILON),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.is_tied,
            "use_bias": True,
            "vocab_size": self.vocab,
        }
        if scaling := rope_scaling(self):
            config["rope_scaling"] = scaling
        return config
