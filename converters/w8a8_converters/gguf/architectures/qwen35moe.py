"""qwen35moe: Qwen3.5 and 3.6 with experts in every layer."""

from typing import Any

from w8a8_converters.gguf.architectures import qwen35
from w8a8_converters.gguf.architectures.experts import QwenSharedExpert


class Model(QwenSharedExpert, qwen35.Model):
    """Qwen3_5MoeForCausalLM, which vLLM has from 0.27 on.

    Some published checkpoints stack the experts' weights. One tensor for each expert is what transformers writes, what both
    load, and what can be quantized.
    """

    @property
    def inner(self) -> int:
        return self.size("feed_forward_length", 0, minimum=0)  # no layer has a dense MLP: most files lack it

    def config(self) -> dict[str, Any]:
        config = super().config()
        for dense in ("decoder_sparse_step", "intermediate_size", "mlp_only_layers"):
            config.pop(dense)
        return config | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
