"""llama: Llama 1 to 3, Mistral, Mixtral, SmolLM and others that llama.cpp stores under this name."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Architecture, Table, interleaved_to_halves
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.architectures.rope import ROPE_FREQS, rope_scaling

_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


class Model(Architecture):
    """LlamaForCausalLM, or with experts MixtralForCausalLM. Rows of q and k are stored interleaved."""

    setting_tensors = (ROPE_FREQS,)
    ignored_keys = ("tensor_data_layout",)  # of early files: that rows are interleaved, as they are in all

    @property
    def experts(self) -> int:
        return self.integer("expert_count", 0, minimum=0)

    def layer_table(self, layer: int) -> Table:
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        query_order = interleaved_to_halves(self.heads, self.head_dim)
        key_order = interleaved_to_halves(self.kv_heads, self.head_dim)
        table = {
            "input_layernorm.weight": stored("attn_norm.weight", hidden),
            "self_attn.q_proj.weight": stored("attn_q.weight", queries, hidden).take(query_order),
            "self_attn.k_proj.weight": stored("attn_k.weight", keys, hidden).take(key_order),
            "self_attn.v_proj.weight": stored("attn_v.weight", keys, hidden),
            "self_attn.o_proj.weight": stored("attn_output.weight", hidden, queries),
            "post_attention_layernorm.weight": stored("ffn_norm.weight", hidden),
        }
        if self.any_layer_has(*_ATTENTION_BIASES):
            table |= {
                "self_attn.q_proj.bias": stored("attn_q.bias", queries).take(query_order),
                "self_attn.k_proj.bias": stored("attn_k.bias", keys).take(key_order),
                "self_attn.v_proj.bias": stored("attn_v.bias", keys),
                "self_attn.o_proj.bias": stored("attn_output.bias", hidden),
            }
        return table | (self._experts_table() if self.experts else self._mlp_table())

    def _mlp_table(self) -> dict[str, Recipe]:
        table = {
            "mlp.gate_proj.weight": stored("ffn_gate.weight", self.inner, self.hidden),
            "mlp.up_proj.weight": stored("ffn_up.weight", self.inner, self.hidden),
            "mlp.down_proj.weight": stored("ffn_down.weight", self.hidden, self.inner),
        }
        if self.any_layer_has(*_MLP_BIASES):
            table |= {
                "mlp.gate_proj.bias": stored("ffn_gate.bias", self.inner),
                "mlp.up_proj.bias": stored("ffn_up.bias", self.inner),
                "mlp.down_proj.bias": stored("ffn_down.bias", self.hidden),
            }
        return table

    def _experts_table(self) -> dict[str, Recipe]:
        experts, hidden, inner = self.experts, self.hidden, self.inner
        moe = "block_sparse_moe"
        router = {f"{moe}.gate.weight": stored("ffn_gate_inp.weight", experts, hidden)}
        if self.any_layer_has("ffn_gate.0.weight"):  # of early files, which do not stack them
            return router | {
                f"{moe}.experts.{expert}.{theirs}.weight": stored(f"ffn_{ours}.{expert}.weight", *shape)
                for expert in range(experts)
                for theirs, ours, shape in (
                    ("w1", "gate", (inner, hidden)),
                    ("w2", "down", (hidden, inner)),
                    ("w3", "up", (inner, hidden)),
                )
            }
        return router | {
            f"{moe}.experts.{{}}.w1.weight": stored("ffn_gate_exps.weight", experts, inner, hidden).experts(),
            f"{moe}.experts.{{}}.w2.weight": stored("ffn_down_exps.weight", experts, hidden, inner).experts(),
            f"{moe}.experts.{{}}.w3.weight": stored("ffn_up_exps.weight", experts, inner, hidden).experts(),
        }

    def config(self) -> dict[str, Any]:
        self.expect("rope.dimension_count", self.head_dim)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": self.any_layer_has(*_ATTENTION_BIASES),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.integer("context_length"),
            "mlp_bias": self.any_layer_has(*_MLP_BIASES),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "tie_word_embeddings": self.is_tied,
            "vocab_size": self.vocab,
        }
        if scaling := rope_scaling(self):
            config["rope_scaling"] = scaling
        if not self.experts:
            self.expect("expert_used_count", 0)
            return config
        for dense in ("attention_bias", "mlp_bias"):
            config.pop(dense)
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": self.integer("expert_used_count"),
            "num_local_experts": self.experts,
        }
