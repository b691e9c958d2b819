"""qwen35: Qwen3.5 and 3.6, dense, text only. A vision tower comes in a file of its own, which is not read."""

from typing import Any

from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.delta_net import DeltaNetArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored


class Model(DeltaNetArchitecture):
    """Qwen3_5ForCausalLM, which vLLM has from 0.27 on.

    The file has the first value head of every key head, then the second of every key head; Hugging Face has all value heads
    of the first key head, then those of the next.
    """

    def value_order(self, size: int) -> Tensor:
        per_key = self.value_heads // self.key_heads
        return super().value_order(size).reshape(per_key, self.key_heads, size).transpose(0, 1).reshape(-1)

    def delta_net_projections(self, layer: int) -> dict[str, Recipe]:
        hidden, keys, values = self.hidden, self.key_heads * self.key_dim, self.value_heads * self.value_dim
        order, heads = self.value_order(self.value_dim), self.value_order(1)
        return {
            "linear_attn.in_proj_qkv.weight": stored("attn_qkv.weight", 2 * keys + values, hidden).take(self.channel_order()),
            "linear_attn.in_proj_z.weight": stored("attn_gate.weight", values, hidden).take(order),
            "linear_attn.in_proj_b.weight": stored("ssm_beta.weight", self.value_heads, hidden).take(heads),
            "linear_attn.in_proj_a.weight": stored("ssm_alpha.weight", self.value_heads, hidden).take(heads),
        }

    def config(self) -> dict[str, Any]:
        config = super().config()
        # No release of transformers or vLLM that has the model reads another spelling.
        rope = {
            **(config.pop("rope_scaling", None) or {"rope_type": "default"}),
            "mrope_interleaved": True,
            "mrope_section": self._mrope_section(),
            "partial_rotary_factor": config.pop("partial_rotary_factor"),
            "rope_theta": config.pop("rope_theta"),
        }
        return config | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "attn_output_gate": True,
            # Of the recurrent states, in vLLM's cache: so in all models that were published, and no file says it.
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": self.n_layers - self.main_layers,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": rope,
        }

    def _mrope_section(self) -> list[int]:
        """Of time, height and width; positions of text are the same in all."""
        key = "rope.dimension_sections"
        sections = self.value(key)
        pairs = self.rotary_dim // 2
        if not isinstance(sections, list) or len(sections) != 4 or sections[3] != 0 or sum(sections) != pairs:
            raise ConversionError(
                f"{self.file.path}: metadata {self.name}.{key} is {sections}, expected three numbers and 0 that add up to the "
                f"{pairs} pairs of the rotary embedding"
            )
        return sections[:3]
