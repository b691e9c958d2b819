"""Methods of mixture-of-experts layers: int8 checkpoints, and unquantized checkpoints that are quantized while they load."""

import functools
from collections.abc import Callable

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from vllm_w8a8_plugin import compat, envs, log, saved_state
from vllm_w8a8_plugin.linear import WEIGHT_DTYPES, checked_loader
from vllm_w8a8_plugin.warmup import WARMUP
from w8a8_kernels import int8_experts, select_experts
from w8a8_kernels.hadamard import BLOCKS, chosen_block, ranks_that_fit
from w8a8_kernels.ops import device_facts
from w8a8_kernels.quantize.weight import quantize_weight, row_amax


def refusal(layer: RoutedExperts) -> str | None:
    """Why the experts of `layer` cannot be int8, or None if they can."""
    config = layer.moe_config
    activation = getattr(config.activation, "value", config.activation)
    swiglu = [getattr(layer, f"swiglu_{name}", None) for name in ("limit", "alpha", "beta")]
    if activation != "silu" or any(value is not None for value in swiglu):
        return f"their activation is {activation}{' with a limit' if any(swiglu) else ''}, and only SiLU·mul is there in int8"
    if config.has_bias:
        return "they have biases"
    if config.moe_parallel_config.use_all2all_kernels:
        return "an all-to-all backend sends their tokens between ranks, which these kernels have no form for"
    if compat.takes_adapters():
        return "LoRA (enable_lora) reaches experts through vLLM's own kernels only, which int8 experts do not run on"
    return None


class W8A8MoEMethod(FusedMoEMethodBase):
    """Experts whose checkpoint holds int8 weights [N, K] and fp32 `weight_scale` [N, 1] for each expert and projection.

    Args:
        moe: vLLM's description of the layer.
        hadamard_in, hadamard_out: what the config says of the first projections (gate and up) and of the last (down), each one
            of `w8a8_kernels.hadamard.CHOICES`.
        all_built: called when the model's layers are all there, once for each of them.

    Raises:
        ValueError: VLLM_W8A8_KERNEL names a kernel that experts cannot run on here.
    """

    def __init__(
        self,
        moe,
        hadamard_in: str | int = 0,
        hadamard_out: str | int = 0,
        all_built: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(moe)
        compat.check_forced_kernel(select_experts)
        self._hadamard = hadamard_in, hadamard_out
        self._all_built = all_built

    # How the user can have another block, for the message below.
    _OTHER_BLOCK = "convert the model again with --hadamard {block}"

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Register w13_weight [E, 2I, H], w2_weight [E, H, I] and their scales [E, 2I, 1] and [E, H, 1]; I is this rank's."""
        self._choose_blocks(layer, hidden_size, intermediate_size_per_partition)
        layer.w13_input_scale = layer.w2_input_scale = None
        shapes = {
            "w13": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            self._register_weight(layer, f"{name}_weight", shape, params_dtype, extra_weight_attrs)
        self._register_scales(layer, shapes, extra_weight_attrs)
        layer.w8a8_dtype = params_dtype
        saved_state.note_blocks(layer)
        WARMUP.expect(layer)

    def _register_weight(self, layer, name: str, shape: tuple[int, ...], params_dtype: torch.dtype, attrs: dict) -> None:
        weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.int8), requires_grad=False)
        layer.register_parameter(name, weight)
        set_weight_attrs(
            weight, attrs | {"weight_loader": checked_loader(attrs["weight_loader"], (torch.int8,), self._all_built)}
        )

    def _register_scales(self, layer, shapes: dict[str, tuple[int, ...]], attrs: dict) -> None:
        for name, (experts, rows, _) in shapes.items():
            scale = torch.nn.Parameter(torch.ones(experts, rows, 1, dtype=torch.float32), requires_grad=False)
            layer.register_parameter(f"{name}_weight_scale", scale)
            loader = checked_loader(attrs["weight_loader"], WEIGHT_DTYPES)
            channel = FusedMoeWeightScaleSupported.CHANNEL.value
            set_weight_attrs(scale, attrs | {"weight_loader": loader, "quant_method": channel})

    def _choose_blocks(self, layer: RoutedExperts, hidden: int, part: int) -> None:
        """Set `w8a8_hadamard`, the blocks of both inputs, which depend on the whole layer alone.

        Raises:
            ValueError: a block does not fit into a rank's part of the intermediate size.
        """
        ranks = self.moe.moe_parallel_config.tp_size
        whole = part * ranks
        blocks = chosen_block(self._hadamard[0], hidden), chosen_block(self._hadamard[1], whole, row_parallel=True)
        if blocks[1] and part % blocks[1]:
            smaller = next((b for b in BLOCKS if b < blocks[1] and part % b == 0), 0)
            fitting = ", ".join(map(str, ranks_that_fit(whole, blocks[1])))
            raise ValueError(
                f"{layer.layer_name}: {ranks} tensor-parallel ranks would cut the Hadamard blocks of {blocks[1]} of the "
                f"experts' {whole} intermediate features. Degrees that fit: {fitting}. Or "
                f"{self._OTHER_BLOCK.format(block=smaller)}"
            )
        layer.w8a8_hadamard = blocks

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: vLLM's own kernels are not used."""
        return None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Say what runs; on a GPU, compile what the layer can reach."""
        self._all_built()
        saved_state.check_blocks(layer)
        choice = select_experts(device_facts(layer.w13_weight.device))
        log.once(f"W8A8 experts run on {choice.kernel} ({choice.reason})")
        WARMUP.ready(layer)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts=None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Experts of x [T, H] by topk_weights and topk_ids [T, top_k]; [T, H] in x's dtype, this rank's part of the sum."""
        hadamard_in, hadamard_out = layer.w8a8_hadamard
        return int8_experts(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            topk_weights,
            topk_ids,
            hadamard13=hadamard_in,
            hadamard2=hadamard_out,
            expert_map=layer.expert_map,
            apply_weight_on_input=layer.apply_router_weight_on_input,
        )


class W8A8OnlineMoEMethod(W8A8MoEMethod):
    """Experts whose checkpoint holds floating-point weights.

    As in `W8A8OnlineLinearMethod` the weights are created on the meta device, and one layer at a time is materialized,
    quantized and freed; with its two exceptions.
    """

    uses_meta_device = True  # asked of each method when the model is built
    _OTHER_BLOCK = envs.HADAMARD + "={block}"
    _is_int8 = False

    def create_weights(self, layer: RoutedExperts, **sizes_and_attrs) -> None:
        """As for a checkpoint, but floating-point, and without scales."""
        self._is_int8 = saved_state.is_loaded()
        self.uses_meta_device = not self._is_int8 and not compat.offloads_weights()
        super().create_weights(layer, **sizes_and_attrs)
        # Rows of the last projection that this rank has a part of: local expert -> their amax over all ranks' columns.
        layer.w8a8_amax = {}
        if self.uses_meta_device:
            initialize_online_processing(layer)

    def _register_weight(self, layer, name: str, shape: tuple[int, ...], params_dtype: torch.dtype, attrs: dict) -> None:
        if self._is_int8:
            super()._register_weight(layer, name, shape, params_dtype, attrs)
            return
        device = "meta" if self.uses_meta_device else None
        weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device), requires_grad=False)
        layer.register_parameter(name, weight)
        loader = checked_loader(attrs["weight_loader"], WEIGHT_DTYPES)
        ranks = self.moe.moe_parallel_config.tp_size
        if name == "w2_weight" and ranks > 1:
            loader = _recording_amax(layer, loader, shape[2] * ranks)
        set_weight_attrs(weight, attrs | {"weight_loader": loader})

    def _register_scales(self, layer, shapes: dict[str, tuple[int, ...]], attrs: dict) -> None:
        """Nothing, unless they are loaded: the scales come with the codes."""
        if self._is_int8:
            super()._register_scales(layer, shapes, attrs)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Quantize each expert by the scales of its whole matrices."""
        # vLLM calls this when the layer is complete and once more for all layers; its own methods use this flag, too.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if self._is_int8:
            super().process_weights_after_loading(layer)
            return
        hadamard_in, hadamard_out = layer.w8a8_hadamard
        for name, block, amax in (("w13", hadamard_in, {}), ("w2", hadamard_out, layer.w8a8_amax)):
            weight = getattr(layer, f"{name}_weight").data
            codes = torch.empty_like(weight, dtype=torch.int8)
            scale = torch.empty(*weight.shape[:2], 1, dtype=torch.float32, device=weight.device)
            for expert in range(weight.shape[0]):
                codes[expert], scale[expert] = quantize_weight(weight[expert], amax.get(expert), block)
            replace_parameter(layer, f"{name}_weight", codes)
            replace_parameter(layer, f"{name}_weight_scale", scale)
        layer.w8a8_amax = {}
        layer._already_called_process_weights_after_loading = True
        super().process_weights_after_loading(layer)


def _recording_amax(layer: RoutedExperts, weight_loader: Callable, whole: int) -> Callable:
    """`weight_loader` of the experts' last projection that notes each row's amax over all ranks' columns, transformed.

    Every rank is handed the whole matrices, so the scales are those of whole matrices without a collective.

    Args:
        whole: columns of a whole matrix.
    """

    @functools.wraps(weight_loader)  # vLLM binds arguments by the signature, which wraps keeps
    def load(param, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int, *args, **kwargs):
        if not param.is_meta:  # vLLM first calls the loader on a meta tensor, to count elements
            stacked = loaded_weight if loaded_weight.dim() == 3 else loaded_weight[None]
            transposed = getattr(layer, "is_fused_checkpoint_transposed", False) and loaded_weight.dim() == 3
            if transposed or stacked.shape[2] != whole:
                stacked = stacked.transpose(1, 2)
            for i, matrix in enumerate(stacked):
                local = layer._map_global_expert_id_to_local_expert_id(expert_id + i)
                if local >= 0:
                    layer.w8a8_amax[local] = row_amax(matrix.contiguous(), layer.w8a8_hadamard[1], param.device)
        return weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, *args, **kwargs)

    return load
