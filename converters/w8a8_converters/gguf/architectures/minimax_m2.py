"""minimax-m2: MiniMax-M2 and M2.x."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.experts import ExpertsOnly
from w8a8_converters.gguf.architectures.recipe import Recipe, stored

_SIGMOID = 2


class Model(ExpertsOnly):
    """MiniMaxM2ForCausalLM: one norm over all heads of q and of k, experts chosen by sigmoid and a bias."""

    def layer_table(self, layer: int) -> Table:
        return super().layer_table(layer) | {
            "self_attn.q_norm.weight": stored("attn_q_norm.weight", self.heads * self.head_dim),
            "self_attn.k_norm.weight": stored("attn_k_norm.weight", self.kv_heads * self.head_dim),
        }

    def mlp(self) -> dict[str, Recipe]:
        experts, hidden, inner = self.experts, self.hidden, self.inner
        moe = "block_sparse_moe"
        return {
            f"{moe}.gate.weight": stored("ffn_gate_inp.weight", experts, hidden),
            f"{moe}.e_score_correction_bias": stored("exp_probs_b.bias", experts).fp32(),
            f"{moe}.experts.{{}}.w1.weight": stored("ffn_gate_exps.weight", experts, inner, hidden).experts(),
            f"{moe}.experts.{{}}.w2.weight": stored("ffn_down_exps.weight", experts, hidden, inner).experts(),
            f"{moe}.experts.{{}}.w3.weight": stored("ffn_up_exps.weight", experts, inner, hidden).experts(),
        }

    def config(self) -> dict[str, Any]:
        self.expect("expert_gating_func", _SIGMOID)
        return super().config() | {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            "head_dim": self.head_dim,
            "num_experts_per_tok": self.size("expert_used_count"),
            "num_local_experts": self.experts,
            "qk_norm_type": "per_layer",
            "rotary_dim": self.rotary_dim,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        }
