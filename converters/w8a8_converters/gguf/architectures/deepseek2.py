"""deepseek2: DeepSeek V2, V3 and R1, and what has their architecture: Kimi K2, Moonlight, GLM-4.7-Flash."""

from typing import Any

import torch
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.recipe import Recipe, joined, stored
from w8a8_converters.gguf.architectures.shared_experts import SIGMOID, SOFTMAX, SharedExpertsArchitecture
from w8a8_converters.gguf.reader import GGUFFile
from w8a8_converters.gguf.values import Index, Values

# Numbers of experts of the models whose experts are in groups: DeepSeek V2 and V3.
_GROUPED_EXPERTS = (160, 256)
_GLM_TOKENIZERS = ("glm4", "chatglm-bpe")
_GLM_FLASH_LAYERS, _GLM_FLASH_VOCABULARY = (47, 48), 154880


class Model(SharedExpertsArchitecture):
    """Multi-head latent attention. The rotary rows are as in Hugging Face, where the model pairs neighbours, too.

    Softmax gating makes it DeepseekV2ForCausalLM, sigmoid DeepseekV3ForCausalLM or, told by the tokenizer,
    Glm4MoeLiteForCausalLM.
    """

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        self.rope_dim = self.size("rope.dimension_count")
        self.kv_rank = self.size("attention.kv_lora_rank")
        self.q_rank = self.size("attention.q_lora_rank", 0, minimum=0)
        # Since MLA runs on the compressed keys, these are the sizes of one compressed head and the true ones have other names.
        self.is_split = self.value("attention.key_length_mla") is not None
        if self.is_split:
            self.expect("attention.key_length", self.kv_rank + self.rope_dim)
            self.expect("attention.value_length", self.kv_rank)
            self.expect("attention.head_count_kv", 1)
        else:
            self.expect("attention.head_count_kv", self.heads)
        suffix = "_mla" if self.is_split else ""
        self.key_dim = self.size(f"attention.key_length{suffix}")
        self.value_dim = self.size(f"attention.value_length{suffix}")
        if self.rope_dim % 2:
            raise ConversionError(f"{file.path}: {self.name}.rope.dimension_count must be even, got {self.rope_dim}")
        if self.key_dim <= self.rope_dim:
            raise ConversionError(
                f"{file.path}: {self.name}.attention.key_length{suffix} is {self.key_dim}, expected more than the "
                f"{self.rope_dim} of rope.dimension_count"
            )

    @property
    def default_gating(self) -> int:
        # As in llama.cpp: softmax, but for early files of GLM-4.7-Flash.
        is_flash = self.vocab == _GLM_FLASH_VOCABULARY and self.main_layers in _GLM_FLASH_LAYERS
        return SIGMOID if is_flash else SOFTMAX

    def projections(self) -> dict[str, Recipe]:
        hidden, heads = self.hidden, self.heads
        queries = heads * self.key_dim
        table = {
            "self_attn.kv_a_proj_with_mqa.weight": stored("attn_kv_a_mqa.weight", self.kv_rank + self.rope_dim, hidden),
            "self_attn.kv_a_layernorm.weight": stored("attn_kv_a_norm.weight", self.kv_rank),
            "self_attn.kv_b_proj.weight": self._kv_b(),
            "self_attn.o_proj.weight": stored("attn_output.weight", hidden, heads * self.value_dim),
        }
        if not self.q_rank:
            return table | {"self_attn.q_proj.weight": stored("attn_q.weight", queries, hidden)}
        return table | {
            "self_attn.q_a_proj.weight": stored("attn_q_a.weight", self.q_rank, hidden),
            "self_attn.q_a_layernorm.weight": stored("attn_q_a_norm.weight", self.q_rank),
            "self_attn.q_b_proj.weight": stored("attn_q_b.weight", queries, self.q_rank),
        }

    def _kv_b(self) -> Recipe:
        heads, rank, nope = self.heads, self.kv_rank, self.key_dim - self.rope_dim
        if not self.is_split:
            return stored("attn_kv_b.weight", heads * (nope + self.value_dim), rank)
        keys = stored("attn_k_b.weight", heads, rank, nope)
        return joined(_rows_of_heads, keys, stored("attn_v_b.weight", heads, self.value_dim, rank))

    def config(self) -> dict[str, Any]:
        groups = self.integer("expert_group_count", 1)
        if self.value("expert_group_count") is None and self.experts in _GROUPED_EXPERTS:
            self.notes.append(
                "the metadata has no expert groups: each token chooses among all experts, as in llama.cpp; if the model has "
                "groups, as DeepSeek V2 and V3, give its own config with --hf-config"
            )
        config = super().config() | {
            **self._class(groups),
            "attention_bias": False,
            "kv_lora_rank": self.kv_rank,
            "moe_layer_freq": 1,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank or None,
            "qk_nope_head_dim": self.key_dim - self.rope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
        }
        if "rope_scaling" in config:
            config["rope_scaling"] |= self._mscale(config["rope_scaling"]["rope_type"])
        return config

    def _class(self, groups: int) -> dict[str, Any]:
        # vLLM reads how experts are scored and chosen, transformers knows it by the class.
        if not self.has_sigmoid_gating:
            if self.flag("expert_weights_norm", False):
                raise ConversionError(
                    f"{self.file.path}: softmax gating with {self.name}.expert_weights_norm is not supported: no Hugging Face "
                    "class has both"
                )
            return {
                "architectures": ["DeepseekV2ForCausalLM"],
                "model_type": "deepseek_v2",
                "scoring_func": "softmax",
                "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
            }
        chosen = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        if self.file.metadata.get("tokenizer.ggml.pre") not in _GLM_TOKENIZERS:
            return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **chosen}
        types = ["dense" if layer < self.dense_layers else "sparse" for layer in range(self.main_layers)]
        return {
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "model_type": "glm4_moe_lite",
            "mlp_layer_types": types,
            **chosen,
        }

    def _mscale(self, kind: str) -> dict[str, float]:
        """The file holds a tenth of mscale_all_dim, and every model has an equal mscale.

        Without it llama.cpp computes something that no Hugging Face class does.
        """
        if kind != "yarn" or not self.number("rope.scaling.yarn_log_multiplier", 0.0):
            raise ConversionError(
                f"{self.file.path}: {self.name} with rope scaling {kind} is supported only as yarn with "
                "rope.scaling.yarn_log_multiplier"
            )
        mscale = round(10 * self.number("rope.scaling.yarn_log_multiplier"), 6)
        return {"mscale": mscale, "mscale_all_dim": mscale}


def _rows_of_heads(keys: Values, values: Values) -> Values:
    """kv_b_proj of what the file has split: for each head its rows of keys, then those of values.

    Args:
        keys: [heads, rank, nope], each head transposed.
        values: [heads, value_dim, rank].
    """
    heads, rank, nope = keys.shape
    per_head = nope + values.shape[1]

    def rows(index: Index) -> Tensor:
        wanted = torch.arange(heads * per_head)[index]
        if not len(wanted):
            return torch.empty(0, rank)
        first, last = int(wanted.min()) // per_head, int(wanted.max()) // per_head
        read = slice(first, last + 1)
        block = torch.cat([keys.rows(read).transpose(1, 2), values.rows(read)], dim=1)
        return block.reshape(-1, rank)[wanted - first * per_head]

    return Values((heads * per_head, rank), rows)
