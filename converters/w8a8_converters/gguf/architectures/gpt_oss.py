"""gpt-oss: OpenAI's open models, with experts in MXFP4."""

from typing import Any

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.experts import ExpertsOnly
from w8a8_converters.gguf.architectures.recipe import Recipe, joined, stored
from w8a8_converters.gguf.values import Values, interleaved

# vLLM has windows in every second layer, beginning with the first, and this activation, whatever the config says.
_GLOBAL_EVERY = 2
# What llama.cpp takes where the file says nothing.
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


class Model(ExpertsOnly):
    """GptOssForCausalLM, its experts in the layout of the checkpoints in bf16: stacked, transposed, gate and up by turns."""

    def layer_table(self, layer: int) -> Table:
        return super().layer_table(layer) | {"self_attn.sinks": stored("attn_sinks.weight", self.heads)}

    def norms(self) -> dict[str, Recipe]:
        return {
            "input_layernorm.weight": stored("attn_norm.weight", self.hidden),
            "post_attention_layernorm.weight": stored("post_attention_norm.weight", self.hidden),
        }

    def projections(self) -> dict[str, Recipe]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return super().projections() | {
            "self_attn.q_proj.bias": stored("attn_q.bias", queries),
            "self_attn.k_proj.bias": stored("attn_k.bias", keys),
            "self_attn.v_proj.bias": stored("attn_v.bias", keys),
            "self_attn.o_proj.bias": stored("attn_output.bias", self.hidden),
        }

    def mlp(self) -> dict[str, Recipe]:
        experts, hidden, inner = self.experts, self.hidden, self.inner
        weights = [stored(f"ffn_{name}_exps.weight", experts, inner, hidden) for name in ("gate", "up")]
        biases = [stored(f"ffn_{name}_exps.bias", experts, inner) for name in ("gate", "up")]
        down = stored("ffn_down_exps.weight", experts, hidden, inner)
        return {
            "mlp.router.weight": stored("ffn_gate_inp.weight", experts, hidden),
            "mlp.router.bias": stored("ffn_gate_inp.bias", experts),
            "mlp.experts.gate_up_proj": joined(interleaved, *weights).then(Values.transposed),
            "mlp.experts.gate_up_proj_bias": joined(interleaved, *biases),
            "mlp.experts.down_proj": down.then(Values.transposed),
            "mlp.experts.down_proj_bias": stored("ffn_down_exps.bias", experts, hidden),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        config = super().config()
        scaling = config.get("rope_scaling", {})
        if scaling.get("rope_type") != "yarn":
            raise ConversionError(f"{self.file.path}: gpt-oss with rope scaling other than yarn is not supported")
        self.expect("rope.freq_base_swa", self.value("rope.freq_base", config["rope_theta"]))
        layer_types = self.layer_types(_GLOBAL_EVERY)
        if layer_types != ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(self.n_layers)]:
            raise ConversionError(
                f"{self.file.path}: {self.name}.attention.sliding_window_pattern is not supported; "
                "expected windows in every second layer, beginning with the first"
            )
        return config | {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "head_dim": self.head_dim,
            "layer_types": layer_types,
            "num_experts_per_tok": self.size("expert_used_count"),
            "num_local_experts": self.experts,
            # The model's frequencies are not rounded to whole dimensions; no file says it.
            "rope_scaling": _YARN_BETAS | scaling | {"truncate": False},
            "sliding_window": self.integer("attention.sliding_window"),
            "swiglu_limit": 7.0,
        }
