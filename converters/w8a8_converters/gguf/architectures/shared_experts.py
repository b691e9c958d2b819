"""What DeepSeek's mixtures of experts and those after their pattern share: experts, leading dense layers, MTP layers."""

from typing import Any

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.experts import routed_experts
from w8a8_converters.gguf.architectures.mtp import MTPArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored

# Values of expert_gating_func.
SOFTMAX, SIGMOID = 1, 2


class SharedExpertsArchitecture(MTPArchitecture):
    """Routed and shared experts after leading dense layers; MTP layers follow the others under `model.layers.N`."""

    @property
    def experts(self) -> int:
        return self.size("expert_count")

    @property
    def expert_inner(self) -> int:
        return self.size("expert_feed_forward_length")

    @property
    def dense_layers(self) -> int:
        """How many layers at the front have a plain MLP."""
        return self.integer("leading_dense_block_count", 0, minimum=0)

    @property
    def default_gating(self) -> int:
        """How experts are scored where the file does not say."""
        return SIGMOID

    @property
    def has_sigmoid_gating(self) -> bool:
        """Whether experts are scored by sigmoid and chosen with `exp_probs_b`; else by softmax."""
        gating = self.integer("expert_gating_func", 0, minimum=0) or self.default_gating
        if gating not in (SOFTMAX, SIGMOID):
            raise ConversionError(
                f"{self.file.path}: {self.name}.expert_gating_func is {gating}, which is not supported; "
                f"expected {SOFTMAX} (softmax) or {SIGMOID} (sigmoid)"
            )
        return gating == SIGMOID

    def layer_table(self, layer: int) -> Table:
        mlp = self.mlp() if layer < self.dense_layers else self._experts_table()
        return self.norms() | self.projections() | mlp | (self._mtp_table() if layer >= self.main_layers else {})

    def config(self) -> dict[str, Any]:
        groups = self.integer("expert_group_count", 1)
        return super().config() | {
            "first_k_dense_replace": self.dense_layers,
            "moe_intermediate_size": self.expert_inner,
            "n_group": groups,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.size("expert_shared_count"),
            "norm_topk_prob": self.flag("expert_weights_norm", False),
            "num_experts_per_tok": self.size("expert_used_count"),
            "num_hidden_layers": self.main_layers,
            "num_nextn_predict_layers": self.n_layers - self.main_layers,
            "routed_scaling_factor": self.number("expert_weights_scale", 0.0) or 1.0,  # 0, too, is no scale
            "topk_group": self.integer("expert_group_used_count") if groups > 1 else self._one_group(),
        }

    def _one_group(self) -> int:
        self.expect("expert_group_used_count", 1)
        return 1

    def _experts_table(self) -> dict[str, Recipe]:
        hidden, inner = self.hidden, self.expert_inner * self.size("expert_shared_count")
        table = routed_experts(self, self.experts, self.expert_inner) | {
            "mlp.shared_experts.gate_proj.weight": stored("ffn_gate_shexp.weight", inner, hidden),
            "mlp.shared_experts.up_proj.weight": stored("ffn_up_shexp.weight", inner, hidden),
            "mlp.shared_experts.down_proj.weight": stored("ffn_down_shexp.weight", hidden, inner),
        }
        if self.has_sigmoid_gating:
            table["mlp.gate.e_score_correction_bias"] = stored("exp_probs_b.bias", self.experts).fp32()
        return table

    def _mtp_table(self) -> dict[str, Recipe]:
        # A file may leave out what equals the model's own embedding and lm_head.
        return {
            "enorm.weight": stored("nextn.enorm.weight", self.hidden),
            "hnorm.weight": stored("nextn.hnorm.weight", self.hidden),
            "eh_proj.weight": stored("nextn.eh_proj.weight", self.hidden, 2 * self.hidden),
            "embed_tokens.weight": stored("nextn.embed_tokens.weight", self.vocab, self.hidden).optional(),
            "shared_head.norm.weight": stored("nextn.shared_head_norm.weight", self.hidden),
            "shared_head.head.weight": stored("nextn.shared_head_head.weight", self.vocab, self.hidden).optional(),
        }
