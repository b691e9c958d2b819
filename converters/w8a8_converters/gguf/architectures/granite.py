"""granite: Granite 3 and 4, dense."""

from typing import Any

from w8a8_converters.gguf.architectures import llama


class Model(llama.Model):
    """GraniteForCausalLM: Llama with factors on embeddings, attention, residuals and logits."""

    def config(self) -> dict[str, Any]:
        self.expect("expert_count", 0)
        self.expect("rope.scaling.finetuned", True)  # llama.cpp's switch for models without positions
        return super().config() | {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            # As in llama.cpp, 0 stands for what the file does not say.
            "attention_multiplier": self.number("attention.scale", 0.0) or self.head_dim**-0.5,
            "embedding_multiplier": self.number("embedding_scale", 0.0) or 1.0,
            "logits_scaling": self.number("logit_scale"),
            "residual_multiplier": self.number("residual_scale", 0.0) or 1.0,
        }
