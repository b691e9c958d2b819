"""qwen2moe: Qwen1.5-MoE and Qwen2-57B, with experts and one shared expert in every layer."""

from typing import Any

from w8a8_converters.gguf.architectures import qwen2
from w8a8_converters.gguf.architectures.experts import QwenSharedExpert


class Model(QwenSharedExpert, qwen2.Model):
    """Qwen2MoeForCausalLM."""

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "norm_topk_prob": False,  # as llama.cpp has it for this architecture: no file says it
        }
