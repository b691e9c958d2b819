"""llama: Llama 1 to 3, Mistral, Mixtral, SmolLM and others that llama.cpp stores under this name."""

from typing import Any

from w8a8_converters.gguf.architectures.base import interleaved_to_halves
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.architectures.rope import ROPE_FREQS

_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


class Model(DenseArchitecture):
    """LlamaForCausalLM, or with experts MixtralForCausalLM. Rows of q and k are stored interleaved."""

    setting_tensors = (ROPE_FREQS,)
    ignored_keys = ("tensor_data_layout",)  # of early files: that rows are interleaved, as they are in all

    @property
    def experts(self) -> int:
        return self.size("expert_count", 0, minimum=0)

    def projections(self) -> dict[str, Recipe]:
        table = super().projections()
        if self.any_layer_has(*_ATTENTION_BIASES):
            keys = self.kv_heads * self.head_dim
            table |= {
                "self_attn.q_proj.bias": stored("attn_q.bias", self.heads * self.head_dim),
                "self_attn.k_proj.bias": stored("attn_k.bias", keys),
                "self_attn.v_proj.bias": stored("attn_v.bias", keys),
                "self_attn.o_proj.bias": stored("attn_output.bias", self.hidden),
            }
        for name, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads)):
            order = interleaved_to_halves(heads, self.head_dim)
            table |= {key: recipe.take(order) for key, recipe in table.items() if name in key}
        return table

    def mlp(self) -> dict[str, Recipe]:
        if self.experts:
            return self._experts_table()
        table = super().mlp()
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
            self.bound("expert_count", experts, len(self.file.tensors), "the number of tensors in the file")
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
        self.expect_whole_rotary()
        config = super().config() | {"head_dim": self.head_dim}
        if self.experts:
            return config | {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_experts_per_tok": self.size("expert_used_count"),
                "num_local_experts": self.experts,
            }
        self.expect("expert_used_count", 0)
        return config | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": self.any_layer_has(*_ATTENTION_BIASES),
            "mlp_bias": self.any_layer_has(*_MLP_BIASES),
        }
