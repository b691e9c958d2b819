"""gemma3: the text model of Gemma 3. A vision tower comes in a file of its own, which is not read."""

from typing import Any, ClassVar

from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Architecture

# What llama.cpp takes where the file says nothing, and files say nothing of the first.
_GLOBAL_EVERY = 6
_LOCAL_ROPE_BASE = 10000.0
# Gemma 3 27B, told by its depth as in llama.cpp, scales attention by the hidden size per head instead of the head size.
_LAYERS_OF_27B = 62


class Model(Architecture):
    """Gemma3ForCausalLM. The factor hidden_size**0.5 on the embeddings is the model's own, no tensor holds it."""

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
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "ffn_gate.weight": "mlp.gate_proj.weight",
        "ffn_up.weight": "mlp.up_proj.weight",
        "ffn_down.weight": "mlp.down_proj.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    }
    optional = frozenset({"output.weight"})
    metadata_tensors = frozenset()
    # Gemma multiplies by 1 + weight. The file holds the sum.
    stored_plus_one = frozenset(
        {
            "output_norm.weight",
            "attn_norm.weight",
            "attn_q_norm.weight",
            "attn_k_norm.weight",
            "post_attention_norm.weight",
            "ffn_norm.weight",
            "post_ffw_norm.weight",
        }
    )
    known_keys = frozenset(
        {
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.layer_norm_rms_epsilon",
            "attention.scale",
            "attention.sliding_window",
            "attention.sliding_window_pattern",
            "attention.value_length",
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "final_logit_softcapping",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.freq_base_swa",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.type",
            "vocab_size",
        }
    )

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length")

    def row_order(self, name: str) -> Tensor | None:
        return None

    def config(self) -> dict[str, Any]:
        tensors = self.file.tensors
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.integer(key, self.head_dim) != self.head_dim:
                raise ConversionError(
                    f"{self.file.path}: {self.name}.{key} is {self.value(key)}, expected the head size {self.head_dim}"
                )
        self._check_shapes()
        softcap = self.number("final_logit_softcapping", 0.0)
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": softcap or None,
            "head_dim": self.head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": self.integer("embedding_length"),
            "intermediate_size": self.integer("feed_forward_length"),
            "layer_types": self._layer_types(),
            "max_position_embeddings": self.integer("context_length"),
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.kv_heads,
            "query_pre_attn_scalar": self._query_scalar(),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            **self._rope(),
            "sliding_window": self._sliding_window(),
            "tie_word_embeddings": "output.weight" not in tensors,
            "vocab_size": tensors["token_embd.weight"].shape[0],
        }

    def _check_shapes(self) -> None:
        """Sizes in the metadata against the tensors: no row order is there to notice wrong head counts."""
        hidden, inner = self.integer("embedding_length"), self.integer("feed_forward_length")
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "attn_q.weight": (queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "attn_q_norm.weight": (self.head_dim,),
            "attn_k_norm.weight": (self.head_dim,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
        }
        for layer in range(self.n_layers):
            for inner_name in self.layer_tensors:
                name = f"blk.{layer}.{inner_name}"
                expected, got = shapes.get(inner_name, (hidden,)), self.file.tensors[name].shape
                if got != expected:
                    raise ConversionError(
                        f"{self.file.path}: tensor {name} has shape {list(got)}, the metadata ask for {list(expected)}"
                    )

    def _sliding_window(self) -> int | None:
        # The models have one each; like llama.cpp, a file without it, or with 0, attends to everything in every layer.
        return self.integer("attention.sliding_window") if self.value("attention.sliding_window") else None

    def _layer_types(self) -> list[str]:
        key = "attention.sliding_window_pattern"
        pattern = self.value(key, _GLOBAL_EVERY)
        if isinstance(pattern, list):
            if len(pattern) != self.n_layers:
                raise ConversionError(
                    f"{self.file.path}: {self.name}.{key} has {len(pattern)} entries for {self.n_layers} layers"
                )
            local = [bool(entry) for entry in pattern]
        else:
            every = self.integer(key, _GLOBAL_EVERY)
            local = [layer % every != every - 1 for layer in range(self.n_layers)]
        if self._sliding_window() is None:
            local = [False] * self.n_layers
        return ["sliding_attention" if is_local else "full_attention" for is_local in local]

    def _query_scalar(self) -> int:
        scale = self.value("attention.scale")
        if scale is None:
            return self.integer("embedding_length") // self.heads if self.n_layers == _LAYERS_OF_27B else self.head_dim
        scale = self.number("attention.scale")
        scalar = round(scale**-2) if scale > 0 else 0
        if scalar < 1 or abs(scalar * scale**2 - 1) > 1e-4:
            raise ConversionError(
                f"{self.file.path}: {self.name}.attention.scale is {scale}, expected 1/sqrt of a positive integer"
            )
        return scalar

    def _rope(self) -> dict[str, Any]:
        """In both spellings: transformers 5 and vLLM read `rope_parameters`, transformers 4 the others."""
        theta = self.number("rope.freq_base", 10000.0)
        local_theta = self.number("rope.freq_base_swa", _LOCAL_ROPE_BASE)
        scaling = self._rope_scaling()
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

    def _rope_scaling(self) -> dict[str, Any] | None:
        """Of the global layers; the local ones have none."""
        # As in llama.cpp, a factor that has no type is linear.
        kind = self.value("rope.scaling.type", "none" if self.value("rope.scaling.factor") is None else "linear")
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        raise ConversionError(f"{self.file.path}: rope scaling {kind!r} is not supported; known are none and linear")
