"""What the architectures with plain attention and a gated MLP in every layer share."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Architecture, Table
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.architectures.rope import rope_scaling


class DenseArchitecture(Architecture):
    """RMSNorms before attention and MLP, no biases, rows of q and k as in Hugging Face. Subclasses add to it and replace."""

    def layer_table(self, layer: int) -> Table:
        return self.norms() | self.projections() | self.mlp()

    def norms(self) -> dict[str, Recipe]:
        return {
            "input_layernorm.weight": stored("attn_norm.weight", self.hidden),
            "post_attention_layernorm.weight": stored("ffn_norm.weight", self.hidden),
        }

    def projections(self) -> dict[str, Recipe]:
        """Of the attention."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": stored("attn_q.weight", queries, hidden),
            "self_attn.k_proj.weight": stored("attn_k.weight", keys, hidden),
            "self_attn.v_proj.weight": stored("attn_v.weight", keys, hidden),
            "self_attn.o_proj.weight": stored("attn_output.weight", hidden, queries),
        }

    def mlp(self) -> dict[str, Recipe]:
        return {
            "mlp.gate_proj.weight": stored("ffn_gate.weight", self.inner, self.hidden),
            "mlp.up_proj.weight": stored("ffn_up.weight", self.inner, self.hidden),
            "mlp.down_proj.weight": stored("ffn_down.weight", self.hidden, self.inner),
        }

    def config(self) -> dict[str, Any]:
        """Without `architectures` and `model_type`."""
        config = {
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.integer("context_length"),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.is_tied,
            "vocab_size": self.vocab,
        }
        if scaling := rope_scaling(self):
            config["rope_scaling"] = scaling
        return config

    def expect_divided_heads(self) -> None:
        """Refuses files with a head size of their own: the model's classes have hidden_size / heads and nothing else."""
        self.expect("attention.key_length", self.divided_head_dim)
