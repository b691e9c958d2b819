"""What Qwen's hybrid models share: gated attention in some layers, gated delta nets in the others, an MTP layer."""

from typing import Any

import torch
from torch import Tensor

from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.architectures.base import Table
from w8a8_converters.gguf.architectures.mtp import MTPArchitecture
from w8a8_converters.gguf.architectures.recipe import Recipe, stored
from w8a8_converters.gguf.reader import GGUFFile

# What llama.cpp takes where the file says nothing.
_ATTENTION_EVERY = 4


class DeltaNetArchitecture(MTPArchitecture):
    """Norms multiply by 1 + weight and the file holds the sum, but for the delta nets' own norm, which has none added.

    Subclasses give the delta nets' projections and the MLP.

    Attributes:
        key_heads, value_heads: of a delta net; each key head serves `value_heads / key_heads` value heads.
        key_dim, value_dim: size of such a head.
    """

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        if self.n_layers > self.main_layers + 1:
            raise ConversionError(
                f"{file.path}: {self.name}.nextn_predict_layers is {self.n_layers - self.main_layers}, "
                "expected 0 or 1: the model's class has one MTP layer"
            )
        self.key_heads = self.size("ssm.group_count")
        self.key_dim = self.size("ssm.state_size")
        self.value_heads = self.size("ssm.time_step_rank")
        inner = self.size("ssm.inner_size")
        if self.value_heads % self.key_heads or inner % self.value_heads:
            raise ConversionError(
                f"{file.path}: {self.name}.ssm.inner_size {inner} must be a multiple of ssm.time_step_rank "
                f"{self.value_heads}, and that of ssm.group_count {self.key_heads}"
            )
        self.value_dim = inner // self.value_heads
        most = self.largest_dimension // self.key_dim
        what = f"the largest dimension of the file's tensors, in heads of {self.key_dim}"
        self.bound("ssm.group_count", self.key_heads, most, what)

    def layer_prefix(self, layer: int) -> str:
        is_mtp = layer >= self.main_layers
        return f"mtp.layers.{layer - self.main_layers}." if is_mtp else super().layer_prefix(layer)

    def model_table(self) -> Table:
        table = super().model_table() | {"model.norm.weight": stored("output_norm.weight", self.hidden).minus_one()}
        if self.n_layers == self.main_layers:
            return table
        mtp = {
            "mtp.fc.weight": stored("nextn.eh_proj.weight", self.hidden, 2 * self.hidden),
            "mtp.norm.weight": stored("nextn.shared_head_norm.weight", self.hidden).minus_one(),
            "mtp.pre_fc_norm_embedding.weight": stored("nextn.enorm.weight", self.hidden).minus_one(),
            "mtp.pre_fc_norm_hidden.weight": stored("nextn.hnorm.weight", self.hidden).minus_one(),
        }
        return table | {name: recipe.under(f"blk.{self.main_layers}.") for name, recipe in mtp.items()}

    def layer_table(self, layer: int) -> Table:
        has_delta_net = self.layer_kinds()[layer] == "linear_attention"
        mixer = self._delta_net(layer) if has_delta_net else self.projections()
        return self.norms() | mixer | self.mlp()

    def norms(self) -> dict[str, Recipe]:
        return {
            "input_layernorm.weight": stored("attn_norm.weight", self.hidden).minus_one(),
            "post_attention_layernorm.weight": stored("post_attention_norm.weight", self.hidden).minus_one(),
        }

    def projections(self) -> dict[str, Recipe]:
        # Rows of each head of q: the query, then the gate on what the head puts out.
        gated = stored("attn_q.weight", 2 * self.heads * self.head_dim, self.hidden)
        return super().projections() | {
            "self_attn.q_proj.weight": gated,
            "self_attn.q_norm.weight": stored("attn_q_norm.weight", self.head_dim).minus_one(),
            "self_attn.k_norm.weight": stored("attn_k_norm.weight", self.head_dim).minus_one(),
        }

    def delta_net_projections(self, layer: int) -> dict[str, Recipe]:
        """Of q, k, v, z, b and a."""
        raise NotImplementedError

    def value_order(self, size: int) -> Tensor:
        """The stored row of each row in Hugging Face order, where each value head has `size` rows: int64 [rows]."""
        return torch.arange(self.value_heads * size)

    def channel_order(self) -> Tensor:
        """The same for the rows of q, k and v together, of which those of v alone are in another order."""
        keys = 2 * self.key_heads * self.key_dim
        return torch.cat([torch.arange(keys), keys + self.value_order(self.value_dim)])

    def layer_kinds(self) -> list[str]:
        """`layer_types` of config.json, with those of the MTP layers behind."""
        every = self.integer("full_attention_interval", _ATTENTION_EVERY)
        recurrent = self.value("attention.recurrent_layers")
        if recurrent is None:
            recurrent = [layer < self.main_layers and (layer + 1) % every != 0 for layer in range(self.n_layers)]
        elif not isinstance(recurrent, list) or len(recurrent) != self.integer("block_count"):
            raise ConversionError(
                f"{self.file.path}: metadata {self.name}.attention.recurrent_layers must have an entry for each of "
                f"{self.integer('block_count')} layers"
            )
        elif any(recurrent[self.main_layers :]):
            raise ConversionError(
                f"{self.file.path}: {self.name}.attention.recurrent_layers has an MTP layer, which is not supported"
            )
        return ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent]

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "attention_bias": False,
            "head_dim": self.head_dim,
            "layer_types": self.layer_kinds()[: self.main_layers],
            "linear_conv_kernel_dim": self.size("ssm.conv_kernel"),
            "linear_key_head_dim": self.key_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.value_dim,
            "num_hidden_layers": self.main_layers,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
        }

    def _delta_net(self, layer: int) -> dict[str, Recipe]:
        self._check_decay(layer)
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        channels, width = 2 * keys + values, self.size("ssm.conv_kernel")
        order, heads = self.value_order(self.value_dim), self.value_order(1)
        conv1d = stored("ssm_conv1d.weight", channels, width).take(self.channel_order())
        table = {
            "linear_attn.conv1d.weight": conv1d.reshape(channels, 1, width),
            # The two are fp32 in the model's recurrence, and the file's values came through exp.
            "linear_attn.A_log": stored("ssm_a", self.value_heads).take(heads).map(lambda decay: (-decay).log()).fp32(),
            "linear_attn.dt_bias": stored("ssm_dt.bias", self.value_heads).take(heads).fp32(),
            "linear_attn.norm.weight": stored("ssm_norm.weight", self.value_dim),
            "linear_attn.out_proj.weight": stored("ssm_out.weight", self.hidden, values).take_columns(order),
        }
        return table | self.delta_net_projections(layer)

    def _check_decay(self, layer: int) -> None:
        """`ssm_a` is -exp(A_log)."""
        name = f"blk.{layer}.ssm_a"
        if name in self.file.tensors and not (decay := self.values(name)).lt(0).all():
            raise ConversionError(
                f"{self.file.path}: tensor {name} holds {decay[~decay.lt(0)][0]:g}, expected values below 0; download it again"
            )
