"""llama: Llama 1 to 3, Mistral, SmolLM and others that llama.cpp stores under this name."""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture, interleaved_to_halves
from w8a8_converters.gguf.dequant import dequantize_rows

_ROPE_FACTORS = "rope_freqs.weight"
# (low_freq_factor, high_freq_factor, original_max_position_embeddings): the only values that Llama 3.x was published with.
_LLAMA3_ROPE = (1.0, 4.0, 8192)


class Model(Architecture):
    """LlamaForCausalLM."""

    model_tensors: ClassVar = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    layer_tensors: ClassVar = {
        "attn_norm.weight": "input_layernorm.weight",
        "attn_q.weight": "self_attn.q_proj.weight",
        "attn_k.weight": "self_attn.k_proj.weight",
        "attn_v.weight": "self_attn.v_proj.weight",
        "attn_output.weight": "self_attn.o_proj.weight",
        "attn_q.bias": "self_attn.q_proj.bias",
        "attn_k.bias": "self_attn.k_proj.bias",
        "attn_v.bias": "self_attn.v_proj.bias",
        "attn_output.bias": "self_attn.o_proj.bias",
        "ffn_norm.weight": "post_attention_layernorm.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
    }
    attention_biases = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias"})
    optional = attention_biases | {"output.weight"}
    metadata_tensors = frozenset({_ROPE_FACTORS})
    known_keys = frozenset(
        {
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.layer_norm_rms_epsilon",
            "attention.value_length",
            "block_count",
            "context_length",
            "embedding_length",
            "expert_count",
            "expert_used_count",
            "feed_forward_length",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.type",
            "vocab_size",
        }
    )

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", self.integer("embedding_length") // self.heads)

    def row_order(self, name: str) -> Tensor | None:
        if name.startswith("blk.") and ".attn_q." in name:
            return interleaved_to_halves(self.heads, self.head_dim)
        if name.startswith("blk.") and ".attn_k." in name:
            return interleaved_to_halves(self.kv_heads, self.head_dim)
        return None

    def config(self) -> dict[str, Any]:
        tensors = self.file.tensors
        self._refuse_unsupported()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": self._attention_bias(),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            "max_position_embeddings": self.integer("context_length"),
            "mlp_bias": False,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
            "vocab_size": tensors["token_embd.weight"].shape[0],
        }
        if scaling := self._rope_scaling(config["rope_theta"]):
            config["rope_scaling"] = scaling
        return config

    def _refuse_unsupported(self) -> None:
        if self.value("expert_count", 0):
            raise ConversionError(f"{self.file.path} is a mixture of experts of architecture llama: not supported yet")
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.integer(key, self.head_dim) != self.head_dim:
                raise ConversionError(
                    f"{self.file.path}: {self.name}.{key} is {self.value(key)}, expected the head size {self.head_dim}"
                )

    def _attention_bias(self) -> bool:
        present = [f"blk.{i}.{bias}" in self.file.tensors for i in range(self.n_layers) for bias in self.attention_biases]
        if any(present) and not all(present):
            raise ConversionError(
                f"{self.file.path} has some attention biases and lacks others, which LlamaForCausalLM cannot hold"
            )
        return any(present)

    def _rope_scaling(self, rope_theta: float) -> dict[str, Any] | None:
        kind = self.value("rope.scaling.type", "none")
        if _ROPE_FACTORS in self.file.tensors:
            if kind != "none":
                raise ConversionError(f"{self.file.path} has both {_ROPE_FACTORS} and rope scaling {kind}")
            return self._llama3_scaling(rope_theta)
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        raise ConversionError(f"{self.file.path}: rope scaling {kind!r} is not supported; known are none, linear and llama3")

    def _llama3_scaling(self, rope_theta: float) -> dict[str, Any]:
        tensor = self.file.tensors[_ROPE_FACTORS]
        factors = dequantize_rows(self.file.packed_rows(tensor), tensor.type).reshape(-1).double()
        low, high, original = _LLAMA3_ROPE
        factor = float(factors.max())
        frequencies = rope_theta ** -(torch.arange(0, self.head_dim, 2).double() / self.head_dim)
        wavelengths = 2 * math.pi / frequencies
        smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if len(factors) != len(expected) or not torch.allclose(factors, expected, rtol=1e-4):
            raise ConversionError(f"{self.file.path}: {_ROPE_FACTORS} is not the scaling of Llama 3; no other is supported")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
