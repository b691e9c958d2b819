"""gemma2: Gemma 2."""

from typing import Any

from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.dense import DenseArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored

# What llama.cpp takes where the file says nothing.
_GLOBAL_EVERY = 2
_WINDOW = 4096
_ATTENTION_SOFTCAP, _FINAL_SOFTCAP = 50.0, 30.0
# Gemma 2 27B, told by its depth as in llama.cpp, scales attention by the hidden size per head instead of the head size.
_LAYERS_OF_27B = 46


class Model(DenseArchitecture):
    """Gemma2ForCausalLM, always tied. The factor hidden_size**0.5 on the embeddings is the model's own, no tensor holds it."""

    @property
    def head_dim(self) -> int:
        self.size("attention.key_length")  # required: it is not hidden/heads
        return super().head_dim

    def model_table(self) -> Table:
        return {
            "model.embed_tokens.weight": stored("token_embd.weight", self.vocab, self.hidden),
            "model.norm.weight": stored("output_norm.weight", self.hidden).minus_one(),
        }

    def norms(self) -> dict[str, Recipe]:
        # Gemma multiplies by 1 + weight. The file holds the sum.
        return {
            "input_layernorm.weight": stored("attn_norm.weight", self.hidden).minus_one(),
            "post_attention_layernorm.weight": stored("post_attention_norm.weight", self.hidden).minus_one(),
            "pre_feedforward_layernorm.weight": stored("ffn_norm.weight", self.hidden).minus_one(),
            "post_feedforward_layernorm.weight": stored("post_ffw_norm.weight", self.hidden).minus_one(),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        config = super().config()
        self.expect("rope.freq_base_swa", config["rope_theta"])
        config.pop("hidden_act")
        return config | {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            "attention_bias": False,
            "attn_logit_softcapping": self.number("attn_logit_softcapping", _ATTENTION_SOFTCAP) or None,
            "final_logit_softcapping": self.number("final_logit_softcapping", _FINAL_SOFTCAP) or None,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": self.layer_types(_GLOBAL_EVERY),
            "query_pre_attn_scalar": self.hidden // self.heads if self.n_layers == _LAYERS_OF_27B else self.head_dim,
            "sliding_window": self.integer("attention.sliding_window", _WINDOW),
        }
