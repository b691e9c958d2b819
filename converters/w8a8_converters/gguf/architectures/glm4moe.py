"""glm4moe: GLM-4.5 to 4.7 and their Air models, text only."""

from typing import Any

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures import glm4
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.architectures.shared_experts import SharedExpertsArchitecture

_QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")


class Model(SharedExpertsArchitecture):
    """Glm4MoeForCausalLM. Rows of q and k are as in Hugging Face."""

    def norms(self) -> dict[str, Recipe]:
        table = {
            "input_layernorm.weight": stored("attn_norm.weight", self.hidden),
            "post_attention_layernorm.weight": stored("post_attention_norm.weight", self.hidden),
        }
        if self.any_layer_has(*_QK_NORMS):  # GLM-4.5 has them, GLM-4.5-Air has not
            table |= {
                "self_attn.q_norm.weight": stored("attn_q_norm.weight", self.head_dim),
                "self_attn.k_norm.weight": stored("attn_k_norm.weight", self.head_dim),
            }
        return table

    def projections(self) -> dict[str, Recipe]:
        return super().projections() | glm4.biases(self)

    def config(self) -> dict[str, Any]:
        if not self.has_sigmoid_gating:
            raise ConversionError(f"{self.file.path}: glm4moe with softmax gating is not supported; expected sigmoid")
        return super().config() | {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "attention_bias": bool(glm4.biases(self)),
            "head_dim": self.head_dim,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "use_qk_norm": self.any_layer_has(*_QK_NORMS),
        }
