"""phi3: Phi-3, Phi-3.5 and Phi-4, text only."""

from typing import Any

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.architectures.rope import ROPE_FACTORS


class Model(DenseArchitecture):
    """Phi3ForCausalLM: q, k and v, and gate and up, are one tensor each, in the file as in Hugging Face."""

    setting_tensors = ROPE_FACTORS

    def projections(self) -> dict[str, Recipe]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.qkv_proj.weight": stored("attn_qkv.weight", queries + 2 * keys, self.hidden),
            "self_attn.o_proj.weight": stored("attn_output.weight", self.hidden, queries),
        }

    def mlp(self) -> dict[str, Recipe]:
        return {
            "mlp.gate_up_proj.weight": stored("ffn_up.weight", 2 * self.inner, self.hidden),
            "mlp.down_proj.weight": stored("ffn_down.weight", self.hidden, self.inner),
        }

    def config(self) -> dict[str, Any]:
        self.expect_divided_heads()
        config = super().config()
        if config.get("rope_scaling", {}).get("rope_type"):
            raise ConversionError(f"{self.file.path}: {self.name} with another rope scaling than longrope is not supported")
        return config | {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "original_max_position_embeddings": self.integer(
                "rope.scaling.original_context_length", config["max_position_embeddings"]
            ),
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            # 0 where there is no window, as in Phi-4. llama.cpp itself gives windows up.
            "sliding_window": self.integer("attention.sliding_window", 0, minimum=0) or None,
        }
