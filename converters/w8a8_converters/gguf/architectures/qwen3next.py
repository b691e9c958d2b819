"""qwen3next: Qwen3-Next."""

from typing import Any

import torch
from torch import Tensor

from w8a8_converters.gguf.architectures.delta_net import DeltaNetArchitecture
from w8a8_converters.gguf.architectures.experts import QwenSharedExpert
from w8a8_converters.gguf.architectures.recipe import Recipe, joined, stored
from w8a8_converters.gguf.values import concatenated


class Model(QwenSharedExpert, DeltaNetArchitecture):
    """Qwen3NextForCausalLM. Each key head of its delta nets has its rows of q, k, v, z together, and those of b and a."""

    def delta_net_projections(self, layer: int) -> dict[str, Recipe]:
        hidden, values = self.hidden, self.value_heads * self.value_dim
        channels = 2 * self.key_heads * self.key_dim + values
        if f"blk.{layer}.ssm_in.weight" in self.file.tensors:  # early files, in Hugging Face order
            together = stored("ssm_in.weight", channels + values, hidden)
        else:
            apart = stored("attn_qkv.weight", channels, hidden), stored("attn_gate.weight", values, hidden)
            together = joined(concatenated, *apart).take(self._order())
        return {
            "linear_attn.in_proj_qkvz.weight": together,
            "linear_attn.in_proj_ba.weight": stored("ssm_ba.weight", 2 * self.value_heads, hidden),
        }

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "norm_topk_prob": True,  # as llama.cpp has it for this architecture: no file says it
            "num_nextn_predict_layers": self.n_layers - self.main_layers,
        }

    def _order(self) -> Tensor:
        """Rows of q, k, v, z of the first key head, then of the next, where the file has all of q, then k, v, z."""
        sizes = [self.key_dim, self.key_dim, *[self.value_heads // self.key_heads * self.value_dim] * 2]
        parts = torch.arange(self.key_heads * sum(sizes)).split([self.key_heads * size for size in sizes])
        return torch.cat([part.reshape(self.key_heads, -1) for part in parts], dim=1).reshape(-1)
