"""gemma3: the text model of Gemma 3. A vision tower comes in a file of its own, which is not read."""

from typing import Any

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture, Table
from w8a8_converters.gguf.architectures.recipe import stored
from w8a8_converters.gguf.architectures.rope import rope_scaling
from w8a8_converters.gguf.metadata import POSITIVE

# What llama.cpp takes where the file says nothing, and files say nothing of the first.
_GLOBAL_EVERY = 6
_LOCAL_ROPE_BASE = 10000.0
# Gemma 3 27B, told by its depth as in llama.cpp, scales attention by the hidden size per head instead of the head size.
_LAYERS_OF_27B = 62


class Model(Architecture):
    """Gemma3ForCausalLM. The factor hidden_size**0.5 on the embeddings is the model's own, no tensor holds it."""

    @property
    def head_dim(self) -> int:
        self.size("attention.key_length")  # required: it is not hidden/heads
        return super().head_dim

    def model_table(self) -> Table:
        return super().model_table() | {"model.norm.weight": stored("output_norm.weight", self.hidden).minus_one()}

    def layer_table(self, layer: int) -> Table:
        hidden, inner = self.hidden, self.inner
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        # Gemma multiplies by 1 + weight. The file holds the sum.
        return {
            "input_layernorm.weight": stored("attn_norm.weight", hidden).minus_one(),
            "self_attn.q_proj.weight": stored("attn_q.weight", queries, hidden),
            "self_attn.k_proj.weight": stored("attn_k.weight", keys, hidden),
            "self_attn.v_proj.weight": stored("attn_v.weight", keys, hidden),
            "self_attn.o_proj.weight": stored("attn_output.weight", hidden, queries),
            "self_attn.q_norm.weight": stored("attn_q_norm.weight", self.head_dim).minus_one(),
            "self_attn.k_norm.weight": stored("attn_k_norm.weight", self.head_dim).minus_one(),
            "post_attention_layernorm.weight": stored("post_attention_norm.weight", hidden).minus_one(),
            "pre_feedforward_layernorm.weight": stored("ffn_norm.weight", hidden).minus_one(),
            "mlp.gate_proj.weight": stored("ffn_gate.weight", inner, hidden),
            "mlp.up_proj.weight": stored("ffn_up.weight", inner, hidden),
            "mlp.down_proj.weight": stored("ffn_down.weight", hidden, inner),
            "post_feedforward_layernorm.weight": stored("post_ffw_norm.weight", hidden).minus_one(),
        }

    def config(self) -> dict[str, Any]:
        self.expect_whole_rotary()
        # The models have one window each; like llama.cpp, a file without it, or with 0, attends to everything in every layer.
        window = self.integer("attention.sliding_window", 0, minimum=0) or None
        layer_types = self.layer_types(_GLOBAL_EVERY)
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": self.number("final_logit_softcapping", 0.0) or None,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "layer_types": layer_types if window else ["full_attention"] * self.n_layers,
            "max_position_embeddings": self.integer("context_length"),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "query_pre_attn_scalar": self._query_scalar(),
            "rms_norm_eps": self.rms_norm_eps,
            **self._rope(),
            "sliding_window": window,
            "tie_word_embeddings": self.is_tied,
            "vocab_size": self.vocab,
        }

    def _query_scalar(self) -> int:
        if self.value("attention.scale") is None:
            return self.hidden // self.heads if self.n_layers == _LAYERS_OF_27B else self.head_dim
        scale = self.number("attention.scale")
        scalar = round(scale**-2) if scale > 0 else 0
        if scalar < 1 or abs(scalar * scale**2 - 1) > 1e-4:
            raise ConversionError(
                f"{self.file.path}: {self.name}.attention.scale is {scale}, expected 1/sqrt of a positive integer"
            )
        return scalar

    def _rope(self) -> dict[str, Any]:
        """In both spellings: transformers 5 and vLLM read `rope_parameters`, transformers 4 the others."""
        theta = self.rope_theta
        local_theta = self.number("rope.freq_base_swa", _LOCAL_ROPE_BASE, POSITIVE)
        scaling = rope_scaling(self)  # of the global layers; the local ones have none
        parameters = {
            "full_attention": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
            "sliding_attention": {"rope_theta": local_theta, "rope_type": "default"},
        }
        return {
            "rope_local_base_freq": local_theta,
            "rope_parameters": parameters,
            "rope_scaling": scaling,
            "rope_theta": theta,
        }
