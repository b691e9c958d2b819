"""Linear methods: int8 checkpoints, and unquantized checkpoints that are quantized while they load."""

import functools
from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from vllm_w8a8_plugin import compat, envs, log, saved_state
from vllm_w8a8_plugin.collective import max_over_ranks
from vllm_w8a8_plugin.packing import pack
from vllm_w8a8_plugin.warmup import WARMUP
from w8a8_kernels import int8_linear, quantize_amax
from w8a8_kernels.hadamard import BLOCKS, chosen_block, ranks_that_fit
from w8a8_kernels.ops import device_facts
from w8a8_kernels.quantize.weight import quantize_weight, row_amax
from w8a8_kernels.select import describe_scaled_mm

# Of weights to quantize, and of scales.
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class W8A8LinearMethod(LinearMethodBase):
    """Layer whose checkpoint holds `weight` [N, K] int8 and `weight_scale` [N, 1].

    Args:
        hadamard: what the config says of the layer, one of `w8a8_kernels.hadamard.CHOICES`.
        all_built: called when the model's layers are all there, once for each of them.
        tp_consistent: whether a row-parallel layer quantizes its input by the maximum over all ranks, not its own part's.
    """

    def __init__(
        self, hadamard: str | int = 0, all_built: Callable[[], None] = lambda: None, tp_consistent: bool = False
    ) -> None:
        super().__init__()
        self._hadamard = hadamard
        self._all_built = all_built
        self._tp_consistent = tp_consistent

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        self._choose_block(layer, input_size, input_size_per_partition)
        self._choose_scales(layer, input_size, input_size_per_partition)
        weight_loader = extra_weight_attrs["weight_loader"]
        n = sum(output_partition_sizes)
        weight = ModelWeightParameter(
            data=torch.empty(n, input_size_per_partition, dtype=torch.int8),
            input_dim=1,
            output_dim=0,
            weight_loader=checked_loader(weight_loader, (torch.int8,), self._all_built),
        )
        scale = ChannelQuantScaleParameter(
            data=torch.empty(n, 1, dtype=torch.float32),
            output_dim=0,
            weight_loader=checked_loader(weight_loader, WEIGHT_DTYPES),
        )
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale", scale)
        self._prepare(layer, params_dtype)

    # How the user can have another block, for the message below.
    _OTHER_BLOCK = "convert the model again with --hadamard {block}"

    def _choose_block(self, layer: torch.nn.Module, K: int, part: int) -> None:
        """Set `w8a8_hadamard`, which depends on the whole layer's K alone.

        Raises:
            ValueError: a block does not fit into a rank's part of K.
        """
        block = chosen_block(self._hadamard, K, row_parallel=isinstance(layer, RowParallelLinear))
        if block and part % block:
            smaller = next((b for b in BLOCKS if b < block and part % b == 0), 0)
            fitting = ", ".join(map(str, ranks_that_fit(K, block)))
            name = getattr(layer, "prefix", "a layer")
            raise ValueError(
                f"{name}: {K // part} tensor-parallel ranks would cut the Hadamard blocks of {block} of its {K} input "
                f"features. Degrees that fit this layer: {fitting}. Or {self._OTHER_BLOCK.format(block=smaller)}"
            )
        layer.w8a8_hadamard = block
        if block:
            log.once(f"W8A8: inputs of linear layers are transformed in Hadamard blocks of {block}")

    def _choose_scales(self, layer: torch.nn.Module, K: int, part: int) -> None:
        """Set `w8a8_shares_amax`: whether the scales of the layer's input are those of whole rows, of which it has a part."""
        is_part = isinstance(layer, RowParallelLinear) and part != K
        layer.w8a8_shares_amax = is_part and self._tp_consistent
        if layer.w8a8_shares_amax:
            log.once(
                f"W8A8: inputs of row-parallel layers are quantized by the maximum over {K // part} ranks "
                "(tp_consistent_activations): one more collective a layer, and SiLU·mul is not folded into their quantizer"
            )
        elif is_part:
            log.once("W8A8: inputs of row-parallel layers are quantized by each rank's own part of a row")

    def _prepare(self, layer: torch.nn.Module, params_dtype: torch.dtype) -> None:
        layer.w8a8_dtype = params_dtype
        layer.packed_weight = None
        saved_state.note_blocks(layer)
        WARMUP.expect(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Pack the weight where the device's kernel wants that; on a GPU, compile what the layer can reach.

        To be called again when other weights were loaded; without, it changes nothing.
        """
        self._all_built()
        saved_state.check_blocks(layer)
        log.once(f"W8A8 linear layers run on {describe_scaled_mm(device_facts(layer.weight.device), layer.w8a8_dtype)}")
        pack(layer, layer.weight.data, layer.weight_scale.data, layer.w8a8_dtype)
        WARMUP.ready(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] in bf16, fp16 or fp32 to [..., N] of the same dtype."""
        amax = None
        if layer.w8a8_shares_amax:
            amax = max_over_ranks(quantize_amax(x.reshape(-1, x.shape[-1]), layer.w8a8_hadamard))
        return int8_linear(x, layer.weight, layer.weight_scale, bias, layer.packed_weight, layer.w8a8_hadamard, amax)


class W8A8OnlineLinearMethod(W8A8LinearMethod):
    """Layer whose checkpoint holds a floating-point `weight` [N, K].

    The weight is created on the meta device; vLLM buffers a layer's pieces and, when the last has come, materializes that one
    layer and calls `process_weights_after_loading`. So the unquantized model never stands in memory as a whole.

    Two cases differ. Where vLLM offloads weights to the CPU it does so when layers are built, so the weight is real from the
    start, and quantized when the whole model is loaded. A saved state (`saved_state`) is int8 already, and loaded as such.
    """

    uses_meta_device = True  # asked of each method when the model is built
    _OTHER_BLOCK = envs.HADAMARD + "={block}"
    _is_int8 = False

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        self._is_int8 = saved_state.is_loaded()
        self.uses_meta_device = not self._is_int8 and not compat.offloads_weights()
        if self._is_int8:
            super().create_weights(
                layer,
                input_size_per_partition,
                output_partition_sizes,
                input_size,
                output_size,
                params_dtype,
                **extra_weight_attrs,
            )
            return
        self._choose_block(layer, input_size, input_size_per_partition)
        self._choose_scales(layer, input_size, input_size_per_partition)
        weight_loader = checked_loader(extra_weight_attrs["weight_loader"], WEIGHT_DTYPES)
        if input_size_per_partition != input_size:
            weight_loader = _recording_amax(layer, weight_loader)
        N, K = sum(output_partition_sizes), input_size_per_partition
        weight = ModelWeightParameter(
            data=torch.empty(N, K, dtype=params_dtype, device="meta" if self.uses_meta_device else None),
            input_dim=1,
            output_dim=0,
            weight_loader=weight_loader,
        )
        layer.register_parameter("weight", weight)
        layer.w8a8_amax = None
        self._prepare(layer, params_dtype)
        if self.uses_meta_device:
            initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the layer's weight by the scales of the whole matrix, then do as for a checkpoint."""
        # vLLM calls this when the layer is complete and once more for all layers; its own methods use this flag, too.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        if self._is_int8:
            super().process_weights_after_loading(layer)
            return
        self._all_built()
        codes, scale = quantize_weight(layer.weight.data, layer.w8a8_amax, layer.w8a8_hadamard)
        layer.w8a8_amax = None
        replace_parameter(layer, "weight", codes)
        replace_parameter(layer, "weight_scale", scale)
        layer._already_called_process_weights_after_loading = True
        super().process_weights_after_loading(layer)


def checked_loader(
    weight_loader: Callable, dtypes: tuple[torch.dtype, ...], all_built: Callable[[], None] = lambda: None
) -> Callable:
    """`weight_loader` that refuses tensors of another dtype, which vLLM would convert without a word.

    It also refuses to load into a parameter of another dtype: weights that were quantized while they loaded.

    Args:
        all_built: called before it refuses a tensor: what is said of the config then may be why the dtype is another.
    """

    @functools.wraps(weight_loader)  # vLLM binds arguments by the signature, which wraps keeps
    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args, **kwargs):
        if param.dtype not in dtypes:
            raise ValueError(
                f"a weight of dtype {loaded_weight.dtype} and shape {tuple(loaded_weight.shape)} was handed to a layer that "
                "is quantized already. Load other weights with vLLM's reload_weights or its weight transfer, which quantize "
                "them; model.load_weights alone does not"
            )
        if loaded_weight.dtype not in dtypes:
            all_built()
            raise ValueError(
                f"the checkpoint holds a weight of dtype {loaded_weight.dtype} and shape {tuple(loaded_weight.shape)} where "
                f"{' or '.join(map(str, dtypes))} is expected. Is the checkpoint complete, and quantized as config.json says?"
            )
        return weight_loader(param, loaded_weight, *args, **kwargs)

    return load


def _recording_amax(layer: torch.nn.Module, weight_loader: Callable) -> Callable:
    """`weight_loader` of a row-parallel layer that notes each row's amax over all ranks' columns, transformed.

    Every rank is handed the whole matrix, so the scales are those of the whole matrix without a collective, which could hang
    while ranks finish layers in different order.
    """

    @functools.wraps(weight_loader)
    def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args, **kwargs):
        if not param.is_meta:  # vLLM first calls the loader on a meta tensor, to count elements
            layer.w8a8_amax = row_amax(loaded_weight, layer.w8a8_hadamard, param.device)
        return weight_loader(param, loaded_weight, *args, **kwargs)

    return load
