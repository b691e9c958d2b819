"""qwen3moe: Qwen3 with experts in every layer."""

from typing import Any

from w8a8_converters.gguf.architectures import qwen3
from w8a8_converters.gguf.architectures.experts import QwenExperts


class Model(QwenExperts, qwen3.Model):
    """Qwen3MoeForCausalLM."""

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,  # as llama.cpp has it for this architecture: no file says it
        }
