"""Experts under the names that Qwen's and DeepSeek's checkpoints have."""

from typing import Any

import torch

from w8a8_converters.gguf.architectures.base import Architecture
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored


def routed_experts(architecture: Architecture, experts: int, inner: int) -> dict[str, Recipe]:
    """A router and its experts of `inner` rows, whose gate and up a file may hold joined."""
    hidden = architecture.hidden
    if architecture.any_layer_has("ffn_gate_up_exps.weight"):
        both = stored("ffn_gate_up_exps.weight", experts, 2 * inner, hidden)
        gate, up = (both.take(torch.arange(first, first + inner)) for first in (0, inner))
    else:
        gate, up = (stored(f"ffn_{name}_exps.weight", experts, inner, hidden) for name in ("gate", "up"))
    return {
        "mlp.gate.weight": stored("ffn_gate_inp.weight", experts, hidden),
        "mlp.experts.{}.gate_proj.weight": gate.experts(),
        "mlp.experts.{}.up_proj.weight": up.experts(),
        "mlp.experts.{}.down_proj.weight": stored("ffn_down_exps.weight", experts, hidden, inner).experts(),
    }


class ExpertsOnly(DenseArchitecture):
    """Experts in every layer, of one size that the metadata name twice. Subclasses say what they are called."""

    @property
    def experts(self) -> int:
        return self.size("expert_count")

    @property
    def inner(self) -> int:
        """Of an expert."""
        inner = self.size("expert_feed_forward_length")
        self.expect("feed_forward_length", inner)
        return inner


class QwenExperts(DenseArchitecture):
    """Experts in place of the MLP of every layer, chosen by softmax. To stand before the class of the dense model."""

    @property
    def experts(self) -> int:
        return self.size("expert_count")

    @property
    def used_experts(self) -> int:
        """Of each token."""
        return self.size("expert_used_count")

    @property
    def expert_inner(self) -> int:
        return self.size("expert_feed_forward_length", self.inner // self.used_experts)

    def mlp(self) -> dict[str, Recipe]:
        return routed_experts(self, self.experts, self.expert_inner)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.expert_inner,
            "num_experts": self.experts,
            "num_experts_per_tok": self.used_experts,
        }


class QwenSharedExpert(QwenExperts):
    """And beside them one that every token has, weighted by a gate."""

    @property
    def shared_inner(self) -> int:
        return self.size("expert_shared_feed_forward_length", self.inner)

    def mlp(self) -> dict[str, Recipe]:
        hidden, inner = self.hidden, self.shared_inner
        return super().mlp() | {
            "mlp.shared_expert.gate_proj.weight": stored("ffn_gate_shexp.weight", inner, hidden),
            "mlp.shared_expert.up_proj.weight": stored("ffn_up_shexp.weight", inner, hidden),
            "mlp.shared_expert.down_proj.weight": stored("ffn_down_shexp.weight", hidden, inner),
            "mlp.shared_expert_gate.weight": stored("ffn_gate_inp_shexp.weight", 1, hidden),
        }

    def config(self) -> dict[str, Any]:
        return super().config() | {"shared_expert_intermediate_size": self.shared_inner}
